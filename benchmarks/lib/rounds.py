"""Time alternatives by turns: each runs once per round, in a changing order; ratios are judged.

A shared machine slows everything down for seconds at a time, and alternatives in the same round
alike.  The CPU time of this process, which other work affects less, is recorded with the wall
time.  A round on a busy machine is repeated, not averaged: the work of all cores (/proc/stat)
minus that of this process and its children is other work, and more than FOREIGN of a core is too
much."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from lib import results_file

Times = dict[str, list[tuple[float, float]]]  # alternative -> (wall, CPU) seconds of each round

FOREIGN = 0.1  # cores of other work from which on a round does not count
GRAIN = 0.05  # CPU seconds: the error of /proc/stat's ticks and the kernel's threads
TRIES = 2  # attempts for each round, at most
LOAD_BEFORE = os.getloadavg()[0]
MADE: list[dict[str, Any]] = []  # every round of this program, in order, for its result


def busy_seconds() -> float:
    """CPU seconds that all cores were busy, also for other machines (steal)."""
    user, nice, system, _, _, _, _, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process and all its descendants, also of ended ones."""
    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue  # ended in between: its time is in its parent's sum
    return total


def cpu_of(pid: int) -> float:
    """CPU seconds of a process by its own clock, with ended threads; 0 if it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


class Watch:
    """Measure other work on this machine from now on."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.before = busy_seconds() - own_seconds()

    def foreign(self) -> tuple[float, float]:
        """Return CPU seconds of other work, and wall seconds."""
        others = max(0.0, busy_seconds() - own_seconds() - self.before)
        return others, time.perf_counter() - self.began


def quiet(wanted: int, one_round: Callable[[int], Any]) -> list[Any]:
    """Return the values of `wanted` rounds without other work.

    one_round: gets the number of the attempt.  After TRIES attempts per round, the least disturbed
    ones fill up the list, which MADE records.  A single round judges nothing and is made once."""
    made: list[tuple[float, dict[str, Any], Any]] = []
    alone = 0
    for attempt in range(TRIES * wanted if wanted > 1 else 1):
        load = os.getloadavg()[0]
        watch = Watch()
        value = one_round(attempt)
        others, wall = watch.foreign()
        beside = others > FOREIGN * wall + GRAIN
        alone += not beside
        row = {
            "seconds": round(wall, 2),
            "foreign_cores": round(others / max(wall, 1e-9), 3),
            "load": [round(load, 2), round(os.getloadavg()[0], 2)],
            "beside_other_work": beside,
            "counted": False,
        }
        made.append((others / max(wall, 1e-9), row, value))
        MADE.append(row)
        if beside:
            print(
                f"round {attempt}: {row['foreign_cores']} cores of other work beside it",
                file=sys.stderr,
            )
        if alone == wanted:
            break
    # a stable sort: all that were alone, in their order, then the least disturbed
    made.sort(key=lambda x: x[0] if x[1]["beside_other_work"] else 0.0)
    for _, row, _ in made[:wanted]:
        row["counted"] = True
    return [value for _, _, value in made[:wanted]]


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
    """Run each alternative once untimed, then in `rounds` quiet rounds; every other one
    backwards.  A single round judges nothing and is all.
    """
    for run in alternatives.values() if rounds > 1 else ():
        run()

    def one_round(number: int) -> dict[str, tuple[float, float]]:
        row = {}
        for name in list(alternatives) if number % 2 == 0 else reversed(list(alternatives)):
            wall = time.perf_counter()
            cpu = time.process_time()
            alternatives[name]()
            row[name] = (time.perf_counter() - wall, time.process_time() - cpu)
        return row

    rows = quiet(rounds, one_round)
    return {name: [row[name] for row in rows] for name in alternatives}


def median(times: Times, name: str, which: int = 0) -> float:
    return statistics.median(t[which] for t in times[name])


def speedups(times: Times, ours: str, rival: str, which: int = 0) -> list[float]:
    """Of each round rival / ours: above 1 we are faster.  which: 0 wall, 1 CPU."""
    return [r[which] / o[which] for o, r in zip(times[ours], times[rival], strict=True)]


def speedup(times: Times, ours: str, rival: str, which: int = 0) -> float:
    """The median of `speedups`."""
    return statistics.median(speedups(times, ours, rival, which))


def goal(name: str, value: float, target: float, *, at_least: bool, **more: Any) -> dict[str, Any]:
    """One line of the table."""
    return {
        "figure": name,
        "value": round(value, 4),
        "goal": f"{'>=' if at_least else '<='} {target:g}",
        "met": bool(value >= target if at_least else value <= target),
        **more,
    }


def figure(
    name: str, each: Sequence[float], target: float, *, at_least: bool, **more: Any
) -> dict[str, Any]:
    """`goal` for the median of a value of each round; with the number of rounds and the spread."""
    spread = [round(min(each), 3), round(max(each), 3)]
    value = statistics.median(each)
    return goal(name, value, target, at_least=at_least, spread=spread, rounds=len(each), **more)


def parser(doc: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--quick", action="store_true", help="at most 3 minutes; nothing is written to results/"
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
    load = {"before": round(LOAD_BEFORE, 2), "after": round(os.getloadavg()[0], 2)}
    disturbed = sum(row["counted"] and row["beside_other_work"] for row in MADE)
    again = sum(not row["counted"] for row in MADE)
    result = {
        "goals": goals,
        "met": all(g["met"] for g in goals),
        "beside": args.beside,
        "load": load,
        "rounds_made": MADE,
        "rounds_beside_other_work": disturbed,
        "rounds_made_again": again,
    } | result
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
    print(
        f"load {load['before']} before, {load['after']} after; {len(MADE)} rounds: {again} beside "
        f"other work and made again, {disturbed} beside other work and counted"
    )
    return path
