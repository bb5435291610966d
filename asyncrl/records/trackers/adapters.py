"""The trackers, each through its own package: start a run, log values at a step, finish.

The package's environment variables and its login decide where the data go.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """One run of a tracker. id: the tracker's name of the run, by which it is continued."""

    id: str

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


class WandbTracker:
    """Weights & Biases; offline with WANDB_MODE=offline."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], run_id: str) -> None:
        import wandb

        folder = run_dir / "trackers"
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "asyncrl"),
            name=run_dir.name,
            id=run_id or None,
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

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], run_id: str) -> None:
        import trackio

        self.id = run_id or run_dir.name
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

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], run_id: str) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ["MLFLOW_TRACKING_URI"] = (run_dir.parent / "mlruns").as_uri()
            # mlflow asks for this since it prefers a database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "asyncrl"))
        run = mlflow.start_run(run_id=run_id or None, run_name=None if run_id else run_dir.name)
        self.id = str(run.info.run_id)
        if not run_id:
            mlflow.log_params(settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def finish(self) -> None:
        self.mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], str], Tracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}
