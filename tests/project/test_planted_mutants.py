"""The short form of the mutation test: promises of the configuration, broken one by one in memory,
are each noticed by their test."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from process_kit import ENV, ROOT

pytestmark = pytest.mark.slow


@pytest.mark.cold  # mutants are forks of a process that has imported nothing of asyncrl
def test_every_planted_mutant_is_noticed_by_its_test() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/mutants.py", "--planted", "--json"],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 18
    alive = [
        f"{x['name']}: {x['mutant']} passes {x['test']}"
        for x in found
        if x["status"] not in ("killed", "timeout")
    ]
    assert not alive and done.returncode == 0, alive


def test_the_table_of_tests_names_files_that_are_there() -> None:
    """benchmarks/mutants_tests.json: a mutant is tried against the test files that it names."""
    table = json.loads((ROOT / "benchmarks" / "mutants_tests.json").read_text())
    named = {*table, *(path for paths in table.values() for path in paths)}
    gone = sorted(path for path in named if not (ROOT / path).exists())
    assert table and not gone, f"write it anew: python benchmarks/mutants.py --table; gone: {gone}"
