"""Runs from Python and notebooks: `asyncrl.run` starts one, `asyncrl.load_run` reads one.

Does not import torch.
"""

from __future__ import annotations

import ast
import html
import json
import re
import signal
import subprocess
import symtable
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncrl.config import bundled_configs, layers, load
from asyncrl.config.tree import Config
from asyncrl.contract import importing, toml_writer
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import Numbers
from asyncrl.records import jsonl, metrics
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import format_number
from asyncrl.supervise import doctor
from asyncrl.supervise import summary as summaries
from asyncrl.supervise.report.run_view import RunView
from asyncrl.tasks.data import row_objects

if TYPE_CHECKING:
    from pandas import DataFrame

INTERRUPTED = 130
POLL_S = 0.2  # between two checks for new output of a run
START_LINE = re.compile(r"run (.+): \d+ generator\(s\), ")  # `asyncrl run` prints its directory so
# receives a row of metrics or a checkpoint
Callback = Callable[[JsonObject], Any]
# exception class by the command's exit code
KINDS = {kind.exit_code: kind for kind in AsyncrlError.__subclasses__() if kind.exit_code > 1}


class MetricSeries(msgspec.Struct, frozen=True, eq=False):
    """A metric over the run, in order of time; its unit is in `asyncrl config metrics`."""

    steps: np.ndarray  # int64 [n]: committed batches at the time of the measurement
    seconds: np.ndarray  # float64 [n]: time of the run, without pauses
    values: np.ndarray  # float64 [n]

    def __repr__(self) -> str:
        return (
            f"MetricSeries({len(self.values)} values, steps {self.steps[0]} to {self.steps[-1]}, "
            f"last {self.values[-1]:.4g})"
        )


class LoadedRun(msgspec.Struct, frozen=True, eq=False):
    """The content of a run directory."""

    path: Path
    config: Config
    metrics: dict[str, MetricSeries]  # by name; scalars only, without histograms
    samples: list[JsonObject]  # rows of samples.jsonl: a few samples with rewards
    # rows of optimizer_steps.jsonl: `step` (the batch), `update` (number in it), metrics by name
    optimizer_steps: list[Numbers]
    ledger: dict[str, int]  # tokens: `generated`, and the number in each line
    summary: JsonObject  # as `asyncrl run --json` prints it; can have `partial` before the end

    def facts(self) -> dict[str, str]:
        """Return the run's identity and progress, as a notebook shows them."""
        accuracy = (
            format_number(self.summary[key], ".3f") for key in ("heldout_start", "heldout_end")
        )
        return {
            "path": str(self.path),
            "task": self.config.task.name,
            "model": self.config.model.path,
            "steps": f"{self.summary['steps']} of {self.config.learner.steps}",
            "held-out": " -> ".join(accuracy),
            "mean lag": f"{self.summary['lag']['mean']:.2f}",
            "contents": f"{len(self.metrics)} metrics, {len(self.samples)} samples",
        }

    def __repr__(self) -> str:
        return f"LoadedRun({', '.join(f'{key}: {fact}' for key, fact in self.facts().items())})"

    def _repr_html_(self) -> str:
        """Return `facts` as an HTML table for notebooks."""
        rows = (
            f"<tr><th>{html.escape(key)}</th><td>{html.escape(fact)}</td></tr>"
            for key, fact in self.facts().items()
        )
        return f"<table>{''.join(rows)}</table>"

    def rows(self) -> list[Numbers]:
        """Return the metrics in rows by time: `step`, `seconds` and the values at that time.

        A row of an evaluation has only its accuracies, a row of a batch all other metrics."""
        table: dict[tuple[float, int], Numbers] = {}
        for name, series in self.metrics.items():
            for seconds, step, value in zip(
                series.seconds.tolist(), series.steps.tolist(), series.values, strict=True
            ):
                row = table.setdefault((seconds, step), {"step": step, "seconds": seconds})
                row[name] = float(value)
        return [table[key] for key in sorted(table)]

    def frame(self) -> DataFrame:
        """Return `rows` as a pandas DataFrame, with NaN for missing values.

        Raises ConfigError if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                "frame() needs pandas: pip install pandas; rows() returns the same data without it"
            ) from error
        return pandas.DataFrame(self.rows())


def load_run(path: str | Path) -> LoadedRun:
    """Read a run directory, also of a live or failed run.

    Raises ConfigError if `path` is not a run directory."""
    directory = Path(path)
    if not (directory / "config.toml").is_file() or not (directory / "run_id").is_file():
        raise ConfigError(
            f"{directory} is not a run directory (it lacks config.toml or run_id); give the one "
            "that `asyncrl run` printed, such as runs/NAME"
        )
    view = RunView.open(directory)
    summary = summaries.read(view.config, directory)
    steps, seconds = (view.series.axes[axis].values for axis in ("step", "time"))
    return LoadedRun(
        path=directory,
        config=view.config,
        metrics={
            name: MetricSeries(
                steps[column.rows].astype(np.int64), seconds[column.rows], column.values.copy()
            )
            for name, column in view.series.columns.items()
        },
        samples=jsonl.read(directory / "samples.jsonl"),
        optimizer_steps=jsonl.read(directory / metrics.OPTIMIZER_STEPS),
        ledger=summary["ledger"],
        summary=summary,
    )


@dataclass
class RunFollower:
    """Read the new output of a run and call the callbacks.

    stopped: a callback has ended the run; no callback is called after that.
    """

    on_step: Callback | None
    on_evaluation: Callback | None
    on_checkpoint: Callback | None
    run_dir: Path | None = None
    stopped: bool = False
    _file: jsonl.GrowingFile | None = None
    _version: int = 0

    def read_new(self) -> None:
        """Call the callbacks for every new row of metrics.jsonl and for a new checkpoint."""
        if self.run_dir is None or self.stopped:
            return
        self._file = self._file or jsonl.GrowingFile(self.run_dir / "metrics.jsonl")
        for row in self._file.read_rows():
            callback = self.on_evaluation if metrics.name_evaluation(row) else self.on_step
            self._pass_on(callback, row)
        checkpoint = doctor.find_checkpoint(self.run_dir)
        if checkpoint and checkpoint["version"] > self._version:
            self._version = checkpoint["version"]
            self._pass_on(self.on_checkpoint, checkpoint)

    def _pass_on(self, callback: Callback | None, value: JsonObject) -> None:
        if callback and not self.stopped:
            self.stopped = callback(value) is True


def run(
    config: str | Path | Mapping[str, Any] | Config,
    sets: Sequence[str] = (),
    *,
    show: bool = False,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
) -> LoadedRun:
    """Run a config to its end in separate processes like `asyncrl run`, and load the result.

    config: a file, the name of a bundled config (`demo`), a table of the same keys, or a loaded
        config.  In a table `{here}` is the working directory, and prompts may be objects: a
        `datasets.Dataset` or a list of dicts.  Their rows are stored in a file below `runs`.
    sets: `key.path=value`, as on the command line.
    show: print the command's messages on stderr.
    on_step, on_evaluation: called with each row of metrics.jsonl as it is written: `step`, `t` and
        metrics by name.  Rows of evaluations go to on_evaluation.
    on_checkpoint: called with `version` and `path` of a new checkpoint.

    A callback that returns True stops the run early with a checkpoint; the result is the stopped
    run, which `asyncrl run --resume` continues.  An exception of a callback also stops the run and
    is raised.

    Raises the command's error with the same message: ConfigError, ProcessLost, PeerUnreachable,
    DamagedDataError or another AsyncrlError.  After an interrupt, the run writes a checkpoint, then
    KeyboardInterrupt is raised; a second interrupt stops the run at once."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-notebook-") as folder:
        if isinstance(config, str | Path):
            source = Path(config)
        else:
            source = Path(folder) / "notebook.toml"
            source.write_text(_format_toml(config), encoding="utf-8")
        options = [word for item in sets for word in ("--set", item)]
        argv = importing.make_command("asyncrl.cli", "run", str(source), "--json", *options)
        follower = RunFollower(on_step, on_evaluation, on_checkpoint)
        with (Path(folder) / "answer").open("w+", encoding="utf-8") as stdout:
            code, message = _run_command(argv, stdout, Path(folder) / "log", show, follower)
            stdout.seek(0)
            try:  # the JSON object in the last line, if any
                result = dict(json.loads(stdout.read().strip().rpartition("\n")[2]))
            except ValueError:
                result = {}
    if code == INTERRUPTED and follower.stopped and "run_dir" in result:
        return load_run(result["run_dir"])
    if code == INTERRUPTED:
        run_dir = result.get("run_dir")
        raise KeyboardInterrupt(
            f"the run was stopped; read it with asyncrl.load_run({run_dir!r})" if run_dir else ""
        )
    if code:
        text = result.get("error") or message or f"exit code {code}"
        text = re.sub(rf"{folder}\S+ ", "", text)  # a place in the caller's table
        raise KINDS.get(code, AsyncrlError)(text, code)
    return load_run(result["run_dir"])


def train(
    model: str | Path,
    dataset: Any,
    reward: str | Callable[..., Any] | list[Any],
    method: str = "ppo",
    max_lag: float = 2,
    *,
    show: bool = True,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    **keys: Any,
) -> LoadedRun:
    """Train a model on a data set with rewards, by `run`; the result is in its `path / "model"`.

    model: a directory, or hf://ORG/NAME.
    dataset: a list of dicts, a `datasets.Dataset` or a path; `prompt` is a column.
    reward: a function of docs/rewards.md, also in TRL's form, `file.py:name`, or a list of them.  A
        function, and what it uses, stands at the top level of a script, module or notebook.
    method: a name of `asyncrl methods`.
    max_lag: staleness.max_lag; 0 alternates between sampling and training.
    show, on_step, on_evaluation, on_checkpoint: as for `run`.
    keys: other keys, as `**{"learner.steps": 100}`, or by TRL's name: max_steps=100.

    Raises the errors of `run`."""
    folder = Path(keys.get("runs", "runs")).resolve() / row_objects.FOLDER
    rewards = reward if isinstance(reward, list) else [reward]
    paths = [one if isinstance(one, str) else _export_function(one, folder) for one in rewards]
    table = {
        "method": method,
        "model.path": str(model),
        "task.name": "file",
        "task.prompts": dataset,
        "staleness.max_lag": max_lag,
    } | ({"reward.functions": paths} if rewards is reward else {"reward.function": paths[0]})
    for key, value in keys.items():
        if (name := load.RENAMED.get(key, key)) in table:
            raise ConfigError(f"{key}: is also given by another argument; remove one of them")
        table[name] = value
    return run(
        layers.nest(table),
        show=show,
        on_step=on_step,
        on_evaluation=on_evaluation,
        on_checkpoint=on_checkpoint,
    )


def _export_function(function: Callable[..., Any], folder: Path) -> str:
    """Return the `file.py:name` of a function for other processes. Raises ConfigError.

    Importing a script would start its run again: the statements of a script or notebook that the
    function needs are written to a file in `folder`."""
    name, module = getattr(function, "__qualname__", ""), sys.modules[function.__module__]
    file, cells = getattr(module, "__file__", None), vars(module).get("In")
    if module.__name__ != "__main__" and name.isidentifier():
        return f"{module.__name__ if '.' in module.__name__ else file}:{name}"
    statements: list[ast.stmt] = []
    for cell in cells or ([Path(file).read_text(encoding="utf-8")] if file else []):
        with suppress(SyntaxError):  # of a cell that failed
            statements += ast.parse(cell).body
    by_name = {
        symbol.get_name(): node
        for node in statements
        for symbol in symtable.symtable(ast.unparse(node), "", "exec").get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    if name not in by_name:
        raise ConfigError(
            f"reward: {name or function} is not defined at the top level of a script or cell; "
            "define it there, or give file.py:name"
        )
    needed, pending = set(), [name]
    while pending:
        node = by_name.get(pending.pop())
        if node is not None and node not in needed:
            needed.add(node)
            pending += [x.id for x in ast.walk(node) if isinstance(x, ast.Name)]
    source = "\n\n".join(ast.unparse(node) for node in statements if node in needed)
    return f"{row_objects.write_content(source, folder, '.py')}:{name}"


def _format_toml(config: Mapping[str, Any] | Config) -> str:
    """Format a config or a table as TOML that does not depend on the working directory."""
    if isinstance(config, Config):
        return load.dump(config)
    table = bundled_configs.substitute_here(dict(config), Path.cwd())
    row_objects.write_objects(table, Path(table.get("runs", "runs")).resolve() / row_objects.FOLDER)
    return toml_writer.dumps(table)


def _run_command(
    argv: Sequence[str], stdout: IO[str], log: Path, show: bool, follower: RunFollower
) -> tuple[int, str]:
    """Run a command; return its exit code and the last line of its stderr.

    log: file for its stderr.  The command has its own session, so that an interrupt of this
    process's group reaches it once.  It is killed if this process is.  An error of a callback is
    raised after the end of the command."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=importing.end_with_parent(),
        )
    output = jsonl.GrowingFile(log)
    last_line, callback_error, interrupted = "", None, False
    while True:
        try:
            code = process.poll()
            for line in output.read_new().decode(errors="replace").splitlines(keepends=True):
                last_line = line.strip() or last_line
                if start_line := START_LINE.match(line):
                    follower.run_dir = Path(start_line[1])
                if show:
                    print(line, end="", file=sys.stderr, flush=True)
            try:
                follower.read_new()
            except Exception as error:
                callback_error, follower.stopped = error, True
            if code is not None:
                break
            if follower.stopped and not interrupted:
                interrupted = True
                process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
    if callback_error:
        raise callback_error
    return code, last_line
