"""How a supervisor tells a clear refusal from a crash: the child says a refusal through a pipe of
its own; whatever else ends it is a crash.

Exit codes alone cannot: Python ends with 1 after any traceback, and so do libraries that give up in
their own words.  A pipe needs no disk, which may be full."""

from __future__ import annotations

import json
import os

from asyncrl.contract.errors import AsyncrlError

VARIABLE = "ASYNCRL_REFUSAL_FD"
MOST_BYTES = 32_768  # of a message; a pipe holds 65,536 without a reader


_mine: list[int] = []


def listen() -> None:
    """In the child, at its start: the pipe is this process's alone; those that it starts itself
    inherit neither it nor its number.
    """
    if number := os.environ.pop(VARIABLE, ""):
        os.set_inheritable(int(number), False)
        _mine.append(int(number))


def send_refusal(error: AsyncrlError) -> None:
    """In the child: the message and its exit code, for the supervisor, if one has started this
    process.

    An error that ends as a signal would (RankLost: 137) is a crash of something else: starting
    again may go well, so it is no refusal."""
    if not _mine or error.exit_code >= 128:
        return
    try:
        os.write(_mine.pop(), json.dumps([error.exit_code, str(error)[: MOST_BYTES // 8]]).encode())
    except OSError:
        pass  # nobody listens any more


def read_refusal(pipe: int) -> AsyncrlError | None:
    """In the supervisor, after the child's end: the refusal it told through `pipe`, None when it
    told none.
    """
    os.set_blocking(pipe, False)
    try:
        code, message = json.loads(os.read(pipe, MOST_BYTES))
    except (OSError, ValueError):
        return None
    error = AsyncrlError(message)
    error.exit_code = code
    return error
