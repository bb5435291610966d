"""Environments in processes: what each session's environment said comes back; one that raises,
hangs or ends its process fails its own session, and the others of that process begin again."""

import re
import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from actors.gateway import environment_pool, environment_worker
from actors.gateway.environment_pool import EnvironmentPool
from actors.gateway.environment_worker import (
    EnvironmentEvent,
    EnvironmentOperation,
    EnvironmentSetup,
)
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt

PATIENCE_S = 600.0


def prompt(kind: str = "talks") -> Prompt:
    return Prompt(0, "ab=", meta={"kind": kind})


def reset(session: int, kind: str = "talks") -> EnvironmentOperation:
    return EnvironmentOperation(session, "reset", prompt=prompt(kind), seed=3)


@pytest.fixture()
def drive(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EnvironmentPool]:
    """With time enough for what is well; "grace_s" is of a process's import."""
    given = {"env": "agent_envs:Fails", "step_s": PATIENCE_S} | getattr(request, "param", {})
    monkeypatch.setattr("asyncrl.transport.worker_pool.GRACE_S", given.pop("grace_s", PATIENCE_S))
    made = EnvironmentPool(AgentConfig(**given))
    yield made
    made.close()


def poll(drive: EnvironmentPool, count: int) -> list[EnvironmentEvent]:
    out: list[EnvironmentEvent] = []
    until = time.monotonic() + PATIENCE_S
    while len(out) < count:
        assert time.monotonic() < until, out
        out += drive.poll()
        time.sleep(0.002)
    return out


def test_a_process_is_told_what_it_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[EnvironmentSetup, str]] = []

    def process(setup: bytes, python: str) -> str:
        made.append((msgspec.msgpack.decode(setup, type=EnvironmentSetup), python))
        return "process"

    monkeypatch.setattr(environment_pool, "_EnvironmentProcess", process)
    players = {"opponent": "self", "eval_opponent": "m:other"}
    more = {"workers": 2, "python": "/opt/python", "step_s": 7.0}
    agent = AgentConfig(env="m:E", args={"a": 1}, **players, **more)
    pool = EnvironmentPool(agent, judged=True)
    assert made == [(EnvironmentSetup(agent, True), "/opt/python")] * 2
    assert pool.workers == ["process"] * 2 and (pool.named, pool.call_s) == ("agent.env = m:E", 7.0)
    agent = AgentConfig(tools=["m:t"], opponent="self")
    pool = EnvironmentPool(agent, name="part a")
    assert made[-1] == (EnvironmentSetup(agent, False), "") and pool.named == "part a"


def test_a_session_begins_in_the_process_with_the_fewest() -> None:
    pool = EnvironmentPool.__new__(EnvironmentPool)
    pool.processes = {}

    def process(*sessions: int) -> Any:
        sent: list[Any] = []
        made = SimpleNamespace(sessions={*sessions}, asked=deque([(9, "step")]), ready=True)
        made.sent, made.send = sent, sent.append
        return made

    pool.workers = [process(1, 2), process(3), process(4, 5)]
    for session, place in ((6, 1), (7, 0), (8, 1)):
        pool.reset(reset(session))
        assert pool.processes[session] is pool.workers[place]
        assert session in pool.processes[session].sessions
        assert pool.processes[session].sent[-1] == [reset(session)]
        assert pool.processes[session].asked[-1] == (session, "reset")
    pool.end(6)
    pool.end(6)
    assert 6 not in pool.workers[1].sessions and 6 not in pool.processes
    assert pool.workers[1].sent[2:] == [[EnvironmentOperation(6, "end")]]


def test_sessions_share_a_process_and_nothing_else(drive: EnvironmentPool) -> None:
    drive.reset(reset(1))
    drive.reset(reset(2))
    assert {x.session: x.obs for x in poll(drive, 2)} == {1: "ab=", 2: "ab="}
    for session, text in ((1, "a"), (2, "abc"), (1, "ab"), (1, "")):
        drive.step(EnvironmentOperation(session, "step", text=text))
    found = poll(drive, 4)
    assert [(x.session, x.obs, x.reward, x.ended) for x in found] == [
        (1, "1=", 0.1, False),
        (2, "3=", 0.3, False),
        (1, "2=", 0.2, False),
        (1, "", 0.0, True),
    ]
    assert found[0].parts == {"turns": 1.0}
    drive.end(2)
    drive.reset(reset(3))
    assert [x.session for x in poll(drive, 1)] == [3]


@pytest.mark.parametrize(
    ("kind", "why"), [("raises", "raised KeyError: 'gone' in step"), ("nan", "the reward is nan")]
)
def test_an_exception_fails_its_session_alone(drive: EnvironmentPool, kind: str, why: str) -> None:
    drive.reset(reset(1, kind))
    drive.reset(reset(2))
    poll(drive, 2)
    drive.step(EnvironmentOperation(1, "step", text="a"))
    drive.step(EnvironmentOperation(2, "step", text="a"))
    failed, well = poll(drive, 2)
    assert (failed.session, failed.kind) == (1, "failed") and why in failed.why
    assert (well.session, well.kind) == (2, "ok")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("hangs", r"more than 1 s \(agent.step_s\)"),
        ("dies", r"its process ended \(exit code 3\)"),
        ("garbles", r"its process sent an invalid reply \(a frame of 4294967295 bytes\)"),
    ],
)
def test_a_hang_or_death_loses_the_others(drive: EnvironmentPool, kind: str, why: str) -> None:
    for session, what in ((1, "talks"), (2, kind), (3, "talks")):
        drive.reset(reset(session, what))
    poll(drive, 3)
    drive.step(EnvironmentOperation(1, "step", text="a"))
    drive.step(EnvironmentOperation(2, "step", text="a"))
    drive.step(EnvironmentOperation(3, "step", text="a"))
    first = poll(drive, 1)  # the first one's step is done, or its process has ended
    if kind == "hangs":
        drive.call_s = 1.0
    found = {x.session: x for x in first + poll(drive, 3 - len(first))}
    drive.call_s = PATIENCE_S
    assert found[1].kind in ("ok", "lost") and found[3].kind == "lost"
    assert found[2].kind == "failed" and re.search(why, found[2].why)
    assert drive.hangs == (kind == "hangs")
    drive.reset(reset(4))
    assert poll(drive, 1)[0].obs == "ab="


@pytest.mark.parametrize(
    ("drive", "said"),
    [
        (
            {"env": "agent_envs:Fails", "step_s": 0.2},
            r"agent\.env = agent_envs:Fails: 3 processes were lost in a reset, and none has ever "
            r"completed one; the last one as it took more than 0\.2 s \(agent\.step_s\): raise "
            r"agent\.step_s, or move slow work to the import",
        ),
        (
            {"env": "agent_sleeps:Nobody", "step_s": 0.2, "grace_s": 0.3},
            r"agent\.env = agent_sleeps:Nobody: 3 processes in a row were lost while importing "
            r"it, the last one as it took more than 0\.3 s \(agent\.step_s\); if the import",
        ),
    ],
    indirect=["drive"],
)
def test_what_no_process_has_ever_done_in_time_ends_the_run(
    drive: EnvironmentPool, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reset that hangs, an import that does: each process is told of, the third is the last."""
    drive.reset(reset(1, "hangs at reset"))
    numbers = iter(range(2, 100))
    with pytest.raises(ConfigError, match=said):
        while True:
            for each in poll(drive, 1):
                assert each.kind in ("failed", "lost")
                drive.reset(reset(next(numbers), "hangs at reset"))
    assert capfd.readouterr().err.count("a process was lost in ") >= 2
    assert re.match("[23] lost in ", drive.replaced)


def test_steps_that_were_done_before_are_only_counted(drive: EnvironmentPool) -> None:
    """A service that is away for a while ends no run: the budget of failures does."""
    drive.done.add("step")
    worker = drive.workers[0]
    worker.ready = True
    for _ in range(20):
        drive._count(worker, "step", "it took more than 1 s (agent.step_s)")
    assert drive.replaced.startswith("20 lost in a step so far, the last one as it took more")
    for kind, activity in (("score", "get_reward"), ("", "a pause")):
        drive._count(worker, kind, "its process ended (SIGKILL)")
        assert drive.replaced.startswith(f"1 lost in {activity} so far")
    with pytest.raises(ConfigError, match="3 processes were lost in a reset, and none has ever"):
        for _ in range(3):
            drive._count(worker, "reset", "its process ended (SIGKILL)")


@pytest.mark.parametrize("drive", [{"env": "agent_envs:Nobody"}], indirect=True)
def test_an_environment_that_is_not_there_is_named(drive: EnvironmentPool) -> None:
    drive.reset(reset(1))
    with pytest.raises(ConfigError, match=r"agent\.env = agent_envs:Nobody: importing it raised"):
        poll(drive, 1)


@pytest.mark.parametrize("obs", [5, [], [3], [{"content": "x"}]])
def test_an_observation_is_text_or_messages(obs: object) -> None:
    with pytest.raises(ValueError, match="an observation must be text or a list of messages"):
        environment_worker.check_observation(obs)
