"""How large a lossless difference of two versions' weights is, against the weights themselves.

    OMP_NUM_THREADS=1 python benchmarks/delta.py [--quick] [--json] [--model DIR] [--steps N]

Real updates of configs/demo.toml, one process (asyncrl/experiments/serial.py), at learning rates
from 1e-6 to 1e-4; the versions that follow each other are compared word by word:

- `float32`: what the learner publishes.
- `float32 as bfloat16`: the same versions, each rounded to bfloat16, as a link would carry them to
  engines of bfloat16.
- `bfloat16`: a learner whose own weights are bfloat16.

Two ways to write the difference, each undone and compared here: `words`, the changed words, and
where they are (a bit a word or the gaps between them, whichever is shorter); `xor`, zlib level 1 of
the words' exclusive or, bytes of the same significance together.  The table has the medians of the
second half of the updates.  Not timed: what they cost, beside zlib's CPU seconds a MB."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import json
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib import results_file, rounds

from asyncrl.config import load
from asyncrl.contract.versions import Label
from asyncrl.experiments import serial

RATES = (1e-6, 1e-5, 1e-4)
WORD = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
LEVEL = 1
COLUMNS = ("changed", "words", "xor", "zlib_s_a_mb")

Words = np.ndarray[Any, Any]  # (words of a version,) uint32 or uint16


class Kept(serial.SerialRun):
    """A run that keeps every version's weights."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.versions: list[torch.Tensor] = []  # each (parameters,)

    def publish(self) -> tuple[Label, str]:
        found = super().publish()
        tensors = self.ring[found[0]].tensors.values()
        self.versions.append(torch.cat([tensor.flatten() for tensor in tensors]))
        return found


def words(version: torch.Tensor) -> Words:
    """The bits of each parameter."""
    seen: Words = version.view(WORD[version.dtype]).numpy()
    return seen.view(f"u{seen.itemsize}")


def gaps(where: Words) -> bytes:
    """Rising positions as their differences, seven bits a byte, low ones first.

    >>> gaps(np.array([0, 1, 300])).hex()
    '0001ab02'
    """
    out = bytearray()
    for gap in np.diff(where, prepend=0).tolist():
        while gap > 127:
            out.append(gap & 127 | 128)
            gap >>= 7
        out.append(gap)
    return bytes(out)


def as_words(before: Words, after: Words) -> int:
    """Bytes of the changed words and their places, as long as a reader can make `after` of it."""
    changed = before != after
    values = after[changed].tobytes()
    bits = np.packbits(changed)
    again = before.copy()
    again[np.unpackbits(bits, count=len(before)).view(bool)] = np.frombuffer(values, after.dtype)
    assert np.array_equal(again, after)
    return len(values) + min(bits.nbytes, len(gaps(np.flatnonzero(changed))))


def as_xor(before: Words, after: Words) -> int:
    """Bytes of zlib's."""
    size = before.itemsize
    planes = (before ^ after).view(np.uint8).reshape(-1, size).T.tobytes()
    packed = zlib.compress(planes, LEVEL)
    back = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(size, -1).T
    assert np.array_equal(np.ascontiguousarray(back).view(before.dtype).ravel() ^ before, after)
    return len(packed)


def compare(before: Words, after: Words) -> dict[str, float]:
    """Shares of the whole version: of changed words, and of the bytes of each way.

    >>> one = np.arange(1 << 16, dtype=np.uint32)
    >>> two = one.copy()
    >>> two[5] = 7
    >>> {k: round(x * one.nbytes) for k, x in compare(one, two).items() if k == "words"}
    {'words': 5}
    """
    began = time.process_time()
    xor = as_xor(before, after)
    spent = time.process_time() - began
    return {
        "changed": float(np.mean(before != after)),
        "words": as_words(before, after) / after.nbytes,
        "xor": xor / after.nbytes,
        "zlib_s_a_mb": spent / after.nbytes * 1e6,
    }


def of_run(versions: list[torch.Tensor]) -> dict[str, float]:
    """The medians over the second half of the updates."""
    seen = [words(version) for version in versions]
    rows = [compare(*pair) for pair in itertools.pairwise(seen)]
    half = rows[len(rows) // 2 :]
    return {name: statistics.median(row[name] for row in half) for name in COLUMNS}


def run(model: str, dtype: str, rate: float, steps: int) -> list[torch.Tensor]:
    sets = [
        f"model.path={model!r}",
        f"model.dtype={dtype!r}",
        f"learner.lr={rate}",
        f"learner.steps={steps}",
        "evaluation.every=0",
        "evaluation.prompts=1",
        "evaluation.final_prompts=1",
        "evaluation.ood_prompts=0",
    ]
    kept = Kept(load.load(results_file.ROOT / "configs" / "demo.toml", sets))
    kept.run()
    return kept.versions


def measure(model: str, rates: tuple[float, ...], steps: int) -> list[dict[str, Any]]:
    out = []
    for rate in rates:
        versions = run(model, "float32", rate, steps)
        kinds = {
            "float32": versions,
            "float32 as bfloat16": [version.bfloat16() for version in versions],
            "bfloat16": run(model, "bfloat16", rate, steps),
        }
        for kind, each in kinds.items():
            row: dict[str, Any] = {"lr": rate, "weights": kind, "bytes": words(each[0]).nbytes}
            out.append(row | {name: round(x, 5) for name, x in of_run(each).items()})
            print(out[-1], file=sys.stderr, flush=True)
    return out


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--model", default="", help="a warm-started model; absent: built")
    p.add_argument("--steps", type=int, default=12)
    args = p.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        model = args.model or str(Path(work) / "model")
        if not args.model:
            from asyncrl.tasks.warm_start import warm_start

            demo = load.load(results_file.ROOT / "configs" / "demo.toml", [f"model.path={model!r}"])
            warm_start(demo, model, threads=1)
        rates, steps = (RATES[-1:], 3) if args.quick else (RATES, args.steps)
        rows = measure(model, rates, steps)
    result = {"what": "differences of published weights", "steps": steps, "rows": rows}
    if not args.quick:
        print(results_file.write("delta", result), file=sys.stderr)
    if args.json:
        print(json.dumps(result))
        return
    print("  ".join(f"{name:>12}" for name in ("lr", "weights", *COLUMNS)))
    for row in rows:
        cells = [f"{row['lr']:>12g}", f"{row['weights']:>12}"]
        print("  ".join(cells + [f"{row[name]:>12.4f}" for name in COLUMNS]))


if __name__ == "__main__":
    main()
