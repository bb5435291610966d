"""The learner process: connect, then request, train, publish and commit batches.

    request n --> batch n --> train --> weights into the ring --> commit n
                     `--> request n+1

Requests are repeated until answered. Commits are sent, and repeated, in order while training goes
on. Checkpoints are written every `learner.checkpoint_every` batches.

On a GPU a batch trains in a thread while this one checksums, publishes and commits the version
before, whose bytes are off the device. At lag 0 and in exact mode it does one after the other.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from asyncrl.config.tree import Config, explain_changed_steps
from asyncrl.contract import messages as m
from asyncrl.contract.errors import LearnerFenced
from asyncrl.contract.versions import Label
from asyncrl.models import adapters, memory, policy
from asyncrl.models.devices import bind_learner
from asyncrl.models.policy import compute_weights_digest, export
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.records import atomic_write, machine_memory, process_log, rundir
from asyncrl.records.trace import Tracer
from asyncrl.transport import keys, message_checks
from asyncrl.transport.sockets import BufferPeer
from learner import checkpoint
from learner.cores import divide_cores
from learner.publisher import Publisher, Recorder
from learner.sample_log import BatchLog, SampleLog
from learner.state import BatchCursor
from learner.step import LearnerCore

POLL_S = 0.1
PROGRESS_S = 0.5
COMMITS_WAITED_FOR = "the replies to its commits"
TRIES = 3  # incarnations that may be fenced while they start


class Learner(BufferPeer):
    """One incarnation (epoch) of the learner."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.core = LearnerCore(config, config.model.path, run_dir)
        adapter = self.core.model.adapter
        self.full_bytes = (
            adapter.base_bytes if adapter else policy.count_flat_bytes(self.core.layout)
        )
        self.epoch, self.origin, self.directory = checkpoint.start_epoch(run_dir / "checkpoints")
        self.cursor = BatchCursor()
        earlier_versions: dict[int, bytes] = {}
        if (path := checkpoint.find_newest_checkpoint(self.directory)) is not None:
            self.cursor = BatchCursor.read(checkpoint.restore(self.core, path))
            earlier_versions = checkpoint.read_earlier_versions(path)
            print(
                f"learner: resumed from {path} at version {self.number}, "
                f"{config.learner.steps - self.number} steps left",
                file=sys.stderr,
            )
            earlier_steps = self.core.state.steps or config.learner.steps
            if change := explain_changed_steps(config.learner, earlier_steps, self.number):
                print(f"learner: learner.{change}", file=sys.stderr)
        record = config.record
        # before the hello: for most model directories it imports transformers
        self.tokenizer = None
        if record.token_samples and record.samples_every:
            self.tokenizer = load_tokenizer(config.model.path)
        self.publisher = Publisher(config, run_dir, self.epoch, self.core)
        first = self.number - self.publisher.depth  # the settings may ask for fewer than before
        for version, data in sorted(earlier_versions.items()):
            if version >= first:
                self.publisher.publish_bytes(version, data)
        self.digest = self.publisher.publish(self.number)
        labels = self.publisher.ring.list_labels()
        self.ring = sorted(pair for pair in labels.items() if pair[0].number in earlier_versions)
        self.core.measure.read_weights = self.publisher.read_weights
        super().__init__(config, run_dir, keys.LEARNER)
        self.silent_since = self.waiting_since
        vocabulary = int(self.core.model.hf.config.get_text_config().vocab_size)
        vision = self.core.model.vision
        images = None if vision is None else vision.shape
        self.model = m.ModelShape(vocabulary, self.core.routing, images)
        self.socket.check = self.check
        self.tracer = Tracer(run_dir, "learner")
        self.welcomed = self.finished = self.stopping = False
        self.batches: dict[int, m.Batch] = {}
        self.commits: dict[int, m.Commit] = {}
        self.sent: dict[str, float] = {}
        self.mark = time.monotonic()
        self.publishes_behind = (
            self.publisher.on_gpu and config.staleness.limit > 0 and not config.exact
        )
        self.thread = ThreadPoolExecutor(1)
        # publishes the last batch's version and returns its digest; the batch's commit
        self.unpublished: tuple[Callable[[], str], m.Commit] | None = None
        self.checkpointed: int | None = None
        self.recorder: Recorder | None = None
        self.step_log: BatchLog | None = None
        self.division = None
        if config.learner.ranks == "auto" and self.core.model.device.type == "cpu":
            self.division = divide_cores(config, run_dir, self.log_change)
            next(self.division)

    @property
    def number(self) -> int:
        return self.core.state.number

    # ---- messages --------------------------------------------------------------------------------

    def repeat(self, key: str, message: m.FromPeer) -> None:
        """Send a request now and every wires.retry_s until it is no longer pending."""
        now = time.monotonic()
        if now - self.sent.get(key, -1e9) >= self.config.wires.retry_s:
            self.sent[key] = now
            self.socket.send(message)

    def handle_messages(self, timeout: float) -> None:
        """Handle what arrives within `timeout` seconds, and repeat unanswered requests.

        It also reports the current wait and reacts to the buffer's silence.
        """
        for reply in self.receive(timeout):
            self.handle(reply)
        if self.commits:
            oldest = min(self.commits)
            self.repeat(f"commit {oldest}", self.commits[oldest])
        if (
            self.checkpointed is not None
            and min(self.commits, default=self.number) >= self.checkpointed
        ):
            # never before a commit that the checkpoint would invalidate
            self.socket.send(m.CheckpointNotice(self.epoch, self.checkpointed))
            self.checkpointed = None
        self.core.backend.keep_alive()
        self.report(time.monotonic())
        self.judge_silence()

    def report(self, now: float) -> None:
        """Report the current wait to the buffer, and on stderr when it takes long."""
        wait = self.current_wait(now)
        if now - self.sent.get("progress", 0.0) > PROGRESS_S and self.welcomed:
            self.sent["progress"] = now
            if self.publisher.ring.recreate():  # new generators look for it
                print(
                    f"learner: {self.publisher.directory} was removed; it is recreated with all "
                    "its versions",
                    file=sys.stderr,
                )
            self.socket.send(m.LearnerProgress("learner", wait, {}, os.getpid(), self.epoch))
        self.log_wait(wait)

    def on_reply(self) -> None:
        """Restart the silence timer, while this learner waits."""
        self.silent_since = time.monotonic() if self.waiting_for else 0.0

    def on_moved_buffer(self) -> None:
        self.silent_since = time.monotonic()
        self.sent.clear()  # send every request to the new buffer too

    def on_finished_run(self) -> None:
        """Finish although the buffer's last message was lost.

        Raises NothingToDo when this learner started after the end of the run.
        """
        if self.number < self.config.learner.steps or not self.welcomed:
            raise self.make_end_error("this learner")
        self.finished = True

    def check(self, reply: m.FromBuffer) -> None:
        """Raise BadMessage for replies that would end this learner or lose its checkpoints."""
        message_checks.check(reply, self.model)
        if isinstance(reply, m.Welcome) and reply.epoch == self.epoch:
            message_checks.require(
                reply.checkpointed <= self.number,
                f"checkpoints are kept from {reply.checkpointed}, and this one is {self.number}",
            )

    def handle(self, reply: m.FromBuffer) -> None:
        """Apply a checked reply. Raises LearnerFenced when a newer epoch has taken over."""
        if getattr(reply, "epoch", None) != self.epoch:
            return
        if isinstance(reply, m.FencedReply):
            raise LearnerFenced(
                f"epoch {reply.by} of the learner has taken over from epoch {self.epoch}"
            )
        if isinstance(reply, m.Welcome) and not self.welcomed:
            self.directory = checkpoint.claim(self.directory, reply.checkpointed)
            self.welcomed = True
            # the run has not ended (again): an earlier export is not its result
            if self.number < self.config.learner.steps:
                (self.run_dir / "weights_digest").unlink(missing_ok=True)
            # readers that still map an earlier ring keep it
            rings = rundir.list_numbered(self.publisher.directory.parent, r"epoch_(\d+)")
            rundir.remove([path for epoch, path in rings.items() if epoch < self.epoch])
            steps = self.config.learner.steps
            self.log_change(f"follows epoch {self.epoch} from version {self.number} of {steps}")
        elif isinstance(reply, m.Batch):
            if self.number <= reply.number <= self.number + 1:  # no other batch was requested
                self.batches.setdefault(reply.number, reply)
        elif isinstance(reply, m.CommitReply):
            self.commits.pop(reply.number, None)
            self.publisher.keep = reply.keep
        elif isinstance(reply, m.RunFinished):
            self.finished = True

    def set_wait(self, reason: str) -> None:
        """Set what the learner waits for and restart the silence timer.

        Silence before the wait does not count: during a long step the learner reads nothing.
        """
        if reason != self.waiting_for:
            super().set_wait(reason)
            self.silent_since = self.waiting_since if reason else 0.0

    # ---- the loop --------------------------------------------------------------------------------

    def send_hello(self) -> None:
        """Send the hello until the buffer welcomes this learner or it is stopped."""
        parent = self.cursor.parent
        cursor = msgspec.structs.asdict(self.cursor)
        message = m.LearnerHello(
            **cursor | {"parent": None if parent is None else Label(*parent)},
            **self.model._asdict(),
            protocol=m.PROTOCOL,
            run=self.run,
            epoch=self.epoch,
            label=Label(self.epoch, self.number),
            digest=self.digest,
            origin=self.origin,
            max_lag=self.config.staleness.limit,
            source=self.publisher.source,
            ring=self.ring,
            pid=os.getpid(),
            before=process_log.find_previous_end(self.run_dir, os.getpid()),
        )
        self.set_wait("the buffer's welcome")
        while not self.welcomed and not self.stopping:
            self.repeat("hello", message)
            self.handle_messages(POLL_S)

    def run_batches(self) -> None:
        """Run this incarnation: hello, all remaining batches, export and goodbye."""
        steps = self.config.learner.steps
        self.send_hello()
        if self.welcomed:
            self.step_log = BatchLog(self.config, self.run_dir, self.number)
            if self.tokenizer is not None:
                self.core.sample_log = SampleLog(
                    self.config, self.run_dir, self.number, self.tokenizer
                )
        if self.config.record.stream and self.welcomed and not self.stopping:
            self.recorder = Recorder(self.config, self.run_dir, self.epoch, self.core, self.digest)
        if self.number == 0 and not self.stopping:
            self.save_checkpoint()  # from here on a killed learner finds a checkpoint
        self.mark = time.monotonic()
        first = self.number
        while self.number < steps and not self.stopping:
            batch = self.wait_for_batch()
            if batch is not None:
                if batch.number == first:
                    self.log_change(f"trains batch {first}, its first one")
                self.step(batch)
        self.commit()
        self.set_wait(COMMITS_WAITED_FOR)
        while (self.commits or self.checkpointed is not None) and not self.stopping:
            self.handle_messages(POLL_S)
        if not self.welcomed:
            return  # stopped before its welcome: it has trained nothing
        if self.number not in checkpoint.list_numbers(self.directory):
            self.save_checkpoint()
        if self.stopping:
            return  # run_dir/model belongs to a finished run
        self.export()
        self.set_wait("the last evaluation")
        while not self.finished and not self.stopping:
            self.repeat("goodbye", m.LearnerGoodbye(self.epoch, self.number))
            self.handle_messages(POLL_S)

    def export(self) -> None:
        """Write the final model, then its digest.

        This comes before the goodbye, so that the files exist by the time the run counts as
        finished.
        """
        self.core.backend.broadcast("export")
        with self.core.backend.gather_full_parameters():
            model = self.core.model
            if model.adapter is not None and self.config.export.lora == "merged":
                model = adapters.merge_model(model, self.config.model.device)
            export(model, self.run_dir / "model")
            atomic_write.sync_tree(self.run_dir / "model")
            atomic_write.sync_path(self.run_dir)
            digest = compute_weights_digest(self.core.model)
            atomic_write.write(self.run_dir / "weights_digest", digest, sync=True)

    def wait_for_batch(self) -> m.Batch | None:
        """Return the batch to train on, or None when stopped while waiting."""
        if self.number not in self.batches:
            self.commit()
        while self.number not in self.batches and not self.stopping:
            self.set_wait(f"batch {self.number}")
            self.repeat(f"ask {self.number}", m.BatchRequest(self.epoch, self.number))
            self.handle_messages(POLL_S)
        if self.waiting_for:
            self.set_wait("")
        batch = self.batches.pop(self.number, None)
        if (
            batch is not None
            and self.config.learner.prefetch
            and self.number + 1 < self.config.learner.steps
        ):
            self.repeat(f"ask {self.number + 1}", m.BatchRequest(self.epoch, self.number + 1))
        return batch

    def step(self, batch: m.Batch) -> None:
        """Train on one batch, publish the new weights and commit the batch."""
        began = time.monotonic()
        tokens = sum(s.length for s in batch.samples)
        with self.tracer.time_span("train", tokens):
            if self.unpublished is None:
                metrics = self.core.train(batch)
            else:
                training = self.thread.submit(self.core.train, batch)
                self.commit()
                metrics = training.result()
        if self.step_log is not None:
            self.step_log.add(self.core.updates)
        trained = time.monotonic()
        with self.tracer.time_span("publish"):
            publish = self.publisher.begin(self.number)
            digest = "" if self.publishes_behind else publish()
        now = time.monotonic()
        step_s = now - self.mark
        metrics |= {
            "time/train": trained - began,
            "time/publish": now - trained,
            "time/step": step_s,
            "time/learner_idle_share": max(0.0, 1.0 - (now - began) / max(step_s, 1e-9)),
            "throughput/learner_tokens_per_s": tokens / max(step_s, 1e-9),
            "weights/bytes": self.publisher.ring.size,
            "weights/full_bytes": self.full_bytes,
            "memory/learner_mb": machine_memory.read_resident_bytes() / 2**20,
        }
        self.mark = now
        if self.division is not None:
            metrics["time/learner_threads"] = self.division.send((step_s, now - began, tokens))
        cursor = msgspec.convert(batch, BatchCursor, from_attributes=True)
        parent = [self.epoch, self.number - 1]
        self.cursor = msgspec.structs.replace(cursor, parent=parent)
        commit = m.Commit(
            self.epoch,
            batch.number,
            Label(self.epoch, self.number),
            digest,
            metrics,
            self.core.unused,
        )
        self.unpublished = publish, commit
        is_checkpointed = self.number % self.config.learner.checkpoint_every == 0
        if digest or is_checkpointed or self.recorder is not None:
            self.commit()
        self.handle_messages(0)
        # before a checkpoint, from which a resumed learner would skip this batch
        if self.recorder is not None:
            self.recorder.add(batch, metrics, self.digest)
        if is_checkpointed:
            # the buffer must have recorded every trained batch: a run that is resumed from the
            # checkpoint skips them, and the rows of one that it lost would be missing for good
            self.set_wait(COMMITS_WAITED_FOR)
            while self.commits and not self.stopping:
                self.handle_messages(POLL_S)
            self.set_wait("")
            self.save_checkpoint()

    def commit(self) -> None:
        """Publish and commit the last batch, unless that is done."""
        if self.unpublished is None:
            return
        publish, commit = self.unpublished
        self.digest = commit.digest or publish()
        self.unpublished = None
        self.commits[commit.number] = msgspec.structs.replace(commit, digest=self.digest)
        if min(self.commits) == commit.number:
            self.repeat(f"commit {commit.number}", self.commits[commit.number])

    def save_checkpoint(self) -> None:
        """Write a checkpoint; `handle_messages` announces it after its commits."""
        with self.tracer.time_span("checkpoint"):
            for log in filter(None, (self.step_log, self.core.sample_log)):
                log.file.sync()  # a resumed run relies on the rows before its checkpoint
            self.checkpointed = checkpoint.save(
                self.directory,
                self.core,
                msgspec.to_builtins(self.cursor),
                self.config.learner.keep_checkpoints,
                self.publisher.read_earlier_versions(self.number) if self.publisher.depth else {},
            )
        self.log_change(f"wrote the checkpoint of version {self.number}")

    def close(self) -> None:
        self.thread.shutdown()
        if self.recorder is not None:
            self.recorder.close()
        for log in filter(None, (self.step_log, self.core.sample_log)):
            log.file.close()
        self.core.backend.close()
        self.tracer.close()
        self.publisher.close()
        self.socket.close()


def follow(core: LearnerCore) -> None:
    """Run the commands of rank 0 on another rank until it ends; then call `exit_rank`."""
    from learner.distributed.ranks import DistributedBackend

    backend = core.backend
    assert isinstance(backend, DistributedBackend)
    while True:
        command, payload = backend.receive_broadcast()
        if command == "end":
            backend.close()
            return
        if command == "train":
            core.train(payload)
        elif command == "publish":
            backend.probe()
            backend.write_flat(None)
        elif command in ("save", "export"):
            if command == "save":
                core.save(Path(payload))
            with backend.gather_full_parameters():
                pass
        elif command == "restore":
            checkpoint.load_checkpoint(core, Path(payload))


def main(config: Config, run_dir: Path) -> bool:
    """Run the learner until its last batch is committed and evaluated, or until SIGTERM.

    After SIGTERM it finishes the batch, writes a checkpoint and returns False.
    """
    signals: list[int] = []
    learner: Learner | None = None
    bind_learner(config)
    memory.keep_freed()
    if int(os.environ.get("RANK", "0")) > 0 and config.learner.distributed:
        from learner.distributed.ranks import exit_rank

        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, signal.SIG_IGN)  # rank 0 ends the other ranks
        follow(LearnerCore(config, config.model.path, run_dir))
        exit_rank()

    def stop(number: int, _frame: object) -> None:
        signals.append(number)
        if learner is not None:
            learner.stopping = True

    process_log.stop_at_signals(stop)
    for tries_left in reversed(range(TRIES)):
        learner = None
        try:
            learner = Learner(config, run_dir)
            learner.stopping = bool(signals)
            learner.run_batches()
            return learner.finished
        except LearnerFenced as error:
            if (learner is not None and learner.welcomed) or not tries_left:
                print(f"learner: {error}; this one ends", file=sys.stderr)
                return True
            print(
                f"learner: {error} while this one was starting; starting over from the newest "
                "checkpoint",
                file=sys.stderr,
            )
        finally:
            if learner is not None:
                learner.close()
    return True
