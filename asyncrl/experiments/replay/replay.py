"""`asyncrl replay`: train again, offline, on exactly the stream that a run recorded, with another
loss, correction, KL or early stop.

    RUN/recording --> batches in their order --> the learner's own step (learner/step.py) -->
    OUT/metrics.jsonl, model, report.html

With nothing changed the recorded losses, norms and weights come out again, bitwise on the same
machine.  With something changed the data stays what the recorded policies wrote: lags, behaviour
probabilities and rewards are the recorded ones.  In a run of its own the changed learner's weights
would have written other answers from the second version on, and every report of this module says
so."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError, DamagedDataError, NotFiniteError
from asyncrl.experiments.compare.arms import changes, config_differences
from asyncrl.experiments.compare.page import clean
from asyncrl.experiments.compare.verdict import stability
from asyncrl.experiments.replay import diff
from asyncrl.experiments.replay.offline_eval import OfflineEvaluator
from asyncrl.models.policy import export, weights_digest
from asyncrl.records import atomic_write, metrics, stream
from learner import checkpoint
from learner.step import LearnerCore

MAY_CHANGE = (
    "loss",
    "correction",
    "kl",
    "stop",
    "advantage",
    "value",
    "reshape",
    "evaluation",
    "model.reference",
    "model.device",
    "learner",
    "staleness.on_exceed",
    "staleness.max_lag",
    "staleness.half_life",
    "exact",
)
DECIDES_DATA = {
    "learner.groups": "the batches were composed",
    "learner.group_size": "the groups were written",
    "learner.prefetch": "batches were leased",
    "learner.steps": "the stream ends where it ends: --until N "
    "stops earlier, and the schedule of the "
    "rate stays the recorded one",
    "learner.backend": "a replay is one process with torch",
    "learner.ranks": "a replay is one process with torch",
    "learner.zero_stage": "a replay is one process with torch",
    "advantage.no_spread": "groups were filtered before they were stored",
    "learner.checkpoint_every": "a replay keeps no checkpoints",
    "learner.keep_checkpoints": "a replay keeps no checkpoints",
}
SAID_S = 10.0
WATCHED = (
    "is/ess",
    "is/target_ess",
    "kl/behavior_target_k3",
    "optim/grad_norm",
    "policy/entropy",
    "clip/share",
    "loss/policy",
)


@dataclass
class ReplayResult:
    """What a replay gave.  rows: metrics by step; digests: version -> weights."""

    config: Config
    start: int
    end: int
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    failed: str = ""


def check_sets(sets: Sequence[str]) -> None:
    """Raises ConfigError for a key that decides what is written: the data is there already."""
    known = set(load.keys())
    for item in sets:
        key = item.partition("=")[0].strip()
        if why := DECIDES_DATA.get(key):
            raise ConfigError(f"--set {item}: a replay cannot change {key}: {why}")
        if key not in known:
            continue  # an unknown key: the config's own error says what was meant
        if not any(key == k or key.startswith(k + ".") for k in MAY_CHANGE):
            raise ConfigError(
                f"--set {item}: {key} decides what is written, and a replay trains on what was; "
                "start a new run for it "
                f"(a replay may change {', '.join(k for k in MAY_CHANGE)})"
            )


def resolve(text: str, sets: Sequence[str], source: str) -> Config:
    """A life's config with `sets` applied.  A preset given now also replaces what an earlier preset
    had filled in.
    """
    raw = tomllib.loads(text)
    given = {item.partition("=")[0].strip() for item in sets}
    if any(k.startswith("staleness.") for k in given):
        # it asks for on_exceed = pace; the lags are in the stream
        raw.get("staleness", {}).pop("inject", None)
    changed = load.convert(raw, source, text, sets)
    if any(k.startswith("staleness.") for k in given) and changed.staleness.on_exceed not in (
        "mask",
        "downweight",
    ):
        raise ConfigError(
            f"--set staleness: on_exceed = {changed.staleness.on_exceed} decides what is written; "
            "a replay can mask or downweight stale tokens"
        )
    return changed


def single_process_config(config: Config, initial: Path | None) -> Config:
    """The config as one torch process runs it; initial: the recorded first weights, when the
    recording begins at version 0.
    """
    replace = msgspec.structs.replace
    if config.learner.backend != "torch":
        config = replace(config, learner=replace(config.learner, backend="torch", ranks=1))
    # the check at lag 0 compares with the run's own weights, which a changed replay leaves
    if config.exact is True:
        config = replace(config, exact="try")
    if initial is not None:
        config = replace(config, model=replace(config.model, path=str(initial)))
    return config


class Replay:
    """One replay of `run_dir` from version `start` (default: the recording's first) to `until`
    (default: its last).
    """

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
        check_sets(sets)
        self.recording = recording = stream.read(run_dir)
        kept = stream.weights(run_dir)
        self.start = recording.start if start is None else start
        self.end = recording.end if until is None else min(until, recording.end)
        if self.start not in kept:
            if start is None:
                raise DamagedDataError(
                    f"{run_dir}: the recording's first weights "
                    f"({stream.directory(run_dir)}/weights/number_{recording.start}) are missing"
                )
            raise ConfigError(
                f"--from {start}: no weights of version {start} were recorded, but of "
                f"{', '.join(map(str, kept))} (record.weights_every)"
            )
        if not recording.start <= self.start < self.end:
            raise ConfigError(
                f"--from {self.start}, --until {self.end}: nothing lies between them; the "
                f"recording has batches {recording.start} to {recording.end - 1}"
            )
        if wrong := checkpoint.verify(kept[self.start]):
            raise DamagedDataError(f"{kept[self.start]} is damaged: {wrong}")
        self.weights = kept[self.start]
        self.initial = kept[0] / "model" if 0 in kept and not recording.start else None
        self.recorded = resolve(recording.life(self.end - 1).config, (), str(run_dir))
        self.config = self.config_of_batch(self.start)
        last = self.config_of_batch(self.end - 1)
        if (last.advantage.name == "remax") != (self.recorded.advantage.name == "remax"):
            raise ConfigError(
                f"--set advantage.name={last.advantage.name}: recorded with "
                f"{self.recorded.advantage.name}, and only remax has a greedy "
                "answer in each group; start a new run"
            )
        self.changed = changes(
            config_differences(msgspec.to_builtins(self.recorded), msgspec.to_builtins(last))
        )
        self.cut = (
            ""
            if until is not None and until <= recording.end
            else recording.missing_part(self.recorded.learner.steps)
        )
        if self.recorded.learner.backend != "torch" and self.start:
            raise ConfigError(
                f"--from {self.start}: the optimizer's state is of learner.backend = "
                f"{self.recorded.learner.backend}; replay from 0"
            )

    def config_of_batch(self, number: int) -> Config:
        """The config that batch `number` is trained with."""
        return resolve(
            self.recording.life(number).config, self.sets, str(self.run_dir / "recording")
        )

    def core(self, config: Config) -> LearnerCore:
        return LearnerCore(single_process_config(config, self.initial), self.weights / "model")

    def run(self, out: Path, say: Callable[[str], None], *, evaluate: bool = True) -> ReplayResult:
        """Train; metrics and the last weights go to `out`.  An update that stays not finite ends it
        and is part of the result.
        """
        core = self.core(self.config)
        # at version 0 there are no moments yet, and the state is the config's
        if self.start and self.recorded.learner.backend == "torch":
            checkpoint.restore(core, self.weights)
        done = ReplayResult(
            self.config, self.start, self.end, digests={self.start: weights_digest(core.model)}
        )
        evaluator = OfflineEvaluator(core.config) if evaluate else None
        writer = metrics.MetricsWriter(out)
        began = time.monotonic()
        told = time.monotonic()

        def write(step: int, values: dict[str, float]) -> None:
            done.rows.setdefault(step, {}).update(values)
            writer.write(step, values, time.monotonic() - began)

        try:
            for step in self.recording.steps(self.start, self.end):
                number = step.batch.number
                self.measure(evaluator, core, number, write)
                core = self.follow(core, number)
                write(number, core.train(step.batch))
                done.digests[number + 1] = weights_digest(core.model)
                if time.monotonic() - told > SAID_S or number + 1 == self.end:
                    told = time.monotonic()
                    say(f"replayed {number + 1 - self.start} of {self.end - self.start} batches")
            self.measure(evaluator, core, self.end, write)
        except NotFiniteError as error:
            done.failed = str(error)
            say(f"ended: {error}")
        finally:
            writer.close()
            if evaluator is not None:
                evaluator.close()
        export(core.model, out / "model")
        (out / "weights_digest").write_text(weights_digest(core.model), encoding="utf-8")
        return done

    def measure(
        self,
        evaluator: OfflineEvaluator | None,
        core: LearnerCore,
        number: int,
        write: Callable[[int, dict[str, float]], None],
    ) -> None:
        """The held-out accuracy where the run measured it."""
        if evaluator is not None and (
            values := evaluator.evaluate(core.model, number, last=number == self.end)
        ):
            write(number, values)
            torch.set_num_threads(core.config.learner.threads)  # the engine has set its own

    def follow(self, core: LearnerCore, number: int) -> LearnerCore:
        """Where a resumed run went on with other settings, so does its replay."""
        life = self.recording.life(number)
        if number == self.start or all(first != number for first, _ in self.recording.lives):
            return core
        config = resolve(life.config, self.sets, str(self.run_dir / "recording"))
        if single_process_config(config, self.initial) == core.config:
            return core
        new = self.core(config)
        new.model.hf.load_state_dict(core.model.hf.state_dict())
        new.backend.load_state(core.backend.state(self.run_dir), self.run_dir)
        if core.critic is not None and new.critic is not None:
            new.critic.load_state(core.critic.state(), self.run_dir)
        new.state = core.state
        if config.kl.reward.controller == "fixed":
            new.state.beta = config.kl.reward.coefficient
        return new


def replay_directory(run_dir: Path, out: Path | None) -> Path:
    """A new directory for a replay: `out`, or RUN/replays/N.  Raises ConfigError when it is
    used.
    """
    if out is None:
        taken = [int(p.name) for p in (run_dir / "replays").glob("*") if p.name.isdigit()]
        out = run_dir / "replays" / str(max(taken, default=0) + 1)
    if (out / "config.toml").exists():
        raise ConfigError(f"{out} holds a run or a replay already; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / "command").write_text(" ".join(sys.argv) + "\n", encoding="utf-8")
    return out


def replay(
    run_dir: Path,
    sets: Sequence[str],
    say: Callable[[str], None],
    *,
    out: Path | None = None,
    start: int | None = None,
    until: int | None = None,
    evaluate: bool = True,
) -> dict[str, Any]:
    """The whole of `asyncrl replay`; returns what replay.json holds.

    Raises ConfigError for a run without a recording, a key that may not change or versions that are
    not there; Damaged for a damaged recording."""
    made = Replay(run_dir, sets, start=start, until=until)
    if made.cut:
        say(f"note: {made.cut}")
    if made.recorded.learner.backend != "torch":
        say(
            f"note: recorded with learner.backend = {made.recorded.learner.backend}; one torch "
            "process rounds otherwise, so nothing will be bitwise the same"
        )
    where = replay_directory(run_dir, out)
    (where / "config.toml").write_text(
        load.dump(made.config_of_batch(made.end - 1)), encoding="utf-8"
    )
    done = made.run(where, say, evaluate=evaluate)
    found = judge(made, done)
    found["replay_dir"] = str(where)
    write(where, made, done, found)
    return found


# ---- the difference ------------------------------------------------------------------------------


def read_recorded_metrics(made: Replay) -> dict[int, dict[str, float]]:
    """step -> what the run measured, from the recording, and its evaluations from metrics.jsonl."""
    rows = {s.batch.number: dict(s.metrics) for s in made.recording.steps(made.start, made.end)}
    for row in metrics.read(made.run_dir):
        if any(k.startswith("eval/") for k in row) and made.start <= row["step"] <= made.end:
            rows.setdefault(int(row["step"]), {}).update(
                {k: v for k, v in row.items() if k.startswith("eval/")}
            )
    return rows


def judge(made: Replay, done: ReplayResult) -> dict[str, Any]:
    """The replay beside the recorded run: first difference, ends, stability by rule, and how far
    the replay left the data.
    """
    before = read_recorded_metrics(made)
    trained = {
        n: {k: v for k, v in row.items() if not k.startswith("eval/")}
        for n, row in done.rows.items()
    }
    first = diff.first_difference(before, trained)
    digests = {s.batch.number + 1: s.digest for s in made.recording.steps(made.start, made.end)}
    other = next(
        (n for n, d in sorted(done.digests.items()) if n in digests and d != digests[n]), None
    )
    same = first is None and other is None and not done.failed
    reproduced = same if not made.changed and made.recorded.learner.backend == "torch" else None
    found: dict[str, Any] = {
        "run_dir": str(made.run_dir),
        "from": done.start,
        "to": done.end,
        "changed": [x.replace(", now ", " | ") for x in made.changed],
        "cut": made.cut,
        "equal": same,
        "reproduced": reproduced,
        "first_difference": first,
        "first_other_weights": other,
        "failed": done.failed,
        "weights_digest": done.digests[max(done.digests)],
        "recorded": summarize_ends(before),
        "replayed": summarize_ends(done.rows),
    }
    found["verdict"], found["warning"] = verdict(found), warning(found)
    return found


def summarize_ends(rows: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Means of the last tenth of the steps, first and last held-out accuracy, and what is wrong by
    rule.
    """
    train = [rows[n] for n in sorted(rows) if "loss/policy" in rows[n]]
    tail = train[-max(1, len(train) // 10) :]
    accuracy = [rows[n]["eval/heldout"] for n in sorted(rows) if "eval/heldout" in rows[n]]
    out: dict[str, Any] = {
        k: sum(x[k] for x in tail if k in x) / max(1, sum(k in x for x in tail))
        for k in WATCHED
        if any(k in x for x in tail)
    }
    kls = [x["kl/behavior_target_k3"] for x in train if "kl/behavior_target_k3" in x]
    return out | {
        "heldout_start": accuracy[0] if accuracy else None,
        "heldout_end": accuracy[-1] if accuracy else None,
        "kl_max": max(kls, default=None),
        "trouble": stability(accuracy, train),
    }


def verdict(found: dict[str, Any]) -> str:
    """One sentence: the same bits, or did this change keep it stable."""
    if found["reproduced"]:
        return (
            "nothing changed: every recorded loss, gradient norm and weight came out again, bitwise"
        )
    if found["reproduced"] is False:
        return (
            "nothing was changed, and yet the replay differs from the recording: another "
            "machine, thread count or version of a library?"
        )
    if not found["changed"]:
        return (
            "nothing changed; recorded by several ranks, which add up in another order "
            "than one process: equal up to rounding is all there is to expect"
        )
    if found["equal"]:
        return "the change made no difference: every loss and weight is bitwise the recorded one"
    before = found["recorded"]["trouble"]
    after = [*found["replayed"]["trouble"], *([found["failed"]] if found["failed"] else [])]
    if before and not after:
        return (
            f"the recorded run was unstable by rule ({'; '.join(before)}); on the same data "
            "this change is not"
        )
    if after and not before:
        return (
            f"unstable by rule on the same data, where the recorded run was not: {'; '.join(after)}"
        )
    return (
        f"both unstable by rule: recorded: {'; '.join(before)}; replayed: {'; '.join(after)}"
        if after
        else "both stable by rule"
    )


def warning(found: dict[str, Any]) -> str:
    """What a replay cannot know; with the measured distance from the policies that wrote the
    data.
    """
    if found["equal"] or not found["changed"]:
        return ""
    far = ""
    was, now = (found[k].get("kl/behavior_target_k3") for k in ("recorded", "replayed"))
    share = found["replayed"].get("is/target_ess")
    if was is not None and now is not None:
        far = (
            f" At the end the replayed policy is {now:.2g} nats a token (k3) from the "
            f"policies that wrote the answers; the recorded one was {was:.2g}."
        )
    if share is not None:
        far += (
            f" Effective sample size of the recorded answers under it: {share:.2g} of their number."
        )
    return (
        "The data would have changed too: in a run of its own this learner's weights would have "
        "written other answers, at other lags, from "
        f"version {found['from'] + 1} on. A replay shows what the change does to the updates on "
        "these answers; a run shows the rest." + far
    )


def format_replay(found: dict[str, Any]) -> str:
    """The result for a reader."""
    lines = [
        f"{found['run_dir']}, batches {found['from']} to {found['to'] - 1}, trained again in "
        f"{found['replay_dir']}"
    ]
    lines += [f"  {x}" for x in found["changed"]] or ["  nothing changed"]
    if found["cut"]:
        lines.append(found["cut"])
    first = found["first_difference"]
    if first is not None:
        lines.append(
            f"first difference at batch {first['step']}, in {len(first['metrics'])} metrics:"
        )
        lines += [
            f"  {m['name']}: {m['a']:.9g} | {m['b']:.9g} (relative {m['relative']:.2g})"
            for m in first["metrics"][:5]
        ]
    recorded = found["recorded"]
    replayed = found["replayed"]
    names = [
        k
        for k in ("heldout_end", *WATCHED, "kl_max")
        if recorded.get(k) is not None and replayed.get(k) is not None
    ]
    lines.append(f"{'at the end (mean of the last tenth)':36} {'recorded':>12} {'replayed':>12}")
    lines += [f"  {k:34} {recorded[k]:12.5g} {replayed[k]:12.5g}" for k in names]
    return "\n".join([*lines, found["verdict"], *([found["warning"]] if found["warning"] else [])])


def write(where: Path, made: Replay, done: ReplayResult, found: dict[str, Any]) -> None:
    """OUT/replay.json and OUT/report.html: the curves of both, and the text."""
    atomic_write.write(where / "replay.json", json.dumps(clean(found), indent=1))
    diff.page(
        "A replay",
        format_replay(found),
        {"recorded": read_recorded_metrics(made), "replayed": done.rows},
        clean(found),
        where / "report.html",
        "replay",
    )
