"""benchmarks/real_equal.py: every way is held against transformers, here on a tiny model; what is
off is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_rivals_kit import program


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("real_equal", monkeypatch)


def test_engine_packed_forward_exact_mode_and_ring(bench: Any, tmp_path: Path) -> None:
    held = bench.measure(bench.tiny(tmp_path), ["forms", "exact"], bench.SHORT)
    assert all(goal["met"] for goal in held.goals)
    ways = [f"{way}, {d}" for d in bench.DTYPES for way in ("packed forward", "embedded engine")]
    ways += ["transformers, bfloat16", "exact mode, float32"]
    assert sorted(held.result["rows"]) == sorted(ways)
    # both lengths with and without a system turn, plain text; two answers each behind one prompt
    assert len(held.asked) == 5 and min(map(len, held.asked)) == 10
    assert [a.group for a in held.answers] == [at for at in range(5) for _ in range(2)]
    assert held.result["tokens"] == sum(len(a.tokens) for a in held.answers) == 10 * bench.ANSWER
    pairs = zip(held.answers[::2], held.answers[1::2], strict=True)
    assert all((one.prompt == other.prompt).all() for one, other in pairs)
    rows = held.result["rows"]
    assert 1e-4 < rows["packed forward, bfloat16"][0] < rows["packed forward, bfloat16"][1]


def test_what_is_off_misses_its_goal(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = bench.by_packed

    def off(model: Any, answers: Any) -> np.ndarray:
        found: np.ndarray = plain(model, answers)
        found[3] += np.float32(2e-4)
        return found

    monkeypatch.setattr(bench, "by_packed", off)
    held = bench.measure(bench.tiny(tmp_path), ["forms", "exact"], bench.SHORT[:1])
    assert {g["figure"] for g in held.goals if not g["met"]} == {
        "packed forward, float32: largest distance, nats",
        "exact mode: tokens of engine and learner that differ",
        "exact mode, float32: largest distance, nats",
    }


def test_a_learners_row_is_held_to_what_it_says(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each learner gets the answers with short prompts alone; its largest distance counts, and how
    far its weights are from torch's."""
    jobs: list[dict[str, Any]] = []

    def learned(job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        stage = job["learner"].get("zero_stage")
        off = None if stage is None else 0.02 if stage == 2 else 1e-6
        sent = bench.msgspec.msgpack.decode(Path(job["batch"]).read_bytes())
        assert len(sent["samples"]) == 4  # of three prompts one is too long
        most = 1e-3 if stage == 3 and job["dtype"] == "float32" else 1e-6
        return {"largest": most, "norm": 1.0, "weights_off": off, "names": ["a"]}

    monkeypatch.setattr(bench, "learned", learned)
    path = bench.tiny(tmp_path)
    lengths = bench.SHORT[:1]
    longest = max(len(prompt) for prompt in bench.prompts(path, lengths))
    monkeypatch.setattr(bench, "LEARNED", longest - 1)
    held = bench.measure(path, ["deepspeed"], lengths)
    stages = [job["learner"].get("zero_stage") for job in jobs]
    assert stages == [None, 0, 1, 2, 3, None, 2, 3]
    assert {g["figure"] for g in held.goals if not g["met"]} == {
        "ZeRO stage 2, two ranks, float32: weights off torch's, of a step",
        "ZeRO stage 3, two ranks, float32: largest distance, nats",
    }
