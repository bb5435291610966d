"""Compare `asyncrl simulate` with real runs: times fitted to one run predict other settings.

In every round one run of configs/demo.toml (limit 2) is fitted; then runs with other settings are
made, and predicted with the times of the first: lag histograms (total variation) and idle shares
(points).  The difference of two real runs of the same settings, from round to round, is reported
too: the machine is shared, and no prediction can be better than a repetition.

The predicted processes share as many cores as this process may use.  The fitted run ends with the
evaluation of the config, whose decode calls are beside no update: few others tell how much the two
sides slow each other down.  With slow rewards that evaluation is small."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib import rounds

ROOT = rounds.results_file.ROOT
MOST_TV = 0.15
MOST_POINTS = 5.0
CALLS = 3072  # of the slow reward: as many as a run makes, or its tail is missed
SEEDS = 5  # of a prediction
SMALL = [
    "evaluation.every=0",
    "evaluation.ood_prompts=0",
    "record.samples=0",
]
SLOW = [
    "reward.function='benchmarks.lib.slow_reward:waiting'",
    "reward.workers=32",
    "learner.groups=8",
    "generator.slots=64",
    "staleness.max_lag=4",
    "evaluation.final_prompts=64",
]
BASE = "limit 2 (fitted)"
RUNS: dict[str, list[str]] = {
    BASE: [],
    "synchronous": ["staleness.max_lag=0"],
    "limit 1": ["staleness.max_lag=1"],
    "limit 6": ["staleness.max_lag=6"],
    "2 generators": ["generators=2"],
    "slow reward, limit 4": SLOW,
    "slow reward, synchronous": [*SLOW, "staleness.max_lag=0"],
}


def real(
    work: Path, name: str, model: Path, steps: int, sets: list[str], seed: int
) -> dict[str, Any]:
    """One real run: its lag histogram (shares of the trained tokens), idle shares, seconds a
    step.
    """
    every = [
        f"runs={str(work)!r}",
        f"name={name!r}",
        f"model.path={str(model)!r}",
        f"learner.steps={steps}",
        f"seed={seed}",
        *SMALL,
        *sets,
    ]
    argv = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "run",
        "configs/demo.toml",
        "--json",
        *[x for s in every for x in ("--set", s)],
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not (work / name / "summary.json").exists():
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        (work / name / "load").write_text(str(os.getloadavg()[0]))
    s = json.loads((work / name / "summary.json").read_text())
    tokens = sum(s["lag_histogram"].values())
    return {
        "lag": {int(k): n / tokens for k, n in s["lag_histogram"].items()},
        "idle_generator": s["speed"]["idle_share"]["generator"],
        "idle_learner": s["speed"]["idle_share"]["learner"],
        "step_s": s["wall_s"] / s["steps"],
        "load": float((work / name / "load").read_text()),
    }


def reward_times(work: Path, model: Path) -> list[float]:
    """The time of a call of the slow reward, measured by itself: in as many processes as the runs
    have, on answers of its task.
    """
    from actors.rewards import RewardRunner
    from asyncrl.config.load import load
    from asyncrl.tasks import get_task

    if (work / "reward_s.json").exists():
        return [float(x) for x in json.loads((work / "reward_s.json").read_text())]
    config = load(ROOT / "configs" / "demo.toml", [f"model.path={str(model)!r}", *SLOW])
    task = get_task(config.task)
    found = list[float]()
    runner = RewardRunner(config, task)
    runner.timed = lambda name, began, ended, answers: found.append(round(ended - began, 4))
    while not all(p.ready for p in runner.processes):
        runner.poll()
        time.sleep(0.01)
    for i in range(CALLS):
        prompt = task.prompt("heldout", i, 0)
        runner.submit((i, 0, 0), prompt, prompt.answer, [0])
    done = 0
    while done < CALLS:
        done += len(runner.poll())
        time.sleep(0.01)
    runner.close()
    (work / "reward_s.json").write_text(json.dumps(found))
    return found


def predicted(config: Any, times: Any, seeds: int) -> dict[str, Any]:
    from asyncrl.experiments.simulate.what_if import average_outcomes, simulate_seeds

    o = average_outcomes(simulate_seeds(config, times, seeds))
    return {
        "lag": {int(k): x for k, x in o["lag_histogram"].items()},
        "idle_generator": o["idle_generator"],
        "idle_learner": o["idle_learner"],
        "step_s": o["step_s"],
        "took_s": o["took_s"],
    }


def apart(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    """Total variation of the lag histograms; idle shares in points; steps as a ratio b / a."""
    keys = {*a["lag"], *b["lag"]}
    return {
        "tv": sum(abs(a["lag"].get(k, 0) - b["lag"].get(k, 0)) for k in keys) / 2,
        "generator_points": 100 * (b["idle_generator"] - a["idle_generator"]),
        "learner_points": 100 * (b["idle_learner"] - a["idle_learner"]),
        "step_ratio": b["step_s"] / a["step_s"],
    }


def one_round(
    work: Path, r: int, model: Path, steps: int, names: list[str], slow: list[float]
) -> dict[str, Any]:
    from asyncrl.config.load import load
    from asyncrl.experiments.simulate.times import change, fit

    out: dict[str, Any] = {}
    others = [n for n in names if n != BASE]
    for name in [BASE, *(others if r % 2 == 0 else reversed(others))]:
        place = f"r{r}_{list(RUNS).index(name)}"
        found = real(work, place, model, steps, RUNS[name], r)
        if name == BASE:
            times = change(fit(work / place), cores=len(os.sched_getaffinity(0)))
            out["times"] = {
                k: getattr(times, k)
                for k in (
                    "step",
                    "row",
                    "admit",
                    "look",
                    "finish",
                    "beside",
                    "cores",
                    "train_tokens",
                )
            }
        known = change(times, reward=slow) if name.startswith("slow") else times
        guess = predicted(load(work / place / "config.toml"), known, SEEDS)
        out[name] = {"real": found, "predicted": guess, "apart": apart(found, guess)}
        a = out[name]["apart"]
        print(
            f"round {r}, {name}: total variation {a['tv']:.3f}, generators "
            f"{a['generator_points']:+.1f} and learner {a['learner_points']:+.1f} points, "
            f"step {a['step_ratio']:.2f} of the real one; load {found['load']:.0f}",
            file=sys.stderr,
        )
    return out


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100) if len(values) > 1 else []
    return (
        {
            "calls": len(values),
            "mean": statistics.mean(values),
            "p50": cuts[49],
            "p99": cuts[98],
            "max": max(values),
        }
        if cuts
        else {}
    )


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--model", default="", help="a warm-started `sort` model; absent: built")
    p.add_argument(
        "--work", type=Path, help="keep the runs here; those already there are not made again"
    )
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    args = p.parse_args()
    n, steps = (1, 15) if args.quick else (args.rounds, args.steps)
    names = [BASE, "synchronous"] if args.quick else list(dict.fromkeys([BASE, *args.runs]))
    with tempfile.TemporaryDirectory() as temporary:
        tmp = args.work or Path(temporary)
        tmp.mkdir(parents=True, exist_ok=True)
        model = Path(args.model).resolve() if args.model else tmp / "model"
        if not model.exists():
            from asyncrl.config.load import load
            from asyncrl.tasks.warm_start import warm_start

            warm_start(
                load(ROOT / "configs" / "demo.toml", [f"model.path={str(model)!r}"]), str(model)
            )
        slow = reward_times(tmp, model) if any(x.startswith("slow") for x in names) else []
        rows = [one_round(tmp, r, model, steps, names, slow) for r in range(n)]
    goals = []
    repeats = {}
    for name in names:
        found = [row[name]["apart"] for row in rows]
        pairs = [
            apart(a[name]["real"], b[name]["real"]) for a, b in itertools.combinations(rows, 2)
        ]
        repeats[name] = pairs
        median = {
            k: statistics.median(abs(f[k]) for f in found)
            for k in ("tv", "generator_points", "learner_points")
        }
        again = {
            k: round(statistics.median(abs(x[k]) for x in pairs), 3) if pairs else None
            for k in median
        }
        for key, what, most in (
            ("tv", "lag, total variation", MOST_TV),
            ("generator_points", "generators' idle share, points", MOST_POINTS),
            ("learner_points", "learner's idle share, points", MOST_POINTS),
        ):
            each = [round(f[key], 3) for f in found]
            goals.append(
                rounds.goal(
                    f"{name}: {what}",
                    median[key],
                    most,
                    at_least=False,
                    rounds=each,
                    repetition=again[key],
                )
            )
    result = {
        "what": f"real runs of {steps} steps; predicted with the times of the round's own "
        f"first run; medians over {n} rounds",
        "rounds": rows,
        "reward_s": spread(slow),
        "repetitions": repeats,
    }
    rounds.report("simulate", goals, result, args)


if __name__ == "__main__":
    main()
