"""Where benchmark results go: results/DATE_COMMIT_MACHINE_NAME.json, with date, commit and machine
inside.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lib.kept_pages import keep

ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "?",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def commit() -> str:
    return (
        subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        or "unknown"
    )


def write(name: str, result: dict[str, Any], made_by: str = "") -> Path:
    """Write a result; returns its path.  made_by: the short commit that was measured; empty: the
    present one.
    """
    m = machine()
    made_by = made_by or commit()
    path = (
        ROOT
        / "benchmarks"
        / "results"
        / f"{time.strftime('%Y-%m-%d')}_{made_by}_{m['cores']}core_{name}.json"
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps(
            {
                "date": time.strftime("%Y-%m-%d"),
                "time": time.strftime("%H:%M:%S"),
                "commit": made_by,
                "machine": m,
                "load_at_end": os.getloadavg(),
            }
            | result,
            indent=1,
        )
        + "\n"
    )
    return path


def finish(name: str, result: dict[str, Any], page: Path, args: Any) -> None:
    """A study's end: the result and its page side by side (not with --quick), and the JSON on
    stdout if asked for.
    """
    if not args.quick:
        path = write(name, result)
        keep(page, path.with_suffix(".html"))
        print(path, file=sys.stderr)
    if args.json:
        print(json.dumps(result))
