"""The calculator's task by hand, and its warm start: every demonstrated turn stands behind what the
environment would have said."""

from __future__ import annotations

import jinja2
import pytest
from process_kit import ROOT, load_program

from asyncrl.contract.messages import Prompt
from asyncrl.tasks.calc import END, TURNS, CalcTask, Calculator, calculate
from asyncrl.tasks.synthetic import FIXED


def test_the_calculator_by_hand() -> None:
    assert calculate("?12+30") == "42=" and calculate("?99*99") == "9801="
    for none in ("12+30", "?12", "?12+", "?1+2+3", "?1-2", "?9999*9", "", "#4", "?12345+1"):
        assert calculate(none) == "e=", none
    task = CalcTask()
    assert task.solve("37*8+45") == "#341" and task.solve("12*3-20") == "#16"
    assert task.split_problem("37*8-45") == ("?37*8", "-45")


def play(prompt: Prompt, *texts: str) -> list[tuple[str, float, bool, bool]]:
    env = Calculator()
    assert env.reset(seed=1, options={"prompt": prompt}) == (prompt.text, {})
    return [env.step(text)[:4] for text in texts]


def test_an_episode_by_hand() -> None:
    prompt = Prompt(0, "37*8+45=", "#341")
    assert play(prompt, "?37*8", "?296+45", "#341") == [
        ("296=", 0.0, False, False),
        ("341=", 0.0, False, False),
        ("", 1.0, True, False),
    ]
    assert play(prompt, "#340") == [("", 0.0, True, False)]
    assert play(prompt, *["x"] * TURNS)[-1] == ("e=", 0.0, False, True)


def test_demonstrated_turns_stand_behind_what_the_calculator_says() -> None:
    task = CalcTask()
    pairs = task.make_demonstrations(3000, 0)
    assert len(pairs) == 3000 and pairs == CalcTask().make_demonstrations(3000, 0)
    right = whole = 0
    for before, written in pairs:
        problem, *turns = before.split("=", 1)[0], *before.split("=", 1)[1].split("=")[:-1]
        for turn in turns:
            text, says = turn.split(END)
            assert calculate(text) == says + "="
        assert set(written) <= set(task.symbols)
        if written.startswith("#"):
            whole += 1
            right += written == task.solve(problem)
    assert 0.25 < right / whole < 0.6  # spoiled on purpose


def test_fixed_sets_share_no_problem_with_training() -> None:
    task = CalcTask()
    sets = [{task.prompt(split, i, 0).text for i in range(FIXED)} for split in ("heldout", "ood")]
    assert all(len(texts) == FIXED for texts in sets)
    train = {task.prompt("train", i, 3).text for i in range(2000)}
    shown = {before.split("=")[0] + "=" for before, _ in task.make_demonstrations(2000, 1)}
    assert not sets[0] & sets[1] and not (train | shown) & (sets[0] | sets[1])
    assert all(0 < int(task.solve(text[:-1])[1:]) < 2000 for text in sets[0] | sets[1])


@pytest.mark.parametrize("first", ["?37*8", "37*", "?12-30"])
def test_a_framework_is_told_and_says_what_the_environment_does(first: str) -> None:
    """Its messages, written by the template, are the text of a session in the environment."""
    program = load_program(ROOT / "benchmarks" / "openai_agents.py")
    assert program.solved("37*8+45=") == CalcTask().solve("37*8+45")
    assert program.solved("37*8-45=") == CalcTask().solve("37*8-45")
    call = program.called(first)
    (made,) = call["tool_calls"]
    told = program.calculate(**made["function"]["arguments"])
    assert told == calculate(first)
    assert program.called("#341") == {"content": "#341"}
    messages = [
        {"role": "user", "content": "37*8+45="},
        {"role": "assistant", **call},
        {"role": "tool", "content": told},
    ]
    written = jinja2.Template(program.TEMPLATE).render(messages=messages)
    assert written == f"37*8+45={first}{END}{told}"
