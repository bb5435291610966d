"""Environments in processes: what each session's environment said comes back; one that raises,
hangs or ends its process fails its own session, and the others of that process begin again.
Tools: plain functions, and classes whose methods keep a state; what is refused.
`asyncrl task try` of an environment: by hand, and with a model whose ids are as in a run."""

import json
import re
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from process_kit import ENV, ROOT

from actors.gateway import environment_pool, environment_worker
from actors.gateway.environment_pool import EnvironmentPool
from actors.gateway.environment_worker import (
    EnvironmentEvent,
    EnvironmentHost,
    EnvironmentOperation,
    EnvironmentSetup,
)
from actors.gateway.hubs import tools
from actors.gateway.hubs.tools import LONGEST, ToolLoop, build_row, build_schema
from asyncrl.config import load
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.experiments.play import HumanPlayer, ModelPlayer, PlayEvent, make_ticket, play
from asyncrl.models.policy import build_model
from asyncrl.tasks.calc import CalcTask


def config(*sets: str) -> Config:
    return load.load(ROOT / "configs" / "calc.toml", sets)


def by_hand(settings: Config, *lines: str) -> list[PlayEvent]:
    left = iter(lines)
    player = HumanPlayer(settings, lambda: next(left, None))
    return list(play(settings, make_ticket(settings, 0), player))


ENVS = ["agent.tools=[]", f"agent.env='{ROOT}/tests/support/agent_envs.py:Talks'"]


def test_the_command_by_hand() -> None:
    """The calculator's sum, called, answered wrongly and rightly; each turn is a line."""
    prompt = make_ticket(config(), 0).prompt
    first, _ = CalcTask().split_problem(prompt.text[:-1])

    def said(*words: str, line: str) -> Any:
        argv = [*importing.make_command("asyncrl.cli"), "task", "try", "configs/calc.toml", *words]
        done = subprocess.run(
            argv, input=line, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    lines = said("--json", line=f"{first}\n{prompt.answer}\n").splitlines()
    turns = [(x["kind"], x["turn"], x["text"], x["reward"]) for x in map(json.loads, lines)]
    result = turns[2][2]
    assert turns == [
        ("asked", 1, prompt.text, 0.0),
        ("answered", 1, first, 0.0),
        ("asked", 2, result, 0.0),
        ("answered", 2, prompt.answer, 0.0),
        ("ended", 2, "ended by the environment", 1.0),
    ]
    assert result.endswith("=") and result[:-1].isdigit()
    shown = said(line="#1\n")
    assert shown == f"--- turn 1\n{prompt.text}\n<<< #1\n=== reward 0: ended by the environment\n"


def test_rewards_parts_and_ends_by_hand() -> None:
    shown = by_hand(config(*ENVS), "abc", "", "abcdef")
    middle = [(x.kind, x.text, x.reward) for x in shown[2:4]]
    assert middle == [("asked", "3=", 0.3), ("answered", "", 0.0)]
    assert shown[-1].kind == "ended" and shown[-1].reward == pytest.approx(0.9)
    assert shown[-1].parts == {"turns": 3.0}
    short = by_hand(config(*ENVS), "abc")[-1]
    assert (short.text, short.reward) == ("the player stopped", 0.3)
    cut = by_hand(config(*ENVS, "agent.max_calls=2"), "abc", "abc", "abc")[-1]
    assert cut.reward == 0.6 and cut.text.startswith("cut: agent.max_calls = 2")
    broken = config(ENVS[0], f"agent.env='{ROOT}/tests/no_such.py:Talks'")
    with pytest.raises(AsyncrlError, match="no_such"):
        by_hand(broken, "abc")


def test_tools_are_called_and_the_reward_judges() -> None:
    settings = config(
        "agent.env=''",
        f"agent.tools=['{ROOT}/tests/support/agent_envs.py:add']",
        f"reward.function='{ROOT}/tests/support/agent_envs.py:is_four'",
    )
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 3}}</tool_call>'
    shown = by_hand(settings, call, "4")
    assert shown[2].text == "[tool] 4"
    assert (shown[-1].reward, shown[-1].text) == (1.0, "judged by the config's reward")
    assert by_hand(settings, "5")[-1].reward == 0.0


def with_model(settings: Config, index: int = 0) -> tuple[ModelPlayer, list[PlayEvent]]:
    ticket = make_ticket(settings, index)
    player = ModelPlayer(settings, ticket)
    return player, list(play(settings, ticket, player))


def whole(player: ModelPlayer) -> Sequence[int]:
    (row,) = player.session.build_training_rows()
    return [int(x) for part in (row.prompt_tokens, row.tokens) for x in np.frombuffer(part, "<i4")]


def test_a_model_plays_on_the_ids_that_a_run_would_train(tmp_path: Path) -> None:
    build_model(tmp_path, CalcTask.symbols, hidden=32, layers=1, seed=3)
    settings = config(*ENVS, f"model.path='{tmp_path}'")
    player, shown = with_model(settings)
    asked = [x for x in shown if x.kind == "asked"]
    drawn = [x for x in shown if x.kind == "answered"]
    assert len(asked) == len(drawn) == 3 and shown[-1].kind == "ended"
    assert shown[-1].reward == pytest.approx(sum(len(x.text) for x in drawn) / 10)
    # all before, what was drawn, what the environment said: a token a character
    for before, answer, now in zip(asked, drawn, asked[1:], strict=False):
        assert now.tokens == before.tokens + answer.tokens + len(now.text) and not now.row
    assert len(whole(player)) == asked[-1].tokens + drawn[-1].tokens
    again, shown_again = with_model(settings)
    assert shown_again == shown and whole(again) == whole(player), "the run's seed draws it again"
    other, _ = with_model(config(*ENVS, f"model.path='{tmp_path}'", "seed=5"))
    assert whole(other) != whole(player)
    limited = config(*ENVS, f"model.path='{tmp_path}'", "agent.max_calls=2")
    assert with_model(limited)[1][-1].text.startswith("cut: ")


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
        made = Mock(asked=deque([(9, "step")]), ready=True, sent=[])
        made.send = made.sent.append
        pool.processes |= dict.fromkeys(sessions, made)
        return made

    pool.workers = [process(1, 2), process(3), process(4, 5)]
    for session, place in ((6, 1), (7, 0), (8, 1)):
        pool.reset(reset(session))
        assert pool.processes[session] is pool.workers[place]
        assert pool.processes[session].sent[-1] == [reset(session)]
        assert pool.processes[session].asked[-1] == (session, "reset")
    pool.end(6)
    pool.end(6)
    assert 6 not in pool.processes
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


GOAL = Prompt(0, "Save.", meta={"goal": "7", "tags": '["a"]'})


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def apply(host: EnvironmentHost, *op: Any, **more: Any) -> EnvironmentEvent:
    event = host.apply(EnvironmentOperation(*op, **more))
    assert event is not None and event.kind == "ok", event
    return event


def test_a_class_keeps_its_state_between_the_calls_and_pays() -> None:
    agent = AgentConfig(tools=["agent_envs:add", "agent_envs:Account"], args={"fee": 1})
    host = EnvironmentHost(EnvironmentSetup(agent))
    first = apply(host, 1, "reset", prompt=GOAL)
    assert first.pays and first.obs == [
        {"role": "user", "content": "Save. (goal 7, tags ['a'])"}  # a number and a list again
    ]
    tools = {tool["function"]["name"]: tool["function"] for tool in first.tools}
    assert list(tools) == ["add", "audit", "deposit"]
    assert tools["deposit"]["description"] == "Deposit money."
    assert tools["deposit"]["parameters"]["properties"] == {
        "amount": {"type": "integer", "description": "How much, in whole dollars."}
    }
    untagged = Prompt(1, "x", messages=[{"role": "user", "content": "hi"}], meta={"goal": "3"})
    assert apply(host, 2, "reset", prompt=untagged).obs == [{"role": "user", "content": "hi"}]
    for session, balance in ((1, 4), (2, 4), (1, 8)):
        event = apply(host, session, "step", message=call("deposit", amount=5))
        assert event.obs == [
            {"role": "tool", "tool_call_id": "", "content": f"balance {balance}", "name": "deposit"}
        ]
    event = apply(host, 1, "step", message=call("audit"))
    assert isinstance(event.obs, list) and event.obs[0]["content"] == "audited 8"
    event = apply(host, 1, "step", message={"content": "done"})
    assert (event.ended, event.judge, event.reward, event.truncated) == (True, False, 0.08, False)
    event = apply(host, 2, "score")  # a limit of the session
    assert (event.ended, event.judge, event.reward, event.truncated) == (True, False, 0.04, True)


def test_without_get_reward_the_configs_reward_judges() -> None:
    host = EnvironmentHost(EnvironmentSetup(AgentConfig(tools=["agent_envs:Ledger"]), True))
    assert not apply(host, 1, "reset", prompt=GOAL).pays
    event = apply(host, 1, "step", message={"content": "done"})
    assert event.ended and event.judge


def test_every_type_of_a_parameter_and_its_description() -> None:
    def act(a: int, b: float, c: bool, d: str, e: list, f: dict, g, h: int = 1) -> str:
        """Act.

        Args:
            a (int): the first.
            b: the second
              goes on
            x: no parameter
        Returns:
            c: nothing"""
        return ""

    function = build_schema(act)["function"]
    types = {name: what["type"] for name, what in function["parameters"]["properties"].items()}
    assert types == {
        **{"a": "integer", "b": "number", "c": "boolean", "d": "string"},
        **{"e": "array", "f": "string", "g": "string", "h": "integer"},
    }
    described = {
        name: what["description"]
        for name, what in function["parameters"]["properties"].items()
        if "description" in what
    }
    assert described == {"a": "the first.", "b": "the second"}
    assert function["parameters"]["required"] == list("abcdefg")
    assert build_schema(act)["type"] == "function" and function["description"] == "Act."
    assert build_schema(lambda: "")["function"]["description"] == ""


def called(loop: ToolLoop, name: str, arguments: Any) -> dict[str, Any]:
    (message,) = loop.run_calls(
        {"tool_calls": [{"id": "c", "function": {"name": name, "arguments": arguments}}]}
    )
    return message


def test_results_errors_and_coroutines_of_tools() -> None:
    def long(count: int) -> str:
        return "x" * count

    async def later(text: str) -> str:
        return text

    def wrong() -> str:
        raise KeyError("one\ntwo")

    loop = ToolLoop([long, later, wrong])
    assert not loop.pays
    assert [each["function"]["name"] for each in loop.schemas] == [*("long", "later", "wrong")]
    assert len(called(loop, "long", {"count": LONGEST + 5})["content"]) == LONGEST == 1 << 20
    assert called(loop, "later", {"text": "a"}) == {
        **{"role": "tool", "tool_call_id": "c", "content": "a", "name": "later"}
    }
    assert called(loop, "long", {})["content"].startswith("error: TypeError")
    assert called(loop, "wrong", None)["content"] == "error: KeyError: 'one\\ntwo'"
    found = called(loop, "none", {})["content"]
    assert found == "error: no tool 'none'; there are long, later, wrong"
    assert loop.run_calls({"tool_calls": None}) == [] == loop.run_calls({})
    turns = [{"role": "user", "content": "hi"}]
    assert loop.reset(Prompt(0, "a", messages=turns)) == turns
    assert loop.reset(Prompt(0, "a")) == [{"role": "user", "content": "a"}]


class Purse:
    """A class with a coroutine for everything, and tools beside ones that are none."""

    closed = False

    async def reset(self, goal: float, prompt: list[Any], answer: str) -> str:
        self.goal, self.prompt, self.answer = goal, prompt, answer
        return "!"

    async def get_reward(self) -> str:
        return "0.5"

    def close(self) -> None:
        self.closed = True

    def _hidden(self) -> str:
        return ""

    def count(self) -> int:
        return 3


def test_a_state_is_begun_scored_and_closed() -> None:
    def plain() -> str:
        return "p"

    made = Purse()
    loop = ToolLoop([plain], made)
    assert list(loop.tools) == ["plain", "count"] and loop.pays
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]
    first = loop.reset(Prompt(0, "", answer="[1]", messages=turns, meta={"goal": "2"}))
    assert first == [turns[0], {"role": "user", "content": "u!", "name": "n"}]
    assert (made.goal, made.prompt, made.answer) == (2, turns, [1])
    assert turns[1]["content"] == "u", "the prompt stays"
    assert loop.compute_reward() == 0.5 and called(loop, "count", {})["content"] == "3"
    loop.close()
    assert made.closed

    class Bare:
        def reset(self) -> int:
            return 7

    bare = ToolLoop([], Bare())
    assert not bare.pays and not hasattr(bare, "close")
    with pytest.raises(ValueError) as error:
        bare.reset(Prompt(0, "a"))
    assert str(error.value) == "reset returned a int, not text or None"


def test_columns_of_a_row_for_the_parameters_of_reset() -> None:
    meta = {"a": "1", "b": "1.5", "c": "true", "d": '{"x": 1}', "e": "[1", "f": "7", "g": ""}
    prompt = Prompt(0, "", answer="4", meta=meta)

    def every(a: int, b: float, c: bool, **more: Any) -> None: ...

    row = build_row(prompt, [], every)
    assert row == {
        **{"prompt": [], "a": 1, "b": 1.5, "c": True, "d": {"x": 1}, "e": "[1", "f": "7"},
        **{"g": "", "answer": "4"},
    }

    def some(f: str, answer: int, none: int = 0) -> None: ...

    assert build_row(prompt, [], some) == {"f": "7", "answer": 4}


def add(a: int) -> str:
    return str(a)


def test_functions_share_a_loop_and_a_class_is_made_for_each_session() -> None:
    make = tools.load([("m:add", add)], {}, judged=True)
    assert make() is make() and list(make().tools) == ["add"]

    class Fee:
        def __init__(self, fee: int = 0) -> None:
            self.fee = fee

        def reset(self) -> None: ...

        def pay(self) -> int:
            return self.fee

    make = tools.load([("m:Fee", Fee), ("m:add", add)], {"fee": 3}, judged=True)
    one, other = make(), make()
    assert one is not other and list(one.tools) == ["add", "pay"]
    assert called(one, "pay", {})["content"] == "3"
    assert one.reset(Prompt(0, "a")) == [{"role": "user", "content": "a"}]
    with pytest.raises(TypeError):
        tools.load([("m:Fee", Fee)], {"cost": 3}, judged=True)


def of(**methods: Callable[..., Any]) -> type:
    return type("Made", (), methods)


def begins(self: Any) -> None: ...


HIDDEN = of(reset=begins, _a=add, close=add, get_reward=add)
PAYS = of(reset=begins, a=add, get_reward=add)


@pytest.mark.parametrize(
    ("classes", "judged", "why"),
    [
        ([of(reset=begins, a=add)] * 2, False, "m:0 and m:1 are classes: one keeps the state"),
        ([of(a=add)], False, "m:0 has no method reset, which begins a session"),
        ([HIDDEN], False, "m:0 has no public method that the model could call"),
        ([PAYS], True, "m:0 pays by get_reward, and so does [reward]: remove one of them"),
    ],
)
def test_what_is_no_class_of_tools_is_refused(classes: list[type], judged: bool, why: str) -> None:
    found = [(f"m:{place}", kind) for place, kind in enumerate(classes)]
    with pytest.raises(ConfigError) as error:
        tools.load(found, {}, judged=judged)
    assert str(error.value) == f"agent.tools: {why}"
