"""The same sessions by an environment, OpenAI's client in Python, token ids and a program in Node:
in exact mode at limit 0 every drawn token, every log-probability and the weights at the end are the
same to the last bit."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import more_clients
import pytest
from clients_kit import AGENTS, MULTIPLY, RUN_PAGE, Runner, python_of, tool_call
from process_kit import ROOT, RUN_SEED, run_command

from asyncrl.models.policy import build_model
from asyncrl.tasks.calc import CalcTask

pytestmark = pytest.mark.slow

TESTS = ROOT / "tests" / "support"
SETS = (
    f"seed={RUN_SEED}",
    "exact=true",
    "generator.top_p=0.9",  # the kept tokens come along, too
    *("model.path=m", "model.warm_start=false", "staleness.max_lag=0", "learner.steps=2"),
    *("learner.groups=1", "learner.group_size=4", "generator.slots=4", "evaluation.every=0"),
    *("evaluation.prompts=1", "evaluation.final_prompts=1", "evaluation.ood_prompts=1"),
    *("record.samples_every=1", "record.samples=0"),
    "wires.lease_s=3600",  # a sample that is drawn twice stands in the ledger twice
)


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden")
    build_model(path / "m", CalcTask.symbols, hidden=32, layers=1)
    return path


def run(where: Path, config: str, name: str, *sets: str) -> tuple[dict[str, Any], Any, Any]:
    """(summary, samples by ticket and sample, rows of metrics)."""
    words = [word for each in (*SETS, *sets, f"name='{name}'") for word in ("--set", each)]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", str(ROOT / "configs" / config), "--json"]
    done = run_command([*argv, *words], cwd=where, timeout=600).check()
    folder = where / "runs" / name
    read = [
        [json.loads(line) for line in (folder / file).read_text().splitlines()]
        for file in ("samples.jsonl", "metrics.jsonl")
    ]
    return done.json, {(each["ticket"], each["sample"]): each for each in read[0]}, read[1]


@pytest.fixture(scope="module")
def environment(where: Path) -> tuple[dict[str, Any], Any, Any]:
    return run(where, "calc.toml", "env", f"agent.env='{TESTS}/golden_agents.py:Lengths'")


def test_the_learner_has_the_bits_of_the_calls(environment: tuple[Any, Any, Any]) -> None:
    """Also where a later call encoded anew what an earlier one drew."""
    summary, samples, metrics = environment
    assert summary["trajectories"] == len(samples) == 8
    assert all(each["calls"] == 3 and not each["rows"] for each in samples.values())
    assert len({each["reward"] for each in samples.values()}) > 2  # something is learned
    largest = [row["mismatch/max_at_lag_0"] for row in metrics if "mismatch/max_at_lag_0" in row]
    assert largest == [0.0, 0.0]


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(f"agent.function='{TESTS}/golden_agents.py:by_both'", id="python"),
        pytest.param(
            f"agent.command=['node', '{TESTS}/golden_agent.mjs']",
            id="node",
            marks=pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
        ),
    ],
)
def test_agents_over_http_draw_and_learn_the_same_bits(
    environment: tuple[Any, Any, Any], where: Path, agent: str
) -> None:
    sets = [agent] if "function" in agent else ["agent.function=''", agent]
    name = "python" if "function" in agent else "node"
    summary, samples, _ = run(where, "calc_http.toml", name, "agent.at_once=4", *sets)
    expected = environment[1]
    assert samples.keys() == expected.keys()
    for key, sample in samples.items():
        for part in ("tokens", "logprobs", "mask", "versions", "reward", "calls"):
            assert sample[part] == expected[key][part], (key, part)
    assert summary["weights_digest"] == environment[0]["weights_digest"]
    assert summary["trained_ids"] == environment[0]["trained_ids"]
    ledger = summary["ledger"]
    assert ledger["trained"] == ledger["generated"] > 8 and not ledger["failed"]


OBJECT = '{"value": 51}'
# page -> the policy's answers, calls, training sequences, ignored for its form
RIGHT = {
    "openai": ([MULTIPLY, "fifty-one", OBJECT], 3, 2, "response_format"),
    "anthropic": ([MULTIPLY, tool_call("answer", value=51)], 2, 1, "tool_choice"),
    "openai-agents": ([MULTIPLY, "fifty-one", MULTIPLY, OBJECT], 4, 2, "text.format"),
    "pydantic-ai": (
        [MULTIPLY, "It is 51.", tool_call("final_result", value=51)],
        3,
        1,
        "tool_choice",
    ),
    "langchain": (
        [MULTIPLY, tool_call("Answer", value="x"), tool_call("Answer", value=51)],
        3,
        1,
        "tool_choice",
    ),
    "langgraph": ([MULTIPLY, OBJECT], 2, 1, ""),
    "smolagents": ([MULTIPLY, tool_call("final_answer", answer="51")], 2, 2, "tool_choice"),
    "litellm": ([MULTIPLY, OBJECT], 2, 1, "response_format"),
}
# the policy never writes what is asked for: calls
WRONG = {"openai": 3, "openai-agents": 2, "pydantic-ai": 3, "langchain": 1}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    command = [python_of("clients"), "-E", "-P", "-c", RUN_PAGE]
    made = Runner(tmp_path_factory.mktemp("clients"), command)
    yield made
    made.close()


@pytest.mark.parametrize("page", RIGHT)
def test_an_agent_is_paid_for_its_answer(page: str, runner: Runner) -> None:
    """Its tool is called, its result is in the next prompt, all that was sampled is trained."""
    answers, calls, rows, ignored = RIGHT[page]
    ended = runner.play(page, answers)
    assert (ended.left.kind, ended.left.reward) == ("scored", 1.0), runner.log()
    session = ended.session
    assert (session.calls, len(session.build_training_rows()), session.aside) == (calls, rows, 0)
    assert "51" not in ended.prompts[0] and "51" in ended.prompts[1]
    assert not ignored or ignored in ended.ignored
    assert ended.left.parts.get("parsed", 1.0) == 1.0


@pytest.mark.parametrize("page", WRONG)
def test_an_unparsable_answer_costs_reward_and_fails_nothing(page: str, runner: Runner) -> None:
    ended = runner.play(page, ["no idea"])
    assert (ended.left.kind, ended.left.reward) == ("scored", 0.0), runner.log()
    assert ended.left.parts["parsed"] == 0.0 and ended.session.calls == WRONG[page]


def test_every_agent_is_run_and_is_on_the_page() -> None:
    assert set(AGENTS) == {*RIGHT, *more_clients.SCRIPTS}
    page = (ROOT / "docs" / "http.md").read_text()
    for path in AGENTS.values():
        assert f"(clients/{path.name})" in page
