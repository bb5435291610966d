"""Numbers of committed batches, of the generators between commits, and of the whole run.

Pure functions without sockets or clock."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from asyncrl.config.tree import RecordConfig
from asyncrl.contract.admission import AdaptiveLimit
from asyncrl.contract.messages import Batch, Numbers, TrainingSequence, Trajectory
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.metrics import METRICS
from buffer.sessions import PeerState
from buffer.store import Store
from buffer.training_log import TrainingLog, describe_lags, mean, quantile

# sums that a generator reports since its start
SUMS = (
    *(f"generator/{name}" for name in ("tokens", "busy_s", "idle_s", "swap_s", "reward_idle_s")),
    "reward/judged",
    "reward/waited_s",
    "reward/called_s",
    "reward/batches",
    "reward/failed_batches",
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
# metrics of one sum as a share of another
RATIOS = (
    ("reward/wait_s", "reward/waited_s", "reward/judged"),
    ("reward/call_s", "reward/called_s", "reward/judged"),
    ("reward/failed_batch_share", "reward/failed_batches", "reward/batches"),
    ("link/ack_s", "link/ack_waited_s", "link/acked"),
    ("link/fetch_mb_per_s", "link/fetched_mb", "link/fetch_s"),
)


def compute_batch_metrics(batch: Batch, counts: dict[int, int]) -> Numbers:
    """Compute the metrics of a trained batch: lag, length of its samples, parts of their rewards.

    counts: trained tokens by lag."""
    sample_count = max(len(batch.lags), 1)
    parts: dict[str, list[float]] = {}
    tokens = old_kv = 0
    for sample in batch.samples:
        for name, value in sample.reward_parts.items():
            parts.setdefault(f"reward_part/{name}", []).append(value)
        for span in sample.list_spans():
            tokens += span.end - span.start
            old_kv += (span.end - span.start) * (span.kv < span.label)
    return (
        {
            "lag/mean": mean(counts),
            "lag/max": max(counts, default=0),
            "lag/p95": quantile(counts, 0.95),
            "lag/in_flight": sum(batch.in_flight) / sample_count,
            "lag/in_queue": (sum(batch.lags) - sum(batch.in_flight)) / sample_count,
            "lag/old_kv_share": old_kv / max(tokens, 1),
            "answer/length": sum(sample.length for sample in batch.samples) / sample_count,
        }
        | {name: sum(values) / len(values) for name, values in parts.items()}
        | compute_task_metrics(batch)
    )


def compute_task_metrics(batch: Batch) -> Numbers:
    """Compute the metrics of each task of a mixture in a trained batch; {} without a mixture."""
    positions: dict[str, list[int]] = {}
    for position, title in enumerate(batch.tasks):
        positions.setdefault(title, []).append(position)
    metrics: Numbers = {}
    for title, task_positions in positions.items():
        samples = [batch.samples[position] for position in task_positions]
        runs = [run for position in task_positions for run in batch.token_lags[position]]
        tokens = sum(end - start for start, end, _ in runs)
        metrics |= {
            f"task/{title}_share": len(samples) / len(batch.tasks),
            f"task/{title}_reward": sum(sample.reward for sample in samples) / len(samples),
            f"task/{title}_length": sum(sample.length for sample in samples) / len(samples),
            f"task/{title}_lag": sum((end - start) * lag for start, end, lag in runs)
            / max(tokens, 1),
        }
    return metrics


def compute_limit_metrics(store: Store, previous: AdaptiveLimit) -> Numbers:
    """Compute the metrics of an adaptive limit and of an admission window after a commit.

    A limit that moved has its reason. A run without either has no metrics of it.

    previous: the limit before the commit."""
    limit, window = store.limit, store.window
    metrics: Numbers = {}
    if store.settings.ess_floor:
        metrics["limit/now"] = limit.now
    if metrics and limit.now != previous.now:
        metrics |= {"limit/before": limit.before, "limit/ess": limit.ess, "limit/idle": limit.idle}
    if store.settings.wait:
        metrics |= {
            "window/now": store.current_window(),
            "window/wait": window.wait,
            "window/lower": max(0.0, window.lower - window.size),
        }
    return metrics


def select_sample_rows(batch: Batch, record: RecordConfig) -> Iterator[JsonObject]:
    """Select rows of samples.jsonl: samples of every `samples_every`-th batch, evenly spaced."""
    if not record.samples_every or batch.number % record.samples_every:
        return
    count = record.samples or len(batch.samples)
    stride = max(1, len(batch.samples) // count)
    yield from make_batch_rows(batch, range(len(batch.samples))[::stride][:count])


def make_batch_rows(batch: Batch, positions: Iterable[int] | None = None) -> list[JsonObject]:
    """Make readable JSON rows of the samples of a batch.

    positions: of the samples; None: all. JSON needs many times the memory of the arrays: choose
        some samples of a large batch."""
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
            "digests": [span.digest for span in sample.spans],
            **_describe_sequence(sample),
        }
        | ({"images": sample.images} if sample.images else {})
        | (
            {
                "calls": sample.calls,
                "aside": sample.aside,
                "mask": list(sample.mask),
                "rows": [_describe_sequence(row) | {"mask": list(row.mask)} for row in sample.rows],
            }
            if sample.calls
            else {}
        )
        for position in positions
        for sample, lag in [(batch.samples[position], batch.lags[position])]
    ]


def _describe_sequence(row: Trajectory | TrainingSequence) -> JsonObject:
    """Describe the tokens of a sequence in JSON."""
    return {
        "versions": [[str(span.label), span.start, span.end] for span in row.spans],
        "prompt_tokens": memoryview(row.prompt_tokens).cast("i").tolist(),
        "tokens": memoryview(row.tokens).cast("i").tolist(),
        "logprobs": memoryview(row.behavior_logprobs).cast("f").tolist(),
    }


def leave_out_wait_for_ticket(values: Numbers, seconds: float) -> None:
    """Shorten the time of a learner's step that began before the first ticket.

    seconds: since the first ticket of this buffer process."""
    step_s, idle_share = values.get("time/step", 0.0), values.get("time/learner_idle_share", 0.0)
    busy_s = step_s * (1 - idle_share)
    if step_s > (seconds := max(seconds, busy_s)) > 0:
        rate = values.get("throughput/learner_tokens_per_s", 0.0) * step_s / seconds
        values["throughput/learner_tokens_per_s"] = rate
        values["time/learner_idle_share"] = 1 - busy_s / seconds
        values["time/step"] = seconds


def sum_growth(generators: Iterable[PeerState]) -> Numbers:
    """Sum the growth of each of SUMS over the generators since the last call."""
    totals = dict.fromkeys(SUMS, 0.0)
    for generator in generators:
        if generator.stats is generator.counted:
            continue  # with a thousand generators, few have sent a report since the last call
        counted = generator.counted or {}
        for name in SUMS:
            growth = generator.stats.get(name, 0.0) - counted.get(name, 0.0)
            totals[name] += max(0.0, growth)
        generator.counted = generator.stats or None
    return totals


def compute_generator_metrics(
    stats: Sequence[Mapping[str, float]], totals: Mapping[str, float], seconds: float
) -> Numbers:
    """Compute the metrics of the generators, their reward processes and their connections.

    stats: the generators' numbers.
    totals: the growth of their sums since their last metrics, `seconds` ago.
    Returns {} if they have not reported since then."""
    spent = totals["generator/busy_s"] + totals["generator/idle_s"]
    if not spent:
        return {}
    metrics = {
        "throughput/generator_tokens_per_s": totals["generator/tokens"] / max(seconds, 1e-9),
        "time/generator_idle_share": totals["generator/idle_s"] / spent,
        "time/generators": spent,
        "time/swap": totals["generator/swap_s"],
    } | {name: totals[part] / totals[whole] for name, part, whole in RATIOS if totals[whole]}
    scoring = [entry for entry in stats if "reward/workers" in entry]
    for name in ("reward/queue", "reward/workers") if scoring else ():
        metrics[name] = sum(entry.get(name, 0.0) for entry in scoring)
        metrics["time/reward_wait_share"] = min(1.0, totals["generator/reward_idle_s"] / spent)
    if totals["link/fetched_mb"]:  # weights came over a socket
        metrics["link/fetch_share"] = min(1.0, totals["link/fetch_s"] / spent)
    of_engines = {
        name for entry in stats for name in entry if name.startswith(("prefix/", "draft/"))
    }
    return metrics | {name: totals[name] for name in SUMS if name in of_engines}


def compute_judge_metrics(machines: Iterable[tuple[str, Mapping[str, float]]]) -> Numbers:
    """Compute the numbers of the judge's requests in the whole run; drop unknown names.

    machines: (machine, numbers) of each generator. All generators of a machine report the same
        budget, so that only the newest report of each machine counts.

    >>> first = [("a", {"judge/requests": 3.0}), ("a", {"judge/requests": 5.0, "x": 1.0})]
    >>> second = ("b", {"judge/requests": 2.0, "judge/requests_left": 98.0})
    >>> compute_judge_metrics([*first, second])
    {'judge/requests': 7.0, 'judge/requests_left': 98.0}
    """
    newest: dict[tuple[str, str], float] = {}
    for machine, stats in machines:
        for name, value in stats.items():
            if name.startswith("judge/") and name in METRICS:
                choose_newer = min if name.endswith("_left") else max
                newest[name, machine] = choose_newer(newest.get((name, machine), value), value)
    totals: Numbers = {}
    for (name, _), value in newest.items():
        totals[name] = totals.get(name, 0.0) + value
    return totals


def make_summary(store: Store, trained: TrainingLog, wall_s: float) -> JsonObject:
    """Make the buffer's summary of the run.

    wall_s: seconds from the first ticket to the last commit."""
    results = store.evaluations.results
    evaluated = sorted(number for split, number in results if split == "heldout")

    def get_accuracy(split: str, number: int | None) -> float | None:
        if number is None or (split, number) not in results:
            return None
        return results[split, number][f"eval/{split}"]

    ledger = store.sum_ledger()
    samples, lags, digest = trained.summarize()
    return {
        "wall_s": wall_s,
        "steps": store.committed,
        "trajectories": samples,
        "heldout_start": get_accuracy("heldout", 0),
        "heldout_end": get_accuracy("heldout", evaluated[-1] if evaluated else None),
        "ood_start": get_accuracy("ood", 0),
        "ood_end": get_accuracy("ood", store.settings.steps),
        "ledger": {"generated": store.count_generated_tokens()}
        | {name: int(line["tokens"]) for name, line in ledger.items()},
        "ledger_lines": ledger,
        "ledger_by_task": {
            title: part.compute_totals() for title, part in store.make_task_ledgers().items()
        },
        "trained_ids": digest,
        "failures": store.failures,
        **describe_lags(lags),
    }
