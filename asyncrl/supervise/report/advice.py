"""Describe what limited a run's speed, whether staleness hurt, and what to try next.

Each rule is a function of the run that returns a sentence or None. docs/watch.md lists them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl.config.tree import Config
from asyncrl.records import jsonl, process_log, trackers
from asyncrl.records.health_checks import HealthFinding, exceeds_chance, find_reward_range
from asyncrl.supervise.report.series import Series

PREDICTION = "what_if.json"  # predictions of `asyncrl simulate`, written by `asyncrl report`
CHECKS = "health.jsonl"  # health checks with the step at which each first fired

WINDOW = 20  # number of newest batches that a rule uses
LEAST = 8  # number of batches that a rule needs
TIMES = {  # share of time -> the time that it is of
    "time/learner_idle_share": "time/step",
    "time/generator_idle_share": "time/generators",
    "time/reward_wait_share": "time/generators",
}
BUSY = 0.05  # idle share below which a side counts as busy
IDLE = 0.15  # idle share from which a side counts as waiting
LOW_ESS = 0.5
STALENESS_SHARE = 2.0  # smallest ratio of the staleness part to the mismatch


class Advice(NamedTuple):
    """A sentence about a run.

    rule: the name in docs/watch.md.
    about: speed, staleness, learning, or health (a health check that fired).
    said: the observation, with its numbers.
    try_this: the recommendation, or "".
    """

    rule: str
    about: str
    said: str
    try_this: str

    def format_line(self) -> str:
        return f"{self.said}. To try: {self.try_this}" if self.try_this else self.said


class Facts(NamedTuple):
    """Inputs of the rules: the run's metrics and two of its settings.

    ended: all steps are made. The last batches then do not count: generators had no more tickets.
    predicted: rule -> prediction of a simulation with the run's own times for its proposal.
    cores: that learner and generators share; None: unknown, or they have several machines.
    threads: of the learner and of one generator.
    """

    series: Series
    max_lag: int | None
    generators: int
    ended: bool = False
    predicted: Mapping[str, str] = {}
    cores: int | None = None
    threads: tuple[int, int] = (1, 1)


def select_batches(facts: Facts) -> np.ndarray:
    """Return the row numbers of the newest WINDOW batches, int64 [n]; none for fewer than LEAST."""
    trained = facts.series.columns.get("reward/mean")
    rows = trained.rows if trained is not None else np.zeros(0, np.int64)
    if facts.ended:
        rows = rows[: max(0, len(rows) - 1 - (facts.max_lag or 0))]
    return rows[-WINDOW:] if len(rows) >= LEAST else rows[:0]


def average_recent(facts: Facts, name: str) -> float | None:
    """Return a metric's mean over the newest batches that have it, or None without any.

    Shares of time are weighted by the time: idle time over all time."""
    columns, batches = facts.series.columns, select_batches(facts)
    if name not in columns:
        return None
    recent = np.isin(columns[name].rows, batches)
    if not recent.any():
        return None
    whole = columns.get(TIMES.get(name, ""))
    if whole is None:
        return float(columns[name].values[recent].mean())
    known = dict(zip(whole.rows.tolist(), whole.values.tolist(), strict=True))
    weights = [known.get(row, 0.0) for row in columns[name].rows[recent].tolist()]
    return float(columns[name].values[recent] @ weights / max(sum(weights), 1e-9))


def _describe_prediction(facts: Facts, rule: str, option: str, question: str) -> str:
    """Return the prediction of a simulation for a rule's proposal, or how to get one."""
    if prediction := facts.predicted.get(rule):
        return f". Simulated with the times of this run: {prediction}"
    return f"; `asyncrl simulate CONFIG --from RUN {option}` predicts {question}"


def _propose_generator(facts: Facts) -> str:
    """Return the proposal of one more generator, with the cores that it would have to share."""
    proposal = f"add a generator (generators = {facts.generators + 1})"
    learner, generator = facts.threads
    threads = learner + (facts.generators + 1) * generator
    if facts.cores is None or threads <= facts.cores:
        return proposal
    return (
        f"{proposal} on a machine with more cores (here {threads} threads would share "
        f"{facts.cores} cores)"
    )


def check_learner_waits(facts: Facts) -> Advice | None:
    """The learner waits for samples while the generators are busy."""
    learner = average_recent(facts, "time/learner_idle_share")
    generator = average_recent(facts, "time/generator_idle_share")
    rewards = average_recent(facts, "time/reward_wait_share") or 0.0
    if learner is None or generator is None or learner < IDLE or rewards > IDLE:
        return None
    if generator > BUSY + IDLE:
        return None
    return Advice(
        "learner_waits",
        "speed",
        f"generation limits the speed: the learner waits {learner:.0%} of its time, the "
        f"generators {generator:.0%}",
        f"{_propose_generator(facts)}, or shorten what is generated (generator.max_new_tokens)"
        + _describe_prediction(facts, "learner_waits", "--more 1", "what one more would give"),
    )


def check_generators_wait(facts: Facts) -> Advice | None:
    """The generators wait for tickets while the learner is busy."""
    learner = average_recent(facts, "time/learner_idle_share")
    generator = average_recent(facts, "time/generator_idle_share")
    rewards = average_recent(facts, "time/reward_wait_share") or 0.0
    if learner is None or generator is None or generator < IDLE or learner > BUSY + IDLE:
        return None
    if rewards > generator / 2:
        return None
    return Advice(
        "generators_wait",
        "speed",
        f"training limits the speed: the generators wait {generator:.0%} of their time, the "
        f"learner {learner:.0%}",
        "a higher limit would not help: it would only make samples older. Give the learner more "
        "cores or devices (learner.threads, learner.ranks), or use fewer generators",
    )


def check_rewards_wait(facts: Facts) -> Advice | None:
    """Generators wait for rewards."""
    rewards = average_recent(facts, "time/reward_wait_share")
    if rewards is None or rewards < IDLE:
        return None
    return Advice(
        "rewards_wait",
        "speed",
        f"rewards limit the speed: generators wait for them {rewards:.0%} of the time",
        "add reward processes (reward.workers), or raise staleness.max_lag so that more samples "
        "are in flight",
    )


def check_both_wait(facts: Facts) -> Advice | None:
    """Both sides wait in turn, as in synchronous training."""
    learner = average_recent(facts, "time/learner_idle_share")
    generator = average_recent(facts, "time/generator_idle_share")
    if learner is None or generator is None or min(learner, generator) < IDLE:
        return None
    if (average_recent(facts, "time/reward_wait_share") or 0.0) > IDLE:
        return None
    limit = facts.max_lag
    remedy = (
        f"raise staleness.max_lag (now {limit})"
        + _describe_prediction(facts, "both_wait", f"--limit {limit + 1}", "what that would give")
        if limit is not None and limit < 2
        else "look for what delays both: swaps of weights (time/swap), publication (time/publish)"
    )
    return Advice(
        "both_wait",
        "speed",
        f"learner and generators wait for each other: {learner:.0%} and {generator:.0%} of their "
        "time",
        remedy,
    )


def check_balanced(facts: Facts) -> Advice | None:
    """Neither side waits much."""
    learner = average_recent(facts, "time/learner_idle_share")
    generator = average_recent(facts, "time/generator_idle_share")
    if learner is None or generator is None or max(learner, generator) >= IDLE:
        return None
    return Advice(
        "balanced",
        "speed",
        f"both sides are busy: the learner waits {learner:.0%}, the generators {generator:.0%}",
        "",
    )


def check_staleness_harmless(facts: Facts) -> Advice | None:
    """The effective sample size shows that lag costs little."""
    ess, lag = average_recent(facts, "is/ess"), average_recent(facts, "lag/mean")
    if ess is None or lag is None or ess < 0.9 or lag < 0.5:
        return None
    return Advice(
        "staleness_harmless",
        "staleness",
        f"staleness costs little: samples are {lag:.2f} versions old on average, and importance "
        f"ratios leave {ess:.0%} of the batch as effective sample size",
        "",
    )


def check_staleness_hurts(facts: Facts) -> Advice | None:
    """The effective sample size has fallen, and staleness is the larger part of the ratio."""
    ess, lag = average_recent(facts, "is/ess"), average_recent(facts, "lag/mean")
    if ess is None or lag is None or ess > LOW_ESS or lag < 0.5:
        return None
    stale = average_recent(facts, "split/staleness_k3")
    engine = average_recent(facts, "split/mismatch_k3")
    if stale is not None and engine is not None and stale < STALENESS_SHARE * engine:
        return None
    comparison = (
        f"; staleness is {stale:.1e} nats a token of the log ratio, engine mismatch {engine:.1e}"
        if stale is not None and engine is not None
        else ""
    )
    limit = facts.max_lag
    lower = f"lower staleness.max_lag (now {limit})" if limit else "lower the learning rate"
    return Advice(
        "staleness_hurts",
        "staleness",
        f"staleness costs much: at a mean lag of {lag:.2f} the effective sample size is {ess:.0%} "
        f"of the batch{comparison}",
        f"{lower}, lower learner.lr, or compare with a method made for lag: "
        "`asyncrl compare CONFIG --arm gmpo --arm vespo`",
    )


def check_mismatch_dominates(facts: Facts) -> Advice | None:
    """Engine mismatch, not staleness, is the larger part of the log ratio."""
    stale = average_recent(facts, "split/staleness_k3")
    engine = average_recent(facts, "split/mismatch_k3")
    if stale is None or engine is None or engine < 1e-4 or engine < stale:
        return None
    return Advice(
        "mismatch_dominates",
        "staleness",
        f"engine mismatch ({engine:.1e} nats a token) is larger than staleness ({stale:.1e})",
        "use the same dtype in engine and learner, or exact mode; a lower limit would not help",
    )


def check_learning(facts: Facts) -> Advice | None:
    """Held-out reward from the first to the last evaluation."""
    values = facts.series.get_values("eval/heldout")
    if len(values) < 2:
        return None
    best = int(np.argmax(values))
    drop = values[best] - values[-1]
    count = facts.series.get_latest("eval/heldout_n") or 1.0
    rewards = [v for k in ("reward/min", "reward/max") for v in facts.series.get_values(k)]
    lo, hi = find_reward_range([*values, *rewards])
    has_fallen = exceeds_chance((values[best], count), (values[-1], count), lo, hi)
    accuracies = f"held-out reward {values[0]:.3f} at the start, {values[-1]:.3f} now"
    if best < len(values) - 1 and drop > 0.02 * (hi - lo) and has_fallen:
        return Advice(
            "accuracy_fell",
            "learning",
            f"{accuracies}; it was {values[best]:.3f} at evaluation {best + 1} of {len(values)}",
            "take the checkpoint of that time; lower learner.lr, or add a KL term (kl.loss)",
        )
    return Advice("accuracy", "learning", accuracies, "")


RULES: tuple[Callable[[Facts], Advice | None], ...] = (
    check_learning,
    check_rewards_wait,
    check_both_wait,
    check_learner_waits,
    check_generators_wait,
    check_balanced,
    check_staleness_hurts,
    check_mismatch_dominates,
    check_staleness_harmless,
)


def apply_rules(facts: Facts) -> list[Advice]:
    """Return the advice of all rules, but only the first about speed."""
    results: list[Advice] = []
    for rule in RULES:
        result = rule(facts)
        if result is None or any(result.about == other.about == "speed" for other in results):
            continue
        if result.about in ("speed", "staleness"):
            steps = facts.series.axes["step"].values[select_batches(facts)]
            window = f" (steps {steps[0]:.0f} to {steps[-1]:.0f})"
            result = result._replace(said=result.said + window)
        results.append(result)
    return results


def record_check(run_dir: Path, finding: HealthFinding, step: int) -> None:
    """Record when a health check fired; ignore a directory that cannot be written."""
    try:
        with (run_dir / CHECKS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finding._asdict()}) + "\n")
    except OSError:
        pass


def list_fired_checks(run_dir: Path, signs: Sequence[Mapping[str, Any]]) -> list[Advice]:
    """Return the health checks that fired, each once, with the step if it is known.

    signs: the health checks in the run's summary.
    """
    recorded: dict[str, Mapping[str, Any]] = {}
    for row in jsonl.read(run_dir / CHECKS):
        recorded.setdefault(str(row.get("name")), row)
    current = {sign["name"]: sign for sign in signs}
    return [
        Advice(
            f"check {name}",
            "health",
            f"health check {name} fired"
            + (f" at step {recorded[name]['step']}" if name in recorded else "")
            + f": {sign['said']}",
            sign["try_this"],
        )
        for name, sign in (recorded | current).items()
    ]


def list_advice(
    config: Config | None,
    run_dir: Path,
    *,
    ended: bool,
    series: Series | None = None,
    signs: Sequence[Mapping[str, Any]] | None = None,
) -> list[Advice]:
    """Return the first lines about a run: advice, then the health checks that fired.

    config: None if it cannot be read. series, signs: the run's metrics and the health checks of its
    summary; None: read them from the run directory.
    """
    if series is None:
        series = Series(run_dir / "metrics.jsonl")
        series.refresh()
    if signs is None:
        signs = jsonl.read_object(run_dir / "summary.json").get("signs", [])
    limit = config.staleness.limit if config else float("inf")
    facts = Facts(
        series,
        int(limit) if limit != float("inf") else None,
        config.generators if config else 1,
        ended,
        jsonl.read_object(run_dir / PREDICTION),
    )
    if config and not config.generator.gpus:
        facts = facts._replace(
            cores=process_log.find_shared_cores(run_dir),
            threads=(config.learner.ranks * config.learner.threads, config.generator.threads),
        )
    failed_trackers = [
        Advice(
            f"tracker {name}",
            "health",
            f"the tracker {name} failed, and the run goes on without it: {reason}",
            f"look into {run_dir / 'logs' / f'tracker_{name}.log'}",
        )
        for name, reason in trackers.read_failures(run_dir).items()
    ]
    return [*apply_rules(facts), *list_fired_checks(run_dir, signs or []), *failed_trackers]
