"""Answers of any length, as a generator delivers them: what benchmarks/buffer.py and transport.py
send.  Imports no more than messages need, so that rivals in another Python make the same ones.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label

VOCABULARY = 23
PROMPT = 12
RANDOM = np.random.default_rng(0)
PROMPT_IDS = RANDOM.integers(3, VOCABULARY, PROMPT).astype("<i4").tobytes()


@cache
def arrays(tokens: int) -> tuple[bytes, bytes, bytes]:
    """Ids, log-probabilities and mask of every answer of so many tokens."""
    random = np.random.default_rng(tokens)
    ids = random.integers(3, VOCABULARY, tokens).astype("<i4").tobytes()
    logprobs = (-3.0 + 0.5 * random.standard_normal(tokens)).clip(max=-0.01)
    return ids, logprobs.astype("<f4").tobytes(), b"\1" * tokens


def answer(ticket: m.Ticket, sample: int, first: Label, last: Label, tokens: int) -> m.Trajectory:
    """An answer; its second half by `last`, where that is another version."""
    ids, logprobs, mask = arrays(tokens)
    spans = [m.VersionSpan(first, "", 0, tokens, first)]
    if last != first:
        half = tokens // 2
        spans = [
            m.VersionSpan(first, "", 0, half, first),
            m.VersionSpan(last, "", half, tokens, first),
        ]
    return m.Trajectory(
        ticket.ticket,
        sample,
        ticket.attempt,
        PROMPT_IDS,
        ids,
        logprobs,
        mask,
        spans,
        float(sample % 2),
        {"exact": float(sample % 2)},
        "stop",
        1.0,
        text="0123456789" * 2,
        prompt_text="sort 123=",
        segments=[("model", 0, tokens)],
    )


def disagreement(came: list[m.Trajectory], many: int, tokens: int) -> str:
    """Describe errors in `many` received samples, "" if each came once and unchanged."""
    keys = {(one.ticket, one.sample, one.attempt) for one in came}
    if len(came) != many or len(keys) != many:
        return f"{len(came)} answers came, {len(keys)} different ones, of {many}"
    expected = arrays(tokens)
    for one in came:
        if (one.tokens, one.behavior_logprobs, one.mask) != expected:
            return f"answer {one.sample} of ticket {one.ticket} came with other bytes"
        if one.prompt_tokens != PROMPT_IDS or one.spans[-1].end != tokens:
            return f"answer {one.sample} of ticket {one.ticket} came with another prompt or spans"
    return ""
