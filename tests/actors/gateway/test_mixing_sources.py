"""Sources of sessions without processes: environments' events, agents' places, single completions,
and the rows of an environment."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from actors.gateway import http_gateway
from actors.gateway.agents.session_messages import AgentSetup
from actors.gateway.environment_sessions import (
    EnvironmentSource,
    EnvironmentState,
    SingleCompletions,
)
from actors.gateway.environment_worker import EnvironmentEvent
from actors.gateway.http_gateway import AgentPool
from actors.gateway.hubs import prompt_files
from actors.gateway.refusals import CallRefused
from actors.gateway.service import WaitCause
from asyncrl.config import load
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config, TaskConfig
from asyncrl.contract.errors import ConfigError


class Session:
    own_prompt = "ids"

    def __init__(self) -> None:
        self.state, self.limit = "open", ""
        self.events: list[tuple[Any, ...]] = []
        self.refused: CallRefused | None = None
        self.judged = True

    def place(self, ids: Any, *, now: float) -> str:
        assert now > 0
        if self.refused is not None:
            raise self.refused
        return f"call of {ids}"

    def fail(self, why: str) -> None:
        self.events.append(("failed", why))

    def judge(self, now: float) -> bool:
        assert now > 0
        self.events.append(("judged",))
        return self.judged


class Gateway:
    def __init__(self) -> None:
        self.config = SimpleNamespace(agent=SimpleNamespace(sessions=3))
        self.free_sessions = 3
        self.grants = [SimpleNamespace(waiting=[0, 1]), SimpleNamespace(waiting=[4, 5])]
        self.begun: list[tuple[int, bool]] = []
        self.asked: list[tuple[Any, str]] = []
        self.submitted: list[Any] = []
        self.refused: dict[int, CallRefused] = {}

    def list_waiting_tickets(self, parts: set[str]) -> Any:
        assert parts == {"sort"}
        return self.grants

    def begin_session(self, grant: Any, sample: int, *, first: bool) -> Any:
        self.free_sessions -= 1
        self.begun.append((sample, first))
        session = Session()
        session.refused = self.refused.get(sample)
        session.sample = sample
        return session

    def ask(self, session: Any, call: str) -> None:
        self.asked.append((session.sample, call))

    def submit(self, session: Any) -> None:
        self.submitted.append(session)


def test_single_completions_are_calls_of_their_own() -> None:
    gateway = Gateway()
    gateway.refused[1] = CallRefused(400, "empty_prompt", "the prompt has no token")
    source = SingleCompletions(gateway, "sort")
    assert source.count_wanted() == 3
    source.open_sessions()
    assert gateway.begun == [(0, True), (1, True), (4, True)]
    assert gateway.asked == [(0, "call of ids"), (4, "call of ids")]
    assert [grant.waiting for grant in gateway.grants] == [[], [5]] and source.count_wanted() == 0
    assert source.explain_queue("sort") == WaitCause("place", "a place: agent.sessions = 3")


@pytest.mark.parametrize(
    ("node", "failed", "state", "limit", "judged", "events", "submits"),
    [
        ("node", "no", "open", "", True, [("failed", "a generator cannot sample it: no")], False),
        (None, "", "open", "", True, [("failed", "agent.deadline_s ended it")], False),
        (None, "", "open", "max_tokens", True, [("failed", "agent.max_tokens ended it")], False),
        ("node", "", "open", "", True, [("judged",)], True),
        ("node", "", "open", "", False, [("judged",)], False),
        ("node", "", "ended", "", True, [], False),
    ],
)
def test_what_becomes_of_a_single_completion(
    node: Any, failed: str, state: str, limit: str, judged: bool, events: Any, submits: bool
) -> None:
    gateway = Gateway()
    source = SingleCompletions(gateway, "sort")
    session = Session()
    session.state, session.limit, session.judged = state, limit, judged
    source.on_answer(session, SimpleNamespace(is_answered=node is not None), failed)
    assert session.events == events and gateway.submitted == [session] * submits
    source.on_drop(session)
    wait = source.explain_wait(session, "agent.deadline_s", 2.0, 1.0)
    assert wait == WaitCause("reward", "the reward of its answer", "agent.deadline_s", 2.0)


ENV = AgentConfig(env="verifiers:words", args={"seed": 4}, python="/opt/python")


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the program `examine` is started with, and what it answers."""
    state: dict[str, Any] = {"counts": {"train": 2, "eval": 0}, "err": "", "argv": []}

    def run(argv: list[str], **how: Any) -> Any:
        if isinstance(state["counts"], OSError):
            raise state["counts"]
        state["argv"].append(argv)
        assert how == {
            **{"capture_output": True, "text": True, "check": False},
            "stdin": subprocess.DEVNULL,
        }
        folder = Path(argv[-1])
        for split, count in (state["counts"] or {}).items():
            if split != "error":
                (folder / f"{split}.jsonl").write_text(f"{split}\n" * count)
        out = "" if state["counts"] is None else json.dumps(state["counts"])
        return SimpleNamespace(stdout=out, stderr=state["err"], returncode=3)

    monkeypatch.setattr(prompt_files.subprocess, "run", run)
    return state


def test_an_environments_rows_become_task_files(examined: dict[str, Any], tmp_path: Path) -> None:
    task = prompt_files.write_task_files(TaskConfig(name="env"), ENV, tmp_path)
    assert Path(task.prompts).read_text() == "train\n" * 2 and task.heldout == ""
    assert Path(task.prompts).is_relative_to(tmp_path)
    (argv,) = examined["argv"]
    assert argv[0] == "/opt/python"
    assert argv[-4:-1] == [*("actors.gateway.hubs.examine", "verifiers:words", '{"seed": 4}')]
    assert not Path(argv[-1]).exists(), "the temporary folder is removed"
    examined["counts"] = {"train": 1, "eval": 3}
    task = prompt_files.write_task_files(TaskConfig(name="env"), ENV, tmp_path)
    assert Path(task.heldout).read_text() == "eval\n" * 3
    kept = prompt_files.write_task_files(TaskConfig(name="env", heldout="mine"), ENV, tmp_path)
    assert kept.heldout == "mine" and kept.prompts == task.prompts
    examined["counts"] = {"train": 0, "eval": 3}
    with pytest.raises(ConfigError) as error:
        prompt_files.write_task_files(TaskConfig(name="env"), ENV, tmp_path)
    assert str(error.value) == "agent.env = verifiers:words: it has no training data set"


def test_an_environment_without_examples_says_why(examined: dict[str, Any], tmp_path: Path) -> None:
    def why() -> str:
        with pytest.raises(ConfigError) as error:
            prompt_files.examine(ENV, tmp_path)
        return str(error.value)

    examined["counts"] = {"error": "no such environment"}
    assert why() == "no such environment"
    examined["counts"], examined["err"] = None, "first\n\nlast\x1b\n  \n"
    assert why() == "agent.env = verifiers:words: its process ended: last\\x1b"
    examined["err"] = ""
    assert why() == "agent.env = verifiers:words: its process ended: exit code 3"
    examined["counts"] = FileNotFoundError(2, "No such file or directory")
    assert why() == (
        "agent.python: /opt/python cannot be started: No such file or directory; give the path of "
        "a Python of 3.11 or newer"
    )
    examined["counts"] = {"train": 5}
    assert prompt_files.examine(ENV, tmp_path) == {"train": 5}
    assert prompt_files.examine(AgentConfig(env="verifiers:words"), tmp_path) == {"train": 5}
    assert examined["argv"][-1][0] == sys.executable


def loaded(**task: Any) -> Config:
    plain = load.build({"model": {"path": "m"}, "task": {"name": "sort"}})
    changed = msgspec.structs.replace(plain.task, **task)
    return msgspec.structs.replace(plain, task=changed, agent=ENV)


def test_a_config_gets_environments_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def rows(task: Any, agent: AgentConfig, folder: Path) -> Any:
        asked.append((agent, folder))
        return msgspec.structs.replace(task, prompts="rows")

    monkeypatch.setattr(prompt_files, "write_task_files", rows)
    for config in (loaded(), loaded(name="env", prompts="mine")):
        assert prompt_files.write_prompt_files(config) is config
    config = loaded(name="env")
    found = prompt_files.write_prompt_files(config)
    assert found.task.prompts == "rows" and found.agent is ENV
    folder = Path(config.runs) / prompt_files.FOLDER
    assert asked == [(ENV, folder)]
    parts = [
        {"name": "env", "label": "a", "agent": {"env": "verifiers:words"}},
        {"name": "env", "label": "b"},
        {"name": "env", "label": "c", "prompts": "mine"},
        {"name": "sort"},
    ]
    task = msgspec.convert({"name": "mixture", "mixture": parts}, type(config.task))
    mixture = msgspec.structs.replace(config, task=task)
    found = prompt_files.write_prompt_files(mixture)
    assert [part.prompts for part in found.task.mixture] == ["rows", "rows", "mine", ""]
    assert [agent.env for agent, _ in asked[1:]] == ["verifiers:words"] * 2
    assert asked[1][0].args == {} and asked[2] == (ENV, folder) and found.task.name == "mixture"
    few = msgspec.structs.replace(task, mixture=task.mixture[2:])
    mixture = msgspec.structs.replace(config, task=few)
    assert prompt_files.write_prompt_files(mixture) is mixture


def environment_source() -> tuple[Any, Any, list[Any]]:
    """A source with one session, and what the events lead to, with the player that has the turn."""
    source = EnvironmentSource.__new__(EnvironmentSource)
    turns: list[Any] = []
    session = SimpleNamespace(shortened=False, number=1, last=SimpleNamespace(number=4))
    state = EnvironmentState("the reset")
    source.states = {1: state}
    source.gateway = SimpleNamespace(templated=True)
    for name in ("place_call", "judge", "score"):
        setattr(source, name, lambda *x, name=name: turns.append((name, state.active.game, *x)))
    return source, session, turns


def test_rewards_and_parts_of_an_environment_are_summed() -> None:
    source, session, turns = environment_source()
    state = source.states[1]
    tools = [{"name": "add"}]
    for event in (
        EnvironmentEvent(1, "ok", "a", tools=tools, pays=True),
        EnvironmentEvent(1, "ok", "b", reward=0.5, parts={"x": 1.0}, asked=2),
        EnvironmentEvent(1, "ok", "c", reward=0.25, parts={"x": 2.0, "y": 1.0}),
    ):
        source.on_event(session, event)
    assert (state.tools, state.pays, state.reward) == (tools, True, 0.75)
    assert state.parts == {"x": 3.0, "y": 1.0} and state.shares == {4: 0.75}
    assert turns[:2] == [("place_call", 0, session, "a"), ("place_call", 2, session, "b")]
    assert state.players[0] is state.active is not state.players[2]
    session.last = None
    source.on_event(session, EnvironmentEvent(1, "ok", "d", reward=9.0))
    assert state.reward == 0.75, "of no call"


@pytest.mark.parametrize(
    ("truncated", "before", "judge"),
    [(True, False, False), (False, False, True), (False, True, False)],
)
def test_the_end_of_an_environment(truncated: bool, before: bool, judge: bool) -> None:
    source, session, turns = environment_source()
    session.shortened = before
    end = EnvironmentEvent(1, "ok", ended=True, truncated=truncated, judge=judge)
    source.on_event(session, end)
    assert session.shortened == (truncated or before)
    assert turns == [("judge" if judge else "score", 0, session)]


def test_each_process_of_agents_has_its_setup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(http_gateway, "_AgentProcess", lambda setup: setup)
    agent = AgentConfig(function="mine:play", workers=2, at_once=5)
    made = {"agents": {"ask": agent}, "run_dir": tmp_path, "get_source_name": "named ".__add__}
    sessions: Any = SimpleNamespace(gateway=SimpleNamespace(**made))
    pool = AgentPool(sessions, "http://here", "ask")
    logs = [str(tmp_path / f"agent-ask-{index}.log") for index in range(2)]
    assert pool.workers == [AgentSetup(agent, log) for log in logs]
    assert (pool.url, pool.part, pool.named) == ("http://here", "ask", "named ask")
    assert (pool.places_per_process, pool.numbers, pool.requested) == (3, 0, 0)
    assert (pool.exit_s, pool.call_s) == (0.0, agent.step_s)


def test_sessions_begin_where_agents_have_room() -> None:
    pool = AgentPool.__new__(AgentPool)
    leases: list[tuple[str, set[str]]] = []
    left = [SimpleNamespace(name=f"opened {n}") for n in range(3)]

    def lease(name: str, parts: set[str]) -> Any:
        leases.append((name, parts))
        return left.pop(0) if left else None

    def worker(*numbers: int, ready: bool = True) -> Any:
        sent: list[Any] = []
        playing = dict.fromkeys(numbers)
        return SimpleNamespace(ready=ready, playing=playing, sent=sent, send=sent.append)

    sessions = SimpleNamespace(starting=set(), asks=0, lease_session=lease)
    pool.sessions, pool.part = sessions, "ask"
    pool.agent = SimpleNamespace(at_once=6)
    pool.places_per_process, pool.numbers, pool.requested = 3, 7, 0
    pool._build_access = lambda opened: opened.name
    pool.workers = [worker(1, 2), worker(3), worker(ready=False)]
    pool._start_sessions()
    assert leases[:3] == [(f"played here ask {n}", {"ask"}) for n in (8, 9, 10)]
    assert leases[3:] in ([], [("played here ask 11", {"ask"})])
    first, second, starting = pool.workers
    assert [orders.seats for orders in second.sent] == [["opened 0"], ["opened 2"]]
    assert [orders.seats for orders in first.sent] == [["opened 1"]] and starting.sent == []
    assert pool.numbers == 10 and sessions.asks == pool.requested == 0
    assert sessions.starting == set()
    for each in pool.workers:
        each.ready = False
    pool._start_sessions()
    assert sessions.starting == {"ask"} and sessions.asks == 0 and len(leases) == 3
