"""Two ranks in one process, each a learner in a thread of its own: the same step as one, however
unevenly the samples are dealt. And the threads that learner.ranks = auto chooses."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_step_kit import batch, core, model_dir, weights
from process_kit import ROOT, Ended

from asyncrl.config import load
from asyncrl.records import jsonl, process_log
from learner import cores
from learner.backend import TorchBackend
from learner.step import LearnerCore

__all__ = ["model_dir"]


class Meeting:
    """Where the ranks exchange things: each leaves its own and takes both."""

    def __init__(self) -> None:
        self.barrier, self.left = threading.Barrier(2), [None, None]

    def exchange(self, rank: int, x: Any) -> list[Any]:
        self.left[rank] = x
        self.barrier.wait(timeout=600)
        both = list(self.left)
        self.barrier.wait(timeout=600)
        return both


class Rank(TorchBackend):
    """Gradients summed over the ranks before the step; rank 0 gets the first `first` samples of a
    step, rank 1 the rest."""

    ranks = 2

    def __init__(
        self, c: LearnerCore, rank: int, meeting: Meeting, first: int, stops_first: bool
    ) -> None:
        super().__init__(c.config, c.model)
        self.rank, self.meeting, self.first, self.stops_first = rank, meeting, first, stops_first
        self.passes = 0

    def split_samples(self, samples: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        return [list(samples)[: self.first], list(samples)[self.first :]]

    def gather(self, x: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, x)

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.gather(x)
        return a + b

    def find_max_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(*self.gather(x))

    def accumulate(self, loss: torch.Tensor, *, is_last: bool = True) -> None:
        self.passes += 1
        super().accumulate(loss, is_last=is_last)
        assert is_last == (len(set(self.gather((self.passes, is_last)))) == 1 and is_last), (
            "ranks make their passes side by side"
        )

    def apply(self, rate: float, loss: torch.Tensor | None = None) -> float:
        for p in self.model.hf.parameters():
            a, b = self.gather(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = a + b
        return super().apply(rate, loss)


def trained(
    model_dir: Path, first: int, batches: int, stops_first: bool, how: dict[str, Any]
) -> list[tuple[torch.Tensor, list[dict[str, float]], int]]:
    """(weights, metrics of each batch, passes) of both ranks."""
    meeting, found, errors = Meeting(), [None, None], []

    def run(rank: int, c: LearnerCore) -> None:
        try:
            rows = [c.train(batch(n, seed=n)) for n in range(batches)]
            found[rank] = (weights(c), rows, c.backend.passes)
        except BaseException as e:
            errors.append(e)
            meeting.barrier.abort()

    cores = [core(model_dir, **how) for _ in range(2)]
    for rank, c in enumerate(cores):
        c.backend = Rank(c, rank, meeting, first, stops_first)
    threads = [threading.Thread(target=run, args=(rank, c)) for rank, c in enumerate(cores)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    return found


# on answers of rank 0's own passes: the reference where no term needs it, and the batch's own move
MEASURED = ("kl/target_ref", "kl/ref_target", "kl/moved")
HOW: list[dict[str, Any]] = [
    {"learner": {"micro_batch_tokens": 40}},
    {
        "learner": {"micro_batch_tokens": 40, "minibatches": 2},
        "stop": {"kl_max": 1e9},
        "kl": {"loss": {"coefficient": 0.1}},
    },
    {"learner": {"epochs": 3, "lr": 1.0}, "stop": {"kl_max": 1e-6}},
    {"loss": {"surrogate": "reshape"}, "correction": {"proximal": "behavior"}},
]


@pytest.mark.parametrize("stops_first", [False, True])
@pytest.mark.parametrize("first", [5, 0])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_two_ranks_make_the_step_of_one(
    model_dir: Path, how: dict[str, Any], first: int, stops_first: bool
) -> None:
    """A rank may be dealt nothing (first = 0): it makes passes of no weight beside the other."""
    alone = core(model_dir, **how)
    alone.backend.stops_first = stops_first
    rows = [alone.train(batch(n, seed=n)) for n in range(2)]
    (a, mine, some), (b, theirs, others) = trained(model_dir, first, 2, stops_first, how)
    assert torch.equal(a, b) and torch.allclose(a, weights(alone), atol=2e-6) and some == others > 0
    for one, two in zip(rows, mine, strict=True):
        said = {k for k in one if not k.startswith(MEASURED)}
        assert {k for k in two if not k.startswith(MEASURED)} == said
        wrong = {
            k: (two[k], one[k]) for k in said if two[k] != pytest.approx(one[k], rel=2e-3, abs=2e-5)
        }
        assert not wrong
    # the other rank knows what rank 0 says, but for what only rank 0 measures
    for one, two in zip(mine, theirs, strict=True):
        assert two.items() <= one.items()


@pytest.mark.parametrize(
    ("learner", "cpu", "generators", "count", "chosen"),
    [
        (5.9, 5.9, [2.4], 2, 2),
        (5.9, 5.9, [5.8], 2, 1),  # no time is left on two cores
        (3.0, 3.0, [2.4], 2, 1),  # it waits, for rewards or for long answers
        (5.9, 5.9, [2.4], 8, 4),  # more would wait for the generator
        (5.9, 5.9, [], 8, 8),  # the generators are elsewhere
        (5.9, 5.9, [2.4], 1, 1),
    ],
)
def test_the_learner_gets_threads_where_it_holds_up_the_run(
    learner: float, cpu: float, generators: list[float], count: int, chosen: int
) -> None:
    assert cores.choose_threads(6.0, learner, cpu, generators, count, 1) == chosen


@pytest.mark.parametrize(
    ("busy_s", "later_s", "threads", "said"),
    [(0.3, 0.1, 1, 1), (1.0, 0.7, 2, 1), (1.0, 1.1, 1, 2)],
)
def test_threads_and_priorities_are_those_of_the_decision(
    busy_s: float,
    later_s: float,
    threads: int,
    said: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A batch takes one second, and `later_s` beside more threads; `said` decisions are logged."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "setpriority", lambda _, pid, nice: asked.append((pid, nice)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    (tmp_path / "logs").mkdir()
    lines: list[str] = []
    argv = [sys.executable, "-c", "input()"]
    sleeper = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
    before = torch.get_num_threads()
    try:
        process_log.append_event(tmp_path, "generator-0", sleeper.pid, "began")
        config = load.load(ROOT / "configs" / "demo.toml", ["staleness.max_lag=0"])
        course = cores.divide_cores(config, tmp_path, lines.append)
        used = [next(course)]
        for _ in range(20):
            step_s = 1.0 if used[-1] == 1 else later_s
            used.append(course.send((step_s, min(busy_s, step_s), 1000)))
        assert used[:9] == [1] * 9 and (2 in used) == (busy_s == 1.0) and used[-1] == threads
        assert len(lines) == said and torch.get_num_threads() in (before, threads)
        assert {pid for pid, _ in asked} == ({sleeper.pid} if busy_s == 1.0 else set())
        assert not asked or asked[-1][1] == (cores.NICE if threads == 2 else 0)
    finally:
        torch.set_num_threads(before)
        sleeper.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets", [(), ("reward.function='benchmarks.lib.slow_reward:reward'", "reward.workers=4")]
)
def test_a_run_says_which_threads_its_learner_gets(
    sets: tuple[str, ...], asyncrl: Callable[..., Ended], tmp_path: Path
) -> None:
    few = ("learner.groups=4", "learner.group_size=2", "learner.steps=13", "evaluation.every=0")
    done = asyncrl("run", "learner.ranks='auto'", "name='auto'", *few, *sets)
    assert done.code == 0 and done.json["steps"] == 13, done.err[-3000:]
    log = (tmp_path / "runs" / "auto" / "logs" / "attempt_1" / "learner.log").read_text()
    assert "learner: learner.ranks = auto: " in log
    rows = jsonl.read(tmp_path / "runs" / "auto" / "metrics.jsonl")
    assert all(row["time/learner_threads"] >= 1 for row in rows if "time/step" in row)
