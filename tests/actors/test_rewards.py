"""Reward functions that misbehave: each answer comes back exactly once, as a number or as a
failure, never as a silent 0."""

import math
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from process_kit import ROOT, run_command, until

from actors import rewards
from actors.reward_worker import (
    RewardCall,
    RewardReply,
    RewardUnit,
    call,
    check_value,
    split_results,
)
from actors.rewards import RewardResult, RewardRunner, _RewardPool
from asyncrl.config import load
from asyncrl.config.tree import TaskConfig as TaskConfig
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import Prompt, RewardFailure
from asyncrl.tasks import get_task
from asyncrl.transport import worker_pool
from asyncrl.transport.worker_pool import PRINTED_CHARACTERS

MakeRewardRunner = Callable[..., RewardRunner]

FUNCTIONS = (Path(__file__).parents[1] / "data" / "programs" / "rewards_functions.txt").read_text()
RIGHT = Prompt(7, "1+1=", "2", meta={"kind": "sum"})


@pytest.fixture
def runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RewardRunner]]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "dies.py").write_text("import os; os._exit(7)")
    (tmp_path / "exits.py").write_text("import sys; sys.exit(7)")
    monkeypatch.setenv(
        "PYTHONPATH",
        f"{Path(__file__).resolve().parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker_pool, "GRACE_S", 600.0)  # of an import, also on a busy machine
    made: list[RewardRunner] = []

    def make(
        function: str = "", workers: int | str = 0, deadline_s: float = 600.0, **more: Any
    ) -> RewardRunner:
        reward = {"function": function, "workers": workers, "deadline_s": deadline_s} | more
        config = load.build({"model": {"path": "m"}, "task": {"name": "sort"}, "reward": reward})
        made.append(RewardRunner(config, get_task(config.task)))
        return made[-1]

    yield make
    for r in made:
        r.close()


def ended_for(runner: RewardRunner, *texts: str) -> RewardRunner:
    """With a short deadline: whoever is at one of these answers is ended at it, and nobody else,
    so that a good call may take its time on a busy machine."""
    assert runner.pool is not None
    deadline = runner.pool.compute_deadline

    def held(process: Any) -> float:
        units = list(process.units.values())[: process.window]
        at = {job.call.text for jobs, _ in units for job in jobs}
        return deadline(process) if at & set(texts) or not process.ready else math.inf

    runner.pool.compute_deadline = held
    return runner


def judge(runner: RewardRunner, *texts: str, prompt: Prompt = RIGHT) -> list[RewardResult]:
    """Results in the order of `texts`, each of two tokens."""
    for i, text in enumerate(texts):
        runner.submit((i, 0, 0), prompt, text, [1, 2])
    return collected(runner, len(texts))


def collected(runner: RewardRunner, n: int, had: Sequence[RewardResult] = ()) -> list[RewardResult]:
    results = list(had)

    def all_there() -> bool:
        results.extend(runner.poll())
        return len(results) >= n

    until(all_there)
    assert sorted(r[0][0] for r in results) == list(range(n)) and not runner.waiting
    return sorted(((*r[:4], str(r[4])) for r in results), key=lambda r: r[0])


def noted() -> list[str]:
    """What the functions judged, in the order in which they did; once for each time."""
    path = Path("noted")
    return path.read_text().splitlines() if path.exists() else []


def test_answers_are_judged_in_other_processes_and_each_failure_is_named(
    runner: MakeRewardRunner,
) -> None:
    r = runner("mine:reward", workers=2)
    got = judge(r, "2", "3", "parts", "tokens")
    assert [r[1] for r in got] == [1.0, 0.0, 0.5, 1.0]
    assert got[2][2] == {"reward": 0.5, "format": 1.0} and got[3][3] == [0.25, 0.75]
    assert [r[4] for r in got] == [""] * 4
    got = judge(r, "raise", "nan", "inf", "none", "word", "nameless", "few", "2")
    words = ("no such thing", "nan", "inf", "NoneType", "str", "without `reward`", "list of 2")
    for r, word in zip(got, words, strict=False):
        assert r[4].startswith("data: ") and word in r[4]
    assert got[7][1:] == (1.0, {}, None, "")  # the process lives on


def test_a_process_that_hangs_or_dies_is_replaced(runner: MakeRewardRunner) -> None:
    r = ended_for(runner("mine:reward", deadline_s=2.0), "hang")
    got = judge(r, "2", "hang", "a", "die", "b", "2")
    assert "hung for more than 2 s" in got[1][4]
    assert got[3][4].startswith("machinery: the reward process ended (exit code 3); prompt '1+1='")
    assert [x[1] for x in got] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [bool(x[4]) for x in got] == [False, True, False, True, False, False]
    once = "what stood in a lost process's queue was judged once, by another"
    assert sorted(noted()) == ["2", "2", "a", "b"], once


def test_a_process_that_garbles_its_socket_or_is_killed_is_replaced(
    runner: MakeRewardRunner,
) -> None:
    r = runner("mine:reward")
    got = judge(r, "2", "garble", "2")
    assert got[1][4].startswith("machinery: the reward process sent an invalid reply (a frame of ")
    assert got[0][1] == got[2][1] == 1.0
    r.processes[0].process.kill()
    r.processes[0].process.wait()
    got = judge(r, "2", "2")
    assert all(x[1] == 1.0 or x[4].startswith("machinery") for x in got) and got[1][1] == 1.0


def test_processes_go_on_between_two_looks(runner: MakeRewardRunner) -> None:
    """All that was handed over is judged, though nobody polls."""
    r = runner("mine:reward")
    for i in range(50):
        r.submit((i, 0, 0), RIGHT, f"answer {i}", [1, 2])
    had = r.poll()  # hands them over
    assert len(had) + r.waiting == 50
    until(lambda: len(noted()) == 50)
    assert len(collected(r, 50, had)) == 50 and r.judged == 50
    numbers = r.collect_metrics()
    assert numbers["reward/judged"] == 50 and numbers["reward/queue"] == 0
    assert numbers["reward/workers"] == 1
    assert numbers["reward/called_s"] > 0 and numbers["reward/waited_s"] > 0


def test_a_call_that_takes_long_keeps_only_its_process(runner: MakeRewardRunner) -> None:
    """Only what was sent ahead to that process waits behind it; the other one judges the rest."""
    r = runner("mine:reward", workers=2)
    until(lambda: not r.poll() and all(p.ready for p in r.processes))
    judge(r, *["warm"] * 20)
    n = 4 * rewards.MOST_AHEAD
    for i, text in enumerate(["gate", *["later"] * n]):
        r.submit((i, 0, 0), RIGHT, text, [1, 2])
    got = r.poll()
    until(lambda: bool(got.extend(r.poll()) or len(got) >= n - rewards.MOST_AHEAD))
    Path("gate").touch()
    until(lambda: bool(got.extend(r.poll()) or len(got) == n + 1))
    assert sorted(x[0][0] for x in got) == list(range(n + 1)) and noted().count("later") == n


def test_a_function_that_takes_lists_async_or_not(runner: MakeRewardRunner) -> None:
    r = runner("mine:lists", batch=8)
    got = judge(r, *["2", "3"] * 20)
    assert [x[1] for x in got] == [1.0, 0.0] * 20
    assert max(x[2]["together"] for x in got) == 8, "full lists, and never more"
    spans: list[tuple[float, float, int]] = []
    r.timed = lambda name, began, ended, answers: spans.append((began, ended, answers))
    judge(r, "2", "2", "2")
    assert sum(n for *_, n in spans) == 3 and all(a <= b for a, b, _ in spans)
    both = judge(runner("mine:both", batch=4), *["abc"] * 12)
    assert [x[1] for x in both] == [3.0] * 12 and max(x[2]["together"] for x in both) == 4
    # each call waits until three are under way; more than three never are
    got = judge(runner("mine:three", concurrency=3), *["a"] * 20)
    assert [x[4] for x in got] == [""] * 20 and max(x[2]["peak"] for x in got) == 3


def test_lists_are_checked_by_answer_and_a_wrong_length_fails_all(runner: MakeRewardRunner) -> None:
    calls = [RewardCall(RIGHT, "a", [1]), RewardCall(RIGHT, "b", [1, 2])]
    good, bad = split_results(np.array([1.0, math.nan]), calls)
    assert good == (1.0, {}, None) and isinstance(bad, str) and "nan" in bad
    for wrong in (1.0, [1.0], {"reward": 1}, None, "a"):
        first, second = split_results(wrong, calls)
        assert isinstance(first, str) and "for 2 responses" in first and first == second
    r = runner("mine:lists", batch=4, error_budget=1.0)
    got = judge(r, "2", "short", "3", "2")
    why = "returned 1 values for 4 responses: return a list of the same length"
    assert all(why in x[4] for x in got) and len(noted()) == 1
    assert r.collect_metrics()["reward/failed_batches"] == 0  # no answer was scored alone


def test_calls_with_lists_that_fail_are_counted(runner: MakeRewardRunner, tmp_path: Path) -> None:
    r = runner("mine:lists", batch=4)
    assert [x[4] for x in judge(r, "alone", "2", "alone", "2")] == [""] * 4 and len(noted()) == 5
    numbers = r.collect_metrics()
    assert (numbers["reward/batches"], numbers["reward/failed_batches"]) == (1, 1)
    judge(r, "2", "2")
    assert r.collect_metrics()["reward/failed_batches"] == 1
    deadly = runner("mine:lists", batch=4)
    judge(deadly, "die", "2")
    assert deadly.collect_metrics()["reward/failed_batches"] == 1


@pytest.mark.parametrize("function", ["reward", "troubled"])
def test_a_child_that_returns_answers_nothing(function: str, runner: MakeRewardRunner) -> None:
    r = runner(f"mine:{function}", concurrency=2)
    pid = r.processes[0].process.pid
    got = judge(r, "2", "fork", *["3", "fork", "forked"] * 3, "2")
    assert [x[4] for x in got] == [""] * len(got)
    assert [x[1] for x in got] == [1.0, *[0.0] * 10, 1.0] and r.processes[0].process.pid == pid


def test_a_reply_for_other_answers_is_invalid(runner: MakeRewardRunner) -> None:
    r = runner("mine:reward")
    pool = r.pool
    assert pool is not None
    until(lambda: pool.workers[0].ready)
    worker = pool.workers[0]
    pool.on_reply(worker, RewardReply("ok", 77, [(77.0, {}, None)]))
    assert worker.invalid == "1 results for 0 responses"
    assert [x[1] for x in judge(r, "2", "3")] == [1.0, 0.0]
    assert r.processes[0] is not worker and not pool.error


@pytest.mark.parametrize(
    ("function", "bad", "why", "lives"),
    [
        ("lists", "raise", "data: the reward raised KeyError", False),
        ("lists", "die", "machinery: the reward process ended (exit code 3)", False),
        ("lists", "hang", "data: the reward hung", False),
        ("lists", "none", "data: the reward function returned", False),
        ("troubled", "raise", "data: the reward raised KeyError", True),
        ("troubled", "exit", "data: the reward called sys.exit(4)", True),
        ("troubled", "never", "data: the reward hung for more than", True),
        ("troubled", "stubborn", "data: the reward hung for more than", True),
        ("troubled", "block", "data: the reward hung for more than", False),
        ("troubled", "die", "machinery: the reward process ended (exit code 3)", False),
    ],
)
def test_one_call_spoils_no_other(
    function: str, bad: str, why: str, lives: bool, runner: MakeRewardRunner
) -> None:
    """Neither in a list nor beside other async calls."""
    how, hangs = ({"batch": 8}, "hang") if function == "lists" else ({"concurrency": 4}, "block")
    r = ended_for(runner(f"mine:{function}", deadline_s=2.0, **how), hangs)
    got = judge(r, "2", "3", bad, "2", "3", "2", "3")
    assert why in got[2][4] and [x[4] for x in got if x is not got[2]] == [""] * 6
    assert [x[1] for x in got] == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    pids = {x[2].get("pid") for x in got if not x[4]} | {r.processes[0].process.pid}
    assert len(pids) == 1 or not lives


def test_the_example_takes_lists_or_single_answers(runner: MakeRewardRunner) -> None:
    prompt = Prompt(0, "75057=", "05577")
    got = [
        judge(runner(f"configs.examples.my_reward:{name}"), f"#{prompt.answer}", "1", prompt=prompt)
        for name in ("reward", "rewards")
    ]
    assert got[0] == got[1] and got[0][0][1] == 1.0


def test_exits_prints_and_reads_are_no_harm(
    runner: MakeRewardRunner, capfd: pytest.CaptureFixture[str]
) -> None:
    r = runner("mine:reward")
    pid = r.processes[0].process.pid
    got = judge(r, "exit", "read", "print", "print", "lines", "2")
    assert "called sys.exit('no more')" in got[0][4] and "EOFError" in got[1][4]
    assert got[4][4].startswith("data: the reward raised ValueError: one at mine.py:")
    assert [x[4] for x in (got[2], got[3], got[5])] == [""] * 3
    assert r.processes[0].process.pid == pid
    out, err = capfd.readouterr()
    assert not out, "standard output is not theirs"
    assert PRINTED_CHARACTERS <= len(err) < PRINTED_CHARACTERS + 1000
    assert err.count("the rest is dropped") == 1


@pytest.mark.parametrize(
    ("body", "rewards_", "why"),
    [
        ("return float(bool(text))", [1.0, 0.0], ""),
        ("import sys; sys.exit(1)", [None, None], "called sys.exit(1)"),
        ("return None if text else 0.5", [None, 0.5], "reward is a NoneType, not a number"),
        ("print('hello'); return text", [None, None], "is a str"),
    ],
)
def test_a_look_at_a_reward_function(
    body: str, rewards_: list[float], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncrl task try`: as a run would call it; what fails is one line with the key."""
    (tmp_path / "looked_at.py").write_text(f"def reward(prompt, text):\n    {body}\n")
    argv = [*importing.make_command("asyncrl.cli"), "task", "try"]
    argv += [str(ROOT / "configs" / "demo.toml"), "-n", "1", "--set", "reward.deadline_s=600"]
    done = run_command([*argv, "--set", "reward.function='looked_at:reward'"], cwd=tmp_path)
    (row,) = [msgspec.json.decode(x) for x in done.out.splitlines()]
    assert [row["reward_of_answer"], row["reward_of_nothing"]] == rewards_, done.err
    assert done.code == (2 if why else 0) and "Traceback" not in done.err
    assert ("error: reward.function = looked_at:reward: data: " in done.err) == bool(why)
    assert why in done.err


def test_the_pool_grows_while_answers_wait_and_cores_are_idle(
    runner: MakeRewardRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "GROW_S", 0.0)
    monkeypatch.setattr(rewards, "GROW_CALLS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    monkeypatch.setattr(rewards, "count_idle_cores", lambda: 2.0)
    r = runner("mine:reward", workers="auto")
    assert len(r.processes) == 1
    for i in range(9):
        r.submit((i, 0, 0), RIGHT, "gate", [1, 2])
    r.poll()
    until(lambda: len(r.processes) == 3)
    Path("gate").touch()
    assert len(collected(r, 9)) == 9 and len(r.processes) == 3, "never more than cores"
    monkeypatch.setattr(rewards, "count_idle_cores", lambda: 0.0)
    busy = runner("mine:reward", workers="auto")
    judge(busy, *["a"] * 50)
    assert len(busy.processes) == 1
    assert not runner(workers="auto").processes, "a task's own reward runs in place"


def test_when_a_pool_measures_whether_it_should_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _RewardPool.__new__(_RewardPool)
    asked: list[tuple[Any, ...]] = []

    def size(*given: Any) -> int:
        asked.append(given)
        return 3

    clock = 1000.0
    monkeypatch.setattr(rewards.time, "monotonic", lambda: clock)
    monkeypatch.setattr(rewards, "next_pool_size", size)
    begun = SimpleNamespace(ready=True, units=[1], window=1)
    pool.workers = [begun, begun]
    pool.make = lambda index: f"new {index}"
    pool.queue, pool.suspects = deque([1]), deque()
    monkeypatch.setattr(rewards, "count_idle_cores", lambda: 4.0)
    pool.cores, pool.rate_before = 8, 0.5
    grow_s, calls, most_s = rewards.GROW_S, rewards.GROW_CALLS, rewards.GROW_MOST_S

    def measure(spent: float, done: int) -> bool:
        """Whether it has measured, after so many seconds and calls."""
        pool.measured_at, pool.done = clock - spent, done
        del pool.workers[2:]
        before = len(asked)
        pool._measure()
        return len(asked) > before

    assert not measure(grow_s * 0.99, 2 * calls) and not measure(grow_s, 2 * calls - 1)
    assert pool.done == 2 * calls - 1 and pool.measured_at == clock - grow_s
    assert measure(grow_s, 2 * calls) and asked[-1] == (2, 8, 4.0, 2 * calls / grow_s, 0.5)
    assert pool.workers[2:] == ["new 2"] and (pool.measured_at, pool.done) == (clock, 0)
    assert pool.rate_before == 2 * calls / grow_s
    assert not measure(most_s * 0.99, 1) and measure(most_s, 1)
    pool.queue.clear()
    assert not measure(most_s, 9) and (pool.measured_at, pool.done) == (clock, 0), "none waits"
    pool.suspects.append(1)
    begun.ready = False
    assert not measure(most_s, 9) and (pool.measured_at, pool.done) == (clock, 0)
    pool.suspects.clear()
    begun.units = [1, 2, 3]
    assert pool.count_waiting() == 4
    sent: list[Any] = []
    pool._send = lambda *given: sent.append(given)
    full, free = (Mock(**vars(begun), is_reserved=False, bytes=0) for _ in range(2))
    full.ready = free.ready = True
    pool.workers, pool.unit_s, free.units = [full, free], 0.0, []
    pool.suspects.extend("ab")
    pool._feed()
    assert sent == [(free, ["a"])] and free.is_reserved and not full.is_reserved
    assert pool.suspects == deque("b")


def test_what_becomes_of_a_reply_and_of_the_work_of_a_lost_process() -> None:
    pool = _RewardPool.__new__(_RewardPool)
    pool.queue, pool.suspects, pool.results, pool.spans = (deque[Any]() for _ in range(4))
    pool.unit_s, pool.call_s, pool.log, pool.judges_again = 0.0, 5.0, "; reward.log: L", True
    pool.done = pool.batches = pool.failed_batches = 0
    jobs = [rewards._RewardJob((n, 0, 0), RewardCall(RIGHT, f"t{n}", [n])) for n in range(6)]
    process: Any = SimpleNamespace(since=0.0, invalid="", window=1, bytes=70, is_reserved=True)
    process.units = {1: (jobs[:1], 10), 2: (jobs[1:3], 20), 3: (jobs[3:5], 20), 4: (jobs[5:], 10)}

    def failed(n: int, kind: Any, why: str) -> RewardResult:
        why += f"; prompt {RIGHT.text!r}, response 't{n}'"
        return RewardResult((n, 0, 0), 0.0, {}, None, RewardFailure(kind, why))

    pool.on_reply(process, RewardReply("alive", ended=1.0))
    assert process.since == 1.0 and len(process.units) == 4
    pool.on_reply(process, RewardReply("ok", 1, [(0.5, {"a": 1.0}, None)], began=1.0, ended=3.0))
    result = RewardResult((0, 0, 0), 0.5, {"a": 1.0}, None, "")
    assert pool.results.pop() == (jobs[0], result, 3.0) and pool.spans == deque([(1.0, 3.0, 1)])
    assert (process.bytes, process.is_reserved, process.since) == (60, False, 3.0)
    assert (pool.unit_s, pool.done, pool.batches, pool.failed_batches) == (2.0, 1, 0, 0)
    pool.on_reply(process, RewardReply("ok", 2, [(1.0, {}, None), "no"], began=3.0, ended=4.0))
    assert [(job, ended) for job, _, ended in pool.results] == [(job, 4.0) for job in jobs[1:3]]
    assert pool.results[1][1] == failed(2, "data", "no")._replace(
        failed=RewardFailure("data", failed(2, "data", "no").failed.why + pool.log)  # type: ignore[union-attr]
    )
    assert pool.unit_s == pytest.approx(0.9 * 2.0 + 0.1 * 1.0)
    assert (pool.done, pool.batches, pool.failed_batches) == (3, 1, 0)
    for id, results, why in (
        (3, [(1.0, {}, None)], "1 results for 2 responses"),
        (9, [], "0 results for 0 responses"),
    ):
        pool.on_reply(process, RewardReply("ok", id, results))  # type: ignore[arg-type]
        assert process.invalid == why and len(process.units) == 2 and pool.done == 3
    pool.on_reply(process, RewardReply("failed", 3, why="raised X"))
    assert list(pool.suspects) == jobs[3:5], "each is judged alone"
    assert (pool.batches, pool.failed_batches) == (2, 1)
    pool.on_reply(process, RewardReply("hung", 4, ended=9.0))
    hang = "the reward hung for more than 5 s (reward.deadline_s)"
    assert pool.results[-1] == (jobs[5], failed(5, "data", hang), 9.0)
    process.units = {5: (jobs[:2], 0), 6: (jobs[2:3], 0), 7: (jobs[3:5], 0), 8: (jobs[5:], 0)}
    process.window = 2
    pool.suspects.clear()
    pool.on_lost(process, "it ended", hung=False)
    assert list(pool.suspects) == jobs[:3], "those that it ran"
    assert list(pool.queue) == jobs[3:] and (pool.batches, pool.failed_batches) == (3, 2)
    process.units = {9: (jobs[:1], 0)}
    for hung, kind in ((False, "machinery"), (True, "data")):
        pool.on_lost(process, "it ended", hung=hung)
        assert pool.results[-1][1] == failed(0, kind, "it ended")


def test_how_a_pool_shares_out_its_work() -> None:
    pool = _RewardPool.__new__(_RewardPool)
    jobs = [rewards._RewardJob((n, 0, 0), RewardCall(RIGHT, f"t{n}", [n])) for n in range(6)]
    size = 64 + 4 * (len(RIGHT.text) + len(RIGHT.answer) + 2 + 1)
    pool.suspects, pool.last_id, pool.batch = deque(), 0, 3

    def fed(*processes: Any, unit_s: float = 0.0, queue: int = 6) -> list[list[int]]:
        """The numbers of the jobs of each process's units."""
        pool.workers, pool.unit_s = [*processes], unit_s
        pool.queue = deque(jobs[:queue])
        pool._feed()
        units = [[[job.key[0] for job in of] for of, _ in x.units.values()] for x in processes]
        assert [x.bytes for x in processes] == [size * sum(map(len, of)) for of in units]
        return units

    def process(**more: Any) -> Any:
        fields = {"units": {}, "ready": True, "is_reserved": False, "bytes": 0, "batched": False}
        return Mock(**fields | {"window": 1} | more)

    one, two = process(), process()
    assert fed(one, process(ready=False), two, process(is_reserved=True)) == [[[0]], [], [[1]], []]
    assert list(pool.queue) == jobs[2:] and [*one.units, *two.units] == [1, 2] == [1, pool.last_id]
    one.restart_clock.assert_called_once_with()
    one.send.assert_called_once_with([RewardUnit(1, [jobs[0].call])])
    assert fed(one, two, unit_s=rewards.AHEAD_S / 2, queue=3) == [[[0], [0], [2]], [[1], [1]]]
    one.restart_clock.assert_called_once_with()
    later = [given.args[0] for given in one.send.call_args_list[1:]]
    assert later == [[RewardUnit(3, [jobs[0].call])], [RewardUnit(5, [jobs[2].call])]]
    assert fed(process(window=2), process()) == [[[0], [1]], [[2]]]
    assert fed(process(batched=True), process(batched=True)) == [[[0, 1, 2]], [[3, 4]]]
    full = process(bytes=rewards.AHEAD_BYTES + 1)
    pool.workers, pool.queue = [full], deque(jobs)
    pool._feed()
    assert not full.units and len(pool.queue) == 6


def test_reward_processes_end_with_their_generator(runner: MakeRewardRunner) -> None:
    """Killed outright, and while a reward hangs."""
    program = (
        "import os; from actors.rewards import RewardRunner; from asyncrl.config import load;"
        "from asyncrl.contract.messages import Prompt;"
        "raw = "
        "{'model': {'path': 'm'}, 'task': {'name': 'sort'},"
        " 'reward': {'function': 'mine:reward', 'workers': 2}};"
        "r = RewardRunner(load.build(raw), None);"
        "[r.submit((i, 0, 0), Prompt(0, 'p'), 'gate', [1]) for i in range(2)]; r.poll();"
        "print([p.process.pid for p in r.processes], flush=True); input()"
    )
    runner()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as p:
        assert p.stdout is not None
        pids = msgspec.json.decode(p.stdout.readline(), type=list[int])
        p.kill()
    until(lambda: all(_gone(pid) for pid in pids))


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_broken_thread_is_said(runner: MakeRewardRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "STUCK_S", 600.0)
    r = runner("mine:reward")
    judge(r, "2")
    assert r.is_working and r.pool is not None

    def broken() -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(r.pool, "_feed", broken)
    with pytest.raises(AsyncrlError, match="raised OSError: no more processes"):
        until(lambda: bool(r.poll()))
    monkeypatch.setattr(rewards, "STUCK_S", -1.0)
    assert not r.is_working


@pytest.mark.parametrize(
    ("path", "why"),
    [
        *((path, f"reward.function = {path}") for path in ("mine:absent", "absent:reward", "mine")),
        ("mine:number", "reward.function = mine:number"),
        ("exits:reward", r"reward.function = exits:reward: importing it called sys.exit\(7\)"),
        ("dies:reward", "3 processes ended"),
    ],
)
def test_an_absent_function_is_config_error(path: str, why: str, runner: MakeRewardRunner) -> None:
    with pytest.raises(ConfigError, match=why):
        judge(runner(path), "2")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tasks_reward_runs_in_place_or_in_workers(workers: int, runner: MakeRewardRunner) -> None:
    r = runner(workers=workers)
    assert len(r.processes) == workers
    prompt = get_task(TaskConfig(name="sort")).prompt("train", 0, 0)
    got = judge(r, prompt.answer, "#0", prompt=prompt)
    assert [x[1] for x in got] == [1.0, 0.0] and not r.poll()
    if not workers:
        r.task = None  # type: ignore[assignment]
        why = "data: the reward raised AttributeError: 'NoneType' object has no attribute 'reward'"
        assert judge(r, "x", prompt=prompt) == [((0, 0, 0), 0.0, {}, None, why)]


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.array(1.0)])
def test_numbers_of_all_kinds_count(value: Any) -> None:
    assert check_value(value, 3) == (1.0, {}, None)
    found = check_value({"reward": value, "token_rewards": np.ones(3)}, 3)
    assert found == (1.0, {"reward": 1.0}, [1.0] * 3)
    for parts in ({"tries": 2}, {"parts": {"tries": 2}}):
        assert check_value({"reward": value} | parts, 3)[1] == {"reward": 1.0, "tries": 2.0}


def test_a_function_is_called_the_same_way_for_a_look() -> None:
    """`asyncrl task try`."""

    async def later(prompt: Prompt, text: str) -> float:
        return len(text)

    def lists(prompts: list[Prompt], texts: list[str]) -> list[Any]:
        return [None if t == "none" else len(t) for t in texts]

    lists.batched = True
    assert call(later, RIGHT, "abc", [1])[0] == 3.0 and call(lists, RIGHT, "abc", [1])[0] == 3.0
    with pytest.raises(ValueError, match="NoneType"):
        call(lists, RIGHT, "none", [1])

    def counted(prompts: list[Prompt], texts: list[str], tokens: list[list[int]]) -> list[Any]:
        return [sum(ids) for ids in tokens]

    counted.batched = True
    assert call(counted, RIGHT, "abc", [1, 2])[0] == 3.0


NO_NUMBERS: list[Any] = [math.nan, -math.inf, None, "1", [1.0], {}, {"reward": None}]
NO_NUMBERS += [{"reward": 1, "part": math.nan}]
LARGE: list[Any] = [1e39, 1e308, -1e308, 1.1e15, 10**400, np.float32(1e38)]
LARGE += [{"reward": 0, "part": 1e39}, {"reward": 0, "token_rewards": [0, 0, -1e39]}]


@pytest.mark.parametrize("value", NO_NUMBERS + LARGE)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        check_value(value, 3)


def test_idle_cores_are_this_processs_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    idle = [SimpleNamespace(idle=share) for share in (0.0, 25.0, 100.0)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 7})
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda percpu: idle)
    assert rewards.count_idle_cores() == 0.25, "core 2 is another's"
