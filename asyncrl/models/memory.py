"""Keep memory that torch has freed in the process, for the next tensors of the same size.

A step allocates and frees the same tensors again and again. By default glibc returns blocks of
128 KiB and more to the system at once, or trims its heap after them. The next step then faults in
every page again with a cold cache, which took more than a quarter of the CPU time of a learner's
step at 84k parameters.
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of mallopt, in malloc.h
KEPT = 1 << 30  # free bytes at the end of the heap that are not returned to the system
MAPPED = 1 << 28  # larger tensors are returned: no step allocates one repeatedly
SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)


def keep_freed() -> bool:
    """Let malloc keep freed memory in this process from now on.

    Returns False where nothing was set: the user has malloc settings, or this is not glibc.
    Threads that start later share one heap: zmq's thread allocates batches of many megabytes that
    another thread frees, and a separate heap would be returned page by page each time.
    """
    if any(os.environ.get(name) for name in SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = ((ARENA_MAX, 1), (MMAP_THRESHOLD, MAPPED), (TRIM_THRESHOLD, KEPT))
    return all(mallopt(option, value) for option, value in settings)
