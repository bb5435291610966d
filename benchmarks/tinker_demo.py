"""The learning curve of the cookbook's math_rl recipe on `asyncrl tinker` with its demo config.

    python benchmarks/tinker_demo.py [--python cookbook/bin/python] [--steps 40] [--quick] [--json]

Starts the server in a directory that is removed afterwards, with the demo model of this directory
if it has one, and runs the unmodified recipe with the command of docs/tinker.md: first synchronous,
then with max_steps_off_policy=2. --python: of an environment with tinker-cookbook, by default that
of `make clients`. --quick: three steps, and no result file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib import results_file
from lib.results_file import ROOT

CONFIG = ROOT / "configs" / "examples" / "tinker_demo.toml"
RECIPE = (
    *("-m", "tinker_cookbook.recipes.math_rl.train", "env=arithmetic", "renderer_name=role_colon"),
    *("groups_per_batch=16", "group_size=8", "lora_rank=32", "learning_rate=3e-4"),
    *("eval_every=0", "save_every=0"),
)
FORMS: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "off_policy": ("max_steps_off_policy=2", "loss_fn=ppo"),
}
SHOWN = 10  # steps at each end of a curve that are averaged


def start_server(folder: Path) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Return the server's process, and the variables that it prints for clients."""
    model = ROOT / "models" / "tinker_demo"
    if model.exists():
        shutil.copytree(model, folder / "models" / "tinker_demo")
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncrl.cli", "tinker", str(CONFIG), "--set", "server.port=0"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    words = process.stdout.readline().split()[1:]
    if not words:
        sys.exit("the server did not start")
    return process, dict(word.split("=", 1) for word in words)


def run_recipe(
    python: str, folder: Path, variables: dict[str, str], name: str, steps: int
) -> dict[str, Any]:
    """Run the recipe, and return its curves."""
    log = folder / name
    began = time.monotonic()
    ended = subprocess.run(
        [
            *(python, *RECIPE, f"model_name={folder}/models/tinker_demo"),
            *(f"base_url={variables['TINKER_BASE_URL']}", f"log_path={log}"),
            *(f"max_steps={steps}", *FORMS[name]),
        ],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        | variables
        | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        sys.exit(f"the recipe failed:\n{ended.stderr[-4000:]}")
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    lags = [row[key] for row in rows for key in row if key.endswith("lag_max")]
    return {
        "correct": [round(row["env/all/correct"], 4) for row in rows if "env/all/correct" in row],
        "lag_max": max(lags, default=None),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=f"{sys.prefix}/cookbook/bin/python")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    steps = 3 if args.quick else args.steps
    result: dict[str, Any] = {"steps": steps, "recipe": list(RECIPE), "forms": FORMS, "curves": {}}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        server, variables = start_server(folder)
        try:
            for name in FORMS:
                curve = run_recipe(args.python, folder, variables, name, steps)
                result["curves"][name] = curve
                first, last = (
                    sum(part) / len(part)
                    for part in (curve["correct"][:SHOWN], curve["correct"][-SHOWN:])
                )
                print(
                    f"{name}: correct {first:.3f} in the first {SHOWN} steps, {last:.3f} in the "
                    f"last {SHOWN}; largest lag {curve['lag_max']}; {curve['seconds']} s",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
        note = json.loads((folder / "models" / "tinker_demo" / "warm_start.json").read_text())
    result["warm_start"] = note
    if not args.quick:
        print(results_file.write("tinker_demo", result), file=sys.stderr)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
