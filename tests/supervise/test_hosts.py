"""The supervisor's rules, with a launcher that starts nothing."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hosts_kit import (
    maker,
    said,  # noqa: F401
    supervisor,  # noqa: F401
)
from process_kit import ENV, ROOT

from asyncrl.config import load
from asyncrl.contract import errors, refusal
from asyncrl.contract.errors import AsyncrlError, BadMessage, ConfigError, NothingToDo, ProcessLost
from asyncrl.contract.importing import end_with_parent
from asyncrl.contract.messages import RunStatus
from asyncrl.contract.printable import LONGEST_LINE
from asyncrl.contract.waits import ProcessWait
from asyncrl.records import process_log
from asyncrl.supervise import doctor
from asyncrl.supervise import run as runner
from asyncrl.supervise.hosts import TAIL_BYTES, read_last_lines
from asyncrl.supervise.run import SupervisedProcess, Supervisor


def test_what_a_maker_is_asked_to_start(supervisor: Supervisor, tmp_path: Path) -> None:
    orders = {process.order.name: process.order for process in maker(supervisor).made}
    assert list(orders) == ["buffer", "learner", "generator-0", "generator-1"]
    assert orders["learner"].threads == 3 and orders["buffer"].threads == 1
    assert orders["generator-1"].argv[-2:] == ["--index", "1"]
    assert orders["buffer"].log == tmp_path / "logs" / "attempt_1" / "buffer.log"


def test_the_budget_of_restarts_is_the_supervisors(supervisor: Supervisor, said: list[str]) -> None:
    for life in range(3):
        process = maker(supervisor).newest("generator-1")
        process.code = 1
        if life < 2:
            assert not supervisor.poll() and process.closed == 1
            assert maker(supervisor).newest("generator-1") is not process
    assert "    the last 20 lines of generator-1" in said
    with pytest.raises(ProcessLost, match=r"generator-1 exited \(exit code 1\) and cannot be"):
        supervisor.poll()


def test_generators_come_back_to_a_run_that_goes_on_after_its_end(
    supervisor: Supervisor, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it waits for evaluations that no process writes."""
    now = runner.time.monotonic()
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now))
    status = RunStatus("r", 9, 9, 1, {}, {}, [], {}, True)
    for name in ("generator-0", "generator-1"):
        maker(supervisor).newest(name).code = 0
    before = len(maker(supervisor).made)
    for finished, later in ((True, 60.0), (False, 0.0), (False, runner.LATE_S)):
        supervisor.observe(msgspec.structs.replace(status, finished=finished))
        supervisor.status_time = now + later
        assert not supervisor.poll() and len(maker(supervisor).made) == before
    supervisor.status_time = now + runner.LATE_S + 1
    assert not supervisor.poll() and len(maker(supervisor).made) == before + 2
    assert "the run resumed from an earlier step: starting generator-1 again" in said
    assert not supervisor.poll() and len(maker(supervisor).made) == before + 2
    # where the buffer itself has ended well, the run is over
    maker(supervisor).newest("generator-0").code = maker(supervisor).newest("buffer").code = 0
    supervisor.poll()
    supervisor.status_time = now + 60.0
    supervisor.poll()
    assert len(maker(supervisor).made) == before + 2


def test_who_holds_the_run_up_is_ended_and_started_again(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = runner.time.monotonic()
    # a supervisor that was away for seconds blames nobody: its clock stands still here
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now))
    waits = [ProcessWait("learner", "a batch", "generator-0", 900.0)]
    peers = {"generator-0": 900.0, "generator-1": 0.1, "learner": 0.1}
    supervisor.observe(RunStatus("r", 1, 9, 1, {}, {}, waits, peers, False))
    supervisor.progress_check = now
    supervisor.watchdog.restart(now - 1e6)
    held_up = maker(supervisor).newest("generator-0")
    supervisor.check_progress()
    assert maker(supervisor).events == ["generator-0 killed"]
    assert not supervisor.poll() and maker(supervisor).newest("generator-0") is not held_up
    again = maker(supervisor).newest("generator-0")
    again.code = -signal.SIGKILL  # by somebody else
    assert not supervisor.poll()
    ends = [row for row in process_log.read_events(supervisor.run_dir) if row["event"] == "died"]
    assert [row.get("held_up", False) for row in ends] == [True, False]


def test_a_run_ends_in_order_and_who_does_not_hear_is_killed(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "END_S", 0.05)
    maker(supervisor).newest("generator-1").deaf = True
    supervisor.end(gently=True)
    assert maker(supervisor).events == [
        "learner SIGTERM",
        "generator-0 SIGTERM",
        "generator-1 SIGTERM",
        "generator-1 killed",
        "buffer SIGTERM",
    ]
    assert all(process.closed == 1 for process in maker(supervisor).made)
    assert {c.name: c.code for c in supervisor.children} == {
        "buffer": 130,
        "learner": 130,
        "generator-0": 130,
        "generator-1": -signal.SIGKILL,
    }


def test_a_learner_has_as_long_for_its_end_as_for_a_step(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a step and a checkpoint of its model take; all others END_S."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    learner, generator = (maker(supervisor).newest(n) for n in ("learner", "generator-0"))
    learner.deaf = generator.deaf = True
    killed: dict[str, float] = {}
    for process in (learner, generator):
        kill, name = process.kill, process.order.name
        monkeypatch.setattr(
            process, "kill", lambda kill=kill, name=name: (killed.update({name: clock[0]}), kill())
        )
    patience = supervisor.watchdog.deadline
    supervisor.end(gently=True)
    assert patience > 2 * runner.END_S and killed["learner"] == pytest.approx(patience, abs=0.1)
    assert killed["generator-0"] == pytest.approx(killed["learner"] + runner.END_S, abs=0.1)


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_last_lines(log, 3) == []
    log.write_bytes(b"x" * TAIL_BYTES + b"\nb\nc\xff\nd\n")
    assert read_last_lines(log, 3) == ["b", "c\ufffd", "d"]
    assert read_last_lines(log, 9)[0] == "x" * LONGEST_LINE + "..."


# The parent starts a child with a pipe's end, which the child writes to before and after it asks,
# and ends: before the child asks, or after.
PARENT = (Path(__file__).parents[1] / "data" / "programs" / "hosts_parent.txt").read_text()


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
    os.write(writer, b"Segmentation fault")
    assert refusal.read_refusal(reader) is None, "other bytes"
    refusal.send_refusal(RankEnded("killed"))
    assert refusal.read_refusal(reader) is None, "the crash of another process"
    refusal.send_refusal(ConfigError("no such key \u00e9"))
    refusal.send_refusal(BadMessage("a second one"))
    error = refusal.read_refusal(reader)
    assert error is not None and str(error) == "no such key \u00e9"
    assert error.exit_code == ConfigError.exit_code and refusal.read_refusal(reader) is None


def test_a_long_refusal_is_cut_and_still_read(pipe: tuple[int, int]) -> None:
    refusal.send_refusal(ConfigError("\U0001f600" * 100_000))
    error = refusal.read_refusal(pipe[0])
    assert error is not None and str(error) == "\U0001f600" * 4096


def test_errors_have_the_exit_codes_of_the_page() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"(?m)^\| (\d+) \| (.+?) \| ", page)
    assert {int(code): meaning for code, meaning in rows} == errors.EXIT_CODES
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert {kind.__name__: kind("").exit_code for kind in kinds if kind("").exit_code != 1} == {
        "ConfigError": 2,
        "ProcessLost": 3,
        "PeerUnreachable": 4,
        "DamagedDataError": 5,
        "NothingToDo": 6,
        "BufferTakenOver": 7,
    }
    assert (str(AsyncrlError()), ConfigError("no", 9).exit_code) == ("", 9)
    assert BadMessage("no").reason == "message"


def test_without_a_supervisor_nothing_is_sent(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    refusal.send_refusal(ConfigError("to nobody"))
    assert refusal._pipes == []
    refusal.take_pipe()
    assert refusal._pipes == [], "a child of the child has none"


REFUSE = (
    "import sys; from asyncrl.contract import refusal; from asyncrl.contract.errors import {kind}; "
    "refusal.take_pipe(); "
    "e = {kind}('{words}'); refusal.send_refusal(e);"
    "print('error: something else', file=sys.stderr); sys.exit(e.exit_code)"
)
WAIT = "import time; time.sleep(600)"
Make = Callable[..., Supervisor]
LATE_S, END_S = 5000.0, 30000.0  # longer than any test stands still


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    made: list[Supervisor] = []
    # who is late for a run's end is late by what a test says, not by how long it took
    monkeypatch.setattr(runner, "LATE_S", LATE_S)
    monkeypatch.setattr(runner, "END_S", END_S)

    def supervisor(restarts: int = 1, **codes: str) -> Supervisor:
        s = Supervisor(
            load.load(ROOT / "configs" / "demo.toml", [f"watchdog.restarts={restarts}"]),
            tmp_path,
            lambda x: s.said.append(x),
        )  # type: ignore[attr-defined]
        s.said, s.logs = [], tmp_path  # type: ignore[attr-defined]
        for name, code in codes.items():
            argv = [sys.executable, "-c", code]
            s.spawn(SupervisedProcess(name.replace("_", "-"), argv, 1, True))
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
    assert [child.restarts for child in s.children] == [2]


@pytest.mark.parametrize(
    ("kind", "code"),
    [("ConfigError", 2), ("AsyncrlError", 1), ("PeerUnreachable", 4), ("DamagedDataError", 5)],
)
def test_a_refusal_ends_the_run_at_once_in_its_own_words(make: Make, kind: str, code: int) -> None:
    s = make(learner=REFUSE.format(kind=kind, words="learner.lr: not today"))
    with pytest.raises(AsyncrlError, match=r"^learner\.lr: not today$") as e:
        run(s)
    assert e.value.exit_code == code and s.children[0].restarts == 0


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
    s.children[1].process.kill()
    # type: ignore[attr-defined]
    assert run(s) and "ended (SIGKILL) after the end of the run" in s.said[-1]


def test_who_is_not_started_again(make: Make) -> None:
    s = make(generator_0=REFUSE.format(kind="NothingToDo", words="the run is over"))
    assert run(s) and s.children[0].restarts == 0 and NothingToDo.exit_code == 6
    s = make(buffer=CRASHES["a traceback"])
    s.children[0].restartable = False
    with pytest.raises(ProcessLost, match="buffer exited"):
        run(s)


@pytest.mark.parametrize("longer", [1, 10])
def test_what_starts_too_late_is_ended_soon_and_a_learner_that_is_closing_late(
    make: Make, longer: int
) -> None:
    """The learner finishes its batch: with ten times the usual floor, ten times the patience."""
    s = make(buffer="pass", learner=WAIT, generator_0=WAIT)
    watchdog = msgspec.structs.replace(s.config.watchdog, floor_s=60.0 * longer)
    s.config = msgspec.structs.replace(s.config, watchdog=watchdog)
    run(s, lambda: s.is_ended)
    codes = lambda: [c.code for c in s.children]  # noqa: E731
    s.end_remaining(LATE_S - 0.1)
    assert codes() == [0, None, None]
    s.observe(RunStatus("r", 1, 1, 1, {}, {}, [], {"learner": 0.1}, True))
    s.end_remaining(LATE_S + 0.1)
    s.end_remaining(longer * END_S - 0.1)
    assert codes() == [0, None, 0]
    s.end_remaining(longer * END_S + 0.1)
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
    assert doctor.describe_process("buffer", {}, None, s.children[0].log)["last_line"] == (
        "error: the last words"
    )


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
