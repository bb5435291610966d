"""Decode images into blobs and pixels, by Pillow."""

from __future__ import annotations

import base64
import contextlib
import io
from typing import Any

import numpy as np

from asyncrl.contract.blobs import images

FORMATS = ("PNG", "JPEG")  # of images that enter a run
THUMBNAIL = 96  # pixels
DATA_URL = images.DATA_URL
MOST_FILE_BYTES = 20 << 20


def build_blob(data: bytes) -> bytes:
    """Return the blob (asyncrl/contract/blobs/images.py) of a PNG or JPEG file.

    Transparency is dropped, and a JPEG is rotated by its EXIF data. Raises ValueError for other
    formats, for damaged files and beyond the limits.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(data) > MOST_FILE_BYTES:
        raise ValueError(f"{len(data)} bytes; an image has at most {MOST_FILE_BYTES}")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if max(width, height) > images.MOST_SIDE:
                raise ValueError(
                    f"{width} x {height} pixels; a side has at most {images.MOST_SIDE}"
                )
            opened.load()
            with contextlib.suppress(ValueError):
                images.read_size(data)
                return data  # a blob already
            turned = ImageOps.exif_transpose(opened)
            file = io.BytesIO()
            turned.convert("RGB").save(file, "PNG")
            blob = file.getvalue()
    except UnidentifiedImageError as error:
        raise ValueError("it is neither a PNG nor a JPEG") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"it is damaged: {' '.join(str(error).split())}") from error
    images.read_size(blob)
    return blob


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a data: URL with an image in base64. Raises ValueError."""
    head, comma, body = url.partition(",")
    if not (comma and head.startswith(DATA_URL) and head.endswith(";base64")):
        raise ValueError("a data: URL of an image is data:image/png;base64,... or image/jpeg")
    if len(body) > 4 * MOST_FILE_BYTES // 3 + 4:
        raise ValueError(f"an image has at most {MOST_FILE_BYTES} bytes")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ValueError("its base64 is damaged") from error


def build_thumbnail_url(blob: bytes) -> str:
    """Return a blob as a data: URL of at most THUMBNAIL pixels a side."""
    picture = as_pil(blob)
    if max(picture.size) > THUMBNAIL:
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        blob = images.encode_png(picture.width, picture.height, picture.tobytes())
    return images.to_data_url(blob)


def decode_pixels(blob: bytes) -> np.ndarray:
    """Return the pixels of a blob, uint8 [height, width, 3].

    Raises ValueError for a damaged one.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(blob), formats=("PNG",)) as opened:
            pixels: np.ndarray = np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"a damaged image: {' '.join(str(error).split())}") from error
    return pixels


def as_pil(blob: bytes) -> Any:
    """Return a blob as a Pillow image."""
    from PIL import Image

    return Image.fromarray(decode_pixels(blob))
