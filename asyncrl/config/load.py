"""Read a config: TOML, `--set` overrides, method and presets, and the rules on several keys.

Every mistake is one ConfigError with file, line and remedy."""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from asyncrl.config import bundled_configs, layers, methods, presets, rules
from asyncrl.config.layers import FlatTable, is_inside, key_of
from asyncrl.config.tree import Config
from asyncrl.contract import toml_writer
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import Say
from asyncrl.contract.toml_writer import RawTable, flatten

# earlier and foreign names of keys, with their replacements
RENAMED, SPLIT, REMOVED, REMOVED_PRESETS, REMOVED_METHODS = tomllib.loads(
    Path(__file__).with_name("renamed.toml").read_text(encoding="utf-8")
).values()

Struct = TypeVar("Struct", bound=msgspec.Struct)


class ConfigSchema(NamedTuple, Generic[Struct]):
    """A kind of config: its root struct and its rules that span several keys."""

    root: type[Struct]
    check: Callable[[Struct], list[str]]


RUN: ConfigSchema[Config] = ConfigSchema(Config, rules.check)
# without the rules that span several keys
UNCHECKED: ConfigSchema[Config] = ConfigSchema(Config, lambda config: [])


def load(
    path: str | Path,
    sets: Sequence[str] = (),
    note: Say | None = None,
    origins: dict[str, str] | None = None,
) -> Config:
    """Load the config in `path` and apply `sets` ("key.path=value", TOML values).

    A bundled config needs only its name, no path.  `{here}` in the file is the file's folder.
    `method` and presets fill the missing keys; in `sets` they also replace the file's keys. If an
    item of `sets` changes a method, the keys of the earlier one are dropped, and `note` is called
    with a sentence about each.  `origins` receives the origin of every key that is not a default:
    file:line, `--set ...`, a method or a preset.

    Raises ConfigError with file:line, key and remedy."""
    return load_as(RUN, path, sets, note, origins)


def load_to_train(source: str, sets: Sequence[str]) -> Config:
    """Load a config for a command whose runs must train.  Raises ConfigError like `load`."""
    config = load(source, sets)
    if not config.learner.steps:
        raise ConfigError(f"{source}: learner.steps = 0 only evaluates: this command needs steps")
    return config


def load_as(
    tree: ConfigSchema[Struct],
    path: str | Path,
    sets: Sequence[str] = (),
    note: Say | None = None,
    origins: dict[str, str] | None = None,
) -> Struct:
    """Load another kind of config like `load`."""
    path = bundled_configs.find(path, tree.root is Config)
    text = ""
    try:
        # some editors write a byte order mark
        text = Path(path).read_text(encoding="utf-8-sig")
        raw = bundled_configs.substitute_here(tomllib.loads(text), path.parent)
        return _apply_layers(tree, raw, _ConfigSource(str(path), text, sets), note, origins)
    except FileNotFoundError as error:
        names = bundled_configs.list_names(tree.root is Config)
        matches = difflib.get_close_matches(path.name.removesuffix(".toml"), names, 1)
        hint = f" did you mean {matches[0]}?" if matches else ""
        raise ConfigError(
            f"{path}: no such config file;{hint} bundled configs, by name: {', '.join(names)}"
        ) from error
    except IsADirectoryError as error:
        raise ConfigError(
            f"{path}: is a folder, not a config; to continue a run: asyncrl run --resume {path}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (tomllib.TOMLDecodeError, ConfigError) as error:
        problem = "" if isinstance(error, ConfigError) else f"is not valid TOML: {error}"
        problem = bundled_configs.explain_other_system(text, layers.list_keys(tree.root)) or problem
        raise ConfigError(f"{path}: {problem}" if problem else str(error)) from error


class _ConfigSource(NamedTuple):
    """The file with its text and the --set items of a config, to locate errors."""

    path: str
    text: str
    sets: Sequence[str]

    def locate(self, key: str) -> str:
        """Return file:line of a key, or the --set item that set it."""
        for item in self.sets:
            item_key = key_of(item)
            if key and (is_inside(item_key, [key]) or is_inside(key, [item_key])):
                return f"--set {item}"
        section, _, name = key.rpartition(".")
        current_section = ""
        heading_place = ""
        for number, line in enumerate(self.text.splitlines(), 1):
            if heading := re.match(r"\s*\[([\w.]+)\]", line):
                current_section = heading.group(1)
                heading_place = f"{self.path}:{number}" if current_section == key else heading_place
            elif (
                current_section == section and re.match(rf"\s*{re.escape(name)}\s*=", line)
            ) or re.match(rf"\s*{re.escape(key)}\s*=", line):
                return f"{self.path}:{number}"
        return heading_place or self.path


def convert(raw: RawTable, source: str, text: str = "", sets: Sequence[str] = ()) -> Config:
    """Convert a raw table to a checked Config, with `sets`, method and presets applied."""
    return _apply_layers(RUN, raw, _ConfigSource(source, text, sets))


def build(raw: RawTable, source: str = "config") -> Config:
    """Convert a raw table without the rules that span several keys."""
    return _apply_layers(UNCHECKED, raw, _ConfigSource(source, "", ()))


def _apply_layers(
    tree: ConfigSchema[Struct],
    raw: RawTable,
    source: _ConfigSource,
    note: Say | None = None,
    origins: dict[str, str] | None = None,
) -> Struct:
    """Apply the layers in order: the table, the items of `sets`, then method and presets."""
    flat = layers.flatten(raw, tree.root)
    is_complete = raw.keys() >= _WHOLE
    item_numbers: dict[str, int] = {}  # key -> the last item of `sets` that gave it
    for number, item in enumerate(source.sets):
        key = apply(flat, item, tree.root)
        item_numbers[key] = number
        if tree.root is Config and key == "method":
            methods.replace(flat)
        if chooser := methods.FUNCTIONS.get(key):
            flat.pop(chooser, None)
            item_numbers[chooser] = number
    if tree.root is not Config:
        return _convert(tree, flat, source)
    for key, chooser in methods.FUNCTIONS.items():
        if key in flat:
            flat.setdefault(chooser, "function")
    presets.forget(flat, source.sets)
    if (
        "correction.proximal" in item_numbers
        and "correction.preset" not in item_numbers
        and flat.get("correction.proximal") == "behavior"
    ):
        flat.pop("correction.preset", None)  # with the behavior policy there are no weights
    if "method" in flat and (name := str(flat["method"])) not in methods.METHODS:
        problem = (
            f"{flat['method']!r} is unknown{methods.suggest_method(name)}; choose one of "
            f"{', '.join(methods.METHODS)}, or build it of advantage, loss, correction and kl: "
            "docs/methods.md"
        )
        if instead := REMOVED_METHODS.get(name):
            problem = f"{name} was removed; write {instead}"
        raise ConfigError(f"{source.locate('method')}: method: {problem}")
    _drop_removed(flat, source)
    origin_of: dict[str, str] = {}  # filled key -> the preset or method that filled it
    bundles = presets.BUNDLES | {"method": {name: x.keys for name, x in methods.METHODS.items()}}
    for chooser, keys_by_name in bundles.items():
        name = str(flat.get(chooser))
        _fill(flat, keys_by_name.get(name, {}), f'{chooser} = "{name}"', origin_of)
    path = flat.get("model.path")
    if isinstance(path, str) and flat.get("learner.optimizer") != "sgd":
        rate, reason = presets.choose_learning_rate(path, lora=bool(flat.get("lora.rank")))
        _fill(flat, {} if rate is None else {"learner.lr": rate}, reason, origin_of)
    _check_known(flat, tree.root, source)
    while unread_keys := layers.find_unread(flat, tree.root):
        for unread_key in unread_keys:
            item_number = item_numbers.get(unread_key.key, -1)
            is_overridden = any(
                number > item_number
                and (
                    other in (unread_key.chooser, "method")
                    or (other.endswith(".preset") and unread_key.chooser.startswith(other[:-6]))
                )
                for other, number in item_numbers.items()
            )
            if unread_key.key not in origin_of:
                if not is_overridden and not (is_complete and item_number < 0):
                    raise ConfigError(f"{source.locate(unread_key.key)}: {unread_key.problem}")
                if is_overridden and note is not None:
                    note(f"dropped {unread_key.problem}")
            del flat[unread_key.key]
            item_numbers[unread_key.key] = len(source.sets)  # also drop the keys that depend on it
    if origins is not None:
        short_source = source._replace(path=Path(source.path).name)
        origins.update(
            {key: origin_of.get(key) or short_source.locate(key) for key in flatten(flat)}
        )
    return _convert(tree, flat, source)


def _fill(flat: FlatTable, keys: FlatTable, origin: str, origin_of: dict[str, str]) -> None:
    """Set the missing ones of `keys`, and record their origin."""
    for key in [key for key in keys if key not in flat]:
        flat[key], origin_of[key] = keys[key], origin


def _drop_removed(flat: FlatTable, source: _ConfigSource) -> None:
    """Drop removed keys with their only value; raise ConfigError for other values."""
    for key, (only_value, replacement) in REMOVED.items():
        value = flat.pop(key, only_value)
        matters = key != "correction.m2_over" or flat.get("correction.m2")
        if value != only_value and matters:
            raise ConfigError(f"{source.locate(key)}: {key} = {value} was removed; {replacement}")
    preset = str(flat.get("correction.preset"))
    if preset in REMOVED_PRESETS:
        raise ConfigError(
            f"{source.locate('correction.preset')}: correction.preset = {preset} was removed; "
            f"write {REMOVED_PRESETS[preset]}"
        )


# Only a config written by a run has all these sections.  Earlier versions also wrote unread keys,
# which are therefore dropped instead of refused.
_WHOLE = {"runs", "wires", "watchdog", "record", "durability", "weights", "evaluation"}


def _convert(tree: ConfigSchema[Struct], flat: FlatTable, source: _ConfigSource) -> Struct:
    _check_known(flat, tree.root, source)
    if tree.root is Config:
        flat.pop("method", None)
    for section, structs in layers.map_sections(tree.root).items():  # msgspec requires the tags
        tag = f"{section}.{layers.get_tag(structs[0])[0]}"
        if len(structs) > 1 and any(key.startswith(f"{section}.") for key in flat):
            flat[tag] = layers.get_value(flat, tree.root, tag)
    try:
        config = msgspec.convert(layers.nest(flat), tree.root)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        key = re.sub(r"\[\.\.\.\]|\[\d+\]", "", path.strip("`").lstrip("."))
        key = key or (match.group(1) if (match := re.search(r"field `(\w+)`", message)) else "")
        raise ConfigError(
            f"{source.locate(key)}: {key}: {message}{list_allowed_values(key, tree.root)}"
        ) from error
    if problems := tree.check(config):
        key = problems[0].split(":")[0].split(" ")[0]
        raise ConfigError(f"{source.locate(key)}: {problems[0]}")
    return config


def apply(flat: FlatTable, item: str, root: Any = Config) -> str:
    """Set one `key.path=value` and return the key.

    A text key of the tree `root` accepts a value without quotes.  Raises ConfigError for other
    forms."""
    key, equals, value = item.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {item}: write key.path=value")
    value = value.strip()
    kinds = [place.field.type for place in layers.map_places(root).get(key.strip(), [])]
    is_text = bool(kinds) and all(layers.split_annotations(kind)[0] is str for kind in kinds)
    takes_text = is_text and not value.startswith(('"', "'"))
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
        if takes_text and not isinstance(parsed, (list, dict)):
            parsed = value  # name=2026 is a name
    except tomllib.TOMLDecodeError:
        if not takes_text and not re.fullmatch(r"[\w./:@+-]*", value):
            raise ConfigError(
                f'--set {item}: `{value}` is not a TOML value; quote text as "..."'
            ) from None
        parsed = value
    key = key.strip()
    for inner in [inner for inner in flat if inner.startswith(f"{key}.")]:
        del flat[inner]  # the section is given as a whole
    given = layers.flatten(layers.nest({key: parsed}), root)
    earlier = layers.nest({name: copy.deepcopy(flat[name]) for name in given if name in flat})
    flat |= layers.flatten(layers.nest({key: parsed}, earlier), root)
    return key


def _check_known(flat: FlatTable, root: Any, source: _ConfigSource) -> None:
    """Raise ConfigError for an unknown key, a section given as a value or an unknown method."""
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        structs = layers.map_sections(root).get(section, ())
        tag = layers.get_tag(structs[0])[0] if structs else ""
        if key in layers.map_sections(root):
            if value != {}:
                raise ConfigError(f"{source.locate(key)}: {key}: is a section, not a value")
        elif name == tag:
            if layers.choose_struct(flat, root, section) is None:
                raise ConfigError(
                    f"{source.locate(key)}: {key}: Invalid value {value!r}"
                    f"{list_allowed_values(key, root)}"
                )
        elif key not in layers.map_places(root) and not (root is Config and key == "method"):
            known = RENAMED.keys() | SPLIT.keys()
            leaves = (leaf for leaf in flatten({key: value}) if leaf.rpartition(".")[2] in known)
            key = next(leaves, key)
            struct = layers.choose_struct(flat, root, section)
            names = [*filter(None, [tag]), *(layers.map_fields(struct) if struct else ())]
            raise ConfigError(
                f"{source.locate(key)}: {key}: {explain_unknown_key(key, root, names)}"
            )


def explain_unknown_key(key: str, root: Any, fields: Collection[str]) -> str:
    """Return the message for an unknown key, with its replacement if one is known."""
    prefix, _, name = key.rpartition(".")
    if root is Config and (current := RENAMED.get(key) or RENAMED.get(name)):
        return f"is called {current} here; write that"
    if root is Config and (replacement := SPLIT.get(key) or SPLIT.get(name)):
        return f"was replaced; write {replacement}"
    top = {"method": "method"} | RENAMED if root is Config and not prefix else {}
    similar = difflib.get_close_matches(name, [*fields, *top], 1, 0.5)
    guesses = [other for other in layers.list_keys(root) if f".{other}".endswith(f".{name}")]
    guesses += [top.get(match, key[: -len(name)] + match) for match in similar]
    if guesses:
        return f"unknown key; did you mean {guesses[0]}?"
    if not fields:  # the key's prefix is not a section
        sections = sorted({x.partition(".")[0] for x in layers.map_sections(root) if x})
        return f"unknown key; there is no section {prefix}; sections: {', '.join(sections)}"
    return f"unknown key; keys of this section: {', '.join(fields)}"


def list_keys() -> tuple[str, ...]:
    """Return every dotted key of the tree."""
    return layers.list_keys(Config)


def _find_type(key: str, root: Any = Config) -> Any:
    """Return the type of a key, or the tuple of tags if it chooses a section's struct."""
    places = layers.map_places(root).get(key)
    if places:
        return places[0].field.type
    options = layers.map_sections(root).get(key.rpartition(".")[0], ())
    return None if places is None else tuple(layers.get_tag(option)[1] for option in options)


def list_choices(key: str) -> list[str]:
    """Return the named values of a key of a run's config, or [] if it has none."""
    kind = tuple(methods.METHODS) if key == "method" else _find_type(key)
    if isinstance(kind, tuple):
        return list(kind)
    kind = layers.split_annotations(kind)[0]
    members = get_args(kind) if layers.is_union(kind) else [kind]
    literals = (get_args(member) for member in members if get_origin(member) is Literal)
    return [str(value) for literal in literals for value in literal]


def list_allowed_values(key: str, root: Any) -> str:
    """Return the end of a message with the values that a key allows, or ""."""
    kind = _find_type(key, root)
    if kind is None:
        return ""
    if isinstance(kind, tuple):
        return f"; choose one of {', '.join(kind)}"
    return f"; choose {layers.describe_values(kind)}"


def require_same_config(started: Config, current: Config, sets: Sequence[str], path: Path) -> None:
    """Raise ConfigError for a --set that differs from the run's own config.

    started: the config that the process was started with.  current: the run's config in `path`,
    which applies to all its processes, so that the --set would be ignored."""
    # the last item of a repeated key applies
    for key, item in {key_of(item): item for item in sets}.items():
        values = [msgspec.to_builtins(config) for config in (started, current)]
        for name in key.split("."):
            values = [value.get(name) if isinstance(value, dict) else None for value in values]
        started_value, current_value = values
        if started_value != current_value:
            raise ConfigError(
                f"--set {item}: the run has {key} = {format_value(current_value)}, not "
                f"{format_value(started_value)} ({path}), and all its processes share one config; "
                "remove this --set, or start a new run"
            )


def format_value(value: Any) -> str:
    """Format a value as in a config, or a section as a table."""
    if value is None:
        return "not set"
    if isinstance(value, dict):
        return str(value)
    return toml_writer.dumps({"x": value}).partition("=")[2].strip()


def dump(config: msgspec.Struct) -> str:
    """Format the config as TOML that loads back equal.

    Keys that are None or that its methods do not read are left out."""
    return toml_writer.dumps(layers.nest(layers.read_keys(config)))


def build_schema() -> RawTable:
    """Return the JSON schema of the config for editors.

    It accepts a section without a tag, whose method is the default, and the key `method`, which
    fills keys of several sections."""
    schema = layers.build_schema(Config)
    for section, structs in layers.map_sections(Config).items():
        if tag := layers.get_tag(structs[0])[0]:
            default = layers.choose_struct({}, Config, section)
            schema["$defs"][default.__name__]["required"].remove(tag)
    schema["$defs"]["Config"]["properties"] = {
        "method": {"enum": list(methods.METHODS), "description": methods.DESCRIPTION}
    } | schema["$defs"]["Config"]["properties"]
    return schema
