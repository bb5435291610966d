"""What a server says to those that ask: a message that cannot be costs a counter and the
connection, never the process; what would end its reader is refused before it is acted on."""

import socket as plain_socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zmq
from gateway_kit import Served
from hostile_messages_kit import GOOD

from asyncrl.contract import messages as m
from asyncrl.contract.blobs.images import ImageShape
from asyncrl.contract.errors import REFUSALS, BadMessage, PeerUnreachable
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import BlockingSession, OpenSession, ProcessWait
from asyncrl.supervise import live
from asyncrl.transport import chunks, message_checks, sockets
from asyncrl.transport.chunks import ChunkClient
from asyncrl.transport.sockets import PeerSocket
from learner.loop import Learner

WAIT_S = 600.0
NAN, INF = float("nan"), float("inf")
AT = Label(1, 3)
SAID = m.PolicyAnnouncement(AT, "d", m.WeightsSource(1, "here", "/nowhere", ""))
SAMPLING = m.SamplingSettings(1.0, 1.0, 0, 4)
TICKET = m.Ticket(3, 1, "train", m.Prompt(3, "p"), [0, 1], SAMPLING, AT, None, 0)
CALL = m.GenerationCall(1, 7, 1, "train", b"\3\0\0\0\4\0\0\0", 4, SAMPLING, AT, None, 5)
ROUTING = m.RoutingShape(1, 8, 2)
replace = msgspec.structs.replace


def answer(sample: int, **more: Any) -> m.Trajectory:
    rest = {"reward": 0.0, "reward_parts": {}, "finish": "stop", "temperature": 1.0}
    return m.Trajectory(ticket=3, sample=sample, attempt=1, **GOOD | rest | more)


def batch(**more: Any) -> m.Batch:
    fields: dict[str, Any] = {
        "samples": [answer(0), answer(1)],
        "lags": [1, 1],
        "in_flight": [0, 1],
        "token_lags": [[(0, 2, 1)], [(0, 1, 0), (1, 2, 1)]],
        "ledger": {"trained": {"tokens": 4.0}},
    }
    return m.Batch(epoch=1, number=2, stats={}, next_ticket=4, **fields | more)


def tickets(**more: Any) -> m.TicketGrant:
    return m.TicketGrant(1, 1, [TICKET, replace(TICKET, **more)], SAID)


def announced(**more: Any) -> m.HeartbeatReply:
    return m.HeartbeatReply(1, replace(SAID, source=replace(SAID.source, **more)))


def calls(**more: Any) -> m.CallAssignments:
    return m.CallAssignments(1, 1, [replace(CALL, **more)], [], None)


def sampled(**more: Any) -> m.SamplingSettings:
    return replace(SAMPLING, **more)


def second(**more: Any) -> m.Batch:
    return batch(samples=[answer(0), answer(1, **more)])


LEDGER = "batch 2: its ledger has unknown lines or infinite counts"
OPEN = OpenSession(1, 0, "1.0.1", "p", 0, "engine", "w", 1.0, 1.0)
STATUS = m.RunStatus("r", 1, 9, 1, {}, {}, [], {}, False)
REFUSED: list[tuple[Any, str]] = [
    (batch(samples=[]), "batch 2: 0 samples with 2 lags, 2 in flight, 2 by token"),
    (batch(lags=[1]), "batch 2: 2 samples with 1 lags, 2 in flight, 2 by token"),
    (batch(in_flight=[0, 2]), "batch 2: ticket 3, sample 1: a lag of 1, 2 of it in flight"),
    (batch(lags=[-1, 1]), "batch 2: ticket 3, sample 0: a lag of -1, 0 of it in flight"),
    (
        batch(token_lags=[[(0, 3, 1)], []]),
        "batch 2: ticket 3, sample 0: lag 1 from 0 to 3, of 2 tokens with lag 1",
    ),
    (
        batch(token_lags=[[(1, 0, 1)], []]),
        "batch 2: ticket 3, sample 0: lag 1 from 1 to 0, of 2 tokens with lag 1",
    ),
    (
        batch(token_lags=[[(0, 2, 2)], []]),
        "batch 2: ticket 3, sample 0: lag 2 from 0 to 2, of 2 tokens with lag 1",
    ),
    (batch(samples=[answer(0), answer(0)]), "batch 2: groups with missing or duplicate samples"),
    (
        second(mask=b"\1"),
        "batch 2: ticket 3, sample 1: 8 bytes of tokens, 8 of behavior_logprobs and "
        "8 of token_rewards for 1 mask bytes, 4 of its prompt",
    ),
    (
        second(spans=[m.VersionSpan(AT, "", 0, 2, Label(1, -(2**63)))]),
        "Expected `int` >= 0 - at `$.samples[1][7][0][4][1]`",
    ),
    (second(reward=NAN), "ticket 3, sample 1: reward is nan, not a finite number"),
    (
        second(tokens=b"\5" + b"\0" * 7),
        "ticket 3, sample 1: tokens from 0 to 5, of a model with 5 tokens",
    ),
    (batch(ledger={"lost": {"tokens": 1.0}}), LEDGER),
    (batch(ledger={"trained": {"tokens": NAN}}), LEDGER),
    (m.Welcome(1, -1), "Expected `int` >= 0 - at `$.checkpointed`"),
    (m.CommitReply(1, 1, [Label(1, -1)]), "Expected `int` >= 0 - at `$.keep[0][1]`"),
    (m.Refusal("x" * 70_000), "Expected `str` of length <= 65536 - at `$.reason`"),
    (m.Refusal("x", 300), "Expected `int` <= 255 - at `$.exit_code`"),
    (tickets(ticket=-1), "Expected `int` >= 0 - at `$.tickets[1][0]`"),
    (tickets(attempt=0), "Expected `int` >= 1 - at `$.tickets[1][1]`"),
    (tickets(samples=[]), "Expected `array` of length >= 1 - at `$.tickets[1][4]`"),
    (tickets(samples=[0, 0]), "ticket 3, attempt 1: samples [0, 0]"),
    (tickets(samples=[-1]), "Expected `int` >= 0 - at `$.tickets[1][4][0]`"),
    (
        tickets(sampling=sampled(temperature=NAN)),
        "Expected `float` > 0.0 - at `$.tickets[1][5][0]`",
    ),
    (
        tickets(sampling=sampled(temperature=INF)),
        "Expected `float` <= 1.7976931348623157e+308 - at `$.tickets[1][5][0]`",
    ),
    (tickets(sampling=sampled(top_p=0.0)), "Expected `float` > 0.0 - at `$.tickets[1][5][1]`"),
    (tickets(sampling=sampled(top_k=-1)), "Expected `int` >= 0 - at `$.tickets[1][5][2]`"),
    (tickets(sampling=sampled(max_new_tokens=0)), "Expected `int` >= 1 - at `$.tickets[1][5][3]`"),
    (
        tickets(sampling=sampled(max_new_tokens=1 << 31)),
        "Expected `int` <= 2147483647 - at `$.tickets[1][5][3]`",
    ),
    (tickets(min_version=Label(1, -1)), "Expected `int` >= 0 - at `$.tickets[1][6][1]`"),
    (tickets(exact_version=Label(2, 0)), "ticket 3, attempt 1: exactly 2.0"),
    (m.DeliveryAcks(1, [], -1, None), "Expected `int` >= 0 - at `$.credit`"),
    (
        m.DeliveryAcks(1, [], 0, replace(SAID, label=Label(-1, 0))),
        "Expected `int` >= 0 - at `$.announcement.label[0]`",
    ),
    (
        announced(directory="a\0b"),
        "Expected `str` matching regex '^[^\\\\0]*$' - at `$.announcement.source.directory`",
    ),
    (
        announced(address="x" * 5000),
        "Expected `str` of length <= 4096 - at `$.announcement.source.address`",
    ),
    (announced(epoch=-1), "Expected `int` >= 0 - at `$.announcement.source.epoch`"),
    (calls(prompt=b""), "call 1 of ticket 7: 0 bytes"),
    (calls(prompt=b"\0" * 5), "call 1 of ticket 7: 5 bytes"),
    (calls(prompt=b"\5\0\0\0"), "call 1 of ticket 7: tokens from 5 to 5, of a model with 5"),
    (calls(prompt=b"\xff" * 4), "call 1 of ticket 7: tokens from -1 to -1, of a model with 5"),
    (calls(max_new_tokens=0), "call 1 of ticket 7: 0 tokens behind 2, in a context of 8"),
    (calls(max_new_tokens=7), "call 1 of ticket 7: 7 tokens behind 2, in a context of 8"),
    (calls(sample=-1), "Expected `int` >= 0 - at `$.calls[0][2]`"),
    (calls(stream=-1), "Expected `int` >= 0 - at `$.calls[0][10]`"),
    (
        calls(grammar="x" * (m.MOST_GRAMMAR + 1)),
        "Expected `str` of length <= 65536 - at `$.calls[0][11]`",
    ),
    (calls(min_version=Label(1, -1)), "Expected `int` >= 0 - at `$.calls[0][7][1]`"),
    (replace(STATUS, steps=-1), "Expected `int` >= 0 - at `$.steps`"),
    (replace(STATUS, committed=-1), "Expected `int` >= 0 - at `$.committed`"),
    (replace(STATUS, waits=[("a", "b", "c", NAN)]), "Expected `float` >= 0.0 - at `$.waits[0][3]`"),
    (
        replace(STATUS, held_up=BlockingSession(replace(OPEN, limit="x" * 1001), "g")),
        "Expected `str` of length <= 1000 - at `$.held_up.session[9]`",
    ),
    (
        replace(STATUS, held_up=BlockingSession(OPEN, "x" * 65_537)),
        "Expected `str` of length <= 65536 - at `$.held_up.producer`",
    ),
]
ALLOWED = [
    batch(),
    tickets(samples=[5], exact_version=Label(1, 2)),
    m.DeliveryAcks(1, [(3, 0, 1, "accepted")], 0, SAID),
    m.HeartbeatReply(1, None),
    calls(max_new_tokens=6),
    calls(stream=(1 << 64) - 1),
    calls(grammar="x" * m.MOST_GRAMMAR),
    tickets(sampling=sampled(top_k=(1 << 31) - 1, max_new_tokens=(1 << 31) - 1)),
    tickets(sampling=sampled(max_new_tokens=1)),
    tickets(ticket=0, samples=[0]),
    announced(directory="x" * 4096, epoch=0),
    m.DeliveryAcks(1, [], (1 << 60) - 1, replace(SAID, label=Label(0, 0))),
    m.Refusal("x" * (1 << 16), 255),
    replace(STATUS, steps=0, committed=0, waits=[ProcessWait(*["x" * (1 << 16)] * 3, 0.0)]),
    m.Welcome(1, 0),
    m.CommitReply(1, 1, [AT]),
    STATUS,
    m.Refusal("no"),
]


def look(message: Any) -> None:
    message_checks.check(message, m.ModelShape(5))
    for call in getattr(message, "calls", ()):
        message_checks.check_call(call, 5, 8, {}, None)


@pytest.mark.parametrize(("message", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_is_refused(message: Any, said: str) -> None:
    # as it comes over a wire: what decodes, decodes
    kind = type(message)
    with pytest.raises((BadMessage, msgspec.ValidationError)) as refused:
        look(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind))
    assert str(refused.value) == said


@pytest.mark.parametrize("message", ALLOWED, ids=[type(x).__name__ for x in ALLOWED])
def test_what_an_honest_server_says_is_taken(message: Any) -> None:
    look(message)
    message_checks.check(message)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tokens": b"\0" * 5}, "call 1: 5 bytes of tokens, 8 of logprobs"),
        ({"logprobs": b""}, "call 1: 8 bytes of tokens, 0 of logprobs"),
        ({"lost": 5}, "call 1: 2 tokens and 5 lost; it may have 4"),
        ({"failed": "no"}, "call 1: 2 tokens, and a failure of 2 characters"),
        ({"spans": []}, "call 1: its spans are not its 2 tokens in order"),
        ({"spans": GOOD["spans"][:1]}, "call 1: its spans are not its 2 tokens in order"),
        (
            {"spans": [m.VersionSpan(Label(2, 0), "", 0, 2, Label(2, 0))]},
            "call 1: tokens of another epoch than 1",
        ),
        ({"tokens": b"\5\0\0\0" * 2}, "call 1: tokens from 5 to 5, of a model with 5 tokens"),
        (
            {"logprobs": np.float32([-1, NAN]).tobytes()},
            "call 1: a behavior_logprob is above 0 or not finite",
        ),
        (
            {"logprobs": np.float32([-1, 0.5]).tobytes()},
            "call 1: a behavior_logprob is above 0 or not finite",
        ),
        (
            {"tokens": b"\0" * 20, "logprobs": b"\0" * 20},
            "call 1: 5 tokens and 0 lost; it may have 4",
        ),
        ({"routed": b"\1"}, "call 1: the experts of its tokens: 1 bytes"),
        (
            {"routed": RoutedExperts.make_unrecorded(9, ROUTING).encode()},
            "call 1: the experts of its tokens: 23 bytes for 3 tokens and 1 layers with 2 experts",
        ),
        ({"routed": b""}, "call 1: it has no experts, and the learner replays them"),
    ],
)
def test_an_answer_to_a_call_fits_it(more: dict[str, Any], said: str) -> None:
    experts = RoutedExperts.make_unrecorded(len(CALL.prompt) // 4 + 1, ROUTING).encode()
    good = m.CallResult(1, b"\0" * 8, b"\0" * 8, GOOD["spans"], "stop", routed=experts)
    message_checks.check_call_result(good, CALL, m.ModelShape(5, ROUTING))
    message_checks.check_call_result(replace(good, routed=b""), CALL, m.ModelShape(5))
    message_checks.check_call_result(replace(good, lost=4), CALL, m.ModelShape(5, ROUTING))
    nothing = m.CallResult(1, b"", b"", [], "length", 4)
    message_checks.check_call_result(nothing, CALL, m.ModelShape(5, ROUTING))
    failed = replace(nothing, failed="x" * (1 << 16))
    message_checks.check_call_result(failed, CALL, m.ModelShape(5, ROUTING))
    for more_of_none in ({"routed": experts}, {"support": b"1"}):
        with pytest.raises(BadMessage, match=r"^call 1: a support or experts without tokens$"):
            message_checks.check_call_result(replace(nothing, **more_of_none), CALL)
    other = [m.VersionSpan(Label(2, 0), "", 0, 2, Label(2, 0))]
    exact = replace(CALL, exact_version=Label(2, 0))
    message_checks.check_call_result(replace(good, spans=other), exact, m.ModelShape(5, ROUTING))
    with pytest.raises(BadMessage) as refused:
        message_checks.check_call_result(replace(good, **more), CALL, m.ModelShape(5, ROUTING))
    assert str(refused.value) == said


def test_a_call_has_the_images_of_its_image_tokens() -> None:
    shape = ImageShape(4, 2)
    pictured = replace(CALL, prompt=b"\4\0\0\0" * 4, images=["a", "b"])
    message_checks.check_call(pictured, 5, 8, {"a": b"", "b": b"", "c": b""}, shape)
    message_checks.check_call(replace(pictured, images=[]), 5, 8, {}, None)
    for call, blobs, read, said in (
        (pictured, {"a": b""}, shape, "call 1: an image is not in the message"),
        (replace(pictured, images=["a"]), {"a": b""}, shape, "call 1: 4 image tokens for 1 images"),
        (pictured, {"a": b"", "b": b""}, None, "call 1: 0 image tokens for 2 images"),
        (replace(CALL, images=[]), {}, shape, "call 1: 1 image tokens for 0 images"),
    ):
        with pytest.raises(BadMessage) as refused:
            message_checks.check_call(call, 5, 8, blobs, read)
        assert str(refused.value) == said

    with pytest.raises(BadMessage, match=r"^calls: ") as refused:
        message_checks.check(replace(calls(), images={"a": b"x"}))
    assert refused.value.reason == "image"


def test_a_generators_word_of_itself() -> None:
    good = m.ServingReport(m.PROTOCOL, "run", "generator-0", 1, 8, [1], 3)
    message_checks.check_producer(good.producer)
    message_checks.check_producer("x" * 200)
    most = 1 << 20

    def over_a_wire(**more: Any) -> m.ServingReport:
        data = msgspec.msgpack.encode(replace(good, **more))
        return msgspec.msgpack.decode(data, type=m.ServingReport)

    for more in ({"slots": 0}, {"slots": most}, {"heard": (1 << 60) - 1}):
        over_a_wire(**more)
    for more in (
        *({"slots": most + 1}, {"heard": 1 << 60}, {"held": [1] * (most + 1)}),
        *({"slots": -1}, {"heard": -1}),
    ):
        with pytest.raises(msgspec.ValidationError, match=rf"at `\$\.{next(iter(more))}`"):
            over_a_wire(**more)
    for producer in ("", "\x1b[2J", "x" * 201):
        with pytest.raises(BadMessage, match="a generator's name is printable and has 1 to 200 ch"):
            message_checks.check_producer(over_a_wire(producer=producer).producer)
    names = "frame stranger role message ticket version limit shape length number token text image"
    assert " ".join(REFUSALS) == names
    kinds = {text.partition(" ")[0] for text in REFUSALS.values()}
    assert kinds == {"frames", "impossible", "messages", "samples"}
    assert msgspec.convert((0, (1 << 60) - 1), Label) == (0, (1 << 60) - 1)
    for label in ((0, 1 << 60), (1 << 60, 0), (-1, 0), (0, -1)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(label, Label)


ROWS = [("a", "float32", [2, 3], 0, 24), ("b", "bfloat16", [4], 64, 8)]


def test_the_bounds_of_a_layout() -> None:
    """Sixteen dimensions, a byte at the end of what weights may take, a hole before it."""
    most = 1 << 46
    assert chunks.decode_layout(msgspec.msgpack.encode(ROWS)) == ROWS
    message_checks.check_weight_layout([("a", "uint8", [1] * 16, 0, 1)])
    message_checks.check_weight_layout([ROWS[0], ("b", "uint8", [1], most - 1, 1)])
    message_checks.check_weight_layout([("a", "uint8", [most], 0, most)])
    message_checks.check_weight_layout([("a", "uint8", [0, 2], 0, 0)])
    known = "float32, bfloat16, float16, float64, uint8, int8, int16, int32, int64, bool, float8"
    for rows, why in (
        ([("a", "uint8", [1] * 17, 0, 1)], "weights 'a'"),
        ([("a", "uint8", [most + 1, 0], 0, 0)], "weights 'a'"),
        (
            [("a" * 90, "uint8", [1], most, 1)],
            f"weights {'a' * 80!r}: bytes {most} to {most + 1}, behind 0",
        ),
        ([ROWS[0], ("b", "uint8", [1], 23, 1)], "weights 'b': bytes 23 to 24, behind 24"),
        ([ROWS[0], ("a", "uint8", [1], 24, 1)], "a layout that names a tensor twice"),
        (
            [("a", "int3", [1], 0, 1)],
            f"weights 'a': dtype 'int3'; known are {known}_e4m3fn, float8_e5m2",
        ),
        ([("a", "uint8", [2], 0, 1)], "weights 'a': 1 bytes for shape [2] of uint8"),
        ([], "a layout of 0 tensors"),
        ([("a", "float32", [-2, -3], 0, 24)], "weights 'a'"),
        ([("a", "float32", [2, 3], -4, 24)], "weights 'a': bytes -4 to 20, behind 0"),
        ([("a", "float32", [2, 3], 1, 24)], "weights 'a': bytes 1 to 25, behind 0"),
    ):
        with pytest.raises(BadMessage) as error:
            chunks.decode_layout(msgspec.msgpack.encode(rows))
        assert str(error.value).startswith(why) and (
            str(error.value) == why or why.endswith("are ")
        ), error.value


class Server:
    """A server that says what it likes: `say` of the number of the message that came."""

    def __init__(self, say: Any) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.say, self.end, self.peers = say, False, []  # type: ignore[var-annotated]
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        number = 0
        while not self.end:
            if self.socket.poll(20):
                peer, *frames = self.socket.recv_multipart()
                self.peers.append(peer)
                self.socket.send_multipart([peer, *self.say(number, frames)])
                number += 1

    def close(self) -> None:
        self.end = True
        self.thread.join()
        self.socket.close()
        self.context.term()


def heard(peer: PeerSocket, message: Any) -> Any:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        peer.send(message)
        if (reply := peer.recv(0.2)) is not None:
            return reply
    raise AssertionError("no answer")


GOOD_REPLY = msgspec.msgpack.encode(m.Welcome(1, 0))


def test_a_message_that_cannot_be_costs_a_counter_and_the_connection() -> None:
    bad = [[b"\xc1"], [GOOD_REPLY, GOOD_REPLY], [msgspec.msgpack.encode(m.Welcome(1, -1))]]
    bad += [[GOOD_REPLY] * 60, [b"\x91" * 100_000]]

    def say(*_: Any) -> list[bytes]:
        """By the connection, which may have asked again before it heard."""
        at = len(set(server.peers)) - 1
        return bad[at] if at < len(bad) else [GOOD_REPLY]

    server = Server(say)
    peer = PeerSocket(server.address)
    try:
        assert heard(peer, m.StatusRequest()) == m.Welcome(1, 0)
        assert peer.broken == len(bad) and peer.broken_in_a_row == 0
        with pytest.raises(BadMessage, match=r"^a message of more than one frame$") as refused:
            peer.read([GOOD_REPLY, b""])
        assert refused.value.reason == "frame"
        assert len(set(server.peers)) == len(bad) + 1  # a connection each
    finally:
        peer.close()
        server.close()


def test_who_says_nothing_else_is_given_up_by_its_peers_and_not_by_who_only_looks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sockets, "MOST_BROKEN", 4)
    server = Server(lambda *_: [b"\xc1"])
    peer = PeerSocket(server.address)
    viewer = PeerSocket(server.address)
    try:
        with pytest.raises(PeerUnreachable, match="4 invalid messages in a row"):
            heard(peer, m.StatusRequest())
        until = time.monotonic() + WAIT_S
        while viewer.broken < 5:
            assert time.monotonic() < until
            viewer.send(m.StatusRequest())
            assert live.receive_reply(viewer, 0.2) is None
        assert capsys.readouterr().err.count("sent an invalid message, reconnecting") == 2 * 3
    finally:
        peer.close()
        viewer.close()
        server.close()


def test_a_learner_takes_no_word_by_which_it_would_lose_its_checkpoints() -> None:
    learner: Any = SimpleNamespace(model=m.ModelShape(5), epoch=2, number=7)
    Learner.check(learner, m.Welcome(2, 7))
    Learner.check(learner, m.Welcome(1, 8))  # another's, not acted on
    with pytest.raises(BadMessage, match="kept from 8, and this one is 7"):
        Learner.check(learner, m.Welcome(2, 8))
    with pytest.raises(BadMessage, match="with 5 tokens"):
        Learner.check(learner, second(tokens=b"\5" + b"\0" * 7))


def test_a_decoded_message_keeps_nothing_of_the_frame_it_came_in() -> None:
    """msgspec makes a field of type memoryview or Raw a window on the frame."""
    messages: list[Any] = [m.Delivery("generator-0", 1, 1, [answer(0), answer(1)]), batch(), CALL]
    for message in messages:
        frame = bytearray(msgspec.msgpack.encode(message))
        decoded = msgspec.msgpack.decode(frame, type=type(message))
        frame[:] = bytes(len(frame))
        assert decoded == message, type(message).__name__


def test_a_damaged_chunk_does_not_shift_those_of_the_next_fetch() -> None:
    """Those that were on their way behind it are of the connection that ends with it."""
    data = np.random.default_rng(0).bytes(3 * chunks.CHUNK_BYTES)
    digest = xxhash.xxh3_64_hexdigest(data)

    def say(number: int, frames: list[bytes]) -> list[bytes]:
        ask = msgspec.msgpack.decode(frames[0], type=chunks._ChunkRequest)
        part = data[ask.offset : ask.offset + ask.size]
        checksum = xxhash.xxh3_64_intdigest(part) + (number == 0)
        return [msgspec.msgpack.encode(chunks._ChunkReply(digest, part, checksum, b""))]

    server = Server(say)
    client = ChunkClient(server.address, WAIT_S)
    into = bytearray(len(data))
    try:
        with pytest.raises(PeerUnreachable, match="a damaged chunk"):
            client.fetch(AT, digest, memoryview(into))
        assert client.fetch(AT, digest, memoryview(into)) == digest and bytes(into) == data
    finally:
        client.close()
        server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


@pytest.mark.parametrize("what", ["line", "trailers"])
def test_a_head_without_end_costs_its_connection(what: str, served: Served) -> None:
    """And holds no more than a bounded piece of it, whoever sends it: no key is needed."""
    begin, piece = {
        "line": (b"GET /", b"a" * 1000),
        "trailers": (
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
            b"x-a: " + b"b" * 1000 + b"\r\n",
        ),
    }[what]
    host, port = served.url.removeprefix("http://").split(":")
    sent = 0
    with plain_socket.create_connection((host, int(port)), WAIT_S) as wire:
        try:
            wire.sendall(begin)
            while sent < 1 << 28:
                wire.sendall(piece * 100)
                sent += 100 * len(piece)
            while wire.recv(1 << 16):
                pass
        except (ConnectionError, BrokenPipeError):
            pass
    assert sent < 1 << 25  # what the sockets themselves hold
    served.until(lambda: not served.endpoint.server.server_state.connections)
