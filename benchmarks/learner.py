"""A learner step against the same step written plainly with `transformers` and full logits, on one
core.

    OMP_NUM_THREADS=1 python benchmarks/learner.py [--quick] [--json]

Proves: at least 1.4 times the tokens a second; the gradient is the plain one up to rounding; and
states the peak memory a step adds, each measured in a process of its own.  A step: 32 prompts with
8 answers each, leave-one-out advantages, clipped PPO anchored on the behaviour policy, clipped
gradient, AdamW.  Ours also computes every diagnostic that a run logs.  The plain step gets the best
of several micro-batches, and torch's fused AdamW."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib import rounds
from lib.learner_batch import GROUPS, PROMPT, SIZE, batch, config

from asyncrl.contract.messages import Batch
from asyncrl.models.policy import build_model
from learner.step import LearnerCore

SIZES: dict[str, dict[str, int]] = {
    "84k": {"hidden": 64, "layers": 2, "heads": 4},
    "2.6M": {"hidden": 256, "layers": 4, "heads": 8},
}


class Plain:
    """The step on half a page: padded rows, the model's own forward, log_softmax over full
    logits.
    """

    def __init__(self, path: Path, rows: int) -> None:
        from transformers import AutoModelForCausalLM

        self.hf = AutoModelForCausalLM.from_pretrained(str(path))
        self.rows = rows
        self.optimizer = torch.optim.AdamW(
            self.hf.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )

    def train(self, b: Batch) -> None:
        reward = torch.tensor([s.reward for s in b.samples]).view(GROUPS, SIZE)
        advantage = ((reward - reward.mean(1, keepdim=True)) * SIZE / (SIZE - 1)).flatten()
        tokens = sum(s.length for s in b.samples)
        self.optimizer.zero_grad()
        for at in range(0, len(b.samples), self.rows):
            part = b.samples[at : at + self.rows]
            answers = [np.frombuffer(s.tokens, "<i4") for s in part]
            width = PROMPT + max(map(len, answers))
            ids = torch.zeros(len(part), width, dtype=torch.long)
            seen = torch.zeros(len(part), width, dtype=torch.long)
            old = torch.zeros(len(part), width - PROMPT)
            mask = torch.zeros(len(part), width - PROMPT)
            for i, (s, a) in enumerate(zip(part, answers, strict=True)):
                ids[i, : PROMPT + len(a)] = torch.from_numpy(
                    np.concatenate([np.frombuffer(s.prompt_tokens, "<i4"), a]).astype(np.int64)
                )
                seen[i, : PROMPT + len(a)], mask[i, : len(a)] = 1, 1
                old[i, : len(a)] = torch.from_numpy(
                    np.frombuffer(s.behavior_logprobs, "<f4").copy()
                )
            logits = (
                self.hf(input_ids=ids, attention_mask=seen, use_cache=False)
                .logits[:, PROMPT - 1 : -1]
                .float()
            )
            new = logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None])[:, :, 0]
            ratio = (new - old).exp()
            a = advantage[at : at + self.rows, None]
            gain = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            (-(gain * mask).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.hf.parameters(), 1.0)
        self.optimizer.step()


def make(who: str, path: Path) -> Any:
    torch.set_num_threads(1)
    return LearnerCore(config(path), path) if who == "ours" else Plain(path, int(who))


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
            who = {"ours": make("ours", path)} | {
                f"plain, {n} rows": make(str(n), path) for n in (64, 256)
            }
            times = rounds.interleave(
                {k: lambda x=x: x.train(b) for k, x in who.items()},
                3 if args.quick else args.rounds,
            )
            rates = {k: round(tokens / rounds.median(times, k)) for k in times}
            rival = max((k for k in rates if k != "ours"), key=lambda k: rates[k])
            mine = gradient(who["ours"])
            plain = gradient(who[rival])
            error = float((mine - plain).norm() / plain.norm())
            peaks = {}
            for k in ("ours", "64", "256"):
                argv = [sys.executable, __file__, "--peak", k, str(path)]
                peaks[k] = json.loads(
                    subprocess.run(
                        argv, capture_output=True, text=True, check=True
                    ).stdout.splitlines()[-1]
                )["peak"]
        value = rounds.speedup(times, "ours", rival)
        cpu = rounds.speedup(times, "ours", rival, 1)
        goals += [
            rounds.goal(
                f"{name}: step, ours / {rival}",
                value,
                1.4,
                at_least=True,
                by_cpu=round(cpu, 3),
                ours=rates["ours"],
            ),
            rounds.goal(f"{name}: gradient, relative difference", error, 1e-4, at_least=False),
            rounds.goal(
                f"{name}: peak memory, ours / plain 64 rows",
                peaks["ours"] / peaks["64"],
                1.0,
                at_least=False,
            ),
        ]
        details[name] = {
            "tokens": tokens,
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
