"""Send a run's metrics to wandb, trackio or mlflow, each from a process of its own.

A process reads metrics.jsonl as it grows, so a tracker that fails or hangs never slows or ends the
run, and the file keeps every row. RUN/trackers/NAME.json records the offset from which a resumed
run continues, and the reason of a failure.

    feed       that process
    adapters   the differences between the trackers
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path

from asyncrl.contract import importing
from asyncrl.records import jsonl


class TrackerFeeds:
    """The processes that feed a run's trackers."""

    def __init__(self, run_dir: Path, names: Iterable[str]) -> None:
        """Start one process a tracker; its output goes to RUN/logs/tracker_NAME.log."""
        self.logs = {name: run_dir / "logs" / f"tracker_{name}.log" for name in names}
        self.processes = {name: self._start(run_dir, name) for name in self.logs}

    def _start(self, run_dir: Path, name: str) -> subprocess.Popen[bytes]:
        self.logs[name].parent.mkdir(exist_ok=True)
        with self.logs[name].open("ab") as output:
            return subprocess.Popen(
                importing.make_command(
                    "asyncrl.records.trackers.feed", str(run_dir.resolve()), name
                ),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def close(self) -> None:
        """Close their inputs, upon which they send the remaining rows and exit."""
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.close()


def read_failures(run_dir: Path) -> dict[str, str]:
    """Return the reason of each failed tracker."""
    reasons = {}
    for path in sorted((run_dir / "trackers").glob("*.json")):
        if failure := jsonl.read_object(path).get("failed"):
            reasons[path.stem] = str(failure)
    return reasons
