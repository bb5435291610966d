"""Pages beside results: small, because the plot library is put there by a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import plotly.graph_objects as go
import pytest
from process_kit import ENV, ROOT

from asyncrl.records import page_kit

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    # last: benchmarks/learner.py must not hide the package
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from lib import kept_pages

    return kept_pages


# type: ignore[no-untyped-def]
def test_a_kept_page_has_its_plots_and_asks_for_the_library(kept, tmp_path: Path) -> None:
    plot = page_kit.plot(go.Figure().add_scatter(y=[1.25, 2.5], name="a line"))
    made = tmp_path / "report.html"
    made.write_text(f"<html>before{page_kit.library()}<p>between</p>{plot}after</html>")
    kept.keep(made, tmp_path / "kept.html")
    assert (
        tmp_path / "kept.html"
    ).read_text() == f"<html>before{kept.REFERENCE}<p>between</p>{plot}after</html>"
    made.write_text(f"ran {tmp_path}/r in {tmp_path.parent}/x")
    kept.keep(made, tmp_path / "kept.html", {tmp_path: "runs", tmp_path.parent: "."})
    assert (tmp_path / "kept.html").read_text() == "ran runs/r in ./x"
    plain = "<html><script>one = 1</script></html>"
    assert kept.without_library(plain) == plain


def test_no_file_beside_the_results_is_above_a_megabyte() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "benchmarks/results"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    files = [ROOT / name for name in listed] or [
        path for path in RESULTS.iterdir() if path.suffix != ".js"
    ]
    assert [path.name for path in files if path.stat().st_size > 2**20] == []


def test_the_library_comes_by_a_command(kept) -> None:  # type: ignore[no-untyped-def]
    library = RESULTS / kept.LIBRARY
    there = library.exists()
    done = subprocess.run(
        [sys.executable, "benchmarks/pages.py"], cwd=ROOT, env=ENV, capture_output=True, text=True
    )
    try:
        assert done.returncode == 0, done.stderr
        asking = {
            path.name for path in RESULTS.glob("*.html") if kept.REFERENCE in path.read_text()
        }
        assert {Path(line).name for line in done.stdout.splitlines()} == asking and asking
        assert kept.BEGINS.removeprefix("<script>") in library.read_text()
    finally:
        if not there:
            library.unlink(missing_ok=True)
