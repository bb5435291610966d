"""Write TOML by tomli_w, or in a plainer form; read tables, and fill the templates in them.

The plainer form lets `make gpu-check` start a run beside a machine's own torch, with few packages.
Both forms read back equal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

RawTable = dict[str, Any]  # of TOML
Differences = dict[str, tuple[Any, Any]]  # key -> (value in the base, in the compared table)
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(table: Mapping[str, Any]) -> str:
    """Return `table` as TOML.

    Its values are texts, numbers, booleans, lists and tables."""
    try:
        import tomli_w
    except ImportError:
        return "\n".join(_write_lines(table)) + "\n"
    return tomli_w.dumps(table)


def read_table(module: str, kind: Any = RawTable) -> Any:
    """Read NAME.toml beside NAME.py as a `kind`.  module: the `__file__` of NAME.py."""
    return msgspec.toml.decode(Path(module).with_suffix(".toml").read_bytes(), type=kind)


def fill(template: str, **values: Any) -> str:
    """Return a template of Jinja as plain text: nothing is escaped."""
    import jinja2

    made = jinja2.Template(
        template, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return str(made.render(values))


def flatten(table: Mapping[str, Any], prefix: str = "") -> RawTable:
    """Return {dotted key: value} of nested tables.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    flat: RawTable = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def find_differences(base: Mapping[str, Any], compared: Mapping[str, Any]) -> Differences:
    """Return every leaf in which two nested tables differ, by dotted key.

    >>> find_differences({"a": 3, "b": {"c": 1, "d": 2}}, {"a": 4, "b": {"c": 1, "d": 5}})
    {'a': (3, 4), 'b.d': (2, 5)}
    """
    left, right = flatten(base), flatten(compared)
    pairs = {key: (left.get(key), right.get(key)) for key in sorted({*left, *right})}
    return {key: (value, other) for key, (value, other) in pairs.items() if value != other}


def _write_lines(table: Mapping[str, Any], path: Sequence[str] = ()) -> list[str]:
    lines = [
        f"{_format_key(name)} = {format_value(value)}"
        for name, value in table.items()
        if not isinstance(value, Mapping)
    ]
    for name, value in table.items():
        if isinstance(value, Mapping):
            inner = (*path, name)
            heading = ".".join(_format_key(part) for part in inner)
            lines += ["", f"[{heading}]", *_write_lines(value, inner)]
    return lines


def _format_key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else format_value(name)


def format_value(value: Any) -> str:
    """Format a value on one line; a table in a list as an inline table."""
    if isinstance(value, Mapping):
        pairs = (f"{_format_key(name)} = {format_value(item)}" for name, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, str):
        # a JSON string is a TOML string, but TOML also escapes DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
