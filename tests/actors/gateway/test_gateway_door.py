"""Leases by hand: a gateway whose buffer and generators are the test, asked from one event loop."""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait  # select.select knows no descriptor above 1023
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from gateway_door_kit import (
    config,  # noqa: F401  # noqa: F401
    ticket,
)
from gateway_service_kit import AT, Wire

import asyncrl
from actors.gateway import environment_sessions, http_gateway, service
from actors.gateway.environment_sessions import EnvironmentSource, SingleCompletions
from actors.gateway.refusals import CallRefused
from actors.gateway.service import WaitCause
from actors.gateway.session_api import SessionApi
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config
from asyncrl.contract import foreign_start
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.models import tokenizer


@pytest.fixture
def gateway(config: Config, tmp_path: Path) -> Iterator[service.Gateway]:
    (tmp_path / "run_id").write_text("run")
    made = service.Gateway(config, tmp_path, source=SessionApi)
    made.socket.close()
    made.socket = Wire()
    yield made
    made.close()


def sessions_of(gateway: service.Gateway) -> SessionApi:
    assert isinstance(gateway.sources[""], SessionApi)
    return gateway.sources[""]


async def refused(call: Any) -> tuple[int, str, str]:
    with pytest.raises(CallRefused) as caught:
        await call
    return caught.value.status, caught.value.code, str(caught.value)


def test_what_clients_may_ask_for_and_what_sessions_wait_for(gateway: service.Gateway) -> None:
    door = sessions_of(gateway)
    policy = door.request_policy
    assert policy.agent is gateway.config.agent and policy.agent.serve
    assert policy.stops == {*gateway.stops} and policy.stops
    assert policy.vocabulary == gateway.vocabulary > 0  # ids of the token route lie below it
    harness = "a harness to lease a session (RUN/agent.url, RUN/agent.key)"
    assert door.explain_queue("") == WaitCause("agent", harness)
    gateway.open_sessions()
    assert gateway.waiting_for == harness  # no ticket is asked for before a lease
    door.asks = 1
    gateway.open_sessions()
    assert gateway.waiting_for == "a ticket"
    agents = {
        "its harness: the next call, or its reward": AgentConfig(serve=True),
        "its program (agent.command): the next call, or its end": AgentConfig(command=["x"]),
        "its function (agent.function): the next call, or its end": AgentConfig(function="a:b"),
        "its environment (agent.env): the next call, or its end": AgentConfig(env="a:b"),
    }
    for what, agent in agents.items():
        gateway.agents["one"] = agent
        session: Any = SimpleNamespace(part="one", name="1.0.1")
        door.add(session)
        wait = door.explain_wait(session, "limit", 2.0, 1.0)
        assert wait == WaitCause("agent", what, "limit", 2.0)
    gateway.agents[""] = AgentConfig(function="words:play", at_once=7)
    worker = SimpleNamespace(ready=True)
    door.pools[""] = Mock(workers=[worker])
    assert door.explain_queue("") == WaitCause("place", "a place: agent.at_once = 7")
    worker.ready = False
    ready = WaitCause("place", "a process that imports agent.function = words:play to be ready")
    assert door.explain_queue("") == ready


def test_leases_calls_and_a_new_life_of_the_learner(gateway: service.Gateway) -> None:
    wire = gateway.socket

    async def play() -> None:
        door = sessions_of(gateway)
        assert await door.lease("a", 0.0) is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(door, "current_time", lambda: 5.0)  # so that 1 s is always left
            waiting = asyncio.create_task(door.lease("a", 1.0))
            await asyncio.sleep(0)
            assert not waiting.done()
            with pytest.MonkeyPatch.context() as room:
                room.setattr(type(gateway), "free_sessions", 9)
                assert door.count_wanted() == 1
                others = [asyncio.create_task(door.lease(x, 1.0)) for x in "xy"]
                await asyncio.sleep(0)
                assert door.count_wanted() == 3
                for other in others:
                    other.cancel()
                await asyncio.wait(others)
                assert door.count_wanted() == 1
            gateway.request_samples()
            wanted = [x.samples for x in wire.sent if isinstance(x, m.TicketRequest)]
            assert wanted == [1]  # as many as asked
            gateway.accept_tickets([ticket(1), ticket(2, "eval", 1)])
            door.open_sessions()
            first = await waiting
        assert first is not None and first.ticket.kind == "eval"  # evaluation goes first
        assert await door.lease("a", 0.0) is first
        described = str(first.ticket.prompt.describe_task())
        assert "secret" not in described and first.first
        session = await door.lease("b", 0.0)
        assert session is not None and session.api_key != first.api_key
        assert await door.lease("c", 0.0) is None  # agent.sessions
        # a call is drawn, an answer comes, the session is scored and delivered
        call = session.place(text="ab=", now=door.current_time())
        drawing = asyncio.create_task(door.draw(session, call))
        await asyncio.sleep(0)
        (number,) = gateway.router.open
        assert gateway.router.open[number].message.stream == 0  # the plain answer's stream
        spans = [m.VersionSpan(AT, "d", 0, 1, AT)]
        one, logprob = np.ones(1, "<i4").tobytes(), np.zeros(1, "<f4").tobytes()
        gateway.on_result(m.CallResult(number, one, logprob, spans, "stop"))
        assert await drawing is session.tree.nodes[0]
        session.set_reward(1.0, now=door.current_time())
        gateway.tick(door.current_time())
        (sample,) = gateway.outbox.fresh
        assert (sample.ticket, sample.reward, sample.calls) == (1, 1.0, 1)
        assert door.find(session.name) is session  # it is told that it has ended
        # the learner's next life: an open session waits, its call too, until its sample is granted
        third = await door.lease("c", 0.0)
        assert third is not None
        call = third.place(text="ab=", now=door.current_time())
        drawing = asyncio.create_task(door.draw(third, call))
        await asyncio.sleep(0)
        (was,) = gateway.router.open
        source = m.WeightsSource(2, "", "", "")
        gateway.announce(m.PolicyAnnouncement(Label(2, 0), "d", source))
        await asyncio.sleep(0)
        assert not gateway.router.open  # drawn by nobody
        assert not drawing.done() and third.state == "open"
        granted, sample = third.attempt, third.sample
        again = msgspec.structs.replace(ticket(3), ticket=1, samples=[sample])
        gateway.accept_tickets([msgspec.structs.replace(again, min_version=Label(2, 0))])
        (number,) = gateway.router.open
        assert number != was and gateway.router.open[number].message.min_version == Label(2, 0)
        spans = [m.VersionSpan(Label(2, 0), "d", 0, 1, AT)]
        gateway.on_result(m.CallResult(number, one, logprob, spans, "stop"))
        assert await drawing is third.tree.nodes[0]
        with patch.context() as observed:
            observed.setattr(door, "on_progress", Mock())
            door.on_change(third)
            assert third.state == "open" and not door.on_progress.called
        assert third.adopted == [(granted, 0)] and door.find(third.name) is third
        # one that nothing adopts ends by its deadline, and whoever waits for it hears of that
        call = third.place(text="ab=", now=door.current_time())
        drawing = asyncio.create_task(door.draw(third, call))
        await asyncio.sleep(0)
        gateway.announce(m.PolicyAnnouncement(Label(3, 0), "d", source))
        gateway.drop(gateway.list_parked_sessions()[0])
        why = f"session {third.name} is lost: lease another"
        assert await refused(drawing) == (410, "session_lost", why)
        assert third.state == "ended"
        assert not gateway.sessions
        why = f"session {third.name} has ended"
        assert await refused(door.draw(third, call)) == (410, "session_ended", why)
        # the same sample again: it may have acted before
        last = msgspec.structs.replace(ticket(4), ticket=1, samples=[sample])
        gateway.accept_tickets([msgspec.structs.replace(last, min_version=Label(3, 0))])
        again_leased = await door.lease("d", 0.0)
        assert again_leased is not None and not again_leased.first

    asyncio.run(play())


class Heard:
    """A socket of the gateway: `sent`: its descriptor is readable without a message."""

    def __init__(self) -> None:
        self.socket, self.other = socket.socketpair()
        self.taken = self.sent = False  # taken: its message was received already

    @property
    def has_message(self) -> bool:
        return self.taken or (not self.sent and bool(wait([self.socket], 0)))


def test_a_turn_is_due_when_something_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gateway, "POLL_S", 3600.0)
    one, two = Heard(), Heard()
    gateway: Any = SimpleNamespace(socket=one, calls_socket=two, wires=[])

    async def play() -> None:
        watcher = http_gateway.SocketWatcher(gateway, asyncio.Event())

        async def is_due(*, after: Any = None) -> asyncio.Task[None]:
            """Whether a turn is due at once, or else after `after`."""
            for _ in range(3):
                await asyncio.sleep(0)
            watcher.due.clear()
            turn = asyncio.create_task(watcher.wait_until_due())
            for _ in range(5):
                await asyncio.sleep(0)
            if after is None:
                return turn
            assert not turn.done()
            after()
            await asyncio.wait_for(turn, 600)
            return turn

        for heard in (one, two, two):
            await is_due(after=lambda heard=heard: heard.other.send(b"x"))
            heard.socket.recv(1)
            # another socket gets its descriptor, as that of a peer with another protocol does
            descriptor = two.socket.fileno()
            made, two.other = socket.socketpair()
            two.socket.close()
            two.socket = socket.socket(fileno=os.dup2(made.detach(), descriptor))
        wire, other = socket.socketpair()
        gateway.wires.append(wire)  # of a process that was started
        await is_due(after=lambda: other.send(b"x"))
        gateway.wires.clear()
        wire.close()
        other.close()
        two.taken = True  # zmq has it already, and its descriptor says nothing more
        assert (await is_due()).done()
        two.taken, two.sent = False, True
        two.other.send(b"x")
        turn = await is_due()
        assert not turn.done()
        turn.cancel()
        monkeypatch.setattr(http_gateway, "POLL_S", 0.01)
        await asyncio.wait_for(watcher.wait_until_due(), 600)  # by the clock
        descriptor = watcher.epoll.fileno()
        watcher.close()
        assert watcher.epoll.closed and not asyncio.get_running_loop().remove_reader(descriptor)
        for end in (one.socket, one.other, two.socket, two.other):
            end.close()

    asyncio.run(play())


def test_templates_are_imported_before_anybody_waits(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run_id").write_text("run")
    monkeypatch.setattr(tokenizer, "has_template", lambda path: True)
    seen = []

    async def serve(gateway: service.Gateway) -> None:
        seen.append("full_tokenizer" in vars(gateway.tokenizer) and gc.get_freeze_count() > 0)
        gateway.ending = True
        gateway.close()

    monkeypatch.setattr(http_gateway, "serve", serve)
    monkeypatch.setattr(service.Gateway, "run_until_signal", lambda _, play: play())
    try:
        environment_sessions.main(config, tmp_path, 0)
    finally:
        gc.unfreeze()
    assert seen == [True]


def test_a_call_that_a_generator_refuses_is_answered_by_a_failure(gateway: service.Gateway) -> None:

    async def play() -> None:
        door = sessions_of(gateway)
        gateway.accept_tickets([ticket(1)])
        opened = await door.lease("a", 0.0)
        assert opened is not None
        call = opened.place(text="ab=", now=door.current_time())
        drawing = asyncio.create_task(door.draw(opened, call))
        await asyncio.sleep(0)
        (number,) = gateway.router.open
        why = "tokens from 3 to 99\n\x1b[2J"
        gateway.on_generator_message(b"g", m.CallResult(number, b"", b"", [], "length", failed=why))
        why = "a generator cannot sample this call: tokens from 3 to 99\\n\\x1b[2J"
        assert await refused(drawing) == (500, "call_refused", why)
        # the session goes on
        assert opened.state == "open" and not opened.open_calls

    asyncio.run(play())


HANDLED = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in HANDLED]
    yield
    for number, handler in zip(HANDLED, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(params=["http", "env"])
def either(request: pytest.FixtureRequest, config: Config) -> Config:
    """A gateway with sessions over HTTP, and one with environments."""
    if request.param == "http":
        return config
    return msgspec.structs.replace(config, agent=AgentConfig(env="agent_envs:Talks"))


class Gateway(service.Gateway):
    """A gateway that is interrupted, or whose run ends, in its third turn."""

    number, turns, closed = 0, 0, False
    by: tuple[type, ...] = ()  # what makes its sessions

    def step(self) -> bool:
        type(self).turns += 1
        type(self).by = tuple(map(type, self.sources.values()))
        if self.turns == 3 and self.number:
            os.kill(os.getpid(), self.number)
        elif self.turns == 3:
            self.over = self.ever_served = True
            for folder in self.run_dir.glob("sessions-*"):
                (folder / "1.0.1").touch()
        return super().step()

    def close(self) -> None:
        type(self).closed = True
        super().close()


def made(monkeypatch: pytest.MonkeyPatch, run_dir: Path, number: int) -> type[Gateway]:
    (run_dir / "run_id").write_text("run")
    kind = type("Gateway", (Gateway,), {"number": number})
    monkeypatch.setattr(environment_sessions, "Gateway", kind)
    monkeypatch.setattr(environment_sessions, "gc", Mock())  # it would freeze this process's heap
    return kind


@pytest.mark.parametrize("number", HANDLED)
def test_a_signal_ends_the_process_after_its_turn(
    either: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    kind = made(monkeypatch, tmp_path, number)
    monkeypatch.delenv("ASYNCRL_SUPERVISED", raising=False)
    assert environment_sessions.main(either, tmp_path, 2) is False
    assert kind.closed and kind.turns == 3
    assert kind.by == (SessionApi if either.agent.http else EnvironmentSource,)
    assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM)


def test_a_mixture_of_agents_has_a_source_for_each(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = made(monkeypatch, tmp_path, signal.SIGTERM)
    parts = [
        {"name": "sort", "label": "a", "agent": {"env": "agent_envs:Talks"}},
        {"name": "sort", "label": "b"},
    ]
    task = msgspec.convert({"name": "mixture", "mixture": parts}, type(config.task))
    mixture = msgspec.structs.replace(config, task=task, agent=AgentConfig())
    assert environment_sessions.main(mixture, tmp_path, 0) is False
    assert kind.by == (SingleCompletions, EnvironmentSource) and kind.closed


def test_the_run_s_end_ends_the_process(
    either: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = made(monkeypatch, tmp_path, 0)
    monkeypatch.setattr("actors.gateway.http_gateway.OVER_S", 0.01)
    monkeypatch.setenv("ASYNCRL_SUPERVISED", "1")
    kept = tmp_path / "sessions-0" / "1.0.1"
    kept.parent.mkdir(mode=0o700)
    assert environment_sessions.main(either, tmp_path, 0) is True and kind.closed
    assert kept.exists() != either.agent.http, "no session over HTTP goes on"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "its supervisor ends it"
    assert callable(signal.getsignal(signal.SIGTERM))


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a Python that has no asyncrl: modules in it can be run."""
    monkeypatch.setitem(sys.modules, "asyncrl", ModuleType("somebody else's"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_foreign_python_finds_asyncrl_and_runs_a_module(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (foreign / "own_main.py").write_text(
        "import sys, asyncrl\n"
        "print(__name__, sys.argv[1:], asyncrl.__name__, asyncrl.__file__, asyncrl.__path__)\n"
    )
    monkeypatch.setattr(sys, "argv", ["foreign_start.py", "own_main", "3", "4"])
    foreign_start.main()
    inside = Path(asyncrl.__file__).parent
    expected = f"__main__ ['3', '4'] asyncrl {inside / '__init__.py'} {[str(inside)]}\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("name", foreign_start.NEEDED)
def test_a_package_that_a_foreign_python_lacks_is_named(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (foreign / "own_needs.py").write_text(f"raise ModuleNotFoundError(name={name!r})\n")
    monkeypatch.setattr(sys, "argv", ["foreign_start.py", "own_needs"])
    with pytest.raises(SystemExit) as ended:
        foreign_start.main()
    assert ended.value.code == (
        f"agent.python: {sys.executable} has no {name}: {sys.executable} -m pip install msgspec "
        "xxhash"
    )


def test_another_missing_module_is_raised(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (foreign / "own_lacks.py").write_text("import nothing_of_this_name\n")
    monkeypatch.setattr(sys, "argv", ["foreign_start.py", "own_lacks"])
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        foreign_start.main()
