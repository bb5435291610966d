"""benchmarks/delta.py: what a difference of two versions takes, and that it is measured on versions
of real updates.
"""

from __future__ import annotations

import importlib.util
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_kit import ROOT

from asyncrl.tasks import synthetic


@pytest.fixture(scope="module")
def bench() -> Any:
    # last: benchmarks/learner.py must not hide the package
    sys.path.append(str(ROOT / "benchmarks"))
    path = ROOT / "benchmarks" / "delta.py"
    spec = importlib.util.spec_from_file_location("bench_delta", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_changed_words_cost_their_bytes_and_their_places(bench: Any) -> None:
    before = np.arange(4096, dtype=np.uint16)
    after = before.copy()
    assert bench.as_words(before, after) == 0
    after[[3, 4, 400]] ^= 1
    # gaps 3, 1, 396: one byte, one byte, two
    assert bench.as_words(before, after) == 3 * 2 + 4
    assert bench.gaps(np.array([3, 4, 400])) == bytes([3, 1, 396 & 127 | 128, 396 >> 7])
    assert bench.as_words(before, ~before) == 4096 * 2 + 4096 // 8  # a bit a word is shorter
    found = bench.compare(before, after)
    assert (found["changed"], found["words"]) == (3 / 4096, 10 / 8192)


def test_bytes_of_one_significance_lie_together_before_they_are_packed(bench: Any) -> None:
    rng = np.random.default_rng(0)
    before = rng.integers(0, 1 << 32, 5000, np.uint32)
    low = rng.integers(0, 256, 5000, np.uint32)
    expected = low.astype(np.uint8).tobytes() + bytes(3 * 5000)
    assert bench.as_xor(before, before ^ low) == len(zlib.compress(expected, 1))
    assert bench.as_xor(before, before) < 200


def test_a_float_is_its_bits_and_medians_are_of_the_second_half(bench: Any) -> None:
    assert bench.words(torch.tensor([1.0, -0.0])).tolist() == [0x3F800000, 0x80000000]
    assert bench.words(torch.tensor([1.0]).bfloat16()).tolist() == [0x3F80]
    one, two = torch.zeros(64), torch.ones(64)
    assert bench.of_run([one, two, two, two, two])["changed"] == 0.0
    assert bench.of_run([one, one, one, two, one])["changed"] == 1.0


def test_versions_of_real_updates_are_compared(
    bench: Any, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an untrained model has something to learn of it
    def varied(_task: Any, _prompt: Any, text: str) -> float:
        return len(text) % 5 / 4

    monkeypatch.setattr(synthetic.TASKS["sort"], "reward", varied)
    (one, two, last) = rows = bench.measure(str(small_model), (1e-4,), 2)
    assert [row["weights"] for row in rows] == ["float32", "float32 as bfloat16", "bfloat16"]
    assert one["bytes"] == 2 * two["bytes"] == 2 * last["bytes"] > 0
    # Adam moves nearly every parameter, by less than bfloat16 shows of many of them
    assert one["changed"] > 0.9 > two["changed"] > 0 and last["changed"] > 0
    assert 0 < two["xor"] < one["xor"] < 1
