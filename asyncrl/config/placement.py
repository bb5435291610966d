"""The section [placement]: resources of a run's processes on a cluster (`run --on ray`)."""

from __future__ import annotations

from typing import Literal

from asyncrl.algorithms.settings import Count, NonNegative, Positive, PositiveFloat, Section


class HostPlacement(Section):
    cpus: PositiveFloat = 1.0
    """CPUs of each process."""
    gpus: NonNegative = 0.0
    """GPUs of each process."""


class GeneratorPlacement(HostPlacement):
    count: Count = 0
    """Generators on the cluster. 0: as `generators`."""


class Placement(Section):
    learner: HostPlacement = HostPlacement()
    """Resources of all learner ranks, and of the buffer beside them."""
    generator: GeneratorPlacement = GeneratorPlacement()
    """Resources of each generator."""
    nodes: Count = 0
    """Hosts of a cluster, for which `asyncrl run --dry-run` makes a plan. 0: none."""
    gpus_per_node: Positive = 8
    """GPUs of each of these hosts."""
    gpu_gib: PositiveFloat = 80.0
    """Memory of each of these GPUs, in GiB."""
    strategy: Literal["PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Use few hosts, many hosts, or a host for each process."""
    deadline_s: PositiveFloat = 300.0
    """Seconds to wait until the cluster has room for all processes."""
