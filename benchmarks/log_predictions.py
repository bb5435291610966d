"""Predict steps of other settings from the log of one run alone, for TRL and for our own runs.

    python benchmarks/log_predictions.py MODEL_DIR [--trl-python PYTHON] [--rounds 3] [--steps 48]
        [--logs DIR] [--quick] [--json]

In every round TRL's GRPOTrainer trains a warm-started `sort` model with four settings.  `asyncrl
simulate` reads the trainer_state.json of the first and predicts a step of the others.  Then our
synchronous run is made, and its files predict runs with a limit of 2, with one and two generators.
A step of TRL is a generation with its updates; the median over a run without its first step is
compared.  The processes share the machine, so ratios of one round belong together.

--logs: where the runs are kept; a run that is there is not made again."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import simulate as own_runs
import trl_diagnose
from lib import results_file, rounds

SIZE = trl_diagnose.SIZE
FITTED = "8 groups, 4 updates"
# groups of an update, updates of a generation, most tokens; and the question that predicts it
SETTINGS: dict[str, tuple[int, int, int, dict[str, list[float]]]] = {
    FITTED: (8, 4, 56, {}),
    "16 groups": (16, 4, 56, {"groups": [64]}),
    "8 updates": (8, 8, 56, {"groups": [64]}),
    "24 tokens": (8, 4, 24, {"tokens": [24]}),
}
# our runs: the settings of a run of benchmarks/simulate.py, and the questions that predict it
OWN: dict[str, tuple[str, dict[str, list[float]]]] = {
    "synchronous": ("synchronous", {}),
    "limit 2": (own_runs.BASE, {"limits": [2]}),
    "limit 2, 2 generators": ("2 generators", {"limits": [2], "added_generators": [1]}),
}
MOST = 1.25  # of a predicted step over the real one, or the other way round


def run_trl(name: str, seed: int, args: argparse.Namespace, folder: Path) -> Path:
    """Train in a process of its own; return its log."""
    groups, updates, most, _ = SETTINGS[name]
    out = folder / f"{name.replace(' ', '-').replace(',', '')}-{seed}"
    environment = os.environ | {"PYTHONPATH": str(results_file.ROOT), "OMP_NUM_THREADS": "1"}
    settings = json.dumps([args.model, str(out), seed, args.steps, groups, updates, most])
    if not (out / "trainer_state.json").exists():
        argv = [args.trl_python, __file__, "-", "--train", settings]
        subprocess.run(argv, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    return out / "trainer_state.json"


def measure_step(log: Path) -> float:
    """Return the median seconds of a generation with its updates, without the first."""
    rows = [row for row in json.loads(log.read_text())["log_history"] if "step_time" in row]
    starts = [i for i, row in enumerate(rows) if "completions/mean_length" in row]
    ends = [*starts[1:], len(rows)]
    turns = [
        sum(row["step_time"] for row in rows[start:end])
        for start, end in zip(starts, ends, strict=True)
    ]
    return float(statistics.median(turns[1:]))


def predict_trl(log: Path) -> dict[str, dict[str, Any]]:
    """Predict the settings from the log of the first: seconds of a step, and their range."""
    from asyncrl.config.load import load
    from asyncrl.experiments import diagnose
    from asyncrl.experiments.simulate import times, what_if

    read = diagnose.read(log)
    sets = [*times.list_settings(read), "learner.groups=32", f"learner.group_size={SIZE}"]
    sets += ["learner.steps=16"]
    config = load(results_file.ROOT / "configs" / "demo.toml", [*sets, "generator.slots=512"])
    models, text = times.fit_log(read, config)
    print(text, file=sys.stderr)

    def simulate(config: Any, seeds: int = own_runs.SEEDS, **changes: Any) -> Any:
        return what_if.simulate_seeds(config, models, seeds, evaluate=False, **changes)

    base = simulate(config)
    known = statistics.fmean(x["step_s"] for x in base)
    predicted: dict[str, dict[str, Any]] = {FITTED: {"step_s": known}}
    for name, (*_, question) in SETTINGS.items():
        for answer in what_if.answer_questions(config, simulate, base, question):
            spread = [known * answer[key] for key in ("step_least", "step_largest")]
            predicted[name] = {"step_s": known * answer["step_ratio"], "range": spread}
    return predicted


def predict_own(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Predict the runs of OWN from the files of a synchronous run."""
    from asyncrl.config import load
    from asyncrl.experiments.simulate import times, what_if

    config = load.load(run_dir / "config.toml")
    model = times.change(times.fit(run_dir), cores=len(os.sched_getaffinity(0)))

    def simulate(config: Any, seeds: int = own_runs.SEEDS, **changes: Any) -> Any:
        return what_if.simulate_seeds(config, model, seeds, **changes)

    base = simulate(config)
    predicted = {}
    for name, (_, questions) in OWN.items():
        answers = what_if.answer_questions(config, simulate, base, questions)
        predicted[name] = answers[-1]["outcome"] if answers else what_if.average_outcomes(base)
    return {name: {key: x[key] for key in ("step_s", "lag_mean")} for name, x in predicted.items()}


def run_round(number: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the runs of a round and predict all but the first of each kind from it."""
    names = [FITTED, *sorted({*SETTINGS} - {FITTED}, reverse=bool(number % 2))]
    steps = {name: measure_step(run_trl(name, number, args, folder)) for name in names}
    found: dict[str, Any] = {f"TRL, {name}": {"step_s": step} for name, step in steps.items()}
    predictions = predict_trl(run_trl(FITTED, number, args, folder))
    predicted: dict[str, Any] = {f"TRL, {name}": x for name, x in predictions.items()}
    model = Path(args.model).resolve()
    for name, (settings, _) in OWN.items():
        place, sets = f"own{number}_{list(OWN).index(name)}", own_runs.RUNS[settings]
        found[name] = own_runs.real(folder, place, model, args.steps, sets, number)
        found[name]["lag_mean"] = sum(lag * share for lag, share in found[name]["lag"].items())
        if name == "synchronous":
            predicted |= predict_own(folder / place)
    for name, real in found.items():
        ratio = predicted[name]["ratio"] = predicted[name]["step_s"] / real["step_s"]
        load = os.getloadavg()[0]
        print(f"round {number}, {name}: {ratio:.2f}, load {load:.0f}", file=sys.stderr)
    return {"real": found, "predicted": predicted, "load": os.getloadavg()[0]}


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("model", help="a warm-started model for the task `sort`")
    p.add_argument("--trl-python", default=sys.executable, help="one with the extra `bench`")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=48)
    p.add_argument("--logs", type=Path, help="kept there; absent: in a temporary directory")
    p.add_argument("--train", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.train is not None:
        model, out, *numbers = json.loads(args.train)
        return trl_diagnose.train("", Path(model), Path(out), *numbers)
    if args.quick:
        args.rounds, args.steps = 1, 16
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        made = [run_round(number, args, folder) for number in range(args.rounds)]
    goals = []
    for name in made[0]["predicted"]:
        ratios = [row["predicted"][name]["ratio"] for row in made]
        middle = statistics.median(ratios)
        text = (
            f"{name}: predicted step over the real one, {middle:.2f}; the larger over the smaller"
        )
        shown = [round(ratio, 3) for ratio in ratios]
        largest = max(middle, 1 / middle)
        goals.append(rounds.goal(text, largest, MOST, at_least=False, rounds=shown))
    result = {
        "what": "steps predicted from the log of one run of TRL 1.16.0, and of one synchronous run",
        "steps": args.steps,
        "rounds": made,
    }
    rounds.report("log_predictions", goals, result, args)


if __name__ == "__main__":
    main()
