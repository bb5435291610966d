"""The section [placement]: what the processes of a run ask of a cluster (`run --on ray`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asyncrl.algorithms.settings import Count


class HostPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    cpus: Annotated[float, Meta(gt=0)] = 1.0
    gpus: Annotated[float, Meta(ge=0)] = 0.0


class GeneratorPlacement(HostPlacement, frozen=True, forbid_unknown_fields=True, kw_only=True):
    count: Annotated[Count, Meta(description="generators on the cluster; 0: as `generators`")] = 0


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    learner: Annotated[
        HostPlacement, Meta(description="of all learner ranks, and the buffer beside")
    ] = HostPlacement()
    generator: Annotated[GeneratorPlacement, Meta(description="of each generator")] = (
        GeneratorPlacement()
    )
    strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_SPREAD"],
        Meta(description="few hosts, many, or a host for each"),
    ] = "PACK"
    deadline_s: Annotated[
        float, Meta(gt=0, description="so long a cluster may take to have room for all of it")
    ] = 300.0
