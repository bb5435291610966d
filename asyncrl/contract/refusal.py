"""Distinguish a child's clear refusal from a crash: it sends a refusal through a separate pipe.

Exit codes do not suffice: Python exits with 1 after any traceback, and so do libraries with their
own error messages.  A pipe also works when the disk is full."""

from __future__ import annotations

import json
import os

from asyncrl.contract.errors import AsyncrlError

VARIABLE = "ASYNCRL_REFUSAL_FD"
MOST_BYTES = 65_536  # of a message: a pipe holds them without a reader
_pipes: list[int] = []  # the pipe of this process, until it is used


def take_pipe() -> None:
    """Take the pipe in the child at its start.

    The child's own children inherit neither the pipe nor its number."""
    if number := os.environ.pop(VARIABLE, None):
        os.set_inheritable(int(number), False)
        _pipes.append(int(number))


def send_refusal(error: AsyncrlError) -> None:
    """Send the message and its exit code from the child to its supervisor, if there is one.

    An error with the exit code of a signal (RankLost: 137) is the crash of another process. It is
    not sent: a restart may succeed."""
    if not _pipes or error.exit_code >= 128:
        return
    try:
        os.write(
            _pipes.pop(), json.dumps([error.exit_code, str(error)[: MOST_BYTES // 16]]).encode()
        )
    except OSError:
        pass  # the supervisor is gone


def read_refusal(pipe: int) -> AsyncrlError | None:
    """Read a child's refusal in the supervisor after the child's exit; None if it sent none."""
    os.set_blocking(pipe, False)
    try:
        code, message = json.loads(os.read(pipe, MOST_BYTES))
    except (OSError, ValueError):
        return None
    return AsyncrlError(message, code)
