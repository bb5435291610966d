"""Runs of a mixture of experts whose routing the learner replays."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_kit import ROOT
from run_kit import survive_kills

from actors.engine_embedded import make_engine
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Batch
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.experiments import serial
from asyncrl.models import policy
from asyncrl.tasks import get_task
from asyncrl.tasks.warm_start import warm_start
from learner.batch import pack
from learner.step import LearnerCore

SHORT = (
    "learner.steps=2",
    "learner.groups=2",
    "learner.group_size=2",
    "generator.max_new_tokens=12",
    "evaluation.every=0",
    "evaluation.final_prompts=4",
    "evaluation.ood_prompts=0",
)


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse") / "model"
    task = load.load(ROOT / "configs" / "moe.toml").task
    policy.build_model(path, get_task(task).symbols, hidden=32, family="qwen3_moe", seed=1)
    return path


def shipped(path: Path, *sets: str) -> Any:
    return load.load(ROOT / "configs" / "moe.toml", [f"model.path={str(path)!r}", *SHORT, *sets])


def test_the_shipped_config_trains_on_the_recorded_experts(
    sparse_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch carries them. An earlier version of the policy, by which the split measures the
    mismatch, uses them, too, and the reference policy does not."""
    seen: list[Batch] = []
    replayed: list[tuple[policy.PolicyModel, bool]] = []
    learners: list[LearnerCore] = []
    train, logprobs = LearnerCore.train, policy.PolicyModel.logprobs

    def trained(self: LearnerCore, batch: Batch, *args: Any, **more: Any) -> Any:
        seen.append(batch)
        learners.append(self)
        return train(self, batch, *args, **more)

    def computed(self: policy.PolicyModel, *args: Any, **more: Any) -> Any:
        replayed.append((self, more["routed"] is not None))
        return logprobs(self, *args, **more)

    monkeypatch.setattr(LearnerCore, "train", trained)
    monkeypatch.setattr(policy.PolicyModel, "logprobs", computed)
    found = serial.run_serial(shipped(sparse_model, "kl.loss.coefficient=0.1"), 0)
    assert found["steps"] == 2 and len(seen) == 2
    learner = learners[0]
    shadow = learner.measure.shadow = policy.load_policy(sparse_model, "float32", "cpu")
    learner._forward(shadow, pack(seen[0]), [0, 1])
    assert learner.reference is not None
    for model, does in ((learner.model, True), (shadow, True), (learner.reference, False)):
        assert {flag for one, flag in replayed if one is model} == {does}
    for batch in seen:
        packed = pack(batch)
        for row, routed in enumerate(packed.routed):
            assert routed is not None and routed.shape == (2, 8, 2)
            read = len(packed.prompts[row]) + len(packed.responses[row]) - 1
            assert routed.ids.shape == (read, 2, 2)
            assert (routed.ids[len(packed.prompts[row]) - 1 :] < 8).all()


def test_a_prompt_is_shared_only_by_rows_with_the_same_experts(sparse_model: Path) -> None:
    from learner_step_kit import batch

    asked = batch()
    for sample in asked.samples[:3]:
        tokens = (len(sample.prompt_tokens) + len(sample.tokens)) // 4 - 1
        ids = np.full((tokens, 2, 2), [0, 1 + (sample.sample == 2)], np.uint16)
        sample.routed = RoutedExperts(ids, 8).encode()
    shared = pack(asked).shared
    assert shared[:4] == [0, 0, 1, 2]


def test_a_warm_start_builds_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.tasks.warm_start.measure_accuracy", lambda *_: 0.0)
    config = shipped(tmp_path / "m", "model.warm_start_experts=4")
    warm_start(config, tmp_path / "m", steps=1)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (raw["model_type"], raw["num_local_experts"], raw["num_experts_per_tok"]) == (
        "qwen3_moe",
        4,
        2,
    )


def test_a_dense_model_is_refused(small_model: Path) -> None:
    config = shipped(small_model)
    for start in (make_engine, lambda config: LearnerCore(config, small_model)):
        with pytest.raises(ConfigError, match=r"replay_routing: .* is a dense qwen3, it has no"):
            start(config)


@pytest.mark.slow
def test_kills_journal_and_replay_keep_the_experts(
    forked: Callable[..., dict[str, Any]], sparse_model: Path, tmp_path: Path
) -> None:
    sets = (f"model.path={str(sparse_model)!r}", "learner.replay_routing=true")
    batches = survive_kills(forked, tmp_path / "run", *sets)
    samples = [sample for batch in batches for sample in batch.samples]
    assert samples and all(
        RoutedExperts.decode(s.routed, (len(s.prompt_tokens) + len(s.tokens)) // 4 - 1).experts == 8
        for s in samples
    )
