"""The configs that come with asyncrl: `configs/` of a checkout, inside the package once installed.

Also what `{here}` means: the folder of the config that says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.contract import importing

FOLDER = importing.HOME / "configs"
HERE = "{here}"


def names() -> list[str]:
    """The configs that can be named without a path."""
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


def find(path: str | Path) -> Path:
    """`path` where it is a file, else the shipped config that it names: `demo`, `demo.toml` or
    `configs/demo.toml`.  A `path` that is neither comes back as it is.
    """
    given = Path(path)
    if not given.is_file() and given.parent in (Path(), Path("configs")):
        shipped = FOLDER / f"{given.name.removesuffix('.toml')}.toml"
        if shipped.is_file():
            return shipped
    return given


def substitute_here(value: Any, folder: Path) -> Any:
    """A raw table with `{here}` at the beginning of its texts replaced by `folder`, absolute."""
    if isinstance(value, dict):
        return {key: substitute_here(x, folder) for key, x in value.items()}
    if isinstance(value, list):
        return [substitute_here(x, folder) for x in value]
    if isinstance(value, str) and (value == HERE or value.startswith(f"{HERE}/")):
        return f"{folder.resolve()}{value.removeprefix(HERE)}"
    return value
