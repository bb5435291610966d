"""How benchmarks are timed: a round beside other work is made again; a figure says its spread."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUSY = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    # last: benchmarks/learner.py must not hide the package
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from lib import rounds

    monkeypatch.setattr(rounds, "MADE", [])
    return rounds


def watching(rounds: Any, monkeypatch: pytest.MonkeyPatch, others: list[float]) -> None:
    """Rounds of a second each, beside so many CPU seconds of other work."""
    seconds: Iterator[float] = iter(others)

    class Watch:
        def foreign(self) -> tuple[float, float]:
            return next(seconds), 1.0

    monkeypatch.setattr(rounds, "Watch", Watch)


def test_a_round_on_busy_machines_is_repeated(rounds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watching(rounds, monkeypatch, [0.0, 0.9, 0.1, 0.16, 0.0])
    assert rounds.quiet(3, lambda number: number) == [0, 2, 4]
    assert [row["counted"] for row in rounds.MADE] == [True, False, True, False, True]
    assert [row["beside_other_work"] for row in rounds.MADE] == [False, True, False, True, False]
    watching(rounds, monkeypatch, [0.0, 0.9, 0.0])
    ran: list[str] = []
    times = rounds.interleave({name: lambda n=name: ran.append(n) for name in "ab"}, 2)
    assert ran == ["a", "b", *"ab", *"ba", *"ab"]  # once untimed; every other round backwards
    assert {name: len(row) for name, row in times.items()} == {"a": 2, "b": 2}


def test_where_none_is_quiet_the_least_disturbed_count_and_the_result_says_so(
    rounds: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watching(rounds, monkeypatch, [0.9, 0.5, 0.7, 0.0])
    assert rounds.quiet(2, lambda number: number) == [3, 1]
    args = argparse.Namespace(quick=True, json=True, beside="")
    rounds.report("x", [rounds.goal("f", 1.0, 2.0, at_least=True)], {"what": "y"}, args)
    said = json.loads(capsys.readouterr().out)
    assert said["rounds_beside_other_work"] == 1 and said["rounds_made_again"] == 2
    assert set(said["load"]) == {"before", "after"} and not said["met"]


def test_work_of_its_own_children_is_no_other_work(rounds: Any) -> None:
    watch = rounds.Watch()
    before = rounds.own_seconds()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    alive = subprocess.Popen(
        [sys.executable, "-c", f"{BUSY}\nprint(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert alive.stdout is not None
    alive.stdout.readline()
    assert rounds.own_seconds() - before >= 1.0  # of one that ended and of one that has not
    alive.communicate(b"\n")
    others, wall = watch.foreign()
    assert others >= 0.0 and wall > 0.0


def test_a_figure_is_the_median_of_its_rounds_with_their_spread(rounds: Any) -> None:
    times = {
        "ours": [(1.0, 1.0), (2.0, 1.0), (1.0, 1.0)],
        "rival": [(2.0, 3.0), (2.0, 3.0), (4.0, 3.0)],
    }
    each = rounds.speedups(times, "ours", "rival")
    assert each == [2.0, 1.0, 4.0] and rounds.speedup(times, "ours", "rival", 1) == 3.0
    row = rounds.figure("x", each, 2.0, at_least=True, more=1)
    assert (row["value"], row["spread"], row["rounds"], row["met"]) == (2.0, [1.0, 4.0], 3, True)
    assert not rounds.figure("x", each, 1.5, at_least=False)["met"]
