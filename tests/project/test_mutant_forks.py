"""benchmarks/lib: forks of the mutation test end hanging tests."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: it has learner.py
from lib import mutant_forks
from lib.mutant_forks import NormalCost, TimeLimits
from lib.mutant_session import module_name

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


def test_the_module_of_a_package_is_its_folder() -> None:
    """Otherwise a mutant of an __init__.py is imported by nothing, and lives."""
    assert module_name("actors/gateway/hubs/__init__.py") == "actors.gateway.hubs"
    assert module_name("actors/gateway/hubs/examine.py") == "actors.gateway.hubs.examine"
