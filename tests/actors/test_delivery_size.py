"""actors/delivery.py: what a sample takes on the wire, by its estimate and encoded."""

from __future__ import annotations

import msgspec
import pytest

from actors.delivery import estimate_size
from asyncrl.contract.messages import TrainingSequence, Trajectory, VersionSpan
from asyncrl.contract.versions import Label

AT = Label(1, 2)


def row(prompt: int, tokens: int, spans: int, **more: bytes) -> TrainingSequence:
    parts = [VersionSpan(AT, "0123456789abcdef", 9 * n, 9 * n + 9, AT) for n in range(spans)]
    arrays = (b"\1\0\0\0" * prompt, b"\2\0\0\0" * tokens, b"\3\3\3\3" * tokens)
    return TrainingSequence(*arrays, b"\1" * tokens, parts, **more)


@pytest.mark.parametrize("more", [{}, {"token_rewards": 900 * b"r", "support": 800 * b"s"}])
@pytest.mark.parametrize("others", [[], [(200, 300, 2), (700, 10, 1)]])
def test_a_samples_size_is_that_of_its_message(
    others: list[tuple[int, int, int]], more: dict[str, bytes]
) -> None:
    first = row(150, 400, 3, **more)
    sample = Trajectory(
        *(4, 1, 9, first.prompt_tokens, first.tokens, first.behavior_logprobs, first.mask),
        first.spans,
        reward=1.0,
        reward_parts={"form": 0.5},
        finish="stop",
        temperature=1.0,
        text="x" * 120,
        rows=[row(*other, **more) for other in others],
        **more,
    )
    assert estimate_size(sample) == pytest.approx(len(msgspec.msgpack.encode(sample)), rel=0.05)
    names = msgspec.structs.replace(sample, images=["f" * 32] * 50)
    assert estimate_size(names) == pytest.approx(len(msgspec.msgpack.encode(names)), rel=0.05)
