"""The gateway process: tickets in, sessions open, calls to the generators, trajectories out.

```
 buffer --Tickets--> waiting --> Episode <-- environments (environment_pool.py)
    ^                              | place     ^ step
    |                              v           |
    +--Deliver-- outbox <-- ended  Call --> generator --> Called   (call_router.py)
```

To the buffer it is a generator whose answers take several calls.  It vouches for the leases of open
sessions, each to its deadline: while a tool runs, no token is drawn."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import socket
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from actors.delivery import Outbox
from actors.gateway.call_router import CallRouter
from actors.gateway.chat import ChatFormat, parser_for
from actors.gateway.environment_pool import EnvironmentPool
from actors.gateway.environment_worker import EnvironmentEvent, EnvironmentOperation
from actors.gateway.sessions import (
    CallRefused,
    Session,
    SessionCall,
    SessionLimits,
    SessionOutcome,
    SessionPlayers,
)
from actors.rewards import RewardRunner
from actors.turn import RENEW_S
from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.errors import (
    AsyncrlError,
    BadMessage,
    ConfigError,
    NothingToDo,
    PeerUnreachable,
)
from asyncrl.contract.printable import escape_line
from asyncrl.contract.waits import BUFFER, OpenSession, ProcessWait, SessionWait, WaitLog
from asyncrl.models.tokenizer import (
    PlainTokenizer,
    encode_prompt,
    has_template,
    load_tokenizer,
    stop_tokens,
    vocabulary,
)
from asyncrl.records.rundir import current_buffer_address, gateway_address, is_finished, run_id
from asyncrl.tasks import get_task
from asyncrl.transport import message_checks, sockets

if TYPE_CHECKING:
    from actors.gateway.session_api import SessionApi

MOST_AT_ONCE = 1000  # messages of generators in a turn: others are waited for too
REFUSALS_SAID = 20  # lines in the log; further ones are only counted
CALLED_BYTES = 128  # of a token of an answer: id, log-probability, a version each
MORE_BYTES = 1 << 20  # of a message that is no answer
POLL_S = 0.05  # a look at the clock with no news
TICK_S = 0.25
HOPELESS = 8  # sessions that failed, and none has ended well
RECENT = 64  # the last sessions that ended, at least
RARE = 0.1  # share of these that ended well, below which the run ends
OLDEST = 8  # tickets of which a session is told
SHOWN = 40  # characters of a prompt, or of tools' names
KEPT_SESSIONS = 200  # whose length counts
# what a session over HTTP waits for, by whether a command or a function plays it
HARNESS = {
    (False, False): "its harness: the next call, or its reward",
    (True, False): "its program (agent.command): the next call, or its end",
    (False, True): "its function (agent.function): the next call, or its end",
}
GREET_S = 5.0
LAST_WORDS = 256  # tickets that are over and still told of: a report may be lost
ENDED_S = 2.0  # of the buffer's silence, before it is looked up whether the run has ended


@dataclass
class GatewayTicket:
    """A ticket that this gateway has taken."""

    ticket: m.Ticket
    waiting: list[int]
    open: set[int] = field(default_factory=set)  # episodes
    tokens: int = 0  # drawn by sessions that are no more
    taken: float = field(default_factory=lambda: time.monotonic())


@dataclass(eq=False)
class Episode:
    """A session and its environment, in which it plays one side or both."""

    number: int
    session: Session
    first: bool
    sides: SessionPlayers
    tools: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)  # reward of each call, by its number
    doing: str = ""  # what its environment was asked for last
    call: SessionCall | None = None
    last: SessionCall | None = None  # the newest of the policy's that was drawn


def limits(config: Config) -> SessionLimits:
    """What a session may use, of a config."""
    agent = config.agent
    return SessionLimits(
        context=config.generator.context,
        max_calls=agent.max_calls,
        max_tokens=agent.max_tokens,
        rows=agent.rows,
        parallel=agent.parallel,
        deadline_s=agent.deadline_s,
        idle_s=agent.idle_s if agent.serve else 0.0,
        grace_s=2 * agent.step_s,
        fork=agent.fork,
    )


def env_seed(config: Config, ticket: m.Ticket) -> int:
    """What an environment is reset with: the same for all samples of a group, which are compared,
    and for an evaluation prompt at every version.
    """
    name = f"{config.seed}:{ticket.ticket}" if ticket.kind == "train" else f"e{ticket.prompt.id}"
    return xxhash.xxh3_64_intdigest(f"env:{name}".encode()) >> 33


class Gateway:
    """One gateway.  `loop` returns when the run is over or it was told to end."""

    def __init__(self, config: Config, run_dir: Path, index: int = 0) -> None:
        self.config = config
        self.run_dir = run_dir
        self.index = index
        self.producer = f"gateway-{index}"
        self.session = time.time_ns()
        self.run = run_id(run_dir)
        self.limits = limits(config)
        self.tokenizer = load_tokenizer(config.model.path)
        self.vocabulary = vocabulary(config.model.path)
        self.stops = stop_tokens(self.tokenizer, config)
        self.chat = ChatFormat(
            self.tokenizer,
            self.stops,
            parser=parser_for(config.agent.parser),
            history=config.agent.history,
            context=config.generator.context,
        )
        self.templated = has_template(config.model.path)
        if config.agent.tools and not self.templated:
            raise AsyncrlError(
                f"agent.tools: the tokenizer in {config.model.path} has no chat template, which "
                "says how a model calls tools; put one there (chat_template.jinja), or use "
                "agent.env"
            )
        self.door: SessionApi | None = None  # where a harness asks, in the place of environments
        self.drive = None if config.agent.http else EnvironmentPool(config.agent)
        judges = bool(config.agent.tools) or config.agent.http
        self.rewards = RewardRunner(config, get_task(config.task), run_dir) if judges else None
        self.judged: dict[tuple[int, int, int], Episode] = {}
        self.outbox = Outbox(config.wires, self.producer, self.session)
        self.socket = sockets.PeerSocket(current_buffer_address(config, run_dir), run=self.run)
        self.socket.find = lambda: current_buffer_address(config, run_dir)
        self.calls_socket = sockets.BufferSocket(
            gateway_address(run_dir, index),
            run=self.run,
            most=CALLED_BYTES * config.generator.context + MORE_BYTES,
            reads=m.FromGenerator,
            key="agent",
        )
        self.refused = Counter[str]()  # messages at calls_socket that were, by reason
        self.calls_socket.refused = self.refuse
        self.board = CallRouter(self.run, config.wires.lease_s)
        self.held: dict[tuple[int, int], GatewayTicket] = {}
        self.episodes: dict[int, Episode] = {}
        self.drawing: dict[int, Episode] = {}  # by the call's id
        self.put_off: dict[
            int, m.GenerationCall
        ] = {}  # of these, calls that wait for their session's ticket
        # (ticket, attempt) of an earlier process, whose sessions wait for the next grant
        self.restored: set[tuple[int, int]] = set()
        # (ticket, attempt) that hold nothing any more -> tokens drawn for them
        self.last_words: OrderedDict[tuple[int, int], int] = OrderedDict()
        # of episodes and calls, given so far: a generator may still be at calls of the gateway's
        # life before, whose answers must not be taken for those of this one
        self.numbers = self.session
        self.announced: m.PolicyAnnouncement | None = None
        self.newest_attempt = 0
        self.want_sequence = self.asked = 0
        self.want_sent = self.renewed = self.greeted = self.ticked = 0.0
        self.unanswered = self.epoch_since = 0.0
        self.ending = self.over = False
        self.ever_served = False
        self.numbered = self.failed = 0  # sessions that began; that failed
        agent = config.agent
        at_once = agent.at_once if agent.command or agent.function else agent.sessions
        # whether each of the last sessions failed: twice as many as those that end at once
        self.recent: deque[bool] = deque(maxlen=max(RECENT, 2 * at_once))
        self.took: deque[float] = deque(maxlen=KEPT_SESSIONS)  # seconds of those that ended well
        self.waiting_for = "the buffer's first answer"
        self.waiting_since = time.monotonic()
        self.wait_log = WaitLog(min(10.0, config.watchdog.floor_s / 2))

    def warm_up(self) -> None:
        """Before anybody waits: import what renders templates, which takes seconds in which no turn
        is made, and have the garbage collector leave alone what was made so far.
        """
        if self.templated and isinstance(self.tokenizer, PlainTokenizer):
            _ = self.tokenizer.full_tokenizer
        gc.collect()
        gc.freeze()

    # ---- the loop --------------------------------------------------------------------------------

    def loop(self) -> None:
        self.greet()
        while True:
            self.wait()
            if self.step():
                break
        self.finish()

    def wait(self) -> None:
        """Until there is news, or a look at the clock is due."""
        descriptors = list(self.drive.descriptors) if self.drive is not None else []
        sockets.wait([self.socket, self.calls_socket], descriptors, POLL_S)

    def step(self) -> bool:
        """Take in the news and act on it; True when it was the last turn."""
        self.read()
        if self.ending or self.over:
            return True
        self.read_calls()
        self.read_environments()
        self.read_rewards()
        self.tick(time.monotonic())
        self.open_sessions()
        self.send_calls()
        for frame in self.outbox.frames(time.monotonic(), flush=True):
            self.socket.send(frame)
        self.want()
        self.renew()
        return False

    def finish(self) -> None:
        """The buffer's last word from here.  Raises NothingToDo for a run that had ended before."""
        if not self.over:
            self.renewed = 0.0
            self.renew()
        elif not self.ever_served:
            raise NothingToDo(
                f"the run in {self.run_dir} has ended, all its {self.config.learner.steps} steps "
                f"are made: {self.producer} came too late"
            )

    def request(self, message: m.FromPeer) -> None:
        self.unanswered = self.unanswered or time.monotonic()
        self.socket.send(message)

    def greet(self) -> None:
        self.greeted = time.monotonic()
        self.request(
            m.GeneratorHello(
                protocol=m.PROTOCOL,
                run=self.run,
                producer=self.producer,
                session=self.session,
                slots=self.config.agent.sessions,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
        )

    def read(self) -> None:
        """What the buffer says.  Raises PeerUnreachable for its silence."""
        while (reply := self.socket.recv(0)) is not None:
            self.unanswered = 0.0
            if isinstance(reply, m.TicketGrant) and reply.session == self.session:
                self.announce(reply.announcement)
                if reply.sequence == self.want_sequence:
                    self.asked = 0
                self.accept_tickets(reply.tickets)
                self.over = self.over or reply.finished
            elif isinstance(reply, m.DeliveryAcks) and reply.session == self.session:
                self.outbox.on_acks(reply, time.monotonic())
                self.announce(reply.announcement)
            elif isinstance(reply, m.HeartbeatReply):
                self.announce(reply.announcement)
                self.newest_attempt = max(self.newest_attempt, reply.attempts)
            elif isinstance(reply, m.Refusal):
                error = AsyncrlError(reply.reason)
                error.exit_code = reply.exit_code
                raise error
        silent = time.monotonic() - self.unanswered if self.unanswered else 0.0
        if self.socket.find_moved_buffer(silent):
            self.unanswered = silent = 0.0
            self.asked = 0
            self.greet()
        if silent > ENDED_S and is_finished(self.run_dir, self.config.learner.steps):
            self.over = True
        elif silent > self.config.wires.connect_s:
            raise PeerUnreachable(
                f"the buffer at {self.socket.address} has not answered for {silent:.0f} s "
                "(wires.connect_s); start it with `asyncrl buffer`"
            )

    def announce(self, said: m.PolicyAnnouncement | None) -> None:
        """Remember the newest weights.  With an epoch the leases of those before it are over: what
        was not begun is forgotten, open sessions wait to be adopted.
        """
        if said is None or (
            self.announced is not None and said.announcement_key <= self.announced.announcement_key
        ):
            return
        if self.announced is None or said.label.epoch > self.announced.label.epoch:
            self.epoch_since = time.monotonic()
        self.announced = said
        for name, held in list(self.held.items()):
            if not self.is_expired(held.ticket):
                continue
            held.waiting = []
            for number in list(held.open):
                episode = self.episodes[number]
                if (
                    held.ticket.kind == "eval"
                    or len(self.parked_episodes()) > self.config.agent.sessions
                ):
                    self.drop(episode)
                else:
                    self.park(episode)
            if not held.open:
                self.close_ticket(name)

    def is_expired(self, ticket: m.Ticket) -> bool:
        """Is the ticket of an epoch that is over, or its lease of an earlier gateway process?"""
        said = self.announced
        if (ticket.ticket, ticket.attempt) in self.restored:
            return True
        return said is not None and ticket.min_version.epoch < said.label.epoch

    def parked_episodes(self) -> list[Episode]:
        """Open sessions whose ticket is over; the next one for their sample adopts them."""
        over = (x for x in self.episodes.values() if self.is_expired(x.session.ticket))
        return [episode for episode in over if episode.session.ticket.kind == "train"]

    def park(self, episode: Episode) -> None:
        """Its calls are not drawn by the weights of the epoch that is over, and not yet by others:
        they wait, under new numbers, as answers to the old ones may be on their way.
        """
        mine = [number for number, each in self.drawing.items() if each is episode]
        for number in mine:
            del self.drawing[number]
            call = self.board.forget(number)
            if call is None:  # it was waiting already
                call = self.put_off.pop(number)
            self.numbers += 1
            self.drawing[self.numbers] = episode
            self.put_off[self.numbers] = msgspec.structs.replace(call, id=self.numbers)
            if self.door is not None:
                self.door.renumber(number, self.numbers)

    # ---- sessions --------------------------------------------------------------------------------

    def accept_tickets(self, tickets: list[m.Ticket]) -> None:
        """Keep those that are new; what is open of their samples goes on under them."""
        for ticket in tickets:
            if ticket.attempt <= self.newest_attempt:
                continue
            self.newest_attempt = ticket.attempt
            new = GatewayTicket(ticket, list(ticket.samples))
            for name, held in list(self.held.items()):
                # of evaluations of two versions, both under way, the tickets have equal numbers
                same = held.ticket.exact_version == ticket.exact_version
                if name[0] == ticket.ticket and same:
                    self.transfer_sessions(held, new)
                    if not held.waiting and not held.open:
                        self.close_ticket(name)
            self.held[ticket.ticket, ticket.attempt] = new

    def transfer_sessions(self, held: GatewayTicket, new: GatewayTicket) -> None:
        """A ticket is granted again: its earlier grant has no sample of the new one any more."""
        held.waiting = [sample for sample in held.waiting if sample not in new.ticket.samples]
        for number in sorted(held.open):
            session = self.episodes[number].session
            if session.sample not in new.waiting:
                continue
            new.waiting.remove(session.sample)
            held.open.discard(number)
            held.tokens += session.current_attempt_tokens
            session.resume_under(new.ticket)
            if self.door is not None:
                self.door.on_resume(session)
            new.open.add(number)
            waiting = [x for x, each in self.drawing.items() if each.number == number]
            for call in waiting:
                if call in self.put_off:
                    self.submit_call(self.put_off.pop(call), new.ticket)

    def submit_call(self, call: m.GenerationCall, ticket: m.Ticket) -> None:
        """Have a call drawn, at or above the minimum of its session's ticket of now."""
        least = ticket.min_version
        self.board.submit(msgspec.structs.replace(call, min_version=least))

    def open_sessions(self) -> None:
        """Open sessions while agent.sessions has room; a harness opens its own."""
        for held in self.waiting_tickets() if self.door is None else ():
            while held.waiting and self.free_sessions > 0:
                self.open(held, held.waiting.pop(0), first=True)
        self.waits_for("" if self.episodes else "a ticket: none may be granted, or all are out")

    @property
    def free_sessions(self) -> int:
        """Sessions that may begin.  Those that wait to be adopted do not count: were they to fill
        all places, no ticket would come that adopts one.
        """
        return self.config.agent.sessions - len(self.episodes) + len(self.parked_episodes())

    def waiting_tickets(self) -> list[GatewayTicket]:
        """Tickets with samples that wait, evaluation first."""
        return sorted(
            (held for held in self.held.values() if held.waiting),
            key=lambda held: (held.ticket.kind == "train", held.ticket.ticket),
        )

    def env_seed(self, ticket: m.Ticket) -> int:
        return env_seed(self.config, ticket)

    def episode(self, held: GatewayTicket, sample: int, *, first: bool) -> Episode:
        """A session, begun."""
        ticket = held.ticket
        self.numbers += 1
        self.numbered += 1
        own = encode_prompt(self.tokenizer, ticket.prompt)
        now = time.monotonic()
        chat = self.chat.with_date(datetime.now())
        session = Session(
            ticket, sample, ticket.attempt, self.limits, chat, own_prompt=own, opened=now
        )
        sides = SessionPlayers(self.templated)
        made = self.episodes[self.numbers] = Episode(self.numbers, session, first, sides)
        held.open.add(self.numbers)
        return made

    def restore(self, session: Session, last: SessionCall | None, *, first: bool) -> Episode:
        """Take over a session of an earlier process. The greeting ends its lease in the buffer, so
        its calls wait for the next grant of its sample. Tokens that were reported count once.
        """
        self.numbers += 1
        self.numbered += 1
        players = SessionPlayers(self.templated)
        episode = Episode(self.numbers, session, first, players, last=last)
        self.episodes[episode.number] = episode
        name = (session.ticket.ticket, session.attempt)
        self.restored.add(name)
        held = self.held.setdefault(name, GatewayTicket(session.ticket, []))
        held.open.add(episode.number)
        reported = max(0, session.current_attempt_tokens - session.tokens + session.reported)
        for attempt, tokens in (*session.adopted, (session.attempt, reported)):
            self.outbox.drawn.restore(session.ticket.ticket, attempt, tokens)
        return episode

    def open(self, held: GatewayTicket, sample: int, *, first: bool) -> None:
        """A session in an environment."""
        assert self.drive is not None
        ticket = held.ticket
        episode = self.episode(held, sample, first=first)
        episode.doing = "the reset of its environment"
        self.drive.reset(
            EnvironmentOperation(
                session=episode.number,
                kind="reset",
                prompt=ticket.prompt,
                seed=env_seed(self.config, ticket),
                attempt=ticket.attempt,
                first=first,
                opponent=self.config.agent.opponent_for(ticket.kind),
            )
        )

    def drop(self, episode: Episode) -> None:
        """The session is no more; what it drew stays counted with its ticket."""
        if self.drive is not None:
            self.drive.end(episode.number)
        if self.door is not None:
            self.door.on_drop(episode)
        for number, drawing in list(self.drawing.items()):
            if drawing is episode:
                self.board.forget(number)
                self.put_off.pop(number, None)
                del self.drawing[number]
        session = episode.session
        self.judged.pop((session.ticket.ticket, session.sample, session.attempt), None)
        del self.episodes[episode.number]
        held = self.held[session.ticket.ticket, session.attempt]
        held.open.discard(episode.number)
        held.tokens += session.current_attempt_tokens

    def restart_episode(self, episode: Episode) -> None:
        """Its environment was lost with another's: the session begins anew."""
        session = episode.session
        self.drop(episode)
        self.open(self.held[session.ticket.ticket, session.attempt], session.sample, first=False)

    def call(self, episode: Episode, obs: Any) -> None:
        """The environment has spoken: ask for an answer, or end at a limit."""
        session = episode.session
        now = time.monotonic()
        try:
            call = episode.sides.now.place_observation(session, obs, episode.tools, now)
        except CallRefused as error:
            # a template that refuses the messages is the environment's fault; a limit is none
            if error.code in ("session_limit", "context_length_exceeded"):
                self.end_at_limit(episode)
            else:
                session.fail(str(error), now)
            return
        episode.call = call
        self.ask(episode, call)

    def ask(self, episode: Episode, call: SessionCall) -> int:
        """Have a call drawn; its number."""
        session = episode.session
        self.numbers += 1
        ticket = session.ticket
        self.drawing[self.numbers] = episode
        asked = m.GenerationCall(
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
        )
        if self.is_expired(ticket):
            self.put_off[asked.id] = asked
        else:
            self.submit_call(asked, ticket)
        return asked.id

    def end_at_limit(self, episode: Episode) -> None:
        """A limit that the policy can cause is an outcome: the reward so far counts."""
        session = episode.session
        now = time.monotonic()
        session.shortened = True
        if self.config.agent.at_limit == "fail":
            session.fail(f"it reached agent.{session.limit or 'context'}", now)
        elif self.rewards is not None:
            self.judge(episode)
        else:
            self.score(episode)

    def score(self, episode: Episode) -> None:
        """The environment's rewards are the session's, unless its time ran out this moment, or they
        add up to what no reward may be: then it has failed.
        """
        session = episode.session
        calls = episode.shares if self.config.agent.fork == "end" else {}
        now = time.monotonic()
        try:
            session.reward(episode.reward, episode.parts, calls, now=now)
        except CallRefused as refused:
            session.fail(f"its environment's rewards cannot be used: {refused}", now)

    def judge(self, episode: Episode) -> None:
        """The config's reward is asked of the last answer, once; not when its time ran out this
        moment.
        """
        with suppress(CallRefused):
            if episode.last is not None and episode.session.judge(time.monotonic()):
                self.submit(episode)

    def submit(self, episode: Episode) -> None:
        """The same for a session that is being judged."""
        session = episode.session
        assert self.rewards is not None
        if episode.last is None:
            session.on_judged(SessionOutcome(0.0, {}, why_untrained(session, self.config.agent)))
            return
        ids = episode.last.node.ids
        assert ids is not None
        key = (session.ticket.ticket, session.sample, session.attempt)
        if key in self.judged:
            return
        self.judged[key] = episode
        self.rewards.submit(key, session.ticket.prompt, self.chat.visible_text(ids), ids)

    # ---- news ------------------------------------------------------------------------------------

    def read_calls(self) -> None:
        """Answers to calls, and generators that tell of themselves."""
        for _ in range(MOST_AT_ONCE):
            if (got := self.calls_socket.recv(0)) is None:
                return
            peer, message = got
            try:
                self.on_generator_message(peer, message)
            except BadMessage as error:
                self.refuse(error.reason, f"refused a {type(message).__name__}: {error}")
                self.calls_socket.send(peer, m.Refusal(str(error), 4))

    def on_generator_message(self, peer: bytes, message: m.ServingReport | m.CallResult) -> None:
        """What a generator says.  Raises BadMessage for what cannot be."""
        if isinstance(message, m.ServingReport):
            message_checks.serving(message)
            self.ever_served = True
            refused = self.board.on_report(peer, message, time.monotonic())
            if refused is not None:
                self.calls_socket.send(peer, refused)
            return
        if (call := self.board.open.get(message.id)) is not None:
            message_checks.check_call_result(message, call, self.vocabulary)
        if self.board.on_result(message) is not None:
            self.on_result(message)

    def refuse(self, reason: str, line: str) -> None:
        """Count it; the first ones stand in the log."""
        self.refused[reason] += 1
        if self.refused.total() <= REFUSALS_SAID:
            print(f"{self.producer}: {escape_line(line)}", file=sys.stderr, flush=True)

    def on_result(self, message: m.CallResult) -> None:
        episode = self.drawing.pop(message.id, None)
        if episode is not None and self.door is not None:
            self.door.on_result(episode, message)
            return
        if episode is None or episode.call is None:
            return
        call, session = episode.call, episode.session
        episode.call = None
        ids = np.frombuffer(message.tokens, "<i4")
        node = session.on_result(
            call,
            ids,
            np.frombuffer(message.logprobs, "<f4"),
            message.spans,
            message.finish,
            past=message.lost,
            now=time.monotonic(),
        )
        if node is not None and not call.aside:
            episode.last = call
        if message.failed:
            session.fail(f"a generator cannot draw its call: {message.failed}", time.monotonic())
        if session.state != "open":
            return
        if node is None or session.limit:
            self.end_at_limit(episode)
            return
        episode.sides.now.on_answer(node)
        assert self.drive is not None
        episode.doing = describe_request(node.answer)
        self.drive.step(
            EnvironmentOperation(
                episode.number, "step", text=self.chat.visible_text(ids), message=node.answer
            )
        )

    def read_environments(self) -> None:
        for happened in self.drive.poll() if self.drive is not None else ():
            episode = self.episodes.get(happened.session)
            if episode is None or episode.session.state != "open":
                continue
            if happened.kind == "lost":
                self.restart_episode(episode)
            elif happened.kind == "failed":
                episode.session.fail(happened.why, time.monotonic())
            else:
                self.on_environment_event(episode, happened)

    def on_environment_event(self, episode: Episode, happened: EnvironmentEvent) -> None:
        episode.tools = happened.tools or episode.tools
        if happened.reward and episode.last is not None:
            episode.reward += happened.reward
            number = episode.last.number
            episode.shares[number] = episode.shares.get(number, 0.0) + happened.reward
        for name, value in happened.parts.items():
            episode.parts[name] = episode.parts.get(name, 0.0) + value
        episode.sides.set_turn(happened.asked)
        if not happened.ended:
            self.call(episode, happened.obs)
            return
        episode.session.shortened |= happened.truncated
        if happened.judge:
            self.judge(episode)
        else:
            self.score(episode)

    def read_rewards(self) -> None:
        if self.rewards is None:
            return
        for result in self.rewards.poll():
            episode = self.judged.pop(result.key, None)
            if episode is not None:
                failed = str(result.failed) if result.failed else ""
                episode.session.on_judged(SessionOutcome(result.reward, result.parts, failed))

    def tick(self, now: float) -> None:
        """Limits of time; what has ended goes out."""
        if now - self.ticked > TICK_S:
            self.ticked = now
            self.board.tick(now)
            for episode in self.episodes.values():
                episode.session.tick(now)
        for episode in list(self.episodes.values()):
            session = episode.session
            while session.cuts:
                self.cancel_call(episode, session.cuts.pop())
            if self.is_expired(session.ticket):
                self.give_up(episode, now)
            elif session.complete:
                self.deliver(episode)

    def give_up(self, episode: Episode, now: float) -> None:
        """A session that nothing adopted up to its deadline, as its group has its sample or is no
        more: what it drew is lost, and told of.
        """
        session = episode.session
        begun = max(session.opened + self.limits.deadline_s, self.epoch_since)
        if now > begun + self.limits.grace_s:
            held = self.held[session.ticket.ticket, session.attempt]
            self.drop(episode)
            if not held.open:
                self.close_ticket((session.ticket.ticket, session.attempt))

    def cancel_call(self, episode: Episode, call: SessionCall) -> None:
        """End a call in the engine; one that no engine has is over now."""
        if self.door is not None:
            asked = self.door.call_of(call)
            if asked is not None and self.drop_call(asked):
                self.on_result(m.CallResult(asked, b"", b"", [], "length"))
            return
        for number, drawing in list(self.drawing.items()):
            if drawing is episode and episode.call is call and self.drop_call(number):
                self.on_result(m.CallResult(number, b"", b"", [], "length"))

    def drop_call(self, number: int) -> bool:
        """End a call; True when no answer will come."""
        return self.put_off.pop(number, None) is not None or self.board.cancel(number)

    def deliver(self, episode: Episode) -> None:
        session = episode.session
        made = trajectory(session, self.tokenizer, self.config.agent)
        self.count(session, made.failed)
        if self.door is not None:
            session.reported = session.tokens
            self.door.on_end(session)
        self.outbox.add(made)
        self.drop(episode)
        name = (session.ticket.ticket, session.attempt)
        held = self.held[name]
        if not held.waiting and not held.open:
            self.close_ticket(name)

    def count(self, session: Session, failed: m.RewardFailure | str) -> None:
        """A session has ended.  Raises ConfigError when none has ended well so far, or hardly any
        of the last ones, and that is the agent's way: they would be written again for ever,
        evaluations above all, which have no budget of failures.  A harness is not ours to judge.
        """
        agent = self.config.agent
        self.recent.append(bool(failed))
        if not failed:
            self.took.append(time.monotonic() - session.opened)
            return
        self.failed += 1
        if self.failed <= REFUSALS_SAID:
            why = escape_line(str(failed))
            print(f"{self.producer}: session {session.name}: {why}", file=sys.stderr, flush=True)
        counted = f"{self.failed} sessions failed, and none has ended well"
        # half of those that began: what fails at once is told before what ends well
        hopeless = not self.took and self.failed >= max(HOPELESS, self.numbered / 2)
        if self.took and len(self.recent) == self.recent.maxlen:
            counted = f"{sum(self.recent)} of the last {len(self.recent)} sessions failed"
            hopeless = sum(self.recent) > (1 - RARE) * len(self.recent)
        if agent.serve or not hopeless:
            return
        hint = "is it the agent, or an answer that it cannot use?  That is worth a reward, say 0"
        if agent.command or agent.function:
            hint = f"what it printed: {self.run_dir / 'agent-0.log'}"
        why = escape_line(str(failed))
        raise ConfigError(f"{agent.source_name}: {counted}; the last one: {why}; {hint}")

    def close_ticket(self, name: tuple[int, int]) -> None:
        """Nothing is written for the ticket any more.  What was drawn for it stays in the next
        reports: sessions that began again have tokens that no sample delivers.
        """
        held = self.held.pop(name)
        self.restored.discard(name)
        if held.tokens:
            self.last_words[name] = held.tokens
        while len(self.last_words) > LAST_WORDS:
            self.last_words.popitem(last=False)

    def send_calls(self) -> None:
        for peer, message in self.board.frames(self.announced):
            self.calls_socket.send(peer, message)

    # ---- the buffer ------------------------------------------------------------------------------

    def want(self) -> None:
        """Ask for as many samples as agent.sessions has room for, and a harness asks for."""
        now = time.monotonic()
        waiting = sum(len(held.waiting) for held in self.held.values())
        asked_for = (
            self.free_sessions if self.door is None else min(self.free_sessions, self.door.asks)
        )
        free = asked_for + (len(self.parked_episodes()) if self.door is not None else 0) - waiting
        if self.outbox.is_full:
            self.waits_for("credit: the buffer has not acknowledged what was delivered")
            return
        due = free > self.asked or (self.asked and now - self.want_sent > self.config.wires.retry_s)
        if free > 0 and due:
            self.want_sequence += 1
            self.want_sent = now
            self.asked = free
            holding = self.announced.label if self.announced is not None else None
            self.socket.send(
                m.TicketRequest(self.producer, self.session, self.want_sequence, free, holding)
            )

    def progress(self) -> list[tuple[int, int, int]]:
        """(ticket, attempt, tokens drawn for it so far): at most what its samples may have, should
        sessions have begun again so often.
        """
        most = self.config.learner.group_size * self.config.agent.max_tokens
        open_now = {
            name: held.tokens
            + sum(self.episodes[x].session.current_attempt_tokens for x in held.open)
            for name, held in self.held.items()
        }
        counts = {**self.last_words, **open_now}
        return [(*name, min(most, tokens)) for name, tokens in counts.items()]

    def renew(self) -> None:
        now = time.monotonic()
        if now - self.renewed < RENEW_S:
            return
        self.renewed = now
        if now - self.greeted > GREET_S:
            self.greet()
        waiting = None
        if self.waiting_for:
            since = now - self.waiting_since
            waiting = ProcessWait(self.producer, self.waiting_for, BUFFER, since)
        for line in self.wait_log.lines([waiting] if waiting else []):
            print(line, file=sys.stderr, flush=True)
        progress = self.progress()
        if self.door is not None:
            self.door.on_report()
        self.request(
            m.LeaseRenewal(
                producer=self.producer,
                session=self.session,
                progress=progress,
                stats=self.stats(),
                waiting=waiting,
                judging=sorted(
                    name for name, held in self.held.items() if not self.is_expired(held.ticket)
                ),
                drawn=self.outbox.drawn.on_report(progress),
                sessions=self.oldest_sessions(now),
                written=sorted(self.outbox.tickets()),
                taken=self.newest_attempt,
            )
        )

    def stats(self) -> dict[str, float]:
        """The gateway's own numbers."""
        out = self.rewards.numbers() if self.rewards is not None else {}
        if self.took:
            ordered = sorted(self.took)
            out[m.SESSION_P95] = ordered[int(0.95 * (len(ordered) - 1))]
        return out

    def oldest_sessions(self, now: float) -> list[OpenSession]:
        """For whoever waits for them: of each of the oldest tickets the session that has waited
        longest for something else than the engine, or a sample that none has begun.
        """
        out = []
        for held in sorted(self.held.values(), key=lambda held: held.ticket.ticket):
            each = [self.session_state(self.episodes[number], now) for number in held.open]
            if held.waiting:
                each.append(self.waiting_sample(held, now))
            if each:  # tickets of evaluations have the highest numbers
                out.append(max(each, key=lambda one: (one.kind != "engine", one.seconds)))
            if len(out) == OLDEST:
                break
        return out

    def waiting_sample(self, held: GatewayTicket, now: float) -> OpenSession:
        """A sample that no session has begun."""
        agent, ticket = self.config.agent, held.ticket
        kind: SessionWait = "place"
        if agent.serve:
            kind, what = "agent", "a harness to lease it (RUN/agent.url, RUN/agent.key)"
        elif agent.http:
            what = f"a place: agent.at_once = {agent.at_once}"
        else:
            what = f"a place: agent.sessions = {agent.sessions}"
        waited = now - held.taken
        sample = held.waiting[0]
        return OpenSession(
            ticket=ticket.ticket,
            sample=sample,
            name="",
            task=task(ticket),
            turn=0,
            kind=kind,
            what=what,
            seconds=waited,
            open_s=waited,
        )

    def session_state(self, episode: Episode, now: float) -> OpenSession:
        """Where an open session stands, and what it waits for."""
        session = episode.session
        limit, at = session.next_deadline()
        since, left = session.call_at, at - now
        kind: SessionWait = "agent"
        what = HARNESS[bool(self.config.agent.command), bool(self.config.agent.function)]
        if self.is_expired(session.ticket):
            kind, what = "grant", "its ticket to be granted again by the new learner"
        elif session.open_calls:
            kind = "engine"
            what = f"an answer of the engine{'' if self.board.lines else ': no generator serves'}"
        elif session.state == "judging":
            kind, what, since, limit = "reward", "the reward of its answer", session.judging_at, ""
        elif self.drive is not None and episode.number in self.drive.places:
            kind, what = "environment", episode.doing
            found = self.drive.locate(episode.number, now)
            if found.left_s <= left or found.front is None:
                limit, left = found.limit, found.left_s
            front = self.episodes.get(found.front) if found.front is not None else None
            if found.front is None:
                what = f"a process to import {self.config.agent.source_name}"
            if self.drive.replaced:
                what += f" ({self.drive.replaced})"
            if found.front is not None and front is not episode:
                name = front.session.name if front is not None else "one that has ended"
                what += f", behind that of session {name} in the same process"
        ends_s = max(0.0, left) if limit else 0.0
        return OpenSession(
            ticket=session.ticket.ticket,
            sample=session.sample,
            name=session.name,
            task=task(session.ticket),
            turn=session.calls,
            kind=kind,
            what=what,
            seconds=max(0.0, now - since),
            open_s=max(0.0, now - session.opened),
            limit=limit if ends_s < math.inf else "",
            ends_s=ends_s if ends_s < math.inf else 0.0,
        )

    def waits_for(self, what: str) -> None:
        if what != self.waiting_for:
            self.waiting_for = what
            self.waiting_since = time.monotonic()

    def close(self) -> None:
        if self.drive is not None:
            self.drive.close()
        if self.rewards is not None:
            self.rewards.close()
        if not self.over:
            self.socket.send(m.GeneratorGoodbye(self.producer, self.session))
        self.socket.close()
        self.calls_socket.close()


def task(ticket: m.Ticket) -> str:
    """Which prompt it is, in a few words."""
    prompt = ticket.prompt
    kind = "evaluation prompt" if ticket.kind == "eval" else "prompt"
    text = prompt.text or next((str(x.get("content", "")) for x in prompt.messages), "")
    return f"{kind} {prompt.id} {text[:SHOWN]!a}{'...' if len(text) > SHOWN else ''}"


def describe_request(answer: dict[str, Any] | None) -> str:
    """What an answer asks of its environment: a step, or tools by their names."""
    calls = (answer or {}).get("tool_calls") or ()
    names = ascii(", ".join(str(call["function"]["name"]) for call in calls)[:SHOWN])[1:-1]
    return f"its tool {names}" if names else "the step of its environment"


def why_untrained(session: Session, agent: AgentConfig) -> str:
    """Why a session that has ended has no token to train."""
    if session.refusals and not any(node.ids is not None for node in session.forest.nodes):
        return f"the session ended without an answer; {session.refusals}"
    if not session.calls:
        return "the session ended without a call: does the agent ask its own base URL?"
    excluded = sum(node.aside and node.ids is not None for node in session.forest.nodes)
    if not excluded or not agent.http:
        return "the session ended before its first answer"
    return (
        f"all {excluded} answered calls of the session are excluded from training: ask for the "
        f"model {agent.model} ($ASYNCRL_MODEL), without metadata asyncrl = aside; or set "
        'agent.other_models = "train"'
    )


def trajectory(session: Session, tokenizer: Any, agent: AgentConfig) -> m.Trajectory:
    """The record of a session that has ended."""
    assert session.outcome is not None
    rows = list(session.training_rows())
    failed: m.RewardFailure | str = ""
    if session.outcome.failed:
        why = session.outcome.failed
        failed = m.RewardFailure("data", f"{why}; {session.refusals}" if session.refusals else why)
    elif not rows:
        failed = m.RewardFailure("data", why_untrained(session, agent))
    first = rows[0] if rows else m.TrainingSequence(b"", b"", b"", b"", [])
    shown = [int(x) for x in np.frombuffer(first.tokens, "<i4")]
    ticket = session.ticket
    return m.Trajectory(
        ticket=ticket.ticket,
        sample=session.sample,
        attempt=session.attempt,
        prompt_tokens=first.prompt_tokens,
        tokens=first.tokens,
        behavior_logprobs=first.behavior_logprobs,
        mask=first.mask,
        spans=first.spans,
        reward=session.outcome.reward,
        reward_parts=dict(session.outcome.parts),
        finish=session.finish,
        temperature=ticket.sampling.temperature,
        text=str(tokenizer.decode(shown)) if shown else "",
        prompt_text=ticket.prompt.text,
        segments=first.segments,
        token_rewards=first.token_rewards,
        generated_at=time.monotonic(),
        failed=failed,  # type: ignore[arg-type]
        rows=rows[1:],
        aside=session.aside,
        calls=session.calls,
        adopted=session.adopted,
    )


def door_of() -> Callable[[Gateway], Coroutine[Any, Any, None]]:
    """What serves a gateway over HTTP.  Raises ConfigError where its libraries are missing."""
    try:
        from actors.gateway import session_api
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"agent: sessions over HTTP need {error.name}, which is not installed: pip install "
            "'asyncrl[agents]'"
        ) from error
    return session_api.serve


def main(config: Config, run_dir: Path, index: int) -> bool:
    """Run gateway `index` until the run is over, or SIGTERM asks for its end (False)."""
    gateway = Gateway(config, run_dir, index)

    def stop(_number: int, _frame: object) -> None:
        gateway.ending = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN if os.environ.get("ASYNCRL_SUPERVISED") else stop)
    gateway.warm_up()
    try:
        if config.agent.http:
            asyncio.run(door_of()(gateway))
        else:
            gateway.loop()
    finally:
        gateway.close()
    return gateway.over
