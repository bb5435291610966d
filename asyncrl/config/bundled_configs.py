"""Find the bundled configs, substitute `{here}`, and recognize the configs of other systems.

The configs are in `configs/` of a checkout, or inside the installed package."""

from __future__ import annotations

import contextlib
import functools
import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from asyncrl.contract import importing
from asyncrl.contract.toml_writer import flatten

FOLDER = importing.HOME / "configs"
HERE = "{here}"
MOST_MAPPED = 10  # keys of another system that a message maps


def list_names(of_runs: bool = True) -> list[str]:
    """List the names of the bundled configs, of runs or of other commands."""
    runs = FOLDER.glob("*.toml")
    return sorted(path.stem for path in (runs if of_runs else FOLDER.glob("examples/*.toml")))


def find(path: str | Path, of_runs: bool = True) -> Path:
    """Return `path` if it is a file, otherwise the bundled config that it names.

    A name is `demo`, `demo.toml` or `configs/demo.toml`.  The name of a config of another command
    is `tinker_demo` or `configs/examples/tinker_demo.toml`.  Another path is returned unchanged."""
    requested = Path(path)
    folder = Path("configs") if of_runs else Path("configs/examples")
    bundled = importing.HOME / folder / f"{requested.name.removesuffix('.toml')}.toml"
    is_name = not requested.is_file() and requested.parent in (Path(), folder)
    return bundled if is_name and bundled.is_file() else requested


def substitute_here(value: Any, folder: Path) -> Any:
    """Replace `{here}` at the start of a raw table's texts by the absolute `folder`."""
    if isinstance(value, dict):
        return {key: substitute_here(x, folder) for key, x in value.items()}
    if isinstance(value, list):
        return [substitute_here(x, folder) for x in value]
    if isinstance(value, str) and (value == HERE or value.startswith(f"{HERE}/")):
        return f"{folder.resolve()}{value.removeprefix(HERE)}"
    return value


@functools.cache
def load_systems() -> dict[str, Any]:
    """Return name -> title, seen, intro, concepts and keys of each other system."""
    return tomllib.loads(Path(__file__).with_name("coming_from.toml").read_text(encoding="utf-8"))


def explain_other_system(text: str, own_keys: Collection[str]) -> str:
    """Explain of which other system a config is, and what its keys are called here.

    text: TOML, YAML, or a command with flags or dotted settings.
    own_keys: the keys of this kind of config. Returns "" if the config has as many of them as of
    each other system, or a single key of another system."""
    raw: Any = None
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        with contextlib.suppress(Exception):  # it is absent, or this is not YAML
            import yaml  # type: ignore[import-untyped]  # transformers needs it

            raw = yaml.safe_load(text)
    if not isinstance(raw, dict):
        setting = r"(?<!\S)\+*(--[\w.-]+|\w+(?:\.\w+)+(?==))[ =]+([^\s\\]*)"
        raw = dict(re.findall(setting, text))
    leaves = flatten(raw)
    foreign = {key: value for key, value in leaves.items() if key not in own_keys}
    most, text = max(1, len(leaves) - len(foreign)), ""
    for name, system in load_systems().items():
        mapped: dict[str, str] = {}
        for theirs, _, ours, _ in system["keys"]:
            mapped |= _map_row(theirs, ours, foreign) | mapped
        if len(mapped) > most:
            most = len(mapped)
            pairs = [f"{key} is {here}" for key, here in mapped.items() if here][:MOST_MAPPED]
            text = (
                f"is a config of {system['title']}, not of asyncrl; here {', '.join(pairs)}; "
                f"docs/coming-from.md#{name} maps the other keys"
            )
    return text


def _map_row(theirs: str, ours: str, leaves: dict[str, Any]) -> dict[str, str]:
    """Map the keys of `leaves`, or their ends, that a row of the table names to ours."""
    first, *others = theirs.split(", ")
    first, _, value = first.partition(" = ")
    if value:
        values, options = [value, *others], ours.split(" or ")
        if (given := str(leaves.get(first))) not in values:
            return {}
        option = options[values.index(given)] if len(options) == len(values) else ours
        return {first: option.replace(" + ", " and ")}
    prefix = first[: first.rfind(".") + 1]
    names = [first, *(name if "." in name else prefix + name for name in others)]
    settings = list(dict.fromkeys(re.sub(r" = [^ ]+", "", ours).split(" + ")))
    if len(settings) != len(names):
        settings = [" and ".join(settings)] * len(names)
    return {
        key: setting
        for name, setting in zip(names, settings, strict=True)
        for key in leaves
        if key == name or (name not in leaves and name.endswith(f".{key}"))
    }
