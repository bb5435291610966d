"""Runs that drift, collapse or overfit say so by name; signs of the policy and its engine."""

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from models_kit import model_fixture
from process_kit import SMALL, demo_command, run_command, write_lines
from signs_kl_kit import LOST, Row, apply_rules, config, evals, fired, names, rows, split_share
from trajectory_kit import trajectory

from asyncrl.config import bundled_configs, load
from asyncrl.config.engines import ENGINES
from asyncrl.config.tree import Config
from asyncrl.contract.messages import Batch, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.records import health_checks, metrics
from asyncrl.records.health_checks import compute_chance_above, find_growth
from asyncrl.supervise import doctor
from asyncrl.supervise import run as runner
from asyncrl.supervise.report import advice
from asyncrl.tasks.file import FileTask
from learner.batch import pack
from learner.step import LearnerCore

K1_LOSS = ("kl.loss.coefficient=0.3", "kl.loss.estimator=k1")
K3_REWARD = ("kl.reward.coefficient=0.1", "kl.reward.estimator=k3")
K3_LOSS = ("kl.loss.coefficient=0.1", "kl.loss.estimator=k3")
# KL to the reference under a term that works
HELD = [0.06 * (1 - math.exp(-n / 10)) for n in range(50)]


def test_the_chance_of_an_order_is_that_of_counting_them_all() -> None:
    """Every order of 2 late and 3 early values."""
    values, at_least = [1.0, 2.0, 3.0, 4.0, 5.0], dict.fromkeys(range(7), 0)
    picks = list(itertools.combinations(values, 2))
    for late in picks:
        u = sum(x > y for x in late for y in values if y not in late)
        for k in range(u + 1):
            at_least[k] += 1
    for late in picks:
        early = [y for y in values if y not in late]
        u = sum(x > y for x in late for y in early)
        assert compute_chance_above(late, early) == at_least[u] / len(picks)
    assert (
        compute_chance_above([5.0] * 4, [1.0] * 8) == 1 / math.comb(12, 4)
        and compute_chance_above([1.0] * 4, [1.0] * 8) == 1.0
    ), "ties are no growth"


def noise(seed: int, n: int, spread: float = 0.5, carry: float = 0.0) -> list[float]:
    """Lognormal; carry: correlation of neighbours."""
    r, x, out = random.Random(seed), 0.0, []
    for _ in range(n):
        x = carry * x + math.sqrt(1 - carry**2) * r.gauss(0, spread)
        out.append(1e-4 * math.exp(x))
    return out


@pytest.mark.parametrize(("spread", "carry"), [(0.5, 0.0), (1.5, 0.0), (0.3, 0.5)])
def test_noise_without_trend_is_seldom_called_growing(spread: float, carry: float) -> None:
    """1,000 series; a look may be wrong once in 1,000, so 3 or fewer with a chance of 98 %."""
    got = sum(
        find_growth(noise(i, 15 + 37 * i % 186, spread, carry)) is not None for i in range(1000)
    )
    assert got <= 3


def test_growth_is_found() -> None:
    """Fivefold in noise, or late. What does not double is no growth, and neither are spikes."""

    def share(shape: Any) -> float:
        return (
            sum(
                find_growth([x * shape(i / 199) for i, x in enumerate(noise(seed, 200, 0.3))])
                is not None
                for seed in range(40)
            )
            / 40
        )

    assert share(lambda t: 1 + 4 * t) > 0.6 and share(lambda t: math.exp(3 * t)) > 0.9
    assert share(lambda t: 10.0 if t > 0.66 else 1.0) == 1 and share(lambda t: 1 + 0.7 * t) == 0
    assert share(lambda t: 100.0 if t > 0.97 else 1.0) == 0 and share(lambda t: 5 - 4 * t) == 0
    assert find_growth([1.0] * 10 + [2.0] * 5) == (1.0, 2.0)
    assert find_growth([1.0] * 10 + [1.99] * 5) is None
    assert find_growth([float(i) for i in range(13)]) is None and find_growth(
        [float(i) for i in range(14)]
    ) == (1.5, 11.5), "14 values are needed"
    assert find_growth([]) is None and find_growth([1.0]) is None
    assert find_growth([1.0, 2.0]) is None
    # 17 values: 5 late over 12 early; three pairs the wrong way round have a chance of 7 / 6188 =
    # 0.0011, two one of 4 / 6188.
    assert find_growth([1.0] * 9 + [10.0] * 3 + [5.0] + [20.0] * 4) is None
    assert find_growth([1.0] * 10 + [10.0] * 2 + [5.0] + [20.0] * 4) == (1.0, 20.0)
    # stretches of ten: their medians are 3, though a third of the values is not
    assert find_growth([1.0] * 120 + [3.0, 1.0, 3.0] * 20) == (1.0, 3.0)


@pytest.mark.parametrize("name", ["mismatch__k3_at_lag_0", "split__mismatch_k3"])
def test_a_growing_mismatch_is_said(name: str) -> None:
    (sign,) = apply_rules(rows(60, **{name: [1e-4 * math.exp(0.05 * i) for i in range(60)]}))
    assert sign.name == "growing_mismatch" and name.replace("__", "/") in sign.said
    assert "from 1.6e-04 to 1.2e-03" in sign.said
    assert "learner.lr" in sign.try_this and "exact" in sign.try_this
    # too small to matter
    assert apply_rules(rows(60, **{name: [1e-9 * math.exp(0.05 * i) for i in range(60)]})) == []
    assert apply_rules(rows(60, **{name: noise(3, 60)})) == []
    assert apply_rules(rows(60, **{name: [1e-6] * 40 + [9.9e-6] * 20})) == []
    assert names(apply_rules(rows(60, **{name: [1e-6] * 40 + [1e-5] * 20}))) == [
        "growing_mismatch"
    ], "harmless below 1e-5"


def test_both_measures_of_the_mismatch_are_looked_at() -> None:
    grows = [1e-4 * math.exp(0.05 * i) for i in range(60)]
    holes = [math.nan if i % 2 else x for i, x in enumerate(grows)]
    for first in (noise(3, 60), grows, holes):
        found = rows(60, mismatch__k3_at_lag_0=first, split__mismatch_k3=grows)
        assert names(apply_rules(found)) == ["growing_mismatch"], "said once"
    (sign,) = apply_rules(rows(6, mismatch__k3_at_lag_0=[1e-4, 2e-3, 3e-3]), config())
    assert sign.name == "engine_mismatch" and "by k3 = 2.0e-03" in sign.said
    assert "above 0.001" in sign.said and "generator.dtype" in sign.try_this
    assert fired(rows(6, mismatch__k3_at_lag_0=[1e-3])) == [] == fired(rows(6))
    # one batch with few tokens says little
    assert fired(rows(6, mismatch__k3_at_lag_0=[1e-13, 2e-3])) == []
    late = rows(60, mismatch__k3_at_lag_0=[1e-5] * 41 + [0.01] * 11)
    assert (
        health_checks.check_engine_mismatch(late[:45], config()) is None
        and health_checks.check_engine_mismatch(late[:46], config()) is not None
    ), "the last 9 count: five of them are enough"
    got = apply_rules(
        rows(6, mismatch__k3_at_lag_0=[0.05]), health_checks.RunFacts(config().config, 0.1)
    )
    assert got == [], "a mixture of experts"


def test_answers_continued_on_older_keys_are_no_fault_of_the_engine() -> None:
    (sign,) = apply_rules(
        rows(6, mismatch__k3_at_lag_0=[2e-3] * 6, by_age__mismatch_k3_0=[1e-13, 2e-13]), config()
    )
    assert sign.name == "engine_mismatch" and "but by 1.0e-13 where no older keys" in sign.said
    assert "recompute_kv" in sign.try_this
    (engine,) = apply_rules(
        rows(6, mismatch__k3_at_lag_0=[2e-3] * 6, by_age__mismatch_k3_0=[2e-3] * 6), config()
    )
    assert "older keys" not in engine.said and "generator.dtype" in engine.try_this


def test_drift_under_k1_in_the_loss() -> None:
    lost = rows(kl__target_ref_k3=LOST)
    (sign,) = apply_rules(lost, config(*K1_LOSS))
    assert sign.name == "kl_drift" and "rises from 0.19 to 0.33 nats a token" in sign.said
    assert "k1 in the loss" in sign.said and "k3" in sign.try_this
    assert fired(rows(kl__target_ref_k3=HELD), *K1_LOSS) == [], "the settings alone are no sign"
    assert fired(rows(kl__target_ref_k3=[x / 5 for x in LOST]), *K1_LOSS) == [], "little"
    assert fired(rows(kl__target_ref_k3=[0.3] * 50), *K1_LOSS) == [], "no longer rising"
    for middle, late, said in (
        (0.08, 0.1, ["kl_drift"]),
        (0.07, 0.099, []),
        (0.16, 0.2, ["kl_drift"]),
        (0.1601, 0.2, []),
    ):
        got = fired(rows(48, kl__target_ref_k3=[0.0] * 16 + [middle] * 16 + [late] * 16), *K1_LOSS)
        assert got == said, (middle, late)
    # too early
    assert fired(rows(14, kl__target_ref_k3=[0.1 * x for x in range(14)]), *K1_LOSS) == []
    assert fired(rows(15, kl__target_ref_k3=[0.1 * x for x in range(15)]), *K1_LOSS) == ["kl_drift"]
    for other in (
        K3_LOSS,
        ("kl.reward.coefficient=0.3", "kl.reward.estimator=k1"),
        (*K1_LOSS, "kl.loss.off_policy=ratio"),
        (K1_LOSS[0], "kl.loss.estimator='k1+'"),
    ):
        assert fired(lost, *other) == [], other


@pytest.mark.parametrize("sets", [(), ("kl.loss.coefficient=0.0",)])
def test_drift_without_a_kl_term(sets: tuple[str, ...]) -> None:
    """While the reward rises, a policy that leaves the reference learns; then it drifts."""
    (sign,) = apply_rules(rows(kl__target_ref_k3=LOST), config(*sets))
    assert sign.name == "kl_drift"
    assert "without a KL penalty, and the reward does not rise" in sign.said
    assert "kl.loss.coefficient" in sign.try_this
    learning = rows(kl__target_ref_k3=LOST, reward__mean=[0.4 + 0.01 * n for n in range(50)])
    assert fired(learning, *sets) == [] and fired(rows(kl__target_ref_k3=HELD), *sets) == []


def test_drift_is_seen_in_a_run_that_gives_few_values() -> None:
    """The demo measures the KL to the reference 12 times."""
    few = [r | {"kl/target_ref_k3": 0.03 * r["step"] / 10} for r in rows(120)]
    few = [{n: x for n, x in r.items() if r["step"] % 10 == 0 or "ref" not in n} for r in few]
    assert fired(few) == ["kl_drift"] and fired(few[:80]) == []


def test_collapse_under_k3_in_the_reward() -> None:
    gone = [
        *evals("heldout", 128, (0, 0.377), (10, 0.4), (20, 0.02)),
        *rows(20, kl__target_ref_k3=HELD),
    ]
    (sign,) = apply_rules(gone, config(*K3_REWARD))
    assert sign.name == "kl_collapse" and "held-out reward fell to 0.020 from 0.400" in sign.said
    assert "k3 in the reward" in sign.said
    assert "k1" in sign.try_this and "checkpoint" in sign.try_this
    (drifts,) = apply_rules(rows(kl__target_ref_k3=LOST), config(*K3_REWARD))
    assert drifts.name == "kl_collapse" and "rises from 0.19 to 0.33 nats a token" in drifts.said
    assert fired([*evals("heldout", 128, (0, 0.4), (20, 0.2)), *rows(20)], *K3_REWARD) == []
    assert fired(evals("heldout", 128, (0, 0.4)) + rows(20), *K3_REWARD) == []
    back = [*evals("heldout", 128, (30, 0.6), (20, 0.02), (0, 0.4)), *rows(30)]
    assert fired(back, *K3_REWARD) == [], "in the order of steps"
    for other in (
        K3_LOSS,
        (),
        ("kl.reward.coefficient=0.0",),
        (K3_REWARD[0], "kl.reward.estimator=k1"),
    ):
        assert fired(gone, *other) == [], other
    assert fired(gone, K3_REWARD[0], "kl.reward.estimator='k3+'") == ["kl_collapse"]


def test_good_in_distribution_and_poor_out_of_distribution() -> None:
    """`rlenarrow` without KL; 3 sqrt(.35 .65 / 256 + .07 .93 / 256) = 0.102."""
    near = evals("heldout", 512, (0, 0.38), (60, 0.88))
    far = evals("ood", 256, (0, 0.35), (60, 0.07))
    half = 3 * math.sqrt((0.35 * 0.65 + 0.07 * 0.93) / 256)
    (sign,) = apply_rules([*near, *far, *rows()])
    assert sign.name == "out_of_distribution"
    assert "held-out reward rose from 0.380 to 0.880" in sign.said
    expected = (
        f"out-of-distribution reward fell from 0.350 to 0.070, more than chance (+-{half:.3f})"
    )
    assert expected in sign.said and "kl.reward.coefficient" in sign.try_this
    # half = 0.116 there
    assert apply_rules([*near, *evals("ood", 256, (0, 0.35), (60, 0.35 - 0.11)), *rows()]) == []
    values = names(apply_rules([*near, *evals("ood", 256, (0, 0.35), (60, 0.35 - 0.13)), *rows()]))
    assert values == ["out_of_distribution"]
    assert apply_rules([*near, *evals("ood", 256, (0, 0.07), (60, 0.35)), *rows()]) == []
    assert (
        apply_rules([*near, *far[:1], *rows()])
        == []
        == apply_rules([*near[:1], *far, *rows()])
        == apply_rules([*near, *far])
    )
    worse = evals("heldout", 512, (0, 0.38), (60, 0.2))
    # a run that gets worse at everything is another matter
    assert apply_rules([*worse, *far, *rows()]) == []
    ends = [
        *evals("heldout", 512, (0, 0.38), (50, 0.13)),
        *evals("ood", 256, (0, 0.14), (50, 0.01)),
    ]
    (sign,) = apply_rules(
        [*ends, *rows(reward__mean=[0.5 + 0.33 * min(i, 40) / 40 for i in range(50)])]
    )
    assert (
        "the training reward rose from 0.537 to 0.830 while out-of-distribution reward fell from "
        "0.140 to 0.010" in sign.said
    )
    assert apply_rules([*ends, *rows(reward__mean=[0.5] * 50)]) == []


def test_a_coefficient_without_effect() -> None:
    moved, none = [0.05] * 50, [0.004] * 50
    (sign,) = apply_rules(rows(kl__target_ref_k3=moved, kl__gradient_share=none), config(*K3_LOSS))
    assert sign.name == "kl_without_effect" and "0.4% of the policy term's" in sign.said
    assert "a KL of 0.05 nats" in sign.said and "kl.loss.coefficient = 0.1" in sign.try_this
    assert fired(rows(kl__target_ref_k3=moved, kl__gradient_share=[0.01] * 50), *K3_LOSS) == []
    # nothing to hold
    assert fired(rows(kl__target_ref_k3=[0.019] * 50, kl__gradient_share=none), *K3_LOSS) == []
    for share, kl, said in ((0.0099, 0.02, ["kl_without_effect"]), (0.01, 0.02, [])):
        got = fired(rows(kl__target_ref_k3=[kl] * 50, kl__gradient_share=[share] * 50), *K3_LOSS)
        assert got == said
    values = fired(rows(20, kl__target_ref_k3=moved, kl__gradient_share=none), *K3_LOSS)
    assert values == ["kl_without_effect"]
    # too early
    assert fired(rows(19, kl__target_ref_k3=moved, kl__gradient_share=none), *K3_LOSS) == []
    assert fired(
        rows(kl__target_ref_k3=moved, kl__gradient_share=[0.5] * 30 + none[:20]), *K3_LOSS
    ) == ["kl_without_effect"]
    weak = rows(kl__target_ref_k3=moved, kl__gradient_share=none)
    assert fired(weak, "kl.loss.coefficient=0.0") == []
    both = (*K3_LOSS, "kl.reward.coefficient=0.2")
    strong = [0.5] * 50
    mixed = rows(kl__target_ref_k3=moved, kl__gradient_share=strong, kl__reward_gradient_share=none)
    (sign,) = apply_rules(mixed, config(*both))
    assert (
        "kl.reward.coefficient = 0.2" in sign.try_this and "(kl/reward_gradient_share)" in sign.said
    ), "each term by its own share"
    assert fired(mixed, *K3_LOSS) == [] and fired(rows(kl__target_ref_k3=moved), *K3_LOSS) == []
    assert fired(rows(kl__gradient_share=none), *K3_LOSS) == []


def test_a_watcher_knows_the_settings(tmp_path: Path) -> None:
    told: list[str] = []
    write_lines(tmp_path / "metrics.jsonl", *rows(kl__target_ref_k3=LOST))
    runner.HealthWatcher(tmp_path, told.append, config(*K3_LOSS)).check(50)
    assert told == []
    watcher = runner.HealthWatcher(
        tmp_path, told.append, runner.collect_facts(load.load("configs/demo.toml", K1_LOSS))
    )
    watcher.check(50)
    watcher.check(80)
    assert len(told) == 1 and told[0].startswith("note: KL to the reference rises")


def test_the_summary_keeps_them(tmp_path: Path) -> None:
    """And the accuracies at the start that a resumed buffer no longer knows."""
    ends = [*evals("heldout", 512, (0, 0.3), (50, 0.6)), *evals("ood", 256, (0, 0.2), (50, 0.3))]
    write_lines(tmp_path / "metrics.jsonl", *ends, *rows(kl__target_ref_k3=LOST))
    text = (
        "trajectories tokens heldout_end ood_end ledger_lines lag_histogram trained_ids failures "
        "mismatch_k3_max"
    )
    left: Row = dict.fromkeys(text.split())
    left |= {"steps": 50, "heldout_start": None, "ood_start": None, "lag": {}}
    left |= {"tokens": 100, "wall_s": 10.0, "ledger": {"generated": 100}}
    (tmp_path / "buffer_summary.json").write_text(json.dumps(left))
    found = runner.write_summary(load.load("configs/demo.toml", K1_LOSS), tmp_path)
    assert [s["name"] for s in found["signs"]] == ["kl_drift"]
    assert found["signs"][0]["said"].startswith("KL to the reference rises")
    assert (found["heldout_start"], found["ood_start"]) == (0.3, 0.2)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ends[3:]))
    # the end is not the start
    assert runner.write_summary(load.load("configs/demo.toml"), tmp_path)["ood_start"] is None


HEALTHY = json.loads((Path(__file__).parents[1] / "data" / "healthy_demos.json").read_text())


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_healthy_runs_have_no_sign_at_any_time(name: str) -> None:
    """Two real runs of the demo, 0.40 to 0.90, answers that shorten from 26 to 8 tokens."""
    run = HEALTHY[name]
    for end in (*range(1, len(run), 6), len(run)):
        assert apply_rules(run[:end], config(), ended=end == len(run)) == []


@pytest.mark.parametrize("factor", [2.1, 0.45])
def test_a_jump_of_the_answers_length(factor: float) -> None:
    lengths = [20.0 + n % 3 for n in range(30)] + [21.0 * factor] * 5
    (sign,) = apply_rules(rows(35, answer__length=lengths), config())
    assert sign.name == "length_jump" and "from batch 30 on" in sign.said
    assert f"{21 * factor:.0f} tokens long, 21 in the 10 batches before" in sign.said
    assert apply_rules(rows(34, answer__length=lengths[:32]), config()) == [], "two of five"
    slowly = [20.0 * 1.05**n for n in range(60)]
    assert apply_rules(rows(60, answer__length=slowly), config()) == [], "it grows, and by much"


def test_kl_that_runs_away_in_a_batch() -> None:
    (sign,) = apply_rules(
        rows(kl__start_target_k3=[0.004] * 44 + [0.1] * 6, optim__steps=[8.0] * 50), config()
    )
    assert sign.name == "kl_runaway"
    assert "0.10 nats a token (kl/start_target_k3), in 8 updates" in (sign.said)
    assert "stop.kl_max" in sign.try_this
    (alone,) = apply_rules(rows(kl__moved=[0.3] * 50, optim__steps=[1.0] * 50), config())
    assert "in 1 update;" in alone.said and "learner.lr" in alone.try_this
    assert "stop.kl_max" not in alone.try_this, "it would not act"
    spike = rows(kl__start_target_k3=[0.004] * 48 + [0.9] * 2, optim__steps=[8.0] * 50)
    assert apply_rules(spike, config()) == []
    (sign,) = apply_rules(
        rows(8, is__rejected_share=[0.3] * 8, is__vetoed_share=[0.4] * 8), config()
    )
    assert sign.name == "batch_rejected" and "70% of the tokens" in sign.said
    assert "30% rejected, 40% vetoed" in sign.said and "correction.reject_hi" in sign.try_this
    assert apply_rules(rows(8, is__rejected_share=[0.45] * 8), config()) == []


def test_accuracy_that_swings() -> None:
    """By more than chance at 512 prompts, three times; noise of that size does not."""
    wild = [0.3, 0.6, 0.35, 0.62, 0.4, 0.66]
    (sign,) = apply_rules([*evals("heldout", 512, *enumerate(wild)), *rows()], config())
    assert sign.name == "oscillating_accuracy" and "turned 4 times" in sign.said
    assert "learner.lr" in sign.try_this
    for quiet in (
        [0.3, 0.5, 0.6, 0.7, 0.75, 0.8],
        [0.6, 0.63, 0.58, 0.61, 0.57, 0.62],
        [0.3, 0.6, 0.62, 0.5, 0.64, 0.66],  # one fall
    ):
        assert apply_rules([*evals("heldout", 512, *enumerate(quiet)), *rows()], config()) == []
    # grades up to 10: chance is larger
    judged = evals("heldout", 512, *enumerate([5.0, 5.8, 5.0, 5.8, 5.0, 5.8]))
    assert apply_rules([*judged, *rows(reward__max=[10.0] * 50)], config()) == []
    assert apply_rules([*judged, *rows(reward__max=[6.0] * 50)], config()) != []


def test_k1_in_the_reward_under_many_updates() -> None:
    k1 = ("kl.reward.coefficient=0.1", "kl.reward.estimator=k1")
    (sign,) = apply_rules(rows(kl__target_ref_k3=LOST, optim__steps=[16.0] * 50), config(*k1))
    assert sign.name == "stale_kl_reward" and "which 16 updates a batch share" in sign.said
    assert "kl.loss.coefficient" in sign.try_this
    assert apply_rules(rows(kl__target_ref_k3=LOST, optim__steps=[1.0] * 50), config(*k1)) == []
    held = rows(kl__target_ref_k3=[0.05] * 50, optim__steps=[16.0] * 50)
    assert apply_rules(held, config(*k1)) == [], "the settings alone are no sign"


def test_a_cut_sampler_is_not_the_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run of the demo with top_p = 0.9 measured it, with an engine that does not record what
    is kept: at the first batch, and under lag."""
    silent = msgspec.structs.replace(ENGINES["vllm"], records_support=False)
    monkeypatch.setitem(ENGINES, "vllm", silent)
    first = {"mismatch/k3_at_lag_0": 2e-3, "is/chi2": -0.043, "is/ratio_max": 1.0}
    told: list[str] = []
    vllm = config("generator.top_p=0.9", "generator.engine=vllm")
    watcher = runner.HealthWatcher(tmp_path, told.append, vllm)
    watcher.check(1, first)
    (line,) = told
    assert "is/chi2 is -0.043" in line and "generator.top_p = 0.9" in line
    assert "generator.dtype" not in line
    lagged = rows(
        mismatch__k3_one_version=[2e-3] * 50,
        is__chi2=[-0.03 + 0.01 * (n % 3) for n in range(50)],
        is__ratio_max=[3.0] * 50,
    )
    (sign,) = apply_rules(lagged, vllm)
    assert sign.name == "truncated_sampling" and "not the dtype" in sign.try_this
    # the embedded engine records what top-p keeps: the setting is no cause
    (sign,) = apply_rules(lagged, config("generator.top_p=0.9"))
    assert sign.name == "engine_mismatch" and "generator.top_p" not in sign.try_this
    (sign,) = apply_rules(lagged, config())
    assert sign.name == "engine_mismatch" and "only a part of the distribution" in sign.said
    assert "top_p, top_k or min_p" in sign.try_this and "generator.dtype" not in sign.try_this
    (little,) = apply_rules([r | {"mismatch/k3_one_version": 3e-4} for r in lagged], config())
    assert little.name == "truncated_sampling" and "is/chi2 is -0.020" in little.said
    chance = [-0.03 + 0.1 * (n % 7 == 0) for n in range(50)]  # of few tokens
    assert not apply_rules(rows(is__chi2=chance, is__ratio_max=[1.2] * 50), config())
    (other,) = apply_rules(
        rows(mismatch__k3_one_version=[2e-3] * 50, is__chi2=[0.01] * 50, is__ratio_max=[3.0] * 50),
        config(),
    )
    assert other.name == "engine_mismatch" and "generator.dtype" in other.try_this


@pytest.mark.parametrize("name", ["mismatch__k3_one_version", "split__mismatch_k3"])
def test_the_split_alone_tells_of_an_engine_that_differs(name: str) -> None:
    """A run that lags has tokens of lag 0 in its first batch only."""
    start = {"mismatch__k3_at_lag_0": [1e-13]}
    (sign,) = apply_rules(rows(30, **start, **{name: [1e-13] * 15 + [0.1] * 15}), config())
    assert sign.name == "engine_mismatch" and name.replace("__", "/") in sign.said
    assert "--resume RUN --set correction.preset=mis" in sign.try_this


def test_thresholds_follow_the_number_of_values_that_a_run_gives() -> None:
    """12 values cannot be as sure as 14: a run that gives 12 is judged by what they can show."""
    series = [1e-4 * 1.5**n for n in range(12)]
    few = config("learner.steps=60")
    assert health_checks.count_possible_values(few.config, health_checks.ONE_VERSION) == 12
    found = names(apply_rules(rows(12, mismatch__k3_one_version=series), few))
    assert sorted(found) == ["engine_mismatch", "growing_mismatch"]
    many = config("learner.steps=120")
    found = names(apply_rules(rows(12, mismatch__k3_one_version=series), many))
    assert "growing_mismatch" not in found
    assert (
        health_checks.choose_alarm(health_checks.PARTS)
        == health_checks.ALARM
        < health_checks.choose_alarm(12)
        < health_checks.choose_alarm(7)
    )


TINY: dict[str, dict[str, Any]] = {
    "model": {"device": "cpu", "dtype": "float32"},
    "learner": {"backend": "torch", "ranks": 1, "threads": 1, "groups": 4, "group_size": 2},
    "record": {"reference_kl_every": 0},
}


def tiny(whole: Config) -> Config:
    sections = {n: msgspec.structs.replace(getattr(whole, n), **keys) for n, keys in TINY.items()}
    return msgspec.structs.replace(whole, **sections)


model_dir = model_fixture("abcdefgh", layers=1)


def shipped_settings() -> Iterator[tuple[str, Config]]:
    """One config of those that train alike, and its name with theirs."""
    alike: dict[bytes, list[str]] = {}
    for name in bundled_configs.list_names():
        whole = load.load(f"configs/{name}.toml")
        parts = [whole.record, whole.correction, whole.loss, whole.kl, whole.stop, whole.lora.rank]
        parts += [whole.learner.steps, whole.learner.epochs, whole.learner.minibatches]
        alike.setdefault(msgspec.json.encode([*parts, whole.advantage]), []).append(name)
    for many in alike.values():
        yield " ".join(many), tiny(load.load(f"configs/{many[0]}.toml"))


SETTINGS = dict(shipped_settings())


def test_every_shipped_config_measures_the_mismatch_twenty_times_for_little() -> None:
    for name in bundled_configs.list_names():
        whole = load.load(f"configs/{name}.toml")
        assert health_checks.count_possible_values(whole, health_checks.ONE_VERSION) >= 20, name
        assert split_share(whole) < 0.02, name


def batch(core: LearnerCore, number: int, off: float) -> Batch:
    """Answers of the version before, whose log-probabilities are its own forward's plus `off`."""
    r = np.random.default_rng(number)
    samples = []
    size = core.config.learner.group_size
    for ticket in range(core.config.learner.groups):
        prompt = r.integers(3, 11, 3)
        for index in range(size):
            answer = r.integers(3, 11, 8)
            span = VersionSpan(Label(1, number - 1), "", 0, 8, Label(1, number - 1))
            fields = {"spans": [span], "reward": float(r.random() < 0.5)}
            samples.append(trajectory((ticket, index, 0), prompt, answer, [0.0] * 8, **fields))
    lags = [[(0, 8, 1)]] * len(samples)
    made = Batch(1, number, samples, [1] * len(samples), [0] * len(samples), lags, {}, 4, {})
    packed = pack(made)
    with core.measure.use_weights(core.measure.read_weights(Label(1, number - 1), "")) as earlier:
        own = core._forward(earlier, packed)
    for sample, first in zip(samples, packed.offsets[:-1], strict=True):
        of_sample = own[int(first) : int(first) + 8] + off
        sample.behavior_logprobs = of_sample.numpy().astype("<f4").tobytes()
    return made


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_mismatch_that_begins_in_mid_run_is_said_under_every_shipped_config(
    name: str, model_dir: Path, tmp_path: Path
) -> None:
    """0.5 nats on every token from batch 30 on, or from a quarter of a shorter run; learner, its
    split, metrics.jsonl and the watcher are those of a run, batches between measurements left out.
    """
    settings = SETTINGS[name]
    here = msgspec.structs.replace(settings.model, path=str(model_dir), reference="")
    settings = msgspec.structs.replace(settings, model=here)
    steps, every = settings.learner.steps, settings.record.split_every
    begins = min(30, steps // 4)
    core = LearnerCore(settings, model_dir)
    held = bytearray(policy.count_flat_bytes(core.layout))
    core.measure.read_weights = lambda _, __: bytes(held)
    told: list[str] = []
    watcher = runner.HealthWatcher(tmp_path, told.append, health_checks.RunFacts(settings))
    writer = metrics.MetricsWriter(tmp_path)
    policy.write_flat(core.model, memoryview(held))
    for number in range(0, steps, every):
        made = batch(core, number, 0.5 if number >= begins else 0.0)
        now = bytearray(held)
        policy.write_flat(core.model, memoryview(now))
        found = core.train(made)
        held[:] = now  # the next batch is drawn by what this one started from
        assert "mismatch/k3_one_version" in found
        writer.write(number, found)
        watcher.check(number + 1, found)
        blamed = [line for line in told if "engine and learner differ" in line]
        assert not blamed or number >= begins, "said before it began"
        if blamed:
            break
    writer.close()
    assert len(blamed) == 1 and number <= begins + 6 * every, told
    assert f"k3 = {math.exp(-0.5) - 1 + 0.5:.1e}" in blamed[0]


def plain(n: int, **keys: Any) -> list[dict[str, Any]]:
    """n batches with these metrics; `_` in a name stands for `/` once."""
    return [row | {k.replace("_", "/", 1): v for k, v in keys.items()} for row in rows(n)]


def test_all_answers_truncated_and_constant_rewards() -> None:
    assert apply_rules(plain(30)) == [] and apply_rules([], ended=True) == []
    assert apply_rules(plain(30), ended=True) == [], "a healthy run"
    (sign,) = apply_rules(plain(6, answer_truncated_share=1.0))
    assert sign.name == "all_truncated"
    assert "100% of the completions of the last 6 batches" in sign.said
    assert "generator.max_new_tokens" in sign.said
    assert apply_rules(plain(6, answer_truncated_share=0.9)) == []
    flat = {"reward_no_spread_share": 1.0, "reward_min": 0.25, "reward_max": 0.25}
    assert apply_rules(plain(4, **flat)) == []
    (sign,) = apply_rules(plain(5, **flat))
    assert sign.name == "constant_rewards" and "last 5 batches has the reward 0.25" in sign.said
    assert "task try" in sign.try_this and sign.as_line() == f"{sign.said}; {sign.try_this}"
    (sign,) = apply_rules(plain(8, reward_no_spread_share=0.95))
    expected = "in 95% of the groups of the last 8 batches all completions have the same reward"
    assert expected in sign.said and apply_rules(plain(8, reward_no_spread_share=0.94)) == []
    got = names(apply_rules(plain(30) + plain(20, reward_no_spread_share=0.96)))
    assert got == ["constant_rewards"]
    assert apply_rules(plain(30, reward_no_spread_share=1.0) + plain(20)) == []


def test_rewards_that_hold_the_generators_up() -> None:
    of = {"reward_queue": 120.0, "reward_wait_s": 3.0, "reward_call_s": 0.2, "reward_workers": 1.0}
    (sign,) = apply_rules(plain(6, time_reward_wait_share=0.42, **of))
    assert sign.name == "rewards_hold_up"
    assert (
        "idle 42% of their time because of rewards: 120 completions waited, 3 s each, and "
        "calls took 0.2 s in 1 process" in sign.said
    )
    assert "async def" in sign.try_this and "reward.workers" in sign.try_this
    assert apply_rules(plain(6, time_reward_wait_share=0.09, **of)) == []
    assert apply_rules(plain(4, time_reward_wait_share=0.42, **of)) == []
    # No call has ended yet, as in a run of few steps.
    del of["reward_call_s"], of["reward_wait_s"]
    assert apply_rules(plain(6, time_reward_wait_share=0.42, **of)) == []
    of |= {"reward_call_s": 0.2, "reward_wait_s": 3.0}
    # Calls of 20 microseconds explain no wait of 3 s: answers wait for a core.
    assert apply_rules(plain(6, time_reward_wait_share=0.42, **of | {"reward_call_s": 2e-5})) == []


def evaluated(start: float, end: float, n: int, **keys: Any) -> list[dict[str, Any]]:
    ends = [
        {"step": s, "t": 0.0, "eval/heldout": p, "eval/heldout_n": n}
        for s, p in ((0, start), (30, end))
    ]
    return [ends[0], *plain(30, **keys), ends[1]]


def test_accuracy_that_moves_less_than_its_interval() -> None:
    """n = 100 at 0.5: 1.96 sqrt(2 x 0.25 / 100) = 0.1386."""
    (sign,) = apply_rules(evaluated(0.5, 0.6, 100), ended=True)
    half = math.sqrt(1.96**2 * (0.25 + 0.24) / 100)
    assert sign.name == "unmoved_accuracy"
    expected = (
        f"from 0.500 to 0.600 in 30 batches, which is within chance (+-{half:.3f} at n = 100)"
    )
    assert expected in sign.said
    assert apply_rules(evaluated(0.5, 0.6, 100)) == [], "a run that goes on is not judged by it"
    assert apply_rules(evaluated(0.5, 0.65, 100), ended=True) == []
    assert apply_rules(evaluated(0.5, 0.35, 100), ended=True) == []
    for level, told in ((0.0, "no prompt"), (0.5, "more steps"), (1.0, "every prompt already")):
        (sign,) = apply_rules(evaluated(level, level, 1000), ended=True)
        assert sign.name == "unmoved_accuracy" and told in sign.try_this, level
        assert ("train more steps" in sign.try_this) == (level == 0.5)
    wide = {"reward_min": -10.0, "reward_max": 10.0}
    assert names(apply_rules(evaluated(0.0, 2.7, 100, **wide), ended=True)) == ["unmoved_accuracy"]
    assert apply_rules(evaluated(0.0, 2.8, 100, **wide), ended=True) == []
    first = {"step": 0, "eval/heldout": 0.5, "eval/heldout_n": 10}
    assert apply_rules([first, *plain(30)], ended=True) == [], "one evaluation is no movement"


def test_signs_are_said_once_while_a_run_goes_on(tmp_path: Path) -> None:
    """Each on one line, at the first look that finds it; ever fewer looks at the file."""
    told: list[str] = []
    watcher = runner.HealthWatcher(tmp_path, told.append, config())
    for n in range(1, 40):
        with (tmp_path / "metrics.jsonl").open("a") as f:
            flat = {"reward_no_spread_share": 1.0, "reward_min": 0.0, "reward_max": 0.0}
            f.write(json.dumps(plain(1, **flat)[0] | {"step": n - 1}) + "\n")
        watcher.check(n)
        assert len(told) == (n >= 5)
    assert told[0].startswith("note: every completion of the last 5 batches has the reward 0")
    assert watcher.next == 41  # looked after 5 6 7 8 10 12 15 18 22 27 33
    (line,) = advice.list_fired_checks(tmp_path, [])
    assert line.said.startswith("health check constant_rewards fired at step 5: every completion")
    later = {"name": "constant_rewards", "said": "now more", "try_this": "x"}
    (line,) = advice.list_fired_checks(tmp_path, [later, later])
    assert line.said == "health check constant_rewards fired at step 5: now more"
    assert line.try_this == "x"


@pytest.mark.parametrize(("largest", "lines"), [(0.0, 2), (1.0, 1)])
def test_equal_rewards_are_said_early_and_late(largest: float, lines: int, tmp_path: Path) -> None:
    told: list[str] = []
    watcher = runner.HealthWatcher(tmp_path, told.append, config())
    watcher.check(0, {})
    (batch,) = plain(1, reward_no_spread_share=1.0, reward_min=0.0, reward_max=largest)
    for n in range(1, 9):
        with (tmp_path / "metrics.jsonl").open("a") as f:
            f.write(json.dumps(batch | {"step": n - 1}) + "\n")
        watcher.check(n, batch)
        assert len(told) == lines - (n < 5)
    if lines == 2:
        assert told[0].startswith("note: every completion of the newest batch has the reward 0, so")
    assert "last 5 batches" in told[-1]


def test_refused_messages_are_said_at_once_and_stay_in_report_and_doctor(tmp_path: Path) -> None:
    (sign,) = apply_rules(plain(2) + plain(1, refused_number=2.0, refused_token=1.0) + plain(1))
    assert sign.name == "refused_messages"
    assert sign.said == (
        "the buffer has refused 3 messages: 2 samples with an impossible reward, part, "
        "log-probability or temperature; 1 samples with tokens that the model does not have"
    )
    told: list[str] = []
    watcher = runner.HealthWatcher(tmp_path, told.append, config())
    watcher.check(0, {"reward/mean": 0.5})
    assert not told
    watcher.check(0, {"refused/limit": 1.0})
    watcher.check(1, {"refused/limit": 2.0})
    (line,) = told
    assert line.startswith("note: the buffer has refused 1 message: 1 samples by weights older")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(plain(1, refused_frame=4.0)[0]) + "\n")
    seen = doctor.examine_run(load.load("configs/demo.toml"), tmp_path, None)
    assert seen["refused"] == {"frame": 4}
    said = "refused: 4 frames that do not decode, have a value out of its range, or are too large"
    assert said in doctor.format_state(load.load("configs/demo.toml"), tmp_path, None, seen)
    told: list[str] = []
    watcher = runner.HealthWatcher(tmp_path, told.append, config())
    watcher.check(0, {"reward/failed_batch_share": 0.75})
    assert not told
    watcher.check(1, {"reward/failed_batch_share": 1.0})
    watcher.check(2, {"reward/failed_batch_share": 1.0})
    (line,) = told
    assert "each completion was scored alone" in line and "RUN/reward.log" in line
    (sign,) = apply_rules(plain(1, reward_failed_batch_share=1.0))
    assert sign.name == "reward_batches_fail"


def test_prompts_without_answers(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": f"{i}="} | ({"answer": "1"} if i % 2 else {}) for i in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    sets = ["task.name=file", f"task.prompts={str(path)!r}"]
    (sign,) = runner.find_task_signs(load.load("configs/demo.toml", sets))
    left = len(FileTask(str(path)).sets["train"])
    assert sign.name == "answers_missing" and f"of {left} prompts have no `answer`" in sign.said
    assert "reward.function" in sign.try_this
    # an environment pays
    for other in ([*sets, "reward.function='a:b'"], [*sets, "agent.env='file.py:Environment'"], []):
        assert runner.find_task_signs(load.load("configs/demo.toml", other)) == []


def test_a_run_with_nothing_to_learn_says_so(tmp_path: Path, small_model: Path) -> None:
    """For real: prompts without answers, so that no answer is ever right."""
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}{i}="}) for i in range(10, 40)))
    words = (*SMALL[:-1], "generator.max_new_tokens=12", "learner.steps=8", "name='r'")
    words += ("task.name='file'", f"task.prompts={str(path)!r}")
    done = run_command(demo_command("run", tmp_path, small_model, *words)).check()
    found = ["answers_missing", "constant_rewards", "unmoved_accuracy"]
    assert [s["name"] for s in done.json["signs"]] == found
    html = (tmp_path / "runs" / "r" / "report.html").read_text()
    for sign in done.json["signs"]:
        # its numbers are of the moment when it was first seen
        count = 1 + (sign["name"] == "constant_rewards")  # and of the first batch
        assert done.err.count(f"; {sign['try_this']}\n") == count, done.err
    assert 'id="heldout-end-note">+-0.000 (n = 3)<' in html
    assert done.json["certainty"]["heldout"] == {"n": 3, "half": 0.0}
    head = html.index('<ul id="signs" class="warn">')
    assert html.index("</h1>") < head < html.index('class="card"')
    assert html[head : html.index("</ul>", head)].count("<li>") == 3
