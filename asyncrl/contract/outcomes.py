"""Checks of a sample's outcome, before it is sent and again by the buffer.

An outcome is a reward with its named parts, or the reason of a failure.  It comes from user code: a
reward function, an environment, an agent over HTTP.  The functions here check it before it becomes
a sample, so that the buffer, which checks again, does not have to refuse it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from msgspec import structs

from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import RewardFailure, Trajectory
from asyncrl.contract.printable import escape_line

# the sum of a batch's squared rewards still fits into float32; sensible rewards are far smaller
LARGEST_REWARD = 1e15
MOST_PARTS = 256
MOST_ROWS = 4096  # training sequences of a session
NAME_LENGTH = 200  # characters
REASON_LENGTH = 1 << 16  # characters


def check_number(value: float, name: str) -> None:
    """Raise BadMessage unless the value is finite and at most LARGEST_REWARD in magnitude."""
    if not math.isfinite(value):
        raise BadMessage(f"{name} is {value}, not a finite number", "number")
    if abs(value) > LARGEST_REWARD:
        raise BadMessage(
            f"{name} is {value:g}, more than {LARGEST_REWARD:g} in magnitude, which overflows the "
            "learner's float32: scale it down",
            "number",
        )


def check_parts(parts: Mapping[str, float]) -> None:
    """Raise BadMessage for too many parts, a long or broken name, or a value out of range."""
    if len(parts) > MOST_PARTS:
        raise BadMessage(
            f"a reward has {len(parts)} parts; at most {MOST_PARTS} are allowed", "text"
        )
    for name, value in parts.items():
        check_text(name, "the name of a part", NAME_LENGTH)
        check_number(value, escape_line(name))


def check_text(text: str, name: str, most: float = math.inf) -> None:
    """Raise BadMessage for a text that is too long, or that UTF-8 cannot encode.

    It cannot encode a lone surrogate, half of a character."""
    if len(text) > most:
        raise BadMessage(
            f"{name} has {len(text)} characters, {escape_line(text, 40)!r}; at most {most} are "
            "allowed",
            "text",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise BadMessage(
            f"{name} has {half}, half of a character: UTF-8 cannot encode it", "text"
        ) from None


def check_sample(sample: Trajectory) -> None:
    """Raise BadMessage for a sample whose outcome cannot be sent or would be refused."""
    check_number(sample.reward, "reward")
    check_parts(sample.reward_parts)
    if sample.failed:
        check_text(sample.failed.why, "the reason", REASON_LENGTH)
    check_text(sample.text, "the text of the completion")
    check_text(sample.prompt_text, "the text of the prompt")
    check_text(sample.group_key, "the key of the group", NAME_LENGTH)


def make_failed_sample(
    sample: Trajectory, kind: Literal["data", "refused"], reason: str
) -> Trajectory:
    """Make a failed sample: its tokens still count, its outcome and texts are dropped."""
    return structs.replace(
        sample,
        reward=0.0,
        reward_parts={},
        failed=RewardFailure(kind, escape_line(reason)),
        temperature=sample.temperature if 0 < sample.temperature < math.inf else 1.0,
        generated_at=sample.generated_at if math.isfinite(sample.generated_at) else 0.0,
        group_key="",
        text="",
        prompt_text="",
        segments=[],
        token_rewards=b"",
        images=[],
        rows=[
            structs.replace(row, segments=[], token_rewards=b"", images=[]) for row in sample.rows
        ],
    )
