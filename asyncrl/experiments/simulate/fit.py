"""Times from a run directory: its trace (what each process did, on how much), its metrics, its
samples.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.turn import DECODE_STEPS
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.simulate.times import Spec, TimeModel, change
from asyncrl.records import jsonl, metrics, trace
from asyncrl.records.trace import TraceSpan

FEWEST = 20  # decode calls, and 5 batches, below which nothing is fitted
MOST_BESIDE = 3.0  # how much one side may slow the other down
WAIT_S = 0.03  # a learner's pause from which it counts as a wait for its batch


class EngineCall(NamedTuple):
    """One call of the engine: `rows` at its start, `admitted` of them new."""

    start: float
    end: float
    rows: int
    admitted: int
    steps: (
        int | None
    )  # None: a trace without steps, and the engine ran empty before the usual number
    finished: int  # rows
    pause: float | None  # to the next call, less swaps; None: the engine ran empty


def fit(run_dir: Path) -> tuple[TimeModel, Config]:
    """Times and config of a run.  Raises ConfigError for a directory that has no trace with sizes,
    or too short a one.
    """
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(f"{run_dir}: no run directory (it has no config.toml)")
    config = load.load(run_dir / "config.toml")
    lanes = trace.read_sized_spans(run_dir)
    calls = [
        calls_of(spans)
        for name, spans in lanes.items()
        if name.startswith("generator-") and not name.endswith("-rewards")
    ]
    learner = lanes.get("learner", [])
    trains = [s for s in learner if s[0] == "train" and s[3]]
    if sum(map(len, calls)) < FEWEST or len(trains) < 5:
        raise ConfigError(
            f"{run_dir}: too little to fit times to: {sum(map(len, calls))} decode calls and "
            f"{len(trains)} batches with their sizes in its trace "
            f"(needed: {FEWEST} and 5); make a run of 20 steps or more with this version"
        )
    flat = [c for lane in calls for c in lane]
    if sum(c.steps is not None for c in flat) < FEWEST:
        raise ConfigError(
            f"{run_dir}: its answers are so short that nearly every decode call emptied the "
            "engine, and its trace does not say in how many steps; make a run with this version"
        )
    times = change(TimeModel(), **_decode(flat, trains))
    times = change(times, **_learner(times, trains, learner, flat), **_answers(run_dir, config))
    times = change(
        times, batch=_hand_over_times(times, learner, flat), commit=_grants(times, learner, lanes)
    )
    judged = [
        (s[2] - s[1], s[3] or 1)
        for name, spans in lanes.items()
        if name.endswith("-rewards")
        for s in spans
    ]
    # of a list, each answer its share
    rewards = [seconds / answers for seconds, answers in judged for _ in range(answers)]
    swaps = _swaps(lanes)
    return change(
        times, **({"reward": rewards} if rewards else {}), **({"swap": swaps} if swaps else {})
    ), config


def calls_of(spans: list[TraceSpan]) -> list[EngineCall]:
    """One generator's decode calls, but for the last."""
    raw: list[
        tuple[TraceSpan, int, float]
    ] = []  # a call, rows admitted and seconds of swaps before
    admitted = 0
    swap = 0.0
    for span in spans:
        if span.name == "prefill":
            admitted += span.size or 0
        elif span.name == "weights":
            swap += span.end - span.start
        elif span.name == "decode" and span.size:
            raw.append((span, admitted, swap))
            admitted = 0
            swap = 0.0
    out = []
    for (call, new, _), (after, then_new, swapped) in itertools.pairwise(raw):
        rows = call.size or 0
        left = (after.size or 0) - then_new
        steps = call.steps if call.steps is not None else (DECODE_STEPS if left > 0 else None)
        pause = after.start - call.end - swapped if left > 0 else None
        finished = rows - max(0, left)
        out.append(EngineCall(*call[1:3], rows, new, steps, finished, pause))
    return out


def share_beside(start: float, end: float, others: list[tuple[float, float]]) -> float:
    """The share of [start, end] that lies in any of `others`, which are sorted and do not
    overlap.
    """
    at = bisect.bisect_left(others, start, key=lambda x: x[1])
    both = 0.0
    while at < len(others) and others[at][0] < end:
        both = both + min(end, others[at][1]) - max(start, others[at][0])
        at = at + 1
    return both / max(end - start, 1e-9)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def solve(
    columns: list[list[float]], seconds: list[float], least: float = 1e-3
) -> tuple[NDArray[np.float64], float]:
    """Coefficients of at least 0, and what they leave unexplained; long calls do not outweigh the
    short ones.
    """
    from scipy.optimize import nnls

    measured = np.asarray(seconds)
    weight = 1 / np.sqrt(np.maximum(measured, least))
    found: tuple[NDArray[np.float64], float] = nnls(
        np.asarray(columns, dtype=float) * weight[:, None], measured * weight
    )
    return found


def _times(columns: list[list[float]], shares: list[float], factor: float) -> list[list[float]]:
    """Each row `factor` times as long for its share beside the learner."""
    return [
        [x * (1 + (factor - 1) * s) for x in row] for row, s in zip(columns, shares, strict=True)
    ]


def _minimum(loss: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import minimize_scalar

    return float(minimize_scalar(loss, bounds=(low, high), method="bounded").x)


def _decode(calls: list[EngineCall], trains: list[TraceSpan]) -> dict[str, object]:
    """step, row, admit, look, finish, beside, noise."""
    whole = [c for c in calls if c.steps is not None]
    training = union((t[1], t[2]) for t in trains)
    seconds = [c.end - c.start for c in whole]
    shares = [share_beside(c.start, c.end, training) for c in whole]
    columns: list[list[float]] = [
        [c.steps or 0, (c.steps or 0) * c.rows, c.admitted] for c in whole
    ]
    slower = 1.0
    if sum(x < 0.1 for x in shares) >= FEWEST and sum(x > 0.9 for x in shares) >= FEWEST:
        slower = _minimum(lambda f: solve(_times(columns, shares, f), seconds)[1], 1.0, MOST_BESIDE)
    factors = [1 + (slower - 1) * s for s in shares]
    step, row, admit = map(float, solve(_times(columns, shares, slower), seconds)[0])
    plain = [max(1e-9, step * begin + row * end + admit * c) for begin, end, c in columns]
    noise = [s / p / f for s, p, f in zip(seconds, plain, factors, strict=True)]
    out: dict[str, object] = {
        "step": step,
        "row": row,
        "admit": admit,
        "beside": slower,
        "noise": {"sequence": [round(x, 4) for x in noise]},
    }
    paused = [(c, c.pause) for c in calls if c.pause is not None]
    if len(paused) < FEWEST:  # the engine runs empty after nearly every call
        return out
    look, finish, new = map(
        float,
        solve(
            [[1, c.finished, c.admitted] for c, _ in paused],
            [max(0.0, pause) for _, pause in paused],
        )[0],
    )
    return out | {"admit": admit + new, "look": look, "finish": finish}


def _learner(
    times: TimeModel, trains: list[TraceSpan], spans: list[TraceSpan], calls: list[EngineCall]
) -> dict[str, object]:
    """train, publish, checkpoint; each batch's seconds as if it had the mean number of tokens and
    no generator beside it, in the run's order.
    """
    tokens = statistics.mean(t[3] or 0 for t in trains)
    busy = union((c.start, c.end) for c in calls)
    seconds = [
        (t[2] - t[1])
        * tokens
        / (t[3] or 1)
        / (1 + (times.beside - 1) * share_beside(t[1], t[2], busy))
        for t in trains
    ]

    def durations_of(name: str) -> list[float]:
        return [round(s[2] - s[1], 6) for s in spans if s[0] == name]

    return {
        "train": {"sequence": [round(s, 5) for s in seconds]},
        "train_tokens": round(tokens, 1),
        "publish": durations_of("publish") or times.publish,
        "checkpoint": durations_of("checkpoint") or times.checkpoint,
    }


def _hand_over_times(times: TimeModel, learner: list[TraceSpan], calls: list[EngineCall]) -> Spec:
    """batch: where the learner had waited, the time from the last decode call's end to its start,
    less what is told apart.
    """
    ends = sorted(c.end for c in calls)
    last = None
    found = []
    for name, start, end, *_ in learner:
        if (
            name == "train"
            and last is not None
            and start - last > WAIT_S
            and (at := bisect.bisect(ends, start))
        ):
            found.append(start - ends[at - 1])
        last = end
    finished = [c.finished for c in calls]
    mean = statistics.mean(finished) if finished else 0.0
    return _usual(
        found, times.look + mean * (times.finish + times.buffer) + 2 * times.wire, times.batch
    )


def _grants(times: TimeModel, learner: list[TraceSpan], lanes: dict[str, list[TraceSpan]]) -> Spec:
    """commit: where a generator had waited, the time from the publication to its first work after
    it, less the wires.
    """
    published = [s[2] for s in learner if s[0] == "publish"]
    found = []
    for name, spans in lanes.items():
        if not name.startswith("generator-") or name.endswith("-rewards"):
            continue
        ended = None  # of the last decode call, until something follows
        for kind, start, end, *_ in spans:
            if kind == "decode":
                ended = end
            elif ended is not None:
                at = bisect.bisect(published, start)
                if at and published[at - 1] > ended + WAIT_S:
                    found.append(start - published[at - 1])
                ended = None
    return _usual(found, 2 * times.wire, times.commit)


def _usual(found: list[float], less: float, otherwise: Spec) -> Spec:
    """What was seen less a constant, without what is far beyond the usual; of fewer than three,
    nothing is made.
    """
    if len(found) < 3:
        return otherwise
    usual = statistics.median(found)
    return [round(max(0.0005, x - less), 5) for x in found if x < 4 * usual]


def _answers(run_dir: Path, config: Config) -> dict[str, object]:
    """group_lengths from the samples of whole groups, otherwise from the ledger's classes of
    length; no_spread.
    """
    rows = [r for r in metrics.read(run_dir) if "reward/mean" in r]
    spread = [r["reward/no_spread_share"] for r in rows if "reward/no_spread_share" in r]
    out: dict[str, object] = {"no_spread": statistics.mean(spread)} if spread else {}
    groups: dict[int, list[int]] = {}
    for sample in jsonl.read(run_dir / "samples.jsonl"):
        groups.setdefault(sample["ticket"], []).append(len(sample["tokens"]))
    whole = [g for g in groups.values() if len(g) == config.learner.group_size]
    if len(whole) >= 2 * FEWEST:
        return out | {"group_lengths": whole}
    lengths = [left for g in groups.values() for left in g]
    if len(lengths) >= 2 * FEWEST:
        return out | {"lengths": [float(left) for left in lengths]}
    means = [r["answer/length"] for r in rows if "answer/length" in r]
    if not means:
        raise ConfigError(f"{run_dir}: neither samples nor metrics say how long its answers are")
    mean = statistics.mean(means)
    return out | {
        "lengths": f"uniform({mean / 2:.1f}, "
        f"{min(1.5 * mean, config.generator.max_new_tokens):.1f})"
    }


def _swaps(lanes: dict[str, list[TraceSpan]]) -> list[float]:
    """Loads that came to something: the trace holds the looks at a version that was not there yet
    as well, which are short.
    """
    found = [
        s[2] - s[1]
        for name, spans in lanes.items()
        if name.startswith("generator-")
        for s in spans
        if s[0] == "weights"
    ]
    if not found:
        return []
    usual = statistics.median(found)
    return [round(x, 6) for x in found if x > usual / 5]
