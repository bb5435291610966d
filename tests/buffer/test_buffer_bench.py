"""benchmarks/buffer.py: its quick run, with every alternative started for real."""

from __future__ import annotations

import json
import sys

import pytest
from process_kit import run_command

MODES = ("memory", "process", "disk")


def test_the_cpu_of_a_batch_is_judged_against_the_bare_store_of_the_same_run() -> None:
    done = run_command([sys.executable, "benchmarks/buffer.py", "--quick", "--json"]).check()
    found = json.loads(done.out.splitlines()[-1])
    goals = {goal["figure"]: goal for goal in found["goals"]}
    assert set(found["times"]) == {*MODES, "queue", "bare store"}
    assert found["bare_store_ms"] > 0
    for mode in MODES:
        goal = goals[f"{mode}: CPU of a batch over the bare store's, last third"]
        assert goal["goal"] == "<= 5" and goal["met"] == (goal["value"] <= 5)
        last_ms = found["cpu"][mode]["last_ms"]
        assert goal["value"] == pytest.approx(last_ms / found["bare_store_ms"], rel=0.02)
        assert goals[f"{mode}: samples/s over the socket"]["of_queue"] > 0
