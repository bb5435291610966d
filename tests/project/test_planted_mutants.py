"""The short form of the mutation test: promises of the configuration, broken one by one in memory,
are each noticed by their test."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
from process_kit import ROOT, run_command

pytestmark = pytest.mark.slow


@pytest.mark.cold  # mutants are forks of a process that has imported nothing of asyncrl
def test_every_planted_mutant_is_noticed_by_its_test() -> None:
    done = run_command([sys.executable, "benchmarks/mutants.py", "--planted", "--json"])
    assert done.out, done.err[-3000:]
    found = json.loads(done.out.splitlines()[-1])
    assert len(found) >= 18
    alive = [
        f"{x['name']}: {x['mutant']} passes {x['test']}"
        for x in found
        if x["status"] not in ("killed", "timeout")
    ]
    assert not alive and done.code == 0, alive


def test_the_table_of_tests_names_files_that_are_there() -> None:
    """benchmarks/mutants_tests.json: a mutant is tried against the test files that it names."""
    table = json.loads((ROOT / "benchmarks" / "mutants_tests.json").read_text())
    named = {*table, *(path for paths in table.values() for path in paths)}
    gone = sorted(path for path in named if not (ROOT / path).exists())
    assert table and not gone, f"write it anew: python benchmarks/mutants.py --table; gone: {gone}"


def test_types_have_no_mutants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    monkeypatch.setattr(os, "environ", {**os.environ})  # which this import changes
    import mutants

    text = """
Row = TypeVar("Row", bound=int)
class Reader(Protocol[Row]):
    def read(self, most: int = 8) -> Row: ...
if TYPE_CHECKING:
    Share = str
class Protocols(Reader):
    step = 4
"""
    (tmp_path / "types.py").write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    made = [make().plus for _, make in mutants.catalogue(["types.py"])]
    assert sorted(made) == ["step = 5", "step = None"]


def test_each_equivalent_mutant_changes_a_line_that_is_there() -> None:
    known = tomllib.loads((ROOT / "benchmarks" / "mutants_equivalent.toml").read_text())
    gone = []
    for entry in (x for x in known["equivalent"] if "minus" in x):
        lines = (ROOT / entry["path"]).read_text().splitlines()
        if entry["minus"] not in map(str.strip, lines):
            gone.append((entry["path"], entry["minus"]))
    assert not gone, "remove these entries, or write them anew"
