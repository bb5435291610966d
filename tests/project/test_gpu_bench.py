"""benchmarks/gpu_bench.py on a CPU, where its figures say nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_rivals_kit import program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu_bench")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    program("gpu_bench", monkeypatch)
    from lib import gpu_bench_parts

    return gpu_bench_parts


@pytest.mark.parametrize("name", ["peaks", "engine", "generate", "learner", "plain learner"])
def test_a_part_measures_rates(name: str, parts: Any, work: Path) -> None:
    found = parts.run_part(f"{name} 0.5B", "cpu", "tiny", work)
    rates = [value for key, value in found.items() if key.endswith("per_s")]
    assert rates and all(rate > 0 for rate in rates)


def test_a_run_has_the_time_of_a_step(parts: Any, work: Path) -> None:
    found = parts.run_part("asynchronous 0.5B", "cpu", "tiny", work)
    assert found["step_s"] > 0 and found["lag"]["limit"] == 2


def test_completions_end_by_chance(parts: Any, work: Path) -> None:
    """One in `mean` tokens is the end token, and its chance does not depend on the text much: the
    share of completions that go on past the mean is (1 - 1 / 8) ** 8 = 0.34."""
    from actors.engine import CompletionRequest
    from actors.engine_embedded import EmbeddedEngine
    from asyncrl.contract.versions import Label
    from asyncrl.models import policy

    setting = parts.Setting("cpu", parts.SCALES["tiny"], work)
    model = policy.load_policy(setting.model_directory("0.5B"), "float32", "cpu")
    engine = EmbeddedEngine(model, slots=64, context=100, max_new_tokens=90)
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
    prompts = parts.draw_prompts(setting, 100)
    engine.add(
        CompletionRequest(
            (row // 8, row % 8, 1), prompts[row // 8], row // 8, 90, 1.0, 1.0, 0, (parts.END,), 7
        )
        for row in range(800)
    )
    lengths: list[int] = []
    while engine.active:
        lengths += [len(completion.tokens) for completion in engine.step(8)]
    assert len(lengths) == 800
    assert 5 < np.mean(lengths) < 13 and 0.2 < np.mean(np.array(lengths) > 8) < 0.5


def test_a_failed_part_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Continuous batching needs a GPU.  A second call adds to the results of the first one."""
    bench = program("gpu_bench", monkeypatch)
    out = ["gpu_bench.py", "--quick", "--json", "--patience", "100", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*out, "--only", "continuous batching 0.5B"])
    assert bench.main() == 1
    monkeypatch.setattr(sys, "argv", [*out, "--only", "peaks 0.5B"])
    assert bench.main() == 1
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found == json.loads((tmp_path / "result.json").read_text())
    assert found["parts"]["peaks 0.5B"]["bytes_per_s"] > 0
    assert "a GPU's free memory" in found["parts"]["continuous batching 0.5B"]["error"]


def test_ratios_have_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 2 GB are read 300 times a second from a memory of 1,000 GB/s; 6 * 1e9 * 2e4 FLOP
    are 0.3 of 4e14; a swap takes 0.05 of a step of 2 s."""
    bench = program("gpu_bench", monkeypatch)
    rows = {
        "peaks 0.5B": {"flop_per_s": 4e14, "bytes_per_s": 1e12},
        "engine 0.5B": {
            **{"tokens_per_s": 6000.0, "passes_per_s": 300.0},
            **{"weight_bytes": 2e9, "swap_s": 0.1},
        },
        "generate 0.5B": {"tokens_per_s": 1000.0},
        "learner 0.5B": {"parameters": 1e9, "positions_per_s": 2e4},
        "synchronous 0.5B": {"step_s": 4.0},
        "asynchronous 0.5B": {"step_s": 2.0},
    }
    goals = {row["figure"]: (row["value"], row["met"]) for row in bench.compute_goals(rows)}
    assert goals == {
        "engine / generate": (6.0, True),
        "engine / bandwidth": (0.6, True),
        "learner / peak": (pytest.approx(0.3), False),
        "asynchronous / synchronous": (0.5, True),
        "swap / step": (0.05, False),
    }
    assert bench.compute_goals({}) == []
