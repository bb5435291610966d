"""Helpers of the any_model tests that other test files use."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers

from asyncrl.models import policy


def directory(path: Path, family: str, symbols: str) -> Path:
    """A tiny random model of another architecture, with the tokenizer of the built-in ones."""
    policy.build_model(path / "tokenizer", symbols, hidden=16, layers=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path / "tokenizer")
    common = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=128,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
        hf = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.Gemma2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=64,
            max_position_embeddings=128,
            **common,
        )
        hf = transformers.Gemma2ForCausalLM(config)
    hf.save_pretrained(path / "m")
    for f in (path / "tokenizer").glob("tokenizer*"):
        shutil.copy(f, path / "m")
    return path / "m"
