"""Images of prompts: blobs, named by their digests.

A blob is a PNG of 8-bit RGB pixels. A PNG is lossless, so that every process that decodes a blob
sees the same pixels; an image in another format is converted once, where it enters the run. A
message contains each blob once, and samples name it by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

from msgspec import Meta

MARKER = "<image>"  # the position of an image in the text of a prompt
MOST_BYTES = 8 << 20  # of a blob
MOST_SIDE = 4096  # pixels
MOST_SESSION_BYTES = 16 << 20  # of the images of a session
MOST_IMAGES = 64  # of a prompt or a session
DATA_URL = "data:image/"  # the beginning of a data: URL of an image
DIGEST_BYTES = 16
SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADER = struct.Struct(">I4sIIBBBBB")  # IHDR up to the checksum
Blobs = Mapping[str, bytes]  # digest -> blob
RGB = (8, 2, 0, 0, 0)  # depth, color type, compression, filter, interlace


class ImageShape(NamedTuple):
    """How a model reads an image: as `length` tokens with the id `token`."""

    token: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=1)]

    def __str__(self) -> str:
        return f"{self.length} tokens of id {self.token}"


def digest(blob: bytes) -> str:
    """Return the BLAKE2b digest of a blob, 32 hex digits."""
    return hashlib.blake2b(blob, digest_size=DIGEST_BYTES).hexdigest()


def is_digest(name: str) -> bool:
    """Whether `name` has the form of a digest."""
    return len(name) == 2 * DIGEST_BYTES and not set(name) - set("0123456789abcdef")


def read_size(blob: bytes) -> tuple[int, int]:
    """Return (width, height) of a blob in pixels.

    Raises ValueError for anything but a PNG of 8-bit RGB pixels within the limits."""
    if len(blob) > MOST_BYTES:
        raise ValueError(f"an image of {len(blob)} bytes; at most {MOST_BYTES} are allowed")
    if blob[:8] != SIGNATURE or len(blob) < 8 + HEADER.size:
        raise ValueError("an image that is not a PNG")
    length, kind, width, height, *pixel_format = HEADER.unpack_from(blob, 8)
    if (length, kind) != (13, b"IHDR") or tuple(pixel_format) != RGB:
        raise ValueError("an image that is not a PNG of 8-bit RGB pixels")
    if not (0 < width <= MOST_SIDE and 0 < height <= MOST_SIDE):
        raise ValueError(f"an image of {width} x {height} pixels; a side has 1 to {MOST_SIDE}")
    return width, height


def check_blobs(blobs: Blobs) -> None:
    """Check that each blob is an image under its digest. Raises ValueError otherwise."""
    for name, blob in blobs.items():
        read_size(blob)
        if digest(blob) != name:
            raise ValueError(f"an image under the digest {name[:32]!r} that has another one")


def index_by_digest(blobs: Iterable[bytes]) -> dict[str, bytes]:
    """Return {digest: blob}."""
    return {digest(blob): blob for blob in blobs}


def to_data_url(blob: bytes) -> str:
    """Return a blob as a data: URL."""
    return f"{DATA_URL}png;base64,{base64.b64encode(blob).decode('ascii')}"


def encode_png(width: int, height: int, pixels: bytes) -> bytes:
    """Return the blob of `pixels`, RGB bytes in rows from the top.

    >>> read_size(encode_png(2, 1, bytes(6)))
    (2, 1)
    """
    row_bytes = 3 * width
    raw = b"".join(
        b"\0" + pixels[offset : offset + row_bytes]
        for offset in range(0, row_bytes * height, row_bytes)
    )
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, *RGB)),
        (b"IDAT", zlib.compress(raw, 9)),
        (b"IEND", b""),
    )
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
