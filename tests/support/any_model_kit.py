import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from asyncrl.models import policy

LLAMA_LIKE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
GPT_LIKE = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
STATE_SPACE = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_HEAD_DIM = {name: size for name, size in LLAMA_LIKE.items() if name != "head_dim"}
EXPERTS = {"num_experts_per_tok": 2}
# family -> transformers' config class, and its shape; windows are shorter than the test's rows
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        GPT_LIKE | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "gemma2": ("Gemma2Config", LLAMA_LIKE | {"attn_logit_softcapping": 1.0, "sliding_window": 4}),
    "gemma3": ("Gemma3TextConfig", LLAMA_LIKE | {"sliding_window": 4}),
    "gpt_oss": (
        "GptOssConfig",
        LLAMA_LIKE | EXPERTS | {"num_local_experts": 4, "sliding_window": 4},
    ),
    "gptj": ("GPTJConfig", GPT_LIKE | {"rotary_dim": 4}),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "mamba": ("MambaConfig", STATE_SPACE),
    "opt": ("OPTConfig", HEADS | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "phi": ("PhiConfig", HEADS | {"intermediate_size": 64}),
    "falcon": ("FalconConfig", HEADS),
    "falcon_alibi": ("FalconConfig", HEADS | {"alibi": True}),
    "cohere2": ("Cohere2Config", LLAMA_LIKE | {"sliding_window": 4}),
    "mistral_window": ("MistralConfig", LLAMA_LIKE | {"sliding_window": 4}),
    "olmo2": ("Olmo2Config", NO_HEAD_DIM),
    "olmoe": ("OlmoeConfig", NO_HEAD_DIM | EXPERTS | {"num_experts": 4}),
    "qwen2": ("Qwen2Config", NO_HEAD_DIM),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        LLAMA_LIKE | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32},
    ),
}


def directory(path: Path, family: str, symbols: str) -> Path:
    """A random model of FAMILIES, its weights large, and the built-in models' tokenizer."""
    policy.build_model(path / "tokenizer", symbols, hidden=16, layers=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path / "tokenizer")
    name, shape = FAMILIES[family]
    config = getattr(transformers, name)(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    torch.manual_seed(0)
    hf = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in hf.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    hf.save_pretrained(path / "m")
    for f in (path / "tokenizer").glob("tokenizer*"):
        shutil.copy(f, path / "m")
    return path / "m"
