"""Build a tiny LLaVA with random weights, for tasks with small pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.contract.blobs.images import MARKER
from asyncrl.models.policy import (
    PolicyModel,
    build_character_tokenizer,
    build_text_config,
    initialize_model,
)


def build_llava(
    path: str | Path,
    symbols: Sequence[str],
    *,
    side: int,
    patch: int,
    seed: int = 0,
    **sizes: Any,
) -> PolicyModel:
    """Build a LLaVA in the directory `path`: a CLIP tower, a projector and a Qwen3.

    side: pixels of a side of an image, which is one token for each patch of `patch` pixels a side.
    symbols: characters of the tokenizer, as in `build_model`; the image token is added.
    sizes: of the Qwen3, as in `build_text_config`.
    """
    import transformers

    tokenizer = build_character_tokenizer([*symbols, MARKER])
    text = build_text_config(tokenizer, **sizes)
    tower = transformers.CLIPVisionConfig(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        projection_dim=text.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=text.num_attention_heads,
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
    square = {"height": side, "width": side}
    processor = transformers.CLIPImageProcessorPil(
        size=square, crop_size=square, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    maker = transformers.AutoModelForImageTextToText
    return initialize_model(path, maker, config, seed, tokenizer, processor)
