"""Write the pages of docs/ that come from tables: docs/coming-from, papers and exit codes.

    python benchmarks/reference_pages.py

asyncrl/config/coming_from.toml holds what other systems call their settings, docs/papers.toml which
settings follow a paper.  tests/project/test_reference_pages.py compares every page with what this
program writes, and loads every setting that a page names."""

from __future__ import annotations

import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl.config import explain, load, methods  # noqa: E402
from asyncrl.config.bundled_configs import load_systems  # noqa: E402
from asyncrl.contract.errors import EXIT_CODES  # noqa: E402

DOCS = ROOT / "docs"
FOLDER = DOCS / "coming-from"
COLUMNS = 100
SOURCE = """Generated from `asyncrl/config/coming_from.toml` by
`python benchmarks/reference_pages.py`."""
NO_DEFAULT = ("", "-", "not set", "none: it must be given", '""', "{}", "[]")
READING = """- The column "here" has keys of the configuration. Commas join
  keys that belong together. "or" separates alternatives. A dash means that asyncrl has no such
  setting, and the remark gives the reason or an alternative.
- "default here" has the defaults of these keys in the same order. A dash or "unset" means that
  nothing is set, or that the method decides.
- In the column "there", a name without dots has the prefix of the name before it.

In asyncrl, lag is a number of versions. The learner publishes one version after every batch, with
any number of optimizer steps.
"""


def alternatives(ours: str) -> list[list[str]]:
    """Split the third cell of a row: alternatives of settings, each a key or "key = value"."""
    return [option.split(" + ") for option in ours.split(" or ")] if ours else []


def format_setting(setting: str) -> str:
    """Format a setting as code, with quotes around a text."""
    key, equals, value = setting.partition(" = ")
    if not equals:
        return f"`{key}`"
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return f"`{key} = {load.format_value(parsed)}`"


def format_settings(ours: str) -> str:
    """Format the alternatives of a row."""
    return " or ".join(
        ", ".join(format_setting(setting) for setting in option) for option in alternatives(ours)
    )


def format_defaults(ours: str) -> str:
    """Format the default of each key of a row in the order of the keys; empty: none has one."""
    keys = {
        setting.partition(" = ")[0]: None for option in alternatives(ours) for setting in option
    }
    defaults = [explain.explain(key)[0].default for key in keys]
    shown = ["" if default in NO_DEFAULT else default for default in defaults]
    return ", ".join(f"`{value}`" if value else "unset" for value in shown) if any(shown) else ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") or "-" for cell in cells) + " |\n"


def _wrap(text: str) -> str:
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False) + "\n"


def system_page(system: dict[str, Any]) -> str:
    """Return the page of one system."""
    parts = [f"# Coming from {system['title']}\n\n{SOURCE}\n\n", _wrap(system["intro"])]
    parts += ["\n## Concepts\n\n", _row("there", "here"), "|---|---|\n"]
    parts += [_row(*row) for row in system["concepts"]]
    parts += ["\n## Settings\n\n", READING, "\n"]
    parts += [
        _row("there", "default there", "default here", "here", "remark"),
        "|---|---|---|---|---|\n",
    ]
    for theirs, default, ours, remark in system["keys"]:
        here = format_settings(ours)
        names = ", ".join(f"`{name}`" for name in theirs.split(", "))
        there = f"`{default}`" if default else ""
        parts.append(_row(names, there, format_defaults(ours), here, remark))
    return (
        "".join(parts) + "\n" + _wrap(f"Looked up in {system['seen']}. Other versions may differ.")
    )


def index_page() -> str:
    """Return the page that leads to the others, with the setting that limits lag in each system."""
    head = (
        f"# Coming from another system\n\n{SOURCE}\n\nEach page maps concepts and settings of one"
        " system to those of asyncrl.\n\n"
    )
    rows = []
    for name, system in load_systems().items():
        lag = next(row for row in system["keys"] if "staleness.max_lag" in row[2])
        names = ", ".join(f"`{name}`" for name in lag[0].split(", "))
        rows.append(_row(f"[{system['title']}]({name}.md)", names, lag[3]))
    table = _row("system", "what limits lag there", "compared with `staleness.max_lag`")
    return head + table + "|---|---|---|\n" + "".join(rows)


PAPERS_HEAD = """# Papers

Generated from `docs/papers.toml` by `python benchmarks/reference_pages.py`.

This page lists the settings that reproduce each paper. Settings that are joined by commas belong
together. "or" separates alternatives. `method` sets all keys of a published method, which
`asyncrl methods` lists. Each number is that of a preprint on arXiv. Write a row into a config, or
set it on the command line: `asyncrl run CONFIG --set method=vespo`. A test trains two batches with
every row.

The last column gives the sources that were read and the differences from them. If it is a dash, the
docstring of the function names the source. [Algorithms](algorithms.md) leads to formulas and
measurements.

"""
# exit code -> what to do
ACTIONS = {
    0: "nothing",
    1: "read the last lines; for a run, `asyncrl doctor RUN` names the cause and the remedy",
    2: "correct the line that the message names; `asyncrl config explain KEY` describes the key",
    3: "read `logs/attempt_N/PROCESS.log`, correct the cause, then `asyncrl run --resume RUN`",
    4: "start the process that the message names, or correct its address or its keys",
    5: "`asyncrl run --resume RUN` continues from the newest undamaged data",
    6: "raise `learner.steps` with `--resume`, or start a new run",
    7: "nothing: the run continues with the other process",
    130: "`asyncrl run --resume RUN`",
}
EXIT_HEAD = """# Exit codes

Generated from the table in `asyncrl/contract/errors.py` by
`python benchmarks/reference_pages.py`.

Every command ends with one of these codes. An expected failure prints one line to stderr, never a
traceback. `asyncrl diff` and `asyncrl config diff` end with 1 if the two differ.

"""


def papers() -> list[list[str]]:
    """Return source, name, settings and remark of each paper."""
    return [list(row) for row in tomllib.loads((DOCS / "papers.toml").read_text())["papers"]]


def papers_page() -> str:
    """Return the index of papers."""
    rows = []
    for source, name, settings, remark in papers():
        here = format_settings(settings)
        known = settings.removeprefix("method = ").partition(" or ")[0]
        if known in methods.METHODS:
            remark = f"Read: {methods.METHODS[known].source}. {remark}".strip()
        rows.append(_row(source, name, here, remark))
    table = _row("source", "name", "settings", "what was read, what differs")
    return PAPERS_HEAD + table + "|---|---|---|---|\n" + "".join(rows)


def exit_codes_page() -> str:
    """Return the page of exit codes."""
    rows = [_row(str(code), meaning, ACTIONS[code]) for code, meaning in EXIT_CODES.items()]
    return EXIT_HEAD + _row("code", "meaning", "what to do") + "|---|---|---|\n" + "".join(rows)


def pages() -> dict[Path, str]:
    """Return every page that this program writes -> its text."""
    found = {FOLDER / f"{name}.md": system_page(system) for name, system in load_systems().items()}
    return found | {
        FOLDER / "index.md": index_page(),
        DOCS / "papers.md": papers_page(),
        DOCS / "exit-codes.md": exit_codes_page(),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
