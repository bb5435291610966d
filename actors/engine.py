"""The engine interface: requests in, completions out, weight swaps between steps.

asyncrl/config/engines.py lists the engines. `RowEngine` is what those in torch have in common.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy import ndarray, uint64
from torch import Tensor

from actors.decoding.constraints import TokenConstraint
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import IntPair, Numbers, RoutingShape, VersionSpan
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.contract.versions import Label
from asyncrl.models import exact_operators
from asyncrl.models.adapters import AdapterBase
from asyncrl.models.policy import PolicyModel, compute_weights_digest, list_named_weights

Key = tuple[int, int, int]  # (ticket, sample, attempt)
TokenCounts = dict[Key, int]
VersionMark = tuple[int, Label, str]  # the first token, label and digest of a span
Finish = Literal["stop", "length"]
SCORED = 1 << 24  # logits in memory while prompts are scored: 64 MiB, plus copies


@dataclass(frozen=True)
class CompletionRequest:
    """One completion to generate. Requests with the same `group` have the same prompt.

    prompt: int32 [P], P >= 1.
    """

    key: Key
    prompt: ndarray
    group: Hashable
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0: all
    stop: tuple[int, ...]
    seed: int  # of the run, see `draw_uniform_rows`
    beside: int = 0  # selects another stream for a further call of the same sample
    drawn_for: IntPair | None = None  # (ticket, sample) of the stream, if not the key's
    # the grammar that it is decoded under, which the engine advances; None: any tokens
    constraint: TokenConstraint | None = None
    images: tuple[bytes, ...] = ()  # the blobs of the prompt's image tokens, in their order

    @property
    def truncates(self) -> bool:
        """Whether top-p or top-k may exclude tokens."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def has_support(self) -> bool:
        """Whether its completion records the tokens that it was sampled from."""
        return self.truncates or self.constraint is not None

    @property
    def stream(self) -> tuple[int, int, int]:
        """The (seed, ticket, sample) that `draw_uniform_rows` derives the random stream from."""
        ticket, sample = self.drawn_for or self.key[:2]
        return self.seed, ticket, sample ^ self.beside


@dataclass(frozen=True)
class Completion:
    """A finished completion.

    tokens: int32 [T], the stop token included.
    logprobs: float32 [T], under the sampling distribution (after temperature, top-p and top-k).
    support: the tokens that top-p, top-k and a grammar left at each of the T positions; None: all
        were left, or the engine does not record it.
    routed: the experts of the P + T - 1 tokens that the model read; None: not recorded.
    """

    key: Key
    prompt: ndarray
    tokens: ndarray
    logprobs: ndarray
    spans: list[VersionSpan]
    finish: Finish
    support: SampledSupport | None
    routed: RoutedExperts | None = None

    @property
    def support_bytes(self) -> bytes:
        """The wire form of the support."""
        return b"" if self.support is None else self.support.encode()

    @property
    def routed_bytes(self) -> bytes:
        """The wire form of the experts."""
        return b"" if self.routed is None else self.routed.encode()


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens under the loaded weights (temperature 1).

    logprobs: float32 [P - 1], of the tokens 1..P-1, each given all tokens before it.
    top_ids: int32 [P - 1, N], the N most likely tokens at these positions, best first.
    top_logprobs: float32 [P - 1, N].
    """

    logprobs: ndarray
    top_ids: ndarray
    top_logprobs: ndarray


class Engine(Protocol):
    """Continuous batching over `slots` rows."""

    slots: int
    steps_made: int  # decode steps since its start

    @property
    def active(self) -> int:
        """Rows that are being decoded, plus requests that wait for a row."""

    def load(
        self, weights: Mapping[str, Any], label: Label, digest: str, probe: bytes = b""
    ) -> None:
        """Use a copy of these weights (name -> tensor) from the next decode step on.

        probe: the learner's log-probabilities, to check the engine.
        """

    def add(self, requests: Iterable[CompletionRequest]) -> None:
        """Queue requests; they start at the next step with the weights then loaded."""

    def step(self, steps: int = 8) -> list[Completion]:
        """Make at most `steps` decode steps and return the completions that ended."""

    def score(self, prompts: Sequence[ndarray], most_likely: int = 1) -> list[PromptScores]:
        """Score the tokens of sequences by one forward pass, without touching live rows.

        prompts: int32 [P] each, P >= 1. most_likely: the N of `PromptScores`, at least 1 and at
        most the vocabulary. Raises ConfigError for a sequence longer than the context, and for an
        engine that does not score.
        """

    def abort(self, keys: Iterable[Key]) -> TokenCounts:
        """Drop requests and return the number of tokens that each had."""

    def count_tokens(self) -> TokenCounts:
        """Return the tokens generated so far of every request in the engine."""

    def collect_metrics(self) -> Numbers:
        """Return metrics, summed since the engine's start."""
        return {}


def require_room(request: CompletionRequest, context: int) -> None:
    """Raise ConfigError for a request that does not fit into the context."""
    if len(request.prompt) + request.max_new_tokens > context:
        raise ConfigError(
            f"prompt of {len(request.prompt)} and {request.max_new_tokens} new tokens do "
            f"not fit generator.context = {context}"
        )


def build_spans(marks: Sequence[VersionMark], length: int, in_flight: str) -> list[VersionSpan]:
    """Return the version spans of a response of `length` tokens.

    Under recompute_kv each span's keys are of its own version, else of the first.
    """
    ends = [mark[0] for mark in marks[1:]] + [length]
    return [
        VersionSpan(
            label, digest, start, end, label if in_flight == "recompute_kv" else marks[0][1]
        )
        for (start, label, digest), end in zip(marks, ends, strict=True)
        if end > start
    ]


def build_completion(
    request: CompletionRequest,
    tokens: Sequence[int] | ndarray,
    logprobs: Sequence[float] | ndarray,
    spans: list[VersionSpan],
    support: SampledSupport | None = None,
    routed: RoutedExperts | None = None,
) -> Completion:
    """Build a completion from its tokens and their log-probabilities."""
    return Completion(
        request.key,
        request.prompt,
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        spans,
        "stop" if tokens[-1] in request.stop else "length",
        support=support,
        routed=routed,
    )


@dataclass
class EngineRow:
    """Host-side state of a live row."""

    request: CompletionRequest
    marks: list[VersionMark]
    # int32, the tokens that were kept at each position, where the request has a support; empty: all
    kept: list[ndarray] = field(default_factory=list)
    # uint16 [tokens, layers, k], the experts of the tokens read so far, in parts
    routed: list[ndarray] = field(default_factory=list)
    sampled: int = 0  # tokens so far


class RowEngine(Engine):
    """An engine in torch, whose requests wait for one of its rows.

    in_flight: how `load` treats live rows. base: the adapter base to which `load` adds each
    version; None: versions are full weights. routing: the shape of the experts that completions
    carry; None: they carry none.
    """

    rows: dict[int, Any]  # the live ones by slot, ascending

    def __init__(
        self,
        slots: int,
        context: int,
        in_flight: str,
        base: AdapterBase | None,
        routing: RoutingShape | None,
    ) -> None:
        self.slots = slots
        self.context = context
        self.in_flight = in_flight
        self.base = base
        self.routing = routing
        self.queue: deque[CompletionRequest] = deque()
        self.rows = {}
        self.label = Label(0, 0)
        self.digest = ""
        self.steps_made = 0
        self.vocabulary = 0  # tokens that a row with a support was sampled from

    @property
    def active(self) -> int:
        return len(self.rows) + len(self.queue)

    def load(
        self, weights: Mapping[str, Any], label: Label, digest: str, probe: bytes = b""
    ) -> None:
        if self.base is not None:
            weights = self.base.merge(weights, probe)
        self.use(weights)
        self.label = label
        self.digest = digest
        for row in self.rows.values():
            if row.marks[-1][0] == row.sampled:
                row.marks.pop()
            row.marks.append((row.sampled, label, digest))

    def use(self, weights: Mapping[str, Any]) -> None:
        """Copy whole weights for the next decode step."""

    def add(self, requests: Iterable[CompletionRequest]) -> None:
        for request in requests:
            require_room(request, self.context)
            self.queue.append(request)

    def abort(self, keys: Iterable[Key]) -> TokenCounts:
        aborted_keys = set(keys)
        tokens = {request.key: 0 for request in self.queue} | self.count_tokens()
        aborted = [request for request in self.queue if request.key in aborted_keys]
        self.queue = deque(request for request in self.queue if request.key not in aborted_keys)
        for slot, row in list(self.rows.items()):
            if row.request.key in aborted_keys:
                aborted.append(row.request)
                del self.rows[slot]
        for request in aborted:
            self.forget(request)
        return {request.key: tokens[request.key] for request in aborted}

    def forget(self, request: CompletionRequest) -> None:
        """Forget a request that left the engine without a completion."""

    def count_tokens(self) -> TokenCounts:
        return {row.request.key: row.sampled for row in self.rows.values()}

    def score(self, prompts: Sequence[ndarray], most_likely: int = 1) -> list[PromptScores]:
        longest = max((len(prompt) for prompt in prompts), default=0)
        if longest > self.context:
            raise ConfigError(
                f"a prompt of {longest} tokens does not fit generator.context = {self.context}"
            )
        return [self.score_prompt(prompt.astype(np.int64), most_likely) for prompt in prompts]

    def score_prompt(self, ids: ndarray, most_likely: int) -> PromptScores:
        """Score one sequence, int64 [P]."""
        raise NotImplementedError

    def list_constraints(self, count: int) -> list[TokenConstraint | None]:
        """Return the grammar of each of the first `count` rows."""
        rows = (self.rows.get(slot) for slot in range(count))
        return [None if row is None else row.request.constraint for row in rows]

    def record_kept(self, masks: Tensor, made: Mapping[int, int]) -> None:
        """Append kept tokens to the rows that have a support.

        masks: bool [n, m, V], of which the row `slot` has sampled the first made[slot].
        """
        self.vocabulary = masks.shape[2]
        recorded = [slot for slot, row in self.rows.items() if row.request.has_support]
        if recorded:
            ids = iter(list_kept_ids(torch.cat([masks[slot, : made[slot]] for slot in recorded])))
            for slot in recorded:
                self.rows[slot].kept += islice(ids, made[slot])

    def join_routing(self, row: EngineRow, *parts: ndarray) -> RoutedExperts | None:
        """Join the experts of a row's tokens with further ones; None: they are not recorded."""
        if self.routing is None:
            return None
        return RoutedExperts(np.concatenate([*row.routed, *parts]), self.routing.experts)

    def finish(
        self,
        slot: int,
        tokens: Sequence[int] | ndarray,
        logprobs: Sequence[float] | ndarray,
        routed: RoutedExperts | None,
    ) -> Completion:
        """Free a row; return its completion."""
        row = self.rows.pop(slot)
        spans = build_spans(row.marks, len(tokens), self.in_flight)
        support = SampledSupport.from_lists(row.kept, self.vocabulary) if row.kept else None
        return build_completion(row.request, tokens, logprobs, spans, support, routed)


def list_kept_ids(kept: Tensor) -> list[ndarray]:
    """List the kept tokens of each row, int32; an empty array if all were kept.

    kept: bool [n, V].
    """
    partial_mask = kept & ~kept.all(-1, keepdim=True)
    sizes = partial_mask.sum(-1).cpu().numpy()
    ids = partial_mask.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    return np.split(ids, np.cumsum(sizes)[:-1])


def score_states(
    states: Tensor, targets: Tensor, most_likely: int, logits: Callable[[Tensor], Tensor], size: int
) -> PromptScores:
    """Score the token after each state, with at most SCORED logits in memory.

    Args:
        states: [n, H].
        targets: [n], token ids.
        most_likely: of `Engine.score`.
        logits: maps states [m, H] to logits fp32 [m, size].
    """
    step = exact_operators.round_up(SCORED // size, exact_operators.ROWS)
    parts = []
    for start in range(0, max(1, len(states)), step):
        logs = torch.log_softmax(logits(states[start : start + step]), -1)
        of_targets = logs.gather(1, targets[start : start + step, None])[:, 0]
        parts.append((of_targets, *logs.topk(most_likely)))
    picked, best, ids = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    return PromptScores(picked, ids.astype(np.int32), best)


def build_engine(config: Config) -> Engine:
    """Build the engine that `generator.engine` names."""
    engine_module = importlib.import_module(config.generator.abilities.maker)
    engine: Engine = engine_module.make_engine(config)
    return engine


def load_model(engine: Engine, model: PolicyModel, label: Label) -> None:
    """Use a model's weights, as version `label`, from the next decode step on."""
    engine.load(dict(list_named_weights(model)), label, compute_weights_digest(model))


def draw_uniform_rows(keys: Sequence[tuple[int, int, int]], count: int) -> ndarray:
    """Return float32 [len(keys), count] in (0, 1), a counter-based random stream of every key.

    keys: (seed, ticket, sample) each; a number depends on its key and its position alone.

    The finalizer is SplitMix64 (Steele, Lea, Flood 2014), applied to a key that is itself mixed per
    component.
    """
    key = np.full(len(keys), uint64(0x9E3779B97F4A7C15))
    for components in zip(*keys, strict=True):
        column = np.array([number & 0xFFFFFFFFFFFFFFFF for number in components], uint64)
        key = _mix(key ^ _mix(column + uint64(0x632BE59BD9B4E019)))
    counter = np.arange(1, count + 1, dtype=uint64) * uint64(0x9E3779B97F4A7C15)
    bits = _mix(key[:, None] + counter)
    rows: ndarray = ((bits >> uint64(40)) + 0.5).astype(np.float32) * np.float32(2.0**-24)
    return rows


def _mix(bits: ndarray) -> ndarray:
    """Mix uint64 arrays. A numpy scalar would warn about the intended wraparound."""
    bits = (bits ^ (bits >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> uint64(27))) * uint64(0x94D049BB133111EB)
    mixed: ndarray = bits ^ (bits >> uint64(31))
    return mixed
