"""Reward functions that misbehave: each answer comes back exactly once, as a number or as a failure, never as a silent 0."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.reward_worker import checked
from actors.rewards import Result, RewardRunner
from asyncrl.config import Config
from asyncrl.config import Task as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.messages import Prompt
from asyncrl.tasks import get_task

FUNCTIONS = """
import asyncio, os, time
def reward(prompt, text):
    match text:
        case "raise": raise KeyError("no such thing")
        case "nan": return float("nan")
        case "inf": return {"reward": float("inf")}
        case "none": return None
        case "word": return "1.0"
        case "parts": return {"reward": 0.5, "format": True}
        case "nameless": return {"score": 1}
        case "tokens": return {"reward": 1, "token_rewards": [0.25, 0.75]}
        case "few": return {"reward": 1, "token_rewards": [0.25]}
        case "die": os._exit(3)
        case "hang":
            while True: time.sleep(60)
    return float(text == prompt.answer)
async def later(prompt, text):
    await asyncio.sleep(0)
    return {"reward": len(text), "pid": os.getpid()}
number = 3
"""
RIGHT = Prompt(7, "1+1=", "2", meta={"kind": "sum"})


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardRunner]]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "dies.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).resolve().parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    made: list[RewardRunner] = []

    def make(function: str = "", workers: int = 0, deadline_s: float = 30.0) -> RewardRunner:
        raw = {"model": {"path": "m"}, "task": {"name": "sort"}, "reward": {"function": function, "workers": workers, "deadline_s": deadline_s}}
        config = msgspec.convert(raw, Config)
        made.append(RewardRunner(config, get_task(config.task)))
        return made[-1]

    yield make
    for r in made:
        r.close()


def judge(runner: RewardRunner, *texts: str, prompt: Prompt = RIGHT) -> list[Result]:
    """Results in the order of `texts`, each of two tokens."""
    for i, text in enumerate(texts):
        runner.submit((i, 0, 0), prompt, text, [1, 2])
    results: list[Result] = []
    deadline = time.monotonic() + 120
    while len(results) < len(texts):
        assert time.monotonic() < deadline
        results += runner.poll()
    assert sorted(r[0][0] for r in results) == list(range(len(texts)))
    return sorted(results)


def test_answers_are_judged_in_other_processes(runner: Callable[..., RewardRunner]) -> None:
    got = judge(runner("mine:reward", workers=2), "2", "3", "parts", "tokens")
    assert [r[1] for r in got] == [1.0, 0.0, 0.5, 1.0]
    assert got[2][2] == {"reward": 0.5, "format": 1.0} and got[3][3] == [0.25, 0.75]
    assert [r[4] for r in got] == [""] * 4


def test_what_raises_or_returns_no_number_is_a_failure(runner: Callable[..., RewardRunner]) -> None:
    got = judge(runner("mine:reward"), "raise", "nan", "inf", "none", "word", "nameless", "few", "2")
    words = ("no such thing", "nan", "inf", "NoneType", "str", "without `reward`", "list of 2")
    for r, word in zip(got, words, strict=False):
        assert r[4].startswith("data: ") and word in r[4]
    assert got[7][1:] == (1.0, {}, None, "")  # the process lives on


def test_a_process_that_hangs_or_dies_is_replaced(runner: Callable[..., RewardRunner]) -> None:
    r = runner("mine:reward", deadline_s=0.5)
    got = judge(r, "hang", "2", "die", "2")
    assert "hung for more than 0.5 s" in got[0][4] and r.hangs == 1
    assert got[2][4] == "machinery: the reward process ended (3)"
    assert [x[1] for x in (got[1], got[3])] == [1.0, 1.0]


def test_a_process_killed_between_calls_is_replaced(runner: Callable[..., RewardRunner]) -> None:
    r = runner("mine:reward")
    judge(r, "2")
    r.processes[0].process.kill()
    r.processes[0].process.wait()
    got = judge(r, "2", "2")
    assert all(x[1] == 1.0 or x[4].startswith("machinery") for x in got) and got[1][1] == 1.0


def test_async_functions(runner: Callable[..., RewardRunner]) -> None:
    got = judge(runner("mine:later"), "abc")
    assert got[0][1] == 3.0 and got[0][2]["pid"] != os.getpid()


@pytest.mark.parametrize("path", ["mine:absent", "absent:reward", "mine:number", "mine"])
def test_a_function_that_cannot_be_had_is_a_config_error(path: str, runner: Callable[..., RewardRunner]) -> None:
    with pytest.raises(ConfigError, match=f"reward.function = {path}"):
        judge(runner(path), "2")


def test_a_module_that_ends_its_process_is_a_config_error(runner: Callable[..., RewardRunner]) -> None:
    with pytest.raises(ConfigError, match="3 processes ended"):
        judge(runner("dies:reward"), "2")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tasks_own_reward_runs_in_place_or_in_workers(workers: int, runner: Callable[..., RewardRunner]) -> None:
    r = runner(workers=workers)
    assert len(r.processes) == workers
    prompt = get_task(TaskConfig(name="sort")).prompt("train", 0, 0)
    got = judge(r, prompt.answer, "#0", prompt=prompt)
    assert [x[1] for x in got] == [1.0, 0.0] and not r.poll()


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.array(1.0)])
def test_numbers_of_all_kinds_count(value: Any) -> None:
    assert checked(value, 3) == (1.0, {}, None)
    assert checked({"reward": value, "token_rewards": np.ones(3)}, 3) == (1.0, {"reward": 1.0}, [1.0] * 3)


@pytest.mark.parametrize("value", [math.nan, -math.inf, None, "1", [1.0], {}, {"reward": None}, {"reward": 1, "part": math.nan}])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        checked(value, 3)
