"""Compare a real model's log-probabilities in every part of a run with transformers'.

Also measured: the loss's memory with a large vocabulary.

    asyncrl model get smollm2 models/smollm2
    OMP_NUM_THREADS=1 python benchmarks/real_equal.py models/smollm2 [--json] [--parts forms ...]
    OMP_NUM_THREADS=1 python benchmarks/real_equal.py --quick        of a tiny random model

Prompts of 10 to 1,000 tokens through the model's chat template, with and without a system turn, one
of plain text; two completions each, sampled by the engine; both sides encode the prompt once.
Proves:
- forms     the packed forward and the embedded engine, its weights through a real ring, in float32:
            no token further than 1e-4 nats from transformers; in bfloat16 ours are on average at
            most BOUND times as far from the float32 values as transformers' bfloat16; the weights
            from the ring are bitwise those that were published, a tied head once
- exact     in exact mode engine and learner agree in every bit, and with transformers to 1e-4
- vllm      vLLM after a swap of all weights, as the embedded engine
- deepspeed the learner by torch and by two ranks of each ZeRO stage: its log-probabilities of the
            shorter completions as in forms, and after a step the weights differ from torch's by
            less than 1 % of the step's length
- loss      the loss adds the same memory for any number of tokens
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from lib import rounds
from lib.real_answers import (
    ANSWER,
    SLOTS,
    Answered,
    by_packed,
    by_transformers,
    drawn,
    far,
    prompts,
    recorded,
    room,
    tiny,
)
from lib.real_ranks import batch
from lib.results_file import ROOT
from weights import Pair

from actors.engine_embedded import EmbeddedEngine
from asyncrl.config import load
from asyncrl.contract.versions import Label
from asyncrl.models import packed_forward
from asyncrl.models.policy import (
    PolicyModel,
    compute_probe_logprobs,
    list_named_weights,
    load_policy,
)

LENGTHS = (10, 100, 300, 1000)  # tokens of the prompts, about
SHORT = (10, 60)  # with --quick
LEARNED = 200  # tokens of the prompts that the learners' step takes, at most
FLOAT32 = 1e-4  # nats a token, the largest
BOUND = 1.5  # bfloat16: distance from float32, over that of transformers' own
STEP = 0.01  # of a step's length
TOKENS = (256, 1024, 4096)  # of the loss
DTYPES = ("float32", "bfloat16")
PARTS = ("forms", "exact", "vllm", "deepspeed", "loss")
# name of a learner -> its section and dtype; torch's writes the weights that the others are held to
TORCH: dict[str, Any] = {"backend": "torch"}
LEARNERS = {
    f"{'torch' if stage is None else f'ZeRO stage {stage}, two ranks'}, {dtype}": (
        TORCH if stage is None else {"backend": "deepspeed", "zero_stage": stage, "ranks": 2},
        dtype,
    )
    for dtype in DTYPES
    for stage in ((None, 0, 1, 2, 3) if dtype == "float32" else (None, 2, 3))
}


class Held:
    """Goals and figures of a program's parts, held against transformers in float32.

    theirs: the mean and largest distance of transformers' own bfloat16, found when first asked for.
    """

    def __init__(self, path: str, lengths: tuple[int, ...]) -> None:
        self.path = path
        self.asked = prompts(path, lengths)
        self.goals: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {"prompts": sorted(map(len, self.asked)), "rows": {}}
        self.found: tuple[float, float] | None = None
        self.answers: list[Answered] = []
        self.wanted = np.empty(0, np.float32)

    def model(self, dtype: str, *, whole: bool = True) -> PolicyModel:
        return load_policy(self.path, dtype, "cpu", with_modules=whole)

    def want(self, answers: list[Answered]) -> np.ndarray:
        """Their log-probabilities by transformers in float32."""
        return by_transformers(self.model("float32"), answers)

    def drawn(self) -> tuple[list[Answered], np.ndarray]:
        """Answers by the embedded engine in float32, and what transformers says of them; once."""
        if not self.answers:
            model = self.model("float32")
            engine = embedded(model, self.asked)
            engine.load(dict(list_named_weights(model)), Label(1, 0), "")
            self.answers = drawn(engine, self.asked)
            self.wanted = by_transformers(model, self.answers)
        return self.answers, self.wanted

    @property
    def theirs(self) -> tuple[float, float]:
        if self.found is None:
            answers, want = self.drawn()
            self.found = far(by_transformers(self.model("bfloat16"), answers), want)
            self.result["rows"]["transformers, bfloat16"] = self.found
        return self.found

    def row(self, name: str, dtype: str, mean: float | None, most: float) -> None:
        """A way's distance from transformers in float32; mean: None where a learner says only the
        largest.
        """
        self.result["rows"][f"{name}, {dtype}"] = (mean, most)
        if dtype == "float32":
            self.goal(f"{name}, {dtype}: largest distance, nats", most, FLOAT32)
            return
        bound = self.theirs[1] if mean is None else self.theirs[0]
        value = (most if mean is None else mean) / bound
        which = "largest" if mean is None else "mean"
        self.goal(f"{name}, {dtype}: {which} distance / transformers'", value, BOUND)

    def goal(self, name: str, value: float, most: float) -> None:
        line = rounds.goal(name, value, most, at_least=False)
        self.goals.append(line | {"value": float(f"{value:.3g}")})
        print(f"{name}: {value:.2g}, at most {most:g}", file=sys.stderr)


def embedded(model: PolicyModel, asked: list[np.ndarray], *, fixed: bool = False) -> EmbeddedEngine:
    return EmbeddedEngine(
        model,
        slots=SLOTS,
        context=room(asked),
        max_new_tokens=ANSWER,
        fixed=fixed,
    )


# ---- the parts -----------------------------------------------------------------------------------


def forms(held: Held) -> None:
    """Packed forward and embedded engine; its weights are those that came out of a ring."""
    for dtype in DTYPES:
        model = held.model(dtype)
        with tempfile.TemporaryDirectory() as work:
            pair = Pair(model, Path(work))
            pair.publish()
            pair.pull()
            sent = dict(list_named_weights(model))
            other = [n for n, t in sent.items() if not torch.equal(t, pair.tensors[n])]
            held.goal(f"ring, {dtype}: tensors that differ", len(other), 0)
            tied = model.hf.config.tie_word_embeddings
            twice = len([n for n in pair.tensors if n not in sent or (tied and "lm_head" in n)])
            held.goal(f"ring, {dtype}: tied or unknown tensors in it", twice, 0)
            engine = embedded(model, held.asked)
            engine.load(pair.tensors, Label(1, 1), pair.digest)
            pair.close()
        del pair  # the ring's memory goes before the answers' comes
        own = drawn(engine, held.asked)
        del engine
        if dtype == "float32":
            held.answers, held.wanted = own, by_transformers(model, own)
        answers, want = held.drawn()
        held.row("packed forward", dtype, *far(by_packed(model, answers), want))
        del model
        # bfloat16 draws tokens of its own: they have float32 values of their own
        mine = want if dtype == "float32" else held.want(own)
        held.row("embedded engine", dtype, *far(recorded(own), mine))
    held.result["tokens"] = len(held.wanted)


def exact(held: Held) -> None:
    model = held.model("float32")
    engine = embedded(model, held.asked, fixed=True)
    engine.load(dict(list_named_weights(model)), Label(1, 0), "")
    answers = drawn(engine, held.asked)
    del engine
    model.exact = True
    learned = by_packed(model, answers)
    differ = int((learned != recorded(answers)).sum())
    held.goal("exact mode: tokens of engine and learner that differ", differ, 0)
    held.row("exact mode", "float32", *far(learned, by_transformers(model, answers)))


def vllm(held: Held) -> None:
    """Its answers after a swap: first it gets weights that are a hundredth larger."""
    from actors.engine_vllm import VllmEngine

    for dtype in DTYPES:
        model = held.model(dtype)
        weights = dict(list_named_weights(model))
        engine = VllmEngine(
            load.build(
                {
                    "model": {"path": str(held.path), "dtype": dtype, "device": "cpu"},
                    "task": {"name": "none"},
                    "generator": {
                        "slots": SLOTS,
                        "context": room(held.asked),
                        "threads": torch.get_num_threads(),
                    },
                }
            )
        )
        probe = compute_probe_logprobs(model).tobytes()
        # the probe of a swap that another one follows is never asked
        engine.load({n: t * 1.01 for n, t in weights.items()}, Label(1, 0), "a", probe)
        engine.load(weights, Label(1, 1), "b", probe)
        answers = drawn(engine, held.asked)
        assert engine.probes == 1
        engine.close()
        del engine, model, weights
        held.row("vLLM", dtype, *far(recorded(answers), held.want(answers)))


def deepspeed(held: Held) -> None:
    answers, want = held.drawn()
    ends = np.cumsum([len(a.tokens) for a in answers])
    few = [at for at, a in enumerate(answers) if len(a.prompt) <= LEARNED]
    known = np.concatenate([want[ends[at] - len(answers[at].tokens) : ends[at]] for at in few])
    some = [answers[at] for at in few]
    seen: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        data = Path(work) / "batch"
        data.write_bytes(msgspec.msgpack.encode(batch(some, known)))
        for name, (learner, dtype) in LEARNERS.items():
            job = {
                "model": held.path,
                "dtype": dtype,
                "batch": str(data),
                "learner": learner,
                "weights": f"{work}/{dtype}",
            }
            seen[name] = row = learned(job)
            held.row(name.removesuffix(f", {dtype}"), dtype, None, row["largest"])
            if row["weights_off"] is not None and dtype == "float32":
                held.goal(f"{name}: weights off torch's, of a step", row["weights_off"], STEP)
    held.result["learners"] = {k: {**v, "names": len(v["names"])} for k, v in seen.items()}


def learned(job: dict[str, Any]) -> dict[str, Any]:
    program = ROOT / "benchmarks" / "lib" / "real_ranks.py"
    argv = [sys.executable, str(program), json.dumps(job)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{job['learner']} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- the loss ------------------------------------------------------------------------------------


class Peak:
    """The most memory that this process holds while it is open, over what it held before, MiB."""

    def __enter__(self) -> Peak:
        self.process = psutil.Process()
        self.before = self.most = self.process.memory_info().rss
        self.open = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while self.open:
            self.most = max(self.most, self.process.memory_info().rss)
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.open = False
        self.thread.join()
        self.mib = (self.most - self.before) / 2**20


def loss_memory(weight: torch.Tensor, tokens: int, *, whole: bool) -> float:
    """MiB that a loss over `tokens` adds, forward and backward; whole: with all logits at once."""
    hidden = torch.randn(tokens, weight.shape[1], requires_grad=True)
    head = weight.detach().clone().requires_grad_(True)
    targets = torch.randint(0, len(weight), (tokens,))
    scale = torch.ones(tokens)
    with Peak() as peak:
        if whole:
            logs = (hidden @ head.T).log_softmax(-1)
            found = logs.gather(1, targets[:, None]).sum()
        else:
            found = packed_forward._PickedLogprobs.apply(hidden, head, targets, scale, True, None)[
                0
            ].sum()
        found.backward()
    return peak.mib


def loss(held: Held) -> None:
    weight: Any = held.model("float32", whole=False).hf.get_output_embeddings().weight
    loss_memory(weight, 64, whole=False)  # what is made once
    added = {tokens: loss_memory(weight, tokens, whole=False) for tokens in TOKENS}
    at_once = {n: loss_memory(weight, n, whole=True) for n in TOKENS if n <= 1024}
    held.result["loss_mib"] = {"in chunks": added, "all logits at once": at_once}
    if len(weight) * TOKENS[1] >= packed_forward.LOGIT_CHUNK:  # a tiny vocabulary has no chunks
        value = added[TOKENS[-1]] / added[TOKENS[1]]
        held.goal("loss: memory of 4,096 tokens / of 1,024", value, 1.5)


def measure(path: str, parts: list[str], lengths: tuple[int, ...]) -> Held:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    held = Held(path, lengths)
    for part in PARTS:  # in this order: the first ones keep their answers for the next
        if part in parts:
            began = time.monotonic()
            {"forms": forms, "exact": exact, "vllm": vllm, "deepspeed": deepspeed, "loss": loss}[
                part
            ](held)
            print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return held


def main(words: list[str] | None = None) -> None:
    p: argparse.ArgumentParser = rounds.parser(__doc__)
    p.add_argument("model", type=Path, nargs="?", help="its directory; with --quick a tiny one")
    p.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    p.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="of the prompts, tokens")
    args = p.parse_args(words)
    if not args.model and not args.quick:
        p.error("name the model's directory")
    with tempfile.TemporaryDirectory() as work:
        path = tiny(Path(work) / "model") if args.quick else str(args.model)
        held = measure(path, args.parts, SHORT if args.quick else tuple(args.lengths))
    name = "_".join(["real_equal", *(args.parts if len(args.parts) < len(PARTS) else [])])
    what = "a real model's log-probabilities by every way, against transformers' in float32"
    rounds.report(name, held.goals, {"what": what, **held.result}, args)
    sys.exit(not all(g["met"] for g in held.goals))


if __name__ == "__main__":
    main()
