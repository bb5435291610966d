"""Two ranks in one process, each a learner in a thread of its own: the same step as one, however
unevenly the samples are dealt. And the threads that learner.ranks = auto chooses."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
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

    def __init__(self, c: LearnerCore, rank: int, meeting: Meeting, first: int) -> None:
        super().__init__(c.config, c.model)
        self.rank, self.meeting, self.first = rank, meeting, first
        self.passes = 0

    def split_samples(self, samples: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        return [list(samples)[: self.first], list(samples)[self.first :]]

    def gather(self, x: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, x)

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.gather(x)
        return a + b

    def accumulate(self, loss: torch.Tensor, *, is_last: bool = True) -> None:
        self.passes += 1
        super().accumulate(loss, is_last=is_last)
        side_by_side = len(set(self.gather((self.passes, is_last)))) == 1
        assert is_last == (side_by_side and is_last)

    def apply(self, rate: float, loss: torch.Tensor | None = None) -> float:
        for p in self.model.hf.parameters():
            a, b = self.gather(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = a + b
        return super().apply(rate, loss)


def trained(model_dir: Path, first: int, how: dict[str, Any]) -> list[Any]:
    """(weights, metrics of each batch, passes) of both ranks."""
    meeting, found, errors = Meeting(), [None, None], []

    def run(rank: int, c: LearnerCore) -> None:
        try:
            rows = [c.train(batch(n, seed=n)) for n in range(2)]
            found[rank] = (weights(c), rows, c.backend.passes)
        except BaseException as e:
            errors.append(e)
            meeting.barrier.abort()

    cores = [core(model_dir, **how) for _ in range(2)]
    for rank, c in enumerate(cores):
        c.backend = Rank(c, rank, meeting, first)
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


@pytest.mark.parametrize("first", [5, 0])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_two_ranks_make_the_step_of_one(model_dir: Path, how: dict[str, Any], first: int) -> None:
    """A rank may be dealt nothing (first = 0): it makes passes of no weight beside the other."""
    alone = core(model_dir, **how)
    rows = [alone.train(batch(n, seed=n)) for n in range(2)]
    (a, mine, some), (b, theirs, others) = trained(model_dir, first, how)
    assert torch.equal(a, b) and torch.allclose(a, weights(alone), atol=2e-6) and some == others > 0
    if how is HOW[2]:  # a step that is not made costs its gradient
        assert some == 4
    for one, two in zip(rows, mine, strict=True):
        said = {k for k in one if not k.startswith(MEASURED)}
        assert {k for k in two if not k.startswith(MEASURED)} == said
        same = pytest.approx({k: one[k] for k in said}, rel=2e-3, abs=2e-5)
        assert {k: two[k] for k in said} == same
    # the other rank knows what rank 0 says, but for what only rank 0 measures
    for one, two in zip(mine, theirs, strict=True):
        assert two.items() <= one.items()


@pytest.mark.parametrize(
    ("busy", "generators", "count", "threads", "chosen"),
    [
        (5.9, [2.4], 2, 1, 2),
        (5.4, [2.4], 2, 1, 2),  # at work for just enough of the step
        (5.9, [5.8], 2, 1, 1),  # no time is left on two cores
        (5.9, [3.0, 3.0], 2, 1, 1),
        (5.6, [cores.SAVED * 6], 2, 1, 1),  # just too little is saved
        (3.0, [2.4], 2, 1, 1),  # it waits, for rewards or for long answers
        (5.9, [2.4], 8, 1, 4),  # more would wait for the generator
        (5.9, [2.4], 9, 2, 9),
        (5.9, [], 8, 1, 8),  # the generators are elsewhere
        (5.9, [2.4], 1, 2, 2),
    ],
)
def test_the_learner_gets_threads_where_it_holds_up_the_run(
    busy: float, generators: list[float], count: int, threads: int, chosen: int
) -> None:
    assert cores.choose_threads(6.0, busy, busy, generators, count, threads) == chosen


DECISION = "learner.ranks = auto: {} thread(s), as the learner was idle for {} of 6 batches and "
DECISION += "used 20% of the CPU time of learner and generators here"
BACK = "learner.ranks = auto: 1 thread(s) again, as a token took {} times as long with 2"


@pytest.mark.parametrize(
    ("busy_s", "later", "lag", "used", "said"),
    [
        (0.3, [], 0, [1] * 40, [DECISION.format(1, "70%")]),
        (0.95, [0.7, 1.0, 1.1], 0, [1] * 9 + [2] * 27 + [1] * 4, ["5%", "1.10"]),
        (0.95, [1.25], 2, [1] * 11 + [2] * 11 + [1] * 9, ["5%", "1.25"]),
        (0.95, [2.5], 20, [1] * 17 + [2] * 17 + [1] * 6, ["5%", "2.50"]),
    ],
)
def test_threads_and_priorities_are_those_of_the_decision(
    busy_s: float,
    later: list[float],
    lag: int,
    used: list[int],
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A batch takes one second, and `later` beside more threads, one factor a measurement."""
    times = iter([{5: 1.0}, {5: 3.5, 6: 1.5}])
    clock = iter([3.0, 4.0])
    set_up: list[tuple[int, Path, int]] = []
    monkeypatch.setattr(cores, "read_generator_times", lambda d: next(times, {}) if d else None)
    monkeypatch.setattr(cores, "use_threads", lambda *how: set_up.append(how))
    monkeypatch.setattr(time, "process_time", lambda: next(clock, 9.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}.difference({pid + 2}))
    lines: list[str] = []
    config = load.load(ROOT / "configs" / "demo.toml", [f"staleness.max_lag={lag}"])
    course = cores.divide_cores(config, tmp_path, lines.append)
    found = [next(course)]
    measured = 3 + min(lag, 8) + cores.BATCHES
    while len(found) < len(used):
        step_s = 1.0
        if found[-1] == 2:
            step_s = later[(len(found) - measured - 1) // measured]
        found.append(course.send((step_s, min(busy_s, step_s), 500)))
    assert found == used
    if later:
        said = [DECISION.format(2, said[0]), BACK.format(said[1])]
        assert set_up == [*[(2, tmp_path, 5)] * (len(later) + 1), (1, tmp_path, 0)]
    assert lines == said and bool(set_up) == bool(later)


def test_threads_consider_local_generators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two that are gone, one is noticed where its times are read and one where they were."""
    done: list[tuple[Any, ...]] = []

    def get_process(pid: int) -> SimpleNamespace:
        if pid == 13:
            raise psutil.NoSuchProcess(pid)
        return SimpleNamespace(cpu_times=lambda: (pid / 1.0, 0.25, 100.0, 200.0))

    def get_session(pid: int) -> int:
        if pid == 14:
            raise ProcessLookupError
        return {11: 11, 12: 3}[pid]

    def set_priority(*how: int) -> None:
        done.append(how)
        if how[1] == 14:
            raise ProcessLookupError

    monkeypatch.setattr(psutil, "Process", get_process)
    monkeypatch.setattr(os, "getsid", get_session)
    monkeypatch.setattr(os, "setpriority", set_priority)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: done.append((count,)))
    monkeypatch.setattr(time, "sleep", lambda s: done.append((s,)))
    (tmp_path / "logs").mkdir()
    for number, pid in ((1, 13), (0, 14), (2, 11), (3, 12)):
        process_log.append_event(tmp_path, f"generator-{number}", pid, "began")
    process_log.append_event(tmp_path, "generator-4", 15, "ended")
    process_log.append_event(tmp_path, "learner", 16, "began")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        process_log.append_event(tmp_path, "generator-9", 17, "began")
    assert cores.read_generator_times(tmp_path) == {14: 14.25, 11: 11.25, 12: 12.25}
    write = lambda p, x, encoding: done.append((str(p), x.encode(encoding)))  # noqa: E731
    monkeypatch.setattr(Path, "write_text", write)
    cores.use_threads(3, tmp_path, 5)
    nice = [(os.PRIO_PROCESS, pid, 5) for pid in (14, 11, 12)]
    assert {*done} == {(3,), (0.1,), ("/proc/11/autogroup", b"5"), *nice} and len(done) == 6


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
