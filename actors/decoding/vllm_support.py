"""Top-p, top-k and grammars in front of vLLM's sampler; records the support.

vLLM 0.32 returns the kept tokens (`return_sampling_mask`) from one of its model runners only, which
does not run on a CPU, and its guided decoding needs vLLM's own tokenizer.  So both happen here, in
front of its sampler: grammars and truncation are applied to the logits, the rest is recorded, and
the sampler gets logits that are -inf for all other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from actors.decoder import list_kept_ids
from actors.decoding.constraints import TokenConstraint
from asyncrl.contract.sampled_support import SampledSupport


class RecordedRequest:
    """A request whose support is recorded.

    kept: position -> int32, the tokens that it was sampled from; empty: all. A position that vLLM
    samples again, as it was preempted or its prompt is encoded in parts, replaces the earlier one.
    """

    def __init__(self, constraint: TokenConstraint | None) -> None:
        self.constraint = constraint
        self.consumed = 0  # tokens that the constraint has advanced by
        self.kept: dict[int, np.ndarray] = {}

    def compute_allowed(self, tokens: list[int], size: int) -> np.ndarray | None:
        """Return bool [size]: the tokens that may follow `tokens`; None: all."""
        if self.constraint is None:
            return None
        for token in tokens[self.consumed :]:
            self.constraint.advance(token)
        self.consumed = len(tokens)
        return self.constraint.compute_allowed(size)


class SupportRecorder:
    """A record of the requests that have a support, whose distributions it restricts."""

    def __init__(self) -> None:
        self.requests: dict[str, RecordedRequest] = {}
        self.vocabulary = 0

    def begin(self, name: str, constraint: TokenConstraint | None) -> None:
        """Record a request, by its name at the engine."""
        self.requests[name] = RecordedRequest(constraint)

    def end(self, name: str, length: int = 0) -> SampledSupport | None:
        """Forget a request; return the support of its `length` tokens, if recorded."""
        recorded = self.requests.pop(name, None)
        if recorded is None:
            return None
        kept = [recorded.kept[position] for position in range(length)]
        return SampledSupport.from_lists(kept, self.vocabulary)

    def install(self, runner: Any) -> None:
        """Put this in front of the sampler of vLLM's model runner."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        inner = runner.sampler.topk_topp_sampler
        plain: Callable[..., Any] = inner.forward

        def forward(
            logits: torch.Tensor,
            generators: dict[int, torch.Generator],
            keys: torch.Tensor | None,
            parameter: torch.Tensor | None,
        ) -> Any:
            rows = self._map_rows(runner.input_batch, len(logits)) if self.requests else {}
            if not rows:
                return plain(logits, generators, keys, parameter)
            for row, (recorded, tokens) in rows.items():
                allowed = recorded.compute_allowed(tokens, logits.shape[1])
                if allowed is not None:
                    mask = torch.from_numpy(allowed).to(logits.device)
                    logits[row].masked_fill_(~mask, -torch.inf)
            logits = apply_top_k_top_p(logits, keys, parameter)
            self.vocabulary = logits.shape[1]
            chosen = torch.tensor(list(rows), device=logits.device)
            for (recorded, tokens), ids in zip(
                rows.values(), list_kept_ids(logits[chosen] > -torch.inf), strict=True
            ):
                recorded.kept[len(tokens)] = ids
            return plain(logits, generators, None, None)

        inner.forward = forward

    def _map_rows(self, batch: Any, count: int) -> dict[int, tuple[RecordedRequest, list[int]]]:
        """Return the recorded requests by their row, each with its tokens so far."""
        rows = {}
        for row, internal in enumerate(batch.req_ids[:count]):
            # vLLM appends a random part to the name
            recorded = self.requests.get(internal.rpartition("-")[0])
            if recorded is not None:
                rows[row] = recorded, batch.req_output_token_ids[row]
        return rows
