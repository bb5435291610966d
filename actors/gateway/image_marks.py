"""Images in the text of a session: marks of private characters with their digests.

Messages are compared, rendered by the template and continued as text. With the digest in the text,
a call continues an earlier one only if the images are the same.
"""

from __future__ import annotations

import re

from actors.gateway.refusals import CallRefused
from asyncrl.contract.blobs.images import MARKER

MARK = re.compile("\ue002([0-9a-f]{32})\ue003")


def make_mark(digest: str) -> str:
    """Return the mark of an image."""
    return f"\ue002{digest}\ue003"


def find_digests(text: str) -> list[str]:
    """Return the digests of the marks in a text, in their order.

    >>> find_digests(make_mark("0" * 32) + "?") == ["0" * 32]
    True
    """
    return MARK.findall(text)


def replace_marks(text: str) -> str:
    """Replace each mark by the marker that the model's tokenizer knows.

    Raises CallRefused for a text that has the marker already.
    """
    if MARKER in text:
        raise CallRefused(
            400,
            "invalid_image",
            f"a text has {MARKER}, which is the model's token of an image: send the image as a "
            "data: URL in the content of a message",
            "messages",
        )
    return MARK.sub(MARKER, text)


def restore_marks(text: str, digests: list[str]) -> str | None:
    """Replace the markers of a rendered text by the marks of `digests`, in order.

    None if their numbers differ.
    """
    pieces = text.split(MARKER)
    if len(pieces) != len(digests) + 1:
        return None
    marks = [*map(make_mark, digests), ""]
    return "".join(piece + mark for piece, mark in zip(pieces, marks, strict=True))
