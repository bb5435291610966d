"""benchmarks/lib: forks of the mutation test end hanging tests, and likely killers come first."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: it has learner.py
from lib import mutant_forks, mutant_tests
from lib.mutant_forks import NormalCost, TimeLimits
from lib.mutant_session import module_name
from lib.mutant_tests import Baseline, function_at, statement

TEST = "tests/test_a.py::test_b"


def burn() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(3600.0)


def ended(tmp_path: Path, act: Callable[[], Any]) -> tuple[dict[str, Any] | None, str]:
    """What a fork answered in which `act` is the body of a test, and the test that ran last."""

    def run(directory: Path) -> dict[str, Any]:
        limits = TimeLimits(directory / "running", {TEST: NormalCost(0.0)})
        around = limits.pytest_runtest_protocol(SimpleNamespace(nodeid=TEST))
        next(around)
        act()
        next(around, None)
        return {"status": "whole"}

    children = [mutant_forks.fork("mutant", tmp_path, 600.0, run)]
    child, answer, last = mutant_forks.reap(children)
    assert child.what == "mutant" and not children and not child.directory.exists()
    return answer, last


@pytest.mark.parametrize("act", [burn, sleep])
def test_a_test_that_hangs_ends_its_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]
) -> None:
    monkeypatch.setattr(mutant_forks, "SPARE_CPU_S", 0.05)
    monkeypatch.setattr(mutant_forks, "SPARE_ASLEEP_S", 0.05)
    monkeypatch.setattr(mutant_forks, "CHECK_S", 0.0)
    assert ended(tmp_path, act) == (None, TEST)


def test_a_test_within_its_limits_answers(tmp_path: Path) -> None:
    assert ended(tmp_path, lambda: None) == ({"status": "whole"}, TEST)


def test_what_a_test_normally_takes_is_allowed_several_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(mutant_forks.signal, "setitimer", lambda _, s: limits.append(s))
    monkeypatch.setattr(mutant_forks.signal, "signal", lambda *_: None)
    costs = {TEST: NormalCost(cpu_s=1.0, asleep_s=3.0, setup_s=2.0)}
    around = TimeLimits(tmp_path / "running", costs).pytest_runtest_protocol(
        SimpleNamespace(nodeid=TEST)
    )
    next(around)
    child = mutant_forks.Child(0, tmp_path, None)
    assert child.running is not None and (child.running[0], child.running[3]) == (TEST, 24.0)
    assert next(around, None) is None and limits == [16.0, 0]


TEXT = """LIMIT = 3

class A:
    def first(self):
        if self.x:
            return 1
        return 2

    async def second(self):
        return 3
"""


def test_the_statement_of_a_line_and_its_function() -> None:
    assert statement(TEXT, 1, 1) == (0, 0) and function_at(TEXT, 1, 1) == ""
    assert statement(TEXT, 5, 5) == (5, 5) and function_at(TEXT, 5, 5) == "A.first"
    assert statement(TEXT, 4, 4) == (5, 7), "a changed default: the body runs"
    assert statement(TEXT, 10, 10) == (10, 10) and function_at(TEXT, 10, 10) == "A.second"


def test_killers_come_first_then_files_that_speak_of_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speaks = {"test_a.py": False, "test_b.py": True, "test_c.py": False}
    monkeypatch.setattr(mutant_tests, "mentions", lambda file, path: speaks[file])
    names = ["test_a.py::1", "test_a.py::2", "test_b.py::1", "test_c.py::1", "test_c.py::2"]
    base = Baseline()
    for file in speaks:
        of = [name for name in names if name.startswith(file)]
        seconds = dict.fromkeys(of, 1.0 if file == "test_c.py" else 2.0)
        lines = {"x.py": dict.fromkeys(range(5, 8), of)}
        base.add(file, {"seconds": seconds, "asleep": seconds, "setup_s": 0.5, "lines": lines})
    order = ["test_b.py::1", "test_c.py::1", "test_c.py::2", "test_a.py::1", "test_a.py::2"]
    assert base.reaching("x.py", TEXT, 6, 6) == order
    base.count_killer("x.py", TEXT, 10, 10, "test_c.py::2")
    base.count_killer("x.py", TEXT, 5, 5, "test_a.py::2")
    base.killers["other.py"] = {"f": Counter({"test_a.py::1": 9})}
    assert base.reaching("x.py", TEXT, 6, 6)[:3] == ["test_a.py::2", "test_c.py::2", "test_b.py::1"]
    assert base.reaching("x.py", TEXT, 10, 10) == []
    assert base.costs(["test_b.py::1"]) == {"test_b.py::1": NormalCost(2.0, 2.0, 0.5)}


def test_a_test_that_fails_without_a_mutant_is_used_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = Baseline(
        seconds={"a::x": 1.0, "a::y": 2.0},
        asleep={"a::x": 0.0, "a::y": 0.0},
        setup={"a": 0.0},
        lines={"p.py": {1: ["a::x", "a::y"], 2: ["a::x"]}},
    )
    monkeypatch.setattr(mutant_tests, "mentions", lambda file, path: False)
    base.leave_out("a::x")
    assert base.left_out == ["a::x"] and base.lines == {"p.py": {1: ["a::y"], 2: []}}
    assert list(base.seconds) == ["a::y"]
    assert base.reaching("p.py", "x = 1\ny = 2\n", 1, 1) == ["a::y"]


def test_the_module_of_a_package_is_its_folder() -> None:
    """Otherwise a mutant of an __init__.py is imported by nothing, and lives."""
    assert module_name("actors/gateway/hubs/__init__.py") == "actors.gateway.hubs"
    assert module_name("actors/gateway/hubs/examine.py") == "actors.gateway.hubs.examine"
