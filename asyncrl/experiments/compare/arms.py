"""An arm: a name, the `--set` items that make it, and what makes it differ from another one.

What a report says of an arm is read from its resolved config, never from its name.
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

METHOD = "method"  # this key in an arm stands for all keys of the method that it names
# key -> its value in the arm that is compared with, and in this one
Differences = dict[str, tuple[Any, Any]]


@dataclass
class Arm:
    """A name and the `--set` items that make it differ.

    sets: all of them, those of `method` first; own: those that were given beside it.
    """

    name: str
    sets: list[str]
    same_as: str = ""
    method: str = ""
    own: Sequence[str] = ()

    @property
    def title(self) -> str:
        """What it was asked to be."""
        said = CORRECTIONS[self.method][0] if self.method else ""
        own = ", ".join(self.own if self.method else self.sets)
        return "; with ".join(part for part in (said, own) if part) or "as configured"


def parse_arm(text: str, option: str = "--arm") -> Arm:
    """`NAME:key=value,key=value`.  Raises ConfigError.

    NAME is a method of CORRECTIONS, whose own keys come first, or any other word; then `method=`
    among the keys names the method.  `NAME:` changes nothing, `NAME:same-as=OTHER` repeats an arm,
    and a method's name needs no colon.
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
                f"{option} {text}: {name} is a method; give an arm that repeats another a name of "
                "its own"
            )
        return Arm(name, [], items[0].removeprefix("same-as="))
    return _with_method(name, items, f"{option} {text}")


def _with_method(name: str, items: Sequence[str], where: str) -> Arm:
    """An arm of its items, `method=` among them replaced by that method's keys."""
    asked = [value for key, value in map(_split, items) if key == METHOD]
    own = [item for item in items if _split(item)[0] != METHOD]
    if name in CORRECTIONS:
        if asked:
            raise ConfigError(
                f"{where}: {name} is a method itself; call an arm with {METHOD}={asked[0]} "
                "otherwise"
            )
        asked = [name]
    if not asked:
        return Arm(name, own)
    if len(asked) > 1:
        raise ConfigError(f"{where}: {METHOD} is given twice")
    method = asked[0]
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
    """`key = "value"` as key and value."""
    key, _, value = item.partition("=")
    return key.strip(), value.strip().strip("'\"")


def _method_like(name: str) -> str:
    """The method that a name is but for case and hyphens; empty: none."""

    def bare(word: str) -> str:
        return word.lower().replace("-", "").replace("_", "")

    return next((method for method in CORRECTIONS if bare(method) == bare(name)), "")


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, CORRECTIONS, 1, 0.6)
    return f" (did you mean {close[0]}?)" if close else ""


# ---- what differs --------------------------------------------------------------------------------


def configs_as_json(configs: Mapping[str, Config]) -> dict[str, Any]:
    """name -> config as JSON has it."""
    return {
        name: json.loads(json.dumps(msgspec.to_builtins(config)))
        for name, config in configs.items()
    }


def config_differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Differences:
    """Every leaf of two nested tables that differs, by its dotted key.

    >>> config_differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "d": 3})
    {'a.c': (2, 4)}
    """
    out: Differences = {}
    for key in sorted({*before, *now}):
        mine = before.get(key)
        other = now.get(key)
        if isinstance(mine, dict) and isinstance(other, dict):
            out |= config_differences(mine, other, f"{prefix}{key}.")
        elif mine != other:
            out[f"{prefix}{key}"] = (mine, other)
    return out


def changes(found: Differences) -> list[str]:
    """`key: x, now y`, for each of them."""
    return [f"{key}: {before}, now {now}" for key, (before, now) in found.items()]


def refuse_other(directory: Path, what: str, before: Any, now: Any) -> None:
    """Raise ConfigError where the configs that a directory holds are not these."""
    if found := changes(config_differences(before, now)):
        raise ConfigError(
            f"{directory} holds a {what} with other settings ({'; '.join(found[:4])}"
            f"{' ...' if len(found) > 4 else ''}); choose another directory by --out"
        )


def from_first(configs: Mapping[str, Config]) -> dict[str, Differences]:
    """Arm -> what its resolved config has otherwise than the first arm's."""
    tables = configs_as_json(configs)
    first, *others = tables
    return {name: config_differences(tables[first], tables[name]) for name in others}


def words(found: Differences) -> str:
    """`key = value (other)`, for each of them: the value, and the one of the arm compared with.

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
        f"{key} = {format_value(now)} ({format_value(before)})"
        for key, (before, now) in found.items()
    )
    return ", ".join(pairs) or "nothing"
