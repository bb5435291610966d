"""Feed mutated messages to the reader of every socket, and check that none ends its process.

    OMP_NUM_THREADS=1 python benchmarks/fuzz.py [--mutants N] [--only NAME ...] [--seed S]
                                                [--quick] [--json] [--corpus FILE]
    OMP_NUM_THREADS=1 python benchmarks/fuzz.py --protobuf [--mutants N] [--seed S] [--json]

There is a target for each socket: the buffer's service, the learner's chunk server and its
replies at a generator, the buffer's messages at learner and generator, the gateway's socket of
calls, its endpoint, and the routes of `asyncrl serve` and `asyncrl tinker`.  One in five mutants is
a real message of a run changed in its bytes: bits, bytes and whole numbers of msgpack replaced,
pieces cut, doubled and exchanged.  The others are changed in their values, and most still decode:
one to three numbers, texts, arrays or lists are replaced, nine in ten by a value of the same type;
a request's body goes to another route now and then.  In this process, without the sockets: they
bound a message's size (asyncrl/transport/sockets.py), which tests/ show.

A mutant in EVERY is traced, and one that reaches lines of ours that none reached before becomes
material for further ones.  --corpus writes the smallest mutants by which all those lines are
reached, and the verdict on each, for tests/transport/test_hostile_messages.py.

--protobuf sends mutants of a forward_backward call, each as the model's next call, to `asyncrl
tinker` with its processes.  None of these may end, and no call may fail on the server's side.

Goals: no mutant raises anything but what its reader answers a peer with (what does is printed as
hex), a million decode, and a reader's mutants leave at most GROWTH_MIB of memory behind."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import copy
import gc
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import psutil
from google.protobuf.message import DecodeError
from lib import rounds
from lib.fuzz_http import PROTOBUF
from lib.fuzz_targets import TARGETS, Target
from lib.results_file import ROOT

EDGES: tuple[bytes, ...] = (
    b"\xcb\x7f\xf8" + b"\0" * 6,
    b"\xcb\x7f\xf0" + b"\0" * 6,
    b"\xd3\x80" + b"\0" * 7,
)
EDGES += (b"\xcf" + b"\xff" * 8, b"\xc0", b"\xff", b"\x90", b"\x80", b"\xa0", b"\xc4\x00")
TEXT_EDGES = (
    b"null",
    b"1e999",
    b"-1",
    b"[]",
    b"{}",
    b'""',
    b"[[[[",
    b"99999999999999999999",
    b"1e19",
    b'"\\ud800"',
    b"\\udc00",
    b"\r\n",
)
FRESH = 20_000  # mutants after which a target begins anew
EVERY = 20  # of so many mutants one is traced
LARGEST = 1 << 16  # bytes of a mutant that becomes material
BYTES = 0.2  # share of the mutants that are changed in their bytes; the rest in their values
HTTP = ("web", "completions", "tinker")
GROWTH_MIB = 64.0  # that a reader's mutants may leave behind, material and findings included
OURS = tuple(f"{ROOT}/{part}/" for part in ("asyncrl", "actors", "buffer", "learner"))


def mutant(r: random.Random, frame: bytes, other: bytes, edges: tuple[bytes, ...]) -> bytes:
    """One to four changes."""
    data = bytearray(frame)
    for _ in range(r.randint(1, 4)):
        at = r.randrange(len(data) + 1)
        end = min(len(data), at + r.choice((1, 1, 2, 4, 9, 40)))
        kind = r.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << r.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = r.randrange(256)
        elif kind == 2:
            data[at:end] = r.choice(edges)
        elif kind == 3:
            del data[at:end]
        elif kind == 4:
            data[at:at] = data[at:end]
        elif other:
            start = r.randrange(len(other))
            data[at:end] = other[start : start + end - at]
    return bytes(data)


def traced(target: Target, data: bytes) -> tuple[str, set[tuple[str, int]]]:
    """The verdict, and the lines of ours that were run."""
    lines: set[tuple[str, int]] = set()

    def inside(frame: Any, event: str, _: Any) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return inside

    def called(frame: Any, event: str, _: Any) -> Any:
        return inside if frame.f_code.co_filename.startswith(OURS) else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        return target.feed(data), lines
    finally:
        sys.settrace(before)


VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 5, 17, 2**31, 2**40, 2**62, -(2**63), 2**64 - 1),
    *(0.0, -1.0, 0.5, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "x" * 300, "generator-0", "\x1b[2J", "\0", None, True, [], {}, [0], b"", b"\xff" * 8),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    found: list[tuple[Any, Any]] = []
    inside = [value]
    while inside:
        holder = inside.pop()
        keys = holder if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                inside.append(holder[key])
    return found


def is_uniform(value: list[Any]) -> bool:
    """Whether all entries have one type: a sequence, not a record written as an array."""
    return len({type(x) for x in value}) == 1


def same_type(r: random.Random, value: Any) -> Any:
    """Another value of the same type, so that the message still decodes."""
    if value is None or isinstance(value, bool):
        return None if value is None else not value
    if isinstance(value, bytes):
        return r.choice((value[:-1], value[:-4], value * 2, mutant(r, value, value, EDGES)))
    if isinstance(value, list):
        if not value:
            return value
        if not is_uniform(value):
            at = r.randrange(len(value))
            return [*value[:at], same_type(r, value[at]), *value[at + 1 :]]
        return copy.deepcopy(r.choice((value[:-1], value + value, value[::-1], value[:1] * 40)))
    if isinstance(value, dict):
        gone = r.choice(list(value)) if value else None
        return {key: x for key, x in value.items() if key != gone}
    if isinstance(value, int) and r.random() < 0.5:
        return value + r.choice((-1, 1))
    if isinstance(value, str) and r.random() < 0.3:
        return value[: r.randrange(len(value) + 1)] + r.choice(("", "<script>", "\ud83d\ude00"))
    return r.choice([x for x in VALUES if type(x) is type(value)])


def another(r: random.Random, value: Any) -> Any:
    """A replacement, nine times in ten of the same type."""
    if r.random() < 0.9:
        return same_type(r, value)
    return copy.deepcopy(r.choice(VALUES))


def of_values(r: random.Random, value: Any) -> Any:
    """One to three values changed, in place."""
    for _ in range(r.randint(1, 3)):
        # a message's tag says how the rest is decoded: the byte mutants change it
        if found := [(holder, key) for holder, key in places(value) if key != "type"]:
            holder, key = r.choice(found)
            holder[key] = another(r, holder[key])
    return value


def of_protobuf(r: random.Random, body: bytes) -> bytes:
    """One to three values of a forward_backward call changed."""
    from google.protobuf import json_format
    from tinker.proto import tinker_public_pb2 as pb

    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
        values = of_values(r, json_format.MessageToDict(message))
        changed = json_format.ParseDict(values, pb.ForwardBackwardRequest())
    # what ParseDict raises for values that fit no field
    except (DecodeError, json_format.Error, AttributeError, SystemError) as error:
        raise ValueError("no message of this kind") from error
    return bytes(changed.SerializeToString())


def typed(r: random.Random, name: str, frame: bytes, other: bytes) -> bytes:
    """A mutant that still is msgpack, or HTTP with JSON, if the frame was.  other: a request whose
    body goes to this one's route now and then.
    """
    try:
        if name not in HTTP:
            return msgspec.msgpack.encode(of_values(r, msgspec.msgpack.decode(frame)))
        head, _, body = frame.partition(b"\r\n\r\n")
        if r.random() < 0.2:
            body = other.partition(b"\r\n\r\n")[2]
        if PROTOBUF in head:
            changed = of_protobuf(r, body)
        else:
            changed = json.dumps(of_values(r, json.loads(body)), default=repr).encode()
        size = f"content-length: {len(changed)}".encode()
        return re.sub(rb"content-length: \d+", size, head) + b"\r\n\r\n" + changed
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError):
        return frame


def resident_mib() -> float:
    """Memory of this process, without what nothing refers to."""
    gc.collect()
    return float(psutil.Process().memory_info().rss) / (1 << 20)


class Found:
    """The verdicts on the mutants of one target."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.verdicts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.reached: dict[tuple[str, int], bytes] = {}  # line -> the smallest mutant that ran it
        self.seconds = 0.0
        self.mib: tuple[float, float] = (0.0, 0.0)  # resident, after the first life and at the end

    @property
    def decoded(self) -> int:
        return self.verdicts.total() - self.verdicts["undecodable"]

    def learn(self, data: bytes, lines: set[tuple[str, int]]) -> bool:
        """Keep a mutant for the lines that it reached; True when some are new."""
        new = not lines <= self.reached.keys()
        for line in lines:
            if len(data) < len(self.reached.get(line, data + b"\0")):
                self.reached[line] = data
        return new and len(data) <= LARGEST

    def corpus(self) -> list[bytes]:
        """The mutants that reach a line as the smallest ones."""
        return sorted(set(self.reached.values()), key=lambda data: (len(data), data))


def fuzz(name: str, wanted: int, seed: int) -> Found:
    r = random.Random(f"{name} {seed}")
    found = Found(name)
    edges = TEXT_EDGES if name in HTTP else EDGES
    began = time.process_time()
    made = 0
    fresh: list[bytes] = []
    while made < wanted:
        target = TARGETS[name]()
        for frame in target.frames if not made else ():
            found.learn(frame, traced(target, frame)[1])
        for _ in range(min(FRESH, wanted - made)):
            made += 1
            material = fresh if fresh and r.random() < 0.3 else target.frames
            data = r.choice(material)
            data = (
                mutant(r, data, r.choice(target.frames), edges)
                if r.random() < BYTES
                else typed(r, name, data, r.choice(target.frames))
            )
            try:
                if made % EVERY:
                    verdict = target.feed(data)
                else:
                    verdict, lines = traced(target, data)
                    if found.learn(data, lines):
                        fresh.append(data)
            except Exception as error:
                found.failed.append(f"{type(error).__name__} {str(error)[:200]}")
                print(f"{name}: {found.failed[-1]}\n{data.hex()}", file=sys.stderr)
                break
            found.verdicts[verdict] += 1
        with contextlib.suppress(Exception):  # one that failed may not close either
            target.close()
        mib = resident_mib()
        found.mib = (found.mib[0] or mib, mib)
        if len(found.failed) >= 20:
            break
    found.seconds = time.process_time() - began
    return found


def fuzz_server(wanted: int, seed: int) -> Found:
    """Send mutants of a forward_backward call to a Tinker server in its own processes."""
    from lib.chaos import tinker
    from tinker.proto import tinker_public_pb2 as pb

    r = random.Random(seed)
    found = Found("protobuf")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        server = tinker.RestartedServer(Path(work))
        client = tinker.TinkerClient(server, 0, 0)
        client.create_model()
        sampled = client.sample(client.save_sampler(0), 0)
        children = tinker.find_children(server.process.pid)
        resident = psutil.Process(server.process.pid).memory_info
        found.mib = (resident().rss / (1 << 20), 0.0)
        while found.verdicts.total() < wanted:
            body = client.build_loss(sampled)
            made = pb.ForwardBackwardRequest()
            try:
                data = mutant(r, body, body, EDGES) if r.random() < BYTES else of_protobuf(r, body)
                made.ParseFromString(data)
                made.seq_id = client.number
                data = made.SerializeToString()
            except DecodeError:
                pass
            except (ValueError, TypeError, OverflowError):  # the values fit no field
                client.number -= 1
                continue
            reply = client.post("forward_backward", data)
            if reply.status_code == 200:
                promise = {"request_id": reply.json()["request_id"]}
                reply = client.post("retrieve_future", promise)
            else:
                client.number -= 1  # no call of the model
            is_json = "json" in reply.headers["content-type"]
            outcome = reply.json() if is_json else {}
            verdict = "refused" if "error" in outcome else "taken"
            found.verdicts["undecodable" if "is not a F" in reply.text else verdict] += 1
            if reply.status_code >= 500 or outcome.get("category") == "server":
                found.failed.append(reply.text[:200])
                print(f"{found.failed[-1]}\n{data.hex()}", file=sys.stderr)
            if not found.verdicts.total() % EVERY:
                adam = {"adam_params": {"learning_rate": 1e-3}}
                promise = client.post("optim_step", client.next_call() | adam).json()
                client.post("retrieve_future", {"request_id": promise["request_id"]})
        client.call("forward_backward", client.build_loss(sampled))
        if tinker.find_children(server.process.pid) != children:
            found.failed.append("a process of the server has ended")
        found.mib = (found.mib[0], resident().rss / (1 << 20))
        server.stop()
    found.seconds = time.monotonic() - began
    return found


def write_corpus(path: Path, every: list[Found]) -> None:
    """The corpus with the verdicts of a first pass through it, in its order."""
    rows = []
    for found in every:
        target = TARGETS[found.name]()
        for data in found.corpus():
            rows.append(f"{found.name}\t{target.feed(data)}\t{data.hex()}\n")
        target.close()
    path.write_text("".join(rows))


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--mutants", type=int, help="of each target; a million")
    p.add_argument("--only", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--corpus", type=Path, help="a file to write")
    p.add_argument("--protobuf", action="store_true", help="to a Tinker server; 1,500 mutants")
    args = p.parse_args()
    wanted = args.mutants or (1000 if args.quick else 1_000_000)
    every = []
    if args.protobuf:
        every = [fuzz_server(args.mutants or 1500, args.seed)]
    for name in args.only if not args.protobuf else ():
        every.append(found := fuzz(name, wanted, args.seed))
        print(
            f"{name}: {found.verdicts.total()} mutants, {found.decoded} of them decoded, in "
            f"{found.seconds:.0f} CPU s, {found.mib[0]:.0f} to {found.mib[1]:.0f} MiB, "
            f"{len(found.reached)} lines by {len(found.corpus())} of them, "
            f"{dict(found.verdicts.most_common())}",
            file=sys.stderr,
            flush=True,
        )
    if args.corpus:
        write_corpus(args.corpus, every)
    goals = [
        rounds.goal(f"{x.name}: mutants that ended it", len(x.failed), 0, at_least=False)
        for x in every
    ]
    for x in every:
        name = f"{x.name}: MiB kept of its mutants"
        goals.append(rounds.goal(name, round(x.mib[1] - x.mib[0], 1), GROWTH_MIB, at_least=False))
    if not args.quick and not args.protobuf and args.only == list(TARGETS):
        decoded = sum(x.decoded for x in every)
        goals.append(rounds.goal("decoded mutants", decoded, 1_000_000, at_least=True))
    what = "mutated messages behind every socket, in process"
    rounds.report(
        "fuzz_protobuf" if args.protobuf else "fuzz",
        goals,
        {
            "what": "mutated calls to a Tinker server" if args.protobuf else what,
            "mutants": {x.name: x.verdicts.total() + len(x.failed) for x in every},
            "decoded": {x.name: x.decoded for x in every},
            "resident_mib": {x.name: [round(mib, 1) for mib in x.mib] for x in every},
            "cpu_seconds": {x.name: round(x.seconds, 1) for x in every},
            "lines_reached": {x.name: len(x.reached) for x in every},
            "verdicts": {x.name: dict(x.verdicts.most_common()) for x in every},
            "seed": args.seed,
            "failed": {x.name: x.failed[:50] for x in every if x.failed},
        },
        args,
    )


if __name__ == "__main__":
    main()
