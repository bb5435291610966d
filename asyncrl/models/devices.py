"""Which GPU a process computes on: `generator.gpus` and `learner.gpus`, through
CUDA_VISIBLE_DEVICES of each process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError

# what CUDA_VISIBLE_DEVICES was before a process took its share: its children choose from the whole
# again
WHOLE = "ASYNCRL_VISIBLE_DEVICES"


def visible_devices(gpus: Sequence[int], index: int, visible: str = "", key: str = "gpus") -> str:
    """CUDA_VISIBLE_DEVICES of process `index`: its GPU of `gpus`, dealt in turn, counted within
    `visible` where that is set.

    Raises ConfigError (naming `key`) for a number beyond them.
    """
    names = [x.strip() for x in visible.split(",") if x.strip()]
    number = gpus[index % len(gpus)]
    if names and number >= len(names):
        raise ConfigError(
            f"{key}: GPU {number} of {len(names)} (CUDA_VISIBLE_DEVICES={visible}); they are "
            "counted from 0"
        )
    return names[number] if names else str(number)


def bind(gpus: Sequence[int], index: int, key: str) -> None:
    """Let this process see its GPU alone; call it before anything touches CUDA.  Nothing for an
    empty list.  key: for the error.
    """
    if not gpus:
        return
    whole = os.environ.setdefault(WHOLE, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(gpus, index, whole, key)
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"{key}: GPU {gpus[index % len(gpus)]} is not there: torch {torch.__version__} sees no "
            "such CUDA device (`asyncrl engines`)"
        )


def bind_learner(config: Config) -> None:
    """`bind` for a rank of the learner, which then is the only one on its (single visible)
    device.
    """
    if config.learner.gpus:
        bind(config.learner.gpus, int(os.environ.get("LOCAL_RANK", "0")), "learner.gpus")
        os.environ["LOCAL_RANK"] = "0"


def missing(config: Config) -> str:
    """What the config asks for that this machine does not have; empty when it is all there."""
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
            f"{key}: asks for CUDA, and torch {torch.__version__} sees no CUDA device "
            "(`asyncrl engines`): install torch with CUDA, or set model.device = cpu"
        )
    for key, numbers in gpus.items():
        if numbers and max(numbers) >= torch.cuda.device_count():
            return (
                f"{key}: GPU {max(numbers)} of {torch.cuda.device_count()}; they are counted from 0"
            )
    return ""


class DeviceSplit(NamedTuple):
    """The GPUs of a machine, divided among a run's processes.

    sets: `key=value` for SPLIT_KEYS, as `--set` takes them.
    reason: why they are divided in this way.
    """

    sets: tuple[str, ...]
    reason: str


SPLIT_KEYS = ("learner.gpus", "generator.gpus", "generators")


def split_gpus(config: Config, count: int, sets: Sequence[str] = ()) -> DeviceSplit:
    """Divide GPUs 0 to `count` - 1: one for each learner rank, the others for generators.

    sets: what the command line sets besides; it may hold none of SPLIT_KEYS.

    >>> from asyncrl.config import load
    >>> split_gpus(load.load("gpu_one"), 4).sets
    ('learner.gpus=[0]', 'generator.gpus=[1, 2, 3]', 'generators=3')

    Raises ConfigError where a rank or every generator would be left without a GPU, or where the
    devices are chosen already.
    """
    asked = f"--gpus {count}"
    ranks = config.learner.ranks
    for item in sets:
        if item.partition("=")[0].strip() in SPLIT_KEYS:
            raise ConfigError(f"{asked}: chooses {', '.join(SPLIT_KEYS)}; leave out --set {item}")
    if config.model.device not in ("auto", "cuda"):
        raise ConfigError(
            f"{asked}: model.device = {config.model.device} chooses a device already; use auto or "
            "cuda"
        )
    if ranks > count or ranks == count > 1:
        why = "each need a GPU of their own" if ranks > count else "leave no GPU for a generator"
        fewer = f" or learner.ranks={count - 1}" if count > 1 else " or learner.ranks=1"
        raise ConfigError(
            f"{asked}: {ranks} learner ranks (learner.ranks) {why}; use --gpus {ranks + 1}{fewer}"
        )
    free = list(range(ranks, count)) or [0]
    chosen = (list(range(ranks)), free, len(free))
    lines = tuple(f"{key}={value}" for key, value in zip(SPLIT_KEYS, chosen, strict=True))
    return DeviceSplit(lines, _explain_split(config, count))


def _explain_split(config: Config, count: int) -> str:
    ranks = config.learner.ranks
    if count == 1:
        return "learner and generator share the only GPU and its memory"
    takes = (
        "the learner takes one GPU" if ranks == 1 else f"each of {ranks} learner ranks takes one"
    )
    if config.learner.backend == "torch" and count > 2:
        takes += " (more with learner.backend=deepspeed and learner.ranks)"
    free = count - ranks
    return f"{takes}; " + (
        "the other one has a generator"
        if free == 1
        else f"each of the other {free} has a generator"
    )


def any_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def placement(config: Config) -> list[str]:
    """One line a process that computes: where it will."""
    where = config.model.device
    out = [
        f"learner rank {r}: "
        f"{f'GPU {g}' if (g := _device_of(config.learner.gpus, r)) is not None else where}"
        for r in range(config.learner.ranks)
    ]
    return out + [
        f"generator {i}: "
        f"{f'GPU {g}' if (g := _device_of(config.generator.gpus, i)) is not None else where}"
        for i in range(config.generators)
    ]


def _device_of(gpus: Sequence[int], index: int) -> int | None:
    return gpus[index % len(gpus)] if gpus else None
