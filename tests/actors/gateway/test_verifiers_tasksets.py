"""Environments of verifiers 0.4 by name, with the real package in an environment of its own: their
tasks as prompts, their episodes at the endpoint, their rewards, and what is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from clients_kit import python_of, tool_call
from process_kit import ENV
from verifiers_kit import KINDS, Bench, config

from asyncrl.contract import importing
from asyncrl.supervise import preflight

pytestmark = pytest.mark.slow

KIND = "verifiers:tasksets_kinds"
NULL = {"harness": {"id": "null"}}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(KINDS)
        patch.setenv("PYTHONPATH", str(KINDS))  # as if it were installed, for its tools' process
        runs = tmp_path_factory.mktemp("runs")
        located = preflight.localize(config(runs, KIND, python_of("verifiers")))
        made = Bench(tmp_path_factory.mktemp("agent"), located)
        yield made
        made.close()


def test_the_prompts_are_the_tasks(bench: Bench) -> None:
    brief = {"role": "system", "content": "Be brief."}
    for number, text in enumerate(("3+4=", "4+3=", "guess")):
        prompt = bench.prompt(text)
        assert prompt.id == number and prompt.meta == {"dataset": "train"}
        assert prompt.messages == [brief, {"role": "user", "content": text}]
    assert (bench.rows, bench.heldout) == (7, 1)  # a tenth, or one


def test_its_rewards_pay_and_each_is_a_part(bench: Bench) -> None:
    for text, answer, reward in (("3+4=", "7", 1.5), ("4+3=", "7", 1.5), ("3+4=", "seven", 0.0)):
        result, opened = bench.play(bench.prompt(text), answer)
        assert (result.kind, result.reward, result.truncated) == ("scored", reward, False), result
        paid = float(reward > 0)
        parts = {"exact": paid, "short": paid, "turns": 1.0, "reward": reward}
        assert result.parts == parts
        assert "Be brief." in bench.texts(opened)[0] and text in bench.texts(opened)[0]
        assert (opened.session.calls, len(opened.session.build_training_rows())) == (1, 1)


def test_an_exchange_of_several_turns_is_one_training_sequence(bench: Bench) -> None:
    result, opened = bench.play(bench.prompt("guess"), "3", "7")
    assert (result.kind, result.reward, result.parts["turns"]) == ("scored", 1.5, 2.0), result
    assert "no" in bench.texts(opened)[1]
    assert (opened.session.calls, len(opened.session.build_training_rows())) == (2, 1)


def test_tools_of_the_taskset_are_called(bench: Bench) -> None:
    calls = [
        tool_call("calculator_multiply", a=7, b=1),
        tool_call("calculator_divide", a=7, b=1),
        "7",
    ]
    result, opened = bench.play(bench.prompt("What is 7 times 1?"), *calls)
    assert (result.kind, result.reward, result.truncated) == ("scored", 1.5, False), result
    _, second, third = bench.texts(opened)
    assert second.rpartition("</tool_call>")[2].count("7") == 1
    assert "error: unknown tool 'calculator_divide'" in third
    assert len(opened.session.build_training_rows()) == 1


def test_an_empty_answer_is_scored(bench: Bench) -> None:
    result, opened = bench.play(bench.prompt("3+4="), "")
    assert (result.kind, result.reward, opened.session.calls) == ("scored", 0.5, 1), result


def test_what_raises_fails_the_session(bench: Bench) -> None:
    for text, answers, why in (
        ("a number, please", ["none"], "invalid literal"),
        ("an error, please", ["7"], "the environment is broken"),
        ("two answers, please", ["7", "7"], "ran the agent agent 2 times, not once"),
    ):
        result, opened = bench.play(bench.prompt(text), *answers)
        assert result.kind == "failed" and why in result.why and not result.scored, result
        assert opened.session.calls == len(answers), "nothing is tried again"
    result, _ = bench.play(bench.prompt("a number, please"), "4")
    assert (result.kind, result.reward) == ("scored", 0.125)


def test_a_limit_cuts_the_session_and_its_task_scores_it(bench: Bench) -> None:
    result, opened = bench.play(bench.prompt("guess"), "1", "2", "3")
    assert (result.kind, result.truncated, result.reward) == ("scored", True, 0.5), result
    assert opened.session.calls == 3 and not opened.session.limit  # max_turns of its agent
    # after two long answers the next prompt is longer than the context
    result, opened = bench.play(bench.prompt("guess"), "x" * 190, "y" * 190)
    assert (result.kind, result.truncated, result.reward) == ("scored", True, 0.0), result
    assert opened.session.shortened and opened.session.calls == 2
    result, opened = bench.play_limited(bench.prompt("guess"), "3")
    assert (result.kind, result.scored, result.reward) == ("failed", True, 0.5), result
    assert opened.session.limit == "max_calls" and "agent.max_calls" in result.why


def test_tasks_that_change_between_processes_fail_the_session(bench: Bench) -> None:
    prompt = bench.prompt("3+4=")
    other = msgspec.structs.replace(prompt, messages=[{"role": "user", "content": "8+9="}])
    result, _ = bench.play(other)
    assert result.kind == "failed" and "give the taskset a fixed seed" in result.why


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("verifiers:no-such", {}, "'no_such'; install its package into agent.python"),
    (KIND, {"taskset": {"kinds": 1}}, "[agent.args]: taskset.kinds: Extra inputs"),
    (KIND, {"taskset": {"endless": True}}, "never ends: say how many tasks are read"),
    (KIND, {"taskset": {"picture": True}}, "row 0: its prompt has content that is not text"),
    (KIND, {"agent": {"harness": {"id": "bash"}}}, 'agent.args.agent.harness.id = "null"'),
    (KIND, {"id": "user-sim", "assistant": NULL}, "assistant, user would be played by 2 policies"),
    ("verifiers:verifiers_kinds", {}, "agent.python has verifiers 0.4.0"),
]


def test_an_environment_that_cannot_be_played_is_refused_in_one_line() -> None:
    """All in one process, as each import of verifiers takes seconds."""
    accepted = (KIND, {"taskset": {"endless": True}, "select": {"limit": 3}})
    cases = [(env, args) for env, args, _ in REFUSED] + [accepted]
    argv = [*importing.make_command("verifiers_refused", python=python_of("verifiers"))]
    ended = subprocess.run(
        [*argv, json.dumps(cases)], cwd=KINDS, env=ENV, capture_output=True, check=True
    )
    *refused, found = json.loads(ended.stdout)
    for (env, _, why), answer in zip(REFUSED, refused, strict=True):
        assert answer["error"].startswith(f"agent.env = {env}: "), answer
        assert why in answer["error"] and "\n" not in answer["error"], answer
    assert found == {"train": 3, "eval": 0}
