"""The section [placement]: resources of a run's processes on a cluster (`run --on ray`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count


class HostPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    cpus: Annotated[float, Meta(gt=0, description="CPUs of each process.")] = 1.0
    gpus: Annotated[float, Meta(ge=0, description="GPUs of each process.")] = 0.0


class GeneratorPlacement(HostPlacement, frozen=True, forbid_unknown_fields=True, kw_only=True):
    count: Annotated[Count, Meta(description="Generators on the cluster. 0: as `generators`.")] = 0


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    learner: Annotated[
        HostPlacement,
        Meta(description="Resources of all learner ranks, and of the buffer beside them."),
    ] = HostPlacement()
    generator: Annotated[GeneratorPlacement, Meta(description="Resources of each generator.")] = (
        GeneratorPlacement()
    )
    strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_SPREAD"],
        Meta(description="Use few hosts, many hosts, or a host for each process."),
    ] = "PACK"
    deadline_s: Annotated[
        float,
        Meta(gt=0, description="Seconds to wait until the cluster has room for all processes."),
    ] = 300.0
