"""A run whose samples are sessions of a harness in a program of its own, over HTTP with OpenAI's
client: leased, drawn, scored, trained."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from gateway_run_kit import PATIENT, SETS
from process_kit import ENV, ROOT

from asyncrl.models.policy import build_model
from asyncrl.tasks.calc import CalcTask

pytestmark = pytest.mark.slow


def test_a_harness_is_trained_over_http(tmp_path: Path) -> None:
    build_model(tmp_path / "m", CalcTask.symbols, hidden=32, layers=1)
    sets = [word for each in (*SETS, "model.path=m") for word in ("--set", each)]
    config = str(ROOT / "configs" / "calc.toml")
    run = [sys.executable, "-c", PATIENT, "run", config, *sets]
    with open(tmp_path / "out.txt", "wb") as out:
        started = subprocess.Popen(run, cwd=tmp_path, env=ENV, stdout=out, stderr=out)
    harness = None
    try:
        deadline = time.monotonic() + 600
        while not (found := list(tmp_path.glob("runs/*/agent.url"))):
            assert started.poll() is None and time.monotonic() < deadline, said(tmp_path)
            time.sleep(0.05)
        (url,) = found
        assert (url.parent / "agent.key").stat().st_mode & 0o777 == 0o600
        agent = [sys.executable, str(ROOT / "configs/examples/calc_harness.py"), str(url.parent)]
        harness = subprocess.Popen(agent, cwd=tmp_path, env=ENV)
        assert started.wait(1800) == 0, said(tmp_path)
        assert harness.wait(600) == 0
    finally:
        for process in (started, harness):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    out_text = said(tmp_path)
    assert "2 steps, 16 trajectories" in out_text and "trained 100.0%" in out_text, out_text
    assert "was still" not in out_text


def said(path: Path) -> str:
    return (path / "out.txt").read_text()[-3000:]
