"""One run as the pages of `asyncrl watch` show it, from the files of its directory."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.contract.toml_writer import flatten
from asyncrl.records import jsonl, metrics, process_log, rundir
from asyncrl.supervise import doctor, live, summary
from asyncrl.supervise.report import advice
from asyncrl.supervise.report.series import Series
from asyncrl.supervise.report.token_samples import FILE, SampleStore

LOG_BYTES = 64 * 1024
COMPOSE_S = 5.0  # a summary of a run in progress is composed at most this often
COMPOSE_SHARE = 0.005  # share of a core that composing it costs at most


@dataclass
class WatchedRun:
    """A run directory and the data read from it so far."""

    no_samples: ClassVar[str] = (
        "This run has logged no samples yet: it logs some of every record.samples_every-th batch "
        "(record.token_samples)."
    )

    id: str
    path: Path
    series: Series = field(init=False)
    samples: SampleStore = field(init=False)
    steps: Series = field(init=False)  # of optimizer_steps.jsonl, read on demand
    problem: str = ""  # why its files cannot be read
    _summary: dict[str, Any] = field(default_factory=dict)
    _next_summary: float = 0.0
    _config: tuple[tuple[int, int], Config] | None = None

    def __post_init__(self) -> None:
        self.series = Series(self.path / "metrics.jsonl")
        self.samples = SampleStore(self.path / FILE)
        self.steps = Series(self.path / metrics.OPTIMIZER_STEPS)

    def refresh(self) -> None:
        """Read what the run has written since the last call."""
        self.series.refresh()
        self.samples.refresh()

    @property
    def config(self) -> Config:
        """The run's settings, read again when the file has changed. Raises ConfigError."""
        path = self.path / "config.toml"
        try:
            status = path.stat()
        except OSError:
            raise ConfigError(
                f"{self.path}: the run directory was removed, or has no config.toml"
            ) from None
        version = (status.st_mtime_ns, status.st_size)
        if self._config is None or self._config[0] != version:
            self._config = (version, load.load(path))
        return self._config[1]

    def read_summary(self) -> dict[str, Any]:
        """Return the run's summary object; {} until it exists.

        A thread composes that of a run in progress, at most every COMPOSE_S seconds.
        """
        if summary := jsonl.read_object(self.path / "summary.json"):
            return summary
        if time.monotonic() >= self._next_summary:
            self._next_summary = math.inf
            # in a thread, because a long run takes seconds
            threading.Thread(target=self._compose, name="summary", daemon=True).start()
        return self._summary

    def _compose(self) -> None:
        start = time.monotonic()
        try:
            has_rows = (self.path / "metrics.jsonl").exists()
            self._summary = summary.compose(self.config, self.path) if has_rows else {}
        except (OSError, ValueError, KeyError, TypeError, AsyncrlError):
            self._summary = {}
        end = time.monotonic()
        self._next_summary = end + max(COMPOSE_S, (end - start) / COMPOSE_SHARE)

    def describe_state(self) -> dict[str, Any]:
        """Return the run's row of the list: state, steps, newest held-out reward, mean lag."""
        try:
            config = self.config
            planned, problem = config.learner.steps, ""
            finished = rundir.is_finished(self.path, planned)
        except (AsyncrlError, OSError) as error:
            planned, finished, problem = 0, False, str(error)
        running = process_log.list_alive(self.path)
        state = "running" if running else "finished" if finished else "stopped"
        rows = self.series.rows
        return {
            "id": self.id,
            "path": str(self.path),
            "state": "unreadable" if problem else state,
            "problem": problem,
            "step": self._count_trained_steps(),
            "steps": planned,
            "seconds": float(self.series.axes["time"].values[-1]) if rows else 0.0,
            "accuracy": self.series.get_latest("eval/heldout"),
            "reward": self.series.get_latest("reward/mean"),
            "lag": self.series.get_latest("lag/mean"),
            "rows": rows,
            "samples": len(self.samples.heads),
            "summed_up": bool(self._summary),
            "damaged": self.series.damaged + self.samples.damaged,
        }

    def _count_trained_steps(self) -> int:
        """Count trained batches, whose rows are numbered from 0."""
        trained = self.series.columns.get("reward/mean")
        if trained is None or not trained.count:
            return 0
        return int(self.series.axes["step"].values[trained.rows[-1]]) + 1

    def build_overview(self) -> dict[str, Any]:
        """Return state, advice, health checks and the main figures."""
        summary = self.read_summary()
        latest = {name: float(column.values[-1]) for name, column in self.series.columns.items()}
        waits = [
            text
            for text in (live.describe_reward_wait(latest), live.describe_slow_link(latest))
            if text
        ]
        return {
            "state": self.describe_state(),
            "advice": [line._asdict() for line in self.list_advice(summary.get("signs", []))],
            "waits": waits,
            "speed": summary.get("speed", {}),
            "lag": summary.get("lag", {}),
            "certainty": summary.get("certainty", {}),
            "heldout": [summary.get("heldout_start"), summary.get("heldout_end")],
        }

    def list_advice(self, signs: list[dict[str, Any]]) -> list[advice.Advice]:
        """Return the first lines of the page."""
        config, ended = None, False
        with contextlib.suppress(AsyncrlError, OSError):
            config = self.config
            ended = rundir.is_finished(self.path, config.learner.steps)
        return advice.list_advice(config, self.path, ended=ended, series=self.series, signs=signs)

    @property
    def process_group(self) -> str:
        """Name under which its processes are shown."""
        return self.id

    def list_processes(self) -> list[dict[str, Any]]:
        """Return every process of the run: state, last end, restarts, last line of its log."""
        return add_starts(doctor.describe_processes(self.config, self.path), self.path)

    def read_ledger(self) -> dict[str, Any]:
        """Return the ledger: tokens by their end, with samples and mean reward."""
        summary = self.read_summary()
        return {
            "totals": summary.get("ledger", {}),
            "lines": summary.get("ledger_lines", {}),
            "failures": summary.get("failures", {}),
        }

    def read_optimizer_steps(self) -> Series:
        """Return optimizer_steps.jsonl as columns, up to its newest row."""
        self.steps.refresh()
        return self.steps

    def read_trained_batches(self) -> list[dict[str, Any]]:
        """Return the rows of trained.jsonl: one per batch, with its tokens by lag."""
        return jsonl.read(self.path / "trained.jsonl")

    def read_settings(self) -> dict[str, Any]:
        """Return the run's settings as {dotted key: value}."""
        return read_settings(self.path / "config.toml")

    def list_changed_settings(self) -> list[str]:
        """List the keys whose values are not the defaults."""
        config = load.build({"model": {"path": ""}, "task": {"name": "sort"}})
        defaults = flatten(tomllib.loads(load.dump(config)))
        settings = self.read_settings()
        return [key for key, value in settings.items() if defaults.get(key) != value]

    def list_logs(self) -> list[str]:
        """Return the names of the log files, the newest attempt first."""
        return list_log_names(self.path)

    def read_log_tail(self, name: str) -> str:
        """Return the end of a log file, escaped line by line.

        Raises ConfigError for a file that is not one of `logs`.
        """
        return read_log_tail(self.path, name)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a file as {dotted key: value}.  Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return flatten(tomllib.load(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def list_log_names(folder: Path) -> list[str]:
    """Return the names of the log files of a directory, the newest attempt first."""
    files = [*(folder / "logs").rglob("*.log"), *folder.glob("*.log")]
    root = folder.resolve()  # a link out of the directory would show another file
    inside = [path for path in files if path.resolve().is_relative_to(root) and path.is_file()]
    return sorted((str(path.relative_to(folder)) for path in inside), reverse=True)


def read_log_tail(folder: Path, name: str) -> str:
    """Return the end of a log file, escaped line by line.

    Raises ConfigError for a file that is not one of `list_log_names`.
    """
    if name not in list_log_names(folder):
        raise ConfigError(f"{name}: no log file of {folder}")
    path = folder / name
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        text = file.read().decode("utf-8", "replace")
    return "\n".join(escape_line(line, 2000) for line in text.splitlines())


def add_starts(rows: list[dict[str, Any]], run_dir: Path) -> list[dict[str, Any]]:
    """Add host, process id, memory and restarts to descriptions of processes."""
    events = process_log.read_events(run_dir)
    for row in rows:
        starts = [e for e in events if (e.get("name"), e.get("event")) == (row["name"], "began")]
        row["restarts"] = max(len(starts) - 1, 0)
        row["host"] = starts[-1].get("host", "") if starts else ""
        row["pid"] = starts[-1].get("pid") if starts else None
        row["memory_mb"] = measure_resident_mb(row["pid"]) if row["alive"] else None
    return rows


def measure_resident_mb(pid: int | None) -> float | None:
    """Return the resident memory of a process of this machine in MiB, or None if there is none."""
    if pid is None:
        return None
    import psutil

    try:
        return float(psutil.Process(pid).memory_info().rss / 2**20)
    except psutil.Error:
        return None


def list_differences(runs: list[WatchedRun]) -> list[dict[str, Any]]:
    """Return the settings in which the runs differ, as {key, values by run}."""
    settings = {run.id: run.read_settings() for run in runs}
    keys = sorted({key for values in settings.values() for key in values})
    return [
        {"key": key, "values": {name: values.get(key) for name, values in settings.items()}}
        for key in keys
        if len({json.dumps(values.get(key), default=str) for values in settings.values()}) > 1
    ]
