"""Reading a config: TOML, `--set` overrides, one clear line for each mistake, and the rules that
span several keys.
"""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from asyncrl.config import bundled_configs, layers, methods, presets, rules
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError

RENAMED = {  # a key's earlier name here, or its name in systems that people come from -> the key
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


Struct = typing.TypeVar("Struct", bound=msgspec.Struct)


class ConfigSchema(typing.NamedTuple, typing.Generic[Struct]):
    """A kind of config: its root, and the rules that span several keys."""

    root: type[Struct]
    check: typing.Callable[[Struct], list[str]]


RUN: ConfigSchema[Config] = ConfigSchema(Config, rules.check)


def load(
    path: str | Path,
    sets: typing.Sequence[str] = (),
    note: typing.Callable[[str], None] | None = None,
) -> Config:
    """The config in `path` with `sets` ("key.path=value", TOML values) applied.  Raises
    ConfigError: file:line, key, what to do.

    A shipped config needs no path, only its name; `{here}` in the file is the file's folder.
    `method` and presets fill the keys that are not given; in `sets` they also replace the file's.
    Where an item of `sets` changes a method, the keys of the one before are dropped: `note` is
    called with each."""
    return load_as(RUN, path, sets, note)


def load_as(
    tree: ConfigSchema[Struct],
    path: str | Path,
    sets: typing.Sequence[str] = (),
    note: typing.Callable[[str], None] | None = None,
) -> Struct:
    """`load`, of another kind of config."""
    path = bundled_configs.find(path)
    try:
        # some editors put a byte order mark first
        text = Path(path).read_text(encoding="utf-8-sig")
        raw = tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such config file; shipped, by name: {', '.join(bundled_configs.names())}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return _layered(
        tree,
        bundled_configs.substitute_here(raw, path.parent),
        _ConfigSource(str(path), text, sets),
        note,
    )


class _ConfigSource(typing.NamedTuple):
    """What errors point at: a file with its text, and the --set words."""

    path: str
    text: str
    sets: typing.Sequence[str]

    def where(self, key: str) -> str:
        return _locate_key(key, self.path, self.text, self.sets)


def convert(
    raw: dict[str, Any], source: str, text: str = "", sets: typing.Sequence[str] = ()
) -> Config:
    """A raw table to a checked Config, `sets` applied; method and presets fill the keys that the
    table does not give."""
    return _layered(RUN, raw, _ConfigSource(source, text, sets))


def build(raw: dict[str, Any], source: str = "config") -> Config:
    """`convert` without the rules that span several keys."""
    return _layered(ConfigSchema(Config, lambda config: []), raw, _ConfigSource(source, "", ()))


def _layered(
    tree: ConfigSchema[Struct],
    raw: dict[str, Any],
    given: _ConfigSource,
    note: typing.Callable[[str], None] | None = None,
) -> Struct:
    """The file's table, then `given.sets` one after another, then what method and presets fill."""
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
        layers.remove(raw, "correction.preset")  # its weights are gone
    if "method" in raw and methods.find_method(raw) is None:
        raise ConfigError(
            f"{given.where('method')}: {methods.unknown_method_message(raw['method'])}"
        )
    before = set(_leaves(raw))
    presets.fill(raw)
    methods.fill(raw)
    filled = set(_leaves(raw)) - before
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
            placed[unread.key] = len(given.sets)  # what hangs on it goes with it
    return _convert(tree, raw, given)


# sections that only a config has which a run wrote out whole: one from before a key was refused
# where nothing reads it still has such keys
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
    """Put one `key.path=value` into a raw table; returns its key.  Raises ConfigError when it is
    not of that form.  A key of text in the tree `root` takes its value without quotes."""
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
                f'--set {item}: `{value}` is no TOML value; quote text as "..."'
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
    """Raises ConfigError for a key that no method has, a section that is a value, a name that no
    method has."""
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
    """kind: the section's struct, of the tree `root`."""
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
    """What to write in the place of a key that there is not."""
    prefix, _, name = key.rpartition(".")
    if root is Config and (now := RENAMED.get(key) or RENAMED.get(name)):
        return f"is called {now} here; write that"
    if root is Config and (instead := SPLIT.get(key) or SPLIT.get(name)):
        return f"is no key now; write {instead}"
    known = [*fields, *(["method"] if root is Config and not prefix else [])]
    section = f"{prefix}." if prefix else ""
    close = difflib.get_close_matches(name, known, 1, 0.5)
    elsewhere = [other for other in layers.keys(root) if other.rsplit(".", 1)[-1] == name]
    if close:
        return f"unknown key; did you mean {section}{close[0]}?"
    if elsewhere:
        return f"unknown key; did you mean {elsewhere[0]}?"
    return f"unknown key; known here: {', '.join(known)}"


def keys(kind: Any = Config) -> list[str]:
    """Every key of the tree, dotted."""
    return list(layers.keys(kind))


def _locate_key(key: str, source: str, text: str, sets: typing.Sequence[str]) -> str:
    """file:line of a key, or the --set that gave it."""
    for item in sets:
        given = item.partition("=")[0].strip()
        if key and (given == key or given.startswith(f"{key}.")):
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


def _allowed_values(key: str, root: Any = Config) -> str:
    """The values that a key with a closed set takes."""
    options: list[Any] = [root]
    field: Any = None
    for part in key.split("."):
        tags = [layers.tag_of(option) for option in options]
        if any(name == part for name, _ in tags):
            return f"; choose one of {', '.join(value for _, value in tags)}"
        found = [layers.fields_of(option).get(part) for option in options]
        field = next((one for one in found if one is not None), None)
        options = list(layers.structs_of(field.type)) if field is not None else []
    kind: Any = None if field is None else field.type
    while isinstance(kind, typing._AnnotatedAlias):  # type: ignore[attr-defined]
        kind = kind.__origin__
    literals = [
        a
        for a in (typing.get_args(kind) if isinstance(kind, types.UnionType) else [kind])
        if typing.get_origin(a) is typing.Literal
    ]
    names = [str(x) for o in literals for x in typing.get_args(o)]
    return f"; choose one of {', '.join(names)}" if names else ""


def require_same_config(
    given: Config, found: Config, sets: typing.Sequence[str], path: Path
) -> None:
    """One process of a run was started with `given`; the run's config, which holds for all of them,
    is `found` in `path`.

    Raises ConfigError for a --set that differs from it: it would be ignored.
    """
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
                f"--set {item}: the run has {key} = {_toml(run)}, not {_toml(ours)} ({path}): one "
                "run, one config; leave this --set out, "
                "or start a new run"
            )


def _toml(value: Any) -> str:
    """A value as in a config; a section's as its table."""
    if value is None:
        return "nothing"
    return (
        tomli_w.dumps({"x": value}).partition("=")[2].strip()
        if not isinstance(value, dict)
        else str(value)
    )


def dump(config: msgspec.Struct) -> str:
    """The config as TOML that loads back equal; keys that are None, or that its methods do not
    read, are left out."""
    return tomli_w.dumps(layers.read_keys(config))


def schema() -> dict[str, Any]:
    """JSON schema of the config, for editors.  A section that leaves its method to the default, and
    `method`, which stands for keys of several sections, are no errors."""
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
