"""A run whose answers are decoded under grammars: a model of random weights answers in the form
that OpenAI's client or pydantic-ai demands, every sampled token is trained, and in exact mode the
learner has the bits of the engine.
"""

from __future__ import annotations

import json
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from clients_kit import python_of
from process_kit import ENV, ROOT, RUN_SEED

from asyncrl.cli import main
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.models.policy import build_model
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.records import stream

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}assistant:"
SETS = (
    f"seed={RUN_SEED}",
    "exact=true",
    "model.path=m",
    "model.warm_start=false",
    "staleness.max_lag=0",
    "learner.steps=2",
    "learner.groups=1",
    "learner.group_size=4",
    "generator.slots=4",
    "agent.at_once=4",
    "evaluation.every=0",
    "evaluation.prompts=1",
    "evaluation.final_prompts=1",
    "evaluation.ood_prompts=1",
    "record.stream=true",
    "wires.lease_s=3600",
)


def run(where: Path, symbols: str, *sets: str) -> list[Any]:
    """The trained samples of a run of calc_form.toml, all of whose calls were sampled in form."""
    build_model(where / "m", symbols, hidden=32, layers=1, max_positions=512)
    (where / "m" / "chat_template.jinja").write_text(TEMPLATE)
    words = [word for each in (*SETS, *sets, "name=form") for word in ("--set", each)]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", str(ROOT / "configs" / "calc_form.toml")]
    done = subprocess.run(
        [*argv, "--json", *words], cwd=where, env=ENV, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = where / "runs" / "form"
    summary = json.loads(done.stdout)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    largest = [row["mismatch/max_at_lag_0"] for row in metrics if "mismatch/max_at_lag_0" in row]
    assert largest == [0.0, 0.0]
    ledger = summary["ledger"]
    assert ledger["trained"] == ledger["generated"] and not ledger["failed"]
    recording = stream.read(folder)
    samples = [s for n in range(recording.end) for s in recording.step(n).batch.samples]
    assert len(samples) == 8
    for sample in samples:
        support = SampledSupport.decode(sample.support, len(sample.mask))
        sampled = np.frombuffer(sample.mask, np.uint8) > 0
        assert (support.sizes[sampled] > 0).all() and not support.sizes[~sampled].any()
    return samples


def test_parsed_objects_and_required_tools_are_trained_token_for_token(tmp_path: Path) -> None:
    """By OpenAI's client and pydantic-ai, neither of which may ask again; the replay learns the
    same.
    """
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
