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

from actors.gateway import environment_sessions, session_api
from actors.gateway.agents.session_messages import AgentSetup
from actors.gateway.environment_sessions import (
    EnvironmentSource,
    LocalSource,
    SingleCompletions,
)
from actors.gateway.environment_worker import EnvironmentEvent
from actors.gateway.hubs import prompt_files
from actors.gateway.refusals import CallRefused
from actors.gateway.service import WaitCause
from actors.gateway.session_api import AgentPool
from asyncrl.config import load
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config, TaskConfig
from asyncrl.contract.errors import ConfigError


class Session:
    own_prompt = "ids"

    def __init__(self, number: int = 0) -> None:
        self.number = self.sample = number
        self.state, self.limit, self.shortened = "open", "", False
        self.last: Any = None
        self.events: list[tuple[Any, ...]] = []
        self.refused: CallRefused | None = None
        self.call = SimpleNamespace(is_answered=False)

    def place(self, ids: Any, *, now: float) -> Any:
        assert now > 0 and ids == "ids"
        if self.refused is not None:
            raise self.refused
        return self.call

    def fail(self, why: str) -> None:
        self.state = "ended"
        self.events.append(("failed", why))

    def judge(self, now: float) -> None:
        assert now > 0
        self.events.append(("judged",))

    def set_reward(self, reward: float, parts: Any, calls: Any, *, now: float) -> None:
        assert now > 0
        self.events.append((reward, parts, calls))


NO_TOKEN = CallRefused(400, "empty_prompt", "the prompt has no token")


class Gateway:
    templated = True

    def __init__(self) -> None:
        self.config = SimpleNamespace(agent=SimpleNamespace(sessions=3))
        self.free_sessions = 3
        self.grants = [SimpleNamespace(waiting=[0, 1]), SimpleNamespace(waiting=[4, 5])]
        self.begun: list[Session] = []
        self.asked: list[tuple[Any, Any]] = []
        self.chat = SimpleNamespace(decode_visible=str)

    def list_waiting_tickets(self, parts: set[str]) -> Any:
        assert parts == {"sort"}
        return self.grants

    def begin_session(self, grant: Any, sample: int) -> Any:
        self.free_sessions -= 1
        session = Session(sample)
        session.refused = NO_TOKEN if sample == 1 else None
        self.begun.append(session)
        return session

    def ask(self, session: Any, call: Any) -> None:
        self.asked.append((session.sample, call))


def test_single_completions_are_calls_of_their_own() -> None:
    gateway = Gateway()
    source = SingleCompletions(gateway, "sort")
    assert source.count_wanted() == 3
    source.open_sessions()
    first, refused, last = gateway.begun
    assert [each.sample for each in gateway.begun] == [0, 1, 4]
    assert gateway.asked == [(0, first.call), (4, last.call)]
    assert refused.events == [("failed", "the prompt has no token")]
    assert [grant.waiting for grant in gateway.grants] == [[], [5]] and source.count_wanted() == 0
    assert source.explain_queue("sort") == WaitCause("place", "a place: agent.sessions = 3")


@pytest.mark.parametrize(
    ("answered", "failed", "limit", "event"),
    [
        (True, "no", "", ("failed", "a generator cannot sample its call: no")),
        (False, "", "", ("failed", "agent.deadline_s ended it")),
        (False, "", "max_tokens", ("failed", "agent.max_tokens ended it")),
        (True, "", "", ("judged",)),
    ],
)
def test_what_becomes_of_a_completion(answered: bool, failed: str, limit: str, event: Any) -> None:
    source = SingleCompletions(Gateway(), "sort")
    source.open(SimpleNamespace(), 0)
    (session,) = source.gateway.begun
    assert source.explain_wait(session, "x", 2.0, 1.0)[1:] == ("its completion", "x", 2.0)
    session.limit, session.call.is_answered = limit, answered
    source.on_answer(session, session.call, failed)
    assert session.events == [event]


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


LIMIT = CallRefused(400, "session_limit", "no more")
TEMPLATE = CallRefused(400, "chat_template", "it fails")
END = EnvironmentEvent(1, "ok", ended=True, reward=0.25)


@pytest.mark.parametrize(
    ("refused", "end", "agent", "outcome", "shortened"),
    [
        (None, END, {}, (0.75, {"x": 1.0}, {}), False),
        (None, END, {"fork": "end"}, (0.75, {"x": 1.0}, {4: 0.75}), False),
        (None, msgspec.structs.replace(END, judge=True), {}, ("judged",), False),
        (LIMIT, None, {}, (0.5, {"x": 1.0}, {}), True),
        (LIMIT, None, {"tools": ["a:b"]}, ("judged",), True),
        (LIMIT, None, {"at_limit": "fail"}, ("failed", "it reached agent.context"), True),
        (LIMIT, END, {"opponent": "pays"}, (0.75, {"x": 1.0}, {}), True),
        (TEMPLATE, None, {}, ("failed", "it fails"), False),
    ],
)
def test_the_end_of_an_environment(
    monkeypatch: pytest.MonkeyPatch,
    refused: CallRefused | None,
    end: EnvironmentEvent | None,
    agent: Any,
    outcome: Any,
    shortened: bool,
) -> None:
    """After a reset and a step whose reward and part count; its tools pay if `opponent` says so."""
    call = SimpleNamespace(is_answered=True, ids="ids", answer=None)
    replies = iter((call, refused or call))

    def place(*_: Any) -> Any:
        if isinstance(reply := next(replies), CallRefused):
            raise reply
        return reply

    player = SimpleNamespace(place_observation=place, on_answer=lambda _: None)
    monkeypatch.setattr(environment_sessions, "SessionPlayer", lambda *_: player)
    source = EnvironmentSource.__new__(EnvironmentSource)
    LocalSource.__init__(source, Gateway(), "play")
    source.agent = AgentConfig(env="a:b", **agent)
    operations: list[Any] = []
    source.pool = SimpleNamespace(reset=operations.append, step=operations.append)
    session: Any = Session(1)
    session.ticket = SimpleNamespace(prompt=None, kind="train", attempt=7)
    session.seed, session.first, session.last = 3, True, SimpleNamespace(number=4)
    session.play = source.play(session)
    source.resume(session, None)
    source.resume(session, EnvironmentEvent(1, "ok", pays="opponent" in agent))
    source.on_answer(session, call, "")
    source.resume(session, EnvironmentEvent(1, "ok", reward=0.5, parts={"x": 1.0}))
    if refused is None:
        source.on_answer(session, call, "")
    if end is not None:
        source.resume(session, end)
    assert session.events == [outcome] and session.shortened == shortened
    last = "score" if refused and end else "step"
    assert [x.kind for x in operations] == ["reset", "step", last][: 2 + (end is not None)]


def test_sessions_begin_where_agents_have_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = [SimpleNamespace(name=f"opened {n}") for n in range(3)]
    for each in left:
        each.ticket, each.limits = SimpleNamespace(prompt=None), SimpleNamespace(deadline_s=1.0)
        each.api_key, each.seed, each.attempt, each.first = "", 0, 1, True
        each.number = int(each.name[-1])

    def process(setup: AgentSetup) -> Any:
        sent: list[Any] = []
        return SimpleNamespace(
            setup=setup, ready=False, playing={}, sent=sent, send=sent.append, flush=lambda: None
        )

    def begin(parts: set[str]) -> Any:
        assert parts == {"ask"}
        return left.pop(0) if left else None

    monkeypatch.setattr(session_api, "_AgentProcess", process)
    agent = AgentConfig(function="mine:play", workers=3, at_once=8)
    made = {"agents": {"ask": agent}, "run_dir": tmp_path, "get_source_name": "named ".__add__}
    sessions: Any = SimpleNamespace(
        gateway=SimpleNamespace(**made), begin_session=begin, url="http://here"
    )
    pool = AgentPool(sessions, "ask")
    logs = [str(tmp_path / f"agent-ask-{index}.log") for index in range(3)]
    assert [each.setup for each in pool.workers] == [AgentSetup(agent, log) for log in logs]
    assert [each.places for each in pool.workers] == [3, 3, 2] and pool.named == "named ask"
    assert (pool.exit_s, pool.call_s, pool.count_places()) == (0.0, agent.step_s, 0)
    pool.open_sessions()
    assert len(left) == 3, "no process is ready"
    first, second, _ = pool.workers
    first.ready = second.ready = True
    first.playing, second.playing = {8: None, 9: None}, {7: None}
    assert pool.count_places() == 3
    pool.open_sessions()
    names = [[seat.name for orders in x.sent for seat in orders.seats] for x in (first, second)]
    assert names == [["opened 1"], ["opened 0", "opened 2"]]
    seat = second.sent[0].seats[0]
    assert (seat.number, seat.url) == (0, "http://here/s/opened 0") and not pool.count_places()
