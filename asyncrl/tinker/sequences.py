"""Which weights sampled every sequence, and how often each was trained.

A sequence gets its id before it is sampled. A datum names the sequences it contains by provenance
spans. Without spans, a run of sampled tokens is found by its fingerprint: the tokens and the bits
of their log-probabilities. The ledger closes: every sampled sequence of a model was trained 0, 1 or
more times.

The ledger remembers the newest sequences only. Those that it forgot stay in its totals, and their
tokens are of unknown lag.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write, jsonl
from asyncrl.tinker.messages import NOT_SAMPLED, UNKNOWN, Datum
from asyncrl.tinker.model_records import model_of

REMEMBERED = 200_000  # newest sequences of a server, about 100 MB


@dataclass(slots=True)
class SampledSequence:
    """A sequence that a sampler returned.

    model: whose weights sampled it; "": the base model.
    version: optimizer steps of that model behind these weights.
    uncertain: fingerprint and offset of its first run of log-probabilities that are not 0, where it
        has some that are: a datum without advantages does not show the others.
    trained: optimizer steps whose gradient contained tokens of it.
    """

    id: str
    model: str
    version: int
    length: int
    fingerprint: str
    uncertain: tuple[str, int] | None = None
    trained: int = 0

    @property
    def fingerprints(self) -> set[str]:
        """The keys by which a datum's runs are looked up."""
        return {self.fingerprint} | ({self.uncertain[0]} if self.uncertain else set())


class ProvenanceSpan(NamedTuple):
    """A run of positions of a datum, as the client names it; sampled=False: part of a prompt."""

    sequence: str
    offset: int
    length: int
    sampled: bool


class SampledRun(NamedTuple):
    """Positions [start, stop) of a datum that `sequence` wrote; None: unknown."""

    start: int
    stop: int
    sequence: SampledSequence | None


def fingerprint(tokens: bytes, logprobs: bytes) -> str:
    """Digest int32 tokens and float32 log-probabilities."""
    digest = xxhash.xxh3_64(tokens)
    digest.update(logprobs)
    return digest.hexdigest()


def uncertain_run(tokens: bytes, logprobs: bytes) -> tuple[str, int] | None:
    """Return `SampledSequence.uncertain`."""
    runs = runs_of(np.frombuffer(logprobs, "<f4") != 0)
    if not runs or 4 * (runs[0][1] - runs[0][0]) == len(tokens):
        return None
    piece = slice(4 * runs[0][0], 4 * runs[0][1])
    return fingerprint(tokens[piece], logprobs[piece]), runs[0][0]


@dataclass
class ModelAncestry:
    """A branch of a model, and those whose states it descends from, with their versions then.

    load_weights begins a new branch of a model: later versions of the weights that it replaced are
    no earlier versions of the new ones."""

    model: str
    parents: dict[str, int] = field(default_factory=dict)

    def version_of(self, sequence: SampledSequence) -> int | None:
        """Return the version in this model's count that sampled a sequence; None: not its own."""
        if sequence.model == self.model:
            return sequence.version
        if not sequence.model:
            return 0  # every model begins as the base model
        if sequence.version <= self.parents.get(sequence.model, -1):
            return sequence.version
        return None


class SequenceLedger:
    """The newest sequences of a server, and the totals of all.

    `sequences.jsonl` begins with the totals of the sequences that its other rows lack. Once it is
    rewritten, its rows say how often each sequence was trained, up to the call of each model in
    `counted`; later calls are in trained.jsonl of the model.

    remembered: how many sequences datums can be matched to."""

    def __init__(self, path: Path, remembered: int = REMEMBERED) -> None:
        self.path = path
        self.remembered = remembered
        self.sequences: dict[str, SampledSequence] = {}  # in the order of sampling
        self.by_fingerprint: dict[str, list[SampledSequence]] = {}
        self.models: dict[str, ModelLedger] = {}
        self.rows = 0  # in the file
        self.counted: dict[str, int] = {}  # model -> the last call whose step was counted
        for row in jsonl.read(path):
            if (forgotten := row.get("forgotten")) is not None:
                self.models = {model: ModelLedger(**totals) for model, totals in forgotten.items()}
                self.counted = row.get("counted", {})
                continue
            self._add(
                SampledSequence(
                    *(row["id"], row["model"], row["version"], row["length"], row["fingerprint"]),
                    tuple(row["uncertain"]) if row.get("uncertain") else None,
                    row.get("trained", 0),
                )
            )
        self.file = jsonl.JsonlAppender(path)
        self.prefix = secrets.token_hex(4)  # ids of lost sequences are never minted again
        self.minted = 0

    @property
    def sampled_total(self) -> int:
        """Sequences that this server has sampled since it was created."""
        return sum(ledger.sampled for ledger in self.models.values())

    def mint(self, count: int) -> list[str]:
        """Return ids for sequences that are going to be sampled."""
        first = self.minted
        self.minted += count
        return [f"seq-{self.prefix}-{number}" for number in range(first, self.minted)]

    def record(self, id: str, model: str, version: int, tokens: bytes, logprobs: bytes) -> None:
        """Record a sampled sequence before its client receives it."""
        sequence = SampledSequence(
            *(id, model, version, len(tokens) // 4, fingerprint(tokens, logprobs)),
            uncertain_run(tokens, logprobs),
        )
        self._add(sequence)
        self.file.write(_sequence_row(sequence))
        while len(self.sequences) > self.remembered:
            self._forget(next(iter(self.sequences.values())))
        if self.rows > 2 * self.remembered:
            self.rewrite()

    def _forget(self, sequence: SampledSequence) -> None:
        """Keep a sequence in the totals alone."""
        del self.sequences[sequence.id]
        for key in sequence.fingerprints:
            self.by_fingerprint[key].remove(sequence)
            if not self.by_fingerprint[key]:
                del self.by_fingerprint[key]
        if not sequence.trained:
            ledger = self.of_model(sequence.model)
            ledger.untrained[sequence.version] -= 1
            ledger.drop_empty()
            ledger.forgotten_untrained += 1

    def rewrite(self) -> None:
        """Replace the rows of forgotten sequences by their totals, and note what was trained."""
        kept: dict[str, ModelLedger] = {}
        for sequence in self.sequences.values():
            kept.setdefault(sequence.model, ModelLedger()).add(sequence)
        forgotten = {
            model: ledger.without(kept.get(model, ModelLedger()))
            for model, ledger in self.models.items()
        }
        rows: list[dict[str, Any]] = [{"forgotten": forgotten, "counted": self.counted}]
        rows += [_sequence_row(sequence) for sequence in self.sequences.values()]
        self.file.close()
        atomic_write.write(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        self.file = jsonl.JsonlAppender(self.path)
        self.rows = len(self.sequences)

    def _add(self, sequence: SampledSequence) -> None:
        self.rows += 1
        self.sequences[sequence.id] = sequence
        for key in sequence.fingerprints:
            self.by_fingerprint.setdefault(key, []).append(sequence)
        self.of_model(sequence.model).add(sequence)

    def of_model(self, model: str) -> ModelLedger:
        return self.models.setdefault(model, ModelLedger())

    # ---- datums ----------------------------------------------------------------------------------

    def resolve(
        self,
        datum: Datum,
        spans: Sequence[ProvenanceSpan] | None,
        taken: Counter[str],
        ancestry: ModelAncestry,
    ) -> list[SampledRun]:
        """Return the sampled runs of a datum.

        taken: sequences that earlier datums of the same optimizer step were matched to; of several
        equal sequences, each is matched once before any is matched again.
        ancestry: of the model that trains the datum. Models of one server sample equal sequences
        while their adapters are new; its own are matched before those of others.

        Raises ConfigError for spans that do not fit."""
        if spans is not None:
            return self._by_spans(datum, spans)
        return self._by_fingerprints(datum, taken, ancestry)

    def _by_spans(self, datum: Datum, spans: Sequence[ProvenanceSpan]) -> list[SampledRun]:
        runs = []
        start = 0
        for span in spans:
            stop = start + span.length
            if span.sampled and span.length:
                sequence = self.sequences.get(span.sequence)
                if sequence is not None:
                    self._check_span(datum, span, start, sequence)
                runs.append(SampledRun(start, stop, sequence))
            start = stop
        if start != datum.length:
            raise ConfigError(
                f"provenance spans cover {start} positions of a datum of {datum.length}"
            )
        return runs

    @staticmethod
    def _check_span(
        datum: Datum, span: ProvenanceSpan, start: int, sequence: SampledSequence
    ) -> None:
        if span.offset + span.length > sequence.length:
            raise ConfigError(
                f"a provenance span names tokens {span.offset} to {span.offset + span.length} of "
                f"sequence {sequence.id}, which has {sequence.length}"
            )
        logprobs = datum.fields.get("logprobs")
        if logprobs is None or span.length != sequence.length:
            return
        piece = slice(4 * start, 4 * (start + span.length))
        if fingerprint(datum.targets[piece], logprobs[piece]) != sequence.fingerprint:
            raise ConfigError(
                f"a provenance span names sequence {sequence.id}, but the datum has other tokens "
                "or log-probabilities there"
            )

    def _by_fingerprints(
        self, datum: Datum, taken: Counter[str], ancestry: ModelAncestry
    ) -> list[SampledRun]:
        logprobs = datum.fields.get("logprobs")
        if logprobs is None:
            return []
        runs: list[SampledRun] = []
        done = 0  # positions that are part of a run
        for start, stop in sampled_runs(datum):
            if start < done:
                continue
            piece = slice(4 * start, 4 * stop)
            key = fingerprint(datum.targets[piece], logprobs[piece])
            fits = {
                sequence.id: (begin, sequence)
                for sequence in self.by_fingerprint.get(key, [])
                if (begin := _begin_in(datum, logprobs, start, key, sequence)) is not None
            }
            first = min(
                fits.values(),
                key=lambda fit: (
                    ancestry.version_of(fit[1]) is None,
                    fit[1].model != ancestry.model,
                    taken[fit[1].id],
                    fit[1].trained,
                    fit[1].version,
                ),
                default=None,
            )
            if first is None:
                runs.append(SampledRun(start, stop, None))
                continue
            begin, chosen = first
            taken[chosen.id] += 1
            done = begin + chosen.length
            runs.append(SampledRun(begin, done, chosen))
        return runs

    def totals(self, model: str) -> dict[str, int]:
        """Return the ledger of a model with all its branches."""
        own = [ledger for branch, ledger in self.models.items() if model_of(branch) == model]
        rows = [ledger.as_dict() for ledger in own or [ModelLedger()]]
        return {name: sum(row[name] for row in rows) for name in rows[0]}

    def mark_trained(self, ids: Iterable[str], model: str, call: int) -> None:
        """Count the optimizer step of a model's call on these sequences."""
        self.counted[model] = call
        for sequence in filter(None, map(self.sequences.get, ids)):
            sequence.trained += 1
            ledger = self.of_model(sequence.model)
            if sequence.trained == 1:
                ledger.untrained[sequence.version] -= 1
                ledger.drop_empty()
                ledger.trained_once += 1
            elif sequence.trained == 2:
                ledger.trained_once -= 1
                ledger.trained_again += 1

    def close(self) -> None:
        self.file.close()


def _begin_in(
    datum: Datum, logprobs: bytes, start: int, key: str, sequence: SampledSequence
) -> int | None:
    """Return where a datum has a sequence whose run `key` begins at `start`; None: nowhere."""
    if key == sequence.fingerprint:
        return start
    assert sequence.uncertain is not None
    begin = start - sequence.uncertain[1]
    piece = slice(4 * begin, 4 * (begin + sequence.length))
    whole = begin >= 0 and fingerprint(datum.targets[piece], logprobs[piece])
    return begin if whole == sequence.fingerprint else None


def _sequence_row(sequence: SampledSequence) -> dict[str, Any]:
    """Return the row of a sequence in the file."""
    trained = {"trained": sequence.trained} if sequence.trained else {}
    return {
        "id": sequence.id,
        "model": sequence.model,
        "version": sequence.version,
        "length": sequence.length,
        "fingerprint": sequence.fingerprint,
        "uncertain": sequence.uncertain,
        **trained,
    }


def sampled_runs(datum: Datum) -> list[tuple[int, int]]:
    """Return the runs [start, stop) of a datum that look sampled.

    By its mask; without one, where log-probabilities or advantages are not 0."""
    mask = datum.field("mask")
    if mask is None:
        inside = np.zeros(datum.length, bool)
        for name in ("logprobs", "advantages"):
            row = datum.field(name)
            if row is not None:
                inside |= row != 0
    else:
        inside = mask != 0
    return runs_of(inside)


def runs_of(inside: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs [start, stop) of bool [n].

    >>> runs_of(np.array([False, True, True, False, True]))
    [(1, 3), (4, 5)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


@dataclass
class ModelLedger:
    """The sequences that a model's weights sampled.

    untrained: version -> remembered sequences that no optimizer step has used yet.
    """

    sampled: int = 0
    sampled_tokens: int = 0
    trained_once: int = 0
    trained_again: int = 0
    forgotten_untrained: int = 0
    untrained: Counter[int] = field(default_factory=Counter)

    def add(self, sequence: SampledSequence) -> None:
        self.sampled += 1
        self.sampled_tokens += sequence.length
        if not sequence.trained:
            self.untrained[sequence.version] += 1
        elif sequence.trained == 1:
            self.trained_once += 1
        else:
            self.trained_again += 1

    def drop_empty(self) -> None:
        """Forget versions without untrained sequences."""
        self.untrained = +self.untrained

    def without(self, part: ModelLedger) -> dict[str, int]:
        """Return the totals less those of remembered sequences."""
        names = ("sampled", "sampled_tokens", "trained_once", "trained_again")
        less = {name: getattr(self, name) - getattr(part, name) for name in names}
        return less | {"forgotten_untrained": self.forgotten_untrained}

    def as_dict(self) -> dict[str, int]:
        """Return the lines of the ledger; the last three add up to `sampled`."""
        return {
            "sampled": self.sampled,
            "sampled_tokens": self.sampled_tokens,
            "never_trained": sum(self.untrained.values()) + self.forgotten_untrained,
            "trained_once": self.trained_once,
            "trained_again": self.trained_again,
        }


class LagCheck(NamedTuple):
    """The lags of a datum's positions, int32 [n], and the sequences behind them."""

    lags: np.ndarray
    sequences: list[str]
    refused: str = ""  # why the datum may not be trained


def measure_lags(
    datum: Datum,
    runs: Sequence[SampledRun],
    ancestry: ModelAncestry,
    version: int,
    *,
    limit: float,
    unknown: str,
) -> LagCheck:
    """Compute the lag of every position of a datum, and check it against the limit.

    version: of the model whose gradient the datum joins.
    unknown: train or refuse, for sampled tokens of unknown age."""
    lags = np.full(datum.length, NOT_SAMPLED, np.int32)
    found: list[str] = []
    refused = ""
    for run in runs:
        own = None if run.sequence is None else ancestry.version_of(run.sequence)
        if run.sequence is not None:
            found.append(run.sequence.id)
        if own is None:
            lags[run.start : run.stop] = UNKNOWN
            if unknown == "refuse":
                refused = refused or describe_unknown(run, ancestry.model)
            continue
        lag = version - own
        lags[run.start : run.stop] = lag
        if lag > limit and run.sequence is not None:
            refused = refused or (
                f"sequence {run.sequence.id} was sampled at version {own} of {ancestry.model}, "
                f"which is at version {version}: a lag of {lag}, and staleness.max_lag = {limit:g}"
            )
    return LagCheck(lags, found, refused)


def describe_unknown(run: SampledRun, model: str) -> str:
    """Say why a run's age is unknown."""
    if run.sequence is None:
        return (
            f"tokens {run.start} to {run.stop} of a datum are not a sequence of this server, or "
            f"not among its newest {REMEMBERED}, so their lag is unknown, and staleness.unknown = "
            "refuse"
        )
    return (
        f"sequence {run.sequence.id} was sampled by {run.sequence.model or 'the base model'}, no "
        f"earlier version of {model}: its lag is unknown, and staleness.unknown = refuse"
    )


def lag_metrics(lags: Counter[int]) -> dict[str, float]:
    """Return the lag metrics of an optimizer step from {lag: trained tokens}."""
    known = sorted((lag, tokens) for lag, tokens in lags.items() if lag >= 0)
    total = sum(tokens for _, tokens in known)
    unknown = lags.get(UNKNOWN, 0)
    metrics: dict[str, float] = {}
    if total + unknown:
        metrics["lag/unknown_share"] = unknown / (total + unknown)
    if total:
        reached = np.cumsum([tokens for _, tokens in known])
        metrics |= {
            "lag/mean": sum(lag * tokens for lag, tokens in known) / total,
            "lag/max": float(known[-1][0]),
            "lag/p95": float(known[int(np.searchsorted(reached, 0.95 * total))][0]),
        }
    return metrics


def trained_row(
    version: int, lags: Counter[int], sequences: Sequence[str], call: int
) -> dict[str, Any]:
    """Return the row of an optimizer step in `trained.jsonl`; `buffer.training_log` reads it."""
    return {
        "batch": version,
        "call": call,
        "samples": len(set(sequences)),
        "ids": xxhash.xxh3_64_hexdigest(";".join(sequences).encode()),
        "lags": {str(lag): tokens for lag, tokens in sorted(lags.items()) if lag >= 0},
        "unknown": lags.get(UNKNOWN, 0),
        "sequences": sorted(set(sequences)),
    }
