"""Images in the rows of prompt files: paths, data: URLs, and the images of data sets.

A column `image` has one image, a column `images` a list. Only a path of a PNG or JPEG file or a
data: URL counts as an image, because data sets have columns of that name with other text.
"""

from pathlib import Path
from typing import Any

from asyncrl.contract.errors import ConfigError
from asyncrl.models import pictures

IMAGE_COLUMNS = ("image", "images")
SUFFIXES = (".png", ".jpg", ".jpeg")


def holds_images(value: Any) -> bool:
    """Return whether the value of a column is an image or a list of images."""
    if isinstance(value, list):
        return bool(value) and all(map(holds_images, value))
    if isinstance(value, dict):  # the stored form of a data set's `Image` feature
        return set(value) == {"bytes", "path"}
    if not isinstance(value, str):
        return False
    return value.startswith(pictures.DATA_URL) or value.lower().endswith(SUFFIXES)


def read_images(location: str, column: str, value: Any, folder: Path) -> list[bytes]:
    """Return the blobs of a column that holds images; paths are relative to `folder`.

    Raises ConfigError that starts with `location`."""
    values = value if isinstance(value, list) else [value]
    try:
        return [pictures.build_blob(_read_bytes(image, folder)) for image in values]
    except (OSError, ValueError) as error:
        problem = (
            f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        )
        raise ConfigError(
            f"{location}: `{column}` is not an image: {problem}; give the path of a PNG or JPEG "
            "file, relative to this one, or a data: URL"
        ) from error


def _read_bytes(value: Any, folder: Path) -> bytes:
    """Read the bytes of an image.  Raises OSError or ValueError."""
    if isinstance(value, dict):
        if value["bytes"] is not None:
            return bytes(value["bytes"])
        value = value["path"]
    if not isinstance(value, str):
        raise ValueError("it has neither bytes nor a path")
    if value.startswith(pictures.DATA_URL):
        return pictures.decode_data_url(value)
    return (folder / value).read_bytes()
