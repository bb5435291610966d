"""`asyncrl figure` and `asyncrl ls`: their points, files and errors; other tests draw real runs."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncrl.cli import main
from asyncrl.experiments import figures
from asyncrl.experiments.figures import LAG, STEP, FigurePoint, make_lines

HEADERS = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<?xml"}


def comparison(path: Path, arms: dict[str, dict[int, list[float]]]) -> Path:
    """A comparison of warm runs: arm -> seed -> accuracies at steps 0, 5, ..."""
    (path / "cells").mkdir(parents=True)
    (path / "compare.json").write_text(json.dumps({"arms": {arm: {} for arm in arms}}))
    for arm, seeds in arms.items():
        for seed, accuracy in seeds.items():
            steps = [5.0 * number for number in range(len(accuracy))]
            record: dict[str, Any] = {
                "accuracy": [steps, accuracy],
                "curve": [{"version": 1, "is/ess": 0.9}, {"version": 2, "is/ess": float("nan")}],
                "lag_histogram": {"0": 100, "4": 100 * (seed + 1)},
            }
            (path / "cells" / f"{arm}-seed{seed}.json").write_text(json.dumps(record))
    return path


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    early = {0: [0.1, 0.3, 0.5], 1: [0.2, 0.5]}  # seed 1 was given up
    return comparison(tmp_path / "c", {"a": early, "a-seed1": {0: [0.1, 0.4, 0.6]}})


def test_a_comparison_s_points_and_lines(compared: Path, tmp_path: Path) -> None:
    points = figures.read_points([compared], "eval/heldout", STEP)
    first, second = make_lines(points)
    assert (first.name, first.positions, first.counts) == ("a", [0.0, 5.0, 10.0], [2, 2, 1])
    assert first.mean == pytest.approx([0.15, 0.4, 0.5])
    assert (first.low, first.high) == ([0.1, 0.3, 0.5], [0.2, 0.5, 0.5])
    assert (second.name, second.mean) == ("a-seed1", [0.1, 0.4, 0.6]), "not a seed of the arm a"
    said = figures.make_caption([first, second], STEP)
    assert said == "Mean over seeds (n = 1 to 2); band: lowest to highest seed."
    assert figures.make_caption([second], STEP) == "One run each (n = 1 seed), no band."
    points = figures.read_points([compared], "eval/heldout", LAG)
    lags = enumerate((2.0, 800 / 300))
    assert points[:2] == [FigurePoint("a", "a", seed, lag, 0.5) for seed, lag in lags]
    (line,) = make_lines(points[:2])
    assert line.positions == pytest.approx([7 / 3]) and line.counts == [2]
    assert "x: measured mean lag" in figures.make_caption([line], LAG)
    points = figures.read_points([compared], "is/ess", STEP)
    found = [(p.series, p.seed, p.position, p.value) for p in points[:2]]
    assert found == [("a", seed, 0.0, 0.9) for seed in (0, 1)]
    # series of one name in two directories stay apart
    here = comparison(tmp_path / "x" / "c", {"a": {0: [0.1]}})
    there = comparison(tmp_path / "y" / "c", {"a": {0: [0.9]}})
    other = comparison(tmp_path / "d", {"a": {0: [0.5]}})
    lines = make_lines(figures.read_points([here, there, other], "eval/heldout", STEP))
    assert [line.name for line in lines] == [f"{here}: a", f"{there}: a", "d: a"]
    assert [line.mean for line in lines] == [[0.1], [0.9], [0.5]]


@pytest.mark.parametrize("ending", figures.FORMATS)
@pytest.mark.parametrize("across", [STEP, LAG])
def test_a_figure_is_of_its_kind(ending: str, across: str, compared: Path, tmp_path: Path) -> None:
    lines = make_lines(figures.read_points([compared], "eval/heldout", across))
    files = [tmp_path / f"{number}{ending}" for number in range(2)]
    for file in files:
        figures.draw(lines, "eval/heldout", across, file)
    assert files[0].read_bytes().startswith(HEADERS[ending])
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_svg_has_caption_names_axes_and_colors(compared: Path, tmp_path: Path) -> None:
    files = ("-o", str(tmp_path / "f.svg"), "--csv", str(tmp_path / "f.csv"))
    main.main(["figure", str(compared), *files], standalone_mode=False)
    svg = (tmp_path / "f.svg").read_text()
    lines = make_lines(figures.read_points([compared], "eval/heldout", STEP))
    for text in (figures.make_caption(lines, STEP), "held-out reward", "step (versions)", "a"):
        assert f">{text}</text>" in svg, text
    for color in figures.OKABE_ITO[:2]:
        assert color.lower() in svg
    rows = list(csv.DictReader((tmp_path / "f.csv").open(newline="")))
    assert len(rows) == 8
    assert rows[4] == {"series": "a", "seed": "1", "step": "5.0", "eval/heldout": "0.5"}


def test_more_series_than_colors(tmp_path: Path) -> None:
    lines = make_lines([FigurePoint(f"s{n}", "0", 0, 0.0, n / 20) for n in range(20)])
    figures.draw(lines, "eval/heldout", STEP, tmp_path / "f.svg")
    svg = (tmp_path / "f.svg").read_text()
    assert all(f">{line.name}</text>" in svg for line in lines)
    # a correction has a color, and a limit a line style
    series = [f"{name}, limit {limit}" for name in ("none", "tis") for limit in (1, 8)]
    points = [FigurePoint(name, str(x), "0", x, 0.1 * x) for name in series for x in (1, 2)]
    figures.draw(make_lines(points), "eval/heldout", STEP, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    colors = [color.lower() for color in figures.OKABE_ITO]
    used = [color for color in colors if f"stroke: {color}; stroke-width: 1.5" in text]
    assert used == colors[:2] and text.count("stroke-dasharray: 5.55") >= 2


def refused(*argv: str) -> str:
    done = CliRunner().invoke(main, argv)
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2
    return line


def test_what_a_figure_refuses(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, out = str(compared), str(tmp_path / "f.pdf")
    table = tmp_path / "f.csv"
    assert "give -o FILE.pdf (or .svg, .png), --csv FILE.csv" in refused("figure", c)
    assert "ends in .pdf, .svg, .png" in refused(
        "figure", c, "-o", f"{out}.gif", "--csv", str(table)
    )
    assert "holds no run, comparison or sweep" in refused("figure", str(tmp_path), "-o", out)
    (tmp_path / "sweep.json").write_text("{}")
    assert "the sweep has no result.json yet" in refused("figure", str(tmp_path), "-o", out)
    words = ("figure", c, "-o", out, "--metric", "is/es")
    assert "no finished run measured is/es; `asyncrl config metrics`" in refused(*words)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused("figure", c, "-o", out)
    assert "a figure needs matplotlib: " in line and line.endswith("--csv works without it")
    assert not table.exists() and not Path(out).exists()
    main.main(["figure", c, "--csv", str(table)], standalone_mode=False)
    assert table.is_file()


def test_what_a_list_of_runs_refuses_and_shows(tmp_path: Path) -> None:
    assert "no such directory" in refused("ls", str(tmp_path / "none"))
    assert f"{tmp_path} contains no run directory" in refused("ls", str(tmp_path))
    for name in ("run_id", "config.toml"):
        (tmp_path / name).touch()
    assert "is a run itself" in refused("ls", str(tmp_path))
    # runs that cannot be read hide no other
    (tmp_path / "run_id").unlink()
    for name, config in (("torn", "learner = ["), ("new", "[learner]\nsteps = 9\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run_id").write_text(name)
        (tmp_path / name / "config.toml").write_text(config)
    done = CliRunner().invoke(main, ["ls", str(tmp_path), "--json"])
    runs = {run.pop("run"): run for run in json.loads(done.stdout)["runs"]}
    nothing = {"accuracy": None, "lag": None}
    assert runs["torn"] == {"state": "unreadable", "steps": None, "of": None, **nothing}
    assert runs["new"] == {"state": "stopped", "steps": 0, "of": 9, **nothing}
    table = CliRunner().invoke(main, ["ls", str(tmp_path)]).stdout
    assert ["torn", "unreadable", "-/-", "-", "-"] in map(str.split, table.splitlines())
    assert table.splitlines()[0].split() == ["run", "state", "steps", "held-out", "lag"]
