"""Fit times to a run directory: to its trace, its metrics and its samples."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.turn import DECODE_STEPS
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.simulate.times import Spec, TimeModel, change
from asyncrl.models.devices import has_cuda
from asyncrl.records import jsonl, metrics, process_log, rundir, trace
from asyncrl.records.trace import TraceSpan

FEWEST = 20  # decode calls that a fit needs, besides 5 batches
MOST_BESIDE = 3.0  # bound of the factor by which generators and learner slow each other down
WAIT_S = 0.03  # a longer pause of a process counts as a wait

Interval = tuple[float, float]


class EngineCall(NamedTuple):
    """One call of the engine: `rows` at its start, `admitted` of them new."""

    start: float
    end: float
    rows: int
    admitted: int
    steps: int | None  # None: not in the trace, and the engine ran empty before the usual number
    finished: int  # rows
    pause: float | None  # to the next call, less swaps; None: the engine ran empty


def fit(run_dir: Path) -> tuple[TimeModel, Config]:
    """Return the times and the config of a run.

    Raises ConfigError if the run has no trace with sizes, or if it is too short.
    """
    rundir.require_run(run_dir)
    config = load.load(run_dir / "config.toml")
    lanes = trace.read_sized_spans(run_dir)
    rewards = [lanes[name] for name in lanes if name.endswith("-rewards")]
    generators = [
        spans
        for name, spans in lanes.items()
        if name.startswith("generator-") and not name.endswith("-rewards")
    ]
    learner = lanes.get("learner", [])
    calls = [call for spans in generators for call in list_engine_calls(spans)]
    trains = [span for span in learner if span.name == "train" and span.size]
    if len(calls) < FEWEST or len(trains) < 5:
        raise ConfigError(
            f"{run_dir}: too little to fit times to: {len(calls)} decode calls and {len(trains)} "
            f"batches with their sizes in its trace (needed: {FEWEST} and 5); make a run of 20 "
            "steps or more with this version"
        )
    if sum(call.steps is not None for call in calls) < FEWEST:
        raise ConfigError(
            f"{run_dir}: its completions are so short that nearly every decode call emptied the "
            "engine, and its trace lacks the number of steps; make a run with this version"
        )
    times = change(TimeModel(), **_fit_decode(calls, trains))
    times = change(times, **_fit_learner(times, trains, learner, calls))
    times = change(times, **_fit_lengths(run_dir, config))
    batch, commit = _fit_batch(times, learner, calls), _fit_commit(times, learner, generators)
    times = change(times, batch=batch, commit=commit, ready=_fit_ready(times, learner))
    # each sample of a batched call gets its share
    shares = [
        (span.end - span.start) / (span.size or 1)
        for spans in rewards
        for span in spans
        for _ in range(span.size or 1)
    ]
    swaps = _find_swaps(generators)
    times = change(times, reward=shares or times.reward, swap=swaps or times.swap)
    if config.learner.gpus or config.generator.gpus or has_cuda():
        return times, config
    return change(times, cores=process_log.find_shared_cores(run_dir)), config


def list_engine_calls(spans: Sequence[TraceSpan]) -> list[EngineCall]:
    """Return one generator's decode calls, except the last."""
    # a call, the rows admitted before it and the seconds of swaps before it
    decodes: list[tuple[TraceSpan, int, float]] = []
    admitted, swap = 0, 0.0
    for span in spans:
        if span.name == "prefill":
            admitted += span.size or 0
        elif span.name == "weights":
            swap += span.end - span.start
        elif span.name == "decode" and span.size:
            decodes.append((span, admitted, swap))
            admitted, swap = 0, 0.0
    calls = []
    for (call, new_rows, _), (next_call, next_new_rows, swapped) in itertools.pairwise(decodes):
        rows = call.size or 0
        remaining = (next_call.size or 0) - next_new_rows
        steps, pause = call.steps, None
        if remaining > 0:
            steps = DECODE_STEPS if steps is None else steps
            pause = next_call.start - call.end - swapped
        finished = rows - max(0, remaining)
        calls.append(EngineCall(*call[1:3], rows, new_rows, steps, finished, pause))
    return calls


def compute_overlap(start: float, end: float, intervals: Sequence[Interval]) -> float:
    """Return the share of [start, end] covered by `others`, sorted and disjoint."""
    index = bisect.bisect_left(intervals, start, key=lambda interval: interval[1])
    covered = 0.0
    for low, high in itertools.takewhile(lambda interval: interval[0] < end, intervals[index:]):
        covered += min(end, high) - max(start, low)
    return covered / max(end - start, 1e-9)


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals; the result is sorted."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def solve(
    columns: Sequence[Sequence[float]] | NDArray[np.float64], seconds: Sequence[float]
) -> tuple[NDArray[np.float64], float]:
    """Return coefficients of at least 0 and the residual.

    columns: [calls, coefficients].
    seconds: [calls], weighted so that long calls do not outweigh short ones.
    """
    from scipy.optimize import nnls

    measured = np.asarray(seconds)
    weight = 1 / np.sqrt(np.maximum(measured, 1e-3))
    rows = np.asarray(columns, dtype=float) * weight[:, None]
    solution: tuple[NDArray[np.float64], float] = nnls(rows, measured * weight)
    return solution


def _fit_decode(calls: Sequence[EngineCall], trains: Sequence[TraceSpan]) -> dict[str, Any]:
    """Fit step, row, admit, look, finish, beside and noise."""
    from scipy.optimize import minimize_scalar

    timed = [call for call in calls if call.steps is not None]
    training = unite((train.start, train.end) for train in trains)
    seconds = [call.end - call.start for call in timed]
    shares = np.array([compute_overlap(call.start, call.end, training) for call in timed])
    columns = np.array(
        [[call.steps or 0, (call.steps or 0) * call.rows, call.admitted] for call in timed], float
    )

    def slow_down(factor: float) -> NDArray[np.float64]:
        """Return the columns with `factor` on the share beside training."""
        slowed: NDArray[np.float64] = columns * (1 + (factor - 1) * shares)[:, None]
        return slowed

    beside = 1.0
    if sum(shares < 0.1) >= FEWEST and sum(shares > 0.9) >= FEWEST:
        beside = float(
            minimize_scalar(
                lambda factor: solve(slow_down(factor), seconds)[1],
                bounds=(1.0, MOST_BESIDE),
                method="bounded",
            ).x
        )
    coefficients = solve(slow_down(beside), seconds)[0]
    step, row, admit = map(float, coefficients)
    expected = np.maximum(1e-9, columns @ coefficients) * (1 + (beside - 1) * shares)
    noise = {"sequence": [round(float(x), 4) for x in np.array(seconds) / expected]}
    fitted = {"step": step, "row": row, "admit": admit, "beside": beside, "noise": noise}
    paused = [(call, call.pause) for call in calls if call.pause is not None]
    if len(paused) < FEWEST:  # the engine runs empty after nearly every call
        return fitted
    look, finish, new = _fit_pauses([(call.finished, call.admitted, x) for call, x in paused])
    return fitted | {"admit": admit + new, "look": look, "finish": finish}


def _fit_pauses(pauses: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Fit look, finish and the time of an admitted row to (finished, admitted, seconds) of pauses.

    A few pauses are many times as long as the others, because the process waits for a core. The
    columns do not explain them, and the weights of `solve` leave them out, although the generator
    is busy in them. The solution is therefore scaled to the sum of all pauses.
    """
    columns = np.array([[1, finished, admitted] for finished, admitted, _ in pauses], float)
    seconds = [max(0.0, pause) for *_, pause in pauses]
    solution = solve(columns, seconds)[0]
    explained = float((columns @ solution).sum())
    look, finish, new = solution * (sum(seconds) / explained if explained > 0 else 1.0)
    return float(look), float(finish), float(new)


def _fit_learner(
    times: TimeModel,
    trains: Sequence[TraceSpan],
    spans: Sequence[TraceSpan],
    calls: Sequence[EngineCall],
) -> dict[str, Any]:
    """Fit train, publish and checkpoint.

    Each batch's seconds are scaled to the mean number of tokens and to idle generators, in the
    order of the run.
    """
    tokens = statistics.mean(train.size or 0 for train in trains)
    # a pause between two calls is work, as in the simulation
    busy = unite((call.start, call.end + max(0.0, call.pause or 0.0)) for call in calls)
    seconds = [
        (train.end - train.start)
        * tokens
        / (train.size or 1)
        / (1 + (times.beside - 1) * compute_overlap(train.start, train.end, busy))
        for train in trains
    ]

    def list_durations(name: str) -> list[float]:
        return [round(span.end - span.start, 6) for span in spans if span.name == name]

    return {
        "train": {"sequence": [round(s, 5) for s in seconds]},
        "train_tokens": round(tokens, 1),
        "publish": list_durations("publish") or times.publish,
        "checkpoint": list_durations("checkpoint") or times.checkpoint,
    }


def _fit_batch(times: TimeModel, learner: Sequence[TraceSpan], calls: Sequence[EngineCall]) -> Spec:
    """Fit `batch` to the waits of the learner.

    It is the time from the last decode call's end to the training, less the times fitted elsewhere.
    """
    ends = sorted(call.end for call in calls)
    waits = []
    for previous, span in itertools.pairwise(learner):
        index = bisect.bisect(ends, span.start)
        if span.name == "train" and span.start - previous.end > WAIT_S and index:
            waits.append(span.start - ends[index - 1])
    finished = statistics.mean(call.finished for call in calls)
    other_times = times.look + finished * (times.finish + times.buffer) + 2 * times.wire
    return _select_typical(waits, other_times, times.batch)


def _fit_ready(times: TimeModel, learner: Sequence[TraceSpan]) -> Spec:
    """Fit `ready` to the learner's messages between two updates without a wait."""
    gaps = [
        span.start - previous.end
        for previous, span in itertools.pairwise(learner)
        if span.name == "train" and span.start - previous.end <= WAIT_S
    ]
    return _select_typical(gaps, 0.0, times.ready)


def _fit_commit(
    times: TimeModel, learner: Sequence[TraceSpan], generators: Sequence[Sequence[TraceSpan]]
) -> Spec:
    """Fit `commit` to the waits of generators.

    It is the time from the publication to its first work afterwards, less the wires.
    """
    published = [span.end for span in learner if span.name == "publish"]
    waits = []
    for previous, span in itertools.chain.from_iterable(map(itertools.pairwise, generators)):
        index = bisect.bisect(published, span.start)
        if previous.name != "decode" or span.name == "decode" or not index:
            continue
        if published[index - 1] > previous.end + WAIT_S:
            waits.append(span.start - published[index - 1])
    return _select_typical(waits, 2 * times.wire, times.commit)


def _select_typical(values: Sequence[float], other_times: float, default: Spec) -> Spec:
    """Return the values less `known`, without outliers; the default for fewer than three."""
    if len(values) < 3:
        return default
    median = statistics.median(values)
    return [round(max(0.0005, value - other_times), 5) for value in values if value < 4 * median]


def _fit_lengths(run_dir: Path, config: Config) -> dict[str, Any]:
    """Fit group_lengths to the samples, otherwise lengths to samples or metrics; and no_spread."""
    rows = [row for row in metrics.read(run_dir) if "reward/mean" in row]
    shares = [row["reward/no_spread_share"] for row in rows if "reward/no_spread_share" in row]
    fitted: dict[str, Any] = {"no_spread": statistics.mean(shares)} if shares else {}
    groups: dict[int, list[int]] = {}
    for sample in jsonl.read(run_dir / "samples.jsonl"):
        groups.setdefault(sample["ticket"], []).append(len(sample["tokens"]))
    complete = [lengths for lengths in groups.values() if len(lengths) == config.learner.group_size]
    if len(complete) >= 2 * FEWEST:
        return fitted | {"group_lengths": complete}
    lengths = [float(length) for group in groups.values() for length in group]
    means = [row["answer/length"] for row in rows if "answer/length" in row]
    if len(lengths) >= 2 * FEWEST:  # samples of some batches only: the metrics have the mean of all
        scale = statistics.mean(means) / statistics.mean(lengths) if means else 1.0
        return fitted | {"lengths": [round(scale * length, 2) for length in lengths]}
    if not means:
        raise ConfigError(
            f"{run_dir}: neither samples nor metrics have the length of its completions"
        )
    mean = statistics.mean(means)
    longest = min(1.5 * mean, config.generator.max_new_tokens)
    return fitted | {"lengths": f"uniform({mean / 2:.1f}, {longest:.1f})"}


def _find_swaps(generators: Sequence[Sequence[TraceSpan]]) -> list[float]:
    """Return the seconds of loads.

    The trace also has polls for a version that was not published yet, which are short.
    """
    loads = [s.end - s.start for spans in generators for s in spans if s.name == "weights"]
    typical = statistics.median(loads) if loads else 0.0
    return [round(seconds, 6) for seconds in loads if seconds > typical / 5]
