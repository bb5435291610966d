"""The tokens of images in prompts, without torch.

In the text of a prompt an image is one marker. The model reads it as a fixed number of tokens with
one id, whose embeddings its vision tower gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy import ndarray

from asyncrl.contract.blobs.images import MARKER, ImageShape
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
