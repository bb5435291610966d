"""Measure engine, learner and whole steps on one GPU at the sizes of real models.

    python benchmarks/gpu_bench.py [--out DIR] [--only PART ...] [--scale tiny|full] [--patience N]

Models have the shapes of Qwen3-0.6B and 1.7B and random weights; completions have 512 tokens in
the mean and at most 2,048, groups of 8.  Each part runs in a process of its own with a time limit
and writes DIR/PART.json as soon as it ends; DIR/result.json has the ratios of all parts that DIR
holds, so a second call with --only adds to the first.  All parts together take 8 minutes.  It
needs what `make gpu-check` needs, and no network.

Ratios and their goals on one H100, 0.5B:
  engine / generate      tokens a second over transformers' generate with a static cache
  engine / bandwidth     weights, keys and values read in each forward pass, over a copy's rate
  learner / peak         6 FLOP a weight and position, over the rate of a matrix product
  asynchronous / synchronous   time of a step, limit 2 and limit 0, answers with a long tail
  shared / synchronous   the same, engine and learner in one process (SerialRun) at limit 2
  shared / asynchronous  below 1, one process is faster than two on this GPU
  swap / step            time to load a version into the engine, over an asynchronous step"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from gpu_check import Outcome, installed_versions, run_isolated
from lib import results_file, rounds

TOTAL_S = 480.0
# part -> its time limit in seconds; the most telling first, which TOTAL_S holds at their limits
PARTS = {
    "peaks 0.5B": 30.0,
    "engine 0.5B": 60.0,
    "learner 0.5B": 60.0,
    "synchronous 0.5B": 110.0,
    "asynchronous 0.5B": 110.0,
    "shared 0.5B": 110.0,
    "generate 0.5B": 80.0,
    "plain learner 0.5B": 60.0,
    "engine 1.5B": 60.0,
    "learner 1.5B": 60.0,
    "continuous batching 0.5B": 80.0,
}


def run_parts(args: argparse.Namespace, device: str, scale: str, work: Path) -> None:
    """Run the parts one after another, within TOTAL_S."""
    end = time.monotonic() + args.patience * TOTAL_S
    program = [sys.executable, str(Path(__file__).resolve()), "--out", str(args.out)]
    for name in args.only or PARTS:
        limit = min(args.patience * PARTS[name], end - time.monotonic())
        command = [*program, "--part", name, "--device", device, "--scale", scale]
        outcome = (
            run_isolated([*command, "--work", str(work)], limit)
            if limit > 0
            else Outcome({}, "not run: the time of all parts is over", 0.0, "")
        )
        row = {"part": name, "error": outcome.error, "seconds": round(outcome.seconds, 1)}
        row |= outcome.result | ({"log": outcome.log} if outcome.error else {})
        (args.out / f"{name.replace(' ', '_')}.json").write_text(json.dumps(row, indent=1))
        figures = {k: f"{v:.4g}" for k, v in outcome.result.items() if isinstance(v, int | float)}
        print(f"{name:25} {outcome.seconds:6.1f} s  {outcome.error or figures}", flush=True)


def compute_goals(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratios whose parts have run, each with its goal."""

    def read(part: str, key: str) -> float:
        return float(rows.get(f"{part} 0.5B", {}).get(key) or 0.0)

    def divide(above: float, below: float) -> float:
        return above / below if below else 0.0

    def goal(name: str, value: float, target: float, *, at_least: bool) -> None:
        if value:
            goals.append(rounds.goal(name, value, target, at_least=at_least))

    goals: list[dict[str, Any]] = []
    engine = read("engine", "tokens_per_s")
    read_bytes = read("engine", "weight_bytes") + read("engine", "cache_bytes")
    read_s = divide(read_bytes, read("peaks", "bytes_per_s"))
    flop = 6 * read("learner", "parameters") * read("learner", "positions_per_s")
    step = read("asynchronous", "step_s")
    goal("engine / generate", divide(engine, read("generate", "tokens_per_s")), 5, at_least=True)
    goal("engine / bandwidth", read("engine", "passes_per_s") * read_s, 0.5, at_least=True)
    goal("learner / peak", divide(flop, read("peaks", "flop_per_s")), 0.4, at_least=True)
    for above, below, target in (
        ("asynchronous", "synchronous", 0.6),
        ("shared", "synchronous", 0.6),
        ("shared", "asynchronous", 1.0),
    ):
        ratio = divide(read(above, "step_s"), read(below, "step_s"))
        goal(f"{above} / {below}", ratio, target, at_least=False)
    goal("swap / step", divide(read("engine", "swap_s"), step), 0.01, at_least=False)
    return goals


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu-bench"), help="folder of the results"
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--scale", choices=["tiny", "full"], help="default: full on a GPU")
    parser.add_argument("--patience", type=float, default=1.0, help="multiply all time limits")
    parser.add_argument("--json", action="store_true", help="print the result as JSON at the end")
    parser.add_argument("--quick", action="store_true", help="the tiny scale")
    for hidden in ("--part", "--device", "--work"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return run_child(args)
    args.out.mkdir(parents=True, exist_ok=True)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    scale = "tiny" if args.quick else args.scale or ("full" if device == "cuda" else "tiny")
    versions = installed_versions()
    print(", ".join(f"{name} {version or '-'}" for name, version in versions.items()))
    print(f"{gpu or 'no CUDA GPU: the figures say nothing'}; scale {scale}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as work:
        run_parts(args, device, scale, Path(work))
    rows = {
        row["part"]: row
        for path in sorted(args.out.glob("*.json"))
        if "part" in (row := json.loads(path.read_text()))
    }
    result = {
        "what": "engine, learner and steps on one GPU, models of random weights",
        "machine": results_file.machine() | {"gpu": gpu},
        "commit": results_file.commit(),
        "versions": versions,
        "scale": scale,
        "goals": compute_goals(rows),
        "parts": rows,
    }
    (args.out / "result.json").write_text(json.dumps(result, indent=1))
    for goal in result["goals"]:
        print(goal)
    if args.json:
        print(json.dumps(result))
    return int(any(row["error"] for row in rows.values()))


def run_child(args: argparse.Namespace) -> int:
    """Run one part, and print its result or its error as JSON."""
    try:
        from lib import gpu_bench_parts

        result = gpu_bench_parts.run_part(args.part, args.device, args.scale, Path(args.work))
    except Exception as error:
        traceback.print_exc()
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        print(json.dumps({"error": f"{type(error).__name__}: {reason}"}))
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
