"""textarena's games as environments: the real GuessTheNumber, and a stand-in where luck matters."""

import itertools
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from actors.gateway.environment_worker import (
    EnvironmentHost,
    EnvironmentOperation,
    EnvironmentSetup,
)
from asyncrl.config.rules import check
from asyncrl.config.tree import TaskConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.tasks import arena, get_task, guess_task
from asyncrl.tasks.calc import END


class Dice:
    """A game as textarena has them: rolls at every turn, by Python's own generator."""

    def reset(self, num_players: int, seed: int) -> None:
        assert num_players == 1
        self.rolls = [random.randint(1, 1000)]
        self.news: list[Any] = [(-1, "Roll.", "PROMPT"), (-1, str(self.rolls[-1]), "MESSAGE")]

    def get_observation(self) -> tuple[int, list[Any]]:
        news, self.news = self.news, []
        return 0, news

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.rolls.append(random.randint(1, 1000))
        self.news = [(0, action, "ACTION"), (-1, str(self.rolls[-1]), "MESSAGE")]
        return len(self.rolls) == 4, {}

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return {0: 0.25}, {0: {"invalid_move": action_was_bad(self.rolls)}}


def action_was_bad(rolls: list[int]) -> bool:
    return rolls[0] % 2 == 0


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for the package; the ids that were asked for."""
    asked: list[str] = []

    def make(name: str) -> Dice:
        asked.append(name)
        if name != "Dice-v0-raw":
            raise ValueError(f"Environment {name} not found in registry.")
        return Dice()

    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=make))
    return asked


def test_sessions_of_one_process_have_a_luck_of_their_own(dice: list[str]) -> None:
    """The games draw from the global generator: two sessions by turns see what each sees alone."""

    def played(env: arena.ArenaGame, seed: int) -> Any:
        yield env.reset(seed=seed, options={})[0]
        while True:
            obs, reward, ended, truncated, info = env.step("go")
            yield obs
            if ended:
                yield reward, truncated, info
                return

    alone = [list(played(arena.ArenaGame("Dice-v0"), seed)) for seed in (7, 8)]
    random.seed(1)
    before = random.getstate()
    one, other = (
        played(arena.ArenaGame(f"Dice-v0{raw}"), 7 + at) for at, raw in enumerate(("", "-raw"))
    )
    turns = list(zip(one, other, strict=True))
    assert random.getstate() == before, "nor is anybody else's changed"
    assert [list(x) for x in zip(*turns, strict=True)] == alone and alone[0] != alone[1]
    first = alone[0][0].splitlines()
    assert first[0] == "Roll." and alone[0][1].isdigit(), "its own words are not said to it again"
    parts = {"invalid": float(action_was_bad([int(first[1])]))}
    assert alone[0][-1] == (0.25, False, {"parts": parts}) and set(dice) == {"Dice-v0-raw"}


def test_one_line_of_config(dice: list[str]) -> None:
    made = EnvironmentHost(EnvironmentSetup("textarena:Dice-v0", []))
    got = made.apply(EnvironmentOperation(3, "reset", prompt=Prompt(0, "0"), seed=5))
    assert got is not None and got.kind == "ok" and str(got.obs).startswith("Roll.\n")
    with pytest.raises(ConfigError, match=r"^agent.env = textarena:Chess-v9: Environment .* not f"):
        EnvironmentHost(EnvironmentSetup("textarena:Chess-v9", []))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[arena\]'"):
        arena.ArenaGame("GuessTheNumber-v0")


def test_the_real_game() -> None:
    """Halving wins within five guesses, whatever the number; the seed decides it; what is no
    guess, twice, ends it without pay."""
    pytest.importorskip("textarena")
    from asyncrl.tasks.guess import GuessGame

    found = set()
    for seed in range(30):
        env = GuessGame()
        assert env.reset(seed=seed, options={})[0] == guess_task.GuessTask.question
        low, high, reward = 1, 20, 0.0
        for _ in range(guess_task.FAIREST):
            guess = (low + high) // 2
            obs, reward, ended, *_ = env.step(str(guess))
            if ended:
                found.add(guess)
                break
            low, high = (low, guess - 1) if obs == "<" else (guess + 1, high)
            assert obs in "<>"
        assert reward == 1.0 and ended
    assert len(found) > 10
    env = GuessGame()
    env.reset(seed=3, options={})
    assert env.step("x")[:3] == ("!", 0.0, False) and env.step("")[1:3] == (0.0, True)
    whole = arena.ArenaGame("GuessTheNumber-v0")
    first, _ = whole.reset(seed=3, options={})
    assert "between 1 and 20" in first and "[GAME]" not in first
    said, *_ = whole.step("I say [1]")
    assert said == "The target number is higher."
    near, *_ = env.reset(seed=3, options={})
    assert near != first


def test_demonstrated_guesses_stand_behind_what_the_game_says() -> None:
    pytest.importorskip("textarena")
    task = guess_task.GuessTask()
    pairs = task.make_demonstrations(400, 0)
    assert len(pairs) == 400 and pairs == guess_task.GuessTask().make_demonstrations(400, 0)
    sessions: list[list[tuple[str, str]]] = []
    for before, guess in pairs:
        if before == task.question:
            sessions.append([])
        sessions[-1].append((before, guess))
    hits = 0
    for turns in sessions[:-1]:
        whole = task.question
        for (before, guess), (after, _) in itertools.pairwise(turns):
            assert before == whole
            whole = after
            sign = after.removeprefix(before + guess + END)
            assert sign in ("<", ">", "!") and len(guess) < task.longest
        assert len(turns) <= task.turns
        hits += len(turns) < task.turns
    assert 0.2 < hits / len(sessions) < 0.8  # spoiled on purpose


@pytest.mark.parametrize("name", ["seeds", "guess", "nim"])
def test_tasks_whose_environment_pays(name: str) -> None:
    from asyncrl.config import load

    task = get_task(TaskConfig(name=name))
    assert task.prompt("train", 5, 0).id == 5 and task.size("train") is None
    assert task.size("heldout") and task.prompt("heldout", 1, 0).split == "heldout"
    with pytest.raises(ValueError, match="the environment gives it"):
        task.reward(task.prompt("train", 0, 0), "")
    assert check(load.load("guess", [f"task.name={name}", "model.warm_start=false"])) == []
    with pytest.raises(ConfigError, match="needs an environment that gives prompts and rewards"):
        load.load("guess", [f"task.name={name}", "model.warm_start=false", "agent.env=''"])
