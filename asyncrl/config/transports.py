"""The ways of the weights from the learner to a generator, a row each.

A new one is a module in `asyncrl/transport/` with `serve` and `connect`, as
`asyncrl/transport/weight_transport.py` says; a row here; and its test.  From the row follow
`weights.transport`
and its schema, what the learner serves, and what a generator asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

# name -> the module that serves and connects; imported when a learner or a generator starts
TRANSPORTS: dict[str, str] = {
    "auto": "asyncrl.transport.chunks",  # and the ring itself, where the generator can map it
    "shared_memory": "asyncrl.transport.chunks",  # serves too, when it has an address
    "tcp": "asyncrl.transport.chunks",
    "nccl": "asyncrl.transport.gpu_pairs",
    "gloo": "asyncrl.transport.gpu_pairs",
}

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[tuple(TRANSPORTS)]
