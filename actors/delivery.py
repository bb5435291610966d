"""The generator's outbox: samples are packed, sent, and sent again until the buffer says what became of each."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config import Wires
from asyncrl.messages import Acks, Deliver, Trajectory

Key = tuple[int, int, int]  # (ticket, sample, attempt)
LINGER_S = 0.02  # how long a small frame waits for company


def size(sample: Trajectory) -> int:
    """Bytes of one sample on the wire, to a few per cent."""
    return 160 + len(sample.prompt_tokens) + 3 * len(sample.tokens) + len(sample.text) + len(sample.token_rewards)


class Outbox:
    """At most `credit` bytes are unacknowledged; several samples travel in one frame of about `frame_bytes`.

    >>> box = Outbox(Wires(), "generator-0", 1)     # nothing to send: no frames
    >>> list(box.frames(0.0, flush=True)), box.full
    ([], False)
    """

    def __init__(self, wires: Wires, producer: str, session: int) -> None:
        self.frame_bytes, self.retry_s, self.credit = wires.frame_bytes, wires.retry_s, wires.credit_bytes
        self.producer, self.session, self.sequence = producer, session, 0
        self.fresh: list[Trajectory] = []
        self.fresh_since = 0.0
        self.sent: dict[Key, tuple[Trajectory, float]] = {}  # key -> (sample, when it was sent last)
        self.unacked_bytes = 0
        self.acked: dict[str, int] = {}  # disposition -> samples

    @property
    def full(self) -> bool:
        """No credit left: nothing new is asked for until acknowledgements come."""
        return self.unacked_bytes >= self.credit

    @property
    def empty(self) -> bool:
        return not self.fresh and not self.sent

    def add(self, sample: Trajectory) -> None:
        self.fresh.append(sample)

    def on_acks(self, reply: Acks) -> None:
        self.credit = reply.credit
        for ticket, sample, attempt, disposition in reply.acks:
            if (entry := self.sent.pop((ticket, sample, attempt), None)) is not None:
                self.unacked_bytes -= size(entry[0])
                self.acked[disposition] = self.acked.get(disposition, 0) + 1

    def frames(self, now: float, *, flush: bool) -> Iterator[Deliver]:
        """Frames to send now: new samples, and those unanswered for `retry_s`."""
        late = [s for s, at in self.sent.values() if now - at > self.retry_s]
        if self.fresh and not self.fresh_since:
            self.fresh_since = now
        due = flush or now - self.fresh_since > LINGER_S or sum(map(size, self.fresh)) >= self.frame_bytes
        if self.fresh and due and not self.full:
            for s in self.fresh:
                self.unacked_bytes += size(s)
            late, self.fresh, self.fresh_since = late + self.fresh, [], 0.0
        yield from self._packed(late, now)

    def _packed(self, samples: list[Trajectory], now: float) -> Iterator[Deliver]:
        frame: list[Trajectory] = []
        for sample in samples:
            if frame and sum(map(size, frame)) + size(sample) > self.frame_bytes:
                yield self._frame(frame, now)
                frame = []
            frame.append(sample)
        if frame:
            yield self._frame(frame, now)

    def _frame(self, samples: list[Trajectory], now: float) -> Deliver:
        self.sequence += 1
        for s in samples:
            self.sent[s.ticket, s.sample, s.attempt] = (s, now)
        return Deliver(self.producer, self.session, self.sequence, samples)
