"""`make bench`: every figure on a page has a program that makes it, and the table hides nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # last: benchmarks/learner.py must not hide the package
import table  # noqa: E402

# figures of a study or of a single run: docs/log says how each was made
STUDIES = {
    "lag_grid",
    "demo_run",
    "loop_speed_without_trl",
    "middle_lag",
    "scale_waiting",
    "simulate_slow",
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(table, "ROOT", tmp_path)
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    return folder


def put(folder: Path, name: str, day: str, met: bool, **more: Any) -> None:
    goal = {"figure": "f", "value": 1.5, "goal": ">= 2", "met": met, "spread": [1.0, 2.0]}
    result = {"date": day, "time": "10:00:00", "commit": "abc", "goals": [goal], **more}
    (folder / f"{day}_abc_2core_{name}.json").write_text(json.dumps(result))


def test_every_figure_on_a_page_has_its_program() -> None:
    made = {r for program in table.PROGRAMS.values() for r in program.results} | STUDIES
    for page in ("README.md", "docs/performance.md"):
        files = re.findall(r"benchmarks/results/([\w.-]+)\.json", (ROOT / page).read_text())
        assert files
        for file in files:
            name = re.sub(r"^[\d-]+_[0-9a-z]+_\d+core_", "", file)
            assert name in made, f"{page}: no program of benchmarks/table.py makes {file}"


def test_every_program_is_there() -> None:
    for program in table.PROGRAMS.values():
        assert (ROOT / "benchmarks" / program.words.split()[0]).is_file()
    assert "benchmarks/table.py --run" in (ROOT / "Makefile").read_text()


def test_what_was_measured_against_a_weaker_rival_is_no_figure(results: Path) -> None:
    put(results, "engine", "2026-11-21", True)
    put(results, "engine_332k", "2026-11-21", True)
    assert {r["program"]: r["figure"] for r in table.rows([])}["engine"] == table.TO_DO
    assert "engine_332k" not in {r["program"] for r in table.rows([])}
    put(results, "engine", "2026-11-22", False)
    put(results, "engine", "2026-11-23", True)
    (row,) = table.rows(["engine"])
    assert row["met"] and row["file"].startswith("2026-11-23")  # the newest


def test_unmet_and_unmeasured_are_marked(results: Path) -> None:
    put(results, "buffer", "2026-11-21", False)
    put(results, "weights", "2026-11-21", True, rounds_beside_other_work=2)
    found = table.rows(["buffer", "weights", "memory"])
    marks = list(table.shown(found).columns[5].cells)
    assert marks == ["NOT MET", "met, beside other work", "NOT MEASURED"]
    assert [r["met"] for r in found] == [False, True, False]


def test_run_runs_those_asked_for_and_names_what_failed(
    results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = {
        name: table.Program(f"{name}.py --x", (name,), 1) for name in ("good", "bad", "other")
    }
    for name, code in (("good", 0), ("bad", 1), ("other", 0)):
        (tmp_path / "benchmarks" / f"{name}.py").write_text(
            f"import sys; open({str(tmp_path)!r} + '/ran', 'a').write("
            f"' '.join([{name!r}, *sys.argv[1:]]) + ';'); sys.exit({code})"
        )
    monkeypatch.setattr(table, "PROGRAMS", programs)
    monkeypatch.setattr(
        sys, "argv", ["table.py", "--run", "--quick", "--json", "--only", "good", "bad"]
    )
    with pytest.raises(SystemExit, match="failed: bad"):
        table.main()
    assert (tmp_path / "ran").read_text() == "good --x --quick;bad --x --quick;"
