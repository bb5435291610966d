"""Stand-ins around a measured gateway, each a separate process, so that CPU time can be separated.

    python benchmarks/lib/endpoint/stage.py buffer RUN           grants tickets without end
    python benchmarks/lib/endpoint/stage.py drawn RUN PAUSE_S    a generator without a model
    python benchmarks/lib/endpoint/stage.py engine RUN           a generator, weights loaded
    python benchmarks/lib/endpoint/stage.py stub FILE            an endpoint that answers at once

They run until they are killed.  Every completion has all tokens that its call allows."""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import msgspec
import numpy as np

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records.rundir import get_buffer_address, get_gateway_address, read_run_id
from asyncrl.transport import sockets

AT = Label(1, 1)
CREDIT = 1 << 23
REPORT_S = 0.5
FIRST_TOKEN = 3  # behind pad, eos and unk
SYMBOLS = 40  # different tokens that a stand-in draws, and different pauses that it makes
RECV = 1 << 20


# ---- a buffer --------------------------------------------------------------------------------


def granted(want: m.TicketRequest, config: Config, first: int) -> m.TicketGrant:
    """Tickets of one sample each, as many as are asked for."""
    how = m.SamplingSettings(temperature=1.0, max_new_tokens=config.generator.max_new_tokens)
    tickets = [
        m.Ticket(
            ticket=number,
            attempt=number + 1,
            kind="train",
            prompt=m.Prompt(number, "go"),
            samples=[0],
            sampling=how,
            min_version=AT,
            exact_version=None,
            seed=7,
        )
        for number in range(first, first + want.samples)
    ]
    return m.TicketGrant(want.session, want.sequence, tickets, None)


def buffer(run_dir: Path) -> NoReturn:
    """Grants and acknowledges."""
    config = load.load(run_dir / "config.toml")
    peers = sockets.BufferSocket(get_buffer_address(config, run_dir), run=read_run_id(run_dir))
    number = 0
    while True:
        if (got := peers.recv(1.0)) is None:
            continue
        peer, message = got
        if isinstance(message, m.TicketRequest) and message.samples:
            peers.send(peer, granted(message, config, number))
            number += message.samples
        elif isinstance(message, m.Delivery):
            acks: Any = [(x.ticket, x.sample, x.attempt, "accepted") for x in message.samples]
            peers.send(peer, m.DeliveryAcks(message.session, acks, CREDIT, None))
        elif isinstance(message, m.TicketRequest | m.GeneratorHello | m.LeaseRenewal):
            peers.send(peer, m.HeartbeatReply(1))


# ---- generators ------------------------------------------------------------------------------


def answer(call: m.GenerationCall) -> m.CallResult:
    """A stand-in's completion, with all tokens of the call; the first one encodes its pause."""
    count = call.max_new_tokens
    tokens = FIRST_TOKEN + (np.arange(count) * 7 + call.id) % SYMBOLS
    logprobs = np.full(count, -0.5, "<f4").tobytes()
    spans = [m.VersionSpan(AT, "d", 0, count, AT)]
    return m.CallResult(call.id, tokens.astype("<i4").tobytes(), logprobs, spans, "length")


def pauses(mean_s: float) -> list[float]:
    """Seconds that a stand-in takes for an answer, by its first token less FIRST_TOKEN: from a half
    of the mean to one and a half, so that sessions do not go on all at once.
    """
    return [mean_s * (0.5 + n / (SYMBOLS - 1)) for n in range(SYMBOLS)]


def drawn(run_dir: Path, mean_s: float) -> NoReturn:
    """A generator without an engine."""
    config = load.load(run_dir / "config.toml")
    run = read_run_id(run_dir)
    peer = sockets.PeerSocket(
        get_gateway_address(config, run_dir, 0), reads=m.FromGateway, run=run, key="agent"
    )
    session, heard, said = time.time_ns(), 0, 0.0
    takes = pauses(mean_s)
    waiting: list[deque[tuple[float, m.GenerationCall]]] = [
        deque() for _ in takes
    ]  # each in order of time
    while True:
        now = time.monotonic()
        if now - said > REPORT_S:
            said = now
            held = [call.id for queue in waiting for _, call in queue]
            slots = config.generator.slots
            peer.send(m.ServingReport(m.PROTOCOL, run, "generator-0", session, slots, held, heard))
        due = min((queue[0][0] for queue in waiting if queue), default=now + REPORT_S)
        if (message := peer.recv(max(0.0, min(due - now, REPORT_S)))) is not None:
            heard = max(heard, message.sequence)
            for call in message.calls:
                which = call.id % SYMBOLS
                waiting[which].append((time.monotonic() + takes[which], call))
        now = time.monotonic()
        for queue in waiting:
            while queue and queue[0][0] <= now:
                peer.send(answer(queue.popleft()[1]))


def engine(run_dir: Path) -> None:
    """A generator as `asyncrl generator` has it; its weights are the model's own."""
    from actors import generator as generators
    from actors import turn
    from asyncrl.models import policy as models

    config = load.load(run_dir / "config.toml")
    turn.collect_stop_tokens = lambda *_: ()  # every answer is of the same length
    made = generators.Generator(config, run_dir, 0, generators.build_engine(config))
    model = models.load_policy(config.model.path, "float32", "cpu")
    layout = models.build_manifest(model)
    source = bytearray(models.count_flat_bytes(layout))
    models.write_flat(model, memoryview(source))
    weights = models.read_flat(memoryview(source), layout)
    made.engine.load(weights, AT, "d", models.compute_probe_logprobs(model).tobytes())
    made.loaded = generators.LoadedWeights(AT, "d")
    made.loop()


# ---- an endpoint that answers at once --------------------------------------------------------


def reply(tokens: int) -> bytes:
    """Of a chat completion, head and body, as the gateway's are."""
    text = "".join(chr(ord("a") + n % 26) for n in range(tokens))
    body = msgspec.json.encode(
        {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "length",
                    "logprobs": None,
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1},
        }
    )
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def whole(got: bytes) -> int:
    """Bytes of the first request in `got`; 0 while it is not all there."""
    end = got.find(b"\r\n\r\n")
    if end < 0:
        return 0
    length = (got[:end].lower().partition(b"content-length:")[2] or b"0").split(b"\r\n")[0]
    size = end + 4 + int(length)
    return size if len(got) >= size else 0


def stub(file: Path, tokens: int = 32) -> NoReturn:
    """Serve the same reply to every request; the URL is written to `file`."""
    said = reply(tokens)
    selector = selectors.DefaultSelector()
    server = socket.create_server(("127.0.0.1", 0))
    selector.register(server, selectors.EVENT_READ)
    part = file.with_suffix(".part")
    part.write_text(f"http://127.0.0.1:{server.getsockname()[1]}")
    part.rename(file)
    open_ones: dict[socket.socket, bytes] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is server:
                one, _ = server.accept()
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                open_ones[one] = b""
                selector.register(one, selectors.EVENT_READ)
                continue
            asking: Any = key.fileobj
            got = asking.recv(RECV)
            if not got:
                selector.unregister(asking)
                asking.close()
                del open_ones[asking]
                continue
            open_ones[asking] += got
            while size := whole(open_ones[asking]):
                open_ones[asking] = open_ones[asking][size:]
                asking.sendall(said)


ROLES = {"buffer": buffer, "drawn": drawn, "engine": engine, "stub": stub}


if __name__ == "__main__":
    ROLES[sys.argv[1]](Path(sys.argv[2]), *map(float, sys.argv[3:]))
