from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import actors
import asyncrl
import buffer
import learner

# imported in the Python of an environment alone (agent.python), where its package is
FOREIGN = {
    "actors.gateway.hubs.verifiers_chat",
    "actors.gateway.hubs.verifiers_v0",
    "actors.gateway.hubs.verifiers_v1",
}
MODULES = sorted(
    m.name
    for package in (actors, asyncrl, buffer, learner)
    for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if m.name not in FOREIGN
)
FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples(name: str) -> list[doctest.DocTest]:
    return [t for t in FINDER.find(importlib.import_module(name)) if t.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    for test in examples(name):
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0, test.name


def test_there_are_examples() -> None:
    assert sum(len(examples(name)) for name in MODULES) >= 5
