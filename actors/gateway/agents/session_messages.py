"""What the gateway and the processes that play its sessions say to each other: frames as those of
reward processes.  In: Setup, then lists of Seat and of sessions to stop.  Out: Left("ready" or
"broken"), then one for each seat, in any order.
"""

from __future__ import annotations

import socket
from typing import Any, Literal

import msgspec

from actors.reward_worker import check_value, describe_exception, first_line
from asyncrl.contract.messages import Prompt
from asyncrl.transport.child import frame

NO_REWARD = "ended and gave no reward"


class AgentSetup(msgspec.Struct, frozen=True):
    """Once: what agent.command or agent.function names, the file for what agents print, and the
    variables that programs inherit (agent.env_pass).
    """

    command: list[str]
    function: str
    log: str
    env_pass: list[str] = []


class SessionAccess(msgspec.Struct, frozen=True, array_like=True):
    """A session as an agent is given it.  url: for its reward; base_url: for OpenAI's client.
    seed: the same for all samples of a group; first: no earlier attempt at this sample may have
    acted; deadline_s: seconds until its calls are refused.
    """

    number: int
    name: str
    url: str
    api_key: str
    model: str
    prompt: Prompt
    seed: int
    attempt: int
    first: bool
    deadline_s: float

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


class SessionOrders(msgspec.Struct, frozen=True):
    """Sessions that begin, and numbers of those that are to end now."""

    seats: list[SessionAccess] = []
    stop: list[int] = []


class SessionResult(msgspec.Struct, frozen=True, array_like=True):
    """How an agent's session ended.  judge: the config's reward is asked; failed: why says it."""

    number: int
    kind: Literal["ready", "broken", "scored", "judge", "failed"]
    reward: float = 0.0
    parts: dict[str, float] = {}
    why: str = ""


def parse_outcome(number: int, value: Any) -> SessionResult:
    """What an agent returned: a number; a dict of parts with `reward`; None: the config's reward
    judges.
    """
    if value is None:
        return SessionResult(number, "judge")
    try:
        reward, parts, _ = check_value(value, 0)
    except Exception as error:
        why = str(error) if type(error) is ValueError else describe_exception(error)
        return SessionResult(number, "failed", why=f"gave what is no reward: {first_line(why)}")
    return SessionResult(number, "scored", reward, parts)


def send(wire: socket.socket, left: SessionResult) -> None:
    """To the gateway."""
    wire.sendall(frame(msgspec.msgpack.encode(left)))
