"""benchmarks/studies/kl_direction.py: its terms and references, and what it reads of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_rivals_kit import program


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("kl_direction", monkeypatch)


def test_forward_and_reverse_differ_by_the_estimator_and_the_other_reference_is_the_next_seeds(
    bench: Any, tmp_path: Path
) -> None:
    options = {"quick": False, "groups": 4, "steps": 3, "seeds": 2, "betas": "0.1,0.3"}
    study = bench.plan(SimpleNamespace(out=tmp_path, **options))
    assert len(study.arms) == 1 + 2 * 2 * 2 and all(set(x) == {0, 1} for x in study.arms.values())
    for arm, names in study.arms.items():
        for seed, name in names.items():
            config = study.cells.configs[name]
            assert config.kl.reward.coefficient == 0 and config.staleness.max_lag == 0
            own = f"{tmp_path}/models/rlehack-{seed}"
            assert config.model.path == own
            if arm == "no KL":
                assert config.kl.loss.coefficient == 0
                continue
            direction, beta, reference = arm.split(", ")
            assert config.kl.loss.estimator == {"reverse": "k2", "forward": "k3"}[direction]
            assert config.kl.loss.coefficient == float(beta)
            other = f"{tmp_path}/models/rlehack-{1 - seed}"
            assert config.model.reference == (other if reference == "other" else "")


def test_the_table_tells_forward_from_reverse_at_the_end_of_the_runs(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"quick": False, "groups": 4, "steps": 3, "seeds": 2, "betas": "0.1"}
    study = bench.plan(SimpleNamespace(out=tmp_path / "k", **options))
    for arm, names in study.arms.items():
        for seed, name in names.items():
            covered = 0.9 - 0.2 * arm.startswith("reverse") + 0.01 * seed
            record = {
                "accuracy": [[0, 10], [0.2, 0.4]],
                "curve": [],
                "weights_digest": "",
                "evals": {},
                "evaluation_metrics": {
                    "eval/wide_pass_at_1": {"0": 0.2, "9": 0.1, "10": 0.4},
                    "eval/wide_pass_at_16": {"0": 0.95, "9": 0.1, "10": covered},
                },
            }
            path = study.cells.get_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record))
    monkeypatch.setattr(bench.studies.results_file, "write", lambda name, result: tmp_path / name)
    (tmp_path / "kl_direction").write_text("[\n 1]")
    words = ["--out", str(tmp_path / "k"), "--seeds", "2", "--table", "--json", "--betas", "0.1"]
    monkeypatch.setattr(sys, "argv", ["x", *words])
    bench.main()
    arms = json.loads(capsys.readouterr().out)["arms"]
    forward = arms["forward, 0.1, own"]
    assert forward["spread"] == pytest.approx(0.505) and forward["pass_at_16_start"] == 0.95
    told = forward["pairs"]["reverse, 0.1, own"]
    assert told["pass_at_16"]["difference"] == pytest.approx(0.2)
    assert told["end"]["difference"] == 0
    assert "own" not in arms["no KL"].get("pairs", {})
    assert "forward, 0.1, own" in arms["forward, 0.1, other"]["pairs"]
