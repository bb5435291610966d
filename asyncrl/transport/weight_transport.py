"""What every way of the weights is made of: a server at the learner, a client at a generator, and
the module that makes them.

The ring (asyncrl/transport/ring.py) holds the versions whatever the way; a server reads it."""

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
    """The learner's end.  `address` goes to the generators as `WeightsSource.address`."""

    address: str

    def on_published(self, label: Label, digest: str) -> None:  # noqa: B027
        """The ring holds version `label` now.  Nothing to do for who reads the ring when asked."""

    @abstractmethod
    def close(self) -> None:
        """No generator is served from here on."""


class WeightsClient(Protocol):
    """A generator's end.  Its methods raise PeerUnreachable when the learner does not answer."""

    bytes_received: int  # of weights, over a socket
    probe: bytes  # what the learner published with the version fetched last

    def manifest(self) -> Rows:
        """The layout of the flat bytes."""

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Copy version `label` into `into`; returns its digest, verified over the whole, or "" when
        it is gone.  digest "": whatever carries the label.
        """

    def close(self) -> None: ...


class WeightsTransport(Protocol):
    """The module of a way."""

    def serve(self, config: Config, ring: WeightRing) -> WeightsServer | None:
        """The learner's end; None when nobody is to be served."""

    def connect(self, config: Config, source: WeightsSource, name: str) -> WeightsClient:
        """The end of generator `name`.  Raises PeerUnreachable."""


def maker(transport: str) -> WeightsTransport:
    """The module that TRANSPORTS names for `weights.transport`."""
    return cast(WeightsTransport, importlib.import_module(TRANSPORTS[transport]))
