"""Groups in the store: samples, lease, attempts, and their lines in the ledger."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from asyncrl.config.tree import Config
from asyncrl.contract.messages import (
    Disposition,
    IntPair,
    LagRun,
    LedgerLine,
    SamplingSettings,
    Trajectory,
)
from asyncrl.contract.versions import Label
from buffer.ledger import Ledger, LedgerSums

MAX_DROPS = 3  # the third drop, or failure, of a group abandons it


@dataclass
class StoreSettings:
    """The settings that the store needs from the config.

    batch, group: groups of a batch, samples of a group. steps: batches of the run."""

    batch: int
    group: int
    steps: int
    sampling: SamplingSettings
    seed: int = 0
    on_exceed: str = "pace"
    order: str = "auto"
    inject: int | list[float] | None = None
    filter_no_spread: bool = False
    half_life: float = 2.0  # versions past the limit after which a token's weight is one half
    lease_s: float = 20.0  # seconds
    error_budget: float = 1.0
    machinery_budget: float = 1.0
    byte_limit: int = 1 << 30
    context: int = 0  # most tokens of prompt and completion; 0: unknown
    ess_floor: float = 0.0  # of an adaptive limit; 0: the limit is constant
    wait: float = 0.0  # the learner's share of waiting that the window aims at; 0: no window
    session_tokens: int = 0  # most sampled tokens of a session; 0: samples are single completions
    evaluators: list[str] = field(default_factory=list)  # generators reserved for evaluations
    token_limits: dict[str, int] = field(default_factory=dict)  # of the tasks of a mixture

    def get_sampling(self, task: str) -> SamplingSettings:
        """Return the sampling of a task's training prompts.

        A task of a mixture may have its own limit of tokens."""
        limit = self.token_limits.get(task)
        return self.sampling if limit is None else replace(self.sampling, max_new_tokens=limit)

    @property
    def batch_samples(self) -> int:
        """The samples of a batch."""
        return self.batch * self.group

    @property
    def most_tokens(self) -> int:
        """The most tokens that one attempt of a sample may have."""
        return self.session_tokens or self.sampling.max_new_tokens


def make_store_settings(config: Config) -> StoreSettings:
    """Make the store's settings from the config."""
    generator = config.generator
    staleness = config.staleness
    longest = max(agent.max_tokens for agent in config.agents.values())
    return StoreSettings(
        batch=config.learner.groups,
        group=config.learner.group_size,
        steps=config.learner.steps,
        sampling=SamplingSettings(
            generator.temperature,
            generator.top_p,
            generator.top_k,
            generator.max_new_tokens,
            config.advantage.name == "remax",
        ),
        seed=config.seed,
        on_exceed=staleness.on_exceed,
        order=staleness.order,
        inject=staleness.inject,
        half_life=staleness.half_life,
        ess_floor=staleness.ess_floor,
        wait=staleness.wait_target,
        filter_no_spread=config.advantage.no_spread == "filter",
        lease_s=config.wires.lease_s,
        error_budget=config.reward.error_budget,
        machinery_budget=config.reward.machinery_budget,
        context=generator.context,
        session_tokens=longest if config.uses_sessions else 0,
        token_limits={
            part.title: part.max_new_tokens for part in config.task.mixture if part.max_new_tokens
        },
        evaluators=[
            f"generator-{index}"
            for index in range(config.generators - config.evaluation.generators, config.generators)
        ],
    )


@dataclass
class Lease:
    """The lease of a group by one attempt."""

    attempt: int
    producer: str
    session: int
    expires: float  # seconds, on the clock of this process
    todo: set[int]  # samples that were not delivered yet
    granted: Label  # the policy at the grant


@dataclass
class LeaseTable:
    """Active leases: the attempts that each session holds.

    >>> leases = LeaseTable()
    >>> leases.add("g", 1, 5, ticket=0), leases.add("g", 1, 6, ticket=1)
    (None, None)
    >>> leases.find_unnamed_attempts("g", 1, taken=5, named=set())
    [(0, 5)]
    >>> leases.find_unnamed_attempts("g", 1, taken=6, named={5})
    [(1, 6)]
    """

    # (producer, session) -> {attempt: ticket}
    attempts: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)

    def add(self, producer: str, session: int, attempt: int, ticket: int) -> None:
        """Add an active lease."""
        self.attempts.setdefault((producer, session), {})[attempt] = ticket

    def end(self, producer: str, session: int, attempt: int) -> None:
        """Remove the lease of an attempt. Raises KeyError if it is not active."""
        tickets = self.attempts[producer, session]
        del tickets[attempt]
        if not tickets:
            del self.attempts[producer, session]

    def count(self) -> int:
        """Count the active leases."""
        return sum(map(len, self.attempts.values()))

    def find_unnamed_attempts(
        self, producer: str, session: int, taken: int, named: Set[int]
    ) -> list[IntPair]:
        """Find the (ticket, attempt) with attempt <= `taken` that are not in `named`."""
        tickets = self.attempts.get((producer, session), {})
        return [
            (ticket, attempt)
            for attempt, ticket in tickets.items()
            if attempt <= taken and attempt not in named
        ]


class Grant(NamedTuple):
    """The versions that may sample an attempt: `label` or newer of its epoch, or exactly `label`.

    limit: the greatest lag at which it may train under an adaptive limit."""

    label: Label
    exact: bool
    limit: float = math.inf

    def permits(self, label: Label) -> bool:
        """Whether this version may sample under the grant."""
        if self.exact:
            return label == self.label
        return label.epoch == self.label.epoch and label.number >= self.label.number


@dataclass
class StoredSample:
    """An accepted sample of a group, and its tokens that were not trained with full weight."""

    trajectory: Trajectory
    in_flight: int  # lag at delivery
    masked: int = 0  # tokens past the limit (mask)
    faded: float = 0.0  # tokens times (1 - weight) past the limit (downweight)
    skipped: int = 0  # tokens: no optimizer step was made on the sample (early stopping)
    rejected: int = 0  # tokens that the correction rejected or vetoed in every step
    # (start, end, lag) from handing out its batch until the commit
    runs: list[LagRun] | None = None

    def __post_init__(self) -> None:
        """Cache what every fold and every batch needs; not fields, so that snapshots omit them."""
        self.length = self.trajectory.length
        self.size = count_bytes(self.trajectory)


@dataclass
class Group:
    """A group of the store, with its lease, its attempts and the ledger lines of its samples."""

    ticket: int
    samples: list[StoredSample | None]
    lease: Lease | None = None
    drops: int = 0
    failures: int = 0
    completed: int = 0  # order of completion
    # samples that are not stored: (ledger line, tokens, reward)
    other: list[tuple[LedgerLine, int, float]] = field(default_factory=list)
    # attempt -> [tokens reported, delivered, ended]
    attempts: dict[int, list[int]] = field(default_factory=dict)
    # attempt -> the versions that may sample it
    grants: dict[int, Grant] = field(default_factory=dict)
    # (sample, attempt) -> disposition
    finals: dict[IntPair, Disposition] = field(default_factory=dict)
    stands: int = -1  # the ticket whose position it has (lag injection), -1: its own
    task: str = ""  # of a mixture
    index: int = -1  # of its prompt in the task
    images: dict[str, bytes] = field(default_factory=dict)  # digest -> blob, of all its samples

    def __post_init__(self) -> None:
        # the sums of a complete group's samples with all their tokens, cached because every batch
        # folds them; not a field: a snapshot has the samples
        self.complete_sums: LedgerSums | None = None

    def set_sample(self, index: int, stored: StoredSample | None) -> None:
        """Store a sample, or remove it (None)."""
        self.samples[index] = stored
        self.complete_sums = None

    def record_loss(self, stored: StoredSample, line: LedgerLine) -> None:
        """Record the ledger line of a sample that will not train."""
        sample = stored.trajectory
        self.other.append((line, stored.length, sample.reward))
        self.finals[sample.sample, sample.attempt] = line

    def empty(self) -> None:
        """Remove all samples."""
        self.samples = [None] * len(self.samples)
        self.complete_sums = None

    @property
    def position(self) -> int:
        """Position in ticket order."""
        return self.ticket if self.stands < 0 else self.stands

    def list_missing(self) -> list[int]:
        """List the numbers of the samples that are not stored."""
        return [number for number, stored in enumerate(self.samples) if stored is None]

    @property
    def is_complete(self) -> bool:
        """Whether all samples are stored."""
        for stored in self.samples:  # noqa: SIM110 - a third of what `all` over a generator takes
            if stored is None:
                return False
        return True

    def list_stored_samples(self) -> list[StoredSample]:
        """List the stored samples by their numbers."""
        return [stored for stored in self.samples if stored is not None]

    def fold(self, ledger: Ledger, *, trained: bool, rest: LedgerLine = "left_over") -> None:
        """Add this group's lines to `ledger`.

        Accepted samples count as trained, or under `rest`. Undelivered tokens of ended attempts are
        lost; those of other attempts count under `rest`."""
        for ledger_line, tokens, reward in self.other:
            ledger.lines[ledger_line].add(tokens, 1, tokens, reward)
        line = ledger.lines["trained" if trained else rest]
        # a trained sample may have tokens that were not trained with full weight
        if self.is_complete and not (
            trained
            and any(
                stored.skipped or stored.rejected or stored.masked or stored.faded
                for stored in self.list_stored_samples()
            )
        ):
            if self.complete_sums is None:
                self.complete_sums = LedgerSums()
                for stored in self.list_stored_samples():
                    length = stored.length
                    self.complete_sums.add(length, 1, length, stored.trajectory.reward)
            line.merge(self.complete_sums)
        else:
            for stored in self.list_stored_samples():
                length, reward = stored.length, stored.trajectory.reward
                # some tokens of a trained sample may not have been trained with full weight:
                # those that were skipped, rejected or masked have lines of their own
                if not trained:  # all its tokens are in one line
                    line.add(length, 1, length, reward)
                    continue
                if stored.skipped:
                    ledger.lines["skipped"].add(stored.skipped, 1, length, reward)
                else:
                    tokens = length - stored.masked - stored.rejected
                    line.add(tokens, 1, length, reward, stored.faded)
                if stored.rejected:
                    ledger.lines["rejected"].add(stored.rejected, 1, length, reward)
                if stored.masked:
                    ledger.lines["masked_stale"].add(stored.masked, 1, length, reward)
        for reported, delivered, ended in self.attempts.values():
            if reported > delivered:
                ledger.lines["lost_with_process" if ended else rest].add(reported - delivered)

    def add_images(self, blobs: Mapping[str, bytes]) -> int:
        """Add the images that the group lacks; return their number of bytes."""
        new = {name: blob for name, blob in blobs.items() if name not in self.images}
        self.images |= new
        return sum(map(len, new.values()))

    def count_sample_bytes(self) -> int:
        """Count the bytes of the stored samples."""
        return sum(stored.size for stored in self.list_stored_samples())


def count_bytes(sample: Trajectory) -> int:
    """Count the bytes of a stored sample for the byte limit: ids, logprobs, mask and prompt."""
    sequence_bytes = 11 * len(sample.tokens) // 4 + len(sample.prompt_tokens)
    return sequence_bytes + sum(
        11 * len(row.tokens) // 4 + len(row.prompt_tokens) for row in sample.rows
    )
