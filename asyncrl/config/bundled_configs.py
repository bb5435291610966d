"""Find the bundled configs, and substitute `{here}`, the folder of a config.

The configs are in `configs/` of a checkout, and inside the package once installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.contract import importing

FOLDER = importing.HOME / "configs"
HERE = "{here}"


def names() -> list[str]:
    """List the configs that can be named without a path."""
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


def find(path: str | Path) -> Path:
    """Return `path` if it is a file, otherwise the bundled config that it names.

    A name is `demo`, `demo.toml` or `configs/demo.toml`.  A config in `examples/` is found as
    `tinker_demo` or `configs/examples/tinker_demo.toml`.  Any other `path` is returned as is."""
    given = Path(path)
    if not given.is_file() and given.parent in (Path(), Path("configs"), Path("configs/examples")):
        for folder in (FOLDER, FOLDER / "examples"):
            shipped = folder / f"{given.name.removesuffix('.toml')}.toml"
            if shipped.is_file():
                return shipped
    return given


def substitute_here(value: Any, folder: Path) -> Any:
    """Replace `{here}` at the beginning of a raw table's texts by the absolute `folder`."""
    if isinstance(value, dict):
        return {key: substitute_here(x, folder) for key, x in value.items()}
    if isinstance(value, list):
        return [substitute_here(x, folder) for x in value]
    if isinstance(value, str) and (value == HERE or value.startswith(f"{HERE}/")):
        return f"{folder.resolve()}{value.removeprefix(HERE)}"
    return value
