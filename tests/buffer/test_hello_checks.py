"""What a learner may say of itself: its version, its ring, its ledger, its place in a mixture."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hostile_messages_kit import honest_hello

from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import LearnerHello, MixturePosition
from asyncrl.contract.versions import Label
from buffer import checks

LINE = {"tokens": 4.0, "samples": 2.0, "mean_length": 2.0, "mean_reward": 0.5, "upto_8": 4.0}
PLACE = MixturePosition({"a": 0.5}, {"a": 0}, [("a", -1)], {"a": 0}, {"a": {"trained": LINE}})


def said(**more: Any) -> LearnerHello:
    return msgspec.structs.replace(honest_hello("run"), **more)


def placed(**more: Any) -> dict[str, Any]:
    return {"mixture": msgspec.structs.replace(PLACE, **more)}


HONEST: list[dict[str, Any]] = [
    {},
    {
        "epoch": 3,
        "label": Label(3, 9),
        "origin": 3,
        "ring": [(Label(3, 0), "a"), (Label(3, 8), "b")],
    },
    {"max_lag": 0.0, "limit": 0, "vocabulary": (1 << 31) - 1},
    {"routing": (1, 8, 8)},
    {"routing": (1, (1 << 16) - 1, 1)},
    {"next_ticket": (1 << 48) - 1, "trained_above": [0, (1 << 48) - 1]},
    {"ledger": {"trained": LINE}},
    {"mixture": PLACE},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"epoch": 0, "label": Label(0, 0)}, "cannot be at version"),
    ({"label": Label(2, 0)}, "cannot be at version"),
    ({"label": Label(1, -1)}, "cannot be at version"),
    ({"origin": -1}, "cannot have resumed from epoch -1"),
    ({"origin": 2}, "cannot have resumed from epoch 2"),
    ({"max_lag": -0.5}, "cannot have the limit -0.5"),
    ({"max_lag": math.nan}, "cannot have the limit nan"),
    ({"limit": -1}, "cannot have the adaptive limit -1"),
    ({"vocabulary": -1}, "cannot have a model with -1 tokens"),
    ({"vocabulary": 1 << 31}, "cannot have a model with 2147483648 tokens"),
    ({"routing": (0, 8, 2)}, "cannot have a model of"),
    ({"routing": (1, 8, 0)}, "cannot have a model of"),
    ({"routing": (1, 8, 9)}, "cannot have a model of"),
    ({"routing": (1, 1 << 16, 2)}, "cannot have a model of"),
    ({"next_ticket": -1}, "cannot continue at ticket -1"),
    ({"next_ticket": 1 << 48}, "cannot continue at ticket"),
    ({"trained_above": [3, -1]}, "cannot continue at ticket 0"),
    ({"trained_above": [3, 1 << 48]}, "cannot continue at ticket 0"),
    ({"ring": [(Label(1, 0), "a")]}, "not earlier versions of its epoch: 1.0"),
    ({"label": Label(1, 3), "ring": [(Label(2, 1), "a")]}, "not earlier versions"),
    ({"label": Label(1, 3), "ring": [(Label(1, -1), "a")]}, "not earlier versions"),
    (placed(credit={"a": math.inf}), "invalid position in its mixture of tasks"),
    (placed(indices={"a": -1}), "invalid position in its mixture of tasks"),
    (placed(due=[("a", -2)]), "invalid position in its mixture of tasks"),
    (placed(removed={"a": -1}), "invalid position in its mixture of tasks"),
    (placed(ledgers={"a": {"lost": LINE}}), "a ledger with other lines than"),
    ({"ledger": {"lost": LINE}}, "a ledger with other lines than"),
    ({"ledger": {"trained": {"tokens": 1.0}}}, "an invalid ledger: KeyError 'samples'"),
    ({"ledger": {"trained": LINE | {"tokens": math.inf}}}, "an invalid ledger: OverflowError"),
    ({"ledger": {"trained": LINE | {"upto_x": 1.0}}}, "an invalid ledger: ValueError"),
]


@pytest.mark.parametrize("more", HONEST)
def test_what_a_learner_may_say(more: dict[str, Any]) -> None:
    checks.check_hello(said(**more))


@pytest.mark.parametrize(("more", "why"), REFUSED)
def test_what_no_learner_can_be(more: dict[str, Any], why: str) -> None:
    with pytest.raises(BadMessage) as refused:
        checks.check_hello(said(**more))
    message = str(refused.value)
    assert message.startswith("the learner of epoch ") and why in message
