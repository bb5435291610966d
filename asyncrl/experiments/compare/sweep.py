"""`asyncrl sweep`: staleness limits x corrections, and the suggested limit.

Every cell is a run of serial.py over several seeds, in warm processes, with the real store,
admission, engine and learner; with agents, vLLM or DeepSpeed it is a run of `asyncrl run`. With
injected lag k, every ticket is sampled with weights k versions old. With natural lag, the engine
continues during an update as far as the limit allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.compare import comparison, methods, warm_pool
from asyncrl.experiments.compare.arms import Arm, convert_configs, parse_arm, refuse_other_configs

SYNC = "sync"
PROBE_STEPS = 12
SWEPT_KEYS = ("staleness.max_lag", "staleness.inject")  # set by the limits of the cells
CORRECTIONS = methods.CORRECTIONS


def parse_correction(text: str) -> Arm:
    """Parse `NAME` or `NAME:key=value,...` as an arm. Raises ConfigError."""
    arm = parse_arm(text, "--correction")
    if arm.same_as:
        raise ConfigError(
            f"--correction {text}: same-as belongs to compare; a sweep does not repeat a correction"
        )
    return arm


def parse_limits(text: str, injected: bool) -> list[float]:
    """Parse `0,1,2,4` or `1,inf` into sorted limits. Raises ConfigError."""
    try:
        limits = [float(x) for x in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--limits {text}: give whole numbers separated by commas, for example 0,1,2,4 (inf: "
            "no limit)"
        ) from None
    for limit in limits:
        if math.isnan(limit) or limit < 0 or (not math.isinf(limit) and limit != int(limit)):
            raise ConfigError(
                f"--limits {text}: {limit:g} is neither a whole number from 0 on nor inf"
            )
        if injected and math.isinf(limit):
            raise ConfigError(
                f"--limits {text}: a lag of inf cannot be injected; leave --inject out for natural "
                "lag"
            )
    if len(set(limits)) < len(limits):
        raise ConfigError(f"--limits {text}: a limit is given twice")
    return sorted(limits)


def format_limit(limit: float) -> str:
    return "inf" if math.isinf(limit) else str(int(limit))


@dataclass
class SweepPlan:
    """The runs of a sweep: (correction, limit) -> arm.

    Arms with equal configs run once.
    """

    corrections: dict[str, list[str]]
    limits: list[float]
    injected: bool
    arms: dict[str, Config] = field(default_factory=dict)  # name -> config; the first is `sync`
    cell: dict[tuple[str, float], str] = field(default_factory=dict)
    # limit -> a short run at natural lag that measures its speed
    probes: dict[float, Config] = field(default_factory=dict)


def list_limit_sets(limit: float, injected: bool) -> list[str]:
    return [f"staleness.max_lag={format_limit(limit)}"] + (
        [f"staleness.inject={format_limit(limit)}"] if injected and limit > 0 else []
    )


def check_correction(name: str, items: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for a correction that cannot be in this sweep.

    Its name must be unique among `names`, and its items must leave the shared keys alone.
    """
    if names.count(name) > 1:
        raise ConfigError(
            f"--correction {name}: given twice; give the second another name, such as "
            f"NAME:method={name if name in CORRECTIONS else 'tis'},key=value"
        )
    if name == SYNC:
        raise ConfigError(
            f"--correction {name}: this name belongs to the synchronous run of the unchanged config"
        )
    for item in items:
        key = item.partition("=")[0].strip()
        if comparison.is_shared_key(key) or key in SWEPT_KEYS:
            raise ConfigError(
                f"--correction {name}: {key} must be the same in all cells; give it with --set, "
                "limits with --limits"
            )


def make_plan(
    source: str,
    sets: Sequence[str],
    corrections: Sequence[tuple[str, list[str]]],
    limits: Sequence[float],
    *,
    injected: bool,
) -> SweepPlan:
    """Resolve every config of the sweep before the first run. Raises ConfigError."""
    base = load.load_to_train(source, sets)
    if base.staleness.inject is not None:
        raise ConfigError(
            "staleness.inject: the sweep sets it; remove it from the config and give --inject"
        )
    result = SweepPlan(
        dict(corrections),
        list(limits),
        injected,
        {SYNC: load.load(source, [*sets, *list_limit_sets(0, injected)])},
    )
    names = [name for name, _ in corrections]
    for name, items in corrections:
        check_correction(name, items, names)
        for limit in limits:
            try:
                config = load.load(source, [*sets, *items, *list_limit_sets(limit, injected)])
            except ConfigError as error:
                raise ConfigError(
                    f"--correction {name}, limit {format_limit(limit)}: {error}"
                ) from error
            twin = next((n for n, other in result.arms.items() if other == config), None)
            if (
                twin is not None
                and (limit > 0 or twin != SYNC)
                and not twin.startswith(f"{name}-limit")
            ):
                raise ConfigError(
                    f"--correction {name}: with limit {format_limit(limit)} it is the same as "
                    f"{twin}; leave one out"
                )
            arm = twin or f"{name}-limit{format_limit(limit)}"
            result.arms.setdefault(arm, config)
            result.cell[name, limit] = arm
    probe_sets = [
        "evaluation.every=0",
        "evaluation.final_prompts=1",
        "evaluation.ood_prompts=0",
        f"learner.steps={min(PROBE_STEPS, base.learner.steps)}",
    ]
    result.probes = {
        x: load.load(source, [*sets, *probe_sets, f"staleness.max_lag={format_limit(x)}"])
        for x in sorted({0.0, *limits})
    }
    return result


class Sweep:
    """A sweep in its directory.

    Raises ConfigError if the directory holds another one.
    """

    def __init__(
        self, directory: Path, sweep_plan: SweepPlan, seeds: int, log: Callable[[str], None]
    ) -> None:
        self.directory = directory
        self.plan = sweep_plan
        self.log = log
        self.seeds = [sweep_plan.arms[SYNC].seed + i for i in range(seeds)]
        self.cells = warm_pool.CellStore(directory)
        written = {"arms": convert_configs(sweep_plan.arms)}
        path = directory / "sweep.json"
        if path.exists():
            previous = comparison.upgrade_arms(json.loads(path.read_bytes())["arms"])
            common = {n: previous[n] for n in previous if n in written["arms"]}
            refuse_other_configs(
                directory, "sweep", common, {n: written["arms"][n] for n in common}
            )
            written["arms"] = previous | written["arms"]
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(written, indent=1), encoding="utf-8")

    @staticmethod
    def name_run(arm: str, seed: int) -> str:
        return f"{arm}-seed{seed}"

    def run(
        self,
        workers: int,
        on_event: warm_pool.EventCallback,
        *,
        first: Sequence[float] = (),
        abandon: bool = True,
    ) -> None:
        """Run the speed probes, then all arms seed by seed.

        Limits in `first` get all their seeds before the others start.
        """
        for limit, config in self.plan.probes.items():
            self.cells.add(f"probe-limit{format_limit(limit)}", config, config.seed)
        blocks = [[x] for x in first] + [[x for x in self.plan.limits if x not in first]]
        for block in blocks:
            for seed in self.seeds:
                arms = [SYNC] + [
                    arm for (_, limit), arm in self.plan.cell.items() if limit in block
                ]
                for arm in dict.fromkeys(arms):
                    self.cells.add(self.name_run(arm, seed), self.plan.arms[arm], seed)
        missing = len(self.cells.list_missing())
        if missing < len(self.cells.configs):
            self.log(
                f"{len(self.cells.configs) - missing} of {len(self.cells.configs)} runs are "
                "finished already"
            )
        self.cells.run(workers, on_event, abandon=abandon)
