"""Nothing to learn is said: rules over rows of metrics, by hand."""

from __future__ import annotations

import math
from typing import Any

from asyncrl import signs
from asyncrl.signs import Sign


def rows(n: int, **keys: Any) -> list[dict[str, Any]]:
    """n batches with these metrics; `_` in a name stands for `/` once."""
    usual = {"reward/mean": 0.5, "reward/no_spread_share": 0.3, "reward/min": 0.0, "reward/max": 1.0, "answer/truncated_share": 0.1}
    return [{"step": i, "t": float(i)} | usual | {k.replace("_", "/", 1): v for k, v in keys.items()} for i in range(n)]


def names(found: list[Sign]) -> list[str]:
    return [s.name for s in found]


def test_a_healthy_run_has_no_signs() -> None:
    assert signs.signs(rows(30)) == [] and signs.signs([], ended=True) == [] and signs.signs(rows(30), ended=True) == []


def test_constant_rewards_are_said_from_the_fifth_batch_on() -> None:
    flat = {"reward_no_spread_share": 1.0, "reward_min": 0.25, "reward_max": 0.25}
    assert signs.signs(rows(4, **flat)) == []
    (sign,) = signs.signs(rows(5, **flat))
    assert sign.name == "constant_rewards" and "last 5 batches was given the reward 0.25" in sign.said and "task try" in sign.try_this
    assert sign.line() == f"{sign.said}; {sign.try_this}"


def test_rewards_without_spread_in_most_groups() -> None:
    """95 % is the limit, over the last 20 batches only; groups may differ among each other."""
    (sign,) = signs.signs(rows(8, reward_no_spread_share=0.95))
    assert "in 95% of the groups of the last 8 batches all answers have the same reward" in sign.said
    assert signs.signs(rows(8, reward_no_spread_share=0.94)) == []
    assert names(signs.signs(rows(30) + rows(20, reward_no_spread_share=0.96))) == ["constant_rewards"]
    assert signs.signs(rows(30, reward_no_spread_share=1.0) + rows(20)) == []


def test_all_answers_truncated() -> None:
    (sign,) = signs.signs(rows(6, answer_truncated_share=1.0))
    assert sign.name == "all_truncated" and "100% of the answers of the last 6 batches" in sign.said and "generator.max_new_tokens" in sign.said
    assert signs.signs(rows(6, answer_truncated_share=0.9)) == []


def evaluated(start: float, end: float, n: int, **keys: Any) -> list[dict[str, Any]]:
    ends = [{"step": s, "t": 0.0, "eval/heldout": p, "eval/heldout_n": n} for s, p in ((0, start), (30, end))]
    return [ends[0], *rows(30, **keys), ends[1]]


def test_accuracy_that_moves_less_than_its_interval() -> None:
    """n = 100 at 0.5: 1.96 sqrt(2 x 0.25 / 100) = 0.1386."""
    (sign,) = signs.signs(evaluated(0.5, 0.6, 100), ended=True)
    half = math.sqrt(1.96**2 * (0.25 + 0.24) / 100)
    assert sign.name == "unmoved_accuracy" and f"from 0.500 to 0.600 in 30 batches, which is within chance (+-{half:.3f} at n = 100)" in sign.said
    assert signs.signs(evaluated(0.5, 0.6, 100)) == [], "a run that goes on is not judged by it"
    assert signs.signs(evaluated(0.5, 0.65, 100), ended=True) == [] and signs.signs(evaluated(0.5, 0.35, 100), ended=True) == []
    assert names(signs.signs(evaluated(0.0, 0.0, 1000), ended=True)) == ["unmoved_accuracy"]


def test_the_interval_follows_the_range_of_the_rewards() -> None:
    """Rewards of -10 to 10 around 0 vary by up to 10: 1.96 sqrt(2 x 100 / 100) = 2.77, where shares of 1 would give 0."""
    wide = {"reward_min": -10.0, "reward_max": 10.0}
    assert names(signs.signs(evaluated(0.0, 2.7, 100, **wide), ended=True)) == ["unmoved_accuracy"]
    assert signs.signs(evaluated(0.0, 2.8, 100, **wide), ended=True) == []


def test_one_evaluation_is_no_movement() -> None:
    assert signs.signs([{"step": 0, "eval/heldout": 0.5, "eval/heldout_n": 10}, *rows(30)], ended=True) == []
