"""benchmarks/studies/lag_grid.py: its arms and their updates a batch, and the tables."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from bench_rivals_kit import program


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("lag_grid", monkeypatch)


def plan(grid: Any, tmp_path: Path, quick: bool = False) -> Any:
    return grid.make(
        "rle-5e-4", argparse.Namespace(out=tmp_path, lags="0,4", steps=3, seeds=1, quick=quick)
    ).plan


def test_decoupled_arms_are_there_with_one_update_and_with_four(grid: Any, tmp_path: Path) -> None:
    p = plan(grid, tmp_path)
    made = grid.updates(p)
    assert made == {
        "none": 1,
        "ppo": 1,
        "tis": 1,
        "mis": 1,
        "reshape": 1,
        "reshape-stop": 2,
        "k3": 1,
        "none-4": 4,
        "ppo-4": 4,
        "tis-4": 4,
        "mis-4": 4,
    }
    one, four = (p.arms[p.cell[n, 4.0]] for n in ("tis", "tis-4"))
    assert one.learner.lr == 5e-4
    assert four.learner.lr == 2.5e-4
    assert four.correction == one.correction
    assert four.loss == one.loss
    assert four.correction.proximal == "recompute"
    assert four.loss.surrogate == "decoupled_ppo"
    assert four.staleness.inject == 4
    assert p.arms[p.cell["ppo-4", 4.0]].correction.proximal == "behavior"
    assert p.arms[p.cell["mis-4", 4.0]].correction.veto == "ratio"
    assert len({p.cell[n, x] for n in made for x in (0.0, 4.0)}) == 2 * len(made), (
        "no arm is another one"
    )
    assert plan(grid, tmp_path / "quick", quick=True).arms["sync"].learner.groups == 8
    assert p.arms["sync"].learner.groups == 32


def test_tables_and_pages_say_how_many_updates(grid: Any, tmp_path: Path) -> None:
    cells = [
        {
            "correction": n,
            "limit": "4",
            "final": 0.5,
            "difference": {"interval": [-0.1, 0.1]},
            "unstable": 0,
            "seeds": 1,
        }
        for n in ("tis", "tis-4")
    ]
    lines = grid.table(
        {"cells": cells, "limits": ["0", "4"], "corrections": ["tis", "tis-4"], "seeds": [0]},
        {"tis": 1, "tis-4": 4},
    )
    assert lines[0] == "|lag|updates a batch|0|4|" and lines[1].count("---") == 4
    assert lines[2] == "|`tis`|1||0.50 [-0.10, +0.10]|" and lines[3].startswith("|`tis-4`|4|")
    said = grid.titles({"tis": 1, "tis-4": 4, "reshape-stop": 2})
    assert said["tis"].endswith("its clip acts from a batch's second update on; 1 update a batch")
    assert said["tis-4"].endswith("4 updates a batch at 0.5 of the rate")
    assert said["reshape-stop"].endswith("2 updates a batch")
