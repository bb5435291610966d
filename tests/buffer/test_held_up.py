"""The session that a learner waits for: who it is, what limit would not wait, who is told."""

import io
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from process_kit import ROOT
from rich.console import Console

from asyncrl.config import load
from asyncrl.contract.messages import RunStatus
from asyncrl.contract.waits import (
    LONGEST_LINE,
    BlockingSession,
    OpenSession,
    ProcessWait,
    ProgressWatchdog,
    SessionWait,
    WaitLog,
    find_blocking_process,
    find_blocking_session,
)
from asyncrl.supervise import live
from asyncrl.supervise import run as runner
from asyncrl.supervise.run import SupervisedProcess, Supervisor

ONE = OpenSession(
    17, 3, "17.3.41", "prompt 5 'ab='", 6, "environment", "its tool add", 209.0, 212.0
)


def among(
    ticket: int, *sessions: OpenSession, step_s: float = 35.0, max_lag: float = 2
) -> BlockingSession:
    found = find_blocking_session(
        {"gateway-0": sessions}, ticket, usual_s=100.0, step_s=step_s, max_lag=max_lag
    )
    assert found is not None
    return found


def test_it_is_the_tickets_own_or_the_oldest() -> None:
    later = msgspec.structs.replace(ONE, ticket=20, name="20.0.50")
    assert among(20, later, ONE).session is later and among(-1, later, ONE).session is ONE
    assert find_blocking_session({"gateway-0": [ONE]}, 18, usual_s=0, step_s=1, max_lag=0) is None
    assert find_blocking_session({}, -1, usual_s=0, step_s=1, max_lag=0) is None


def test_what_goes_on_as_it_should_holds_nobody_up() -> None:
    for kind, open_s, seconds, named in (
        ("environment", 4.9, 4.9, False),
        ("environment", 5.0, 0.1, True),
        ("agent", 60.0, 0.0, True),
        ("engine", 60.0, 4.9, False),  # its calls are answered: that is throughput
        ("engine", 60.0, 5.0, True),
    ):
        one = msgspec.structs.replace(ONE, kind=kind, open_s=open_s, seconds=seconds)
        found = find_blocking_session({"gateway-0": [one]}, 17, usual_s=0, step_s=1, max_lag=0)
        assert (found is not None) == named


@pytest.mark.parametrize(
    ("open_s", "step_s", "max_lag", "kind", "needed"),
    [
        (212.0, 35.0, 2, "environment", 7),
        (210.0, 35.0, 2, "environment", 6),
        (50.0, 35.0, 2, "environment", 3),  # 95 % take 100 s
        (212.0, 35.0, 7, "environment", 0),  # the limit is no less: it is not at fault
        (212.0, 35.0, 6, "agent", 7),
        (212.0, 35.0, float("inf"), "agent", 0),
        (212.0, 35.0, 0, "engine", 0),
        (212.0, 0.0, 0, "agent", 0),  # no step was made
    ],
)
def test_the_limit_that_would_not_wait(
    open_s: float, step_s: float, max_lag: float, kind: SessionWait, needed: int
) -> None:
    one = msgspec.structs.replace(ONE, open_s=open_s, kind=kind)
    assert among(17, one, step_s=step_s, max_lag=max_lag).max_lag == needed


def test_the_words() -> None:
    usual = BlockingSession(
        msgspec.structs.replace(ONE, open_s=5.0), "gateway-0", 210.0, 35.0, 6
    ).describe()
    assert "would not wait (95 % of sessions end within 210 s, a step takes 35 s)" in usual
    assert "ends that" not in usual
    equal = msgspec.structs.replace(ONE, open_s=210.0)
    assert "(open for 210 s, " in BlockingSession(equal, "gateway-0", 210.0, 35.0, 6).describe()
    unknown = msgspec.structs.replace(ONE, open_s=0.5)
    said = BlockingSession(unknown, "gateway-0", step_s=35.0, max_lag=6).describe()
    assert "(open for 0 s, a step takes 35 s)" in said
    no_step = BlockingSession(unknown, "gateway-0", max_lag=1).describe()
    assert no_step.endswith("max_lag >= 1 would not wait (open for 0 s, a step takes 0 s)")
    nobody = BlockingSession(msgspec.structs.replace(ONE, name=""), "gateway-0").describe()
    assert nobody == (
        "the learner is held up by sample 3 of ticket 17 (prompt 5 'ab='): it has waited 209 s for "
        "its tool add"
    )


def test_a_deadline_of_its_own_ends_all_waits_but_one_for_the_engine() -> None:
    bounded = msgspec.structs.replace(ONE, kind="agent", limit="agent.step_s", ends_s=0.5)
    assert bounded.is_bounded
    for change in ({"kind": "engine"}, {"limit": ""}, {"ends_s": 0.0}):
        assert not msgspec.structs.replace(bounded, **change).is_bounded


def test_a_run_is_overdue_after_medians_of_its_own_steps() -> None:
    watch = ProgressWatchdog(multiple=10, floor_s=1, startup_s=60)
    assert watch.explain_overdue(60.0) == "" and watch.explain_overdue(60.1) == (
        "no commit and no evaluation answer for 60.1 s (grace of a start: watchdog.startup_s = 60 "
        "s)"
    )
    watch.observe(1, 1, 10.0)
    assert watch.explain_overdue(70.0) == ""
    watch.observe(2, 2, 12.0)
    assert watch.deadline == 20.0 and watch.explain_overdue(32.0) == ""
    assert watch.explain_overdue(32.5) == (
        "no commit and no evaluation answer for 20.5 s (deadline 20.0 s: 10 medians of 2.00 s, at "
        "least 1 s)"
    )
    watch.observe(3, 2, 13.0)  # an evaluation
    assert watch.explain_overdue(33.0) == "" and list(watch.steps) == [2.0]
    for number in range(60):
        watch.observe(4 + number, 4 + 2 * number, 14.0 + 0.02 * number)
    assert len(watch.steps) == 50 and watch.deadline == 1
    watch.restart(20.0)
    watch.observe(63, 122, 21.0)
    watch.observe(70, 126, 24.0)
    assert list(watch.steps) == [1.0]
    again = ProgressWatchdog(multiple=10, floor_s=1, startup_s=60)
    again.observe(0, 2, 5.0)
    assert again.deadline == 60


def status(kind: SessionWait, limit: str, *, wait_s: float = 9.0) -> RunStatus:
    one = msgspec.structs.replace(ONE, kind=kind, limit=limit, ends_s=88.0)
    waits = [ProcessWait("learner", "ticket 17: 1 samples at gateway-0", "gateway-0", wait_s)]
    peers = {"learner": 0.1, "gateway-0": 0.1}
    held = BlockingSession(one, "gateway-0", 0.0, 35.0, 7)
    return RunStatus("r", 3, 9, 1, {}, {}, waits, peers, False, held_up=held)


def test_the_live_view_says_it() -> None:
    now = status("environment", "agent.step_s")
    assert now.held_up is not None and now.held_up.describe() in live.format_status(now)
    assert "held up" not in live.format_status(status("environment", "agent.step_s", wait_s=0.5))
    out = io.StringIO()
    Console(file=out, width=400).print(live.build_table(now))
    assert now.held_up.describe() in out.getvalue()


class Killed:
    killed = False

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("kind", "limit", "killed"),
    [("environment", "agent.step_s", False), ("engine", "agent.deadline_s", True)],
)
def test_the_watchdog_leaves_a_session_to_its_own_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: SessionWait, limit: str, killed: bool
) -> None:
    """No process is ended for a tool that takes its time; for an engine that hangs one is."""
    said: list[str] = []
    now = 1e7
    # it stands still: a supervisor that did itself blames nobody
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now))
    supervisor = Supervisor(load.load(ROOT / "configs" / "calc.toml"), tmp_path, said.append)
    supervisor.logs = tmp_path
    gateway = Killed()
    for name, process in (("buffer", Killed()), ("learner", Killed()), ("gateway-0", gateway)):
        # type: ignore[arg-type]
        supervisor.children.append(child := SupervisedProcess(name, [], 1, True))
        child.process = process
    supervisor.observe(status(kind, limit))
    supervisor.progress_check = now
    supervisor.watchdog.since = now - 1e6
    supervisor.check_progress()
    assert gateway.killed == killed
    assert ("the learner is held up by session" in "".join(said)) == killed
    # the time until its deadline does not count later either
    assert supervisor.watchdog.explain_overdue(now + 1) == ""


def test_silence_counts_once_it_is_longer_than_the_patience() -> None:
    heard = {"learner": 5.0, "generator-0": 0.1}
    for silent, of_buffer, blocking in ((5.0, 5.0, "learner"), (5.0, 5.5, "buffer")):
        assert find_blocking_process(["learner"], [], heard, of_buffer, silent) == blocking
    waits = [ProcessWait("learner", "batch 3", "buffer", 9.0)]
    assert find_blocking_process(list(heard), waits, heard, 5.0, 5.0) == "generator-0"
    got = find_blocking_process(list(heard), waits, heard | {"learner": 5.5}, 5.0, 5.0)
    assert got == "learner"


def test_a_wait_is_told_in_a_line_of_bounded_length() -> None:
    (line,) = WaitLog().make_lines([ProcessWait("learner", "x" * 10_000 + "\n", "buffer", 10.0)])
    assert line.startswith("learner has waited for buffer for 10 s: xxx")
    assert len(line) == LONGEST_LINE + len("...") and "\n" not in line


def test_a_wait_is_logged_at_its_first_age_and_whenever_that_doubles() -> None:
    log = WaitLog(first_s=10)

    def said(*seconds: float) -> list[str]:
        return log.make_lines(
            [ProcessWait(f"p{n}", "what\x1b", "on", s) for n, s in enumerate(seconds)]
        )

    assert said(9.9) == [] and said(10.0) == ["p0 has waited for on for 10 s: what\\x1b"]
    assert said(19.9) == [] and len(said(20.0)) == 1 and said(39.9) == []
    assert said() == ["p0 no longer waits: what\\x1b"]
    assert said() == [] and len(said(10.0)) == 1, "another wait begins anew"
    assert len(said(15.0, 10.0)) == 1
