"""`asyncrl replay`: train again on a recorded run; `asyncrl diff`: compare two runs."""

import sys
from pathlib import Path
from typing import Any

from asyncrl.cli.base import command, emit


@command
def replay(run_dir: Path, sets: tuple[str, ...], **choice: Any) -> None:
    """Train again on the recorded stream of RUN_DIR, offline.

    Shows the difference, for example with another loss, correction, KL penalty or early stop.
    """
    from asyncrl.records import rundir

    rundir.require_run(run_dir)  # before the imports of torch below
    from asyncrl.experiments.replay import replay as replaying
    from asyncrl.records.page_kit import clean
    from asyncrl.supervise.preflight import say

    result = replaying.replay(run_dir, sets, say, **choice)
    emit(clean(result), replaying.format_replay(result))
    say(f"report: {Path(result['replay_dir']) / 'report.html'}")
    sys.exit(1 if result["reproduced"] is False else 0)


@command
def diff(run_a: Path, run_b: Path, html: Path | None) -> None:
    """Compare two runs.

    Shows settings, the first step that differs, and by how much.  Exit code 0 if they are bitwise
    equal, otherwise 1.
    """
    from asyncrl.experiments.replay import diff as differ

    comparison = differ.diff(run_a, run_b)
    if html is not None:
        differ.write(comparison, html)
    emit(comparison, differ.format_diff(comparison))
    sys.exit(0 if comparison["equal"] else 1)
