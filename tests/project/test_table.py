"""`make bench`: every figure on a page has a program that makes it, and the table hides nothing."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import table
from lib import run_pictures, timelines
from process_kit import write_lines

ROOT = Path(__file__).resolve().parents[2]

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
    programs = {n: table.Program(f"{n}.py --x", (n,), 1) for n in ("good", "bad", "other")}
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


BATCHES, SIZE = 20, 4


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Batch n begins at second n, three of its samples end at n + 0.3, and it trains at n + 1.

    One sample is evaluated at the start, and one at the end."""
    generator: list[Any] = [["prefill", -1.0, -0.9, 1], ["decode", -0.9, -0.5, 1, 8]]
    for n in range(BATCHES):
        generator += [
            ["weights", n - 0.05, n - 0.01],
            ["prefill", n, n + 0.1, SIZE],
            ["decode", n + 0.1, n + 0.3, SIZE, 8],
            ["decode", n + 0.3, n + 0.6, 1, 8],
        ]
    generator += [["prefill", BATCHES, BATCHES + 0.1, 1], ["decode", BATCHES, BATCHES + 0.3, 1, 8]]
    learner = []
    for n in range(BATCHES):
        learner += [["train", n + 1, n + 1.5, 40], ["publish", n + 1.5, n + 1.6]]
    write_lines(tmp_path / "trace" / "generator-0.jsonl", *generator)
    write_lines(tmp_path / "trace" / "learner.jsonl", *learner)
    batches = [{"batch": n, "lags": {"1": 40}} for n in range(BATCHES)]
    write_lines(tmp_path / "trained.jsonl", *batches)
    return tmp_path


def test_the_queue_counts_the_samples_that_began_and_ended(run_dir: Path) -> None:
    part = timelines.excerpt(run_dir, SIZE, evaluated=1)
    first = BATCHES // 2
    assert part["queue"]["batch_size"] == SIZE
    by_second = {second: (begun, ended) for second, begun, ended in part["queue"]["samples"]}
    start = first - 3 + 1  # of the first batch that trains in the excerpt
    for batch in range(first - 2, first + timelines.BATCHES):
        begun = (batch + 1) * SIZE
        assert by_second[round(batch + 0.1 - start, 4)] == (begun, begun - SIZE)
        assert by_second[round(batch + 0.3 - start, 4)] == (begun, begun - 1)


def test_samples_that_nobody_counted_are_refused(run_dir: Path) -> None:
    with pytest.raises(SystemExit, match="samples began, not those of 20 batches"):
        timelines.excerpt(run_dir, SIZE, evaluated=0)


def test_the_ledger_has_the_lines_with_tokens_after_each_batch(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "t": 1.0, "ledger/trained": 10, "ledger/left_over": 5},
        {"step": 1, "t": 2.5, "ledger/trained": 30, "ledger/dropped_stale": 4},
        {"step": 1, "t": 2.6, "eval/heldout": 0.5},
    ]
    write_lines(tmp_path / "metrics.jsonl", *rows)
    assert run_pictures.ledger_excerpt(tmp_path) == {
        "seconds": [1.0, 2.5],
        "lines": {"trained": [10, 30], "dropped_stale": [0, 4], "left_over": [5, 0]},
    }


def test_accuracy_is_at_the_second_of_its_version(tmp_path: Path) -> None:
    """An evaluation ends later than the version that it measures begins."""
    rows = [
        {"step": 0, "t": 3.0, "eval/heldout": 0.25},
        {"step": 0, "t": 4.0, "reward/mean": 0.2},
        {"step": 1, "t": 6.0, "reward/mean": 0.3},
        {"step": 1, "t": 9.0, "eval/heldout": 0.5},
        {"step": 2, "t": 11.0, "eval/heldout": 0.75},
    ]
    write_lines(tmp_path / "metrics.jsonl", *rows)
    assert run_pictures.accuracy_curve(tmp_path) == [[0.0, 0.25], [4.0, 0.5], [6.0, 0.75]]
