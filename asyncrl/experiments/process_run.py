"""A run of `asyncrl run` as part of an experiment, and its record in the form of a serial run."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.engines import list_engines
from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError
from asyncrl.experiments.serial_record import KEPT, RunRecord, describe_evaluations
from asyncrl.records import jsonl, metrics, rundir
from asyncrl.records.jsonl import JsonObject
from asyncrl.supervise.hosts import find_last_words, read_last_lines
from buffer import training_log


def needs_own_process(config: Config) -> str:
    """Return the reason why `config` cannot run in a warm process (serial.py); empty if it can."""
    if config.uses_sessions:
        return "agent: sessions need a gateway, which a warm process lacks; run it as processes"
    if not config.generator.abilities.one_process:
        return (
            f"generator.engine: {config.generator.engine} does not run in a warm process; "
            f"use {list_engines('one_process')}"
        )
    if config.learner.distributed:
        return (
            f"learner.backend: {config.learner.backend} with learner.ranks = "
            f"{config.learner.ranks} does not run in a warm process; use torch and one rank"
        )
    return ""


def complete(
    run_dir: Path,
    source: str,
    sets: Sequence[str],
    steps: int,
    log: Path,
    advice: str = "the same command continues from here",
) -> None:
    """Make the run of a config in `run_dir`, or continue it from its last checkpoint.

    log: file for its output.  Raises AsyncrlError, with `advice`, if it does not finish its
    steps."""
    if rundir.is_finished(run_dir, steps) and (run_dir / "summary.json").exists():
        return
    command = importing.make_command("asyncrl.cli", "run")
    items = [*sets, f"runs={str(run_dir.parent)!r}", f"name={run_dir.name!r}"]
    fresh = [*command, source, *[word for item in items for word in ("--set", item)], "--json"]
    resumable = any(run_dir.glob("checkpoints/epoch_*/number_*/manifest"))
    if run_dir.exists() and not resumable:
        shutil.rmtree(run_dir)
    argv = [*command, "--resume", str(run_dir), "--json"] if resumable else fresh
    log.parent.mkdir(exist_ok=True)
    with log.open("a", encoding="utf-8") as log_file:
        code = subprocess.run(
            argv,
            stdout=log_file,
            stderr=log_file,
            stdin=subprocess.DEVNULL,
            check=False,
            env=os.environ | {"NO_COLOR": "1"},
        ).returncode
    if rundir.is_finished(run_dir, steps):
        return
    raise AsyncrlError(
        f"run {run_dir.name} ended with exit code {code}: "
        f"{find_last_words(read_last_lines(log, 100))} (log: {log}); {advice}"
    )


def read_record(run_dir: Path, config: Config) -> RunRecord:
    """Read a finished run's files as the record of a serial run.

    Its `clock` is its wall time in milliseconds."""
    summary: JsonObject = json.loads((run_dir / "summary.json").read_bytes())
    rows = metrics.read(run_dir)
    batches = training_log.read(run_dir / "trained.jsonl")

    evaluations: dict[str, dict[int, float]] = {}
    for row in rows:
        for name in row:
            if name.startswith("eval/"):
                evaluations.setdefault(name, {})[int(row["step"])] = row[name]
    return summary | {
        "seed": config.seed,
        "clock": round(1000 * summary["wall_s"]),
        "batches": [
            {"ids": batch.ids, "tickets": batch.tickets} for _, batch in sorted(batches.items())
        ],
        "curve": [
            {"version": row["step"] + 1, "t": row.get("t", 0.0)}
            | {name: row[name] for name in (*KEPT, "lag/mean", "answer/length") if name in row}
            for row in rows
            if "reward/mean" in row
        ],
        "optimizer_steps": jsonl.read(run_dir / metrics.OPTIMIZER_STEPS),
        "evals": {},
        **describe_evaluations(evaluations),
        "abandoned": "",
    }
