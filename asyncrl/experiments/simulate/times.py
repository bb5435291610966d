"""Times of a simulation, in seconds: from defaults, a run (fit.py), a TOML file or flags.

A distribution is written in one of these forms:

- a number
- `exponential(MEAN)`, `uniform(A, B)`, `normal(MEAN, SD)` (cut at 0), `lognormal(MEDIAN, SIGMA)` or
  `pareto(LEAST, EXPONENT, MOST)`
- a list of values, sampled at random
- `{ sequence = [...] }`, sampled along the run: values of a third of one run are used at about a
  third of another
"""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import NonNegative, PositiveFloat, PositiveShare, Section, Share
from asyncrl.contract.errors import ConfigError

Value = TypeVar("Value")
NEAR = 0.05  # share of a sequence, to both sides of a stage, from which values are sampled
Draw = Callable[[], float]
Spec = float | int | str | list[float] | dict[str, list[float]]
# name -> how many numbers it takes, and a sampler
SHAPES: dict[str, tuple[int, Callable[..., float]]] = {
    "exponential": (1, lambda rng, mean: rng.expovariate(1 / mean) if mean > 0 else 0.0),
    "uniform": (2, lambda rng, low, high: rng.uniform(low, high)),
    "normal": (2, lambda rng, mean, sd: max(0.0, rng.gauss(mean, sd))),
    "lognormal": (2, lambda rng, median, sigma: median * math.exp(rng.gauss(0, sigma))),
    "pareto": (
        3,
        lambda rng, least, exponent, most: min(most, least * (1 - rng.random()) ** (-1 / exponent)),
    ),
}


def make_sampler(
    spec: Spec, rng: random.Random, name: str = "time", stage: Draw = lambda: 0.0
) -> Draw:
    """Return a function that samples `spec`; `stage` returns the completed share of the run.

    Raises ConfigError if `spec` is not a distribution or has times below 0.
    """
    if isinstance(spec, bool):
        raise ConfigError(
            f"{name} = {spec}: give seconds, a list of them, or one of {', '.join(SHAPES)} with "
            "its numbers"
        )
    if isinstance(spec, int | float):
        value = _check_times([spec], name)[0]
        return lambda: value
    if isinstance(spec, list):
        values = _check_times(spec, name)
        return lambda: values[int(rng.random() * len(values))]
    if isinstance(spec, dict):
        if set(spec) != {"sequence"}:
            raise ConfigError(
                f"{name}: a table must have the one key `sequence`, not "
                f"{', '.join(map(repr, spec)) or 'nothing'}"
            )
        return make_sequence_sampler(_check_times(spec["sequence"], name), rng, stage)
    match = re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", spec)
    if not match or match[1] not in SHAPES:
        raise ConfigError(
            f"{name} = {spec!r} is not a distribution: give seconds, or {', '.join(SHAPES)} with "
            "its numbers, such as exponential(0.2)"
        )
    count, sample = SHAPES[match[1]]
    try:
        numbers = [float(word) for word in match[2].split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise ConfigError(f"{name} = {spec!r}: {match[1]} takes {count} number{'s' * (count > 1)}")
    _check_times(numbers, name)
    return lambda: sample(rng, *numbers)


def _check_times(values: Sequence[float], name: str) -> list[float]:
    if not values or not all(
        isinstance(value, int | float) and math.isfinite(value) and value >= 0 for value in values
    ):
        raise ConfigError(f"{name}: needs finite numbers of at least 0, not {list(values)[:5]}")
    return [float(value) for value in values]


def make_sequence_sampler(
    values: Sequence[Value], rng: random.Random, stage: Draw
) -> Callable[[], Value]:
    """Return a function that samples `values` near the position of the stage."""
    width = max(1.0, NEAR * len(values))

    def sample_at_stage() -> Value:
        position = int(stage() * len(values) + rng.uniform(-width, width))
        return values[min(len(values) - 1, max(0, position))]

    return sample_at_stage


class TimeModel(Section, frozen=True, kw_only=True):
    """The times of a simulation, in seconds unless noted.

    The defaults are those of configs/demo.toml with one 2.5 GHz core a process.
    """

    step: NonNegative = 0.0012  # a decode step, without its samples
    row: NonNegative = 1.6e-5  # each sample in a decode step
    admit: NonNegative = 1e-4  # the start of a sample: its prompt's keys and values
    finish: NonNegative = 8e-5  # the end of a sample: text, a reward in place, packing
    look: NonNegative = 0.002  # between two decode calls: messages, requests
    # effective sample size of tokens of lag 1, at lag k its k-th power; moves an automatic limit
    ess: PositiveShare = 0.97
    # factor of decode calls during training and of training beside a busy generator
    beside: Annotated[float, Meta(ge=1)] = 1.0
    # cores that learner and generators share; None: each process has its own
    cores: PositiveFloat | None = None
    noise: Spec = 1.0  # factor of each decode call
    lengths: Spec | None = None  # tokens of a call, by default half to all of max_new_tokens
    group_lengths: list[list[int]] | None = None  # of whole groups, overrides lengths
    calls: Spec = 1  # calls of a session, each with its own length
    tool: Spec = 0.0  # between two calls of a session: a tool, an environment's step
    reward: Spec = 0.0  # a call in a reward process
    train: Spec = 0.25  # a batch of train_tokens
    train_tokens: PositiveFloat | None = 10_752.0  # None: `train` is the time of any batch
    batch: Spec = 0.02  # from a batch's last sample at the buffer to the learner
    ready: Spec = 0.005  # from a publication to the next update, with its batch at hand
    commit: Spec = 0.02  # the buffer's work on a commit, before it grants new tickets
    publish: Spec = 0.001  # weights into the ring
    swap: Spec = 0.0015  # weights into an engine
    checkpoint: Spec = 0.05
    wire: NonNegative = 0.0005  # a message, one way
    buffer: NonNegative = 1e-4  # the buffer's work for each sample
    no_spread: Share = 0.0  # share of zero-variance groups
    failed: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # share of samples whose reward fails
    lost_every: NonNegative = 0.0  # mean time between losses of a generator process; 0: none
    restart: NonNegative = 5.0  # from a loss until the generator is back


# fields that may be distributions, except `lengths`, which depends on the config if it is absent
DISTRIBUTIONS = [f.name for f in msgspec.structs.fields(TimeModel) if f.type == Spec]
change = msgspec.structs.replace


def load(path: Path, base: TimeModel) -> TimeModel:
    """Read times from a TOML file, on top of `base`. Raises ConfigError with the key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return merge_times(base, table, str(path))


def parse(base: TimeModel, items: Sequence[str]) -> TimeModel:
    """Merge `KEY=VALUE` words into `base`.

    VALUE is a TOML value, or a distribution without quotes.
    """
    table: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--time {item}: give KEY=VALUE, such as --time swap=0.5")
        try:
            table[key.strip()] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            table[key.strip()] = value.strip()
    return merge_times(base, table, "--time")


def merge_times(base: TimeModel, table: dict[str, Any], source: str) -> TimeModel:
    fields = TimeModel.__struct_fields__
    if unknown := [key for key in table if key not in fields]:
        raise ConfigError(f"{source}: unknown time `{unknown[0]}`; choose from {', '.join(fields)}")
    if "train" in table:
        table = {"train_tokens": None} | table
    try:
        times: TimeModel = msgspec.convert(msgspec.to_builtins(base) | table, TimeModel)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error
    for name in (*DISTRIBUTIONS, "lengths"):
        if (spec := getattr(times, name)) is not None:
            make_sampler(spec, random.Random(0), f"{source}: {name}")
    if times.group_lengths is not None and not all(times.group_lengths):
        raise ConfigError(f"{source}: group_lengths: every group needs a length")
    return times
