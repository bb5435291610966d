import sys
from typing import Any

import pytest
from process_kit import ROOT, load_program


def program(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/NAME.py or studies/NAME.py as a module, under a name that hides no package."""
    folders = [ROOT / "benchmarks", ROOT / "benchmarks" / "studies"]
    monkeypatch.setattr(sys, "path", [*sys.path, *map(str, folders)])
    (path,) = (folder / f"{name}.py" for folder in folders if (folder / f"{name}.py").is_file())
    return load_program(path)
