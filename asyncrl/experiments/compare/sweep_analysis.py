"""The results of a sweep.

They are each cell against the synchronous run, the speed of each limit, and the suggested limit
with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from asyncrl.config import layers
from asyncrl.config.tree import Config
from asyncrl.contract.toml_writer import flatten
from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.comparison import make_warm_cell
from asyncrl.experiments.compare.comparison_analysis import (
    average,
    average_reference_kl,
    collect_findings,
    drop_nan,
    find_likely_cause,
)
from asyncrl.experiments.compare.sweep import SWEPT_KEYS, SYNC, Sweep, SweepPlan, format_limit

ESS_LEAST = 0.5
ESS_WINDOW = 10
MARGIN = 0.05  # held-out reward that a suggested limit may cost


def describe_rule(margin: float) -> str:
    return (
        f"largest limit whose 95 % interval against sync stays above -{margin:g}, whose ESS stays "
        f"above {ESS_LEAST:g} and whose runs are all stable"
    )


def complete_curve(record: dict[str, Any], last_step: int) -> tuple[list[float], list[float]]:
    """Return steps and held-out rewards of a run.

    A run that failed or stopped early keeps its last reward up to step `last_step`.
    """
    steps, accuracy = record["accuracy"]
    return (
        (steps, accuracy)
        if not steps or steps[-1] >= last_step
        else ([*steps, float(last_step)], [*accuracy, accuracy[-1]])
    )


def find_lowest_ess(rows: Sequence[dict[str, float]]) -> float:
    """Return the lowest mean over ESS_WINDOW consecutive steps of the ESS.

    It is the ESS of the raw ratios target/behavior; nan without rows.
    """
    shares = verdict.list_values(rows, "is/target_ess")
    width = min(ESS_WINDOW, len(shares))
    if not shares:
        return math.nan
    return min(average(shares[i : i + width]) for i in range(len(shares) - width + 1))


def find_ood_ends(record: dict[str, Any], last_step: int) -> tuple[float, float]:
    """Return the out-of-distribution reward at the start and after step `last_step`.

    A value that was not measured is nan; a run that stopped early has no end.
    """
    by_step = dict(zip(*record.get("ood", ([], [])), strict=True))
    return by_step.get(0.0, math.nan), by_step.get(float(last_step), math.nan)


def list_instabilities(record: dict[str, Any]) -> list[str]:
    """Return the reasons why a run is unstable; empty if it is stable."""
    problems = verdict.list_instabilities(record["accuracy"][1], record["curve"])
    return problems + ([f"failed: {record['failed']}"] if record.get("failed") else [])


def compute_lost_share(record: dict[str, Any]) -> float:
    """Return the share of generated tokens neither trained nor left over at the run's end."""
    lines = {name: line["tokens"] for name, line in record["ledger_lines"].items()}
    total = sum(lines.values())
    return 1 - (lines.get("trained", 0) + lines.get("left_over", 0)) / total if total else 0.0


def sum_ledgers(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Sum the ledger's lines over all seeds: tokens, and tokens by length."""
    totals: dict[str, dict[str, float]] = {}
    for record in records:
        for name, line in record["ledger_lines"].items():
            total = totals.setdefault(name, {})
            for size, tokens in line.items():
                if size == "tokens" or "upto_" in size:
                    total[size] = total.get(size, 0) + tokens
    return {name: line for name, line in totals.items() if line.get("tokens")}


def analyze(sweep: Sweep, margin: float = MARGIN) -> dict[str, Any]:
    """Return the content of the page and of `--json`, from the finished cells.

    margin: held-out reward that a suggested limit may cost.
    """
    plan = sweep.plan
    records = {arm: read_finished(sweep, arm) for arm in plan.arms}
    speed = measure_speeds(sweep)
    cells = []
    differences = {}
    for (correction, limit), arm in plan.cell.items():
        runs_by_seed = {
            seed: record for seed, record in records[arm].items() if seed in records[SYNC]
        }
        if not runs_by_seed:
            continue
        cell = summarize_cell(runs_by_seed, records[SYNC], plan.arms[SYNC])
        if arm != SYNC:
            differences[arm] = cell["difference"]
        runs = [
            make_warm_cell(arm, seed, runs_by_seed[seed], plan.arms[arm])
            for seed in sorted(runs_by_seed)
        ]
        cells.append(
            {
                "signs": collect_findings(runs),
                "correction": correction,
                "limit": format_limit(limit),
                "arm": arm,
                "difference": cell.pop("difference"),
                "speed": speed.get(format_limit(limit), math.nan),
                "cause": find_likely_cause(plan.arms[arm], cell["trouble"]),
                **cell,
            }
        )
    verdict.adjust_by_holm(differences)
    for cell in cells:
        cell["difference"] = convert_difference(cell["difference"])
    result = {
        "corrections": list(plan.corrections),
        "limits": [format_limit(limit) for limit in plan.limits],
        "injected": plan.injected,
        "seeds": sweep.seeds,
        "missing": len(plan.arms) * len(sweep.seeds) - sum(map(len, records.values())),
        "speed": speed,
        "sync": _summarize_records(list(records[SYNC].values()), plan.arms[SYNC].learner.steps),
        "cells": cells,
    }
    return result | {"suggestion": suggest(result, plan, margin)}


def read_finished(sweep: Sweep, arm: str) -> dict[int, dict[str, Any]]:
    """Return the records of an arm's finished runs, by seed."""
    names = {seed: sweep.name_run(arm, seed) for seed in sweep.seeds}
    return {
        seed: sweep.cells.read(name)
        for seed, name in names.items()
        if sweep.cells.get_path(name).exists()
    }


def summarize_cell(
    runs_by_seed: dict[int, dict[str, Any]], sync: dict[int, dict[str, Any]], base: Config
) -> dict[str, Any]:
    """Summarize one arm, with its `difference` from the synchronous run."""
    last_step = base.learner.steps
    cell = _summarize_records([runs_by_seed[seed] for seed in sorted(runs_by_seed)], last_step)
    sync_ends = [
        _summarize_records([sync[seed]], last_step)["each"][0] for seed in sorted(runs_by_seed)
    ]
    return cell | {
        "difference": verdict.compare_pairs(cell["each"], sync_ends, base.evaluation.final_prompts)
    }


def _summarize_records(records: Sequence[dict[str, Any]], last_step: int) -> dict[str, Any]:
    """Summarize one arm over its seeds."""
    curves = [complete_curve(record, last_step) for record in records]
    ends = [accuracy[-1] for _, accuracy in curves]
    lags = sum_lags(records)
    total = max(sum(lags.values()), 1)
    reasons = [list_instabilities(record) for record in records]
    ood_pairs = [find_ood_ends(record, last_step) for record in records]
    kl = [
        x
        for record in records
        for x in verdict.list_values(record["curve"], "kl/behavior_target_k3")
    ]
    return {
        "seeds": len(records),
        "each": ends,
        "final": average(ends),
        "area": average([verdict.compute_area(steps, accuracy) for steps, accuracy in curves]),
        "ess": min((find_lowest_ess(record["curve"]) for record in records), default=math.nan),
        "kl": max(kl, default=math.nan),
        "ood_start": average(drop_nan(start for start, _ in ood_pairs)),
        "ood_end": average(drop_nan(end for _, end in ood_pairs)),
        "ood_each": [end for _, end in ood_pairs],
        "kl_ref": average(drop_nan(average_reference_kl(record["curve"]) for record in records)),
        "lag": sum(lag * tokens for lag, tokens in lags.items()) / total,
        "lag_max": max(lags, default=0),
        "unstable": sum(map(bool, reasons)),
        "trouble": sorted(
            {sentence.split(":")[0] for run_reasons in reasons for sentence in run_reasons}
        ),
        "abandoned": [
            record["steps"] for record in records if record["abandoned"] or record.get("failed")
        ],
        "ledger_lines": sum_ledgers(records),
        "lost": average([compute_lost_share(record) for record in records]),
        "tokens": average([float(sum(record["lag_histogram"].values())) for record in records]),
        "curves": [[list(steps), list(accuracy)] for steps, accuracy in curves],
        "digests": [record["weights_digest"] for record in records],
        "trained_ids": [record["trained_ids"] for record in records],
    }


def sum_lags(records: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Sum the trained tokens of all seeds by lag."""
    lags: dict[int, int] = {}
    for record in records:
        for lag, tokens in record["lag_histogram"].items():
            lags[int(lag)] = lags.get(int(lag), 0) + tokens
    return lags


def convert_difference(difference: verdict.PairedDifference) -> dict[str, Any]:
    """Convert a difference from the synchronous run to its JSON form."""
    return {
        "mean": difference.mean,
        "sd": difference.sd,
        "interval": [difference.low, difference.high],
        "interval_holm": [difference.holm_low, difference.holm_high],  # the verdict's
        "p": difference.adjusted,
        "verdict": "no verdict" if difference.seeds < 2 else difference.choose_word(),
        "interval_other_prompts": [difference.prompt_low, difference.prompt_high],
        "detectable": verdict.find_detectable(difference.sd, difference.seeds),
    }


def measure_speeds(sweep: Sweep) -> dict[str, float]:
    """Return the speed of each limit relative to limit 0.

    It is measured in decode steps of short runs at natural lag, with learner and generators equally
    fast; runs as processes are measured in seconds.
    """
    clocks = {}
    for limit in sweep.plan.probes:
        name = f"probe-limit{format_limit(limit)}"
        if sweep.cells.get_path(name).exists():
            clocks[format_limit(limit)] = sweep.cells.read(name)["clock"]
    if "0" not in clocks:
        return {}
    return {limit: clocks["0"] / max(clock, 1) for limit, clock in clocks.items()}


def format_difference(cell: dict[str, Any]) -> str:
    """Format a cell's difference from the synchronous run, with its interval."""
    low, high = cell["difference"]["interval"]
    return f"{cell['difference']['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"


def find_objection(cell: dict[str, Any], margin: float = MARGIN) -> str:
    """Return the reason why a cell cannot be suggested; empty if it can."""
    against = cell["difference"]
    low, high = against["interval"]
    if cell["seeds"] < 2:
        return "one seed gives no interval"
    if cell["unstable"]:
        return f"{cell['unstable']} of {cell['seeds']} runs unstable ({', '.join(cell['trouble'])})"
    if not cell["ess"] > ESS_LEAST:
        return f"ESS falls to {cell['ess']:.2f}"
    if high < 0 and not low > -margin:
        return f"reward {format_difference(cell)} against sync"
    if against["mean"] <= -margin:
        return (
            f"reward {against['mean']:+.3f} against sync, {margin:g} below or more, though the "
            f"interval [{low:+.3f}, {high:+.3f}] includes zero"
        )
    return "" if low > -margin else describe_undecided(cell, margin)


def describe_undecided(cell: dict[str, Any], margin: float) -> str:
    """Describe a cell that has too few seeds, and how many are needed.

    Empty if it has enough.
    """
    against = cell["difference"]
    low, high = against["interval"]
    settled = cell["unstable"] or high < 0 or low > -margin or against["mean"] <= -margin
    if cell["seeds"] < 2 or settled or not cell["ess"] > ESS_LEAST:
        return ""
    needed = verdict.count_needed_seeds(against["mean"] + margin, against["sd"])
    count = f"about {needed}" if needed else "no practical number of"
    result = f"reward {format_difference(cell)} at {cell['seeds']} seeds is undecided"
    return f"{result}; {count} seeds would decide"


class LimitChoice(NamedTuple):
    """The largest limit of one correction that passes.

    best: its cell, None if no limit passes.
    """

    cells: list[dict[str, Any]]  # by limit
    best: dict[str, Any] | None
    why_not_more: str
    open: str  # if none passes: the smallest limit with too few seeds to decide

    @property
    def limit(self) -> str | None:
        if self.best is not None:
            return str(self.best["limit"])
        return None if self.open else "0"


def choose_limit(result: dict[str, Any], correction: str, margin: float) -> LimitChoice:
    cells = sorted(
        (c for c in result["cells"] if c["correction"] == correction and c["limit"] != "0"),
        key=lambda cell: float(cell["limit"]),
    )
    good = [cell for cell in cells if not find_objection(cell, margin)]
    best = good[-1] if good else None
    least = float(best["limit"]) if best else -math.inf
    next_cell = next((cell for cell in cells if float(cell["limit"]) > least), None)
    unclear = [(cell["limit"], describe_undecided(cell, margin)) for cell in cells if not good]
    return LimitChoice(
        cells,
        best,
        f"at limit {next_cell['limit']}: {find_objection(next_cell, margin)}" if next_cell else "",
        next((f"at limit {limit}: {reason_}" for limit, reason_ in unclear if reason_), ""),
    )


def suggest(analysis: dict[str, Any], plan: SweepPlan, margin: float = MARGIN) -> dict[str, Any]:
    """Choose the limit and correction by the rule; ties go to the higher mean reward.

    `set` has the options to paste. limit is None if there are too few seeds for a suggestion.
    """
    choices = {name: choose_limit(analysis, name, margin) for name in plan.corrections}
    if len(analysis["seeds"]) < 2:
        return {
            "limit": None,
            "set": "",
            "reason": "one seed: no interval, so no limit can be suggested; use --seeds 3 or more",
            "by_correction": dict.fromkeys(choices),
            "rule": describe_rule(margin),
        }
    result = {
        "by_correction": {
            name: {"limit": limit_choice.limit, "why_not_more": limit_choice.why_not_more}
            for name, limit_choice in choices.items()
        },
        "rule": describe_rule(margin),
    }
    passing = [
        (name, limit_choice.best) for name, limit_choice in choices.items() if limit_choice.best
    ]
    unclear = [
        f"{name}, {limit_choice.open}"
        for name, limit_choice in choices.items()
        if limit_choice.open
    ]
    if not passing and unclear:
        return result | {
            "limit": None,
            "correction": None,
            "set": "",
            "reason": f"no limit is suggested: none has an interval above -{margin:g} "
            f"({'; '.join(unclear)})",
        }
    if not passing:
        reasons = "; ".join(
            f"{name}: {limit_choice.why_not_more}"
            for name, limit_choice in choices.items()
            if limit_choice.why_not_more
        )
        return result | {
            "limit": "0",
            "correction": None,
            "set": "--set staleness.max_lag=0",
            "reason": f"no limit above 0 passes ({reasons}): stay synchronous",
        }
    name, best = max(passing, key=lambda pair: (float(pair[1]["limit"]), pair[1]["final"]))
    return result | {
        "limit": best["limit"],
        "correction": name,
        "set": format_set_arguments(plan, name, float(best["limit"])),
        "reason": explain_choice(name, best, choices[name], margin),
    }


def explain_choice(
    name: str, best: dict[str, Any], limit_choice: LimitChoice, margin: float
) -> str:
    """Explain the choice: its reward and speed, and the objection to a higher limit."""
    text = (
        f"limit {best['limit']} with {name}: reward {format_difference(best)} against sync at "
        f"{best['seeds']} seeds, ESS stays at {best['ess']:.2f} and more, every run stable"
    )
    if not math.isnan(best["speed"]):
        text += (
            f"; {best['speed']:.2f} times the speed of sync if learner and generators are "
            "equally fast"
        )
    small = next(
        (
            cell
            for cell in limit_choice.cells
            if not find_objection(cell, margin) and cell["speed"] >= 0.98 * best["speed"]
        ),
        best,
    )
    if small is not best:
        text += f"; limit {small['limit']} is as fast there"
    if limit_choice.why_not_more:
        text += f"; {limit_choice.why_not_more}"
    return text


def format_set_arguments(plan: SweepPlan, correction: str, limit: float) -> str:
    """Return the differences from the original config as `--set` arguments."""
    arm = flatten(layers.read_keys(plan.arms[plan.cell[correction, limit]]))
    base = flatten(msgspec.to_builtins(plan.arms[SYNC]))
    settings = [("staleness.max_lag", format_limit(limit))]
    for key, value in arm.items():
        if value != base.get(key) and value is not None and key not in SWEPT_KEYS:
            settings.append((key, str(value).lower() if isinstance(value, bool) else value))
    return " ".join(f"--set {key}={value}" for key, value in settings)
