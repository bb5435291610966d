"""Engine and learner that differ at equal weights: said once, at once; what
benchmarks/lib/studies.py computes from runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_rivals_kit import program
from process_kit import Ended

from asyncrl.config import load
from asyncrl.experiments import serial as warm
from asyncrl.supervise import run as runner

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("keys", "replays", "said", "at"),
    [
        ({"model_type": "qwen3"}, "false", 2e-3, 5),
        ({"num_experts": 8}, "false", 0.2, 7),
        ({"num_experts": 8}, "true", 2e-3, 5),
    ],
)
def test_an_unhealthy_mismatch_is_said_once(
    keys: dict[str, object], replays: str, said: float, at: int, tmp_path: Path
) -> None:
    """When half of the batches have it; the same status seen again is no new batch."""
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config, lines = (
        load.load(
            ROOT / "configs" / "demo.toml",
            [f"model.path='{tmp_path}'", f"learner.replay_routing={replays}"],
        ),
        list[str](),
    )
    watcher = runner.HealthWatcher(tmp_path, lines.append, runner.collect_facts(config))
    for n, k3 in enumerate((1e-4, 1e-3, 2e-3, 0.2, 0.3, 0.4, 0.5, 0.6), 1):
        for step in range(3):
            watcher.check(1, {"mismatch/k3_at_lag_0": k3, "time/step": step})
        watcher.check(1, {})
        assert len(lines) == (n >= at), n
    assert f"k3 = {said:.1e}" in lines[0] and "generator.dtype" in lines[0]
    first = list[str]()
    runner.HealthWatcher(tmp_path, first.append, runner.collect_facts(config)).check(
        1, {"mismatch/k3_at_lag_0": 0.7}
    )
    assert len(first) == 1, "in the first batch already"


def run(end: float, ood: float, norm: float = 1.0) -> dict[str, object]:
    """What a warm process records of a run, as far as a study reads it."""
    curve = [
        {
            "version": n + 1,
            "optim/grad_norm": norm,
            "reward/mean": 0.5,
            "kl/behavior_target_k3": 0.01 * n,
        }
        for n in range(12)
    ]
    return {
        "curve": curve,
        "accuracy": [[0.0, 10.0], [0.4, end]],
        "evals": {"ood": {"0": [0.9], "10": [ood, ood]}},
        "weights_digest": "d",
    }


def test_a_study_pairs_runs_by_seed_and_counts_what_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    # last: benchmarks/learner.py must not hide the package
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from lib import studies

    broken = studies.facts(run(0.1, 0.2))
    assert broken["collapsed"]
    assert broken["swing"] == pytest.approx(0.3)
    assert broken["kl_mu_max"] == pytest.approx(0.11)
    assert broken["reward_end"] == 0.5
    assert "kl_ref_last" not in broken
    assert broken["ood"] == pytest.approx(0.2)
    cut = studies.facts(run(0.1, 0.2) | {"evals": {"ood": {"0": [0.9]}}})
    assert cut["ood"] is None, "of a run that did not come to its end"
    good = {seed: studies.facts(run(0.6 + 0.01 * seed, 0.3)) for seed in range(3)}
    less = {seed: studies.facts(run(0.5 + 0.01 * seed, 0.2 - 0.1 * seed)) for seed in range(1, 4)}
    found = studies.compare({"a": good, "b": less, "c": {5: broken}}, "b", "end")
    # seeds 1 and 2; c shares none
    assert set(found) == {"a"} and found["a"].seeds == 2 and found["a"].mean == pytest.approx(0.1)
    ood = studies.compare({"a": good, "b": less}, "b", "ood")["a"]
    assert ood.mean == pytest.approx(0.3 - (0.1 + 0.0) / 2) and ood.low < ood.mean < ood.high


def test_bypass_is_recompute_at_lag_0_in_exact_mode(sort_model: Path) -> None:
    """Section 8 of the mathematics, on real samples: where engine and learner agree bitwise, which
    anchor is named changes no bit."""
    text = (
        "learner.steps=2 learner.groups=4 learner.group_size=4 staleness.max_lag=0 "
        "evaluation.every=0 evaluation.final_prompts=1 evaluation.ood_prompts=0 learner.lr=0.01"
    )
    small = [*text.split(), f"model.path='{sort_model}'", "exact=true"]
    recompute = [
        "correction.proximal=recompute",
        "correction.preset=tis",
        "loss.surrogate=decoupled_ppo",
    ]
    found = {}
    for name, sets in (
        ("behavior", ["correction.proximal=behavior", "loss.surrogate=ppo"]),
        ("recompute", recompute),
    ):
        found[name] = warm.run_serial(load.load(ROOT / "configs" / "demo.toml", [*small, *sets]), 0)
    assert found["behavior"]["weights_digest"] == found["recompute"]["weights_digest"]
    assert sum(r["optim/grad_norm"] for r in found["recompute"]["curve"]) > 0


@pytest.mark.parametrize(
    "sets",
    [["exact=true"], ["lora.rank=2"], ["weights.in_flight=recompute_kv"], ["agent.serve=true"]],
)
def test_a_warm_process_keeps_its_engine_for_runs_that_need_the_same_one(
    sort_model: Path, sets: list[str]
) -> None:
    """An exact arm, or one that trains adapters, beside a plain one has an engine of its own."""

    def engine(*more: str) -> Any:
        items = [f"model.path='{sort_model}'", "generator.slots=8", "staleness.max_lag=0", *more]
        return warm.get_engine(load.load(ROOT / "configs" / "demo.toml", items))

    plain = engine()
    assert engine("learner.lr=0.5") is plain
    other = engine(*sets)
    assert other is not plain and engine(*sets) is other and engine() is plain


@pytest.mark.parametrize("bits", [0, 1])
def test_a_rounded_generator_shows_under_the_shipped_config(
    asyncrl: Callable[..., Ended], bits: int
) -> None:
    """configs/demo.toml divides by mu itself: what engine and learner compute differently is
    measured and said all the same."""
    done = asyncrl(
        "run",
        "learner.steps=4",
        "learner.groups=8",
        "evaluation.final_prompts=8",
        "record.split_every=1",
        f"generator.mantissa_bits={bits}",
        "name='rounded'",
    )
    assert done.code == 0, done.err[-3000:]
    rows = [
        json.loads(x)
        for x in (Path(done.json["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    ]
    split = [r for r in rows if "split/mismatch_k3" in r]
    assert [r["step"] for r in split] == [0, 1, 2, 3]
    assert all(r["split/coverage"] == 1 for r in split)
    aged = [r for r in split if r["lag/mean"] > 0]
    assert aged and all(r["kl/behavior_start_k3"] > 1e-9 and r["is/ess"] < 1 for r in aged), (
        "staleness is measured, not a constant"
    )
    # older keys and values are a mismatch of their own
    alone = [r["by_age/mismatch_k3_0"] for r in split if "by_age/mismatch_k3_0" in r]
    assert alone, "no token was drawn on keys and values of its own version"
    if bits:
        assert done.json["mismatch_k3_max"] > 1e-2
        assert min(alone) > 1e-3
        assert all(r["split/mismatch_k3"] > 1e-3 for r in split)
        assert "engine and learner differ at equal weights" in done.err
    else:
        assert done.json["mismatch_k3_max"] < 1e-9 and max(alone) < 1e-9
        assert "engine and learner differ" not in done.err


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("mismatch", monkeypatch)


def plan_of(study: Any, out: Path, **more: Any) -> Any:
    known = {"out": out, "quick": False, "steps": 40, "groups": 16, "seeds": 2, "lr": "5e-4"}
    known |= {"engines": "b2,bf16:none+mis", "look": False, "lag": 0, "table": False}
    return study.plan(argparse.Namespace(**known | more))


def test_under_lag_every_arm_is_run_with_and_without_mismatch(study: Any, tmp_path: Path) -> None:
    still, late = (plan_of(study, tmp_path / str(lag), lag=lag) for lag in (0, 16))
    assert "b2, bypass" in still.arms and "bf16, bypass" not in still.arms
    assert set(late.arms) == {f"{e}, {a}" for e in ("fp32", "b2", "bf16") for a in study.UNDER_LAG}
    for plan, limit in ((still, 0), (late, 16)):
        for config in plan.cells.configs.values():
            assert config.staleness.limit == limit
            assert config.staleness.inject == (limit or None)
    assert not set(still.cells.configs) & set(late.cells.configs)
    assert ("b2, tis", "b2, none") in study.pairs(still)
    assert not [pair for pair in study.pairs(still) if pair[1].startswith("fp32")]
    both = study.pairs(late)
    assert ("b2, tis", "b2, bypass") in both and ("b2, tis", "fp32, tis") in both
    assert ("b2, bypass", "fp32, bypass") in both and ("b2, bypass", "b2, bypass") not in both


def test_parts_are_means_over_batches_that_have_the_whole_lag(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def command(argv: list[str]) -> dict[str, Any]:
        asked.append(argv)
        return {}

    def read(run: Path) -> list[dict[str, float]]:
        lag = int(run.name.rpartition("lag")[2])
        before = [{"step": lag, "split/mismatch_k3": 9.0, "split/coverage": 0.0}]
        parts = {"mismatch": 0.1, "staleness": 0.01 * lag, "update": 0.3}
        row = {f"split/{name}_k3": value for name, value in parts.items()}
        after = [{"step": lag + 1, "split/coverage": 1.0} | row, {"step": lag + 2}]
        return before + after

    monkeypatch.setattr(study, "command", command)
    monkeypatch.setattr(study.metrics, "read", read)
    plan = plan_of(study, tmp_path, engines="b2")
    plan.out.mkdir(exist_ok=True)
    rows = study.split(plan.args, plan)
    assert [(row["engine"], row["lag"]) for row in rows] == [
        (engine, lag) for lag in (0, 4, 16) for engine in ("fp32", "b2")
    ]
    last = rows[-1]
    assert last["batches"] == 2 and last["coverage"] == 1.0
    assert [last[f"{part}_k3"] for part in study.PARTS] == pytest.approx([0.1, 0.16, 0.3])
    assert "generator.mantissa_bits=2" in asked[-1] and "staleness.inject=16" in asked[-1]
    assert "learner.steps=56" in asked[-1] and "staleness.inject=0" not in asked[0]
    assert study.split(plan.args, plan) == rows and len(asked) == len(rows)  # kept
