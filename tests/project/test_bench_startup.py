"""benchmarks/startup.py: every process gets as far as it is to be measured."""

from __future__ import annotations

import json
import sys

import pytest
from bench_rivals_kit import program


def test_every_part_is_started_until_it_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = program("startup", monkeypatch)
    monkeypatch.setattr(bench, "READY_S", 1800.0)
    monkeypatch.setattr(sys, "argv", ["startup.py", "--quick", "--json"])
    bench.main()
    found = json.loads(capsys.readouterr().out)
    assert found["started"].keys() == {"rival", "import torch", *bench.GOALS}
    assert all(row["cpu_s"] > 0 for row in found["started"].values())
    assert [g["rounds"] for g in found["goals"]] == [1] * len(bench.GOALS)
