"""The agents of docs/clients that `make test` leaves out, each with its real package: `make
clients` builds their environment from nothing, runs this, and shows what came of each."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from clients_kit import MULTIPLY, Ended, Runner, python_of, tool_call, write_program
from hubs_kit import Player

OBJECT = '{"value": 51}'
WRITE = "echo 51 > answer.txt"


class Script(NamedTuple):
    """What the policy answers to a page's program, and what comes of it.  again: the calls of a
    program whose policy never writes what is asked for."""

    answers: list[str]
    calls: int
    sequences: int
    again: int
    ignored: str = ""
    asides: Mapping[str, str] = MappingProxyType({})


def step(tool: str, **arguments: object) -> str:
    """A step of DSPy's ReAct."""
    return json.dumps({"next_thought": "t", "next_tool_name": tool, "next_tool_args": arguments})


SCRIPTS = {
    "llama-index": Script([MULTIPLY, OBJECT], 2, 1, 1),
    "dspy": Script(
        [step("multiply", a=17, b=3), step("finish"), '{"reasoning": "r", "value": 51}'],
        *(3, 3, 1, "response_format"),
    ),
    "autogen": Script([MULTIPLY, OBJECT], 2, 1, 1, "response_format"),
    "crewai": Script([MULTIPLY, OBJECT], 2, 1, 4),
    "mini-swe-agent": Script(
        [
            tool_call("bash", command=WRITE),
            tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ],
        *(2, 1, 3),
    ),
    "vercel-ai": Script([MULTIPLY, OBJECT], 2, 1, 1, "response_format"),
    "claude-code": Script(
        [tool_call("Bash", command=WRITE, description="write"), "Done."], 2, 1, 1
    ),
    "codex": Script([tool_call("exec_command", cmd=WRITE), "Done."], 2, 1, 1),
    "opencode": Script(
        [tool_call("bash", command=WRITE, description="write"), "Done."],
        *(3, 2, 2),
        asides={"title generator": "A product"},
    ),
}


class Bench:
    """Sessions of pages in the environment of `make clients`, and a line on each."""

    def __init__(self) -> None:
        self.python = python_of("more-clients")
        self.home = Path(self.python).parents[1]
        self.lines: list[str] = []

    def play(self, page: str, policy: str, answers: Sequence[str]) -> tuple[Ended, str]:
        """One session, and what its program printed."""
        # beside node_modules, where Node looks for what a program imports
        with tempfile.TemporaryDirectory(dir=self.home) as folder:
            program = write_program(page, Path(folder))
            interpreters = {".py": [self.python, "-E", "-P"], ".mjs": ["node"], ".sh": ["bash"]}
            runner = Runner(Path(folder), [*interpreters[program.suffix], str(program)])
            try:
                ended = runner.play(page, answers, SCRIPTS[page].asides)
                log = runner.log()
            finally:
                runner.close()
        session, left = ended.session, ended.left
        reward = left.reward if left.kind == "scored" else left.kind
        sequences = len(session.build_training_rows())
        self.lines.append(f"{page:16}{policy:8}{reward!s:>8}{session.calls:8}{sequences:20}")
        return ended, log


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    head = f"{'framework':16}{'policy':8}{'reward':>8}{'calls':>8}{'training sequences':>20}"
    print("", "", head, *made.lines, sep="\n")


@pytest.fixture(autouse=True)
def programs_find_node_and_each_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (bench.home / "bin", bench.home / "node_modules" / ".bin")
    monkeypatch.setenv("PATH", os.pathsep.join([*map(str, folders), os.environ["PATH"]]))


@pytest.mark.parametrize("page", SCRIPTS)
def test_an_agent_is_paid_for_its_answer(page: str, bench: Bench) -> None:
    """Its tool is called, its result is in the next prompt, all that was sampled is trained."""
    script = SCRIPTS[page]
    ended, log = bench.play(page, "right", script.answers)
    assert (ended.left.kind, ended.left.reward) == ("scored", 1.0), log
    session = ended.session
    found = (session.calls, len(session.build_training_rows()), session.aside)
    assert found == (script.calls, script.sequences, 0), log
    assert not script.ignored or script.ignored in ended.ignored
    assert ended.left.parts.get("parsed", 1.0) == 1.0


@pytest.mark.parametrize("page", SCRIPTS)
def test_an_answer_of_another_form_costs_reward_and_fails_nothing(page: str, bench: Bench) -> None:
    ended, log = bench.play(page, "wrong", ["no idea"])
    assert (ended.left.kind, ended.left.reward) == ("scored", 0.0), log
    assert ended.left.parts.get("parsed", 0.0) == 0.0
    assert ended.session.calls == SCRIPTS[page].again, log


def test_an_environment_of_gem_is_played_by_its_id() -> None:
    """Sessions of a seed are alike, though they sample from the process's generator by turns."""
    env = "gem:game:GuessTheNumber-v0-random"
    player = Player(env=env, args={"max_turns": 3}, python=python_of("gem"))
    try:
        first, second = player.reset(1, seed=5), player.reset(2, seed=5)
        assert first.obs == second.obs and "boxed" in str(first.obs)
        for text in ("\\boxed{1}", "\\boxed{2}"):
            one, two = player.step(1, text), player.step(2, text)
            assert (one.obs, one.reward, one.ended) == (two.obs, two.reward, two.ended)
    finally:
        player.pool.close()
