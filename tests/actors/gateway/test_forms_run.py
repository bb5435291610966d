"""A run whose answers are decoded under grammars: a model of random weights answers in the form
that OpenAI's client or pydantic-ai demands, every sampled token is trained, and in exact mode the
learner has the bits of the engine."""

import contextlib
import json
import os
import re
import signal
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from clients_kit import python_of
from holding import allow, held
from process_kit import PATIENT, ROOT, RUN_SEED, run_command
from run_kit import steps_done, wait_until

from asyncrl.cli import main
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.models.policy import build_model
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.records import stream
from asyncrl.tasks.calc import CalcTask

pytestmark = pytest.mark.slow

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
        tokens = np.frombuffer(sample.tokens, "<i4")
        assert support.contains(tokens)[sampled].all()
    return samples


def test_parsed_objects_and_required_tools_are_trained_token_for_token(tmp_path: Path) -> None:
    """By OpenAI's client and pydantic-ai, neither of which may ask again; the replay learns the
    same."""
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
        written = json.loads(call[1] if call else text)
        assert sample.reward == written["value"] / 9
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
        "name=form",
        "generators=2",
        "staleness.max_lag=2",
        "learner.steps=6",
        "learner.checkpoint_every=1",
        "durability.mode=disk",
        "record.split_every=1",
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
