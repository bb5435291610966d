"""The supervisor's rules, with children of one line: restarts, ends, what matters no longer."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from process_kit import ROOT

from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError, NothingToDo, ProcessLost
from asyncrl.contract.messages import RunStatus
from asyncrl.records import process_log
from asyncrl.supervise import doctor, launch
from asyncrl.supervise.launch import SupervisedProcess, Supervisor

REFUSE = (
    "import sys; from asyncrl.contract import refusal; from asyncrl.contract.errors import {kind}; "
    "refusal.take_pipe(); "
    "e = {kind}('{words}'); refusal.send_refusal(e);"
    "print('error: something else', file=sys.stderr); sys.exit(e.exit_code)"
)
WAIT = "import time; time.sleep(600)"
Make = Callable[..., Supervisor]
LATE_S, END_S = 5000.0, 30000.0  # longer than any test stands still


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is late for a run's end is late by what a test says, not by how long it took."""
    monkeypatch.setattr(launch, "LATE_S", LATE_S)
    monkeypatch.setattr(launch, "END_S", END_S)


@pytest.fixture
def make(tmp_path: Path) -> object:
    made: list[Supervisor] = []

    def supervisor(restarts: int = 1, **codes: str) -> Supervisor:
        s = Supervisor(
            load.load(ROOT / "configs" / "demo.toml", [f"watchdog.restarts={restarts}"]),
            tmp_path,
            lambda x: s.said.append(x),
        )  # type: ignore[attr-defined]
        s.said, s.logs = [], tmp_path  # type: ignore[attr-defined]
        s.children = [
            SupervisedProcess(name.replace("_", "-"), [sys.executable, "-c", code], 1, True)
            for name, code in codes.items()
        ]
        for child in s.children:
            s.spawn(child)
        s.watchdog.restart(time.monotonic())
        made.append(s)
        return s

    yield supervisor
    for s in made:
        s.end(gently=False)


def run(s: Supervisor, until: Callable[[], bool] = lambda: False) -> bool:
    """poll, as the live view does, until the end or `until` holds; what poll raises comes out."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if s.poll():
            return True
        if until():
            return False
        time.sleep(0.01)
    raise AssertionError("the awaited event did not come")


CRASHES = {
    "a traceback": "raise KeyError(3)",
    "a library's own exit": "import os; print('error: CUDA is gone'); os._exit(1)",
    "a kill": "import os; os.kill(os.getpid(), 9)",
    "an error that ends as a kill would": "import sys; from asyncrl.contract import refusal; from "
    "asyncrl.contract.errors import AsyncrlError; "
    "refusal.take_pipe();"
    "e = AsyncrlError('rank 1 has ended'); e.exit_code = 137; "
    "refusal.send_refusal(e); sys.exit(137)",
    "told to end by somebody": "import sys; sys.exit(130)",
}


@pytest.mark.parametrize("name", ["buffer", "learner", "generator_0"])
@pytest.mark.parametrize("how", CRASHES.values(), ids=CRASHES)
def test_a_crash_is_started_again_as_often_as_may_be(make: Make, name: str, how: str) -> None:
    s = make(restarts=2, **{name: how})
    with pytest.raises(
        ProcessLost,
        match=f"{name.replace('_', '-')} exited .* and cannot be started again; log: "
        f".*{name.replace('_', '-')}.log",
    ):
        run(s)
    assert s.children[0].restarts == 2


@pytest.mark.parametrize(
    ("kind", "code"),
    [("ConfigError", 2), ("AsyncrlError", 1), ("PeerUnreachable", 4), ("DamagedDataError", 5)],
)
def test_a_refusal_ends_the_run_at_once_in_its_own_words(make: Make, kind: str, code: int) -> None:
    s = make(learner=REFUSE.format(kind=kind, words="learner.lr: not today"))
    with pytest.raises(AsyncrlError, match=r"^learner\.lr: not today$") as e:
        run(s)
    assert e.value.exit_code == code and s.children[0].restarts == 0


def test_a_buffer_that_may_not_be_started_again_is_lost(make: Make) -> None:
    s = make(buffer=CRASHES["a traceback"])
    s.children[0].restartable = False
    with pytest.raises(ProcessLost, match="buffer exited"):
        run(s)


def test_a_child_of_a_child_cannot_speak_for_it(make: Make) -> None:
    """A process that a part starts has neither the pipe nor its number in its environment."""
    grandchild = "import os, sys; sys.exit(any('REFUSAL' in k for k in os.environ))"
    code = (
        "import subprocess, sys; from asyncrl.contract import refusal; refusal.take_pipe(); "
        f"subprocess.run([sys.executable, '-c', {grandchild!r}], check=True)"
    )
    assert run(make(learner=code))


@pytest.mark.parametrize("name", ["learner", "generator_0"])
def test_a_death_after_the_end_is_no_loss(make: Make, name: str) -> None:
    """The model was exported before the buffer could end: who dies now leaves nothing undone."""
    s = make(restarts=0, buffer="pass", **{name: WAIT})
    run(s, lambda: s.is_ended)
    assert s.children[1].process is not None
    s.children[1].process.kill()
    # type: ignore[attr-defined]
    assert run(s) and "ended (SIGKILL) after the end of the run" in s.said[-1]


def test_a_generator_that_has_heard_of_the_end_is_not_started_again(make: Make) -> None:
    s = make(generator_0=REFUSE.format(kind="NothingToDo", words="the run is over"))
    assert run(s) and s.children[0].restarts == 0 and NothingToDo.exit_code == 6


def test_what_starts_too_late_is_ended_soon_and_a_learner_that_is_closing_late(make: Make) -> None:
    s = make(buffer="pass", learner=WAIT, generator_0=WAIT)
    run(s, lambda: s.is_ended)
    codes = lambda: [c.code for c in s.children]  # noqa: E731
    s.end_remaining(LATE_S - 0.1)
    assert codes() == [0, None, None]
    s.status = RunStatus("r", 1, 1, 1, {}, {}, [], {"learner": 0.1}, True)
    s.end_remaining(LATE_S + 0.1)
    assert codes() == [0, None, 0]
    s.end_remaining(END_S + 0.1)
    assert codes() == [0, 0, 0] and run(s)


def test_a_generator_that_has_worked_is_ending_and_one_without_a_hello_starting(make: Make) -> None:
    s = make(buffer="pass", generator_0=WAIT, generator_1=WAIT)
    s.observe(RunStatus("r", 1, 1, 1, {}, {}, [], {"generator-0": 0.1}, False))
    s.observe(RunStatus("r", 1, 1, 1, {}, {}, [], {}, True))  # it has taken its leave
    run(s, lambda: s.is_ended)
    s.end_remaining(LATE_S + 0.1)
    assert [text for text in s.said if "when the run had ended" in text] == [
        "generator-0 was still ending when the run had ended",
        "generator-1 was still starting when the run had ended",
    ]


LEAKS = """error: the last words
nanobind: leaked 2 instances of type "ir.context"!
 - leaked type "ir.context"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
[W1127 08:00:00] Warning: WARNING: destroy_process_group() was not called before program exit, \
which can leak resources.
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There \
appear to be 1 leaked semaphore objects to clean up at shutdown
  warnings.warn('resource_tracker: There appear to be %d '
"""


def test_the_last_words_of_a_process_are_its_own(make: Make, tmp_path: Path) -> None:
    """Not what a library reports at exit."""
    code = f"import os, sys; sys.stderr.write({LEAKS!r}); sys.stderr.flush(); os._exit(3)"
    s = make(restarts=0, learner=code)
    with pytest.raises(ProcessLost):
        run(s)
    (row,) = [row for row in process_log.read_events(s.run_dir) if row["event"] == "died"]
    assert row["why"] == "error: the last words"
    assert doctor.describe_process("buffer", None, None, s.children[0].log)["last_line"] == (
        "error: the last words"
    )


def test_who_is_asked_to_end_has_longer_where_steps_may_take_longer(make: Make) -> None:
    """The learner finishes its batch: ten times the usual floor, ten times the patience."""
    s = make(buffer="pass", learner=WAIT)
    assert s.end_s == END_S
    watchdog = msgspec.structs.replace(s.config.watchdog, floor_s=600.0)
    s.config = msgspec.structs.replace(s.config, watchdog=watchdog)
    run(s, lambda: s.is_ended)
    s.status = RunStatus("r", 1, 1, 1, {}, {}, [], {"learner": 0.1}, True)
    s.end_remaining(10 * END_S - 0.1)
    assert [c.code for c in s.children] == [0, None]
    s.end_remaining(10 * END_S + 0.1)
    assert [c.code for c in s.children] == [0, 0]


def test_a_checkpoint_read_at_a_resume_is_no_pace(make: Make) -> None:
    """The number of committed batches jumps when the new learner has read its checkpoint.  They
    were not made since, so the run keeps the grace of a start.  In one epoch they give the pace."""
    s = make()

    def status(committed: int, epoch: int) -> RunStatus:
        return RunStatus("r", committed, 100, epoch, {}, {}, [], {}, False, progress=committed)

    s.observe(status(0, epoch=1))
    s.observe(status(90, epoch=2))
    assert s.watchdog.deadline == s.config.watchdog.startup_s
    s.watchdog.restart(time.monotonic())
    s.observe(status(90, epoch=2))
    s.observe(status(95, epoch=2))
    assert s.watchdog.deadline == s.config.watchdog.floor_s < s.config.watchdog.startup_s
