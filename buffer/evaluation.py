"""Evaluation: held-out prompts as separate tickets, all at one exact version.

They are outside the staleness limit and the training ledger. The run's own sets are `heldout` and
`ood`, with one sample a prompt. Further sets (`evaluation.sets`) have several, and a greedy one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
from asyncrl.records.pass_at_k import compute_set_metrics
from buffer.groups import LeaseTable, StoreSettings

SET_TICKETS = 1 << 32  # ticket numbers of each set
OOD_BASE = EVAL_BASE + SET_TICKETS
MAX_FAILURES = 3


class EvaluationSet(NamedTuple):
    """A named set of prompts. Made from `evaluation.sets`.

    number: of its ticket numbers; 0 is heldout, 1 is ood. every: versions between two evaluations;
    0: only the first and the last version. samples: of each prompt. greedy: one greedy completion a
    prompt besides. passing: a sample passes from this reward on. counts: the k of pass@k.
    """

    name: str
    number: int
    prompts: int
    every: int = 0
    samples: int = 1
    greedy: bool = False
    temperature: float = 1.0
    passing: float = 1.0
    counts: tuple[int, ...] = ()

    def sampling(self, sample: int, most_tokens: int) -> SamplingSettings:
        """Return how sample number `sample` of a prompt is generated."""
        if self.temperature == 0 or sample == self.samples:
            return SamplingSettings(1.0, 1.0, 1, most_tokens)
        return SamplingSettings(self.temperature, 1.0, 0, most_tokens)

    @property
    def numbers(self) -> range:
        """The numbers of a prompt's samples; a greedy one is the last."""
        return range(self.samples + self.greedy)

    def ticket(self, index: int) -> int:
        """The ticket number of a prompt."""
        return EVAL_BASE + self.number * SET_TICKETS + index


@dataclass
class EvaluationJob:
    """One sample of a prompt at one version."""

    label: Label
    split: str
    index: int
    failures: int = 0
    sample: int = 0
    number: int = 0  # of the set; that of ood follows from its name

    @property
    def ticket(self) -> int:
        number = 1 if self.split == "ood" else self.number
        return EVAL_BASE + number * SET_TICKETS + self.index


@dataclass
class EvaluationRound:
    """One version's evaluation of one set.

    places: the prompts of `rewards` and `lengths`, in the same order. greedy: rewards of the greedy
    completions.
    """

    label: Label
    split: str
    size: int
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    failed: int = 0
    places: list[int] = field(default_factory=list)
    greedy: list[float] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.rewards) + len(self.greedy) + self.failed >= self.size

    def add(self, job: EvaluationJob, sample: Trajectory, plan: EvaluationSet) -> None:
        """Add the reward of a job's sample."""
        if job.sample == plan.samples:
            self.greedy.append(sample.reward)
            return
        self.rewards.append(sample.reward)
        self.lengths.append(sample.length)
        self.places.append(job.index)

    def metrics(self, plan: EvaluationSet) -> dict[str, float]:
        by_prompt: dict[int, list[float]] = {}
        for index, reward in zip(self.places, self.rewards, strict=True):
            by_prompt.setdefault(index, []).append(reward)
        return compute_set_metrics(
            self.split, by_prompt, self.greedy, self.lengths, plan.passing, plan.counts
        )


class EvaluationPlan(NamedTuple):
    """The evaluations of a run: their interval in versions and their numbers of prompts."""

    every: int = 0
    prompts: int = 0
    final_prompts: int = 0
    ood_prompts: int = 0
    temperature: float = 1.0
    ood_every: int = 0
    sets: tuple[EvaluationSet, ...] = ()

    @property
    def most_samples(self) -> int:
        """The most samples of a prompt, in any set."""
        return max([1, *(len(one.numbers) for one in self.sets)])

    def plan_of(self, name: str) -> EvaluationSet:
        """Return the plan of a set by its name; one sample a prompt for heldout and ood."""
        known = next((one for one in self.sets if one.name == name), None)
        number = int(name == "ood")
        return known or EvaluationSet(name, number, self.prompts, temperature=self.temperature)

    def due(self, number: int, steps: int) -> list[tuple[str, int]]:
        """List the sets to evaluate at version `number`, each with its number of prompts."""
        ends = number in (0, steps)

        def is_due(every: int) -> bool:
            return ends or (every > 0 and number % every == 0)

        found = []
        if is_due(self.every):
            found.append(("heldout", self.final_prompts if ends else self.prompts))
        if is_due(self.ood_every):
            few = min(self.prompts, self.ood_prompts)
            found.append(("ood", self.ood_prompts if ends else few))
        return found + [(one.name, one.prompts) for one in self.sets if is_due(one.every)]


class LeasedJob(NamedTuple):
    """A job at a generator.

    lapsed: its lease has expired and the job is queued again, but not granted again yet."""

    job: EvaluationJob
    producer: str
    session: int
    expires: float
    lapsed: bool = False


class EvaluationsState(NamedTuple):
    """The state of `Evaluations` in a snapshot."""

    plan: EvaluationPlan
    queue: list[EvaluationJob]
    out: list[tuple[int, LeasedJob]]
    rounds: list[EvaluationRound]
    results: list[tuple[tuple[str, int], dict[str, float]]]


class Evaluations:
    """The open rounds, the queued and leased jobs, and the results by (split, version number)."""

    def __init__(
        self,
        every: int = 0,
        prompts: int = 0,
        final_prompts: int = 0,
        ood_prompts: int = 0,
        temperature: float = 1.0,
        prompt: Callable[[str, int], Prompt] | None = None,
        ood_every: int = 0,
        sets: Sequence[EvaluationSet] = (),
    ) -> None:
        self.plan = EvaluationPlan(
            every=every,
            prompts=prompts,
            final_prompts=final_prompts,
            ood_prompts=ood_prompts,
            temperature=temperature,
            ood_every=ood_every,
            sets=tuple(sets),
        )
        self.prompt = prompt
        self.queue: deque[EvaluationJob] = deque()
        self.out: dict[int, LeasedJob] = {}  # by attempt
        self.leases = LeaseTable()  # of `out`
        self.rounds: list[EvaluationRound] = []
        self.results: dict[tuple[str, int], dict[str, float]] = {}
        # results not yet written to the metrics
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
        """Take over the state of a snapshot.

        Results in `fresh` are not part of it: they belong to the process that must write them."""
        self.plan = state.plan
        self.queue = deque(state.queue)
        self.out = dict(state.out)
        self.leases = LeaseTable()
        for attempt, leased in self.out.items():
            self.leases.add(leased.producer, leased.session, attempt, leased.job.ticket)
        self.rounds = state.rounds
        self.results = dict(state.results)

    def renew_all_leases(self, expires: float) -> None:
        self.out = {
            attempt: leased._replace(expires=expires) for attempt, leased in self.out.items()
        }

    def restart(self, label: Label, steps: int) -> None:
        """Start over at a learner's hello: drop unfinished rounds and results of later versions.

        Later versions belong to another branch. A round that is due at `label` begins."""
        self.queue.clear()
        self.out.clear()
        self.leases = LeaseTable()
        self.rounds = []
        self.results = {k: v for k, v in self.results.items() if k[1] <= label.number}
        self.fresh = [x for x in self.fresh if x[0] <= label.number]
        self.on_commit(label, steps)

    def forget(self, base: int) -> None:
        """Drop results before version `base`, to which no learner can roll back any more.

        The first and the newest result of each split are kept for the summary."""
        newest = dict(sorted(self.results))  # of each split, the last one counts
        self.results = {
            (split, number): values
            for (split, number), values in self.results.items()
            if number >= base or number in (0, newest[split])
        }

    def on_commit(self, label: Label, steps: int) -> None:
        """Start the rounds that are due at this version."""
        for name, prompts in self.plan.due(label.number, steps):
            self._start(label, self.plan.plan_of(name), prompts)

    def _start(self, label: Label, plan: EvaluationSet, prompts: int) -> None:
        if prompts and self.prompt is not None and (plan.name, label.number) not in self.results:
            self.rounds.append(EvaluationRound(label, plan.name, prompts * len(plan.numbers)))
            self.queue.extend(
                EvaluationJob(label, plan.name, index, sample=sample, number=plan.number)
                for index in range(prompts)
                for sample in plan.numbers
            )

    def labels(self) -> list[Label]:
        return [r.label for r in self.rounds]

    @property
    def pending(self) -> bool:
        return bool(self.rounds)

    def grant(
        self, attempt: int, settings: StoreSettings, *, producer: str, session: int, expires: float
    ) -> Ticket:
        """Grant the next job of `queue` as a ticket."""
        assert self.prompt is not None
        job = self.queue.popleft()
        lapsed = [old for old, leased in self.out.items() if leased.lapsed and leased.job == job]
        for lapsed_attempt in lapsed:
            self._take_back_job(lapsed_attempt)
        self.out[attempt] = LeasedJob(job, producer, session, expires)
        self.leases.add(producer, session, attempt, job.ticket)
        prompt = self.prompt(job.split, job.index)
        limit = settings.sampling_of(prompt.task).max_new_tokens
        return Ticket(
            ticket=job.ticket,
            attempt=attempt,
            kind="eval",
            prompt=prompt,
            samples=[job.sample],
            sampling=self.plan.plan_of(job.split).sampling(job.sample, limit),
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
        """Queue the jobs whose leases have expired; return their number.

        Until a job is granted again, a slow generator may still renew or deliver it."""
        late = [(a, e) for a, e in self.out.items() if e.expires < now and not e.lapsed]
        for attempt, entry in late:
            self.queue.appendleft(entry.job)
            self.out[attempt] = entry._replace(lapsed=True)
        return len(late)

    def end_sessions(self, producer: str, session: int) -> None:
        self._requeue_jobs(
            [
                attempt
                for attempt, leased in self.out.items()
                if leased.producer == producer and leased.session != session
            ]
        )

    def requeue_job(self, attempt: int) -> None:
        """Queue a leased job again."""
        if attempt in self.out:
            self._requeue_jobs([attempt])

    def _requeue_jobs(self, attempts: list[int]) -> None:
        for attempt in attempts:
            entry = self._take_back_job(attempt)
            if not entry.lapsed:
                self.queue.appendleft(entry.job)

    def _take_back_job(self, attempt: int) -> LeasedJob:
        leased = self.out.pop(attempt)
        self.leases.end(leased.producer, leased.session, attempt)
        return leased

    def deliver(self, sample: Trajectory) -> Disposition:
        if sample.attempt not in self.out:
            return "duplicate"
        entry = self._take_back_job(sample.attempt)
        job = entry.job
        if entry.lapsed:
            self.queue.remove(job)
        plan = self.plan.plan_of(job.split)
        current = next(r for r in self.rounds if r.label == job.label and r.split == job.split)
        if sample.failed and job.failures + 1 < MAX_FAILURES:
            job.failures += 1
            self.queue.append(job)
        elif sample.failed:
            current.failed += 1
        else:
            current.add(job, sample, plan)
        if current.is_done:
            self.rounds.remove(current)
            values = current.metrics(plan) | self._by_task(current)
            self.results[current.split, job.label.number] = values
            self.fresh.append((job.label.number, values))
        return "evaluated"

    def _by_task(self, done: EvaluationRound) -> dict[str, float]:
        """Metrics of each task of a mixture in the run's own sets: eval/TASK and eval/TASK-ood."""
        assert self.prompt is not None
        tasks: dict[str, EvaluationRound] = {}
        own = done.split in ("heldout", "ood")
        for index, reward, length in zip(
            done.places if own else (), done.rewards, done.lengths, strict=own
        ):
            if task := self.prompt(done.split, index).task:
                name = f"{task}-ood" if done.split == "ood" else task
                part = tasks.setdefault(name, EvaluationRound(done.label, name, 0))
                part.rewards.append(reward)
                part.lengths.append(length)
                part.places.append(index)
        plan = self.plan.plan_of(done.split)
        return {key: x for part in tasks.values() for key, x in part.metrics(plan).items()}
