"""Engine and learner that differ at equal weights: said once, at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_kit import Ended

from asyncrl.config import load
from asyncrl.experiments import serial as warm
from asyncrl.records import jsonl
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
    sets = [f"model.path='{tmp_path}'", f"learner.replay_routing={replays}"]
    config, lines = load.load(ROOT / "configs" / "demo.toml", sets), list[str]()
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


def test_bypass_is_recompute_at_lag_0_in_exact_mode(sort_model: Path) -> None:
    """Section 8 of the mathematics, on real samples: where engine and learner agree bitwise, which
    anchor is named changes no bit."""
    text = (
        "learner.steps=2 learner.groups=4 learner.group_size=4 staleness.max_lag=0 "
        "evaluation.every=0 evaluation.final_prompts=1 evaluation.ood_prompts=0 learner.lr=0.01"
    )
    small = [*text.split(), f"model.path='{sort_model}'", "exact=true"]
    named = {"behavior": "loss.surrogate=ppo", "recompute": "loss.surrogate=decoupled_ppo"}
    found = {}
    for name, surrogate in named.items():
        sets = [*small, f"correction.proximal={name}", surrogate]
        sets += ["correction.preset=tis"] if name == "recompute" else []
        found[name] = warm.run_serial(load.load(ROOT / "configs" / "demo.toml", sets), 0)
    assert found["behavior"]["weights_digest"] == found["recompute"]["weights_digest"]
    assert sum(r["optim/grad_norm"] for r in found["recompute"]["curve"]) > 0


@pytest.mark.parametrize(
    "sets",
    [["exact=true"], ["lora.rank=2"], ["weights.in_flight=recompute_kv"], ["agent.serve=true"]],
)
def test_a_warm_process_keeps_a_fitting_engine(sort_model: Path, sets: list[str]) -> None:
    """An exact arm, or one that trains adapters, beside a plain one has an engine of its own."""

    def engine(*more: str) -> Any:
        items = [f"model.path='{sort_model}'", "generator.slots=8", "staleness.max_lag=0", *more]
        return warm.get_engine(load.load(ROOT / "configs" / "demo.toml", items))

    plain = engine()
    assert engine("learner.lr=0.5") is plain
    other = engine(*sets)
    assert other is not plain and engine(*sets) is other and engine() is plain


@pytest.mark.parametrize("bits", [0, 1])
def test_a_rounded_generator_shows_as_shipped(asyncrl: Callable[..., Ended], bits: int) -> None:
    """configs/demo.toml divides by mu itself: what engine and learner compute differently is
    measured and said all the same."""
    sets = "learner.steps=4 learner.groups=8 evaluation.final_prompts=8 record.split_every=1"
    more = (f"generator.mantissa_bits={bits}", "name='rounded'")
    done = asyncrl("run", *sets.split(), *more).check()
    rows = jsonl.read(Path(done.json["run_dir"]) / "metrics.jsonl")
    split = [r for r in rows if "split/mismatch_k3" in r]
    assert [r["step"] for r in split] == [0, 1, 2, 3]
    assert all(r["split/coverage"] == 1 for r in split)
    aged = [r for r in split if r["lag/mean"] > 0]
    # staleness is measured, not a constant
    assert aged and all(r["kl/behavior_start_k3"] > 1e-9 and r["is/ess"] < 1 for r in aged)
    # older keys and values are a mismatch of their own
    alone = [r["by_age/mismatch_k3_0"] for r in split if "by_age/mismatch_k3_0" in r]
    assert alone, "no token was drawn on keys and values of its own version"
    if bits:
        assert done.json["mismatch_k3_max"] > 1e-2 and min(alone) > 1e-3
        assert all(r["split/mismatch_k3"] > 1e-3 for r in split)
        assert "engine and learner differ at equal weights" in done.err
    else:
        assert done.json["mismatch_k3_max"] < 1e-9 and max(alone) < 1e-9
        assert "engine and learner differ" not in done.err
