"""Records beside a model's files: its origin, and the weights saved under each name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.contract.errors import ConfigError

# NAME.json is the record of NAME, and NAME.part is what a process is writing
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(?<!\.json)(?<!\.part)")


class SavedWeights(msgspec.Struct):
    """NAME.json beside weights that a client saved.

    model: the branch of the weights.  call: number of the call that saved them."""

    model: str
    rank: int
    version: int
    parents: dict[str, int]
    time: float
    call: int = -1


class ModelRecord(msgspec.Struct):
    """model.json.

    source: tinker path that it was loaded from; "": the base model.
    version: the model's version when it was created."""

    model: str
    session: str
    rank: int
    seed: int
    time: float
    source: str = ""
    optimizer: bool = False
    version: int = 0
    parents: dict[str, int] = {}
    metadata: dict[str, Any] | None = None


def build_folder_name(model: str) -> str:
    """Return the folder of a model.

    >>> build_folder_name("s-1f:train:0")
    's-1f-train-0'
    """
    return model.replace(":", "-")


def build_branch_name(model: str, branch: int) -> str:
    """Return the name of the branch that starts with load_weights call `branch`; 0: the first.

    >>> build_branch_name("s-1f:train:0", 0), build_branch_name("s-1f:train:0", 7)
    ('s-1f:train:0', 's-1f:train:0@7')
    """
    return f"{model}@{branch}" if branch else model


def strip_branch(branch: str) -> str:
    """Return the model of a branch.

    >>> strip_branch("s-1f:train:0@7")
    's-1f:train:0'
    """
    return branch.partition("@")[0]


def find_saved(root: Path, path: str, kind: str = "") -> tuple[Path, SavedWeights]:
    """Return the directory and the record of a tinker path.  Raises ConfigError."""
    match = re.fullmatch(r"tinker://([A-Za-z0-9:_-]+)/(weights|sampler_weights)/([^/]+)", path)
    if match is None or not NAME.fullmatch(match[3]):
        raise ConfigError(f"{path} is not a path of saved weights: tinker://MODEL/weights/NAME")
    if kind and match[2] != kind:
        raise ConfigError(
            f"{path} has no optimizer: training can continue only from tinker://MODEL/{kind}/"
        )
    folder = root / build_folder_name(match[1]) / match[2] / match[3]
    try:
        note = folder.with_name(f"{folder.name}.json").read_bytes()
        return folder, msgspec.json.decode(note, type=SavedWeights)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: this server has no such weights") from error
