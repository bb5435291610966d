"""Metrics of committed batches, of the generators between commits, and of the whole run.

Pure functions without sockets or clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from asyncrl.config.tree import RecordConfig
from asyncrl.contract.admission import AdaptiveLimit
from asyncrl.contract.messages import Batch, Trajectory
from buffer.store import Store
from buffer.training_log import TrainingLog, mean, quantile

# sums that a generator reports, counted since its start
SUMS = (
    *(f"generator/{name}" for name in ("tokens", "busy_s", "idle_s", "swap_s", "reward_idle_s")),
    "reward/judged",
    "reward/waited_s",
    "reward/called_s",
    "prefix/hits",
    "prefix/reused_tokens",
    "prefix/encoded_tokens",
    "draft/proposed",
    "draft/accepted",
    "link/fetch_s",
    "link/fetched_mb",
    "link/acked",
    "link/ack_waited_s",
)


def batch_metrics(batch: Batch, counts: dict[int, int]) -> dict[str, float]:
    """Metrics of a trained batch: lag, length of its samples, parts of their rewards.

    counts: trained tokens by lag."""
    sample_count = max(len(batch.lags), 1)
    parts: dict[str, list[float]] = {}
    for sample in batch.samples:
        for name, value in sample.reward_parts.items():
            parts.setdefault(f"reward_part/{name}", []).append(value)
    return (
        {
            "lag/mean": mean(counts),
            "lag/max": max(counts, default=0),
            "lag/p95": quantile(counts, 0.95),
            "lag/in_flight": sum(batch.in_flight) / sample_count,
            "lag/in_queue": (sum(batch.lags) - sum(batch.in_flight)) / sample_count,
            "answer/length": sum(sample.length for sample in batch.samples) / sample_count,
        }
        | {name: sum(values) / len(values) for name, values in parts.items()}
        | task_metrics(batch)
    )


def task_metrics(batch: Batch) -> dict[str, float]:
    """Metrics of each task of a mixture in a trained batch; {} without one."""
    positions: dict[str, list[int]] = {}
    for position, title in enumerate(batch.tasks):
        positions.setdefault(title, []).append(position)
    metrics: dict[str, float] = {}
    for title, mine in positions.items():
        samples = [batch.samples[position] for position in mine]
        runs = [run for position in mine for run in batch.token_lags[position]]
        tokens = sum(end - start for start, end, _ in runs)
        metrics |= {
            f"task/{title}_share": len(mine) / len(batch.tasks),
            f"task/{title}_reward": sum(sample.reward for sample in samples) / len(mine),
            f"task/{title}_length": sum(sample.length for sample in samples) / len(mine),
            f"task/{title}_lag": sum((end - start) * lag for start, end, lag in runs)
            / max(tokens, 1),
        }
    return metrics


def limit_metrics(store: Store, before: AdaptiveLimit) -> dict[str, float]:
    """Metrics of an adaptive limit after a commit, with the reason if the commit moved it.

    before: the limit before the commit.
    Returns {} for a constant limit."""
    now = store.limit
    if not store.settings.ess_floor:
        return {}
    moved = {"limit/before": now.before, "limit/ess": now.ess, "limit/idle": now.idle}
    return {"limit/now": now.now} | (moved if now.now != before.now else {})


def window_metrics(store: Store) -> dict[str, float]:
    """Metrics of the admission window after a commit; {} if the limit is always filled."""
    if not store.settings.wait:
        return {}
    window = store.window
    return {
        "window/now": store.current_window(),
        "window/wait": window.wait,
        "window/lower": max(0.0, window.lower - window.size),
    }


def sample_rows(batch: Batch, record: RecordConfig) -> Iterator[dict[str, Any]]:
    """Rows of samples.jsonl: some samples of every `samples_every`-th batch, evenly spaced."""
    if not record.samples_every or batch.number % record.samples_every:
        return
    wanted = record.samples or len(batch.samples)
    stride = max(1, len(batch.samples) // wanted)
    yield from batch_rows(batch, range(len(batch.samples))[::stride][:wanted])


def batch_rows(batch: Batch, positions: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Samples of a batch as JSON rows for people to read; by default all.

    JSON needs many times the memory of the arrays: pass `positions` for large batches."""
    positions = range(len(batch.samples)) if positions is None else positions
    return [
        {
            "batch": batch.number,
            "ticket": sample.ticket,
            "sample": sample.sample,
            "attempt": sample.attempt,
            **({"task": batch.tasks[position]} if batch.tasks else {}),
            "prompt": sample.prompt_text,
            "text": sample.text,
            "reward": sample.reward,
            "parts": sample.reward_parts,
            "finish": sample.finish,
            "lag": lag,
            "versions": [[str(span.label), span.start, span.end] for span in sample.spans],
            "digests": [span.digest for span in sample.spans],
            "prompt_tokens": memoryview(sample.prompt_tokens).cast("i").tolist(),
            "tokens": memoryview(sample.tokens).cast("i").tolist(),
            "logprobs": memoryview(sample.behavior_logprobs).cast("f").tolist(),
        }
        | ({"images": sample.images} if sample.images else {})
        | (_session_fields(sample) if sample.calls else {})
        for position, sample, lag in ((i, batch.samples[i], batch.lags[i]) for i in positions)
    ]


def _session_fields(sample: Trajectory) -> dict[str, Any]:
    """The fields that only a session has: calls, excluded tokens, mask, further sequences."""
    rows = [
        {
            "prompt_tokens": memoryview(row.prompt_tokens).cast("i").tolist(),
            "tokens": memoryview(row.tokens).cast("i").tolist(),
            "logprobs": memoryview(row.behavior_logprobs).cast("f").tolist(),
            "mask": list(row.mask),
            "versions": [[str(span.label), span.start, span.end] for span in row.spans],
        }
        for row in sample.rows
    ]
    return {
        "calls": sample.calls,
        "aside": sample.aside,
        "mask": list(sample.mask),
        "rows": rows,
    }


def new_totals(generators: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Growth of each of SUMS over the generators since the last call.

    Each generator's entry remembers the values that were counted."""
    totals = dict.fromkeys(SUMS, 0.0)
    for entry in generators:
        counted = entry.setdefault("counted", {})
        for name in SUMS:
            value = entry["stats"].get(name, 0.0)
            totals[name] += max(0.0, value - counted.get(name, 0.0))
            counted[name] = value
    return {name.partition("/")[2]: value for name, value in totals.items()}


def reward_metrics(
    stats: Sequence[Mapping[str, float]], totals: Mapping[str, float], spent: float
) -> dict[str, float]:
    """Metrics of the reward processes, {} if there are none.

    stats: the generators' numbers. totals: their growth since the last step. spent: seconds of all
    generators since the last step."""
    judging = [entry for entry in stats if "reward/workers" in entry]
    if not judging:
        return {}
    now = {
        name: sum(entry.get(name, 0.0) for entry in judging)
        for name in ("reward/queue", "reward/workers")
    }
    judged = totals["judged"]
    means = {}
    if judged:
        means = {
            "reward/wait_s": totals["waited_s"] / judged,
            "reward/call_s": totals["called_s"] / judged,
        }
    return now | means | {"time/reward_wait_share": min(1.0, totals["reward_idle_s"] / spent)}


def engine_metrics(
    stats: Sequence[Mapping[str, float]], totals: Mapping[str, float]
) -> dict[str, float]:
    """Metrics of the engines' prefix caches and drafts, {} if there are none.

    totals: growth of the sums since the last step."""
    reported = {name for entry in stats for name in entry}
    names = [name for name in SUMS if name in reported and name.startswith(("prefix/", "draft/"))]
    return {name: totals[name.partition("/")[2]] for name in names}


def judge_metrics(machines: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """Numbers of the judge's requests in the whole run.

    machines: (machine, numbers) of each generator. All generators of a machine report the same
    budget, so that only the newest report of each machine counts.

    >>> here = [("a", {"judge/requests": 3.0}), ("a", {"judge/requests": 5.0, "x": 1.0})]
    >>> judge_metrics([*here, ("b", {"judge/requests": 2.0, "judge/requests_left": 98.0})])
    {'judge/requests': 7.0, 'judge/requests_left': 98.0}
    """
    newest: dict[tuple[str, str], float] = {}
    for machine, stats in machines:
        for name, value in stats.items():
            if name.startswith("judge/"):
                better = min if name.endswith("_left") else max
                newest[name, machine] = better(newest.get((name, machine), value), value)
    totals: dict[str, float] = {}
    for (name, _), value in newest.items():
        totals[name] = totals.get(name, 0.0) + value
    return totals


def link_metrics(totals: Mapping[str, float], spent: float) -> dict[str, float]:
    """Metrics of the connections to the generators, and of weights that come over a socket.

    totals: growth of the sums since the last step. spent: seconds of all generators since then."""
    link = {}
    if totals["acked"]:
        link["link/ack_s"] = totals["ack_waited_s"] / totals["acked"]
    if totals["fetched_mb"]:
        link["link/fetch_share"] = min(1.0, totals["fetch_s"] / spent)
        link["link/fetch_mb_per_s"] = totals["fetched_mb"] / totals["fetch_s"]
    return link


def summary(store: Store, trained: TrainingLog, wall_s: float) -> dict[str, Any]:
    """The summary of the run from the store and the training log."""
    results = store.evaluations.results
    evaluated = sorted(number for split, number in results if split == "heldout")

    def value(split: str, number: int | None) -> float | None:
        if number is None or (split, number) not in results:
            return None
        return results[split, number][f"eval/{split}"]

    ledger = store.ledger()
    lags = trained.lags()
    return {
        "wall_s": wall_s,
        "steps": store.committed,
        "trajectories": trained.samples(),
        "tokens": sum(lags.values()),
        "heldout_start": value("heldout", 0),
        "heldout_end": value("heldout", evaluated[-1] if evaluated else None),
        "ood_start": value("ood", 0),
        "ood_end": value("ood", store.settings.steps),
        "lag": {"mean": mean(lags), "p95": quantile(lags, 0.95), "max": max(lags, default=0)},
        "ledger": {"generated": store.generated_tokens()}
        | {name: int(line["tokens"]) for name, line in ledger.items()},
        "ledger_lines": ledger,
        "ledger_by_task": {title: part.totals() for title, part in store.ledgers_by_task().items()},
        "trained_ids": trained.ids(),
        "failures": store.failures,
        "lag_histogram": {str(lag): tokens for lag, tokens in sorted(lags.items())},
    }
