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


def look(**more: Any) -> None:
    """As the buffer does with what comes over a wire."""
    data = msgspec.msgpack.encode(said(**more))
    checks.check_hello(msgspec.msgpack.decode(data, type=LearnerHello))


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
    ({"epoch": 0, "label": Label(0, 0)}, "at `$.epoch`"),
    ({"label": Label(2, 0)}, "cannot be at version"),
    ({"label": Label(1, -1)}, "at `$.label[1]`"),
    ({"origin": -1}, "at `$.origin`"),
    ({"origin": 2}, "cannot have resumed from epoch 2"),
    ({"max_lag": -0.5}, "at `$.max_lag`"),
    ({"max_lag": math.nan}, "at `$.max_lag`"),
    ({"limit": -1}, "at `$.limit`"),
    ({"vocabulary": -1}, "at `$.vocabulary`"),
    ({"vocabulary": 1 << 31}, "at `$.vocabulary`"),
    ({"routing": (0, 8, 2)}, "at `$.routing[0]`"),
    ({"routing": (1, 8, 0)}, "at `$.routing[2]`"),
    ({"routing": (1, 8, 9)}, "cannot have a model of"),
    ({"routing": (1, 1 << 16, 2)}, "at `$.routing[1]`"),
    ({"next_ticket": -1}, "at `$.next_ticket`"),
    ({"next_ticket": 1 << 48}, "at `$.next_ticket`"),
    ({"trained_above": [3, -1]}, "at `$.trained_above[1]`"),
    ({"trained_above": [3, 1 << 48]}, "at `$.trained_above[1]`"),
    ({"ring": [(Label(1, 0), "a")]}, "not earlier versions of its epoch: 1.0"),
    ({"label": Label(1, 3), "ring": [(Label(2, 1), "a")]}, "not earlier versions"),
    ({"label": Label(1, 3), "ring": [(Label(1, -1), "a")]}, "at `$.ring[0][0][1]`"),
    (placed(credit={"a": math.inf}), "at `$.mixture.credit[...]`"),
    (placed(indices={"a": -1}), "at `$.mixture.indices[...]`"),
    (placed(due=[("a", -2)]), "at `$.mixture.due[0][1]`"),
    (placed(removed={"a": -1}), "at `$.mixture.removed[...]`"),
    (placed(ledgers={"a": {"lost": LINE}}), "a ledger with other lines than"),
    ({"ledger": {"lost": LINE}}, "a ledger with other lines than"),
    ({"ledger": {"trained": {"tokens": 1.0}}}, "an invalid ledger: KeyError 'samples'"),
    ({"ledger": {"trained": LINE | {"tokens": math.inf}}}, "an invalid ledger: OverflowError"),
    ({"ledger": {"trained": LINE | {"upto_x": 1.0}}}, "an invalid ledger: ValueError"),
]


@pytest.mark.parametrize("more", HONEST)
def test_what_a_learner_may_say(more: dict[str, Any]) -> None:
    look(**more)


@pytest.mark.parametrize(("more", "why"), REFUSED)
def test_what_no_learner_can_be(more: dict[str, Any], why: str) -> None:
    with pytest.raises((BadMessage, msgspec.ValidationError)) as refused:
        look(**more)
    message = str(refused.value)
    assert message.startswith(("the learner of epoch ", "Expected ")) and why in message
