"""The corpus of benchmarks/fuzz.py: for each socket the smallest mutants that reach the lines
that any reached; each gets the verdict that it got then.

After a change that means another verdict: `python benchmarks/fuzz.py --mutants 5000 --quick
--corpus tests/data/fuzz_corpus.tsv`, and a look at what changed."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest
from process_kit import ROOT

CORPUS = defaultdict(list)
for _line in (Path(__file__).parents[1] / "data" / "fuzz_corpus.tsv").read_text().splitlines():
    _name, _verdict, _data = _line.split("\t")
    CORPUS[_name].append((_verdict, bytes.fromhex(_data)))


@pytest.mark.parametrize("name", CORPUS)
def test_each_mutant_gets_its_verdict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from lib.fuzz_targets import TARGETS

    target = TARGETS[name]()
    try:
        found = [(target.feed(data), data) for _, data in CORPUS[name]]
        honest = {target.feed(frame) for frame in target.frames}
    finally:
        target.close()
    assert found == CORPUS[name]
    assert "taken" in honest and {verdict for verdict, _ in CORPUS[name]} - {"taken"}


def test_every_socket_has_a_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from lib.fuzz_targets import TARGETS

    assert list(CORPUS) == list(TARGETS)
