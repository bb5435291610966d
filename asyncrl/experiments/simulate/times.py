"""Times of a simulation, in seconds: from defaults, a run, a TOML file or flags.

A distribution is written in one of these forms:

- a number
- `exponential(MEAN)`, `uniform(A, B)`, `normal(MEAN, SD)` (cut at 0), `lognormal(MEDIAN, SIGMA)` or
  `pareto(LEAST, EXPONENT, MOST)`
- a list of values, sampled at random
- `{ sequence = [...] }`, sampled along the run: values of a third of one run are used at about a
  third of another
"""

import bisect
import itertools
import math
import random
import re
import statistics
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from actors.turn import DECODE_STEPS
from asyncrl.algorithms.settings import (
    Decay,
    NonNegative,
    PositiveFloat,
    PositiveShare,
    Section,
    Share,
)
from asyncrl.config import load as configs
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments import diagnose
from asyncrl.experiments.diagnose import RunLog
from asyncrl.models.devices import has_cuda
from asyncrl.records import jsonl, metrics, process_log, rundir, trace
from asyncrl.records.health_checks import list_values
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.trace import TraceSpan

FEWEST = 20  # decode calls that a fit needs, besides 5 batches
MOST_BESIDE = 3.0  # bound of the factor by which generators and learner slow each other down
WAITING = 0.1  # share of a step's seconds: the trainer waits for generation
GROWING = 0.5, 0.1, 1.0  # share of a decode step's time that its completions take, by seed
BINS = 200  # lengths that stand for a distribution
NOT_LOGGED = "admit finish look batch ready commit checkpoint wire buffer"
WAIT_S = 0.03  # a longer pause of a process counts as a wait

Interval = tuple[float, float]
Numbers = NDArray[np.float64]

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
    if not values or not all(math.isfinite(value) and value >= 0 for value in values):
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


class TimeModel(Section):
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
    # of whole groups, overrides lengths
    group_lengths: list[Annotated[list[int], Meta(min_length=1)]] | None = None
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
    failed: Decay = 0.0  # share of samples whose reward fails


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
    table: JsonObject = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--time {item}: give KEY=VALUE, such as --time swap=0.5")
        try:
            table[key.strip()] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            table[key.strip()] = value.strip()
    return merge_times(base, table, "--time")


def merge_times(base: TimeModel, table: JsonObject, source: str) -> TimeModel:
    fields = TimeModel.__struct_fields__
    if unknown := [key for key in table if key not in fields]:
        raise ConfigError(f"{source}: unknown time `{unknown[0]}`; choose from {', '.join(fields)}")
    if "train" in table:
        table = {"train_tokens": None} | table
    try:
        times: TimeModel = msgspec.convert(msgspec.to_builtins(base) | table, TimeModel)
    except msgspec.ValidationError as error:
        message, _, key = str(error).strip("`").partition(" - at `$.")
        allowed = configs.list_allowed_values(key, TimeModel)
        raise ConfigError(f"{source}: {key}: {message}{allowed}") from error
    for name in (*DISTRIBUTIONS, "lengths"):
        if (spec := getattr(times, name)) is not None:
            make_sampler(spec, random.Random(0), f"{source}: {name}")
    return times


# ---- the times of a run --------------------------------------------------------------------------


class EngineCall(NamedTuple):
    """One call of the engine: `rows` at its start, `admitted` of them new."""

    start: float
    end: float
    rows: int
    admitted: int
    steps: int
    finished: int  # rows
    pause: float | None  # to the next call, less swaps; None: the engine ran empty


def fit(run_dir: Path) -> TimeModel:
    """Return the times of a run.

    Raises ConfigError if the run has no trace with sizes, or if it is too short.
    """
    rundir.require_run(run_dir)
    config = configs.load(run_dir / "config.toml")
    lanes = trace.read_sized_spans(run_dir)
    learner = lanes.get("learner", [])
    rewards = [lane for name, lane in lanes.items() if name.endswith("-rewards")]
    generators = [
        lane
        for name, lane in lanes.items()
        if name.startswith("generator-") and not name.endswith("-rewards")
    ]
    calls = [call for spans in generators for call in list_engine_calls(spans)]
    trains = [span for span in learner if span.name == "train" and span.size]
    if len(calls) < FEWEST or len(trains) < 5:
        raise ConfigError(
            f"{run_dir}: too little to fit times to: {len(calls)} decode calls and {len(trains)} "
            f"batches in its trace (needed: {FEWEST} and 5); make a run of 20 steps or more"
        )
    times = change(TimeModel(), **_fit_decode(calls, trains))
    times = change(times, **_fit_train(times, trains, calls), **_fit_lengths(run_dir, config))
    times = change(times, **_fit_waits(times, learner, generators, calls))
    swaps = _list_durations("weights", *generators)
    # the trace also has polls for a version that was not published yet, which are short
    typical_swap = statistics.median(swaps or [0])
    measured = {
        "publish": _list_durations("publish", learner),
        "checkpoint": _list_durations("checkpoint", learner),
        "swap": [seconds for seconds in swaps if seconds > typical_swap / 5],
        # each sample of a batched call gets its share
        "reward": [
            (span.end - span.start) / max(span.size, 1)
            for span in itertools.chain(*rewards)
            for _ in range(max(span.size, 1))
        ],
    }
    times = change(times, **{name: values for name, values in measured.items() if values})
    if config.learner.gpus or config.generator.gpus or has_cuda():
        return times
    return change(times, cores=process_log.find_shared_cores(run_dir))


def list_settings(log: RunLog) -> list[str]:
    """Return the settings that a log shows, as KEY=VALUE."""
    lags = [*(log.find("lag_max")[1] or log.find("lag")[1]).values()] or [0.0]
    longest = math.ceil(measure_lengths(log)[1])
    return [
        f"staleness.max_lag={math.ceil(statistics.median(lags))}",
        f"generator.max_new_tokens={longest}",
        f"generator.context={2 * longest}",
    ]


def measure_lengths(log: RunLog) -> tuple[float, float]:
    """Return the tokens of the mean and of the longest completion of a typical step."""
    mean = statistics.median(log.require("length").values())
    return mean, statistics.median(log.find("length_max")[1].values() or [1.5 * mean])


def fit_log(log: RunLog, config: Config, update_s: Any = None) -> tuple[list[TimeModel], str]:
    """Return times of a run of another framework by GROWING, and what was measured and assumed.

    config: has the batches and engines of that run.
    update_s: seconds of an update, for a log without times of generation.

    Raises ConfigError with the metric that is missing."""
    step_s, lags = log.require("step_s"), log.find("lag")[1]
    mean, longest = measure_lengths(log)
    # a step without lengths trains on completions of a step before
    turns = [at for at in step_s if at in log.find("length")[1]]
    updates_of_turn = len(step_s) / max(1, len(turns))
    is_async = statistics.median(lags.values() or [0.0]) >= diagnose.MIXED
    waited = log.find("wait_s")[1] or ({} if is_async else log.find("generate_s")[1])
    if not (waited or is_async) and updates_of_turn > 1:
        repeated = [x for at, x in step_s.items() if at not in turns]
        update_s = update_s or statistics.fmean(repeated)
    if update_s is not None:
        waited = {at: max(0.0, step_s[at] - update_s) for at in turns}
    if not waited:
        log.require("wait_s" if is_async else "generate_s", "; or give --time train=SECONDS")
    generated = waited
    if is_async and sum(waited.values()) >= WAITING * sum(step_s.values()):
        generated = step_s  # the engines limit the run
    elif is_async:
        latencies = log.find("sample_s")[1]  # of a mean completion
        generated = {at: x * longest / mean for at, x in latencies.items()}
        generated = generated or log.require("generate_s")
    seconds = max(1e-6, statistics.median(generated.values()))
    step = updates_of_turn * statistics.fmean(step_s.values())
    sync = statistics.median(log.find("sync_s")[1].values() or [0.0])
    rests = [updates_of_turn * (x - waited[at]) for at, x in step_s.items() if at in waited]
    rests = rests or [step - statistics.fmean(waited.values())]
    updates = [max(0.0, rest - sync) for rest in rests]
    learner, slots = config.learner, config.generator.slots
    samples = learner.groups * learner.group_size
    # a power of uniform numbers, with this mean and this largest value
    lengths = [longest * ((i + 0.5) / BINS) ** (longest / mean - 1) for i in range(BINS)]
    # a row is free at the end of the call in which its completion ends
    rows = statistics.fmean(math.ceil(x / DECODE_STEPS) * DECODE_STEPS for x in lengths)
    share = samples / config.generators * min(rows, longest)
    base = change(
        TimeModel(),
        **dict.fromkeys(NOT_LOGGED.split(), 0.0),
        noise={"sequence": [second / seconds for second in generated.values()]},
        lengths=lengths,
        train={"sequence": updates},
        train_tokens=samples * mean,
        publish=sync,
    )
    steps = max(longest, share / slots)
    models = [
        change(base, step=(1 - grows) * seconds / steps, row=grows * seconds / share)
        for grows in GROWING
    ]
    kind = f" of {updates_of_turn:g} updates" if updates_of_turn > 1 else ""
    return models, (
        f"{log.path}, by {log.description.title}: steps{kind} take {step:.3g} s, generation "
        f"{seconds:.3g} s, updates {statistics.median(updates):.3g} s; assumed: batches of "
        f"{learner.groups} groups of {learner.group_size}, {slots} completions at once in each of "
        f"{config.generators} generator(s), of a decode step's time {GROWING[0]} (with other seeds "
        f"{GROWING[1]}, {GROWING[2]}) grows with their number, devices of their own"
    )


def _list_durations(name: str, *lanes: Sequence[TraceSpan]) -> list[float]:
    spans = itertools.chain(*lanes)
    return [round(span.end - span.start, 6) for span in spans if span.name == name]


def list_engine_calls(spans: Sequence[TraceSpan]) -> list[EngineCall]:
    """Return one generator's decode calls, except the last."""
    # a call, the rows admitted before it and the seconds of swaps before it
    decodes: list[tuple[TraceSpan, int, float]] = []
    admitted, swap = 0, 0.0
    for span in spans:
        if span.name == "prefill":
            admitted += span.size
        elif span.name == "weights":
            swap += span.end - span.start
        elif span.name == "decode" and span.steps:
            decodes.append((span, admitted, swap))
            admitted, swap = 0, 0.0
    calls = []
    for (call, new_rows, _), (next_call, next_new_rows, swapped) in itertools.pairwise(decodes):
        remaining = max(0, next_call.size - next_new_rows)
        pause = next_call.start - call.end - swapped if remaining else None
        finished = call.size - remaining
        calls.append(EngineCall(*call[1:4], new_rows, call.steps, finished, pause))
    return calls


def compute_overlaps(spans: Iterable[Interval], others: Iterable[Interval]) -> Numbers:
    """Return the share of each of `spans` that `others` cover; both are (start, end)."""
    edges: list[float] = []  # of the united others
    for start, end in sorted(others):
        if edges and start <= edges[-1]:
            edges[-1] = max(end, edges[-1])
        else:
            edges += [start, end]
    lengths = np.diff(edges, prepend=edges[0])
    lengths[::2] = 0  # from an end to the next start
    starts, ends = np.array([*spans]).T
    covered = np.interp(ends, edges, lengths.cumsum()) - np.interp(starts, edges, lengths.cumsum())
    shares: Numbers = covered / np.maximum(ends - starts, 1e-9)
    return shares


def solve(columns: Numbers, seconds: Sequence[float] | Numbers) -> tuple[Numbers, float]:
    """Return coefficients of at least 0 and the residual.

    columns: [calls, coefficients].
    seconds: [calls], weighted so that long calls do not outweigh short ones.
    """
    from scipy.optimize import nnls

    weight = 1 / np.sqrt(np.maximum(seconds, 1e-3))
    solution: tuple[Numbers, float] = nnls(columns * weight[:, None], seconds * weight)
    return solution


def _fit_decode(calls: Sequence[EngineCall], trains: Sequence[TraceSpan]) -> JsonObject:
    """Fit step, row, admit, look, finish, beside and noise."""
    from scipy.optimize import minimize_scalar

    seconds = np.array([call.end - call.start for call in calls])
    shares = compute_overlaps((call[:2] for call in calls), (train[1:3] for train in trains))
    columns = np.array([[x.steps, x.steps * x.rows, x.admitted] for x in calls], float)

    def solve_beside(factor: float) -> tuple[Numbers, float]:
        """Solve with the slowdown `factor` on each call's share beside training."""
        return solve(columns * (1 + (factor - 1) * shares)[:, None], seconds)

    beside = 1.0
    if sum(shares < 0.1) >= FEWEST and sum(shares > 0.9) >= FEWEST:
        found = minimize_scalar(
            lambda factor: solve_beside(factor)[1], bounds=(1.0, MOST_BESIDE), method="bounded"
        )
        beside = float(found.x)
    coefficients = solve_beside(beside)[0]
    step, row, admit = map(float, coefficients)
    expected = np.maximum(1e-9, columns @ coefficients) * (1 + (beside - 1) * shares)
    noise = {"sequence": [round(float(x), 4) for x in seconds / expected]}
    fitted = {"step": step, "row": row, "admit": admit, "beside": beside, "noise": noise}
    pauses = [max(0.0, call.pause) for call in calls if call.pause is not None]
    if len(pauses) < FEWEST:  # the engine runs empty after nearly every call
        return fitted
    columns = np.array([[1, x.finished, x.admitted] for x in calls if x.pause is not None], float)
    solution = solve(columns, pauses)[0]
    # A few pauses are many times as long as the others, because the process waits for a core. The
    # columns do not explain them, and the weights of `solve` leave them out, although the generator
    # is busy in them. The solution is therefore scaled to the sum of all pauses.
    explained = float((columns @ solution).sum())
    look, finish, new = map(float, solution * (sum(pauses) / explained if explained > 0 else 1.0))
    return fitted | {"admit": admit + new, "look": look, "finish": finish}


def _fit_train(
    times: TimeModel, trains: Sequence[TraceSpan], calls: Sequence[EngineCall]
) -> JsonObject:
    """Fit train and train_tokens.

    Each batch's seconds are scaled to the mean number of tokens and to idle generators, in the
    order of the run.
    """
    spans = [train[1:3] for train in trains]
    # a pause between two calls is work, as in the simulation
    busy = [(call.start, call.end + max(0.0, call.pause or 0.0)) for call in calls]
    slowdown = 1 + (times.beside - 1) * compute_overlaps(spans, busy)
    sizes = np.array([train.size for train in trains])
    seconds = np.diff(spans)[:, 0] * sizes.mean() / sizes / slowdown
    return {
        "train": {"sequence": [round(float(s), 5) for s in seconds]},
        "train_tokens": round(float(sizes.mean()), 1),
    }


def _fit_waits(
    times: TimeModel,
    learner: Sequence[TraceSpan],
    generators: Sequence[Sequence[TraceSpan]],
    calls: Sequence[EngineCall],
) -> dict[str, list[float]]:
    """Fit batch, ready and commit.

    - batch: to waits of the learner, from the last decode call's end to the training
    - ready: to the learner's messages between two updates without a wait
    - commit: to waits of generators, from the publication to their first work afterwards

    Each is without the times fitted elsewhere, and without outliers. Fewer than three values fit
    nothing.
    """
    ends = sorted(call.end for call in calls)
    published = [span.end for span in learner if span.name == "publish"]
    waits: dict[str, list[float]] = {"batch": [], "ready": [], "commit": []}
    for previous, span in itertools.pairwise(learner):
        if span.name == "train":
            if span.start - previous.end <= WAIT_S:
                waits["ready"].append(span.start - previous.end)
            elif index := bisect.bisect(ends, span.start):
                waits["batch"].append(span.start - ends[index - 1])
    for previous, span in itertools.chain(*map(itertools.pairwise, generators)):
        index = bisect.bisect(published, span.start)
        begins = previous.name == "decode" and span.name != "decode"
        if begins and index and published[index - 1] > previous.end + WAIT_S:
            waits["commit"].append(span.start - published[index - 1])
    finished = statistics.mean(call.finished for call in calls)
    others = {"batch": times.look + finished * (times.finish + times.buffer) + 2 * times.wire}
    others["commit"] = 2 * times.wire
    return {
        name: [
            round(max(0.0005, value - others.get(name, 0.0)), 5)
            for value in values
            if value < 4 * statistics.median(values)
        ]
        for name, values in waits.items()
        if len(values) >= 3
    }


def _fit_lengths(run_dir: Path, config: Config) -> JsonObject:
    """Fit group_lengths to the samples, otherwise lengths to samples or metrics; and no_spread."""
    rows = [row for row in metrics.read(run_dir) if "reward/mean" in row]
    shares = list_values(rows, "reward/no_spread_share")
    fitted: JsonObject = {"no_spread": statistics.mean(shares)} if shares else {}
    groups: dict[int, list[int]] = {}
    for sample in jsonl.read(run_dir / "samples.jsonl"):
        groups.setdefault(sample["ticket"], []).append(len(sample["tokens"]))
    complete = [lengths for lengths in groups.values() if len(lengths) == config.learner.group_size]
    if len(complete) >= 2 * FEWEST:
        return fitted | {"group_lengths": complete}
    lengths = [*itertools.chain(*groups.values())]
    means = list_values(rows, "answer/length")
    if len(lengths) >= 2 * FEWEST:  # samples of some batches only: the metrics have the mean of all
        scale = statistics.mean(means) / statistics.mean(lengths) if means else 1.0
        return fitted | {"lengths": [round(scale * length, 2) for length in lengths]}
    if not means:
        raise ConfigError(
            f"{run_dir}: neither samples nor metrics have the length of its completions"
        )
    mean = statistics.mean(means)
    longest = min(1.5 * mean, config.generator.max_new_tokens)
    return fitted | {"lengths": f"uniform({mean / 2:.1f}, {longest:.1f})"}
