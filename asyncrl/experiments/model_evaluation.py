"""Evaluations outside a run, and `asyncrl eval`, which scores a model directory by them.

An engine in this process samples the completions that a run's evaluation would request.
"""

import json
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from actors.engine import Engine, build_engine, load_model
from actors.engine_embedded import make_engine
from actors.turn import EVERYTHING, GeneratorTurn, build_failed_trajectory, build_trajectory
from asyncrl.config import load
from asyncrl.config.tree import Config, LoraConfig
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import IntPair, Numbers
from asyncrl.contract.printable import Say
from asyncrl.contract.toml_writer import read_table
from asyncrl.contract.versions import Label
from asyncrl.experiments import process_run
from asyncrl.models import model_check
from asyncrl.models.policy import PolicyModel, load_policy
from asyncrl.records import metrics, rundir
from asyncrl.records.jsonl import JsonObject
from asyncrl.supervise import live
from buffer.groups import make_store_settings
from buffer.service import make_evaluations

TEXT: str = read_table(__file__)["text"]
ASK_S = 1.0  # between two status requests to the buffer of an evaluation in sessions
REPORT_S = 5.0  # between two lines of progress
Report = Callable[[str, int, int], None]  # name of a set, scored completions, all completions


class OfflineEvaluator:
    """The evaluations of `config` outside a run.

    Prompts, random streams and evaluated versions are those of a run.

    engine: None: the embedded one. report: called while a set is evaluated.
    failures: (ticket, sample) -> the reason for which it has no reward, of the last set.
    """

    def __init__(
        self, config: Config, engine: Engine | None = None, report: Report | None = None
    ) -> None:
        self.engine = engine or make_engine(config)
        self.report = report or (lambda name, done, total: None)
        self.turn = GeneratorTurn(config, self.engine, lockstep=False)
        self.settings = make_store_settings(config)
        self.evaluations = make_evaluations(config, self.turn.task)
        self.loaded = Label(1, 0)
        self.attempt = 0  # of all tickets, so that each is accepted once
        self.failures: dict[IntPair, str] = {}

    def load(self, model: PolicyModel, number: int) -> None:
        """Load the model to evaluate, as version `number`."""
        self.loaded = Label(1, number)
        load_model(self.engine, model, self.loaded)

    def evaluate(self, model: PolicyModel, number: int, *, last: bool) -> Numbers:
        """Return the metrics of version `number`; empty if no evaluation is due.

        last: the final evaluation, which has more prompts.
        """
        due_sets = self.evaluations.plan.list_due(number, number if last else -1)
        if due_sets:
            self.load(model, number)
        values: Numbers = {}
        for name, prompts in due_sets:
            values |= self.measure(name, prompts)
        return values

    def measure(self, name: str, prompts: int) -> Numbers:
        """Return the metrics over the first `prompts` prompts of a set; empty without prompts.

        Completions are left out if their reward fails or their prompt is too long.
        """
        turn, evaluations = self.turn, self.evaluations
        self.failures = {}
        if not prompts:
            return {}
        evaluations.start_round(self.loaded, name, prompts)
        total = len(evaluations.queue)
        while evaluations.rounds:
            while evaluations.queue:
                self.attempt += 1
                ticket = evaluations.grant(
                    self.attempt, self.settings, producer="", session=0, expires=math.inf
                )
                turn.accept_tickets([ticket])
            requests, refused = turn.build_requests(self.loaded, room=EVERYTHING)
            self.engine.add(requests)
            for completion in self.engine.step() if self.engine.active else []:
                if (finished := turn.finish(completion)) is not None:
                    turn.submit(finished)
            samples = [build_failed_trajectory(sample, self.loaded, "") for sample in refused]
            samples += [build_trajectory(*result) for result in turn.poll_results()]
            for sample in samples:
                self.failures.pop(sample.key[:2], None)
                if sample.failed:
                    turn.schedule.finish_sample(sample.key, 0)
                    self.failures[sample.key[:2]] = sample.failed.why
                evaluations.deliver(sample)
            if samples:
                left = len(evaluations.queue) + len(evaluations.leased_jobs)
                self.report(name, total - left, total)
            elif not self.engine.active:
                time.sleep(0.001)
        return evaluations.results.pop((name, self.loaded.number))

    def close(self) -> None:
        self.turn.rewards.close()


class EvaluationProgress:
    """Progress with the time left, a line every REPORT_S. say: prints a line."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.name = ""
        self.began = self.reported_at = 0.0

    def report(self, name: str, done: int, total: int) -> None:
        """Note that `done` of `total` completions of a set are scored."""
        now = time.monotonic()
        if name != self.name:
            self.name, self.began, self.reported_at = name, now, now
        if now - self.reported_at >= REPORT_S:
            self.reported_at = now
            seconds_left = (now - self.began) / max(done, 1) * (total - done)
            remaining = live.format_duration(seconds_left)
            self.say(f"{name}: {done} of {total} completions, {remaining} left")


def evaluate(
    model: str,
    source: str,
    sets: Sequence[str],
    names: Sequence[str],
    prompts: int | None,
    progress: EvaluationProgress,
) -> JsonObject:
    """Evaluate a model directory by the config `source`: return {model, sets: {name: metrics}}.

    names: the sets; empty means all. prompts: of each set; None means as many as at the end of a
    run. Sessions need a gateway, so a run without steps evaluates them. Raises ConfigError for an
    unknown set, and if all completions of a set lack a reward.
    """
    replaced = [f"model.path={json.dumps(model)}", "model.warm_start=false"]
    config = load.load(source, [*sets, *replaced])
    config = msgspec.structs.replace(config, lora=LoraConfig())  # MODEL is merged already
    if unknown := [name for name in names if name not in config.evaluation.names]:
        raise ConfigError(f"--only {unknown[0]}: choose from {', '.join(config.evaluation.names)}")
    model_check.check(config)

    def count(name: str, planned: int) -> int:
        chosen = planned if prompts is None else min(planned, prompts)
        return chosen if not names or name in names else 0

    if config.uses_sessions:
        return _evaluate_sessions(config, names, count, progress)
    progress.say(f"loading {config.model.path}")
    evaluator = OfflineEvaluator(config, build_engine(config), progress.report)
    try:
        evaluator.load(load_policy(config.model.path, config.model.dtype, config.model.device), 0)
        results: JsonObject = {}
        for name, planned in evaluator.evaluations.plan.list_due(0, 0):
            start = time.monotonic()
            values = evaluator.measure(name, count(name, planned))
            if not values:
                continue
            if not values[f"eval/{name}_n"]:
                why = next(iter(evaluator.failures.values()))
                raise ConfigError(f"{name}: no completion has a reward: {why}")
            results[name] = select_set(name, values) | {
                "failed": len(evaluator.failures),
                "seconds": time.monotonic() - start,
            }
    finally:
        evaluator.close()
    if not results:
        raise ConfigError(f"--only {', '.join(names)}: this set has no prompts")
    return {"model": config.model.path, "sets": results}


def select_set(name: str, values: Numbers) -> Numbers:
    """Return the metrics of a set, without its name."""
    prefix = f"eval/{name}"
    return {
        metric[len(prefix) + 1 :] or "reward": value
        for metric, value in values.items()
        if f"{metric}_".startswith(f"{prefix}_")
    }


def follow_sessions(
    config: Config, run_dir: Path, total: int, progress: EvaluationProgress, stop: threading.Event
) -> None:
    """Report how many of `total` sessions the buffer of a run has evaluated, until `stop`."""
    while not stop.wait(ASK_S):
        try:
            address = rundir.get_current_buffer_address(config, run_dir)
            status = live.request_status(address, config.wires.curve_dir, ASK_S)
        except (AsyncrlError, OSError):
            continue  # the run has not begun, or is ending
        if status is not None and not status.committed:
            progress.report("sessions", min(status.progress, total), total)


def _evaluate_sessions(
    config: Config,
    names: Sequence[str],
    count: Callable[[str, int], int],
    progress: EvaluationProgress,
) -> JsonObject:
    """Evaluate by a run without steps in its own directory, which remains if the run fails.

    count: the prompts of a set, of those planned.
    """
    replace = msgspec.structs.replace
    settings = config.evaluation
    own_sets = [replace(one, prompts=count(one.name, one.prompts)) for one in settings.sets]
    evaluation = replace(
        settings,
        final_prompts=count("heldout", settings.final_prompts),
        ood_prompts=count("ood", settings.ood_prompts),
        sets=[one for one in own_sets if one.prompts],
    )
    directory = Path(tempfile.mkdtemp(prefix="asyncrl-eval-"))
    learner = replace(config.learner, steps=0)
    record = replace(config.record, trackers=[])
    evaluated = replace(config, learner=learner, record=record, evaluation=evaluation)
    source = directory / "config.toml"
    source.write_text(load.dump(evaluated), encoding="utf-8")
    log = directory / "logs" / "run.log"
    progress.say(f"evaluating sessions by a run without steps; its output is in {log}")
    run_dir, stop = directory / "run", threading.Event()
    total = evaluation.final_prompts + evaluation.ood_prompts
    total += sum(one.prompts * (one.samples + one.greedy) for one in evaluation.sets)
    follower = threading.Thread(
        target=follow_sessions, args=(evaluated, run_dir, total, progress, stop), daemon=True
    )
    follower.start()
    try:
        advice = f"see asyncrl doctor {run_dir}"
        process_run.complete(run_dir, str(source), [], 0, log, advice)
    finally:
        stop.set()
        follower.join()
    results: JsonObject = {}
    for row in metrics.read(run_dir):
        for name in evaluation.names:
            if f"eval/{name}" in row:
                results[name] = results.get(name, {}) | select_set(name, row)
    if not results:
        raise ConfigError(f"no session of {', '.join(names) or 'the sets'} has a reward: see {log}")
    shutil.rmtree(directory)
    return {"model": config.model.path, "sets": results}
