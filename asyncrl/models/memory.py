"""Memory that torch has freed stays with the process, for the next tensors of that size.

A step makes and frees the same tensors again and again.  glibc by default hands those of 128 KiB
and more back to the system at once, or, once it has learnt better, trims its heap behind them; the
next step then faults in every page anew and finds no cache warm: more than a quarter of the CPU
time of a learner's step at 84k parameters."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of mallopt, in malloc.h
KEPT = 1 << 30  # bytes free at the end of the heap that are not handed back
MAPPED = 1 << 28  # bytes of one tensor from which on it is: nothing so large is made at every step
SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)


def keep_freed() -> bool:
    """Let malloc keep what is freed, in this process, from now on; False where nothing was set: the
    user has settings of their own, or this is not glibc.

    Threads that begin later share the heap: what zmq's allocates, a batch of many megabytes, is
    freed by another, and a heap of its own would be handed back page by page each time."""
    if any(os.environ.get(name) for name in SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    wanted = ((ARENA_MAX, 1), (MMAP_THRESHOLD, MAPPED), (TRIM_THRESHOLD, KEPT))
    return all(mallopt(what, value) for what, value in wanted)
