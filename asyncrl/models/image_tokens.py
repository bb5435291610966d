"""The tokens of images in prompts, without torch.

In the text of a prompt an image is one marker. The model reads it as a fixed number of tokens with
one id, whose embeddings its vision tower gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from asyncrl.contract.blobs.images import MARKER, MOST_IMAGES, ImageShape
from asyncrl.contract.errors import ConfigError
from asyncrl.records.jsonl import read_object

FAMILY = "llava"  # the model type that reads images


def read_shape(path: str | Path) -> ImageShape | None:
    """Return how the model in a directory reads images, from its config.json; None: it does not.

    Raises ConfigError for a config.json without the keys that describe it.
    """
    raw = read_object(Path(path) / "config.json")
    if raw.get("model_type") != FAMILY:
        return None
    token = raw.get("image_token_index", raw.get("image_token_id"))
    length = raw.get("image_seq_length", 576)  # transformers' default, of LLaVA-1.5
    if not (isinstance(token, int) and isinstance(length, int) and token >= 0 and length > 0):
        raise ConfigError(
            f"model.path: {path} has no image_token_index and image_seq_length in its config.json"
        )
    return ImageShape(token, length)


def expand(ids: Sequence[int] | ndarray, shape: ImageShape) -> ndarray:
    """Repeat each image token as often as the model reads it.

    >>> expand([5, 9, 6], ImageShape(9, 3)).tolist()
    [5, 9, 9, 9, 6]
    """
    tokens = np.asarray(ids, np.int32)
    return np.repeat(tokens, np.where(tokens == shape.token, shape.length, 1))


def contract(ids: Sequence[int] | ndarray, shape: ImageShape) -> ndarray:
    """Return `ids` with one token for each image, as before `expand`.

    >>> contract([5, 9, 9, 9, 9, 9, 9, 6], ImageShape(9, 3)).tolist()
    [5, 9, 9, 6]
    """
    tokens = np.asarray(ids, np.int32)
    is_image = tokens == shape.token
    contracted: ndarray = tokens[~is_image | ((np.cumsum(is_image) - 1) % shape.length == 0)]
    return contracted


def count(ids: Sequence[int] | ndarray, shape: ImageShape) -> int:
    """Count the image tokens in `ids`."""
    return int((np.asarray(ids) == shape.token).sum())


def split_image_parts(text: str) -> list[dict[str, str]]:
    """Divide the text of a turn at its markers into the parts that chat templates take.

    >>> split_image_parts("a<image>")
    [{'type': 'text', 'text': 'a'}, {'type': 'image'}]
    """
    parts: list[dict[str, str]] = []
    for index, piece in enumerate(text.split(MARKER)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def add_image_markers(turns: Sequence[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return chat turns with a marker for each image.

    Turns without markers get them in front of the last user's text.
    """
    copied = [dict(turn) for turn in turns]
    if not any(MARKER in (turn.get("content") or "") for turn in copied):
        user_turns = [turn for turn in copied if turn["role"] == "user"] or copied
        user_turns[-1]["content"] = MARKER * images + (user_turns[-1].get("content") or "")
    return copied


def require_images(shape: ImageShape | None, images: int, path: str | Path) -> None:
    """Raise ConfigError for images that the model cannot read.

    The message lacks its subject, which the caller puts in front.
    """
    if images and shape is None:
        raise ConfigError(
            f"has an image, and the model in {path} reads only text: images need a LLaVA "
            f"(model_type = {FAMILY})"
        )
    if images > MOST_IMAGES:
        raise ConfigError(f"has {images} images; at most {MOST_IMAGES} are allowed")
