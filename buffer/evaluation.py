"""Evaluation: held-out prompts as separate tickets, all at one exact version.

They are outside the staleness limit and the training ledger. The run's own sets are `heldout` and
`ood`, with one sample a prompt. Further sets (`evaluation.sets`) have several, and a greedy one."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from asyncrl.contract.messages import (
    EVAL_BASE,
    Disposition,
    Numbers,
    Prompt,
    SamplingSettings,
    Ticket,
    Trajectory,
)
from asyncrl.contract.versions import Label
from asyncrl.records.pass_at_k import compute_set_metrics
from buffer.groups import LeaseTable, StoreSettings

SET_TICKETS = 1 << 32  # ticket numbers of each set
MAX_FAILURES = 3


class EvaluationSet(NamedTuple):
    """A named set of evaluation prompts, from an entry of `evaluation.sets`.

    number: selects the block of ticket numbers; 0 is heldout, 1 is ood.
    prompts: number of prompts.
    every: versions between two evaluations; 0: only the first and the last version.
    samples: sampled completions of each prompt.
    greedy: whether each prompt also gets one greedy completion.
    passing: a sample passes if its reward is at least this.
    counts: the values of k of pass@k.
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

    @property
    def numbers(self) -> range:
        """The sample numbers of a prompt; the last one is the greedy completion, if any."""
        return range(self.samples + self.greedy)


@dataclass
class EvaluationJob:
    """One sample of a prompt at one version."""

    label: Label
    split: str
    index: int  # of the prompt in its set
    failures: int = 0
    sample: int = 0
    number: int = 0  # of the set; that of ood follows from its name

    @property
    def ticket(self) -> int:
        """The ticket number of the prompt."""
        number = 1 if self.split == "ood" else self.number
        return EVAL_BASE + number * SET_TICKETS + self.index


@dataclass
class EvaluationRound:
    """One version's evaluation of one set.

    size: number of samples.
    rewards, lengths: of the sampled completions; lengths in tokens.
    failed: number of failed samples.
    places: the prompt index of each entry of `rewards` and `lengths`.
    greedy: rewards of the greedy completions.
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
        """Whether every sample was delivered or has failed."""
        return len(self.rewards) + len(self.greedy) + self.failed >= self.size

    def add(self, job: EvaluationJob, sample: Trajectory, plan: EvaluationSet) -> None:
        """Add the reward and the length of a job's sample."""
        if job.sample == plan.samples:
            self.greedy.append(sample.reward)
            return
        self.rewards.append(sample.reward)
        self.lengths.append(sample.length)
        self.places.append(job.index)

    def compute_metrics(self, plan: EvaluationSet, prompt: Callable[[str, int], Prompt]) -> Numbers:
        """Compute the metrics of the set, by name.

        Heldout and ood also have those of each task of a mixture: eval/TASK and eval/TASK-ood."""
        positions = {self.split: [*range(len(self.places))]}
        for position, index in enumerate(self.places if self.split in ("heldout", "ood") else ()):
            if task := prompt(self.split, index).task:
                name = f"{task}-ood" if self.split == "ood" else task
                positions.setdefault(name, []).append(position)
        metrics: Numbers = {}
        for name, chosen in positions.items():
            by_prompt: dict[int, list[float]] = {}
            for position in chosen:
                by_prompt.setdefault(self.places[position], []).append(self.rewards[position])
            greedy = self.greedy if name == self.split else []
            lengths = [self.lengths[position] for position in chosen]
            metrics |= compute_set_metrics(
                name, by_prompt, greedy, lengths, plan.passing, plan.counts
            )
        return metrics


class EvaluationPlan(NamedTuple):
    """The evaluations of a run: their interval in versions and their numbers of prompts."""

    every: int = 0
    prompts: int = 0
    final_prompts: int = 0
    ood_prompts: int = 0
    temperature: float = 1.0
    ood_every: int = 0
    sets: tuple[EvaluationSet, ...] = ()

    def find_set(self, name: str) -> EvaluationSet:
        """Find a set by its name; heldout and ood have one sample a prompt."""
        configured = next((plan for plan in self.sets if plan.name == name), None)
        number = int(name == "ood")
        return configured or EvaluationSet(name, number, self.prompts, temperature=self.temperature)

    def list_due(self, number: int, steps: int) -> list[tuple[str, int]]:
        """List the sets to evaluate at version `number`, as (name, number of prompts).

        steps: the number of the run's last version."""
        is_first_or_last = number in (0, steps)

        def is_due(every: int) -> bool:
            return is_first_or_last or (every > 0 and number % every == 0)

        due = []
        if is_due(self.every):
            due.append(("heldout", self.final_prompts if is_first_or_last else self.prompts))
        if is_due(self.ood_every):
            fewer = min(self.prompts, self.ood_prompts)
            due.append(("ood", self.ood_prompts if is_first_or_last else fewer))
        return due + [(plan.name, plan.prompts) for plan in self.sets if is_due(plan.every)]


class LeasedJob(msgspec.Struct, array_like=True):
    """A job that a generator has leased.

    expires: time at which the lease ends, in seconds.
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
    leased_jobs: list[tuple[int, LeasedJob]]
    rounds: list[EvaluationRound]
    results: list[tuple[tuple[str, int], Numbers]]


@dataclass(eq=False)
class Evaluations:
    """The open rounds, the queued and leased jobs, and the results by (split, version number).

    prompt: makes the prompt of (split, index); None: the run evaluates nothing."""

    plan: EvaluationPlan = field(default_factory=EvaluationPlan)
    prompt: Callable[[str, int], Prompt] | None = None
    queue: deque[EvaluationJob] = field(default_factory=deque)
    leased_jobs: dict[int, LeasedJob] = field(default_factory=dict)  # by attempt
    # of `leased_jobs`, and of the store's groups
    leases: LeaseTable = field(default_factory=LeaseTable)
    rounds: list[EvaluationRound] = field(default_factory=list)
    results: dict[tuple[str, int], Numbers] = field(default_factory=dict)
    # gets the version number and the metrics of each result
    on_result: Callable[[int, Numbers], object] = lambda number, values: None

    def snapshot(self) -> EvaluationsState:
        """Return the state for a snapshot of the store."""
        return EvaluationsState(
            plan=self.plan,
            queue=list(self.queue),
            leased_jobs=list(self.leased_jobs.items()),
            rounds=self.rounds,
            results=list(self.results.items()),
        )

    def restore(self, state: EvaluationsState) -> None:
        """Take over the state of a snapshot."""
        self.plan = state.plan
        self.queue = deque(state.queue)
        self.leased_jobs = dict(state.leased_jobs)
        self.leases = LeaseTable()
        for attempt, leased in self.leased_jobs.items():
            self.leases.add(leased.producer, leased.session, attempt, leased.job.ticket)
        self.rounds = state.rounds
        self.results = dict(state.results)

    def renew_all_leases(self, expires: float) -> None:
        """Let every lease expire at `expires`."""
        for leased in self.leased_jobs.values():
            leased.expires = expires

    def restart(self, label: Label, steps: int) -> None:
        """Start over at a learner's hello: drop unfinished rounds and results of later versions.

        Later versions belong to another branch. A round that is due at `label` begins."""
        self.queue.clear()
        self.leased_jobs.clear()
        self.leases.attempts.clear()  # the store's have ended
        self.rounds = []
        self.results = {k: v for k, v in self.results.items() if k[1] <= label.number}
        self.on_commit(label, steps)

    def forget(self, base: int) -> None:
        """Drop results before version `base`, to which no learner can roll back any more.

        The first and the newest result of each split are kept for the summary."""
        newest = dict(sorted(self.results))  # split -> its highest version number
        self.results = {
            (split, number): values
            for (split, number), values in self.results.items()
            if number >= base or number in (0, newest[split])
        }

    def on_commit(self, label: Label, steps: int) -> None:
        """Start the rounds that are due at this version."""
        for name, prompts in self.plan.list_due(label.number, steps):
            if prompts and self.prompt is not None and (name, label.number) not in self.results:
                self.start_round(label, name, prompts)

    def start_round(self, label: Label, name: str, prompts: int) -> None:
        """Queue the jobs of a set's first `prompts` prompts at a version."""
        plan = self.plan.find_set(name)
        self.rounds.append(EvaluationRound(label, name, prompts * len(plan.numbers)))
        self.queue.extend(
            EvaluationJob(label, name, index, sample=sample, number=plan.number)
            for index in range(prompts)
            for sample in plan.numbers
        )

    def grant(
        self, attempt: int, settings: StoreSettings, *, producer: str, session: int, expires: float
    ) -> Ticket:
        """Grant the next job of `queue` as a ticket.

        expires: time at which its lease ends, in seconds."""
        assert self.prompt is not None
        job = self.queue.popleft()
        lapsed_attempts = [
            earlier
            for earlier, leased in self.leased_jobs.items()
            if leased.lapsed and leased.job == job
        ]
        for lapsed_attempt in lapsed_attempts:
            self._take_back_job(lapsed_attempt)
        self.leased_jobs[attempt] = LeasedJob(job, producer, session, expires)
        self.leases.add(producer, session, attempt, job.ticket)
        prompt = self.prompt(job.split, job.index)
        limit = settings.get_sampling(prompt.task).max_new_tokens
        plan = self.plan.find_set(job.split)
        greedy = plan.temperature == 0 or job.sample == plan.samples
        temperature, top_k = (1.0, 1) if greedy else (plan.temperature, 0)
        return Ticket(
            ticket=job.ticket,
            attempt=attempt,
            kind="eval",
            prompt=prompt,
            samples=[job.sample],
            sampling=SamplingSettings(temperature, 1.0, top_k, limit),
            min_version=Label(job.label.epoch, 0),
            exact_version=job.label,
            seed=settings.seed,
        )

    def renew(self, attempt: int, expires: float) -> None:
        """Let the lease of an attempt end at `expires`; ignore an unknown attempt."""
        if (entry := self.leased_jobs.get(attempt)) is None:
            return
        if entry.lapsed:
            self.queue.remove(entry.job)
        entry.expires, entry.lapsed = expires, False

    def expire(self, now: float) -> int:
        """Queue the jobs whose leases have expired; return their number.

        Until a job is granted again, a slow generator may still renew or deliver it."""
        expired = [x for x in self.leased_jobs.values() if x.expires < now and not x.lapsed]
        for leased in expired:
            self.queue.appendleft(leased.job)
            leased.lapsed = True
        return len(expired)

    def end_sessions(self, producer: str, session: int) -> None:
        """Queue the jobs of a producer's other sessions again."""
        self.requeue_jobs(
            [
                attempt
                for attempt, leased in self.leased_jobs.items()
                if leased.producer == producer and leased.session != session
            ]
        )

    def requeue_jobs(self, attempts: list[int]) -> None:
        """Queue leased jobs again; ignore unknown attempts."""
        for attempt in filter(self.leased_jobs.__contains__, attempts):
            entry = self._take_back_job(attempt)
            if not entry.lapsed:
                self.queue.appendleft(entry.job)

    def _take_back_job(self, attempt: int) -> LeasedJob:
        leased = self.leased_jobs.pop(attempt)
        self.leases.end(leased.producer, leased.session, attempt)
        return leased

    def deliver(self, sample: Trajectory) -> Disposition:
        """Take the sample of a leased job; return "evaluated", or "duplicate" if none is leased.

        A failed job is queued again until its third failure."""
        if sample.attempt not in self.leased_jobs:
            return "duplicate"
        entry = self._take_back_job(sample.attempt)
        job = entry.job
        if entry.lapsed:
            self.queue.remove(job)
        plan = self.plan.find_set(job.split)
        current_round = next(
            open_round
            for open_round in self.rounds
            if open_round.label == job.label and open_round.split == job.split
        )
        if sample.failed and job.failures + 1 < MAX_FAILURES:
            job.failures += 1
            self.queue.append(job)
        elif sample.failed:
            current_round.failed += 1
        else:
            current_round.add(job, sample, plan)
        if current_round.is_done:
            self.rounds.remove(current_round)
            assert self.prompt is not None
            values = current_round.compute_metrics(plan, self.prompt)
            self.results[current_round.split, job.label.number] = values
            self.on_result(job.label.number, values)
        return "evaluated"
