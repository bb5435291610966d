"""`asyncrl compare`: the same training under several settings, fairly, and whether they differ.

Every arm gets the same initial weights, prompts in the same order, number of groups and seeds.
Cells (arm, seed) of arms with injected lag run in warm processes (warm_pool.py), and so do
synchronous ones unless an arm at natural lag is to be compared with them for speed; all others are
real runs of their own processes in DIR/runs/ARM-seedN.  A synchronous warm cell's weights are those
of the real run, bitwise.  A finished cell is never repeated, an interrupted one goes on or starts
over."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.experiments.compare import verdict, warm_pool
from asyncrl.experiments.one_process import cold
from asyncrl.records import metrics, signs
from buffer import trained

KL_BATCHES = 20  # at a run's end, over which KL to the reference is averaged
TARGET = 0.9  # of the first arm's accuracy at the end: how soon the others come there
INJECTED = 4  # lag of the default injected arm when the config's limit is 0 or inf
# what no arm may change
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
class Arm:
    """A name and the `--set` items that make it differ."""

    name: str
    sets: list[str]
    same_as: str = ""


@dataclass
class Cell:
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
    # step -> accuracy on out-of-distribution prompts
    ood: dict[float, float] = field(default_factory=dict)
    signs: list[signs.Sign] = field(default_factory=list)

    @property
    def final(self) -> float:
        return float(self.summary["heldout_end"])

    @property
    def ood_start(self) -> float:
        return self.ood.get(self.steps[0], math.nan)

    @property
    def ood_end(self) -> float:
        """Where the last held-out accuracy was measured; nan for a run that ended without it."""
        return self.ood.get(self.steps[-1], math.nan)

    @property
    def area(self) -> float:
        return verdict.area(self.steps, self.accuracy)


def parse_arm(text: str) -> Arm:
    """`NAME:key=value,key=value`; `NAME:` changes nothing; `NAME:same-as=OTHER` repeats an arm.
    Raises ConfigError.
    """
    name, colon, rest = text.partition(":")
    if not colon or not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigError(
            f"--arm {text}: write NAME:key=value,key=value; the name of letters, digits and . + -"
        )
    # A comma inside brackets or quotes belongs to the value.
    items = [x for x in re.split(r",(?=\s*[\w.-]+\s*=)", rest) if x.strip()]
    if len(items) == 1 and items[0].startswith("same-as="):
        return Arm(name, [], items[0].removeprefix("same-as="))
    return Arm(name, items)


def default_arms(config: Config) -> list[Arm]:
    """Synchronous; as configured; without correction; at an injected lag."""
    limit = config.staleness.max_lag
    lag = int(limit) if 0 < limit < math.inf else INJECTED
    plain = ["correction.preset=none", "correction.proximal=recompute", "loss.surrogate=vanilla"]
    on = [f"staleness.max_lag={lag}"] if limit == 0 else []
    return [
        Arm("sync", ["staleness.max_lag=0"]),
        Arm("async", on),
        Arm("async-uncorrected", [*on, *plain]),
        Arm("injected", [f"staleness.max_lag={lag}", f"staleness.inject={lag}"]),
    ]


def resolve(source: str, sets: Sequence[str], arms: Sequence[Arm]) -> dict[str, Config]:
    """name -> config, every mistake found before anything starts.  Raises ConfigError."""
    if len({a.name for a in arms}) < len(arms):
        raise ConfigError(
            "--arm: the name "
            f"{next(a.name for a in arms if [b.name for b in arms].count(a.name) > 1)} is given "
            "twice"
        )
    if len(arms) < 2:
        raise ConfigError("--arm: one arm has nothing to be compared with; give two or more")
    base = load.load(source, sets)
    out: dict[str, Config] = {}
    for a in arms:
        if a.same_as:
            if a.same_as not in out:
                raise ConfigError(
                    f"--arm {a.name}:same-as={a.same_as}: no arm of that name before it; arms: "
                    f"{', '.join(out) or 'none'}"
                )
            out[a.name] = out[a.same_as]
            continue
        for item in a.sets:
            key = item.partition("=")[0].strip()
            if any(key == k or key.startswith(k + ".") for k in SHARED):
                raise ConfigError(
                    f"--arm {a.name}: {key} must be the same in all arms; give it by --set"
                )
        try:
            out[a.name] = load.load(source, [*sets, *a.sets])
        except ConfigError as error:
            raise ConfigError(f"--arm {a.name}: {error}") from error
        if twin := next((n for n, c in out.items() if n != a.name and c == out[a.name]), None):
            raise ConfigError(
                f"--arm {a.name}: resolves to the same config as {twin}; leave one out, or write "
                f"{a.name}:same-as={twin} to mean it"
            )
    del base
    return out


def differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: x, now y` for every leaf that differs."""
    out = []
    for key in sorted({*a, *b}):
        x = a.get(key)
        y = b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            out += differences(x, y, f"{prefix}{key}.")
        elif x != y:
            out.append(f"{prefix}{key}: {x}, now {y}")
    return out


def as_now(arms: dict[str, Any]) -> dict[str, Any]:
    """Configs written earlier, with the defaults of keys that did not exist yet; as they are when a
    key is gone.
    """
    try:
        return {
            n: json.loads(json.dumps(msgspec.to_builtins(msgspec.convert(c, Config))))
            for n, c in arms.items()
        }
    except msgspec.ValidationError:
        return arms


def design(arms: int, seeds: int) -> str:
    """The power of the design, before a run is made."""
    if seeds < 2:
        return "one seed: differences are shown, but no verdict is possible"
    unit = verdict.detectable(1.0, seeds, verdict.LEVEL / max(1, arms - 1))
    return (
        f"{arms} arms x {seeds} seeds: a difference of {unit:.1f} standard deviations between "
        "seeds is found with 80 % power "
        f"(after correction for {arms - 1} arms); at 0.02 between seeds that is {0.02 * unit:.3f} "
        "in accuracy"
    )


class Comparison:
    """A comparison in its directory.  Raises ConfigError when the directory holds another one."""

    def __init__(
        self,
        directory: Path,
        source: str,
        sets: Sequence[str],
        arms: Sequence[Arm],
        seeds: int,
        say: Callable[[str], None],
        *,
        real: bool = False,
    ) -> None:
        self.directory = directory
        self.arms = list(arms)
        self.say = say
        self.configs = resolve(source, sets, arms)
        first = next(iter(self.configs.values()))
        self.seeds = [first.seed + i for i in range(seeds)]
        self.source = source
        self.sets = list(sets)
        self.cells, self.warm = (
            warm_pool.Cells(directory),
            set() if real else warm_arms(self.configs),
        )
        plan = {
            "arms": {
                n: json.loads(json.dumps(msgspec.to_builtins(c))) for n, c in self.configs.items()
            }
        }
        path = directory / "compare.json"
        if path.exists():
            before = json.loads(path.read_text())
            if found := differences(as_now(before["arms"]), plan["arms"]):
                raise ConfigError(
                    f"{directory} holds a comparison with other settings "
                    f"({'; '.join(found[:4])}{' ...' if len(found) > 4 else ''}); "
                    "choose another directory by --out"
                )
        else:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(plan, indent=1))

    def run_dir(self, arm: str, seed: int) -> Path:
        return self.directory / "runs" / f"{arm}-seed{seed}"

    def finished(self, arm: str, seed: int) -> bool:
        if arm in self.warm:
            return self.cells.path(f"{arm}-seed{seed}").exists()
        path = self.run_dir(arm, seed) / "summary.json"
        return (
            path.exists()
            and json.loads(path.read_text())["steps"] >= self.configs[arm].learner.steps
        )

    def run(self, jobs: int, tell: warm_pool.Tell = lambda name, event: None) -> list[Cell]:
        """All cells, seed by seed with the arms in turn: `jobs` real runs at a time.  `tell` hears
        of every run (`warm_pool.Tell`).

        Warm cells, whose wall times nobody compares, take every core that this process may use,
        unless they share a GPU."""
        plan = []
        for i, seed in enumerate(self.seeds):
            names = list(self.configs)
            plan += [(n, seed) for n in names[i % len(names) :] + names[: i % len(names)]]
        todo = [x for x in plan if not self.finished(*x)]
        if len(todo) < len(plan):
            self.say(f"{len(plan) - len(todo)} of {len(plan)} runs are finished already")
        self.say(design(len(self.configs), len(self.seeds)))
        for arm, seed in todo:
            if arm in self.warm:
                self.cells.add(f"{arm}-seed{seed}", self.configs[arm], seed)
        self.cells.run(
            max(
                jobs,
                1 if uses_gpu(next(iter(self.configs.values()))) else len(os.sched_getaffinity(0)),
            ),
            tell,
            abandon=False,
        )
        with ThreadPoolExecutor(jobs) as team:
            real = [x for x in todo if x[0] not in self.warm]
            for (arm, seed), _ in zip(real, team.map(lambda x: self.one(*x), real), strict=True):
                tell(f"{arm}-seed{seed}", {"done": True})
        return [self.read(n, s) for n in self.configs for s in self.seeds]

    def one(self, arm: str, seed: int) -> None:
        """Make one run, from its last checkpoint when an earlier try left one."""
        run_dir = self.run_dir(arm, seed)
        base = importing.command("asyncrl.cli", "run")
        where = [x for a in self.arms if a.name == arm for x in self.sets_of(a)]
        sets = [
            *self.sets,
            *where,
            f"seed={seed}",
            f"runs={str(self.directory / 'runs')!r}",
            f"name={run_dir.name!r}",
        ]
        fresh = [*base, self.source, *[x for s in sets for x in ("--set", s)], "--json"]
        resumable = any(run_dir.glob("checkpoints/epoch_*/number_*/manifest"))
        if run_dir.exists() and not resumable:
            shutil.rmtree(run_dir)
        argv = [*base, "--resume", str(run_dir), "--json"] if resumable else fresh
        log = self.directory / "logs" / f"{run_dir.name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as out:
            code = subprocess.run(
                argv,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                check=False,
                env=os.environ | {"NO_COLOR": "1"},
            ).returncode
        if not self.finished(arm, seed):
            last = [x for x in log.read_text().splitlines() if x.strip()][-1:]
            raise AsyncrlError(
                f"run {run_dir.name} ended with exit code {code}: {' '.join(last)} (log: {log}); "
                "the same command goes on from here"
            )

    def sets_of(self, a: Arm) -> list[str]:
        return (
            self.sets_of(next(b for b in self.arms if b.name == a.same_as)) if a.same_as else a.sets
        )

    def read(self, arm: str, seed: int) -> Cell:
        if arm in self.warm:
            return warm_cell(arm, seed, self.cells.read(f"{arm}-seed{seed}"), self.configs[arm])
        run_dir = self.run_dir(arm, seed)
        cell = Cell(arm, seed, json.loads((run_dir / "summary.json").read_text()))
        every = metrics.read(run_dir)
        # after a resume the later row of a step wins
        by_step = {r["step"]: r for r in every if "reward/mean" in r}
        cell.rows = [by_step[s] for s in sorted(by_step)]
        points = {r["step"]: r["eval/heldout"] for r in every if "eval/heldout" in r}
        cell.steps = [float(s) for s in sorted(points)]
        cell.accuracy = [points[s] for s in sorted(points)]
        cell.ood = {float(r["step"]): r["eval/ood"] for r in every if "eval/ood" in r}
        cell.trouble = verdict.stability(cell.accuracy, cell.rows)
        cell.signs = [signs.Sign(**s) for s in cell.summary.get("signs", [])]
        cell.batches = [
            (r.ids, r.tickets) for _, r in sorted(trained.read(run_dir / "trained.jsonl").items())
        ]
        return cell


def warm_arms(configs: dict[str, Config]) -> set[str]:
    """Arms for warm processes: injected lag; synchronous too when no arm at natural lag needs their
    wall time to be compared with.

    A reward function of the user's own may be slow, and a warm process waits for each answer's:
    such arms run as real processes."""
    able = {n for n, c in configs.items() if not cold(c) and not c.reward.function}
    injected = {n for n in able if configs[n].staleness.inject is not None}
    sync = {n for n, c in configs.items() if c.staleness.max_lag == 0}
    return injected | ((sync & able) if len(injected | sync) == len(configs) else set())


def uses_gpu(config: Config) -> bool:
    """Whether `model.device` comes to a GPU on this machine."""
    if config.model.device == "auto":
        import torch

        return torch.cuda.is_available()
    return config.model.device != "cpu"


def warm_signs(cell: Cell, config: Config) -> list[signs.Sign]:
    """What `asyncrl run` would say of a warm run, as far as its record goes."""
    error = config.evaluation
    ends = (cell.steps[0], cell.steps[-1])
    rows = [
        {
            "step": s,
            "eval/heldout": x,
            "eval/heldout_n": error.final_prompts if s in ends else error.prompts,
        }
        for s, x in zip(cell.steps, cell.accuracy, strict=True)
    ]
    rows += [
        {
            "step": s,
            "eval/ood": x,
            "eval/ood_n": error.ood_prompts if s in ends else min(error.prompts, error.ood_prompts),
        }
        for s, x in cell.ood.items()
    ]
    return signs.signs(
        [*rows, *cell.rows], signs.About(config), ended=cell.steps[-1] >= config.learner.steps
    )


def warm_cell(arm: str, seed: int, record: dict[str, Any], config: Config) -> Cell:
    """A record of `serial.one` in the words of a run's summary and metrics."""
    steps, accuracy = record["accuracy"]
    lags = {int(k): n for k, n in record["lag_histogram"].items()}
    tokens = sum(lags.values())
    summary = {
        "heldout_start": accuracy[0],
        "heldout_end": accuracy[-1],
        "wall_s": record["wall_s"],
        "tokens": tokens,
        "ledger": {"generated": sum(x["tokens"] for x in record["ledger_lines"].values())},
        "weights_digest": record["weights_digest"],
        "lag": {
            "mean": sum(k * n for k, n in lags.items()) / max(tokens, 1),
            "max": max(lags, default=0),
        },
        "trained_ids": record["trained_ids"],
    }
    rows = [
        {"step": r["version"] - 1} | {k: x for k, x in r.items() if k != "version"}
        for r in record["curve"]
    ]
    trouble = verdict.stability(accuracy, rows) + (
        [f"failed: {record['failed']}"] if record.get("failed") else []
    )
    batches = [(str(b["ids"]), b["tickets"]) for b in record.get("batches", ())]
    # a record of an older version has none
    ood = dict(zip(*record.get("ood", ([], [])), strict=True))
    cell = Cell(arm, seed, summary, steps, accuracy, rows, trouble, batches, warm=True, ood=ood)
    cell.signs = warm_signs(cell, config)
    return cell


def signs_of(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Sign -> what each run that has it says."""
    out: dict[str, list[str]] = {}
    for c in cells:
        for sign in c.signs:
            out.setdefault(sign.name, []).append(sign.line())
    return out


def signs_told(arm: str, found: Mapping[str, Sequence[str]], runs: int) -> list[str]:
    """A line for each sign of an arm: how many of its runs have it, and what one of them says."""
    return [
        f"{arm}: {name} in {len(said)} of {runs} runs: {said[0]}" for name, said in found.items()
    ]


def data_apart(a: Cell, b: Cell) -> str:
    """How far the samples that two runs trained differ, in words; empty: they are the same, in the
    same order.
    """
    if a.summary["trained_ids"] == b.summary["trained_ids"]:
        return ""
    first = next(
        (i for i, (x, y) in enumerate(zip(a.batches, b.batches, strict=False)) if x[0] != y[0]),
        min(len(a.batches), len(b.batches)),
    )
    mine, other = (
        {t for _, runs in c.batches for low, high in runs for t in range(low, high + 1)}
        for c in (a, b)
    )
    if not mine or not other:
        return "other samples"
    return (
        f"{len(mine & other) / max(len(mine), len(other)):.0%} of the groups in common, in "
        f"other batches from number {first} on"
    )


# ---- what it says --------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def known(values: Iterable[float]) -> list[float]:
    """Those that are numbers."""
    return [x for x in values if not math.isnan(x)]


def reference_kl(rows: Sequence[Mapping[str, Any]]) -> float:
    """KL(target || reference) at a run's end, k3, nats a token: mean over its last KL_BATCHES
    batches.

    Without a KL term it is measured every record.reference_kl_every batches: where that leaves
    none among them, the last one measured; nan without any.  rows: one a batch.
    """
    every = [float(r["kl/target_ref_k3"]) for r in rows if "kl/target_ref_k3" in r]
    late = [float(r["kl/target_ref_k3"]) for r in rows[-KL_BATCHES:] if "kl/target_ref_k3" in r]
    return mean(late or every[-1:])


def cause(config: Config, trouble: Sequence[str]) -> str:
    """The likely cause of an unstable arm, where its configuration is a known one."""
    c = config
    if not trouble:
        return ""
    if c.kl.reward.coefficient > 0 and c.kl.reward.estimator == "k3":
        return "k3 in the reward is known to collapse: use k1 in the reward or k3 in the loss"
    lagged = c.staleness.max_lag > 0
    if (
        lagged
        and c.correction.level == "none"
        and c.loss.surrogate in ("vanilla", "decoupled_ppo")
        and c.correction.proximal == "recompute"
    ):
        return (
            "stale samples without correction: anchor PPO on the behaviour policy, or set "
            "correction.preset = tis"
        )
    if lagged and c.staleness.max_lag >= 8:
        return "a large lag: lower staleness.max_lag or learner.lr"
    return "lower learner.lr, or set stop.kl_max with more than one optimizer step a batch"


def analyse(cells: Sequence[Cell], configs: dict[str, Config]) -> dict[str, Any]:
    """Everything the report and `--json` say.  The first arm is what the others are compared
    with.
    """
    names = list(configs)
    seeds = sorted({c.seed for c in cells})
    of = {n: sorted((c for c in cells if c.arm == n), key=lambda c: c.seed) for n in names}
    base = names[0]
    prompts = configs[names[0]].evaluation.final_prompts
    target = TARGET * mean([c.final for c in of[base]])
    arms = {n: about(of[n], configs[n], target) for n in names}
    verdicts: list[dict[str, Any]] = []

    def judge(metric: str, what: str, value: Callable[[Cell], float], n_prompts: int) -> None:
        found = {
            n: verdict.paired([value(c) for c in of[n]], [value(c) for c in of[base]], n_prompts)
            for n in names[1:]
        }
        verdict.holm(found)
        for n, d in found.items():
            same = all(
                a.summary["weights_digest"] == b.summary["weights_digest"]
                for a, b in zip(of[n], of[base], strict=True)
            )
            word = (
                "equal"
                if same
                else (
                    "no difference visible"
                    if not d.different
                    else ("better" if d.mean > 0 else "worse")
                )
            )
            verdicts.append(
                {
                    "arm": n,
                    "against": base,
                    "metric": metric,
                    "difference": d.mean,
                    "interval": [d.low, d.high],
                    "verdict": word,
                    "p": d.adjusted,
                    "interval_other_prompts": [d.prompt_low, d.prompt_high],
                    "detectable": verdict.detectable(d.sd, d.seeds),
                    "text": f"{n} is bitwise equal to {base}"
                    if same
                    else verdict.verdict(n, base, d, what),
                }
            )

    judge("heldout_end", "final accuracy", lambda c: c.final, prompts)
    judge("area", "mean accuracy over training", lambda c: c.area, 0)
    if len(known(c.ood_end for c in cells)) == len(cells):
        judge(
            "ood_end",
            "out-of-distribution accuracy",
            lambda c: c.ood_end,
            configs[base].evaluation.ood_prompts,
        )
    apart = {n: [data_apart(a, b) for a, b in zip(of[n], of[base], strict=True)] for n in names[1:]}
    data = {n: [not x for x in found] for n, found in apart.items()}
    trade = []
    for n in names[1:]:
        speed = arms[base]["wall_s"] / max(arms[n]["wall_s"], 1e-9)
        alike = not arms[n]["warm"] and not arms[base]["warm"]
        said = (
            f"{speed:.2f} times the speed of {base}"
            if alike
            else "run in a warm process by turns, so its speed says nothing"
        )
        trade.append(
            f"{n}: {said}, accuracy {arms[n]['heldout_end'] - arms[base]['heldout_end']:+.3f}; "
            f"{reached(arms[n], arms[base], base, alike)}"
        )
    return {
        "arms": arms,
        "verdicts": verdicts,
        "seeds": seeds,
        "same_data": data,
        "data_apart": apart,
        "trade": trade,
    }


def reached(arm: dict[str, Any], base: dict[str, Any], name: str, timed: bool) -> str:
    """When an arm came to the accuracy asked for, beside the base."""
    goal = f"{arm['target']:.3f}"
    missed = len(arm["each"]) - arm["reached"]
    if not arm["reached"] or not base["reached"]:
        return f"accuracy {goal} was never reached" + (
            "" if arm["reached"] == base["reached"] else f" by {name}" if arm["reached"] else ""
        )
    what = (
        f"accuracy {goal} at batch {arm['steps_to_target']:.0f} ({name} "
        f"{base['steps_to_target']:.0f})"
    )
    what += (
        f", after {arm['seconds_to_target']:.0f} s ({base['seconds_to_target']:.0f})"
        if timed
        else ""
    )
    return what + (f", never in {missed} of {len(arm['each'])} runs" if missed else "")


def about(cells: Sequence[Cell], config: Config, target: float) -> dict[str, Any]:
    """One arm over its seeds.  target: the accuracy whose time is asked for, over the runs that
    reach it.
    """

    def when(c: Cell) -> tuple[float, float]:
        """Batch and seconds of the first evaluation at the target or above; nan: never."""
        step = next((s for s, a in zip(c.steps, c.accuracy, strict=True) if a >= target), math.nan)
        return step, next(
            (float(r["t"]) for r in c.rows if r["step"] >= min(step, c.rows[-1]["step"])), math.nan
        ) if step == step else math.nan

    times = [x for x in map(when, cells) if x[0] == x[0]]
    trouble = sorted({x.split(":")[0] for c in cells for x in c.trouble})
    return {
        "heldout_start": mean([float(c.summary["heldout_start"]) for c in cells]),
        "heldout_end": mean([c.final for c in cells]),
        "ood_start": mean(known(c.ood_start for c in cells)),
        "ood_end": mean(known(c.ood_end for c in cells)),
        "ood_each": [c.ood_end for c in cells],
        "kl_ref": mean(known(reference_kl(c.rows) for c in cells)),
        "each": [c.final for c in cells],
        "area": mean([c.area for c in cells]),
        "wall_s": mean([c.summary["wall_s"] for c in cells]),
        "tokens": mean([c.summary["tokens"] for c in cells]),
        "generated": mean([c.summary["ledger"]["generated"] for c in cells]),
        "tokens_per_s": mean([c.summary["tokens"] / max(c.summary["wall_s"], 1e-9) for c in cells]),
        "lag": mean([c.summary["lag"]["mean"] for c in cells]),
        "lag_max": max(c.summary["lag"]["max"] for c in cells),
        "ess": mean([r["is/target_ess"] for c in cells for r in c.rows if "is/target_ess" in r]),
        "target": target,
        "reached": len(times),
        "steps_to_target": mean([x for x, _ in times]),
        "seconds_to_target": mean([x for _, x in times]),
        "unstable": sum(bool(c.trouble) for c in cells),
        "trouble": trouble,
        "cause": cause(config, trouble),
        "signs": signs_of(cells),
        "weights_digests": [c.summary["weights_digest"] for c in cells],
        "warm": all(c.warm for c in cells),
    }
