"""Read metrics.jsonl as it grows and send its rows to one tracker: a program.

    python -m asyncrl.records.trackers.feed RUN_DIR NAME

When its stdin closes, it sends the remaining rows and exits after at most END_S seconds. Each
tracker is used through its own package, whose environment variables and login decide where the data
go.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from asyncrl.contract.toml_writer import flatten
from asyncrl.records import atomic_write, jsonl, rundir

RUN_TAG = "asyncrl.run_id"  # in mlflow


class Tracker(Protocol):
    """One run of a tracker, made from the run directory, its settings and two ids.

    run_id: of the run, which decides which curve it continues.
    known: the tracker's id of this run, if an earlier process has recorded it, or "".
    """

    id: str

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


class WandbTracker:
    """Weights & Biases; offline with WANDB_MODE=offline."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], run_id: str, known: str) -> None:
        import wandb

        folder = run_dir / "trackers"
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "asyncrl"),
            name=run_dir.name,
            id=known or run_id,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )
        self.id = str(self.run.id)
        # rows of an evaluation come after those of later batches, and wandb's own step never falls
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def finish(self) -> None:
        self.run.finish()


class TrackioTracker:
    """trackio, which keeps its runs on this machine (TRACKIO_DIR)."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], run_id: str, known: str) -> None:
        import trackio

        # trackio continues a run of the same name, of whatever directory
        self.id = known or f"{run_dir.name}-{run_id}"
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "asyncrl"),
            name=self.id,
            config=dict(settings),
            resume="allow",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def finish(self) -> None:
        self.run.finish()


class MlflowTracker:
    """MLflow; without MLFLOW_TRACKING_URI it writes files beside the run, in RUNS/mlruns."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], run_id: str, known: str) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ["MLFLOW_TRACKING_URI"] = (run_dir.parent / "mlruns").as_uri()
            # mlflow asks for this since it prefers a database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "asyncrl"))
        if not known:  # mlflow chooses the id itself
            rows = mlflow.search_runs(
                filter_string=f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1, output_format="list"
            )
            known = str(rows[0].info.run_id) if rows else ""
        named = {} if known else {"run_name": run_dir.name, "tags": {RUN_TAG: run_id}}
        run = mlflow.start_run(known or None, **named)
        self.id = str(run.info.run_id)
        if not known:
            mlflow.log_params(settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def finish(self) -> None:
        self.mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], str, str], Tracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}

POLL_S = 1.0
END_S = 60  # for the remaining rows and the end of the tracker


def read_new_rows(path: Path, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each whole row from `offset` on, with the offset behind it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                row = json.loads(line)
                yield {"step": int(row["step"]), **row}, offset
            except (ValueError, KeyError, TypeError):
                continue  # a damaged row


def send(tracker: Tracker, path: Path, offset: int) -> int:
    """Send the rows from `offset` on; returns the offset behind them."""
    for row, behind in read_new_rows(path, offset):
        numbers = {
            name: float(value)
            for name, value in row.items()
            if name not in ("step", "t") and isinstance(value, int | float)
        }
        tracker.log(row["step"], numbers | {"time/run": float(row.get("t", 0.0))})
        offset = behind
    return offset


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
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        if ended:
            signal.alarm(END_S)
        offset = state.get("offset", 0)
        behind = send(tracker, run_dir / "metrics.jsonl", offset)
        if behind != offset:
            note(offset=behind)
    tracker.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
