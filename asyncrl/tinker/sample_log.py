"""Some trained datums of a model with every token: MODEL/token_samples.jsonl.

`asyncrl samples` and `asyncrl watch` read it, as they read the learner's
(`learner.records.sample_log`). A server knows no rewards: the rules that choose by them are absent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from asyncrl.records import jsonl
from asyncrl.tinker.messages import Datum
from asyncrl.tinker.sequences import SampledRun
from learner.records.sample_log import DECIMALS, FILE, decode_pieces

# as record.samples_every and record.token_samples_mib of a run
EVERY = 10
LIMIT_BYTES = 64 * 2**20


@dataclass
class ScoredDatum:
    """A datum of a policy loss; logprobs: float32 [n], by the weights that its gradient is of."""

    datum: Datum
    runs: Sequence[SampledRun]
    logprobs: bytes = b""

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return sum(run.stop - run.start for run in self.runs)

    def distance(self) -> float:
        """Return the mean |log pi - log mu| over the sampled tokens."""
        moved = np.abs(np.frombuffer(self.logprobs, "<f4") - self._behavior())
        return float(np.concatenate([moved[run.start : run.stop] for run in self.runs]).mean())

    def _behavior(self) -> np.ndarray:
        behavior = self.datum.field("logprobs")
        assert behavior is not None
        return behavior

    def row(self, tokenizer: Any) -> dict[str, Any]:
        """Return prompt and response with what the server knows of every token."""
        start, stop = self.runs[0].start, self.runs[-1].stop
        inputs = np.frombuffer(self.datum.tokens, "<i4").tolist()
        targets = np.frombuffer(self.datum.targets, "<i4").tolist()
        ids = [*inputs[start + 1 : stop], targets[stop - 1]]
        part = slice(start, stop)
        lags = np.frombuffer(self.datum.lags, "<i4")[part]
        mask = self.datum.field("mask")
        inside = np.zeros(self.datum.length, bool)
        for run in self.runs:
            inside[run.start : run.stop] = True
        used = inside if mask is None else inside & (mask != 0)
        advantages = self.datum.field("advantages")
        assert advantages is not None
        return {
            "prompt": tokenizer.decode(inputs[: start + 1]),
            "pieces": decode_pieces(tokenizer, ids),
            "tokens": ids,
            "versions": [[_label(run), run.start - start, run.stop - start] for run in self.runs],
            "behavior": _numbers(self._behavior()[part], inside[part]),
            "start": _numbers(np.frombuffer(self.logprobs, "<f4")[part], inside[part]),
            "advantage": _numbers(advantages[part], inside[part]),
            "lag": [lag if lag >= 0 else None for lag in lags.tolist()],
            "mask": inside[part].astype(int).tolist(),
            "used": used[part].astype(int).tolist(),
        }


def _label(run: SampledRun) -> str:
    return "unknown" if run.sequence is None else str(run.sequence.version)


def _numbers(values: np.ndarray, inside: np.ndarray) -> list[float | None]:
    return [
        round(value, DECIMALS) if here and math.isfinite(value) else None
        for value, here in zip(values.tolist(), inside.tolist(), strict=True)
    ]


@dataclass
class TrainedSampleLog:
    """MODEL/token_samples.jsonl, at most LIMIT_BYTES large: of every EVERY-th version."""

    folder: Path
    tokenizer: Any
    collected: list[ScoredDatum] = field(default_factory=list)  # of the current optimizer step

    def __post_init__(self) -> None:
        self.file = jsonl.JsonlAppender(self.folder / FILE)

    def is_due(self, version: int) -> bool:
        """Return whether datums of the optimizer step from `version` are to be logged."""
        return version % EVERY == 0 and self.file.path.stat().st_size < LIMIT_BYTES

    def collect(
        self, data: Sequence[Datum], runs: Sequence[Sequence[SampledRun]], scores: Sequence[bytes]
    ) -> None:
        """Take the datums of a loss; those without behavior policy or advantages are left out."""
        for datum, own, logprobs in zip(data, runs, scores, strict=True):
            if own and {"logprobs", "advantages"} <= datum.fields.keys():
                self.collected.append(ScoredDatum(datum, own, logprobs))

    def drop(self) -> None:
        """Forget the datums of the current optimizer step."""
        self.collected.clear()

    def write(self, version: int) -> None:
        """Write the datum furthest from its sampling policy, the longest, and one at random."""
        if not self.collected:
            return
        places = range(len(self.collected))
        chosen: dict[int, list[str]] = {}
        for rule, place in (
            ("off_policy", max(places, key=lambda place: self.collected[place].distance())),
            ("longest", max(places, key=lambda place: self.collected[place].length)),
            ("random", random.Random(version).randrange(len(places))),
        ):
            chosen.setdefault(place, []).append(rule)
        for place, rules in sorted(chosen.items()):
            self.file.write(self._row(version, place, rules))

    def _row(self, version: int, place: int, rules: list[str]) -> dict[str, Any]:
        scored = self.collected[place]
        sequence = scored.row(self.tokenizer)
        lags = [lag for lag in sequence["lag"] if lag is not None]
        return {
            "batch": version,
            "ticket": place,
            "sample": 0,
            "group_key": xxhash.xxh3_64_hexdigest(sequence["prompt"].encode()),
            "rules": rules,
            "reward": None,
            "sequence_ids": [run.sequence.id for run in scored.runs if run.sequence is not None],
            "parts": {},
            "finish": "",
            "calls": 0,
            "excluded": 0,
            "lag_mean": round(sum(lags) / max(len(lags), 1), DECIMALS),
            "lag_max": max(lags, default=0),
            "length": scored.length,
            "group_rewards": [],
            "sequences": [sequence],
        }

    def close(self) -> None:
        self.file.close()
