"""What a sweep found: each cell against the synchronous run, the speed of each limit, and the limit
to choose, with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from asyncrl.config import layers
from asyncrl.config.tree import Config
from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.comparison import warm_cell
from asyncrl.experiments.compare.comparison_analysis import (
    finite_values,
    likely_cause,
    mean,
    reference_kl,
    signs_of,
)
from asyncrl.experiments.compare.sweep import SWEPT_KEYS, SYNC, Sweep, SweepPlan, label

ESS_LEAST = 0.5
ESS_WINDOW = 10
MARGIN = 0.05  # accuracy that a limit may cost


def rule(margin: float) -> str:
    return (
        f"largest limit whose 95 % interval against sync stays above -{margin:g}, whose ESS stays "
        f"above {ESS_LEAST:g} and whose runs are all stable"
    )


def curve(record: dict[str, Any], last: int) -> tuple[list[float], list[float]]:
    """Steps and accuracies; an abandoned or failed run keeps its last accuracy up to step
    `last`.
    """
    steps, accuracy = record["accuracy"]
    return (
        (steps, accuracy)
        if not steps or steps[-1] >= last
        else ([*steps, float(last)], [*accuracy, accuracy[-1]])
    )


def ess(rows: Sequence[dict[str, float]]) -> float:
    """Lowest mean over ESS_WINDOW steps in a row of the ESS of the raw ratios target/behaviour; nan
    without rows.
    """
    shares = verdict.series(rows, "is/target_ess")
    width = min(ESS_WINDOW, len(shares))
    if not shares:
        return math.nan
    return min(mean(shares[i : i + width]) for i in range(len(shares) - width + 1))


def ood(record: dict[str, Any], last: int) -> tuple[float, float]:
    """Out-of-distribution accuracy at the start and after step `last`; nan where it was not
    measured: a run that was given up has no end.
    """
    found = dict(zip(*record.get("ood", ([], [])), strict=True))
    return found.get(0.0, math.nan), found.get(float(last), math.nan)


def instability_reasons(record: dict[str, Any]) -> list[str]:
    """Why a run counts as unstable; empty: stable."""
    found = verdict.stability(record["accuracy"][1], record["curve"])
    return found + ([f"failed: {record['failed']}"] if record.get("failed") else [])


def lost_share(record: dict[str, Any]) -> float:
    """Share of the generated tokens that were neither trained nor left over when the run ended."""
    lines = {name: line["tokens"] for name, line in record["ledger_lines"].items()}
    total = sum(lines.values())
    return 1 - (lines.get("trained", 0) + lines.get("left_over", 0)) / total if total else 0.0


def sum_ledgers(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The ledger's lines over all seeds: tokens, and tokens by answer length."""
    out: dict[str, dict[str, float]] = {}
    for record in records:
        for name, line in record["ledger_lines"].items():
            mine = out.setdefault(name, {})
            for size, tokens in line.items():
                if size == "tokens" or "upto_" in size:
                    mine[size] = mine.get(size, 0) + tokens
    return {name: line for name, line in out.items() if line.get("tokens")}


def analyse(sweep: Sweep, margin: float = MARGIN) -> dict[str, Any]:
    """Everything the page and `--json` say, from the cells that are finished; an unfinished grid
    shows what it has.  margin: accuracy that a suggested limit may cost.
    """
    plan = sweep.plan
    records = {arm: finished(sweep, arm) for arm in plan.arms}
    speed = speeds(sweep)
    cells = []
    found = {}
    for (correction, limit), arm in plan.cell.items():
        got = {seed: record for seed, record in records[arm].items() if seed in records[SYNC]}
        if not got:
            continue
        cell = summarize_cell(got, records[SYNC], plan.arms[SYNC])
        if arm != SYNC:
            found[arm] = cell["difference"]
        runs = [warm_cell(arm, seed, got[seed], plan.arms[arm]) for seed in sorted(got)]
        cells.append(
            {
                "signs": signs_of(runs),
                "correction": correction,
                "limit": label(limit),
                "arm": arm,
                "difference": cell.pop("difference"),
                "speed": speed.get(label(limit), math.nan),
                "cause": likely_cause(plan.arms[arm], cell["trouble"]),
                **cell,
            }
        )
    verdict.holm(found)
    for cell in cells:
        cell["difference"] = difference_as_json(cell["difference"])
    out = {
        "corrections": list(plan.corrections),
        "limits": [label(limit) for limit in plan.limits],
        "injected": plan.injected,
        "seeds": sweep.seeds,
        "missing": len(plan.arms) * len(sweep.seeds) - sum(map(len, records.values())),
        "speed": speed,
        "sync": _cell(list(records[SYNC].values()), plan.arms[SYNC].learner.steps),
        "cells": cells,
    }
    return out | {"suggestion": suggest(out, plan, margin)}


def finished(sweep: Sweep, arm: str) -> dict[int, dict[str, Any]]:
    """seed -> the record of an arm's run, of those that are there."""
    names = {seed: sweep.name(arm, seed) for seed in sweep.seeds}
    return {
        seed: sweep.cells.read(name)
        for seed, name in names.items()
        if sweep.cells.path(name).exists()
    }


def summarize_cell(
    got: dict[int, dict[str, Any]], sync: dict[int, dict[str, Any]], base: Config
) -> dict[str, Any]:
    """One arm over its seeds, and its `difference` to the synchronous run of the same seeds."""
    last = base.learner.steps
    cell = _cell([got[seed] for seed in sorted(got)], last)
    other = [_cell([sync[seed]], last)["each"][0] for seed in sorted(got)]
    return cell | {"difference": verdict.paired(cell["each"], other, base.evaluation.final_prompts)}


def _cell(records: Sequence[dict[str, Any]], last: int) -> dict[str, Any]:
    """One arm over its seeds."""
    curves = [curve(record, last) for record in records]
    ends = [accuracy[-1] for _, accuracy in curves]
    lags = lag_histogram(records)
    total = max(sum(lags.values()), 1)
    said = [instability_reasons(record) for record in records]
    far = [ood(record, last) for record in records]
    kl = [x for record in records for x in verdict.series(record["curve"], "kl/behavior_target_k3")]
    return {
        "seeds": len(records),
        "each": ends,
        "final": mean(ends),
        "area": mean([verdict.area(steps, accuracy) for steps, accuracy in curves]),
        "ess": min((ess(record["curve"]) for record in records), default=math.nan),
        "kl": max(kl, default=math.nan),
        "ood_start": mean(finite_values(start for start, _ in far)),
        "ood_end": mean(finite_values(end for _, end in far)),
        "ood_each": [end for _, end in far],
        "kl_ref": mean(finite_values(reference_kl(record["curve"]) for record in records)),
        "lag": sum(lag * tokens for lag, tokens in lags.items()) / total,
        "lag_max": max(lags, default=0),
        "unstable": sum(map(bool, said)),
        "trouble": sorted({sentence.split(":")[0] for each in said for sentence in each}),
        "abandoned": [
            record["steps"] for record in records if record["abandoned"] or record.get("failed")
        ],
        "ledger_lines": sum_ledgers(records),
        "lost": mean([lost_share(record) for record in records]),
        "tokens": mean([float(sum(record["lag_histogram"].values())) for record in records]),
        "curves": [[list(steps), list(accuracy)] for steps, accuracy in curves],
        "digests": [record["weights_digest"] for record in records],
        "trained_ids": [record["trained_ids"] for record in records],
    }


def lag_histogram(records: Sequence[dict[str, Any]]) -> dict[int, int]:
    """lag -> trained tokens of all seeds."""
    lags: dict[int, int] = {}
    for record in records:
        for lag, tokens in record["lag_histogram"].items():
            lags[int(lag)] = lags.get(int(lag), 0) + tokens
    return lags


def difference_as_json(found: verdict.PairedDifference) -> dict[str, Any]:
    """A difference to the synchronous run as the JSON has it."""
    return {
        "mean": found.mean,
        "sd": found.sd,
        "interval": [found.low, found.high],
        "p": found.adjusted,
        "verdict": "no verdict" if found.seeds < 2 else found.verdict_word(),
        "interval_other_prompts": [found.prompt_low, found.prompt_high],
        "detectable": verdict.detectable(found.sd, found.seeds),
    }


def speeds(sweep: Sweep) -> dict[str, float]:
    """limit -> speed against limit 0, in decode steps of short runs at natural lag with learner and
    generators equally fast.
    """
    clocks = {}
    for limit in sweep.plan.probes:
        name = f"probe-limit{label(limit)}"
        if sweep.cells.path(name).exists():
            clocks[label(limit)] = sweep.cells.read(name)["clock"]
    if "0" not in clocks:
        return {}
    return {limit: clocks["0"] / max(clock, 1) for limit, clock in clocks.items()}


def format_difference(cell: dict[str, Any]) -> str:
    """A cell's difference to the synchronous run, with its interval."""
    low, high = cell["difference"]["interval"]
    return f"{cell['difference']['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"


def judge(cell: dict[str, Any], margin: float = MARGIN) -> str:
    """Why a cell cannot be suggested; empty: it can."""
    against = cell["difference"]
    low, high = against["interval"]
    if cell["seeds"] < 2:
        return "one seed gives no interval"
    if cell["unstable"]:
        return f"{cell['unstable']} of {cell['seeds']} runs unstable ({', '.join(cell['trouble'])})"
    if not cell["ess"] > ESS_LEAST:
        return f"ESS falls to {cell['ess']:.2f}"
    if high < 0 and not low > -margin:
        return f"accuracy {format_difference(cell)} against sync"
    if against["mean"] <= -margin:
        return (
            f"accuracy {against['mean']:+.3f} against sync, {margin:g} below or more, though the "
            f"interval [{low:+.3f}, {high:+.3f}] includes zero"
        )
    return "" if low > -margin else undecided(cell, margin)


def undecided(cell: dict[str, Any], margin: float) -> str:
    """What a cell says whose seeds are too few, and how many would tell; empty: they are not."""
    against = cell["difference"]
    low, high = against["interval"]
    settled = cell["unstable"] or high < 0 or low > -margin or against["mean"] <= -margin
    if cell["seeds"] < 2 or settled or not cell["ess"] > ESS_LEAST:
        return ""
    need = verdict.seeds_needed(against["mean"] + margin, against["sd"])
    more = f"about {need}" if need else "more than any practical number of"
    said = f"accuracy {format_difference(cell)} at {cell['seeds']} seeds says nothing"
    return f"{said}; {more} seeds would tell"


class LimitChoice(NamedTuple):
    """The largest limit of one correction that passes; best: its cell, None: no limit does."""

    cells: list[dict[str, Any]]  # by limit
    best: dict[str, Any] | None
    why_not_more: str
    open: str  # the smallest limit, where none passes and its seeds are too few to say so

    @property
    def limit(self) -> str | None:
        if self.best is not None:
            return str(self.best["limit"])
        return None if self.open else "0"


def choice(found: dict[str, Any], correction: str, margin: float) -> LimitChoice:
    cells = sorted(
        (c for c in found["cells"] if c["correction"] == correction and c["limit"] != "0"),
        key=lambda cell: float(cell["limit"]),
    )
    good = [cell for cell in cells if not judge(cell, margin)]
    best = good[-1] if good else None
    least = float(best["limit"]) if best else -math.inf
    over = next((cell for cell in cells if float(cell["limit"]) > least), None)
    unclear = [(cell["limit"], undecided(cell, margin)) for cell in cells if not good]
    return LimitChoice(
        cells,
        best,
        f"at limit {over['limit']}: {judge(over, margin)}" if over else "",
        next((f"at limit {limit}: {said}" for limit, said in unclear if said), ""),
    )


def suggest(found: dict[str, Any], plan: SweepPlan, margin: float = MARGIN) -> dict[str, Any]:
    """The limit and correction to choose, by `rule`; ties go to the higher mean accuracy.  `set` is
    to be pasted; limit None: the seeds are too few for a suggestion.
    """
    each = {name: choice(found, name, margin) for name in plan.corrections}
    if len(found["seeds"]) < 2:
        return {
            "limit": None,
            "set": "",
            "reason": "one seed: no interval, so no limit can be suggested; use --seeds 3 or more",
            "by_correction": dict.fromkeys(each),
            "rule": rule(margin),
        }
    out = {
        "by_correction": {
            name: {"limit": made.limit, "why_not_more": made.why_not_more}
            for name, made in each.items()
        },
        "rule": rule(margin),
    }
    able = [(name, made.best) for name, made in each.items() if made.best]
    unclear = [f"{name}, {made.open}" for name, made in each.items() if made.open]
    if not able and unclear:
        return out | {
            "limit": None,
            "correction": None,
            "set": "",
            "reason": f"no limit is suggested: none has an interval above -{margin:g} "
            f"({'; '.join(unclear)})",
        }
    if not able:
        why = "; ".join(
            f"{name}: {made.why_not_more}" for name, made in each.items() if made.why_not_more
        )
        return out | {
            "limit": "0",
            "correction": None,
            "set": "--set staleness.max_lag=0",
            "reason": f"no limit above 0 passes ({why}): stay synchronous",
        }
    name, best = max(able, key=lambda pair: (float(pair[1]["limit"]), pair[1]["final"]))
    return out | {
        "limit": best["limit"],
        "correction": name,
        "set": set_arguments(plan, name, float(best["limit"])),
        "reason": reason(name, best, each[name], margin),
    }


def reason(name: str, best: dict[str, Any], made: LimitChoice, margin: float) -> str:
    """Why this limit, what it gives, and what speaks against more."""
    said = (
        f"limit {best['limit']} with {name}: accuracy {format_difference(best)} against sync at "
        f"{best['seeds']} seeds, ESS stays at {best['ess']:.2f} and more, every run stable"
    )
    if not math.isnan(best["speed"]):
        said += (
            f"; {best['speed']:.2f} times the speed of sync if learner and generators are "
            "equally fast"
        )
    small = next(
        (
            cell
            for cell in made.cells
            if not judge(cell, margin) and cell["speed"] >= 0.98 * best["speed"]
        ),
        best,
    )
    if small is not best:
        said += f"; limit {small['limit']} is as fast there"
    if made.why_not_more:
        said += f"; {made.why_not_more}"
    return said


def set_arguments(plan: SweepPlan, correction: str, limit: float) -> str:
    """What differs from the config as it is, as `--set` words."""
    arm = flatten_config(layers.read_keys(plan.arms[plan.cell[correction, limit]]))
    base = flatten_config(msgspec.to_builtins(plan.arms[SYNC]))
    words = [("staleness.max_lag", label(limit))]
    for key, value in arm.items():
        if value != base.get(key) and value is not None and key not in SWEPT_KEYS:
            words.append((key, str(value).lower() if isinstance(value, bool) else value))
    return " ".join(f"--set {key}={value}" for key, value in words)


def flatten_config(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`a.b` -> value, of a config as nested dicts."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= flatten_config(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
