"""Helpers of the bench_rivals tests that other test files use."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def program(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/NAME.py or studies/NAME.py as a module, under a name that hides no package."""
    folders = [ROOT / "benchmarks", ROOT / "benchmarks" / "studies"]
    monkeypatch.setattr(sys, "path", [*sys.path, *map(str, folders)])
    (path,) = (folder / f"{name}.py" for folder in folders if (folder / f"{name}.py").is_file())
    spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
