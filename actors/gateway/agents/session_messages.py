"""The messages between agents' processes and the gateway, and the log of those processes.

Messages are in reward processes' frames:

in:   AgentSetup, then SessionOrders
out:  SessionResult "ready" or "broken", then one for each session, in any order
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from actors.reward_worker import check_value
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import Numbers, Prompt
from asyncrl.contract.printable import describe_exception, get_first_line
from asyncrl.records import private

MOST_BYTES = 16 << 20  # a larger file becomes NAME.old, and a new one begins
NO_REWARD = "ended and gave no reward"


class AgentSetup(Struct, frozen=True):
    """The first message; log: the file for agents' output."""

    agent: AgentConfig
    log: str


class SessionAccess(Struct, frozen=True, array_like=True):
    """A session as its agent gets it.

    url: of the session, for its reward
    base_url: for OpenAI's client
    seed: the same for all samples of a group
    first: False if an earlier attempt at this sample may have acted
    deadline_s: seconds until its calls are refused
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


class SessionOrders(Struct, frozen=True):
    """Sessions to begin, and numbers of those to stop."""

    seats: list[SessionAccess] = []
    stop: list[int] = []


class SessionResult(Struct, frozen=True, array_like=True):
    """The result of an agent's session.

    kind: judge: the config's reward scores it; failed: `why` is the reason
    truncated: a limit of the environment has cut it
    scored: it failed, and its reward counts if a limit of the session is the cause
    """

    number: int
    kind: Literal["ready", "broken", "scored", "judge", "failed"]
    reward: float = 0.0
    parts: Numbers = {}
    why: str = ""
    truncated: bool = False
    scored: bool = False


def parse_outcome(
    number: int, value: Any, *, truncated: bool = False, failed: str = ""
) -> SessionResult:
    """Read an agent's return value.

    It is a number, a dict of parts with `reward`, or None for the config's reward.

    truncated, failed: a limit of the environment has cut it; the reason of a failure beside it
    """
    if value is None:
        return SessionResult(number, "judge")
    try:
        reward, parts, _ = check_value(value, 0)
    except Exception as error:
        reason = (
            str(error) if type(error) in (ValueError, BadMessage) else describe_exception(error)
        )
        return SessionResult(
            number, "failed", why=f"gave an invalid reward: {get_first_line(reason)}"
        )
    result = SessionResult(number, "scored", reward, parts, truncated=truncated)
    if not failed:
        return result
    why = f"failed: {get_first_line(failed)}"
    return msgspec.structs.replace(result, kind="failed", why=why, scored=True)


class AgentLog:
    """The log of agents' output: a file of bounded size, with a head for each session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writing = threading.Lock()

    def write(self, head: str, *texts: bytes) -> None:
        """Append a session's head and output.  Errors such as a full disk are ignored."""
        output = b"".join(text if text.endswith(b"\n") else text + b"\n" for text in texts if text)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with self.writing, contextlib.suppress(OSError):
            with os.fdopen(private.open_private(self.path, flags), "ab") as file:
                file.write(f"--- {head}\n".encode("utf-8", "replace") + output)
                size = file.tell()
            if size > MOST_BYTES:
                self.path.replace(self.path.with_suffix(".log.old"))
