"""What a reader of the product's code meets stays within its limits (benchmarks/shape.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from process_kit import ROOT

SPEC = importlib.util.spec_from_file_location("shape", ROOT / "benchmarks" / "shape.py")
assert SPEC is not None and SPEC.loader is not None
shape = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(shape)


def test_the_product_is_within_every_limit() -> None:
    found = {figure.name: (figure.value, figure.limit, figure.places) for figure in shape.figures()}
    assert {name: each for name, each in found.items() if each[0] > each[1]} == {}
    assert len(found) == 9


LONG = "\n".join(["def long():", *["    pass"] * 81])
BEYOND = {
    "lines wider than 100 columns": "value = '" + "a" * 100 + "'",
    "fmt: skip": "value = 1  # fmt: skip",
    "tokens a line, mean": "value = [1, 2, 3, 4, 5, 6, 7, 8]",
    "lines of a function, most": LONG,
    "calls with over 6 arguments by position": "print(\n" + "1,\n" * 7 + ")",
    "one-letter names": "def f(x):\n    pass",
    "class names used twice": "class Row:\n    pass\n\n\nclass Row:\n    pass",
    "bare participles and pronouns as names": "def _held():\n    pass",
}


@pytest.mark.parametrize("name", [*BEYOND, "modules in a folder, most"])
def test_what_is_beyond_a_limit_is_found_with_its_place(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "part").mkdir()
    if name in BEYOND:
        (tmp_path / "part" / "one.py").write_text(BEYOND[name])
    else:
        for number in range(15):
            (tmp_path / "part" / f"module_{number}.py").write_text("value = 1")
    monkeypatch.setattr(shape, "ROOT", tmp_path)
    monkeypatch.setattr(shape, "PRODUCT", ("part",))
    if name == "one-letter names":
        (tmp_path / "part" / "two.py").write_text("value = [x for x in (1, 2)]")
    monkeypatch.setattr(shape, "MATHEMATICS", ())
    beyond = [figure for figure in shape.figures() if figure.value > figure.limit]
    assert [figure.name for figure in beyond] == [name]
    if name != "tokens a line, mean":
        assert beyond[0].places[0].startswith("part")
