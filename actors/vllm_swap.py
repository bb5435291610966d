"""Published weights straight into the layers of vLLM's model, without its reload.

vLLM's reload prepares for any checkpoint and any quantization: it rebuilds every layer, loads into
fresh memory, packs, and copies the outcome over the old.  For plain layers whose weights are those
of the Hugging Face model, stacked, less will do: copy into the live parameters, and on a CPU, where
vLLM packs the matrix of a linear layer and lets go of it, drop the old packing and pack the
published bytes where they lie.  Which layer takes which weights is found from the names, and
believed only after it was compared with what vLLM's own reload made of the same weights.  What is
not plain (quantized, experts, latent attention, other names) is told, and keeps the reload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

Weights = Mapping[str, torch.Tensor]
# elements; a smaller fp32 matrix multiplies faster as it is than packed for oneDNN (0.4 to 0.9 of
# the time at 8 to 64 rows)
PLAIN = 256 * 768
# of the largest output, where packed products are compared
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class UnsupportedModel(Exception):
    """A model that cannot be written directly; the text says why."""


@dataclass(frozen=True)
class StackedTensor:
    """One tensor of a vLLM layer, and the published weights that it consists of, stacked."""

    layer: Any
    kind: str  # attribute of the layer: weight, bias
    names: list[str]
    product: bool  # the matrix of a linear layer or of the output head
    tied: bool  # its tensor is another part's too, which fills it


def fused_view(weights: Weights, names: Sequence[str]) -> torch.Tensor | None:
    """The stacked tensor as a view, where the published ones lie one behind the other in memory."""
    first, *rest = (weights[name] for name in names)
    end = first.storage_offset() + first.numel()
    for weight in rest:
        if (
            weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or weight.storage_offset() != end
            or weight.dtype != first.dtype
        ):
            return None
        end += weight.numel()
    rows = sum(len(weights[name]) for name in names)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class DirectWriter:
    """The parts of one model.  Raises Unknown.  dtype: the engine's."""

    def __init__(self, model: torch.nn.Module, weights: Weights, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.cpu = next(model.parameters()).device.type == "cpu"
        self.parts = list(stacked_tensors(model, weights))
        found = [name for part in self.parts if not part.tied for name in part.names]
        if (missing := weights.keys() - set(found)) or len(found) > len(weights):
            raise UnsupportedModel(
                f"no layer of vLLM's takes {min(missing)}"
                if missing
                else "a weight belongs to several layers"
            )
        heads = [part.layer for part in self.parts if part.product]
        # embeddings: packed for nothing
        self.idle: list[Any] = [
            module
            for module in model.modules()
            if hasattr(module, "cpu_linear") and not any(module is h for h in heads)
        ]
        self.scratch = torch.empty(0, dtype=dtype)
        # by part: matrices kept plain where vLLM has let go of its own
        self.plain: dict[int, torch.Tensor] = {}

    def check_same(self, weights: Weights) -> None:
        """Compare with what vLLM's own reload has just made of these weights.  Raises Unknown."""
        for part in self.parts:
            want = self.stack(weights, part)
            live = getattr(part.layer, part.kind)
            if live.numel() and not torch.equal(
                live[: len(want)].float(), want.to(live.device, self.dtype).float()
            ):
                raise UnsupportedModel(f"vLLM's own loading changes {part.names[0]}")
            if live.numel() == 0 or (part.product and self.cpu):
                probe = torch.randn(
                    4, want.shape[1], generator=torch.Generator().manual_seed(0)
                ).to(self.dtype)
                got = part.layer.cpu_linear(probe, part.layer.weight, None).float()
                plain = linear(probe, want).float()
                if live.numel():
                    got = got[:, : len(want)]
                if (
                    got.shape != plain.shape
                    or not (got - plain).abs().max() <= CLOSE[self.dtype] * plain.abs().max()
                ):
                    raise UnsupportedModel(f"vLLM's own loading changes {part.names[0]}")

    def stack(self, weights: Weights, part: StackedTensor) -> torch.Tensor:
        """The tensor of one part in the engine's dtype, until the next call; a view of the
        published bytes where that will do.
        """
        whole = fused_view(weights, part.names)
        if whole is not None and (whole.dtype == self.dtype or not part.product):
            return whole
        size = sum(weights[name].numel() for name in part.names)
        if self.scratch.numel() < size:
            self.scratch = torch.empty(size, dtype=self.dtype, device=weights[part.names[0]].device)
        out = self.scratch[:size].view(-1, *weights[part.names[0]].shape[1:])
        self.copy(weights, part, out)
        return out

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        for module in self.idle:
            module.cpu_linear = linear
        for number, part in enumerate(self.parts):
            packed = (
                self.cpu
                and part.product
                and (
                    self.dtype != torch.float32
                    or sum(weights[name].numel() for name in part.names) >= PLAIN
                )
            )
            if packed:
                # first give back the old packing, so that the new one gets its memory
                part.layer.cpu_linear = None
                # else the output head, which keeps its plain weight, padded and perhaps tied
                if not getattr(part.layer, part.kind).numel():
                    part.layer.weight = torch.nn.Parameter(
                        self.stack(weights, part), requires_grad=False
                    )
                    pack(part.layer, remove_weight=True)
                    continue
            elif self.cpu and part.product and not part.layer.weight.numel():
                own = (
                    self.plain[number]
                    if number in self.plain
                    else self.plain.setdefault(number, self.stack(weights, part).clone())
                )
                part.layer.cpu_linear = lambda probe, _weight, bias, own=own: linear(
                    probe, own, bias
                )
                self.copy(weights, part, own)
                continue
            elif self.cpu and part.product:
                part.layer.cpu_linear = linear
            if not part.tied:
                self.copy(weights, part, getattr(part.layer, part.kind))
            if packed:
                pack(part.layer, remove_weight=False)

    @staticmethod
    def copy(weights: Weights, part: StackedTensor, live: torch.Tensor) -> None:
        """Fill the rows of `live` that are published; those beyond, of a padded vocabulary, stay
        zero.
        """
        at = 0
        for name in part.names:
            live[at : at + len(weights[name])].copy_(weights[name])
            at += len(weights[name])


def pack(layer: Any, *, remove_weight: bool) -> None:
    """vLLM's own choice of a CPU kernel for a layer, and its packing of `layer.weight`."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(layer, remove_weight=remove_weight)


def stacked_tensors(model: torch.nn.Module, weights: Weights) -> Iterator[StackedTensor]:
    """Every parameter of the model and its sources.  Raises Unknown for a layer that is not
    plain.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    stacks: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    has_head = any(isinstance(module, ParallelLMHead) for module in model.modules())
    seen: dict[int, list[str]] = {}
    for path, layer in model.named_modules():
        method: Any = getattr(layer, "quant_method", None)
        square = isinstance(layer, LinearBase) and type(method) is UnquantizedLinearMethod
        table = (
            isinstance(layer, VocabParallelEmbedding) and type(method) is UnquantizedEmbeddingMethod
        )
        if not (square or table) and (
            method is not None
            or (hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention)
        ):
            raise UnsupportedModel(f"{path} ({type(layer).__name__}) is not plain")
        prefix, _, leaf = path.rpartition(".")
        for kind, tensor in layer.named_parameters(recurse=False):
            head = (
                table and kind == "weight" and (isinstance(layer, ParallelLMHead) or not has_head)
            )
            names = [".".join(filter(None, (prefix, s, kind))) for s in stacks.get(leaf, [leaf])]
            tied = head and names[0] not in weights and id(tensor) in seen
            if tied:
                names = seen[id(tensor)]
            elif any(name not in weights for name in names):
                raise UnsupportedModel(
                    "no published weight is called "
                    f"{next(name for name in names if name not in weights)}"
                )
            elif not _shapes_fit(tensor, [weights[name] for name in names], padded=table):
                raise UnsupportedModel(f"{path}.{kind} has another shape than {names[0]}")
            seen[id(tensor)] = names
            yield StackedTensor(layer, kind, names, kind == "weight" and (square or head), tied)


def _shapes_fit(tensor: torch.Tensor, sources: Sequence[torch.Tensor], *, padded: bool) -> bool:
    rows = sum(len(s) for s in sources)
    if any(s.shape[1:] != sources[0].shape[1:] or not s.is_contiguous() for s in sources):
        return False
    if tensor.numel() == 0:  # packed, its plain form gone
        return sources[0].ndim == 2
    return tensor.shape[1:] == sources[0].shape[1:] and (
        len(tensor) == rows or (padded and len(tensor) > rows)
    )
