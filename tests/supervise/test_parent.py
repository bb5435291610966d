from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from process_kit import ENV, ROOT

from asyncrl.contract.importing import end_with_parent

# The parent starts a child with a pipe's end, which the child writes to before and after it asks,
# and ends: before the child asks, or after.
PARENT = """
import os, signal, sys, time
from asyncrl.contract.importing import end_with_parent

pipe, first = int(sys.argv[1]), sys.argv[2] == "first"
ask, parent = end_with_parent(), os.getpid()
heard, told = os.pipe()
if os.fork() == 0:
    os.close(heard)
    while first and os.getppid() == parent:
        time.sleep(0.001)
    os.write(pipe, b"child ")
    ask()
    if not first:
        os.write(told, b"asked")
        time.sleep(3600)
    os.write(pipe, b"lives")
    os._exit(0)
os.close(told)
first or os.read(heard, 5)
os._exit(0)
"""


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_child_ends_with_a_parent_that_is_gone_before_it_asks_or_after(order: str) -> None:
    mine, theirs = os.pipe()
    with os.fdopen(mine, "rb") as pipe:
        argv = [sys.executable, "-c", PARENT, str(theirs), order]
        subprocess.run(argv, cwd=ROOT, env=ENV, pass_fds=[theirs], check=True, timeout=600)
        os.close(theirs)
        assert pipe.read() == b"child "  # to the end: nobody holds the other side


def test_what_is_asked_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    killed: list[tuple[int, int]] = []
    library = SimpleNamespace(prctl=lambda *words: asked.append(words))
    monkeypatch.setattr(ctypes, "CDLL", {None: library}.get)
    monkeypatch.setattr(os, "kill", lambda *words: killed.append(words))
    request = end_with_parent()
    monkeypatch.setattr(os, "getppid", os.getpid)
    request()
    assert asked == [(1, signal.SIGKILL)] and not killed  # PR_SET_PDEATHSIG of <sys/prctl.h>
    monkeypatch.setattr(os, "getppid", lambda: 1)
    request()
    assert len(asked) == 2 and killed == [(os.getpid(), signal.SIGKILL)]
