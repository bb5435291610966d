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


def keep_freed(*, one_arena: bool = False) -> bool:
    """Let malloc keep what is freed, in this process, from now on; False where nothing was set: the
    user has settings of their own, or this is not glibc.

    one_arena: for all threads, where one makes what another frees (zmq's, messages), before there
    are any: each would otherwise have a heap of its own, and hand it back page by page."""
    if any(os.environ.get(name) for name in SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    if one_arena and not mallopt(ARENA_MAX, 1):
        return False
    return bool(mallopt(MMAP_THRESHOLD, MAPPED)) and bool(mallopt(TRIM_THRESHOLD, KEPT))
