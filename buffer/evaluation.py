"""Evaluation: held-out prompts as tickets of their own, all at one exact version, outside pacing
and the training ledger.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.contract.messages import (
    EVAL_BASE,
    Disposition,
    Prompt,
    SamplingSettings,
    Ticket,
    Trajectory,
)
from asyncrl.contract.versions import Label
from buffer.groups import LeaseTable, StoreSettings

OOD_BASE = EVAL_BASE + (1 << 32)
MAX_FAILURES = 3


@dataclass
class EvaluationJob:
    """One prompt at one version."""

    label: Label
    split: str
    index: int
    failures: int = 0

    @property
    def ticket(self) -> int:
        return (OOD_BASE if self.split == "ood" else EVAL_BASE) + self.index


@dataclass
class EvaluationRound:
    """One version's evaluation of one split."""

    label: Label
    split: str
    size: int
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    failed: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.rewards) + self.failed >= self.size

    def metrics(self) -> dict[str, float]:
        count = max(len(self.rewards), 1)
        mean = math.fsum(self.rewards) / count  # rounded once: rewards arrive in any order
        return {
            f"eval/{self.split}": mean,
            f"eval/{self.split}_n": len(self.rewards),
            f"eval/{self.split}_length": sum(self.lengths) / count,
        }


class EvaluationPlan(NamedTuple):
    """What a run evaluates: every so many versions, how many prompts."""

    every: int = 0
    prompts: int = 0
    final_prompts: int = 0
    ood_prompts: int = 0
    temperature: float = 1.0
    ood_every: int = 0


class LeasedJob(NamedTuple):
    """A job at a generator.  lapsed: its lease ran out, and the job is in the queue again, but no
    other generator has it yet.
    """

    job: EvaluationJob
    producer: str
    session: int
    expires: float
    lapsed: bool = False


class EvaluationsState(NamedTuple):
    """Evaluations, to be kept."""

    plan: EvaluationPlan
    queue: list[EvaluationJob]
    out: list[tuple[int, LeasedJob]]
    rounds: list[EvaluationRound]
    results: list[tuple[tuple[str, int], dict[str, float]]]


class Evaluations:
    """Which rounds are due, which jobs are out, and the results by (split, number of the
    version).
    """

    def __init__(
        self,
        every: int = 0,
        prompts: int = 0,
        final_prompts: int = 0,
        ood_prompts: int = 0,
        temperature: float = 1.0,
        prompt: Callable[[str, int], Prompt] | None = None,
        ood_every: int = 0,
    ) -> None:
        self.plan = EvaluationPlan(
            every=every,
            prompts=prompts,
            final_prompts=final_prompts,
            ood_prompts=ood_prompts,
            temperature=temperature,
            ood_every=ood_every,
        )
        self.prompt = prompt
        self.queue: deque[EvaluationJob] = deque()
        self.out: dict[int, LeasedJob] = {}  # by attempt
        self.leases = LeaseTable()  # of `out`
        self.rounds: list[EvaluationRound] = []
        self.results: dict[tuple[str, int], dict[str, float]] = {}
        # finished, not yet written to the metrics
        self.fresh: list[tuple[int, dict[str, float]]] = []

    def snapshot(self) -> EvaluationsState:
        return EvaluationsState(
            plan=self.plan,
            queue=list(self.queue),
            out=list(self.out.items()),
            rounds=self.rounds,
            results=list(self.results.items()),
        )

    def restore(self, state: EvaluationsState) -> None:
        """Go on from `state`.  Results that were not written yet (`fresh`) are not in it: they are
        of the process, and a buffer that starts again has nobody to tell them to.
        """
        self.plan = state.plan
        self.queue = deque(state.queue)
        self.out = dict(state.out)
        self.leases = LeaseTable()
        for attempt, out in self.out.items():
            self.leases.add(out.producer, out.session, attempt, out.job.ticket)
        self.rounds = state.rounds
        self.results = dict(state.results)

    def renew_all_leases(self, expires: float) -> None:
        self.out = {attempt: out._replace(expires=expires) for attempt, out in self.out.items()}

    def restart(self, label: Label, steps: int) -> None:
        """A learner's hello: what is unfinished starts over, at the learner's version if one is due
        there; what lies past it was of another branch.
        """
        self.queue.clear()
        self.out.clear()
        self.leases = LeaseTable()
        self.rounds = []
        self.results = {k: v for k, v in self.results.items() if k[1] <= label.number}
        self.fresh = [x for x in self.fresh if x[0] <= label.number]
        self.on_commit(label, steps)

    def forget(self, base: int) -> None:
        """No learner begins behind version `base` any more: of the results behind it only the first
        and the newest of a split are of use.
        """
        newest = dict(sorted(self.results))  # of each split, the last one counts
        self.results = {
            (split, number): values
            for (split, number), values in self.results.items()
            if number >= base or number in (0, newest[split])
        }

    def on_commit(self, label: Label, steps: int) -> None:
        """Start the rounds that are due at this version."""
        ends = label.number in (0, steps)
        plan = self.plan
        if ends or (plan.every and label.number % plan.every == 0):
            self._start(label, "heldout", plan.final_prompts if ends else plan.prompts)
        if ends or (plan.ood_every and label.number % plan.ood_every == 0):
            self._start(
                label, "ood", plan.ood_prompts if ends else min(plan.prompts, plan.ood_prompts)
            )

    def _start(self, label: Label, split: str, size: int) -> None:
        if size and self.prompt is not None and (split, label.number) not in self.results:
            self.rounds.append(EvaluationRound(label, split, size))
            self.queue.extend(EvaluationJob(label, split, i) for i in range(size))

    def labels(self) -> list[Label]:
        return [r.label for r in self.rounds]

    @property
    def pending(self) -> bool:
        return bool(self.rounds)

    def grant(
        self, attempt: int, settings: StoreSettings, *, producer: str, session: int, expires: float
    ) -> Ticket:
        """The next job of `queue` as a ticket."""
        assert self.prompt is not None
        job = self.queue.popleft()
        for before in [old for old, out in self.out.items() if out.lapsed and out.job == job]:
            self._take_back_job(before)
        self.out[attempt] = LeasedJob(job, producer, session, expires)
        self.leases.add(producer, session, attempt, job.ticket)
        limit = settings.sampling.max_new_tokens
        return Ticket(
            ticket=job.ticket,
            attempt=attempt,
            kind="eval",
            prompt=self.prompt(job.split, job.index),
            samples=[0],
            sampling=SamplingSettings(self.plan.temperature, 1.0, 0, limit),
            min_version=Label(job.label.epoch, 0),
            exact_version=job.label,
            seed=settings.seed,
        )

    def renew(self, ticket: int, attempt: int, expires: float) -> None:
        if (entry := self.out.get(attempt)) is None:
            return
        if entry.lapsed:
            self.queue.remove(entry.job)
        self.out[attempt] = entry._replace(expires=expires, lapsed=False)

    def expire(self, now: float) -> int:
        """Queue the jobs whose leases ran out.  Until one is granted again, its first holder may
        still renew it or deliver: a generator that was slow, not dead.
        """
        late = [(a, out) for a, out in self.out.items() if out.expires < now and not out.lapsed]
        for attempt, entry in late:
            self.queue.appendleft(entry.job)
            self.out[attempt] = entry._replace(lapsed=True)
        return len(late)

    def end_sessions(self, producer: str, session: int) -> None:
        self._requeue_jobs(
            [
                attempt
                for attempt, out in self.out.items()
                if out.producer == producer and out.session != session
            ]
        )

    def requeue_job(self, attempt: int) -> None:
        """A job that is out is due again."""
        if attempt in self.out:
            self._requeue_jobs([attempt])

    def _requeue_jobs(self, attempts: list[int]) -> None:
        for attempt in attempts:
            entry = self._take_back_job(attempt)
            if not entry.lapsed:
                self.queue.appendleft(entry.job)

    def _take_back_job(self, attempt: int) -> LeasedJob:
        out = self.out.pop(attempt)
        self.leases.end(out.producer, out.session, attempt)
        return out

    def deliver(self, sample: Trajectory) -> Disposition:
        if sample.attempt not in self.out:
            return "duplicate"
        entry = self._take_back_job(sample.attempt)
        job = entry.job
        if entry.lapsed:
            self.queue.remove(job)
        current = next(r for r in self.rounds if r.label == job.label and r.split == job.split)
        if sample.failed and job.failures + 1 < MAX_FAILURES:
            job.failures += 1
            self.queue.append(job)
        elif sample.failed:
            current.failed += 1
        else:
            current.rewards.append(sample.reward)
            current.lengths.append(sample.length)
        if current.is_done:
            self.rounds.remove(current)
            self.results[current.split, job.label.number] = current.metrics()
            self.fresh.append((job.label.number, current.metrics()))
        return "evaluated"
