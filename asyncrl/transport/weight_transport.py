"""The interface of a weight transport: the learner's server, a generator's client.

Under every transport the ring (asyncrl/transport/ring.py) holds the versions, and a server reads
it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any, Protocol

from asyncrl.config.transports import TRANSPORTS
from asyncrl.contract.versions import Label
from asyncrl.transport.ring import Rows


class WeightsServer(ABC):
    """The learner's end. Generators receive `address` as `WeightsSource.address`."""

    address: str

    def on_published(self, label: Label, digest: str) -> None:  # noqa: B027
        """React to a new version in the ring. Servers that read on request ignore it."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving."""


class WeightsClient(Protocol):
    """A generator's end. Its methods raise PeerUnreachable when the learner is silent."""

    probe: bytes  # published with the version fetched last

    @property
    def bytes_received(self) -> int:
        """Bytes of weights over a socket whose speed is reported."""

    @property
    def is_broken(self) -> bool:
        """Whether another client must be connected to get further versions."""

    def fetch_layout(self) -> Rows:
        """Fetch the layout of the flat bytes."""

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Copy version `label` into `into` and return its verified digest.

        digest: "" accepts any version with that label.
        Returns "" when the learner no longer has the version.
        """

    def close(self) -> None:
        """Disconnect."""


def import_transport(transport: str) -> Any:
    """Import the module that TRANSPORTS names for `weights.transport`.

    It has `serve(config, ring)`, which starts the learner's `WeightsServer`, or returns None if the
    config does not ask for it, and `connect(config, source, name)`, which returns generator `name`
    its `WeightsClient` or raises PeerUnreachable.
    """
    return importlib.import_module(TRANSPORTS[transport])
