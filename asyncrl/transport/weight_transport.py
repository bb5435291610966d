"""The interface of a weight transport: the learner's server, a generator's client.

Under every transport the ring (asyncrl/transport/ring.py) holds the versions, and a server reads
it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any

from asyncrl.config.transports import TRANSPORTS
from asyncrl.contract.versions import Label

# (name, dtype, shape, offset, bytes) of each tensor in the flat bytes
Rows = list[tuple[str, str, list[int], int, int]]


class WeightsServer(ABC):
    """The learner's end. Generators receive `address` as `WeightsSource.address`."""

    address: str

    def on_published(self, label: Label, digest: str) -> None:  # noqa: B027
        """React to a new version in the ring. Servers that read on request ignore it."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving."""


class WeightsClient(ABC):
    """A generator's end. Its methods raise PeerUnreachable when the learner is silent."""

    probe = b""  # published with the version fetched last
    bytes_received = 0  # of weights, over a socket whose speed is reported
    is_broken = False  # another client must be connected to get further versions

    @abstractmethod
    def fetch_layout(self) -> Rows:
        """Fetch the layout of the flat bytes."""

    @abstractmethod
    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Copy version `label` into `into` and return its verified digest.

        digest: "" accepts any version with that label.
        Returns "" when the learner no longer has the version.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


def import_transport(transport: str) -> Any:
    """Import the module that TRANSPORTS names for `weights.transport`.

    It has `serve(config, ring)`, which starts the learner's `WeightsServer`, or returns None if the
    config does not ask for it, and `connect(config, source, name)`, which returns generator `name`
    its `WeightsClient` or raises PeerUnreachable.
    """
    return importlib.import_module(TRANSPORTS[transport])
