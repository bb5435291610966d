"""Pages beside results, without the plot library in them: 5 MB each otherwise.

A kept page asks for LIBRARY in its own folder, which the repository does not hold; `python
benchmarks/pages.py` puts it there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

LIBRARY = "plotly.min.js"
REFERENCE = f'<script src="{LIBRARY}"></script>'
BEGINS = "<script>/**\n* plotly.js v"


def without_library(page: str) -> str:
    """The page with a reference where it has the library itself; unchanged without one."""
    begin = page.find(BEGINS)
    if begin < 0:
        return page
    end = page.index("</script>", begin) + len("</script>")
    return page[:begin] + REFERENCE + page[end:]


def keep(page: Path, path: Path, names: Mapping[Path, str] = MappingProxyType({})) -> None:
    """Copy a page to its place beside a result.  names: what stands for directories of the machine
    that made it, which say nothing elsewhere.
    """
    text = without_library(page.read_text())
    for directory, name in names.items():
        text = text.replace(str(directory), name)
    path.write_text(text)
