"""What a comparison found: each arm over its seeds, whether it differs from the first one, what a
faster one gives up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from asyncrl.config.tree import Config
from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.arms import Differences, from_first
from asyncrl.experiments.compare.comparison import CellResult

KL_BATCHES = 20  # at a run's end, over which KL to the reference is averaged
TARGET = 0.9  # of the first arm's accuracy at the end: how soon the others come there

Runs = Mapping[str, Sequence[CellResult]]  # arm -> its runs, by seed


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def finite_values(values: Iterable[float]) -> list[float]:
    """Those that are numbers."""
    return [value for value in values if not math.isnan(value)]


# ---- one run, or two -----------------------------------------------------------------------------


def signs_of(cells: Sequence[CellResult]) -> dict[str, list[str]]:
    """Sign -> what each run that has it says."""
    out: dict[str, list[str]] = {}
    for cell in cells:
        for sign in cell.signs:
            out.setdefault(sign.name, []).append(sign.as_line())
    return out


def signs_told(arm: str, found: Mapping[str, Sequence[str]], runs: int) -> list[str]:
    """A line for each sign of an arm: how many of its runs have it, and what one of them says."""
    return [
        f"{arm}: {name} in {len(said)} of {runs} runs: {said[0]}" for name, said in found.items()
    ]


def tickets(cell: CellResult) -> set[int]:
    """Every ticket that a run trained."""
    return {
        ticket
        for _, runs in cell.batches
        for first, last in runs
        for ticket in range(first, last + 1)
    }


def data_apart(arm: CellResult, base: CellResult) -> str:
    """How far the samples that two runs trained differ, in words; empty: they are the same, in the
    same order.
    """
    if arm.summary["trained_ids"] == base.summary["trained_ids"]:
        return ""
    pairs = zip(arm.batches, base.batches, strict=False)
    first = next(
        (number for number, (mine, other) in enumerate(pairs) if mine[0] != other[0]),
        min(len(arm.batches), len(base.batches)),
    )
    mine = tickets(arm)
    other = tickets(base)
    if not mine or not other:
        return "other samples"
    return (
        f"{len(mine & other) / max(len(mine), len(other)):.0%} of the groups in common, in "
        f"other batches from number {first} on"
    )


def reference_kl(rows: Sequence[Mapping[str, Any]]) -> float:
    """KL(target || reference) at a run's end, k3, nats a token: mean over its last KL_BATCHES
    batches.

    Without a KL term it is measured every record.reference_kl_every batches: where that leaves
    none among them, the last one measured; nan without any.  rows: one a batch.
    """
    name = "kl/target_ref_k3"
    every = [float(row[name]) for row in rows if name in row]
    late = [float(row[name]) for row in rows[-KL_BATCHES:] if name in row]
    return mean(late or every[-1:])


def first_reached(cell: CellResult, target: float) -> tuple[float, float]:
    """Batch and seconds of the first evaluation at the target or above; nan: never."""
    points = zip(cell.steps, cell.accuracy, strict=True)
    step = next((step for step, accuracy in points if accuracy >= target), math.nan)
    if math.isnan(step):
        return math.nan, math.nan
    row = min(step, cell.rows[-1]["step"])
    return step, next((float(found["t"]) for found in cell.rows if found["step"] >= row), math.nan)


# ---- one arm over its seeds ----------------------------------------------------------------------


def likely_cause(config: Config, trouble: Sequence[str]) -> str:
    """The likely cause of an unstable arm, where its configuration is a known one."""
    if not trouble:
        return ""
    if config.kl.reward.coefficient > 0 and config.kl.reward.estimator == "k3":
        return "k3 in the reward is known to collapse: use k1 in the reward or k3 in the loss"
    lagged = config.staleness.limit > 0
    if (
        lagged
        and config.correction.level == "none"
        and config.loss.surrogate in ("vanilla", "decoupled_ppo")
        and config.correction.proximal == "recompute"
    ):
        return (
            "stale samples without correction: anchor PPO on the behaviour policy, or set "
            "correction.preset = tis"
        )
    if lagged and config.staleness.limit >= 8:
        return "a large lag: lower staleness.max_lag or learner.lr"
    return "lower learner.lr, or set stop.kl_max with more than one optimizer step a batch"


class ArmSummary(msgspec.Struct, frozen=True):
    """One arm over its seeds, as the JSON has it: means over its runs where nothing else is said,
    nan where none of them measured it.
    """

    heldout_start: float
    heldout_end: float
    ood_start: float
    ood_end: float
    ood_each: list[float]
    kl_ref: float  # target to reference at the end, k3, nats a token
    each: list[float]  # held-out accuracy at the end, by seed
    area: float  # mean height of the curve of accuracy
    wall_s: float
    tokens: float  # trained
    generated: float  # tokens
    tokens_per_s: float  # trained
    lag: float  # of trained tokens, versions
    lag_max: int  # of any run
    ess: float  # share; over all batches of all runs
    target: float  # accuracy whose time is asked for
    reached: int  # runs that came there; the next two are means over these
    steps_to_target: float
    seconds_to_target: float
    unstable: int  # runs
    trouble: list[str]  # kinds, of any run
    cause: str
    signs: dict[str, list[str]]
    weights_digests: list[str]
    warm: bool  # in warm processes: its times are not those of a real run


def summarize_arm(cells: Sequence[CellResult], config: Config, target: float) -> ArmSummary:
    """One arm over its seeds.  target: the accuracy whose time is asked for, over the runs that
    reach it.
    """

    def mean_of(name: str) -> float:
        return mean([float(cell.summary[name]) for cell in cells])

    times = [first_reached(cell, target) for cell in cells]
    times = [found for found in times if not math.isnan(found[0])]
    trouble = sorted({said.split(":")[0] for cell in cells for said in cell.trouble})
    ess = "is/target_ess"
    return ArmSummary(
        heldout_start=mean_of("heldout_start"),
        heldout_end=mean([cell.final for cell in cells]),
        ood_start=mean(finite_values(cell.ood_start for cell in cells)),
        ood_end=mean(finite_values(cell.ood_end for cell in cells)),
        ood_each=[cell.ood_end for cell in cells],
        kl_ref=mean(finite_values(reference_kl(cell.rows) for cell in cells)),
        each=[cell.final for cell in cells],
        area=mean([cell.area for cell in cells]),
        wall_s=mean_of("wall_s"),
        tokens=mean_of("tokens"),
        generated=mean([cell.summary["ledger"]["generated"] for cell in cells]),
        tokens_per_s=mean(
            [cell.summary["tokens"] / max(cell.summary["wall_s"], 1e-9) for cell in cells]
        ),
        lag=mean([cell.summary["lag"]["mean"] for cell in cells]),
        lag_max=max(cell.summary["lag"]["max"] for cell in cells),
        ess=mean([row[ess] for cell in cells for row in cell.rows if ess in row]),
        target=target,
        reached=len(times),
        steps_to_target=mean([step for step, _ in times]),
        seconds_to_target=mean([seconds for _, seconds in times]),
        unstable=sum(bool(cell.trouble) for cell in cells),
        trouble=trouble,
        cause=likely_cause(config, trouble),
        signs=signs_of(cells),
        weights_digests=[cell.summary["weights_digest"] for cell in cells],
        warm=all(cell.warm for cell in cells),
    )


# ---- arms against the first one ------------------------------------------------------------------


class ArmMeasure(NamedTuple):
    """What arms are judged by.  prompts: n of each value, an accuracy; 0: it is none."""

    name: str
    words: str
    value: Callable[[CellResult], float]
    prompts: int


def measures(cells: Sequence[CellResult], config: Config) -> list[ArmMeasure]:
    """Accuracy at the end and over training; out of distribution where every run measured it."""
    prompts = config.evaluation.final_prompts
    out = [
        ArmMeasure("heldout_end", "final accuracy", lambda cell: cell.final, prompts),
        ArmMeasure("area", "mean accuracy over training", lambda cell: cell.area, 0),
    ]
    if len(finite_values(cell.ood_end for cell in cells)) == len(cells):
        words = "out-of-distribution accuracy"
        prompts = config.evaluation.ood_prompts
        out.append(ArmMeasure("ood_end", words, lambda cell: cell.ood_end, prompts))
    return out


def judge_arms(
    measure: ArmMeasure, runs: Runs, base: str, differs: Mapping[str, Differences]
) -> list[ArmVerdict]:
    """A verdict on every arm but the base, by one measure, with Holm's correction among them."""
    other = [measure.value(cell) for cell in runs[base]]
    found = {
        name: verdict.paired([measure.value(cell) for cell in cells], other, measure.prompts)
        for name, cells in runs.items()
        if name != base
    }
    verdict.holm(found)
    return [
        make_verdict(measure, (name, base), found[name], runs, differs.get(name, {}))
        for name in found
    ]


class ArmVerdict(msgspec.Struct, frozen=True):
    """One arm against the base by one measure, as the JSON has it."""

    arm: str
    against: str
    metric: str
    difference: float
    interval: list[float]  # 95 %, over other seeds
    verdict: str  # equal, better, worse, no difference visible
    p: float  # after Holm
    interval_other_prompts: list[float]
    detectable: float  # the difference that as many seeds show with 80 % power
    differs: Differences  # resolved config: key -> its value in `against`, and in `arm`
    text: str


def make_verdict(
    measure: ArmMeasure,
    pair: tuple[str, str],
    found: verdict.PairedDifference,
    runs: Runs,
    differs: Differences,
) -> ArmVerdict:
    """What is said of one difference; runs with the same weights are equal, whatever it is.

    pair: the arm, and the one it is compared with.
    """
    name, base = pair
    same = all(
        cell.summary["weights_digest"] == other.summary["weights_digest"]
        for cell, other in zip(runs[name], runs[base], strict=True)
    )
    return ArmVerdict(
        arm=name,
        against=base,
        metric=measure.name,
        difference=found.mean,
        interval=[found.low, found.high],
        verdict="equal" if same else found.verdict_word(),
        p=found.adjusted,
        interval_other_prompts=[found.prompt_low, found.prompt_high],
        detectable=verdict.detectable(found.sd, found.seeds),
        differs=differs,
        text=f"{name} is bitwise equal to {base}"
        if same
        else verdict.verdict(name, base, found, measure.words),
    )


def describe_tradeoff(name: str, arm: ArmSummary, base_name: str, base: ArmSummary) -> str:
    """What an arm gains in speed and loses in accuracy, beside the base."""
    alike = not arm.warm and not base.warm
    speed = base.wall_s / max(arm.wall_s, 1e-9)
    said = (
        f"{speed:.2f} times the speed of {base_name}"
        if alike
        else "run in a warm process by turns, so its speed says nothing"
    )
    return (
        f"{name}: {said}, accuracy {arm.heldout_end - base.heldout_end:+.3f}; "
        f"{describe_target_time(arm, base, base_name, alike)}"
    )


def describe_target_time(arm: ArmSummary, base: ArmSummary, name: str, timed: bool) -> str:
    """When an arm came to the accuracy asked for, beside the base."""
    goal = f"{arm.target:.3f}"
    missed = len(arm.each) - arm.reached
    if not arm.reached or not base.reached:
        return f"accuracy {goal} was never reached" + (
            "" if arm.reached == base.reached else f" by {name}" if arm.reached else ""
        )
    what = f"accuracy {goal} at batch {arm.steps_to_target:.0f} ({name} {base.steps_to_target:.0f})"
    what += f", after {arm.seconds_to_target:.0f} s ({base.seconds_to_target:.0f})" if timed else ""
    return what + (f", never in {missed} of {len(arm.each)} runs" if missed else "")


def analyse(cells: Sequence[CellResult], configs: dict[str, Config]) -> dict[str, Any]:
    """Everything the report and `--json` say.  The first arm is what the others are compared
    with.
    """
    base, *others = configs
    runs = {
        name: sorted((cell for cell in cells if cell.arm == name), key=lambda cell: cell.seed)
        for name in configs
    }
    differs = from_first(configs)
    target = TARGET * mean([cell.final for cell in runs[base]])
    arms = {name: summarize_arm(runs[name], config, target) for name, config in configs.items()}
    apart = {
        name: [data_apart(cell, other) for cell, other in zip(runs[name], runs[base], strict=True)]
        for name in others
    }
    return {
        "arms": {name: asdict(arm) for name, arm in arms.items()},
        "verdicts": [
            asdict(said)
            for measure in measures(cells, configs[base])
            for said in judge_arms(measure, runs, base, differs)
        ],
        "seeds": sorted({cell.seed for cell in cells}),
        "same_data": {name: [not said for said in each] for name, each in apart.items()},
        "data_apart": apart,
        "trade": [describe_tradeoff(name, arms[name], base, arms[base]) for name in others],
    }
