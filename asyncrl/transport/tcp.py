"""The weight transport in chunks over TCP."""

from __future__ import annotations

from asyncrl.config.tree import Config
from asyncrl.contract.errors import PeerUnreachable
from asyncrl.contract.messages import WeightsSource
from asyncrl.transport.chunks import ChunkClient, ChunkServer, reachable_address
from asyncrl.transport.file_server import FileServer
from asyncrl.transport.ring import WeightRing
from asyncrl.transport.weight_transport import WeightsClient


def serve(config: Config, ring: WeightRing) -> ChunkServer | None:
    """Start the learner's chunk server, if `wires.weights_address` is set."""
    if not config.wires.weights_address:
        return None
    return ChunkServer(
        config.wires.weights_address,
        ring.rows,
        ring.read_part,
        config.wires.curve_dir,
        FileServer(config),
    )


def connect(config: Config, source: WeightsSource, name: str) -> WeightsClient:
    """Connect generator `name` to the learner's chunk server.

    Raises PeerUnreachable when the learner serves no chunks."""
    if not source.address:
        raise PeerUnreachable(
            f"the learner's weights are on host {source.host} in {source.directory}, which this "
            "host cannot read; set wires.weights_address to a tcp address of the learner"
        )
    address = reachable_address(source.address, config.wires.address)
    return ChunkClient(address, config.wires.connect_s, config.wires.curve_dir, name)
