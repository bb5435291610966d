"""Read a config: TOML, `--set` overrides, method and presets, and the rules on several keys.

Every mistake is one ConfigError with file, line and remedy."""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import bundled_configs, layers, methods, presets, rules
from asyncrl.config.tree import Config
from asyncrl.contract import toml_writer
from asyncrl.contract.errors import ConfigError

RENAMED = {  # earlier name of a key, or its name in other systems -> the key
    "staleness.limit": "staleness.max_lag",
    "max_staleness": "staleness.max_lag",
    "max_async_level": "staleness.max_lag",
    "max_head_offpolicyness": "staleness.max_lag",
    "max_staleness_steps": "staleness.max_lag",
    "learning_rate": "learner.lr",
    "num_generations": "learner.group_size",
    "rollout_n": "learner.group_size",
    "n_samples_per_prompt": "learner.group_size",
    "max_completion_length": "generator.max_new_tokens",
    "max_tokens": "generator.max_new_tokens",
    "response_length": "generator.max_new_tokens",
    "ppo_epochs": "learner.epochs",
    "num_iterations": "learner.epochs",
    **{f"kl.{key}": f"kl.reward.{key}" for key in ("controller", "target", "horizon")},
    **{f"kl.{key}": f"kl.loss.{key}" for key in ("off_policy", "discount", "truncate")},
    "adv_estimator": "advantage.name",
    "model_name_or_path": "model.path",
    "max_grad_norm": "learner.clip_norm",
    "grad_clip": "learner.clip_norm",
}

SPLIT = {  # keys that became several: what to write instead
    "kl.coefficient": "kl.reward.coefficient (KL in the reward) "
    "or kl.loss.coefficient (in the loss)",
    "kl.estimator": "kl.reward.estimator or kl.loss.estimator",
    "kl.placement": "kl.reward.coefficient or kl.loss.coefficient: one above 0 puts the term there",
    "kl_coef": "kl.reward.coefficient or kl.loss.coefficient",
    "beta": "kl.loss.coefficient or kl.reward.coefficient",
}

# keys that were removed -> the value whose meaning is the only one left, which the configs of
# earlier runs may still give, and what to write instead of the others
REMOVED = {
    "correction.m2_over": (
        "pushing",
        "correction.m2 alone (M2PO as published), or correction.function with weights of your own",
    ),
    "advantage.squared_norm": (
        "gradient",
        "advantage.name = opob, which always uses the norms of the gradients",
    ),
}
REMOVED_PRESETS = {
    "m2po": 'method = "m2po-published", or correction.function with weights of your own'
}


Struct = typing.TypeVar("Struct", bound=msgspec.Struct)


class ConfigSchema(typing.NamedTuple, typing.Generic[Struct]):
    """A kind of config: its root struct and its rules on several keys."""

    root: type[Struct]
    check: typing.Callable[[Struct], list[str]]


RUN: ConfigSchema[Config] = ConfigSchema(Config, rules.check)


def load(
    path: str | Path,
    sets: typing.Sequence[str] = (),
    note: typing.Callable[[str], None] | None = None,
    origins: dict[str, str] | None = None,
) -> Config:
    """Load the config in `path` and apply `sets` ("key.path=value", TOML values).

    A bundled config needs only its name, no path.  `{here}` in the file is the file's folder.
    `method` and presets fill the keys that are not given; in `sets` they also replace the file's.
    If an item of `sets` changes a method, the keys of the earlier one are dropped, and `note` is
    called with a sentence about each.  `origins` is filled with the origin of every key that is
    not a default: file:line, `--set ...`, a method or a preset.

    Raises ConfigError with file:line, key and remedy."""
    return load_as(RUN, path, sets, note, origins)


def load_to_train(source: str, sets: typing.Sequence[str]) -> Config:
    """Load a config for a command whose runs must train.  Raises ConfigError, as `load` does."""
    config = load(source, sets)
    if not config.learner.steps:
        raise ConfigError(f"{source}: learner.steps = 0 only evaluates: this command needs steps")
    return config


def load_as(
    tree: ConfigSchema[Struct],
    path: str | Path,
    sets: typing.Sequence[str] = (),
    note: typing.Callable[[str], None] | None = None,
    origins: dict[str, str] | None = None,
) -> Struct:
    """Load another kind of config as `load` does."""
    path = bundled_configs.find(path)
    try:
        # some editors put a byte order mark first
        text = Path(path).read_text(encoding="utf-8-sig")
        raw = tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such config file; bundled configs, by name: "
            f"{', '.join(bundled_configs.names())}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error
    return _layered(
        tree,
        bundled_configs.substitute_here(raw, path.parent),
        _ConfigSource(str(path), text, sets),
        note,
        origins,
    )


class _ConfigSource(typing.NamedTuple):
    """The source of a config, to locate errors: a file with its text, and the --set items."""

    path: str
    text: str
    sets: typing.Sequence[str]

    def where(self, key: str) -> str:
        return _locate_key(key, self.path, self.text, self.sets)


def convert(
    raw: dict[str, Any], source: str, text: str = "", sets: typing.Sequence[str] = ()
) -> Config:
    """Convert a raw table to a checked Config, with `sets`, method and presets applied."""
    return _layered(RUN, raw, _ConfigSource(source, text, sets))


def build(raw: dict[str, Any], source: str = "config") -> Config:
    """Convert a raw table without the rules on several keys."""
    return _layered(ConfigSchema(Config, lambda config: []), raw, _ConfigSource(source, "", ()))


def _layered(
    tree: ConfigSchema[Struct],
    raw: dict[str, Any],
    given: _ConfigSource,
    note: typing.Callable[[str], None] | None = None,
    origins: dict[str, str] | None = None,
) -> Struct:
    """Apply the layers in order: the table, the items of `sets`, then method and presets."""
    raw = copy.deepcopy(raw)
    written_whole = raw.keys() >= _WHOLE
    placed: dict[str, int] = {}  # key -> the last item of `sets` that gave it
    for number, item in enumerate(given.sets):
        key = apply(raw, item, tree.root)
        placed[key] = number
        if tree.root is Config and key == "method":
            methods.replace(raw)
    if tree.root is not Config:
        return _convert(tree, raw, given)
    presets.forget(raw, given.sets)
    if (
        "correction.proximal" in placed
        and "correction.preset" not in placed
        and layers.value_of(raw, Config, "correction.proximal") == "behavior"
    ):
        layers.remove(raw, "correction.preset")  # on the behavior policy it has no weights
    if "method" in raw and methods.find_method(raw) is None:
        raise ConfigError(
            f"{given.where('method')}: {methods.unknown_method_message(raw['method'])}"
        )
    _drop_removed(raw, given)
    filled: dict[str, str] = {}  # key -> what filled it
    for fill, origin in ((presets.fill, _preset_of), (methods.fill, _method_of)):
        before = set(_leaves(raw))
        fill(raw)
        filled |= {key: origin(raw, key) for key in set(_leaves(raw)) - before}
    _check_known(raw, tree.root, given)
    while found := layers.unread(raw, tree.root):
        for unread in found:
            own = placed.get(unread.key, -1)
            later = any(
                number > own and _decides(other, unread.chooser) for other, number in placed.items()
            )
            if unread.key not in filled:
                if not later and not (written_whole and own < 0):
                    raise ConfigError(f"{given.where(unread.key)}: {unread.why}")
                if later and note is not None:
                    note(f"dropped {unread.why}")
            layers.remove(raw, unread.key)
            placed[unread.key] = len(given.sets)  # also drop the keys that depend on it
    if origins is not None:
        short = given._replace(path=Path(given.path).name)
        origins.update({key: filled.get(key) or short.where(key) for key in _leaves(raw)})
    return _convert(tree, raw, given)


def _preset_of(raw: dict[str, Any], key: str) -> str:
    section = key.partition(".")[0]
    return f'{section}.preset = "{raw[section]["preset"]}"'


def _method_of(raw: dict[str, Any], key: str) -> str:
    return f'method = "{raw["method"]}"'


def _drop_removed(raw: dict[str, Any], given: _ConfigSource) -> None:
    """Drop removed keys that change nothing; raise ConfigError for those that would."""
    for key, (kept, instead) in REMOVED.items():
        section, name = key.split(".")
        table = raw.get(section)
        if isinstance(table, dict) and name in table:
            value = table.pop(name)
            acts = key != "correction.m2_over" or table.get("m2")
            if value != kept and acts:
                raise ConfigError(
                    f"{given.where(key)}: {key} = {value} was removed; write {instead}"
                )
    table = raw.get("correction")
    preset = table.get("preset") if isinstance(table, dict) else None
    if isinstance(preset, str) and preset in REMOVED_PRESETS:
        raise ConfigError(
            f"{given.where('correction.preset')}: correction.preset = {preset} was removed; write "
            f"{REMOVED_PRESETS[preset]}"
        )


# Only a config written by a run has all these sections.  Runs of earlier versions also wrote keys
# that nothing reads, which are therefore dropped and not refused.
_WHOLE = {"runs", "wires", "watchdog", "record", "durability", "weights", "evaluation"}


def _decides(given: str, chooser: str) -> bool:
    """Whether the key `given` sets `chooser`: itself, by a preset or by a method."""
    section, _, name = given.rpartition(".")
    return given in (chooser, "method") or (name == "preset" and chooser.startswith(section + "."))


def _leaves(raw: dict[str, Any], prefix: str = "") -> typing.Iterator[str]:
    for name, value in raw.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _convert(tree: ConfigSchema[Struct], raw: dict[str, Any], given: _ConfigSource) -> Struct:
    raw = {
        name: value for name, value in raw.items() if tree.root is not Config or name != "method"
    }
    _check_known(raw, tree.root, given)
    try:
        config = msgspec.convert(layers.tagged(raw, tree.root), tree.root)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        key = re.sub(r"\[\.\.\.\]|\[\d+\]", "", at.strip("`").lstrip("."))
        key = key or (named.group(1) if (named := re.search(r"field `(\w+)`", message)) else "")
        raise ConfigError(
            f"{given.where(key)}: {key}: {message}{_allowed_values(key, tree.root)}"
        ) from error
    if problems := tree.check(config):
        key = problems[0].split(":")[0].split(" ")[0]
        raise ConfigError(f"{given.where(key)}: {problems[0]}")
    return config


def apply(raw: dict[str, Any], item: str, root: Any = Config) -> str:
    """Put one `key.path=value` into a raw table and return the key.

    A text key of the tree `root` takes its value without quotes.  Raises ConfigError for another
    form."""
    key, eq, value = item.partition("=")
    if not eq or not key.strip():
        raise ConfigError(f"--set {item}: write key.path=value")
    value = value.strip()
    takes_text = layers.is_text(root, key.strip()) and not value.startswith(('"', "'"))
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
    *path, last = key.strip().split(".")
    at = raw
    for part in path:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise ConfigError(f"--set {item}: {part} is not a section")
    at[last] = parsed
    return key.strip()


def _check_known(raw: dict[str, Any], root: Any, given: _ConfigSource) -> None:
    """Raise ConfigError for an unknown key, a section given as a value or an unknown method."""
    _unknown(
        {k: v for k, v in raw.items() if root is not Config or k != "method"},
        root,
        root,
        "",
        given.where,
    )


def _unknown(
    raw: dict[str, Any], root: Any, kind: Any, prefix: str, where: typing.Callable[[str], str]
) -> None:
    """Check the keys of one section, whose struct is `kind`, and of the sections in it."""
    fields = layers.fields_of(kind)
    for name, value in raw.items():
        key = prefix + name
        if name == layers.tag_of(kind)[0] or _of_other_method(key, root):
            continue
        if name not in fields:
            tag, _ = layers.tag_of(kind)
            names = [tag, *fields] if tag else list(fields)
            raise ConfigError(f"{where(key)}: {key}: {_unknown_key(key, root, names)}")
        if not layers.structs_of(fields[name].type):
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{where(key)}: {key}: is a section, not a value")
        below = layers.member(fields[name], value)
        if below is None:
            tag, _ = layers.tag_of(layers.structs_of(fields[name].type)[0])
            raise ConfigError(
                f"{where(f'{key}.{tag}')}: {key}.{tag}: Invalid value {value[tag]!r}"
                f"{_allowed_values(f'{key}.{tag}', root)}"
            )
        _unknown(value, root, below, key + ".", where)


def _of_other_method(key: str, root: Any) -> bool:
    return root is Config and key.count(".") == 1 and key in layers.keys(root)


def _unknown_key(key: str, root: Any, fields: typing.Collection[str]) -> str:
    """Return the message for an unknown key, with the key to write instead."""
    prefix, _, name = key.rpartition(".")
    if root is Config and (now := RENAMED.get(key) or RENAMED.get(name)):
        return f"is called {now} here; write that"
    if root is Config and (instead := SPLIT.get(key) or SPLIT.get(name)):
        return f"was replaced; write {instead}"
    known = [*fields, *(["method"] if root is Config and not prefix else [])]
    section = f"{prefix}." if prefix else ""
    close = difflib.get_close_matches(name, known, 1, 0.5)
    elsewhere = [other for other in layers.keys(root) if other.rsplit(".", 1)[-1] == name]
    if close:
        return f"unknown key; did you mean {section}{close[0]}?"
    if elsewhere:
        return f"unknown key; did you mean {elsewhere[0]}?"
    if not known:  # nothing before the last dot is a section
        sections = sorted({other.partition(".")[0] for other in layers.keys(root) if "." in other})
        return f"unknown key; there is no section {prefix}; sections: {', '.join(sections)}"
    return f"unknown key; keys of this section: {', '.join(known)}"


def unknown_key_error(key: str) -> ConfigError:
    """Return the error for a name that is neither a key nor a section."""
    section = f"{key.rpartition('.')[0]}." if "." in key else ""
    inside = [name.removeprefix(section) for name in keys() if name.startswith(section)]
    names = list(dict.fromkeys(name.partition(".")[0] for name in inside))
    return ConfigError(f"{key}: {_unknown_key(key, Config, names)}")


def keys(kind: Any = Config) -> list[str]:
    """Return every key of the tree, dotted."""
    return list(layers.keys(kind))


def _locate_key(key: str, source: str, text: str, sets: typing.Sequence[str]) -> str:
    """Return file:line of a key, or the --set that gave it."""
    for item in sets:
        given = item.partition("=")[0].strip()
        nested = given.startswith(f"{key}.") or key.startswith(f"{given}.")
        if key and (given == key or nested):
            return f"--set {item}"
    section, _, name = key.rpartition(".")
    inside = ""
    found = ""
    for number, line in enumerate(text.splitlines(), 1):
        if heading := re.match(r"\s*\[([\w.]+)\]", line):
            inside = heading.group(1)
            found = f"{source}:{number}" if inside == key else found
        elif (inside == section and re.match(rf"\s*{re.escape(name)}\s*=", line)) or re.match(
            rf"\s*{re.escape(key)}\s*=", line
        ):
            return f"{source}:{number}"
    return found or source


def _find_type(key: str, root: Any = Config) -> Any:
    """Return the type of a key; a tuple of the tags if it chooses a section's struct."""
    options: list[Any] = [root]
    field: Any = None
    for part in key.split("."):
        tags = [layers.tag_of(option) for option in options]
        if any(name == part for name, _ in tags):
            return tuple(value for _, value in tags)
        found = [layers.fields_of(option).get(part) for option in options]
        field = next((one for one in found if one is not None), None)
        options = list(layers.structs_of(field.type)) if field is not None else []
    return None if field is None else layers.split_annotations(field.type)[0]


def choices(key: str) -> list[str]:
    """Return the named values of a key of a run's config; none: it takes others only."""
    kind = tuple(methods.METHODS) if key == "method" else _find_type(key)
    if isinstance(kind, tuple):
        return list(kind)
    members = typing.get_args(kind) if layers.is_union(kind) else [kind]
    literals = [member for member in members if typing.get_origin(member) is typing.Literal]
    return [str(value) for literal in literals for value in typing.get_args(literal)]


def _allowed_values(key: str, root: Any = Config) -> str:
    """Return the values of a key with choices, as a message's end."""
    kind = _find_type(key, root)
    if isinstance(kind, tuple):
        return f"; choose one of {', '.join(kind)}"
    if layers.is_union(kind) or typing.get_origin(kind) is typing.Literal:
        return f"; choose {layers.describe_values(kind)}"
    return ""


def require_same_config(
    given: Config, found: Config, sets: typing.Sequence[str], path: Path
) -> None:
    """Raise ConfigError for a --set that differs from the run's own config.

    given: the config that a process was started with.  found: the run's config, in `path`, which
    applies to all its processes, so that the --set would be ignored."""
    mine = msgspec.to_builtins(given)
    theirs = msgspec.to_builtins(found)
    # of a key given twice, the last one counts
    for key, item in {item.partition("=")[0].strip(): item for item in sets}.items():
        ours = mine
        run = theirs
        for part in key.split("."):
            ours = ours.get(part) if isinstance(ours, dict) else None
            run = run.get(part) if isinstance(run, dict) else None
        if ours != run:
            raise ConfigError(
                f"--set {item}: the run has {key} = {format_value(run)}, not {format_value(ours)} "
                f"({path}), and all its processes share one config; remove this --set, or start a "
                "new run"
            )


def format_value(value: Any) -> str:
    """Format a value as in a config, or a section as its table."""
    if value is None:
        return "not set"
    return (
        toml_writer.dumps({"x": value}).partition("=")[2].strip()
        if not isinstance(value, dict)
        else str(value)
    )


def dump(config: msgspec.Struct) -> str:
    """Write the config as TOML that loads back equal.

    Keys that are None, or that its methods do not read, are left out."""
    return toml_writer.dumps(layers.read_keys(config))


def schema() -> dict[str, Any]:
    """Return the JSON schema of the config, for editors.

    It accepts a section that leaves its method to the default, and `method`, which fills keys of
    several sections."""
    made = msgspec.json.schema(Config)
    for field in layers.fields_of(Config).values():
        tag, _ = (
            layers.tag_of(default := layers.member(field, {}))
            if layers.structs_of(field.type)
            else ("", "")
        )
        if tag:
            made["$defs"][default.__name__]["required"].remove(tag)
    made["$defs"]["Config"]["properties"] = {
        "method": {"enum": list(methods.METHODS), "description": methods.DESCRIPTION}
    } | made["$defs"]["Config"]["properties"]
    return made
