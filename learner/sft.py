"""`asyncrl sft`: supervised training with held-out loss, checkpoints and resume.

```
RUN/sft.toml                the resolved config
RUN/metrics.jsonl           a row per step: number, loss, lr; heldout where it was measured
RUN/checkpoints/number_N/   model, optimizer, random state, sealed like a run's
RUN/model/                  at the end: a Hugging Face directory, for model.path of a run
RUN/summary.json            at the end
```

The rows of a step are a function of (seed, step). A resumed training repeats the steps after its
checkpoint bitwise as if it had never stopped.
"""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from asyncrl.config import load
from asyncrl.config.sft import SftConfig
from asyncrl.config.tree import explain_changed_steps
from asyncrl.contract.errors import ConfigError, NothingToDo
from asyncrl.models import memory
from asyncrl.models.policy import build_manifest, compute_weights_digest, export, load_policy
from asyncrl.models.tokenizer import collect_model_stops, load_tokenizer
from asyncrl.records import atomic_write, jsonl
from asyncrl.records.rundir import RunLock, choose_directory
from asyncrl.tasks import fit
from asyncrl.tasks.fit import ModelFitter, select_batch
from learner import checkpoint

CONFIG = "sft.toml"
Log = Callable[[str], None]


def prepare(config: SftConfig, source: str) -> Path:
    """Create the training's directory. Raises ConfigError when it is not empty."""
    run_dir = choose_directory(config, source, create=True)
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(
            f"{run_dir} is not empty: continue it with `asyncrl sft --resume {run_dir}`, or choose "
            "another name with --set name=..."
        )
    (run_dir / "checkpoints").mkdir(parents=True)
    atomic_write.write(run_dir / CONFIG, load.dump(config), sync=True)
    return run_dir


class SftRun:
    """One incarnation of a training: from its newest checkpoint, or from model.path."""

    def __init__(self, config: SftConfig, run_dir: Path, log: Log) -> None:
        torch.set_num_threads(config.training.threads)
        memory.keep_freed()
        torch.manual_seed(config.seed)
        self.config = config
        self.run_dir = run_dir
        self.log = log
        self.model = load_policy(config.model.path, config.model.dtype, config.model.device)
        tokenizer = load_tokenizer(config.model.path)
        limit = int(self.model.hf.config.get_text_config().max_position_embeddings)
        path = config.model.path
        train = fit.read_pairs(config.data.train, tokenizer, config.data, limit, path)
        heldout = config.data.heldout
        self.heldout = (
            fit.read_pairs(heldout, tokenizer, config.data, limit, path).rows if heldout else []
        )
        added_ends = set(train.ends) - set(collect_model_stops(tokenizer, path))
        self.ends = train.ends if added_ends else ()
        self.rows = train.rows
        log(
            f"{len(train.rows)} training rows ({train.skipped} too long and excluded), "
            f"{len(self.heldout)} held out"
        )
        self.fitter = ModelFitter(self.model, config.training)
        self.tokens = 0
        self.checkpoints = run_dir / "checkpoints"
        saved = checkpoint.find_newest_checkpoint(self.checkpoints)
        if saved is not None:
            self.restore(saved)
        log_path = run_dir / "metrics.jsonl"
        # the rows of later steps will be written again
        rows = [row for row in jsonl.read(log_path) if row["number"] < self.fitter.number]
        self.metrics = jsonl.JsonlAppender(log_path)
        self.metrics.replace(jsonl.encode(rows), sync=True)

    def run(self, stopping: Callable[[], bool]) -> bool:
        """Train to the last step; return False where `stopping` ended it with a checkpoint."""
        training = self.config.training
        if self.fitter.number >= training.steps:
            raise NothingToDo(
                f"{self.run_dir} has completed all its {training.steps} steps; to add steps, use "
                f"--resume {self.run_dir} --set training.steps=..."
            )
        began = time.monotonic()
        while self.fitter.number < training.steps:
            if stopping():
                self.save()
                return False
            self.step()
            if self.fitter.number % training.checkpoint_every == 0:
                self.save()
        if self.fitter.number % training.checkpoint_every:
            self.save()
        self.finish(time.monotonic() - began)
        return True

    def step(self) -> None:
        """Train on the next batch and write its metric row."""
        number = self.fitter.number
        training = self.config.training
        row: dict[str, Any] = {"number": number}
        every = training.heldout_every
        if self.heldout and (number == 0 or (every and number % every == 0)):
            row["heldout"] = self.fitter.measure_loss(self.heldout)
        batch = select_batch(self.rows, training, self.config.seed, number)
        row["loss"] = self.fitter.step(batch)
        row["lr"] = self.fitter.rate(number)
        self.tokens += sum(len(pair.answer) for pair in batch)
        self.metrics.write(row)
        if "heldout" in row:
            self.log(f"step {number}: loss {row['loss']:.4f}, held out {row['heldout']:.4f}")

    def save(self) -> None:
        """Write a sealed checkpoint and remove those beyond `keep_checkpoints`.

        Raises AsyncrlError (disk full).
        """

        def fill(part: Path) -> None:
            export(self.model, part / "model")
            state = {
                "optimizer": self.fitter.trainer.optimizer.state_dict(),
                "number": self.fitter.number,
                "tokens": self.tokens,
                "steps": self.config.training.steps,
                "random": torch.get_rng_state(),
            }
            torch.save(state, part / "state.pt")

        keep_count = self.config.training.keep_checkpoints
        checkpoint.write(self.checkpoints, self.fitter.number, fill, keep_count)

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint at `path`. Raises DamagedDataError for another model's."""
        checkpoint.restore_weights(self.model, path, build_manifest(self.model), self.config.model)
        state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
        self.fitter.trainer.optimizer.load_state_dict(state["optimizer"])
        self.fitter.number = state["number"]
        self.tokens = state["tokens"]
        torch.set_rng_state(state["random"])
        self.log(f"resumed from {path}")
        training = self.config.training
        earlier_steps = state.get("steps", training.steps)
        if change := explain_changed_steps(training, earlier_steps, self.fitter.number):
            self.log(f"training.{change}")

    def finish(self, seconds: float) -> None:
        """Write the model, then the summary, so that a summary implies a model."""
        self.model.hf.eval()
        end = self.fitter.measure_loss(self.heldout) if self.heldout else None
        export(self.model, self.run_dir / "model", self.ends)
        atomic_write.sync_tree(self.run_dir / "model")
        rows = jsonl.read(self.run_dir / "metrics.jsonl")
        summary = {
            "steps": self.fitter.number,
            "rows": len(self.rows),
            "tokens": self.tokens,
            "loss_start": rows[0]["loss"],
            "loss_end": rows[-1]["loss"],
            "heldout_start": rows[0].get("heldout"),
            "heldout_end": end,
            "seconds": round(seconds, 1),
            "weights_digest": compute_weights_digest(self.model),
            "model": str(self.run_dir / "model"),
        }
        atomic_write.write(self.run_dir / "summary.json", json.dumps(summary), sync=True)


def run(config: SftConfig, run_dir: Path, log: Log) -> dict[str, Any] | None:
    """Train in `run_dir`, from the start or a checkpoint; return the summary.

    Returns None where SIGINT or SIGTERM ended it with a checkpoint.
    """
    lock = RunLock(run_dir, "sft")
    try:
        with catch_stop_signals() as stopping:
            resumed = (run_dir / "metrics.jsonl").exists()
            try:
                training = SftRun(config, run_dir, log)
            except ConfigError:
                if not resumed:  # leave nothing behind, so that the corrected command can run again
                    shutil.rmtree(run_dir, ignore_errors=True)
                raise
            try:
                completed = training.run(stopping)
            finally:
                training.metrics.close()
        return json.loads((run_dir / "summary.json").read_bytes()) if completed else None
    finally:
        lock.close()


def load_resumed(run_dir: Path, sets: tuple[str, ...]) -> SftConfig:
    """Return the config of the training in `run_dir`. Raises ConfigError without one."""
    from asyncrl.config import sft

    if not (run_dir / CONFIG).is_file():
        raise ConfigError(f"{run_dir} holds no training of `asyncrl sft` (no {CONFIG})")
    return sft.read(str(run_dir / CONFIG), sets)


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM was received."""
    received: list[int] = []
    previous_handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
