"""Checkpoints: the only durable state of a run.

```
checkpoints/epoch_E.new/   made exclusively by one incarnation of the learner; links to the
                           checkpoints it resumes from
checkpoints/epoch_E/       the same, renamed when the buffer welcomed it; the highest one counts
    number_N/model/        a Hugging Face directory; with LoRA only the adapter
    number_N/state.pt      optimizer, learner state, cursor, ledger totals
    number_N/older_M.bin   flat weights of version M < N (lag injection)
    number_N/average_R.pt  average weights of rank R (correction.proximal = ema)
    number_N/manifest      size and xxh3-64 of every file; written last, before the directory gets
                           its name
```
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash

from asyncrl.config.sft import SftModel
from asyncrl.config.tree import ModelConfig
from asyncrl.contract.errors import AsyncrlError, DamagedDataError, LearnerFenced
from asyncrl.models import adapters
from asyncrl.models.policy import (
    Manifest,
    PolicyModel,
    build_manifest,
    export,
    list_named_weights,
    load_policy,
    load_weights,
)
from asyncrl.records import atomic_write, rundir
from learner.state import LearnerState
from learner.step import LearnerCore

EPOCHS = r"epoch_(\d+)(\.new)?"  # also of learners that were never welcomed


def list_epochs(root: Path, *, claimed: bool) -> list[int]:
    """Return the epoch numbers, ascending.

    With claimed=False they include those of learners that were never welcomed.
    """
    return list(rundir.list_numbered(root, r"epoch_(\d+)" if claimed else EPOCHS))


def list_numbers(directory: Path) -> list[int]:
    """Return the numbers of the checkpoints in `directory`, ascending."""
    return list(rundir.list_numbered(directory, r"number_(\d+)"))


def start_epoch(root: Path) -> tuple[int, int, Path]:
    """Start an incarnation: return (epoch, origin, its directory).

    The directory links to the origin's checkpoints and survives a power cut. Other learners may
    start and claim epochs at the same time.
    """
    atomic_write.create_directory(root)
    while True:
        origin = max(list_epochs(root, claimed=True), default=0)
        epoch = max(list_epochs(root, claimed=False), default=0) + 1
        directory = root / f"epoch_{epoch}.new"
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        # another learner may have claimed this number, or a greater one, since it was chosen
        if max(list_epochs(root, claimed=True), default=0) >= epoch:
            shutil.rmtree(directory, ignore_errors=True)
            continue
        try:
            for number in list_numbers(root / f"epoch_{origin}") if origin else ():
                shutil.copytree(
                    root / f"epoch_{origin}" / f"number_{number}",
                    directory / f"number_{number}",
                    copy_function=os.link,
                )
            for created in (
                directory,
                *(path for path in directory.rglob("*") if path.is_dir()),
                root,
            ):
                atomic_write.sync_path(created)
        except OSError:
            if max(list_epochs(root, claimed=True), default=0) == origin and directory.exists():
                raise
            shutil.rmtree(directory, ignore_errors=True)  # a newer epoch has removed the origin
            continue
        return epoch, origin, directory


def build_fenced_error(directory: Path) -> LearnerFenced:
    """Build the error for a directory that the claim of a greater epoch has removed."""
    return LearnerFenced(
        f"{directory} was removed: a newer incarnation of the learner has replaced it"
    )


def claim(directory: Path, checkpointed: int) -> Path:
    """Give a welcomed learner's directory its final name, which survives a power cut.

    Checkpoints below `checkpointed` are removed, because the buffer no longer covers them. Raises
    LearnerFenced.
    """
    final = directory.with_suffix("")
    try:
        for number in list_numbers(directory):
            if number < checkpointed:
                shutil.rmtree(directory / f"number_{number}")
        os.rename(directory, final)
    except FileNotFoundError as error:
        raise build_fenced_error(directory) from error
    atomic_write.sync_path(final.parent)
    for epoch, lower in rundir.list_numbered(final.parent, EPOCHS).items():
        if epoch < int(final.name.removeprefix("epoch_")):
            # the checkpoints that count are linked here; a rename removes the rest in one step
            with contextlib.suppress(OSError):
                os.rename(lower, lower.with_name(f".{lower.name}.gone"))
    for removed in final.parent.glob(".epoch_*.gone"):
        shutil.rmtree(removed, ignore_errors=True)
    return final


def save(
    directory: Path,
    core: LearnerCore,
    extra: Mapping[str, Any],
    keep_count: int,
    older: Mapping[int, bytes] = {},
) -> int:
    """Write the checkpoint of `core`'s number and keep the last `keep`; return the oldest.

    Raises AsyncrlError (disk full).
    """

    def fill(part: Path) -> None:
        core.backend.broadcast("save", str(part))
        optimizer = core.save(part)
        with core.backend.gather_full_parameters():
            export(core.model, part / "model")
        critic = None if core.backend.writes_parts else core.critic
        state = {
            "optimizer": optimizer,
            "critic": None if critic is None else critic.get_state(),
            "state": asdict(core.state),
            "extra": dict(extra),
        }
        torch.save(state, part / "state.pt")
        for number, data in older.items():
            (part / f"older_{number}.bin").write_bytes(data)

    return write(directory, core.state.number, fill, keep_count)


def write(directory: Path, number: int, fill: Callable[[Path], None], keep_count: int) -> int:
    """Write the checkpoint `number` and keep the last `keep_count`; return the oldest.

    fill: writes its files into a new directory.  Raises AsyncrlError (disk full).
    """
    final = directory / f"number_{number}"
    part_path = directory / f".number_{number}.part"
    try:
        with atomic_write.replace(final, part=part_path, sync=True) as part:
            part.mkdir()
            fill(part)
            seal(part)
    except AsyncrlError:  # a lost rank, not a full disk
        raise
    except Exception as error:
        # torch and safetensors have their own error classes for a full disk
        raise AsyncrlError(
            f"checkpoint {final} could not be written (is the disk full?): {error}; the ones "
            "before it are whole: free some space and resume"
        ) from error
    saved_numbers = list_numbers(directory)
    for older_number in saved_numbers[:-keep_count]:
        shutil.rmtree(directory / f"number_{older_number}")
    return saved_numbers[-keep_count:][0]


def seal(part: Path) -> None:
    """Write the manifest of `part` (sizes and checksums), which `verify` checks."""
    files = {
        str(file.relative_to(part)): [
            file.stat().st_size,
            xxhash.xxh3_64_hexdigest(file.read_bytes()),
        ]
        for file in sorted(part.rglob("*"))
        if file.is_file()
    }
    (part / "manifest").write_text(json.dumps(files), encoding="utf-8")


def verify(path: Path) -> str:
    """Return the problem with a checkpoint; empty when it is intact."""
    try:
        files = json.loads((path / "manifest").read_bytes())
    except (OSError, ValueError) as error:
        return f"its manifest: {error}"
    for name, (size, checksum) in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} has {file.stat().st_size if file.is_file() else 'no'} bytes, not {size}"
        if xxhash.xxh3_64_hexdigest(file.read_bytes()) != checksum:
            return f"{name} does not match its checksum"
    return ""


def find_newest_checkpoint(directory: Path) -> Path | None:
    """Return the newest intact checkpoint, None without any; report and remove damaged ones.

    Raises DamagedDataError when all are damaged, LearnerFenced when a newer epoch has replaced
    this one.
    """
    saved = list_numbers(directory)
    if not saved and not directory.exists():
        raise build_fenced_error(directory)
    for number in reversed(saved):
        path = directory / f"number_{number}"
        if not (problem := verify(path)):
            return path
        if not directory.exists():
            raise build_fenced_error(directory)
        print(
            f"checkpoint {path} is damaged ({problem}); falling back to the one before it",
            file=sys.stderr,
        )
        shutil.rmtree(path)
    if saved:
        raise DamagedDataError(f"no checkpoint in {directory} is whole; start a new run")
    return None


def restore(core: LearnerCore, path: Path) -> dict[str, Any]:
    """Load weights, optimizer and state; return the loop's part (`extra`).

    Raises DamagedDataError for another model's checkpoint.
    """
    core.backend.broadcast("restore", str(path))
    return load_checkpoint(core, path)


def load_checkpoint(core: LearnerCore, path: Path) -> dict[str, Any]:
    """Do this rank's part of `restore`."""
    data = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    written_by = next((n for n in ("deepspeed", "fsdp2") if n in data["optimizer"]), "torch")
    if written_by != core.config.learner.backend:
        raise DamagedDataError(
            f"checkpoint {path} holds the optimizer of learner.backend = {written_by}; resume it "
            "with that backend"
        )
    if core.model.adapter is not None:
        # in the backend's own files or not, it must be of this base and rank
        stored = adapters.read_fitting(core.model, path / "model")
        if not core.backend.writes_parts:
            load_weights(core.model, stored)
    elif not core.backend.writes_parts:
        with core.backend.gather_full_parameters():
            restore_weights(core.model, path, core.layout, core.config.model)
    core.backend.load(data["optimizer"], path)
    if core.average is not None:
        core.average.load(path)
    if core.critic is not None and not core.backend.writes_parts:
        core.critic.load_state(data.get("critic"), path)
    core.state = LearnerState(**data["state"])
    # only the adaptive controller continues with its own coefficient
    if core.config.kl.reward.controller == "fixed":
        core.state.beta = core.config.kl.reward.coefficient
    return dict(data["extra"])


def restore_weights(
    model: PolicyModel, path: Path, layout: Manifest, settings: ModelConfig | SftModel
) -> None:
    """Load every weight of the model.  Raises DamagedDataError for another model's checkpoint."""
    saved = load_policy(path / "model", settings.dtype, settings.device)
    if [row[:3] for row in build_manifest(saved)] != [row[:3] for row in layout]:
        raise DamagedDataError(
            f"checkpoint {path} is of another model than model.path = {settings.path}: "
            "start a new run, or point model.path at its model"
        )
    load_weights(model, dict(list_named_weights(saved)))


def read_earlier_versions(path: Path) -> dict[int, bytes]:
    """Return the flat weights of earlier versions in a checkpoint."""
    files = rundir.list_numbered(path, r"older_(\d+)\.bin")
    return {number: file.read_bytes() for number, file in files.items()}
