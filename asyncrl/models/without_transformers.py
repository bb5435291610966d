"""A Llama-like model without transformers: the parameters of one under transformers' names, in its
order, from and to its own files.

The packed forward (packed_forward.py) and the decoder need a model's parameters, a few numbers of
its config and its rotary table; importing transformers for that costs each process seconds of CPU.
`load` makes exactly that, for directories that say everything plainly, and None for all others,
which transformers loads as before.  Whoever calls the model itself (a plain forward, `generate`)
gets transformers' modules over the same parameters, built on that first call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from asyncrl.models.layout import INDEX, WEIGHTS, head_dim, is_plain_config, names, rope_base


class BareConfig(SimpleNamespace):
    """The keys of config.json as attributes."""

    def get_text_config(self) -> BareConfig:
        return self


class RotaryEmbedding(torch.nn.Module):
    """cos and sin [B, n, head_dim] of positions [B, n], halves repeated (Su et al. 2021, arXiv
    2104.09864; half-split layout).
    """

    rope_type = "default"

    frequencies: torch.Tensor

    def __init__(self, base: float, dim: int) -> None:
        super().__init__()
        self.register_buffer(
            "frequencies",
            1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)),
            persistent=False,
        )

    def forward(
        self, like: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # also of a bf16 model
        frequencies = self.frequencies.to(like.device, torch.float32)
        angles = positions[..., None].float() * frequencies
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(like.dtype), both.sin().to(like.dtype)


class BareLinear(torch.nn.Linear):
    """x W^T + b, made without the random start of torch's; one of torch's for peft, which puts
    adapters beside nothing else.
    """

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(inputs, self.weight, self.bias)


class WeightModule(torch.nn.Module):
    """An embedding's or a norm's weight."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class ModuleHolder(torch.nn.Module):
    """A named place in the tree of modules."""


class BareModel(torch.nn.Module):
    """The model.  `files`: the directory's JSON files, kept for `save_pretrained`."""

    def __init__(
        self, raw: dict[str, Any], tensors: dict[str, torch.Tensor], files: dict[str, str]
    ) -> None:
        super().__init__()
        config = self.config = BareConfig(**raw)
        self._files = files
        made = {name: torch.nn.Parameter(tensors[name]) for name in names(raw)}

        def linear(at: str) -> BareLinear:
            return BareLinear(made[at + ".weight"], made.get(at + ".bias"))

        self.model = ModuleHolder()
        self.model.embed_tokens = WeightModule(made["model.embed_tokens.weight"])
        self.model.layers = torch.nn.ModuleList()
        for index in range(config.num_hidden_layers):
            at = f"model.layers.{index}."
            layer = ModuleHolder()
            layer.self_attn = ModuleHolder()
            layer.mlp = ModuleHolder()
            for part in "qkvo":
                layer.self_attn.add_module(f"{part}_proj", linear(f"{at}self_attn.{part}_proj"))
            for part in "qk" if config.model_type == "qwen3" else "":
                layer.self_attn.add_module(
                    f"{part}_norm", WeightModule(made[f"{at}self_attn.{part}_norm.weight"])
                )
            for part in ("gate", "up", "down"):
                layer.mlp.add_module(f"{part}_proj", linear(f"{at}mlp.{part}_proj"))
            layer.input_layernorm = WeightModule(made[at + "input_layernorm.weight"])
            layer.post_attention_layernorm = WeightModule(
                made[at + "post_attention_layernorm.weight"]
            )
            self.model.layers.append(layer)
        self.model.norm = WeightModule(made["model.norm.weight"])
        self.model.rotary_emb = RotaryEmbedding(rope_base(raw) or 0.0, head_dim(raw))
        self.lm_head = WeightModule(
            self.model.embed_tokens.weight if config.tie_word_embeddings else made["lm_head.weight"]
        )
        self._whole: list[Any] = []

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def full_model(self) -> Any:
        """The same parameters in transformers' modules."""
        if not self._whole:
            from asyncrl.models.policy import transformers_modules

            self._whole.append(transformers_modules(self))
        return self._whole[0].train(self.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """By transformers' modules."""
        return self.full_model()(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """By transformers' modules."""
        return self.full_model().generate(*args, **kwargs)

    def save_pretrained(self, path: str | Path) -> None:
        """config.json, generation_config.json and one file of weights, as transformers reads and
        writes them.
        """
        import safetensors.torch

        for name, text in self._files.items():
            (Path(path) / name).write_text(text, encoding="utf-8")
        state = {name: p.detach().contiguous() for name, p in self.named_parameters()}
        safetensors.torch.save_file(state, Path(path) / WEIGHTS, metadata={"format": "pt"})


def open_weight_files(path: Path) -> Iterator[Any]:
    """The directory's open safetensors files."""
    import safetensors

    index = path / INDEX
    files = (
        sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if index.is_file()
        else [WEIGHTS]
    )
    for name in files:
        with safetensors.safe_open(str(path / name), framework="pt") as opened:
            yield opened


def load(path: str | Path, dtype: str) -> BareModel | None:
    """The model in `path`, parameters as `dtype` on the CPU; None when it needs transformers, or
    when anything about its files is unusual.
    """
    import safetensors

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
        wanted = names(raw)
        tensors = {}
        for file in open_weight_files(path):
            for name in file.keys():  # noqa: SIM118  # no mapping
                if wanted.get(name) != tuple(file.get_slice(name).get_shape()):
                    return None
                tensors[name] = file.get_tensor(name).to(getattr(torch, dtype), copy=True)
        if set(tensors) != set(wanted):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError):
        return None  # transformers says what is wrong with it
    key = "dtype" if "dtype" in raw or "torch_dtype" not in raw else "torch_dtype"
    if raw.get(key) != dtype:
        raw[key] = dtype
        files["config.json"] = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    return BareModel(raw, tensors, files)
