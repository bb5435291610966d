"""Describe what limited a run's speed, whether staleness hurt, and what to try next.

docs/watch.md lists what the rules find.
"""

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl.config.tree import Config
from asyncrl.contract.toml_writer import read_table
from asyncrl.records import jsonl, process_log, trackers
from asyncrl.records.health_checks import Finding, Rows, exceeds_chance, make_finding, match_rules
from asyncrl.records.jsonl import JsonObject
from asyncrl.supervise.report.plots import Series

PREDICTION = "what_if.json"  # predictions of `asyncrl simulate`, written by `asyncrl report`
CHECKS = "health.jsonl"  # health checks with the step at which each first fired

WINDOW = 20  # number of newest batches that a rule uses
LEAST = 8  # number of batches that a rule needs
AVERAGES: dict[str, list[str]] = read_table(__file__)["averages"]


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
    rows = facts.series.get_column("reward/mean").rows
    if facts.ended:
        rows = rows[: max(0, len(rows) - 1 - (facts.max_lag or 0))]
    return rows[-WINDOW:] if len(rows) >= LEAST else rows[:0]


def average_recent(facts: Facts, name: str, time_name: str = "") -> float | None:
    """Return a metric's mean over the newest batches that have it, or None without any.

    A share of `time_name` is weighted by that time: idle time over all time."""
    batches = select_batches(facts)
    values = facts.series.align(name)[batches]
    weights = np.ones(len(batches))
    if time_name in facts.series.columns:
        weights = facts.series.align(time_name, 0.0)[batches]
    known = np.isfinite(values)
    if not known.any():
        return None
    return float(values[known] @ weights[known] / max(weights[known].sum(), 1e-9))


def collect_values(facts: Facts) -> JsonObject:
    """Collect what the rules on speed and staleness compare, and the texts that they name."""
    averages = {key: average_recent(facts, *names) for key, names in AVERAGES.items()}
    values: JsonObject = {key: x for key, x in averages.items() if x is not None}
    limit = facts.max_lag
    if limit is not None:
        values["limit"] = limit
    values["lower"] = f"staleness.max_lag (now {limit})" if limit else "the learning rate"
    values["other_waits"] = values.get("generator", 0.0) / 2 - values.get("rewards", 0.0)
    values["loss"] = 1 - values.get("ess", 1.0)
    values |= {"comparison": "", "dominance": inf}
    if values.keys() >= {"stale", "engine"}:
        stale, engine = values["stale"], values["engine"]
        values["excess"] = engine - stale
        values["dominance"] = stale / engine if engine else inf
        values["comparison"] = (
            f"; staleness is {stale:.1e} nats a token of the log ratio, engine mismatch "
            f"{engine:.1e}"
        )
    more = facts.generators + 1
    values["proposal"] = f"add a generator (generators = {more})"
    threads = facts.threads[0] + more * facts.threads[1]
    if facts.cores is not None and threads > facts.cores:
        values["proposal"] += (
            f" on a machine with more cores (here {threads} threads would share {facts.cores} "
            "cores)"
        )
    for rule, option, question in (
        ("learner_waits", "--more 1", "what one more would give"),
        ("both_wait", f"--limit {(limit or 0) + 1}", "what that would give"),
    ):
        values[rule] = f"; `asyncrl simulate CONFIG --from RUN {option}` predicts {question}"
        if prediction := facts.predicted.get(rule):
            values[rule] = f". Simulated with the times of this run: {prediction}"
    return values


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
        said = f"{accuracies}; it was {values[best]:.3f} at evaluation {best + 1} of {len(values)}"
        return [make_finding("accuracy_fell", said)]
    return [Finding("accuracy", accuracies)]


def apply_rules(facts: Facts) -> list[Finding]:
    """Return what the rules find: learning, speed, staleness."""
    values = collect_values(facts)
    recent = [*match_rules("speed", values)[:1], *match_rules("staleness", values)]
    steps = facts.series.axes["step"].values[select_batches(facts)]
    return [
        *check_learning(facts),
        *(
            finding._replace(said=f"{finding.said} (steps {steps[0]:.0f} to {steps[-1]:.0f})")
            for finding in recent
        ),
    ]


def list_fired_checks(run_dir: Path, signs: Rows) -> list[Finding]:
    """Return the health checks that fired, each once, with the step if it is known.

    signs: the health checks in the run's summary.
    """
    recorded: dict[str, Mapping[str, Any]] = {}
    for row in jsonl.read(run_dir / CHECKS):
        recorded.setdefault(str(row.get("name")), row)
    return [
        Finding(
            f"check {name}",
            f"health check {name} fired"
            + (f" at step {recorded[name]['step']}" if name in recorded else "")
            + f": {sign['said']}",
            sign["try_this"],
        )
        for name, sign in (recorded | {sign["name"]: sign for sign in signs}).items()
    ]


def list_advice(
    config: Config | None,
    run_dir: Path,
    *,
    ended: bool,
    series: Series | None = None,
    signs: Rows | None = None,
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
    limit = config.staleness.limit if config else inf
    facts = Facts(
        series,
        int(limit) if limit < inf else None,
        config.generators if config else 1,
        ended,
        jsonl.read_object(run_dir / PREDICTION),
    )
    if config and not config.generator.gpus:
        facts = facts._replace(
            cores=process_log.find_shared_cores(run_dir),
            threads=(config.learner.thread_count, config.generator.threads),
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
