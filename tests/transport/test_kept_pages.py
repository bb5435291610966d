from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from process_kit import ROOT

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    # last: benchmarks/learner.py must not hide the package
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from lib import kept_pages

    return kept_pages


def test_a_kept_page_names_no_directory_of_the_machine(kept, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = tmp_path / "report.html"
    made.write_text(f"ran {tmp_path}/r in {tmp_path.parent}/x")
    kept.keep(made, tmp_path / "kept.html", {tmp_path: "runs", tmp_path.parent: "."})
    assert (tmp_path / "kept.html").read_text() == "ran runs/r in ./x"


def test_no_file_beside_the_results_is_above_a_megabyte() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "benchmarks/results"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    files = [ROOT / name for name in listed] or [
        path for path in RESULTS.iterdir() if path.suffix != ".js"
    ]
    assert [path.name for path in files if path.stat().st_size > 2**20] == []
