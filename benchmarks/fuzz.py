"""Mutated messages at the buffer's socket: how many are refused, and does any end the run?

    OMP_NUM_THREADS=1 python benchmarks/fuzz.py [--mutants N] [--seed S] [--quick] [--json]

Real messages of a run (a copy of each kind that a generator or learner sends to the service as it
stands) are changed in their bytes: bits, bytes and whole numbers of msgpack replaced, pieces cut,
doubled and exchanged.  What still decodes goes through the real service.  In this process, without
zmq: its frames are bounded before this (asyncrl/transport/sockets.py).

Goal: no mutant raises anything but BadMessage, and the ledger stays without negative lines.  What
does not hold that is written as hex to --keep, for tests/."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from lib import rounds
from scale import Loop

from asyncrl.contract import messages as m
from asyncrl.records import rundir
from asyncrl.transport.sockets import UNDECODABLE
from buffer.service import Service

EDGES = (b"\xcb\x7f\xf8" + b"\0" * 6, b"\xcb\x7f\xf0" + b"\0" * 6, b"\xd3\x80" + b"\0" * 7)
EDGES += (b"\xcf" + b"\xff" * 8, b"\xc0", b"\xff", b"\x90", b"\x80", b"\xa0", b"\xc4\x00")
FRESH = 20_000  # mutants after which the run begins anew


def mutant(r: random.Random, frame: bytes, other: bytes) -> bytes:
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
            data[at:end] = r.choice(EDGES)
        elif kind == 3:
            del data[at:end]
        elif kind == 4:
            data[at:at] = data[at:end]
        else:
            start = r.randrange(len(other))
            data[at:end] = other[start : start + end - at]
    return bytes(data)


class Victim:
    """A service in the middle of a run, and frames that its peers would send."""

    def __init__(self, work: Path) -> None:
        self.loop = Loop(work, "memory", 3)
        self.service: Service = self.loop.service
        self.service.store.settings.error_budget = 1e9
        self.service.store.settings.machinery_budget = 1e9
        self.frames: list[bytes] = []
        hear = self.loop.say

        def say(name: str, message: Any) -> None:
            self.frames.append(msgspec.msgpack.encode(message))
            hear(name, message)

        self.loop.say = say  # type: ignore[method-assign]
        self.loop.batches(2)
        self.frames = self.frames[-200:]
        self.frames.append(msgspec.msgpack.encode(self.loop.hello()))


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--mutants", type=int, default=1_000_000)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--keep", type=Path, help="a file: what fails is added to it")
    args = p.parse_args()
    wanted = 3000 if args.quick else args.mutants
    r = random.Random(args.seed)
    decoder = msgspec.msgpack.Decoder(m.FromPeer)
    counts = {"undecodable": 0, "refused": 0, "taken": 0}
    failed: list[str] = []
    began = time.perf_counter()
    made = 0
    while made < wanted:
        with tempfile.TemporaryDirectory() as work:
            victim = Victim(Path(work))
            service = victim.service
            for _ in range(min(FRESH, wanted - made)):
                made += 1
                data = mutant(r, r.choice(victim.frames), r.choice(victim.frames))
                try:
                    message = decoder.decode(data)
                except UNDECODABLE:
                    counts["undecodable"] += 1
                    continue
                if isinstance(message, m.LearnerHello) and message.epoch > 1:
                    continue  # a well-formed hello of a later life is a learner's right
                before = service.refused.total()
                try:
                    service.handle(b"m", message)
                    service.answer()
                    service.flush()
                except Exception as error:
                    failed.append(f"{type(error).__name__} {str(error)[:200]}")
                    print(failed[-1], file=sys.stderr)
                    if args.keep:
                        with args.keep.open("a") as file:
                            file.write(data.hex() + "\n")
                    break
                counts["refused" if service.refused.total() > before else "taken"] += 1
                victim.loop.heard.clear()
            if not failed and any(x.tokens < 0 for x in service.store.folded().lines.values()):
                failed.append("a line of the ledger is negative")
            service.close()
            rundir.clean(victim.loop.dir)
    seconds = time.perf_counter() - began
    rounds.report(
        "fuzz",
        [rounds.goal("mutants that ended the run", len(failed), 0, at_least=False)],
        {
            "what": "mutated messages at the buffer's service",
            "mutants": made,
            "seed": args.seed,
            "seconds": round(seconds, 1),
            "failed": failed[:50],
        }
        | counts,
        args,
    )


if __name__ == "__main__":
    main()
