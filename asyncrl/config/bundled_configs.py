"""Find the bundled configs, and substitute `{here}`, the folder of a config.

The configs are in `configs/` of a checkout, or inside the installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.contract import importing

FOLDER = importing.HOME / "configs"
HERE = "{here}"


def list_names(of_runs: bool = True) -> list[str]:
    """List the names of the bundled configs, of runs or of other commands."""
    runs = FOLDER.glob("*.toml")
    return sorted(path.stem for path in (runs if of_runs else FOLDER.glob("examples/*.toml")))


def find(path: str | Path) -> Path:
    """Return `path` if it is a file, otherwise the bundled config that it names.

    A name is `demo`, `demo.toml` or `configs/demo.toml`.  The name of a config in `examples/` is
    `tinker_demo` or `configs/examples/tinker_demo.toml`.  Another `path` is returned unchanged."""
    requested = Path(path)
    if not requested.is_file() and requested.parent in (
        Path(),
        Path("configs"),
        Path("configs/examples"),
    ):
        for folder in (FOLDER, FOLDER / "examples"):
            bundled = folder / f"{requested.name.removesuffix('.toml')}.toml"
            if bundled.is_file():
                return bundled
    return requested


def substitute_here(value: Any, folder: Path) -> Any:
    """Replace `{here}` at the start of a raw table's texts by the absolute `folder`."""
    if isinstance(value, dict):
        return {key: substitute_here(x, folder) for key, x in value.items()}
    if isinstance(value, list):
        return [substitute_here(x, folder) for x in value]
    if isinstance(value, str) and (value == HERE or value.startswith(f"{HERE}/")):
        return f"{folder.resolve()}{value.removeprefix(HERE)}"
    return value
