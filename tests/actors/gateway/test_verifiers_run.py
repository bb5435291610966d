"""Runs on the environments of docs/agents.md, each in a Python with its version of verifiers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from agent_run_kit import rows
from clients_kit import python_of
from process_kit import PATIENT, ROOT, RUN_SEED, run_command

from asyncrl.models.policy import build_model

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "agents.md"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


# an environment of version 0.1 and its config
OLD_MODULE = """
import verifiers as vf
from datasets import Dataset


def load_environment(count=100):
    rows = [{"question": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(count)]

    async def exact(completion, answer):
        return float(completion[-1]["content"].strip() == answer)

    async def brief(completion):
        return float(len(completion[-1]["content"]) < 8)

    rubric = vf.Rubric(funcs=[exact, brief], weights=[1.0, 0.1])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
"""
OLD_CONFIG = """
task.name = "env"
[agent]
env = "verifiers:my_sums"
args = { count = 200 }
"""


def write_environment(folder: Path, name: str) -> None:
    """The environment of the page and its config, as a reader would save them, or the old one."""
    text = PAGE.read_text(encoding="utf-8")
    (module,) = re.findall(r"(?ms)^```python\n(import verifiers.*?)^```", text)
    (config,) = re.findall(r'(?ms)^```toml\n(task.name = "env".*?)^```', text)
    if name == "my_sums":
        module, config = OLD_MODULE, OLD_CONFIG
    (folder / f"{name}.py").write_text(module, encoding="utf-8")
    (folder / "sums.toml").write_text(config, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "python", "metrics"),
    [("my_tasks", "verifiers", []), ("my_sums", "clients", ["num_turns"])],
)
def test_an_environment_of_verifiers_is_trained_on_by_its_name(
    name: str, python: str, metrics: Sequence[str], tmp_path: Path
) -> None:
    """One call a session; the environment pays, and each of its rewards is a part."""
    build_model(tmp_path / "m", "0123456789+= ", hidden=32, layers=1)
    (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATE)
    write_environment(tmp_path, name)
    sets = (
        *PATIENT,
        f"seed={RUN_SEED}",
        "name=sums",
        "model.path=m",
        f"agent.python={python_of(python)!r}",
        "agent.workers=1",  # each imports the package for itself
        "agent.step_s=3600.0",
        "agent.idle_s=3600.0",
        "agent.deadline_s=7200.0",
        "wires.lease_s=3600.0",
        "learner.steps=2",
        "learner.groups=2",
        "learner.group_size=4",
        "generator.max_new_tokens=8",
        "generator.context=64",
        "evaluation.every=0",
        "evaluation.final_prompts=4",
        "record.samples_every=1",
        "record.samples=0",
    )
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "sums.toml", "--json"]
    argv += [word for item in sets for word in ("--set", item)]
    run_command(argv, cwd=tmp_path).check()
    run = tmp_path / "runs" / "sums"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories"], summary["ledger"]["failed"]) == (2, 16, 0)
    samples = rows(run / "samples.jsonl")
    assert len(samples) == 16
    for sample in samples:
        parts = sample["parts"]
        assert {"exact", "brief", *metrics} <= parts.keys()
        assert sample["reward"] == pytest.approx(parts["exact"] + 0.1 * parts["brief"])
        # an empty answer is no turn to version 0.1, and is trained on all the same
        assert sample["calls"] == 1 and all(parts[metric] <= 1 for metric in metrics)
    assert len({sample["prompt"] for sample in samples}) > 1
    assert summary["heldout_end"] is not None
