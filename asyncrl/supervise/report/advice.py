"""Describe what limited a run's speed, whether staleness hurt, and what to try next.

docs/watch.md lists what the rules find.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl.config.tree import Config
from asyncrl.records import jsonl, process_log, trackers
from asyncrl.records.health_checks import Finding, exceeds_chance
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
IDLE = 0.15  # idle share from which a side counts as waiting
LOW_ESS = 0.5
HIGH_ESS = 0.9
STALENESS_SHARE = 2.0  # smallest ratio of the staleness part to the mismatch


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


def check_speed(facts: Facts) -> list[Finding]:
    """Find what limits the speed: rewards, one side, or both sides in turn."""
    learner, generator, rewards = (average_recent(facts, name) for name in TIMES)
    if rewards is not None and rewards >= IDLE:
        return [
            Finding(
                "rewards_wait",
                f"rewards limit the speed: generators wait for them {rewards:.0%} of the time",
                "add reward processes (reward.workers), or raise staleness.max_lag so that more "
                "samples are in flight",
            )
        ]
    if learner is None or generator is None:
        return []
    if min(learner, generator) >= IDLE:
        limit = facts.max_lag
        remedy = (
            f"raise staleness.max_lag (now {limit})"
            + _describe_prediction(
                facts, "both_wait", f"--limit {limit + 1}", "what that would give"
            )
            if limit is not None and limit < 2
            else "look for what delays both: swaps of weights (time/swap), publication "
            "(time/publish)"
        )
        said = (
            f"learner and generators wait for each other: {learner:.0%} and {generator:.0%} of "
            "their time"
        )
        return [Finding("both_wait", said, remedy)]
    if learner >= IDLE:
        return [
            Finding(
                "learner_waits",
                f"generation limits the speed: the learner waits {learner:.0%} of its time, the "
                f"generators {generator:.0%}",
                f"{_propose_generator(facts)}, or shorten what is generated "
                "(generator.max_new_tokens)"
                + _describe_prediction(
                    facts, "learner_waits", "--more 1", "what one more would give"
                ),
            )
        ]
    if generator < IDLE:
        said = (
            f"both sides are busy: the learner waits {learner:.0%}, the generators {generator:.0%}"
        )
        return [Finding("balanced", said)]
    if rewards is not None and rewards > generator / 2:
        return []
    return [
        Finding(
            "generators_wait",
            f"training limits the speed: the generators wait {generator:.0%} of their time, the "
            f"learner {learner:.0%}",
            "a higher limit would not help: it would only make samples older. Give the learner "
            "more cores or devices (learner.threads, learner.ranks), or use fewer generators",
        )
    ]


def check_staleness(facts: Facts) -> list[Finding]:
    """Find whether lag hurts, by the effective sample size, and whether it is the larger part."""
    ess, lag, stale, engine = (
        average_recent(facts, name)
        for name in ("is/ess", "lag/mean", "split/staleness_k3", "split/mismatch_k3")
    )
    mismatch, comparison, is_staleness = [], "", True
    if stale is not None and engine is not None:
        comparison = (
            f"; staleness is {stale:.1e} nats a token of the log ratio, engine mismatch "
            f"{engine:.1e}"
        )
        is_staleness = stale >= STALENESS_SHARE * engine
        if engine >= max(1e-4, stale):
            said = (
                f"engine mismatch ({engine:.1e} nats a token) is larger than staleness "
                f"({stale:.1e})"
            )
            remedy = (
                "use the same dtype in engine and learner, or exact mode; a lower limit would not "
                "help"
            )
            mismatch = [Finding("mismatch_dominates", said, remedy)]
    if ess is None or lag is None or lag < 0.5:
        return mismatch
    if ess <= LOW_ESS and is_staleness:
        limit = facts.max_lag
        lower = f"lower staleness.max_lag (now {limit})" if limit else "lower the learning rate"
        return [
            Finding(
                "staleness_hurts",
                f"staleness costs much: at a mean lag of {lag:.2f} the effective sample size is "
                f"{ess:.0%} of the batch{comparison}",
                f"{lower}, lower learner.lr, or compare with a method made for lag: "
                "`asyncrl compare CONFIG --arm gmpo --arm vespo`",
            ),
            *mismatch,
        ]
    if ess < HIGH_ESS:
        return mismatch
    said = (
        f"staleness costs little: samples are {lag:.2f} versions old on average, and importance "
        f"ratios leave {ess:.0%} of the batch as effective sample size"
    )
    return [*mismatch, Finding("staleness_harmless", said)]


def check_learning(facts: Facts) -> list[Finding]:
    """Compare the held-out reward of the last evaluation with the first and the best."""
    values = facts.series.get_values("eval/heldout")
    if len(values) < 2:
        return []
    best = int(np.argmax(values))
    drop = values[best] - values[-1]
    count = facts.series.get_latest("eval/heldout_n") or 1.0
    lo, hi = facts.series.find_reward_range()
    has_fallen = exceeds_chance((values[best], count), (values[-1], count), lo, hi)
    accuracies = f"held-out reward {values[0]:.3f} at the start, {values[-1]:.3f} now"
    if best < len(values) - 1 and drop > 0.02 * (hi - lo) and has_fallen:
        return [
            Finding(
                "accuracy_fell",
                f"{accuracies}; it was {values[best]:.3f} at evaluation {best + 1} of "
                f"{len(values)}",
                "take the checkpoint of that time; lower learner.lr, or add a KL term (kl.loss)",
            )
        ]
    return [Finding("accuracy", accuracies)]


def apply_rules(facts: Facts) -> list[Finding]:
    """Return what the rules find: learning, speed, staleness."""
    recent = [*check_speed(facts), *check_staleness(facts)]
    steps = facts.series.axes["step"].values[select_batches(facts)]
    return [
        *check_learning(facts),
        *(
            finding._replace(said=f"{finding.said} (steps {steps[0]:.0f} to {steps[-1]:.0f})")
            for finding in recent
        ),
    ]


def record_check(run_dir: Path, finding: Finding, step: int) -> None:
    """Record when a health check fired; ignore a directory that cannot be written."""
    try:
        with (run_dir / CHECKS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finding._asdict()}) + "\n")
    except OSError:
        pass


def list_fired_checks(run_dir: Path, signs: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return the health checks that fired, each once, with the step if it is known.

    signs: the health checks in the run's summary.
    """
    recorded: dict[str, Mapping[str, Any]] = {}
    for row in jsonl.read(run_dir / CHECKS):
        recorded.setdefault(str(row.get("name")), row)
    current = {sign["name"]: sign for sign in signs}
    return [
        Finding(
            f"check {name}",
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
) -> tuple[list[Finding], list[Finding]]:
    """Return the first lines about a run: advice, and the health checks that fired.

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
        Finding(
            f"tracker {name}",
            f"the tracker {name} failed, and the run goes on without it: {reason}",
            f"look into {run_dir / 'logs' / f'tracker_{name}.log'}",
        )
        for name, reason in trackers.read_failures(run_dir).items()
    ]
    return apply_rules(facts), [*list_fired_checks(run_dir, signs), *failed_trackers]
