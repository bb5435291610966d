"""benchmarks/real_learns.py: a gain is what both intervals allow; the program runs the config."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_rivals_kit import program


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("real_learns", monkeypatch)


def summary(**changed: float) -> dict[str, Any]:
    shares = {"heldout_start": 0.3, "heldout_end": 0.6, "ood_start": 0.25, "ood_end": 0.5}
    lag = {"max": changed.pop("lag", 2.0), "limit": 2}
    certainty = {split: {"n": 192, "half": 0.0} for split in ("heldout", "ood")}
    return shares | changed | {"lag": lag, "certainty": certainty}


@pytest.mark.parametrize(
    ("changed", "wall_s", "missed"),
    [
        ({}, 3600.0, set()),
        # 0.3 of 192 is at most 0.369, and 0.43 at least 0.362, 0.45 at least 0.381
        ({"heldout_end": 0.43}, 60.0, {"gain beyond both intervals, held out"}),
        ({"heldout_end": 0.45}, 60.0, set()),
        ({"ood_end": 0.3}, 60.0, {"gain beyond both intervals, names never shown"}),
        ({}, 3601.0, {"seconds, evaluations included"}),
        ({"lag": 3.0}, 60.0, {"lag, largest"}),
    ],
)
def test_what_a_run_has_to_show(
    bench: Any, changed: dict[str, float], wall_s: float, missed: set[str]
) -> None:
    ended = summary(**changed)
    found = bench.goals(bench.shares(ended), ended, wall_s)
    assert {g["figure"] for g in found if not g["met"]} == missed and len(found) == 4


def test_wilsons_interval(bench: Any) -> None:
    # 20 of 64, as docs/log/real-models.md has it
    assert bench.wilson(20 / 64, 64) == pytest.approx([0.212, 0.434], abs=1e-3)
    assert bench.shares(summary())["ood"]["end"] == {
        "share": 0.5,
        "interval": pytest.approx([0.43, 0.57], abs=1e-3),
    }


def test_the_program_runs_a_config_and_keeps_its_report(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run itself, in short, of a tiny model of the same family."""
    model = program("real_equal", monkeypatch).tiny(tmp_path)
    words = [str(model), "--quick", "--json", "--config", "smollm2_first"]
    words += ["--set", "generator.context=320"]  # a token a byte
    monkeypatch.setattr(sys, "argv", ["real_learns.py", *words])
    bench.main()
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == "smollm2_first.toml" and found["run"]["steps"] == 2
    assert found["accuracy"]["heldout"]["n"] == found["accuracy"]["ood"]["n"] == 8
    assert found["run"]["ledger"]["trained"] > 0 and found["seconds"] > found["run"]["wall_s"]

    kept = tmp_path / "kept.json"
    monkeypatch.setattr(bench.rounds, "report", lambda *_: kept)
    monkeypatch.setattr(
        bench, "keep", lambda page, path, names: path.write_text(f"{page.name} {names[bench.ROOT]}")
    )
    monkeypatch.setattr(bench, "run", lambda *_: (summary() | found["run"], 60.0))
    bench.main()
    assert kept.with_suffix(".html").read_text() == "report.html ."
