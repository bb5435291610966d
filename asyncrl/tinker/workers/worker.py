"""Main program of the training and sampling processes: `worker.py ROLE CONFIG DESCRIPTOR`."""

from __future__ import annotations

import select
import signal
import socket
import sys
from pathlib import Path

import msgspec

from asyncrl.contract.importing import pause_collection
from asyncrl.tinker import settings
from asyncrl.tinker.messages import Cancel, SampleCall, WorkerCall, WorkerReply
from asyncrl.transport.worker_pool import READ_BYTES

LENGTH_BYTES = 8


def encode_frame(message: object) -> bytes:
    """Encode a message, prefixed by its length."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class CallChannel:
    """The worker's end of the socket pair."""

    def __init__(self, descriptor: int) -> None:
        self.wire = socket.socket(fileno=descriptor)
        self.incoming = bytearray()
        self.decoder = msgspec.msgpack.Decoder(WorkerCall)

    def receive_calls(self, *, wait: bool) -> list[WorkerCall]:
        """Return the calls that have arrived; wait for at least one if `wait`.

        Exit the process when the server's end is closed."""
        calls: list[WorkerCall] = []
        while (wait and not calls) or select.select([self.wire], [], [], 0)[0]:
            data = self.wire.recv(READ_BYTES)
            if not data:
                sys.exit(0)
            self.incoming += data
            while len(self.incoming) >= LENGTH_BYTES:
                end = LENGTH_BYTES + int.from_bytes(self.incoming[:LENGTH_BYTES], "big")
                if len(self.incoming) < end:
                    break
                calls.append(self.decoder.decode(self.incoming[LENGTH_BYTES:end]))
                del self.incoming[:end]
        return calls

    def reply(self, reply: WorkerReply) -> None:
        self.wire.sendall(encode_frame(reply))


def train(config: settings.TinkerConfig, channel: CallChannel) -> None:
    """Carry out the training calls in order."""
    with pause_collection():
        from asyncrl.tinker.workers.trainer import ServedModels
    trainer = ServedModels(config)
    while True:
        for call in channel.receive_calls(wait=True):
            channel.reply(WorkerReply(call.number, trainer.handle(call.request)))


def sample(config: settings.TinkerConfig, channel: CallChannel) -> None:
    """Carry out all sampling calls at the same time."""
    with pause_collection():
        from asyncrl.tinker.workers.sampler import Sampler
    sampler = Sampler(config, lambda number, result: channel.reply(WorkerReply(number, result)))
    while True:
        for call in channel.receive_calls(wait=not sampler.is_busy):
            if isinstance(call.request, Cancel):
                sampler.cancel(call.request.number)
            else:
                assert isinstance(call.request, SampleCall)
                sampler.add(call.number, call.request)
        sampler.work()


ROLES = {"training": train, "sampling": sample}


def main(role: str, config: str, descriptor: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server closes the socket when it stops
    ROLES[role](settings.read(str(Path(config))), CallChannel(int(descriptor)))


if __name__ == "__main__":
    main(*sys.argv[1:])
