import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from process_kit import ENV, ROOT

from asyncrl.contract import refusal
from asyncrl.contract.errors import AsyncrlError, BadMessage, ConfigError
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


class RankEnded(AsyncrlError):
    exit_code = 137


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    monkeypatch.setenv(refusal.VARIABLE, str(writer))
    refusal.take_pipe()
    yield reader, writer
    refusal._pipes.clear()
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:
            pass


def test_a_refusal_arrives_once_with_its_exit_code(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    assert refusal.VARIABLE not in os.environ and not os.get_inheritable(writer)
    assert refusal.read_refusal(reader) is None, "nothing was sent"
    refusal.send_refusal(RankEnded("killed"))
    assert refusal.read_refusal(reader) is None, "the crash of another process"
    refusal.send_refusal(ConfigError("no such key \u00e9"))
    refusal.send_refusal(BadMessage("a second one"))
    error = refusal.read_refusal(reader)
    assert error is not None and str(error) == "no such key \u00e9"
    assert error.exit_code == ConfigError.exit_code
    assert refusal.read_refusal(reader) is None


def test_a_long_refusal_is_cut_and_still_read(pipe: tuple[int, int]) -> None:
    refusal.send_refusal(ConfigError("\U0001f600" * 100_000))
    error = refusal.read_refusal(pipe[0])
    assert error is not None and str(error) == "\U0001f600" * 4096


def test_without_a_supervisor_nothing_is_sent(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    refusal.send_refusal(ConfigError("to nobody"))
    assert refusal._pipes == []
    refusal.take_pipe()
    assert refusal._pipes == [], "a child of the child has none"


def test_other_bytes_are_no_refusal(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"Segmentation fault")
    assert refusal.read_refusal(reader) is None
