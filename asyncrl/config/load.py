"""Reading a config: TOML, `--set` overrides, one clear line for each mistake, and the rules that
span several keys.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from asyncrl.config import presets, rules, shipped
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


class Tree(typing.NamedTuple, typing.Generic[Struct]):
    """A kind of config: its root, and the rules that span several keys."""

    root: type[Struct]
    check: typing.Callable[[Struct], list[str]]


RUN: Tree[Config] = Tree(Config, rules.check)


def load(path: str | Path, sets: typing.Sequence[str] = ()) -> Config:
    """The config in `path` with `sets` ("key.path=value", TOML values) applied.  Raises
    ConfigError: file:line, key, what to do.

    A shipped config needs no path, only its name; `{here}` in the file is the file's folder.  A
    preset in the file fills the keys that the file does not give; one in `sets` also replaces the
    file's."""
    return load_as(RUN, path, sets)


def load_as(tree: Tree[Struct], path: str | Path, sets: typing.Sequence[str] = ()) -> Struct:
    """`load`, of another kind of config."""
    path = shipped.find(path)
    try:
        # some editors put a byte order mark first
        text = Path(path).read_text(encoding="utf-8-sig")
        raw = tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such config file; shipped, by name: {', '.join(shipped.names())}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    raw = shipped.placed(raw, path.parent)
    for item in sets:
        apply(raw, item)
    if tree.root is Config:
        presets.forget(raw, sets)
    return _convert(tree, raw, _Source(str(path), text, sets))


class _Source(typing.NamedTuple):
    """What errors point at: a file with its text, and the --set words."""

    path: str
    text: str
    sets: typing.Sequence[str]


def convert(
    raw: dict[str, Any], source: str, text: str = "", sets: typing.Sequence[str] = ()
) -> Config:
    """A raw table to a checked Config; presets fill the keys that the table does not give."""
    return _convert(RUN, raw, _Source(source, text, sets))


def _convert(tree: Tree[Struct], raw: dict[str, Any], given: _Source) -> Struct:
    source, text, sets = given
    _unknown(raw, tree.root, tree.root, "", lambda key: _where(key, source, text, sets))
    if tree.root is Config:
        presets.fill(raw)
    try:
        config = msgspec.convert(raw, tree.root)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        key = re.sub(r"\[\.\.\.\]|\[\d+\]", "", at.strip("`").lstrip("."))
        key = key or (named.group(1) if (named := re.search(r"field `(\w+)`", message)) else "")
        raise ConfigError(
            f"{_where(key, source, text, sets)}: {key}: {message}{_allowed(key, tree.root)}"
        ) from error
    if problems := tree.check(config):
        key = problems[0].split(":")[0].split(" ")[0]
        raise ConfigError(f"{_where(key, source, text, sets)}: {problems[0]}")
    return config


def apply(raw: dict[str, Any], item: str) -> None:
    """Put one `key.path=value` into a raw table.  Raises ConfigError when it is not of that
    form.
    """
    key, eq, value = item.partition("=")
    if not eq or not key.strip():
        raise ConfigError(f"--set {item}: write key.path=value")
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        if not re.fullmatch(r"[\w./:@+-]*", value.strip()):
            raise ConfigError(
                f'--set {item}: `{value}` is no TOML value; quote text as "..."'
            ) from None
        parsed = value.strip()
    *path, last = key.strip().split(".")
    at = raw
    for part in path:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise ConfigError(f"--set {item}: {part} is not a section")
    at[last] = parsed


def _fields(kind: Any) -> dict[str, Any]:
    return {f.name: f.type for f in msgspec.structs.fields(kind)}


def _struct(kind: Any) -> Any:
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _unknown(
    raw: dict[str, Any], root: Any, kind: Any, prefix: str, where: typing.Callable[[str], str]
) -> None:
    """kind: the section's struct, of the tree `root`.  Raises ConfigError for a key it lacks."""
    fields = _fields(kind)
    for name, value in raw.items():
        key = prefix + name
        if name not in fields and root is Config and (now := RENAMED.get(key) or RENAMED.get(name)):
            raise ConfigError(f"{where(key)}: {key}: is called {now} here; write that")
        if name not in fields and root is Config and (instead := SPLIT.get(key) or SPLIT.get(name)):
            raise ConfigError(f"{where(key)}: {key}: is no key now; write {instead}")
        if name not in fields:
            close = difflib.get_close_matches(name, fields, 1, 0.5)
            elsewhere = [k for k in keys(root) if k.rsplit(".", 1)[-1] == name]
            hint = (
                f"did you mean {prefix}{close[0]}?"
                if close
                else (
                    f"did you mean {elsewhere[0]}?"
                    if elsewhere
                    else f"known here: {', '.join(fields)}"
                )
            )
            raise ConfigError(f"{where(key)}: {key}: unknown key; {hint}")
        if _struct(fields[name]) is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"{where(key)}: {key}: is a section, not a value")
            _unknown(value, root, fields[name], key + ".", where)


def keys(kind: Any = Config, prefix: str = "") -> list[str]:
    """Every key of the tree, dotted."""
    out = []
    for name, field in _fields(kind).items():
        out += keys(field, f"{prefix}{name}.") if _struct(field) is not None else [prefix + name]
    return out


def _where(key: str, source: str, text: str, sets: typing.Sequence[str]) -> str:
    """file:line of a key, or the --set that gave it."""
    for item in sets:
        if item.partition("=")[0].strip() == key:
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


def _allowed(key: str, root: Any = Config) -> str:
    """The values that a key with a closed set takes."""
    kind: Any = root
    for part in key.split("."):
        kind = _fields(kind).get(part) if _struct(kind) is not None else None
    while isinstance(kind, typing._AnnotatedAlias):  # type: ignore[attr-defined]
        kind = kind.__origin__
    options = [
        a
        for a in (typing.get_args(kind) if isinstance(kind, types.UnionType) else [kind])
        if typing.get_origin(a) is typing.Literal
    ]
    names = [str(x) for o in options for x in typing.get_args(o)]
    return f"; choose one of {', '.join(names)}" if names else ""


def agree(given: Config, found: Config, sets: typing.Sequence[str], path: Path) -> None:
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
            ours = ours[part]
            run = run[part]
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
    """The config as TOML that loads back equal; keys that are None are left out."""

    def plain(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: plain(inner) for key, inner in value.items() if inner is not None}

    return tomli_w.dumps(plain(msgspec.to_builtins(config)))


def schema() -> dict[str, Any]:
    """JSON schema of the config, for editors."""
    return msgspec.json.schema(Config)
