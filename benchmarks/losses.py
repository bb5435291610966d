"""Measure what the loss with all diagnostics adds to a learner's step, at [256, 1024] on one core.

    OMP_NUM_THREADS=1 python benchmarks/losses.py [--quick] [--json]

Proves: at most 3 %.  The same step twice, by turns: complete (decoupled PPO, truncated token
weights, k3 against a reference in the loss, entropy, every diagnostic by lag bucket, all from the
real learner) and bare (the same forward, backward and update for -sum A lp / N, with no entropy
and no metrics).  The reference's logprobs are given: its forward pass is not measured.  The share
of the time in the loss's own functions is also measured inside the complete steps.

    OMP_NUM_THREADS=1 python benchmarks/losses.py --methods [--quick] [--json]

This measures instead, without a goal, the step of every method for old samples (METHODS), and of
the advantages and metrics that need extra passes, relative to PPO with mu as proximal policy, all
by turns, at [256, 256].

    OMP_NUM_THREADS=1 python benchmarks/losses.py --proximal [--quick] [--json]

The same of the proximal policies over behavior, with the demo's config and two optimizer steps a
batch, at [256, 24]: completions of one version, and of two versions each."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from lib import rounds

from asyncrl.algorithms import loss
from asyncrl.config import load, methods
from asyncrl.config.tree import Config
from asyncrl.contract.messages import Batch, Trajectory, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.models.policy import build_model, copy_flat_bytes
from learner.batch import pack
from learner.step import LearnerCore

SIZE = 8
PROMPT = 12
VOCAB = 20


def batch(samples: int, length: int) -> Batch:
    """`samples` answers of exactly `length` tokens, at lags 0 to 10."""
    r = np.random.default_rng(0)
    out = []
    lags = []
    for i in range(samples):
        prompt = (
            np.random.default_rng(i // SIZE).integers(3, 3 + VOCAB, PROMPT).astype("<i4").tobytes()
        )
        tokens = r.integers(3, 3 + VOCAB, length).astype("<i4")
        lp = (-3.1 + 0.1 * r.standard_normal(length)).astype("<f4")
        out.append(
            Trajectory(
                i // SIZE,
                i % SIZE,
                1,
                prompt,
                tokens.tobytes(),
                lp.tobytes(),
                bytes([1] * length),
                [],
                float(r.random() < 0.4),
                {},
                "stop",
                1.0,
            )
        )
        lags.append([(0, length // 2, i % 11), (length // 2, length, (i + 3) % 11)])
    return Batch(1, 0, out, [1] * samples, [0] * samples, lags, {}, samples // SIZE, {})


def config(path: Path) -> Config:
    raw = {
        "model": {"path": str(path), "device": "cpu"},
        "task": {"name": "sort"},
        "learner": {"steps": 10**6, "lr": 0.0},
        "kl": {"loss": {"coefficient": 0.01, "estimator": "k3"}},
    }
    return load.build(raw)


# proximal policy -> a method with it
PROXIMAL = {"recompute": "tis", "version": "tis-version", "ema": "ppo-ewma"}
# beside METHODS: what costs a pass or a copy of its own
MORE = {
    "otb": ["advantage.name=otb"],
    "gradient cosine": ["learner.gradient_cosine=log"],
    "rate by ESS": ["stop.lr_by_ess=sqrt"],
}


def of_proximal(
    path: Path, b: Batch, many: int, spans: int
) -> tuple[list[dict[str, Any]], rounds.Times]:
    """The step with each proximal policy over behavior's: (lines of the table, times).

    spans: versions in a completion, of lags 1 and 2."""
    half = b.samples[0].length // 2
    for i, sample in enumerate(b.samples):
        labels = [Label(1, 8 - i % 2), Label(1, 7 + (i + spans) % 2)]
        ends = (half, sample.length)
        sample.spans = [
            VersionSpan(label, "", end - half, end, label)
            for label, end in zip(labels, ends, strict=True)
        ]
    lags = [[(s.start, s.end, 9 - s.label.number) for s in x.spans] for x in b.samples]
    b = msgspec.structs.replace(b, number=9, token_lags=lags)
    learners = {}
    for name, method in {"behavior": "ppo", **PROXIMAL}.items():
        common = [f"model.path={str(path)!r}", "model.warm_start=false", "model.device=cpu"]
        sets = [f"method={method}", *common, "learner.lr=0.0", "learner.minibatches=2"]
        learners[name] = LearnerCore(load.load("configs/demo.toml", sets), path)
        flat = bytes(copy_flat_bytes(learners[name].model))
        learners[name].measure.read_weights = lambda *_, flat=flat: bytearray(flat)
    times = rounds.interleave(
        {name: functools.partial(learner.train, b) for name, learner in learners.items()}, many
    )
    return [
        rounds.figure(
            f"{name}, {spans} version(s) a completion: CPU of a step over behavior's",
            [1 / x for x in rounds.speedups(times, name, "behavior", 1)],
            math.inf,
            at_least=False,
        )
        for name in PROXIMAL
    ], times


def of_methods(path: Path, b: Batch, many: int) -> tuple[list[dict[str, Any]], rounds.Times]:
    """Each method's step over PPO's: (lines of the table, times)."""
    plain = ["method=ppo"]
    stale = [name for name, method in methods.METHODS.items() if method.stale]
    arms = {"ppo": plain} | {name: [f"method={name}"] for name in stale}
    arms |= {name: [*plain, *sets] for name, sets in MORE.items()}
    common = [
        f"model.path={str(path)!r}",
        "model.warm_start=false",
        "model.device=cpu",
        "learner.lr=0.0",
        f"learner.group_size={SIZE}",
    ]
    learners = {
        name: LearnerCore(load.load("configs/rle.toml", [*sets, *common]), path)
        for name, sets in arms.items()
    }
    # batch 0 has a pass more, of the reference
    plain_batch = msgspec.structs.replace(b, number=1)
    times = rounds.interleave(
        {name: functools.partial(learner.train, plain_batch) for name, learner in learners.items()},
        many,
    )
    table = [
        rounds.figure(
            f"{name}: CPU of a step over PPO's",
            [1 / x for x in rounds.speedups(times, name, "ppo", 1)],
            math.inf,
            at_least=False,
        )
        for name in arms
        if name != "ppo"
    ]
    return table, times


class Whole(LearnerCore):
    """The real step; the reference's logprobs are the behavior policy's."""

    def _forward(self, model: Any, packed: Any, samples: Any) -> torch.Tensor:
        return (
            packed.behavior.clone()
            if model is self.reference
            else super()._forward(model, packed, samples)
        )


class Bare(LearnerCore):
    """The same passes over the same micro-batches for the plainest loss."""

    def train(self, b: Batch) -> dict[str, float]:
        packed = pack(b)
        everyone = list(range(len(b.samples)))
        adv = (packed.rewards - packed.rewards.mean())[packed.seq] / len(packed.seq)
        self.backend.drop_gradient()
        passes = self._select_own_micro_batches(packed, everyone)
        for at, (micro, _) in enumerate(passes):
            lp = self._run(self.model, packed, micro, entropy=False).logprobs
            self.backend.accumulate(
                -(adv[packed.find_token_positions(micro)] * lp).sum(), is_last=at == len(passes) - 1
            )
        self.backend.apply(0.0, torch.zeros(()))
        return {}


class Inside:
    """Seconds spent in the loss's own functions, by wrapping them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return f(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--methods", action="store_true", help="the methods' steps instead, by turns")
    p.add_argument("--proximal", action="store_true", help="the proximal policies' steps instead")
    args = p.parse_args()
    rounds.one_core()
    torch.set_num_threads(1)
    samples, length = (64, 256) if args.quick else (256, 256 if args.methods else 1024)
    if args.proximal:
        table, by_spans = list[dict[str, Any]](), {}
        many = 1 if args.quick else args.rounds
        with tempfile.TemporaryDirectory() as work:
            path = Path(work) / "m"
            build_model(path, "0123456789abcdefghij", hidden=64, layers=2, heads=4)
            for spans in (1, 2):
                lines, by_spans[f"{spans} version(s)"] = of_proximal(
                    path, batch(256, 24), many, spans
                )
                table += lines
        what = {"what": "learner steps [256, 24] by proximal policy, one core", "times": by_spans}
        rounds.report("losses_proximal", table, what, args)
        return
    b = batch(samples, length)
    if args.methods:
        with tempfile.TemporaryDirectory() as work:
            path = Path(work) / "m"
            build_model(path, "0123456789abcdefghij", hidden=64, layers=2, heads=4)
            table, times = of_methods(path, b, 1 if args.quick else args.rounds)
        what = {"what": f"learner steps [{samples}, {length}] by method, one core", "times": times}
        rounds.report("losses_methods", table, what, args)
        return
    inside = Inside()
    shares = []
    for name in ("prepare", "begin_step", "compute_micro_loss", "finish", "add_sums"):
        setattr(loss, name, inside.wrap(getattr(loss, name)))
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "m"
        build_model(path, "0123456789abcdefghij", hidden=64, layers=2, heads=4)
        whole = Whole(config(path), path)
        bare = Bare(config(path), path)

        def run() -> None:
            inside.seconds = 0.0
            start = time.process_time()
            m = whole.train(b)
            shares.append(inside.seconds / (time.process_time() - start - inside.seconds))
            assert "by_lag/ess_9plus" in m and "kl/ref_target" in m and "policy/entropy" in m, (
                "a diagnostic is missing"
            )

        times = rounds.interleave(
            {"whole": run, "bare": lambda: bare.train(b)}, 3 if args.quick else args.rounds
        )
    extra, cpu = (rounds.speedup(times, "bare", "whole", which) - 1 for which in (0, 1))
    within = statistics.median(shares[1:])
    goals = [
        rounds.goal(
            f"[{samples}, {length}]: loss and diagnostics add, CPU",
            cpu,
            0.03,
            at_least=False,
            by_wall=round(extra, 4),
            inside=round(within, 4),
        )
    ]
    rounds.report(
        "losses",
        goals,
        {
            "what": "learner step with loss and diagnostics over a bare one, one core",
            "added_wall": extra,
            "added_cpu": cpu,
            "inside_share": within,
            "inside_shares": shares,
            "times": times,
        },
        args,
    )


if __name__ == "__main__":
    main()
