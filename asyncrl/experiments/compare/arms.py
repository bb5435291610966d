"""An arm of a comparison: a name and the `--set` items that define it.

Reports describe an arm by its resolved config, never by its name.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.compare.methods import CORRECTIONS

METHOD = "method"  # in an arm, short for all keys of the method that it names
# key -> its value in the other arm, and in this one
Differences = dict[str, tuple[Any, Any]]


@dataclass
class Arm:
    """A name and the `--set` items that make the arm differ.

    sets: all items, those of `method` first.
    own: the items given beside the method.
    """

    name: str
    sets: list[str]
    same_as: str = ""
    method: str = ""
    own: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Describe the arm as it was requested."""
        summary = CORRECTIONS[self.method][0] if self.method else ""
        own = ", ".join(self.own if self.method else self.sets)
        return "; with ".join(part for part in (summary, own) if part) or "as configured"


def parse_arm(text: str, option: str = "--arm") -> Arm:
    """Parse `NAME:key=value,key=value`. Raises ConfigError.

    - NAME is a method of CORRECTIONS, whose keys come first, or any other word. `method=` among the
      keys then names the method.
    - `NAME:` changes nothing, and a method's name needs no colon.
    - `NAME:same-as=OTHER` repeats an arm.
    """
    name, colon, rest = text.partition(":")
    known = name in CORRECTIONS
    if not (colon or known):
        raise ConfigError(
            f"{option} {text}: no such method{_meant(name)}; known are {', '.join(CORRECTIONS)}; "
            "or write NAME:key=value,key=value"
        )
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigError(f"{option} {text}: a name has letters, digits and . + - _ alone")
    # A comma inside brackets or quotes belongs to the value.
    items = [item.strip() for item in re.split(r",(?=\s*[\w.-]+\s*=)", rest) if item.strip()]
    if not known and (twin := _method_like(name)):
        raise ConfigError(
            f"{option} {text}: the name {name} reads like the method {twin}; write {twin}:..., or "
            f"another name and {METHOD}={twin} among its keys"
        )
    if len(items) == 1 and items[0].startswith("same-as="):
        if known:
            raise ConfigError(
                f"{option} {text}: {name} is a method; give an arm that repeats another a "
                "name that is not a method"
            )
        return Arm(name, [], items[0].removeprefix("same-as="))
    return _with_method(name, items, f"{option} {text}")


def _with_method(name: str, items: Sequence[str], where: str) -> Arm:
    """Build an arm from its items; `method=` is replaced by that method's keys."""
    methods = [value for key, value in map(_split, items) if key == METHOD]
    own = [item for item in items if _split(item)[0] != METHOD]
    if name in CORRECTIONS:
        if methods:
            raise ConfigError(
                f"{where}: {name} is a method itself; call an arm with {METHOD}={methods[0]} "
                "otherwise"
            )
        methods = [name]
    if not methods:
        return Arm(name, own)
    if len(methods) > 1:
        raise ConfigError(f"{where}: {METHOD} is given twice")
    method = methods[0]
    if method not in CORRECTIONS:
        raise ConfigError(
            f"{where}: {METHOD}={method}: no such method{_meant(method)}; known are "
            f"{', '.join(CORRECTIONS)}"
        )
    if method != "configured" and any(_split(item)[0] == "correction.preset" for item in own):
        raise ConfigError(
            f"{where}: a method has all keys of the correction, so correction.preset would change "
            "nothing; leave one of the two out"
        )
    return Arm(name, [*CORRECTIONS[method][1], *own], method=method, own=own)


def _split(item: str) -> tuple[str, str]:
    """Split `key = "value"` into key and value."""
    key, _, value = item.partition("=")
    return key.strip(), value.strip().strip("'\"")


def _method_like(name: str) -> str:
    """Return the method that equals `name` up to case and hyphens; empty if none."""

    def bare(word: str) -> str:
        return word.lower().replace("-", "").replace("_", "")

    return next((method for method in CORRECTIONS if bare(method) == bare(name)), "")


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, CORRECTIONS, 1, 0.6)
    return f" (did you mean {close[0]}?)" if close else ""


# ---- what differs --------------------------------------------------------------------------------


def configs_as_json(configs: Mapping[str, Config]) -> dict[str, Any]:
    """Convert each config to JSON types, by name."""
    return {
        name: json.loads(json.dumps(msgspec.to_builtins(config)))
        for name, config in configs.items()
    }


def config_differences(
    base: Mapping[str, Any], compared: Mapping[str, Any], prefix: str = ""
) -> Differences:
    """Return every leaf in which two nested tables differ, by dotted key.

    >>> config_differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "d": 3})
    {'a.c': (2, 4)}
    """
    differences: Differences = {}
    for key in sorted({*base, *compared}):
        mine = base.get(key)
        other = compared.get(key)
        if isinstance(mine, dict) and isinstance(other, dict):
            differences |= config_differences(mine, other, f"{prefix}{key}.")
        elif mine != other:
            differences[f"{prefix}{key}"] = (mine, other)
    return differences


def changes(differences: Differences) -> list[str]:
    """Format each difference as `key: x, now y`."""
    return [f"{key}: {base}, now {other}" for key, (base, other) in differences.items()]


def refuse_other(directory: Path, kind: str, base: Any, other: Any) -> None:
    """Raise ConfigError if a directory holds other configs than these."""
    if differences := changes(config_differences(base, other)):
        raise ConfigError(
            f"{directory} holds a {kind} with other settings ({'; '.join(differences[:4])}"
            f"{' ...' if len(differences) > 4 else ''}); choose another directory by --out"
        )


def from_first(configs: Mapping[str, Config]) -> dict[str, Differences]:
    """Map each arm to its config's differences from the first arm."""
    tables = configs_as_json(configs)
    first, *others = tables
    return {name: config_differences(tables[first], tables[name]) for name in others}


def words(differences: Differences) -> str:
    """Format each difference as `key = value (value of the other arm)`.

    >>> words({"staleness.max_lag": (0.0, 8.0), "correction.preset": ("", "tis")})
    'staleness.max_lag = 8 (0), correction.preset = tis (none)'
    """

    def format_value(value: Any) -> str:
        if value is None or value == "":
            return "none"
        if isinstance(value, float):
            return f"{value:.12g}"
        return str(value).lower() if isinstance(value, bool) else str(value)

    pairs = (
        f"{key} = {format_value(other)} ({format_value(base)})"
        for key, (base, other) in differences.items()
    )
    return ", ".join(pairs) or "nothing"
