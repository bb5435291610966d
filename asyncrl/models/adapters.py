"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): low-rank matrices added to linear layers.

Only the adapters are trained, published and stored. The learner computes with peft's layers, which
the packed forward calls like any linear layer. An engine never sees an adapter: it gets
merged weights, which are computed from the base each time, so that the same adapter gives the same
bits however often it is loaded. Files are in peft's format. peft is only imported to attach
adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from asyncrl.config.tree import LoraConfig
from asyncrl.contract.errors import ConfigError, DamagedDataError
from asyncrl.models import layout
from asyncrl.models.adapter_files import (
    NAME,
    AdapterInfo,
    is_adapter_weight,
    list_adapter_weights,
    read,
)
from asyncrl.models.packed_forward import ForwardOutput
from asyncrl.models.policy import (
    LazyWeights,
    PolicyModel,
    build_manifest,
    count_flat_bytes,
    list_named_weights,
    load_policy,
    load_weights,
)
from asyncrl.models.weight_rounding import list_linear_layers


def compute_base_digest(model: PolicyModel) -> str:
    """Return the xxh3-64 over names and bytes of the weights, tensor by tensor."""
    digest = xxhash.xxh3_64()
    for name, tensor in list_named_weights(model):
        digest.update(name.encode())
        raw = tensor.contiguous().flatten().view(torch.uint8)
        digest.update(raw.cpu().numpy().data)
    return str(digest.hexdigest())


def _select_modules(model: PolicyModel, lora: LoraConfig) -> list[str]:
    # the head is excluded: the loss reads its weight directly
    names = [name for name, _ in list_linear_layers(model.hf)]
    return layout.select_targets(names, lora.target_modules)


def attach(model: PolicyModel, lora: LoraConfig, seed: int) -> None:
    """Attach adapters to the model, in place, and freeze the base.

    B is zero, A is random with the given seed; both are float32. Raises ConfigError for modules
    that do not exist, or without peft.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("lora.rank: needs peft: pip install 'asyncrl[lora]'") from error

    modules = _select_modules(model, lora)
    adapter = AdapterInfo(lora, compute_base_digest(model), count_flat_bytes(build_manifest(model)))
    model.hf.requires_grad_(False)
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=modules, lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model.hf, adapter_name=NAME)
    for name, parameter in model.hf.named_parameters():
        if is_adapter_weight(name):
            parameter.data = parameter.data.float()
    model.adapter = adapter


@dataclass
class BasePolicyModel(PolicyModel):
    """The base of a model with adapters, a reference policy that shares its parameters.

    Called without gradient.
    """

    def logprobs(self, *args: Any, **kwargs: Any) -> ForwardOutput:
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in self.hf.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return super().logprobs(*args, **kwargs)
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def build_base_policy(model: PolicyModel) -> BasePolicyModel:
    """Return `model` with its adapters disabled."""
    return BasePolicyModel(model.hf, model.tokenizer_dir)


@contextmanager
def replace_values(tensors: list[Tensor], replacement: list[Tensor]) -> Iterator[None]:
    """Put other values into tensors inside the block; their own come back to the bit."""
    copies = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        torch._foreach_copy_(tensors, replacement)
        try:
            yield
        finally:
            torch._foreach_copy_(tensors, copies)


# ---- base and adapter together -------------------------------------------------------------------


def merge_weights(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float
) -> LazyWeights:
    """Return the weights of a base with an adapter merged, by the base's names.

    Each is computed when it is read: W + alpha / rank * B A, in float32, rounded to W's dtype.
    """

    def merge(name: str, weight: Tensor) -> Tensor:
        module = name.removesuffix(".weight")
        lora_a = adapter.get(f"{module}.lora_A.weight")
        if lora_a is None:
            return weight
        factors = adapter[f"{module}.lora_B.weight"], lora_a
        matrix_b, matrix_a = (factor.to(weight.device, torch.float32) for factor in factors)
        return torch.addmm(weight.float(), matrix_b, matrix_a, alpha=scale).to(weight.dtype)

    return LazyWeights(base, merge)


class AdapterBase:
    """The base of an engine, into which each version of the adapter is merged."""

    def __init__(self, model: PolicyModel, lora: LoraConfig) -> None:
        _select_modules(model, lora)
        self.digest = compute_base_digest(model)
        self.scale = lora.alpha / lora.rank
        # without the fast path, the engine overwrites the model's own parameters
        copied = model.fast is None
        self.weights = {n: t.clone() if copied else t for n, t in list_named_weights(model)}

    def merge(self, adapter: Mapping[str, Tensor], probe: bytes) -> LazyWeights:
        """Merge `adapter` into the base.

        probe: digest of the learner's base, as it was published; may be empty. Raises ConfigError
        for another base.
        """
        base = probe.decode()
        if base and base != self.digest:
            raise ConfigError(
                f"model.path: the base here has the digest {self.digest}, the learner's adapter "
                f"belongs to {base}: copy the learner's model directory to this machine"
            )
        return merge_weights(self.weights, adapter, self.scale)


# ---- files ---------------------------------------------------------------------------------------


def read_fitting(model: PolicyModel, path: Path) -> dict[str, Tensor]:
    """Return the adapter in `path` by the names of `list_adapter_weights`.

    Raises DamagedDataError if it belongs to another base or has other shapes than the model's.
    """
    assert model.adapter is not None
    stored = read(path)
    if stored.base != model.adapter.base:
        raise DamagedDataError(
            f"the adapter in {path} belongs to another base (digest {stored.base}) than "
            f"model.path = {model.tokenizer_dir} (digest {model.adapter.base}): start a new run, "
            "or point model.path at its base"
        )
    if {name: tensor.shape for name, tensor in list_adapter_weights(model.hf)} != {
        n: t.shape for n, t in stored.tensors.items()
    }:
        raise DamagedDataError(
            f"the adapter in {path} has another lora.rank or other lora.target_modules: start a "
            "new run, or set them to the old values"
        )
    return stored.tensors


def merge_model(model: PolicyModel, device: str) -> PolicyModel:
    """Return a new model with base and adapter of `model` merged."""
    assert model.adapter is not None
    dtype = str(model.hf.get_output_embeddings().weight.dtype).removeprefix("torch.")
    base = load_policy(model.tokenizer_dir, dtype, device)
    return _merge(base, dict(list_adapter_weights(model.hf)), model.adapter.scale)


def merge_directory(base: PolicyModel, path: Path) -> PolicyModel:
    """Merge the adapter in `path` into `base`, in place.

    Raises DamagedDataError for another base.
    """
    stored = read(path)
    if stored.base != compute_base_digest(base):
        raise DamagedDataError(
            f"the adapter in {path} belongs to another base than {base.tokenizer_dir}"
        )
    return _merge(base, stored.tensors, stored.settings["lora_alpha"] / stored.settings["r"])


def _merge(base: PolicyModel, adapter: Mapping[str, Tensor], scale: float) -> PolicyModel:
    load_weights(base, merge_weights(dict(list_named_weights(base)), adapter, scale))
    return base
