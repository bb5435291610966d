"""Decide which keys a config reads, given the methods that it chooses, from the structs alone.

A section with several structs (`advantage`, `loss`, `correction`) has the keys of the chosen one.
A key annotated with `read_with` is read only under certain values of another key.  Every other
given key is unread: an error if its own layer gives it, and dropped if a later layer (`--set`, an
arm, a preset, a method) has changed the choice."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import Meta

OFF = (None, False, 0, "", "none", "off")


_TYPE_NAMES = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


class UnreadKey(NamedTuple):
    """A given key that nothing reads, with the key that decides this and the error's text."""

    key: str
    chooser: str
    why: str


def split_annotations(kind: Any) -> tuple[Any, list[Meta]]:
    """Return a field's type without its annotations, and the annotations."""
    metas: list[Meta] = []
    while typing.get_origin(kind) is typing.Annotated:
        metas += [meta for meta in typing.get_args(kind)[1:] if isinstance(meta, Meta)]
        kind = typing.get_args(kind)[0]
    return kind, metas


def is_union(kind: Any) -> bool:
    """True for `a | b`, with annotated members or without."""
    return typing.get_origin(kind) in (types.UnionType, typing.Union)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def structs_of(kind: Any) -> tuple[Any, ...]:
    """Return the structs of a field: several for a section of methods, none for a value."""
    plain, _ = split_annotations(kind)
    if _is_struct(plain):
        return (plain,)
    options = typing.get_args(plain) if is_union(plain) else ()
    return options if options and all(_is_struct(option) for option in options) else ()


@functools.cache
def fields_of(struct: Any) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(struct)}


def tag_of(struct: Any) -> tuple[str, str]:
    """Return the (key, value) that choose `struct` in its section, or ("", "")."""
    config = struct.__struct_config__
    return (config.tag_field, config.tag) if config.tag_field else ("", "")


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default of a field, or None if it has none."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def member(field: msgspec.structs.FieldInfo, table: Any) -> Any:
    """Return the struct that `table` chooses for a section, by its tag or the default.

    None if the field is not a section or the tag is unknown."""
    options = structs_of(field.type)
    if len(options) <= 1:
        return options[0] if options else None
    key, _ = tag_of(options[0])
    given = table.get(key) if isinstance(table, dict) else None
    if given is None:
        return type(default_of(field))
    return next((option for option in options if tag_of(option)[1] == given), None)


def describe_values(kind: Any) -> str:
    """Describe the values that a type with its annotations allows.

    >>> describe_values(typing.Annotated[int, Meta(ge=1)])
    'a whole number of at least 1'
    >>> describe_values(typing.Literal["pace", "drop"])
    'one of pace, drop'
    """
    plain, metas = split_annotations(kind)
    if is_union(plain):
        parts = [part for part in typing.get_args(plain) if part is not types.NoneType]
        return ", or ".join(describe_values(part) for part in parts)
    if typing.get_origin(plain) is typing.Literal:
        names = [str(value) or '""' for value in typing.get_args(plain)]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if structs_of(plain):
        return f"a table of {', '.join(fields_of(plain))}"
    if typing.get_origin(plain) is list:
        return f"a list, each {describe_values(typing.get_args(plain)[0])}"
    words = (("ge", "of at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
    limits = [
        f"{word} {limit:g}"
        for meta in metas
        for name, word in words
        if (limit := getattr(meta, name)) is not None
    ]
    return " ".join([_TYPE_NAMES.get(plain, "a table"), " and ".join(limits)]).strip()


@functools.cache
def keys(root: Any, prefix: str = "") -> tuple[str, ...]:
    """Return every key of the tree, dotted, including those of all methods."""
    found: dict[str, None] = {}
    for name, field in fields_of(root).items():
        options = structs_of(field.type)
        if not options:
            found[prefix + name] = None
        for option in options:
            if tag := tag_of(option)[0]:
                found[f"{prefix}{name}.{tag}"] = None
            found |= dict.fromkeys(keys(option, f"{prefix}{name}."))
    return tuple(found)


def is_text(root: Any, key: str) -> bool:
    """Decide whether `key` takes any text, and nothing else, in every method that has it."""
    *sections, last = key.split(".")
    options: tuple[Any, ...] = (root,)
    for section in sections:
        fields = [fields_of(option).get(section) for option in options]
        options = tuple(struct for field in fields if field for struct in structs_of(field.type))
    leaves = [field for option in options if (field := fields_of(option).get(last))]
    return bool(leaves) and all(split_annotations(field.type)[0] is str for field in leaves)


class GivenKey(NamedTuple):
    """A leaf that a table gives.

    field: None if the struct of its section has no such field.
    conditions: the (key, values) of every `read_with` of the leaf and of the sections around it."""

    key: str
    field: msgspec.structs.FieldInfo | None
    struct: Any
    conditions: tuple[tuple[str, Any], ...]


def walk(
    raw: dict[str, Any], root: Any, prefix: str = "", around: tuple[tuple[str, Any], ...] = ()
) -> Iterator[GivenKey]:
    """Yield every given leaf except the tags."""
    fields = fields_of(root)
    for name, value in raw.items():
        if name == tag_of(root)[0]:
            continue
        field = fields.get(name)
        conditions = around if field is None else (*around, *conditions_of(field, prefix))
        below = member(field, value) if field is not None else None
        if below is not None and isinstance(value, dict):
            yield from walk(value, below, f"{prefix}{name}.", conditions)
        else:
            yield GivenKey(prefix + name, field, root, conditions)


def value_of(raw: dict[str, Any], root: Any, key: str) -> Any:
    """Return the value at `key`, given or by default."""
    table: Any = raw
    struct = root
    *sections, last = key.split(".")
    for section in sections:
        field = fields_of(struct)[section]
        table = table.get(section, {}) if isinstance(table, dict) else {}
        struct = member(field, table)
    if last == tag_of(struct)[0]:
        return tag_of(struct)[1]
    if isinstance(table, dict) and last in table:
        return table[last]
    field_info = fields_of(struct).get(last)
    return None if field_info is None else default_of(field_info)


def conditions_of(field: msgspec.structs.FieldInfo, section: str) -> Iterator[tuple[str, Any]]:
    """Yield the (key, values) of every `read_with` of a field."""
    for meta in split_annotations(field.type)[1]:
        if meta.extra and "read_with" in meta.extra:
            key, values = meta.extra["read_with"]
            yield (key if "." in key else section + key), values


def unread(raw: dict[str, Any], root: Any) -> list[UnreadKey]:
    """Return the given keys that nothing reads, except keys that no method has."""
    found = []
    for given in walk(raw, root):
        if given.field is None:
            found += _of_other_method(root, given.key, given.struct)
            continue
        for chooser, values in given.conditions:
            chosen = value_of(raw, root, chooser)
            if chosen in values or (not values and chosen not in OFF):
                continue
            if values:
                why = f"belongs to {chooser} = {' or '.join(values)}, not to {chosen}"
            else:
                shown = f'"{chosen}"' if isinstance(chosen, str) else f"{chosen}"
                why = f"acts only where {chooser} is set, and it is {shown}"
            found.append(UnreadKey(given.key, chooser, f"{given.key}: {why}"))
            break
    return found


def _of_other_method(root: Any, key: str, struct: Any) -> list[UnreadKey]:
    """Report `key` if it belongs to another method of its section."""
    section, _, name = key.rpartition(".")
    tag, chosen = tag_of(struct)
    if not tag:
        return []
    parent: Any = root
    for part in section.split(".")[:-1]:
        parent = member(fields_of(parent)[part], {})
    options = structs_of(fields_of(parent)[section.rpartition(".")[2]].type)
    owners = [tag_of(option)[1] for option in options if name in fields_of(option)]
    if not owners:
        return []
    read = [other for other in fields_of(struct) if other != name]
    close = difflib.get_close_matches(name, read, 1, 0.6)
    hint = f"; did you mean {section}.{close[0]}?" if close else ""
    why = (
        f"{key}: belongs to {section}.{tag} = {' or '.join(owners)}, not to {chosen}{hint} "
        f"({chosen} reads {', '.join(read)})"
    )
    return [UnreadKey(key, f"{section}.{tag}", why)]


def remove(raw: dict[str, Any], key: str) -> None:
    """Remove one dotted key from a table, if it is there."""
    *sections, last = key.split(".")
    table: Any = raw
    for section in sections:
        table = table.get(section) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table.pop(last, None)


def put(raw: dict[str, Any], key: str, value: Any) -> bool:
    """Set one dotted key unless it is given; return whether it was set."""
    *sections, last = key.split(".")
    table: Any = raw
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            return False
    if last in table:
        return False
    table[last] = value
    return True


def tagged(raw: dict[str, Any], root: Any) -> dict[str, Any]:
    """Return a copy of the table with the tags that it leaves to the defaults, for msgspec."""
    made = dict(raw)
    for name, field in fields_of(root).items():
        value = made.get(name)
        below = member(field, value)
        if below is None or not isinstance(value, dict):
            continue
        tag, chosen = tag_of(below)
        made[name] = ({tag: chosen} if tag else {}) | tagged(value, below)
    return made


def read_keys(config: msgspec.Struct) -> dict[str, Any]:
    """Return the config as a table of the keys that it reads and that are not None."""
    raw = _drop_nones(msgspec.to_builtins(config))
    while found := unread(raw, type(config)):
        for key in found:
            remove(raw, key.key)
    return {name: value for name, value in raw.items() if value != {} or not _section(config, name)}


def _section(config: msgspec.Struct, name: str) -> bool:
    return bool(structs_of(fields_of(type(config))[name].type))


def _drop_nones(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _drop_nones(inner) for key, inner in value.items() if inner is not None}
