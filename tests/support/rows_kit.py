from typing import Any

import numpy as np

from asyncrl.contract.messages import Batch, TrainingSequence, Trajectory, VersionSpan
from asyncrl.contract.versions import Label

GROUPS, SIZE = 3, 3


AT = Label(1, 0)


def ids(values: Any) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def spans(mask: list[int]) -> list[VersionSpan]:
    """One span for each run of ones."""
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return [VersionSpan(AT, "", int(a), int(b), AT) for a, b in edges.reshape(-1, 2)]


def row(
    prompt: list[int], tokens: list[int], logprobs: list[float], mask: list[int]
) -> TrainingSequence:
    given = np.where(np.array(mask) > 0, np.array(logprobs, np.float32), np.float32(0))
    return TrainingSequence(
        ids(prompt), ids(tokens), given.astype("<f4").tobytes(), bytes(mask), spans(mask)
    )


def sample(ticket: int, number: int, rows: list[TrainingSequence], **fields: Any) -> Trajectory:
    first, *more = rows
    return Trajectory(
        ticket,
        number,
        1,
        first.prompt_tokens,
        first.tokens,
        first.behavior_logprobs,
        first.mask,
        first.spans,
        **({"reward": 0.0, "reward_parts": {}, "finish": "stop", "temperature": 1.0} | fields),
        rows=more,
    )


def batch(samples: list[Trajectory], lags: list[int]) -> Batch:
    """The lag of a sample's second call is one more than that of its first."""
    runs = [
        [(span.start, span.end, lag + min(at, 1)) for at, span in enumerate(s.list_spans())]
        for s, lag in zip(samples, lags, strict=True)
    ]
    return Batch(1, 0, samples, lags, lags, runs, {}, GROUPS, {})


def sessions(how: str) -> Batch:
    """The same two-call sessions: as one row; split where a template would have forked them; split,
    the first call's tokens repeated (mask 0) in the second row; and single answers among them."""
    r = np.random.default_rng(0)
    samples, lags = [], []
    for ticket in range(GROUPS):
        prompt = r.integers(2, 8, 2 + ticket).tolist()
        for number in range(SIZE):
            own = [r.integers(2, 8, r.integers(1, 9)).tolist() for _ in range(2)]
            given = [(-2.3 + 0.3 * r.standard_normal(len(x))).tolist() for x in own]
            tool = r.integers(2, 8, 3).tolist()
            ones = [[1] * len(x) for x in own]
            whole = [*own[0], *tool, *own[1]]
            logprobs, mask = [*given[0], 0, 0, 0, *given[1]], [*ones[0], 0, 0, 0, *ones[1]]
            later = [0] * (len(own[0]) + 3) + ones[1]
            rows = {
                "whole": [row(prompt, whole, logprobs, mask)],
                "split": [
                    row(prompt, own[0], given[0], ones[0]),
                    row([*prompt, *own[0], *tool], own[1], given[1], ones[1]),
                ],
                "shared": [
                    row(prompt, own[0], given[0], ones[0]),
                    row(prompt, whole, logprobs, later),
                ],
            }[how]
            if number == 1:
                rows = [row(prompt, own[0], given[0], ones[0])]
            finish = "length" if r.random() < 0.3 else "stop"
            samples.append(sample(ticket, number, rows, reward=float(r.random()), finish=finish))
            lags.append(int(r.integers(0, 3)))
    return batch(samples, lags)
