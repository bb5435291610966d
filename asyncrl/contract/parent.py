"""What ties a child process to the one that started it: it must not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: in the child, SIGKILL when the thread that started it ends, also if it had
    ended before the child came to ask for that.
    """
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return ask
