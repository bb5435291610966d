"""What benchmarks/loop.py makes of its rounds, and of what its contenders say."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loop
import pytest
import torch
from lib import bare_loops, contenders, strong_loop

from asyncrl.config.tree import TaskConfig
from asyncrl.tasks import get_task

pytestmark = pytest.mark.slow


CHOSEN = {"strong": {"name": "two threads"}, "synchronous": {"name": "one core"}}


def a_round(limit: float = 80e-6, **ms: float) -> loop.Row:
    """A round of 1,000 tokens a step; limit in seconds a token."""
    taken = {"strong": 250, "two ranks": 200, "sync": 300, "async": 100, "file, own": 104} | ms
    row = {name: {"step": t / 1e3, "token": t / 1e6} for name, t in taken.items()}
    return row | {"bare": {"token": limit}}


def figures(rows: list[loop.Row], **more: Any) -> dict[str, dict[str, Any]]:
    goals, _ = loop.judged(rows, CHOSEN | more)
    return {goal["figure"]: goal for goal in goals}


def test_ratios_are_taken_within_a_round() -> None:
    # a machine half as fast in the second round changes no ratio
    slow = {name: 2e3 * v["step"] for name, v in a_round().items() if name != "bare"}
    found = figures([a_round(), a_round(160e-6, **slow)])
    values = {name: goal["value"] for name, goal in found.items()}
    assert values == {
        "step, asynchronous / strong loop": 0.5,
        "step, file task and own reward / built in": 1.04,
        "step, synchronous / strong loop": 1.5,
        "speed-up over synchronous, share of S_max": 0.8,
    }
    assert [goal["met"] for goal in found.values()] == [True, True, False, False]
    strongest = found["step, asynchronous / strong loop"]
    assert (strongest["rival"], strongest["over_the_other"]) == ("two ranks", 0.4)


def test_the_rival_is_the_fastest_of_the_strong_loops() -> None:
    found = figures([a_round(**{"two ranks": 400})])
    strongest = found["step, asynchronous / strong loop"]
    assert (strongest["value"], strongest["rival"]) == (0.4, "two threads")
    assert (strongest["rival_ms"], strongest["over_the_other"]) == (250, 0.25)
    assert found["step, synchronous / strong loop"]["value"] == 1.2


def test_the_share_does_not_depend_on_the_synchronous_run() -> None:
    """A slow synchronous run would flatter a share of an ideal one."""
    shares = [loop.share_of_limit(a_round(sync=s)) for s in (150.0, 300.0, 900.0)]
    assert shares == pytest.approx([0.8] * 3)


def test_a_share_above_one_is_an_error_and_no_figure() -> None:
    assert loop.checked([0.9, 1.1, 0.95]) == [0.9, 1.1, 0.95]  # one round is noise
    with pytest.raises(ValueError, match="it cannot exceed 1"):
        loop.checked([1.01, 1.2, 0.9])
    goals, result = loop.judged([a_round(limit=120e-6)], dict(CHOSEN))
    assert "cannot exceed 1" in result["error"] and not [g for g in goals if "share" in g["figure"]]


def test_side_by_side_counts_in_the_limit() -> None:
    """k max(Tg, Tl) is the slower of the two as they are beside each other."""

    class Fake:
        def __init__(self, alone: float, beside: float) -> None:
            self.alone, self.beside = alone, beside

        def run(self, what: str, seconds: float) -> float:
            return self.alone

        def start(self, what: str, seconds: float) -> None: ...

        def result(self) -> str:
            return str(self.beside)

    left, right = Fake(2.0, 2.5), Fake(3.0, 3.3)
    found = bare_loops.limit(left, right, 1.0)  # type: ignore[arg-type]
    assert found["token"] == pytest.approx(3.3) and found["k_Tg"] == pytest.approx(1.25)


def test_the_first_steps_of_a_loop_do_not_count() -> None:
    slow, steady = [9.0] * (contenders.SKIP + 1), [0.2, 0.4]
    out = contenders.summary({"step_seconds": slow + steady, "tokens": [1.0] * 9 + [1000, 2000]})
    assert out["step"] == pytest.approx(0.3) and out["token"] == pytest.approx(0.6 / 3000)


def test_the_file_holds_the_task(tmp_path: Path) -> None:
    sets = loop.file_task(tmp_path)
    rows = [json.loads(x) for x in (tmp_path / "sort.jsonl").read_text().splitlines()]
    assert len(rows) == loop.FILE_PROMPTS and sets[0] == "task.name='file'"
    prompt = SimpleNamespace(**rows[0])
    # type: ignore[arg-type]
    assert get_task(TaskConfig(name="sort")).reward(prompt, prompt.answer) == 1.0


def test_the_strong_loop_as_a_program(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "SKIP", 0)
    out = contenders.strong("two ranks", small_model, sorted(os.sched_getaffinity(0))[:2], 2, 0)
    assert out["step"] > 0 and 0 < out["answer/length"] <= contenders.MOST


def test_two_ranks_make_the_update_of_one(tmp_path: Path) -> None:
    """The sums over ranks, divided by all tokens: the same as one process with both halves."""
    gradients = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    tokens = [7, 12]

    class Summed:
        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def all_reduce(flat: torch.Tensor) -> None:  # the other rank's share is added
            flat += torch.cat([gradients[1].flatten(), torch.tensor([float(tokens[1])])])

    weight = torch.nn.Parameter(torch.zeros(2, 3))
    weight.grad = gradients[0].clone()
    policy: Any = SimpleNamespace(parameters=lambda: [weight])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    whole, strong_loop.dist = strong_loop.dist, Summed  # type: ignore[assignment]
    try:
        strong_loop.update(policy, optimizer, tokens[0])
    finally:
        strong_loop.dist = whole
    mean = (gradients[0] + gradients[1]) / sum(tokens)
    expected = -mean * min(1.0, 1.0 / float(mean.norm()))
    torch.testing.assert_close(weight.detach(), expected)
