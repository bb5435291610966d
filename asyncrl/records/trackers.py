"""Send a run's metrics to wandb, trackio or mlflow, each from a process of its own.

    python -m asyncrl.records.trackers RUN_DIR NAME

This process reads metrics.jsonl as it grows, so a tracker that fails or hangs never slows or ends
the run, and the file keeps every row. RUN/trackers/NAME.json records the offset from which a
resumed run continues, and the reason of a failure.

When its stdin closes, it sends the remaining rows and exits after at most END_S seconds. Each
tracker is used through its own package, whose environment variables and login decide where the data
go.
"""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.contract import importing
from asyncrl.contract.messages import Numbers
from asyncrl.contract.toml_writer import flatten
from asyncrl.records import atomic_write, jsonl, metrics, rundir

Settings = dict[str, Any]
RUN_TAG = "asyncrl.run_id"  # in mlflow


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
                importing.make_command("asyncrl.records.trackers", str(run_dir.resolve()), name),
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


# ---- the process of a tracker --------------------------------------------------------------------


class Tracker(NamedTuple):
    """One run of a tracker.

    id: the tracker's id of the run.
    log: sends the values of a step.
    """

    id: str
    log: Callable[[int, Numbers], Any]
    finish: Callable[[], Any]


def start_wandb(run_dir: Path, settings: Settings, run_id: str, known: str) -> Tracker:
    """Start Weights & Biases; offline with WANDB_MODE=offline."""
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "asyncrl"),
        name=run_dir.name,
        id=known or run_id,
        resume="allow",
        dir=str(run_dir / "trackers"),
        config=settings,
    )
    # rows of an evaluation come after those of later batches, and wandb's own step never falls
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return Tracker(
        str(run.id), lambda step, values: run.log({"step": step, **values}), lambda: run.finish()
    )


def start_trackio(run_dir: Path, settings: Settings, run_id: str, known: str) -> Tracker:
    """Start trackio, which keeps its runs on this machine (TRACKIO_DIR)."""
    import trackio

    # trackio continues a run of the same name, of whatever directory
    name = known or f"{run_dir.name}-{run_id}"
    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", "asyncrl"),
        name=name,
        config=settings,
        resume="allow",
    )
    return Tracker(name, lambda step, values: run.log(values, step=step), lambda: run.finish())


def start_mlflow(run_dir: Path, settings: Settings, run_id: str, known: str) -> Tracker:
    """Start MLflow; without MLFLOW_TRACKING_URI it writes files beside the run, in RUNS/mlruns."""
    if "MLFLOW_TRACKING_URI" not in os.environ:
        os.environ["MLFLOW_TRACKING_URI"] = (run_dir.parent / "mlruns").as_uri()
        # mlflow asks for this since it prefers a database
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "asyncrl"))
    if not known:  # mlflow chooses the id itself
        rows = mlflow.search_runs(
            filter_string=f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1, output_format="list"
        )
        known = str(rows[0].info.run_id) if rows else ""
    named = {} if known else {"run_name": run_dir.name, "tags": {RUN_TAG: run_id}}
    run = mlflow.start_run(known or None, **named)
    if not known:
        mlflow.log_params(settings)
    return Tracker(
        str(run.info.run_id),
        lambda step, values: mlflow.log_metrics(values, step=step),
        lambda: mlflow.end_run(),
    )


# each starts a run with its directory, its settings, its id, and the tracker's id of it if an
# earlier process has recorded one, or ""
TRACKERS = {"wandb": start_wandb, "trackio": start_trackio, "mlflow": start_mlflow}

POLL_S = 1.0
END_S = 60  # for the remaining rows and the end of the tracker


def main(run_dir: Path, name: str) -> None:
    """Feed one tracker, and record a failure in RUN/trackers/NAME.json."""
    state_file = run_dir / "trackers" / f"{name}.json"
    state_file.parent.mkdir(exist_ok=True)
    with (state_file.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the feed of an earlier buffer may still send rows
        state = jsonl.read_object(state_file)

        def note(**changes: Any) -> None:
            state.update(changes)
            atomic_write.write(state_file, json.dumps(state))

        def end_at_once(*_: Any) -> None:
            """End this process and those that the tracker started."""
            note(failed=f"it did not end within {END_S} s of the run")
            os.killpg(0, signal.SIGKILL)

        signal.signal(signal.SIGALRM, end_at_once)
        try:
            feed(run_dir, name, state, note)
        except BaseException as error:
            note(failed=f"{type(error).__name__}: {error}")
            raise


def feed(run_dir: Path, name: str, state: dict[str, Any], note: Callable[..., None]) -> None:
    """Send rows until stdin closes, then the remaining ones.

    state: the values that earlier processes passed to `note`."""
    with (run_dir / "config.toml").open("rb") as file:
        settings = flatten(tomllib.load(file))
    try:
        run_id = rundir.read_run_id(run_dir)
    except FileNotFoundError:  # a directory that was put together by hand
        run_id = uuid.uuid4().hex[:12]
    tracker = TRACKERS[name](run_dir, settings, run_id, state.get("id", ""))
    note(id=tracker.id, failed="")
    ended = False
    growing = jsonl.GrowingFile(run_dir / "metrics.jsonl", state.get("offset", 0))
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        if ended:
            signal.alarm(END_S)
        for row in (rows := growing.read_rows()):
            numbers = {name: float(value) for name, value in metrics.select_numbers(row).items()}
            tracker.log(row["step"], numbers | {"time/run": float(row.get("t", 0.0))})
        if rows:
            note(offset=growing.offset)
    tracker.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
