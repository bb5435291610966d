"""`asyncrl task try` of an environment: by hand, and with a model whose ids are as in a run."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_kit import ENV, ROOT

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError
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
