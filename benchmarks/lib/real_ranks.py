"""Make one step of a learner on a real model, in torch or with ranks of a DeepSpeed stage.

benchmarks/real_equal.py starts it, with separate processes for each learner.

    python benchmarks/lib/real_ranks.py JSON

JSON: model, dtype, batch (a file with the messages' bytes), learner (its section), weights (a
file: torch's learner writes its weights there, and the others are compared with them).  Rank 0
prints one JSON object: the largest distance of its log-probabilities from those in the batch,
norm, and how far the weights are from torch's, as a share of how far the step moved those."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, but the one above
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import numpy as np
import torch

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.models.policy import count_flat_bytes, read_flat
from learner.step import LearnerCore
from lib.real_answers import Answered


def batch(answers: list[Answered], logprobs: np.ndarray) -> m.Batch:
    """Build a batch as a buffer leases it, sampled under the current weights.

    logprobs: of all tokens, in the order of `answers`.  Every second reward is 1."""
    ends = np.cumsum([len(a.tokens) for a in answers])
    samples = [
        m.Trajectory(
            ticket=answer.group,
            sample=at,
            attempt=1,
            prompt_tokens=answer.prompt.astype("<i4").tobytes(),
            tokens=answer.tokens.astype("<i4").tobytes(),
            behavior_logprobs=logprobs[end - len(answer.tokens) : end].astype("<f4").tobytes(),
            mask=b"\1" * len(answer.tokens),
            spans=[],
            reward=float(at % 2),
            reward_parts={},
            finish="length",
            temperature=1.0,
        )
        for at, (answer, end) in enumerate(zip(answers, ends, strict=True))
    ]
    return m.Batch(
        epoch=1,
        number=0,
        samples=samples,
        lags=[0] * len(samples),
        in_flight=[0] * len(samples),
        token_lags=[[(0, s.length, 0)] for s in samples],
        stats={},
        next_ticket=1 + max(a.group for a in answers),
        ledger={},
    )


def flat(core: LearnerCore) -> torch.Tensor:
    """uint8: the weights as they are published."""
    core.backend.broadcast("publish")
    core.backend.probe()
    buffer = torch.zeros(count_flat_bytes(core.layout), dtype=torch.uint8)
    core.backend.write_flat(buffer.numpy().data)
    return buffer


def apart(core: LearnerCore, ours: torch.Tensor, theirs: torch.Tensor, from_: torch.Tensor) -> Any:
    """Mean distance of the weights `ours` from `theirs`, over that of these from where they
    began.
    """
    ways = [read_flat(flat.numpy().data, core.layout) for flat in (ours, theirs, from_)]
    off = moved = 0.0
    for name in ways[0]:
        our, their, began = (way[name].float() for way in ways)
        off += float((our - their).abs().sum(dtype=torch.float64))
        moved += float((their - began).abs().sum(dtype=torch.float64))
    return off / moved if moved else None


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    raw = {
        "model": {"path": job["model"], "device": "cpu", "dtype": job["dtype"]},
        "task": {"name": "sort"},
        # so that the learner makes a probe, a forward pass of every rank at stage 3
        "generator": {"engine": "vllm"},
        "learner": {"steps": 10, "lr": 1e-4, "micro_batch_tokens": 512, **job["learner"]},
        "correction": {"proximal": "behavior"},
        "loss": {"surrogate": "ppo"},
        "record": {"reference_kl_every": 0, "split_every": 0},
    }
    core = LearnerCore(load.build(raw), job["model"])
    if core.backend.rank > 0:
        from learner import loop
        from learner.distributed import ranks

        loop.follow(core)
        ranks.exit_rank()
    began = flat(core)
    found = core.train(msgspec.msgpack.decode(Path(job["batch"]).read_bytes(), type=m.Batch))
    ended = flat(core)
    file = Path(job["weights"])
    if core.backend.ranks == 1 and not file.exists():
        file.write_bytes(ended.numpy().data)
        off = None
    else:
        theirs = torch.from_numpy(np.memmap(file, np.uint8, "c"))
        off = apart(core, ended, theirs, began)
    core.backend.close()
    out = {
        "largest": found["mismatch/max_at_lag_0"],
        "norm": found["optim/grad_norm"],
        "weights_off": off,
        "names": [row[0] for row in core.layout],
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
