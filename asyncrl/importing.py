"""Importing torch, cheaply."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """Around imports: no collection runs, and what is there afterwards is never looked at again.

    Modules are no garbage; to search them dozens of times while torch makes them, and once more at the end, costs a process half a second of CPU.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
