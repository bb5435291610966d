"""LoRA (Hu et al. 2021, arXiv 2106.09685): low-rank matrices beside linear layers, which alone are
trained, published and kept.

The learner computes with peft's layers in place, the packed forward calls them like any other; an
engine never sees an adapter: `MergedWeights` is the weights of base and adapter together, each time
computed from the base, so that the same adapter gives the same bits however often it comes.  Files
are in peft's format.  This module imports peft only where adapters are put in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from asyncrl.config.tree import LoraConfig
from asyncrl.contract.errors import ConfigError, DamagedDataError
from asyncrl.models import layout
from asyncrl.models.packed_forward import ForwardOutput
from asyncrl.models.policy import (
    PolicyModel,
    copy_tokenizer,
    flat_bytes,
    load_policy,
    manifest,
    named_weights,
)

NAME = "default"  # peft's name of a model's adapter, in no file
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names in peft's files
BASE = "base_digest"  # in the metadata of WEIGHTS: peft warns of settings that it does not know


def base_digest(model: PolicyModel) -> str:
    """xxh3-64 over names and bytes of the weights, tensor by tensor."""
    found = xxhash.xxh3_64()
    for name, tensor in named_weights(model):
        found.update(name.encode())
        raw = tensor.detach().contiguous().flatten().view(torch.uint8)
        found.update(raw.cpu().numpy().data)
    return str(found.hexdigest())


def linear_names(model: PolicyModel) -> list[str]:
    """The linear layers that adapters can be put beside: all but the head, whose weight the loss
    reads itself.
    """
    head = model.hf.get_output_embeddings()
    return [
        name
        for name, module in model.hf.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]


def attach(model: PolicyModel, lora: LoraConfig, seed: int) -> None:
    """Put adapters into the model, in place: the base is frozen, B is zero, A is drawn by the seed;
    both are float32.  Raises ConfigError for modules that do not exist, or without peft.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("lora.rank: needs peft: pip install 'asyncrl[lora]'") from error

    found = layout.targets(linear_names(model), lora.target_modules)
    adapter = AdapterInfo(lora, base_digest(model), flat_bytes(manifest(model)))
    model.hf.requires_grad_(False)
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=found, lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model.hf, adapter_name=NAME)
    for name, parameter in model.hf.named_parameters():
        if _is_adapter_weight(name):
            parameter.data = parameter.data.float()
    model.adapter = adapter


@dataclass
class AdapterInfo:
    """What a model with adapters knows of them; base: digest of the weights that they belong to,
    base_bytes: what those would take to publish.
    """

    lora: LoraConfig
    base: str
    base_bytes: int

    @property
    def scale(self) -> float:
        return float(self.lora.alpha / self.lora.rank)


def _is_adapter_weight(name: str) -> bool:
    return f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name


def weights(hf: Any) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the adapters alone: MODULE.lora_A.weight [rank, in], MODULE.lora_B.weight
    [out, rank].
    """
    return [
        (name.replace(f".{NAME}.", "."), parameter.detach())
        for name, parameter in hf.named_parameters()
        if _is_adapter_weight(name)
    ]


@contextmanager
def adapters_disabled(hf: Any) -> Iterator[None]:
    """Inside, the model computes as its base does."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in hf.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@dataclass
class BasePolicyModel(PolicyModel):
    """The base of a model with adapters, over the same parameters: a reference that takes no
    memory.  Called without gradient.
    """

    def logprobs(self, *args: Any, **kwargs: Any) -> ForwardOutput:
        with adapters_disabled(self.hf):
            return super().logprobs(*args, **kwargs)


def without_adapters(model: PolicyModel) -> BasePolicyModel:
    """`model` with its adapters off."""
    return BasePolicyModel(model.hf, model.tokenizer_dir)


@contextmanager
def adapters_replaced(model: PolicyModel, other: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the adapters are those of another version."""
    mine = weights(model.hf)
    kept = [tensor.clone() for _, tensor in mine]
    with torch.no_grad():
        for name, tensor in mine:
            tensor.copy_(other[name])
        try:
            yield
        finally:
            for (_, tensor), before in zip(mine, kept, strict=True):
                tensor.copy_(before)


# ---- base and adapter together -------------------------------------------------------------------


class MergedWeights(Mapping[str, torch.Tensor]):
    """The weights of a base with an adapter in them, by the base's names, each computed when it is
    asked for: W + alpha / rank * B A, in float32, rounded to W's type.
    """

    def __init__(
        self, base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], scale: float
    ) -> None:
        self.base = base
        self.adapter = adapter
        self.scale = scale

    def __getitem__(self, name: str) -> torch.Tensor:
        own = self.base[name]
        at = name.removesuffix(".weight")
        down = self.adapter.get(f"{at}.lora_A.weight")
        if down is None:
            return own
        up = self.adapter[f"{at}.lora_B.weight"]
        low, high = (each.to(own.device, torch.float32) for each in (down, up))
        return torch.addmm(own.float(), high, low, alpha=self.scale).to(own.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


class AdapterBase:
    """The base of an engine, to which every version of the adapter is added anew."""

    def __init__(self, model: PolicyModel, lora: LoraConfig) -> None:
        layout.targets(linear_names(model), lora.target_modules)
        self.digest = base_digest(model)
        self.scale = lora.alpha / lora.rank
        # an engine that computes with the model's own parameters overwrites them
        own = model.fast is None
        self.weights = {n: t.clone() if own else t for n, t in named_weights(model)}

    def merge(self, adapter: Mapping[str, torch.Tensor], probe: bytes) -> MergedWeights:
        """The weights under `adapter`; probe: digest of the base that it was trained on, as the
        learner published it, or nothing.  Raises ConfigError for another base.
        """
        theirs = probe.decode()
        if theirs and theirs != self.digest:
            raise ConfigError(
                f"model.path: the base here has the digest {self.digest}, the learner's adapter "
                f"belongs to {theirs}: copy the learner's model directory to this machine"
            )
        return MergedWeights(self.weights, adapter, self.scale)


# ---- files ---------------------------------------------------------------------------------------


def save(model: PolicyModel, path: Path) -> None:
    """The adapter alone into the directory `path`, as peft reads it, with the tokenizer's files."""
    import safetensors.torch

    assert model.adapter is not None
    adapter = model.adapter
    path.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(model.tokenizer_dir).resolve()),
        "r": adapter.lora.rank,
        "lora_alpha": adapter.lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name, _ in weights(model.hf)}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (path / CONFIG).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    state = {PREFIX + name: tensor.contiguous() for name, tensor in weights(model.hf)}
    safetensors.torch.save_file(
        state, path / WEIGHTS, metadata={"format": "pt", BASE: adapter.base}
    )
    copy_tokenizer(model.tokenizer_dir, path)


class StoredAdapter(NamedTuple):
    """An adapter's files: peft's settings, tensors by the names of `weights`, digest of the base
    ("" where another program wrote it).
    """

    settings: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    base: str


def read(path: Path) -> StoredAdapter:
    """The adapter in `path`.  Raises Damaged."""
    import safetensors

    try:
        settings = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        with safetensors.safe_open(str(path / WEIGHTS), framework="pt") as opened:
            base = (opened.metadata() or {}).get(BASE, "")
            names = list(opened.keys())
            tensors = {name.removeprefix(PREFIX): opened.get_tensor(name) for name in names}
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise DamagedDataError(f"{path} holds no adapter that can be read: {error}") from error
    return StoredAdapter(settings, tensors, base)


def restore(model: PolicyModel, path: Path) -> None:
    """The adapter in `path` into the model's own.  Raises Damaged for another base or shape."""
    assert model.adapter is not None
    found = read(path)
    if found.base != model.adapter.base:
        raise DamagedDataError(
            f"the adapter in {path} belongs to another base (digest {found.base}) than "
            f"model.path = {model.tokenizer_dir} (digest {model.adapter.base}): start a new run, "
            "or point model.path at its base"
        )
    mine = weights(model.hf)
    if {name: tensor.shape for name, tensor in mine} != {
        n: t.shape for n, t in found.tensors.items()
    }:
        raise DamagedDataError(
            f"the adapter in {path} has another lora.rank or other lora.target_modules: start a "
            "new run, or set them as they were"
        )
    with torch.no_grad():
        for name, tensor in mine:
            tensor.copy_(found.tensors[name])


def merged_model(model: PolicyModel, device: str = "auto") -> PolicyModel:
    """A model of its own: base and adapter of `model` together."""
    assert model.adapter is not None
    dtype = str(model.hf.get_output_embeddings().weight.dtype).removeprefix("torch.")
    base = load_policy(model.tokenizer_dir, dtype, device)
    return _added(base, dict(weights(model.hf)), model.adapter.scale)


def merged_directory(base: PolicyModel, path: Path) -> PolicyModel:
    """`base` with the adapter in `path` added to its weights, in place.  Raises Damaged for another
    base.
    """
    found = read(path)
    if found.base != base_digest(base):
        raise DamagedDataError(
            f"the adapter in {path} belongs to another base than {base.tokenizer_dir}"
        )
    return _added(base, found.tensors, found.settings["lora_alpha"] / found.settings["r"])


def _added(base: PolicyModel, adapter: Mapping[str, torch.Tensor], scale: float) -> PolicyModel:
    own = dict(named_weights(base))
    merged = MergedWeights(own, adapter, scale)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(merged[name])
    return base
