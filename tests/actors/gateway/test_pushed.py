"""Agents that the gateway starts: programs with their families, functions in processes, what they
return and what becomes of those that fail, hang or die."""

import math
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gateway_kit import Served
from gateway_service_kit import AT, PATIENCE_S, Wire
from models_kit import model_fixture
from process_kit import until
from pushed_kit import HERE, Commands

from actors.gateway import service, session_api
from actors.gateway.agents import session_messages
from actors.gateway.agents.session_messages import SessionResult
from actors.gateway.session_api import SessionApi
from asyncrl.config import load
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config, ModelConfig, TaskConfig
from asyncrl.contract import messages as m
from asyncrl.contract.errors import ConfigError
from asyncrl.transport import worker_pool

pytestmark = pytest.mark.slow


def test_the_log_is_bounded_and_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_messages, "MOST_BYTES", 30)
    kept = session_messages.AgentLog(tmp_path / "agent-0.log")
    for number in range(3):
        kept.write(f"session {number}", b"said", b"", b"more\n")
    assert (tmp_path / "agent-0.log.old").read_text().startswith("--- session 0\nsaid\nmore\n---")
    assert (tmp_path / "agent-0.log").read_text() == "--- session 2\nsaid\nmore\n"
    session_messages.AgentLog(tmp_path / "nowhere" / "agent-0.log").write("session 3")


@pytest.fixture()
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("ASKS", str(HERE / "agent_asks.py"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = Commands(tmp_path)
    yield made
    made.worker.kill()


def alive(pid: int) -> bool:
    """Whether it runs: one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_programs_know_their_session_and_print_a_reward(commands: Commands, tmp_path: Path) -> None:
    served = Served()
    opened = served.do(served.service.open)
    url = f"{served.url}/s/{opened.name}"
    for number, kind in enumerate(("pays", "file", "told", "fails", "family")):
        commands.begin(number, kind)
    commands.begin(9, "asks", url, opened.api_key)
    try:
        assert commands.left(0) == SessionResult(0, "scored", 0.5)
        assert commands.left(1) == SessionResult(1, "scored", 2.0, {"reward": 2.0, "neat": 1.0})
        assert commands.left(2).reward == 1.0
        assert commands.left(3) == SessionResult(3, "failed", why="ended with 3: because")
        assert commands.left(9) == SessionResult(9, "scored", float(len("answer 0")))
        assert opened.calls == 1
    finally:
        served.close()
    assert commands.left(4).reward == 1.0  # its family has ended with it, wherever it went
    family = list(map(int, (tmp_path / "pids").read_text().split()))
    assert len(family) == 2 and not any(map(alive, family))
    kept = commands.log.read_text()
    assert "http://a/s/1.2.3/v1 k http://a/s/1.2.3 k\nhttp://a/s/1.2.3 policy\n" in kept
    task = msgspec.json.decode(next(line for line in kept.splitlines() if line.startswith("{")))
    assert (task["text"], task["session"], task["seed"], task["first"]) == ("ab=", "2.2.3", 9, True)
    assert "secret" not in kept and "--- session 0.2.3 " in kept and "thinking\n0.5\n" in kept
    assert not list(tmp_path.glob("asyncrl-agent-*"))


def test_a_programs_children_end_with_it_and_no_sooner(commands: Commands, tmp_path: Path) -> None:
    """Also in a session of its own and without a variable; another program's end is not its."""
    commands.begin(1, "keeps")
    commands.worker.flush()
    until((tmp_path / "pids.keeps").exists)
    commands.begin(2, "hides")
    assert commands.left(2) == SessionResult(2, "scored", 1.0)
    kept, hidden = (int((tmp_path / f"pids.{kind}").read_text()) for kind in ("keeps", "hides"))
    assert alive(kept) and not alive(hidden)
    (tmp_path / "pids.go").touch()
    assert commands.left(1) == SessionResult(1, "scored", 1.0) and not alive(kept)


def test_programs_end_with_the_process_that_is_killed(commands: Commands, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    commands.begin(1, "stubborn")
    commands.worker.flush()
    until(pids.exists)
    program = int(pids.read_text())
    commands.worker.process.send_signal(signal.SIGKILL)
    until(lambda: not alive(program))


class World:
    """A gateway with agents of its own; its buffer and generators are the test."""

    def __init__(self, run_dir: Path, model: Path, **agent: Any) -> None:
        (run_dir / "run_id").write_text("run")
        given: dict[str, Any] = {"function": "agent_envs:plays"} | agent
        config = Config(
            model=ModelConfig(path=str(model)),
            task=TaskConfig(name="sort"),
            agent=AgentConfig(**given),
        )
        self.gateway = service.Gateway(config, run_dir, source=SessionApi)
        self.gateway.socket.close()
        self.gateway.socket = self.wire = Wire()
        assert isinstance(self.gateway.sources[""], SessionApi)
        self.door, self.pushing = self.gateway.sources[""], self.gateway.sources[""].pools[""]
        self.tickets = 0

    def take(self, kind: str, **meta: str) -> str:
        """A ticket of one sample; its session's name."""
        self.tickets += 1
        prompt = m.Prompt(5, "ab=", "secret", meta={"kind": kind, **meta})
        sampling = m.SamplingSettings(max_new_tokens=6)
        number = self.tickets
        ticket = m.Ticket(number, number, "train", prompt, [0], sampling, AT, None, 3)
        self.gateway.accept_tickets([ticket])
        return f"{number}.0.{number}"

    def turn(self) -> None:
        self.door.poll()
        self.gateway.read_rewards()
        self.gateway.tick(time.monotonic())
        self.gateway.open_sessions()

    def ended(self, name: str) -> Any:
        """How the session ended."""
        return until(lambda: self.turn() or ((x := self.door.find(name)) and x.outcome))

    def begun(self, name: str) -> Any:
        """The session, once an agent plays it."""

        def look() -> Any:
            self.turn()
            playing = [x for worker in self.pushing.workers for x in worker.playing.values()]
            return next((session for session in playing if session.name == name), None)

        return until(look)

    def close(self) -> None:
        self.gateway.close()


model = model_fixture("abcdefgh0123456789=", layers=1)


@pytest.fixture()
def world(
    tmp_path: Path, model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setattr(worker_pool, "GRACE_S", PATIENCE_S)  # of an import, also on a busy machine
    made = World(tmp_path, model, **getattr(request, "param", {}))
    yield made
    made.close()


def answered(world: World, session: Any) -> None:
    """A call of the session is drawn."""
    call = session.place(text="ab=", now=world.door.current_time())
    session.last = call
    logprob = np.zeros(1, np.float32)
    session.on_result(
        call, np.ones(1, np.int32), logprob, [m.VersionSpan(AT, "d", 0, 1, AT)], "stop"
    )


@pytest.mark.parametrize(("step_s", "allowed_s"), [(5.0, 60.0), (5000.0, 5000.0)])
def test_the_import_of_a_function_has_the_time_of_a_step_and_a_minute_at_least(
    tmp_path: Path, model: Path, step_s: float, allowed_s: float
) -> None:
    w = World(tmp_path, model, step_s=step_s)
    try:
        (worker,) = w.pushing.workers
        worker.receive_messages = lambda _: iter(())
        worker.since = time.monotonic()
        w.pushing.start_s += 1000.0
        w.turn()
        assert w.pushing.workers == [worker]
        starting = "a process that imports agent.function = agent_envs:plays to be ready"
        assert w.door.explain_queue("").text == starting
        w.pushing.start_s -= 1000.0
        worker.since -= allowed_s
        assert w.pushing.start_s == allowed_s
        w.turn()
        assert w.pushing.workers != [worker]
    finally:
        w.close()


@pytest.mark.parametrize("world", [{"at_once": 3}], indirect=True)
def test_what_functions_return_ends_their_sessions(world: World, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    until(lambda: world.turn() or world.pushing.workers[0].ready)
    world.turn()
    assert world.door.explain_queue("").text == "a place: agent.at_once = 3"
    world.gateway.request_samples()
    assert [x.samples for x in world.wire.sent if isinstance(x, m.TicketRequest)] == [3]
    waits = world.take("judge", gate=str(gate))
    opened = world.begun(waits)
    assert world.door.count_wanted() == 2  # as many as have room
    names = {kind: world.take(kind) for kind in ("pays", "parts", "raises", "nan", "judge")}
    found = {kind: world.ended(name) for kind, name in names.items()}
    assert (found["pays"].reward, found["parts"].parts["neat"]) == (0.5, 2.0)
    assert found["raises"].failed == "the agent raised KeyError: 'gone'"
    assert "the agent gave an invalid reward: reward is a str" in found["nan"].failed
    silent = [x for x in world.gateway.outbox.fresh if x.ticket == world.tickets]
    assert [str(x.failed)[:44] for x in silent] == ["data: the session ended without a call: does"]
    assert "KeyError" in (tmp_path / "agent-0.log").read_text()
    answered(world, opened)
    gate.touch()
    assert world.ended(waits).failed == ""  # the config's reward has judged it
    assert world.door.count_wanted() == 3 and not world.pushing.workers[0].playing


@pytest.mark.parametrize("world", [{}, {"at_limit": "fail"}], indirect=True)
def test_a_failure_at_a_sessions_limit_is_judged(world: World, tmp_path: Path) -> None:
    """To write only those again would leave out the long ones."""
    gate = tmp_path / "gate"
    name = world.take("raises", gate=str(gate))
    opened = world.begun(name)
    answered(world, opened)
    opened.limit = "max_calls"
    gate.touch()
    keeps = world.gateway.config.agent.at_limit == "keep"
    assert world.ended(name).failed == ("" if keeps else "it reached agent.max_calls")
    assert opened.finish == "length"


@pytest.mark.parametrize("world", [{"at_once": 3}], indirect=True)
def test_an_environments_score_counts_at_a_limit_too(world: World, tmp_path: Path) -> None:
    """Sampled again, a session that a limit ends would be missing from training."""
    gate = str(tmp_path / "never")
    limited, failed, cut = (world.begun(world.take("pays", gate=gate)) for _ in range(3))
    error = SessionResult(0, "failed", 0.25, {"neat": 1.0}, why="failed: oh", scored=True)
    truncated = SessionResult(0, "scored", 0.5, truncated=True)
    now = world.door.current_time()
    for opened, result in ((limited, error), (failed, error), (cut, truncated)):
        answered(world, opened)
        opened.limit = "max_calls" if opened is limited else ""
        world.pushing._end_session(opened, result, now)
    assert (limited.outcome.reward, limited.finish) == (0.25, "length")
    assert failed.outcome.failed == "the agent failed: oh"
    assert (cut.outcome.reward, cut.finish) == (0.5, "length")


def test_a_function_that_does_not_stop_loses_its_process_and_the_others_begin_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_api, "STOP_S", 0.2)
    gate = tmp_path / "gate"
    hangs = world.begun(world.take("pays", gate=str(tmp_path / "never")))
    other = world.take("pays", gate=str(gate))
    before = world.begun(other)
    assert before.first
    process = world.pushing.workers[0].process.pid
    hangs.fail("the learner was started again")
    until(lambda: world.turn() or world.pushing.workers[0].process.pid != process)
    again = until(lambda: world.begun(other) is not before and world.begun(other))
    assert not again.first and again.api_key != before.api_key and before.outcome.failed
    world.turn()
    (playing,) = [x for worker in world.pushing.workers for x in worker.playing.values()]
    assert playing is again and playing.stop_at == math.inf  # it is open
    gate.touch()
    assert until(lambda: world.turn() or again.outcome).reward == 0.5


def test_a_process_that_dies_fails_its_sessions(world: World, tmp_path: Path) -> None:
    beside = world.take("pays", gate=str(tmp_path / "never"))
    world.begun(beside)
    dies = world.take("dies")
    assert world.ended(dies).failed == "the agent failed: its process ended (exit code 3)"
    assert world.ended(beside).failed
    assert world.ended(world.take("pays")).reward == 0.5  # another process is there


@pytest.mark.parametrize("world", [{"function": "agent_envs:plays_later"}], indirect=True)
def test_a_function_may_be_a_coroutine(world: World) -> None:
    assert world.ended(world.take("pays")).reward == 1.0 + len("v1")


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"function": "agent_envs:nobody"}, r"agent.function = agent_envs:nobody: importing it"),
        ({"function": "agent_envs:os"}, "os is not a function; write module:function"),
        ({"function": "", "command": ["no-such-agent"]}, "there is no program 'no-such-agent'"),
        (
            {"function": "", "command": ["sh"], "env_pass": ["PATH", "NO_*", "NO_NAME", "NOR_IT"]},
            "agent.env_pass: NO_NAME, NOR_IT is not in the environment of the run",
        ),
    ],
)
def test_an_agent_that_is_not_there_is_named(
    tmp_path: Path, model: Path, agent: dict[str, Any], said: str
) -> None:
    world = None
    with pytest.raises(ConfigError, match=said):
        world = World(tmp_path, model, **agent)
        until(lambda: world and world.turn())
    if world is not None:
        world.close()


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("agent.env='m:C'", "agent.function: it is the agent itself; remove agent.env"),
        ("agent.serve=true", "agent.function: it is the agent itself; remove agent.serve"),
        ("agent.command=['a']", "agent.command: it is the agent itself; remove agent.function"),
        ("agent.function='';agent.command=['a', '']", "agent.command: a word is empty"),
        ("agent.function='play'", "agent.function: play; write module:function or file.py:fun"),
        (
            "agent.function='';agent.env='m:C';agent.forced='refuse'",
            "agent.forced: only an agent that",
        ),
        ("agent.at_once=0", "agent.at_once"),
        ("agent.env_pass=['A']", "agent.env_pass: acts only with agent.command"),
        (
            "agent.function='';agent.command=['a'];agent.env_pass=['A=b']",
            "'A=b' is not a variable's name",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(item: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load.load("calc_http", item.split(";"))
    assert all(len(line) < 300 for line in str(caught.value).splitlines())
