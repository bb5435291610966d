"""Tools: plain functions, and classes whose methods keep a state; what is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from actors.gateway.environment_worker import (
    EnvironmentEvent,
    EnvironmentHost,
    EnvironmentOperation,
    EnvironmentSetup,
)
from actors.gateway.hubs.tools import LONGEST, ToolLoop, build_row, build_schema, load
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt

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
    make = load([("m:add", add)], {}, judged=True)
    assert make() is make() and list(make().tools) == ["add"]

    class Fee:
        def __init__(self, fee: int = 0) -> None:
            self.fee = fee

        def reset(self) -> None: ...

        def pay(self) -> int:
            return self.fee

    make = load([("m:Fee", Fee), ("m:add", add)], {"fee": 3}, judged=True)
    one, other = make(), make()
    assert one is not other and list(one.tools) == ["add", "pay"]
    assert called(one, "pay", {})["content"] == "3"
    assert one.reset(Prompt(0, "a")) == [{"role": "user", "content": "a"}]
    with pytest.raises(TypeError):
        load([("m:Fee", Fee)], {"cost": 3}, judged=True)


def of(**methods: Callable[..., Any]) -> type:
    return type("Made", (), methods)


def reset(self: Any) -> None: ...


HIDDEN = of(reset=reset, _a=add, close=add, get_reward=add)
PAYS = of(reset=reset, a=add, get_reward=add)


@pytest.mark.parametrize(
    ("classes", "judged", "why"),
    [
        ([of(reset=reset, a=add)] * 2, False, "m:0 and m:1 are classes: one keeps the state"),
        ([of(a=add)], False, "m:0 has no method reset, which begins a session"),
        ([HIDDEN], False, "m:0 has no public method that the model could call"),
        ([PAYS], True, "m:0 pays by get_reward, and so does [reward]: remove one of them"),
    ],
)
def test_what_is_no_class_of_tools_is_refused(classes: list[type], judged: bool, why: str) -> None:
    found = [(f"m:{place}", kind) for place, kind in enumerate(classes)]
    with pytest.raises(ConfigError) as error:
        load(found, {}, judged=judged)
    assert str(error.value) == f"agent.tools: {why}"
