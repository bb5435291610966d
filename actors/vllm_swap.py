"""Write published weights directly into the layers of vLLM's model.

vLLM's reload handles any checkpoint and any quantization: it rebuilds every layer, loads into fresh
memory, packs, and copies the result over the old layer. Plain layers, whose weights are stacked
Hugging Face weights, need less: a copy into the live parameters. On a CPU vLLM packs the matrix of
a linear layer and frees the plain one; here the old packing is dropped and the published bytes are
packed in place. The names tell which layer takes which weights. This mapping is used only after a
comparison with the result of vLLM's own reload of the same weights. Anything that is not plain
(quantized, experts, latent attention, other names) is reported and keeps the reload.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

Weights = Mapping[str, torch.Tensor]
# elements; a smaller fp32 matrix multiplies faster unpacked than packed for oneDNN (0.4 to 0.9 of
# the time at 8 to 64 rows)
PLAIN = 256 * 768
# tolerance of packed products, relative to the largest output
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class UnsupportedModel(Exception):
    """A model that cannot be written directly; the text gives the reason."""


@dataclass(frozen=True)
class StackedTensor:
    """One tensor of a vLLM layer, and the published weights stacked in it."""

    layer: Any
    kind: str  # attribute of the layer: weight, bias
    names: list[str]
    product: bool  # the matrix of a linear layer or of the output head
    tied: bool  # shared with another part, which fills it


def view_fused(weights: Weights, names: Sequence[str]) -> torch.Tensor | None:
    """Return the stacked tensor as a view, or None if the parts are not contiguous."""
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
    """A writer of weights into the layers of one model. Raises UnsupportedModel.

    dtype: the engine's.
    """

    def __init__(self, model: torch.nn.Module, weights: Weights, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.cpu = next(model.parameters()).device.type == "cpu"
        self.parts = list(find_stacked_tensors(model, weights))
        names = [name for part in self.parts if not part.tied for name in part.names]
        if (missing := weights.keys() - set(names)) or len(names) > len(weights):
            raise UnsupportedModel(
                f"no layer of vLLM's takes {min(missing)}"
                if missing
                else "a weight belongs to several layers"
            )
        heads = [part.layer for part in self.parts if part.product]
        # embeddings, which vLLM packs needlessly
        self.idle: list[Any] = [
            module
            for module in model.modules()
            if hasattr(module, "cpu_linear") and not any(module is h for h in heads)
        ]
        self.scratch = torch.empty(0, dtype=dtype)
        # by part: matrices kept unpacked whose plain form vLLM has freed
        self.plain: dict[int, torch.Tensor] = {}

    def check_same(self, weights: Weights) -> None:
        """Compare with the result of vLLM's reload of these weights.

        Raises UnsupportedModel.
        """
        for part in self.parts:
            expected = self.stack(weights, part)
            live = getattr(part.layer, part.kind)
            if live.numel() and not torch.equal(
                live[: len(expected)].float(), expected.to(live.device, self.dtype).float()
            ):
                raise UnsupportedModel(f"vLLM's own loading changes {part.names[0]}")
            if live.numel() == 0 or (part.product and self.cpu):
                probe = torch.randn(
                    4, expected.shape[1], generator=torch.Generator().manual_seed(0)
                ).to(self.dtype)
                product = part.layer.cpu_linear(probe, part.layer.weight, None).float()
                plain = linear(probe, expected).float()
                if live.numel():
                    product = product[:, : len(expected)]
                if (
                    product.shape != plain.shape
                    or not (product - plain).abs().max() <= CLOSE[self.dtype] * plain.abs().max()
                ):
                    raise UnsupportedModel(f"vLLM's own loading changes {part.names[0]}")

    def stack(self, weights: Weights, part: StackedTensor) -> torch.Tensor:
        """Return one part's tensor in the engine's dtype, valid until the next call.

        A view of the published bytes where possible.
        """
        view = view_fused(weights, part.names)
        if view is not None and (view.dtype == self.dtype or not part.product):
            return view
        size = sum(weights[name].numel() for name in part.names)
        if self.scratch.numel() < size:
            self.scratch = torch.empty(size, dtype=self.dtype, device=weights[part.names[0]].device)
        stacked = self.scratch[:size].view(-1, *weights[part.names[0]].shape[1:])
        self.copy(weights, part, stacked)
        return stacked

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Write `weights` into all layers."""
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
                # free the old packing first, so that the new one reuses its memory
                part.layer.cpu_linear = None
                # a nonempty weight is the output head, which stays plain, padded and perhaps tied
                if not getattr(part.layer, part.kind).numel():
                    part.layer.weight = torch.nn.Parameter(
                        self.stack(weights, part), requires_grad=False
                    )
                    pack(part.layer, remove_weight=True)
                    continue
            elif self.cpu and part.product and not part.layer.weight.numel():
                plain_weight = (
                    self.plain[number]
                    if number in self.plain
                    else self.plain.setdefault(number, self.stack(weights, part).clone())
                )
                part.layer.cpu_linear = lambda probe, _weight, bias, own=plain_weight: linear(
                    probe, own, bias
                )
                self.copy(weights, part, plain_weight)
                continue
            elif self.cpu and part.product:
                part.layer.cpu_linear = linear
            if not part.tied:
                self.copy(weights, part, getattr(part.layer, part.kind))
            if packed:
                pack(part.layer, remove_weight=False)

    @staticmethod
    def copy(weights: Weights, part: StackedTensor, live: torch.Tensor) -> None:
        """Fill the published rows of `live`; the padding of a vocabulary stays zero."""
        row = 0
        for name in part.names:
            live[row : row + len(weights[name])].copy_(weights[name])
            row += len(weights[name])


def pack(layer: Any, *, remove_weight: bool) -> None:
    """Pack `layer.weight` for the CPU kernel that vLLM chooses."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(layer, remove_weight=remove_weight)


def find_stacked_tensors(model: torch.nn.Module, weights: Weights) -> Iterator[StackedTensor]:
    """Yield every parameter of the model with its sources.

    Raises UnsupportedModel for a layer that is not plain.
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
    names_by_tensor: dict[int, list[str]] = {}
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
            tied = head and names[0] not in weights and id(tensor) in names_by_tensor
            if tied:
                names = names_by_tensor[id(tensor)]
            elif any(name not in weights for name in names):
                raise UnsupportedModel(
                    f"no published weight is called {min(set(names) - set(weights))}"
                )
            elif not _shapes_fit(tensor, [weights[name] for name in names], padded=table):
                raise UnsupportedModel(f"{path}.{kind} has another shape than {names[0]}")
            names_by_tensor[id(tensor)] = names
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
