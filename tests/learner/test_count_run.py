"""Runs of the shipped configs of images and of a mixture of experts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_kit import ROOT
from run_kit import survive_kills
from vision_kit import llava, picture, seeing_model  # noqa: F401

from actors.engine_embedded import make_engine
from asyncrl.config import load, rules
from asyncrl.contract.blobs import images
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Batch
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.experiments import serial
from asyncrl.models import policy
from asyncrl.models.policy import PolicyModel
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.supervise import preflight
from asyncrl.supervise.report import run_view, token_samples
from asyncrl.tasks import get_task
from asyncrl.tasks.warm_start import warm_start
from learner.batch import pack
from learner.sample_log import SampleLog
from learner.step import LearnerCore

FEW = ("learner.steps=2", "learner.groups=2", "learner.group_size=2")
FEW += ("evaluation.every=0", "evaluation.final_prompts=4")
SHORT = (*FEW, "evaluation.prompts=4", "evaluation.ood_prompts=2")
SHORT_EXPERTS = (*FEW, "generator.max_new_tokens=12", "evaluation.ood_prompts=0")


def shipped(path: Path, *sets: str) -> Any:
    return load.load(ROOT / "configs" / "count.toml", [f"model.path={str(path)!r}", *SHORT, *sets])


def subject_of(path: Path, *sets: str) -> preflight.Subject:
    """The subject of the checks, with a model that was checked before."""
    subject = preflight.Subject(shipped(path, *sets))
    subject.__dict__["tokenizer"] = load_tokenizer(path)
    return subject


def test_the_shipped_config_trains_on_its_pictures(
    llava: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In exact mode the learner refuses a batch whose log-probabilities differ by one bit. The
    learner and the reference policy see the pictures, each once a batch, and samples are logged
    with a thumbnail."""
    batches: list[Batch] = []
    seen: list[tuple[int, int]] = []
    train, logprobs = LearnerCore.train, PolicyModel.logprobs

    def trained(self: LearnerCore, batch: Batch, *args: Any, **more: Any) -> Any:
        batches.append(batch)
        tokenizer = load_tokenizer(self.config.model.path)
        self.sample_log = SampleLog(self.config, tmp_path, batch.number, tokenizer)
        return train(self, batch, *args, **more)

    def computed(self: PolicyModel, prompts: Any, *args: Any, **more: Any) -> Any:
        seen.append((len(prompts), sum(map(len, more["images"]))))
        return logprobs(self, prompts, *args, **more)

    monkeypatch.setattr(LearnerCore, "train", trained)
    monkeypatch.setattr(PolicyModel, "logprobs", computed)
    sets = ("exact=true", "weights.in_flight='recompute_kv'", "kl.loss.coefficient=0.1")
    found = serial.run_serial(shipped(llava, *sets, "record.samples_every=1"), 0)
    assert len(batches) == 2 and all(rows == pictures for rows, pictures in seen)
    assert not any(x.get("mismatch/max_at_lag_0", 0) for x in found["curve"])
    assert [len(x) for x in found["evals"]["heldout"].values()] == [4, 4]
    for batch in batches:
        assert len(batch.images) == 2 and len(batch.samples) == 4  # one of each group
        for sample, blobs in zip(batch.samples, pack(batch).images, strict=True):
            assert [images.digest(blob) for blob in blobs] == sample.images
    store = token_samples.SampleStore(tmp_path / token_samples.FILE)
    store.refresh()
    (shown,) = store.read_row(0)["sequences"][0]["images"]
    assert shown["size"] == [18, 18] and shown["thumbnail"].startswith("data:image/png;base64,")
    prompt = store.read_row(0)["sequences"][0]["prompt"]
    assert prompt.startswith("<image>") and prompt.count("<image>") == 1
    text = token_samples.format_terminal(store.read_row(0), "lag", False)
    assert f"  image     18 x 18 pixels, {shown['digest']}" in text
    assert shown["thumbnail"] in json.dumps(run_view.select_samples(store).rows)


def test_a_baseline_by_prompt_tells_pictures_apart(llava: Path) -> None:
    """All prompts that ask for one color have the same tokens."""
    sets = ("advantage.name='reinforce'", "advantage.baseline='prompt'", "learner.steps=1")
    run = serial.SerialRun(shipped(llava, *sets, "learner.groups=8"))
    run.run()
    assert len(run.core.state.prompts) == 8


@pytest.mark.parametrize("row", rules.TABLES["images"], ids=lambda row: row.sets[0])
def test_what_images_do_not_support_is_refused_in_one_line(llava: Path, row: Any) -> None:
    more = ("model.dtype='bfloat16'",) if "deepspeed" in row.sets[0] else ()
    with pytest.raises(ConfigError, match=r"^" + row.text[:40]) as refused:
        preflight.check_images(subject_of(llava, *row.sets, *more))
    assert "\n" not in str(refused.value)


def test_environments_and_the_engines_options_are_refused(llava: Path) -> None:
    subject = subject_of(llava, "agent.env='os:path'")
    with pytest.raises(
        ConfigError, match=r"agent\.env = os:path: environments, the run's tools and"
    ):
        preflight.check_images(subject)
    assert preflight.check_images(subject_of(llava)).startswith(
        "the model reads an image as 9 tokens"
    )
    for key, value in (("quantize", "'int8'"), ("speculate", "4")):
        with pytest.raises(ConfigError, match=rf"generator.{key}: needs a model of the packed"):
            make_engine(shipped(llava, f"generator.{key}={value}"))
    with pytest.raises(ConfigError, match=r"replay_routing: .* is a dense llava"):
        make_engine(shipped(llava, "learner.replay_routing=true"))
    with pytest.raises(ConfigError, match="otb needs a model of the packed forward"):
        LearnerCore(shipped(llava, "advantage.name='otb'"), llava)


@pytest.mark.slow
def test_kills_journal_and_replay_keep_the_images(
    forked: Callable[..., dict[str, Any]], llava: Path, tmp_path: Path
) -> None:
    """Every process is killed once, and the buffer twice; no sample is lost or counted twice."""
    sets = (
        *(f"model.path={str(llava)!r}", "task.name='count'", "generator.max_new_tokens=4"),
        *("generator.context=16", "learner.steps=6", "learner.groups=4", "learner.group_size=2"),
        *("evaluation.every=0", "evaluation.final_prompts=4", "evaluation.ood_prompts=0"),
    )
    die = ("learner", "generator-0", "generator-1", "buffer")
    batches = survive_kills(forked, tmp_path / "run", *sets, die=die)
    trained = [(s.ticket, s.sample) for batch in batches for s in batch.samples]
    assert trained and len(trained) == len(set(trained))
    for batch in batches:
        images.check_blobs(batch.images)
        assert set(batch.images) == {name for s in batch.samples for name in s.images}
        assert len(batch.images) == len({s.ticket for s in batch.samples})


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse") / "model"
    task = load.load(ROOT / "configs" / "moe.toml").task
    policy.build_model(path, get_task(task).symbols, hidden=32, family="qwen3_moe", seed=1)
    return path


def shipped_experts(path: Path, *sets: str) -> Any:
    sets = (f"model.path={str(path)!r}", *SHORT_EXPERTS, *sets)
    return load.load(ROOT / "configs" / "moe.toml", sets)


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
    found = serial.run_serial(shipped_experts(sparse_model, "kl.loss.coefficient=0.1"), 0)
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
    assert pack(asked).shared[:4] == [0, 0, 1, 2]


def test_a_warm_start_builds_experts(tmp_path: Path) -> None:
    config = shipped_experts(tmp_path / "m", "model.warm_start_experts=4")
    warm_start(config, tmp_path / "m", steps=1)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    names = ("model_type", "num_local_experts", "num_experts_per_tok")
    assert [raw[name] for name in names] == ["qwen3_moe", 4, 2]


def test_a_dense_model_is_refused(small_model: Path) -> None:
    config = shipped_experts(small_model)
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
