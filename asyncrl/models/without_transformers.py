"""Load and save a Llama-like model without importing transformers.

The packed forward (packed_forward.py) and the decoder need a model's parameters, a few numbers of
its config and its rotary table; importing transformers for them costs each process seconds of CPU.
`load` provides them, under transformers' names and in its order, for directories that describe the
model completely; it returns None for all others, which transformers loads. A call of the model
itself (a plain forward, `generate`) goes to transformers' modules over the same parameters, which
are built on the first call.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.models.layout import (
    INDEX,
    WEIGHTS,
    compute_head_dim,
    find_rope_base,
    is_plain_config,
    list_shapes,
)


class BareConfig(SimpleNamespace):
    """The keys of config.json as attributes."""

    def get_text_config(self) -> BareConfig:
        return self


class RotaryEmbedding(nn.Module):
    """Rotary embedding in the half-split layout (Su et al. 2021, arXiv 2104.09864).

    Maps positions [B, n] to cos and sin [B, n, head_dim], whose second half repeats the first.
    """

    rope_type = "default"

    frequencies: Tensor

    def __init__(self, base: float, dim: int) -> None:
        super().__init__()
        self.register_buffer(
            "frequencies",
            1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)),
            persistent=False,
        )

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        # in float32 even for a bf16 model
        frequencies = self.frequencies.to(like.device, torch.float32)
        angles = positions[..., None].float() * frequencies
        repeated = torch.cat((angles, angles), dim=-1)
        return repeated.cos().to(like.dtype), repeated.sin().to(like.dtype)


class BareLinear(nn.Linear):
    """x W^T + b, built without torch's random initialization.

    It is a subclass of nn.Linear because peft only attaches adapters to that.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)


class WeightModule(nn.Module):
    """A module that only has the weight of an embedding or a norm."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class BareModel(nn.Module):
    """A Llama-like model with transformers' parameter names.

    files: the directory's JSON files, for `save_pretrained`.
    """

    def __init__(
        self, raw: dict[str, Any], tensors: dict[str, Tensor], files: dict[str, str]
    ) -> None:
        super().__init__()
        self.config = BareConfig(**raw)
        self._files = files
        self.model: Any = nn.Module()
        parameters = {name: nn.Parameter(tensors[name]) for name in list_shapes(raw)}
        for name, parameter in parameters.items():
            path, _, leaf = name.rpartition(".")
            *parents, last = path.split(".")
            owner: Any = self
            for part in parents:
                made = nn.ModuleList() if part == "layers" else nn.Module()
                owner = owner._modules.setdefault(part, made)
            if leaf == "weight" and last.endswith("_proj"):
                owner.add_module(last, BareLinear(parameter, parameters.get(f"{path}.bias")))
            elif leaf == "weight":
                owner.add_module(last, WeightModule(parameter))
        self.model.rotary_emb = RotaryEmbedding(find_rope_base(raw) or 0.0, compute_head_dim(raw))
        if self.config.tie_word_embeddings:
            self.lm_head = WeightModule(parameters["model.embed_tokens.weight"])
        self._full: list[Any] = []  # in a list, so that it is not a submodule

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def get_full_model(self) -> Any:
        """Return transformers' model with the same parameters."""
        if not self._full:
            import transformers

            first_parameter = next(self.parameters())
            config = transformers.AutoConfig.for_model(**vars(self.config))
            with torch.random.fork_rng(devices=[]):  # its initialization consumes random numbers
                hf = transformers.AutoModelForCausalLM.from_config(
                    config, dtype=first_parameter.dtype, attn_implementation="sdpa"
                ).to(first_parameter.device)
            for name, parameter in self.named_parameters(remove_duplicate=False):
                module, _, leaf = name.rpartition(".")
                setattr(hf.get_submodule(module), leaf, parameter)
            self._full.append(hf)
        return self._full[0].train(self.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' model."""
        return self.get_full_model()(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate` of transformers' model."""
        return self.get_full_model().generate(*args, **kwargs)

    def save_pretrained(self, path: str | Path) -> None:
        """Write config.json, generation_config.json and one weights file, as transformers does."""
        import safetensors.torch

        for name, text in self._files.items():
            (Path(path) / name).write_text(text, encoding="utf-8")
        state = {name: p.detach().contiguous() for name, p in self.named_parameters()}
        safetensors.torch.save_file(state, Path(path) / WEIGHTS, metadata={"format": "pt"})


def load(path: str | Path, dtype: str) -> BareModel | None:
    """Load the model in `path` as `dtype` on the CPU.

    Returns None when it needs transformers, or when its files are unusual or damaged.
    """
    import safetensors.torch

    path = Path(path)
    try:
        files = {
            n: (path / n).read_text(encoding="utf-8")
            for n in ("config.json", "generation_config.json")
            if (path / n).is_file()
        }
        raw = json.loads(files["config.json"])
        if not is_plain_config(raw):
            return None
        tensors: dict[str, Tensor] = {}
        weight_files = [WEIGHTS]
        if (path / INDEX).is_file():
            weight_files = sorted(
                set(json.loads((path / INDEX).read_bytes())["weight_map"].values())
            )
        for weight_file in weight_files:
            stored = safetensors.torch.load_file(path / weight_file)
            to = getattr(torch, dtype)
            tensors |= {name: tensor.to(to, copy=True) for name, tensor in stored.items()}
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != list_shapes(raw):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError):
        return None  # transformers raises the error
    key = "dtype" if "dtype" in raw or "torch_dtype" not in raw else "torch_dtype"
    if raw.get(key) != dtype:
        raw[key] = dtype
        files["config.json"] = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    return BareModel(raw, tensors, files)
