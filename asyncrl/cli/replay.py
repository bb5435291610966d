"""`asyncrl replay`: train again on a recorded run; `asyncrl diff`: two runs side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from asyncrl.cli.base import PATH


@click.command()
@click.argument("run_dir", type=PATH)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="what is changed: loss, correction, kl, stop, advantage, learner.lr, ...; repeatable",
)
@click.option("--out", type=PATH, help="the replay's directory; RUN_DIR/replays/N without it")
@click.option(
    "--from",
    "start",
    type=click.IntRange(0),
    help="a version whose weights were recorded; the recording's first without it",
)
@click.option("--until", type=click.IntRange(1), help="stop at this version")
@click.option(
    "--eval/--no-eval", "evaluate", default=True, help="held-out accuracy where the run measured it"
)
@click.option("--json", "as_json", is_flag=True)
def replay(
    run_dir: Path,
    sets: tuple[str, ...],
    out: Path | None,
    start: int | None,
    until: int | None,
    evaluate: bool,
    as_json: bool,
) -> None:
    """Train again, offline, on the recorded stream of RUN_DIR, with another loss, correction, KL or
    early stop; show the difference.
    """
    from asyncrl.experiments.compare.page import clean
    from asyncrl.experiments.replay import replay as replaying
    from asyncrl.supervise.preflight import say

    found = replaying.replay(
        run_dir, sets, say, out=out, start=start, until=until, evaluate=evaluate
    )
    print(json.dumps(clean(found)) if as_json else replaying.format_replay(found))
    say(f"report: {Path(found['replay_dir']) / 'report.html'}")
    sys.exit(1 if found["reproduced"] is False else 0)


@click.command()
@click.argument("run_a", type=PATH)
@click.argument("run_b", type=PATH)
@click.option("--html", type=PATH, help="also write a page with both runs' curves")
@click.option("--json", "as_json", is_flag=True)
def diff(run_a: Path, run_b: Path, html: Path | None, as_json: bool) -> None:
    """Two runs side by side: settings, the first step that differs and by how much; exit code 0
    when bitwise equal, else 1.
    """
    from asyncrl.experiments.replay import diff as differ

    found = differ.diff(run_a, run_b)
    if html is not None:
        differ.write(run_a, run_b, html)
    print(json.dumps(found) if as_json else differ.format_diff(found))
    sys.exit(0 if found["equal"] else 1)
