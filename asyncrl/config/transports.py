"""Table of the weight transports from the learner to a generator.

To add a transport, write a module in `asyncrl/transport/` with `serve` and `connect` (see
`asyncrl/transport/weight_transport.py`), add an entry here, and add its test.  The entry defines
the values of `weights.transport` and the modules that learner and generators start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

# name -> the module with `serve` and `connect`, imported when a learner or a generator starts
TRANSPORTS: dict[str, str] = {
    "auto": "asyncrl.transport.chunks",  # or the ring, if the generator can map it
    "shared_memory": "asyncrl.transport.chunks",  # also serves chunks if it has an address
    "tcp": "asyncrl.transport.chunks",
    "nccl": "asyncrl.transport.gpu_pairs",
    "gloo": "asyncrl.transport.gpu_pairs",
}

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[tuple(TRANSPORTS)]
