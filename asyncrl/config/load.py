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
RENAMED, SPLIT, REMOVED, REMOVED_VALUES = tomllib.loads(
    Path(__file__).with_name("renamed.toml").read_text(encoding="utf-8")
).values()

Struct = TypeVar("Struct", bound=msgspec.Struct)
AnyLiteral: Any = Literal  # for values that a type checker cannot evaluate


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
    return load_as(Config, rules.check, path, sets, note, origins)


def load_to_train(source: str, sets: Sequence[str]) -> Config:
    """Load a config for a command whose runs must train.  Raises ConfigError like `load`."""
    config = load(source, sets)
    if not config.learner.steps:
        raise ConfigError(f"{source}: learner.steps = 0 only evaluates: this command needs steps")
    return config


def load_as(
    root: type[Struct],
    check: Callable[[Struct], list[str]],
    path: str | Path,
    sets: Sequence[str] = (),
    note: Say | None = None,
    origins: dict[str, str] | None = None,
) -> Struct:
    """Load another kind of config like `load`.

    root: its struct. check: lists the violations of the rules that span several keys."""
    path = bundled_configs.find(path, root is Config)
    text = ""
    try:
        # some editors write a byte order mark
        text = Path(path).read_text(encoding="utf-8-sig")
        raw = bundled_configs.substitute_here(tomllib.loads(text), path.parent)
        source = _ConfigSource(root, check, str(path), text, sets)
        return _apply_layers(raw, source, note, origins)
    except FileNotFoundError as error:
        names = bundled_configs.list_names(root is Config)
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
        problem = bundled_configs.explain_other_system(text, layers.list_keys(root)) or problem
        raise ConfigError(f"{path}: {problem}" if problem else str(error)) from error


class _ConfigSource(NamedTuple, Generic[Struct]):
    """The kind of a config, and its file with its text and the --set items, to locate errors."""

    root: type[Struct]
    check: Callable[[Struct], list[str]]
    path: str
    text: str = ""
    sets: Sequence[str] = ()

    def locate(self, key: str) -> str:
        """Return file:line of a key, or the --set item that set it."""
        for item in self.sets:
            item_key = key_of(item)
            if key and (is_inside(item_key, [key]) or is_inside(key, [item_key])):
                return f"--set {item}"
        section, place = "", self.path
        for number, line in enumerate(self.text.splitlines(), 1):
            setting = re.match(r"\s*([\w.-]+)\s*=", line)
            if heading := re.match(r"\s*\[([\w.]+)\]", line):
                section = heading[1]
                place = f"{self.path}:{number}" if section == key else place
            elif setting and key in (setting[1], f"{section}.{setting[1]}"):
                return f"{self.path}:{number}"
        return place


def convert(raw: RawTable, source: str, text: str = "", sets: Sequence[str] = ()) -> Config:
    """Convert a raw table to a checked Config, with `sets`, method and presets applied."""
    return _apply_layers(raw, _ConfigSource(Config, rules.check, source, text, sets))


def build(raw: RawTable, source: str = "config") -> Config:
    """Convert a raw table without the rules that span several keys."""
    return _apply_layers(raw, _ConfigSource(Config, lambda config: [], source))


def _apply_layers(
    raw: RawTable,
    source: _ConfigSource[Struct],
    note: Say | None = None,
    origins: dict[str, str] | None = None,
) -> Struct:
    """Apply the layers in order: the table, the items of `sets`, then method and presets."""
    root: Any = source.root
    flat = layers.flatten(raw, root)
    is_complete = raw.keys() >= _WHOLE
    item_numbers: dict[str, int] = {}  # key -> the last item of `sets` that gave it
    for number, item in enumerate(source.sets):
        key = apply(flat, item, root)
        item_numbers[key] = number
        if root is Config and key == "method":
            methods.replace(flat)
        if chooser := methods.FUNCTIONS.get(key):
            flat.pop(chooser, None)
            item_numbers[chooser] = number
    if root is not Config:
        return _convert(flat, source)
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
    _drop_removed(flat, source)
    if "method" in flat and (name := str(flat["method"])) not in methods.METHODS:
        raise ConfigError(
            f"{source.locate('method')}: method: {flat['method']!r} is unknown"
            f"{methods.suggest_method(name)}; choose one of {', '.join(methods.METHODS)}, or build "
            "it of advantage, loss, correction and kl: docs/methods.md"
        )
    origin_of: dict[str, str] = {}  # filled key -> the preset or method that filled it
    bundles = presets.BUNDLES | {"method": {name: x.keys for name, x in methods.METHODS.items()}}
    for chooser, keys_by_name in bundles.items():
        name = str(flat.get(chooser))
        _fill(flat, keys_by_name.get(name, {}), f'{chooser} = "{name}"', origin_of)
    path = flat.get("model.path")
    if isinstance(path, str) and flat.get("learner.optimizer") != "sgd":
        rate, reason = presets.choose_learning_rate(path, lora=bool(flat.get("lora.rank")))
        _fill(flat, {} if rate is None else {"learner.lr": rate}, reason, origin_of)
    _check_known(flat, source)
    while unread_keys := layers.find_unread(flat, root):
        for unread_key in unread_keys:
            item_number = item_numbers.get(unread_key.key, -1)
            preset = f"{unread_key.chooser.partition('.')[0]}.preset"
            is_overridden = any(
                item_numbers.get(other, -1) > item_number
                for other in (unread_key.chooser, preset, "method")
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
    return _convert(flat, source)


def _fill(flat: FlatTable, keys: FlatTable, origin: str, origin_of: dict[str, str]) -> None:
    """Set the missing ones of `keys`, and record their origin."""
    for key in [key for key in keys if key not in flat]:
        flat[key], origin_of[key] = keys[key], origin


def _drop_removed(flat: FlatTable, source: _ConfigSource[Any]) -> None:
    """Drop removed keys with their only value; raise ConfigError for other removed values."""
    for key, (only_value, replacement) in REMOVED.items():
        value = flat.pop(key, only_value)
        matters = key != "correction.m2_over" or flat.get("correction.m2")
        if value != only_value and matters:
            raise ConfigError(f"{source.locate(key)}: {key} = {value} was removed; {replacement}")
    for key, replacements in REMOVED_VALUES.items():
        if instead := replacements.get(str(flat.get(key))):
            raise ConfigError(
                f"{source.locate(key)}: {key} = {flat[key]} was removed; write {instead}"
            )


# Only a config written by a run has all these sections.  Earlier versions also wrote unread keys,
# which are therefore dropped instead of refused.
_WHOLE = {"runs", "wires", "watchdog", "record", "durability", "weights", "evaluation"}


def _convert(flat: FlatTable, source: _ConfigSource[Struct]) -> Struct:
    root = source.root
    _check_known(flat, source)
    if root is Config:
        flat.pop("method", None)
    for section, structs in layers.map_sections(root).items():  # msgspec requires the tags
        tag = f"{section}.{layers.get_tag(structs[0])[0]}"
        if len(structs) > 1 and any(key.startswith(f"{section}.") for key in flat):
            flat[tag] = layers.get_value(flat, root, tag)
    try:
        config = msgspec.convert(layers.nest(flat), root)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        key = re.sub(r"\[\.\.\.\]|\[\d+\]", "", path.strip("`").lstrip("."))
        key = key or (match.group(1) if (match := re.search(r"field `(\w+)`", message)) else "")
        raise ConfigError(
            f"{source.locate(key)}: {key}: {message}{list_allowed_values(key, root)}"
        ) from error
    if problems := source.check(config):
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


def _check_known(flat: FlatTable, source: _ConfigSource[Any]) -> None:
    """Raise ConfigError for an unknown key or a section given as a value."""
    root: Any = source.root
    for key, value in flat.items():
        section = key.rpartition(".")[0]
        structs = layers.map_sections(root).get(section, ())
        if key in layers.map_sections(root):
            if value != {}:
                raise ConfigError(f"{source.locate(key)}: {key}: is a section, not a value")
        elif key not in layers.map_places(root) and not (root is Config and key == "method"):
            known = RENAMED.keys() | SPLIT.keys()
            leaves = (leaf for leaf in flatten({key: value}) if leaf.rpartition(".")[2] in known)
            key = next(leaves, key)
            # with an unknown method the keys of the first one
            struct = layers.choose_struct(flat, root, section) or next(iter(structs), None)
            names = [layers.get_tag(struct)[0], *layers.map_fields(struct)] if struct else []
            names = [*filter(None, names)]
            raise ConfigError(
                f"{source.locate(key)}: {key}: {explain_unknown_key(key, root, names)}"
            )


def explain_unknown_key(key: str, root: Any, fields: Collection[str]) -> str:
    """Return the message for an unknown key, with its replacement if one is known."""
    prefix, _, name = key.rpartition(".")
    if root is Config:
        if current := RENAMED.get(key) or RENAMED.get(name):
            return f"is called {current} here; write that"
        if replacement := SPLIT.get(key) or SPLIT.get(name):
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


def find_type(key: str, root: Any = Config) -> Any:
    """Return the type of a key, or None for an unknown one."""
    if key == "method":
        return AnyLiteral[tuple(methods.METHODS)]
    if places := layers.map_places(root).get(key):
        return places[0].field.type
    options = layers.map_sections(root).get(key.rpartition(".")[0], ())
    tags = tuple(layers.get_tag(option)[1] for option in options)
    return None if places is None else AnyLiteral[tags]


def list_choices(key: str) -> list[str]:
    """Return the named values of a key of a run's config, or [] if it has none."""
    kind = layers.split_annotations(find_type(key))[0]
    members = get_args(kind) if layers.is_union(kind) else [kind]
    literals = (get_args(member) for member in members if get_origin(member) is Literal)
    return [str(value) for literal in literals for value in literal]


def list_allowed_values(key: str, root: Any) -> str:
    """Return the end of a message with the values that a key allows, or ""."""
    kind = find_type(key, root)
    return f"; choose {layers.describe_values(kind)}" if kind else ""


def require_same_config(started: Config, current: Config, sets: Sequence[str], path: Path) -> None:
    """Raise ConfigError for a --set that differs from the run's own config.

    started: the config that the process was started with.  current: the run's config in `path`,
    which applies to all its processes, so that the --set would be ignored."""
    differences = toml_writer.find_differences(*map(msgspec.to_builtins, (started, current)))
    for key, (started_value, current_value) in differences.items():
        for item in reversed(sets):  # the last item of a repeated key applies
            if is_inside(key, [key_of(item)]):
                raise ConfigError(
                    f"--set {item}: the run has {key} = {format_value(current_value)}, not "
                    f"{format_value(started_value)} ({path}), and all its processes share one "
                    "config; remove this --set, or start a new run"
                )


def format_value(value: Any) -> str:
    """Format a value as in a config, on one line."""
    return "not set" if value is None else toml_writer.format_value(value)


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
