from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hostile_messages_kit import greeting, honest_hello
from service_kit import SMALL

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.records import rundir
from buffer.service import BufferService


class Bench:
    """A service, its learner and a generator, by hand."""

    def __init__(self, at: Path, *sets: str) -> None:
        self.config = load.load("demo", [*SMALL, "learner.groups=30", *sets])
        self.dir = at
        rundir.ensure("", at)
        self.service = BufferService(self.config, at)
        self.replies: list[m.FromBuffer] = []
        self.service.send = lambda peer, message: self.replies.append(message)
        self.service.handle(b"l", honest_hello(self.service.run, vocabulary=50))
        self.service.handle(b"g", greeting(self.service))
        self.drawn = self.wants = 0

    def tickets(self, samples: int) -> list[m.Ticket]:
        self.wants += 1
        self.service.handle(b"g", m.TicketRequest("generator-0", 7, self.wants, samples, None))
        self.service.answer()
        found = [x for x in self.replies if isinstance(x, m.TicketGrant)]
        return [t for reply in found for t in reply.tickets if t.kind == "train"]

    def deliver(self, *samples: m.Trajectory, again: bool = False) -> m.DeliveryAcks | m.Refusal:
        self.drawn += 0 if again else sum(sample.length for sample in samples)
        self.replies.clear()
        message = m.Delivery("generator-0", 7, 1, list(samples), self.drawn)
        self.service.socket.payload = msgspec.msgpack.encode(message)
        self.service.handle(b"g", message)
        (reply,) = self.replies
        assert isinstance(reply, m.DeliveryAcks | m.Refusal)
        return reply

    def close(self) -> None:
        self.service.close()
        rundir.clean(self.dir)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*sets: str) -> Bench:
        made.append(Bench(tmp_path / "run", *sets))
        return made[-1]

    yield make
    for each in made:
        each.close()


def sample(ticket: m.Ticket, number: int, **change: Any) -> m.Trajectory:
    fields: dict[str, Any] = {
        "ticket": ticket.ticket,
        "sample": number,
        "attempt": ticket.attempt,
        "prompt_tokens": b"\3\0\0\0",
        "tokens": b"\4\0\0\0\5\0\0\0",
        "behavior_logprobs": b"\0" * 8,
        "mask": b"\1\1",
        "spans": [m.VersionSpan(ticket.min_version, "", 0, 2, ticket.min_version)],
        "reward": 1.0,
        "reward_parts": {},
        "finish": "stop",
        "temperature": 1.0,
    }
    return m.Trajectory(**fields | change)
