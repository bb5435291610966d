"""Alternatives to the buffer: the rivals of benchmarks/transport.py.

Each transports the same samples in the same encoding from a producer to a consumer, through one
process, with fewer guarantees: no tickets, no limit on lag, no ledger, no checks.  One process
acts as both ends, like the peer of benchmarks/buffer.py.  It sends everything before it waits.

frame: samples in a message.  together: messages in one call or round trip (0: all of a batch).
A library is imported where it is used: each may be installed in a separate Python."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from lib.answers import answer, disagreement

SIZE = 8
PATIENCE_S = 600.0  # for a server's start, and for what was sent to come
SINGLE = tuple((frame, 0) for frame in (1, 8, 32, 128))
Payload = bytes | memoryview


def chunks(many: Sequence[Any], each: int) -> Iterator[Sequence[Any]]:
    """Pieces of `each`; 0: everything at once."""
    each = each or len(many)
    return (many[at : at + each] for at in range(0, len(many), each))


def until(what: str, true: Any) -> None:
    """Wait until `true` returns something true.  Raises TimeoutError after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come within {PATIENCE_S:g} s")
        time.sleep(0.02)


class Rival:
    """Batches of answers from `put` to `take`; counts what went and what came."""

    settings: Sequence[tuple[int, int]] = SINGLE  # (frame, together) that are tried
    version = ""

    def __init__(self, folder: Path, tokens: int, groups: int) -> None:
        self.tokens = tokens
        self.groups = groups
        self.frame, self.together = self.settings[0]
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(list[m.Trajectory])
        self.sent = self.taken = self.bytes_sent = self.bytes_taken = 0
        self.ticket = 0
        self.batch: list[m.Trajectory] = []  # the last one that came
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start it."""
        raise NotImplementedError

    def put(self, frames: list[bytes]) -> None:
        """Hand over; returns when it promises what it does."""
        raise NotImplementedError

    def take(self, many: int) -> list[Payload]:
        """So many messages, which are gone from it then."""
        raise NotImplementedError

    def end(self) -> None:
        """Stop what it started, also where it began in part."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def promise(self) -> dict[str, Any]:
        """Return proof of its durability setting.  Raises RuntimeError if it does not hold."""
        return {}

    def made(self) -> list[m.Trajectory]:
        """A batch of answers of two versions."""
        out = []
        for _ in range(self.groups):
            self.ticket += 1
            first, last = Label(1, self.ticket), Label(1, self.ticket + 1)
            prompt = m.Prompt(self.ticket, "p")
            samples = list(range(SIZE))
            ticket = m.Ticket(
                self.ticket, 1, "train", prompt, samples, m.SamplingSettings(), first, None, 0
            )
            out += [answer(ticket, sample, first, last, self.tokens) for sample in samples]
        return out

    def batches(self, count: int) -> None:
        """`count` batches from end to end.  Raises RuntimeError where one does not come whole."""
        many = self.groups * SIZE
        for _ in range(count):
            frames = [self.encoder.encode(part) for part in chunks(self.made(), self.frame)]
            self.put(frames)
            came = self.take(len(frames))
            self.batch = [one for payload in came for one in self.decoder.decode(payload)]
            self.sent += many
            self.taken += len(self.batch)
            self.bytes_sent += sum(map(len, frames))
            self.bytes_taken += sum(map(len, came))
            if (self.sent, self.bytes_sent) != (self.taken, self.bytes_taken):
                raise RuntimeError(
                    f"{self.sent} answers of {self.bytes_sent} bytes went, {self.taken} of "
                    f"{self.bytes_taken} came"
                )

    def check(self) -> dict[str, Any]:
        """Raises RuntimeError unless the last batch came as it went.  Returns the counts."""
        if wrong := disagreement(self.batch, self.groups * SIZE, self.tokens):
            raise RuntimeError(wrong)
        return {
            "sent": self.sent,
            "taken": self.taken,
            "bytes": self.bytes_taken,
            "promise": self.promise(),
        }


FORWARDER = """
import sys, zmq
context = zmq.Context()
ends = [context.socket(zmq.PULL), context.socket(zmq.PUSH)]
for end, address in zip(ends, sys.argv[1:]):
    end.set_hwm(0)
    end.bind(address)
zmq.proxy(*ends)
"""


class Raw(Rival):
    """zmq alone: PUSH, a forwarder in a process of its own (zmq's proxy, all in C), PULL.  It keeps
    nothing: what a process that ends had in hand is lost.
    """

    def begin(self) -> None:
        import zmq

        self.version = f"pyzmq {zmq.__version__}"
        addresses = [f"ipc://{self.folder}/raw-{end}" for end in ("in", "out")]
        self.process = subprocess.Popen([sys.executable, "-c", FORWARDER, *addresses])
        context = zmq.Context()
        self.push, self.pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for end, address in zip((self.push, self.pull), addresses, strict=True):
            end.set_hwm(0)
            end.connect(address)
        self.pull.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))

    def put(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.push.send(frame, copy=False)

    def take(self, many: int) -> list[Payload]:
        return [self.pull.recv(copy=False).buffer for _ in range(many)]


class Redis(Rival):
    """Redis streams through a unix socket: XADD and XREADGROUP with XACK in pipelines, parsed in C
    by hiredis; what is acknowledged is trimmed.  In memory.
    """

    settings = tuple((frame, together) for frame in (1, 8, 32, 128) for together in (0, 8))
    durable = False

    def begin(self) -> None:
        import hiredis
        import redis

        where = self.folder / ("redis-disk" if self.durable else "redis")
        where.mkdir()
        options = {
            "port": "0",
            "unixsocket": str(where / "s"),
            "dir": str(where),
            "save": "",
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "always",
            # our journal rotates; this one may grow, which spares it the rewriting
            "auto-aof-rewrite-percentage": "0",
            "proto-max-bulk-len": "1gb",
            "client-query-buffer-limit": "2gb",
        }
        argv = [
            "redis-server",
            *(word for key, value in options.items() for word in (f"--{key}", value)),
        ]
        self.process = subprocess.Popen(argv, stdout=(where / "log").open("w"))
        self.client = redis.Redis(unix_socket_path=str(where / "s"), socket_timeout=PATIENCE_S)
        until("redis-server's socket", (where / "s").exists)
        found = self.client.info("server")["redis_version"]
        self.version = f"redis {found}, redis-py {redis.__version__}, hiredis {hiredis.__version__}"
        self.client.xgroup_create("answers", "learner", mkstream=True)

    def put(self, frames: list[bytes]) -> None:
        for part in chunks(frames, self.together):
            pipe = self.client.pipeline(transaction=False)
            for frame in part:
                pipe.xadd("answers", {"answers": frame})
            pipe.execute()

    def take(self, many: int) -> list[Payload]:
        each = self.together or many
        came: list[Payload] = []
        read: list[bytes] = []
        while len(came) < many or read:
            pipe = self.client.pipeline(transaction=False)
            if read:
                pipe.xack("answers", "learner", *read)
            if len(came) < many:
                pipe.xreadgroup("learner", "learner", {"answers": ">"}, count=each)
            else:
                pipe.xtrim("answers", maxlen=0, approximate=False)
            reply = pipe.execute()[-1]
            read = []
            if len(came) < many:
                entries = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
                read = [entry for entry, _ in entries]
                came += [fields[b"answers"] for _, fields in entries]
        return came

    def promise(self) -> dict[str, Any]:
        if self.client.xlen("answers"):
            raise RuntimeError("what was acknowledged is still in the stream")
        return {}


class RedisDisk(Redis):
    """The same with appendonly, appendfsync always: as `disk` promises, a reply waits for fsync."""

    durable = True

    def promise(self) -> dict[str, Any]:
        super().promise()
        config = self.client.config_get("append*")
        info = self.client.info("persistence")
        found = {key: config[key] for key in ("appendonly", "appendfsync")} | {
            key: info[key] for key in ("aof_enabled", "aof_last_write_status", "aof_current_size")
        }
        if (
            found["appendonly"] != "yes"
            or found["appendfsync"] != "always"
            or found["aof_last_write_status"] != "ok"
            or found["aof_current_size"] < self.bytes_sent
        ):
            raise RuntimeError(f"redis does not append and sync everything: {found}")
        return found


class RayQueue(Rival):
    """ray.util.queue.Queue, its actor called with batches.  In memory."""

    settings = tuple((frame, together) for frame in (1, 8, 32, 128) for together in (0, 8))

    def begin(self) -> None:
        import ray
        from ray.util.queue import Queue

        self.ray = ray
        self.version = f"ray {ray.__version__}"
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=1 << 30,
            _temp_dir=str(self.folder / "ray"),
        )
        self.queue = Queue()
        if not self.queue.empty():
            raise RuntimeError("a new queue holds something")

    def put(self, frames: list[bytes]) -> None:
        actor: Any = self.queue.actor
        self.ray.get(
            [actor.put_nowait_batch.remote(part) for part in chunks(frames, self.together)],
            timeout=PATIENCE_S,
        )

    def take(self, many: int) -> list[Payload]:
        actor: Any = self.queue.actor
        sizes = [len(part) for part in chunks(range(many), self.together)]
        parts = self.ray.get(
            [actor.get_nowait_batch.remote(size) for size in sizes], timeout=PATIENCE_S
        )
        return [payload for part in parts for payload in part]

    def end(self) -> None:
        if ray := sys.modules.get("ray"):
            ray.shutdown()


REVERB = """
import sys, reverb
table = reverb.Table.queue("answers", 1 << 20)
reverb.Server([table], port=int(sys.argv[1])).wait()
"""


class Reverb(Rival):
    """A queue of Reverb, written by one trajectory writer and sampled by its client.  In memory."""

    def begin(self) -> None:
        import importlib.metadata

        import numpy as np
        import reverb

        self.np = np
        self.version = f"dm-reverb {importlib.metadata.version('dm-reverb')}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.process = subprocess.Popen([sys.executable, "-c", REVERB, str(port)])
        self.client = reverb.Client(f"127.0.0.1:{port}")
        self.client.server_info(timeout=int(PATIENCE_S))
        self.writer = self.client.trajectory_writer(1)

    def put(self, frames: list[bytes]) -> None:
        for frame in frames:
            # strings: arrays of numbers would have to be of one length, and are compressed
            self.writer.append({"answers": self.np.array(frame, object)})
            self.writer.create_item(
                "answers", 1.0, {"answers": self.writer.history["answers"][-1:]}
            )
        self.writer.flush()

    def take(self, many: int) -> list[Payload]:
        found = self.client.sample("answers", many, emit_timesteps=False)
        return [item.data[0].item() for item in found]


class Straw(Rival):
    """straw-queue, durable: a task for some messages, published and synced, then completed in the
    coordinator's journal; the consumer's place is saved.  The coordinator runs in the peer's own
    process, as its documents allow: that spares it a hop.
    """

    settings = tuple((frame, together) for frame in (1, 8, 32) for together in (0, 8))

    def begin(self) -> None:
        import importlib.metadata

        import straw

        self.straw = straw
        self.version = f"straw-queue {importlib.metadata.version('straw-queue')}"
        self.store = straw.SharedFilesystemStore(self.folder / "straw", "answers")
        self.coordinator = straw.Coordinator(self.store, exclusive_owner="benchmark")
        self.token = self.coordinator.open_consumer("learner", exclusive_owner="benchmark")
        self.cursor = self.requests = self.synced = 0

    def request(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    def put(self, frames: list[bytes]) -> None:
        straw = self.straw
        parts = list(chunks(frames, self.together))
        tasks = [straw.TaskSpec(self.request(), estimated_records=len(part)) for part in parts]
        self.coordinator.submit_tasks(self.request(), tasks)
        assignments = self.coordinator.acquire("generator-0", len(tasks)).assignments
        publications = [
            straw.Publication(
                tuple(
                    straw.Record(
                        f"{assignment.task.task_id}:{at}",
                        frame,
                        metadata={
                            "task_id": assignment.lease.task_id,
                            "attempt_id": assignment.lease.attempt_id,
                        },
                    )
                    for at, frame in enumerate(part)
                )
            )
            for assignment, part in zip(assignments, parts, strict=True)
        ]
        references = self.store.publish_many(publications, submission_id=self.request())
        for assignment, reference in zip(assignments, references, strict=True):
            self.coordinator.complete_task(
                assignment.lease,
                submission_id=assignment.task.task_id,
                result_ref=reference,
                result_digest=reference.digest,
            )

    def take(self, many: int) -> list[Payload]:
        came: list[Payload] = []
        while len(came) < many:
            page = self.coordinator.read_commits(self.cursor, limit=many)
            self.cursor = page.cursor
            for receipt in page.commits:
                came += [record.payload for record in self.store.read(receipt.result_ref)]
        self.acknowledge()
        return came

    def acknowledge(self) -> None:
        """The consumer's place, durable."""
        request = self.request()
        state = self.store.publish([self.straw.Record(request, b"")], submission_id=request)
        self.coordinator.save_consumer_state(
            "learner",
            token=self.token,
            request_id=request,
            state_ref=state,
            fetch_cursor=self.cursor,
            processed_cursor=self.cursor,
        )

    def promise(self) -> dict[str, Any]:
        synced = self.store.backend.metrics["syncs"]
        if synced <= self.synced:
            raise RuntimeError("straw-queue synced nothing for this batch")
        self.synced = synced
        return {"syncs": synced}


RIVALS: dict[str, type[Rival]] = {
    "raw": Raw,
    "redis": Redis,
    "redis, AOF always": RedisDisk,
    "ray": RayQueue,
    "reverb": Reverb,
    "straw": Straw,
}
