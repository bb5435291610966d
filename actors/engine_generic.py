"""An engine for any transformers causal LM without a packed forward.

Every step encodes the live rows again. That is correct for every architecture, because it assumes
nothing about the cache, and slow: T steps of T tokens each. A swap always acts as `recompute_kv`.
Llama, Qwen2, Qwen3, Mistral, Qwen3-MoE and Mixtral use actors/engine_embedded.py instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.decoder import list_kept_ids, sample, score_states
from actors.decoding import constraints
from actors.engine import (
    Completion,
    CompletionRequest,
    Engine,
    Key,
    PromptScores,
    TokenCounts,
    VersionMark,
    build_completion,
    build_spans,
    draw_uniform_rows,
    mark_version,
    require_context,
)
from asyncrl.contract.blobs import images
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.contract.versions import Label
from asyncrl.models import router_hooks
from asyncrl.models.adapters import AdapterBase
from asyncrl.models.policy import PolicyModel, load_weights, pad_sequences


@dataclass
class GenericRow:
    """State of a live row.

    stream: float32 [max_new_tokens], the uniform numbers that its tokens are sampled by.
    """

    request: CompletionRequest
    tokens: list[int]
    logprobs: list[float]
    marks: list[VersionMark]
    stream: np.ndarray
    # int32, the tokens that were kept at each position, where the request has a support; empty: all
    kept: list[np.ndarray] = field(default_factory=list)
    # uint16 [tokens, layers, k], the experts of the tokens read so far, in parts
    routed: list[np.ndarray] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # the digests of the request's images


class GenericEngine(Engine):
    """See `actors.engine.Engine`.

    record_routing: completions of a mixture of experts carry the experts of their tokens, each as
    it was when the token was first read. fixed: the log-probabilities are bitwise those of the
    learner's plain path. Each row is then computed by itself, padded to the context.
    """

    def __init__(
        self,
        model: PolicyModel,
        *,
        slots: int,
        context: int,
        in_flight: str = "recompute_kv",
        max_new_tokens: int = 64,
        base: AdapterBase | None = None,
        record_routing: bool = False,
        fixed: bool = False,
    ) -> None:
        self.base = base
        self.fixed = fixed
        self.features: dict[str, Tensor] = {}  # digest -> features under the loaded weights
        self.routing = model.routing if record_routing else None
        self.model = model
        self.slots = slots
        self.context = context
        self.queue: deque[CompletionRequest] = deque()
        self.rows: list[GenericRow] = []
        self.label = Label(0, 0)
        self.digest = ""
        self.steps_made = 0
        self.vocabulary = 0  # tokens that a truncated row was sampled from

    @property
    def active(self) -> int:
        return len(self.rows) + len(self.queue)

    def load(
        self, weights: Mapping[str, Any], label: Label, digest: str, probe: bytes = b""
    ) -> None:
        if self.base is not None:
            weights = self.base.merge(weights, probe)
        load_weights(self.model, weights)
        self.features = {}
        self.label = label
        self.digest = digest
        for row in self.rows:
            mark_version(row.marks, len(row.tokens), label, digest)

    def add(self, requests: Iterable[CompletionRequest]) -> None:
        self.queue.extend(requests)

    @torch.inference_mode()
    def step(self, steps: int = 8) -> list[Completion]:
        completions: list[Completion] = []
        for _ in range(steps):
            while self.queue and len(self.rows) < self.slots:
                request = self.queue.popleft()
                self.rows.append(
                    GenericRow(
                        request,
                        [],
                        [],
                        [(0, self.label, self.digest)],
                        draw_uniform_rows([request.stream], request.max_new_tokens)[0],
                        images=[images.digest(blob) for blob in request.images],
                    )
                )
            if not self.rows:
                break
            self._decode()
            self.steps_made += 1
            ended_rows = [
                row
                for row in self.rows
                if row.tokens[-1] in row.request.stop
                or len(row.tokens) >= row.request.max_new_tokens
            ]
            self.rows = [row for row in self.rows if row not in ended_rows]
            completions += [self._build_completion(row) for row in ended_rows]
        return completions

    def _decode(self) -> None:
        device = self.model.device
        self._encode_images()
        if self.fixed:
            logits = torch.cat(
                [self._compute_last_logits([row], self.context) for row in self.rows]
            )
        else:
            longest = max(len(row.request.prompt) + len(row.tokens) for row in self.rows)
            logits = self._compute_last_logits(self.rows, longest)
        if self.model.vision is not None:
            logits = self.model.vision.exclude_image_token(logits)
        requests = [r.request for r in self.rows]
        uniform = torch.tensor([float(r.stream[len(r.tokens)]) for r in self.rows], device=device)
        scale = torch.tensor([1.0 / r.temperature for r in requests], device=device)
        cut = (
            torch.tensor([r.top_p for r in requests], device=device),
            torch.tensor([r.top_k for r in requests], device=device),
        )
        constrained = [request.constraint for request in requests]
        tokens, logprobs, kept_mask = sample(
            logits,
            uniform,
            scale,
            cut if any(request.truncates for request in requests) else None,
            constraints.compute_allowed_tokens(constrained, logits.shape[1], device),
        )
        constraints.advance(constrained, tokens)
        for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
        if kept_mask is not None:
            for row, ids in zip(self.rows, list_kept_ids(kept_mask), strict=True):
                if row.request.has_support:
                    row.kept.append(ids)
            self.vocabulary = kept_mask.shape[1]

    def _encode_images(self) -> None:
        """Encode the images of the live rows that the loaded weights have not encoded yet."""
        if self.model.vision is None:
            return
        blobs = {
            name: blob
            for row in self.rows
            for name, blob in zip(row.images, row.request.images, strict=True)
        }
        encoded = {name: self.features[name] for name in blobs if name in self.features}
        new_blobs = {name: blob for name, blob in blobs.items() if name not in encoded}
        self.features = encoded | self.model.vision.compute_features(new_blobs, single=self.fixed)

    def _compute_last_logits(self, rows: Sequence[GenericRow], width: int) -> Tensor:
        """Encode rows padded to `width`; return their next tokens' logits, fp32 [n, V]."""
        hf = self.model.hf
        device = self.model.device
        sequences = [[*r.request.prompt.tolist(), *r.tokens] for r in rows]
        routed: list[Tensor] | None = None if self.routing is None else []
        images: dict[str, Any] = {}
        if self.model.vision is not None:
            names = [name for row in rows for name in row.images]
            images = self.model.vision.build_inputs(names, self.features)
        replayed = None
        if self.routing is not None:  # tokens that were read before keep their experts
            known = [
                RoutedExperts(np.concatenate(row.routed), self.routing.experts)
                if row.routed
                else None
                for row in self.rows
            ]
            replayed = router_hooks.build_padded_table(known, self.routing, width, device)
        with router_hooks.replay_routing(hf, replayed, routed):
            padded = pad_sequences(sequences, width, device)
            outputs = hf(**padded, use_cache=False, **images)
        if routed is not None:
            # of the tokens that were read for the first time; routed: [rows * columns, k] a layer
            table = torch.stack(routed, 1).to(torch.int32).cpu().numpy().astype(np.uint16)
            by_row = table.reshape(len(self.rows), -1, *table.shape[1:])
            for row, experts, tokens in zip(self.rows, by_row, sequences, strict=True):
                row.routed.append(experts[sum(map(len, row.routed)) : len(tokens)])
        last_positions = torch.tensor(
            [len(tokens_so_far) - 1 for tokens_so_far in sequences], device=device
        )
        logits: Tensor = outputs.logits[
            torch.arange(len(sequences), device=device), last_positions
        ].float()
        return logits

    def _build_completion(self, row: GenericRow) -> Completion:
        spans = build_spans(row.marks, len(row.tokens), "recompute_kv")
        support = SampledSupport.from_lists(row.kept, self.vocabulary) if row.kept else None
        routed = None
        if self.routing is not None:
            routed = RoutedExperts(np.concatenate(row.routed), self.routing.experts)
        return build_completion(row.request, row.tokens, row.logprobs, spans, support, routed)

    @torch.inference_mode()
    def score(self, prompts: Sequence[np.ndarray], most_likely: int = 1) -> list[PromptScores]:
        require_context(prompts, self.context)
        scores = []
        for prompt in prompts:
            vision = self.model.vision
            if vision is not None and vision.shape.token in prompt:
                raise ConfigError("a prompt with an image cannot be scored; send text")
            ids = torch.from_numpy(prompt.astype(np.int64)).to(self.model.device)
            logits = self.model.hf(input_ids=ids[None], use_cache=False).logits[0, :-1]
            picked, likely, likely_logprobs = score_states(
                logits, ids[1:], most_likely, Tensor.float, logits.shape[1]
            )
            scores.append(
                PromptScores(
                    picked.cpu().numpy(),
                    likely.cpu().numpy().astype(np.int32),
                    likely_logprobs.cpu().numpy(),
                )
            )
        return scores

    def abort(self, keys: Iterable[Key]) -> TokenCounts:
        aborted_keys = set(keys)
        counts = {r.key: 0 for r in self.queue} | self.count_tokens()
        self.queue = deque(r for r in self.queue if r.key not in aborted_keys)
        self.rows = [r for r in self.rows if r.request.key not in aborted_keys]
        return {key: count for key, count in counts.items() if key in aborted_keys}

    def count_tokens(self) -> TokenCounts:
        return {r.request.key: len(r.tokens) for r in self.rows}
