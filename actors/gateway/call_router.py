"""Which generator draws which call: the gateway's side of the wire.

A session's calls go to the generator that drew its last one while that has a free row: it may have
kept the keys and values of what the call begins with.  Others go where most room is.

A call is answered once.  A generator that was started anew, or is silent, loses its calls: they are
sent again, to whoever has most room, with the same random stream.  Should the silent one answer
after all, the first answer counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label

LINES = 4096  # generators of a gateway
AHEAD = 1.25  # calls given out, as a multiple of the slots: a row that frees finds one there
REMEMBERED = 16384  # samples of which is known who drew their last call


@dataclass
class ServingGenerator:
    """A generator that serves: its address, and the calls it has with the message they came in."""

    peer: bytes
    session: int
    slots: int
    heard_at: float
    sequence: int = 0
    calls: dict[int, int] = field(default_factory=dict)  # id -> number of the message
    fresh: list[m.GenerationCall] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    told: Label | None = None  # the newest weights it was told of

    @property
    def free_slots(self) -> float:
        return AHEAD * self.slots - len(self.calls)


class CallRouter:
    """Pure: the clock is passed in, and messages come and go by `on_report`, `on_result` and
    `frames`."""

    def __init__(self, run: str, silent_s: float) -> None:
        self.run = run
        self.silent_s = silent_s
        self.lines: dict[str, ServingGenerator] = {}
        self.open: dict[int, m.GenerationCall] = {}
        self.queue: deque[int] = deque()
        self.again = 0  # calls sent again
        # (ticket, sample) -> the generator that drew its last call; the oldest first
        self.drew: dict[tuple[int, int], str] = {}

    def submit(self, call: m.GenerationCall) -> None:
        """A call to be drawn."""
        self.open[call.id] = call
        self.queue.append(call.id)

    def cancel(self, call: int) -> bool:
        """End a call; True when no generator has it, so that no answer will come."""
        for line in self.lines.values():
            if call in line.calls:
                line.cut.append(call)
                return False
        self.open.pop(call, None)
        return True

    def forget(self, call: int) -> m.GenerationCall | None:
        """Nobody waits for it any more; the call, if it was to be drawn."""
        found = self.open.get(call)
        self.cancel(call)
        self.open.pop(call, None)
        return found

    def on_report(self, peer: bytes, message: m.ServingReport, now: float) -> m.Refusal | None:
        """A generator tells of itself; what to answer if it is none of this run's."""
        if message.protocol != m.PROTOCOL or message.run != self.run:
            return m.Refusal(
                f"this gateway is of run {self.run} and speaks protocol {m.PROTOCOL}, "
                f"{message.producer} is of {message.run} with {message.protocol}"
            )
        line = self.lines.get(message.producer)
        if line is None and len(self.lines) >= LINES:
            return m.Refusal(f"{LINES} generators serve, and {message.producer} is one too many", 2)
        if line is None or line.session != message.session:
            if line is not None:
                self._drop_generator(line)
            line = self.lines[message.producer] = ServingGenerator(
                peer, message.session, message.slots, now
            )
        line.peer = peer
        line.slots = message.slots
        line.heard_at = now
        held = set(message.held)
        gone = [x for x, at in line.calls.items() if at <= message.heard and x not in held]
        for call in gone:
            del line.calls[call]
            self._resubmit(call)
        return None

    def on_result(self, message: m.CallResult) -> m.GenerationCall | None:
        """An answer: the call it is of; None for one that was answered before, or forgotten."""
        found = self.open.pop(message.id, None)
        for name, line in self.lines.items():
            if line.calls.pop(message.id, None) is not None and found is not None:
                self.drew.pop((found.ticket, found.sample), None)
                self.drew[found.ticket, found.sample] = name
                if len(self.drew) > REMEMBERED:
                    del self.drew[next(iter(self.drew))]
        return found

    def tick(self, now: float) -> None:
        """Calls of a silent generator are sent again."""
        for name, line in list(self.lines.items()):
            if now - line.heard_at > self.silent_s:
                del self.lines[name]
                self._drop_generator(line)

    def _drop_generator(self, line: ServingGenerator) -> None:
        for call in line.calls:
            self._resubmit(call)

    def _resubmit(self, call: int) -> None:
        if call in self.open:
            self.again += 1
            self.queue.appendleft(call)

    def _choose_generator(self, call: m.GenerationCall | None) -> ServingGenerator | None:
        """Who is to draw a call; None: nobody serves."""
        if call is not None:
            last = self.lines.get(self.drew.get((call.ticket, call.sample), ""))
            if last is not None and len(last.calls) < last.slots:
                return last
        return max(self.lines.values(), key=lambda line: line.free_slots, default=None)

    def frames(
        self, announcement: m.PolicyAnnouncement | None
    ) -> Sequence[tuple[bytes, m.CallAssignments]]:
        """What to send now: each call to its session's generator or to the one with most room,
        announcements to all."""
        while self.queue:
            line = self._choose_generator(self.open.get(self.queue[0]))
            if line is None or line.free_slots <= 0:
                break
            call = self.queue.popleft()
            if call in self.open:
                line.fresh.append(self.open[call])
                line.calls[call] = line.sequence + 1
        out = []
        label = None if announcement is None else announcement.announcement_key
        for line in self.lines.values():
            if not line.fresh and not line.cut and line.told == label:
                continue
            line.sequence += 1
            line.told = label
            message = m.CallAssignments(
                line.session, line.sequence, line.fresh, line.cut, announcement
            )
            line.fresh, line.cut = [], []
            out.append((line.peer, message))
        return out
