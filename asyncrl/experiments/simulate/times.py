"""What takes how long: distributions of seconds, by default, from a TOML file, from flags, or
fitted to a run (fit.py).

A distribution is written as a number, as `exponential(MEAN)`, `uniform(A, B)`, `normal(MEAN, SD)`
(cut at 0), `lognormal(MEDIAN, SIGMA)`, `pareto(LEAST, EXPONENT, MOST)`, as a list of values that
are drawn at random, or as `{ sequence = [...] }`, which is drawn from along the run: what was seen
after a third of one run comes after about a third of another."""

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

from asyncrl.contract.errors import ConfigError

Value = TypeVar("Value")
NEAR = 0.05  # share of a sequence, to both sides of a stage, from which values are drawn
Draw = Callable[[], float]
Spec = float | int | str | list[float] | dict[str, list[float]]
SHAPES: dict[str, tuple[int, Callable[..., Callable[[random.Random], float]]]] = {
    "exponential": (1, lambda mean: lambda r: r.expovariate(1 / mean) if mean > 0 else 0.0),
    "uniform": (2, lambda a, b: lambda r: r.uniform(a, b)),
    "normal": (2, lambda mean, sd: lambda r: max(0.0, r.gauss(mean, sd))),
    "lognormal": (2, lambda median, sigma: lambda r: median * math.exp(r.gauss(0, sigma))),
    "pareto": (
        3,
        lambda least, exponent, most: (
            lambda r: min(most, least * (1 - r.random()) ** (-1 / exponent))
        ),
    ),
}
DRAWN = (
    "noise",
    "lengths",
    "calls",
    "tool",
    "reward",
    "train",
    "batch",
    "commit",
    "publish",
    "swap",
    "checkpoint",
)


def draw(spec: Spec, rng: random.Random, what: str = "time", stage: Draw = lambda: 0.0) -> Draw:
    """A function that draws from `spec`; `stage` says which share of the run is done.

    Raises ConfigError for what is no distribution, or would give times below 0.
    """
    if isinstance(spec, bool):
        raise ConfigError(
            f"{what} = {spec}: write seconds, a list of them, or one of {', '.join(SHAPES)} with "
            "its numbers"
        )
    if isinstance(spec, int | float):
        value = _check_times([spec], what)[0]
        return lambda: value
    if isinstance(spec, list):
        values = _check_times(spec, what)
        return lambda: values[int(rng.random() * len(values))]
    if isinstance(spec, dict):
        if set(spec) != {"sequence"}:
            raise ConfigError(
                f"{what}: a table must have the one key `sequence`, not "
                f"{', '.join(map(repr, spec)) or 'nothing'}"
            )
        return draw_along(_check_times(spec["sequence"], what), rng, stage)
    found = re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", spec)
    if not found or found[1] not in SHAPES:
        raise ConfigError(
            f"{what} = {spec!r} is no distribution: write seconds, or {', '.join(SHAPES)} with its "
            "numbers, as in exponential(0.2)"
        )
    many, make = SHAPES[found[1]]
    try:
        numbers = [float(x) for x in found[2].split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != many:
        raise ConfigError(f"{what} = {spec!r}: {found[1]} takes {many} number{'s' * (many > 1)}")
    shape = make(*_check_times(numbers, what))
    return lambda: shape(rng)


def _check_times(values: Sequence[float], what: str) -> list[float]:
    if not values or not all(
        isinstance(x, int | float) and math.isfinite(x) and x >= 0 for x in values
    ):
        raise ConfigError(f"{what}: needs finite numbers of at least 0, not {list(values)[:5]}")
    return [float(x) for x in values]


def draw_along(values: Sequence[Value], rng: random.Random, stage: Draw) -> Callable[[], Value]:
    """Draws from `values` near the place that the stage names."""
    count = len(values)
    near = max(1.0, NEAR * len(values))

    def at_this_stage() -> Value:
        place = int(stage() * count + rng.uniform(-near, near))
        return values[min(count - 1, max(0, place))]

    return at_this_stage


class TimeModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds, if nothing else is said.  The defaults are those of configs/demo.toml, one 2.5 GHz
    core a process.
    """

    step: Annotated[float, Meta(ge=0, description="one decode step, whatever is in it")] = 0.0012
    row: Annotated[float, Meta(ge=0, description="each answer in a decode step")] = 1.6e-5
    admit: Annotated[
        float, Meta(ge=0, description="each answer that starts: its prompt's keys and values")
    ] = 1e-4
    finish: Annotated[
        float, Meta(ge=0, description="each answer that ends: text, a reward in place, packing")
    ] = 8e-5
    look: Annotated[
        float, Meta(ge=0, description="between two decode calls: messages, requests")
    ] = 0.002
    ess: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="no time: effective sample size of tokens of lag 1, at lag k its k-th "
            "power; it moves a limit that sets itself",
        ),
    ] = 0.97
    beside: Annotated[
        float,
        Meta(
            ge=1,
            description="a factor of decode calls while the learner trains and of training while a "
            "generator works: shared cores, caches",
        ),
    ] = 1.0
    noise: Annotated[Spec, Meta(description="a factor of each decode call")] = 1.0
    lengths: Annotated[
        Spec | None,
        Meta(
            description="tokens of an answer; absent: uniform(max_new_tokens / 2, max_new_tokens)"
        ),
    ] = None
    group_lengths: Annotated[
        list[list[int]] | None,
        Meta(description="tokens of the answers of whole groups, drawn together; before `lengths`"),
    ] = None
    calls: Annotated[
        Spec, Meta(description="calls of a session ([agent]), each with a length of its own")
    ] = 1
    tool: Annotated[
        Spec, Meta(description="from a session's call to its next: a tool, an environment's step")
    ] = 0.0
    reward: Annotated[
        Spec, Meta(description="a call in a reward process (reward.workers, reward.function)")
    ] = 0.0
    train: Annotated[
        Spec, Meta(description="a batch of train_tokens; where only `train` is given: any batch")
    ] = 0.25
    train_tokens: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="tokens of the batches that `train` was measured on"),
    ] = 10_752.0
    batch: Annotated[
        Spec,
        Meta(
            description="from a batch's last answer at the buffer to the learner: composing, "
            "sending, reading"
        ),
    ] = 0.02
    commit: Annotated[
        Spec, Meta(description="the buffer's work on a commit, before it grants what that freed")
    ] = 0.02
    publish: Annotated[Spec, Meta(description="weights into the ring")] = 0.001
    swap: Annotated[Spec, Meta(description="weights into an engine")] = 0.0015
    checkpoint: Annotated[Spec, Meta(description="a checkpoint")] = 0.05
    wire: Annotated[float, Meta(ge=0, description="a message, one way")] = 0.0005
    buffer: Annotated[float, Meta(ge=0, description="the buffer's work for each sample")] = 1e-4
    no_spread: Annotated[
        float, Meta(ge=0, le=1, description="share of the groups whose rewards are all equal")
    ] = 0.0
    failed: Annotated[
        float, Meta(ge=0, lt=1, description="share of the samples whose reward fails")
    ] = 0.0
    lost_every: Annotated[
        float,
        Meta(ge=0, description="mean time between losses of a generator process; 0: none is lost"),
    ] = 0.0
    restart: Annotated[float, Meta(ge=0, description="from a loss until the generator is back")] = (
        5.0
    )


def change(times: TimeModel, **changes: Any) -> TimeModel:
    return msgspec.structs.replace(times, **changes)


def load(path: Path, base: TimeModel | None = None) -> TimeModel:
    """Times from a TOML file, on top of `base`.  Raises ConfigError with the key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return merge_times(base or TimeModel(), table, str(path))


def parse(base: TimeModel, words: Sequence[str]) -> TimeModel:
    """`KEY=VALUE` words on top of `base`; VALUE is a TOML value, or a distribution without
    quotes.
    """
    table: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--time {word}: write KEY=VALUE, as in --time swap=0.5")
        try:
            table[key.strip()] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            table[key.strip()] = value.strip()
    return merge_times(base, table, "--time")


def merge_times(base: TimeModel, table: dict[str, Any], where: str) -> TimeModel:
    known = TimeModel.__struct_fields__
    if unknown := [k for k in table if k not in known]:
        raise ConfigError(f"{where}: unknown time `{unknown[0]}`; known are {', '.join(known)}")
    if "train" in table:
        table = {"train_tokens": None} | table
    try:
        times: TimeModel = msgspec.convert(msgspec.to_builtins(base) | table, TimeModel)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    rng = random.Random(0)
    for name in DRAWN:
        if (spec := getattr(times, name)) is not None:
            draw(spec, rng, f"{where}: {name}")
    if times.group_lengths is not None and not all(times.group_lengths):
        raise ConfigError(f"{where}: group_lengths: every group needs a length")
    return times


def scale_distribution(spec: Spec, factor: float) -> Spec:
    """The distribution with all its times multiplied."""
    if isinstance(spec, int | float):
        return spec * factor
    if isinstance(spec, list):
        return [x * factor for x in spec]
    if isinstance(spec, dict):
        return {"sequence": [x * factor for x in spec["sequence"]]}
    name, _, rest = spec.partition("(")
    numbers = [float(x) for x in rest.rstrip(") ").split(",")]
    which = {
        "exponential": [0],
        "uniform": [0, 1],
        "normal": [0, 1],
        "lognormal": [0],
        "pareto": [0, 2],
    }[name.strip()]
    scaled = (repr(x * factor if i in which else x) for i, x in enumerate(numbers))
    return f"{name.strip()}({', '.join(scaled)})"
