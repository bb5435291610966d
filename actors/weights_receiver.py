"""Receive weights: from shared memory on one host, in chunks over tcp, or by NCCL.

A version is copied into a private buffer and verified before the engine sees it. Nothing computes
from the shared mapping.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncrl.config.tree import Config
from asyncrl.contract.errors import PeerUnreachable
from asyncrl.contract.messages import WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.models.policy import build_views, count_flat_bytes, read_flat
from asyncrl.transport import weight_transport
from asyncrl.transport.ring import RingReader

if TYPE_CHECKING:
    from asyncrl.transport.gpu_pairs import PairClient


class PulledWeights(NamedTuple):
    """The weights of one version.

    tensors: name -> view of a private buffer.
    probe: the learner's log-probabilities, to check an engine.
    """

    tensors: dict[str, Any]
    digest: str
    probe: bytes


class WeightsReceiver:
    """A reader of announced versions; `bytes_over_socket` excludes shared memory."""

    def __init__(self, config: Config, reader_id: str) -> None:
        self.config = config
        self.transport = config.weights.transport
        self.reader_id = reader_id
        self.epoch = -1
        self.reader: RingReader | None = None
        self.manifest: Any = None
        self.buffer = np.empty(0, np.uint8)
        self.tensors: dict[str, Any] = {}  # views of `buffer`
        self.client: weight_transport.WeightsClient | None = None
        self.pair: PairClient | None = None
        self.bytes_over_socket = 0
        self.fetch_s = self.fetched_mb = 0.0  # seconds and megabytes over a socket, summed

    def collect_metrics(self) -> dict[str, float]:
        """Return metrics for the buffer, summed since the start."""
        return {"link/fetch_s": self.fetch_s, "link/fetched_mb": self.fetched_mb}

    def is_local(self, source: WeightsSource) -> bool:
        """Whether the shared memory of `source` can be read from this process."""
        if self.transport == "auto":
            return source.host == socket.gethostname() and Path(source.directory).is_dir()
        return self.transport == "shared_memory"

    def pull(self, source: WeightsSource, label: Label, digest: str | None) -> PulledWeights | None:
        """Copy version `label`; return None while it is unavailable.

        Raises PeerUnreachable, and FileNotFoundError when the ring's files are missing.
        """
        if source.epoch != self.epoch:
            self.open(source)
        if self.pair is not None:
            pair = self.pair
            try:
                digest = pair.fetch(label, digest or "")
            except PeerUnreachable:
                self.close()  # the next pull opens a new pair
                raise
            if not digest:
                return None
            return PulledWeights(build_views(pair.flat, pair.layout), digest, pair.probe)
        if self.reader is not None:
            digest = digest or self.reader.list_labels().get(label)
            if digest is None or not self.reader.read(label, digest, self.buffer.data):
                if self.reader.is_replaced():
                    self.close()  # the next pull opens the new ring
                return None
            probe = self.reader.probe
        else:
            assert self.client is not None
            began, bytes_before = time.monotonic(), self.client.bytes_received
            try:
                digest = self.client.fetch(label, digest or "", self.buffer.data)
            finally:
                self.fetch_s += time.monotonic() - began
                self.fetched_mb += (self.client.bytes_received - bytes_before) / 1e6
            self.bytes_over_socket = self.client.bytes_received
            if not digest:
                return None
            probe = self.client.probe
        return PulledWeights(self.tensors, digest, probe)

    def open(self, source: WeightsSource) -> None:
        """Connect to `source` and allocate the buffer for its weights."""
        self.close()
        if self.transport == "nccl" or self.transport == "gloo":
            from asyncrl.transport import gpu_pairs

            self.pair = gpu_pairs.connect(self.config, source, self.reader_id)
            self.epoch = source.epoch
            return
        if self.is_local(source):
            self.reader = RingReader(Path(source.directory), self.reader_id)
            self.manifest = self.reader.manifest
        else:
            self.client = weight_transport.import_transport(self.transport).connect(
                self.config, source, self.reader_id
            )
            self.manifest = self.client.fetch_layout()
        # every pull writes all of it, so its pages are touched once; numpy asks for large pages
        self.buffer = np.empty(count_flat_bytes(self.manifest), np.uint8)
        self.tensors = read_flat(self.buffer.data, self.manifest)
        self.epoch = source.epoch

    def close(self) -> None:
        """Close the connection to the source; the next pull opens another."""
        if self.reader is not None:
            self.reader.close()
        if self.client is not None:
            self.client.close()
        if self.pair is not None:
            self.pair.close()
        self.reader = None
        self.client = None
        self.pair = None
        self.epoch = -1
