"""Runs that train from images: the shipped config, exact mode, kills, the journal and a replay."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_kit import ROOT
from run_kit import survive_kills
from vision_kit import llava, picture, seeing_model  # noqa: F401

from actors.engine_embedded import make_engine
from asyncrl.config import load, rules
from asyncrl.contract.blobs import images
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Batch
from asyncrl.experiments import serial
from asyncrl.models.policy import PolicyModel
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.supervise import preflight
from asyncrl.supervise.report import run_page, token_samples
from learner.batch import pack
from learner.sample_log import SampleLog
from learner.step import LearnerCore

SHORT = (
    "learner.steps=2",
    "learner.groups=2",
    "learner.group_size=2",
    "evaluation.every=0",
    "evaluation.prompts=4",
    "evaluation.final_prompts=4",
    "evaluation.ood_prompts=2",
)


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
        self.sample_log = SampleLog(
            self.config, tmp_path, batch.number, load_tokenizer(self.config.model.path)
        )
        return train(self, batch, *args, **more)

    def computed(self: PolicyModel, prompts: Any, *args: Any, **more: Any) -> Any:
        seen.append((len(prompts), sum(map(len, more["images"]))))
        return logprobs(self, prompts, *args, **more)

    monkeypatch.setattr(LearnerCore, "train", trained)
    monkeypatch.setattr(PolicyModel, "logprobs", computed)
    sets = ("exact=true", "weights.in_flight='recompute_kv'", "kl.loss.coefficient=0.1")
    found = serial.run_serial(shipped(llava, *sets, "record.samples_every=1"), 0)
    assert len(batches) == 2
    assert all(rows == pictures for rows, pictures in seen)
    assert all(
        x["mismatch/max_at_lag_0"] == 0 for x in found["curve"] if "mismatch/max_at_lag_0" in x
    )
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
    page = json.dumps(run_page.select_samples(store).rows)
    assert shown["thumbnail"] in page


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
