"""Build a tiny LLaVA with random weights, for tasks with small pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from asyncrl.contract.blobs.images import MARKER
from asyncrl.models import fetch
from asyncrl.models.policy import PolicyModel, build_character_tokenizer


def build_llava(
    path: str | Path,
    symbols: Sequence[str],
    *,
    side: int,
    patch: int,
    hidden: int = 64,
    layers: int = 2,
    max_positions: int = 256,
    seed: int = 0,
) -> PolicyModel:
    """Build a LLaVA in the directory `path`: a CLIP tower, a projector and a Qwen3.

    side: pixels of a side of an image, which is one token for each patch of `patch` pixels a side.
    symbols: characters of the tokenizer, as in `build_model`; the image token is added.
    """
    import transformers

    heads = 4
    tokenizer = build_character_tokenizer([*symbols, MARKER])
    text = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=2 * hidden,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    tower = transformers.CLIPVisionConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        projection_dim=hidden,
        num_hidden_layers=1,
        num_attention_heads=heads,
        image_size=side,
        patch_size=patch,
    )
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(MARKER),
        image_seq_length=(side // patch) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",  # without the class token
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    hf = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    square = {"height": side, "width": side}
    processor = transformers.CLIPImageProcessorPil(
        size=square, crop_size=square, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    Path(path).mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(path))
    processor.save_pretrained(str(path))
    fetch.save(hf, path)
    return PolicyModel(hf.eval(), str(path))
