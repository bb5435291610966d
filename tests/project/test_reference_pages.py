"""The pages that come from tables: docs/coming-from."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import reference_pages  # noqa: E402

from asyncrl.config import load  # noqa: E402

SYSTEMS = reference_pages.systems()


@pytest.mark.parametrize("path", reference_pages.pages(), ids=lambda path: path.name)
def test_every_page_is_what_its_table_says(path: Path) -> None:
    assert path.read_text() == reference_pages.pages()[path], "run benchmarks/reference_pages.py"


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_row_of_a_table_has_its_cells(name: str) -> None:
    widths = {"there | here |": 2, "there | default there | here | remark |": 4}
    width = 0
    for line in reference_pages.system_page(SYSTEMS[name]).splitlines():
        if line.startswith("| "):
            width = widths.get(line.removeprefix("| "), width)
            assert len(re.findall(r"(?<!\\)\|", line)) == width + 1, line


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_key_of_ours_exists_and_every_setting_loads(name: str) -> None:
    """Each alternative of a row is loaded, on top of the demo's config."""
    known = {"method", *load.keys()}
    loaded = 0
    theirs = [row[0] for row in SYSTEMS[name]["keys"]]
    assert len(theirs) == len(set(theirs)) > 35, "a setting of theirs stands in one row"
    for row in SYSTEMS[name]["keys"]:
        for option in reference_pages.alternatives(row[2]):
            settings = [setting.partition(" = ") for setting in option]
            unknown = {key for key, _, _ in settings} - known
            assert not unknown, f"{row[0]}: {unknown}"
            if sets := [f"{key}={value}" for key, equals, value in settings if equals]:
                load.load(ROOT / "configs" / "demo.toml", sets)
                loaded += 1
    assert loaded > 10
