"""Pages beside results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


def keep(page: Path, path: Path, names: Mapping[Path, str] = MappingProxyType({})) -> None:
    """Copy a page to its place beside a result.  names: what stands for directories of the machine
    that made it, which say nothing elsewhere.
    """
    text = page.read_text()
    for directory, name in names.items():
        text = text.replace(str(directory), name)
    path.write_text(text)
