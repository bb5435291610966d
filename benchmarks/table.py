"""One table of every committed figure that has a goal: the newest result of each program, met or
not.

python benchmarks/table.py [--json]
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from lib.results_file import ROOT
from rich.console import Console
from rich.table import Table


def newest() -> dict[str, dict[str, Any]]:
    """Name of the program -> its last result."""
    out: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {}
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        name = re.sub(r"^[\d-]+_[0-9a-z]+_\d+core_", "", path.stem)
        result = json.loads(path.read_text())
        age = (result.get("date", ""), result.get("time", ""))
        if name not in out or age > out[name][0]:
            out[name] = age, result | {"file": path.name}
    return {name: result for name, (_, result) in sorted(out.items())}


def rows() -> list[dict[str, Any]]:
    """figure, value, goal, met; programs without a list of goals give one row."""
    out = []
    for name, result in newest().items():
        if not result.get("goals") and "met" not in result:
            continue  # a study: its findings are in docs/log
        goals = result.get("goals") or [
            {
                "figure": str(result.get("what", name)),
                "value": "",
                "goal": result.get("goal", ""),
                "met": result.get("met"),
            }
        ]
        out += [
            {"program": name, "commit": result.get("commit", "")}
            | {k: g.get(k, "") for k in ("figure", "value", "goal", "met")}
            for g in goals
        ]
    return out


def main() -> None:
    found = rows()
    if "--json" in sys.argv[1:]:
        print(json.dumps(found))
        return
    table = Table("program", "figure", "value", "goal", "", "commit")
    for r in found:
        met = {True: "met", False: "NOT MET"}.get(r["met"], "")
        value = f"{r['value']:,.3f}" if isinstance(r["value"], float) else str(r["value"])
        table.add_row(
            r["program"],
            r["figure"],
            value,
            str(r["goal"]),
            met,
            r["commit"],
            style="red" if r["met"] is False else "",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
