"""Compare the way of weights from learner to generator with one memcpy of the same bytes.

    OMP_NUM_THREADS=1 python benchmarks/weights.py [--quick] [--json] [--sizes 84k 2.6M 135M]

Proves: publish and pick up, checksums apart, take at most 2 memcpys.  Publish is the learner's
`Publisher.publish` (reserve a slot, copy the parameters, check that they are finite, set the
label), pick up the generator's `WeightsReceiver.pull` (pin the slot, copy it out of the mapping,
check it, view it as tensors); both use a real ring in /dev/shm, by turns with the memcpy, one
thread each.  Checksums are disabled by a stand-in for their library; their cost, and the engine's
time to fuse the weights for its kernels, are reported too."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash
from lib import rounds
from lib.learner_batch import config

from actors.engine_embedded import EmbeddedEngine
from actors.generator import WeightsReceiver
from asyncrl.config import load
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.records import rundir
from asyncrl.transport import ring
from learner.backend import TorchBackend
from learner.publisher import Publisher

# build_model's arguments, and how often each is done in a round
SIZES: dict[str, tuple[dict[str, int], int]] = {
    "84k": ({"hidden": 64, "layers": 2, "heads": 4}, 200),
    "2.6M": ({"hidden": 256, "layers": 4, "heads": 8}, 40),
    "135M": ({"hidden": 768, "layers": 14, "heads": 12, "intermediate": 3136}, 1),
}


class NoChecksum:
    """In xxhash's place: every checksum is 0 and costs nothing."""

    @staticmethod
    def xxh3_64(_data: Any = b"") -> NoChecksum:
        return NoChecksum()

    def update(self, _data: Any) -> None:
        pass

    def intdigest(self) -> int:
        return 0

    @staticmethod
    def xxh3_64_intdigest(_data: Any) -> int:
        return 0

    @staticmethod
    def xxh3_64_hexdigest(_data: Any) -> str:
        return f"{0:016x}"


@contextmanager
def checksums(on: bool) -> Iterator[None]:
    ring.xxhash = xxhash if on else NoChecksum  # type: ignore[assignment]
    try:
        yield
    finally:
        ring.xxhash = xxhash


class Pair:
    """A learner's publisher and a generator's receiver of one model, on one ring."""

    def __init__(self, model: policy.PolicyModel, work: Path) -> None:
        settings = config(Path(model.tokenizer_dir))
        core: Any = SimpleNamespace(
            config=settings,
            model=model,
            layout=policy.build_manifest(model),
            backend=TorchBackend(settings, model),
        )
        rundir.ensure(load.dump(settings), work / "run")
        self.run_dir = work / "run"
        self.publisher = Publisher(settings, self.run_dir, 1, core)
        self.receiver = WeightsReceiver(settings, "generator-0")
        self.bytes = policy.count_flat_bytes(core.layout)
        self.number = 0
        self.digest = ""
        self.model = model
        self.engine: EmbeddedEngine | None = None
        self.tensors: dict[str, Any] = {}
        self.ways = {"publish": self.publish, "pick up": self.pull}

    def publish(self) -> None:
        self.number += 1
        self.digest = self.publisher.publish(self.number)

    def pull(self) -> None:
        pulled = self.receiver.pull(self.publisher.source, Label(1, self.number), self.digest)
        assert pulled is not None
        self.tensors = pulled.tensors

    def load(self) -> None:
        self.engine = self.engine or EmbeddedEngine(self.model, slots=8, context=64)
        self.engine.load(self.tensors, Label(1, self.number), self.digest)

    def close(self) -> None:
        self.receiver.close()
        self.publisher.close()
        rundir.clean(self.run_dir)


def measure(
    name: str, model: policy.PolicyModel, count: int, n_rounds: int, work: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """count: of each in a round."""
    pair = Pair(model, work)
    source = np.ones(pair.bytes, np.uint8)
    target = np.zeros(pair.bytes, np.uint8)

    def timed(what: Callable[[], Any]) -> float:
        began = time.perf_counter()
        for _ in range(count):
            what()
        return (time.perf_counter() - began) / count

    def both(which: str) -> dict[str, float]:
        """Publish and pick up of one kind: what was published last is what is picked up."""
        with checksums(which == ", checksum"):
            return {f"{name}{which}": timed(run) for name, run in pair.ways.items()}

    def one_round(number: int) -> dict[str, float]:
        kinds = [
            lambda: {"memcpy": timed(lambda: np.copyto(target, source))},
            lambda: both(""),
            lambda: both(", checksum"),
            lambda: {"engine": timed(pair.load)},
        ]
        out: dict[str, float] = {}
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            out |= kind()
        return out

    both("")  # every page of both ends is touched
    both("")
    pair.load()
    np.copyto(target, source)
    rows = rounds.quiet(n_rounds, one_round)
    pair.close()
    ms = {k: round(1e3 * statistics.median(row[k] for row in rows), 4) for k in rows[0]}
    ratios = [(row["publish"] + row["pick up"]) / row["memcpy"] for row in rows]
    goals = [
        rounds.figure(f"{name}: publish and pick up / memcpy", ratios, 2.0, at_least=False, ms=ms)
    ]
    return goals, {"bytes": pair.bytes, "ms": ms, "rounds": rows, "in_a_round": count}


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    p.add_argument("--rounds", type=int, default=7)
    args = p.parse_args()
    torch.set_num_threads(1)
    rounds.one_core()
    goals = []
    details = {}
    for name in args.sizes[:2] if args.quick else args.sizes:
        shape, count = SIZES[name]
        with tempfile.TemporaryDirectory() as work:
            model = policy.build_model(
                Path(work) / "model",
                "0123456789abcdefghij",
                **shape,  # type: ignore[arg-type]
            )
            found, details[name] = measure(
                name, model, count, 3 if args.quick else args.rounds, Path(work)
            )
        goals += found
    what = "weights from a learner to a generator against one memcpy, one core, by turns"
    rounds.report("weights", goals, {"what": what, "runs": details}, args)


if __name__ == "__main__":
    main()
