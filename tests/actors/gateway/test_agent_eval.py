"""`asyncrl eval` of a config whose samples are sessions: a run without steps, in real processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from agent_run_kit import command, model_dir  # noqa: F401
from process_kit import ROOT

from asyncrl.cli import main

ENVS = ROOT / "tests" / "support" / "agent_envs.py"


def evaluate(model: Path, folder: Path, env: str, *words: str) -> None:
    """Run the command with the small settings that the tests of agent runs have."""
    small = command(model, folder, "unused")[3:]
    sets = [x for x in small[small.index("--set") :] if not x.startswith("--json")]
    main(["eval", str(model), "calc", *sets, "--set", f"agent.env='{ENVS}:{env}'", *words])


def test_a_model_is_scored_in_sessions(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "made"))
    (tmp_path / "made").mkdir()
    sets = "evaluation.sets=[{name='twice', samples=2, prompts=3}, {name='not', prompts=2}]"
    only = ("--only", "heldout", "--only", "twice", "--prompts", "3", "--json")
    evaluate(model_dir, tmp_path, "Talks", "--set", sets, *only)
    found = json.loads(capfd.readouterr().out.splitlines()[-1])  # libraries may print above
    assert found["model"] == str(model_dir)
    assert set(found["sets"]) == {"heldout", "twice"}
    for values in found["sets"].values():
        assert values["n"] == 3 and values["reward"] > 0 and values["length"] > 0
    assert "pass_at_2" in found["sets"]["twice"]
    assert not list((tmp_path / "made").glob("asyncrl-eval-*"))  # its directory is gone


def test_an_environment_that_fails_is_named_and_its_logs_stay(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        evaluate(model_dir, tmp_path, "Nowhere")
    last = capfd.readouterr().err.strip().split("\n")[-1]
    assert ended.value.code and last.startswith("error: ") and "Nowhere" in last, last
    assert Path(re.search(r"log: (\S+)\)", last)[1]).exists()
