"""Print all figures of README and docs/performance.md with their goals, and measure them.

    python benchmarks/table.py [--only NAME ...] [--json]          the committed results
    python benchmarks/table.py --run [--quick] [--only NAME ...]   run the programs first

Goals that are missed, or not measured against the present rival, are marked.

Quick runs show that a program works and write nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from typing import Any, NamedTuple

from lib.results_file import ROOT
from rich.console import Console
from rich.table import Table


class Program(NamedTuple):
    """A program, its results, and about how many minutes it takes on two idle cores."""

    words: str
    results: tuple[str, ...]
    minutes: float


PROGRAMS = {
    "speed": Program("loop.py --parts speed", ("loop_speed",), 12),
    "cores_demo": Program("loop.py --parts cores --kinds '84k, demo'", ("loop_cores_demo",), 4),
    "cores_tail": Program("loop.py --parts cores --kinds '84k, tail'", ("loop_cores_tail",), 15),
    "cores_demo_2_6m": Program(
        "loop.py --parts cores --kinds '2.6M, demo'", ("loop_cores_demo_2_6m",), 24
    ),
    "engine": Program("engine.py", ("engine",), 8),
    "learner": Program("learner.py", ("learner",), 4),
    "prefixes": Program("prefixes.py", ("prefixes",), 2),
    "long_prompts": Program("long_prompts.py", ("long_prompts",), 5),
    "exact": Program("exact.py", ("exact",), 6),
    "buffer": Program("buffer.py", ("buffer",), 1),
    "scale": Program("scale.py --parts waiting sockets", ("scale_waiting_sockets",), 3),
    "scale_share": Program("scale.py --parts share", ("scale_share",), 9),
    "transport": Program("transport.py", ("transport",), 10),
    "weights": Program("weights.py", ("weights",), 2),
    "reward": Program("loop.py --parts reward publication", ("loop_reward_publication",), 10),
    "slow_rewards": Program("slow_rewards.py", ("slow_rewards",), 10),
    "diagnostics": Program("diagnostics.py", ("diagnostics",), 3),
    "growth": Program("growth.py", ("growth",), 8),
    "own": Program("loop.py --parts own", ("loop_own",), 7),
    "losses": Program("losses.py", ("losses",), 3),
    "losses_methods": Program("losses.py --methods --rounds 5", ("losses_methods",), 11),
    "startup": Program("startup.py", ("startup",), 3),
    "memory": Program("memory.py", ("memory",), 11),
    "curves": Program("loop.py --parts curves", ("loop_curves",), 8),
    "comparisons": Program("comparisons.py", ("comparisons_default",), 6),
    "simulate": Program("simulate.py", ("simulate",), 20),
    "freshness": Program("freshness.py", ("freshness",), 3),
    "repeatable": Program("repeatable.py", ("repeatable",), 10),
    "kills": Program("kills.py", ("kills",), 10),
    "tinker_kills": Program("kills.py --tinker --kills 300", ("tinker_kills",), 20),
    "server_kills": Program("kills.py --servers played --kills 300", ("played_server_kills",), 5),
    "real_server_kills": Program(
        "kills.py --servers real --kills 100 --seconds 1800", ("real_server_kills",), 30
    ),
    "serve": Program("serve.py", ("serve",), 12),
    "chaos": Program("chaos.py --faults 400", ("chaos",), 10),
    "network": Program("network.py", ("network",), 6),
    "ray_run": Program("ray_run.py", ("ray_run",), 3),
    "effective": Program("effective.py", ("effective",), 25),
    "fuzz": Program("fuzz.py", ("fuzz",), 10),
    "fuzz_protobuf": Program("fuzz.py --protobuf", ("fuzz_protobuf",), 3),
    "demo_seeds": Program("demo_seeds.py", ("demo_seeds",), 12),
    "slow_seeds": Program("demo_seeds.py --slow", ("slow_seeds",), 18),
    "real_seeds": Program("demo_seeds.py --real models/smollm2", ("real_seeds",), 55),
    "vllm_engine": Program("vllm_engine.py", ("vllm_engine", "vllm_engine_start"), 25),
    "vllm_engine_swap": Program("vllm_engine.py --parts swap", ("vllm_engine_swap",), 1),
    "gateway": Program(
        "gateway.py --parts beyond history client", ("gateway_beyond_history_client",), 4
    ),
    "gateway_engines": Program("gateway.py --parts engines", ("gateway_engines",), 5),
    "gateway_step": Program("gateway.py --parts step larger", ("gateway_step_larger",), 12),
    "real_model": Program(
        "real_model.py models/smollm2",
        ("real_model_run", "real_model_engine", "real_model_learner", "real_model_swap"),
        60,
    ),
    "real_learns": Program("real_learns.py models/smollm2", ("smollm2_sort",), 12),
    "real_learns_lora": Program(
        "real_learns.py models/smollm2 --config smollm2_first_lora", ("smollm2_first_lora",), 10
    ),
    "real_start": Program("real_start.py models/smollm2", ("real_start",), 15),
    "real_equal": Program("real_equal.py models/smollm2", ("real_equal",), 15),
    "memory_sizes": Program("memory_sizes.py models/smollm2", ("memory_sizes",), 5),
    "mutants": Program("mutants.py", ("mutants",), 20),
    "low_precision": Program("low_precision.py models/sort", ("low_precision",), 10),
    "trl_diagnose": Program("trl_diagnose.py models/sort", ("trl_diagnose",), 15),
    "speculation": Program("speculation.py models/sort", ("speculation",), 10),
    "watch": Program("watch.py", ("watch",), 3),
    "environment_cost": Program("environment_cost.py", ("environment_cost",), 3),
    "tinker_cost": Program("tinker_cost.py", ("tinker_cost",), 5),
    "mixing_cost": Program("mixing_cost.py", ("mixing_cost",), 3),
    "cpu_by_process": Program("cpu_by_process.py", ("cpu_by_process",), 10),
}
# Results before this day are against weaker rivals, and do not count any more.
SINCE = {"engine": "2026-11-22", "learner": "2026-11-22", "loop_speed": "2026-11-22"}
OUTDATED = ("engine_",)  # names of such results that no program writes any more
TO_DO = "to be measured"


def newest() -> dict[str, dict[str, Any]]:
    """Name of the result -> the last one."""
    out: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {}
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        name = re.sub(r"^[\d-]+_[0-9a-z]+_\d+core_", "", path.stem)
        result = json.loads(path.read_text())
        age = (result.get("date", ""), result.get("time", ""))
        if age[0] >= SINCE.get(name, "") and (name not in out or age > out[name][0]):
            out[name] = age, result | {"file": path.name}
    return {name: result for name, (_, result) in sorted(out.items())}


def goals(name: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """figure, value, goal, met; a program without a list of goals gives one row, a study none."""
    if not result.get("goals") and "met" not in result:
        return []
    found = result.get("goals") or [
        {
            "figure": str(result.get("what", name)),
            "value": "",
            "goal": result.get("goal", ""),
            "met": result.get("met"),
        }
    ]
    return [
        {"program": name, "commit": result.get("commit", ""), "file": result["file"]}
        | {k: g.get(k, "") for k in ("figure", "value", "goal", "met", "spread", "rounds")}
        | {"beside_other_work": result.get("rounds_beside_other_work", "")}
        for g in found
    ]


def rows(only: list[str]) -> list[dict[str, Any]]:
    """Those of the programs in their order, then, without `only`, of every other result."""
    have = newest()
    out = []
    for name in only or PROGRAMS:
        found = [row for r in PROGRAMS[name].results if r in have for row in goals(r, have[r])]
        out += found or [{"program": name, "figure": TO_DO, "met": False}]
    named = {r for program in PROGRAMS.values() for r in program.results}
    for name, result in have.items():
        if not only and name not in named and not name.startswith(OUTDATED):
            out += goals(name, result)
    return out


def run(only: list[str], extra: list[str]) -> list[str]:
    """Run the programs; the names of those that failed."""
    failed = []
    for name in only or PROGRAMS:
        file, *words = shlex.split(PROGRAMS[name].words)
        began = time.monotonic()
        print(f"{name}: about {PROGRAMS[name].minutes:g} minutes", file=sys.stderr)
        argv = [sys.executable, str(ROOT / "benchmarks" / file), *words, *extra]
        if subprocess.run(argv, cwd=ROOT, check=False).returncode:
            failed.append(name)
        print(f"{name}: {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)
    return failed


def shown(found: list[dict[str, Any]]) -> Table:
    table = Table("program", "figure", "value", "spread", "goal", "", "commit")
    for r in found:
        mark = {True: "met", False: "NOT MET"}.get(r["met"], "")
        if r["figure"] == TO_DO:
            mark = "NOT MEASURED"
        elif r.get("beside_other_work"):
            mark += ", beside other work"
        value = r.get("value", "")
        table.add_row(
            r["program"],
            r["figure"],
            f"{value:,.3f}" if isinstance(value, float) else str(value),
            " to ".join(map(str, r.get("spread") or [])),
            str(r.get("goal", "")),
            mark,
            r.get("commit", ""),
            style="red" if r["met"] is False else "",
        )
    return table


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", nargs="+", default=[], choices=list(PROGRAMS), metavar="NAME")
    p.add_argument("--run", action="store_true", help="run the programs first")
    p.add_argument("--quick", action="store_true", help="with --run: show that they work")
    p.add_argument("--json", action="store_true")
    args, extra = p.parse_known_args()
    if extra and not (args.run and len(args.only) == 1):
        p.error(f"{' '.join(extra)}: a program's own options go with --run and one --only")
    failed = run(args.only, extra + ["--quick"] * args.quick) if args.run else []
    found = rows(args.only)
    if args.json:
        print(json.dumps(found))
    else:
        Console().print(shown(found))
        unmet = sum(r["met"] is False for r in found)
        print(f"{len(found)} figures, {unmet} not met or not measured")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
