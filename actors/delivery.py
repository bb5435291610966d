"""The generator's outbox: pack samples into frames, resend until acknowledged."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from asyncrl.config.tree import WiresConfig
from asyncrl.contract import outcomes
from asyncrl.contract.blobs.images import Blobs
from asyncrl.contract.messages import (
    EVAL_BASE,
    AttemptTokens,
    Delivery,
    DeliveryAcks,
    IntPair,
    Numbers,
    TrainingSequence,
    Trajectory,
)

Key = tuple[int, int, int]  # (ticket, sample, attempt)
LINGER_S = 0.02  # how long a small frame waits for further samples
NO_IMAGES: Blobs = {}
REMEMBERED = 20_000  # attempts whose counts may still grow


def estimate_size(sample: Trajectory) -> int:
    """Estimate the bytes of one sample on the wire, to a few per cent."""
    return (
        160
        + len(sample.text)
        + estimate_arrays_size(sample)
        + sum(map(estimate_arrays_size, sample.rows))
    )


def estimate_arrays_size(sequence: Trajectory | TrainingSequence) -> int:
    """Estimate the bytes of one training sequence."""
    arrays = (
        sequence.prompt_tokens,
        sequence.tokens,
        sequence.behavior_logprobs,
        sequence.mask,
        sequence.token_rewards,
        sequence.support,
        sequence.routed,
    )
    listed = 40 * len(sequence.spans) + 34 * len(sequence.images)
    return 40 + listed + sum(map(len, arrays))


class TokenReport:
    """Count the training tokens reported to the buffer, independently of its ledger.

    The buffer checks its ledger against this count.

    >>> report = TokenReport()
    >>> report.on_report([(0, 1, 5), (1, 2, 3)])
    8
    >>> report.on_delivery(0, 1, 4), report.on_delivery(0, 1, 4)
    (8, 11)
    >>> report.on_report([(1, 2, 7)])
    15
    """

    def __init__(self) -> None:
        self.total = 0
        # (ticket, attempt) -> [reported, delivered]
        self.attempts: OrderedDict[IntPair, list[int]] = OrderedDict()

    def _add(self, ticket: int, attempt: int, reported: int, delivered: int) -> None:
        if ticket < EVAL_BASE:
            count = self.attempts.setdefault((ticket, attempt), [0, 0])
            previous, count[1] = max(count), count[1] + delivered
            count[0] = max(count[0], reported)
            self.total += max(count) - previous
            if len(self.attempts) > REMEMBERED:
                self.attempts.popitem(last=False)

    def restore(self, ticket: int, attempt: int, tokens: int) -> None:
        """Exclude tokens of an attempt that an earlier process has reported."""
        count = self.attempts.setdefault((ticket, attempt), [0, 0])
        count[0] += tokens

    def on_report(self, progress: Iterable[AttemptTokens]) -> int:
        """Count reported (ticket, attempt, tokens); return the sum over all attempts."""
        for ticket, attempt, tokens in progress:
            self._add(ticket, attempt, tokens, 0)
        return self.total

    def on_delivery(self, ticket: int, attempt: int, tokens: int) -> int:
        """Count the tokens of a delivered sample; return the sum over all attempts."""
        self._add(ticket, attempt, 0, tokens)
        return self.total


class UnackedSample(NamedTuple):
    """An unacknowledged sample, and when it was sent (CLOCK_MONOTONIC seconds)."""

    sample: Trajectory
    first_sent: float
    last_sent: float


class Outbox:
    """Samples on their way to the buffer, with at most `credit` unacknowledged bytes.

    Several samples share one frame of about `frame_bytes`.

    >>> box = Outbox(WiresConfig(), "generator-0", 1)     # nothing to send: no frames
    >>> list(box.take_frames(0.0, flush=True)), box.is_full
    ([], False)
    """

    def __init__(self, wires: WiresConfig, producer: str, session: int) -> None:
        self.frame_bytes = wires.frame_bytes
        self.retry_s = wires.retry_s
        self.credit = wires.credit_bytes
        self.producer = producer
        self.session = session
        self.sequence = 0
        self.fresh: list[Trajectory] = []
        self.fresh_since = 0.0
        self.sent: dict[Key, UnackedSample] = {}
        self.images: dict[Key, Blobs] = {}  # of unacknowledged samples
        self.sizes: dict[Key, int] = {}  # estimated bytes of the same samples, with their images
        self.fresh_bytes = self.unacked_bytes = 0
        self.acked = 0  # samples
        self.waited_s = 0.0  # from first send to acknowledgement, summed over samples
        self.token_report = TokenReport()

    @property
    def is_full(self) -> bool:
        """Whether the credit is used up: nothing is requested until acknowledgements come."""
        return self.unacked_bytes >= self.credit

    def list_unacked_keys(self) -> set[Key]:
        """Return the (ticket, sample, attempt) keys of unacknowledged samples."""
        return {sample.key for sample in self.fresh} | self.sent.keys()

    def add(self, sample: Trajectory, images: Blobs = NO_IMAGES) -> None:
        """Queue a sample; a sample that cannot be encoded is queued as failed.

        Otherwise its frame could not be encoded, or would be refused with all its samples.
        images: digest -> blob, of those that the buffer may not have.
        """
        try:
            outcomes.check_sample(sample)
        except ValueError as error:
            sample = outcomes.make_failed_sample(sample, "data", f"it cannot be delivered: {error}")
        key = sample.key
        if sample_images := {name: images[name] for name in sample.all_images if name in images}:
            self.images[key] = sample_images
        self.sizes[key] = estimate_size(sample) + sum(map(len, sample_images.values()))
        self.fresh_bytes += self.sizes[key]
        self.fresh.append(sample)

    def collect_metrics(self) -> Numbers:
        """Return metrics for the buffer, summed since the start."""
        return {"link/acked": float(self.acked), "link/ack_waited_s": self.waited_s}

    def on_acks(
        self, reply: DeliveryAcks, now: float, unread: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Handle acknowledgements that were read at `now`.

        unread: when this process last stopped reading and when it began again. The time between,
        such as a long decode step, does not count as waiting for the link.
        """
        self.credit = reply.credit
        for ticket, sample, attempt, _ in reply.acks:
            key = ticket, sample, attempt
            if (entry := self.sent.pop(key, None)) is not None:
                self.unacked_bytes -= self.sizes.pop(key)
                self.images.pop(key, None)
                busy_s = max(0.0, unread[1] - max(unread[0], entry.first_sent))
                self.waited_s += now - entry.first_sent - busy_s
                self.acked += 1

    def take_frames(self, now: float, *, flush: bool) -> Iterator[Delivery]:
        """Yield the frames to send now.

        They hold the new samples, and those that are unacknowledged for `retry_s`.
        """
        samples = [
            entry.sample for entry in self.sent.values() if now - entry.last_sent > self.retry_s
        ]
        if self.fresh and not self.fresh_since:
            self.fresh_since = now
        is_due = flush or now - self.fresh_since > LINGER_S or self.fresh_bytes >= self.frame_bytes
        if self.fresh and is_due and not self.is_full:
            self.unacked_bytes += self.fresh_bytes
            samples += self.fresh
            self.fresh = []
            self.fresh_since = 0.0
            self.fresh_bytes = 0
        frame: list[Trajectory] = []
        frame_bytes = 0
        for sample in samples:
            size = self.sizes[sample.key]
            if frame and frame_bytes + size > self.frame_bytes:
                yield self._make_frame(frame, now)
                frame = []
                frame_bytes = 0
            frame.append(sample)
            frame_bytes += size
        if frame:
            yield self._make_frame(frame, now)

    def _make_frame(self, samples: list[Trajectory], now: float) -> Delivery:
        self.sequence += 1
        for sample in samples:
            if (earlier := self.sent.get(sample.key)) is None:
                for attempt, tokens in sample.tokens_by_attempt:
                    self.token_report.on_delivery(sample.ticket, attempt, tokens)
            first_sent = now if earlier is None else earlier.first_sent
            self.sent[sample.key] = UnackedSample(sample, first_sent, now)
        images = [self.images.get(sample.key, NO_IMAGES) for sample in samples]
        return Delivery(
            self.producer,
            self.session,
            self.sequence,
            samples,
            self.token_report.total,
            {name: blob for of_sample in images for name, blob in of_sample.items()},
        )
