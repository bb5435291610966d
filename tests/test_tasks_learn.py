"""Each built-in task learns: warm start and RL by its own config, typed as a user would, only fewer steps.

`sort` is the demo's task; `gain` in test_run.py asserts its gain.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENV, ROOT

PROMPTS = 512
# Config, RL steps, least gain in held-out accuracy.  One answer a prompt: the standard error of a difference is at most 0.031.
CASES = [("cancel", 70, 0.08), ("dedup", 50, 0.10), ("grid", 50, 0.10), ("rle", 60, 0.08), ("rlehack", 80, 0.06), ("rlenarrow", 40, 0.10)]


@pytest.mark.parametrize(("name", "steps", "least"), CASES)
def test_task_learns(name: str, steps: int, least: float, tmp_path: Path) -> None:
    sets = [f"model.path={str(tmp_path / 'model')!r}", f"runs={str(tmp_path / 'runs')!r}", f"learner.steps={steps}",
            f"evaluation.final_prompts={PROMPTS}", f"evaluation.prompts={PROMPTS}", f"evaluation.every={steps}",
            "evaluation.ood_prompts=128"]  # fmt: skip
    argv = [sys.executable, "-m", "asyncrl.cli", "run", f"configs/{name}.toml", "--json", *(x for s in sets for x in ("--set", s))]
    done = subprocess.run(argv, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["steps"] == steps
    gained = summary["heldout_end"] - summary["heldout_start"]
    assert gained >= least, f"{name}: held-out {summary['heldout_start']:.3f} -> {summary['heldout_end']:.3f}"
    assert summary["lag"]["max"] <= summary["lag"]["limit"]
