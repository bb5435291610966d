"""Explain config keys and compare configs.  Imports no torch.

Meaning, range and default come from the structs.  This module adds units, reasons for defaults and
the pages of the docs."""

from __future__ import annotations

import textwrap
import typing
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import layers, load, methods
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import Differences, fill, find_differences, flatten, read_table

_TABLES: dict[str, dict[str, str]] = read_table(__file__)
# the unit of a number is that of the end of its name, otherwise that of its dotted key
PAGES, KEYS_BY_UNIT, REASONS, TAGS, REFERENCE, UNIT_ENDINGS = _TABLES.values()


class KeyExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The complete explanation of a config key.

    unit: of a number; empty: it is a count or has no dimension.
    read: the conditions under which the key is read; empty: always.
    methods: published methods that set the key -> the value."""

    key: str
    meaning: str
    unit: str
    values: str
    default: str
    reason: str
    read: list[str]
    methods: dict[str, Any]
    page: str


def explain(key: str) -> list[KeyExplanation]:
    """Explain a key, or every key of a section.  Raises ConfigError for other names."""
    keys = ["method", *load.list_keys()]
    if key in keys:
        return [_explain_key(key)]
    section_keys = [name for name in keys if name.startswith(f"{key}.")]
    if not section_keys:
        section = f"{key.rpartition('.')[0]}." if "." in key else ""
        inside = [name.removeprefix(section) for name in keys[1:] if name.startswith(section)]
        names = dict.fromkeys(name.partition(".")[0] for name in inside)
        raise ConfigError(f"{key}: {load.explain_unknown_key(key, Config, names)}")
    return [_explain_key(name) for name in section_keys]


def _explain_key(key: str) -> KeyExplanation:
    set_by = {name: row.keys[key] for name, row in methods.METHODS.items() if key in row.keys}
    places = layers.map_places(Config).get(key, [])
    if places:
        meanings = (layers.describe_field(place.struct, place.field) for place in places)
        meaning = next(filter(None, meanings), "")
        kinds = [layers.describe_values(place.field.type) for place in places]
        values = " or ".join(dict.fromkeys(kinds))
    else:
        meaning = methods.DESCRIPTION if key == "method" else TAGS[key]
        values = layers.describe_values(load.find_type(key))
    units = [unit for unit, keys in KEYS_BY_UNIT.items() if key in keys.split()]
    units += [unit for ending, unit in UNIT_ENDINGS.items() if key.endswith(ending)]
    names = key.split(".")
    prefixes = (".".join(names[:count]) for count in range(len(names), -1, -1))
    return KeyExplanation(
        key=key,
        meaning=meaning,
        unit=next(iter(units), "") if any(is_number(x.field.type) for x in places) else "",
        values=values,
        default=_describe_default(key, places),
        reason=REASONS.get(key, ""),
        read=_describe_conditions(key, places),
        methods=set_by,
        page=f"docs/{next(PAGES[prefix] for prefix in prefixes if prefix in PAGES)}",
    )


def render_reference() -> str:
    """Render a page of all keys: a table for each section."""
    sections: dict[str, list[KeyExplanation]] = {}
    for key in ("method", *load.list_keys()):
        section = key.partition(".")[0] if "." in key else "top level"
        sections.setdefault(section, []).append(explain(key)[0])
    links = ", ".join(f"[{name}](#{name.replace(' ', '-')})" for name in sections)
    index = textwrap.fill(
        f"Sections: {links}.", 100, break_long_words=False, break_on_hyphens=False
    )
    return fill(REFERENCE["page"], index=index, sections=sections, format_cell=_format_cell)


def _format_cell(text: str) -> str:
    """Format a text as a cell of a table of Markdown."""
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


def is_number(kind: Any) -> bool:
    """Return whether a type accepts numbers, alone, in a list or besides other values."""
    bare, _ = layers.split_annotations(kind)
    if layers.is_union(bare) or typing.get_origin(bare) is list:
        return any(map(is_number, typing.get_args(bare)))
    return bare in (int, float)


def _describe_default(key: str, places: list[layers.KeyPlace]) -> str:
    if not places:
        return "" if key == "method" else load.format_value(layers.get_value({}, Config, key))
    if all(place.field.required for place in places):
        return "none: it must be given"
    values = {layers.get_tag(place.struct)[1]: layers.get_default(place.field) for place in places}
    texts = {owner: load.format_value(value) for owner, value in values.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{text} ({owner})" for owner, text in texts.items())


def _describe_conditions(key: str, places: list[layers.KeyPlace]) -> list[str]:
    if not places:
        return []
    section = key.rpartition(".")[0]
    conditions = []
    siblings = layers.map_sections(Config).get(section, ())
    if len(siblings) > len(places):
        owners = " or ".join(layers.get_tag(place.struct)[1] for place in places)
        conditions.append(f"{section}.{layers.get_tag(siblings[0])[0]} = {owners}")
    for chooser, values in dict.fromkeys(c for place in places for c in place.conditions):
        conditions.append(f"{chooser} = {' or '.join(values)}" if values else f"{chooser} is set")
    return conditions


def compare_configs(*sources: str) -> Differences:
    """Return key -> (left, right) of differing keys; None: the config does not read the key.

    sources: two of a config file, a bundled config or a run directory."""
    paths = (Path(source) for source in sources)
    configs = (load.load(path / "config.toml" if path.is_dir() else path) for path in paths)
    left, right = (flatten(layers.read_keys(config)) for config in configs)
    return find_differences(left, right)


def annotate(text: str, origins: dict[str, str]) -> str:
    """Add a comment with the origin of the value to every key of a dumped config.

    origins: key -> origin, for every value that is not a default.

    >>> print(annotate('seed = 1', {"seed": "--set seed=1"}))
    seed = 1  # --set seed=1
    """
    section = ""
    lines = []
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        name, equals, _ = line.partition(" = ")
        if equals and not line.startswith((" ", "]")):
            origin = origins.get(section + name, "default")
            line = f"{line}  # {origin}"
        lines.append(line)
    return "\n".join(lines)
