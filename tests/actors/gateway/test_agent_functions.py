"""agent.function and environments that play themselves, with the loop of their process run here."""

import json
import os
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pushed_kit import PATIENCE_S, AgentLoop

from actors.gateway.agents.session_messages import (
    SessionAccess,
    SessionOrders,
    SessionResult,
    parse_outcome,
)
from actors.gateway.hubs import SPLITS, examine, self_playing
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt

AGENT = (Path(__file__).parents[2] / "data" / "programs" / "agent_functions_agent.txt").read_text()


def seat(number: int, text: str = "1") -> SessionAccess:
    url = f"http://127.0.0.1/s/{number}"
    prompt = Prompt(number, text)
    return SessionAccess(number, f"s{number}", url, "key", "m", prompt, 0, 1, True, 60.0)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Any]:
    """agent("name"): the loop of agent.function = FILE:name, ready."""
    file = tmp_path / f"own_agent_{tmp_path.name}.py"
    file.write_text(AGENT)
    served: list[AgentLoop] = []

    def begin(name: str) -> AgentLoop:
        served.append(AgentLoop(AgentConfig(function=f"{file}:{name}"), tmp_path / "agent.log"))
        assert served[-1].result() == SessionResult(-1, "ready")
        return served[-1]

    yield begin
    for one in served:
        one.close()
    sys.modules.pop(file.stem, None)


def own_module() -> ModuleType:
    return next(m for name, m in sys.modules.items() if name.startswith("own_agent_"))


def test_a_function_gets_prompt_and_session_and_its_number_is_the_reward(agent: Any) -> None:
    served = agent("numbers")
    assert served.play(seat(1, "0.5"), seat(2, "-2")) == [
        SessionResult(1, "scored", 0.5),
        SessionResult(2, "scored", -2.0),
    ]
    assert ("0.5", "s1", "http://127.0.0.1/s/1/v1") in own_module().asked
    (later,) = served.play(seat(3, "7"))
    assert later.reward == 7.0


def test_what_a_function_may_return(agent: Any) -> None:
    (found,) = agent("parts").play(seat(1))
    assert found == SessionResult(1, "scored", 0.5, {"reward": 0.5, "form": 1.0})
    (found,) = agent("nothing").play(seat(2))
    assert found == SessionResult(2, "judge"), "the config's reward scores it"
    (found,) = agent("text").play(seat(3))
    assert found.kind == "failed" and found.number == 3
    assert found.why == "gave an invalid reward: reward is a str, not a number"
    assert parse_outcome(4, {"form": 1.0}).why == (
        "gave an invalid reward: a dict without `reward`: ['form']"
    )
    assert parse_outcome(5, float("nan")).kind == "failed"
    assert parse_outcome(6, {"reward": _Odd()}).why.endswith("raised ZeroDivisionError: odd")


class _Odd:
    def __float__(self) -> float:
        raise ZeroDivisionError("odd")


def test_an_exception_fails_its_session_alone_and_is_logged(agent: Any, tmp_path: Path) -> None:
    first, second = agent("raises").play(seat(1, "a"), seat(2, "b"))
    assert (first.kind, first.why) == ("failed", "raised KeyError: 'a'")
    assert (second.number, second.why) == (2, "raised KeyError: 'b'")
    log = (tmp_path / "agent.log").read_text()
    assert re.search(r"^--- session s1 raised KeyError: 'a' after \d+\.\d s$", log, re.M)
    assert "Traceback" in log and "raise KeyError(prompt.text)" in log
    (odd,) = agent("half_a_character").play(seat(4))
    assert odd.kind == "failed" and "raised ValueError" in odd.why
    (left,) = agent("leaves").play(seat(3))
    assert (left.kind, left.why) == ("failed", "called sys.exit(3)")


def test_coroutines_share_one_loop_and_a_stop_cancels_one(agent: Any) -> None:
    served = agent("waits")
    (found,) = served.play(seat(1))
    assert found == SessionResult(1, "scored", 1.0)
    served.send(SessionOrders(seats=[seat(2, "for ever"), seat(3)]))
    assert served.result().number == 3 and own_module().waiting.wait(PATIENCE_S)
    served.send(SessionOrders(stop=[99, 2]))
    stopped = served.result()
    assert (stopped.number, stopped.kind) == (2, "failed") and "CancelledError" in stopped.why
    served.send(SessionOrders(stop=[2]))
    assert served.play(seat(4))[0].reward == 1.0, "the loop goes on"
    looped = agent("loop")
    played = [looped.play(seat(5))[0], *looped.play(seat(6), seat(7))]
    assert [found.reward for found in played] == [1.0] * 3, "connections of the module stay usable"
    (found,) = agent("thread").play(seat(5))
    assert found.reward == 1.0


def test_only_a_plain_function_takes_a_thread_and_an_exit_ends_one_session(agent: Any) -> None:
    assert agent("threads").play(seat(1))[0].reward == 0.0
    assert agent("plain_threads").play(seat(1))[0].reward == 1.0, "a coroutine too"
    served = agent("short")
    for number in (1, 2):
        (found,) = served.play(seat(number))
        assert found.kind == "failed" and "TypeError" in found.why, "the loop goes on"
    served = agent("leaves_in_a_task")
    for number in (1, 2):
        (found,) = served.play(seat(number))
        assert (found.kind, found.why) == ("failed", "called sys.exit(4)")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent", "raised AttributeError: "),
        ("CONSTANT", "raised TypeError: CONSTANT is not a function; write module:function"),
    ],
)
def test_a_function_that_is_none_is_refused(name: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / f"refused_{tmp_path.name}.py"
    file.write_text(AGENT)
    served = AgentLoop(AgentConfig(function=f"{file}:{name}"), tmp_path / "agent.log")
    found = served.result()
    assert (found.number, found.kind) == (-1, "broken")
    assert found.why.startswith(f"agent.function = {file}:{name}: importing it {why}")
    assert found.why.endswith("write module:function or file.py:function")
    served.close()


def test_without_the_hub_s_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)  # as where it is not installed
    with pytest.raises(ConfigError) as error:
        self_playing.load("verifiers:words", {})
    assert re.fullmatch(
        r"agent\.env = verifiers:words: [^;]*verifiers[^;]*; .*; install verifiers and the "
        r"environment into a Python, and name it by agent\.python",
        str(error.value),
    )
    served = AgentLoop(AgentConfig(env="verifiers:words", args={"seed": 1}), tmp_path / "log")
    assert served.result().why == str(error.value)
    served.close()
    assert examine.examine("verifiers:words", {}, tmp_path) == {"error": str(error.value)}


def test_another_package_of_that_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("verifiers")
    other.__version__ = "9"
    monkeypatch.setitem(sys.modules, "verifiers", other)
    with pytest.raises(ConfigError) as error:
        self_playing.load("verifiers:words", {})
    assert str(error.value) == (
        "agent.env = verifiers:words: verifiers 9 has neither load_environment(NAME) nor the "
        "module verifiers.v1; install verifiers 0.1 or 0.4"
    )


def test_an_environment_loads_or_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, adapter = ModuleType("verifiers"), ModuleType("adapter")
    package.__version__ = "0.1.9"
    package.load_environment = print
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "actors.gateway.hubs.verifiers_v0", adapter)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    adapter.load = lambda *words: words
    loaded: Any = self_playing.load("verifiers:words", {"seed": 1})
    assert loaded == ("words", {"seed": 1})
    assert any(path in ("", str(tmp_path)) for path in sys.path), "its module may lie here"

    def refuse(error: BaseException) -> str:
        def load(name: str, args: dict[str, Any]) -> None:
            raise error

        adapter.load = load
        with pytest.raises(ConfigError) as told:
            self_playing.load("verifiers:words", {})
        assert told.value.__cause__ is error
        return str(told.value)

    begin = "agent.env = verifiers:words: "
    assert refuse(ConfigError("no rows")) == f"{begin}no rows"
    assert refuse(AttributeError("no Rubric")) == (
        f"{begin}loading it raised AttributeError: no Rubric; agent.python has verifiers 0.1.9: is "
        "it the environment's version?"
    )
    assert refuse(SystemExit(3)) == f"{begin}loading it called sys.exit(3)"


def test_the_version_chooses_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("verifiers")
    package.__path__ = [str(tmp_path)]
    (tmp_path / "v1").mkdir()
    assert self_playing.find_adapter(package) == ""
    (tmp_path / "v1" / "__init__.py").touch()
    assert self_playing.find_adapter(package) == "actors.gateway.hubs.verifiers_v1"
    package.load_environment = print  # 0.1, which may have both
    assert self_playing.find_adapter(package) == "actors.gateway.hubs.verifiers_v0"
    monkeypatch.syspath_prepend(tmp_path)
    assert self_playing.find_adapter(ModuleType("verifiers")) == "", "v1 is no part of a file"


def test_a_prompt_of_text_is_a_message_of_the_user() -> None:
    made = self_playing.build_text_messages("1+1=", "row 0")
    assert made == [{"role": "user", "content": "1+1="}]


def test_a_failed_load_names_its_first_cause_and_a_remedy() -> None:
    def wrapped(cause: BaseException) -> BaseException:
        outer, middle = RuntimeError("outer"), ValueError("middle")
        outer.__cause__, middle.__cause__ = middle, cause
        return outer

    def told(error: BaseException) -> str:
        return self_playing.describe_failure(error, "0.4").removeprefix("loading it raised ")

    assert told(wrapped(ModuleNotFoundError("No module named 'words'"))) == (
        "ModuleNotFoundError: No module named 'words'; install its package into agent.python, or "
        "run where its module lies"
    )
    wrong = TypeError("f() got an unexpected keyword argument 'x'")
    assert told(wrapped(wrong)) == f"TypeError: {wrong}; see [agent.args]"
    assert told(wrapped(TypeError("other"))) == "TypeError: other"
    assert told(wrapped(KeyError("argument"))) == "KeyError: 'argument'"
    assert told(AttributeError("module has no Rubric")) == (
        "AttributeError: module has no Rubric; agent.python has verifiers 0.4: is it the "
        "environment's version?"
    )


class Words:
    """An environment with two data sets, of which one may fail."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args

    def iterate_rows(self, split: str) -> Iterator[dict[str, Any]]:
        for number in range(2 if split == "train" else 1):
            yield {"messages": [], "answer": f"é{number}", "dataset": split}
        if split == self.args.get("bad"):
            raise self.args["error"]

    async def play(self, prompt: Prompt, session: SessionAccess) -> SessionResult:
        return SessionResult(session.number, "scored", float(len(prompt.text)), truncated=True)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Sequence[tuple[str, dict[str, Any]]]:
    """Environments are `Words`; what they were loaded with."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def load(env: str, args: dict[str, Any]) -> Words:
        asked.append((env, args))
        return Words(args)

    monkeypatch.setattr(self_playing, "load", load)
    return asked


def test_prompts_become_files(loaded: Sequence[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    assert SPLITS == ("train", "eval")
    counts = examine.examine("verifiers:words", {"seed": 3}, tmp_path)
    assert counts == {"train": 2, "eval": 1} and loaded == [("verifiers:words", {"seed": 3})]
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["é0", "é1"]
    assert len((tmp_path / "eval.jsonl").read_text().splitlines()) == 1


def test_an_environment_is_examined_in_a_process_of_its_own(
    loaded: Sequence[tuple[str, dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Standard output is the result alone; what the environment prints goes to standard error."""

    def iterate_rows(self: Words, split: str) -> Iterator[dict[str, Any]]:
        os.write(1, f"loading {split}\n".encode())
        yield {"messages": [], "answer": "a", "dataset": split}

    monkeypatch.setattr(Words, "iterate_rows", iterate_rows)
    monkeypatch.setattr(sys, "argv", ["examine", "verifiers:words", '{"n": 1}', str(tmp_path)])
    monkeypatch.delitem(sys.modules, "actors.gateway.hubs.examine")
    kept = os.dup(1)
    try:
        runpy.run_module("actors.gateway.hubs.examine", run_name="__main__")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert capfd.readouterr() == ('{"train": 1, "eval": 1}', "loading train\nloading eval\n")
    assert loaded == [("verifiers:words", {"n": 1})]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.jsonl", "train.jsonl"]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConfigError("row 3 is no text"), "row 3 is no text"),
        (KeyError("x"), "raised KeyError: 'x'"),
    ],
)
def test_a_data_set_that_cannot_be_built_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    monkeypatch.setattr(examine.self_playing, "load", lambda _, args: Words(args))
    made = examine.examine("verifiers:words", {"bad": "train", "error": error}, tmp_path)
    assert made == {"error": f"agent.env = verifiers:words: its data set: {why}"}


def test_an_environment_plays(loaded: Sequence[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    served = AgentLoop(AgentConfig(env="verifiers:words", args={"seed": 4}), tmp_path / "log")
    assert served.result().kind == "ready" and loaded == [("verifiers:words", {"seed": 4})]
    (found,) = served.play(seat(1, "four"))
    assert found == SessionResult(1, "scored", 4.0, truncated=True)
    served.close()
