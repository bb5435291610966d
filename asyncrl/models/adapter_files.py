"""The weights of a LoRA adapter in a model, and its files in peft's format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncrl.config.tree import LoraConfig
from asyncrl.contract.errors import DamagedDataError

NAME = "default"  # peft's name of a model's adapter; files do not contain it
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of parameter names in peft's files
BASE = "base_digest"  # in the metadata of WEIGHTS: peft warns about unknown settings in CONFIG


@dataclass
class AdapterInfo:
    """The adapters of a model."""

    lora: LoraConfig
    base: str  # digest of the base weights
    base_bytes: int  # size of the base weights in the flat layout

    @property
    def scale(self) -> float:
        return float(self.lora.alpha / self.lora.rank)


def is_adapter_weight(name: str) -> bool:
    return f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name


def list_adapter_weights(hf: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Return (name, parameter) of the adapters.

    Names and shapes: MODULE.lora_A.weight [rank, in], MODULE.lora_B.weight [out, rank].
    """
    return [
        (name.replace(f".{NAME}.", "."), parameter)
        for name, parameter in hf.named_parameters()
        if is_adapter_weight(name)
    ]


def save(hf: Any, adapter: AdapterInfo, base_directory: str, path: Path) -> None:
    """Write the adapter of the model `hf` in peft's format to the directory `path`."""
    import safetensors.torch

    path.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base_directory).resolve()),
        "r": adapter.lora.rank,
        "lora_alpha": adapter.lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name, _ in list_adapter_weights(hf)}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (path / CONFIG).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    state = {PREFIX + name: p.detach().contiguous() for name, p in list_adapter_weights(hf)}
    safetensors.torch.save_file(
        state, path / WEIGHTS, metadata={"format": "pt", BASE: adapter.base}
    )


class StoredAdapter(NamedTuple):
    """The content of an adapter's files."""

    settings: dict[str, Any]  # peft's
    tensors: dict[str, torch.Tensor]  # by the names of `list_adapter_weights`
    base: str  # digest of the base; "" if another program wrote the files


def read(path: Path) -> StoredAdapter:
    """Read the adapter in `path`. Raises DamagedDataError."""
    import safetensors

    try:
        settings = json.loads((path / CONFIG).read_bytes())
        with safetensors.safe_open(str(path / WEIGHTS), framework="pt") as opened:
            base = (opened.metadata() or {}).get(BASE, "")
            names = list(opened.keys())
            tensors = {name.removeprefix(PREFIX): opened.get_tensor(name) for name in names}
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise DamagedDataError(f"the adapter in {path} cannot be read: {error}") from error
    return StoredAdapter(settings, tensors, base)
