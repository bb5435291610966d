"""Reading a config: TOML, `--set` overrides, one clear line for each mistake, and the rules that
span several keys.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from asyncrl.config import rules, shipped
from asyncrl.config.engines import ENGINES, which
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError

PRESETS: dict[str, dict[str, Any]] = {
    "none": {"level": "none", "bound": "none"},
    "tis": {"level": "token", "bound": "truncate", "hi": 2.0},
    "seq_tis": {"level": "sequence", "bound": "truncate", "hi": 2.0},
    "icepop": {"level": "token", "bound": "mask", "lo": 0.5, "hi": 5.0},
    "mis": {
        "level": "token",
        "bound": "truncate",
        "hi": 2.0,
        "reject": "ratio",
        "reject_over": "mean",
        "veto": "ratio",
    },
    "m2po": {"level": "none", "bound": "none", "m2": 0.04},
}
KL_PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"loss.coefficient": 0.04, "loss.estimator": "k3"},  # DeepSeekMath's beta
    "dr_grpo": {"loss.coefficient": 0.0},
    "rloo": {"reward.coefficient": 0.05, "reward.estimator": "k1"},
}

PRESET_TABLES = (("correction", PRESETS), ("kl", KL_PRESETS))

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


def load(path: str | Path, sets: typing.Sequence[str] = ()) -> Config:
    """The config in `path` with `sets` ("key.path=value", TOML values) applied.  Raises
    ConfigError: file:line, key, what to do.

    A shipped config needs no path, only its name; `{here}` in the file is the file's folder.  A
    preset in the file fills the keys that the file does not give; one in `sets` also replaces the
    file's."""
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
    forget(raw, sets)
    return convert(raw, str(path), text, sets)


def forget(raw: dict[str, Any], sets: typing.Sequence[str]) -> None:
    """A preset on the command line takes the place of the file's own keys: a resolved file gives
    all of them, so it would change nothing.
    """
    given = {item.partition("=")[0].strip() for item in sets}
    for section, presets in PRESET_TABLES:
        for key in (
            {key for keys in presets.values() for key in keys}
            if f"{section}.preset" in given
            else ()
        ):
            *path, last = f"{section}.{key}".split(".")
            table: Any = raw
            for part in path:
                table = table.get(part) if isinstance(table, dict) else None
            if isinstance(table, dict) and f"{section}.{key}" not in given:
                table.pop(last, None)


def _fill(table: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The table with what it does not give taken from `values`, whose keys may be dotted."""
    out = {k: dict(v) if isinstance(v, dict) else v for k, v in table.items()}
    for key, value in values.items():
        *path, last = key.split(".")
        at = out
        for part in path:
            at = at.setdefault(part, {})
        at.setdefault(last, value)
    return out


def convert(
    raw: dict[str, Any], source: str, text: str = "", sets: typing.Sequence[str] = ()
) -> Config:
    """A raw table to a checked Config; presets fill the keys that the table does not give."""
    _unknown(raw, Config, "", lambda key: _where(key, source, text, sets))
    for section, presets in PRESET_TABLES:
        table = raw.get(section)
        if isinstance(table, dict) and table.get("preset") in presets:
            raw[section] = _fill(table, presets[table["preset"]])
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        key = re.sub(r"\[\.\.\.\]|\[\d+\]", "", at.strip("`").lstrip("."))
        key = key or (m.group(1) if (m := re.search(r"field `(\w+)`", message)) else "")
        raise ConfigError(
            f"{_where(key, source, text, sets)}: {key}: {message}{_allowed(key)}"
        ) from error
    if problems := check(config):
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
    raw: dict[str, Any], kind: Any, prefix: str, where: typing.Callable[[str], str]
) -> None:
    fields = _fields(kind)
    for name, value in raw.items():
        key = prefix + name
        if name not in fields and (now := RENAMED.get(key) or RENAMED.get(name)):
            raise ConfigError(f"{where(key)}: {key}: is called {now} here; write that")
        if name not in fields and (instead := SPLIT.get(key) or SPLIT.get(name)):
            raise ConfigError(f"{where(key)}: {key}: is no key now; write {instead}")
        if name not in fields:
            close = difflib.get_close_matches(name, fields, 1, 0.5)
            elsewhere = [k for k in keys() if k.rsplit(".", 1)[-1] == name]
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
            _unknown(value, fields[name], key + ".", where)


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
    for n, line in enumerate(text.splitlines(), 1):
        if m := re.match(r"\s*\[([\w.]+)\]", line):
            inside = m.group(1)
            found = f"{source}:{n}" if inside == key else found
        elif (inside == section and re.match(rf"\s*{re.escape(name)}\s*=", line)) or re.match(
            rf"\s*{re.escape(key)}\s*=", line
        ):
            return f"{source}:{n}"
    return found or source


def _allowed(key: str) -> str:
    """The values that a key with a closed set takes."""
    kind: Any = Config
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


def check(c: Config) -> list[str]:
    """Rules that span several keys; each problem begins with its key and shows its arithmetic."""
    out = _exact(c) if c.exact else []
    if c.name in (".", "..") or set(c.name) & {"/", "\\", "\0"}:
        out.append(
            f"name: {c.name!r} is no name of one directory; where the directories of runs lie is "
            "`runs`"
        )
    lag = c.staleness.max_lag
    inject = c.staleness.inject
    if math.isnan(lag) or (not math.isinf(lag) and lag != int(lag)):
        out.append(f"staleness.max_lag: {lag:g} is neither a whole number nor inf")
    most = inject if isinstance(inject, int) else (len(inject) - 1 if inject else 0)
    if inject is not None and most > lag:
        out.append(
            f"staleness.inject: injects up to {most} versions, above staleness.max_lag = {lag:g}"
        )
    if isinstance(inject, list) and (not inject or min(inject) < 0 or sum(inject) <= 0):
        out.append(
            "staleness.inject: give the probabilities of lag 0, 1, 2, ...; none negative, not all "
            "zero"
        )
    if inject is not None and c.staleness.on_exceed != "pace":
        out.append(
            f"staleness.inject: needs staleness.on_exceed = pace, not {c.staleness.on_exceed}"
        )
    if inject is not None and c.advantage.no_spread == "filter":
        out.append(
            "staleness.inject: needs advantage.no_spread = keep: filtered groups shift the planned "
            "batches"
        )
    out += _order(c)
    if c.learner.groups < c.learner.minibatches:
        out.append(
            f"learner.minibatches: {c.learner.minibatches} minibatches of {c.learner.groups} "
            "groups: some would be empty"
        )
    if c.generator.max_new_tokens >= c.generator.context:
        out.append(
            f"generator.context: {c.generator.context} tokens leave no room for a prompt beside "
            f"{c.generator.max_new_tokens} new tokens"
        )
    if (
        c.correction.proximal == "behavior"
        and c.correction.preset not in ("", "none")
        and c.correction.level != "none"
    ):
        out.append(
            "correction.proximal: behavior makes every weight 1, so the preset "
            f"{c.correction.preset} has nothing to act on; use recompute"
        )
    if c.correction.self_normalize and c.correction.level == "none":
        out.append(
            "correction.self_normalize: there are no weights to normalise (correction.level = none)"
        )
    if c.stop.kl_max > 0 and c.learner.epochs * c.learner.minibatches == 1:
        out.append(
            "stop.kl_max: with one optimizer step a batch there is nothing to stop; raise "
            "learner.epochs or learner.minibatches"
        )
    if c.learner.backend == "torch" and c.learner.ranks > 1:
        out.append(
            f"learner.ranks: {c.learner.ranks} ranks need learner.backend = deepspeed; torch is "
            "one process"
        )
    if c.learner.offload and (c.learner.backend != "deepspeed" or c.learner.zero_stage == 0):
        out.append(
            "learner.offload: needs learner.backend = deepspeed and learner.zero_stage = 1 or "
            "higher; elsewhere nothing moves to the CPU"
        )
    if (
        c.learner.backend == "deepspeed"
        and c.learner.zero_stage == 0
        and c.model.dtype == "bfloat16"
    ):
        out.append(
            "learner.zero_stage: 0 with model.dtype = bfloat16 keeps no fp32 copy of the weights "
            "and drifts from stages 1 to 3; use 1 or higher"
        )
    if c.weights.transport == "tcp" and not c.wires.weights_address:
        out.append(
            "wires.weights_address: weights.transport = tcp needs an address, for instance "
            "tcp://127.0.0.1:0"
        )
    if c.staleness.on_exceed in ("drop", "mask", "downweight") and math.isinf(lag):
        out.append(
            f"staleness.on_exceed: {c.staleness.on_exceed} never acts without a limit "
            "(staleness.max_lag = inf)"
        )
    return out + rules.check(c)


def _order(c: Config) -> list[str]:
    """Where `staleness.order` cannot be what it says."""
    s = c.staleness
    free = math.isinf(s.max_lag)
    if s.order == "auto" or (s.order == "ticket" and s.on_exceed == "pace" and not free):
        return []
    if s.order == "ticket":
        if free:
            return [
                "staleness.order: ticket waits for the oldest answer, however late; without a "
                "limit (staleness.max_lag = inf) use completion or freshest"
            ]
        return [
            "staleness.order: with ticket order nothing passes the limit, so on_exceed = "
            f"{s.on_exceed} has nothing to do; that is on_exceed = pace"
        ]
    if c.exact or s.max_lag == 0:
        what = "exact" if c.exact else "synchronous (staleness.max_lag = 0)"
        return [
            f"staleness.order: {s.order} makes batches of what happens to be ready; runs that are "
            f"{what} repeat because of ticket order: use that"
        ]
    if s.inject is not None:
        return [
            f"staleness.order: {s.order} trains a ticket in another batch than lag injection "
            "planned; use ticket order, or leave staleness.inject out"
        ]
    if s.on_exceed == "pace" and not free:
        return [
            f"staleness.order: {s.order} lets slow answers past the limit, which on_exceed = pace "
            "keeps by ticket order alone; use drop, mask or downweight"
        ]
    return []


def _exact(c: Config) -> list[str]:
    """What bitwise equal logprobs rule out."""
    out = []
    g = c.generator
    if c.model.dtype != "float32" or g.dtype not in ("same", "float32"):
        out.append("exact: needs model.dtype = float32 and generator.dtype = same")
    if g.mantissa_bits:
        out.append(
            "exact: generator.mantissa_bits rounds the generator's weights, which the learner's "
            "are not; set it to 0"
        )
    if not ENGINES[c.generator.engine].exact:
        out.append(f"exact: needs generator.engine = {which('exact')}, not {c.generator.engine}")
    if c.learner.backend != "torch":
        out.append(f"exact: needs learner.backend = torch, not {c.learner.backend}")
    if g.top_p < 1 or g.top_k > 0:
        out.append(
            "exact: generator.top_p and top_k renormalise what is sampled from, which the learner "
            "does not; set top_p = 1 and top_k = 0"
        )
    if c.weights.in_flight == "keep_kv" and c.staleness.max_lag > 0 and c.staleness.inject is None:
        out.append(
            "exact: weights.in_flight = keep_kv mixes keys of several versions in an answer; use "
            "recompute_kv or between_groups"
        )
    return out


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


def warnings(c: Config) -> list[str]:
    """What a run is told once at its start."""
    return rules.warnings(c)


def dump(config: Config) -> str:
    """The config as TOML that loads back equal; keys that are None are left out."""

    def plain(x: Any) -> Any:
        return {k: plain(v) for k, v in x.items() if v is not None} if isinstance(x, dict) else x

    return tomli_w.dumps(plain(msgspec.to_builtins(config)))


def schema() -> dict[str, Any]:
    """JSON schema of the config, for editors."""
    return msgspec.json.schema(Config)
