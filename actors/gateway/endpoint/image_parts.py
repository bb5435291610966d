"""Images in requests, in the forms of OpenAI's and Anthropic's APIs.  Pure.

```
chat        {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
responses   {"type": "input_image", "image_url": "data:image/png;base64,..."}
messages    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ...}}
```

Only data: URLs are read: the gateway never opens an address that a request names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.gateway.image_marks import make_mark
from actors.gateway.refusals import build_refusal
from asyncrl.contract.blobs.images import MOST_IMAGES, MOST_SESSION_BYTES, digest
from asyncrl.models import pictures

LISTS = ("messages", "input")  # keys of a body whose items have content
INVALID = "invalid_image"  # the code of refusals
PARTS = ("content", "output")  # keys of an item or a part that hold parts


def take_images(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the body with a text part in place of each image, and digest -> blob.

    Raises CallRefused for an image that cannot be read.
    """
    blobs: dict[str, bytes] = {}
    converted = dict(body)
    for key in LISTS:
        if isinstance(body.get(key), list):
            converted[key] = [
                _replace_images(f"{key}[{index}]", item, blobs)
                for index, item in enumerate(body[key])
            ]
    if len(blobs) > MOST_IMAGES or sum(map(len, blobs.values())) > MOST_SESSION_BYTES:
        raise build_refusal(
            "messages",
            f"{len(blobs)} images of {sum(map(len, blobs.values()))} bytes as PNG; at most "
            f"{MOST_IMAGES} of {MOST_SESSION_BYTES} bytes together are served",
            INVALID,
        )
    return converted, blobs


def _replace_images(location: str, item: Any, blobs: dict[str, bytes]) -> Any:
    """Replace the images in the parts of an item, at any depth."""
    if not isinstance(item, dict):
        return item
    converted = dict(item)
    for key in PARTS:
        if isinstance(item.get(key), list):
            converted[key] = [
                _replace_image(f"{location}.{key}[{index}]", part, blobs)
                for index, part in enumerate(item[key])
            ]
    return converted


def _replace_image(location: str, part: Any, blobs: dict[str, bytes]) -> Any:
    """Return a part, or the text part that stands for its image."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("image_url", "input_image", "image"):
        return _replace_images(location, part, blobs)
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        url: Any = f"data:{source.get('media_type')};base64,{source.get('data')}"
    else:
        url = source.get("url") if isinstance(source, dict) else part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str):
        raise build_refusal(
            location, "give the image as a data: URL (data:image/png;base64,...)", INVALID
        )
    if not url.startswith("data:"):
        raise build_refusal(
            location,
            f"{url:.80} is not fetched: send the image itself, as data:image/png;base64,...",
            INVALID,
        )
    try:
        blob = pictures.build_blob(pictures.decode_data_url(url))
    except ValueError as error:
        raise build_refusal(location, f"the image cannot be read: {error}", INVALID) from error
    name = digest(blob)
    blobs[name] = blob
    return {"type": "text", "text": make_mark(name)}
