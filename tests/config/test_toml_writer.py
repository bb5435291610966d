"""TOML without tomli_w, as on a GPU machine that has few packages."""

from __future__ import annotations

import sys
import tomllib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.config import engines, load
from asyncrl.contract import toml_writer

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=4))
@example({"a": {"b.c": {}, "d": [{"e": [1e-05, float("inf")]}], "\x7f\t": '\x7f\n"\\'}, "z": True})
def test_the_plain_form_reads_back_equal(table: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tomli_w", None)
        text = toml_writer.dumps(table)
    assert tomllib.loads(text) == table
    assert tomllib.loads(toml_writer.dumps(table)) == table


def test_a_config_without_tomli_w_loads_back_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load.load("demo", ["learner.clip_norm=0.5", "generator.gpus=[0, 1]"])
    usual = load.dump(config)
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    plain = load.dump(config)
    assert "gpus = [0, 1]\n" in plain != usual
    assert toml_writer.read_table(engines.__file__)["vllm"]
    assert load.build(tomllib.loads(plain)) == load.build(tomllib.loads(usual)) == config
    assert load.format_value(["a", 2]) == '["a", 2]'


def test_values_on_one_line() -> None:
    shown = toml_writer.format_value({"a b": [1, "x\x7f"], "c": True})
    assert shown == '{"a b" = [1, "x\\u007f"], c = true}'
    assert tomllib.loads(f"v = {shown}") == {"v": {"a b": [1, "x\x7f"], "c": True}}
