"""The parameters of a Llama-like model, derived from its config.json.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.contract.errors import ConfigError
from asyncrl.records.jsonl import JsonObject

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
# Keys that the config must have; defaults of the families are left to transformers.
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
    "hidden_act",
)
EXTRA_KEYS = (
    "quantization_config",
    "auto_map",
    "rope_scaling",
    "partial_rotary_factor",
    "text_config",
)
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


def compute_head_dim(raw: JsonObject) -> int:
    return int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])


def list_shapes(raw: JsonObject) -> dict[str, tuple[int, ...]]:
    """Return every parameter's name and shape, tied ones once."""
    width: int = raw["hidden_size"]
    intermediate = raw["intermediate_size"]
    dim = compute_head_dim(raw)
    heads, keys = (raw[f"num_{part}_heads"] * dim for part in ("attention", "key_value"))
    attention = {"q": (heads, width), "k": (keys, width), "v": (keys, width), "o": (width, heads)}
    family = raw["model_type"]
    biased = "qkv" if family == "qwen2" else ""
    if raw.get("attention_bias"):
        biased = {"llama": "qkvo", "qwen3": "qkvo"}.get(family, "")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (raw["vocab_size"], width)}
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for part, shape in attention.items():
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = shape
            if part in biased:
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = shape[:1]
        if family == "qwen3":
            shapes |= {f"{prefix}self_attn.{part}_norm.weight": (dim,) for part in "qk"}
        for part, shape in (
            ("gate", (intermediate, width)),
            ("up", (intermediate, width)),
            ("down", (width, intermediate)),
        ):
            shapes[f"{prefix}mlp.{part}_proj.weight"] = shape
            if family == "llama" and raw.get("mlp_bias"):
                shapes[f"{prefix}mlp.{part}_proj.bias"] = shape[:1]
        shapes |= {
            f"{prefix}{part}.weight": (width,)
            for part in ("input_layernorm", "post_attention_layernorm")
        }
    shapes["model.norm.weight"] = (width,)
    if not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (raw["vocab_size"], width)
    return shapes


def select_targets(names: Sequence[str], target_modules: Sequence[str]) -> list[str]:
    """Select the names that end with one of `target_modules`; all names if it is empty.

    Raises ConfigError for an entry of `target_modules` that matches no name.

    >>> select_targets(["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"], ["up_proj"])
    ['model.layers.0.mlp.up_proj']
    """
    for target in target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            available = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
            raise ConfigError(
                f"lora.target_modules: no linear layer of the model is called {target!r}; it has "
                f"{available or 'none'}"
            )
    ends = tuple(f".{target}" for target in target_modules)
    return [name for name in names if not target_modules or f".{name}".endswith(ends)]


def is_plain_config(raw: JsonObject) -> bool:
    """Return whether config.json fully describes a model that the packed forward covers."""
    family = raw.get("model_type", "")
    sliding = (
        raw.get("sliding_window", "some") if family == "mistral" else raw.get("use_sliding_window")
    )
    return (
        raw.get("architectures") == [ARCHITECTURES.get(family)]
        and all(raw.get(k) is not None for k in NEEDED)
        and raw["hidden_act"] == "silu"
        and not sliding
        and set(raw.get("layer_types") or ()) <= {"full_attention"}
        and find_rope_base(raw) is not None
        and not any(raw.get(k) is not None for k in EXTRA_KEYS)
        and (family != "qwen3" or raw.get("head_dim") is not None)
        and (family not in ("llama", "qwen3") or raw.get("attention_bias") is not None)
    )


def find_rope_base(raw: JsonObject) -> float | None:
    """Return the base of plain rotary embeddings; None if they are scaled or it is missing."""
    rope = raw.get("rope_parameters")
    if rope is None:
        return raw.get("rope_theta")
    is_plain = set(rope) == {"rope_type", "rope_theta"} and rope["rope_type"] == "default"
    return rope["rope_theta"] if is_plain else None
