"""Checkpoints: whole or absent, the last k kept, a damaged one passed over, another model's
refused, epochs claimed once."""

import multiprocessing
import os
import random
import shutil
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import EXTRA, core, model_dir  # noqa: F401
from learner_step_kit import batch, weights

from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError, DamagedDataError, LearnerFenced
from asyncrl.models.policy import build_model
from learner import checkpoint
from learner.step import LearnerCore


def claimed(root: Path) -> tuple[int, Path]:
    epoch, _, directory = checkpoint.start_epoch(root)
    return epoch, checkpoint.claim(directory, 0)


def built(model_dir: Path, **sections: Any) -> LearnerCore:
    raw = {"model": {"path": str(model_dir), "device": "cpu"}, "task": {"name": "sort"}}
    return LearnerCore(load.build(raw | sections), model_dir)


def test_a_restored_learner_goes_on_bitwise(model_dir: Path, tmp_path: Path) -> None:
    whole, (_, directory) = core(model_dir), claimed(tmp_path)
    for n in range(3):
        whole.train(batch(n, seed=n))
        if n == 1:
            assert checkpoint.save(directory, whole, EXTRA, 2, {1: b"older"}) == 2
    path = checkpoint.find_newest_checkpoint(directory)
    assert path is not None and path.name == "number_2"
    assert checkpoint.read_earlier_versions(path) == {1: b"older"}
    second = core(model_dir)
    assert checkpoint.restore(second, path) == EXTRA
    second.train(batch(2, seed=2))
    assert torch.equal(weights(second), weights(whole)) and second.state == whole.state


def test_a_checkpoint_written_on_a_gpu_is_read_without_one(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, (_, directory) = core(model_dir), claimed(tmp_path)
    whole.train(batch())
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        checkpoint.save(directory, whole, EXTRA, 1, {})
    path = checkpoint.find_newest_checkpoint(directory)
    assert path is not None
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path / "state.pt")
    second = core(model_dir)
    assert checkpoint.restore(second, path) == EXTRA
    assert torch.equal(weights(second), weights(whole))


def test_the_last_k_are_kept_and_all_of_them_whole(model_dir: Path, tmp_path: Path) -> None:
    c, (_, directory) = core(model_dir), claimed(tmp_path)
    oldest = []
    for n in range(5):
        c.state.number = n
        oldest.append(checkpoint.save(directory, c, EXTRA, 2))
    assert oldest == [0, 0, 1, 2, 3]
    assert sorted(p.name for p in directory.iterdir()) == ["number_3", "number_4"]


@pytest.mark.parametrize(("controller", "beta"), [("adaptive", 0.75), ("fixed", 0.5)])
def test_an_adaptive_coefficient_goes_on_and_a_fixed_one_is_the_configs(
    model_dir: Path, tmp_path: Path, controller: str, beta: float
) -> None:
    def with_kl(coefficient: float) -> LearnerCore:
        reward = {"coefficient": coefficient, "controller": controller}
        return built(model_dir, kl={"reward": reward})

    c, (_, directory) = with_kl(0.25), claimed(tmp_path)
    assert c.state.beta == 0.25
    c.state.beta = 0.75
    checkpoint.save(directory, c, EXTRA, 1)
    resumed = with_kl(0.5)
    checkpoint.restore(resumed, directory / "number_0")
    assert resumed.state.beta == beta


@pytest.mark.parametrize("part", ["manifest", "state.pt", "model/model.safetensors"])
@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_a_damaged_checkpoint_is_passed_over_and_said(
    part: str, how: str, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    c, (_, directory) = core(model_dir), claimed(tmp_path)
    for n in (1, 2):
        c.state.number = n
        checkpoint.save(directory, c, EXTRA, 3)
    victim = directory / "number_2" / part
    data = victim.read_bytes()
    victim.unlink()
    damaged = {"cut": data[: len(data) // 2], "changed": bytes([data[0] ^ 1]) + data[1:]}
    if how != "gone":
        victim.write_bytes(damaged[how])
    path = checkpoint.find_newest_checkpoint(directory)
    assert path is not None and path.name == "number_1"
    said = capsys.readouterr().err
    size = len(data) // 2 if how == "cut" else "no"
    problem = f"{part} has {size} bytes, not {len(data)}"
    if how == "changed":
        problem = f"{part} does not match its checksum"
    if part == "manifest":
        problem = said.partition("number_2 is damaged (")[2].partition("); falling")[0]
        assert problem.startswith("its manifest: ")
    assert said == (
        f"checkpoint {directory / 'number_2'} is damaged ({problem}); falling back to the one "
        "before it\n"
    )
    assert checkpoint.list_numbers(directory) == [1]


def test_no_whole_checkpoint_is_an_error(model_dir: Path, tmp_path: Path) -> None:
    _, directory = claimed(tmp_path)
    assert checkpoint.find_newest_checkpoint(directory) is None
    checkpoint.save(directory, core(model_dir), EXTRA, 1)
    (directory / "number_0" / "state.pt").unlink()
    with pytest.raises(DamagedDataError, match=r"no checkpoint in .* is whole"):
        checkpoint.find_newest_checkpoint(directory)


def test_another_models_checkpoint_is_refused(model_dir: Path, tmp_path: Path) -> None:
    build_model(tmp_path / "other", "abcdefgh", hidden=64, layers=1)
    _, directory = claimed(tmp_path / "c")
    checkpoint.save(directory, core(tmp_path / "other"), EXTRA, 1)
    mine = core(model_dir)
    before = weights(mine)
    with pytest.raises(DamagedDataError, match=r"another model than model\.path"):
        checkpoint.restore(mine, directory / "number_0")
    assert torch.equal(weights(mine), before)


@pytest.mark.parametrize("written_by", ["deepspeed", "fsdp2"])
def test_other_backends_are_refused(model_dir: Path, tmp_path: Path, written_by: str) -> None:
    _, directory = claimed(tmp_path)
    mine = core(model_dir)
    checkpoint.save(directory, mine, EXTRA, 1)
    path = directory / "number_0"
    data = torch.load(path / "state.pt", weights_only=True)
    torch.save(data | {"optimizer": {written_by: {}}}, path / "state.pt")
    with pytest.raises(DamagedDataError) as error:
        checkpoint.load_checkpoint(mine, path)
    assert str(error.value) == (
        f"checkpoint {path} holds the optimizer of learner.backend = {written_by}; resume it with "
        "that backend"
    )
    torch.save(data, path / "state.pt")
    critic = built(model_dir, advantage={"name": "gae"}, value={"trunk": "shared"})
    assert critic.critic is not None
    with pytest.raises(DamagedDataError, match=f"^checkpoint {path} has no value head with value"):
        checkpoint.load_checkpoint(critic, path)


def test_a_full_disk_leaves_the_checkpoints_before_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the optimizer's state, after the model was written."""
    c, (_, directory) = core(model_dir), claimed(tmp_path)
    checkpoint.save(directory, c, EXTRA, 2)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    c.state.number = 1
    said = r"number_1 could not be written .is the disk full.*No space left on.*free some space and"
    with pytest.raises(AsyncrlError, match=said):
        checkpoint.save(directory, c, EXTRA, 2)
    assert [p.name for p in directory.iterdir()] == ["number_0"]
    assert checkpoint.verify(directory / "number_0") == ""


def test_a_new_life_links_its_origins_checkpoints(model_dir: Path, tmp_path: Path) -> None:
    first, directory = claimed(tmp_path)
    c = core(model_dir)
    for n in (2, 4):
        c.state.number = n
        checkpoint.save(directory, c, EXTRA, 3)
    unwelcome, origin, abandoned = checkpoint.start_epoch(tmp_path)
    second, origin2, mine = checkpoint.start_epoch(tmp_path)
    assert (first, unwelcome, second) == (1, 2, 3) and origin == origin2 == 1
    found = os.stat(mine / "number_4" / "state.pt").st_ino
    assert found == os.stat(directory / "number_4" / "state.pt").st_ino
    # nothing counts before the buffer's welcome
    assert checkpoint.list_epochs(tmp_path, claimed=True) == [1]
    (tmp_path / ".epoch_0.gone").touch()  # not a directory: its removal fails
    final = checkpoint.claim(mine, 4)
    # what the buffer has let go of cannot be resumed from
    assert checkpoint.list_numbers(final) == [4]
    assert {p.name for p in tmp_path.iterdir()} == {".epoch_0.gone", "epoch_3"}
    assert not abandoned.exists() and checkpoint.verify(final / "number_4") == ""


def test_a_start_that_is_overtaken_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another learner takes epoch 2 at once, claims epoch 3, and removes the origin of epoch 4."""
    (tmp_path / "epoch_1" / "number_3").mkdir(parents=True)
    (tmp_path / "epoch_2.new").mkdir()
    answers = [(True, [1]), (False, [1]), (True, [1]), (False, [2]), (True, [1, 3])]
    answers += [(True, [1]), (False, [3]), (True, [1]), (True, [4])]
    answers += [(True, [1]), (False, [4]), (True, [1])]
    copy, failing = shutil.copytree, [True, False, True]

    def list_epochs(root: Path, *, claimed: bool) -> list[int]:
        is_claimed, epochs = answers.pop(0)
        assert (root, claimed) == (tmp_path, is_claimed)
        return epochs

    def copy_and_fail(*paths: Path, **how: Any) -> None:
        copy(*paths, **how)
        if failing.pop(0):
            raise FileNotFoundError(paths[0])

    monkeypatch.setattr(checkpoint, "list_epochs", list_epochs)
    monkeypatch.setattr(shutil, "copytree", copy_and_fail)
    assert checkpoint.start_epoch(tmp_path) == (5, 1, tmp_path / "epoch_5.new")
    assert {path.name for path in tmp_path.iterdir()} == {"epoch_1", "epoch_2.new", "epoch_5.new"}
    assert checkpoint.list_numbers(tmp_path / "epoch_5.new") == [3] and not answers
    answers += [(True, [1]), (False, [5]), (True, [1]), (True, [1])]
    with pytest.raises(FileNotFoundError):
        checkpoint.start_epoch(tmp_path)


def lives(root: Path, seed: int, out: Any) -> None:
    """Lives that begin and claim as fast as they can, among others."""
    choice = random.Random(seed)
    for _ in range(40):
        try:
            epoch, _, mine = checkpoint.start_epoch(root)
            out.put(("began", epoch))
            if not checkpoint.list_numbers(mine):
                made = mine / "number_0" / "model"
                made.mkdir(parents=True)
                for number in range(20):
                    (made / f"f{number}").write_text("x")
            if choice.random() < 0.6:
                out.put(("claimed", int(checkpoint.claim(mine, 0).name.removeprefix("epoch_"))))
        except (LearnerFenced, FileNotFoundError) as error:
            # FileNotFoundError: this program's own writing into a directory that is overtaken
            at = traceback.extract_tb(error.__traceback__)[-1]
            ours = isinstance(error, LearnerFenced) or "checkpoint.py" not in at.filename
            out.put(("fenced" if ours else f"{error} at line {at.lineno}", 0))
        except Exception as error:
            out.put((f"{type(error).__name__}: {error}", 0))
    out.put(("over", 0))


def test_lives_that_begin_at_once_have_epochs_of_their_own_or_are_fenced(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    out = fork.Queue()
    processes = [fork.Process(target=lives, args=(tmp_path / "c", seed, out)) for seed in range(4)]
    for process in processes:
        process.start()
    told: list[tuple[str, int]] = []
    while sum(what == "over" for what, _ in told) < len(processes):
        told.append(out.get(timeout=600))
    for process in processes:
        process.join()
    assert {what for what, _ in told} <= {"began", "claimed", "fenced", "over"}
    for kind in ("began", "claimed"):
        epochs = [epoch for what, epoch in told if what == kind]
        assert len(epochs) == len(set(epochs)) > 10, kind
    (left,) = checkpoint.list_epochs(tmp_path / "c", claimed=True)[-1:]
    assert left == max(epoch for what, epoch in told if what == "claimed")
    assert not list((tmp_path / "c").glob(".*.gone"))
