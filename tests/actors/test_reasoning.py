"""reasoning-gym's generators as tasks: splits, rewards and refusals, by a stand-in with its
interface; the real package where it is installed."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl.config import load
from asyncrl.config.tree import TaskConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.tasks import get_task
from asyncrl.tasks.synthetic import FIXED

# those with short questions and answers, by measurement (docs/rewards.md)
SHORT = ["spell_backward", "lcm", "chain_sum", "count_bits"]


class Halves:
    """What half of a number is; half a point for an answer that holds it."""

    def __init__(self, size: int, seed: int, most: int = 1 << 50) -> None:
        assert most > 0, "most must be positive"
        self.size, self.most = size, most
        self.made = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert 0 <= index < self.size
        self.made += 1
        number = index * 2 % self.most
        return {"question": f"half of {number}?", "answer": number // 2, "metadata": {"n": number}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        if answer == "word":
            raise ValueError("invalid literal for int() with base 10: 'word'")
        right = str(entry["metadata"]["n"] // 2)
        return 1.0 if answer == right else 0.5 * (right in answer)


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(name: str, **settings: Any) -> Halves:
        if name != "halves":
            raise ValueError(f"Dataset '{name}' not registered")
        return Halves(**settings)

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create))


def test_no_problem_is_in_two_splits(gym: None) -> None:
    task = get_task(TaskConfig(name="reasoning_gym:halves"))
    sets = {
        split: [task.prompt(split, index, seed) for seed in (0, 1) for index in range(300)]
        for split in ("train", "heldout", "ood")
    }
    texts = {split: {prompt.text for prompt in found} for split, found in sets.items()}
    assert not texts["train"] & texts["heldout"] and not texts["train"] & texts["ood"]
    assert not texts["heldout"] & texts["ood"]
    assert len(texts["train"]) == 600 and len(texts["heldout"]) == 300, "a seed draws new ones"
    assert task.size("train") is None and task.size("ood") == FIXED
    again = task.prompt("heldout", FIXED + 4, 9)
    assert again == msgspec.structs.replace(sets["heldout"][4], id=FIXED + 4), "and no other later"
    assert sets["train"][5] == task.prompt("train", 5, 0), "a function of seed and number"


def test_the_generators_own_judge_pays_and_few_problems_are_given(gym: None) -> None:
    task = get_task(TaskConfig(name="reasoning_gym:halves"))
    prompt = task.prompt("train", 3, 0)
    assert task.reward(prompt, f" {prompt.answer}\n") == 1.0
    assert task.reward(prompt, f"it is {prompt.answer}") == 0.5 and task.reward(prompt, "") == 0.0
    assert task.reward(prompt, "word") == 0.0, "what the judge cannot read is no failed reward"
    task = get_task(TaskConfig(name="reasoning_gym:halves", options={"most": 4}))
    assert {task.prompt("train", n, 0).text for n in range(50)} <= {"half of 0?", "half of 2?"}


def test_refusals(gym: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'nope' not registered"):
        get_task(TaskConfig(name="reasoning_gym:nope"))
    with pytest.raises(ConfigError, match="most must be positive"):
        get_task(TaskConfig(name="reasoning_gym:halves", options={"most": 0}))
    file = tmp_path / "c.toml"
    head = 'model.path = "m"\n'
    file.write_text(head + '[task]\nname = "reasoning_gym:halves"\noptions = { most = 8 }\n')
    loaded = load.load(file)
    (tmp_path / "resolved.toml").write_text(load.dump(loaded))
    assert load.load(tmp_path / "resolved.toml") == loaded and loaded.task.options == {"most": 8}
    with pytest.raises(ConfigError, match="has no answers to learn from"):
        load.load(file, ["model.warm_start=true"])
    with pytest.raises(ConfigError, match="sort has no options"):
        load.load(file, ["task.name=sort"])
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[reasoning\]'"):
        get_task(TaskConfig(name="reasoning_gym:halves"))


@pytest.mark.parametrize("name", SHORT)
def test_the_real_generators(name: str) -> None:
    pytest.importorskip("reasoning_gym")
    task = get_task(TaskConfig(name=f"reasoning_gym:{name}"))
    for split in ("train", "heldout", "ood"):
        for index in range(20):
            prompt = task.prompt(split, index, 3)
            assert len(prompt.text) <= 110 and len(prompt.answer) <= 12
            assert task.reward(prompt, prompt.answer) == 1.0 and task.reward(prompt, "?") == 0.0
