"""An arm of a comparison: a name and the `--set` items that define it.

Reports describe an arm by its resolved config, never by its name.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.config import layers, methods
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import Differences, find_differences
from asyncrl.records.jsonl import JsonObject

# method -> its summary and its `--set` items
CORRECTIONS: dict[str, tuple[str, list[str]]] = {
    **{name: (method.summary, [f"method={name}"]) for name, method in methods.METHODS.items()},
    "configured": ("as the config says", []),
}
METHOD = "method"  # in an arm, stands for all keys of a method
# an arm, what it is, its config's differences from the base
ArmDescription = tuple[str, str, str]


@dataclass
class Arm:
    """A name and the `--set` items that make the arm differ, those of a method first.

    title: the arm as it was requested, by default its items.
    """

    name: str
    sets: list[str]
    same_as: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        self.title = self.title or ", ".join(self.sets) or "as configured"


def parse_arm(text: str, option: str = "--arm") -> Arm:
    """Parse `NAME:key=value,key=value`. Raises ConfigError.

    - NAME is a method of CORRECTIONS, whose keys come first, or any other word. `method=` among the
      keys then names the method.
    - `NAME:` changes nothing, and a method's name needs no colon.
    - `NAME:same-as=OTHER` repeats an arm.
    """
    name, colon, keys = text.partition(":")
    context = f"{option} {text}"
    is_method = name in CORRECTIONS
    if not (colon or is_method):
        raise ConfigError(
            f"{context}: no such method{methods.suggest_method(name)}; choose from "
            f"{', '.join(CORRECTIONS)}; or write NAME:key=value,key=value"
        )
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigError(f"{context}: a name may have letters, digits and . + - _")
    # A comma inside brackets or quotes belongs to the value.
    items = [item.strip() for item in re.split(r",(?=\s*[\w.-]+\s*=)", keys) if item.strip()]
    if not is_method and (
        twin := next((m for m in CORRECTIONS if methods.simplify(m) == methods.simplify(name)), "")
    ):
        raise ConfigError(
            f"{context}: the name {name} reads like the method {twin}; write {twin}:..., or "
            f"another name and {METHOD}={twin} among its keys"
        )
    if len(items) == 1 and items[0].startswith("same-as="):
        if is_method:
            raise ConfigError(
                f"{context}: {name} is a method; give an arm that repeats another a "
                "name that is not a method"
            )
        if option == "--correction":
            raise ConfigError(
                f"{context}: same-as belongs to compare; a sweep does not repeat a correction"
            )
        return Arm(name, [], items[0].removeprefix("same-as="))
    key_of = {item: layers.key_of(item) for item in items}
    extra_sets = [item for item in items if key_of[item] != METHOD]
    chosen = [
        item.partition("=")[2].strip().strip("'\"") for item in items if key_of[item] == METHOD
    ]
    if is_method and chosen:
        raise ConfigError(
            f"{context}: {name} is a method; give an arm with {METHOD}={chosen[0]} another name"
        )
    if not (chosen or is_method):
        return Arm(name, extra_sets)
    if len(chosen) > 1:
        raise ConfigError(f"{context}: {METHOD} is given twice")
    method = chosen[0] if chosen else name
    if method not in CORRECTIONS:
        raise ConfigError(
            f"{context}: {METHOD}={method}: no such method{methods.suggest_method(method)}; "
            f"choose from {', '.join(CORRECTIONS)}"
        )
    if method != "configured" and "correction.preset" in key_of.values():
        raise ConfigError(
            f"{context}: a method has all keys of the correction, so correction.preset has "
            "no effect; leave out one of the two"
        )
    summary, sets = CORRECTIONS[method]
    title = "; with ".join(filter(None, (summary, ", ".join(extra_sets))))
    return Arm(name, [*sets, *extra_sets], title=title)


# ---- what differs --------------------------------------------------------------------------------


def convert_config(config: Config) -> JsonObject:
    """Convert a config to JSON types."""
    values: JsonObject = json.loads(json.dumps(msgspec.to_builtins(config)))
    return values


def find_changes(base: Config, config: Config) -> Differences:
    """Return the keys that differ in `config`, each with its two values."""
    return find_differences(convert_config(base), convert_config(config))


def describe_changes(base: Config, config: Config, hidden: Sequence[str] = ()) -> str:
    """Describe how `config` differs, without the hidden keys."""
    differences = find_changes(base, config).items()
    return format_differences({key: pair for key, pair in differences if key not in hidden})


def format_differences(differences: Differences) -> str:
    """Format each difference as `key = value (value in the base)`.

    >>> format_differences({"staleness.max_lag": (0.0, 8.0), "correction.preset": ("", "tis")})
    'staleness.max_lag = 8 (0), correction.preset = tis (none)'
    """

    def format_value(value: Any) -> str:
        if value is None or value == "":
            return "none"
        if isinstance(value, float):
            return f"{value:.12g}"
        return str(value).lower() if isinstance(value, bool) else str(value)

    pairs = (
        f"{key} = {format_value(value)} ({format_value(base)})"
        for key, (base, value) in differences.items()
    )
    return ", ".join(pairs) or "nothing"
