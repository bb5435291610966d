"""A ledger of the weights that sampled each sequence, and of how often each was trained.

A sequence gets its id before it is sampled. A datum names the sequences it contains by provenance
spans. Without spans, a run of sampled tokens is found by its fingerprint: the tokens and the bits
of their log-probabilities. The ledger balances: every sampled sequence of a model was trained 0, 1
or more times.

The ledger remembers only the newest sequences. Its totals still count the forgotten ones, but their
tokens have an unknown lag. It keeps the tokens of the newest ones, so that a span over a part of a
sequence can be compared.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from asyncrl.contract.errors import ConfigError
from asyncrl.records import jsonl
from asyncrl.records.jsonl import JsonObject
from asyncrl.tinker.messages import NOT_SAMPLED, SUPERVISED, UNKNOWN, Datum
from asyncrl.tinker.model_records import strip_branch
from asyncrl.tinker.settings import TinkerStaleness
from buffer import training_log

REMEMBERED = 200_000  # newest sequences of a server, about 100 MB
COMPARABLE_TOKENS = 1 << 25  # of the newest sequences, 256 MiB
TRAINED = ("never_trained", "trained_once", "trained_again")
COUNTS = ("sampled", "sampled_tokens", *TRAINED)  # of a model's sequences
COLUMNS = ("id", "model", "version", "length", "fingerprint")  # of sequences.jsonl, always there


@dataclass(slots=True)
class SampledSequence:
    """A sequence that a sampler returned.

    model: the model whose weights sampled it; "": the base model.
    version: optimizer steps of that model behind these weights.
    uncertain: fingerprint and offset of its first run of nonzero log-probabilities, or None if all
        are nonzero: in a datum without advantages, only these positions look sampled.
    trained: number of optimizer steps whose gradient contained its tokens.
    content: its int32 tokens and then their float32 log-probabilities; empty: no longer known.
    """

    id: str
    model: str
    version: int
    length: int
    fingerprint: str
    uncertain: tuple[str, int] | None = None
    trained: int = 0
    content: bytes = b""

    @property
    def state(self) -> str:
        """Which of TRAINED counts the sequence."""
        return TRAINED[min(self.trained, 2)]

    @property
    def fingerprints(self) -> set[str]:
        """The keys by which a datum's runs are looked up."""
        return {self.fingerprint} | ({self.uncertain[0]} if self.uncertain else set())


class ProvenanceSpan(NamedTuple):
    """A run of positions of a datum, named by the client; sampled=False: part of a prompt."""

    sequence: str
    offset: int
    length: int
    sampled: bool


class SampledRun(NamedTuple):
    """Positions [start, stop) of a datum that come from `sequence`; None: unknown."""

    start: int
    stop: int
    sequence: SampledSequence | None


def compute_fingerprint(content: bytes) -> str:
    """Return a digest of int32 tokens with their float32 log-probabilities."""
    return xxhash.xxh3_64_hexdigest(content)


@dataclass
class ModelAncestry:
    """A branch of a model, and the branches it descends from, with their versions at that time.

    load_weights begins a new branch of a model: later versions of the replaced weights are not
    ancestors of the new ones."""

    model: str
    parents: dict[str, int] = field(default_factory=dict)

    def find_version(self, sequence: SampledSequence | None) -> int | None:
        """Return the version of this branch that sampled a sequence; None: none of its versions."""
        if sequence is None:
            return None
        if sequence.model == self.model:
            return sequence.version
        if not sequence.model:
            return 0  # every model starts as the base model
        if sequence.version <= self.parents.get(sequence.model, -1):
            return sequence.version
        return None


class SequenceLedger:
    """The newest sequences of a server, and the totals of all.

    `sequences.jsonl` begins with the totals of the sequences that its other rows lack. Once it is
    rewritten, its rows contain how often each sequence was trained, up to the call of each model in
    `counted`; later calls are in trained.jsonl of the model.

    remembered: number of newest sequences that datums can be matched to.
    totals, forgotten: model -> the COUNTS of all its sequences, and of those not remembered.
    untrained: model -> version -> number of remembered sequences that were not trained yet."""

    def __init__(self, path: Path, remembered: int = REMEMBERED) -> None:
        self.remembered = remembered
        self.sequences = dict[str, SampledSequence]()  # in the order of sampling
        self.by_fingerprint = dict[str, list[SampledSequence]]()
        self.totals = defaultdict[str, Counter[str]](Counter)
        self.forgotten = defaultdict[str, Counter[str]](Counter)
        self.untrained = defaultdict[str, Counter[int]](Counter)
        self.rows = 0  # in the file
        self.row_tokens = 0  # whose content is in the file
        self.comparable: deque[SampledSequence] = deque()  # sequences with content
        self.comparable_tokens = 0
        self.counted = dict[str, int]()  # model -> the last call whose step was counted
        for row in jsonl.read(path):
            if (forgotten := row.get("forgotten")) is not None:
                for model, counts in forgotten.items():
                    counts["never_trained"] = counts.pop("forgotten_untrained")
                    self.totals[model] = Counter(counts)
                    self.forgotten[model] = Counter(counts)
                self.counted = row["counted"]
                continue
            self._add(
                SampledSequence(
                    **{name: row[name] for name in COLUMNS},
                    uncertain=tuple(row["uncertain"]) if row["uncertain"] else None,
                    trained=row.get("trained", 0),
                    content=base64.b64decode(row["content"]),
                )
            )
        self.file = jsonl.JsonlAppender(path)
        self.prefix = secrets.token_hex(4)  # new per server, so that ids are never reused
        self.numbers = itertools.count()
        self.rewriting = asyncio.Lock()

    @property
    def sampled_total(self) -> int:
        """The number of sequences sampled since the server's directory was created."""
        return sum(counts["sampled"] for counts in self.totals.values())

    def mint(self, count: int) -> list[str]:
        """Return new ids for sequences that will be sampled."""
        return [f"seq-{self.prefix}-{next(self.numbers)}" for _ in range(count)]

    def record(self, id: str, model: str, version: int, tokens: bytes, logprobs: bytes) -> None:
        """Record a sampled sequence before its client receives it."""
        uncertain = None
        runs = find_runs(np.frombuffer(logprobs, "<f4") != 0)
        if runs and 4 * (runs[0][1] - runs[0][0]) != len(tokens):
            piece = slice(4 * runs[0][0], 4 * runs[0][1])
            uncertain = compute_fingerprint(tokens[piece] + logprobs[piece]), runs[0][0]
        content = tokens + logprobs
        sequence = SampledSequence(
            *(id, model, version, len(tokens) // 4, compute_fingerprint(content)),
            uncertain,
            content=content,
        )
        self.file.write(_build_row(sequence, 0))
        self._add(sequence)
        while len(self.sequences) > self.remembered:
            self._forget(next(iter(self.sequences.values())))

    def _forget(self, sequence: SampledSequence) -> None:
        """Drop the oldest sequence, which the totals still count."""
        if sequence.content:
            self._drop_oldest_content()
        del self.sequences[sequence.id]
        self.forgotten[sequence.model] += _count(sequence)
        for key in sequence.fingerprints:
            self.by_fingerprint[key].remove(sequence)
            if not self.by_fingerprint[key]:
                del self.by_fingerprint[key]
        if not sequence.trained:
            self.untrained[sequence.model] -= Counter([sequence.version])

    def _drop_oldest_content(self) -> None:
        sequence = self.comparable.popleft()
        self.comparable_tokens -= sequence.length
        sequence.content = b""

    @property
    def is_long(self) -> bool:
        """Whether the file has so many rows or tokens that it should be rewritten."""
        return self.rows > 2 * self.remembered or self.row_tokens > 2 * COMPARABLE_TOKENS

    async def rewrite(self) -> None:
        """Replace the rows of forgotten sequences by totals, and store the training counts.

        A thread writes the new file, and rows that come meanwhile are copied from the old one."""
        async with self.rewriting:
            head: JsonObject = {"forgotten": {}, "counted": {**self.counted}}
            for model, forgotten in self.forgotten.items():
                counts = head["forgotten"][model] = {name: forgotten[name] for name in COUNTS}
                counts["forgotten_untrained"] = counts.pop("never_trained")
            rows = [(sequence, sequence.trained) for sequence in self.sequences.values()]
            size = self.file.path.stat().st_size
            part = jsonl.JsonlAppender(self.file.path.with_suffix(".part"))
            part.clear()

            def write() -> None:
                part.write(head)
                for row in rows:
                    part.write(_build_row(*row))

            await asyncio.to_thread(write)
            with self.file.path.open("rb") as file:
                file.seek(size)
                part.append(file.read())
            part.path = part.path.rename(self.file.path)
            self.file.close()
            self.file = part
            self.rows, self.row_tokens = len(self.sequences), self.comparable_tokens

    def _add(self, sequence: SampledSequence) -> None:
        self.rows += 1
        if sequence.content:
            self.row_tokens += sequence.length
            self.comparable_tokens += sequence.length
            self.comparable.append(sequence)
        while self.comparable_tokens > COMPARABLE_TOKENS:
            self._drop_oldest_content()
        self.sequences[sequence.id] = sequence
        for key in sequence.fingerprints:
            self.by_fingerprint.setdefault(key, []).append(sequence)
        self.totals[sequence.model] += _count(sequence)
        if not sequence.trained:
            self.untrained[sequence.model][sequence.version] += 1

    # ---- datums ----------------------------------------------------------------------------------

    def resolve(
        self,
        datum: Datum,
        spans: Sequence[ProvenanceSpan],
        matched: Counter[str],
        ancestry: ModelAncestry,
    ) -> list[SampledRun]:
        """Return the sampled runs of a datum.

        Every position that a policy loss trains is part of a run.

        spans: of the datum, in the order of its positions; none: runs are found by fingerprint.
        matched: how often earlier datums of the same optimizer step were matched to each sequence.
            Among equal sequences, each is matched once before any is matched again.
        ancestry: of the model that trains the datum. Models of one server sample equal sequences
            while their adapters are new; the model's own sequences are matched first.

        Raises ConfigError, with the position, for spans that do not fit."""
        if spans:
            return self._resolve_spans(datum, spans)
        if "logprobs" not in datum.fields:
            return []
        runs: list[SampledRun] = []
        covered = 0  # positions that are part of a run
        names = ("mask",) if "mask" in datum.fields else ("logprobs", "advantages")
        columns = [datum.fields[name] != 0 for name in names if name in datum.fields]
        for start, stop in find_runs(np.any(columns, axis=0)):
            if start < covered:
                continue
            key = compute_fingerprint(datum.encode(start, stop))
            fits = []
            for sequence in [*self.by_fingerprint.get(key, ())]:  # a thread may run this
                first = start
                if key != sequence.fingerprint and sequence.uncertain:
                    first -= sequence.uncertain[1]
                content = datum.encode(first, first + sequence.length)
                is_equal = compute_fingerprint(content) == sequence.fingerprint
                # a client can make a sequence of the same fingerprint
                if first >= 0 and is_equal and sequence.content in (b"", content):
                    fits.append((first, sequence))
            best = min(
                fits,
                key=lambda fit: (
                    ancestry.find_version(fit[1]) is None,
                    fit[1].model != ancestry.model,
                    matched[fit[1].id],
                    fit[1].trained,
                    fit[1].version,
                ),
                default=None,
            )
            if best is None:
                runs.append(SampledRun(start, stop, None))
                continue
            first, sequence = best
            matched[sequence.id] += 1
            covered = first + sequence.length
            runs.append(SampledRun(first, covered, sequence))
        return runs

    def _resolve_spans(self, datum: Datum, spans: Sequence[ProvenanceSpan]) -> list[SampledRun]:
        """Return the runs that the client named."""
        runs = []
        start, length = 0, len(datum.tokens)
        for span in spans:
            stop = start + span.length
            if min(span.offset, span.length) < 0 or stop > length:
                raise ConfigError(
                    f"position {start}: a provenance span has offset {span.offset} and length "
                    f"{span.length}; spans cover the {length} positions of the datum in order"
                )
            if span.sampled and span.length:
                sequence = self.sequences.get(span.sequence)
                is_known = sequence is not None and _check_span(datum, span, start, sequence)
                runs.append(SampledRun(start, stop, sequence if is_known else None))
            start = stop
        if start != length:
            raise ConfigError(f"provenance spans cover {start} positions of a datum of {length}")
        if "advantages" in datum.fields:
            trained = datum.fields["advantages"] * datum.fields.get("mask", 1) != 0
            for run in runs:
                trained[run.start : run.stop] = False
            if trained.any():
                raise ConfigError(
                    f"position {trained.argmax()}: a token that a provenance span calls part "
                    "of a prompt has an advantage; only sampled tokens may have one"
                )
        return runs

    def sum_totals(self, model: str) -> dict[str, int]:
        """Return the COUNTS of a model with all its branches."""
        branches = [x for branch, x in self.totals.items() if strip_branch(branch) == model]
        return {name: sum(counts[name] for counts in branches) for name in COUNTS}

    def mark_trained(self, ids: Iterable[str], model: str, call: int) -> None:
        """Count that the optimizer step of a model's call trained these sequences."""
        self.counted[model] = call
        for sequence in filter(None, map(self.sequences.get, ids)):
            counts = self.totals[sequence.model]
            counts[sequence.state] -= 1
            if not sequence.trained:
                self.untrained[sequence.model] -= Counter([sequence.version])
            sequence.trained += 1
            counts[sequence.state] += 1

    def close(self) -> None:
        self.file.close()


def _check_span(datum: Datum, span: ProvenanceSpan, start: int, sequence: SampledSequence) -> bool:
    """Compare a span at position `start` of a datum with the sequence that it names.

    Returns False if too little is remembered of the sequence.  Raises ConfigError for a difference.
    """
    named = f"a provenance span names tokens {span.offset} to {span.offset + span.length} of "
    if span.offset + span.length > sequence.length:
        raise ConfigError(
            f"position {start}: {named}sequence {sequence.id}, which has {sequence.length}"
        )
    logprobs, content = datum.fields.get("logprobs"), sequence.content
    stop = start + span.length
    if not content:
        if logprobs is None or span.length != sequence.length:
            return False
        return compute_fingerprint(datum.encode(start, stop)) == sequence.fingerprint
    for first, column, name in (
        (0, datum.targets, "token"),
        (sequence.length, logprobs, "log-probability"),
    ):
        if column is None:
            continue  # cross_entropy has no log-probabilities
        expected = np.frombuffer(content, column.dtype, span.length, 4 * (first + span.offset))
        values = column[start:stop]
        if len(different := np.flatnonzero(values != expected)):
            at = int(different[0])
            raise ConfigError(
                f"position {start + at}: {named}sequence {sequence.id}, whose {name} "
                f"{span.offset + at} is {expected[at]}, but the datum has {values[at]}"
            )
    return True


def _build_row(sequence: SampledSequence, trained: int) -> JsonObject:
    """Build the row of a sequence in sequences.jsonl."""
    return {
        **{name: getattr(sequence, name) for name in COLUMNS},
        "uncertain": sequence.uncertain,
        "content": base64.b64encode(sequence.content).decode(),
        **({"trained": trained} if trained else {}),
    }


def find_runs(inside: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs [start, stop) of true values in bool [n].

    >>> find_runs(np.array([False, True, True, False, True]))
    [(1, 3), (4, 5)]
    """
    edges = np.flatnonzero(np.diff(inside, prepend=False, append=False))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _count(sequence: SampledSequence) -> Counter[str]:
    """Return the COUNTS of one sequence."""
    return Counter({"sampled": 1, "sampled_tokens": sequence.length, sequence.state: 1})


def measure_lags(
    datum: Datum, runs: Sequence[SampledRun], ancestry: ModelAncestry, version: int
) -> np.ndarray:
    """Return the lag of every position of a datum, int32 [n].

    Args:
        runs: the sampled runs of the datum.
        ancestry: of the model that trains it.
        version: current version of that model.

    A lag is in versions, or UNKNOWN, NOT_SAMPLED or SUPERVISED."""
    lags = np.full(len(datum.tokens), NOT_SAMPLED, np.int32)
    for start, stop, sequence in runs:
        sampled_at = ancestry.find_version(sequence)
        lags[start:stop] = UNKNOWN if sampled_at is None else version - sampled_at
    if "weights" in datum.fields and "advantages" not in datum.fields:
        is_trained = datum.fields["weights"] * datum.fields.get("mask", 1) != 0
        lags[is_trained & (lags == NOT_SAMPLED)] = SUPERVISED
    return lags


def check_lags(
    lags: np.ndarray,
    runs: Sequence[SampledRun],
    ancestry: ModelAncestry,
    version: int,
    staleness: TinkerStaleness,
) -> None:
    """Raise ConfigError for tokens that may not be trained at these lags.

    Args:
        lags: int32 [n], as `measure_lags` returns them.
        runs: the sampled runs of the datum.
        ancestry, version: of the model that trains it.
        staleness: limit, and treatment of tokens above it and of those without a lag."""
    for start, stop, sequence in runs:
        lag = lags[start]
        if lag > staleness.max_lag and staleness.on_exceed != "mask" and sequence is not None:
            raise ConfigError(
                f"sequence {sequence.id} was sampled at version {version - lag} of "
                f"{ancestry.model}, which is at version {version}: a lag of {lag}, and "
                f"staleness.max_lag = {staleness.max_lag:g}; sample from newer weights"
            )
        if lag != UNKNOWN or staleness.unknown != "refuse":
            continue
        if sequence is None:
            raise ConfigError(
                f"tokens {start} to {stop} are not a sequence of this server, or not among its "
                f"newest {REMEMBERED}, so their lag is unknown, and staleness.unknown = refuse; "
                "pass tokens and log-probabilities on unchanged, or name the sequence by "
                "provenance spans, which show the position that differs"
            )
        raise ConfigError(
            f"sequence {sequence.id} was sampled by {sequence.model or 'the base model'}, which is "
            f"not an earlier version of {ancestry.model}: its lag is unknown, and "
            "staleness.unknown = refuse"
        )
    if staleness.supervised == "refuse" and (lags == SUPERVISED).any():
        raise ConfigError(
            f"cross_entropy trains position {(lags == SUPERVISED).argmax()}, which no provenance "
            "span calls sampled, and staleness.supervised = refuse"
        )


def measure_lag_metrics(lags: Counter[int]) -> dict[str, float]:
    """Compute the lag metrics of an optimizer step from {lag: trained tokens}."""
    known = {lag: tokens for lag, tokens in lags.items() if lag >= 0}
    metrics: dict[str, float] = {}
    if total := sum(known.values()) + lags[UNKNOWN]:
        metrics["lag/unknown_share"] = lags[UNKNOWN] / total
    if known:
        metrics |= {
            "lag/mean": training_log.mean(known),
            "lag/max": float(max(known)),
            "lag/p95": float(training_log.quantile(known, 0.95)),
        }
    return metrics


def build_trained_row(
    version: int, lags: Counter[int], sequences: Sequence[str], call: int
) -> JsonObject:
    """Build the row of an optimizer step in trained.jsonl; `buffer.training_log` reads it."""
    return {
        "batch": version,
        "call": call,
        "samples": len(set(sequences)),
        "ids": xxhash.xxh3_64_hexdigest(";".join(sequences).encode()),
        "lags": {str(lag): tokens for lag, tokens in sorted(lags.items()) if lag >= 0},
        "unknown": lags[UNKNOWN],
        "supervised": lags[SUPERVISED],
        "sequences": sorted(set(sequences)),
    }
