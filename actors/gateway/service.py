"""The gateway: tickets in, sessions played, trajectories out.

```
 buffer --Ticket--> waiting --> Session --GenerationCall--> generator   (CallRouter)
    ^                            |  ^  ^                        |
    |                      ended |  |  +-------CallResult-------+
    +--Trajectory-- outbox <-----+  +------> session source     (environments, agents over HTTP)
```

For the buffer, a gateway is a generator with samples of several calls.  It renews the lease of each
open session up to the session's deadline, because no token is sampled while a tool runs.  A
`SessionSource` begins the sessions and uses the answers.
"""

from __future__ import annotations

import math
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from msgspec.structs import asdict, replace

from actors.gateway.call_tree import CallNode
from actors.gateway.chat import ChatFormat, find_parser
from actors.gateway.sessions import Session, SessionLimits, SessionOutcome
from actors.rewards import RewardRunner
from actors.schedule import LeasedTicket, TicketSchedule
from actors.ticket_holder import TicketHolder
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract import outcomes
from asyncrl.contract.blobs.images import index_by_digest
from asyncrl.contract.errors import AsyncrlError, BadMessage, ConfigError
from asyncrl.contract.messages import AttemptTokens, IntPair, Ticket
from asyncrl.contract.printable import escape_line
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import OpenSession, ProcessWait, SessionWait
from asyncrl.models.tokenizer import (
    collect_stop_tokens,
    encode_prompt,
    has_template,
    load_tokenizer,
    read_vocabulary_size,
)
from asyncrl.records.rundir import get_gateway_address
from asyncrl.tasks.evaluation_sets import build_task
from asyncrl.transport import message_checks, sockets

MOST_AT_ONCE = 1000  # generator messages read in one turn, before the other sockets' turn
LOGGED_REFUSALS = 20  # refusals that are logged; further ones are only counted
CALLED_BYTES = 128  # per sampled token of a result: id, log-probability, at most a span each
MORE_BYTES = 1 << 20  # for the rest of a message
POLL_S = 0.05  # longest wait before the clock is read again
TICK_S = 0.25
HOPELESS = 8  # failed sessions that end the run if none has ended well
RECENT = 64  # ended sessions, at least, over which the share of failures is taken
RARE = 0.1  # the run ends when a smaller share of them ended well
OLDEST = 8  # tickets listed in a report, one session each
SHOWN = 40  # characters shown of a prompt
KEPT_SESSIONS = 200  # sessions in the statistic of durations
REPORTED_CLOSED = 256  # closed tickets that are still reported, since a report may be lost


# ---- the calls at the generators -----------------------------------------------------------------


MOST_GENERATORS = 4096  # of a gateway
AHEAD = 1.25  # calls assigned, as a multiple of the slots, so that a freed slot finds one waiting


class RoutedCall(NamedTuple):
    """A call that the generators are to sample, and its session."""

    message: m.GenerationCall
    session: Session
    node: CallNode


class ServingGenerator:
    """A generator that serves this gateway, with the calls that it has."""

    def __init__(self, session: int) -> None:
        self.session = session
        # of its last report: its zmq address, slots and time
        self.peer: bytes
        self.slots: int
        self.reported_at: float
        self.sequence = 0  # number of the last message to it
        self.calls: dict[int, int] = {}  # call id -> number of its message
        self.new_calls: list[RoutedCall] = []  # for the next message
        self.cut: list[int] = []  # calls to cancel with the next message
        self.announced: Label | None = None  # the newest weights announced to it

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
        self.open: dict[int, RoutedCall] = {}
        self.queue: deque[int] = deque()

    def submit(self, call: RoutedCall) -> None:
        """Queue a call."""
        self.open[call.message.id] = call
        self.queue.append(call.message.id)

    def cancel(self, call: int) -> bool:
        """Cancel a call; True when no generator has it, so that no result will come."""
        for generator in self.generators.values():
            if call in generator.calls:
                generator.cut.append(call)
                return False
        self.open.pop(call, None)
        return True

    def forget(self, call: int) -> None:
        """Cancel a call and ignore its result."""
        self.cancel(call)
        self.open.pop(call, None)

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
            generator = self.generators[message.producer] = ServingGenerator(message.session)
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

    def on_result(self, message: m.CallResult) -> RoutedCall | None:
        """Close the call of a result; None if it was answered before, or forgotten."""
        call = self.open.pop(message.id, None)
        for name, generator in self.generators.items():
            if generator.calls.pop(message.id, None) is not None and call is not None:
                call.session.generator = name
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
        self, announcement: m.PolicyAnnouncement | None
    ) -> Sequence[tuple[bytes, m.CallAssignments]]:
        """Build the messages to send now, each with its generator's address."""
        while self.queue:
            generators = self.generators
            generator = max(generators.values(), key=lambda one: one.free_slots, default=None)
            if (next_call := self.open.get(self.queue[0])) is not None:
                previous = generators.get(next_call.session.generator)
                if previous is not None and len(previous.calls) < previous.slots:
                    generator = previous
            if generator is None or generator.free_slots <= 0:
                break
            call = self.queue.popleft()
            if call in self.open:
                generator.new_calls.append(self.open[call])
                generator.calls[call] = generator.sequence + 1
        messages = []
        label = None if announcement is None else announcement.label
        for generator in self.generators.values():
            if not generator.new_calls and not generator.cut and generator.announced == label:
                continue
            generator.sequence += 1
            generator.announced = label
            message = m.CallAssignments(
                generator.session,
                generator.sequence,
                [call.message for call in generator.new_calls],
                generator.cut,
                announcement,
                {
                    name: call.session.images[name]
                    for call in generator.new_calls
                    for name in call.message.images
                },
            )
            generator.new_calls, generator.cut = [], []
            messages.append((generator.peer, message))
        return messages


class WaitCause(NamedTuple):
    """The cause of a session's wait; limit: the key that ends it in `left_s`, or ""."""

    kind: SessionWait
    text: str
    limit: str = ""
    left_s: float = 0.0


class SessionSource(ABC):
    """A source of sessions; the gateway calls its methods from one thread."""

    kind: SessionWait = "environment"  # what its sessions wait for

    @abstractmethod
    def count_wanted(self) -> int:
        """Count the samples that the source has room for, parked sessions included."""

    @abstractmethod
    def on_answer(self, session: Session, call: CallNode, failed: str) -> None:
        """Use the answer to a call.

        call: has no token if it was cut before the first one
        failed: the reason of a generator's refusal, or ""
        """

    @abstractmethod
    def explain_queue(self, part: str) -> WaitCause:
        """Describe the wait of a part's samples that no session has begun."""

    def explain_wait(self, session: Session, limit: str, left_s: float, now: float) -> WaitCause:
        """Describe the wait of an open session without an open call.

        limit, left_s: the session's own limit and the seconds until it
        """
        return WaitCause(self.kind, session.waits_for, limit, left_s)

    # ---- without effect by default ---------------------------------------------------------------

    @property
    def wires(self) -> Sequence[socket.socket]:
        """Sockets that `poll` reads."""
        return ()

    def open_sessions(self) -> None:
        """Begin sessions of waiting samples, in each turn."""

    def poll(self) -> None:
        """Handle the events of environments, in each turn."""

    def on_progress(self, session: Session, ticket: Ticket | None = None) -> None:
        """Record that a session's tokens are reported or sent, or its new ticket."""

    def on_drop(self, session: Session) -> None:
        """Forget a session that was delivered or lost."""

    def close(self) -> None:
        """End the processes that the source has started."""


@dataclass
class SessionTally:
    """The sessions of one agent: counts, and the results of the last ones.

    recent: whether each of the last sessions failed
    durations: seconds, of successful sessions
    """

    recent: deque[bool]
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SESSIONS))
    begun: int = 0
    failed: int = 0

    def describe_failure(self) -> str:
        """Describe the failures of a source that hardly ever works; "" for fewer.

        Failed sessions end sooner than good ones.  Before the first success, at least half of all
        that began have to fail.
        """
        if not self.durations:
            hopeless = self.failed >= max(HOPELESS, self.begun / 2)
            return f"{self.failed} sessions failed, and none has ended well" if hopeless else ""
        hopeless = sum(self.recent) > (1 - RARE) * len(self.recent)
        if len(self.recent) < (self.recent.maxlen or 0) or not hopeless:
            return ""
        return f"{sum(self.recent)} of the last {len(self.recent)} sessions failed"


def build_limits(config: Config, agent: AgentConfig) -> SessionLimits:
    """Build the limits of an agent's session, or of a completion without an agent."""
    return SessionLimits(
        context=config.generator.context,
        max_calls=agent.max_calls if agent.uses_sessions else 1,
        max_tokens=agent.max_tokens,
        rows=agent.rows or outcomes.MOST_ROWS,  # the buffer takes no session with more
        parallel=agent.parallel,
        deadline_s=agent.deadline_s,
        idle_s=agent.idle_s if agent.serve else 0.0,
        grace_s=2 * agent.step_s,
        fork=agent.fork,
    )


def name_agent_log(part: str, index: int) -> str:
    """Name the log of agents that process `index` of a part starts."""
    return f"agent-{part}-{index}.log" if part else f"agent-{index}.log"


def compute_env_seed(config: Config, ticket: m.Ticket) -> int:
    """Compute the seed of an environment's reset.

    All samples of a group get the same one, because they are compared with each other.  An
    evaluation prompt gets the same one at every version.
    """
    name = f"{config.seed}:{ticket.ticket}" if ticket.kind == "train" else f"e{ticket.prompt.id}"
    return xxhash.xxh3_64_intdigest(f"env:{name}".encode()) >> 33


class Gateway(TicketHolder):
    """A gateway process.

    source: makes the source of a part's sessions
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        index: int = 0,
        *,
        source: Callable[[Gateway, str], SessionSource],
    ) -> None:
        schedule = TicketSchedule(drain_first=False)
        super().__init__(config, run_dir, f"gateway-{index}", config.agent.sessions, schedule)
        self.index = index
        self.agents = config.agents
        self.tokenizer = load_tokenizer(config.model.path, renders_chats=True)
        self.vocabulary = read_vocabulary_size(config.model.path)
        # of the model's routers, once a call had experts
        self.routing: m.RoutingShape | None = None
        self.stops = collect_stop_tokens(self.tokenizer, config)
        self.chat = ChatFormat(
            self.tokenizer,
            self.stops,
            parser=find_parser(config.agent.parser),
            history=config.agent.history,
            context=config.generator.context,
        )
        self.templated = has_template(config.model.path)
        if any(agent.tools for agent in self.agents.values()) and not self.templated:
            raise AsyncrlError(
                f"agent.tools: the tokenizer in {config.model.path} has no chat template, so the "
                "model cannot be shown tools; add one there (chat_template.jinja) or use agent.env"
            )
        judges = any(
            agent.tools or agent.http or not agent.uses_sessions for agent in self.agents.values()
        )
        self.rewards = RewardRunner(config, build_task(config), run_dir) if judges else None
        self.calls_socket = sockets.BufferSocket(
            get_gateway_address(config, run_dir, index),
            config.wires.curve_dir,
            run=self.run,
            most=(CALLED_BYTES + config.support_bytes) * config.generator.context + MORE_BYTES,
            reads=m.FromGenerator,
            key="wires.gateway_address",
        )
        self.refused = Counter[str]()  # reason -> messages refused at calls_socket
        self.calls_socket.refused = self.refuse
        self.router = CallRouter(self.run, config.wires.lease_s)
        self.held = self.schedule.held  # live: the numbers of the open sessions
        self.sessions: dict[int, Session] = {}
        # (ticket, sample, an evaluation's version) that a session has begun
        self.begun: set[tuple[int, int, Label | None]] = set()
        # (ticket, attempt) of an earlier process, whose sessions wait for the next grant
        self.restored: set[IntPair] = set()
        # (ticket, attempt) without waiting samples or open sessions -> tokens sampled for it
        self.closed_tokens: OrderedDict[IntPair, int] = OrderedDict()
        # the newest number of a session or call.  It starts at the time, so that a generator's
        # result for a call of an earlier gateway process never matches a call of this one
        self.numbers = self.session
        self.ticked = self.epoch_since = 0.0
        self.ever_served = False
        self.tallies: dict[str, SessionTally] = {}
        for part, agent in self.agents.items():
            at_once = agent.at_once if agent.starts_agents else agent.sessions
            # twice as many sessions as may end at the same time
            self.tallies[part] = SessionTally(deque(maxlen=max(RECENT, 2 * at_once)))
        self.sources: dict[str, SessionSource] = {}  # part -> source; parts may share one
        for part in self.agents:
            self.sources[part] = source(self, part)

    # ---- the loop --------------------------------------------------------------------------------

    def loop(self) -> None:
        """Run turns until the run or this process ends."""
        self.greet()
        while True:
            self.wait()
            if self.step():
                break
        self.finish()

    def wait(self) -> None:
        """Wait until a socket or the source has something to read, at most POLL_S."""
        descriptors = [wire.fileno() for wire in self.wires]
        sockets.wait([self.socket, self.calls_socket], descriptors, POLL_S)

    @property
    def wires(self) -> list[socket.socket]:
        """The sockets that the sources read."""
        return [wire for source in self.list_sources() for wire in source.wires]

    def list_sources(self) -> list[SessionSource]:
        """List each source once."""
        return list(dict.fromkeys(self.sources.values()))

    def step(self) -> bool:
        """Run one turn: read all messages and act on them; True for the last turn."""
        self.read_replies(0.0)
        if self.ending or self.over:
            return True
        self.read_calls()
        for source in self.list_sources():
            source.poll()
        self.read_rewards()
        self.tick(time.monotonic())
        self.open_sessions()
        for peer, message in self.router.take_messages(self.schedule.announced):
            self.calls_socket.send(peer, message)
        self.send_samples(flush=True)
        self.request_samples()
        self.renew()
        return False

    def finish(self) -> None:
        """Send the last report.  Raises NothingToDo if the run had ended before."""
        if not self.over:
            self.renew_now()
        elif not self.ever_served:
            raise self.make_end_error(self.producer)

    def announce(self, announcement: m.PolicyAnnouncement | None) -> None:
        """Record an announcement of newer weights.

        A new epoch ends the leases of earlier ones: waiting samples are forgotten, and open
        sessions are parked until their sample is granted again.
        """
        previous = self.schedule.announced
        if not self.schedule.announce(announcement) or announcement is None:
            return
        if previous is None or announcement.label.epoch > previous.label.epoch:
            self.epoch_since = time.monotonic()
        expired = {name: held for name, held in self.held.items() if self.is_expired(held.ticket)}
        for name, grant in expired.items():
            grant.waiting = []
            for number in list(grant.live):
                session = self.sessions[number]
                if (
                    grant.ticket.kind == "eval"
                    or len(self.list_parked_sessions()) > self.config.agent.sessions
                ):
                    self.drop(session)
                else:  # its calls must not be sampled by the weights of the old epoch
                    self.withdraw_calls(session)
            if not grant.live:
                self.close_ticket(name)

    def is_expired(self, ticket: m.Ticket) -> bool:
        """Whether the ticket belongs to an earlier epoch or to an earlier gateway process."""
        announcement = self.schedule.announced
        if (ticket.ticket, ticket.attempt) in self.restored:
            return True
        return announcement is not None and ticket.min_version.epoch < announcement.label.epoch

    def list_parked_sessions(self) -> list[Session]:
        """List the open training sessions with an expired ticket.

        They resume under a new one.
        """
        return [
            session
            for session in self.sessions.values()
            if session.ticket.kind == "train" and self.is_expired(session.ticket)
        ]

    def withdraw_calls(self, session: Session) -> None:
        """Take the session's calls back from the generators, whose results for them are ignored."""
        for call in session.open_calls.values():
            if call.request:
                self.router.forget(call.request)
                call.request = 0

    # ---- sessions --------------------------------------------------------------------------------

    def accept_tickets(self, tickets: list[m.Ticket]) -> None:
        """Record the new tickets; open sessions of the same samples go on under them."""
        for ticket in self.schedule.add_tickets(tickets):
            new_grant = self.held[ticket.ticket, ticket.attempt]
            for name, grant in list(self.held.items()):
                is_earlier = name[0] == ticket.ticket and name[1] < ticket.attempt
                # two evaluations that run at once use the same ticket numbers
                if is_earlier and grant.exact == ticket.exact_version:
                    self.transfer_sessions(grant, new_grant)
                    if grant.is_used_up:
                        self.close_ticket(name)

    def transfer_sessions(self, grant: LeasedTicket, new_grant: LeasedTicket) -> None:
        """Move the samples and open sessions of a ticket's earlier grant to its new one."""
        grant.waiting = [
            sample for sample in grant.waiting if sample not in new_grant.ticket.samples
        ]
        for number in sorted(grant.live):
            session = self.sessions[number]
            if session.sample not in new_grant.waiting:
                continue
            new_grant.waiting.remove(session.sample)
            grant.live.discard(number)
            grant.tokens += session.current_attempt_tokens
            session.resume_under(new_grant.ticket)
            self.sources[session.part].on_progress(session, session.ticket)
            new_grant.live.add(number)
            for call in session.open_calls.values():
                if not call.request:
                    self.ask(session, call)

    def open_sessions(self) -> None:
        """Have the source begin sessions, and note that this process waits without one."""
        for source in self.list_sources():
            source.open_sessions()
        wait = "" if self.sessions else m.TICKET_WAITED_FOR
        if wait and not self.count_wanted():  # it asks for none
            part, source = next(iter(self.sources.items()))
            wait = source.explain_queue(part).text
        self.set_wait(wait)

    @property
    def free_sessions(self) -> int:
        """The number of sessions that may begin.

        Parked sessions do not count: if they filled all places, this gateway would request no
        ticket, and none of them could resume.
        """
        return self.config.agent.sessions - len(self.sessions) + len(self.list_parked_sessions())

    def get_part(self, ticket: m.Ticket) -> str:
        """Return the part of the mixture that a ticket belongs to; "": the run's agent."""
        return ticket.prompt.task if ticket.prompt.task in self.agents else ""

    def get_source_name(self, part: str) -> str:
        """Return key and value of the source of a part's sessions."""
        name = self.agents[part].source_name
        return f"task.mixture: {part}: {name}" if part else name

    def list_waiting_tickets(self, parts: Collection[str]) -> list[LeasedTicket]:
        """List the tickets of some parts with waiting samples, evaluations first."""
        waiting = self.schedule.sort_waiting()
        return [grant for grant in waiting if self.get_part(grant.ticket) in parts]

    def begin_session(self, grant: LeasedTicket, sample: int) -> Session:
        """Begin a session of a ticket's sample."""
        session = self.make_session(grant.ticket, sample, datetime.now(), time.monotonic())
        self.add_session(session, grant)
        return session

    def add_session(self, session: Session, grant: LeasedTicket) -> None:
        """Add a session under the next number."""
        self.numbers += 1
        ticket = session.ticket
        self.tallies[session.part].begun += 1
        sample = (ticket.ticket, session.sample, ticket.exact_version)
        session.first = sample not in self.begun
        self.begun.add(sample)
        session.number = self.numbers
        self.sessions[session.number] = session
        grant.live.add(session.number)

    def make_session(self, ticket: m.Ticket, sample: int, when: datetime, opened: float) -> Session:
        """Make a session; when: the date for its template, opened: the clock's time."""
        part = self.get_part(ticket)
        return Session(
            ticket,
            sample,
            ticket.attempt,
            build_limits(self.config, self.agents[part]),
            self.chat.with_date(when),
            own_prompt=encode_prompt(self.tokenizer, ticket.prompt),
            opened=opened,
            seed=compute_env_seed(self.config, ticket),
            part=part,
        )

    def restore(self, session: Session) -> None:
        """Continue a session of an earlier gateway process.

        This process's greeting ends the session's lease in the buffer, so that its calls wait for
        the next grant of its sample.  Reported tokens are not reported again.
        """
        name = session.ticket_key
        self.restored.add(name)
        self.add_session(session, self.held.setdefault(name, LeasedTicket(session.ticket, [])))
        reported = max(0, session.current_attempt_tokens - session.tokens + session.reported)
        for attempt, tokens in (*session.adopted, (session.attempt, reported)):
            self.outbox.token_report.restore(session.ticket.ticket, attempt, tokens)

    def drop(self, session: Session) -> None:
        """Remove a session; the tokens that it sampled stay counted with its ticket."""
        self.sources[session.part].on_drop(session)
        del self.sessions[session.number]
        self.withdraw_calls(session)
        grant = self.held[session.ticket_key]
        grant.live.discard(session.number)
        grant.tokens += session.current_attempt_tokens

    def ask(self, session: Session, call: CallNode) -> None:
        """Ask the generators to sample a call, now or when its sample is granted again."""
        ticket = session.ticket
        if self.is_expired(ticket):
            return
        self.numbers += 1
        call.request = self.numbers
        generation_call = m.GenerationCall(
            id=self.numbers,
            ticket=ticket.ticket,
            sample=session.sample,
            kind=ticket.kind,
            prompt=np.ascontiguousarray(call.prompt_ids, "<i4").tobytes(),
            max_new_tokens=call.max_new_tokens,
            sampling=ticket.sampling,
            min_version=ticket.min_version,
            exact_version=ticket.exact_version,
            seed=ticket.seed,
            stream=call.stream_key,
            grammar=call.grammar,
            images=call.list_images(),
        )
        self.router.submit(RoutedCall(generation_call, session, call))

    def submit(self, session: Session) -> None:
        """Submit the last answer of a "judging" session to the reward runner, once."""
        assert self.rewards is not None
        if session.last is None:
            session.on_judged(SessionOutcome(0.0, {}))  # it has failed: see `build_trajectory`
            return
        ids = session.last.ids
        session.submitted = True
        key = (session.number, 0, 0)
        text = self.chat.decode_visible(ids)
        self.rewards.submit(key, session.ticket.prompt, text, ids.tolist())

    # ---- results ---------------------------------------------------------------------------------

    def read_calls(self) -> None:
        """Handle the generators' results and reports."""
        for _ in range(MOST_AT_ONCE):
            if (received := self.calls_socket.recv(0)) is None:
                return
            peer, message = received
            try:
                self.on_generator_message(peer, message)
            except BadMessage as error:
                self.refuse(error.reason, f"refused a {type(message).__name__}: {error}")
                self.calls_socket.send(peer, m.Refusal(str(error), 4))

    def on_generator_message(self, peer: bytes, message: m.ServingReport | m.CallResult) -> None:
        """Handle a generator's message.  Raises BadMessage for impossible content."""
        if isinstance(message, m.ServingReport):
            message_checks.check_producer(message.producer)
            self.ever_served = True
            refused = self.router.on_report(peer, message, time.monotonic())
            if refused is not None:
                self.calls_socket.send(peer, refused)
            return
        if (call := self.router.open.get(message.id)) is not None:
            model = m.ModelShape(self.vocabulary, self.routing, self.chat.image_shape)
            message_checks.check_call_result(message, call.message, model)
        self.on_result(message)

    def refuse(self, reason: str, line: str) -> None:
        """Count a refused message and log the first LOGGED_REFUSALS of them."""
        self.refused[reason] += 1
        if self.refused.total() <= LOGGED_REFUSALS:
            self.log_change(escape_line(line))

    def on_result(self, message: m.CallResult) -> None:
        """Use the result of a call, unless the call was withdrawn."""
        if (call := self.router.on_result(message)) is not None:
            self.end_call(call.session, call.node, message)

    def end_call(self, session: Session, call: CallNode, message: m.CallResult) -> None:
        """Record the tokens of a call in its session and pass the answer to the source."""
        count, routed = len(message.tokens) // 4, None
        if message.routed:
            # the first ones define the shape of the model's routers, which all others must have
            routed = RoutedExperts.decode(message.routed, len(call.prompt_ids) + count - 1)
            self.routing = routed.shape
        session.on_result(
            call,
            np.frombuffer(message.tokens, "<i4"),
            np.frombuffer(message.logprobs, "<f4"),
            message.spans,
            message.finish,
            past=message.lost,
            now=time.monotonic(),
            support=SampledSupport.decode(message.support, count),
            routed=routed,
        )
        if call.is_answered and not call.aside:
            session.last = call
        self.sources[session.part].on_answer(session, call, message.failed)

    def read_rewards(self) -> None:
        """End the sessions whose rewards are ready."""
        for result in self.rewards.poll() if self.rewards is not None else ():
            if (session := self.sessions.get(result.key[0])) is not None:
                failed = str(result.failed) if result.failed else ""
                session.on_judged(SessionOutcome(result.reward, result.parts, failed))

    def tick(self, now: float) -> None:
        """Apply time limits, cancel cut calls, and deliver the sessions that ended."""
        if now - self.ticked > TICK_S:
            self.ticked = now
            self.router.tick(now)
            for session in self.sessions.values():
                session.tick(now)
        for session in list(self.sessions.values()):
            while session.cuts:  # without an engine a call ends now, without tokens
                call = session.cuts.pop()
                if call.number not in session.open_calls:
                    continue
                if not call.request or self.router.cancel(call.request):
                    self.end_call(session, call, m.CallResult(0, b"", b"", [], "length"))
            if session.state == "judging" and not session.submitted:
                self.submit(session)
            if self.is_expired(session.ticket):
                # no ticket resumes a session whose group has its samples, or was dropped
                deadline = max(session.opened + session.limits.deadline_s, self.epoch_since)
                if now > deadline + session.limits.grace_s:
                    grant = self.held[session.ticket_key]
                    self.drop(session)
                    if not grant.live:
                        self.close_ticket(session.ticket_key)
            elif session.is_complete:
                self.deliver(session)

    def deliver(self, session: Session) -> None:
        """Queue the trajectory of a session that has ended, and forget the session."""
        delivered = build_trajectory(session, self.tokenizer, self.agents[session.part])
        self.count(session, delivered.failed)
        session.reported = session.tokens
        self.sources[session.part].on_progress(session)
        prompt = index_by_digest(session.ticket.prompt.images)  # which the buffer has
        self.outbox.add(delivered, {k: x for k, x in session.images.items() if k not in prompt})
        self.drop(session)
        name = session.ticket_key
        if self.held[name].is_used_up:
            self.close_ticket(name)

    def count(self, session: Session, failed: m.RewardFailure | str) -> None:
        """Count a session that ended.

        Raises ConfigError when none of its agent's sessions has ended well so far, or hardly any of
        the last ones.  The buffer would otherwise grant their samples again without end, above all
        those of evaluations, which have no budget of failures.  Sessions of an external harness
        (agent.serve) and single completions are only counted.
        """
        part = session.part
        agent, tally = self.agents[part], self.tallies[part]
        tally.recent.append(bool(failed))
        if not failed:
            tally.durations.append(time.monotonic() - session.opened)
            return
        tally.failed += 1
        reason = escape_line(str(failed))
        task = f" of task {part}" if part else ""
        if tally.failed <= LOGGED_REFUSALS:
            self.log_change(f"session {session.name}{task}: {reason}")
        if agent.serve or not agent.uses_sessions or not (counts := tally.describe_failure()):
            return
        hint = "if it cannot use the model's answer, let it give a reward, such as 0"
        if agent.starts_agents:
            hint = f"its output is in {self.run_dir / name_agent_log(part, 0)}"
        raise ConfigError(f"{self.get_source_name(part)}: {counts}; the last one: {reason}; {hint}")

    def close_ticket(self, name: IntPair) -> None:
        """Forget a ticket without waiting samples and open sessions.

        Its tokens stay in the next reports, because no sample delivers those of restarted sessions.
        """
        grant = self.held.pop(name)
        self.restored.discard(name)
        if grant.tokens:
            self.closed_tokens[name] = grant.tokens
        while len(self.closed_tokens) > REPORTED_CLOSED:
            self.closed_tokens.popitem(last=False)

    # ---- the buffer ------------------------------------------------------------------------------

    def request_samples(self) -> None:
        """Request as many samples as the sources have room for."""
        announced = self.schedule.announced
        if self.has_credit():
            self.request_tickets(self.count_wanted(), announced.label if announced else None)

    def count_wanted(self) -> int:
        """Count the samples that find room besides those that wait.

        A part with busy agents over HTTP does not keep the others from new samples.
        """
        room = {self.agents[part].http: x.count_wanted() for part, x in self.sources.items()}
        for grant in self.held.values():
            room[self.agents[self.get_part(grant.ticket)].http] -= len(grant.waiting)
        return sum(max(0, samples) for samples in room.values())

    def list_progress(self) -> list[AttemptTokens]:
        """List (ticket, attempt, tokens sampled for it so far).

        The count is capped at the limit of the ticket's samples, which sessions that begin anew
        often can exceed.
        """
        longest = max(agent.max_tokens for agent in self.agents.values())
        token_cap = self.config.learner.group_size * longest
        open_counts = {
            name: grant.tokens + sum(self.sessions[x].current_attempt_tokens for x in grant.live)
            for name, grant in self.held.items()
        }
        counts = {**self.closed_tokens, **open_counts}
        return [(*name, min(token_cap, tokens)) for name, tokens in counts.items()]

    def make_renewal(self, wait: ProcessWait | None) -> m.LeaseRenewal:
        for session in self.sessions.values():
            if session.reported != session.tokens:
                session.reported = session.tokens
                self.sources[session.part].on_progress(session)
        oldest_sessions = self.list_oldest_sessions(time.monotonic())
        return replace(super().make_renewal(wait), sessions=oldest_sessions)

    def list_judging(self) -> list[IntPair]:
        return [name for name, grant in self.held.items() if not self.is_expired(grant.ticket)]

    def collect_metrics(self) -> dict[str, float]:
        metrics = self.rewards.collect_metrics() if self.rewards is not None else {}
        if ordered := sorted(took for tally in self.tallies.values() for took in tally.durations):
            metrics[m.SESSION_P95] = ordered[int(0.95 * (len(ordered) - 1))]
        return metrics

    def list_oldest_sessions(self, now: float) -> list[OpenSession]:
        """List one session of each of the OLDEST oldest tickets, for the run's status.

        It is the one that has waited longest, a sample without a session included.  Sessions that
        wait for the engine come last.
        """
        sessions = []
        for grant in sorted(self.held.values(), key=lambda grant: grant.ticket.ticket):
            states = [self.describe_session(self.sessions[number], now) for number in grant.live]
            if grant.waiting:  # a sample without a session
                ticket, waited = grant.ticket, now - grant.granted_at
                part = self.get_part(ticket)
                cause = self.sources[part].explain_queue(part)
                state = OpenSession(
                    ticket=ticket.ticket,
                    sample=grant.waiting[0],
                    name="",
                    task=describe_prompt(ticket),
                    turn=0,
                    kind=cause.kind,
                    what=cause.text,
                    seconds=waited,
                    open_s=waited,
                )
                states.append(state)
            if states:  # tickets of evaluations have the highest numbers
                sessions.append(max(states, key=lambda one: (one.kind != "engine", one.seconds)))
            if len(sessions) == OLDEST:
                break
        return sessions

    def describe_session(self, session: Session, now: float) -> OpenSession:
        """Describe the wait of an open session, and the limit that ends it."""
        limit, deadline = session.next_deadline()
        since, left_s = session.call_at, deadline - now
        if self.is_expired(session.ticket):
            text = "its ticket to be granted again by the new learner"
            cause = WaitCause("grant", text, limit, left_s)
        elif session.open_calls:
            missing = "" if self.router.generators else ": no generator serves"
            cause = WaitCause("engine", f"an answer of the engine{missing}", limit, left_s)
        elif session.state == "judging":
            since, cause = session.judging_at, WaitCause("reward", "the reward of its answer")
        else:
            cause = self.sources[session.part].explain_wait(session, limit, left_s, now)
        ends_s = max(0.0, cause.left_s) if cause.limit else 0.0
        return OpenSession(
            ticket=session.ticket.ticket,
            sample=session.sample,
            name=session.name,
            task=describe_prompt(session.ticket),
            turn=session.calls,
            kind=cause.kind,
            what=cause.text,
            seconds=max(0.0, now - since),
            open_s=max(0.0, now - session.opened),
            limit=cause.limit if ends_s < math.inf else "",
            ends_s=ends_s if ends_s < math.inf else 0.0,
        )

    def close(self) -> None:
        for source in self.list_sources():
            source.close()
        if self.rewards is not None:
            self.rewards.close()
        self.leave()
        self.calls_socket.close()


def describe_prompt(ticket: m.Ticket) -> str:
    """Describe a ticket's prompt in one short line."""
    prompt = ticket.prompt
    kind = "evaluation prompt" if ticket.kind == "eval" else "prompt"
    text = prompt.text or next((str(x.get("content", "")) for x in prompt.messages), "")
    return f"{kind} {prompt.id} {text[:SHOWN]!a}{'...' if len(text) > SHOWN else ''}"


def explain_untrained(session: Session, agent: AgentConfig) -> str:
    """Explain the lack of tokens to train on of a session that has ended."""
    if session.refusals and not any(node.is_answered for node in session.tree.nodes):
        return f"the session ended without an answer; {session.refusals}"
    if not session.calls:
        return "the session ended without a call: does the agent use its own base URL?"
    excluded = sum(node.aside and node.is_answered for node in session.tree.nodes)
    if not excluded or not agent.http:
        return "the session ended before its first answer"
    return (
        f"all {excluded} answered calls of the session are excluded from training: ask for the "
        f"model {agent.model} ($ASYNCRL_MODEL), without metadata asyncrl = aside; or set "
        'agent.other_models = "train"'
    )


def build_trajectory(session: Session, tokenizer: Any, agent: AgentConfig) -> m.Trajectory:
    """Build the trajectory of a session that has ended."""
    assert session.outcome is not None
    rows = list(session.build_training_rows())
    failed: m.RewardFailure | str = ""
    if session.outcome.failed:
        reason = session.outcome.failed
        reason = f"{reason}; {session.refusals}" if session.refusals else reason
        failed = m.RewardFailure("data", reason)
    elif not rows:
        failed = m.RewardFailure("data", explain_untrained(session, agent))
    first = rows[0] if rows else m.TrainingSequence(b"", b"", b"", b"", [])
    shown = [int(x) for x in np.frombuffer(first.tokens, "<i4")]
    ticket = session.ticket
    return m.Trajectory(
        ticket=ticket.ticket,
        sample=session.sample,
        attempt=session.attempt,
        **asdict(first),
        reward=session.outcome.reward,
        reward_parts=dict(session.outcome.parts),
        finish=session.finish,
        temperature=ticket.sampling.temperature,
        text=str(tokenizer.decode(shown)) if shown else "",
        prompt_text=ticket.prompt.text,
        generated_at=time.monotonic(),
        failed=failed,  # type: ignore[arg-type]
        rows=rows[1:],
        aside=session.aside,
        calls=session.calls,
        adopted=session.adopted,
    )
