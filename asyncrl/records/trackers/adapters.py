"""The trackers, each through its own package: start a run, log values at a step, finish.

The package's environment variables and its login decide where the data go.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

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
        known = known or self._find(run_id)
        named = {} if known else {"run_name": run_dir.name, "tags": {RUN_TAG: run_id}}
        run = mlflow.start_run(known or None, **named)
        self.id = str(run.info.run_id)
        if not known:
            mlflow.log_params(settings)

    def _find(self, run_id: str) -> str:
        """Return mlflow's id of the run, which mlflow chooses itself, or ""."""
        rows = self.mlflow.search_runs(
            filter_string=f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1, output_format="list"
        )
        return str(rows[0].info.run_id) if rows else ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def finish(self) -> None:
        self.mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], str, str], Tracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}
