"""Assign GPUs to processes by `generator.gpus` and `learner.gpus`.

Each process sees its GPU through CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.config.layers import key_of
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError

# the original CUDA_VISIBLE_DEVICES, from which the children of a bound process choose
ORIGINAL_DEVICES = "ASYNCRL_VISIBLE_DEVICES"


def bind(gpus: Sequence[int], index: int, key: str) -> None:
    """Restrict this process to its GPU; does nothing for an empty list.

    Call it before CUDA is initialized. Raises ConfigError, with `key` in the message, when the
    GPU does not exist.
    """
    if not gpus:
        return
    original = os.environ.setdefault(ORIGINAL_DEVICES, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    names = [x.strip() for x in original.split(",") if x.strip()]
    number = gpus[index % len(gpus)]  # counted within the original devices where these are set
    if names and number >= len(names):
        raise ConfigError(
            f"{key}: GPU {number} of {len(names)} (CUDA_VISIBLE_DEVICES={original}); GPUs are "
            "counted from 0"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = names[number] if names else str(number)
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"{key}: GPU {number} does not exist: torch {torch.__version__} sees "
            "no such CUDA device (`asyncrl engines`)"
        )


def bind_learner(config: Config) -> None:
    """Restrict a rank of the learner to its GPU, which then has local rank 0."""
    if config.learner.gpus:
        bind(config.learner.gpus, int(os.environ.get("LOCAL_RANK", "0")), "learner.gpus")
        os.environ["LOCAL_RANK"] = "0"


def find_missing_gpus(config: Config) -> str:
    """Describe the first GPU that the config needs and this machine lacks; "" if none."""
    gpus = {"generator.gpus": config.generator.gpus, "learner.gpus": config.learner.gpus}
    key = next(
        (k for k, g in gpus.items() if g),
        "model.device" if config.model.device.startswith("cuda") else "",
    )
    if not key:
        return ""
    import torch

    if not torch.cuda.is_available():
        return (
            f"{key}: needs CUDA, and torch {torch.__version__} sees no CUDA device "
            "(`asyncrl engines`): install torch with CUDA, or set model.device = cpu"
        )
    for key, numbers in gpus.items():
        if numbers and max(numbers) >= torch.cuda.device_count():
            return (
                f"{key}: GPU {max(numbers)} of {torch.cuda.device_count()}; GPUs are counted from 0"
            )
    return ""


class DeviceSplit(NamedTuple):
    """The GPUs of a machine, divided among a run's processes."""

    sets: tuple[str, ...]  # `key=value` for SPLIT_KEYS, as for `--set`
    reason: str  # for this division


SPLIT_KEYS = ("learner.gpus", "generator.gpus", "generators")


def split_gpus(config: Config, count: int, sets: Sequence[str] = ()) -> DeviceSplit:
    """Divide GPUs 0 to `count` - 1: one for each learner rank, the others for generators.

    sets: other settings of the command line; none may be of SPLIT_KEYS.

    >>> from asyncrl.config import load
    >>> split_gpus(load.load("gpu_one"), 4).sets
    ('learner.gpus=[0]', 'generator.gpus=[1, 2, 3]', 'generators=3')

    Raises ConfigError where a rank or all generators would have no GPU, or where the config
    already chooses devices.
    """
    option = f"--gpus {count}"
    ranks = config.learner.process_count
    for item in sets:
        if key_of(item) in SPLIT_KEYS:
            raise ConfigError(f"{option}: sets {', '.join(SPLIT_KEYS)}; leave out --set {item}")
    if config.model.device not in ("auto", "cuda"):
        raise ConfigError(
            f"{option}: model.device = {config.model.device} already chooses a device; use auto or "
            "cuda"
        )
    if ranks > count or ranks == count > 1:
        reason = "need a GPU each" if ranks > count else "leave no GPU for a generator"
        fewer = f" or learner.ranks={count - 1}" if count > 1 else " or learner.ranks=1"
        raise ConfigError(
            f"{option}: {ranks} learner ranks (learner.ranks) {reason}; use --gpus "
            f"{ranks + 1}{fewer}"
        )
    generator_gpus = list(range(ranks, count)) or [0]
    chosen = (list(range(ranks)), generator_gpus, len(generator_gpus))
    lines = tuple(f"{key}={value}" for key, value in zip(SPLIT_KEYS, chosen, strict=True))
    if count == 1:
        return DeviceSplit(lines, "learner and generator share the only GPU and its memory")
    more = " (more with learner.ranks)" if count > 2 else ""
    takes = f"the learner takes one GPU{more}"
    if ranks > 1:
        takes = f"each of {ranks} learner ranks takes one"
    others = "the other one" if count == ranks + 1 else f"each of the other {count - ranks}"
    return DeviceSplit(lines, f"{takes}; {others} has a generator")


def has_cuda() -> bool:
    """Return whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def describe_placement(config: Config) -> list[str]:
    """Return one line per learner rank and generator with its device."""
    lines = []
    for name, gpus, count in (
        ("learner rank", config.learner.gpus, config.learner.process_count),
        ("generator", config.generator.gpus, config.generators),
    ):
        for index in range(count):
            device = f"GPU {gpus[index % len(gpus)]}" if gpus else config.model.device
            lines.append(f"{name} {index}: {device}")
    return lines
