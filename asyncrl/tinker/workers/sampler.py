"""The sampling process: an engine that samples from one version of one model at a time.

The engine finishes all requests of the loaded weights before it loads others, so that every token
of a sequence comes from the version that its sampler names.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from actors.engine import Completion, build_engine
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.models import adapter_files, memory
from asyncrl.models.adapters import merge_weights
from asyncrl.models.policy import list_named_weights, load_policy
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.tinker.messages import (
    BASE,
    LABEL,
    CallFailure,
    SampleCall,
    SampleResult,
    SequenceResult,
    WeightsVersion,
    describe_failure,
)
from asyncrl.tinker.settings import TinkerConfig, build_run_config

NOT_FINITE = (
    "the log-probabilities of the sampled tokens are not finite: the sampler's weights have "
    "diverged, or the temperature is too small"
)
STEPS = 8  # decode steps between checks for new requests
KEPT = 4  # number of versions whose weights stay in memory
NO_LOGPROB = -99999.0  # the API's value for an empty cell
Reply = Callable[[int, SampleResult | CallFailure], None]


@dataclass(eq=False)
class SampleJob:
    """A call that is being sampled.

    number: of the call.
    sequences: sample -> its finished sequence.
    prompt_scores: the further fields of its SampleResult.
    """

    number: int
    call: SampleCall
    sequences: dict[int, SequenceResult] = field(default_factory=dict)
    prompt_scores: tuple[bytes, ...] = ()


@dataclass
class Sampler:
    """The engine and the requests that wait for it.

    reply: called with the number of a request and its result."""

    config: TinkerConfig
    reply: Reply

    def __post_init__(self) -> None:
        config = self.config
        torch.set_num_threads(config.sampling.threads)
        memory.keep_freed()
        self.engine = build_engine(build_run_config(config, 0))
        self.loaded: WeightsVersion | None = None  # weights in the engine
        self.is_spoiled = False  # its cache has values that are not finite
        base = load_policy(config.model.path, config.model.dtype, config.model.device)
        self.base = dict(list_named_weights(base))
        self.tokenizer = load_tokenizer(config.model.path)
        self.versions: dict[WeightsVersion, Mapping[str, torch.Tensor]] = {BASE: self.base}
        self.waiting: deque[SampleJob] = deque()
        self.jobs = dict[int, SampleJob]()  # in the engine

    @property
    def is_busy(self) -> bool:
        return bool(self.jobs or self.waiting)

    def add(self, number: int, call: SampleCall) -> None:
        self.waiting.append(SampleJob(number, call))

    def cancel(self, number: int) -> None:
        """Drop a request without a reply."""
        self.waiting = deque(job for job in self.waiting if job.number != number)
        job = self.jobs.pop(number, None)
        if job is not None:
            if isinstance(self.engine, EmbeddedEngine):
                self.is_spoiled |= not self.engine.out_logprob.isfinite().all()
            self.engine.abort([(number, sample, 0) for sample in range(job.call.count)])

    def work(self) -> None:
        """Pass requests of the loaded version to the engine, and make some decode steps.

        An engine that fails ends the process: the server finds the request that it failed on."""
        self._admit()
        for completion in self.engine.step(STEPS):
            job = self.jobs[completion.key[0]]
            job.sequences[completion.key[1]] = self._cut_at_stop(job.call.texts, completion)
            if len(job.sequences) == job.call.count:
                del self.jobs[job.number]
                ordered = [job.sequences[sample] for sample in range(job.call.count)]
                result = SampleResult(ordered, *job.prompt_scores)
                logprobs = b"".join(sequence.logprobs for sequence in ordered)
                is_finite = np.isfinite(np.frombuffer(logprobs, "<f4")).all()
                self.reply(job.number, result if is_finite else CallFailure(NOT_FINITE))
                self.is_spoiled |= not is_finite

    def _admit(self) -> None:
        if self.is_spoiled and self.jobs:
            return
        if self.is_spoiled and isinstance(self.engine, EmbeddedEngine):
            self.engine.erase_cache()
        self.is_spoiled = False
        if self.jobs and any(job.call.version != self.loaded for job in self.waiting):
            return  # later requests of the loaded weights must not keep out those of others
        if self.waiting and not self.jobs:
            try:
                self._load(self.waiting[0].call.version)
            except Exception as error:  # it must not cost the requests of other clients
                self.reply(self.waiting.popleft().number, describe_failure(error))
                return
        for job in [job for job in self.waiting if job.call.version == self.loaded]:
            self.waiting.remove(job)
            try:
                self._start(job)
            except Exception as error:
                self.reply(job.number, describe_failure(error))
            else:
                self.jobs[job.number] = job

    def _load(self, version: WeightsVersion) -> None:
        """Load weights into the engine, from where a model wrote them."""
        if version == self.loaded:
            return
        directory, model, number = version
        if version not in self.versions:
            path = Path(directory)
            gone = ConfigError(
                f"version {number} of {model} was deleted or replaced: the server "
                f"keeps weights.slots = {self.config.weights.slots} versions without a name, and a "
                "client may replace named ones; create a new sampling client"
            )
            if not path.exists():
                raise gone
            if (path / adapter_files.CONFIG).exists():
                adapter = adapter_files.read(path)
                scale = adapter.settings["lora_alpha"] / adapter.settings["r"]
                weights: Mapping[str, torch.Tensor] = merge_weights(
                    self.base, adapter.tensors, scale
                )
            else:
                weights = dict(list_named_weights(load_policy(path, self.config.model.dtype)))
            note = path / LABEL  # read last, as a model may replace them meanwhile
            if note.exists() and note.read_text() != f"{number} {model}":
                raise gone
            while len(self.versions) > KEPT:
                oldest = next(kept for kept in self.versions if kept != BASE)
                del self.versions[oldest]
            self.versions[version] = weights
        self.loaded = None  # if loading fails, the engine has parts of both
        self.engine.load(self.versions[version], Label(0, number), directory)
        self.loaded = version

    def _start(self, job: SampleJob) -> None:
        call, prompt = job.call, job.call.first.prompt
        if call.prompt_logprobs or call.prompt_topk:
            scores = self.engine.score([prompt], max(1, call.prompt_topk))[0]
            columns = (
                (scores.logprobs, np.nan, "<f4"),
                (scores.top_ids, 0, "<i4"),
                (scores.top_logprobs, NO_LOGPROB, "<f4"),
            )
            # the first token has no context, so its row stays empty
            job.prompt_scores = tuple(
                np.insert(column, 0, empty, axis=0).astype(dtype).tobytes()
                for column, empty, dtype in columns[: 3 if call.prompt_topk else 1]
            )
        ticket = call.first.key[0]
        self.engine.add(
            replace(
                call.first,
                key=(job.number, sample, 0),
                group=job.number,
                drawn_for=(ticket, sample),
            )
            for sample in range(call.count)
        )

    def _cut_at_stop(self, texts: list[str], completion: Completion) -> SequenceResult:
        """Cut a completion after the token that completes one of the stop texts.

        The tokens before the cut have the same distribution as if sampling had ended there."""
        length, is_complete = len(completion.tokens), completion.finish == "stop"
        ids = completion.tokens.tolist()

        def has_stop_text(count: int) -> bool:
            decoded = self.tokenizer.decode(ids[:count])
            return any(text in decoded for text in texts)

        if texts and has_stop_text(length):
            length, is_complete = next(filter(has_stop_text, itertools.count(1))), True
        return SequenceResult(
            completion.tokens[:length].astype("<i4").tobytes(),
            completion.logprobs[:length].astype("<f4").tobytes(),
            is_complete,
        )
