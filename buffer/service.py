"""The buffer process: sockets around the store, and the writer of the run's metrics.

It never blocks on a peer.  Only this module reads the clock; it passes the time on as an argument:
leases, ages of waits, wall time since the first ticket."""

import contextlib
import gc
import itertools
import json
import math
import os
import socket
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import admission
from asyncrl.contract import messages as m
from asyncrl.contract.blobs.images import MOST_SESSION_BYTES
from asyncrl.contract.errors import (
    AsyncrlError,
    BadMessage,
    BufferTakenOver,
    DamagedDataError,
    ProcessLost,
)
from asyncrl.contract.freshness import BatchMeter
from asyncrl.contract.messages import Numbers
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
from asyncrl.records import append_log, atomic_write, buffer_leadership, jsonl, metrics
from asyncrl.records.metrics import MetricsWriter, RunClock
from asyncrl.records.process_log import is_supervised, stop_at_signals
from asyncrl.records.rundir import RunLock, clear_end, get_buffer_address, read_run_id
from asyncrl.records.trackers import TrackerFeeds
from asyncrl.tasks import Task
from asyncrl.tasks.evaluation_sets import build_task, check_prompt_files
from asyncrl.transport import message_checks, sockets
from asyncrl.transport.sockets import BufferSocket
from buffer import batches, checks, numbers
from buffer.evaluation import EvaluationPlan, Evaluations, EvaluationSet
from buffer.groups import make_store_settings
from buffer.journal import RecordedStore
from buffer.mixer import make_mixer
from buffer.sessions import PeerSessions, PeerState
from buffer.store import Store
from buffer.training_log import TrainingLog

POLL_S = 0.25
TICK_S = 0.25
SYNC_POLL_S = 0.001  # while replies wait for the disk
NO_SESSION = -1  # the number of no session: all leases of a producer end
# Seconds that the buffer stays after the end of a run, for generators that have not requested again
# yet. A generator on a slow machine or link would otherwise lose its peer and exit with an error.
LINGER_S = 20.0
ANSWER_BYTES = 1024  # per token of a completion: ids, logprobs, texts, a version each
MORE_BYTES = 4 * 1024 * 1024  # for other contents of messages: ledgers, lists of tickets
FORGET = 0.9  # decay of a generator's longest gap between renewals, per renewal
MOST_NOTIFIED = 64  # waiting generators that receive a new version at once
FIRST_JOINED = 1000  # first number of generators that join without a key
SESSIONS_S = 5.0  # a gateway's list of sessions is outdated after this time
PASS = 500  # messages received before replies are sent: a flooding peer must not block the others
OUTGOING = 10_000  # replies waiting for the disk; with more, nothing is received
MOST_REFUSED = 16  # refused samples of a generator, beyond its number of good samples
MOST_BATCH_REQUESTS = 16  # pending batch requests; a learner sends two
SILENT_S = 10.0  # a learner that sends nothing for longer trains a long batch, hangs or has ended
LOGGED_REFUSALS = 20  # refusals in the log; further ones are only counted


ShowStatus = Callable[[m.RunStatus, float], None]  # status, CLOCK_MONOTONIC seconds


def make_evaluations(config: Config, task: Task) -> Evaluations:
    """Make the run's evaluations, with no more prompts than the task has."""
    evaluation = config.evaluation

    def cap_prompts(prompts: int, split: str) -> int:
        size = task.size(split)
        return prompts if size is None else min(prompts, size)

    plan = EvaluationPlan(
        every=evaluation.every,
        prompts=cap_prompts(evaluation.prompts, "heldout"),
        final_prompts=cap_prompts(evaluation.final_prompts, "heldout"),
        ood_prompts=cap_prompts(evaluation.ood_prompts, "ood"),
        temperature=evaluation.temperature,
        ood_every=evaluation.ood_every,
        sets=tuple(
            EvaluationSet(
                number=number,
                prompts=cap_prompts(entry.prompts, entry.name),
                name=entry.name,
                every=entry.every,
                samples=entry.samples,
                greedy=entry.greedy,
                temperature=entry.temperature,
                passing=entry.passing,
                counts=entry.counts,
            )
            for number, entry in enumerate(evaluation.sets, 2)
        ),
    )
    return Evaluations(plan, lambda split, index: task.prompt(split, index, config.seed))


def open_store(
    config: Config, run_dir: Path, task: Task, term: buffer_leadership.BufferTerm | None = None
) -> Store:
    """Make a new store (`memory`), or restore one from the journal (`process`, `disk`).

    Raises DamagedDataError if the journal does not replay, BufferTakenOver if there is a later
    term."""

    def prompt(index: int) -> m.Prompt:
        return task.prompt("train", index, config.seed)

    mode = config.durability.mode
    store = (Store if mode == "memory" else RecordedStore)(
        make_store_settings(config),
        prompt,
        make_evaluations(config, task),
        make_mixer(config, task),
    )
    if isinstance(store, RecordedStore):
        store.open(run_dir / "journal", sync=mode == "disk", now=time.monotonic(), term=term)
    return store


def compute_max_message_bytes(config: Config) -> int:
    """Compute the bytes of the largest valid message: completions of full context, with texts.

    Agents that call over HTTP may send images, which come with their session."""
    token_bytes = ANSWER_BYTES + config.support_bytes
    frame_bytes = 2 * config.wires.frame_bytes + token_bytes * config.generator.context
    if config.serves_agents:
        frame_bytes += MOST_SESSION_BYTES
    return min(m.MAX_FRAME_BYTES, MORE_BYTES + frame_bytes)


def log(line: str) -> None:
    """Write one line to the log; a full disk is ignored."""
    with contextlib.suppress(OSError):
        print(escape_line(line, LONGEST_LINE), file=sys.stderr)


def has_process_ended(pid: int, host: str) -> bool:
    """Whether a process has certainly ended; False on other machines."""
    if pid <= 0 or host != socket.gethostname():
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    # the state follows the name, which is in parentheses and may hold some; Z: not reaped yet
    return status.rpartition(b")")[2].split()[:1] == [b"Z"]


class BufferService:
    """The loop over one ROUTER socket.

    moved: take over the run at a new address, `wires.address`, which differs from the run's
    config.
    show: gets the run's status at every tick."""

    def __init__(
        self, config: Config, run_dir: Path, *, moved: bool = False, show: ShowStatus | None = None
    ) -> None:
        self.config, self.run_dir, self.run = config, run_dir, read_run_id(run_dir)
        self.show = show
        check_prompt_files(config, run_dir)
        task = build_task(config)
        # before taking the term: a buffer that cannot bind its address must not end another one
        self.socket = BufferSocket(
            get_buffer_address(config, run_dir),
            config.wires.curve_dir,
            run=self.run,
            most=compute_max_message_bytes(config),
        )
        self.socket.refused = self.refuse
        try:
            self.term = buffer_leadership.take_leadership(
                run_dir,
                self.socket.address,
                moved=moved,
                supervised=is_supervised(),
            )
            self.store = open_store(config, run_dir, task, self.term)
        except BaseException:
            self.socket.close()
            raise
        self.store.on_excluded, self.store.mixer.log = self.write_excluded_batch, log
        self.store.evaluations.on_result = self.write_evaluation
        self.has_refused_survivor = False  # a process that has state of an earlier buffer
        # (record that must be durable first, peer, reply): replies that wait for the journal
        self.outgoing: deque[tuple[int, bytes, m.FromBuffer]] = deque()
        self.metrics = MetricsWriter(run_dir)
        self.trackers = TrackerFeeds(run_dir, config.record.trackers)
        self.samples = jsonl.JsonlAppender(run_dir / "samples.jsonl")
        self.ticket_requests: admission.TicketQueue[m.TicketRequest] = admission.TicketQueue(
            self.store.settings.evaluators
        )
        self.to_notify: dict[str, None] = {}  # generators that may lack the newest version
        self.announced: Label | None = None  # the version last sent to waiting generators
        self.batch_requests: dict[int, tuple[bytes, m.BatchRequest]] = {}  # by number
        self.goodbye = b""  # the learner that has trained all batches and waits for the end
        self.generators: dict[str, PeerState] = {}
        # threads on the learner's machine; None: to be counted again
        self.local_threads: int | None = None
        self.sessions = PeerSessions(config.wires.lease_s)
        self.next_joined = FIRST_JOINED  # number of the next generator that joins without a key
        self.model = m.UNKNOWN_MODEL  # until the learner's hello
        self.refused = Counter[str]()  # refused messages by reason
        self.learner: PeerState | None = None
        self.learner_waits: tuple[batches.BatchWait, float] | None = None  # (reason, since when)
        self.wait_log = WaitLog(min(10.0, config.watchdog.floor_s / 2))
        # seconds of the learner's last steps, waits excluded
        self.step_s: deque[float] = deque(maxlen=KEPT)
        self.latest: Numbers = {}
        self.clock = RunClock(run_dir)
        self.last_commit = self.last_metrics = 0.0
        self.trained = TrainingLog(run_dir / "trained.jsonl")
        self.meter = BatchMeter()
        # samples that a generator holds at most
        self.slots = config.agent.sessions if config.uses_sessions else config.generator.slots
        self.error = ""
        self.stop = self.taken_over = False
        self.progress = 0  # commits and samples so far: shows the supervisor that the run is alive
        self.counted_samples = 0  # samples that count as progress since the last commit
        if self.store.finished and not (run_dir / "weights_digest").exists():
            # restored after the end, but the learner's export is missing: the learner will restart
            # and send its goodbye again
            self.store.finished = False
        # restored after the end: only generators still have to receive it
        self.ended_at = time.monotonic() if self.store.finished else 0.0
        self.ended_before = self.store.finished
        self.mismatch = 0.0

    # ---- the loop --------------------------------------------------------------------------------

    def loop(self) -> None:
        """Serve until `stop`, or until the run is over and every generator has received its end.

        Raises AsyncrlError when the run must stop, BufferTakenOver when another buffer takes it
        over."""
        ticked = 0.0
        while not self.stop:
            self.receive_messages()
            self.answer()
            now = time.monotonic()
            if now - ticked > TICK_S:
                ticked = now
                self.store.expire(now)
                for name in self.sessions.forget(now):
                    self.remove_generator(name)
                lines = self.wait_log.make_lines(self.list_waits())
                if any(line.startswith("learner ") for line in lines):
                    blocking = self.find_blocker()
                    lines += [] if blocking is None else [blocking.describe()]
                for line in lines:
                    log(line)
                if self.show is not None:
                    self.show(self.make_status(), now)
            self.flush()
            has_served_all = not self.generators and not self.ended_before
            is_over = has_served_all or now - self.ended_at > LINGER_S
            if self.ended_at and not self.outgoing and is_over:
                return

    def receive_messages(self) -> None:
        """Handle up to PASS messages; none while OUTGOING replies wait for the disk.

        Raises BufferTakenOver before it handles a message that came after another buffer took over.
        """
        if len(self.outgoing) >= OUTGOING:
            time.sleep(SYNC_POLL_S)
            return
        now = time.monotonic()
        idle_s = min(POLL_S, self.store.next_opening(now) - now)
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
        """Write the journal, and send the replies whose records are durable."""
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
            if (
                self.config.durability.mode == "memory"
                and self.term.number > 1
                and self.store.policy is None
                and checks.has_state(message)
            ):
                others = (
                    "all other processes" if self.config.uses_sessions else "learner and generators"
                )
                line = (
                    "the earlier buffer's tickets and samples ended with it (durability.mode = "
                    f"memory): start {others} again, and the run continues from its last "
                    f"checkpoint, as after `asyncrl run --resume {self.run_dir}`"
                )
                if not self.has_refused_survivor:
                    log(line)
                self.has_refused_survivor = True
                return self.send(peer, m.Refusal(line, ProcessLost.exit_code))
            if isinstance(message, checks.FROM_WELCOMED) and self.is_fenced(peer, message.epoch):
                return None
            if isinstance(message, m.GeneratorHello | m.LearnerHello):
                head = sockets.make_head(message.run, message.protocol)
                if head != sockets.make_head(self.run):
                    return self.send(peer, sockets.make_foreign_refusal(head, self.run))
            getattr(self, f"on_{kind}")(peer, message)
        except BadMessage as error:
            self.refuse(error.reason, f"refused a {kind}: {error}")
            self.send(peer, m.Refusal(str(error), error.exit_code))

    def refuse(self, reason: str, line: str) -> None:
        """Count a refusal by reason, and log the first LOGGED_REFUSALS.

        The metrics, `asyncrl doctor` and the report show the counts."""
        self.refused[reason] += 1
        self.latest[f"refused/{reason}"] = float(self.refused[reason])
        if self.refused.total() <= LOGGED_REFUSALS:
            log(line)

    # ---- generators ------------------------------------------------------------------------------

    def admit_generator(
        self, peer: bytes, message: m.GeneratorHello | m.ProducerMessage
    ) -> PeerState | None:
        """Return the state of a generator if the session of its message holds its name.

        Any other session has to wait (None) or is refused (None, with a `Refusal`)."""
        now, name, session = time.monotonic(), message.producer, message.session
        holder = self.sessions.names.get(name)
        if holder is None:
            message_checks.check_producer(name)
        known = self.generators.get(name, PeerState())
        holder_ended = (
            holder is not None
            and holder.token != session
            and has_process_ended(known.pid, known.host)
        )
        state = self.sessions.on_message(name, session, now, holder_ended=holder_ended)
        if state == "new":
            self.store.end_sessions(name, session)
            # a ticket granted to a dead session would be blocked until its lease expires
            self.remove_generator(name)
        if state in ("new", "holds"):
            entry = self.generators.setdefault(name, PeerState())
            entry.at, entry.peer = now, peer
            return entry
        reasons = {
            "refused": f"another generator named {name} is running{self.describe_process(name)}: "
            "give this one another --index, or end that one first",
            "over": f"another process has taken over the name {name}{self.describe_process(name)}, "
            "because this one was silent: end one of them",
            "full": f"the buffer already has {len(self.sessions.names)} names of generators, the "
            f"most it keeps, and cannot add {name}: reuse a name",
        }
        if state in reasons:
            self.send(peer, m.Refusal(reasons[state], 2))
        return None

    def describe_process(self, name: str) -> str:
        """Describe the process that holds a name, for an error message; "" if it is unknown."""
        known = self.generators.get(name, PeerState())
        return f" (process {known.pid} on {known.host})" if known.pid else ""

    def on_GeneratorHello(self, peer: bytes, hello: m.GeneratorHello) -> None:
        """Register a generator; queue its request for tickets if that came first."""
        if (entry := self.admit_generator(peer, hello)) is not None:
            entry.pid, entry.host, entry.is_greeted = hello.pid, hello.host, True
            self.local_threads = None
            if entry.early is not None:
                self.queue_ticket_request(entry, entry.early)
                entry.early = None

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
            message_checks.check_producer(message.producer)
        announcement = self.make_announcement()
        name = message.producer or self.socket.sender
        if not name:
            numbers_from = itertools.count(self.next_joined)
            number = next(n for n in numbers_from if f"generator-{n}" not in self.sessions.names)
            self.next_joined = number + 1
            name = f"generator-{number}"
        weights = "" if announcement is None else announcement.source.address
        self.send(peer, m.JoinReply(self.run, name, load.dump(self.config), weights))

    def on_TicketRequest(self, peer: bytes, request: m.TicketRequest) -> None:
        """Queue a request for tickets; a generator without a hello must send it first."""
        entry = self.admit_generator(peer, request)
        if entry is None:
            return
        if entry.is_greeted:
            self.queue_ticket_request(entry, request)
        else:
            entry.early = request
            self.send(peer, m.UnknownSession(request.producer, request.session))

    def queue_ticket_request(self, entry: PeerState, request: m.TicketRequest) -> None:
        """Queue a request for tickets, or for new versions alone."""
        if request.samples:
            self.ticket_requests.add(request.producer, request.samples, request)
        else:
            entry.follows = request
        self.to_notify[request.producer] = None

    def remove_generator(self, name: str) -> None:
        """Drop what is known of a generator, with its queued requests."""
        self.generators.pop(name, None)
        self.local_threads = None
        self.ticket_requests.remove(name)

    def on_Delivery(self, peer: bytes, message: m.Delivery) -> None:
        """Accept finished samples, also from a session that has lost its name."""
        samples, refused = checks.check_delivery(
            self.store, message.samples, self.model, message.images
        )
        entry = self.admit_generator(peer, message)
        if refused or (entry is not None and entry.refused):
            # refused samples count once, however often they are sent, and good ones offset them
            new_keys = [x.key for x in samples if not self.store.is_delivered(x.key)]
            errors = [refused[key] for key in new_keys if key in refused]
            excess = 0
            if entry is not None:
                excess = max(0, entry.refused + 2 * len(errors) - len(new_keys))
            if errors and excess > MOST_REFUSED:
                raise BadMessage(
                    f"{message.producer} delivered {excess} more unusable samples than good ones "
                    f"(at most {MOST_REFUSED} are allowed); the last one: {errors[-1]}",
                    errors[-1].reason,
                )
            if entry is not None:
                entry.refused = excess
            for error in errors:
                self.refuse(error.reason, f"failed a sample of {message.producer}: {error}")
        if entry is not None or self.sessions.is_over(message.producer, message.session):
            self.store.report_tokens(message.producer, message.session, message.drawn)
        dispositions = self.store.accept_samples(
            samples, b"" if refused else self.socket.payload, message.images
        )
        tickets = {sample.ticket for sample in samples}
        self.meter.on_complete(filter(self.store.is_complete, tickets), time.monotonic())
        acks = [
            (*sample.key, disposition)
            for sample, disposition in zip(samples, dispositions, strict=True)
        ]
        self.progress += sum(sample.ticket >= m.EVAL_BASE for sample in samples)
        # accepted samples are progress, at most those of one batch between two commits: a higher
        # count would hide a learner that hangs
        accepted = dispositions.count("accepted")
        counted = min(accepted, self.store.settings.batch_samples - self.counted_samples)
        self.counted_samples += counted
        self.progress += counted
        self.send(
            peer,
            m.DeliveryAcks(
                message.session, acks, self.config.wires.credit_bytes, self.make_announcement()
            ),
        )

    def on_LeaseRenewal(self, peer: bytes, message: m.LeaseRenewal) -> None:
        """Renew leases by progress, and store the numbers, the wait and the sessions."""
        checks.check_renewal(message)
        checks.check_progress(self.store, message.progress)
        entry = self.admit_generator(peer, message)
        if entry is None and not self.sessions.is_over(message.producer, message.session):
            return
        self.store.report_tokens(message.producer, message.session, message.drawn)
        now = time.monotonic()
        gap = 0.0
        if entry is not None:  # the longest gap decays slowly
            gap = max(now - (entry.renewed or now), FORGET * entry.gap)
            entry.renewed, entry.gap = now, gap
        self.store.renew(
            message.producer, message.session, message.progress, now, message.judging, gap=gap
        )
        if entry is not None:
            # leases of tickets that were lost with a connection or an earlier buffer process: the
            # generator names its attempts, and the one up to which it takes no further tickets
            lists = (message.progress, message.judging, message.written)
            named = {row[1] for rows in lists for row in rows}
            unheld = self.store.leases.find_unnamed_attempts(
                message.producer, message.session, message.taken, named
            )
            if unheld:
                self.store.free_leases(unheld)
            stats = entry.stats = message.stats
            entry.waiting, entry.sessions = message.waiting, message.sessions
            age = stats.get("generator/busy_s", 0.0) + stats.get("generator/idle_s", 0.0)
            started_at = self.clock.started_at
            if started_at and entry.counted is None and age > now - started_at:
                entry.counted = stats  # a first report with the time of an earlier buffer
            names = ("reward/judged", "reward/waited_s", "reward/called_s")
            rewards = [stats.get(name, 0.0) for name in names]
            workers = stats.get("reward/workers", 0.0)
            self.meter.on_rewards(message.producer, rewards, workers, now)
            self.send(
                peer,
                m.HeartbeatReply(
                    self.store.epoch,
                    self.make_announcement(),
                    attempts=self.store.attempts,
                    cause=self.find_wait_cause(message.waiting)[0],
                ),
            )

    def on_GeneratorGoodbye(self, peer: bytes, message: m.GeneratorGoodbye) -> None:
        """End the leases of a generator that exits."""
        if not self.sessions.end_session(message.producer, message.session):
            return  # another session holds its name and its leases
        self.store.end_sessions(message.producer, NO_SESSION)
        self.remove_generator(message.producer)

    def make_announcement(self) -> m.PolicyAnnouncement | None:
        """Make the store's announcement; None before a learner's hello to this buffer process.

        The journal may name a learner that is dead."""
        return self.store.make_announcement() if self.learner else None

    # ---- the learner -----------------------------------------------------------------------------

    def on_LearnerHello(self, peer: bytes, hello: m.LearnerHello) -> None:
        """Follow a learner, or reply why not."""
        checks.check_hello(hello)
        is_new = hello.epoch != self.store.epoch
        unreported = self.list_unreported_batches(hello.label.number) if is_new else []
        if not self.store.follow_learner(hello):
            reply: m.Refusal | m.FencedReply = m.FencedReply(hello.epoch, self.store.epoch)
            is_newest = hello.epoch > self.store.epoch and hello.origin >= self.store.active
            if is_newest and hello.label.number < self.store.base:
                # its checkpoint is older than all groups: restarting it would not help
                checkpoints = self.run_dir / "checkpoints"
                remedy = f"start a new run, with a model of {checkpoints} as model.path"
                if self.config.durability.mode == "memory":
                    remedy = (
                        f"end the run and continue with `asyncrl run --resume {self.run_dir}`: a "
                        f"new buffer starts from version {hello.label.number}, and the steps after "
                        "it are repeated"
                    )
                reply = m.Refusal(
                    "the learner's newest intact checkpoint is of version "
                    f"{hello.label.number}, the newer ones are damaged, and the buffer has no "
                    f"groups before version {self.store.base}: {remedy}",
                    DamagedDataError.exit_code,
                )
            self.send(peer, reply)
            return
        if self.ended_at and not self.store.finished:
            self.ended_at, self.ended_before = 0.0, False
        self.local_threads = None
        self.model = m.ModelShape(hello.vocabulary, hello.routing, hello.images)
        if self.store.aside:
            self.latest["buffer/set_aside"] = float(self.store.aside)
        if is_new:
            self.trained.begin_at(hello.label.number)
            for batch in unreported:
                if not self.trained.has_batch(batch.number):
                    self.trained.add(batch, self.store.mask_limit)
            self.batch_requests.clear()
            self.goodbye = b""
        self.learner = PeerState(time.monotonic(), peer, hello.pid)
        self.send(peer, m.Welcome(hello.epoch, self.store.base))

    def write_excluded_batch(self, batch: m.Batch) -> None:
        """Write a batch to RUN/set_aside before the store excludes it.

        Raises AsyncrlError when the disk is full."""
        name = f"batch_{batch.number}_epoch_{batch.epoch}.jsonl"
        path = self.run_dir / "set_aside" / name
        with append_log.name_full_disk(path):
            path.parent.mkdir(exist_ok=True)
            atomic_write.write(path, jsonl.encode(numbers.make_batch_rows(batch)))
        tokens = sum(sample.length for sample in batch.samples)
        log(
            f"batch {batch.number} is excluded, because the last learner processes ended on it; "
            f"its {len(batch.samples)} samples ({tokens} tokens, `fatal` in the ledger) are kept "
            f"in {path}, and the run continues without them"
        )

    def list_unreported_batches(self, number: int) -> list[m.Batch]:
        """List the stored batches before `number` that the training log lacks.

        The commit of such a batch was lost, or its row was torn."""
        store = self.store
        unreported: list[m.Batch] = []
        if store.policy is None:
            return unreported
        for earlier, tickets in enumerate(store.comps, store.base):
            if earlier >= number or self.trained.has_batch(earlier):
                continue
            groups = map(store.find_group, tickets)
            if all(group is not None and group.is_complete for group in groups):
                unreported.append(store.make_batch(earlier))
        return unreported

    def is_fenced(self, peer: bytes, epoch: int) -> bool:
        """Whether a message is not from the current learner; True before any hello.

        The learner of an earlier epoch gets a `FencedReply`."""
        if self.store.policy is None:
            return True
        if epoch < self.store.epoch:
            self.send(peer, m.FencedReply(epoch, self.store.epoch))
        elif epoch == self.store.epoch:
            # a restarted buffer knows the learner of its journal by any message of it
            self.learner = self.learner or PeerState()
            self.learner.at = time.monotonic()
        return epoch != self.store.epoch

    def on_BatchRequest(self, peer: bytes, request: m.BatchRequest) -> None:
        """Queue a request for a batch; a repeated one keeps its place."""
        checks.check_batch_request(self.store, request.number)
        self.batch_requests[request.number] = peer, request
        if len(self.batch_requests) > MOST_BATCH_REQUESTS:
            del self.batch_requests[next(iter(self.batch_requests))]

    def on_Commit(self, peer: bytes, commit: m.Commit) -> None:
        """Commit a trained batch, and write its metrics.

        Raises BadMessage for a metric without a name in the table of metrics."""
        checks.check_commit(self.store, commit.number, commit.label, commit.unused)
        if unknown := [name for name in commit.metrics if not metrics.is_known_metric(name)]:
            raise BadMessage(
                f"metrics not in asyncrl/records/metrics.toml: {', '.join(unknown)[:200]}"
            )
        previous_limit = self.store.limit
        evidence = admission.read_evidence(commit.metrics, self.store.settings.ess_floor)
        now = time.monotonic()
        timing = batch = None
        if commit.number == self.store.committed:
            tickets = self.store.comps[commit.number - self.store.base]
            batch = self.store.make_batch(commit.number)
            idle_share = commit.metrics.get("time/learner_idle_share", 0.0)
            timing = self.meter.on_commit(tickets, idle_share, now)
        is_committed = self.store.commit(
            commit.number,
            commit.label,
            commit.digest,
            commit.unused,
            evidence=evidence,
            timing=timing,
            now=now,
        )
        if is_committed is None:
            return
        if batch is not None:
            self.record_commit(commit, batch, previous_limit)
        self.send(
            peer, m.CommitReply(commit.epoch, commit.number, self.store.list_pinned_versions())
        )

    def on_CheckpointNotice(self, peer: bytes, message: m.CheckpointNotice) -> None:
        """Retire the batches before the oldest checkpoint."""
        self.store.retire_batches(message.oldest)
        self.trained.fold_below(self.store.base)

    def on_LearnerGoodbye(self, peer: bytes, message: m.LearnerGoodbye) -> None:
        """Queue the goodbye of a learner that has trained all batches."""
        message_checks.require(
            self.store.committed >= self.store.settings.steps,
            f"the learner leaves at version {message.number}, but only {self.store.committed} "
            f"of {self.store.settings.steps} batches are committed (learner.steps)",
        )
        self.goodbye = peer

    def on_LearnerProgress(self, peer: bytes, message: m.LearnerProgress) -> None:
        """Store the learner's numbers and its wait."""
        self.send(peer, m.HeartbeatReply(message.epoch))
        assert self.learner is not None
        self.learner.waiting, self.learner.pid = message.waiting, message.pid

    def on_StatusRequest(self, peer: bytes, message: m.StatusRequest) -> None:
        """Reply with the status of the run."""
        self.send(peer, self.make_status())

    # ---- replies that wait for the state ---------------------------------------------------------

    def answer(self) -> None:
        """Send the replies that the last messages allow: batches, tickets, the end."""
        for peer, request in [*self.batch_requests.values()]:
            groups, wait = self.store.ask(request.epoch, request.number)
            if wait is None:
                del self.batch_requests[request.number]
            elif self.learner_waits is None or self.learner_waits[0] != wait:
                self.learner_waits = wait, time.monotonic()
            if groups:
                batch = self.store.make_batch(request.number)
                self.trained.record_lease(batch, self.store.mask_limit)
                # after a restart the first batch may need no ticket
                self.start_clock(time.monotonic())
                self.send(peer, batch)
                self.learner_waits = None
        self.grant()
        if self.goodbye and not self.store.evaluations.rounds:
            self.send(self.goodbye, m.RunFinished(self.store.epoch))
            self.goodbye = b""
            if not self.ended_at:
                self.ended_at = time.monotonic()
                self.store.finish()

    def start_clock(self, now: float) -> None:
        """Start the time of RL at its first ticket; what generators did before is not of it."""
        if not self.clock.started_at:
            numbers.sum_growth(self.generators.values())
        self.clock.start(now)

    def grant(self) -> None:
        """Grant tickets to waiting generators; at the run's end, send all of them its end."""
        now = time.monotonic()
        is_finished = self.store.finished
        queue = self.ticket_requests
        divides = len(queue.waiting) > 1 and admission.divides_batches(
            self.store.max_lag, self.count_local_threads(), len(os.sched_getaffinity(0))
        )

        def grant(name: str, samples: int, request: m.TicketRequest) -> bool:
            tickets = self.store.grant(name, request.session, samples, now)
            if not tickets and not is_finished:
                return False
            training = [ticket.ticket for ticket in tickets if ticket.kind == "train"]
            self.meter.on_grant(training, now)
            if training:
                self.start_clock(now)
            self.send_tickets(request, tickets)
            return True

        granted = queue.serve(self.store.settings.batch_samples if divides else math.inf, grant)
        if is_finished:
            for name, entry in [*self.generators.items()]:
                if entry.follows is not None:
                    self.send_tickets(entry.follows, [])
                if entry.follows is not None or name in granted:
                    self.remove_generator(name)
        self.meter.on_free(queue.free, self.slots * len(self.generators), now)
        self.announce_version()

    def count_local_threads(self) -> int:
        """Count the threads of the learner and of the generators on its machine.

        That machine is taken for the buffer's, whose cores are known.
        """
        if self.local_threads is None:
            host = self.store.source.host if self.store.source is not None else ""
            local = [entry for entry in self.generators.values() if entry.host == host]
            config = self.config
            self.local_threads = config.learner.thread_count
            self.local_threads += len(local) * config.generator.threads
        return self.local_threads

    def send_tickets(self, request: m.TicketRequest, tickets: list[m.Ticket]) -> None:
        """Send a grant, which may have no tickets, with the current version."""
        self.send(
            self.generators[request.producer].peer,
            m.TicketGrant(
                request.session,
                request.sequence,
                tickets,
                self.make_announcement(),
                self.store.finished,
            ),
        )

    def announce_version(self) -> None:
        """Announce a new version to waiting generators, so that they load it while they wait.

        It goes to generators that have just requested tickets, that are next in line, or that
        sample calls of sessions.  If the window keeps samples fresh, it also goes to generators in
        the middle of their samples. The others receive it with the reply to their next renewal."""
        policy, waiting = self.store.policy, self.ticket_requests.waiting
        if self.make_announcement() is None:
            return
        if policy != self.announced:
            self.announced = policy
            self.to_notify |= dict.fromkeys(itertools.islice(waiting, MOST_NOTIFIED))
            entries = self.generators.items()
            self.to_notify |= dict.fromkeys(name for name, x in entries if x.follows is not None)
            if self.store.settings.wait:
                busy = (name for name in self.generators if name not in waiting)
                self.to_notify |= dict.fromkeys(itertools.islice(busy, MOST_NOTIFIED))
        names, self.to_notify = self.to_notify, {}
        for name in names:
            entry = self.generators.get(name)
            if entry is None or entry.announced == policy:
                continue
            _, request = waiting.get(name, (0, entry.follows))
            if request is None:
                if entry.is_greeted:
                    entry.announced = policy
                    cause = self.find_wait_cause(entry.waiting)[0]
                    announcement = self.make_announcement()
                    reply = m.HeartbeatReply(self.store.epoch, announcement, cause=cause)
                    self.send(entry.peer, reply)
                continue
            if request.holding != policy:
                entry.announced = policy
                self.send_tickets(request, [])

    # ---- numbers ---------------------------------------------------------------------------------

    def record_commit(
        self, commit: m.Commit, batch: m.Batch, previous: admission.AdaptiveLimit
    ) -> None:
        """Write the metrics, the lags and some samples of a trained batch.

        batch: before the commit.
        previous: the adaptive limit before the commit."""
        now = time.monotonic()
        self.progress += 1
        self.counted_samples = 0
        values = dict(commit.metrics)
        if self.clock.started_at:
            numbers.leave_out_wait_for_ticket(values, now - self.clock.started_at)
        self.last_commit = now
        if (step_s := values.get("time/step", 0.0)) > 0:
            self.step_s.append(step_s * (1 - values.get("time/learner_idle_share", 0.0)))
        self.mismatch = max(
            self.mismatch,
            *(
                values.get(name, 0.0)
                for name in ("mismatch/k3_at_lag_0", "mismatch/k3_one_version")
            ),
        )
        counts = self.trained.add(batch, self.store.mask_limit)
        histogram = {"lag/samples": [float(lag) for lag in batch.lags]}
        for row in numbers.select_sample_rows(batch, self.config.record):
            self.samples.write(row)
        values |= (
            numbers.compute_batch_metrics(batch, counts)
            | self.compute_generator_metrics(now)
            | numbers.compute_judge_metrics(
                (entry.host, entry.stats) for entry in self.generators.values()
            )
            | numbers.compute_limit_metrics(self.store, previous)
            | self.store.mixer.compute_metrics(self.store.committed)
            | {
                "buffer/groups": len(self.store.alive),
                "buffer/bytes": self.store.stored_bytes,
                "buffer/leases": sum(
                    group.lease is not None for group in self.store.alive.values()
                ),
                **({"buffer/set_aside": self.store.aside} if self.store.aside else {}),
                **{
                    f"ledger/{name}": line.tokens
                    for name, line in self.store.make_ledger().lines.items()
                    if line.tokens
                },
                **{f"refused/{reason}": count for reason, count in self.refused.items()},
            }
        )
        self.latest |= values
        self.metrics.write(commit.number, values, self.clock.seconds_at(now), histogram)

    def compute_generator_metrics(self, now: float) -> Numbers:
        """Compute the metrics of the generators since the last step.

        Returns {} if they have not reported since then."""
        if not self.clock.started_at:
            return {}  # the sums are of an earlier buffer
        # steps may be shorter than the generators' report interval: the next report covers all the
        # time since the last one
        metrics = numbers.compute_generator_metrics(
            [entry.stats for entry in self.generators.values()],
            numbers.sum_growth(self.generators.values()),
            now - (self.last_metrics or self.clock.started_at),
        )
        self.last_metrics = now if metrics else self.last_metrics
        return metrics

    def write_evaluation(self, number: int, values: Numbers) -> None:
        """Write the result of an evaluation at version `number` to the metrics."""
        self.latest |= values
        self.metrics.write(number, values, self.clock.seconds_at(time.monotonic()))

    def list_waits(self) -> list[ProcessWait]:
        """List the current waits: the learner's for its batch, and those that generators report."""
        waits = []
        # while the learner trains, its request for the next batch does not make it wait
        if self.learner_waits is not None and self.store.committed not in self.store.leased:
            wait, since = self.learner_waits
            waited_s = time.monotonic() - since
            waits.append(ProcessWait("learner", wait.reason, wait.process, waited_s))
        for entry in self.generators.values():
            if (waiting := entry.waiting) is not None:
                cause, process = self.find_wait_cause(waiting)
                if cause:
                    waiting = waiting._replace(what=f"{waiting.what}: {cause}", on=process)
                waits.append(waiting)
        return waits

    def find_wait_cause(self, waiting: ProcessWait | None) -> tuple[str, str]:
        """Find why a generator has no ticket or call, and the process that must act.

        Returns ("", "") for other waits."""
        if waiting is None or waiting.what not in (m.TICKET_WAITED_FOR, m.CALL_WAITED_FOR):
            return "", ""
        sessions = [s for entry in self.generators.values() for s in entry.sessions]
        if waiting.what == m.CALL_WAITED_FOR and sessions:
            oldest = max(sessions, key=lambda session: session.seconds)
            text = f"{len(sessions)} sessions are open; the oldest waits for {oldest.what}"
            return text, "gateway"
        if not self.learner:
            return "no learner has connected to this buffer", "learner"
        source = self.store.source
        if source is not None and has_process_ended(self.learner.pid, source.host):
            return "the learner has ended", "learner"
        number = self.store.committed
        silent_s = time.monotonic() - self.learner.at
        trains = number in self.store.leased
        if silent_s > SILENT_S:
            text = f"the learner has been silent for {silent_s:.0f} s"
            return text + (f"; it trains batch {number}" if trains else ""), "learner"
        if trains:
            reason = "all tickets of the run are granted" if self.store.is_covered else "no room"
            return f"{reason} before the learner has trained batch {number}", "learner"
        if self.learner_waits is not None:
            wait = self.learner_waits[0]
            return f"the learner waits for {wait.reason}", wait.process
        return f"the learner has not requested batch {number} yet", "learner"

    def find_blocker(self) -> BlockingSession | None:
        """Find the session that the learner waits for, or None.

        Sessions of a gateway that is silent do not count: they may have ended."""
        if self.learner_waits is None or self.learner is None or self.learner.waiting is None:
            return None
        now = time.monotonic()
        gateways = {
            name: entry
            for name, entry in self.generators.items()
            if entry.sessions and now - entry.at < SESSIONS_S
        }
        return find_blocking_session(
            {name: entry.sessions for name, entry in gateways.items()},
            self.learner_waits[0].ticket,
            usual_s=max(
                (entry.stats.get(m.SESSION_P95, 0.0) for entry in gateways.values()), default=0.0
            ),
            step_s=statistics.median(self.step_s) if self.step_s else 0.0,
            max_lag=self.store.max_lag,
        )

    def make_status(self) -> m.RunStatus:
        """Make the status message of the run."""
        now = time.monotonic()
        peers = {name: now - entry.at for name, entry in self.generators.items()}
        if self.learner:
            peers["learner"] = now - self.learner.at
        return m.RunStatus(
            run=self.run,
            committed=self.store.committed,
            steps=self.store.settings.steps,
            epoch=self.store.epoch,
            metrics=dict(self.latest),
            ledger=self.store.sum_ledger(),
            waits=self.list_waits(),
            peers=peers,
            finished=bool(self.ended_at),
            error=self.error,
            progress=self.progress,
            held_up=self.find_blocker(),
        )

    def make_summary(self) -> dict[str, Any]:
        """Make the part of the run's summary that only the buffer knows."""
        return numbers.make_summary(
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
        with append_log.name_full_disk(path):
            atomic_write.write(path, json.dumps(self.make_summary()))

    def close(self) -> str:
        """Close everything; return the first error message, or "".

        After a takeover the other buffer's files are not touched."""
        actions: list[Callable[[], object]] = [] if self.taken_over else [self.write_summary]
        actions += [self.metrics.close, self.trackers.close, self.samples.close, self.trained.close]
        if isinstance(self.store, RecordedStore):
            journal = self.store.journal
            actions.append(journal.abandon if self.taken_over else journal.close)
        actions.append(self.term.end)
        errors = []
        for action in actions:
            try:
                action()
            except (AsyncrlError, OSError) as error:
                errors.append(str(error))
        self.socket.close()
        return errors[0] if errors else ""


def main(
    config: Config, run_dir: Path, *, moved: bool = False, show: ShowStatus | None = None
) -> bool:
    """Serve the run in `run_dir`; return True when it is finished, False after SIGTERM.

    moved: take over from a buffer at another address.
    show: gets the run's status at every tick.
    Raises AsyncrlError when the run must stop, BufferTakenOver when another buffer takes it over.
    """
    lock = RunLock(run_dir, "buffer")
    memory.keep_freed()
    service = BufferService(config, run_dir, moved=moved, show=show)
    clear_end(run_dir)
    # The thousands of stored samples contain no cycles. Searching for cycles took a sixth of the
    # buffer's time, and at a threshold of 100,000 still a tenth, because the samples kept for a
    # checkpoint are as many objects.
    gc.set_threshold(1_000_000, 50, 50)

    def stop(_number: int, _frame: object) -> None:
        service.stop = True

    stop_at_signals(stop)
    close_error = ""
    try:
        service.loop()
        return bool(service.ended_at)
    except BufferTakenOver:
        service.taken_over = True  # send nothing: the peers belong to the other buffer
        raise
    except AsyncrlError as error:
        service.error = str(error)
        for entry in (*service.generators.values(), service.learner):
            if entry is not None and entry.peer:
                service.socket.send(entry.peer, m.Refusal(str(error), error.exit_code))
        raise
    finally:
        close_error = service.close()
        lock.close()
    if close_error:
        raise AsyncrlError(close_error)
