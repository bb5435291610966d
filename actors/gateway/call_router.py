"""The router of calls to generators: the gateway's side of the connection.

A session's call goes to the generator that sampled its previous one while that has a free slot,
because it may still hold the keys and values of the prompt's beginning.  Other calls go to the
generator with the most free slots.

The calls of a generator that was restarted, or has been silent for too long, are assigned again
with the same random stream.  If the silent one answers after all, the first answer counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label

MOST_GENERATORS = 4096  # of a gateway
AHEAD = 1.25  # calls assigned, as a multiple of the slots, so that a freed slot finds one waiting
REMEMBERED = 16384  # samples whose last generator is known


@dataclass
class ServingGenerator:
    """A generator that serves this gateway, with the calls that it has."""

    peer: bytes  # its zmq address
    session: int
    slots: int
    reported_at: float
    sequence: int = 0  # number of the last message to it
    calls: dict[int, int] = field(default_factory=dict)  # call id -> number of its message
    new_calls: list[m.GenerationCall] = field(default_factory=list)  # for the next message
    cut: list[int] = field(default_factory=list)  # calls to cancel with the next message
    announced: Label | None = None  # the newest weights announced to it

    @property
    def free_slots(self) -> float:
        return AHEAD * self.slots - len(self.calls)


class CallRouter:
    """The queue of calls and the generators that sample them.

    Pure: the clock is an argument; `on_report` and `on_result` handle messages, and `take_messages`
    builds them.
    """

    def __init__(self, run: str, silent_s: float) -> None:
        self.run = run
        self.silent_s = silent_s
        self.generators: dict[str, ServingGenerator] = {}
        self.open: dict[int, m.GenerationCall] = {}
        self.queue: deque[int] = deque()
        # (ticket, sample) -> the generator that sampled its last call; the oldest first
        self.last_generator: dict[tuple[int, int], str] = {}

    def submit(self, call: m.GenerationCall) -> None:
        """Queue a call."""
        self.open[call.id] = call
        self.queue.append(call.id)

    def cancel(self, call: int) -> bool:
        """Cancel a call; True when no generator has it, so that no result will come."""
        for generator in self.generators.values():
            if call in generator.calls:
                generator.cut.append(call)
                return False
        self.open.pop(call, None)
        return True

    def forget(self, call: int) -> m.GenerationCall | None:
        """Cancel a call and ignore its result; return the call if it was open."""
        forgotten = self.open.get(call)
        self.cancel(call)
        self.open.pop(call, None)
        return forgotten

    def on_report(self, peer: bytes, message: m.ServingReport, now: float) -> m.Refusal | None:
        """Record a generator's report; return the refusal of one that cannot serve here."""
        if message.protocol != m.PROTOCOL or message.run != self.run:
            return m.Refusal(
                f"this gateway belongs to run {self.run} with protocol {m.PROTOCOL}, "
                f"{message.producer} to run {message.run} with protocol {message.protocol}"
            )
        generator = self.generators.get(message.producer)
        if generator is None and len(self.generators) >= MOST_GENERATORS:
            return m.Refusal(
                f"{message.producer} is refused: this gateway has {MOST_GENERATORS} generators", 2
            )
        if generator is None or generator.session != message.session:
            if generator is not None:
                self._drop_generator(generator)
            generator = self.generators[message.producer] = ServingGenerator(
                peer, message.session, message.slots, now
            )
        generator.peer = peer
        generator.slots = message.slots
        generator.reported_at = now
        held_calls = set(message.held)
        lost_calls = [
            call
            for call, sequence in generator.calls.items()
            if sequence <= message.heard and call not in held_calls
        ]
        for call in lost_calls:
            del generator.calls[call]
            self._resubmit(call)
        return None

    def on_result(self, message: m.CallResult) -> m.GenerationCall | None:
        """Close the call of a result; None if it was answered before, or forgotten."""
        call = self.open.pop(message.id, None)
        for name, generator in self.generators.items():
            if generator.calls.pop(message.id, None) is not None and call is not None:
                self.last_generator.pop((call.ticket, call.sample), None)
                self.last_generator[call.ticket, call.sample] = name
                if len(self.last_generator) > REMEMBERED:
                    del self.last_generator[next(iter(self.last_generator))]
        return call

    def tick(self, now: float) -> None:
        """Drop generators that were silent for too long and assign their calls again."""
        for name, generator in list(self.generators.items()):
            if now - generator.reported_at > self.silent_s:
                del self.generators[name]
                self._drop_generator(generator)

    def _drop_generator(self, generator: ServingGenerator) -> None:
        for call in generator.calls:
            self._resubmit(call)

    def _resubmit(self, call: int) -> None:
        if call in self.open:
            self.queue.appendleft(call)

    def take_messages(
        self,
        announcement: m.PolicyAnnouncement | None,
        get_images: Callable[[m.GenerationCall], Mapping[str, bytes]] = lambda _: {},
    ) -> Sequence[tuple[bytes, m.CallAssignments]]:
        """Build the messages to send now, each with its generator's address.

        get_images: returns the images of a call, digest -> blob
        """
        while self.queue:
            generators = self.generators
            generator = max(generators.values(), key=lambda one: one.free_slots, default=None)
            if (next_call := self.open.get(self.queue[0])) is not None:
                name = self.last_generator.get((next_call.ticket, next_call.sample), "")
                previous = generators.get(name)
                if previous is not None and len(previous.calls) < previous.slots:
                    generator = previous
            if generator is None or generator.free_slots <= 0:
                break
            call = self.queue.popleft()
            if call in self.open:
                generator.new_calls.append(self.open[call])
                generator.calls[call] = generator.sequence + 1
        messages = []
        label = None if announcement is None else announcement.announcement_key
        for generator in self.generators.values():
            if not generator.new_calls and not generator.cut and generator.announced == label:
                continue
            generator.sequence += 1
            generator.announced = label
            message = m.CallAssignments(
                generator.session,
                generator.sequence,
                generator.new_calls,
                generator.cut,
                announcement,
                {
                    name: blob
                    for call in generator.new_calls
                    for name, blob in get_images(call).items()
                },
            )
            generator.new_calls, generator.cut = [], []
            messages.append((generator.peer, message))
        return messages
