"""Signs of the policy and its engine: planted in rows and in a learner under every shipped config's
settings, and none in two healthy runs."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from models_kit import model_fixture
from signs_kl_kit import LOST, config, evals, names, rows, split_share
from trajectory_kit import trajectory

from asyncrl.config import bundled_configs, load
from asyncrl.config.engines import ENGINES
from asyncrl.config.tree import Config
from asyncrl.contract.messages import Batch, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.records import health_checks, metrics
from asyncrl.records.health_checks import apply_rules
from asyncrl.supervise import run as runner
from learner.batch import pack
from learner.step import LearnerCore

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


def test_a_correction_that_throws_most_of_the_batch_away() -> None:
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
        got = apply_rules([*evals("heldout", 512, *enumerate(quiet)), *rows()], config())
        assert got == []
    # grades up to 10: chance is larger
    grades = [5.0, 5.8, 5.0, 5.8, 5.0, 5.8]
    judged = evals("heldout", 512, *enumerate(grades))
    assert apply_rules([*judged, *rows(reward__max=[10.0] * 50)], config()) == []
    assert apply_rules([*judged, *rows(reward__max=[6.0] * 50)], config()) != []


def test_k1_in_the_reward_under_many_updates() -> None:
    k1 = ("kl.reward.coefficient=0.1", "kl.reward.estimator=k1")
    (sign,) = apply_rules(rows(kl__target_ref_k3=LOST, optim__steps=[16.0] * 50), config(*k1))
    assert sign.name == "stale_kl_reward" and "which 16 updates a batch share" in sign.said
    assert "kl.loss.coefficient" in sign.try_this
    one = rows(kl__target_ref_k3=LOST, optim__steps=[1.0] * 50)
    assert apply_rules(one, config(*k1)) == []
    held = rows(kl__target_ref_k3=[0.05] * 50, optim__steps=[16.0] * 50)
    assert apply_rules(held, config(*k1)) == [], "the settings alone are no sign"


def test_sampling_that_is_cut_is_not_blamed_on_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert "is/chi2 is -0.043" in line
    assert "generator.top_p = 0.9" in line
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
    sections = {
        name: msgspec.structs.replace(getattr(whole, name), **keys) for name, keys in TINY.items()
    }
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
