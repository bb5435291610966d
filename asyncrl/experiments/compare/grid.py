"""Grids of runs, arms x seeds, paired by seed: `asyncrl compare` and `asyncrl sweep`.

All arms share initial weights, prompts and their order, number of groups, and seeds. A cell is one
arm with one seed. Finished cells are not repeated. An interrupted cell continues from its
checkpoint or starts over.

- Cells of a sweep run in warm processes (warm_pool.py), and as `asyncrl run` with agents, vLLM or
  several ranks.
- Cells of a comparison with injected lag run in warm processes. Synchronous cells do too, unless an
  arm at natural lag needs their speed for comparison. Their weights equal a real run's bitwise. All
  other cells are real runs of separate processes in DIR/runs/ARM-seedN.
"""

import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from asyncrl.config import layers, load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import Say
from asyncrl.contract.toml_writer import find_differences
from asyncrl.experiments import process_run
from asyncrl.experiments.compare import verdict, warm_pool
from asyncrl.experiments.compare.arms import (
    CORRECTIONS,
    Arm,
    ArmDescription,
    convert_config,
    describe_changes,
)
from asyncrl.experiments.serial_record import RunRecord
from asyncrl.models import devices
from asyncrl.records import health_checks, metrics
from asyncrl.records.jsonl import JsonObject

USUAL_SD = 0.02  # assumed standard deviation of the reward between seeds, for the power line
USEFUL = 0.05  # a difference in reward that a design should detect
INJECTED = 4  # lag of the default injected arm when the config's limit is 0 or inf
SYNC = "sync"  # arm of a sweep: the config at limit 0
PROBE_STEPS = 12
SWEPT_KEYS = ("staleness.max_lag", "staleness.inject")  # set by the limits of the cells
# keys that no arm may change
SHARED = (
    "seed",
    "model",
    "task",
    "learner.steps",
    "learner.groups",
    "learner.group_size",
    "evaluation",
)


# ---- one cell ------------------------------------------------------------------------------------


@dataclass
class CellResult:
    """One finished run of an arm, with its config.

    record: its results (serial_record.py), of a real run with its summary.
    warm: made in a warm process, whose times differ from a real run's.
    steps, accuracy: of the evaluations. rows: metrics by step. ood: step -> reward. lags: lag ->
        trained tokens. stopped: why it ended early; empty if it did not.
    """

    arm: str
    seed: int
    record: RunRecord
    config: Config
    warm: bool = True

    def __post_init__(self) -> None:
        record = self.record
        self.steps, self.accuracy = record["accuracy"]
        # a record of an older version has none
        self.ood: dict[float, float] = dict(zip(*record.get("ood", ([], [])), strict=True))
        self.rows = [{"step": row["version"] - 1} | row for row in record["curve"]]
        self.lags = {int(lag): count for lag, count in record["lag_histogram"].items()}
        self.trouble = list_instabilities(record)
        self.stopped = str(record.get("abandoned") or record.get("failed") or "")
        signs = [health_checks.Finding(**sign) for sign in record.get("signs", ())]
        self.signs = self.find_signs() if self.warm else signs

    @property
    def final(self) -> float:
        return float(self.accuracy[-1])

    @property
    def ood_start(self) -> float:
        return self.ood.get(self.steps[0], math.nan)

    @property
    def ood_end(self) -> float:
        """The OOD reward at the last held-out evaluation; nan if not measured."""
        return self.ood.get(self.steps[-1], math.nan)

    @property
    def area(self) -> float:
        return verdict.compute_area(self.steps, self.accuracy)

    def find_signs(self) -> list[health_checks.Finding]:
        """Find what `asyncrl run` reports, as far as the record has the metrics."""
        evaluation, ends = self.config.evaluation, (self.steps[0], self.steps[-1])
        held_out = zip(self.steps, self.accuracy, strict=True)
        fewer_ood = min(evaluation.prompts, evaluation.ood_prompts)
        evaluated = [
            {
                "step": step,
                f"eval/{split}": reward,
                f"eval/{split}_n": at_ends if step in ends else between,
            }
            for split, curve, at_ends, between in (
                ("heldout", held_out, evaluation.final_prompts, evaluation.prompts),
                ("ood", self.ood.items(), evaluation.ood_prompts, fewer_ood),
            )
            for step, reward in curve
        ]
        return health_checks.apply_rules(
            [*evaluated, *self.rows],
            health_checks.RunFacts(self.config),
            ended=ends[1] >= self.config.learner.steps,
        )


def list_instabilities(record: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a run is unstable; empty if it is stable."""
    problems = verdict.list_instabilities(record["accuracy"][1], record["curve"])
    return problems + ([f"failed: {record['failed']}"] if record.get("failed") else [])


# ---- the arms of a comparison --------------------------------------------------------------------


def make_default_arms(config: Config) -> list[Arm]:
    """Return the arms used if none are given.

    They are synchronous, as configured, uncorrected and at an injected lag. The last is left out
    for configs that refuse it: with sessions, or with filtered groups.
    """
    limit = config.staleness.limit
    lag = int(limit) if 0 < limit < math.inf else INJECTED
    uncorrected = [
        "correction.preset=none",
        "correction.proximal=recompute",
        "loss.surrogate=vanilla",
    ]
    lagged = [f"staleness.max_lag={lag}"] if limit == 0 else []
    arms = [
        Arm("sync", ["staleness.max_lag=0"]),
        Arm("async", lagged),
        Arm("async-uncorrected", [*lagged, *uncorrected]),
    ]
    if not config.uses_sessions and config.advantage.no_spread != "filter":
        arms.append(Arm("injected", [f"staleness.max_lag={lag}", f"staleness.inject={lag}"]))
    return arms


def resolve(source: str, sets: Sequence[str], arms: Sequence[Arm]) -> dict[str, Config]:
    """Resolve each arm's config by name, before the first run. Raises ConfigError.

    An arm that repeats another gets the items of that one.
    """
    names = [arm.name for arm in arms]
    if duplicate := next((name for name in names if names.count(name) > 1), ""):
        hint = (
            f"; write the second as NAME:method={duplicate},..." if duplicate in CORRECTIONS else ""
        )
        raise ConfigError(f"--arm: the name {duplicate} is given twice{hint}")
    if len(arms) < 2:
        raise ConfigError("--arm: a comparison needs two arms or more")
    configs: dict[str, Config] = {}
    for arm in arms:
        if arm.same_as:
            if arm.same_as not in configs:
                raise ConfigError(
                    f"--arm {arm.name}:same-as={arm.same_as}: no earlier arm has that name; arms: "
                    f"{', '.join(configs) or 'none'}"
                )
            arm.sets = arms[names.index(arm.same_as)].sets
            configs[arm.name] = configs[arm.same_as]
            continue
        context = f"--arm {arm.name}"
        resolved = load_arm(context, source, sets, arm.sets)
        if twin := next((name for name, config in configs.items() if config == resolved), None):
            raise ConfigError(
                f"{context}: resolves to the same config as {twin}; leave one out, or write "
                f"{arm.name}:same-as={twin} to repeat it"
            )
        configs[arm.name] = resolved
    return configs


def load_arm(
    context: str,
    source: str,
    sets: Sequence[str],
    items: Sequence[str],
    swept: Sequence[str] = (),
    where: str = "arms; give it with --set",
) -> Config:
    """Load the config of an arm, `sets` with its own `items`.

    Raises ConfigError that begins with `context`, also for a key that is shared or in `swept`.
    """
    for key in map(layers.key_of, items):
        if key in swept or layers.is_inside(key, SHARED):
            raise ConfigError(f"{context}: {key} must be the same in all {where}")
    try:
        return load.load_to_train(source, [*sets, *items])
    except ConfigError as error:
        raise ConfigError(f"{context}: {error}") from error


def find_warm_arms(configs: Mapping[str, Config]) -> set[str]:
    """Return the arms of a comparison that run in warm processes.

    These are arms with injected lag, and synchronous ones if no arm at natural lag needs their wall
    time. A custom reward function may be slow, and a warm process waits for each reward, so such
    arms run as real processes.
    """
    possible = {
        name
        for name, config in configs.items()
        if not process_run.needs_own_process(config) and not config.reward.uses_reward_processes
    }
    injected = {name for name in possible if configs[name].staleness.inject is not None}
    sync = {name for name, config in configs.items() if config.staleness.limit == 0}
    return injected | ((sync & possible) if len(injected | sync) == len(configs) else set())


def describe_power(arms: int, seeds: int) -> str:
    """Describe the statistical power of the design before any run."""
    if seeds < 2:
        return "one seed: differences are shown, but no verdict is possible"
    level = verdict.LEVEL / max(1, arms - 1)
    unit = verdict.find_detectable(1.0, seeds, level)
    if USUAL_SD * unit > 1:
        needed = verdict.count_needed_seeds(USEFUL, USUAL_SD, level=level)
        return (
            f"{arms} arms x {seeds} seeds: this design detects no difference: at {USUAL_SD:g} "
            "between seeds no difference below 1 in held-out reward is found with 80 % power "
            f"(after correction for {arms - 1} arms); --seeds {needed} finds {USEFUL:g}"
        )
    return (
        f"{arms} arms x {seeds} seeds: a difference of {unit:.1f} standard deviations between "
        f"seeds is found with 80 % power (after correction for {arms - 1} arms); at {USUAL_SD:g} "
        f"between seeds that is {USUAL_SD * unit:.3f} in held-out reward"
    )


# ---- the arms of a sweep -------------------------------------------------------------------------


def parse_limits(text: str, injected: bool) -> list[float]:
    """Parse `0,1,2,4` or `1,inf` into sorted limits. Raises ConfigError."""
    try:
        limits = sorted(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(
            f"--limits {text}: give whole numbers separated by commas, for example 0,1,2,4 (inf: "
            "no limit)"
        ) from None
    for limit in limits:
        if not limit >= 0 or (limit < math.inf and not limit.is_integer()):
            raise ConfigError(
                f"--limits {text}: {limit:g} is neither a whole number from 0 on nor inf"
            )
    if injected and math.inf in limits:
        raise ConfigError(
            f"--limits {text}: a lag of inf cannot be injected; leave --inject out for natural lag"
        )
    if len(set(limits)) < len(limits):
        raise ConfigError(f"--limits {text}: a limit is given twice")
    return limits


def list_limit_sets(limit: float, injected: bool) -> list[str]:
    return [f"staleness.max_lag={limit:g}"] + (
        [f"staleness.inject={limit:g}"] if injected and limit > 0 else []
    )


class SweepPlan:
    """The runs of a sweep. Resolves every config, before the first run; raises ConfigError.

    cell: (name, limit) -> arm. Arms with equal configs run once.
    arms: name -> config; the first is `sync`.
    probes: limit -> config of a short run at natural lag that measures its speed.
    """

    def __init__(
        self,
        source: str,
        sets: Sequence[str],
        corrections: Sequence[Arm],
        limits: Sequence[float],
        *,
        injected: bool,
    ) -> None:
        self.corrections = {arm.name: arm for arm in corrections}
        self.limits, self.injected = list(limits), injected
        self.cell: dict[tuple[str, float], str] = {}
        base = load.load_to_train(source, sets)
        if base.staleness.inject is not None:
            raise ConfigError(
                "staleness.inject: the sweep sets it; remove it from the config and give --inject"
            )
        self.arms = {SYNC: load.load(source, [*sets, *list_limit_sets(0, injected)])}
        for correction in corrections:
            name = correction.name
            context = f"--correction {name}"
            if self.corrections[name] is not correction:
                raise ConfigError(
                    f"{context}: given twice; give the second another name, such as "
                    f"NAME:method={name if name in CORRECTIONS else 'tis'},key=value"
                )
            if name == SYNC:
                raise ConfigError(
                    f"{context}: this name belongs to the synchronous run of the unchanged config"
                )
            for limit in limits:
                config = load_arm(
                    f"{context}, limit {limit:g}",
                    source,
                    [*sets, *list_limit_sets(limit, injected)],
                    correction.sets,
                    SWEPT_KEYS,
                    "cells; give it with --set, limits with --limits",
                )
                own = f"{name}-limit"
                arm = next((n for n, other in self.arms.items() if other == config), "")
                if arm and (limit > 0 or arm != SYNC) and not arm.startswith(own):
                    raise ConfigError(
                        f"{context}: with limit {limit:g} it is the same as {arm}; leave one out"
                    )
                self.cell[name, limit] = arm = arm or f"{own}{limit:g}"
                self.arms[arm] = config
        probe_sets = [
            "evaluation.every=0",
            "evaluation.final_prompts=1",
            "evaluation.ood_prompts=0",
            f"learner.steps={min(PROBE_STEPS, base.learner.steps)}",
        ]
        self.probes = {
            x: load.load(source, [*sets, *probe_sets, f"staleness.max_lag={x:g}"])
            for x in sorted({0.0, *limits})
        }

    def describe(self, titles: Mapping[str, str] = {}) -> list[ArmDescription]:
        """Describe each correction by its title and its differences from the plain config."""
        described = []
        for name, correction in self.corrections.items():
            config = self.arms[self.cell[name, self.limits[-1]]]
            differs = describe_changes(self.arms[SYNC], config, SWEPT_KEYS)
            described.append((name, titles.get(name, correction.title), differs))
        return described


# ---- the grid ------------------------------------------------------------------------------------


class Grid:
    """Arms x seeds in a directory. Raises ConfigError if the directory holds another grid.

    configs: arm -> config; the first arm is the base, and its seed the first of all.
    real: arms that run as processes of `asyncrl run`; the others run in warm processes if possible.
    order: all (arm, seed) in the order in which they run, after the probes.
    probes: name -> config of a short run that only measures a speed.
    head, rows: the progress table: the head of its columns; row -> the runs of each column.
    """

    kind: ClassVar[str]
    file: ClassVar[str]  # holds the configs
    extends: ClassVar[bool]  # whether a directory may get more arms
    head: list[str]
    rows: dict[str, list[list[str]]]
    cores = 1  # warm cells at a time, at least

    def __init__(
        self,
        directory: Path,
        configs: dict[str, Config],
        seeds: int,
        log: Say,
        *,
        real: Iterable[str] = (),
        probes: Mapping[str, Config] = {},
    ) -> None:
        self.directory, self.configs, self.log = directory, configs, log
        first = next(iter(configs.values())).seed
        self.seeds = [first + i for i in range(seeds)]
        names = deque(configs)
        self.order: list[tuple[str, int]] = []
        for seed in self.seeds:
            self.order += [(arm, seed) for arm in names]
            names.rotate(-1)  # the arms take turns in being the first of a seed
        self.names = [*probes, *(self.name_run(*run) for run in self.order)]
        self.cells = warm_pool.CellStore(directory)
        arms = {name: convert_config(config) for name, config in configs.items()}
        path = directory / self.file
        if (directory / "run_id").exists():
            raise ConfigError(f"{directory} holds a run; choose another directory with --out")
        if path.exists():
            previous = json.loads(path.read_bytes())["arms"]
            try:  # fills configs of older versions with the defaults of newer keys
                previous = {n: convert_config(load.build(raw)) for n, raw in previous.items()}
            except ConfigError:
                pass  # a key no longer exists: the arms differ below
            common = previous.keys() & arms if self.extends else {*previous, *arms}
            written, requested = (
                {name: table[name] for name in common if name in table}
                for table in (previous, arms)
            )
            differences = find_differences(written, requested)
            if changes := [f"{key}: {old}, now {new}" for key, (old, new) in differences.items()]:
                raise ConfigError(
                    f"{directory} holds a {self.kind} with other settings "
                    f"({'; '.join(changes[:4])}{' ...' if len(changes) > 4 else ''}); choose "
                    "another directory with --out"
                )
            arms = previous | arms
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"arms": arms}, indent=1), encoding="utf-8")
        for name, config in probes.items():
            self.cells.add(name, config, config.seed)
        for arm, seed in self.order:
            self.cells.add(self.name_run(arm, seed), configs[arm], seed, real=arm in real)

    @staticmethod
    def name_run(arm: str, seed: int) -> str:
        return f"{arm}-seed{seed}"

    def read(self, arm: str, seed: int) -> CellResult:
        name = self.name_run(arm, seed)
        warm = name not in self.cells.real
        return CellResult(arm, seed, self.cells.read(name), self.configs[arm], warm=warm)

    def run(self, jobs: int, on_event: warm_pool.EventCallback, *, abandon: bool = True) -> None:
        """Run what is not finished, `jobs` runs at a time; see `CellStore.run`.

        abandon: give up runs that have collapsed.
        """
        if finished := len(self.names) - len(self.cells.list_missing()):
            self.log(f"{finished} of {len(self.names)} runs are finished already")
        self.cells.run(max(jobs, self.cores), on_event, jobs=jobs, abandon=abandon)


class Comparison(Grid):
    """A comparison in its directory."""

    kind, file, extends = "comparison", "compare.json", False

    def __init__(
        self,
        directory: Path,
        source: str,
        sets: Sequence[str],
        arms: Sequence[Arm],
        seeds: int,
        log: Say,
        *,
        real: bool = False,
    ) -> None:
        configs = resolve(source, sets, arms)
        warm = set() if real else find_warm_arms(configs)
        super().__init__(directory, configs, seeds, log, real=configs.keys() - warm)
        self.arms = {arm.name: arm for arm in arms}
        # warm cells, whose wall times are not compared, use every core unless they share a GPU
        uses_gpu = configs[arms[0].name].model.device != "cpu" and devices.has_cuda()
        self.cores = 1 if uses_gpu else len(os.sched_getaffinity(0))
        self.head = ["arm", *(f"seed {seed}" for seed in self.seeds)]
        self.rows = {arm: [[self.name_run(arm, seed)] for seed in self.seeds] for arm in configs}

    def describe(self) -> list[ArmDescription]:
        """Describe each arm by its title and its differences from the first arm."""
        base, *others = self.configs
        differs = {x: describe_changes(self.configs[base], self.configs[x]) for x in others}
        return [
            (
                name,
                f"the same as {arm.same_as}" if arm.same_as else arm.title,
                differs.get(name, ""),
            )
            for name, arm in self.arms.items()
        ]


class Sweep(Grid):
    """A sweep in its directory, to which a later sweep may add arms.

    Each limit has a short run that measures its speed, a probe.
    """

    kind, file, extends = "sweep", "sweep.json", True

    def __init__(self, directory: Path, sweep_plan: SweepPlan, seeds: int, log: Say) -> None:
        probes = {self.name_probe(limit): x for limit, x in sweep_plan.probes.items()}
        super().__init__(directory, sweep_plan.arms, seeds, log, probes=probes)
        self.plan = sweep_plan
        axis = "lag" if sweep_plan.injected else "limit"
        self.head = ["correction", *(f"{axis} {x:g}" for x in sweep_plan.limits)]
        arms = {
            name: [sweep_plan.cell[name, limit] for limit in sweep_plan.limits]
            for name in sweep_plan.corrections
        }
        self.rows = {
            name: [[self.name_run(arm, seed) for seed in self.seeds] for arm in by_limit]
            for name, by_limit in (arms | {SYNC: [SYNC]}).items()
        }

    @staticmethod
    def name_probe(limit: float) -> str:
        return f"probe-limit{limit:g}"


# ---- its progress --------------------------------------------------------------------------------


class GridProgress:
    """Progress of the runs of a grid, as a context manager.

    `on_event` is the callback of the runs and may be called from several threads.
    """

    def __init__(self, grid: Grid) -> None:
        self.lock = threading.Lock()
        self.started_at = time.monotonic()
        self.grid = grid
        self.running: dict[str, str] = {}  # run -> its state
        # finished run -> its result; None: a speed probe
        self.ends = {
            name: self._read_end(name) for name in filter(grid.cells.is_finished, grid.names)
        }
        self.finished_before = len(self.ends)  # by an earlier command
        self.live: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(
                get_renderable=self.make_table, console=Console(stderr=True), refresh_per_second=2
            )
            self.live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
        if kind is KeyboardInterrupt:
            print(
                f"interrupted with {len(self.ends)} of "
                f"{len(self.grid.names)} runs finished; the same command continues from here",
                file=sys.stderr,
            )

    def _read_end(self, name: str) -> CellResult | None:
        """Read a finished run; None for a speed probe."""
        arm, _, seed = name.rpartition("-seed")
        return self.grid.read(arm, int(seed)) if arm else None

    def on_event(self, name: str, event: JsonObject) -> None:
        """Record a run's event.

        name: the run.
        event: {"step", "accuracy"} while it runs, {"done": True} at its end.
        """
        with self.lock:
            if "done" not in event:
                self.running[name] = f"step {event['step']}: {event['accuracy']:.3f}"
                return
            self.running.pop(name, None)
            cell = self.ends[name] = self._read_end(name)
            outcome = "speed probe"
            if cell is not None:
                outcome = f"reward {cell.final:.3f} in {cell.record['wall_s']:.0f} s"
                if cell.stopped:
                    outcome += f", stopped early at step {cell.record['steps']}: {cell.stopped}"
                else:
                    outcome += "".join(f", {problem}" for problem in cell.trouble)
            if self.live is None:
                print(f"{name}: {outcome} ({self.describe_state()})", file=sys.stderr)

    def describe_state(self) -> str:
        ended, total = len(self.ends), len(self.grid.names)
        text = f"{ended} of {total}"
        made = ended - self.finished_before
        if made and ended < total:
            minutes = (time.monotonic() - self.started_at) / made * (total - ended) / 60
            text += f", about {minutes:.0f} min to go"
        return text

    def make_table(self) -> Any:
        """Return the table for the terminal."""
        from rich.table import Table

        with self.lock:
            title = f"{self.grid.directory.name}: {self.describe_state()}"
            table = Table(*self.grid.head, title=title, caption="held-out reward; ! unstable")
            for name, columns in self.grid.rows.items():
                table.add_row(name, *map(self.format_cell, columns))
            return table

    def format_cell(self, names: Sequence[str]) -> str:
        """Format the finished runs of a cell by their means, then the state of the others."""
        ends = [cell for name in names if (cell := self.ends.get(name))]
        texts = []
        for name in (name for name in names if name not in self.ends):
            cells = self.grid.cells
            rows = metrics.read(cells.get_run_dir(name)) if name in cells.real else []
            rewards = [f": {row['eval/heldout']:.3f}" for row in rows if "eval/heldout" in row]
            if name in self.running:
                texts.append(self.running[name])
            elif rows:
                step = max(row["step"] for row in rows)
                texts.append("".join([f"step {step}", *rewards[-1:]]))
        if ends:
            unstable = sum(bool(cell.trouble) for cell in ends)
            count = f" ({len(ends)})" if len(names) > 1 else ""
            mark = f" !{unstable if count else ''}" if unstable else ""
            seconds = metrics.average([cell.record["wall_s"] for cell in ends])
            reward = metrics.average([cell.final for cell in ends])
            texts.insert(0, f"{reward:.3f}{count}{mark}, {seconds:.0f} s")
        return " ".join(texts) or "-"
