"""The agents of docs/clients with the real packages, in an environment of their own: what the page
says of each framework happens."""

from __future__ import annotations

from collections.abc import Iterator

import more_clients
import pytest
from clients_kit import AGENTS, MULTIPLY, RUN_PAGE, Runner, python_of, tool_call
from process_kit import ROOT

pytestmark = pytest.mark.slow

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
    session = ended.opened.session
    assert (session.calls, len(session.build_training_rows()), session.aside) == (calls, rows, 0)
    assert "51" not in ended.prompts[0] and "51" in ended.prompts[1]
    assert not ignored or ignored in ended.ignored
    assert ended.left.parts.get("parsed", 1.0) == 1.0


@pytest.mark.parametrize("page", WRONG)
def test_an_answer_that_cannot_be_parsed_costs_reward_and_fails_nothing(
    page: str, runner: Runner
) -> None:
    ended = runner.play(page, ["no idea"])
    assert (ended.left.kind, ended.left.reward) == ("scored", 0.0), runner.log()
    assert ended.left.parts["parsed"] == 0.0
    assert ended.opened.session.calls == WRONG[page]


def test_every_agent_is_run_and_is_on_the_page() -> None:
    assert set(AGENTS) == {*RIGHT, *more_clients.SCRIPTS}
    page = (ROOT / "docs" / "http.md").read_text()
    for path in AGENTS.values():
        assert f"(clients/{path.name})" in page
