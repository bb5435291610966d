"""`asyncrl run`: checks, warm start, all processes under a supervisor, the live view, summary and report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl import config_load, devices, importing, live, metrics, recording, report, rundir, signs, trace
from asyncrl.config import Config
from asyncrl.errors import AsyncrlError, ConfigError, NothingToDo
from asyncrl.launch import Supervisor
from asyncrl.messages import Status

FIXED_ON_RESUME = ("seed", "model.path", "model.dtype", "task", "learner.groups", "learner.group_size", "durability")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Watcher:
    """Says each sign that a run goes wrong once, while it goes on.

    It reads the whole of metrics.jsonl when the run has grown by a quarter, so all its readings
    together cost as much as five at the end.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], None], about: signs.About | None = None) -> None:
        self.run_dir, self.say, self.about = run_dir, say, about
        self.said: set[str] = set()
        self.next = signs.LEAST
        self.measured: list[Mapping[str, float]] = []  # what `latest` was, for every new mismatch in it

    def tell(self, found: Sequence[signs.Sign]) -> None:
        for sign in found:
            if sign.name not in self.said:
                self.said.add(sign.name)
                self.say(f"note: {sign.line()}")

    def look(self, committed: int, latest: Mapping[str, float] = {}) -> None:
        """After `committed` batches of the run.

        latest: the newest value of each metric, of whatever batch; it tells of an engine that differs in the first batch already.
        """
        before = self.measured[-1] if self.measured else {}
        if self.about is not None and latest.get(signs.MISMATCH) != before.get(signs.MISMATCH):
            self.measured = [*self.measured[-signs.WINDOW :], latest]
            if found := signs.engine_mismatch(self.measured, self.about):
                self.tell([found])
        if committed >= self.next:
            self.next = max(committed + 1, committed * 5 // 4)
            self.tell(signs.signs(metrics.read(self.run_dir), self.about))


HEALTHY, HEALTHY_EXPERTS = 1e-3, 0.1  # k3 between engine and learner at equal weights, dense models and mixtures of experts


def about(config: Config) -> signs.About:
    """What the rules know of a run: its settings, and how far engine and learner of such a model may be apart."""
    try:
        keys = json.loads((Path(config.model.path) / "config.json").read_text())
    except (OSError, ValueError):
        keys = {}
    experts = {"num_experts", "num_local_experts", "n_routed_experts"} & set(keys)
    return signs.About(config, HEALTHY_EXPERTS if experts else HEALTHY)


def task_signs(config: Config) -> list[signs.Sign]:
    """What the task's own files say: prompts without the answers that their reward compares with."""
    from asyncrl.tasks import get_task
    from asyncrl.tasks.file import FileTask

    try:
        task = get_task(config.task)
    except ConfigError:  # of a run that is over, whose file has gone since
        return []
    if not isinstance(task, FileTask) or config.reward.function or not task.unanswered:
        return []
    return [signs.answers_missing(config.task.prompts, task.unanswered, len(task.sets["train"]))]


def preflight(config: Config) -> None:
    """What can be known before anything starts: model directory, tokenizer, task, room for the prompts, reward function."""
    from asyncrl.engines import missing_vllm
    from asyncrl.tasks import get_task
    from asyncrl.tasks.file import FileTask

    if config.generator.engine == "vllm" and (why := missing_vllm()):
        raise ConfigError(f"generator.engine = vllm: {why}")
    if why := devices.missing(config):
        raise ConfigError(why)
    task = get_task(config.task)
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        if not config.model.warm_start:
            raise ConfigError(f"model.path: {path} is no model directory (it has no config.json); model.warm_start = true builds one for a built-in task")
        from asyncrl.tasks.warm_start import warm_start

        say(f"building and warm-starting a tiny model for `{config.task.name}` in {path}")
        done = warm_start(config, path)
        say(f"warm start: {done['steps']} steps in {done['seconds']} s, loss {done['loss']:.3f}")
    from actors.rewards import check
    from asyncrl import model_check
    from asyncrl.tokenizer import encode_prompt

    tokenizer = model_check.check(config)
    room = config.generator.context - config.generator.max_new_tokens
    for split in ("train", "heldout", "ood"):
        size = len(task.sets[split]) if isinstance(task, FileTask) else task.size(split)
        for i in range(64 if size is None else min(size, 2000)):
            prompt = task.prompt(split, i, config.seed)
            n = len(encode_prompt(tokenizer, prompt))
            if not n:
                raise ConfigError(f"task: {split} prompt {prompt.id} has no token under the tokenizer in {path}: it is empty, or of other symbols")
            if n > room:
                raise ConfigError(f"generator.context: {split} prompt {prompt.id} has {n} tokens; context {config.generator.context} less "
                                  f"max_new_tokens {config.generator.max_new_tokens} leaves {room}")  # fmt: skip
    if config.reward.function and ":" not in config.reward.function:
        raise ConfigError(f"reward.function: {config.reward.function} is not module:function")
    if config.reward.function:
        check(config)
    if config.exact:
        from asyncrl import exact_check

        wrong = exact_check.failure(exact_check.check(config))
        if wrong and config.exact is True:
            raise ConfigError(f'exact: {wrong}; `asyncrl doctor --exact CONFIG` shows the table, exact = "try" goes on')
        say(f'exact: {wrong}; going on, as exact = "try" asks' if wrong else "exact: engine and learner agree bitwise in the self-test")


def resolve_resume(run_dir: Path, sets: Sequence[str]) -> Config:
    """The config of a run to go on with.  Raises ConfigError for keys that may not change, NothingToDo when it is finished."""
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(f"--resume {run_dir}: no run directory (it has no config.toml)")
    before = config_load.load(run_dir / "config.toml")
    config = config_load.load(run_dir / "config.toml", sets)
    for item in sets:
        key = item.partition("=")[0].strip()
        if any(key == f or key.startswith(f + ".") for f in FIXED_ON_RESUME):
            raise ConfigError(f"--set {item}: {key} cannot change when a run is resumed; start a new run")
    summary = run_dir / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["steps"] >= config.learner.steps:
        raise NothingToDo(f"{run_dir} has made all its {config.learner.steps} steps; raise it by --set learner.steps=N to train on")
    if config.staleness.max_lag != before.staleness.max_lag:
        rundir.note_limit(run_dir, before.staleness.max_lag)
    if config != before:
        part = run_dir / "config.toml.part"
        part.write_text(config_load.dump(config))
        os.replace(part, run_dir / "config.toml")
    return config


def supervise(config: Config, run_dir: Path, watcher: Watcher) -> int:
    """Run all processes to their end; 130 when interrupted.  Raises what ended the run otherwise."""
    lock = rundir.Lock(run_dir)
    outside = rundir.outside(run_dir)
    supervisor = Supervisor(config, run_dir, say)
    sweeper = subprocess.Popen(importing.command("asyncrl.sweeper", str(run_dir)), stdin=subprocess.PIPE, start_new_session=True)

    def interrupt(number: int, _frame: Any) -> None:
        supervisor.interrupts += 1
        say("stopping: the learner finishes its batch and writes a checkpoint; once more stops at once" if supervisor.interrupts == 1 else "stopping now")

    def observe(status: Status) -> None:
        supervisor.observe(status)
        if not (run_dir / "config.toml").exists():
            raise AsyncrlError(f"{run_dir} was removed or moved while the run went on; what it had written is where it went, and the run has ended")
        watcher.look(status.committed, status.metrics)

    previous = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        supervisor.start()
        live.follow(rundir.buffer_address(config, run_dir), config.wires.curve_dir, lambda: supervisor.poll() or supervisor.interrupts > 0, observe)
        supervisor.end(gently=supervisor.interrupts < 2)
        return 130 if supervisor.interrupts else 0
    finally:
        supervisor.end(gently=False)
        for number, handler in previous.items():
            signal.signal(number, handler)
        rundir.remove(outside)
        lock.close()
        sweeper.communicate()


def summarise(config: Config, run_dir: Path) -> dict[str, Any]:
    """summary.json: the contract's object, from what buffer and learner left behind."""
    left: dict[str, Any] = json.loads((run_dir / "buffer_summary.json").read_text())
    rows = [r for r in metrics.read(run_dir) if "reward/mean" in r]

    def mean(name: str) -> float:
        found = [r[name] for r in rows if name in r]
        return sum(found) / len(found) if found else 0.0

    digest = run_dir / "weights_digest"
    now = config.staleness.max_lag
    limit = max([now, *rundir.limits(run_dir)])  # the one that all its tokens kept to
    first = {split: next((r[f"eval/{split}"] for r in metrics.read(run_dir) if f"eval/{split}" in r and not r["step"]), None) for split in ("heldout", "ood")}
    summary = {
        "run_dir": str(run_dir), "wall_s": left["wall_s"], "steps": left["steps"], "trajectories": left["trajectories"], "tokens": left["tokens"],
        "heldout_start": left["heldout_start"] if left["heldout_start"] is not None else first["heldout"], "heldout_end": left["heldout_end"],
        "ood_start": left["ood_start"] if left["ood_start"] is not None else first["ood"], "ood_end": left["ood_end"],
        "lag": left["lag"] | {"limit": _limit(limit)} | ({"limit_now": _limit(now)} if now != limit else {}),
        "speed": {"generator_tokens_per_s": mean("throughput/generator_tokens_per_s"), "learner_tokens_per_s": mean("throughput/learner_tokens_per_s"),
                  "idle_share": {"generator": mean("time/generator_idle_share"), "learner": mean("time/learner_idle_share")}},
        "weights_digest": digest.read_text() if digest.exists() else None, "mismatch_k3_max": left["mismatch_k3_max"], "ledger": left["ledger"],
        "ledger_lines": left["ledger_lines"], "lag_histogram": left["lag_histogram"], "trained_ids": left["trained_ids"], "failures": left["failures"],
        "seed": config.seed,
        "certainty": {split: {"n": n, "half": half} for split in ("heldout", "ood") for n, half in report.certainty(metrics.read(run_dir), split)[-1:]},
        "signs": [s._asdict() for s in (*task_signs(config), *signs.signs(metrics.read(run_dir), about(config), ended=left["steps"] >= config.learner.steps))],
    }  # fmt: skip
    part = run_dir / "summary.json.part"
    part.write_text(json.dumps(summary, indent=1))
    os.replace(part, run_dir / "summary.json")
    return summary


def within(summary: Mapping[str, Any]) -> str:
    """How sure the last held-out accuracy is, over prompts."""
    sure = summary.get("certainty", {}).get("heldout")
    return f" +-{sure['half']:.3f} (n = {sure['n']:,})" if sure else ""


def _limit(x: float) -> int | str:
    return int(x) if x != float("inf") else "inf"


def run(config: Config, run_dir: Path, *, resume: bool) -> tuple[int, dict[str, Any]]:
    """The whole of `asyncrl run`; returns the exit code and the summary."""
    for warning in config_load.warnings(config):
        say(f"note: {warning}")
    preflight(config)
    watcher = Watcher(run_dir, say, about(config))
    watcher.tell(task_signs(config))
    if not resume:
        rundir.prepare(config, config_load.dump(config), run_dir)
    say(f"run {run_dir}: {config.generators} generator(s), {config.learner.steps} steps of {config.learner.groups} x {config.learner.group_size}")
    began = time.monotonic()
    try:
        code = supervise(config, run_dir, watcher)
    finally:
        if run_dir.is_dir():
            trace.merge(run_dir)
    if code and not (run_dir / "buffer_summary.json").exists():
        say(f"stopped at once, without a summary; go on with: asyncrl run --resume {run_dir}")
        return code, {}
    summary = summarise(config, run_dir)
    watcher.tell([signs.Sign(**s) for s in summary["signs"]])
    report.write(run_dir)
    say(f"{run_dir}: held-out {_show(summary['heldout_start'])} -> {_show(summary['heldout_end'])}{within(summary)} in {summary['wall_s']:.0f} s of RL "
        f"({time.monotonic() - began:.0f} s in all), mean lag {summary['lag']['mean']:.2f}")  # fmt: skip
    if config.record.stream:
        say(f"recording: {recording.size(run_dir) / recording.MIB:.1f} MiB, bound {config.record.stream_mib} MiB; asyncrl replay {run_dir}")
    say(f"report: {run_dir / 'report.html'}" if code == 0 else f"go on with: asyncrl run --resume {run_dir}")
    return code, summary


def _show(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"
