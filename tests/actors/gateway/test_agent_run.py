"""Runs whose agents are programs or functions, and whose calls demand a form, by real processes."""

import contextlib
import itertools
import json
import os
import re
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from agent_run_kit import (
    check,
    command,
    model_dir,  # noqa: F401
    rows,
)
from click.testing import CliRunner
from clients_kit import python_of
from holding import allow, held
from process_kit import ENV, PATIENT, ROOT, RUN_SEED, run_command, until
from run_kit import steps_done, wait_until

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.contract.waits import BlockingSession
from asyncrl.experiments.process_run import needs_own_process
from asyncrl.models.policy import build_model
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.records import stream
from asyncrl.records.rundir import get_buffer_address
from asyncrl.supervise import live
from asyncrl.tasks.calc import CalcTask

pytestmark = pytest.mark.slow

PATIENCE_S = 1800.0
ENVS = ROOT / "tests" / "support" / "agent_envs.py"


@contextlib.contextmanager
def gated(argv: list[str], gate: Path) -> Iterator[SimpleNamespace]:
    """A run that ends well after this block; `said` is its standard error by then."""
    run = SimpleNamespace(said="")
    env = ENV | {"AGENT_GATE": str(gate)}
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(argv, cwd=ROOT, env=env, text=True, **pipes)
    try:
        yield run
        _, run.said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, run.said[-3000:]


def test_the_learner_finds_the_probabilities_of_the_calls(model_dir: Path, tmp_path: Path) -> None:
    """At limit 0 every token's probability under the row's forward pass is the recorded one, tools
    and all, and behind kept keys: the sessions stand in their second turn until the generator has
    told what it kept."""
    gate, env = tmp_path / "gate", f"{ENVS}:Held"
    config = command(
        *(model_dir, tmp_path, "zero", "learner.steps=2", "staleness.max_lag=0"),
        f"agent.env={env!r}",
    )
    with gated(config, gate):
        until(gate.with_suffix(".reached").exists)
        until_heard(tmp_path / "zero", "generator-0", 1)
        gate.touch()
    samples = check(tmp_path / "zero", 0, 2)
    assert max(s["calls"] for s in samples) > 1 and any(0 in s["mask"] for s in samples)
    found = [
        row["mismatch/k3_at_lag_0"]
        for row in rows(tmp_path / "zero" / "metrics.jsonl")
        if "mismatch/k3_at_lag_0" in row
    ]
    assert found and max(found) < 1e-9
    kept = [row for row in rows(tmp_path / "zero" / "metrics.jsonl") if "prefix/hits" in row]
    assert sum(row["prefix/hits"] for row in kept) > 0
    assert all(
        row["prefix/reused_tokens"] >= 8 * row["prefix/hits"] and row["prefix/encoded_tokens"] > 0
        for row in kept
        if row["prefix/hits"]
    )


def test_a_killed_generators_calls_go_to_its_next_life(model_dir: Path, tmp_path: Path) -> None:
    """The sessions notice nothing: no sample is lost or written twice.  They stand in their second
    turn until the generator is stopped, and it is killed when their calls are with it."""
    run, gate = tmp_path / "killed", tmp_path / "gate"
    env = f"{ENVS}:Held"
    config = command(
        *(model_dir, tmp_path, "killed", "learner.steps=6", "evaluation.every=0"),
        f"agent.env={env!r}",
    )
    with gated(config, gate) as run_of:
        until(gate.with_suffix(".reached").exists)
        generator = int((run / ".generator-0.alive").read_text().strip())
        os.kill(generator, signal.SIGSTOP)
        gate.touch()
        until(lambda: (held := held_up(run)) is not None and held.session.kind == "engine")
        os.kill(generator, signal.SIGKILL)
    assert "generator-0 exited: SIGKILL" in run_of.said
    check(run, 2, 6)
    ledger = json.loads((run / "summary.json").read_text())["ledger"]
    assert ledger["duplicate"] == ledger["failed"] == 0


def test_a_killed_learners_sessions_go_on_under_its_next(model_dir: Path, tmp_path: Path) -> None:
    """An environment holds its session until the next learner has said hello: its first call was
    drawn for the life before, its last for the next, and both are trained."""
    run, gate = tmp_path / "adopted", tmp_path / "gate"
    env = f"{ENVS}:Slow"
    config = command(model_dir, tmp_path, "adopted", "learner.steps=3")
    with gated([*config, "--set", f"agent.env={env!r}"], gate) as run_of:
        until(gate.with_suffix(".reached").exists)
        os.kill(int((run / ".learner.alive").read_text().strip()), signal.SIGKILL)
        until_heard(run, "gateway-0", 2)
        gate.touch()
    assert "learner exited: SIGKILL" in run_of.said
    samples = check(run, 2, 3)
    assert [s for s in samples if len({label.split(".")[0] for label, *_ in s["versions"]}) == 2]
    ledger = json.loads((run / "summary.json").read_text())["ledger"]
    assert ledger["duplicate"] == ledger["failed"] == 0


def test_a_deadline_frees_a_learner_from_an_endless_tool(model_dir: Path, tmp_path: Path) -> None:
    """The session is named while it lasts, by the buffer and by `asyncrl doctor`; its deadline ends
    it, and nothing else of the run.  That comes when both have spoken: the gateway's clock jumps.
    """
    run, late = tmp_path / "stuck", tmp_path / "late"
    env = f"{ENVS}:Stuck"
    config = command(
        *(model_dir, tmp_path, "stuck", "learner.steps=1", "staleness.max_lag=0"),
        f"agent.env={env!r}",
    )
    process = subprocess.Popen(
        config,
        cwd=ROOT,
        env=held(late=late) | {"AGENT_GATE": str(tmp_path / "gate")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    named: list[BlockingSession] = []
    said: list[str] = []
    log = run / "logs" / "attempt_1" / "buffer.log"

    def in_a_step() -> bool:
        assert process.poll() is None
        found = held_up(run)
        step = found is not None and found.session.what.startswith("the step of its environment")
        named.extend([found] if found is not None and step else [])
        return bool(named)

    def doctor_says() -> bool:
        done = CliRunner().invoke(main, ["doctor", str(run)])
        assert done.exit_code == 0
        said.append(done.output)
        return "the learner is held up by session " in done.output

    try:
        until((tmp_path / "gate").exists)
        until(in_a_step)
        until(doctor_says)
        until(lambda: "the learner is held up by session " in log.read_text())
        late.touch()
        _, end = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    session = named[0].session
    assert named[0].producer == "gateway-0" and session.turn >= 1
    assert session.kind == "environment" and session.limit == "agent.step_s"
    assert 0 < session.ends_s <= 3600 and "agent.step_s ends that in " in said[-1]
    assert process.returncode == 0, end[-3000:]
    check(run, 0, 1)
    assert json.loads((run / "summary.json").read_text())["failures"] == {"data": 1}


def test_killed_agents_and_gateways_cost_no_sample(model_dir: Path, tmp_path: Path) -> None:
    """Calls are held by a generator that stands still.  A program that waits for one is killed,
    then the gateway with all the others: their samples are written again, each is trained once.
    The programs of a later batch than the first, all of which are trained, wait for the gate."""
    run, marks, gate = tmp_path / "amid", tmp_path / "marks", tmp_path / "gate"
    samples = run / "samples.jsonl"  # of the first batch
    marks.mkdir()
    agent = [sys.executable, str(ROOT / "tests" / "support" / "agent_marks.py")]
    process = subprocess.Popen(
        command(
            *(model_dir, tmp_path, "amid", "learner.steps=3", "agent.env=''"),
            *(f"agent.command={json.dumps(agent)}", "reward.error_budget=1.0"),
            *(
                "agent.env_pass=['AGENT_*']",
                "evaluation.every=0",
                "generator.slots=8",
                "staleness.max_lag=0",
            ),
        ),
        cwd=ROOT,
        env=ENV | {"AGENT_MARKS": str(marks), "AGENT_GATE": str(gate), "AGENT_AFTER": str(samples)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )

    def waiting() -> set[int]:
        return {int(path.name) for path in marks.iterdir()}

    try:
        until(gate.with_suffix(".reached").exists)
        generator = int((run / ".generator-0.alive").read_text().strip())
        os.kill(generator, signal.SIGSTOP)
        before = waiting()
        gate.touch()
        until(lambda: len(waiting() - before) >= 2)
        killed = min(waiting() - before)
        os.kill(killed, signal.SIGKILL)
        log = run / "agent-0.log"
        until(lambda: "was ended by SIGKILL" in log.read_text())
        assert waiting() - before - {killed}
        os.kill(int((run / ".gateway-0.alive").read_text().strip()), signal.SIGKILL)
        os.kill(generator, signal.SIGCONT)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, said[-3000:]
    assert "gateway-0 exited: SIGKILL" in said and "generator-0 exited" not in said
    trained = check(run, 0, 3)
    assert len({(s["ticket"], s["sample"]) for s in trained}) == len(trained)
    assert json.loads((run / "summary.json").read_text())["ledger"]["duplicate"] == 0


def held_up(run: Path) -> BlockingSession | None:
    """What the buffer says of it now."""
    status = live.request_status(get_buffer_address(load.load("calc"), run), "", 10.0)
    return status.held_up if status is not None else None


def until_heard(run: Path, peer: str, epoch: int) -> None:
    """A whole report of `peer` came and was answered while the buffer follows this learner."""
    ages: list[float] = []

    def reported() -> bool:
        status = live.request_status(get_buffer_address(load.load("calc"), run), "", 10.0)
        if status is not None and status.epoch == epoch:
            ages.append(status.peers.get(peer, 0.0))
        return any(later < before for before, later in itertools.pairwise(ages))

    until(reported)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("staleness.inject=1", "staleness.inject: supports single completions only"),
        ("staleness.delay=1.0", "staleness.delay: supports single completions only"),
        ("advantage.name='remax'", "advantage.name: remax has no greedy session"),
        ("advantage.name='gae'", 'advantage.name = gae: needs the order .* agent.fork = "end"'),
        ("agent.tools=['m:f']", "agent.env: an environment has its own tools"),
        ("agent.max_tokens=5", "agent.max_tokens: 5 are fewer than one call may sample"),
    ],
)
def test_what_sessions_cannot_be_combined_with_is_refused(item: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load.load("calc", [item])


def test_a_fork_that_ends_keeps_order_and_a_warm_process_refuses_sessions() -> None:
    assert load.load("calc", ["advantage.name='gae'", "agent.fork='end'"]).agent.fork == "end"
    config: Config = load.load("calc")
    assert "sessions need a gateway" in needs_own_process(config)
    assert not needs_own_process(msgspec.structs.replace(config, agent=type(config.agent)()))


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}assistant:"
SETS = tuple(
    f"""
seed={RUN_SEED} exact=true model.path=m model.warm_start=false staleness.max_lag=0
learner.steps=2 learner.groups=1 learner.group_size=4 generator.slots=4 agent.at_once=4
evaluation.every=0 evaluation.prompts=1 evaluation.final_prompts=1 evaluation.ood_prompts=1
record.stream=true wires.lease_s=3600
""".split()
)


def run(where: Path, symbols: str, *sets: str) -> list[Any]:
    """The trained samples of a run of calc_form.toml, all of whose calls were sampled in form."""
    build_model(where / "m", symbols, hidden=32, layers=1, max_positions=512)
    (where / "m" / "chat_template.jinja").write_text(TEMPLATE)
    words = [word for each in (*SETS, *sets, "name=form") for word in ("--set", each)]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", str(ROOT / "configs" / "calc_form.toml")]
    done = run_command([*argv, "--json", *words], cwd=where, timeout=600).check()
    folder = where / "runs" / "form"
    summary = done.json
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    largest = [row["mismatch/max_at_lag_0"] for row in metrics if "mismatch/max_at_lag_0" in row]
    assert largest == [0.0, 0.0]
    ledger = summary["ledger"]
    assert ledger["trained"] == ledger["generated"] and not ledger["failed"]
    samples = trained(folder)
    assert len(samples) == 8
    return samples


def trained(folder: Path) -> list[Any]:
    """The samples of a run's recording; each has the allowed tokens of every sampled one."""
    recording = stream.read(folder)
    samples = [s for n in range(recording.end) for s in recording.read_step(n).batch.samples]
    for sample in samples:
        support = SampledSupport.decode(sample.support, len(sample.mask))
        sampled = np.frombuffer(sample.mask, np.uint8) > 0
        assert (support.sizes[sampled] > 0).all() and not support.sizes[~sampled].any()
        assert support.contains(np.frombuffer(sample.tokens, "<i4"))[sampled].all()
    return samples


def test_parsed_objects_and_required_tools_are_trained_token_for_token(tmp_path: Path) -> None:
    """By OpenAI's client and pydantic-ai, neither of which may retry; the replay agrees."""
    samples = run(
        tmp_path,
        string.digits + string.ascii_letters + " \n{}[]\":,;<>/_=+-*?#.$'",
        f"agent.function='{ROOT}/tests/support/form_agents.py:by_both'",
        f"agent.python='{python_of('clients')}'",
        "agent.max_tokens=200",
        "generator.max_new_tokens=200",
        "generator.context=400",
    )
    tokenizer = load_tokenizer(tmp_path / "m")
    for sample in samples:
        tokens = np.frombuffer(sample.tokens, "<i4").tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        call = re.fullmatch(
            r'<tool_call>\n\{"name": "final_result", "arguments": (.*)\}\n</tool_call>',
            text,
            re.DOTALL,
        )
        assert (call is not None) == bool(sample.sample % 2) and sample.calls == 1
        assert sample.reward == json.loads(call[1] if call else text)["value"] / 9
    assert len({sample.reward for sample in samples}) > 2
    replayed = CliRunner().invoke(main, ["replay", str(tmp_path / "runs" / "form"), "--json"])
    assert replayed.exit_code == 0 and '"equal": true' in replayed.output, replayed.output


def test_kills_journal_and_replay_keep_the_allowed_tokens(tmp_path: Path) -> None:
    """Generator, learner and gateway are killed, then the whole run, which resumes.  In exact mode
    the learner refuses a batch whose log-probabilities differ by one bit."""
    build_model(tmp_path / "m", CalcTask.symbols, hidden=32, layers=1)
    run_dir, allowed, log = tmp_path / "runs" / "form", tmp_path / "allowed", tmp_path / "said"
    sets = [
        *SETS,
        *PATIENT,
        *("name=form", "generators=2", "staleness.max_lag=2", "learner.steps=6"),
        *("learner.checkpoint_every=1", "durability.mode=disk", "record.split_every=1"),
        "weights.in_flight=recompute_kv",
    ]
    words = [word for each in sets for word in ("--set", each)]
    argv = [sys.executable, "-m", "asyncrl.cli", "run"]
    allow(allowed, 2)
    with log.open("w") as said:
        first = subprocess.Popen(
            [*argv, str(ROOT / "configs" / "calc_form.toml"), *words],
            cwd=tmp_path,
            env=held(batches=allowed),
            stderr=said,
            text=True,
        )
        try:
            wait_until(lambda: steps_done(run_dir) == 2, first)
            for batches, names in ((3, ("learner", "generator-0")), (4, ("gateway-0",))):
                kill(run_dir, *names)
                for name in names:
                    wait_until(lambda end=f"{name} exited: SIGKILL": end in log.read_text(), first)
                allow(allowed, batches)
                wait_until(lambda done=batches: steps_done(run_dir) == done, first)
            first.kill()
            for name in ("learner", "generator-0", "generator-1", "gateway-0", "buffer"):
                # they end by themselves, too
                with contextlib.suppress(ProcessLookupError, ValueError):
                    kill(run_dir, name)
            first.wait()
        finally:
            first.kill()
    summary = run_command([*argv, "--resume", str(run_dir), "--json"], cwd=tmp_path).check().json
    ledger, samples = summary["ledger"], trained(run_dir)
    assert summary["steps"] == 6 and summary["lag"]["max"] <= 2 and len(samples) == 24
    assert ledger["generated"] == sum(v for k, v in ledger.items() if k != "generated")
    assert ledger["trained"] == sum(sum(s.mask) for s in samples)
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    largest = [row["mismatch/max_one_version"] for row in metrics if "split/mismatch" in row]
    assert largest and not any(largest)
    replayed = CliRunner().invoke(main, ["replay", str(run_dir), "--json"])
    assert replayed.exit_code == 0 and '"equal": true' in replayed.output, replayed.output


def kill(run_dir: Path, *names: str) -> None:
    for name in names:
        os.kill(int((run_dir / f".{name}.alive").read_text()), signal.SIGKILL)
