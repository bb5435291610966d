"""`asyncrl replay`: train again, offline, on the stream that a run recorded.

    RUN/recording --> batches in their order --> the learner's own step (learner/step.py) -->
    OUT/metrics.jsonl, model, report.html

Loss, correction, KL or early stop may change. If nothing changes, the recorded losses, norms and
weights are reproduced, bitwise on the same machine. Otherwise the data stays as recorded: lags,
behavior probabilities and rewards. In a run, the changed learner's weights would have sampled other
completions from the second version on. Every report of this module says so.
"""

import json
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from asyncrl.config import layers, load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError, DamagedDataError, NotFiniteError
from asyncrl.contract.messages import Numbers
from asyncrl.contract.printable import Say
from asyncrl.contract.toml_writer import fill, read_table
from asyncrl.experiments.compare.verdict import list_instabilities, list_values
from asyncrl.experiments.model_evaluation import OfflineEvaluator
from asyncrl.experiments.replay import diff
from asyncrl.experiments.replay.diff import MetricsByStep
from asyncrl.models import policy
from asyncrl.records import atomic_write, metrics, stream
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.metrics import average
from asyncrl.records.page_kit import clean
from learner import checkpoint
from learner.step import LearnerCore

MAY_CHANGE, WATCHED, DECIDES_DATA, TEXTS = read_table(__file__).values()
REPORT_S = 10.0  # between two progress messages


def check_sets(sets: Sequence[str]) -> None:
    """Raise ConfigError for a key that affects sampling, because the data is fixed."""
    keys = set(load.list_keys())
    for item in sets:
        key = layers.key_of(item)
        if reason := DECIDES_DATA.get(key):
            raise ConfigError(f"--set {item}: a replay cannot change {key}: {reason}")
        # the config reports an unknown key, with the nearest one
        if key in keys and not layers.is_inside(key, MAY_CHANGE):
            raise ConfigError(
                f"--set {item}: {key} changes what is sampled, and a replay trains on recorded "
                f"samples; start a new run (a replay may change {', '.join(MAY_CHANGE)})"
            )


def resolve(text: str, sets: Sequence[str], source: str) -> Config:
    """Apply `sets` to the config of one attempt of the run.

    A preset given now also replaces the values that an earlier preset filled in.
    """
    raw = tomllib.loads(text)
    changes_staleness = any(item.strip().startswith("staleness.") for item in sets)
    if changes_staleness:
        # inject requires on_exceed = pace, and the stream has the lags already
        raw.get("staleness", {}).pop("inject", None)
    changed = load.convert(raw, source, text, sets)
    if changes_staleness and changed.staleness.on_exceed not in ("mask", "downweight"):
        raise ConfigError(
            f"--set staleness: on_exceed = {changed.staleness.on_exceed} changes what is sampled; "
            "a replay can mask or downweight stale tokens"
        )
    return changed


def make_single_process_config(config: Config, initial: Path | None) -> Config:
    """Return the config as one torch process runs it.

    initial: the recorded first weights, if the recording starts at version 0.
    """
    replace = msgspec.structs.replace
    if config.learner.distributed:
        config = replace(config, learner=replace(config.learner, backend="torch", ranks=1))
    # the check at lag 0 compares with the run's weights, from which a changed replay differs
    if config.exact is True:
        config = replace(config, exact="try")
    if initial is not None:
        config = replace(config, model=replace(config.model, path=str(initial)))
    return config


class Replay:
    """One replay of `run_dir` from version `start` to `until`.

    They default to the recording's first and last version.

    rows: metrics by step. digests: version -> weights. failed: why it ended early.
    """

    failed = ""

    def __init__(
        self,
        run_dir: Path,
        sets: Sequence[str],
        *,
        start: int | None = None,
        until: int | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.sets = list(sets)
        self.rows: MetricsByStep = {}
        self.digests: dict[int, str] = {}
        check_sets(sets)
        self.recording = recording = stream.read(run_dir)
        checkpoints = stream.list_weights(run_dir)
        self.start = recording.start if start is None else start
        self.end = recording.end if until is None else min(until, recording.end)
        if self.start not in checkpoints:
            if start is None:
                raise DamagedDataError(
                    f"{run_dir}: the recording's first weights are missing "
                    f"({stream.get_directory(run_dir)}/weights/number_{recording.start})"
                )
            raise ConfigError(
                f"--from {start}: no weights of version {start} were recorded; recorded versions: "
                f"{', '.join(map(str, checkpoints))} (record.weights_every)"
            )
        if self.start >= self.end:
            raise ConfigError(
                f"--from {self.start}, --until {self.end}: the range is empty; the "
                f"recording has batches {recording.start} to {recording.end - 1}"
            )
        if damage := checkpoint.verify(checkpoints[self.start]):
            raise DamagedDataError(f"{checkpoints[self.start]} is damaged: {damage}")
        self.weights = checkpoints[self.start]
        self.initial = None if recording.start else checkpoints[0] / "model"
        self.recorded = resolve(recording.find_header(self.end - 1).config, (), str(run_dir))
        self.config = self.resolve_batch_config(self.start)
        self.flat: dict[str, bytearray] = {}  # digest -> weights of the newest versions
        last_config = self.resolve_batch_config(self.end - 1)
        if (last_config.advantage.name == "remax") != (self.recorded.advantage.name == "remax"):
            raise ConfigError(
                f"--set advantage.name={last_config.advantage.name}: recorded with "
                f"{self.recorded.advantage.name}, and only remax has a greedy completion in each "
                "group; start a new run"
            )
        self.changed = diff.list_changes(*map(msgspec.to_builtins, (self.recorded, last_config)))
        self.cut = ""
        if until is None or until > recording.end:
            self.cut = recording.explain_missing_part(self.recorded.learner.steps)
        if self.recorded.learner.backend != "torch" and self.start:
            raise ConfigError(
                f"--from {self.start}: the optimizer state comes from learner.backend = "
                f"{self.recorded.learner.backend}; replay from 0"
            )

    def resolve_batch_config(self, number: int) -> Config:
        """Return the config that trains batch `number`."""
        return resolve(
            self.recording.find_header(number).config, self.sets, str(self.run_dir / "recording")
        )

    def make_core(self, config: Config) -> LearnerCore:
        core = LearnerCore(make_single_process_config(config, self.initial), self.weights / "model")
        if config.reads_versions:
            core.measure.read_weights = lambda _, digest: self.flat.get(digest, bytearray())
        return core

    def keep_weights(self, core: LearnerCore) -> str:
        """Hold the weights for tokens that they sampled; return their digest."""
        flat = policy.copy_flat_bytes(core.model)
        digest = policy.compute_digest(flat)
        if core.measure.read_weights is not None:
            self.flat[digest] = flat
            for old in list(self.flat)[: -core.config.weights.slots]:
                del self.flat[old]
        return digest

    def run(self, directory: Path, log: Say, *, evaluate: bool = True) -> None:
        """Train, and write metrics and the last weights to `directory`.

        An update that stays non-finite ends the replay and is part of the result.
        """
        core = self.make_core(self.config)
        # version 0 has no moments, and the config gives its state
        if self.start and self.recorded.learner.backend == "torch":
            checkpoint.restore(core, self.weights)
        self.digests[self.start] = self.keep_weights(core)
        evaluator = OfflineEvaluator(core.config) if evaluate else None
        writer = metrics.MetricsWriter(directory)
        start = reported = time.monotonic()

        def write(step: int, values: Numbers) -> None:
            self.rows.setdefault(step, {}).update(values)
            writer.write(step, values, time.monotonic() - start)

        def measure(number: int) -> None:
            """Measure the held-out reward at the versions and on the prompts of the run."""
            last = number == self.recorded.learner.steps
            if evaluator and (values := evaluator.evaluate(core.model, number, last=last)):
                write(number, values)
                torch.set_num_threads(core.config.learner.threads)  # the engine has changed it

        try:
            for step in self.recording.read_steps(self.start, self.end):
                number = step.batch.number
                measure(number)
                core = self.follow(core, number)
                write(number, core.train(step.batch))
                self.digests[number + 1] = self.keep_weights(core)
                if time.monotonic() - reported > REPORT_S or number + 1 == self.end:
                    reported = time.monotonic()
                    log(f"replayed {number + 1 - self.start} of {self.end - self.start} batches")
            measure(self.end)
        except NotFiniteError as error:
            self.failed = str(error)
            log(f"ended: {error}")
        finally:
            writer.close()
            if evaluator is not None:
                evaluator.close()
        policy.export(core.model, directory / "model")
        (directory / "weights_digest").write_text(
            policy.compute_weights_digest(core.model), encoding="utf-8"
        )

    def follow(self, core: LearnerCore, number: int) -> LearnerCore:
        """Switch to the settings of a resumed run at the batch from which it was resumed."""
        if number == self.start or all(begin != number for begin, _ in self.recording.lives):
            return core
        config = self.resolve_batch_config(number)
        if make_single_process_config(config, self.initial) == core.config:
            return core
        new = self.make_core(config)
        new.model.hf.load_state_dict(core.model.hf.state_dict())
        new.backend.load(core.backend.save(self.run_dir), self.run_dir)
        if core.critic is not None and new.critic is not None:
            new.critic.load_state(core.critic.get_state(), self.run_dir)
        new.state = core.state
        if core.average is not None and new.average is not None:
            new.average.values = core.average.values
        if config.kl.reward.controller == "fixed":
            new.state.beta = config.kl.reward.coefficient
        return new

    def judge(self) -> tuple[JsonObject, MetricsByStep]:
        """Compare the replay with the recorded run; return the recorded metrics, too.

        The result has the first difference, final values, stability by rule, and the distance from
        the data. The evaluations of the run are those of metrics.jsonl.
        """
        recorded: MetricsByStep = {}
        weights: dict[int, str] = {}
        for step in self.recording.read_steps(self.start, self.end):
            recorded[step.batch.number] = dict(step.metrics)
            weights[step.batch.number + 1] = step.digest
        difference = diff.find_first_difference(recorded, self.rows)
        for row in metrics.read(self.run_dir):
            values = {k: v for k, v in row.items() if k.startswith("eval/")}
            if values and self.start <= row["step"] <= self.end:
                recorded.setdefault(int(row["step"]), {}).update(values)
        first_weights = next(
            (n for n, d in sorted(self.digests.items()) if weights.get(n, d) != d), None
        )
        equal = difference is None and first_weights is None and not self.failed
        evaluated = [
            n
            for n, row in sorted(self.rows.items())
            if row.get("eval/heldout_n") == recorded.get(n, {}).get("eval/heldout_n", 0)
        ]
        comparison: JsonObject = {
            "run_dir": str(self.run_dir),
            "from": self.start,
            "to": self.end,
            "changed": self.changed,
            "cut": self.cut,
            "equal": equal,
            "reproduced": None if self.changed or self.recorded.learner.distributed else equal,
            "first_difference": difference,
            "first_other_weights": first_weights,
            "failed": self.failed,
            "weights_digest": self.digests[max(self.digests)],
            "heldout_version": max(evaluated, default=None),
            "recorded": summarize_ends(recorded, evaluated),
            "replayed": summarize_ends(self.rows, evaluated),
        }
        sentences = {
            name: fill(TEXTS[name], **comparison, start=self.start).strip()
            for name in ("verdict", "warning")
        }
        return comparison | sentences, recorded


def replay(
    run_dir: Path,
    sets: Sequence[str],
    log: Say,
    *,
    out: Path | None = None,
    start: int | None = None,
    until: int | None = None,
    evaluate: bool = True,
) -> JsonObject:
    """Run `asyncrl replay` and return the content of replay.json.

    out: by default RUN/replays/N. Raises ConfigError if it is in use, and for a run without a
    recording, a key that may not change or missing versions. Raises DamagedDataError for a damaged
    recording.
    """
    source = Replay(run_dir, sets, start=start, until=until)
    if source.cut:
        log(f"note: {source.cut}")
    if source.recorded.learner.distributed:
        log(
            f"note: recorded with learner.backend = {source.recorded.learner.backend} and "
            f"learner.ranks = {source.recorded.learner.ranks}; one torch process rounds "
            "differently, so the results are not bitwise equal"
        )
    if out is None:
        used = [int(p.name) for p in (run_dir / "replays").glob("*") if p.name.isdigit()]
        out = run_dir / "replays" / str(max(used, default=0) + 1)
    if (out / "config.toml").exists():
        raise ConfigError(f"{out} holds a run or a replay already; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / "command").write_text(" ".join(sys.argv) + "\n", encoding="utf-8")
    (out / "config.toml").write_text(
        load.dump(source.resolve_batch_config(source.end - 1)), encoding="utf-8"
    )
    source.run(out, log, evaluate=evaluate)
    comparison, recorded = source.judge()
    comparison["replay_dir"] = str(out)
    atomic_write.write(out / "replay.json", json.dumps(clean(comparison), indent=1))
    diff.write_page(
        "A replay",
        format_replay(comparison),
        {"recorded": recorded, "replayed": source.rows},
        clean(comparison),
        out / "report.html",
        "replay",
    )
    return comparison


# ---- the difference ------------------------------------------------------------------------------


def summarize_ends(rows: MetricsByStep, evaluated: Sequence[int]) -> JsonObject:
    """Summarize final values.

    Means of the last tenth of the steps, first and last held-out reward, and broken stability
    rules.

    evaluated: versions at which run and replay evaluated the same number of held-out prompts; the
        rewards of others are not comparable.
    """
    train = [rows[n] for n in sorted(rows) if "loss/policy" in rows[n]]
    tail = train[-max(1, len(train) // 10) :]
    rewards = [rows[n]["eval/heldout"] for n in evaluated]
    watched = {name: list_values(tail, name) for name in WATCHED}
    kls = list_values(train, "kl/behavior_target_k3")
    return {name: average(values) for name, values in watched.items() if values} | {
        "heldout_start": rewards[0] if rewards else None,
        "heldout_end": rewards[-1] if rewards else None,
        "kl_max": max(kls, default=None),
        "trouble": list_instabilities(rewards, train),
    }


def format_replay(comparison: JsonObject) -> str:
    """Format the result for a reader."""
    difference = diff.format_first_difference(comparison["first_difference"], "batch", 5)
    names = ("heldout_end", *WATCHED, "kl_max")
    start = comparison["from"]
    report = fill(TEXTS["report"], **comparison, start=start, difference=difference, names=names)
    return report.rstrip()
