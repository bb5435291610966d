"""The buffer process: sockets around the store.  It never blocks on a peer; it is also where a
run's numbers are written.

Everything it knows of time is read here and passed in: leases, ages of waits, wall time from the
first ticket."""

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

import psutil

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import admission
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, BadMessage, BufferTakenOver, DamagedDataError
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
from asyncrl.records.rundir import RunLock, buffer_address, clear_end, run_id
from asyncrl.tasks import Task, get_task
from asyncrl.transport.sockets import BufferSocket
from buffer import batches, checks, numbers
from buffer.durable_store import RecordedStore
from buffer.evaluation import Evaluations
from buffer.groups import settings
from buffer.ledger import Key
from buffer.sessions import PeerSessions
from buffer.store import ENOUGH, Store
from buffer.training_log import TrainingLog

POLL_S = 0.25
TICK_S = 0.25
SYNC_POLL_S = 0.001  # while replies wait for the disk
NOBODY = -1  # no session: all of a producer's leases end
# how long the end of the run is told to generators that have not asked yet: one on a slow machine,
# or to which weights come over a slow link, would find nobody and end with an error
LINGER_S = 20.0
ANSWER_BYTES = 1024  # of a token of an answer: ids, logprobs, texts, a version each
MORE_BYTES = 4 * 1024 * 1024  # of a message that is no answer: ledgers, lists of tickets
FORGET = 0.9  # of a generator's longest silence that the next renewal remembers
NEWS = 64  # of those that wait for tickets, so many are told at once of a new version
JOINED = 1000  # numbers of generators that join without a key begin here
SESSIONS_S = 5.0  # a gateway that was silent for so long vouches for no session
PASS = 500  # messages taken in before the others are answered: whoever sends without end waits too
OUTGOING = 10_000  # replies that wait for the disk: with more nothing is taken in
MOST_REFUSED = 16  # samples of a generator that are refused alone, beyond those that are good
ASKS = 16  # batches that are asked for at once; a learner asks for two
REFUSALS_SAID = 20  # lines in the log; further ones are only counted


def evaluations(config: Config, task: Task) -> Evaluations:
    """What this run evaluates; never more prompts than the task has."""
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
    )


def open_store(
    config: Config, run_dir: Path, task: Task, term: buffer_leadership.BufferTerm | None = None
) -> Store:
    """A new store (`memory`), or the journal's, folded (`process`, `disk`)."""

    def prompt(index: int) -> m.Prompt:
        return task.prompt("train", index, config.seed)

    if config.durability.mode == "memory":
        return Store(settings(config), prompt, evaluations(config, task))
    return RecordedStore.open(
        run_dir / "journal",
        sync=config.durability.mode == "disk",
        settings=settings(config),
        prompt=prompt,
        evaluations=evaluations(config, task),
        now=time.monotonic(),
        term=term,
    )


def max_message_bytes(config: Config) -> int:
    """Bytes of the largest message that a peer of this run has reason to send: some frames of
    answers, each as long as its context allows, with texts.
    """
    frame = 2 * config.wires.frame_bytes + ANSWER_BYTES * config.generator.context
    return min(m.MAX_FRAME_BYTES, MORE_BYTES + frame)


def log(line: str) -> None:
    """One line to the log; on a full disk there is none."""
    with contextlib.suppress(OSError):
        print(escape_line(line, LONGEST_LINE), file=sys.stderr, flush=True)


class BufferService:
    """The loop over one ROUTER socket.

    moved: it takes the run over, at `wires.address`, which is not where the run's config says."""

    def __init__(self, config: Config, run_dir: Path, *, moved: bool = False) -> None:
        self.config, self.run_dir, self.run = config, run_dir, run_id(run_dir)
        task = get_task(config.task)
        # before the term is taken: a buffer that nobody could reach ends no other
        self.socket = BufferSocket(
            buffer_address(config, run_dir),
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
        # replies that wait for the journal, with the record they rest on
        self.outgoing: deque[tuple[int, bytes, m.FromBuffer]] = deque()
        self.metrics = MetricsWriter(run_dir)
        self.samples = jsonl.JsonlAppender(run_dir / "samples.jsonl")
        self.wants: dict[str, tuple[bytes, m.TicketRequest]] = {}
        # the same of those that want no sample: they draw the calls of sessions, and are told of
        # every version and of the end
        self.followers: dict[str, tuple[bytes, m.TicketRequest]] = {}
        self.fresh: dict[str, None] = {}  # of all these, who may not know of the newest version
        self.told: Label | None = None  # the version that those waiting were told of last
        self.reported: set[str] = set()  # who has told of its work since the last commit
        self.early: dict[
            str, tuple[bytes, m.TicketRequest]
        ] = {}  # of those who have not said hello
        self.asks: deque[tuple[bytes, m.BatchRequest]] = deque()
        self.goodbyes: dict[bytes, m.LearnerGoodbye] = {}
        self.generators: dict[str, dict[str, Any]] = {}
        self.sessions = PeerSessions(config.wires.lease_s)
        self.next_joined = JOINED  # the number of the next one that joins without a key
        self.toml = load.dump(config)  # for those who join
        self.vocabulary = 0  # of the model, as the learner says; 0: not heard in this life
        self.refused = Counter[str]()  # messages that were, by reason
        self.learner: dict[str, Any] = {}
        self.learner_waits: tuple[batches.BatchWait, float] | None = None  # since when
        self.wait_log = WaitLog(min(10.0, config.watchdog.floor_s / 2))
        # seconds of the learner's last steps, without its waits
        self.step_s: deque[float] = deque(maxlen=KEPT)
        self.latest: dict[str, float] = {}
        self.leased: dict[int, m.Batch] = {}
        self.clock = RunClock(run_dir)
        self.last_commit = self.last_metrics = 0.0
        self.trained = TrainingLog(run_dir / "trained.jsonl")
        self.error = ""
        self.stop = self.taken_over = False
        # taken: samples that counted as progress since the last commit
        self.progress = self.taken = 0
        if self.store.finished and not (run_dir / "weights_digest").exists():
            # folded after the end, and what the learner exports is missing: it comes again, and
            # says goodbye again
            self.store.finished = False
        # folded after the end: only generators are left to be told
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
        """What has come, up to PASS messages; nothing while the disk holds up OUTGOING replies.
        Raises TakenOver: whatever has come since another buffer speaks is not looked at.
        """
        if len(self.outgoing) >= OUTGOING:
            time.sleep(SYNC_POLL_S)
            return
        got = self.socket.recv(SYNC_POLL_S if self.outgoing else POLL_S)
        self.term.check()
        for _ in range(PASS):
            if got is None:
                return
            self.handle(*got)
            got = self.socket.recv(0)
        if got is not None:
            self.handle(*got)

    def send(self, peer: bytes, message: m.FromBuffer) -> None:
        """A reply: it leaves once the journal is as durable as the mode promises, up to the record
        it rests on.
        """
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
        self.term.check()  # behind what is durable: see asyncrl/records/buffer_leadership.py
        while self.outgoing and self.outgoing[0][0] <= durable:
            self.socket.send(*self.outgoing.popleft()[1:])

    def handle(self, peer: bytes, message: m.FromPeer) -> None:
        """One message; what cannot be costs its sender, never the run."""
        kind = type(message).__name__
        try:
            getattr(self, f"on_{kind}")(peer, message)
        except BadMessage as error:
            self.refuse(error.reason, f"refused a {kind}: {error}")
            self.send(peer, m.Refusal(str(error), error.exit_code))

    def refuse(self, reason: str, line: str) -> None:
        """Count it, by reason, for the metrics, `asyncrl doctor` and the report; the first ones
        stand in the log.
        """
        self.refused[reason] += 1
        self.latest[f"refused/{reason}"] = float(self.refused[reason])
        if self.refused.total() <= REFUSALS_SAID:
            log(line)

    # ---- generators ------------------------------------------------------------------------------

    def generator_state(self, name: str, peer: bytes, session: int) -> dict[str, Any] | None:
        """What is known of the generator, when this session holds its name.  Another one waits, or
        is told that it must end.
        """
        now = time.monotonic()
        known = self.sessions.token(name)
        if known is None:
            checks.producer(name)
        said = self.sessions.on_message(
            name, session, now, gone=known not in (None, session) and self.process_gone(name)
        )
        if said == "new":
            self.store.end_sessions(name, session)
            # what a dead session asked for would be granted to nobody, and held until its lease
            # ends
            self.forget_wants(name)
            self.generators[name] = {"stats": {}, "waiting": None, "pid": 0, "host": ""}
        elif said == "refused":
            self.send(
                peer,
                m.Refusal(
                    f"another generator named {name} is running{self.peer_address(name)}: "
                    "give this one "
                    "another --index, or end that one first",
                    2,
                ),
            )
        elif said == "over":
            self.send(
                peer,
                m.Refusal(
                    f"another process has taken the name {name} over{self.peer_address(name)}, "
                    "as this "
                    "one was silent: end one of them",
                    2,
                ),
            )
        elif said == "full":
            self.send(
                peer,
                m.Refusal(
                    f"{len(self.sessions.names)} names of generators are known, and {name} is one "
                    "too many",
                    2,
                ),
            )
        if said not in ("new", "holds"):
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
        """Is the process that holds the name known to have ended?  Only one of this machine can be
        looked up.
        """
        entry = self.generators.get(name, {})
        pid = entry.get("pid", 0)
        if not pid or entry["host"] != socket.gethostname():
            return False
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
        except (psutil.Error, ValueError, OverflowError):
            return False

    def forget(self, now: float) -> None:
        """Names that nobody has carried for very long."""
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
        """What a generator on another machine begins with.  Nothing changes by it: it speaks as a
        generator once it says hello.
        """
        if self.config.agent.uses_sessions:
            why = "agent: the samples are sessions, drawn on the gateway's machine alone"
            self.send(peer, m.Refusal(f"{why}: nobody can join", 2))
            return
        if message.producer:
            checks.producer(message.producer)
        said = self.announcement()
        name = message.producer or self.socket.speaker
        if not name:
            numbers_from = itertools.count(self.next_joined)
            number = next(n for n in numbers_from if f"generator-{n}" not in self.sessions.names)
            self.next_joined = number + 1
            name = f"generator-{number}"
        weights = "" if said is None else said.source.address
        self.send(peer, m.JoinReply(self.run, name, self.toml, weights))

    def on_TicketRequest(self, peer: bytes, want: m.TicketRequest) -> None:
        """Tickets go to those who have said hello to this life of the buffer."""
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
        """Finished samples are taken whoever brings them: also from a session that is over."""
        checks.check_token_count(message.drawn)
        samples, refused = checks.check_delivery(self.store, message.samples, self.vocabulary)
        entry = self.generator_state(message.producer, peer, message.session)
        if refused or (entry is not None and entry.get("refused")):
            self.count_refused(message.producer, samples, refused, entry)
        if entry is not None or self.sessions.is_over(message.producer, message.session):
            self.store.report_tokens(message.producer, message.session, message.drawn)
        became = self.store.accept_samples(samples, b"" if refused else self.socket.payload)
        acks = [
            (sample.ticket, sample.sample, sample.attempt, what)
            for sample, what in zip(samples, became, strict=True)
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
        """Count samples that are refused alone, each once however often it is sent; a good one
        makes up for one of them.  Raises BadMessage, which ends the sender, at MOST_REFUSED.

        entry: what is known of the sender; None: it is over, and is told so anyway."""
        keys = [(each.ticket, each.sample, each.attempt) for each in samples]
        new = [key for key in keys if not self.store.is_delivered(key)]
        bad = [refused[key] for key in new if key in refused]
        total = 0 if entry is None else max(0, entry.get("refused", 0) + 2 * len(bad) - len(new))
        if bad and total > MOST_REFUSED:
            raise BadMessage(
                f"{total} more samples of {producer} could not be used than it delivered good "
                f"ones, of which {MOST_REFUSED} are borne; the last one: {bad[-1]}",
                bad[-1].reason,
            )
        if entry is not None:
            entry["refused"] = total
        for error in bad:
            self.refuse(error.reason, f"failed a sample of {producer}: {error}")

    def progress_samples(self, acks: list[tuple[int, int, int, m.Disposition]]) -> int:
        """Samples taken, as progress of a step that takes long: a batch of them, no more, as a
        learner that hangs would be hidden otherwise.
        """
        fresh = min(
            sum(what == "accepted" for *_, what in acks),
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
        if entry is not None:  # what was long is forgotten by and by
            gap = max(now - entry.get("renewed", now), FORGET * entry.get("gap", 0.0))
            entry["renewed"], entry["gap"] = now, gap
        self.store.renew(
            message.producer, message.session, message.progress, now, message.judging, gap=gap
        )
        if entry is not None:
            self.free_unheld_leases(message)
            entry["stats"], entry["waiting"] = message.stats, message.waiting
            entry["sessions"] = message.sessions
            self.reported.add(message.producer)
            said = self.announcement()
            self.send(peer, m.HeartbeatReply(self.store.epoch, said, attempts=self.store.attempts))

    def free_unheld_leases(self, message: m.LeaseRenewal) -> None:
        """Tickets whose reply died with a connection, or with the buffer's life before, are due
        again: the generator says up to which attempt it takes none, and names those that it has.
        """
        each = (message.progress, message.judging, message.written)
        named = {row[1] for rows in each for row in rows}
        unheld = self.store.unheld_attempts(message.producer, message.session, message.taken, named)
        if unheld:
            self.store.free_leases(unheld)

    def on_GeneratorGoodbye(self, peer: bytes, message: m.GeneratorGoodbye) -> None:
        """A generator ends: what it holds is due again now, and nobody waits for it."""
        if not self.sessions.end_session(message.producer, message.session):
            return  # another session holds its name, and the leases with it
        self.store.end_sessions(message.producer, NOBODY)
        self.forget_wants(message.producer)
        self.generators.pop(message.producer, None)

    def announcement(self) -> m.PolicyAnnouncement | None:
        """What the store announces, once the learner of that epoch has been heard in this life of
        the buffer: a journal also names dead ones.
        """
        return self.store.announcement() if self.learner else None

    # ---- the learner -----------------------------------------------------------------------------

    def on_LearnerHello(self, peer: bytes, hello: m.LearnerHello) -> None:
        if self.refuse_foreign_peer(peer, hello.protocol, hello.run):
            return
        checks.hello(hello)
        new = hello.epoch != self.store.epoch
        unheard = self.unreported_batches(hello.label.number) if new else []
        aside = self.store_suspect_batch(hello) if new else ""
        before = self.store.aside
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
        if self.store.aside > before:
            log(aside)
            self.latest["buffer/set_aside"] = float(self.store.aside)
        if new:
            self.leased = {}
            self.trained.begin_at(hello.label.number)
            for batch in unheard:
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
        """What to do where the newest whole checkpoint is of version `number`, before all that is
        kept here.
        """
        todo = (
            f"end the run and go on with `asyncrl run --resume {self.run_dir}`: a new buffer takes "
            f"version {number}, and the steps after it are made again"
            if self.config.durability.mode == "memory"
            else f"begin a new run, with a model of {self.run_dir / 'checkpoints'} as model.path"
        )
        return (
            f"the newest whole checkpoint of the learner is of version {number}, the newer ones "
            f"are damaged, and the buffer holds nothing before version {self.store.base}: {todo}"
        )

    def store_suspect_batch(self, hello: m.LearnerHello) -> str:
        """The batch that this hello sets aside, written for a look before it leaves the store; what
        to say then.  "": none.
        """
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
            raise jsonl.disk_full_error(path, error) from error
        tokens = sum(sample.length for sample in batch.samples)
        return (
            f"batch {number} is set aside: the learner's last lives ended on it; its "
            f"{len(batch.samples)} samples ({tokens} tokens, `fatal` in the ledger) are kept "
            f"in {path}, the run goes on without them"
        )

    def unreported_batches(self, number: int) -> list[m.Batch]:
        """Batches before `number` whose rows are missing and whose samples are here: their commits
        were lost, or their rows torn.
        """
        store = self.store
        out = []
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
                out.append(store.batch(groups, store.epoch, trained))
        return out

    @property
    def mask_limit(self) -> float:
        """Tokens past this lag are left out of the loss."""
        return self.store.max_lag if self.config.staleness.on_exceed == "mask" else float("inf")

    def is_fenced(self, peer: bytes, epoch: int) -> bool:
        """Is this not of the learner that is followed?  Before any hello there is none."""
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
        # leased by this buffer's life before
        if commit.number == self.store.committed and commit.number not in self.leased:
            groups = [
                self.store.alive[t] for t in self.store.comps[commit.number - self.store.base]
            ]
            self.leased[commit.number] = self.store.batch(groups, commit.epoch, commit.number)
        before = self.store.limit
        seen = admission.limit_evidence(commit.metrics, self.store.settings.ess_floor)
        done = self.store.commit(commit.number, commit.label, commit.digest, commit.unused, seen)
        if done is None:
            return
        if done:
            self.record_commit(commit, numbers.limit_metrics(self.store, before))
        self.send(peer, m.CommitReply(commit.epoch, commit.number, self.store.pinned_versions()))

    def on_CheckpointNotice(self, peer: bytes, message: m.CheckpointNotice) -> None:
        if not self.is_fenced(peer, message.epoch):
            self.store.checkpointed(message.oldest)
            self.trained.fold_below(self.store.base)

    def on_LearnerGoodbye(self, peer: bytes, message: m.LearnerGoodbye) -> None:
        if not self.is_fenced(peer, message.epoch):
            checks.goodbye(self.store, message.number)
            self.goodbyes = {peer: message}  # of one learner, however often it connects

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

    # ---- answers that wait for the state ---------------------------------------------------------

    def answer(self) -> None:
        """Lease batches, grant tickets, say goodbye: whatever the messages just handled made
        possible.
        """
        for _ in range(len(self.asks)):
            peer, ask = self.asks.popleft()
            groups, lack = self.store.ask(ask.epoch, ask.number)
            if groups:
                batch = self.store.batch(groups, ask.epoch, ask.number)
                self.leased[ask.number] = batch
                self.trained.record_lease(batch, self.mask_limit)
                # after a restart the first batch may need no ticket
                self.clock.start(time.monotonic())
                self.send(peer, batch)
                self.learner_waits = None
            elif lack is not None:
                if self.learner_waits is None or self.learner_waits[0] != lack:
                    self.learner_waits = lack, time.monotonic()
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
        """Tickets for those that wait, in the order in which they asked, until there are none:
        whom it is that asks makes no difference to the store.
        """
        now = time.monotonic()
        over = self.store.finished
        while self.wants:
            name, (peer, want) = next(iter(self.wants.items()))
            tickets = self.store.grant(want.producer, want.session, want.samples, now)
            if not tickets and not over:
                break
            if any(t.kind == "train" for t in tickets):
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
        self.announce_version()

    def send_tickets(self, peer: bytes, want: m.TicketRequest, tickets: list[m.Ticket]) -> None:
        said = self.announcement()
        over = self.store.finished
        self.send(peer, m.TicketGrant(want.session, want.sequence, tickets, said, over))

    def announce_version(self) -> None:
        """Those that wait hear of a new version, to load it meanwhile: who has just asked, who is
        next in line, and who draws for sessions.  The others hear of it with their next renewal.
        """
        policy = self.store.policy
        if self.announcement() is None:
            return
        if policy != self.told:
            self.told = policy
            self.fresh |= dict.fromkeys(itertools.islice(self.wants, NEWS))
            self.fresh |= dict.fromkeys(self.followers)
        fresh, self.fresh = self.fresh, {}
        for name in fresh:
            found = self.wants.get(name) or self.followers.get(name)
            if found is None:
                continue
            peer, want = found
            entry = self.generators[name]
            if want.holding != policy and entry.get("told") != policy:
                entry["told"] = policy
                self.send_tickets(peer, want, [])

    # ---- numbers ---------------------------------------------------------------------------------

    def record_commit(self, commit: m.Commit, limit: dict[str, float]) -> None:
        """A batch is trained: its metrics, its lags, the limit from now on, some of its samples."""
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
                **{f"refused/{reason}": count for reason, count in self.refused.items()},
                **limit,
            }
        )
        self.latest |= values
        self.metrics.write(commit.number, values, self.clock.seconds_at(now), histogram)

    def judge_numbers(self) -> dict[str, float]:
        """What a judge was asked so far; names of ours alone, whoever tells them."""
        each = [(entry["host"], entry["stats"]) for entry in self.generators.values()]
        return {k: v for k, v in numbers.judge_metrics(each).items() if k in metrics.METRICS}

    def generator_numbers(self, now: float) -> dict[str, float]:
        """Sums over the generators since the last step."""
        reported = [self.generators[name] for name in self.reported if name in self.generators]
        totals = numbers.new_totals(reported)
        self.reported.clear()
        spent = totals["busy_s"] + totals["idle_s"]
        if not spent:
            # steps are faster than the generators' reports: the next report is of all the time
            # since the last one
            return {}
        span = now - (self.last_metrics or self.clock.began or now)
        self.last_metrics = now
        stats = [entry["stats"] for entry in self.generators.values()]
        return (
            {
                "throughput/generator_tokens_per_s": totals["tokens"] / max(span, 1e-9),
                "time/generator_idle_share": totals["idle_s"] / spent,
                "time/swap": totals["swap_s"],
            }
            | numbers.reward_metrics(stats, totals, spent)
            | numbers.prefix_metrics(stats, totals)
            | numbers.link_metrics(totals, spent)
        )

    def write_evaluations(self) -> None:
        fresh = self.store.evaluations.fresh
        self.store.evaluations.fresh = []
        for number, values in fresh:
            self.latest |= values
            self.metrics.write(number, values, self.clock.seconds_at(time.monotonic()))

    def waits(self) -> list[ProcessWait]:
        """All there are: the learner's for its batch, and what the generators say."""
        waits = []
        if self.learner_waits is not None:
            lack, since = self.learner_waits
            waits.append(ProcessWait("learner", lack.what, lack.on, time.monotonic() - since))
        return waits + [
            entry["waiting"] for entry in self.generators.values() if entry["waiting"] is not None
        ]

    def log_waits(self) -> None:
        """Waits that have grown long, for the log; the learner's with the session it is for."""
        lines = self.wait_log.lines(self.waits())
        for line in lines:
            log(line)
        held = (
            self.blocking_session() if any(line.startswith("learner ") for line in lines) else None
        )
        if held is not None:
            log(held.describe())

    def blocking_session(self) -> BlockingSession | None:
        """The session that the learner waits for; None while it has work, or waits for something
        else.  A gateway that is silent vouches for none.
        """
        if self.learner_waits is None or self.learner.get("waiting") is None:
            return None
        now = time.monotonic()
        heard = {
            name: entry
            for name, entry in self.generators.items()
            if entry.get("sessions") and now - entry["at"] < SESSIONS_S
        }
        return find_blocking_session(
            {name: entry["sessions"] for name, entry in heard.items()},
            self.learner_waits[0].ticket,
            usual_s=max((x["stats"].get(m.SESSION_P95, 0.0) for x in heard.values()), default=0.0),
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
        """What only the buffer knows of the run."""
        return numbers.summary(
            self.store, self.trained, self.clock.seconds_at(self.last_commit)
        ) | {
            "mismatch_k3_max": self.mismatch,
            "refused": dict(self.refused),
            "finished": bool(self.ended_at),
            "error": self.error,
        }

    def write_summary(self) -> None:
        """RUN/buffer_summary.json, whole or as it was.  Raises AsyncrlError when the disk is
        full.
        """
        path = self.run_dir / "buffer_summary.json"
        try:
            atomic_write.write(path, json.dumps(self.summary()))
        except OSError as error:
            raise jsonl.disk_full_error(path, error) from error

    def close(self) -> str:
        """End everything; returns what could not be written, "" when all is well.  One that was
        taken over leaves what is the other's.
        """
        wrong = []
        kept = [self.store.journal] if isinstance(self.store, RecordedStore) else []
        last = [] if self.taken_over else [self.write_summary]
        for end in (
            *last,
            self.metrics.close,
            self.samples.close,
            self.trained.close,
            *(journal.abandon if self.taken_over else journal.close for journal in kept),
            self.term.end,
        ):
            try:
                end()
            except (AsyncrlError, OSError) as error:
                wrong.append(str(error))
        self.socket.close()
        return wrong[0] if wrong else ""


def main(config: Config, run_dir: Path, *, moved: bool = False) -> bool:
    """Serve the run in `run_dir` until it is finished, or SIGTERM ends it (False); moved: taken
    over from a buffer elsewhere.  Raises AsyncrlError when the run must stop, TakenOver when
    another buffer speaks for it.
    """
    lock = RunLock(run_dir, "buffer")
    memory.keep_freed()
    service = BufferService(config, run_dir, moved=moved)
    clear_end(run_dir)
    # thousands of stored samples and no cycles among them: looking for some took a sixth of its
    # time, and at 100,000 still a tenth, as what is kept up to a checkpoint is as many objects
    gc.set_threshold(1_000_000, 50, 50)

    def end(_number: int, _frame: object) -> None:
        service.stop = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN if os.environ.get("ASYNCRL_SUPERVISED") else end)
    wrong = ""
    try:
        service.loop()
        return bool(service.ended_at)
    except BufferTakenOver:
        service.taken_over = True  # and not a word to the peers, who are the other's
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
        wrong = service.close()
        lock.close()
    if wrong:
        raise AsyncrlError(wrong)
