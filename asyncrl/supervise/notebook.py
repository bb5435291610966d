"""A run from Python, as a notebook wants it: `asyncrl.run` starts one, `asyncrl.load_run` reads
one.  Imports no torch.
"""

from __future__ import annotations

import html
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import tomli_w

from asyncrl.config import bundled_configs, load
from asyncrl.config.tree import Config
from asyncrl.contract import errors, importing
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.records import jsonl, metrics

if TYPE_CHECKING:
    from pandas import DataFrame

INTERRUPTED = 130
# a refusal's class, by the exit code that the command ends with
KINDS: dict[int, type[AsyncrlError]] = {
    kind.exit_code: kind
    for kind in (
        errors.ConfigError,
        errors.ProcessLost,
        errors.PeerUnreachable,
        errors.DamagedDataError,
        errors.NothingToDo,
        errors.BufferTakenOver,
    )
}


class MetricSeries(msgspec.Struct, frozen=True, eq=False):
    """One metric, in the order in which it was measured; its unit is in docs/metrics.md."""

    steps: np.ndarray  # int64 [n]: batches committed when it was measured
    seconds: np.ndarray  # float64 [n]: of the run's work, pauses left out
    values: np.ndarray  # float64 [n]

    def __repr__(self) -> str:
        return (
            f"MetricSeries({len(self.values)} values, steps {self.steps[0]} to {self.steps[-1]}, "
            f"last {self.values[-1]:.4g})"
        )


class LoadedRun(msgspec.Struct, frozen=True, eq=False):
    """What a run directory says."""

    path: Path
    config: Config
    metrics: dict[str, MetricSeries]  # by name; what is no single number (a histogram) is left out
    samples: list[dict[str, Any]]  # rows of samples.jsonl: a few answers of the run, with rewards
    ledger: dict[str, int]  # tokens: `generated`, and where each of them ended
    summary: dict[str, Any]  # as `asyncrl run --json` prints it; `partial` is in it before the end

    def facts(self) -> dict[str, str]:
        """What identifies the run and how far it came, as a notebook shows it."""
        start, end = (self.summary[key] for key in ("heldout_start", "heldout_end"))
        accuracy = " -> ".join("-" if value is None else f"{value:.3f}" for value in (start, end))
        return {
            "path": str(self.path),
            "task": self.config.task.name,
            "model": self.config.model.path,
            "steps": f"{self.summary['steps']} of {self.config.learner.steps}",
            "held-out": accuracy,
            "mean lag": f"{self.summary['lag']['mean']:.2f}",
            "contents": f"{len(self.metrics)} metrics, {len(self.samples)} samples",
        }

    def __repr__(self) -> str:
        return f"LoadedRun({', '.join(f'{key}: {fact}' for key, fact in self.facts().items())})"

    def _repr_html_(self) -> str:
        """A table of `facts`, for a notebook."""
        rows = (
            f"<tr><th>{html.escape(key)}</th><td>{html.escape(fact)}</td></tr>"
            for key, fact in self.facts().items()
        )
        return f"<table>{''.join(rows)}</table>"

    def rows(self) -> list[dict[str, float]]:
        """The metrics by time: `step`, `seconds` and what was measured then.

        An evaluation's row holds its accuracies alone, a batch's row all else."""
        table: dict[tuple[float, int], dict[str, float]] = {}
        for name, one in self.metrics.items():
            measured = zip(one.seconds.tolist(), one.steps.tolist(), one.values, strict=True)
            for seconds, step, value in measured:
                row = table.setdefault((seconds, step), {"step": step, "seconds": seconds})
                row[name] = float(value)
        return [table[key] for key in sorted(table)]

    def frame(self) -> DataFrame:
        """`rows` as a pandas frame; NaN where a row lacks a metric.

        Raises ConfigError where pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                "frame() needs pandas: pip install pandas; rows() has the same without it"
            ) from error
        return pandas.DataFrame(self.rows())


def load_run(path: str | Path) -> LoadedRun:
    """Read a run directory; one that still goes on, or did not end well, as far as it came.

    Raises ConfigError where no run is."""
    where = Path(path)
    if not (where / "config.toml").is_file() or not (where / "run_id").is_file():
        raise ConfigError(
            f"{where} is no run directory (config.toml and run_id are not both in it); give the "
            "one that `asyncrl run` named, as in runs/NAME"
        )
    config = load.load(where / "config.toml")
    try:
        summary = dict(json.loads((where / "summary.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        from asyncrl.supervise.summary import compose

        summary = compose(config, where)
    return LoadedRun(
        where,
        config,
        series(metrics.read(where)),
        jsonl.read(where / "samples.jsonl"),
        summary["ledger"],
        summary,
    )


def series(rows: Sequence[Mapping[str, Any]]) -> dict[str, MetricSeries]:
    """Rows of metrics.jsonl, by metric.

    >>> series([{"step": 1, "t": 0.5, "a": 2.0}, {"step": 2, "t": 1.5, "a": 3.0}])["a"].values
    array([2., 3.])
    """
    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "t") and isinstance(value, int | float):
                measured = (row["step"], row.get("t", 0.0), value)
                found.setdefault(name, []).append(measured)
    out = {}
    for name, many in found.items():
        steps, seconds, values = zip(*many, strict=True)
        out[name] = MetricSeries(
            np.array(steps, np.int64), np.array(seconds, np.float64), np.array(values, np.float64)
        )
    return out


def run(
    config: str | Path | Mapping[str, Any] | Config,
    sets: Sequence[str] = (),
    *,
    show: bool = False,
) -> LoadedRun:
    """Run it to its end, as `asyncrl run` does, in processes of its own; returns what it left.

    config: a file, the name of a shipped one (`demo`), a table of the same keys, or a config that
    was loaded; in a table `{here}` is the working directory.  sets: `key.path=value`, as on the
    command line.  show: print on stderr what the command says.

    Raises what the command refuses with, by the same line: ConfigError, ProcessLost,
    PeerUnreachable, Damaged or another AsyncrlError.  An interrupt (KeyboardInterrupt, passed on)
    lets the run write a checkpoint first; another one stops it at once."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-notebook-") as folder:
        if isinstance(config, str | Path):
            source = Path(config)
        else:
            source = Path(folder) / "notebook.toml"
            source.write_text(_toml(config), encoding="utf-8")
        words = [word for item in sets for word in ("--set", item)]
        argv = importing.command("asyncrl.cli", "run", str(source), "--json", *words)
        with (Path(folder) / "answer").open("w+", encoding="utf-8") as answer:
            code, said = _call(argv, answer.fileno(), show)
            answer.seek(0)
            found = _last_object(answer.read())
    if code == INTERRUPTED:
        where = found.get("run_dir")
        raise KeyboardInterrupt(
            f"the run was stopped; asyncrl.load_run({where!r})" if where else ""
        )
    if code:
        error = KINDS.get(code, AsyncrlError)(found.get("error") or said or f"exit code {code}")
        error.exit_code = code
        raise error
    return load_run(found["run_dir"])


def _toml(config: Mapping[str, Any] | Config) -> str:
    """A config or a raw table as a file that says the same from anywhere."""
    if isinstance(config, Config):
        return load.dump(config)
    return tomli_w.dumps(bundled_configs.substitute_here(dict(config), Path.cwd()))


def _last_object(text: str) -> dict[str, Any]:
    """The JSON object in the last line of a command's stdout; empty after a crash.

    >>> _last_object('a line {"steps": 6}'), _last_object('{"steps": 6}'), _last_object("")
    ({}, {'steps': 6}, {})
    """
    try:
        return dict(json.loads(text.strip().rpartition("\n")[2]))
    except ValueError:
        return {}


def _call(argv: Sequence[str], answer: int, show: bool) -> tuple[int, str]:
    """The command's exit code, and the last line that it said; `answer` takes its stdout.

    It lives in a session of its own: an interrupt of this process's group reaches it once.  Where
    this process is killed, what the command says next has no reader, and that ends it."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=answer,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    last = ""
    while True:
        try:
            for line in process.stderr:
                last = line.strip() or last
                if show:
                    print(line, end="", file=sys.stderr, flush=True)
            return process.wait(), last
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
