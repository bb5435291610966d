"""Compare a learner's step with the same step in plain `transformers`, on one core.

    OMP_NUM_THREADS=1 python benchmarks/learner.py [--quick] [--json]

Proves: at least 1.4 times the tokens a second; the gradient is the plain one up to rounding; and
reports the peak memory of a step, each in a separate process.  A step has 32 prompts with 8
completions each, leave-one-out advantages, PPO clipped against the behavior policy, gradient
clipping, AdamW.  Ours also computes every diagnostic that a run logs, at its default interval: a
round consists of the steps between two measurements of the KL to the reference (at 2.6M a single
step, with that measurement).  The plain step sorts its completions by length, so that little is
padding, computes logits only for response tokens, and gets the best of several micro-batches and
both attention implementations (by a short run of each), torch's fused AdamW, and the same malloc
settings.  The step of the strong loop (benchmarks/lib/strong_loop.py), whose forward pass has
fused projections, is measured too, without a goal."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from lib import rounds, strong_loop
from lib.learner_batch import PROMPT, batch, config
from lib.plain_step import Plain, advantages

from asyncrl.contract.messages import Batch
from asyncrl.models import memory
from asyncrl.models.policy import build_model
from learner.step import LearnerCore

SIZES: dict[str, dict[str, int]] = {
    "84k": {"hidden": 64, "layers": 2, "heads": 4},
    "2.6M": {"hidden": 256, "layers": 4, "heads": 8},
}
STEPS = {"84k": 10, "2.6M": 1}  # of a round; the first of them measures the KL to the reference


class Strong:
    """The strong loop's step on the same batch."""

    def __init__(self, path: Path, rows: int) -> None:
        self.policy = strong_loop.Policy(str(path))
        self.rows = rows
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )

    def train(self, b: Batch) -> None:
        lengths = torch.tensor([s.length for s in b.samples])

        def padded(each: list[np.ndarray], kind: torch.dtype) -> torch.Tensor:
            parts = [torch.from_numpy(x.copy()).to(kind) for x in each]
            return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

        answers = strong_loop.Answers(
            prompts=padded([np.frombuffer(s.prompt_tokens, "<i4") for s in b.samples], torch.long),
            prompt=torch.full_like(lengths, PROMPT),
            tokens=padded([np.frombuffer(s.tokens, "<i4") for s in b.samples], torch.long),
            length=lengths,
            logprobs=padded(
                [np.frombuffer(s.behavior_logprobs, "<f4") for s in b.samples], torch.float32
            ),
        )
        strong_loop.gradient(self.policy, answers, advantages(b), self.rows)
        strong_loop.update(self.policy, self.optimizer, int(lengths.sum()))


# the plain step's ways: rows of a micro-batch, attention
WAYS = {
    f"{rows} rows, {attention}": (rows, attention)
    for attention in ("sdpa", "eager")
    for rows in (32, 64, 256)
}


def fastest(path: Path, b: Batch, *, quick: bool) -> str:
    """The way of the plain step that takes least, by the better of two runs after a first."""
    took = {}
    for name in ["64 rows, sdpa"] if quick else WAYS:
        plain = make(name, path)
        seconds = []
        for _ in range(3):
            began = time.process_time()
            plain.train(b)
            seconds.append(time.process_time() - began)
        took[name] = min(seconds[1:])
    return min(took, key=lambda name: took[name])


def make(who: str, path: Path) -> Any:
    torch.set_num_threads(1)
    memory.keep_freed()  # as a learner does: the plain step has it too
    if who == "ours":
        return LearnerCore(config(path), path)
    return Strong(path, 64) if who == "strong" else Plain(path, *WAYS[who])


def steps(learner: Any, b: Batch, count: int) -> Callable[[], None]:
    """A round: `count` steps on the same answers, as batches 0, 1, ... of a run."""
    batches = [msgspec.structs.replace(b, number=number) for number in range(count)]

    def run() -> None:
        for each in batches:
            learner.train(each)

    return run


def gradient(learner: Any) -> torch.Tensor:
    hf = learner.hf if isinstance(learner, Plain) else learner.model.hf
    return torch.cat([p.grad.flatten() for p in hf.parameters()])


def peak(who: str, path: Path) -> None:
    """Peak and standing memory of steps, in bytes above what the loaded model and its optimizer
    take.
    """
    learner = make(who, path)
    b = batch()
    learner.train(b)
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = Path("/proc/self/status")

    def read(name: str) -> int:
        return (
            int(
                next(
                    line for line in status.read_text().splitlines() if line.startswith(name)
                ).split()[1]
            )
            * 1024
        )

    before = read("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in range(3):
        learner.train(b)
    print(json.dumps({"peak": read("VmHWM") - before}))


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    p.add_argument(
        "--float",
        action="store_true",
        help="one thread on any core: where all cores are taken, a fixed one stands still",
    )
    p.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.peak:
        return peak(args.peak[0], Path(args.peak[1]))
    if not args.float:
        rounds.one_core()
    goals = []
    details = {}
    b = batch()
    tokens = sum(s.length for s in b.samples)
    for name in args.sizes[: 1 if args.quick else None]:
        shape = SIZES[name]
        with tempfile.TemporaryDirectory() as work:
            path = Path(work) / "m"
            build_model(path, "0123456789abcdefghij", **shape)  # type: ignore[arg-type]
            rival = fastest(path, b, quick=args.quick)
            who = {k: make(k, path) for k in ("ours", rival, "strong")}
            times = rounds.interleave(
                {k: steps(x, b, STEPS[name]) for k, x in who.items()},
                3 if args.quick else args.rounds,
            )
            rates = {k: round(tokens * STEPS[name] / rounds.median(times, k)) for k in times}
            mine = gradient(who["ours"])
            plain = gradient(who[rival])
            error = float((mine - plain).norm() / plain.norm())
            peaks = {}
            for k in ("ours", "64 rows, sdpa"):
                argv = [sys.executable, __file__, "--peak", k, str(path)]
                peaks[k] = json.loads(
                    subprocess.run(
                        argv, capture_output=True, text=True, check=True
                    ).stdout.splitlines()[-1]
                )["peak"]
        cpu = rounds.speedup(times, "ours", rival, 1)
        beside = rounds.speedup(times, "ours", "strong")
        goals += [
            rounds.figure(
                f"{name}: step, ours / plain",
                rounds.speedups(times, "ours", rival),
                1.4,
                at_least=True,
                by_cpu=round(cpu, 3),
                ours=rates["ours"],
                rival=rival,
                over_strong_loop=round(beside, 3),
            ),
            rounds.goal(f"{name}: gradient, relative difference", error, 1e-4, at_least=False),
            rounds.goal(
                f"{name}: peak memory, ours / plain 64 rows",
                peaks["ours"] / peaks["64 rows, sdpa"],
                1.0,
                at_least=False,
            ),
        ]
        details[name] = {
            "tokens": tokens,
            "steps_a_round": STEPS[name],
            "tokens_per_s": rates,
            "peak_bytes": peaks,
            "peak_mib_per_1000_tokens": round(peaks["ours"] / 2**20 / tokens * 1000, 2),
            "gradient_difference": error,
            "times": times,
        }
    rounds.report(
        "learner",
        goals,
        {"what": "learner step against a plain one, one core", "runs": details},
        args,
    )


if __name__ == "__main__":
    main()
