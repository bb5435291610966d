"""Random schedules of sessions: the real gateway, sessions, switchboard and outbox on the real
store, with a synthetic clock and without sockets; environments, engines and faults are drawn.

    python tests/support/session_schedules.py 10000        that many, their counts printed
    python tests/support/session_schedules.py 2000 RULE    with a rule off: the seeds that notice

Every token that an engine draws has a number of its own, which its log-probability carries: what
is trained is compared with what was drawn, draw by draw.  Lags are reckoned as in schedules.py."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
from schedules import LEASE_S, Broken, World, need

from actors import schedule as ticket_schedule
from actors import ticket_holder
from actors.gateway import call_tree, environment_sessions, service
from actors.gateway.call_tree import CallNode
from actors.gateway.environment_pool import EnvironmentPlace
from actors.gateway.environment_worker import EnvironmentEvent, EnvironmentOperation
from actors.gateway.sessions import Session, SessionPlayer
from actors.schedule import LeasedTicket
from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.models.policy import build_model
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.transport import sockets
from buffer import checks
from buffer.store import Store

SYMBOLS = "abcdefgh0123456789="
STOP = 1  # token id
CALL_TOKENS, SESSION_TOKENS, CONTEXT = 6, 40, 96
STEP = 1024.0  # draw number n has the log-probability -n / STEP
QUIET = 400  # looks at the clock in a row with no news: nothing moves any more


def prompt(index: int) -> m.Prompt:
    return m.Prompt(index, "ab=")


def numbers_of(row: m.TrainingSequence) -> Iterator[tuple[int, Label]]:
    """(draw, label of its span) of what is trained in the row."""
    logprobs = np.frombuffer(row.behavior_logprobs, "<f4")
    for span in row.spans:
        for at in range(span.start, span.end):
            yield round(-float(logprobs[at]) * STEP), span.label


class Wire:
    """A socket's end: what was sent, and what is to be received."""

    address = "nowhere"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sent: deque[Any] = deque()
        self.replies: deque[Any] = deque()

    def send(self, *message: Any) -> None:
        self.sent.append(message[-1] if len(message) == 1 else message)

    def recv(self, timeout: float) -> Any:
        return self.replies.popleft() if self.replies else None

    def find_moved_buffer(self, silent: float) -> bool:
        return False

    def close(self) -> None:
        pass


class Drive:
    """Environments whose operations take as long as the schedule has them take."""

    def __init__(self, _: Any, *, judged: bool = False, name: str = "") -> None:
        self.wires: list[Any] = []
        self.open: dict[int, EnvironmentOperation] = {}  # session -> what it is at
        self.processes: set[int] = set()
        self.happened: list[EnvironmentEvent] = []
        self.replaced = ""

    def locate(self, session: int, _: float) -> EnvironmentPlace:
        return EnvironmentPlace(session, "", math.inf)

    def reset(self, op: EnvironmentOperation) -> None:
        self.processes.add(op.session)
        self.open[op.session] = op

    def step(self, op: EnvironmentOperation) -> None:
        need(op.session in self.processes, f"a step of session {op.session} without an environment")
        self.open[op.session] = op

    def end(self, session: int) -> None:
        self.processes.discard(session)
        self.open.pop(session, None)

    def poll(self) -> list[EnvironmentEvent]:
        out = [x for x in self.happened if x.session in self.processes]
        self.happened = []
        return out

    def close(self) -> None:
        pass


class Gateway(service.Gateway):
    """The gateway, with a list of what each session was answered."""

    world: SessionWorld
    answered: dict[Session, list[int]]

    def on_result(self, message: m.CallResult) -> None:
        if (placed := self.router.open.get(message.id)) is not None:
            session = placed.session
            mine = [round(-float(x) * STEP) for x in np.frombuffer(message.logprobs, "<f4")]
            self.world.answered += len(mine) + message.lost
            for number in mine:
                drawn_for = self.world.draws[number][1]
                key = (session.ticket.ticket, session.sample)
                need(drawn_for == key, f"draw {number} of {drawn_for} came to {key}")
            self.answered.setdefault(session, []).extend(mine)
        super().on_result(message)

    def ask(self, session: Session, call: CallNode) -> None:
        super().ask(session, call)
        self.world.placed[call.request] = session.ticket.attempt

    def deliver(self, session: Session) -> None:
        before = len(self.outbox.fresh)
        super().deliver(session)
        for sample in self.outbox.fresh[before:]:
            rows = [x for row in sample.list_rows() for x, _ in numbers_of(row)]
            mine = self.answered.get(session, [])
            need(sorted(rows) == sorted(mine), f"{session.name}: drawn {mine}, trained {rows}")
            self.world.rows += len(sample.rows)


class Player(SessionPlayer):
    """An agent that forks: the calls go on, or begin at an earlier one, or anew."""

    world: SessionWorld

    def place_observation(self, session: Session, obs: Any, tools: Any, now: float) -> CallNode:
        nodes = [node for node in session.tree.nodes if node.is_answered]
        r = self.world.r
        if nodes and r.random() < self.world.fork_share:
            before = r.choice(
                [node.build_token_ids for node in nodes] + [lambda: nodes[0].prompt_ids]
            )
            last: Any = SimpleNamespace(build_token_ids=before)
            self.last_node = last
            obs = obs or "="
        return super().place_observation(session, obs, tools, now)


@dataclass
class Drawing:
    call: m.GenerationCall
    runs: list[tuple[Label, list[int]]] = field(default_factory=list)  # (weights, draws)

    @property
    def tokens(self) -> int:
        return sum(len(draws) for _, draws in self.runs)


@dataclass
class Engine:
    """A generator that draws calls: actors/generator.py, with the engine reckoned."""

    name: str
    session: int = 1
    weights: Label | None = None
    said: Label | None = None  # the newest that it was told of
    calls: dict[int, Drawing] = field(default_factory=dict)
    heard: int = 0
    inbox: deque[m.CallAssignments] = field(default_factory=deque)


class SessionWorld(World):
    """One schedule.  off: a rule that is switched off, see RULES; fault: the only one that befalls
    it, four times; slow: engines load seldom."""

    def __init__(
        self,
        seed: int,
        where: Path,
        off: str = "",
        *,
        fault: str = "",
        slow: bool = False,
        **more: Any,
    ) -> None:
        self.rule, self.fault = off, fault
        self.where = where
        more = {"session_tokens": SESSION_TOKENS, "context": CONTEXT, "error_budget": 1e9} | more
        super().__init__(
            seed, make=functools.partial(STORES.get(off, Store), prompt=prompt), **more
        )
        r = self.r
        self.faults = 4 if fault else self.faults
        self.load_share = 0.1 if slow else r.choice((0.2, 1, 3))
        self.settings.sampling = m.SamplingSettings(max_new_tokens=CALL_TOKENS)
        self.fork_share = r.choice((0.0, 0.0, 0.3))
        self.end_share, self.fail_share = r.choice((0.2, 0.5)), r.choice((0.0, 0.0, 0.05))
        self.agent = {
            "env": "none:None",
            "max_tokens": SESSION_TOKENS,
            "max_calls": r.choice((0, 6)),
            "rows": r.choice((0, 2)),
            "sessions": r.randint(1, 8),
            "deadline_s": r.choice((30.0, 600.0)),
        }
        self.draws: dict[int, tuple[Label, tuple[int, int]]] = {}
        self.placed: dict[int, int] = {}  # call -> the attempt that it was placed under
        self.drawn_under: dict[int, int] = {}  # draw -> the same of its call
        self.done: dict[int, int] = {}  # draw -> the batch that trained it
        self.rows = self.trained_draws = 0
        self.answered = 0  # tokens that gateways were given or told of
        self.engines = [Engine(f"generator-{i}") for i in range(r.randint(1, 2))]
        self.wanted: m.TicketRequest | None = None
        self.said: Counter[str] = Counter()
        self.now = 1000.0
        self.lives = 0
        self.gateway = self.begin()

    # ---- the processes ---------------------------------------------------------------------------

    def begin(self) -> Gateway:
        """A gateway's life."""
        self.lives += 1
        raw = {
            "model": {"path": str(self.where), "device": "cpu"},
            "task": {"name": "sort"},
            "generator": {"max_new_tokens": CALL_TOKENS, "context": CONTEXT},
            "learner": {"group_size": self.settings.group, "groups": self.settings.batch},
            "agent": self.agent,
            "wires": {"connect_s": 1e9},  # the clock leaps
        }
        gateway = Gateway(
            load.build(raw), self.where, source=environment_sessions.EnvironmentSource
        )
        gateway.world, gateway.answered = self, {}
        Player.world = self
        if self.rule == "own_numbers":
            gateway.numbers = 0
        self.hello(gateway)
        return gateway

    def hello(self, gateway: Gateway) -> None:
        self.store.end_sessions(gateway.producer, gateway.session)
        self.wanted = None

    def announcement(self) -> m.PolicyAnnouncement | None:
        return self.store.make_announcement()

    def turn(self) -> bool:
        """The gateway's turn; what it sent goes on its way."""
        gateway = self.gateway
        open_now = Counter((x.ticket.ticket, x.sample) for x in gateway.sessions.values())
        twice = [name for name, count in open_now.items() if count > 1]
        need(not twice, f"samples {twice} are written twice at once")
        before = len(gateway.calls_socket.sent)
        gateway.step()
        for peer, message in gateway.calls_socket.sent:
            for engine in self.engines:
                if engine.name.encode() == peer:
                    engine.inbox.append(message)
        moved = len(gateway.calls_socket.sent) > before
        gateway.calls_socket.sent.clear()
        return moved

    def post(self) -> bool:
        """The buffer reads what has come, and answers."""
        sent: Any = self.gateway.socket.sent
        moved = [self.handle(sent.popleft()) for _ in range(len(sent))]
        self.store.expire(self.now)
        return self.answer_want() or any(moved)

    def handle(self, message: Any) -> bool:
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
        reply: Any = None
        if isinstance(message, m.TicketRequest):
            self.wanted = message
        elif isinstance(message, m.Delivery):
            reply = self.on_deliver(message)
        elif isinstance(message, m.LeaseRenewal):
            reply = self.on_renew(message)
        # an acknowledgement that is lost has the samples come again
        lost = isinstance(reply, m.DeliveryAcks) and self.r.random() < self.late_share / 4
        if reply is not None and not lost:
            self.gateway.socket.replies.append(reply)
        self.check()
        return not isinstance(message, m.LeaseRenewal)

    def on_deliver(self, message: m.Delivery) -> m.DeliveryAcks:
        for sample in message.samples:
            checks.check_sample(self.store, sample)
            checks.check_versions(self.store, sample)
        checks.check_samples(message.samples, m.ModelShape(len(SYMBOLS) + 9), self.settings)
        self.store.report_tokens(message.producer, message.session, message.drawn)
        became = self.store.accept_samples(message.samples)
        self.said.update(became)
        for sample, what in zip(message.samples, became, strict=True):
            self.said["adopted, accepted"] += bool(sample.adopted) and what == "accepted"
            self.said["adopted over an epoch"] += (
                len({span.label.epoch for span in sample.list_spans()}) > 1
            )
        keys = [(x.ticket, x.sample, x.attempt) for x in message.samples]
        acks = [(*key, what) for key, what in zip(keys, became, strict=True)]
        return m.DeliveryAcks(message.session, acks, 1 << 20, self.announcement())

    def on_renew(self, message: m.LeaseRenewal) -> m.HeartbeatReply:
        checks.check_renewal(message)
        checks.check_progress(self.store, message.progress)
        self.store.report_tokens(message.producer, message.session, message.drawn)
        self.store.renew(
            message.producer, message.session, message.progress, self.now, message.judging
        )
        named = {row[1] for row in (*message.progress, *message.judging, *message.written)}
        # no reply is lost here: whatever it was granted and took, it has
        unheld = self.store.leases.find_unnamed_attempts(
            message.producer, message.session, message.taken, named
        )
        need(not unheld, f"tickets {unheld} are held, and not named")
        return m.HeartbeatReply(self.store.epoch, self.announcement(), attempts=self.store.attempts)

    def answer_want(self) -> bool:
        """Tickets, as soon as there are some."""
        want = self.wanted
        if want is None or want.session != self.gateway.session:
            return False
        tickets = self.store.grant(want.producer, want.session, want.samples, self.now)
        if not tickets:
            return False
        self.announced |= {(each.ticket, each.attempt): each.limit for each in tickets}
        said = m.TicketGrant(want.session, want.sequence, tickets, self.announcement())
        self.gateway.socket.replies.append(said)
        self.wanted = None
        return True

    def environment(self) -> bool:
        """One operation of an environment is done."""
        source: Any = self.gateway.sources[""]
        drive = source.pool
        if not drive.open:
            return False
        number = self.r.choice(sorted(drive.open))
        op = drive.open.pop(number)
        if self.r.random() < self.fail_share:
            what = self.r.choice(("failed", "lost"))
            drive.processes.discard(number)
            drive.happened.append(EnvironmentEvent(number, what, why="it was to"))
            return True
        session = self.gateway.sessions[number]
        ends = op.kind == "step" and self.r.random() < self.end_share
        same = session.ticket.ticket % 3 == 1  # every third group has no reward spread
        reward = 0.0 if same or not ends else float(session.sample)
        obs = self.r.choice(("", "3=", "ab")) if op.kind == "step" else "ab="
        drive.happened.append(EnvironmentEvent(number, "ok", obs=obs, reward=reward, ended=ends))
        return True

    # ---- engines ---------------------------------------------------------------------------------

    def engine_reads(self) -> bool:
        busy = [engine for engine in self.engines if engine.inbox]
        if not busy:
            return False
        engine = self.r.choice(busy)
        message = engine.inbox.popleft()
        if message.session != engine.session:
            return True
        engine.heard = max(engine.heard, message.sequence)
        if message.announcement is not None:
            engine.said = max(engine.said or Label(0, 0), message.announcement.label)
        for call in message.calls:
            engine.calls.setdefault(call.id, Drawing(call))
        for number in message.cut:
            if (cut := engine.calls.pop(number, None)) is not None:
                self.tell(engine, m.CallResult(number, b"", b"", [], "length", cut.tokens))
        return True

    def engine_loads(self) -> bool:
        """New weights, which end the calls of an earlier epoch."""
        behind = [x for x in self.engines if x.said is not None and x.said != x.weights]
        if not behind:
            return False
        engine = self.r.choice(behind)
        assert engine.said is not None
        if engine.weights is None or engine.said > engine.weights:
            engine.weights = engine.said
        epoch = engine.weights.epoch
        engine.calls = {
            number: each
            for number, each in engine.calls.items()
            if each.call.min_version.epoch >= epoch
        }
        engine.said = engine.weights
        return True

    def may_draw(self, engine: Engine, each: Drawing) -> bool:
        least = each.call.min_version
        at = engine.weights
        if at is None or at.epoch != least.epoch:
            return False
        return bool(each.runs) or at >= least

    def draw(self) -> bool:
        """A few tokens of a call; its end, sometimes."""
        ready = [(g, x) for g in self.engines for x in g.calls.values() if self.may_draw(g, x)]
        if not ready:
            return False
        engine, each = self.r.choice(ready)
        assert engine.weights is not None
        call = each.call
        if not each.runs or each.runs[-1][0] != engine.weights:
            each.runs.append((engine.weights, []))
        count = min(self.r.randint(1, 3), call.max_new_tokens - each.tokens)
        for _ in range(count):
            number = len(self.draws) + 1
            self.draws[number] = engine.weights, (call.ticket, call.sample)
            self.drawn_under[number] = self.placed[call.id]
            each.runs[-1][1].append(number)
        if each.tokens >= call.max_new_tokens or self.r.random() < 0.5:
            self.finish(engine, each)
        return True

    def finish(self, engine: Engine, each: Drawing) -> None:
        del engine.calls[each.call.id]
        numbers = [number for _, draws in each.runs for number in draws]
        whole = len(numbers) >= each.call.max_new_tokens
        ids = [self.r.randint(2, 8) for _ in numbers]
        if not whole:
            ids[-1] = STOP
        spans, at = [], 0
        for label, draws in each.runs:
            spans.append(
                m.VersionSpan(label, self.store.tree.get_digest(label), at, at + len(draws), label)
            )
            at += len(draws)
        tokens = np.array(ids, "<i4").tobytes()
        logprobs = (-np.array(numbers, "<f4") / np.float32(STEP)).astype("<f4").tobytes()
        finish = "length" if whole else "stop"
        said = m.CallResult(each.call.id, tokens, logprobs, spans, finish)
        self.tell(engine, said)

    def tell(self, engine: Engine, message: Any) -> None:
        self.gateway.calls_socket.replies.append((engine.name.encode(), message))

    def serving(self) -> bool:
        """A generator tells of itself."""
        engine = self.r.choice(self.engines)
        held = sorted(engine.calls)
        said = m.ServingReport(
            m.PROTOCOL, "run", engine.name, engine.session, 4, held, engine.heard
        )
        self.tell(engine, said)
        return False

    # ---- faults ----------------------------------------------------------------------------------

    def kill_generator(self) -> bool:
        engine = self.r.choice(self.engines)
        fresh = Engine(engine.name, engine.session + 1)
        self.engines[self.engines.index(engine)] = fresh
        return True

    def kill_gateway(self) -> bool:
        """Its sessions are gone; what generators are about to say reaches the next one."""
        late = self.gateway.calls_socket.replies
        self.now += 0.5
        self.gateway = self.begin()
        self.gateway.calls_socket.replies.extend(late)
        return True

    def stall(self) -> bool:
        """The gateway stood still for so long that its leases ran out."""
        self.now += 2 * LEASE_S
        self.store.expire(self.now)
        return True

    # ---- the schedule ----------------------------------------------------------------------------

    def train(self) -> bool:
        number = self.learner.number
        batch = self.learner.queue[0] if self.learner.queue else None
        if not super().train():
            return False
        assert batch is not None
        # draws of batches that the surviving history does not hold may come again
        self.done = {draw: at for draw, at in self.done.items() if at < number}
        for sample in batch.samples:
            for row in sample.list_rows():
                for draw, label in numbers_of(row):
                    drawn_with, drawn_for = self.draws[draw]
                    need(drawn_with == label, f"draw {draw} was made by {drawn_with}, not {label}")
                    need(drawn_for == (sample.ticket, sample.sample), f"draw {draw} is another's")
                    need(draw not in self.done, f"draw {draw} is trained twice")
                    self.done[draw] = number
                    self.trained_draws += 1
        return True

    def promised(self, sample: m.Trajectory) -> list[float]:
        """By draw: what the ticket said under whose grant its call was placed, which of a session
        that was adopted is not the sample's own; the least of a span."""
        least = []
        for row in sample.list_rows():
            draws = [draw for draw, _ in numbers_of(row)]
            for span in row.spans:
                mine, draws = draws[: span.end - span.start], draws[span.end - span.start :]
                said = {self.announced[sample.ticket, self.drawn_under[x]] for x in mine}
                self.said["spans under another limit"] += said != {
                    self.announced[sample.ticket, sample.attempt]
                }
                least.append(min(said))
        return least

    def check(self) -> None:
        lines = self.store.make_ledger().lines
        held = sum(line.tokens for line in lines.values())
        told = self.store.count_generated_tokens()
        need(held == told, f"the ledger holds {held} tokens, the gateways told of {told}: {lines}")
        need(held <= len(self.draws), f"the ledger holds {held} tokens of {len(self.draws)} drawn")

    def last_words(self) -> None:
        """One more report: now the buffer knows of every token, but of a killed gateway's."""
        self.now += 1.0
        self.turn()
        self.post()
        told = self.store.count_generated_tokens()
        whole = told == self.answered or (self.lives > 1 and told < self.answered)
        need(whole, f"{self.answered} tokens were answered, {told} are told of")

    def run(self, most: int = 400_000) -> int:
        calm: list[Callable[[], bool]] = [
            *(self.turn, self.post, self.environment, self.engine_reads, self.engine_loads),
            *(self.draw, self.serving, self.ask, self.train, self.commit, self.checkpoint),
        ]
        weights = [self.r.choice((1, 1, 3)) for _ in calm]
        weights[calm.index(self.engine_loads)] = self.load_share
        faults = [self.kill_learner, self.kill_generator, self.kill_gateway, self.stall]
        if self.fault:
            faults = [getattr(self, self.fault)]
        quiet = 0
        for n in range(most):
            if self.store.committed == self.settings.steps and not self.learner.commits:
                self.last_words()
                return n
            self.now += 0.02
            if self.faults and self.r.random() < 0.01:
                self.faults -= 1
                fault = self.r.choice(faults)
                self.said[fault.__name__] += 1
                fault()
                continue
            quiet = 0 if self.r.choices(calm, weights)[0]() else quiet + 1
            if quiet > 40:  # only the clock can bring news: what is repeated, or has a deadline
                self.now += 1.0
            need(quiet < QUIET, f"nothing moves at batch {self.store.committed}")
        raise Broken(f"no end after {most} actions")


# ---- rules that can be switched off --------------------------------------------------------------

ROW = call_tree._make_row


class Unjudged(Store):
    def may_train(self, sample: m.Trajectory, lag: float, limit: float) -> bool:
        return bool(sample.adopted) or super().may_train(sample, lag, limit)


def every_row(path: Any, shares: Any) -> m.TrainingSequence:
    """`call_tree._make_row`, with all that the row's first call continues trained in it again."""
    return ROW([*path[0].path[:-1], *path], shares)


def placed_at_any(self: service.CallRouter, call: service.RoutedCall) -> None:
    """The minimum version holds for a session's first call alone."""
    message = call.message
    least = message.min_version
    least = least if message.stream == 0 else Label(least.epoch, 0)
    SUBMIT(self, call._replace(message=msgspec.structs.replace(message, min_version=least)))


SUBMIT = service.CallRouter.submit


def drawn_at_once(self: service.Gateway, session: Session) -> None:
    """Calls of a session whose ticket is over are drawn by whatever weights there are."""
    WITHDRAW(self, session)
    announced, ticket = self.schedule.announced, session.ticket
    if announced is not None and session.number in self.sessions:
        session.ticket = msgspec.structs.replace(ticket, min_version=announced.label)
        for call in session.open_calls.values():
            self.ask(session, call)
        session.ticket = ticket


WITHDRAW = service.Gateway.withdraw_calls


def uncounted(self: Session, ticket: m.Ticket) -> None:
    ADOPT(self, ticket)
    self.adopted[-1] = (self.adopted[-1][0], 0)


ADOPT = Session.resume_under


def adopted_never(self: service.Gateway, held: LeasedTicket, new: LeasedTicket) -> None:
    """A sample that is open, or waits, begins anew under the new grant."""


class Rule(NamedTuple):
    """patch: of what, its attribute, by what; said: by the checks; shown: schedules of it."""

    patch: Any
    said: str
    shown: Mapping[str, Any] = MappingProxyType({})


TIGHT: dict[str, Any] = {"limits": (0,)}
# a limit that sets itself; learners' other lives have other bounds
AUTO: dict[str, Any] = {"limits": (1, 2, 3, 4), "ess_floor": 0.5, "steps": 12}
RULES = {
    "every_call": Rule(
        (service.CallRouter, "submit", placed_at_any),
        "versions late|asked for",
        {"slow": True, "fault": "kill_generator", **TIGHT},
    ),
    "wait_for_adoption": Rule(
        (service.Gateway, "withdraw_calls", drawn_at_once),
        "versions late|asked for",
        {"fault": "kill_learner"},
    ),
    "judge_adopted": Rule(None, "versions late", {"fault": "kill_learner", "limits": (2, 0)}),
    "row_once": Rule((call_tree, "_make_row", every_row), "drawn .* trained"),
    "count_once": Rule(
        (Session, "resume_under", uncounted), "tokens of .* drawn", {"fault": "stall"}
    ),
    "own_numbers": Rule(None, "came to|tokens, and spans|is another's", {"fault": "kill_gateway"}),
    "hand_over": Rule(
        (service.Gateway, "transfer_sessions", adopted_never), "written twice", {"fault": "stall"}
    ),
}
STORES: dict[str, type[Store]] = {"judge_adopted": Unjudged}


def switched_off(rule: str) -> Any:
    """The patch that switches a rule off, beside what SessionWorld itself does by its name."""
    patch = RULES[rule].patch if rule else None
    return mock.patch.object(*patch) if patch else contextlib.nullcontext()


@contextmanager
def played(world: SessionWorld | None = None) -> Iterator[Callable[[SessionWorld], None]]:
    """The gateway's module without sockets, environments and clock."""
    now = SimpleNamespace(world=world)

    def monotonic() -> float:
        return float(now.world.now)

    def time_ns() -> int:
        return int(now.world.now * 1e9)

    def play(world: SessionWorld) -> None:
        now.world = world

    time = SimpleNamespace(monotonic=monotonic, time_ns=time_ns)
    environments = {"time": time, "EnvironmentPool": Drive, "SessionPlayer": Player}
    quiet = {"time": time, "print": lambda *_, **__: None, "create": True}
    with (
        mock.patch.multiple(environment_sessions, **environments),
        mock.patch.multiple(ticket_holder, time=time),
        mock.patch.multiple(ticket_schedule, time=time),
        mock.patch.multiple(sockets, PeerSocket=Wire, BufferSocket=Wire, **quiet),
        mock.patch.multiple(
            service,
            **quiet,
            load_tokenizer=functools.cache(load_tokenizer),
            has_template=lambda _: False,
            HOPELESS=math.inf,  # sessions fail here by chance, now and then the first eight of them
        ),
    ):
        yield play


def schedule(seed: int, where: Path, off: str = "", **more: Any) -> SessionWorld:
    """Run one; raises Broken, or what the store and the gateway raise."""
    clock = SimpleNamespace(now=1000.0)
    with played() as play, switched_off(off):
        play(clock)
        world = SessionWorld.__new__(SessionWorld)
        world.now = 1000.0
        play(world)
        world.__init__(seed, where, off, **more)
        world.run()
    return world


def place(where: Path) -> Path:
    """A run directory with a tiny model, whose tokenizer the gateway needs."""
    build_model(where, SYMBOLS, hidden=32, layers=1)
    (where / "run_id").write_text("run")
    return where


def several(seeds: range, where: Path, **more: Any) -> Counter[str]:
    """Counts over schedules that all hold."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = schedule(seed, where, **more)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        seen.update({line: int(x["tokens"]) for line, x in world.store.sum_ledger().items()})
        seen.update({f"samples {what}": count for what, count in world.said.items()})
        seen["schedules"] += 1
        seen["tokens at the limit"] += world.at_limit
        seen["tokens trained"] += world.trained_draws
        seen["further rows"] += world.rows
        seen["limit moved"] += world.moves
    return seen


def main(words: list[str]) -> int:
    count = int(words[0])
    with tempfile.TemporaryDirectory() as directory:
        where = place(Path(directory) / "m")
        if words[1:]:
            found = []
            for seed in range(count):
                try:
                    schedule(seed, where, words[1], **RULES[words[1]].shown)
                except Exception as error:
                    found.append((seed, f"{type(error).__name__}: {error}"))
            print(f"{words[1]} off: {len(found)} of {count} schedules notice; {found[:5]}")
            return 0 if found else 1
        for what, many in sorted(several(range(count), where).items()):
            print(f"{what:32} {many:12,}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
