"""The log of trained samples with every token: RUN/token_samples.jsonl.

`asyncrl samples` and `asyncrl watch` read it. The learner writes it, because only the learner has
a token's log-probability under the policy that sampled it, under its own policy before and after
the update, its advantage, its importance weight and whether the trust region clipped it.
"""

import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.algorithms import ratios
from asyncrl.algorithms.loss import PreparedBatch
from asyncrl.config.tree import Config
from asyncrl.contract.blobs.images import read_size
from asyncrl.contract.messages import Batch
from asyncrl.models import image_tokens, pictures
from asyncrl.records import jsonl
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.metrics import OPTIMIZER_STEPS
from learner.batch import PackedBatch

MIB = 2**20
FILE = "token_samples.jsonl"
DECIMALS = 4


class BatchLog:
    """An append-only file of JSON lines: RUN/optimizer_steps.jsonl, a row for each step.

    A batch's rows are written before its commit is sent, so that a committed batch has all of them.
    """

    name = OPTIMIZER_STEPS
    batch_key = "step"  # the key of a row that holds the number of its batch

    def __init__(self, config: Config, run_dir: Path, number: int) -> None:
        """Keep the rows of batches below `number`, the next one; later batches train again.

        The file is always a new one, because a replaced learner may still have the old one open.
        Raises AsyncrlError when the file cannot be written.
        """
        self.config = config
        self.path = run_dir / self.name
        self.limit_name = f"{self.path.stem}_mib"
        self.full = False
        rows = [row for row in jsonl.read(self.path) if row.get(self.batch_key, number) < number]
        lines = jsonl.encode(rows)
        self.file = jsonl.JsonlAppender(self.path)
        self.file.replace(lines, sync=True)
        self.written = len(lines)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append `rows` until the file has reached its bound, which is reported once."""
        for row in rows:
            row_bytes = len(json.dumps(row)) + 1
            limit_mib = getattr(self.config.record, self.limit_name)
            if not self.full and self.written + row_bytes > limit_mib * MIB:
                self.full = True
                print(
                    f"learner: {self.path} has reached record.{self.limit_name} = {limit_mib}: "
                    "later rows are not logged",
                    file=sys.stderr,
                )
            if self.full:
                return
            self.file.write(row)
            self.written += row_bytes


class SampleLog(BatchLog):
    """RUN/token_samples.jsonl."""

    name = FILE
    batch_key = "batch"

    def __init__(self, config: Config, run_dir: Path, number: int, tokenizer: Any) -> None:
        """Keep the rows of batches below `number`: see `BatchLog`."""
        self.tokenizer = tokenizer
        super().__init__(config, run_dir, number)

    def is_due(self, number: int) -> bool:
        """Return whether batch `number` logs samples."""
        record = self.config.record
        interval = record.samples_every
        return bool(interval and record.token_samples and number % interval == 0 and not self.full)

    def build_rows(
        self, batch: Batch, packed: PackedBatch, prep: PreparedBatch
    ) -> list[JsonObject]:
        """Build the rows of the batch's chosen samples, after its update."""
        columns = {
            "behavior": packed.behavior,
            "start": prep.start,
            "target": prep.latest,
            "advantage": prep.advantage,
            "weight": prep.weight,
            "lag": packed.token_lag,
            "clip": prep.clipped,
            "mask": packed.mask.int(),
            "used": prep.used.int(),
        }
        if packed.version is not None:
            columns["sampler"] = packed.version
        values = {name: x.detach().cpu().numpy() for name, x in columns.items()}
        rewards = list(zip(packed.group_of, packed.rewards.tolist(), strict=True))
        rows = []
        chosen = choose_samples(packed, prep, self.config, batch.number)
        for position, rules in sorted(chosen.items()):
            place = packed.places[position]
            sample = batch.samples[place]
            sequences = []
            offset = int(packed.offsets[position])
            for row in sample.list_rows():
                ids = np.frombuffer(row.tokens, "<i4").tolist()
                prompt = np.frombuffer(row.prompt_tokens, "<i4")
                if self.tokenizer.image_shape is not None:
                    prompt = image_tokens.contract(prompt, self.tokenizer.image_shape)
                versions = [[str(s.label), s.start, s.end] for s in row.spans]
                tokens = slice(offset, offset + len(ids))
                sequence = build_sequence(
                    self.tokenizer,
                    prompt.tolist(),
                    ids,
                    versions,
                    {name: x[tokens] for name, x in values.items()},
                )
                if row.images:
                    sequence["images"] = [
                        {
                            "digest": name,
                            "size": list(read_size(batch.images[name])),
                            "thumbnail": pictures.build_thumbnail_url(batch.images[name]),
                        }
                        for name in row.images
                    ]
                sequences.append(sequence)
                offset += len(ids)
            row_head = {
                "batch": batch.number,
                "ticket": sample.ticket,
                "sample": sample.sample,
                "attempt": sample.attempt,
                "group_key": sample.group_key,
                "rules": rules,
                "reward": sample.reward,
                "parts": sample.reward_parts,
                "finish": sample.finish,
                "calls": sample.calls,
                "excluded": sample.aside,
                "segments": [list(segment) for segment in sample.segments],
                "length": sum(len(sequence["tokens"]) for sequence in sequences),
                "group_rewards": [x for group, x in rewards if group == rewards[position][0]],
            }
            if batch.tasks:
                row_head["task"] = batch.tasks[place]
            rows.append(build_row(row_head, sequences))
        return rows


def build_sequence(
    tokenizer: Any,
    prompt: Sequence[int],
    ids: Sequence[int],
    versions: list[list[Any]],
    columns: Mapping[str, np.ndarray],
) -> JsonObject:
    """Return a training sequence of a row; values of `columns` that are not finite become None."""
    return {
        "prompt": tokenizer.decode(prompt),
        "pieces": decode_pieces(tokenizer, ids),
        "tokens": ids,
        "versions": versions,
    } | {
        name: x.tolist()
        if x.dtype.kind == "i"
        else [
            value if math.isfinite(value) else None
            for value in np.round(x.astype(float), DECIMALS).tolist()
        ]
        for name, x in columns.items()
    }


def build_row(head: JsonObject, sequences: list[JsonObject]) -> JsonObject:
    """Return a row of the log: `head`, the lags of the sampled tokens, and the sequences."""
    lags = [
        lag
        for sequence in sequences
        for lag, mask in zip(sequence["lag"], sequence["mask"], strict=True)
        if mask and lag is not None
    ]
    return head | {
        "lag_mean": round(sum(lags) / max(len(lags), 1), DECIMALS),
        "lag_max": max(lags, default=0),
        "sequences": sequences,
    }


def choose_samples(
    packed: PackedBatch, prep: PreparedBatch, config: Config, number: int
) -> dict[int, list[str]]:
    """Return the samples to log, each with the rules of `record.token_samples` that chose it.

    Only samples with a known start that a pass of this rank has seen can be chosen.
    """
    usable = packed.find_whole_samples(prep.known & prep.passed)
    lengths = np.diff(packed.offsets)
    if not usable:
        return {}
    # an environment's tokens have no behavior policy
    moved = (prep.start - packed.behavior).abs() * prep.valid * packed.mask
    distances = ratios.sum_by_sample(moved.double(), packed.seq, packed.count).cpu().numpy()
    rewards = packed.rewards.tolist()
    groups = sorted({packed.group_of[i] for i in usable})
    group_index = number // config.record.samples_every
    source = random.Random(config.seed * 1_000_003 + number)
    by_rule = {
        "group": [i for i in usable if packed.group_of[i] == groups[group_index % len(groups)]],
        "best": [max(usable, key=lambda i: rewards[i])],
        "worst": [min(usable, key=lambda i: rewards[i])],
        "off_policy": [max(usable, key=lambda i: distances[i] / lengths[i])],
        "longest": [max(usable, key=lambda i: lengths[i])],
        "random": [source.choice(usable)],
    }
    chosen: dict[int, list[str]] = {}
    for rule in config.record.token_samples:
        for position in by_rule[rule]:
            chosen.setdefault(position, []).append(rule)
    return chosen


def decode_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, so that the pieces add up to the text of the sequence.

    A token that ends in the middle of a character has an empty piece; the token that completes the
    character has all of it. Where a tokenizer rewrites earlier text, each token is decoded alone.
    """
    pieces: list[str] = []
    start = decoded_end = 0  # first token of the window, first token without a piece
    text = ""  # of the window up to `decoded_end`
    for end in range(1, len(ids) + 1):
        window_text = tokenizer.decode(ids[start:end])
        if (
            window_text.endswith("\N{REPLACEMENT CHARACTER}")
            and end < len(ids)
            and end - decoded_end < 8
        ):
            continue
        if not window_text.startswith(text):
            return [tokenizer.decode([token]) for token in ids]
        pieces += [""] * (end - decoded_end - 1) + [window_text[len(text) :]]
        # a short window keeps the cost linear; one token of context keeps spaces in place
        start, decoded_end = end - 1, end
        text = tokenizer.decode(ids[start:end])
    return pieces
