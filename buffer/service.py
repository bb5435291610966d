"""The buffer process: sockets around the store, and the writer of the run's metrics.

It never blocks on a peer.  Clocks are read here and passed on as arguments: leases, ages of waits,
wall time since the first ticket."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import admission
from asyncrl.contract import messages as m
from asyncrl.contract.blobs.images import MOST_SESSION_BYTES, ImageShape
from asyncrl.contract.errors import AsyncrlError, BadMessage, BufferTakenOver, DamagedDataError
from asyncrl.contract.freshness.meter import BatchMeter
from asyncrl.contract.printable import LONGEST_LINE, escape_line
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import (
    KEPT,
    BlockingSession,
    ProcessWait,
    WaitLog,
    find_blocking_session,
)
from asyncrl.models import memory
from asyncrl.records import atomic_write, buffer_leadership, jsonl, metrics
from asyncrl.records.metrics import MetricsWriter, RunClock
from asyncrl.records.rundir import RunLock, clear_end, get_buffer_address, read_run_id
from asyncrl.records.trackers import TrackerFeeds
from asyncrl.tasks import Task
from asyncrl.tasks.evaluation_sets import build_task
from asyncrl.transport.sockets import BufferSocket
from buffer import batches, checks, numbers
from buffer.durable_store import RecordedStore
from buffer.evaluation import Evaluations, EvaluationSet
from buffer.groups import settings
from buffer.ledger import Key
from buffer.mixing.mixer import mixer_of
from buffer.sessions import PeerSessions
from buffer.store import ENOUGH, Store
from buffer.training_log import TrainingLog

POLL_S = 0.25
TICK_S = 0.25
SYNC_POLL_S = 0.001  # while replies wait for the disk
NOBODY = -1  # matches no session: ends all leases of a producer
# After the end of a run the buffer stays so long for generators that have not asked again yet. A
# generator on a slow machine or link would otherwise lose its peer and exit with an error.
LINGER_S = 20.0
ANSWER_BYTES = 1024  # per token of a completion: ids, logprobs, texts, a version each
MORE_BYTES = 4 * 1024 * 1024  # for other contents of messages: ledgers, lists of tickets
FORGET = 0.9  # decay of a generator's longest gap between renewals, per renewal
NEWS = 64  # waiting generators that are notified of a new version at once
JOINED = 1000  # first number of generators that join without a key
SESSIONS_S = 5.0  # a gateway's list of sessions is outdated after so long
PASS = 500  # messages received before replies are sent: a flooding peer must not block the others
OUTGOING = 10_000  # replies waiting for the disk; with more, nothing is received
MOST_REFUSED = 16  # refused samples of a generator, beyond its number of good ones
ASKS = 16  # pending batch requests; a learner sends two
REFUSALS_SAID = 20  # refusals in the log; further ones are only counted


def evaluations(config: Config, task: Task) -> Evaluations:
    """Make the run's evaluations, with no more prompts than the task has."""
    wanted = config.evaluation

    def most(prompts: int, split: str) -> int:
        size = task.size(split)
        return prompts if size is None else min(prompts, size)

    return Evaluations(
        every=wanted.every,
        prompts=most(wanted.prompts, "heldout"),
        final_prompts=most(wanted.final_prompts, "heldout"),
        ood_prompts=most(wanted.ood_prompts, "ood"),
        temperature=wanted.temperature,
        prompt=lambda split, index: task.prompt(split, index, config.seed),
        ood_every=wanted.ood_every,
        sets=[
            EvaluationSet(
                name=one.name,
                number=number,
                prompts=most(one.prompts, one.name),
                every=one.every,
                samples=one.samples,
                greedy=one.greedy,
                temperature=one.temperature,
                passing=one.passing,
                counts=one.counts,
            )
            for number, one in enumerate(wanted.sets, 2)
        ],
    )


def open_store(
    config: Config, run_dir: Path, task: Task, term: buffer_leadership.BufferTerm | None = None
) -> Store:
    """Make a new store (`memory`), or restore one from the journal (`process`, `disk`)."""

    def prompt(index: int) -> m.Prompt:
        return task.prompt("train", index, config.seed)

    if config.durability.mode == "memory":
        return Store(settings(config), prompt, evaluations(config, task), mixer_of(config, task))
    return RecordedStore.open(
        run_dir / "journal",
        sync=config.durability.mode == "disk",
        settings=settings(config),
        prompt=prompt,
        evaluations=evaluations(config, task),
        mixer=mixer_of(config, task),
        now=time.monotonic(),
        term=term,
    )


def max_message_bytes(config: Config) -> int:
    """Bytes of the largest valid message: frames of completions of full context, with texts.

    Agents that call over HTTP may send images, which come with their session."""
    token = ANSWER_BYTES + config.support_bytes
    frame = 2 * config.wires.frame_bytes + token * config.generator.context
    if any(agent.http for agent in config.agents.values()):
        frame += MOST_SESSION_BYTES
    return min(m.MAX_FRAME_BYTES, MORE_BYTES + frame)


def log(line: str) -> None:
    """Write one line to the log; a full disk is ignored."""
    with contextlib.suppress(OSError):
        print(escape_line(line, LONGEST_LINE), file=sys.stderr, flush=True)


class BufferService:
    """The loop over one ROUTER socket.

    moved: take over the run at a new address, `wires.address`, which differs from the run's
    config."""

    def __init__(self, config: Config, run_dir: Path, *, moved: bool = False) -> None:
        self.config, self.run_dir, self.run = config, run_dir, read_run_id(run_dir)
        task = build_task(config)
        # before taking the term: a buffer that cannot bind its address must not end another one
        self.socket = BufferSocket(
            get_buffer_address(config, run_dir),
            config.wires.curve_dir,
            run=self.run,
            most=max_message_bytes(config),
        )
        self.socket.refused = self.refuse
        try:
            self.term = buffer_leadership.take_leadership(
                run_dir,
                self.socket.address,
                moved=moved,
                supervised=bool(os.environ.get("ASYNCRL_SUPERVISED")),
            )
            self.store = open_store(config, run_dir, task, self.term)
        except BaseException:
            self.socket.close()
            raise
        # replies that wait for the journal, each with the record that must be durable first
        self.outgoing: deque[tuple[int, bytes, m.FromBuffer]] = deque()
        self.metrics = MetricsWriter(run_dir)
        self.trackers = TrackerFeeds(run_dir, config.record.trackers)
        self.samples = jsonl.JsonlAppender(run_dir / "samples.jsonl")
        self.wants: dict[str, tuple[bytes, m.TicketRequest]] = {}
        # requests for zero samples: these generators sample the calls of sessions, and need only
        # new versions and the end of the run
        self.followers: dict[str, tuple[bytes, m.TicketRequest]] = {}
        self.fresh: dict[str, None] = {}  # names in both that may lack the newest version
        self.told: Label | None = None  # the version that waiting generators were last sent
        self.reported: set[str] = set()  # generators whose numbers came since the last commit
        self.early: dict[str, tuple[bytes, m.TicketRequest]] = {}  # before the sender's hello
        self.asks: deque[tuple[bytes, m.BatchRequest]] = deque()
        self.goodbyes: dict[bytes, m.LearnerGoodbye] = {}
        self.generators: dict[str, dict[str, Any]] = {}
        self.sessions = PeerSessions(config.wires.lease_s)
        self.next_joined = JOINED  # number of the next generator that joins without a key
        self.toml = load.dump(config)  # for generators that join
        self.vocabulary = 0  # tokens of the model, from the learner's hello; 0: unknown
        # the routers whose experts the learner replays; None: none, or unknown
        self.routing: m.RoutingShape | None = None
        self.images: ImageShape | None = None  # how the model reads images; None: unknown, or text
        self.refused = Counter[str]()  # refused messages by reason
        self.learner: dict[str, Any] = {}
        self.learner_waits: tuple[batches.BatchWait, float] | None = None  # (reason, since when)
        self.wait_log = WaitLog(min(10.0, config.watchdog.floor_s / 2))
        # seconds of the learner's last steps, waits excluded
        self.step_s: deque[float] = deque(maxlen=KEPT)
        self.latest: dict[str, float] = {}
        self.leased: dict[int, m.Batch] = {}
        self.clock = RunClock(run_dir)
        self.last_commit = self.last_metrics = 0.0
        self.trained = TrainingLog(run_dir / "trained.jsonl")
        self.meter = BatchMeter()
        # samples that a generator holds at most
        self.slots = config.agent.sessions if config.uses_sessions else config.generator.slots
        self.error = ""
        self.stop = self.taken_over = False
        # taken: samples counted as progress since the last commit
        self.progress = self.taken = 0
        if self.store.finished and not (run_dir / "weights_digest").exists():
            # restored after the end, but the learner's export is missing: the learner will restart
            # and send its goodbye again
            self.store.finished = False
        # restored after the end: only generators still need to learn of it
        self.ended_at = time.monotonic() if self.store.finished else 0.0
        self.told_before = self.store.finished
        self.mismatch = 0.0

    # ---- the loop --------------------------------------------------------------------------------

    def loop(self) -> None:
        ticked = 0.0
        while not self.stop:
            self.receive_messages()
            self.answer()
            now = time.monotonic()
            if now - ticked > TICK_S:
                ticked = now
                self.store.expire(now)
                self.forget(now)
                self.log_waits()
            self.flush()
            all_told = not self.generators and not self.told_before
            if self.ended_at and not self.outgoing and (all_told or now - self.ended_at > LINGER_S):
                return

    def receive_messages(self) -> None:
        """Handle up to PASS messages; none while OUTGOING replies wait for the disk.

        Raises BufferTakenOver before it handles a message that came after another buffer took over.
        """
        if len(self.outgoing) >= OUTGOING:
            time.sleep(SYNC_POLL_S)
            return
        now = time.monotonic()
        idle_s = min(POLL_S, self.store.opens_at(now) - now)
        received = self.socket.recv(SYNC_POLL_S if self.outgoing else idle_s)
        self.term.check()
        for _ in range(PASS):
            if received is None:
                return
            self.handle(*received)
            received = self.socket.recv(0)
        if received is not None:
            self.handle(*received)

    def send(self, peer: bytes, message: m.FromBuffer) -> None:
        """Send a reply once the records appended so far are as durable as the mode promises."""
        if isinstance(self.store, RecordedStore):
            self.outgoing.append((self.store.journal.appended, peer, message))
        else:
            self.socket.send(peer, message)

    def flush(self) -> None:
        if not isinstance(self.store, RecordedStore):
            return
        self.store.flush_journal()
        durable = self.store.journal.durable
        if not self.outgoing or self.outgoing[0][0] > durable:
            return
        self.term.check()  # after the records are durable: see records/buffer_leadership.py
        while self.outgoing and self.outgoing[0][0] <= durable:
            self.socket.send(*self.outgoing.popleft()[1:])

    def handle(self, peer: bytes, message: m.FromPeer) -> None:
        """Handle one message; refuse the sender of an invalid one. The run continues."""
        kind = type(message).__name__
        try:
            getattr(self, f"on_{kind}")(peer, message)
        except BadMessage as error:
            self.refuse(error.reason, f"refused a {kind}: {error}")
            self.send(peer, m.Refusal(str(error), error.exit_code))

    def refuse(self, reason: str, line: str) -> None:
        """Count a refusal by reason for the metrics, `asyncrl doctor` and the report; log the first
        ones."""
        self.refused[reason] += 1
        self.latest[f"refused/{reason}"] = float(self.refused[reason])
        if self.refused.total() <= REFUSALS_SAID:
            log(line)

    # ---- generators ------------------------------------------------------------------------------

    def generator_state(self, name: str, peer: bytes, session: int) -> dict[str, Any] | None:
        """Return the state of a generator if this session holds its name.

        Any other session has to wait (None) or is refused (None, with a `Refusal`)."""
        now = time.monotonic()
        known = self.sessions.token(name)
        if known is None:
            checks.producer(name)
        state = self.sessions.on_message(
            name, session, now, gone=known not in (None, session) and self.process_gone(name)
        )
        if state == "new":
            self.store.end_sessions(name, session)
            # a ticket granted to a dead session would be blocked until its lease expires
            self.forget_wants(name)
            self.generators[name] = {"stats": {}, "waiting": None, "pid": 0, "host": ""}
        elif state == "refused":
            self.send(
                peer,
                m.Refusal(
                    f"another generator named {name} is running{self.peer_address(name)}: give "
                    "this one another --index, or end that one first",
                    2,
                ),
            )
        elif state == "over":
            self.send(
                peer,
                m.Refusal(
                    f"another process has taken over the name {name}{self.peer_address(name)}, "
                    "because this one was silent: end one of them",
                    2,
                ),
            )
        elif state == "full":
            self.send(
                peer,
                m.Refusal(
                    f"the buffer already has {len(self.sessions.names)} names of generators, the "
                    f"most it keeps, and cannot add {name}: reuse a name",
                    2,
                ),
            )
        if state not in ("new", "holds"):
            return None
        entry = self.generators.setdefault(
            name, {"stats": {}, "waiting": None, "pid": 0, "host": ""}
        )
        entry |= {"at": now, "peer": peer}
        return entry

    def peer_address(self, name: str) -> str:
        entry = self.generators.get(name, {})
        return f" (process {entry['pid']} on {entry['host']})" if entry.get("pid") else ""

    def process_gone(self, name: str) -> bool:
        """Whether the process that holds the name has certainly ended; False on other machines."""
        entry = self.generators.get(name, {})
        pid = entry.get("pid", 0)
        if pid <= 0 or entry["host"] != socket.gethostname():
            return False
        try:
            status = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False
        # the state follows the name, which is in parentheses and may hold some; Z: not reaped yet
        return status.rpartition(b")")[2].split()[:1] == [b"Z"]

    def forget(self, now: float) -> None:
        """Forget names that have been unused for very long."""
        for name in self.sessions.forget(now):
            self.generators.pop(name, None)
            self.forget_wants(name)

    def refuse_foreign_peer(self, peer: bytes, protocol: int, run: str) -> bool:
        if protocol != m.PROTOCOL:
            self.send(
                peer,
                m.Refusal(
                    f"the buffer speaks protocol {m.PROTOCOL}, this process {protocol}: install "
                    "the same version on all hosts"
                ),
            )
        elif run != self.run:
            self.send(
                peer,
                m.Refusal(
                    f"the buffer belongs to run {self.run}, this process to run {run}: give it the "
                    "same run directory",
                    2,
                ),
            )
        else:
            return False
        return True

    def on_GeneratorHello(self, peer: bytes, hello: m.GeneratorHello) -> None:
        if self.refuse_foreign_peer(peer, hello.protocol, hello.run):
            return
        if (entry := self.generator_state(hello.producer, peer, hello.session)) is not None:
            entry |= {"pid": hello.pid, "host": hello.host, "greeted": True}
            if (early := self.early.pop(hello.producer, None)) is not None:
                self.wait_for_tickets(*early)

    def on_JoinRequest(self, peer: bytes, message: m.JoinRequest) -> None:
        """Send the start parameters to a generator on another machine.

        The state does not change: it becomes a generator of the run with its hello."""
        wires = self.config.wires
        if self.config.uses_sessions and not wires.gateway_address:
            reason = "agent: its gateway serves only its own machine"
            remedy = "start the run with wires.gateway_address = tcp://HOST:PORT"
            self.send(peer, m.Refusal(f"{reason}, so that none can join: {remedy}", 2))
            return
        if message.producer:
            checks.producer(message.producer)
        announcement = self.announcement()
        name = message.producer or self.socket.speaker
        if not name:
            numbers_from = itertools.count(self.next_joined)
            number = next(n for n in numbers_from if f"generator-{n}" not in self.sessions.names)
            self.next_joined = number + 1
            name = f"generator-{number}"
        weights = "" if announcement is None else announcement.source.address
        self.send(peer, m.JoinReply(self.run, name, self.toml, weights))

    def on_TicketRequest(self, peer: bytes, want: m.TicketRequest) -> None:
        """Queue a request for tickets; a generator without a hello is asked for it first."""
        checks.want(want)
        entry = self.generator_state(want.producer, peer, want.session)
        if entry is None:
            return
        if "greeted" in entry:
            self.wait_for_tickets(peer, want)
        else:
            self.early[want.producer] = (peer, want)
            self.send(peer, m.UnknownSession(want.producer, want.session))

    def wait_for_tickets(self, peer: bytes, want: m.TicketRequest) -> None:
        waiting = self.wants if want.samples else self.followers
        waiting[want.producer] = (peer, want)
        self.fresh[want.producer] = None

    def forget_wants(self, name: str) -> None:
        self.wants.pop(name, None)
        self.followers.pop(name, None)
        self.early.pop(name, None)

    def on_Delivery(self, peer: bytes, message: m.Delivery) -> None:
        """Take finished samples, also from a session that has lost its name."""
        checks.check_token_count(message.drawn)
        samples, refused = checks.check_delivery(
            self.store,
            message.samples,
            self.vocabulary,
            self.routing,
            self.images,
            message.images,
        )
        entry = self.generator_state(message.producer, peer, message.session)
        if refused or (entry is not None and entry.get("refused")):
            self.count_refused(message.producer, samples, refused, entry)
        if entry is not None or self.sessions.is_over(message.producer, message.session):
            self.store.report_tokens(message.producer, message.session, message.drawn)
        dispositions = self.store.accept_samples(
            samples, b"" if refused else self.socket.payload, message.images
        )
        self.meter.on_complete(
            (ticket for ticket in {x.ticket for x in samples} if self.store.is_complete(ticket)),
            time.monotonic(),
        )
        acks = [
            (sample.ticket, sample.sample, sample.attempt, disposition)
            for sample, disposition in zip(samples, dispositions, strict=True)
        ]
        self.progress += sum(
            sample.ticket >= m.EVAL_BASE for sample in samples
        ) + self.progress_samples(acks)
        self.send(
            peer,
            m.DeliveryAcks(
                message.session, acks, self.config.wires.credit_bytes, self.announcement()
            ),
        )

    def count_refused(
        self,
        producer: str,
        samples: Sequence[m.Trajectory],
        refused: dict[Key, BadMessage],
        entry: dict[str, Any] | None,
    ) -> None:
        """Count refused samples, each once however often it is sent; good samples offset them.

        Raises BadMessage, which ends the sender, above MOST_REFUSED.

        entry: the sender's state; None: its session has lost its name and is refused anyway."""
        keys = [(sample.ticket, sample.sample, sample.attempt) for sample in samples]
        new = [key for key in keys if not self.store.is_delivered(key)]
        bad = [refused[key] for key in new if key in refused]
        total = 0 if entry is None else max(0, entry.get("refused", 0) + 2 * len(bad) - len(new))
        if bad and total > MOST_REFUSED:
            raise BadMessage(
                f"{producer} delivered {total} more unusable samples than good ones (at most "
                f"{MOST_REFUSED} are allowed); the last one: {bad[-1]}",
                bad[-1].reason,
            )
        if entry is not None:
            entry["refused"] = total
        for error in bad:
            self.refuse(error.reason, f"failed a sample of {producer}: {error}")

    def progress_samples(self, acks: list[tuple[int, int, int, m.Disposition]]) -> int:
        """Number of accepted samples that count as progress: at most one batch between two commits.

        More would hide a learner that hangs."""
        fresh = min(
            sum(disposition == "accepted" for *_, disposition in acks),
            max(0, self.store.settings.batch * self.store.settings.group - self.taken),
        )
        self.taken += fresh
        return fresh

    def on_LeaseRenewal(self, peer: bytes, message: m.LeaseRenewal) -> None:
        checks.renew(message)
        checks.progress(self.store, message.progress)
        entry = self.generator_state(message.producer, peer, message.session)
        if entry is None and not self.sessions.is_over(message.producer, message.session):
            return
        self.store.report_tokens(message.producer, message.session, message.drawn)
        now = time.monotonic()
        gap = 0.0
        if entry is not None:  # the longest gap decays slowly
            gap = max(now - entry.get("renewed", now), FORGET * entry.get("gap", 0.0))
            entry["renewed"], entry["gap"] = now, gap
        self.store.renew(
            message.producer, message.session, message.progress, now, message.judging, gap=gap
        )
        if entry is not None:
            self.free_unheld_leases(message)
            entry["stats"], entry["waiting"] = message.stats, message.waiting
            entry["sessions"] = message.sessions
            self.measure_rewards(message, now)
            self.reported.add(message.producer)
            announcement = self.announcement()
            self.send(
                peer,
                m.HeartbeatReply(self.store.epoch, announcement, attempts=self.store.attempts),
            )

    def measure_rewards(self, message: m.LeaseRenewal, now: float) -> None:
        """Pass the load of a generator's reward processes to the meter of the window."""
        stats = message.stats
        names = ("reward/judged", "reward/waited_s", "reward/called_s")
        judged, waited_s, called_s = (stats.get(name, 0.0) for name in names)
        workers = stats.get("reward/workers", 0.0)
        self.meter.on_rewards(message.producer, (judged, waited_s, called_s), workers, now)

    def free_unheld_leases(self, message: m.LeaseRenewal) -> None:
        """End the leases of tickets that were lost with a connection or an earlier buffer process.

        The generator names the attempts that it holds, and the attempt up to which it takes no
        others."""
        lists = (message.progress, message.judging, message.written)
        named = {row[1] for rows in lists for row in rows}
        unheld = self.store.unheld_attempts(message.producer, message.session, message.taken, named)
        if unheld:
            self.store.free_leases(unheld)

    def on_GeneratorGoodbye(self, peer: bytes, message: m.GeneratorGoodbye) -> None:
        """End the leases of a generator that exits."""
        if not self.sessions.end_session(message.producer, message.session):
            return  # another session holds its name and its leases
        self.store.end_sessions(message.producer, NOBODY)
        self.forget_wants(message.producer)
        self.generators.pop(message.producer, None)

    def announcement(self) -> m.PolicyAnnouncement | None:
        """The store's announcement, or None before a learner's hello to this buffer process.

        The journal may name a learner that is dead."""
        return self.store.announcement() if self.learner else None

    # ---- the learner -----------------------------------------------------------------------------

    def on_LearnerHello(self, peer: bytes, hello: m.LearnerHello) -> None:
        if self.refuse_foreign_peer(peer, hello.protocol, hello.run):
            return
        checks.hello(hello)
        new = hello.epoch != self.store.epoch
        unreported = self.unreported_batches(hello.label.number) if new else []
        exclusion = self.store_suspect_batch(hello) if new else ""
        excluded = self.store.aside
        if not self.store.hello(hello):
            behind = self.store.is_behind(hello)
            self.send(
                peer,
                m.Refusal(self.damage(hello.label.number), DamagedDataError.exit_code)
                if behind
                else m.FencedReply(hello.epoch, self.store.epoch),
            )
            return
        if self.ended_at and not self.store.finished:
            self.ended_at, self.told_before = 0.0, False
        self.vocabulary = hello.vocabulary
        self.routing = hello.routing
        self.images = hello.images
        if self.store.aside > excluded:
            log(exclusion)
            self.latest["buffer/set_aside"] = float(self.store.aside)
        if new:
            self.leased = {}
            self.trained.begin_at(hello.label.number)
            for batch in unreported:
                if not self.trained.has_batch(batch.number):
                    self.trained.add(batch, self.mask_limit)
            self.asks.clear()
            self.goodbyes.clear()
        self.learner = {
            "at": time.monotonic(),
            "pid": hello.pid,
            "waiting": None,
            "stats": {},
            "peer": peer,
        }
        self.send(peer, m.Welcome(hello.epoch, self.store.base))

    def damage(self, number: int) -> str:
        """The error message for a learner whose newest intact checkpoint, of version `number`, is
        older than everything kept here."""
        todo = (
            f"end the run and continue with `asyncrl run --resume {self.run_dir}`: a new buffer "
            f"starts from version {number}, and the steps after it are repeated"
            if self.config.durability.mode == "memory"
            else f"start a new run, with a model of {self.run_dir / 'checkpoints'} as model.path"
        )
        return (
            f"the learner's newest intact checkpoint is of version {number}, the newer ones are "
            f"damaged, and the buffer has no groups before version {self.store.base}: {todo}"
        )

    def store_suspect_batch(self, hello: m.LearnerHello) -> str:
        """Write the batch that this hello excludes to RUN/set_aside before the store removes it.

        Returns the line for the log, or "" if no batch is excluded."""
        store = self.store
        tickets, count = store.suspect_batch(hello)
        if count < ENOUGH or store.policy is None or not all(t in store.alive for t in tickets):
            return ""
        number = store.committed
        groups = [store.alive[ticket] for ticket in tickets]
        batch = store.batch(groups, store.epoch, number)
        path = self.run_dir / "set_aside" / f"batch_{number}_epoch_{store.epoch}.jsonl"
        try:
            path.parent.mkdir(exist_ok=True)
            lines = (json.dumps(row) + "\n" for row in numbers.batch_rows(batch))
            atomic_write.write(path, "".join(lines))
        except OSError as error:
            raise jsonl.make_disk_full_error(path, error) from error
        tokens = sum(sample.length for sample in batch.samples)
        return (
            f"batch {number} is excluded, because the last learner processes ended on it; its "
            f"{len(batch.samples)} samples ({tokens} tokens, `fatal` in the ledger) are kept in "
            f"{path}, and the run continues without them"
        )

    def unreported_batches(self, number: int) -> list[m.Batch]:
        """Batches before `number` that are missing in the training log although their samples are
        here: the commit was lost, or the row was torn."""
        store = self.store
        unreported = []
        for trained, comp in enumerate(store.comps, store.base):
            groups = [
                group
                for ticket in comp
                if (group := store.alive.get(ticket) or store.retained.get(ticket)) is not None
                and group.complete
            ]
            if (
                trained < number
                and not self.trained.has_batch(trained)
                and len(groups) == len(comp)
                and store.policy is not None
            ):
                unreported.append(store.batch(groups, store.epoch, trained))
        return unreported

    @property
    def mask_limit(self) -> float:
        """Tokens of a greater lag are masked in the loss."""
        return self.store.max_lag if self.config.staleness.on_exceed == "mask" else float("inf")

    def is_fenced(self, peer: bytes, epoch: int) -> bool:
        """Whether a message is not of the current learner; True before any hello."""
        if self.store.policy is None:
            return True
        if epoch < self.store.epoch:
            self.send(peer, m.FencedReply(epoch, self.store.epoch))
        elif epoch == self.store.epoch:
            self.learner["at"] = time.monotonic()
        return epoch != self.store.epoch

    def on_BatchRequest(self, peer: bytes, ask: m.BatchRequest) -> None:
        if not self.is_fenced(peer, ask.epoch):
            checks.ask(self.store, ask.number)
            if all(a.number != ask.number for _, a in self.asks):
                self.asks.append((peer, ask))
                if len(self.asks) > ASKS:
                    self.asks.popleft()
            else:
                self.asks = deque(
                    (peer, a) if a.number == ask.number else (p, a) for p, a in self.asks
                )

    def on_Commit(self, peer: bytes, commit: m.Commit) -> None:
        if self.is_fenced(peer, commit.epoch):
            return
        checks.commit(self.store, commit.number, commit.label, commit.unused)
        if unknown := [n for n in commit.metrics if not metrics.is_known_metric(n)]:
            raise BadMessage(
                "metrics not in the table of asyncrl/records/metrics.py: "
                f"{', '.join(unknown)[:200]}"
            )
        # leased by an earlier buffer process
        if commit.number == self.store.committed and commit.number not in self.leased:
            groups = [
                self.store.alive[t] for t in self.store.comps[commit.number - self.store.base]
            ]
            self.leased[commit.number] = self.store.batch(groups, commit.epoch, commit.number)
        limit_before = self.store.limit
        seen = admission.limit_evidence(commit.metrics, self.store.settings.ess_floor)
        now = time.monotonic()
        timing = None
        if commit.number == self.store.committed:
            tickets = self.store.comps[commit.number - self.store.base]
            idle_share = commit.metrics.get("time/learner_idle_share", 0.0)
            timing = self.meter.on_commit(tickets, idle_share, now)
        done = self.store.commit(
            commit.number,
            commit.label,
            commit.digest,
            commit.unused,
            seen=seen,
            timing=timing,
            now=now,
        )
        if done is None:
            return
        if done:
            limits = numbers.limit_metrics(self.store, limit_before)
            mixture = self.store.mixer.metrics(self.store.committed)
            self.record_commit(commit, limits | numbers.window_metrics(self.store) | mixture)
            for line in self.store.mixer.events:
                log(line)
            self.store.mixer.events = []
        self.send(peer, m.CommitReply(commit.epoch, commit.number, self.store.pinned_versions()))

    def on_CheckpointNotice(self, peer: bytes, message: m.CheckpointNotice) -> None:
        if not self.is_fenced(peer, message.epoch):
            self.store.checkpointed(message.oldest)
            self.trained.fold_below(self.store.base)

    def on_LearnerGoodbye(self, peer: bytes, message: m.LearnerGoodbye) -> None:
        if not self.is_fenced(peer, message.epoch):
            checks.goodbye(self.store, message.number)
            self.goodbyes = {peer: message}  # one, however often the learner connects

    def on_LearnerProgress(self, peer: bytes, message: m.LearnerProgress) -> None:
        if self.is_fenced(peer, message.epoch):
            return
        self.send(peer, m.HeartbeatReply(message.epoch))
        self.learner |= {
            "at": time.monotonic(),
            "waiting": message.waiting,
            "stats": message.stats,
            "pid": message.pid,
        }

    def on_StatusRequest(self, peer: bytes, message: m.StatusRequest) -> None:
        self.send(peer, self.status())

    # ---- replies that wait for the state ---------------------------------------------------------

    def answer(self) -> None:
        """Send the replies that the last messages made possible: batches, tickets, the end."""
        for _ in range(len(self.asks)):
            peer, ask = self.asks.popleft()
            groups, wait = self.store.ask(ask.epoch, ask.number)
            if groups:
                batch = self.store.batch(groups, ask.epoch, ask.number)
                self.leased[ask.number] = batch
                self.trained.record_lease(batch, self.mask_limit)
                # after a restart the first batch may need no ticket
                self.clock.start(time.monotonic())
                self.send(peer, batch)
                self.learner_waits = None
            elif wait is not None:
                if self.learner_waits is None or self.learner_waits[0] != wait:
                    self.learner_waits = wait, time.monotonic()
                self.asks.append((peer, ask))
        self.grant()
        if not self.store.evaluations.pending:
            for peer, goodbye in self.goodbyes.items():
                self.write_evaluations()
                self.send(peer, m.RunFinished(goodbye.epoch))
                if not self.ended_at:
                    self.ended_at = time.monotonic()
                    self.store.finish()
            self.goodbyes = {} if self.ended_at else self.goodbyes
        self.write_evaluations()

    def grant(self) -> None:
        """Grant tickets to waiting generators in the order of their requests.

        The first request without a ticket ends it, as the store treats all generators alike, unless
        some are reserved for evaluations."""
        now = time.monotonic()
        over = self.store.finished
        for name, (peer, want) in list(self.wants.items()):
            tickets = self.store.grant(want.producer, want.session, want.samples, now)
            if not tickets and not over:
                if self.config.evaluation.generators:  # they are not alike
                    continue
                break
            training = [ticket.ticket for ticket in tickets if ticket.kind == "train"]
            self.meter.on_grant(training, now)
            if training:
                self.clock.start(now)
            self.send_tickets(peer, want, tickets)
            del self.wants[name]
            if over:
                self.generators.pop(name, None)
        if over:
            for name, (peer, want) in self.followers.items():
                self.send_tickets(peer, want, [])
                self.generators.pop(name, None)
            self.followers.clear()
        free = sum(want.samples for _, want in self.wants.values())
        self.meter.on_free(free, self.slots * len(self.generators), now)
        self.announce_version()

    def send_tickets(self, peer: bytes, want: m.TicketRequest, tickets: list[m.Ticket]) -> None:
        announcement = self.announcement()
        over = self.store.finished
        self.send(peer, m.TicketGrant(want.session, want.sequence, tickets, announcement, over))

    def announce_version(self) -> None:
        """Announce a new version to waiting generators, so that they load it while they wait.

        It goes to generators that have just asked, that are next in line, or that sample calls of
        sessions.  If the window keeps samples fresh, it also goes to those in the middle of their
        samples. The others receive it with the reply to their next renewal."""
        policy = self.store.policy
        if self.announcement() is None:
            return
        if policy != self.told:
            self.told = policy
            self.fresh |= dict.fromkeys(itertools.islice(self.wants, NEWS))
            self.fresh |= dict.fromkeys(self.followers)
            if self.store.settings.wait:
                busy = (name for name in self.generators if name not in self.wants)
                self.fresh |= dict.fromkeys(itertools.islice(busy, NEWS))
        fresh, self.fresh = self.fresh, {}
        for name in fresh:
            request = self.wants.get(name) or self.followers.get(name)
            entry = self.generators.get(name)
            if request is None or entry is None:
                if entry is not None and "greeted" in entry and entry.get("told") != policy:
                    entry["told"] = policy
                    self.send(
                        entry["peer"], m.HeartbeatReply(self.store.epoch, self.announcement())
                    )
                continue
            peer, want = request
            if want.holding != policy and entry.get("told") != policy:
                entry["told"] = policy
                self.send_tickets(peer, want, [])

    # ---- numbers ---------------------------------------------------------------------------------

    def record_commit(self, commit: m.Commit, limit: dict[str, float]) -> None:
        """Write the metrics, the lags and some samples of a trained batch, and the new limit."""
        now = time.monotonic()
        self.progress += 1
        self.taken = 0
        self.last_commit = now
        batch = self.leased.pop(commit.number, None)
        values = dict(commit.metrics)
        if (step_s := values.get("time/step", 0.0)) > 0:
            self.step_s.append(step_s * (1 - values.get("time/learner_idle_share", 0.0)))
        self.mismatch = max(
            self.mismatch,
            *(
                values.get(name, 0.0)
                for name in ("mismatch/k3_at_lag_0", "mismatch/k3_one_version")
            ),
        )
        histogram: dict[str, list[float]] = {}
        if batch is not None:
            values |= numbers.batch_metrics(batch, self.trained.add(batch, self.mask_limit))
            histogram["lag/samples"] = [float(x) for x in batch.lags]
            for row in numbers.sample_rows(batch, self.config.record):
                self.samples.write(row)
        values |= (
            self.generator_numbers(now)
            | self.judge_numbers()
            | {
                "buffer/groups": len(self.store.alive),
                "buffer/bytes": self.store.stored_bytes,
                "buffer/leases": sum(g.lease is not None for g in self.store.alive.values()),
                **({"buffer/set_aside": self.store.aside} if self.store.aside else {}),
                **self.store.ledger_metrics(),
                **{f"refused/{reason}": count for reason, count in self.refused.items()},
                **limit,
            }
        )
        self.latest |= values
        self.metrics.write(commit.number, values, self.clock.seconds_at(now), histogram)

    def judge_numbers(self) -> dict[str, float]:
        """Numbers of the judge's requests so far; names outside the metrics table are dropped."""
        stats = [(entry["host"], entry["stats"]) for entry in self.generators.values()]
        return {k: v for k, v in numbers.judge_metrics(stats).items() if k in metrics.METRICS}

    def generator_numbers(self, now: float) -> dict[str, float]:
        """Sums over the generators since the last step."""
        reported = [self.generators[name] for name in self.reported if name in self.generators]
        totals = numbers.new_totals(reported)
        self.reported.clear()
        spent = totals["busy_s"] + totals["idle_s"]
        if not spent:
            # steps are shorter than the generators' report interval: the next report covers all
            # the time since the last one
            return {}
        span = now - (self.last_metrics or self.clock.started_at or now)
        self.last_metrics = now
        stats = [entry["stats"] for entry in self.generators.values()]
        return (
            {
                "throughput/generator_tokens_per_s": totals["tokens"] / max(span, 1e-9),
                "time/generator_idle_share": totals["idle_s"] / spent,
                "time/swap": totals["swap_s"],
            }
            | numbers.reward_metrics(stats, totals, spent)
            | numbers.engine_metrics(stats, totals)
            | numbers.link_metrics(totals, spent)
        )

    def write_evaluations(self) -> None:
        fresh = self.store.evaluations.fresh
        self.store.evaluations.fresh = []
        for number, values in fresh:
            self.latest |= values
            self.metrics.write(number, values, self.clock.seconds_at(time.monotonic()))

    def waits(self) -> list[ProcessWait]:
        """All current waits: the learner's for its batch, and those that generators report."""
        waits = []
        if self.learner_waits is not None:
            wait, since = self.learner_waits
            waits.append(ProcessWait("learner", wait.what, wait.on, time.monotonic() - since))
        return waits + [
            entry["waiting"] for entry in self.generators.values() if entry["waiting"] is not None
        ]

    def log_waits(self) -> None:
        """Log long waits; for the learner's wait also the session that blocks it."""
        lines = self.wait_log.lines(self.waits())
        for line in lines:
            log(line)
        blocking = (
            self.blocking_session() if any(line.startswith("learner ") for line in lines) else None
        )
        if blocking is not None:
            log(blocking.describe())

    def blocking_session(self) -> BlockingSession | None:
        """The session that the learner waits for, or None.

        Sessions of a gateway that is silent do not count: they may have ended."""
        if self.learner_waits is None or self.learner.get("waiting") is None:
            return None
        now = time.monotonic()
        gateways = {
            name: entry
            for name, entry in self.generators.items()
            if entry.get("sessions") and now - entry["at"] < SESSIONS_S
        }
        return find_blocking_session(
            {name: entry["sessions"] for name, entry in gateways.items()},
            self.learner_waits[0].ticket,
            usual_s=max(
                (entry["stats"].get(m.SESSION_P95, 0.0) for entry in gateways.values()), default=0.0
            ),
            step_s=statistics.median(self.step_s) if self.step_s else 0.0,
            max_lag=self.store.max_lag,
        )

    def status(self) -> m.RunStatus:
        now = time.monotonic()
        peers = {name: now - entry["at"] for name, entry in self.generators.items()}
        if self.learner:
            peers["learner"] = now - self.learner["at"]
        return m.RunStatus(
            run=self.run,
            committed=self.store.committed,
            steps=self.store.settings.steps,
            epoch=self.store.epoch,
            metrics=dict(self.latest),
            ledger=self.store.ledger(),
            waits=self.waits(),
            peers=peers,
            finished=bool(self.ended_at),
            error=self.error,
            progress=self.progress,
            held_up=self.blocking_session(),
        )

    def summary(self) -> dict[str, Any]:
        """The part of the run's summary that only the buffer knows."""
        return numbers.summary(
            self.store, self.trained, self.clock.seconds_at(self.last_commit)
        ) | {
            "mismatch_k3_max": self.mismatch,
            "refused": dict(self.refused),
            "finished": bool(self.ended_at),
            "error": self.error,
        }

    def write_summary(self) -> None:
        """Write RUN/buffer_summary.json atomically. Raises AsyncrlError when the disk is full."""
        path = self.run_dir / "buffer_summary.json"
        try:
            atomic_write.write(path, json.dumps(self.summary()))
        except OSError as error:
            raise jsonl.make_disk_full_error(path, error) from error

    def close(self) -> str:
        """Close everything; return the first error message, or "".

        After a takeover the other buffer's files are not touched."""
        errors = []
        kept = [self.store.journal] if isinstance(self.store, RecordedStore) else []
        last = [] if self.taken_over else [self.write_summary]
        for end in (
            *last,
            self.metrics.close,
            self.trackers.close,
            self.samples.close,
            self.trained.close,
            *(journal.abandon if self.taken_over else journal.close for journal in kept),
            self.term.end,
        ):
            try:
                end()
            except (AsyncrlError, OSError) as error:
                errors.append(str(error))
        self.socket.close()
        return errors[0] if errors else ""


def main(config: Config, run_dir: Path, *, moved: bool = False) -> bool:
    """Serve the run in `run_dir`; return True when it is finished, False after SIGTERM.

    moved: take over from a buffer at another address.
    Raises AsyncrlError when the run must stop, BufferTakenOver when another buffer takes it over.
    """
    lock = RunLock(run_dir, "buffer")
    memory.keep_freed()
    service = BufferService(config, run_dir, moved=moved)
    clear_end(run_dir)
    # The thousands of stored samples contain no cycles. Searching for cycles took a sixth of the
    # buffer's time, and at a threshold of 100,000 still a tenth, because the samples kept for a
    # checkpoint are as many objects.
    gc.set_threshold(1_000_000, 50, 50)

    def end(_number: int, _frame: object) -> None:
        service.stop = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN if os.environ.get("ASYNCRL_SUPERVISED") else end)
    close_error = ""
    try:
        service.loop()
        return bool(service.ended_at)
    except BufferTakenOver:
        service.taken_over = True  # send nothing: the peers belong to the other buffer
        raise
    except AsyncrlError as error:
        service.error = str(error)
        for entry in [
            *service.generators.values(),
            *([service.learner] if "peer" in service.learner else []),
        ]:
            service.socket.send(entry["peer"], m.Refusal(str(error), error.exit_code))
        raise
    finally:
        close_error = service.close()
        lock.close()
    if close_error:
        raise AsyncrlError(close_error)
