"""benchmarks/lib/mutant_lines.py: the measurement of a changed file still names its tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # last: it has learner.py
from lib.mutant_lines import functions_of, lines_by_function

OLD = """import math

def first(x):
    if x:
        return 1
    return 2

class A:
    @property
    def size(self):
        return 3

    @size.setter
    def size(self, value):
        self.x = value

def gone():
    return 4
"""
NEW = """import math
SIZE = 9

def first(x):
    y = x
    if y:
        return 1
    return 2

class A:
    @property
    def size(self):
        return 3

    @size.setter
    def size(self, value):
        self.x = value

if SIZE:
    async def new():
        return 5
"""


def test_functions_and_their_lines() -> None:
    assert functions_of(OLD) == {"first": (3, 6), "A.size": (9, 15), "gone": (17, 18)}
    assert functions_of(NEW) == {"first": (4, 8), "A.size": (11, 17), "new": (20, 21)}


def test_tests_of_a_function_are_those_of_its_new_lines() -> None:
    ran = {"1": ["a", "b", "c", "d"], "5": ["a"], "6": ["b"], "11": ["c"], "18": ["d"]}
    moved = lines_by_function(ran, functions_of(OLD), functions_of(NEW))
    assert [moved[str(n)] for n in range(4, 9)] == [["a", "b"]] * 5
    assert [moved[str(n)] for n in range(11, 18)] == [["c"]] * 7
    assert [moved[str(n)] for n in (20, 21)] == [["a", "b", "c", "d"]] * 2, "any may run it"
    assert set(moved) == {str(n) for n in (*range(4, 9), *range(11, 18), 20, 21)}
    assert lines_by_function({"5": ["a"]}, functions_of(OLD), {"A.size": (1, 2)}) == {}
