"""The section [placement]: resources of a run's processes on a cluster (`run --on ray`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count


class HostPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    cpus: Annotated[float, Meta(gt=0)] = 1.0
    """CPUs of each process."""
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    """GPUs of each process."""


class GeneratorPlacement(HostPlacement, frozen=True, forbid_unknown_fields=True, kw_only=True):
    count: Count = 0
    """Generators on the cluster. 0: as `generators`."""


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    learner: HostPlacement = HostPlacement()
    """Resources of all learner ranks, and of the buffer beside them."""
    generator: GeneratorPlacement = GeneratorPlacement()
    """Resources of each generator."""
    strategy: Literal["PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Use few hosts, many hosts, or a host for each process."""
    deadline_s: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds to wait until the cluster has room for all processes."""
