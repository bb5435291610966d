"""Rewards: built-in ones in place, user code in separate processes with deadlines.

A reward function is `def reward(prompt: Prompt, text: str) -> float | dict`, given as
`module:function`. A dict names the parts. `reward` among them is the reward; `token_rewards` may be
a list of one number per token (None: no reward for this token), on which `advantage.name` = gae,
reinforce_pp and grpo (process supervision) train instead. A function with a parameter `tokens`
receives the response's token ids too, including the stop token. Calls of an `async def` function
are awaited together, at most `reward.concurrency` per process. With `reward.batched = True` the
function takes lists, (prompts, texts), and returns a list of the same length. A call that raises,
returns anything else or hangs makes a failed sample ("data: reason"; "machinery: reason" when its
process exited), never a reward of 0.

A thread feeds the processes, so that none waits for the generator's next poll:

```
submit, poll --inbox--> queue --units--> a process: the first `window` running,
     ^                    ^                  |      a few ahead in its socket
     +-----results--------+---(lost)---------+
```

Units begin in order and each is answered at once. A process that hangs or exits was therefore
working on its first `window` units and on nothing else. If these hold a single response, that one
has failed. Of several the faulty one is unknown: each is judged again, alone.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from actors.reward_worker import RewardCall, RewardReply, RewardUnit, RewardWorkerSetup, call
from actors.scorers.judge_budget import ACCOUNT, read_totals
from actors.scorers.user_function import LOG, format_text
from asyncrl.config.tree import Config, RewardConfig
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import Numbers, Prompt, RewardFailure
from asyncrl.contract.printable import describe_exception
from asyncrl.tasks.evaluation_sets import resolve_reward_configs
from asyncrl.transport.worker_pool import Worker, WorkerPool

Responses = Sequence[tuple[Prompt, str, list[int]]]  # prompt, text, token ids

Key = tuple[int, int, int]
# seconds of work queued in a process's socket; longer calls wait in the common queue for the first
# free process
AHEAD_S = 0.05
AHEAD_BYTES = 64 * 1024  # the capacity of a socket bounds the work ahead
MOST_AHEAD = 128  # units: those behind a hanging one wait for its deadline
REST_S = 0.002  # between two polls, so that replies are read together
# a process of coroutines cancels each at the deadline; the pool ends it only if its loop is blocked
SLACK_S = 1.0
TURN_S = 0.5  # the longest wait of the thread
STUCK_S = 30.0  # a thread that makes no turn for so long counts as stuck
# one measurement lasts GROW_S and GROW_CALLS calls per process, but at most GROW_MOST_S
GROW_S = 1.0
GROW_CALLS = 8
GROW_MOST_S = 10.0
WORTH = 1.25  # a doubled pool must reach this speedup to be doubled again


class RewardResult(NamedTuple):
    """The reward of one response."""

    key: Key
    reward: float
    parts: Numbers
    token_rewards: list[float] | None
    failed: RewardFailure | Literal[""]


@dataclass
class _RewardJob:
    """One response to be judged."""

    key: Key
    call: RewardCall
    submitted_at: float = 0.0  # not of a check


class _RewardProcess(Worker):
    """A reward process and the units sent to it, in sending order."""

    def __init__(self, setup: bytes) -> None:
        super().__init__("actors.reward_worker", setup)
        self.units: dict[int, tuple[list[_RewardJob], int]] = {}  # id -> (its responses, its bytes)
        self.bytes = 0
        self.is_reserved = False  # reserved for one suspect, which may be the only unit
        self.batched = False
        self.window = 1

    @property
    def is_busy(self) -> bool:
        return bool(self.units)


def describe_reward_source(settings: RewardConfig) -> str:
    """Return the config line that names the source of rewards, for messages."""
    if settings.model.path:
        return f"reward.model.path = {settings.model.path}"
    if settings.judge.url and not settings.function:
        return f"reward.judge.url = {settings.judge.url}"
    if settings.functions:
        return f"reward.functions = {', '.join(settings.functions)}"
    return f"reward.function = {settings.function}"


def count_idle_cores() -> float:
    """Count this process's cores that were idle since this thread's last call."""
    import psutil

    own_cores = os.sched_getaffinity(0)
    times = enumerate(psutil.cpu_times_percent(percpu=True))
    return float(sum(time.idle for core, time in times if core in own_cores) / 100)


def next_pool_size(workers: int, cores: int, idle: float, rate: float, previous_rate: float) -> int:
    """Return the next number of processes of a pool that always had work waiting.

    Twice as many, as far as idle cores allow, while the last enlargement paid. rate: calls per
    second now. previous_rate: the rate before the last enlargement; 0: none yet.

    >>> next_pool_size(1, 8, 6.0, 10.0, 0.0), next_pool_size(2, 8, 5.0, 19.0, 10.0)
    (2, 4)
    >>> next_pool_size(4, 8, 1.2, 37.0, 19.0), next_pool_size(6, 8, 6.0, 80.0, 40.0)
    (5, 8)
    >>> next_pool_size(2, 8, 5.0, 11.0, 10.0), next_pool_size(2, 8, 0.3, 19.0, 10.0)
    (2, 2)
    """
    if idle < 0.5 or rate < WORTH * previous_rate:
        return workers
    return max(workers, min(cores, 2 * workers, workers + max(1, int(idle))))


class _RewardPool(WorkerPool[_RewardProcess, RewardReply]):
    """The reward processes and the thread that feeds them.

    Other threads touch only `inbox`, `results`, `spans` and `wake`.
    """

    subject = "the reward process"
    hang_text = "the reward hung for more than {limit_s:g} s (reward.deadline_s)"

    def __init__(self, config: Config, run_dir: Path | None = None) -> None:
        settings = config.reward
        call_s = settings.deadline_s
        if settings.judge.url:  # whose requests have their own deadline
            from actors.scorers.judge import LONGEST_S

            longest_s = settings.judge.attempts * (settings.judge.timeout_s + LONGEST_S)
            call_s = max(call_s, longest_s)
        directory = str(run_dir.resolve()) if run_dir else ""
        setup = msgspec.msgpack.encode(RewardWorkerSetup(settings, config.task, call_s, directory))
        super().__init__(
            describe_reward_source(settings),
            lambda _: _RewardProcess(setup),
            (settings.workers if isinstance(settings.workers, int) else 0) or 1,
            RewardReply,
            call_s,
        )
        module = self.named.partition(" = ")[2].partition(":")[0]
        self.start_text = (
            f"processes ended or hung while importing it; try `python -c 'import {module}'`"
        )
        self.thread = threading.Thread(target=self.run, name="rewards", daemon=True)
        self.batch = settings.batch
        self.log = f"; reward.log: {run_dir / LOG}" if run_dir else ""
        self.judge = settings.judge
        self.account = run_dir / ACCOUNT if run_dir is not None and self.judge.url else None
        self.fresh: list[_RewardJob] = []  # for the inbox, at the next poll of their results
        self.inbox: deque[_RewardJob] = deque()
        # each with the end of its call
        self.results: deque[tuple[_RewardJob, RewardResult, float]] = deque()
        self.spans: deque[tuple[float, float, int]] = deque()  # calls: began, ended, responses
        self.queue: deque[_RewardJob] = deque()
        self.suspects: deque[_RewardJob] = deque()  # to be judged alone
        self.last_id = 0
        self.judges_again = True  # each response of a failed call alone
        self.batches = 0  # calls with several responses
        self.failed_batches = 0
        self.unit_s = 0.0  # smoothed duration of a unit; 0: unknown
        self.error: BaseException | None = None
        self.closing = False
        self.turned = time.monotonic()
        # 0: the pool keeps its size
        grows = settings.workers == "auto" and not (settings.judge.url or settings.model.path)
        self.cores = len(os.sched_getaffinity(0)) if grows else 0
        self.measured_at = time.monotonic()
        self.done = 0
        self.rate_before = 0.0
        self.ours, self.wake = socket.socketpair()
        self.ours.setblocking(False)
        self.wake.setblocking(False)

    def wake_up(self) -> None:
        """Wake the feeding thread, from another one."""
        try:
            self.wake.send(b"x")
        except OSError:  # the buffer is full, so the thread wakes up anyway
            pass

    # ---- the thread ------------------------------------------------------------------------------

    def run(self) -> None:
        """Feed the processes until `end`; the next poll raises an error of this thread."""
        try:
            while not self.closing:
                self.step()
        except BaseException as error:  # raised by the next poll
            self.error = error

    def end(self) -> None:
        """Stop the thread if it runs, then end the processes."""
        self.closing = True
        self.wake_up()
        if self.thread.is_alive():
            self.thread.join()
        self.close()
        self.ours.close()
        self.wake.close()

    def step(self) -> None:
        """Wait for an event, read replies and send out work."""
        self.turned = time.monotonic()
        now = time.monotonic()
        soonest = min(map(self.compute_deadline, self.workers))
        events = select.poll()
        events.register(self.ours, select.POLLIN)
        for process in self.workers:
            events.register(
                process.wire, select.POLLIN | (select.POLLOUT if process.outgoing else 0)
            )
        events.poll(1000 * min(TURN_S, max(0.0, soonest - now)))
        try:
            while self.ours.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self.inbox:
            self.queue.append(self.inbox.popleft())
        self.read()
        self._feed()
        self.flush()
        if self.cores > len(self.workers):
            self._measure()
        if not self.closing:
            time.sleep(REST_S)

    # ---- the workers -----------------------------------------------------------------------------

    def on_ready(self, worker: _RewardProcess, reply: RewardReply) -> None:
        worker.batched = reply.batched
        worker.window = reply.window
        worker.slack_s = SLACK_S if reply.window > 1 else 0.0

    def on_reply(self, worker: _RewardProcess, reply: RewardReply) -> None:
        worker.since = reply.ended
        if reply.kind == "alive":
            return
        jobs, size = worker.units.get(reply.id, ([], 0))
        if not jobs or (reply.kind == "ok" and len(reply.results) != len(jobs)):
            worker.invalid = f"{len(reply.results)} results for {len(jobs)} responses"
            return
        del worker.units[reply.id]
        worker.bytes -= size
        worker.is_reserved = False
        seconds = reply.ended - reply.began
        self.unit_s = 0.9 * self.unit_s + 0.1 * seconds if self.unit_s else max(seconds, 1e-6)
        self.spans.append((reply.began, reply.ended, len(jobs)))
        self.done += len(jobs)
        self.batches += len(jobs) > 1
        self.failed_batches += len(jobs) > 1 and reply.kind != "ok"
        if reply.kind == "ok":
            for job, result in zip(jobs, reply.results, strict=True):
                if isinstance(result, str):
                    self._fail(job, RewardFailure("data", result), reply.ended, self.log)
                else:
                    self.results.append((job, RewardResult(job.key, *result, ""), reply.ended))
        elif reply.kind == "hung":
            hang = self.hang_text.format(limit_s=self.call_s)
            self._blame(jobs, RewardFailure("data", hang), reply.ended)
        else:
            failure = RewardFailure("data", f"the reward {reply.why}")
            self._blame(jobs, failure, reply.ended, self.log)

    def on_lost(self, worker: _RewardProcess, reason: str, *, hung: bool) -> None:
        failure = RewardFailure("data" if hung else "machinery", reason)
        units = [jobs for jobs, _ in worker.units.values()]
        running, queued = units[: worker.window], units[worker.window :]
        batches = sum(len(jobs) > 1 for jobs in running)
        self.batches += batches
        self.failed_batches += batches
        self._blame([*chain(*running)], failure, time.monotonic())
        self.queue.extendleft(reversed([*chain(*queued)]))

    def _fail(self, job: _RewardJob, failure: RewardFailure, ended: float, log: str = "") -> None:
        """Report a failed response. log: where the worker has written more about it."""
        call = job.call
        prompt, response = format_text(call.prompt.text), format_text(call.text)
        reason = f"{failure.why}; prompt {prompt}, response {response}{log}"
        result = RewardResult(job.key, 0.0, {}, None, RewardFailure(failure.kind, reason))
        self.results.append((job, result, ended))

    def _blame(
        self, jobs: list[_RewardJob], failure: RewardFailure, ended: float, log: str = ""
    ) -> None:
        """Fail a single response; of several, queue each to be judged alone."""
        if len(jobs) > 1 and self.judges_again:
            self.suspects.extend(jobs)
            return
        for job in jobs:
            self._fail(job, failure, ended, log)

    # ---- the distribution of work ----------------------------------------------------------------

    def _feed(self) -> None:
        free = [process for process in self.workers if process.ready and not process.is_reserved]
        if self.suspects and free:
            process = min(free, key=lambda x: len(x.units))
            free.remove(process)  # no other work, so that it becomes empty
            if not process.units:
                process.is_reserved = True
                self._send(process, [self.suspects.popleft()])
        room = {}  # a process may hold the units that it runs, plus short ones ahead
        for process in free:
            ahead = int(AHEAD_S * process.window / self.unit_s) if self.unit_s else 0
            room[process] = process.window + min(MOST_AHEAD, ahead) - len(process.units)
        while self.queue and (
            free := [
                process for process in free if room[process] > 0 and process.bytes <= AHEAD_BYTES
            ]
        ):
            largest_room = max(room[process] for process in free)
            for process in [process for process in free if room[process] == largest_room]:
                if not self.queue:
                    break
                count = 1
                if process.batched:
                    count = min(self.batch, math.ceil(len(self.queue) / len(free)))
                self._send(process, [self.queue.popleft() for _ in range(count)])
                room[process] -= 1

    def _send(self, process: _RewardProcess, jobs: list[_RewardJob]) -> None:
        if not process.units:
            process.restart_clock()
        self.last_id += 1
        calls = [job.call for job in jobs]
        size = 0  # of the message, estimated
        for response in calls:
            characters = (
                len(response.text) + len(response.prompt.text) + len(response.prompt.answer)
            )
            size += 64 + 4 * (characters + len(response.tokens))
        process.bytes += size
        process.units[self.last_id] = (jobs, size)
        process.send([RewardUnit(self.last_id, calls)])

    # ---- the size of the pool --------------------------------------------------------------------

    def count_waiting(self) -> int:
        """Count the calls that no process has begun."""
        ahead = sum(max(0, len(process.units) - process.window) for process in self.workers)
        return len(self.queue) + len(self.suspects) + ahead

    def _measure(self) -> None:
        """Enlarge the pool if calls always waited, cores were idle and the last step paid."""
        now = time.monotonic()
        waiting = self.count_waiting()
        if not waiting or not all(process.ready for process in self.workers):
            self.measured_at = now
            self.done = 0
            count_idle_cores()
            return
        elapsed = now - self.measured_at
        count = len(self.workers)
        if elapsed < GROW_S or (self.done < GROW_CALLS * count and elapsed < GROW_MOST_S):
            return
        rate = self.done / elapsed
        target_count = next_pool_size(count, self.cores, count_idle_cores(), rate, self.rate_before)
        self.measured_at = now
        self.done = 0
        if target_count > count:
            self.rate_before = rate
            self.workers += map(self.make, range(count, target_count))


class RewardRunner:
    """The rewards of a run: submits responses and polls their results.

    Results come in any order; each submitted key comes back exactly once. Rewards run in place when
    the task computes them and `reward.workers` is 0 or "auto". Otherwise they run in
    `reward.workers` processes (at least 1) or, with "auto", in as many as pay off; a judge or a
    reward model has one. run_dir: where a judge's replies and spending are kept.

    Evaluation sets and tasks with rewards of their own have pools of their own, which start with
    their first sample. A judge among them has its own RUN/judges/NAME. parts: their configs by
    name; None: those of `config`.
    """

    def __init__(
        self,
        config: Config,
        task: Any,
        run_dir: Path | None = None,
        parts: Mapping[str, Config] | None = None,
    ) -> None:
        self.task = task
        self.run_dir = run_dir
        self.config = config
        self.parts = resolve_reward_configs(config) if parts is None else parts
        self.pools: dict[str, _RewardPool | None] = {}  # by the name of a part; None: in place
        self.done: list[RewardResult] = []
        self.judged = 0
        self.waited_s = 0.0  # from submission to result, summed over responses
        self.called_s = 0.0  # inside the function, summed
        self.waiting = 0  # submitted, not yet returned by `poll`
        # receives each call in a process: name, began, ended, responses
        self.timed: Callable[[str, float, float, int], None] | None = None
        self.pool = self._find_pool("")

    def _find_pool(self, name: str) -> _RewardPool | None:
        """Find or start the processes of a part; None: its rewards run in place."""
        if name not in self.pools:
            config, folder = self.parts.get(name, self.config), self.run_dir
            settings = config.reward
            if name and folder is not None:
                folder = folder / "judges" / name if settings.judge.url else None
            self.pools[name] = None
            if settings.uses_reward_processes or settings.workers not in ("auto", 0):
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                pool = self.pools[name] = _RewardPool(config, folder)
                pool.thread.start()
        return self.pools[name]

    @property
    def processes(self) -> list[_RewardProcess]:
        return [process for pool in self.list_pools() for process in pool.workers]

    def list_pools(self) -> list[_RewardPool]:
        """List the pools that have started."""
        return [pool for pool in self.pools.values() if pool is not None]

    @property
    def is_working(self) -> bool:
        """Whether the feeding threads make progress, so that waiting calls will end."""
        return all(time.monotonic() - pool.turned < STUCK_S for pool in self.list_pools())

    def collect_metrics(self) -> Numbers:
        """Return metrics: sums since the start, and the current state.

        Empty when rewards are judged in place.
        """
        sums = Counter[str]()
        for pool in self.list_pools():
            sums.update(
                {"reward/batches": pool.batches, "reward/failed_batches": pool.failed_batches}
            )
            if pool.account is not None:
                sums.update(read_totals(pool.account, pool.judge))
        if sums:
            sums.update(
                {
                    "reward/judged": self.judged,
                    "reward/waited_s": self.waited_s,
                    "reward/called_s": self.called_s,
                    "reward/queue": self.waiting,
                    "reward/workers": len(self.processes),
                }
            )
        return dict(sums)

    def submit(self, key: Key, prompt: Prompt, text: str, tokens: list[int]) -> None:
        """Submit `text` with its token ids `tokens`, including the stop token.

        Processes receive it at the next `poll`.
        """
        self.waiting += 1
        name = prompt.split if prompt.split in self.parts else prompt.task
        if (pool := self._find_pool(name if name in self.parts else "")) is not None:
            pool.fresh.append(_RewardJob(key, RewardCall(prompt, text, tokens), time.monotonic()))
            return
        try:
            result = call(self.task.reward, prompt, text, tokens)
            self.done.append(RewardResult(key, *result, ""))
        except Exception as error:
            failure = RewardFailure("data", f"the reward {describe_exception(error)}")
            self.done.append(RewardResult(key, 0.0, {}, None, failure))

    def poll(self) -> list[RewardResult]:
        """Return the finished results. Raises ConfigError when no process can start."""
        for pool in self.list_pools():
            if isinstance(pool.error, AsyncrlError):
                raise pool.error
            if pool.error is not None:
                raise AsyncrlError(
                    f"the thread that feeds the reward processes {describe_exception(pool.error)}"
                ) from pool.error
            if pool.fresh:
                pool.inbox.extend(pool.fresh)
                pool.wake_up()
                pool.fresh = []
            while pool.spans:
                began, ended, responses = pool.spans.popleft()
                self.called_s += ended - began
                if self.timed is not None:
                    self.timed("reward", began, ended, responses)
            while pool.results:
                job, result, ended = pool.results.popleft()
                self.judged += 1
                self.waited_s += ended - job.submitted_at
                self.done.append(result)
        results, self.done = self.done, []
        self.waiting -= len(results)
        return results

    def collect(self) -> list[RewardResult]:
        """Wait for all submitted responses and return their results, sorted by key."""
        results = self.poll()
        while self.waiting:
            time.sleep(REST_S)
            results += self.poll()
        return sorted(results, key=lambda r: r[0])

    def judge(self, responses: Responses) -> list[RewardResult]:
        """Judge (prompt, text, token ids) triples; return results in order."""
        for index, (prompt, text, tokens) in enumerate(responses):
            self.submit((index, 0, 0), prompt, text, tokens)
        return self.collect()

    def close(self) -> None:
        """End the processes."""
        for pool in self.list_pools():
            pool.end()
        self.pools = {}


def check_reward_process(config: Config, responses: Responses = ()) -> list[RewardResult]:
    """Judge (prompt, text, token ids) triples by one reward process; return results in order.

    A function that takes lists gets all of them in one call, whose failure is that of each. Raises
    ConfigError when the process cannot start.
    """
    reward = msgspec.structs.replace(config.reward, workers=1)
    runner = RewardRunner(msgspec.structs.replace(config, reward=reward), None, parts={})
    assert runner.pool is not None
    runner.pool.judges_again = False
    try:
        results = runner.judge(responses)
        while not any(process.ready for process in runner.processes):
            time.sleep(REST_S)
            runner.poll()
        return results
    finally:
        runner.close()


def judge_all(config: Config, task: Any, responses: Responses) -> list[RewardResult]:
    """Judge (prompt, text, token ids) triples as a run would; return results in order."""
    runner = RewardRunner(config, task)
    try:
        return runner.judge(responses)
    finally:
        runner.close()
