import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from hostile_messages_kit import greet, honest_hello
from process_kit import ROOT
from trajectory_kit import trajectory

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from asyncrl.transport.sockets import PeerSocket
from buffer.service import BufferService

SMALL = (
    "learner.steps=2",
    "learner.groups=1",
    "learner.group_size=2",
    "staleness.max_lag=0",
    "evaluation.every=0",
    "evaluation.final_prompts=1",
    "evaluation.ood_prompts=0",
    "wires.lease_s=600",  # nothing here comes by time
)


class CountedDict(dict[str, Any]):
    looked = 0

    def __iter__(self) -> Iterator[str]:
        return self._count(super().__iter__())

    def values(self) -> Iterator[Any]:
        return self._count(super().values())

    def items(self) -> Iterator[tuple[str, Any]]:
        return self._count(super().items())

    def _count(self, entries: Iterable[Any]) -> Iterator[Any]:
        for entry in entries:
            self.looked += 1
            yield entry


class Run:
    """A service in a thread, and what ended it."""

    def __init__(self, tmp_path: Path, *sets: str) -> None:
        self.config = load.load(ROOT / "configs" / "demo.toml", [*SMALL, *sets])
        self.dir = tmp_path / "run"
        rundir.ensure("", self.dir)
        self.id, self.error, self.peers = rundir.read_run_id(self.dir), None, []
        self.service = BufferService(self.config, self.dir)
        self.thread = threading.Thread(target=self._loop)
        self.thread.start()

    def _loop(self) -> None:
        try:
            self.service.loop()
        except Exception as e:
            self.error = e

    def peer(self) -> PeerSocket:
        self.peers.append(PeerSocket(rundir.get_buffer_address(self.config, self.dir), run=self.id))
        return self.peers[-1]

    def end(self) -> None:
        if self.service.stop:
            return
        self.service.stop = True
        self.thread.join(600)
        self.service.close()
        for p in self.peers:
            p.close()
        rundir.clean(self.dir)

    def hello(
        self,
        epoch: int,
        number: int = 0,
        origin: int = 0,
        run: str = "",
        protocol: int = m.PROTOCOL,
    ) -> m.LearnerHello:
        source = m.WeightsSource(epoch, "here", "", "tcp://here:1")
        fields = {"epoch": epoch, "label": Label(epoch, number), "digest": f"d{number}"}
        fields |= {"origin": origin, "max_lag": 0, "source": source, "protocol": protocol}
        return honest_hello(run or self.id, **fields)


def ask(peer: PeerSocket, message: m.FromPeer, kind: type[Any]) -> Any:
    peer.send(message)
    return wait(peer, kind)


def wait(peer: PeerSocket, kind: type[Any]) -> Any:
    while (reply := peer.recv(600)) is not None:
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, m.UnknownSession):  # as a generator does
            peer.send(greet(peer.run, reply.producer, reply.session))
    raise AssertionError(f"no {kind.__name__} came")


def join(run: Run, peers: int = 2, max_lag: float = 0) -> list[PeerSocket]:
    """A generator, the learner that the buffer follows, and further peers."""
    joined = [run.peer() for _ in range(peers)]
    ask(joined[1], msgspec.structs.replace(run.hello(1), max_lag=max_lag), m.Welcome)
    return joined


def want(n: int, samples: int = 4) -> m.TicketRequest:
    return m.TicketRequest("generator-0", 1, n, samples, None)


def answers(t: m.Ticket, digest: str = "") -> m.Delivery:
    label = t.exact_version or t.min_version
    spans = [m.VersionSpan(label, digest, 0, 2, label)]
    samples = [
        trajectory((t.ticket, s, t.attempt), (), [0, 0], [0, 0], spans=spans, reward=float(s))
        for s in t.samples
    ]
    return m.Delivery("generator-0", 1, 1, samples)
