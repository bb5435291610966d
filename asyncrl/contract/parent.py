"""Tie a child process to its parent: the child must not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> Callable[[], None]:
    """Make a `preexec_fn` that kills the child (SIGKILL) when the thread that started it ends.

    It also works if that thread has ended before the child calls it."""
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def request_kill() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return request_kill
