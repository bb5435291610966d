"""The results of a comparison.

They are each arm over its seeds, its differences from the first arm, and its tradeoff of speed and
reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict

from asyncrl.config.tree import Config
from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.arms import Differences, compare_with_first
from asyncrl.experiments.compare.comparison import CellResult

KL_BATCHES = 20  # at a run's end, over which KL to the reference is averaged
TARGET = 0.9  # share of the first arm's final reward; the time to reach it is compared

Runs = Mapping[str, Sequence[CellResult]]  # arm -> its runs, by seed


def average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def drop_nan(values: Iterable[float]) -> list[float]:
    """Drop nan."""
    return [value for value in values if not math.isnan(value)]


# ---- one run, or two -----------------------------------------------------------------------------


def collect_findings(cells: Sequence[CellResult]) -> dict[str, list[str]]:
    """Collect the health findings of runs by name."""
    findings: dict[str, list[str]] = {}
    for cell in cells:
        for sign in cell.signs:
            findings.setdefault(sign.name, []).append(sign.as_line())
    return findings


def format_findings(arm: str, findings: Mapping[str, Sequence[str]], runs: int) -> list[str]:
    """Format each health finding of an arm as a line.

    The line has the number of affected runs and one of their messages.
    """
    return [
        f"{arm}: {name} in {len(messages)} of {runs} runs: {messages[0]}"
        for name, messages in findings.items()
    ]


def list_tickets(cell: CellResult) -> set[int]:
    """Return every ticket that a run trained."""
    return {
        ticket
        for _, runs in cell.batches
        for first, last in runs
        for ticket in range(first, last + 1)
    }


def describe_data_difference(arm: CellResult, base: CellResult) -> str:
    """Describe how far the trained samples of two runs differ.

    Empty if they are the same in the same order.
    """
    if arm.summary["trained_ids"] == base.summary["trained_ids"]:
        return ""
    pairs = zip(arm.batches, base.batches, strict=False)
    first_batch = next(
        (
            number
            for number, (arm_tickets, base_tickets) in enumerate(pairs)
            if arm_tickets[0] != base_tickets[0]
        ),
        min(len(arm.batches), len(base.batches)),
    )
    arm_tickets = list_tickets(arm)
    base_tickets = list_tickets(base)
    if not arm_tickets or not base_tickets:
        return "other samples"
    share = len(arm_tickets & base_tickets) / max(len(arm_tickets), len(base_tickets))
    return f"{share:.0%} of the groups in common, in other batches from number {first_batch} on"


def average_reference_kl(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return KL(target || reference) at a run's end: k3, nats a token.

    The mean is over the last KL_BATCHES batches. Without a KL term the metric exists only every
    record.reference_kl_every batches. If none of them is among the last, the newest value is used;
    without values the result is nan. The first batch does not count, because it measures the model
    before any update.
    rows: one a batch.
    """
    name = "kl/target_ref_k3"
    updated = rows[1:]
    values = [float(row[name]) for row in updated if name in row]
    last_values = [float(row[name]) for row in updated[-KL_BATCHES:] if name in row]
    return average(last_values or values[-1:])


def find_first_reached(cell: CellResult, target: float) -> tuple[float, float]:
    """Return batch and seconds of the first evaluation at `target` or above, or nan."""
    points = zip(cell.steps, cell.accuracy, strict=True)
    step = next((step for step, accuracy in points if accuracy >= target), math.nan)
    if math.isnan(step):
        return math.nan, math.nan
    row = min(step, cell.rows[-1]["step"])
    return step, next((float(later["t"]) for later in cell.rows if later["step"] >= row), math.nan)


# ---- one arm over its seeds ----------------------------------------------------------------------


def find_likely_cause(config: Config, trouble: Sequence[str]) -> str:
    """Return the likely cause of an unstable arm, if its config is a known one."""
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
            "stale samples without correction: use the behavior policy as the proximal policy, or "
            "set correction.preset = tis"
        )
    if lagged and config.staleness.limit >= 8:
        return "a large lag: lower staleness.max_lag or learner.lr"
    return "lower learner.lr, or set stop.kl_max with more than one optimizer step a batch"


class ArmSummary(msgspec.Struct, frozen=True):
    """One arm over its seeds, in the form of the JSON.

    Values are means over its runs unless noted; nan if no run measured it.
    """

    heldout_start: float
    heldout_end: float  # final reward
    ood_start: float
    ood_end: float
    ood_each: list[float]
    kl_ref: float  # target to reference at the end, k3, nats a token
    each: list[float]  # final reward, by seed
    area: float  # mean reward over training
    wall_s: float
    tokens: float  # trained
    generated: float  # tokens
    tokens_per_s: float  # trained
    lag: float  # of trained tokens, versions
    lag_max: int  # of any run
    ess: float  # share, over all batches of all runs
    target: float  # reward whose time is measured
    reached: int  # runs that reached it, over which the next two are means
    steps_to_target: float
    seconds_to_target: float
    unstable: int  # runs
    trouble: list[str]  # kinds, of any run
    cause: str
    signs: dict[str, list[str]]
    weights_digests: list[str]
    warm: bool  # in warm processes, whose times differ from a real run's


def summarize_arm(cells: Sequence[CellResult], config: Config, target: float) -> ArmSummary:
    """Summarize one arm over its seeds.

    target: the reward whose time is measured, over the runs that reach it.
    """

    def average_summary(name: str) -> float:
        return average([float(cell.summary[name]) for cell in cells])

    reached = [find_first_reached(cell, target) for cell in cells]
    reached = [time for time in reached if not math.isnan(time[0])]
    trouble = sorted({reason.split(":")[0] for cell in cells for reason in cell.trouble})
    ess = "is/target_ess"
    return ArmSummary(
        heldout_start=average_summary("heldout_start"),
        heldout_end=average([cell.final for cell in cells]),
        ood_start=average(drop_nan(cell.ood_start for cell in cells)),
        ood_end=average(drop_nan(cell.ood_end for cell in cells)),
        ood_each=[cell.ood_end for cell in cells],
        kl_ref=average(drop_nan(average_reference_kl(cell.rows) for cell in cells)),
        each=[cell.final for cell in cells],
        area=average([cell.area for cell in cells]),
        wall_s=average_summary("wall_s"),
        tokens=average_summary("tokens"),
        generated=average([cell.summary["ledger"]["generated"] for cell in cells]),
        tokens_per_s=average(
            [cell.summary["tokens"] / max(cell.summary["wall_s"], 1e-9) for cell in cells]
        ),
        lag=average([cell.summary["lag"]["mean"] for cell in cells]),
        lag_max=max(cell.summary["lag"]["max"] for cell in cells),
        ess=average([row[ess] for cell in cells for row in cell.rows if ess in row]),
        target=target,
        reached=len(reached),
        steps_to_target=average([step for step, _ in reached]),
        seconds_to_target=average([seconds for _, seconds in reached]),
        unstable=sum(bool(cell.trouble) for cell in cells),
        trouble=trouble,
        cause=find_likely_cause(config, trouble),
        signs=collect_findings(cells),
        weights_digests=[cell.summary["weights_digest"] for cell in cells],
        warm=all(cell.warm for cell in cells),
    )


# ---- arms against the first one ------------------------------------------------------------------


class ArmMeasure(NamedTuple):
    """A measure by which arms are compared.

    prompts: n of each value if it is a mean over prompts, otherwise 0.
    """

    name: str
    description: str
    value: Callable[[CellResult], float]
    prompts: int


def list_measures(cells: Sequence[CellResult], config: Config) -> list[ArmMeasure]:
    """Return the measures of a comparison.

    They are final reward, mean reward over training, and out-of-distribution reward if every run
    measured it.
    """
    prompts = config.evaluation.final_prompts
    selected = [
        ArmMeasure("heldout_end", "final reward", lambda cell: cell.final, prompts),
        ArmMeasure("area", "mean reward over training", lambda cell: cell.area, 0),
    ]
    if len(drop_nan(cell.ood_end for cell in cells)) == len(cells):
        description = "out-of-distribution reward"
        prompts = config.evaluation.ood_prompts
        selected.append(ArmMeasure("ood_end", description, lambda cell: cell.ood_end, prompts))
    return selected


def judge_arms(
    measure: ArmMeasure, runs: Runs, base: str, differs: Mapping[str, Differences]
) -> list[ArmVerdict]:
    """Judge every arm against the base by one measure, with Holm's correction."""
    base_values = [measure.value(cell) for cell in runs[base]]
    differences = {
        name: verdict.compare_pairs(
            [measure.value(cell) for cell in cells], base_values, measure.prompts
        )
        for name, cells in runs.items()
        if name != base
    }
    verdict.adjust_by_holm(differences)
    return [
        make_verdict(measure, (name, base), differences[name], runs, differs.get(name, {}))
        for name in differences
    ]


class ArmVerdict(msgspec.Struct, frozen=True):
    """One arm against the base by one measure, in the form of the JSON."""

    arm: str
    against: str
    metric: str
    difference: float
    interval: list[float]  # 95 %, over other seeds
    interval_holm: list[float]  # the same with Holm's correction, as p and the verdict
    verdict: str  # equal, better, worse, no difference visible
    p: float  # with Holm's correction
    interval_other_prompts: list[float]
    detectable: float  # the difference that as many seeds show with 80 % power
    differs: Differences  # resolved config: key -> its value in `against`, and in `arm`
    text: str


def make_verdict(
    measure: ArmMeasure,
    pair: tuple[str, str],
    difference: verdict.PairedDifference,
    runs: Runs,
    differs: Differences,
) -> ArmVerdict:
    """Build the verdict on one difference; runs with the same weights are equal.

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
        difference=difference.mean,
        interval=[difference.low, difference.high],
        interval_holm=[difference.holm_low, difference.holm_high],
        verdict="equal" if same else difference.choose_word(),
        p=difference.adjusted,
        interval_other_prompts=[difference.prompt_low, difference.prompt_high],
        detectable=verdict.find_detectable(difference.sd, difference.seeds),
        differs=differs,
        text=f"{name} is bitwise equal to {base}"
        if same
        else verdict.state_verdict(name, base, difference, measure.description),
    )


def describe_tradeoff(name: str, arm: ArmSummary, base_name: str, base: ArmSummary) -> str:
    """Describe an arm's speed and reward relative to the base."""
    comparable = not arm.warm and not base.warm
    speed = base.wall_s / max(arm.wall_s, 1e-9)
    speed_text = (
        f"{speed:.2f} times the speed of {base_name}"
        if comparable
        else "run in a warm process, so its speed is not comparable"
    )
    return (
        f"{name}: {speed_text}, reward {arm.heldout_end - base.heldout_end:+.3f}; "
        f"{describe_target_time(arm, base, base_name, comparable)}"
    )


def describe_target_time(arm: ArmSummary, base: ArmSummary, name: str, comparable: bool) -> str:
    """Describe the time at which an arm reached the target reward, relative to the base."""
    goal = f"{arm.target:.3f}"
    missed = len(arm.each) - arm.reached
    if not arm.reached or not base.reached:
        return f"reward {goal} was never reached" + (
            "" if arm.reached == base.reached else f" by {name}" if arm.reached else ""
        )
    text = f"reward {goal} at batch {arm.steps_to_target:.0f} ({name} {base.steps_to_target:.0f})"
    text += (
        f", after {arm.seconds_to_target:.0f} s ({base.seconds_to_target:.0f})"
        if comparable
        else ""
    )
    return text + (f", never in {missed} of {len(arm.each)} runs" if missed else "")


def analyze(cells: Sequence[CellResult], configs: dict[str, Config]) -> dict[str, Any]:
    """Return the content of the report and of `--json`.

    The other arms are compared with the first.
    """
    base, *other_names = configs
    runs = {
        name: sorted((cell for cell in cells if cell.arm == name), key=lambda cell: cell.seed)
        for name in configs
    }
    differs = compare_with_first(configs)
    target = TARGET * average([cell.final for cell in runs[base]])
    arms = {name: summarize_arm(runs[name], config, target) for name, config in configs.items()}
    apart = {
        name: [
            describe_data_difference(cell, other)
            for cell, other in zip(runs[name], runs[base], strict=True)
        ]
        for name in other_names
    }
    return {
        "arms": {name: asdict(arm) for name, arm in arms.items()},
        "verdicts": [
            asdict(judged)
            for measure in list_measures(cells, configs[base])
            for judged in judge_arms(measure, runs, base, differs)
        ],
        "seeds": sorted({cell.seed for cell in cells}),
        "same_data": {name: [not text for text in texts] for name, texts in apart.items()},
        "data_apart": apart,
        "trade": [describe_tradeoff(name, arms[name], base, arms[base]) for name in other_names],
    }
