"""Rewards: a task's own in place, anybody else's in processes of their own, under a deadline.

A reward function is `def reward(prompt: Prompt, text: str) -> float | dict`, given as
`module:function`.  A dict names the parts; `reward` among them counts, `token_rewards` may be a
list of one number a token (None: of this token nothing is said), which `advantage.name` = gae,
reinforce_pp and grpo (process supervision) train on in its place.  A function with a parameter
`tokens` is given the answer's token ids too, the stop token included.  As `async def` its calls are
awaited together, at most `reward.concurrency` in a process.  With `reward.batched = True` it takes
lists, (prompts, texts), and returns a list of as many. What raises, returns something else or hangs
is a failed sample ("data: why"; "machinery: why" when its process died), never a reward of 0.

A thread feeds the processes, so that none waits for the generator's next look:

```
submit, poll --inbox--> queue --units--> in a process's hands: the first `window` under way,
     ^                    ^                  |                 a little ahead in its socket
     +-----results--------+---(lost)---------+
```

A process that hangs or dies was working on its first `window` units, and on nothing else: units
begin in order, and each is answered at once.  If these are a single answer, that one has failed.
Of several nobody knows which: each is judged again, alone."""

from __future__ import annotations

import math
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from actors.reward_worker import (
    RewardCall,
    RewardReply,
    RewardUnit,
    RewardWorkerSetup,
    call,
    describe_exception,
)
from actors.scorers.judge_budget import ACCOUNT, totals
from actors.scorers.user_function import LOG, format_text
from asyncrl.config.tree import Config, RewardConfig
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import Prompt, RewardFailure
from asyncrl.transport import child
from asyncrl.transport.child import frame

Key = tuple[int, int, int]
# the first import may be slow, or a call be given longer; its deadline starts when the process is
# ready
GRACE_S = 60.0
# processes in a row that end before they are ready: the function's module cannot be imported here
START_TRIES = 3
# work in a process's socket beyond what it is doing: longer calls wait in the common queue for
# whoever is free
AHEAD_S = 0.05
AHEAD_BYTES = 64 * 1024  # and never more than a socket holds
MOST_AHEAD = 128  # units: what stands behind one that hangs waits for its deadline
REST_S = 0.002  # between two looks: replies are read together
# a process of coroutines ends each by itself at the deadline; only one whose loop is blocked is
# ended by us
SLACK_S = 1.0
TURN_S = 0.5  # the thread looks at least so often
STUCK_S = 30.0  # after so long without a look, it is not taken to be working any more
# a measurement: so long, so many calls a process, or this long at most
GROW_S = 1.0
GROW_CALLS = 8
GROW_MOST_S = 10.0
WORTH = 1.25  # a doubled pool must do so much more to be doubled again


class RewardResult(NamedTuple):
    """What an answer's reward came to."""

    key: Key
    reward: float
    parts: dict[str, float]
    token_rewards: list[float] | None
    failed: RewardFailure | Literal[""]


@dataclass
class _RewardJob:
    """One answer to be judged."""

    key: Key
    call: RewardCall
    at: float  # when it was handed in


@dataclass
class RewardTiming:
    """What the calls took, since the start; the generator's numbers are made of it."""

    judged: int = 0
    waited_s: float = 0.0  # from being handed in to the result, summed over answers
    called_s: float = 0.0  # in the function, its share of a list's call


class _RewardProcess(child.ChildProcess):
    """A reward process and the units in its hands, in the order in which they were sent."""

    def __init__(self, setup: bytes) -> None:
        super().__init__("actors.reward_worker", setup)
        self.units: dict[int, tuple[list[_RewardJob], int]] = {}  # id -> (its answers, its bytes)
        self.bytes = 0
        self.alone = False  # it has one answer that nothing else may be blamed for
        self.ready = False
        self.batched = False
        self.window = 1
        # its start; then when its oldest unit can have begun at the latest
        self.since = time.monotonic()

    def running_jobs(self) -> list[_RewardJob]:
        """The answers it is working on."""
        return [job for jobs, _ in list(self.units.values())[: self.window] for job in jobs]

    def queued_jobs(self) -> list[_RewardJob]:
        """Those it has not begun."""
        return [job for jobs, _ in list(self.units.values())[self.window :] for job in jobs]

    def receive(self) -> tuple[list[RewardReply], bool]:
        """The replies that have come, and whether it has closed.  Raises msgspec.MsgspecError for
        what is no reply.
        """
        payloads, closed = self.payloads()
        return [_reply(payload) for payload in payloads], closed

    def end(self) -> int:
        """End it; its exit code if it had ended by itself."""
        try:
            return self.process.wait(0.2 if self.ready else 0.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self.wire.close()


_reply = msgspec.msgpack.Decoder(RewardReply).decode


def call_timeout_s(settings: RewardConfig) -> float:
    """Seconds of one call: a judge's requests have their own."""
    if not settings.judge.url:
        return settings.deadline_s
    from actors.scorers.judge import longest_s

    return max(settings.deadline_s, longest_s(settings.judge))


def judge_name(settings: RewardConfig) -> str:
    """Who judges, as the config has it."""
    if settings.model.path:
        return f"reward.model.path = {settings.model.path}"
    if settings.judge.url and not settings.function:
        return f"reward.judge.url = {settings.judge.url}"
    return f"reward.function = {settings.function}"


def idle_cores() -> Callable[[], float]:
    """A function that says how many of this process's cores were idle since it was last called."""
    import psutil

    mine = sorted(os.sched_getaffinity(0))
    last = psutil.cpu_times(percpu=True)

    def idle_share() -> float:
        nonlocal last
        before = last
        last = psutil.cpu_times(percpu=True)
        idle = 0.0
        for core in (c for c in mine if c < min(len(before), len(last))):
            # beyond the eighth, guests' time is counted twice
            spent = sum(last[core][:8]) - sum(before[core][:8])
            idle += (last[core].idle - before[core].idle) / spent if spent > 0 else 0.0
        return idle

    return idle_share


def next_pool_size(workers: int, cores: int, idle: float, rate: float, before: float) -> int:
    """Processes from now on, of a pool that had more to do than it could: twice as many, as idle
    cores allow, while that pays.

    rate: calls a second now; before: those before it was last enlarged, 0 if it never was.

    >>> next_pool_size(1, 8, 6.0, 10.0, 0.0), next_pool_size(2, 8, 5.0, 19.0, 10.0)
    (2, 4)
    >>> next_pool_size(4, 8, 1.2, 37.0, 19.0)
    5
    >>> next_pool_size(2, 8, 5.0, 11.0, 10.0), next_pool_size(2, 8, 0.3, 19.0, 10.0)
    (2, 2)
    """
    if idle < 0.5 or rate < WORTH * before:
        return workers
    return max(workers, min(cores, 2 * workers, workers + max(1, int(idle))))


class _RewardPool(threading.Thread):
    """The thread that feeds the processes.  `inbox`, `results` and `wake` are its doors; all else
    is its own.
    """

    def __init__(self, config: Config, run_dir: Path | None = None) -> None:
        super().__init__(name="rewards", daemon=True)
        settings = config.reward
        self.named = judge_name(settings)
        self.deadline_s = call_timeout_s(settings)
        self.batch = settings.batch
        place = str(run_dir.resolve()) if run_dir else ""
        self.log = f"; reward.log: {run_dir / LOG}" if run_dir else ""
        self.setup = msgspec.msgpack.encode(
            RewardWorkerSetup(settings, config.task, self.deadline_s, place)
        )
        self.inbox: deque[_RewardJob] = deque()
        self.results: deque[tuple[_RewardJob, RewardResult, float]] = (
            deque()
        )  # with when its call ended
        self.spans: deque[tuple[float, float, int]] = deque()  # calls: began, ended, answers
        self.queue: deque[_RewardJob] = deque()
        self.suspects: deque[_RewardJob] = deque()  # to be judged alone
        self.hangs = self.unborn = self.last_id = 0
        self.call_s = 0.0  # of one unit, smoothed; 0: not known
        self.error: BaseException | None = None
        self.closing = False
        self.turned = time.monotonic()
        self.processes = [
            _RewardProcess(self.setup)
            for _ in range(
                settings.workers if isinstance(settings.workers, int) and settings.workers else 1
            )
        ]
        # 0: the pool keeps its size
        grows = settings.workers == "auto" and not (settings.judge.url or settings.model.path)
        self.cores = len(os.sched_getaffinity(0)) if grows else 0
        self.idle_cores = idle_cores() if self.cores > 1 else lambda: 0.0
        self.looked = time.monotonic()
        self.done = 0
        self.rate_before = 0.0
        self.ours, self.wake = socket.socketpair()
        self.ours.setblocking(False)
        self.wake.setblocking(False)

    # ---- the generator's side --------------------------------------------------------------------

    def submit(self, jobs: Iterable[_RewardJob]) -> None:
        self.inbox.extend(jobs)
        self.wake_up()

    def wake_up(self) -> None:
        try:
            self.wake.send(b"x")
        except OSError:  # it has enough reasons to wake up
            pass

    # ---- the thread ------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while not self.closing:
                self.step()
        except BaseException as error:  # said by the next poll
            self.error = error

    def end(self) -> None:
        """Close what it has; when its thread runs, end that first."""
        self.closing = True
        self.wake_up()
        if self.is_alive():
            self.join()
        for process in self.processes:
            process.kill()
        self.ours.close()
        self.wake.close()

    def step(self) -> None:
        """Wait for something, take in what came, give out what can be given."""
        self.turned = time.monotonic()
        self._wait()
        while self.inbox:
            self.queue.append(self.inbox.popleft())
        for process in list(self.processes):
            self._receive(process)
        self._watch()
        self._feed()
        for process in self.processes:
            process.flush()
        if self.cores > len(self.processes):
            self._measure()
        if not self.closing:
            time.sleep(REST_S)  # whoever can be fed is fed

    def _wait(self) -> None:
        now = time.monotonic()
        soonest = min((self._deadline(process) for process in self.processes), default=math.inf)
        events = select.poll()
        events.register(self.ours, select.POLLIN)
        for process in self.processes:
            events.register(
                process.wire, select.POLLIN | (select.POLLOUT if process.outgoing else 0)
            )
        events.poll(1000 * min(TURN_S, max(0.0, soonest - now)))
        try:
            while self.ours.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _deadline(self, process: _RewardProcess) -> float:
        if not process.ready:
            return process.since + max(GRACE_S, self.deadline_s)
        return (
            process.since + self.deadline_s + (SLACK_S if process.window > 1 else 0.0)
            if process.units
            else math.inf
        )

    def _receive(self, process: _RewardProcess) -> None:
        dead = (
            process.process.poll() is not None
        )  # looked at before the last of its replies is read
        try:
            replies, closed = process.receive()
        except msgspec.MsgspecError as error:
            self._replace(
                process,
                RewardFailure("machinery", f"what the reward process sent is no reply ({error})"),
            )
            return
        for reply in replies:
            self._on_reply(process, reply)
        if closed or dead:
            self._replace(process, RewardFailure("machinery", "the reward process ended ({code})"))

    def _on_reply(self, process: _RewardProcess, reply: RewardReply) -> None:
        if reply.kind == "broken":
            raise ConfigError(reply.why)
        if reply.kind == "alive":
            process.since = reply.ended
            return
        if reply.kind == "ready":
            process.ready = True
            process.batched = reply.batched
            process.window = reply.window
            self.unborn = 0
            return
        jobs, size = process.units.pop(reply.id, ([], 0))
        process.bytes -= size
        process.since = reply.ended
        process.alone = False
        seconds = reply.ended - reply.began
        self.call_s = 0.9 * self.call_s + 0.1 * seconds if self.call_s else max(seconds, 1e-6)
        self.spans.append((reply.began, reply.ended, len(jobs)))
        self.done += len(jobs)
        if reply.kind == "ok":
            for job, found in zip(jobs, reply.results, strict=True):
                if isinstance(found, str):
                    self._fail(job, RewardFailure("data", found), reply.ended, self.log)
                else:
                    self.results.append((job, RewardResult(job.key, *found, ""), reply.ended))
        elif reply.kind == "hung":
            self.hangs += 1
            self._blame(jobs, self._hung(), reply.ended)
        else:
            why = RewardFailure("data", f"the reward {reply.why}")
            self._blame(jobs, why, reply.ended, self.log)

    def _hung(self) -> RewardFailure:
        return RewardFailure(
            "data", f"the reward hung for more than {self.deadline_s:g} s (reward.deadline_s)"
        )

    def _fail(self, job: _RewardJob, failure: RewardFailure, ended: float, log: str = "") -> None:
        """log: where the worker has written more of it."""
        call = job.call
        prompt, response = format_text(call.prompt.text), format_text(call.text)
        why = f"{failure.why}; prompt {prompt}, response {response}{log}"
        result = RewardResult(job.key, 0.0, {}, None, RewardFailure(failure.kind, why))
        self.results.append((job, result, ended))

    def _blame(
        self, jobs: list[_RewardJob], why: RewardFailure, ended: float, log: str = ""
    ) -> None:
        """One of these answers is to blame: the only one, or who it is will be seen."""
        if len(jobs) == 1:
            self._fail(jobs[0], why, ended, log)
        else:
            self.suspects.extend(jobs)

    def _watch(self) -> None:
        now = time.monotonic()
        for process in list(self.processes):
            if now > self._deadline(process):
                self.hangs += process.ready
                self._replace(process, self._hung())

    def _replace(self, process: _RewardProcess, failure: RewardFailure) -> None:
        code = process.process.poll()
        if failure.kind == "machinery" and code is None:
            code = process.end()
        else:
            process.kill()
        why = failure.why.replace("{code}", str(code))
        self._blame(process.running_jobs(), RewardFailure(failure.kind, why), time.monotonic())
        self.queue.extendleft(reversed(process.queued_jobs()))
        self.unborn += not process.ready
        if self.unborn >= START_TRIES:
            raise ConfigError(
                f"{self.named}: {self.unborn} processes ended or hung while importing it; try "
                f"`python -c 'import {self.named.partition(' = ')[2].partition(':')[0]}'`"
            )
        self.processes[self.processes.index(process)] = _RewardProcess(self.setup)

    # ---- giving out ------------------------------------------------------------------------------

    def _feed(self) -> None:
        free = [process for process in self.processes if process.ready and not process.alone]
        if self.suspects and free:
            process = min(free, key=lambda x: len(x.units))
            free.remove(process)  # it gets nothing else, so that it will be empty
            if not process.units:
                process.alone = True
                jobs = [self.suspects.popleft()]
                process.bytes += _size(jobs)
                self._send(process, [jobs])
        given: dict[_RewardProcess, list[list[_RewardJob]]] = {}
        room = {process: self._capacity(process) - len(process.units) for process in free}
        while self.queue and (
            free := [
                process for process in free if room[process] > 0 and process.bytes <= AHEAD_BYTES
            ]
        ):
            most = max(room[process] for process in free)
            for process in [
                process for process in free if room[process] == most
            ]:  # one for each, in turn
                if not self.queue:
                    break
                many = (
                    min(self.batch, math.ceil(len(self.queue) / len(free)))
                    if process.batched
                    else 1
                )
                jobs = [self.queue.popleft() for _ in range(many)]
                given.setdefault(process, []).append(jobs)
                room[process] -= 1
                process.bytes += _size(jobs)
        for process, groups in given.items():
            self._send(process, groups)

    def _capacity(self, process: _RewardProcess) -> int:
        """Units that it may have in its hands: those under way, and some ahead when they are
        short.
        """
        return process.window + (
            min(MOST_AHEAD, int(AHEAD_S * process.window / self.call_s)) if self.call_s else 0
        )

    def _send(self, process: _RewardProcess, groups: list[list[_RewardJob]]) -> None:
        if not process.units:
            process.since = time.monotonic()
        units = []
        for jobs in groups:
            self.last_id += 1
            process.units[self.last_id] = (jobs, _size(jobs))
            units.append(RewardUnit(self.last_id, [j.call for j in jobs]))
        process.outgoing += frame(msgspec.msgpack.encode(units))

    # ---- its size --------------------------------------------------------------------------------

    def waiting(self) -> int:
        """Calls that no process has begun."""
        return (
            len(self.queue)
            + len(self.suspects)
            + sum(max(0, len(process.units) - process.window) for process in self.processes)
        )

    def _measure(self) -> None:
        """Enlarge the pool when answers waited all the time, cores were idle, and the last
        enlargement paid.
        """
        now = time.monotonic()
        waiting = self.waiting()
        if not waiting or not all(process.ready for process in self.processes):
            self.looked = now
            self.done = 0
            self.idle_cores()
            return
        spent = now - self.looked
        count = len(self.processes)
        if spent < GROW_S or (self.done < GROW_CALLS * count and spent < GROW_MOST_S):
            return
        rate = self.done / spent
        wanted = next_pool_size(count, self.cores, self.idle_cores(), rate, self.rate_before)
        self.looked = now
        self.done = 0
        if wanted > count:
            self.rate_before = rate
            self.processes += [_RewardProcess(self.setup) for _ in range(wanted - count)]


def _size(jobs: list[_RewardJob]) -> int:
    """About what they make in bytes."""
    return sum(
        64
        + 4
        * (
            len(j.call.text)
            + len(j.call.tokens)
            + len(j.call.prompt.text)
            + len(j.call.prompt.answer)
        )
        for j in jobs
    )


def check(config: Config) -> None:
    """Import `reward.function`, or load what judges, in a process like those that will.  Raises
    ConfigError when that cannot be.
    """
    pool = _RewardPool(
        msgspec.structs.replace(config, reward=msgspec.structs.replace(config.reward, workers=1))
    )
    try:
        while not any(process.ready for process in pool.processes):
            pool.step()
    finally:
        pool.end()


class RewardRunner:
    """Submit answers, poll results.  Results may come in any order; each submitted key comes back
    exactly once.

    In place when the task judges and `reward.workers` is 0 or "auto"; otherwise in processes, of
    which there are `reward.workers` (at least 1), or as many as turn out to pay ("auto"); one for a
    judge or a model.  run_dir: where a judge's replies and what it spent are kept."""

    def __init__(self, config: Config, task: Any, run_dir: Path | None = None) -> None:
        self.task = task
        self.done: list[RewardResult] = []
        self.fresh: list[_RewardJob] = []
        self.timing = RewardTiming()
        self.waiting = 0  # submitted, not yet given back
        # told of each call to a process: name, began, ended, answers
        self.timed: Callable[[str, float, float, int], None] | None = None
        settings = config.reward
        self.judge = settings.judge
        self.account = run_dir / ACCOUNT if run_dir is not None and self.judge.url else None
        self.pool = (
            _RewardPool(config, run_dir)
            if settings.uses_reward_processes
            or (isinstance(settings.workers, int) and settings.workers)
            else None
        )
        if self.pool is not None:
            self.pool.start()

    @property
    def processes(self) -> list[_RewardProcess]:
        return self.pool.processes if self.pool is not None else []

    @property
    def hang_count(self) -> int:
        return self.pool.hangs if self.pool is not None else 0

    @property
    def is_working(self) -> bool:
        """Will what waits be judged, or fail at its deadline?  False only if the thread that sees
        to it is stuck.
        """
        return self.pool is None or time.monotonic() - self.pool.turned < STUCK_S

    def numbers(self) -> dict[str, float]:
        """Sums since the start, and the state now, for the metrics; empty when rewards are judged
        in place.
        """
        if self.pool is None:
            return {}
        timing = self.timing
        return {
            "reward/judged": timing.judged,
            "reward/waited_s": timing.waited_s,
            "reward/called_s": timing.called_s,
            "reward/queue": self.waiting,
            "reward/workers": len(self.processes),
            **(totals(self.account, self.judge) if self.account is not None else {}),
        }

    def submit(self, key: Key, prompt: Prompt, text: str, tokens: Any) -> None:
        """Judge `text`, whose token ids are `tokens`, the stop token included.  Processes get it at
        the next `poll`.
        """
        self.waiting += 1
        if self.pool is not None:
            self.fresh.append(
                _RewardJob(
                    key, RewardCall(prompt, text, [int(x) for x in tokens]), time.monotonic()
                )
            )
            return
        try:
            judged = call(self.task.reward, prompt, text, [int(x) for x in tokens])
            self.done.append(RewardResult(key, *judged, ""))
        except Exception as error:
            failure = RewardFailure("data", f"the reward {describe_exception(error)}")
            self.done.append(RewardResult(key, 0.0, {}, None, failure))

    def poll(self) -> list[RewardResult]:
        """What is done by now.  Raises ConfigError when no process can start."""
        if self.pool is not None:
            self._exchange(self.pool)
        out = self.done
        self.done = []
        self.waiting -= len(out)
        return out

    def _exchange(self, pool: _RewardPool) -> None:
        if isinstance(pool.error, AsyncrlError):
            raise pool.error
        if pool.error is not None:
            raise AsyncrlError(
                f"the thread that feeds the reward processes {describe_exception(pool.error)}"
            ) from pool.error
        if self.fresh:
            pool.submit(self.fresh)
            self.fresh = []
        while pool.spans:
            began, ended, answers = pool.spans.popleft()
            self.timing.called_s += ended - began
            if self.timed is not None:
                self.timed("reward", began, ended, answers)
        while pool.results:
            job, result, ended = pool.results.popleft()
            self.timing.judged += 1
            self.timing.waited_s += ended - job.at
            self.done.append(result)

    def collect(self) -> list[RewardResult]:
        """What all that was submitted came to, by key."""
        out = self.poll()
        while self.waiting:
            time.sleep(REST_S)
            out += self.poll()
        return sorted(out, key=lambda r: r[0])

    def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.end()
            self.pool = None


def judge_all(
    config: Config, task: Any, answers: Sequence[tuple[Prompt, str, list[int]]]
) -> list[RewardResult]:
    """Judge (prompt, text, token ids) as a run would, and wait for it; one result each, in their
    order.
    """
    runner = RewardRunner(config, task)
    try:
        for index, (prompt, text, tokens) in enumerate(answers):
            runner.submit((index, 0, 0), prompt, text, tokens)
        return runner.collect()
    finally:
        runner.close()
