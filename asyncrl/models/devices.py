"""Which GPU a process computes on: `generator.gpus` and `learner.gpus`, through
CUDA_VISIBLE_DEVICES of each process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

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
