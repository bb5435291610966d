"""The interface of a weight transport: the learner's server, a generator's client.

Under every transport the ring (asyncrl/transport/ring.py) holds the versions, and a server reads
it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Protocol, cast

from asyncrl.config.transports import TRANSPORTS
from asyncrl.config.tree import Config
from asyncrl.contract.messages import WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.transport.ring import Rows, WeightRing


class WeightsServer(ABC):
    """The learner's end. Generators receive `address` as `WeightsSource.address`."""

    address: str

    def on_published(self, label: Label, digest: str) -> None:  # noqa: B027
        """The ring holds version `label` now. Servers that read on request ignore it."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving."""


class WeightsClient(Protocol):
    """A generator's end. Its methods raise PeerUnreachable when the learner is silent."""

    bytes_received: int  # of weights, over a socket
    probe: bytes  # published with the version fetched last

    def manifest(self) -> Rows:
        """Return the layout of the flat bytes."""

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Copy version `label` into `into` and return its verified digest.

        Returns "" when the version is gone. digest "": accept any version with that label.
        """

    def close(self) -> None: ...


class WeightsTransport(Protocol):
    """The module of a transport."""

    def serve(self, config: Config, ring: WeightRing) -> WeightsServer | None:
        """Start the learner's end; None when there is nothing to serve."""

    def connect(self, config: Config, source: WeightsSource, name: str) -> WeightsClient:
        """Connect generator `name`. Raises PeerUnreachable."""


def maker(transport: str) -> WeightsTransport:
    """Import the module that TRANSPORTS names for `weights.transport`."""
    return cast(WeightsTransport, importlib.import_module(TRANSPORTS[transport]))
