"""Forks that run tests: each with limits in processor time and in time spent asleep.

A test that hangs under a mutant is ended after a small multiple of what it needs without one.
Time in which a busy machine lets a fork wait for a processor counts for neither limit."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, process_time, sleep  # tests may patch those of the module
from typing import Any, NamedTuple

import pytest

TIMES = 4.0  # of a test's normal time, before it counts as hanging
SPARE_CPU_S = 4.0
SPARE_ASLEEP_S = 8.0
START_S = 60.0  # asleep before the first test: imports and collecting
CHECK_S = 0.25  # from one look at a fork's sleep to the next


class NormalCost(NamedTuple):
    """What a test takes without a mutant, in seconds: processor time, and time asleep.

    setup_s: the processor time of all fixtures of its file."""

    cpu_s: float
    asleep_s: float = 0.0
    setup_s: float = 0.0


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def cpu_seconds() -> float:
    """Of this process and of the children it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


def awake_seconds(pid: int) -> float:
    """Return how long a process's main thread has run or waited for a processor.

    Raises OSError when the process is gone."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return (int(ran) + int(waited)) / 1e9


class TimeLimits:
    """A pytest plugin in a fork: limits each test, and notes in a file which one runs.

    costs: of each test; a test without one gets no limit of its own."""

    def __init__(self, note: Path, costs: Mapping[str, NormalCost]) -> None:
        self.note = note
        self.costs = costs

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        if (cost := self.costs.get(item.nodeid)) is not None:
            cpu_s = SPARE_CPU_S + TIMES * (cost.cpu_s + cost.setup_s)
            asleep_s = SPARE_ASLEEP_S + TIMES * (cost.asleep_s + cost.cpu_s)
            running = [item.nodeid, monotonic(), awake_seconds(os.getpid()), asleep_s]
            part = self.note.with_suffix(".part")
            part.write_text(json.dumps(running))
            part.replace(self.note)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
        yield
        signal.setitimer(signal.ITIMER_PROF, 0)


@dataclass
class Child:
    """A fork at work.  Its answer is a file: a mutant may end the process at any place."""

    pid: int
    directory: Path
    what: Any
    asleep_s: float = START_S
    began: float = field(default_factory=monotonic)
    next_check: float = 0.0

    @property
    def answer(self) -> dict[str, Any] | None:
        """What it has written, None without an answer."""
        file = self.directory / "answer.json"
        return json.loads(file.read_text()) if file.exists() else None

    @property
    def running(self) -> tuple[str, float, float, float] | None:
        """The noted test: its name, when it began, awake seconds then, and its limit asleep."""
        try:
            name, began, awake, limit = json.loads((self.directory / "running").read_text())
        except OSError:
            return None
        return name, began, awake, limit

    @property
    def is_asleep(self) -> bool:
        """Whether its test has slept for too long."""
        now = monotonic()
        if now < self.next_check:
            return False
        self.next_check = now + CHECK_S
        _, began, awake_before, limit = self.running or ("", self.began, 0.0, self.asleep_s)
        try:
            asleep = now - began - (awake_seconds(self.pid) - awake_before)
        except OSError:
            return False
        # a busy machine lets the processes and threads wait that a test waits for
        return asleep > limit * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def fork(
    what: Any,
    work: Path,
    cpu_s: float,
    act: Callable[[Path], dict[str, Any]],
    asleep_s: float = START_S,
) -> Child:
    """Run `act(directory)` in a fork, with processor time of `cpu_s` seconds at most.

    What it returns is written down for `reap`.  asleep_s: where no test has limits of its own."""
    directory = Path(tempfile.mkdtemp(dir=work))
    pid = os.fork()
    if pid:
        return Child(pid, directory, what, asleep_s)
    code = 1
    try:
        end_with_parent()
        os.setpgrp()  # for killpg; of the same session, whose share of the processor it has
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 5))
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
        out = os.open(directory / "out", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        (directory / "answer.json").write_text(json.dumps(act(directory)))
        code = 0
    finally:
        os._exit(code)


def reap(children: list[Child]) -> tuple[Child, dict[str, Any] | None, str]:
    """Wait for one to end: the child, its answer, and the test that ran last.

    The answer is None where the child ended, or was ended, without one."""
    while True:
        for child in children:
            pid, _ = os.waitpid(child.pid, os.WNOHANG)
            if not pid and child.is_asleep:
                os.killpg(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                pid = child.pid
            if pid:
                children.remove(child)
                answer = child.answer
                last = child.running[0] if child.running else ""
                shutil.rmtree(child.directory, ignore_errors=True)
                return child, answer, last
        sleep(0.02)
