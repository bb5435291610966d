"""The reader behind each socket, without the socket: bytes in, a verdict out.

`feed` returns "undecodable", "refused: REASON", "taken", or the status of a web request; any
exception is a finding.  `frames` are messages of correct peers, from which mutants are made."""

from __future__ import annotations

import asyncio
import functools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
import numpy as np
import scale
import xxhash

from asyncrl.config.tree import AgentConfig, WiresConfig
from asyncrl.contract import messages as m
from asyncrl.contract import outcomes
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from asyncrl.transport import chunks, message_checks
from asyncrl.transport.ring import WeightRing
from asyncrl.transport.sockets import UNDECODABLE, PeerSocket
from buffer import service as buffer_service
from lib import crowd_of_peers as peers
from lib.fuzz_http import Completions, HttpConnections, Tinker, verdict
from lib.results_file import ROOT

TESTS = str(ROOT / "tests" / "support")
NOBODY = "tcp://127.0.0.1:1"  # an address that is never listened to
VOCABULARY = 50
CONTEXT = 64
encode = msgspec.msgpack.encode


class Target(Protocol):
    frames: list[bytes]

    def feed(self, data: bytes) -> str: ...

    def close(self) -> None: ...


def judged(read: Callable[[], Any]) -> str:
    """The verdict on what `read` reads and acts on."""
    try:
        read()
    except BadMessage as error:
        return f"refused: {error.reason}"
    except UNDECODABLE as error:
        if isinstance(error, msgspec.MsgspecError | UnicodeDecodeError | RecursionError):
            return "undecodable"
        raise
    return "taken"


class Buffer:
    """A service in the middle of a small run; `replies` is what it said to its peers."""

    def __init__(self) -> None:
        self.work = tempfile.TemporaryDirectory()
        sizes = peers.GROUPS, peers.SIZE, peers.TOKENS
        named = buffer_service.read_run_id
        try:
            peers.GROUPS, peers.SIZE, peers.TOKENS = 2, 2, 8
            buffer_service.read_run_id = lambda run_dir: "fuzz"  # the same in every life
            self.loop = scale.Loop(Path(self.work.name), "memory", 3)
            self.service = self.loop.service
            self.service.store.settings.error_budget = 1e9
            self.service.store.settings.machinery_budget = 1e9
            self.frames: list[bytes] = []
            self.replies: list[bytes] = []
            say, hear = self.loop.peers.say, self.loop.hear

            def said(name: str, message: Any) -> None:
                self.frames.append(encode(message))
                say(name, message)

            def heard(peer: bytes, message: Any) -> None:
                self.replies.append(encode(message))
                hear(peer, message)

            self.loop.peers.say = said
            self.service.socket.send = heard  # type: ignore[method-assign]
            self.loop.batches(3)
            self.service.socket.send = lambda peer, message: None  # type: ignore[method-assign]
        finally:
            peers.GROUPS, peers.SIZE, peers.TOKENS = sizes
            buffer_service.read_run_id = named
        self.frames = [
            *self.frames[-60:],
            encode(self.loop.peers.hello()),
            encode(m.StatusRequest()),
        ]
        self.decoder = msgspec.msgpack.Decoder(m.FromPeer)

    def feed(self, data: bytes) -> str:
        try:
            message = self.decoder.decode(data)
        except UNDECODABLE:
            return "undecodable"
        if isinstance(message, m.LearnerHello) and message.epoch > 1:
            return "taken"  # a well-formed hello of a later life is a learner's right
        before = Counter(self.service.refused)
        self.service.handle(b"m", message)
        self.service.answer()
        self.service.flush()
        if any(line.tokens < 0 for line in self.service.store.make_ledger().lines.values()):
            raise AssertionError("a line of the ledger is negative")
        refused = self.service.refused - before
        return f"refused: {next(iter(refused))}" if refused else "taken"

    def close(self) -> None:
        self.service.close()
        rundir.clean(self.loop.dir)
        self.work.cleanup()


@functools.cache
def replies() -> list[bytes]:
    """A buffer's messages in a run, one of each kind and length."""
    buffer = Buffer()
    kinds = {(data[:16], len(data)): data for data in buffer.replies}
    buffer.close()
    more: list[Any] = [
        m.Refusal("no", 2),
        m.FencedReply(1, 2),
        m.RunFinished(1),
        m.UnknownSession("generator-0", 1),
        m.HeartbeatReply(1, announcement()),
        buffer.service.make_status(),
    ]
    return list(kinds.values())[-40:] + [encode(x) for x in more]


def announcement() -> m.PolicyAnnouncement:
    return m.PolicyAnnouncement(Label(1, 3), "d", m.WeightsSource(1, "here", "/nowhere", ""))


class Learner:
    """The learner's reader, and its processing of a batch up to the forward pass."""

    def __init__(self) -> None:
        from learner.loop import Learner as Real

        self.frames = replies()
        self.handle = Real.handle
        self.learner: Any = SimpleNamespace(
            epoch=1,
            number=2,
            welcomed=True,
            batches={},
            commits={2: None},
            publisher=SimpleNamespace(keep=[]),
            model=m.ModelShape(VOCABULARY),
        )
        self.socket = PeerSocket(NOBODY)
        check: Any = Real.check
        self.socket.check = functools.partial(check, self.learner)

    def feed(self, data: bytes) -> str:
        return judged(lambda: self._act(data))

    def _act(self, data: bytes) -> None:
        from learner.batch import pack, split_micro_batches

        message = self.socket.read([data])
        if not isinstance(message, m.Refusal | m.FencedReply):  # these end it, by right
            self.handle(self.learner, message)
        self.learner.batches.clear()
        if isinstance(message, m.Batch):
            for greedy in (False, True):
                packed = pack(message, greedy=greedy)
                split_micro_batches(packed, range(packed.count), 1 << 12)

    def close(self) -> None:
        self.socket.close()


class Generator:
    """A generator's readers: tickets, acknowledgements, calls of a gateway."""

    def __init__(self) -> None:
        from actors.generator import CallTurn

        sampling = m.SamplingSettings(1.0, 1.0, 0, 4)
        prompt = np.arange(3, 9, dtype="<i4").tobytes()
        call = m.GenerationCall(1, 7, 1, "train", prompt, 4, sampling, Label(1, 3), None, 5)
        calls = m.CallAssignments(
            1, 1, [call, msgspec.structs.replace(call, id=2)], [9], announcement()
        )
        self.frames = [*replies(), encode(calls), encode(calls)]
        self.take_calls = CallTurn.take_calls
        self.socket = PeerSocket(NOBODY, reads=m.FromBuffer | m.CallAssignments)
        self.socket.check = functools.partial(message_checks.check, model=m.ModelShape(VOCABULARY))

    def feed(self, data: bytes) -> str:
        return judged(lambda: self._act(data))

    def _act(self, data: bytes) -> None:
        from actors.delivery import Outbox
        from actors.schedule import TicketSchedule

        message = self.socket.read([data])
        schedule = TicketSchedule(drain_first=False)
        if isinstance(
            message, m.TicketGrant | m.DeliveryAcks | m.HeartbeatReply | m.CallAssignments
        ):
            schedule.announce(message.announcement)
        if isinstance(message, m.TicketGrant):
            schedule.add_tickets(message.tickets)
        elif isinstance(message, m.DeliveryAcks):
            Outbox(WiresConfig(), "generator-0", 1).on_acks(message, 0.0)
        elif isinstance(message, m.CallAssignments):
            turn: Any = SimpleNamespace(
                schedule=schedule,
                calls={},
                keys={},
                served=0,
                results=[],
                vocabulary=VOCABULARY,
                context=CONTEXT,
                constraints={},
                images={},
                tokenizer=SimpleNamespace(image_shape=None),
                grammars=SimpleNamespace(begin=_no_grammar),
            )
            self.take_calls(turn, message.calls, message.images)
            if turn.results:
                raise BadMessage(turn.results[0].failed)
        loaded = schedule.next_version(None)
        schedule.find_outdated()
        for held, _ in schedule.admit(loaded, 100):
            limit = held.ticket.sampling.max_new_tokens
            assert limit >= 1 and held.ticket.sampling.temperature > 0

    def close(self) -> None:
        self.socket.close()


def _no_grammar(grammar: str) -> None:
    raise ValueError("no tokenizer compiles it here")


class ChunkServer:
    """The chunk server's reader, without its thread, which an exception would end."""

    def __init__(self) -> None:
        self.work = tempfile.TemporaryDirectory()
        size = 1 << 12
        self.ring = WeightRing(
            Path(self.work.name) / "ring", size, 2, [("w", "uint8", [size], 0, size)], 1
        )
        self.ring.write(Label(1, 3), lambda into: None)
        self.server = chunks.ChunkServer("tcp://127.0.0.1:*", self.ring.rows, self.ring.read_part)
        ask = chunks._ChunkRequest(Label(1, 3), "", 0, size)
        asks = [
            ask,
            chunks._ChunkRequest(Label(0, 0), "", -1, 0),
            chunks._ChunkRequest(Label(1, 3), "d", 9, 5),
        ]
        self.frames = [encode(x) for x in asks]

    def feed(self, data: bytes) -> str:
        if len(data) > chunks.REQUEST_BYTES:
            return "undecodable"  # the socket library takes none
        frame = SimpleNamespace(buffer=data, get=lambda _: "10.0.0.1")
        answer = self.server._make_reply([frame])  # type: ignore[list-item]
        if answer is None:
            return "undecodable"
        assert len(encode(answer)) <= 2 * chunks.CHUNK_BYTES
        return "taken"

    def close(self) -> None:
        self.server.close()
        self.ring.close()
        self.work.cleanup()


class ChunkClient:
    """A generator's reader for the learner's chunk server: chunks, and a layout in one."""

    def __init__(self) -> None:
        self.client = chunks.ChunkClient(NOBODY, 1.0)
        rows = [("a", "float32", [2, 3], 0, 24), ("b", "bfloat16", [4], 64, 8)]
        self.frames = []
        for data in (encode(rows), bytes(40)):
            checksum = xxhash.xxh3_64_intdigest(data)
            self.frames.append(encode(chunks._ChunkReply("d", data, checksum, b"\0" * 8)))
        self.frames += [encode(rows), encode(rows)]  # without their chunk, whose checksum hides it

    def feed(self, data: bytes) -> str:
        return judged(lambda: self._act(data))

    def _act(self, data: bytes) -> None:
        from asyncrl.models.policy import count_flat_bytes, read_flat

        manifest = data if data[:1] in (b"\x91", b"\x92") else self.client.read([data]).data
        rows = chunks.decode_layout(manifest)
        if (size := count_flat_bytes(rows)) < 1 << 24:
            read_flat(memoryview(bytearray(size)), rows)

    def close(self) -> None:
        self.client.close()


class Calls:
    """The gateway's socket of calls: answers, and generators that tell of themselves."""

    def __init__(self) -> None:
        kit = from_tests()
        from actors.gateway.service import CallRouter, Gateway, RoutedCall

        self.scripted = kit.Scripted(limits=kit.SessionLimits(max_calls=0, rows=0))
        sampling = m.SamplingSettings(1.0, 1.0, 0, 4)
        prompt = np.arange(3, 9, dtype="<i4").tobytes()
        call = m.GenerationCall(1, 7, 1, "train", prompt, 4, sampling, Label(1, 3), None, 5)
        session: Any = SimpleNamespace(generator="")
        node: Any = None
        self.call = RoutedCall(call, session, node)
        self.gateway: Any = SimpleNamespace(
            router=CallRouter("fuzz", 10.0),
            ever_served=False,
            vocabulary=VOCABULARY,
            calls_socket=SimpleNamespace(send=lambda peer, message: None),
            routing=None,
            chat=SimpleNamespace(image_shape=None),
            on_result=self._drawn,
        )
        hear: Any = Gateway.on_generator_message
        self.hear = functools.partial(hear, self.gateway)
        ids = np.array([3, 4, 5], "<i4").tobytes()
        logprobs = np.full(3, -0.5, "<f4").tobytes()
        spans = [
            m.VersionSpan(Label(1, 3), "d", 0, 2, Label(1, 3)),
            m.VersionSpan(Label(1, 4), "", 2, 3, Label(1, 3)),
        ]
        self.frames = [
            encode(m.CallResult(1, ids, logprobs, spans, "stop")),
            encode(m.CallResult(1, ids, logprobs, spans, "length", 1)),
            encode(m.CallResult(1, b"", b"", [], "length", 4)),
            encode(m.ServingReport(m.PROTOCOL, "fuzz", "generator-0", 1, 8, [1, 2], 3)),
        ]
        self.decoder = msgspec.msgpack.Decoder(m.FromGenerator)

    def _drawn(self, message: m.CallResult) -> None:
        if self.gateway.router.on_result(message) is None:
            return
        session = self.scripted.open()
        call = session.place(ids=[3, 4, 5], now=0.0, max_new_tokens=4)
        ids = np.frombuffer(message.tokens, "<i4")
        logprobs = np.frombuffer(message.logprobs, "<f4")
        session.on_result(call, ids, logprobs, message.spans, message.finish, past=message.lost)
        list(session.build_training_rows())
        self.scripted.sessions.clear()

    def feed(self, data: bytes) -> str:
        router = self.gateway.router
        if 1 not in router.open:
            router.submit(self.call)
        router.generators.clear()
        return judged(lambda: self._act(data))

    def _act(self, data: bytes) -> None:
        self.hear(b"g", self.decoder.decode(data))
        self.gateway.router.take_messages(announcement())

    def close(self) -> None:
        pass


def from_tests() -> Any:
    """The endpoint over the scripted engine of the gateway's tests."""
    if TESTS not in sys.path:
        sys.path.append(TESTS)
    import gateway_kit

    return gateway_kit


BODIES: tuple[tuple[str, str], ...] = (
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"go"}],"logprobs":true}'),
    (
        "/v1/chat/completions",
        '{"messages":[{"role":"user","content":"a"}],"stream":true,"stop":"x"}',
    ),
    ("/v1/completions", '{"prompt":"abc","max_tokens":5,"n":1}'),
    (
        "/v1/messages",
        '{"model":"policy","max_tokens":9,"messages":[{"role":"user","content":"go"}]}',
    ),
    ("/v1/responses", '{"input":[{"role":"user","content":"go"}],"temperature":1.0}'),
    ("/inference/v1/generate", '{"token_ids":[3,4,5],"sampling_params":{"max_tokens":4}}'),
    ("/reward", '{"reward":1.5,"parts":{"a":0.5},"calls":{"1":0.25}}'),
    ("/end", '{"failed":"why"}'),
    ("/end", '{"failed":"\\ud83d\\ude00 \\u001b[2J"}'),
    ("/end", '{"score":true}'),
    ("/beat", "{}"),
)
FRESH_HTTP = 50  # requests of a session's life


class Web:
    """The gateway's endpoint: bytes of HTTP through its own protocol, routes and sessions."""

    def __init__(self) -> None:
        kit = from_tests()
        from actors.gateway.endpoint import web

        self.kit, self.web = kit, web
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.frames = [self._request(path, body) for path, body in BODIES]
        self.frames.append(self._request("/../../asyncrl/v1/sessions", '{"lease":"a","wait_s":0}'))
        self.requests = 0

    def _request(self, path: str, body: str) -> bytes:
        at = f"/s/{{session}}{path}" if "/../" not in path else "/asyncrl/v1/sessions"
        key = "the-runs-key" if "/../" in path else "key-0"
        head = f"POST {at} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()

    def _anew(self) -> None:
        self.service = self.kit.Scripted(limits=self.kit.SessionLimits(max_calls=0, rows=0))
        session = self.service.open()
        session.api_key = "key-0"
        self.name = session.name.encode()
        self.service.free = 10
        self.app = self.web.WebApp(self.service)
        self.connections = HttpConnections(self.app.app)

    def feed(self, data: bytes) -> str:
        return self.loop.run_until_complete(self._serve(data))

    async def _serve(self, data: bytes) -> str:
        if self.requests % FRESH_HTTP == 0:
            self._anew()
        self.requests += 1
        answer = await self.connections.serve(data.replace(b"{session}", self.name, 1))
        tasks = [*self.app.answering.values()]
        if tasks and (await asyncio.wait(tasks, timeout=30))[1]:
            raise AssertionError("a request that never ends")
        self._check_samples()
        return verdict(answer)

    def _check_samples(self) -> None:
        """Raise for an ended session whose sample cannot be sent or would be refused."""
        from actors.gateway.service import build_trajectory

        for session in self.service.sessions.values():
            if session.is_complete:
                made = build_trajectory(session, self.service.tokenizer, AgentConfig())
                outcomes.check_sample(made)
                encode(made)

    def close(self) -> None:
        self.loop.close()


TARGETS: dict[str, Callable[[], Target]] = {
    "buffer": Buffer,
    "chunk server": ChunkServer,
    "chunk client": ChunkClient,
    "learner": Learner,
    "generator": Generator,
    "calls": Calls,
    "web": Web,
    "completions": Completions,
    "tinker": Tinker,
}
