"""Log some trained datums of a model with every token: MODEL/token_samples.jsonl.

`asyncrl samples` and `asyncrl watch` read it as they read the learner's
(`learner.sample_log`). A server receives no rewards, so rules that choose by reward are
absent.
"""

from __future__ import annotations

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
from learner.sample_log import FILE, build_row, build_sequence

# the defaults of record.samples_every and record.token_samples_mib of a run
EVERY = 10
LIMIT_BYTES = 64 * 2**20


@dataclass
class ScoredDatum:
    """A datum of a policy loss.

    logprobs: float32 [n], by the weights for which the gradient was computed."""

    datum: Datum
    runs: Sequence[SampledRun]
    logprobs: np.ndarray

    def count_sampled(self) -> int:
        """Return the number of sampled tokens."""
        return sum(run.stop - run.start for run in self.runs)

    def measure_distance(self) -> float:
        """Return the mean |log pi - log mu| over the sampled tokens."""
        moved = np.abs(self.logprobs - self.datum.fields["logprobs"])
        return float(np.concatenate([moved[run.start : run.stop] for run in self.runs]).mean())

    def describe(self, tokenizer: Any) -> dict[str, Any]:
        """Return prompt and response with the values of every token."""
        start, stop = self.runs[0].start, self.runs[-1].stop
        fields, inputs = self.datum.fields, self.datum.tokens.tolist()
        inside = np.zeros(len(inputs), bool)
        for run in self.runs:
            inside[run.start : run.stop] = True
        values = {
            "behavior": fields["logprobs"],
            "start": self.logprobs,
            "advantage": fields["advantages"],
        }
        columns = {name: np.where(inside, x, np.nan) for name, x in values.items()} | {
            "mask": inside.astype(int),
            "used": (inside & (fields.get("mask", inside) != 0)).astype(int),
        }
        versions = [
            ["unknown" if sequence is None else str(sequence.version), begin - start, end - start]
            for begin, end, sequence in self.runs
        ]
        lags = self.datum.lags[start:stop].tolist()
        return build_sequence(
            tokenizer,
            inputs[: start + 1],
            [*inputs[start + 1 : stop], int(self.datum.targets[stop - 1])],
            versions,
            {name: x[start:stop] for name, x in columns.items()},
        ) | {"lag": [lag if lag >= 0 else None for lag in lags]}


@dataclass
class TrainedSampleLog:
    """MODEL/token_samples.jsonl: samples of every EVERY-th version, at most LIMIT_BYTES."""

    folder: Path
    tokenizer: Any
    collected: list[ScoredDatum] = field(default_factory=list)  # of the current optimizer step

    def __post_init__(self) -> None:
        self.file = jsonl.JsonlAppender(self.folder / FILE)

    def is_due(self, version: int) -> bool:
        """Return whether to log datums of the optimizer step from `version`."""
        return version % EVERY == 0 and self.file.path.stat().st_size < LIMIT_BYTES

    def collect(
        self,
        data: Sequence[Datum],
        runs: Sequence[Sequence[SampledRun]],
        scores: Sequence[np.ndarray],
    ) -> None:
        """Collect the datums of a loss that have runs, behavior policy and advantages."""
        for datum, datum_runs, logprobs in zip(data, runs, scores, strict=True):
            if datum_runs and {"logprobs", "advantages"} <= datum.fields.keys():
                self.collected.append(ScoredDatum(datum, datum_runs, logprobs))

    def drop(self) -> None:
        """Drop the datums of the current optimizer step."""
        self.collected.clear()

    def write(self, version: int) -> None:
        """Write the datum furthest from its behavior policy, the longest, and a random one."""
        if not self.collected:
            return
        by_rule = {
            "off_policy": max(self.collected, key=ScoredDatum.measure_distance),
            "longest": max(self.collected, key=ScoredDatum.count_sampled),
            "random": random.Random(version).choice(self.collected),
        }
        for index, scored in enumerate(self.collected):
            rules = [rule for rule, chosen in by_rule.items() if chosen is scored]
            if not rules:
                continue
            sequence = scored.describe(self.tokenizer)
            head = {
                "batch": version,
                "ticket": index,
                "sample": 0,
                "group_key": xxhash.xxh3_64_hexdigest(sequence["prompt"].encode()),
                "rules": rules,
                "reward": None,
                "sequence_ids": [
                    run.sequence.id for run in scored.runs if run.sequence is not None
                ],
                "parts": {},
                "finish": "",
                "calls": 0,
                "excluded": 0,
                "length": scored.count_sampled(),
                "group_rewards": [],
            }
            self.file.write(build_row(head, [sequence]))

    def close(self) -> None:
        self.file.close()
