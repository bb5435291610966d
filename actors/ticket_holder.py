"""A process that holds tickets: requests, renewals and deliveries, until the run or it ends."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from socket import gethostname

from actors.delivery import Outbox
from actors.schedule import TicketSchedule
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.messages import AttemptTokens
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import ProcessWait
from asyncrl.records.process_log import stop_at_signals
from asyncrl.transport.sockets import BufferPeer

GREET_S = 5.0  # seconds between two hellos: a restarted buffer does not know its generators


class TicketHolder(BufferPeer):
    """A generator or a gateway: a session that requests tickets and delivers samples."""

    def __init__(
        self, config: Config, run_dir: Path, producer: str, slots: int, schedule: TicketSchedule
    ) -> None:
        super().__init__(config, run_dir, producer)
        self.producer = producer
        self.session = time.time_ns()
        self.slots = slots
        self.schedule = schedule
        self.outbox = Outbox(config.wires, producer, self.session)
        self.unread = (0.0, 0.0)  # see `Outbox.on_acks`
        self.wait_cause = ""  # of a wait for a ticket or a call, from the buffer
        self.want_sequence = 0
        self.want_sent = 0.0  # CLOCK_MONOTONIC seconds
        self.requested_samples = 0  # samples of the unanswered ticket request
        self.renewed = self.greeted = 0.0  # CLOCK_MONOTONIC seconds
        self.has_tickets = True  # and not calls, which have their own numbers
        self.ending = False  # this process must end
        self.over = False  # the run is over

    def greet(self) -> None:
        """Identify this session to the buffer."""
        self.greeted = time.monotonic()
        self.request(
            m.GeneratorHello(
                protocol=m.PROTOCOL,
                run=self.run,
                producer=self.producer,
                session=self.session,
                slots=self.slots,
                host=gethostname(),
                pid=os.getpid(),
            )
        )

    def read_replies(self, timeout: float) -> None:
        """Handle the buffer's replies that arrive within `timeout` seconds, and its silence."""
        for reply in self.receive(timeout):
            if isinstance(reply, m.TicketGrant) and reply.session == self.session:
                self.announce(reply.announcement)
                if reply.sequence == self.want_sequence:
                    self.requested_samples = 0
                self.accept_tickets(reply.tickets)
                self.over = self.over or reply.finished
            elif isinstance(reply, m.DeliveryAcks) and reply.session == self.session:
                self.outbox.on_acks(reply, time.monotonic(), self.unread)
                self.announce(reply.announcement)
            elif isinstance(reply, m.HeartbeatReply):
                self.wait_cause = reply.cause
                self.announce(reply.announcement)
                if self.has_tickets:  # those that have not arrived so far are lost
                    self.schedule.refuse_up_to(reply.attempts)
            elif isinstance(reply, m.UnknownSession) and reply.session == self.session:
                self.greet()
        self.judge_silence()

    def on_moved_buffer(self) -> None:
        self.requested_samples = 0
        self.greet()

    def on_finished_run(self) -> None:
        self.over = True

    def announce(self, announcement: m.PolicyAnnouncement | None) -> None:
        """Store the newest weights."""
        self.schedule.announce(announcement)

    @abstractmethod
    def accept_tickets(self, tickets: list[m.Ticket]) -> None:
        """Accept granted tickets."""

    @abstractmethod
    def list_progress(self) -> list[AttemptTokens]:
        """List (ticket, attempt, tokens sampled for it so far)."""

    @abstractmethod
    def list_judging(self) -> list[tuple[int, int]]:
        """List the (ticket, attempt) pairs to renew although no token is sampled for them."""

    @abstractmethod
    def collect_metrics(self) -> dict[str, float]:
        """Collect the metrics that this process reports."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources and, unless the run is over, the buffer's leases."""

    def list_unacknowledged(self) -> set[tuple[int, int]]:
        """List the (ticket, attempt) pairs with sampled and unacknowledged samples."""
        return {(ticket, attempt) for ticket, _, attempt in self.outbox.list_unacked_keys()}

    def make_renewal(self, wait: ProcessWait | None) -> m.LeaseRenewal:
        """Make the message that renews the leases and reports progress."""
        progress = self.list_progress()
        return m.LeaseRenewal(
            producer=self.producer,
            session=self.session,
            progress=progress,
            stats=self.collect_metrics(),
            waiting=wait,
            judging=sorted(self.list_judging()),
            drawn=self.outbox.token_report.on_report(progress),
            written=sorted(self.list_unacknowledged()),
            taken=self.schedule.newest_attempt if self.has_tickets else 0,
        )

    def send_samples(self, *, flush: bool) -> None:
        """Send the queued samples; flush: also those that a frame has room beside."""
        for frame in self.outbox.take_frames(time.monotonic(), flush=flush):
            self.socket.send(frame)

    def has_credit(self) -> bool:
        """Whether samples may be requested, and not only acknowledgements awaited."""
        if self.outbox.is_full:
            self.set_wait("credit: the buffer has not acknowledged what was delivered")
        return not self.outbox.is_full

    def request_tickets(self, samples: int, holding: Label | None) -> None:
        """Request tickets for free slots; repeat a request that has no reply.

        holding: the newest weights loaded."""
        is_late = time.monotonic() - self.want_sent > self.config.wires.retry_s
        if samples > 0 and (samples > self.requested_samples or is_late):
            self.requested_samples = samples
            self.send_ticket_request(samples, holding)

    def send_ticket_request(self, samples: int, holding: Label | None) -> None:
        """Send a ticket request under a new number."""
        self.want_sequence += 1
        self.want_sent = time.monotonic()
        self.socket.send(
            m.TicketRequest(self.producer, self.session, self.want_sequence, samples, holding)
        )

    def renew(self) -> None:
        """Renew the leases every RENEW_S, send a hello every GREET_S, log long waits."""
        now = time.monotonic()
        if now - self.renewed < m.RENEW_S:
            return
        self.renewed = now
        if now - self.greeted > GREET_S:
            self.greet()
        wait = self.current_wait(now)
        logged = wait
        if wait and self.wait_cause and wait.what in (m.TICKET_WAITED_FOR, m.CALL_WAITED_FOR):
            logged = wait._replace(what=f"{wait.what}: {self.wait_cause}")
        self.log_wait(logged)
        self.request(self.make_renewal(wait))

    def renew_now(self) -> None:
        """Send the last report, when this process ends."""
        self.renewed = 0.0
        self.renew()

    def run_until_signal(self, loop: Callable[[], object]) -> bool:
        """Run `loop`, which ends after a turn when `ending` is set, and close.

        Returns True when the run is finished, False when SIGTERM ended this process.
        """

        def stop(_number: int, _frame: object) -> None:
            self.ending = True

        stop_at_signals(stop)
        try:
            loop()
        finally:
            self.close()
        return self.over

    def leave(self) -> None:
        """Disconnect; unless the run is over, end the leases first."""
        if not self.over:
            self.socket.send(m.GeneratorGoodbye(self.producer, self.session))
        self.socket.close()
