"""A rival of benchmarks/transport.py in a process of its own, by whatever Python has its library.

    PYTHON benchmarks/lib/transport_child.py RIVAL FOLDER TOKENS GROUPS

It says {"version", "settings"} when it has begun, or {"missing": why}; then each line of stdin is
[WORD, ...] and gets a line: ["set", frame, together], ["batches", count], ["check"], ["end"]."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# not the folder of this file, whose modules would hide others
sys.path[0] = str(ROOT / "benchmarks")
sys.path.insert(0, str(ROOT))

from lib.transport_rivals import RIVALS, Rival  # noqa: E402


def answered(rival: Rival, words: list[Any]) -> dict[str, Any]:
    match words:
        case ["set", frame, together]:
            rival.frame, rival.together = frame, together
        case ["batches", count]:
            rival.batches(count)
        case ["check"]:
            return rival.check()
        case _:
            raise ValueError(f"{words} is not a command")
    return {}


def main() -> None:
    # libraries print: what is said to the parent goes where they do not
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=said, flush=True)

    name, folder, tokens, groups = sys.argv[1:]
    rival = RIVALS[name](Path(folder), int(tokens), int(groups))
    try:
        rival.begin()
        say({"version": rival.version, "settings": rival.settings})
        while (line := sys.stdin.readline()) and (words := json.loads(line)) != ["end"]:
            say(answered(rival, words))
    except (ImportError, FileNotFoundError) as error:
        say({"missing": str(error)})
    finally:
        rival.end()


if __name__ == "__main__":
    main()
