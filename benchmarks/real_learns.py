"""Train a pretrained model on this machine: a config of SmolLM2 from start to end.

    asyncrl model get smollm2 models/smollm2
    OMP_NUM_THREADS=1 python benchmarks/real_learns.py models/smollm2 [--config NAME]
        [--set KEY=VALUE ...] [--quick] [--json]

The config runs as in `asyncrl run`.  Proves: held-out accuracy gains more than chance: its 95 %
interval (Wilson) at the end lies above that at the start; the same holds for names that do not
occur in training; the run takes at most an hour, evaluations included; no token is past the
limit.  The run's report is stored with the result.  --quick: 2 steps, few prompts, which proves
nothing of accuracy."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib import rounds
from lib.kept_pages import keep
from lib.results_file import ROOT
from scipy.stats import binomtest

CONFIG = "smollm2_sort"
HOUR_S = 3600.0
QUICK = ("learner.steps=2", "evaluation.final_prompts=8", "evaluation.ood_prompts=8")


def wilson(share: float, count: int) -> list[float]:
    """The 95 % interval of a share of `count`."""
    found = binomtest(round(share * count), count).proportion_ci(method="wilson")
    return [round(float(found.low), 4), round(float(found.high), 4)]


def shares(summary: dict[str, Any]) -> dict[str, Any]:
    """split -> n, and accuracy with its interval at the start and at the end."""
    found: dict[str, Any] = {}
    for split in ("heldout", "ood"):
        count = int(summary["certainty"][split]["n"])
        found[split] = {"n": count}
        for when in ("start", "end"):
            share = float(summary[f"{split}_{when}"])
            found[split][when] = {"share": round(share, 4), "interval": wilson(share, count)}
    return found


def goals(found: dict[str, Any], summary: dict[str, Any], wall_s: float) -> list[dict[str, Any]]:
    """Judge a run's goals; a gain is from the start's upper bound to the end's lower one."""
    out = []
    for split, words in (("heldout", "held out"), ("ood", "names never shown")):
        start, end = found[split]["start"], found[split]["end"]
        gain = end["interval"][0] - start["interval"][1]
        out.append(rounds.goal(f"gain beyond both intervals, {words}", gain, 0, at_least=True))
    lag = summary["lag"]
    return [
        *out,
        rounds.goal("seconds, evaluations included", wall_s, HOUR_S, at_least=False),
        rounds.goal("lag, largest", lag["max"], float(lag["limit"]), at_least=False),
    ]


def run(config: Path, model: Path, work: Path, sets: list[str]) -> tuple[dict[str, Any], float]:
    """The run's summary, and its wall seconds from command to exit."""
    words = [f"model.path={str(model)!r}", f"runs={str(work)!r}", "name='r'", *sets]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", str(config), "--json"]
    argv += [word for each in words for word in ("--set", each)]
    began = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the run ended with {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1]), time.monotonic() - began


def main() -> None:
    parser = rounds.parser(__doc__)
    parser.add_argument("model", type=Path, help="the directory that `asyncrl model get` made")
    parser.add_argument("--config", default=CONFIG, help=f"of configs/; {CONFIG}")
    parser.add_argument(
        "--set", action="append", default=[], help="KEY=VALUE, as `asyncrl run` has it"
    )
    args = parser.parse_args()
    sets = [*(QUICK if args.quick else ()), *args.set]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        config = ROOT / "configs" / f"{args.config}.toml"
        summary, wall_s = run(config, args.model.resolve(), work, sets)
        found = shares(summary)
        kept = ("steps", "tokens", "wall_s", "lag", "speed", "mismatch_k3_max", "ledger")
        result = {
            "config": config.name,
            "set": sets,
            "accuracy": found,
            "seconds": round(wall_s, 1),
            "run": {name: summary[name] for name in kept},
        }
        path = rounds.report(args.config, goals(found, summary, wall_s), result, args)
        if path is not None:
            names = {args.model.resolve(): "models/smollm2", work: "runs", ROOT: "."}
            keep(work / "r" / "report.html", path.with_suffix(".html"), names)


if __name__ == "__main__":
    main()
