"""The notes beside a model's files: what it was created from, what was saved under which name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.contract.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class SavedWeights(msgspec.Struct):
    """NAME.json beside weights that a client saved; model: the branch that has them."""

    model: str
    rank: int
    version: int
    parents: dict[str, int]
    time: float


class ModelRecord(msgspec.Struct):
    """model.json.

    source: tinker path that it was loaded from; "": the base model.
    version: when it was created."""

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


def folder_name(model: str) -> str:
    """Return the folder of a model.

    >>> folder_name("s-1f:train:0")
    's-1f-train-0'
    """
    return model.replace(":", "-")


def branch_name(model: str, branch: int) -> str:
    """Return the name of the weights' history that begins with load_weights call `branch`.

    >>> branch_name("s-1f:train:0", 0), branch_name("s-1f:train:0", 7)
    ('s-1f:train:0', 's-1f:train:0@7')
    """
    return f"{model}@{branch}" if branch else model


def model_of(branch: str) -> str:
    """Return the model of a branch.

    >>> model_of("s-1f:train:0@7")
    's-1f:train:0'
    """
    return branch.partition("@")[0]


def find_saved(root: Path, path: str, kind: str = "") -> tuple[Path, SavedWeights]:
    """Return the directory of a tinker path, and what was saved there.  Raises ConfigError."""
    match = re.fullmatch(r"tinker://([A-Za-z0-9:_-]+)/(weights|sampler_weights)/([^/]+)", path)
    if match is None or not NAME.fullmatch(match[3]):
        raise ConfigError(f"{path} is not a path of saved weights: tinker://MODEL/weights/NAME")
    if kind and match[2] != kind:
        raise ConfigError(f"{path} has no optimizer: training goes on from tinker://MODEL/{kind}/")
    found = root / folder_name(match[1]) / match[2] / match[3]
    try:
        note = found.with_name(f"{found.name}.json").read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: this server has no such weights") from error
    return found, msgspec.json.decode(note, type=SavedWeights)
