"""The results of a grid.

They are each arm over its seeds and its difference from the base; of a comparison also the verdicts
and tradeoffs of speed and reward, of a sweep the suggested limit with its reason.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import msgspec

from asyncrl.config import layers, rules
from asyncrl.config.tree import Config
from asyncrl.contract.messages import Numbers
from asyncrl.contract.toml_writer import fill, flatten, read_table
from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.arms import find_changes
from asyncrl.experiments.compare.grid import (
    SWEPT_KEYS,
    SYNC,
    CellResult,
    Sweep,
    SweepPlan,
)
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.metrics import average, average_known
from buffer import training_log
from buffer.ledger import sum_tokens

TEXTS: dict[str, str] = read_table(__file__)
KL_BATCHES = 20  # at a run's end, over which KL to the reference is averaged
TARGET = 0.9  # share of the first arm's final reward; the time to reach it is compared
ESS = "is/target_ess"  # of the raw ratios target/behavior
ESS_LEAST = 0.5
ESS_WINDOW = 10
MARGIN = 0.05  # held-out reward that a suggested limit may cost
# (metric of a verdict, attribute of a run, description, n of a mean over prompts in evaluation)
MEASURES = (
    ("heldout_end", "final", "final reward", "final_prompts"),
    ("area", "area", "mean reward over training", ""),
    ("ood_end", "ood_end", "out-of-distribution reward", "ood_prompts"),
)

Runs = Mapping[str, Sequence[CellResult]]  # arm -> its runs, by seed
Summary = dict[str, Any]  # JSON of an arm, a cell of a sweep, or of all of them


# ---- one run, or two -----------------------------------------------------------------------------


def describe_data_difference(arm: CellResult, base: CellResult) -> str:
    """Describe how far the trained samples of two runs differ.

    Empty if they are the same in the same order.
    """
    if arm.record["trained_ids"] == base.record["trained_ids"]:
        return ""
    batches, others = (cell.record.get("batches", ()) for cell in (arm, base))
    pairs = zip(batches, others, strict=False)
    first_batch = next(
        (number for number, (mine, theirs) in enumerate(pairs) if mine["ids"] != theirs["ids"]),
        min(len(batches), len(others)),
    )
    arm_tickets, base_tickets = (
        {
            ticket
            for batch in run
            for first, last in batch["tickets"]
            for ticket in range(first, last + 1)
        }
        for run in (batches, others)
    )
    if not arm_tickets or not base_tickets:
        return "other samples"
    share = len(arm_tickets & base_tickets) / max(len(arm_tickets), len(base_tickets))
    return f"{share:.0%} of the groups in common, in other batches from number {first_batch} on"


def average_reference_kl(rows: Sequence[Summary]) -> float:
    """Return KL(target || reference) at a run's end: k3, nats a token.

    The mean is over the last KL_BATCHES batches. Without a KL term the metric exists only every
    record.reference_kl_every batches. If none of them is among the last, the newest value is used;
    without values the result is nan. The first batch does not count, because it measures the model
    before any update.
    rows: one a batch.
    """
    name = "kl/target_ref_k3"
    updated = rows[1:]
    last_values = verdict.list_values(updated[-KL_BATCHES:], name)
    return average(last_values or verdict.list_values(updated, name)[-1:])


def complete_curve(record: Summary, last_step: int) -> tuple[list[float], list[float]]:
    """Return steps and held-out rewards of a run.

    A run that failed or stopped early keeps its last reward up to step `last_step`.
    """
    steps, accuracy = record["accuracy"]
    if steps and steps[-1] < last_step:
        return [*steps, float(last_step)], [*accuracy, accuracy[-1]]
    return steps, accuracy


def find_lowest_ess(rows: Sequence[Mapping[str, float]]) -> float:
    """Return the lowest mean over ESS_WINDOW consecutive steps of the ESS; nan without rows."""
    shares = verdict.list_values(rows, ESS)
    width = min(ESS_WINDOW, len(shares))
    starts = range(len(shares) - width + 1) if shares else ()
    return min((average(shares[i : i + width]) for i in starts), default=nan)


def compute_lost_share(record: Summary) -> float:
    """Return the share of generated tokens neither trained nor left over at the run's end."""
    lines = {name: line["tokens"] for name, line in record["ledger_lines"].items()}
    kept = lines.get("trained", 0) + lines.get("left_over", 0)
    return 1 - kept / total if (total := sum(lines.values())) else 0.0


def sum_ledgers(records: Sequence[Summary]) -> dict[str, Numbers]:
    """Sum the ledger's lines over all seeds: tokens, and tokens by length."""
    totals: dict[str, Numbers] = {}
    for record in records:
        for name, line in record["ledger_lines"].items():
            total = totals.setdefault(name, {})
            for size, tokens in line.items():
                if size == "tokens" or "upto_" in size:
                    total[size] = total.get(size, 0) + tokens
    return {name: line for name, line in totals.items() if line.get("tokens")}


# ---- one arm over its seeds ----------------------------------------------------------------------


def summarize(cells: Sequence[CellResult], config: Config) -> Summary:
    """Return what the JSON of a comparison and of a sweep has of an arm.

    Values are means over its runs unless noted; nan if no run measured it.
    """
    trouble = sorted({reason.split(":")[0] for cell in cells for reason in cell.trouble})
    findings: dict[str, list[str]] = {}
    for cell in cells:
        for sign in cell.signs:
            findings.setdefault(sign.name, []).append(sign.as_line())
    return {
        "seeds": len(cells),
        "each": [cell.final for cell in cells],  # final reward, by seed
        "area": average([cell.area for cell in cells]),  # mean reward over training
        "ood_start": average_known(cell.ood_start for cell in cells),
        "ood_end": average_known(cell.ood_end for cell in cells),
        "ood_each": [cell.ood_end for cell in cells],
        # target to reference at the end, k3, nats a token
        "kl_ref": average_known(average_reference_kl(cell.rows) for cell in cells),
        "tokens": average([float(sum(cell.lags.values())) for cell in cells]),  # trained
        "lag_max": max((max(cell.lags, default=0) for cell in cells), default=0),
        "unstable": sum(bool(cell.trouble) for cell in cells),  # runs
        "trouble": trouble,  # kinds, of any run
        "cause": next(rules.apply_table("causes", config), "") if trouble else "",
        "signs": findings,
    }


def summarize_arm(cells: Sequence[CellResult], config: Config, target: float) -> Summary:
    """Return what comparison.json has of an arm, in addition to `summarize`.

    target: the reward whose time is measured, over the runs that reach it.
    """

    reached: list[float] = []  # batch of the first evaluation at `target` or above
    seconds: list[float] = []
    for cell in cells:
        points = zip(cell.steps, cell.accuracy, strict=True)
        step = next((step for step, accuracy in points if accuracy >= target), None)
        if step is not None:
            row = min(step, cell.rows[-1]["step"])
            times = (float(later["t"]) for later in cell.rows if later["step"] >= row)
            reached.append(step)
            seconds.append(next(times, nan))
    result = summarize(cells, config)
    return result | {
        "heldout_start": average([cell.accuracy[0] for cell in cells]),
        "heldout_end": average(result["each"]),
        "wall_s": average([float(cell.record["wall_s"]) for cell in cells]),
        "generated": average([sum_tokens(cell.record["ledger_lines"]) for cell in cells]),
        "tokens_per_s": average(  # trained
            [sum(cell.lags.values()) / max(cell.record["wall_s"], 1e-9) for cell in cells]
        ),
        "lag": average([training_log.mean(cell.lags) for cell in cells]),  # versions
        # share, over all batches of all runs
        "ess": average([x for cell in cells for x in verdict.list_values(cell.rows, ESS)]),
        "target": target,
        "reached": len(reached),  # runs, over which the next two are means
        "steps_to_target": average(reached),
        "seconds_to_target": average(seconds),
        "weights_digests": list_digests(cells),
        # in warm processes, whose times differ from a real run's
        "warm": all(cell.warm for cell in cells),
    }


def summarize_cell(cells: Sequence[CellResult], config: Config) -> Summary:
    """Return what result.json has of an arm of a sweep, in addition to `summarize`.

    A run that stopped early keeps its last reward up to the last step, and has no OOD reward there.
    """
    for cell in cells:
        cell.steps, cell.accuracy = complete_curve(cell.record, config.learner.steps)
    records = [cell.record for cell in cells]
    lags: Counter[int] = Counter()  # trained tokens of all seeds
    for cell in cells:
        lags.update(cell.lags)
    kl = [x for cell in cells for x in verdict.list_values(cell.rows, "kl/behavior_target_k3")]
    result = summarize(cells, config)
    return result | {
        "final": average(result["each"]),
        "ess": min((find_lowest_ess(cell.rows) for cell in cells), default=nan),
        "kl": max(kl, default=nan),
        "lag": training_log.mean(lags),
        "abandoned": [cell.record["steps"] for cell in cells if cell.stopped],
        "ledger_lines": sum_ledgers(records),
        "lost": average([compute_lost_share(record) for record in records]),
        "curves": [[list(cell.steps), list(cell.accuracy)] for cell in cells],
        "digests": list_digests(cells),
        "trained_ids": [record["trained_ids"] for record in records],
    }


# ---- the arms of a comparison against the first one ----------------------------------------------


def judge_arms(runs: Runs, configs: Mapping[str, Config]) -> list[Summary]:
    """Judge every arm against the first by each measure, with Holm's correction over the arms.

    The out-of-distribution reward is judged if every run measured it.
    """
    base = next(iter(configs))
    verdicts = []
    for metric, attribute, description, prompts in MEASURES:
        values = {
            arm: {cell.seed: float(getattr(cell, attribute)) for cell in cells}
            for arm, cells in runs.items()
        }
        if any(math.isnan(value) for by_seed in values.values() for value in by_seed.values()):
            continue
        size = getattr(configs[base].evaluation, prompts) if prompts else 0
        for arm, difference in verdict.compare_arms(values, base, size).items():
            same = list_digests(runs[arm]) == list_digests(runs[base])
            verdicts.append(
                difference.as_json()
                | {
                    "arm": arm,
                    "against": base,
                    "metric": metric,
                    "difference": difference.mean,
                    "verdict": "equal" if same else difference.choose_word(),
                    "differs": find_changes(configs[base], configs[arm]),
                    "text": f"{arm} is bitwise equal to {base}"
                    if same
                    else verdict.state_verdict(arm, base, difference, description),
                }
            )
    return verdicts


def list_digests(cells: Sequence[CellResult]) -> list[str]:
    return [cell.record["weights_digest"] for cell in cells]


def analyze(cells: Sequence[CellResult], configs: dict[str, Config]) -> Summary:
    """Return the content of a comparison's report and of `--json`.

    The other arms are compared with the first.
    """
    base, *other_names = configs
    runs = {
        name: sorted((cell for cell in cells if cell.arm == name), key=lambda cell: cell.seed)
        for name in configs
    }
    target = TARGET * average([cell.final for cell in runs[base]])
    arms = {name: summarize_arm(runs[name], config, target) for name, config in configs.items()}
    apart = {
        name: [
            describe_data_difference(cell, other)
            for cell, other in zip(runs[name], runs[base], strict=True)
        ]
        for name in other_names
    }
    first = arms[base]
    sentences = [
        fill(
            TEXTS["tradeoff"],
            name=name,
            arm=arms[name],
            base_name=base,
            base=first,
            comparable=not (arms[name]["warm"] or first["warm"]),
        ).strip()
        for name in other_names
    ]
    return {
        "arms": arms,
        "verdicts": judge_arms(runs, configs),
        "seeds": sorted({cell.seed for cell in cells}),
        "same_data": {name: [not text for text in texts] for name, texts in apart.items()},
        "data_apart": apart,
        "trade": sentences,  # speed, reward and time to the target, relative to the base
    }


# ---- the cells of a sweep, and the suggested limit -----------------------------------------------


def analyze_sweep(sweep: Sweep, margin: float = MARGIN) -> Summary:
    """Return the content of a sweep's page and of `--json`, from the finished cells.

    margin: held-out reward that a suggested limit may cost.
    """
    plan = sweep.plan
    runs = {
        arm: [
            sweep.read(arm, seed)
            for seed in sweep.seeds
            if sweep.cells.is_finished(sweep.name_run(arm, seed))
        ]
        for arm in plan.arms
    }
    missing = len(sweep.names) - len(plan.probes) - sum(map(len, runs.values()))
    paired = {cell.seed for cell in runs[SYNC]}
    runs = {arm: [cell for cell in cells if cell.seed in paired] for arm, cells in runs.items()}
    summaries = {arm: summarize_cell(cells, plan.arms[arm]) for arm, cells in runs.items()}
    sync = summaries[SYNC]
    ends = {arm: {cell.seed: cell.final for cell in cells} for arm, cells in runs.items()}
    prompts = plan.arms[SYNC].evaluation.final_prompts
    differences = verdict.compare_arms(ends, SYNC, prompts)
    clocks = {
        f"{limit:g}": sweep.cells.read(name)["clock"]
        for limit in plan.probes
        if sweep.cells.is_finished(name := sweep.name_probe(limit))
    }
    speed = {limit: clocks["0"] / max(clock, 1) for limit, clock in clocks.items() if "0" in clocks}
    result = {
        "corrections": list(plan.corrections),
        "limits": [f"{limit:g}" for limit in plan.limits],
        "injected": plan.injected,
        "seeds": sweep.seeds,
        "missing": missing,
        "speed": speed,
        "sync": sync,
        "cells": [
            summaries[arm]
            | {
                "correction": correction,
                "limit": f"{limit:g}",
                "arm": arm,
                "difference": (
                    differences.get(arm)
                    or verdict.compare_pairs(sync["each"], sync["each"], prompts)
                ).as_json(),
                "speed": speed.get(f"{limit:g}", nan),
            }
            for (correction, limit), arm in plan.cell.items()
            if runs[arm]
        ],
    }
    return result | {"suggestion": suggest(result, plan, margin)}


def format_difference(cell: Summary) -> str:
    """Format a cell's difference from the synchronous run, with its interval."""
    low, high = cell["difference"]["interval"]
    return f"{cell['difference']['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"


def find_objection(cell: Summary, margin: float) -> tuple[str, bool]:
    """Return the reason why a cell cannot be suggested, and whether more seeds could remove it.

    The reason is empty if the cell can be suggested.
    """
    at = f"at limit {cell['limit']}: "
    against = cell["difference"]
    low, high = against["interval"]
    if cell["seeds"] < 2:
        return f"{at}one seed gives no interval", False
    if cell["unstable"]:
        kinds = ", ".join(cell["trouble"])
        return f"{at}{cell['unstable']} of {cell['seeds']} runs unstable ({kinds})", False
    if not cell["ess"] > ESS_LEAST:
        return f"{at}ESS falls to {cell['ess']:.2f}", False
    if low > -margin:
        return "", False
    if high < 0:
        return f"{at}reward {format_difference(cell)} against sync", False
    if against["mean"] <= -margin:
        return (
            f"{at}reward {against['mean']:+.3f} against sync, {margin:g} below or more, though the "
            f"interval [{low:+.3f}, {high:+.3f}] includes zero"
        ), False
    needed = verdict.count_needed_seeds(against["mean"] + margin, against["sd"])
    return (
        f"{at}reward {format_difference(cell)} at {cell['seeds']} seeds is undecided; "
        f"{f'about {needed}' if needed else 'no practical number of'} seeds would decide"
    ), True


def suggest(analysis: Summary, plan: SweepPlan, margin: float = MARGIN) -> Summary:
    """Choose the limit and correction by the rule; ties go to the higher mean reward.

    `set` has the options to paste. limit is None if there are too few seeds for a suggestion.
    """
    rule = {
        "rule": f"largest limit whose 95 % interval against sync stays above -{margin:g}, whose "
        f"ESS stays above {ESS_LEAST:g} and whose runs are all stable"
    }
    if len(analysis["seeds"]) < 2:
        return rule | {
            "limit": None,
            "set": "",
            "reason": "one seed: no interval, so no limit can be suggested; use --seeds 3 or more",
            "by_correction": dict.fromkeys(plan.corrections),
        }
    passing: list[tuple[str, list[Summary]]] = []  # correction, its cells by limit
    unclear: list[str] = []
    by_correction: dict[str, JsonObject] = {}
    for name in plan.corrections:
        cells = sorted(
            (c for c in analysis["cells"] if c["correction"] == name and c["limit"] != "0"),
            key=lambda cell: float(cell["limit"]),
        )
        objections = [find_objection(cell, margin) for cell in cells]
        good = [i for i, (text, _) in enumerate(objections) if not text]
        undecided = [text for text, may_pass in objections if may_pass]
        limit: str | None = None if undecided else "0"
        if good:
            passing.append((name, [cells[i] for i in good]))
            limit = cells[good[-1]]["limit"]
        elif undecided:
            unclear.append(f"{name}, {undecided[0]}")
        following = objections[good[-1] + 1 if good else 0 :]
        why_not_more = following[0][0] if following else ""
        by_correction[name] = {"limit": limit, "why_not_more": why_not_more}
    limit, correction, sets = None, None, ""
    if passing:
        correction, cells = max(
            passing, key=lambda pair: (float(pair[1][-1]["limit"]), pair[1][-1]["final"])
        )
        best = cells[-1]
        limit = best["limit"]
        sets = format_set_arguments(plan, correction, float(limit))
        reason = fill(
            TEXTS["choice"],
            name=correction,
            best=best,
            small=next((cell for cell in cells if cell["speed"] >= 0.98 * best["speed"]), best),
            difference=format_difference(best),
            why_not_more=by_correction[correction]["why_not_more"],
        ).strip()
    elif unclear:
        reason = (
            f"no limit is suggested: none has an interval above -{margin:g} ({'; '.join(unclear)})"
        )
    else:
        limit, sets = "0", "--set staleness.max_lag=0"
        objected = "; ".join(
            f"{name}: {choice['why_not_more']}"
            for name, choice in by_correction.items()
            if choice["why_not_more"]
        )
        reason = f"no limit above 0 passes ({objected}): stay synchronous"
    return rule | {
        "by_correction": by_correction,
        "limit": limit,
        "correction": correction,
        "set": sets,
        "reason": reason,
    }


def format_set_arguments(plan: SweepPlan, correction: str, limit: float) -> str:
    """Return the differences from the original config as `--set` arguments."""
    arm = flatten(layers.read_keys(plan.arms[plan.cell[correction, limit]]))
    base = flatten(msgspec.to_builtins(plan.arms[SYNC]))
    settings = [("staleness.max_lag", f"{limit:g}")]
    for key, value in arm.items():
        if value != base.get(key) and value is not None and key not in SWEPT_KEYS:
            settings.append((key, str(value).lower() if isinstance(value, bool) else value))
    return " ".join(f"--set {key}={value}" for key, value in settings)
