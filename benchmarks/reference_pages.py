"""Write what in docs/ comes from tables: coming-from, the tables of papers and of exit codes.

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

from asyncrl.config.bundled_configs import load_systems  # noqa: E402
from asyncrl.contract.errors import EXIT_CODES  # noqa: E402

DOCS = ROOT / "docs"
COMING_FROM = """# Coming from another system

Generated from `asyncrl/config/coming_from.toml` by `python benchmarks/reference_pages.py`.

Find your setting before the colon, without dots: its prefix may be that of the name before it. The
keys here follow, as after `--set`: in TOML, put quotes around a text. Commas join keys that belong
together. "or" separates alternatives, in the order of the values there. Settings whose last name is
the same here, such as `temperature`, are left out. `asyncrl run` also recognizes a config of these
systems and names our keys. [`asyncrl diagnose`](diagnose.md) reads the log of a run that you made
there.

- a script, YAML or flags: `asyncrl run CONFIG`, a TOML file, `--set key=value`
- defaults for language models: [some are for tiny ones](algorithms.md#the-defaults-and-why)
- generation and training share GPUs: always separate processes
- Ray: processes, optionally on [Ray or Slurm](machines.md#ray)
- queues, replay buffers, collectors: the buffer, bounded by the limit
- old samples are discarded: `staleness.max_lag` prevents them, or `staleness.on_exceed=drop`
- weights every few steps: a version after every batch, `learner.minibatches` steps
- batches in completions: `learner.groups` prompts of `learner.group_size` samples
- a limit of engine requests: `generator.slots`, completions of one generator
- micro-batches: `learner.micro_batch_tokens`; the result does not depend on it
- several GPUs: `learner.backend=fsdp2` or `deepspeed`
- None: 0 for `loss.dual_clip`, `kl.*.coefficient`, `generator.top_k`
- resume: `asyncrl run --resume RUN`

"""


def alternatives(ours: str) -> list[list[str]]:
    """Split the third cell of a row: alternatives of settings, each a key or "key = value"."""
    return [option.split(" + ") for option in ours.split(" or ")] if ours else []


def format_settings(ours: str) -> str:
    """Format the alternatives of a row: settings as after `--set`, a repeated key once."""
    shown, key = [], ""
    for option in alternatives(ours):
        only, equals, value = option[0].partition(" = ")
        repeated = len(option) == 1 and equals and only == key
        settings = [value] if repeated else [setting.replace(" = ", "=") for setting in option]
        shown.append(", ".join(f"`{setting}`" for setting in settings))
        key = only if len(option) == 1 else ""
    return " or ".join(shown)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") or "-" for cell in cells) + " |\n"


def _wrap(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def _item(text: str) -> str:
    return (
        textwrap.fill(
            f"- {text}", 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        + "\n"
    )


def system_section(system: dict[str, Any]) -> str:
    """Return the section of one system: concepts, settings, and settings without a counterpart."""
    parts = [f"## {system['title']}\n\n{_wrap(system['intro'])}\n"]
    parts += [_item(f"{there}: {here}") for there, here in system["concepts"]]
    missing = []
    for theirs, _, ours, remark in system["keys"]:
        names = ", ".join(f"`{name.replace(' = ', '=')}`" for name in theirs.split(", "))
        if not ours and remark == "Not here.":
            missing.append(names)
        elif remark or (ours and theirs.rpartition(".")[2] != ours.rpartition(".")[2]):
            here = ". ".join(part for part in (format_settings(ours), remark) if part)
            parts.append(_item(f"{names}: {here}"))
    if missing:
        parts += ["\n", _wrap(f"Not here: {', '.join(missing)}.")]
    parts += ["\n", _wrap(f"Looked up in {system['seen'].partition(': ')[0]}.")]
    return "".join(parts)


def coming_from_page() -> str:
    """Return the page of all systems."""
    return COMING_FROM + "\n".join(map(system_section, load_systems().values()))


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


def papers() -> list[list[str]]:
    """Return source, name, settings and remark of each paper."""
    return [list(row) for row in tomllib.loads((DOCS / "papers.toml").read_text())["papers"]]


def papers_table() -> str:
    """Return the index of papers, without those that are a method with nothing to add."""
    rows = []
    for source, name, settings, remark in papers():
        if remark or not all(option.startswith("method = ") for option in settings.split(" or ")):
            what = ". ".join(part for part in (format_settings(settings), remark) if part)
            rows.append(_row(f"{name} ({source})", what))
    return _row("paper", "settings, and what differs") + "|---|---|\n" + "".join(rows)


def exit_codes_table() -> str:
    """Return the table of exit codes."""
    rows = [_row(str(code), meaning, ACTIONS[code]) for code, meaning in EXIT_CODES.items()]
    return _row("code", "meaning", "what to do") + "|---|---|---|\n" + "".join(rows)


def replace_last_table(page: str, table: str) -> str:
    """Return a page of docs/ with `table` in place of the one with the same head, its end."""
    head, row, _ = (DOCS / page).read_text().partition(table.partition("\n")[0])
    assert row, f"docs/{page} has no table {table.partition(chr(10))[0]}"
    return head + table


def pages() -> dict[Path, str]:
    """Return every page that this program writes -> its text."""
    return {
        DOCS / "coming-from.md": coming_from_page(),
        DOCS / "methods.md": replace_last_table("methods.md", papers_table()),
        DOCS / "troubleshooting.md": replace_last_table("troubleshooting.md", exit_codes_table()),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
