"""Decide from the structs which keys a config reads under its chosen methods.

A section with several structs (`advantage`, `loss`, `correction`) has the keys of the chosen one.
A key annotated with `read_with` is read only under certain values of another key.  Every other key
is unread: it is an error if its own layer sets it, and it is dropped if a later layer (`--set`, an
arm, a preset, a method) has changed the choice."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import RawTable

FlatTable = dict[str, Any]  # dotted key -> value
Conditions = tuple[tuple[str, Any], ...]  # (key, values) of every `read_with`
OFF = (None, False, 0, "", "none", "off")


_MOST_SHOWN = 2**53  # a larger limit is only that of a number's type
_TYPE_NAMES = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


class UnreadKey(NamedTuple):
    """A key that nothing reads, with the key that decides this and the error's text."""

    key: str
    chooser: str
    problem: str


def key_of(item: str) -> str:
    """Return the key of a `--set` item."""
    return item.partition("=")[0].strip()


def is_inside(key: str, names: Iterable[str]) -> bool:
    """Return whether `key` is one of the names or in a section of that name."""
    return f"{key}.".startswith(tuple(f"{name}." for name in names))


def split_annotations(kind: Any) -> tuple[Any, list[Meta]]:
    """Return a field's type without annotations, and the annotations."""
    metas: list[Meta] = []
    while get_origin(kind) is typing.Annotated:
        metas += [meta for meta in get_args(kind)[1:] if isinstance(meta, Meta)]
        kind = get_args(kind)[0]
    return kind, metas


def is_union(kind: Any) -> bool:
    """Return whether a type is `a | b`, with or without annotated members."""
    return get_origin(kind) in (types.UnionType, typing.Union)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def list_structs(kind: Any) -> tuple[Any, ...]:
    """Return the structs of a field: several for a section with methods, none for a value."""
    bare, _ = split_annotations(kind)
    options = get_args(bare) if is_union(bare) else (bare,)
    return options if all(map(_is_struct, options)) else ()


@functools.cache
def map_fields(struct: Any) -> dict[str, FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(struct)}


@functools.cache
def _read_module(module: str) -> dict[str, dict[str, str]]:
    """Return class -> field -> the string literal behind the field, of a module's source."""
    return {
        node.name: {
            field.target.id: " ".join(text.value.value.split())
            for field, text in itertools.pairwise(node.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for node in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(node, ast.ClassDef)
    }


def describe_field(struct: Any, field: FieldInfo) -> str:
    """Return the description of a field: the string behind it, or that of its type."""
    for base in struct.__mro__:
        texts = _read_module(base.__module__) if base.__module__.startswith("asyncrl.") else {}
        if text := texts.get(base.__name__, {}).get(field.name):
            return text
    metas = split_annotations(field.type)[1]
    return next((meta.description for meta in metas if meta.description), "")


def build_schema(root: Any) -> RawTable:
    """Return the JSON schema of a tree of structs, with the descriptions of its fields."""
    schema = msgspec.json.schema(root)
    kinds, structs = [root], set()
    for kind in kinds:  # grows
        bare, _ = split_annotations(kind)
        if not _is_struct(bare):
            kinds += get_args(bare)
        elif bare not in structs:
            structs.add(bare)
            for name, field in map_fields(bare).items():
                kinds.append(field.type)
                if text := describe_field(bare, field):
                    properties = schema["$defs"][bare.__name__]["properties"]
                    properties[name] = {"description": text} | properties[name]
    return schema


def get_tag(struct: Any) -> tuple[str, str]:
    """Return the (key, value) that chooses `struct` in its section, or ("", "")."""
    config = struct.__struct_config__
    return (config.tag_field, config.tag) if config.tag_field else ("", "")


def get_default(field: FieldInfo) -> Any:
    """Return the default of a field, or None if it has none."""
    if field.required:
        return None
    makes = field.default is msgspec.NODEFAULT
    return field.default_factory() if makes else field.default


@functools.cache
def map_sections(root: Any) -> dict[str, tuple[Any, ...]]:
    """Return the structs of every section, by its dotted key; "" is the root's."""
    sections: dict[str, tuple[Any, ...]] = {"": (root,)}
    for key, places in map_places(root).items():
        for place in places:
            if structs := list_structs(place.field.type):
                sections[key] = sections.get(key, ()) + structs
    return sections


def choose_struct(flat: FlatTable, root: Any, section: str) -> Any:
    """Return the struct of a section, by its tag or by default; None for an unknown tag."""
    structs = map_sections(root).get(section, ())
    if len(structs) <= 1:
        return structs[0] if structs else None
    chosen = flat.get(f"{section}.{get_tag(structs[0])[0]}")
    if chosen is None:
        return type(get_default(map_places(root)[section][0].field))
    return next((struct for struct in structs if get_tag(struct)[1] == chosen), None)


def describe_values(kind: Any) -> str:
    """Describe the values that a type with its annotations allows.

    >>> describe_values(typing.Annotated[int, Meta(ge=1)])
    'a whole number of at least 1'
    >>> describe_values(typing.Literal["pace", "drop"])
    'one of pace, drop'
    """
    bare, metas = split_annotations(kind)
    if is_union(bare):
        options = [option for option in get_args(bare) if option is not types.NoneType]
        return ", or ".join(describe_values(option) for option in options)
    if get_origin(bare) is typing.Literal:
        names = [str(value) or '""' for value in get_args(bare)]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if list_structs(bare):
        return f"a table of {', '.join(map_fields(bare))}"
    if get_origin(bare) is list:
        return f"a list, each {describe_values(get_args(bare)[0])}"
    bounds = (("ge", "of at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
    limits = [
        f"{phrase} {limit:g}"
        for meta in metas
        for name, phrase in bounds
        if (limit := getattr(meta, name)) is not None and limit < _MOST_SHOWN
    ]
    return " ".join([_TYPE_NAMES.get(bare, "a table"), " and ".join(limits)]).strip()


class KeyPlace(NamedTuple):
    """A field that a dotted key leads to, with its struct.

    conditions: the (key, values) of every `read_with` of the field and of its sections."""

    field: FieldInfo
    struct: Any
    conditions: Conditions


@functools.cache
def map_places(root: Any, prefix: str = "", outer: Conditions = ()) -> dict[str, list[KeyPlace]]:
    """Return the fields of every dotted key, sections included: one for each method that has it.

    A tag has none."""
    places: dict[str, list[KeyPlace]] = {}
    for name, field in map_fields(root).items():
        conditions = (*outer, *list_conditions(field, prefix))
        places.setdefault(prefix + name, []).append(KeyPlace(field, root, conditions))
        for option in list_structs(field.type):
            if tag := get_tag(option)[0]:
                places[f"{prefix}{name}.{tag}"] = []
            for key, inner in map_places(option, f"{prefix}{name}.", conditions).items():
                places.setdefault(key, []).extend(inner)
    return places


@functools.cache
def list_keys(root: Any) -> tuple[str, ...]:
    """Return every dotted key of the tree, including those of all methods."""
    return tuple(key for key in map_places(root) if key not in map_sections(root))


def flatten(raw: RawTable, root: Any, prefix: str = "") -> FlatTable:
    """Return {dotted key: value} of a table, down to the keys of values.

    An empty section stays as an empty table."""
    flat: FlatTable = {}
    for name, value in raw.items():
        if isinstance(value, dict) and value and prefix + name in map_sections(root):
            flat |= flatten(value, root, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def nest(flat: FlatTable, earlier: RawTable | None = None) -> RawTable:
    """Return the table whose keys `flatten` made dotted, on top of an earlier one.

    Raises ConfigError for a key of a value."""
    raw = earlier or {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        table = raw
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{key}: {section} is not a section")
        table[name] = value
    return raw


def get_value(flat: FlatTable, root: Any, key: str) -> Any:
    """Return the value of a key, or its default; None for a key that its section lacks."""
    if key in flat:
        return flat[key]
    section, _, name = key.rpartition(".")
    struct = choose_struct(flat, root, section)
    if struct is None:  # an unknown tag, for which the conversion reports the choices
        return None
    tag, chosen = get_tag(struct)
    field = map_fields(struct).get(name)
    return chosen if name == tag else None if field is None else get_default(field)


def list_conditions(field: FieldInfo, section: str) -> Iterator[tuple[str, Any]]:
    """Yield the (key, values) of every `read_with` of a field."""
    for meta in split_annotations(field.type)[1]:
        if meta.extra and "read_with" in meta.extra:
            key, values = meta.extra["read_with"]
            yield (key if "." in key else section + key), values


def find_unread(flat: FlatTable, root: Any) -> list[UnreadKey]:
    """Return the keys that nothing reads, except keys that no method has."""
    unread_keys = []
    for key in flat:
        section, _, name = key.rpartition(".")
        struct = choose_struct(flat, root, section)
        places = map_places(root).get(key, ())
        place = next((place for place in places if place.struct is struct), None)
        if place is None:
            if places and struct is not None:  # a key of another method of its section
                tag, method = get_tag(struct)
                owners = [get_tag(other.struct)[1] for other in places]
                readable = list(map_fields(struct))
                similar = difflib.get_close_matches(name, readable, 1, 0.6)
                hint = f"; did you mean {section}.{similar[0]}?" if similar else ""
                problem = (
                    f"{key}: belongs to {section}.{tag} = {' or '.join(owners)}, not to {method}"
                    f"{hint} ({method} reads {', '.join(readable)})"
                )
                unread_keys.append(UnreadKey(key, f"{section}.{tag}", problem))
            continue
        conditions = place.conditions
        # a key that only this variant of its section has
        base = next((kind for kind in struct.__mro__ if "OWN_KEYS_READ_WITH" in vars(kind)), None)
        if base is not None and place.field.name not in map_fields(base):
            conditions += ((base.OWN_KEYS_READ_WITH, ()),)
        for chooser, values in conditions:
            value = get_value(flat, root, chooser)
            if value in values or (not values and value not in OFF):
                continue
            if values:
                reason = f"belongs to {chooser} = {' or '.join(values)}, not to {value}"
            else:
                formatted = f'"{value}"' if isinstance(value, str) else f"{value}"
                reason = f"acts only where {chooser} is set, and it is {formatted}"
            unread_keys.append(UnreadKey(key, chooser, f"{key}: {reason}"))
            break
    return unread_keys


def read_keys(config: msgspec.Struct) -> FlatTable:
    """Return the keys of a config that are read and not None."""
    root = type(config)
    keys = flatten(msgspec.to_builtins(config), root)
    flat = {key: value for key, value in keys.items() if value is not None}
    while unread_keys := find_unread(flat, root):
        for unread in unread_keys:
            del flat[unread.key]
    return flat
