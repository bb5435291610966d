"""Alternatives timed by turns: in every round each one runs once, in an order that changes, and
only ratios are judged.

A shared machine slows everything for seconds at a time; what runs side by side is slowed alike.
Beside wall time stands the CPU time of this process, which neighbours touch less."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lib import results_file

# first: benchmarks/learner.py and buffer.py must not hide the packages of their names
sys.path.insert(0, str(results_file.ROOT))

Times = dict[str, list[tuple[float, float]]]  # alternative -> (wall, CPU) seconds of each round


def idle_cores(n: int, seconds: float = 0.5) -> list[int]:
    """The n cores that did least during `seconds`."""

    def busy() -> dict[int, int]:
        rows = [
            line.split()
            for line in Path("/proc/stat").read_text().splitlines()
            if line[:3] == "cpu" and line[3].isdigit()
        ]
        return {int(r[0][3:]): sum(map(int, r[1:4])) + int(r[6]) + int(r[7]) for r in rows}

    before = busy()
    _ = time.sleep(seconds)
    after = busy()
    return sorted(os.sched_getaffinity(0), key=lambda c: after[c] - before[c])[:n]


def one_core() -> int:
    """Bind this process to the core that is least busy; returns its number."""
    core = idle_cores(1)[0]
    os.sched_setaffinity(0, {core})
    return core


def interleave(alternatives: Mapping[str, Callable[[], Any]], rounds: int) -> Times:
    """Run each alternative once untimed, then `rounds` times; every other round backwards."""
    out: Times = {name: [] for name in alternatives}
    for run in alternatives.values():
        run()
    for n in range(rounds):
        for name in list(alternatives) if n % 2 == 0 else reversed(list(alternatives)):
            wall = time.perf_counter()
            cpu = time.process_time()
            alternatives[name]()
            out[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return out


def median(times: Times, name: str, which: int = 0) -> float:
    return statistics.median(t[which] for t in times[name])


def speedup(times: Times, ours: str, rival: str, which: int = 0) -> float:
    """Median over rounds of rival / ours within the round: above 1 we are faster.  which: 0 wall, 1
    CPU.
    """
    return statistics.median(
        r[which] / o[which] for o, r in zip(times[ours], times[rival], strict=True)
    )


def goal(name: str, value: float, target: float, *, at_least: bool, **more: Any) -> dict[str, Any]:
    """One line of the table."""
    return {
        "figure": name,
        "value": round(value, 4),
        "goal": f"{'>=' if at_least else '<='} {target:g}",
        "met": bool(value >= target if at_least else value <= target),
        **more,
    }


def parser(doc: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--quick", action="store_true", help="under a minute; nothing is written to results/"
    )
    p.add_argument("--json", action="store_true")
    p.add_argument("--beside", default="", help="what else ran on the machine, for the record")
    return p


def report(
    name: str, goals: list[dict[str, Any]], result: dict[str, Any], args: argparse.Namespace
) -> Path | None:
    """Write the result file (not with --quick; its path comes back) and print the table, or the
    JSON.
    """
    result = {"goals": goals, "met": all(g["met"] for g in goals), "beside": args.beside} | result
    path = None if args.quick else results_file.write(name, result)
    if path:
        print(path, file=sys.stderr)
    if args.json:
        print(json.dumps(result))
        return path
    for g in goals:
        rest = "  ".join(
            f"{k} {v}" for k, v in g.items() if k not in ("figure", "value", "goal", "met")
        )
        print(
            f"{g['figure']:52} {g['value']:>9.3f}  {g['goal']:>9}  "
            f"{'met' if g['met'] else 'NOT MET'}  {rest}"
        )
    return path
