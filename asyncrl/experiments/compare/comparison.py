"""`asyncrl compare`: train under several settings and test the differences.

All arms share initial weights, prompts and their order, number of groups, and seeds. A cell is one
arm with one seed.

- Cells with injected lag run in warm processes (warm_pool.py).
- Synchronous cells do too, unless an arm at natural lag needs their speed for comparison. Their
  weights equal a real run's bitwise.
- All other cells are real runs of separate processes in DIR/runs/ARM-seedN.

Finished cells are not repeated. An interrupted cell continues from its checkpoint or starts over.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments import process_run
from asyncrl.experiments.compare import verdict, warm_pool
from asyncrl.experiments.compare.arms import Arm, convert_configs, refuse_other_configs
from asyncrl.experiments.compare.methods import CORRECTIONS
from asyncrl.experiments.one_process import needs_own_process
from asyncrl.records import health_checks, metrics
from buffer import training_log

USUAL_SD = 0.02  # assumed standard deviation of the reward between seeds, for the power line
USEFUL = 0.05  # a difference in reward that a design should detect
INJECTED = 4  # lag of the default injected arm when the config's limit is 0 or inf
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


@dataclass
class CellResult:
    """One finished run."""

    arm: str
    seed: int
    summary: dict[str, Any]
    steps: list[float] = field(default_factory=list)  # of the evaluations
    accuracy: list[float] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    # trained: digest of the samples' ids, runs of tickets
    batches: list[tuple[str, list[list[int]]]] = field(default_factory=list)
    warm: bool = False
    # step -> mean reward on out-of-distribution prompts
    ood: dict[float, float] = field(default_factory=dict)
    signs: list[health_checks.HealthFinding] = field(default_factory=list)

    @property
    def final(self) -> float:
        return float(self.summary["heldout_end"])

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
    """Resolve each arm's config by name, before the first run. Raises ConfigError."""
    names = [arm.name for arm in arms]
    if duplicate := next((name for name in names if names.count(name) > 1), ""):
        hint = (
            f"; write the second as NAME:method={duplicate},..." if duplicate in CORRECTIONS else ""
        )
        raise ConfigError(f"--arm: the name {duplicate} is given twice{hint}")
    if len(arms) < 2:
        raise ConfigError("--arm: a comparison needs two arms or more")
    load.load_to_train(source, sets)  # reports a mistake in CONFIG or --set as such
    configs: dict[str, Config] = {}
    for arm in arms:
        if arm.same_as:
            if arm.same_as not in configs:
                raise ConfigError(
                    f"--arm {arm.name}:same-as={arm.same_as}: no earlier arm has that name; arms: "
                    f"{', '.join(configs) or 'none'}"
                )
            configs[arm.name] = configs[arm.same_as]
            continue
        for item in arm.sets:
            key = item.partition("=")[0].strip()
            if is_shared_key(key):
                raise ConfigError(
                    f"--arm {arm.name}: {key} must be the same in all arms; give it with --set"
                )
        try:
            resolved = load.load_to_train(source, [*sets, *arm.sets])
        except ConfigError as error:
            raise ConfigError(f"--arm {arm.name}: {error}") from error
        if twin := next((name for name, config in configs.items() if config == resolved), None):
            raise ConfigError(
                f"--arm {arm.name}: resolves to the same config as {twin}; leave one out, or write "
                f"{arm.name}:same-as={twin} to repeat it"
            )
        configs[arm.name] = resolved
    return configs


def is_shared_key(key: str) -> bool:
    """Return whether all arms must agree on `key`."""
    return any(key == shared or key.startswith(shared + ".") for shared in SHARED)


def upgrade_arms(arms: dict[str, Any]) -> dict[str, Any]:
    """Fill configs written by older versions with the defaults of newer keys.

    They remain unchanged if a key no longer exists.
    """
    try:
        return convert_configs({name: load.build(raw) for name, raw in arms.items()})
    except ConfigError:
        return arms


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


class Comparison:
    """A comparison in its directory.

    Raises ConfigError if the directory holds another one.
    """

    def __init__(
        self,
        directory: Path,
        source: str,
        sets: Sequence[str],
        arms: Sequence[Arm],
        seeds: int,
        log: Callable[[str], None],
        *,
        real: bool = False,
    ) -> None:
        self.directory = directory
        self.arms = list(arms)
        self.log = log
        self.configs = resolve(source, sets, arms)
        first = next(iter(self.configs.values()))
        self.seeds = [first.seed + i for i in range(seeds)]
        self.source = source
        self.sets = list(sets)
        self.cells = warm_pool.CellStore(directory)
        self.warm = set() if real else find_warm_arms(self.configs)
        plan = {"arms": convert_configs(self.configs)}
        path = directory / "compare.json"
        if path.exists():
            written = upgrade_arms(json.loads(path.read_bytes())["arms"])
            refuse_other_configs(directory, "comparison", written, plan["arms"])
        else:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(plan, indent=1), encoding="utf-8")

    def get_run_dir(self, arm: str, seed: int) -> Path:
        return self.directory / "runs" / f"{arm}-seed{seed}"

    def is_finished(self, arm: str, seed: int) -> bool:
        if arm in self.warm:
            return self.cells.get_path(f"{arm}-seed{seed}").exists()
        path = self.get_run_dir(arm, seed) / "summary.json"
        return (
            path.exists()
            and json.loads(path.read_bytes())["steps"] >= self.configs[arm].learner.steps
        )

    def run(
        self, jobs: int, on_event: warm_pool.EventCallback = lambda name, event: None
    ) -> list[CellResult]:
        """Run all cells, seed by seed with the arms in turn, and return the results.

        `jobs` real runs share the machine. Warm cells, whose wall times are not compared, use every
        core that this process may use, unless they share a GPU. `on_event` receives every run's
        events (`warm_pool.EventCallback`).
        """
        names = list(self.configs)
        plan = []
        for turn, seed in enumerate(self.seeds):
            first = turn % len(names)
            plan += [(name, seed) for name in names[first:] + names[:first]]
        missing = [cell for cell in plan if not self.is_finished(*cell)]
        if len(missing) < len(plan):
            self.log(f"{len(plan) - len(missing)} of {len(plan)} runs are finished already")
        self.log(describe_power(len(self.configs), len(self.seeds)))
        for arm, seed in missing:
            if arm in self.warm:
                self.cells.add(f"{arm}-seed{seed}", self.configs[arm], seed)
        cores = 1 if uses_gpu(self.configs[names[0]]) else len(os.sched_getaffinity(0))
        self.cells.run(max(jobs, cores), on_event, abandon=False)
        with ThreadPoolExecutor(jobs) as team:
            real = [(arm, seed) for arm, seed in missing if arm not in self.warm]
            results = team.map(lambda cell: self.run_cell(*cell), real)
            for (arm, seed), _ in zip(real, results, strict=True):
                on_event(f"{arm}-seed{seed}", {"done": True})
        return [self.read(name, seed) for name in names for seed in self.seeds]

    def run_cell(self, arm: str, seed: int) -> None:
        """Make one run, or continue it from the last checkpoint of an earlier attempt."""
        run_dir = self.get_run_dir(arm, seed)
        arm_sets = self.list_sets(
            next(candidate for candidate in self.arms if candidate.name == arm)
        )
        sets = [*self.sets, *arm_sets, f"seed={seed}"]
        log = self.directory / "logs" / f"{run_dir.name}.log"
        process_run.complete(run_dir, self.source, sets, self.configs[arm].learner.steps, log)

    def list_sets(self, arm: Arm) -> list[str]:
        if not arm.same_as:
            return arm.sets
        return self.list_sets(
            next(candidate for candidate in self.arms if candidate.name == arm.same_as)
        )

    def read(self, arm: str, seed: int) -> CellResult:
        if arm in self.warm:
            return make_warm_cell(
                arm, seed, self.cells.read(f"{arm}-seed{seed}"), self.configs[arm]
            )
        run_dir = self.get_run_dir(arm, seed)
        cell = CellResult(arm, seed, json.loads((run_dir / "summary.json").read_bytes()))
        rows = metrics.read(run_dir)
        # after a resume the later row of a step wins
        by_step = {row["step"]: row for row in rows if "reward/mean" in row}
        cell.rows = [by_step[step] for step in sorted(by_step)]
        points = {row["step"]: row["eval/heldout"] for row in rows if "eval/heldout" in row}
        cell.steps = [float(step) for step in sorted(points)]
        cell.accuracy = [points[step] for step in sorted(points)]
        cell.ood = {float(row["step"]): row["eval/ood"] for row in rows if "eval/ood" in row}
        cell.trouble = verdict.list_instabilities(cell.accuracy, cell.rows)
        cell.signs = [health_checks.HealthFinding(**sign) for sign in cell.summary.get("signs", [])]
        batches = sorted(training_log.read(run_dir / "trained.jsonl").items())
        cell.batches = [(batch.ids, batch.tickets) for _, batch in batches]
        return cell


def find_warm_arms(configs: dict[str, Config]) -> set[str]:
    """Return the arms that run in warm processes.

    These are arms with injected lag, and synchronous ones if no arm at natural lag needs their wall
    time. A custom reward function may be slow, and a warm process waits for each reward, so such
    arms run as real processes.
    """
    possible = {
        name
        for name, config in configs.items()
        if not needs_own_process(config) and not config.reward.uses_reward_processes
    }
    injected = {name for name in possible if configs[name].staleness.inject is not None}
    sync = {name for name, config in configs.items() if config.staleness.limit == 0}
    return injected | ((sync & possible) if len(injected | sync) == len(configs) else set())


def uses_gpu(config: Config) -> bool:
    """Return whether `model.device` is a GPU on this machine."""
    if config.model.device == "auto":
        import torch

        return torch.cuda.is_available()
    return config.model.device != "cpu"


def check_warm_run(cell: CellResult, config: Config) -> list[health_checks.HealthFinding]:
    """Return the health findings of a warm run, as `asyncrl run` reports them.

    They cover only the metrics in its record.
    """
    evaluation = config.evaluation
    ends = (cell.steps[0], cell.steps[-1])
    middle_ood = min(evaluation.prompts, evaluation.ood_prompts)
    rows = [
        {
            "step": step,
            "eval/heldout": accuracy,
            "eval/heldout_n": evaluation.final_prompts if step in ends else evaluation.prompts,
        }
        for step, accuracy in zip(cell.steps, cell.accuracy, strict=True)
    ]
    rows += [
        {
            "step": step,
            "eval/ood": accuracy,
            "eval/ood_n": evaluation.ood_prompts if step in ends else middle_ood,
        }
        for step, accuracy in cell.ood.items()
    ]
    return health_checks.apply_rules(
        [*rows, *cell.rows],
        health_checks.RunFacts(config),
        ended=cell.steps[-1] >= config.learner.steps,
    )


def make_warm_cell(arm: str, seed: int, record: dict[str, Any], config: Config) -> CellResult:
    """Convert a record of `serial.run_serial` to a run's summary and metrics."""
    steps, accuracy = record["accuracy"]
    lags = {int(lag): count for lag, count in record["lag_histogram"].items()}
    tokens = sum(lags.values())
    summary = {
        "heldout_start": accuracy[0],
        "heldout_end": accuracy[-1],
        "wall_s": record["wall_s"],
        "tokens": tokens,
        "ledger": {"generated": sum(line["tokens"] for line in record["ledger_lines"].values())},
        "weights_digest": record["weights_digest"],
        "lag": {
            "mean": sum(lag * count for lag, count in lags.items()) / max(tokens, 1),
            "max": max(lags, default=0),
        },
        "trained_ids": record["trained_ids"],
    }
    rows = [
        {"step": row["version"] - 1} | {name: x for name, x in row.items() if name != "version"}
        for row in record["curve"]
    ]
    failed = record.get("failed")
    cell = CellResult(
        arm,
        seed,
        summary,
        steps=steps,
        accuracy=accuracy,
        rows=rows,
        trouble=verdict.list_instabilities(accuracy, rows)
        + ([f"failed: {failed}"] if failed else []),
        batches=[(str(batch["ids"]), batch["tickets"]) for batch in record.get("batches", ())],
        warm=True,
        # a record of an older version has none
        ood=dict(zip(*record.get("ood", ([], [])), strict=True)),
    )
    cell.signs = check_warm_run(cell, config)
    return cell
