"""An engine for any transformers causal LM without a packed forward.

Every step encodes the live rows again. That is correct for every architecture, because it assumes
nothing about the cache, and slow: T steps of T tokens each. A swap always acts as `recompute_kv`.
Llama, Qwen2, Qwen3, Mistral, Qwen3-MoE and Mixtral use actors/engine_embedded.py instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.decoder import sample
from actors.decoding import constraints
from actors.engine import (
    Completion,
    EngineRow,
    PromptScores,
    RowEngine,
    draw_uniform_rows,
    score_states,
)
from asyncrl.contract.blobs import images
from asyncrl.contract.errors import ConfigError
from asyncrl.models.adapters import AdapterBase
from asyncrl.models.policy import PolicyModel, load_weights, run_modules


@dataclass
class GenericRow(EngineRow):
    """A live row of the generic engine.

    stream: float32 [max_new_tokens], the uniform numbers that its tokens are sampled by.
    """

    stream: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # the digests of the request's images

    @property
    def sequence(self) -> list[int]:
        """The prompt and the tokens so far."""
        return [*self.request.prompt.tolist(), *self.tokens]


class GenericEngine(RowEngine):
    """See `actors.engine.RowEngine`.

    record_routing: completions of a mixture of experts carry the experts of their tokens, each as
    it was when the token was first read. fixed: the log-probabilities are bitwise those of the
    learner's plain path. Each row is then computed by itself, padded to the context.
    """

    rows: dict[int, GenericRow]

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
        routing = model.routing if record_routing else None
        super().__init__(slots, context, "recompute_kv", base, routing)
        self.fixed = fixed
        self.features: dict[str, Tensor] = {}  # digest -> features under the loaded weights
        self.model = model

    def use(self, weights: Mapping[str, Any]) -> None:
        load_weights(self.model, weights)
        self.features = {}

    @torch.inference_mode()
    def step(self, steps: int = 8) -> list[Completion]:
        completions: list[Completion] = []
        for _ in range(steps):
            self.rows = dict(enumerate(self.rows.values()))
            while self.queue and len(self.rows) < self.slots:
                request = self.queue.popleft()
                self.rows[len(self.rows)] = GenericRow(
                    request,
                    [(0, self.label, self.digest)],
                    stream=draw_uniform_rows([request.stream], request.max_new_tokens)[0],
                    images=[images.digest(blob) for blob in request.images],
                )
            if not self.rows:
                break
            self._decode()
            self.steps_made += 1
            for slot, row in list(self.rows.items()):
                request = row.request
                if row.tokens[-1] in request.stop or row.sampled >= request.max_new_tokens:
                    experts = self.join_routing(row)
                    completions.append(self.finish(slot, row.tokens, row.logprobs, experts))
        return completions

    def _decode(self) -> None:
        rows = list(self.rows.values())
        device = self.model.device
        self._encode_images()
        if self.fixed:
            parts = [self._compute_last_logits([row], self.context) for row in rows]
            logits = torch.cat(parts)
        else:
            longest = max(len(row.request.prompt) + row.sampled for row in rows)
            logits = self._compute_last_logits(rows, longest)
        if self.model.vision is not None:
            logits = self.model.vision.exclude_image_token(logits)
        requests = [row.request for row in rows]
        uniform, scale, top_p, top_k = (
            torch.tensor(values, device=device)
            for values in (
                [float(row.stream[row.sampled]) for row in rows],
                [1.0 / request.temperature for request in requests],
                [request.top_p for request in requests],
                [request.top_k for request in requests],
            )
        )
        constrained = self.list_constraints(len(rows))
        tokens, logprobs, kept_mask = sample(
            logits,
            uniform,
            scale,
            (top_p, top_k) if any(request.truncates for request in requests) else None,
            constraints.compute_allowed_tokens(constrained, logits.shape[1], device),
        )
        constraints.advance(constrained, tokens)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.sampled += 1
        if kept_mask is not None:
            self.record_kept(kept_mask[:, None], dict.fromkeys(self.rows, 1))

    def _encode_images(self) -> None:
        """Encode the images of the live rows that the loaded weights have not encoded yet."""
        if self.model.vision is None:
            return
        blobs = {
            name: blob
            for row in self.rows.values()
            for name, blob in zip(row.images, row.request.images, strict=True)
        }
        encoded = {name: self.features[name] for name in blobs if name in self.features}
        new_blobs = {name: blob for name, blob in blobs.items() if name not in encoded}
        self.features = encoded | self.model.vision.compute_features(new_blobs, single=self.fixed)

    def _compute_last_logits(self, rows: Sequence[GenericRow], width: int) -> Tensor:
        """Encode rows padded to `width`; return their next tokens' logits, fp32 [n, V]."""
        sequences = [row.sequence for row in rows]
        routed: list[Tensor] | None = None if self.routing is None else []
        images: dict[str, Any] = {}
        if self.model.vision is not None:
            names = [name for row in rows for name in row.images]
            images = self.model.vision.build_inputs(names, self.features)
        # tokens that were read before keep their experts
        known = [self.join_routing(row) if row.routed else None for row in rows]
        outputs = run_modules(self.model.hf, sequences, width, known, routed, **images)
        if routed is not None:
            # of the tokens that were read for the first time; routed: [rows * columns, k] a layer
            table = torch.stack(routed, 1).to(torch.int32).cpu().numpy().astype(np.uint16)
            by_row = table.reshape(len(rows), -1, *table.shape[1:])
            for row, experts, tokens in zip(rows, by_row, sequences, strict=True):
                row.routed.append(experts[sum(map(len, row.routed)) : len(tokens)])
        last_positions = [len(tokens) - 1 for tokens in sequences]
        logits: Tensor = outputs.logits[list(range(len(rows))), last_positions].float()
        return logits

    @torch.inference_mode()
    def score_prompt(self, ids: np.ndarray, most_likely: int) -> PromptScores:
        vision = self.model.vision
        if vision is not None and vision.shape.token in ids:
            raise ConfigError("a prompt with an image cannot be scored; send text")
        tokens = torch.from_numpy(ids).to(self.model.device)
        logits = self.model.hf(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        return score_states(logits, tokens[1:], most_likely, Tensor.float, logits.shape[1])
