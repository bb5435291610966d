"""Rank program of test_backends.py: `python ranks_program.py JSON` trains LearnerCore on a
fixed stream of batches.

JSON: model, config (sections), batches; optional: sessions (cuts into rows of those of later
batches), dtype, bad (a batch with a reward that is not finite), lost (a step whose loss is NaN on
the last rank, with a finite gradient), frozen (a weight without gradients), held (the start's
weights sampled every token), save (after which batch, directory), stand (after that rank 0 touches
FILE.there, waits for FILE, and then has so many seconds of patience), restore (directory)."""

import itertools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from learner_step_kit import batch
from rows_kit import sessions
from torch.distributed.tensor import DTensor

from asyncrl.config import load
from asyncrl.contract.messages import Batch, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.models.policy import (
    PolicyModel,
    compute_digest,
    compute_probe_logprobs,
    count_flat_bytes,
    load_policy,
    load_weights,
    read_flat,
)
from learner import checkpoint
from learner.backend import TorchBackend
from learner.step import LearnerCore


def held(core: LearnerCore) -> int:
    if hasattr(core.backend.optimizer, "state"):
        states = core.backend.optimizer.state
    else:
        states = core.backend.optimizer.optimizer.state
    return sum(part(v["exp_avg"]).numel() for v in states.values() if "exp_avg" in v)


def part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters(core: LearnerCore) -> int:
    return sum(part(p).numel() for p in core.model.hf.parameters())


def digest_norms(core: LearnerCore) -> str:
    """A digest of this rank's parts of the norms."""
    found = [part(p.detach()) for n, p in core.model.hf.named_parameters() if "norm" in n]
    return compute_digest(torch.cat([x.flatten().float() for x in found]).numpy().tobytes())


def stand(core: LearnerCore, until: Path, patience_s: float) -> None:
    """Wait for that file; from then on a rank that does not answer is soon lost."""
    until.with_suffix(".there").touch()
    while not until.exists():
        time.sleep(0.01)
    config = core.backend.config
    learner = msgspec.structs.replace(config.learner, rank_timeout_s=patience_s)
    core.backend.config = msgspec.structs.replace(config, learner=learner)


def lose(backend: TorchBackend, lost: int) -> None:
    """The loss of that step, counted from 0, is NaN on this rank."""
    apply, made = backend.apply, itertools.count()
    backend.apply = lambda rate, loss: apply(rate, loss if next(made) != lost else loss * math.nan)


def sampled_by(model: PolicyModel, data: Batch) -> Batch:
    """That batch by this model as version 0; older by a version with each batch."""
    for sample in data.samples:
        columns = [[np.frombuffer(x, "<i4")] for x in (sample.prompt_tokens, sample.tokens)]
        with torch.no_grad():
            mu = model.logprobs(*columns, torch.ones(1)).logprobs
        sample.behavior_logprobs = mu.numpy().astype("<f4").tobytes()
        sample.spans = [VersionSpan(Label(1, 0), "", 0, sample.length, Label(1, 0))]
    lags = [[(a, b, lag + data.number) for a, b, lag in row] for row in data.token_lags]
    return msgspec.structs.replace(data, token_lags=lags)


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    config = load.build(
        {
            "model": {"path": job["model"], "device": "cpu", "dtype": job.get("dtype", "float32")},
            "task": {"name": "sort"},
            "generator": {"engine": "vllm"},
            **job["config"],
        }
    )
    core = LearnerCore(config, job["model"])
    for name, parameter in core.model.hf.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name != job.get("frozen"))
    if core.backend.rank == config.learner.ranks - 1 and "lost" in job:
        lose(core.backend, job["lost"])
    gathered: list[int] = []  # numbers in whole parameters while a layer runs
    layer = core.model.hf.model.layers[0].self_attn.o_proj
    layer.register_forward_hook(
        lambda *_: gathered.append(
            sum(p.numel() for p in core.model.hf.parameters() if not isinstance(p, DTensor))
        )
    )
    again: list[int] = []  # calls of a layer's first matrix within a backward pass
    core.model.hf.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda *_: again.append(1) if torch._C._current_graph_task_id() != -1 else None
    )
    if core.backend.rank > 0:
        from learner import loop
        from learner.distributed import ranks

        loop.follow(core)
        told = {"rank": core.backend.rank, "held": held(core), "norms": digest_norms(core)}
        told |= {"parameters": parameters(core)}
        os.write(2, f"{json.dumps(told)}\n".encode())  # at once: other ranks write, too
        ranks.exit_rank()
    if job.get("held"):
        first = bytearray(count_flat_bytes(core.layout))
        core.backend.broadcast("publish")
        core.backend.probe()
        core.backend.write_flat(memoryview(first))
        core.measure.read_weights = lambda *_: bytes(first)
    if "restore" in job:
        checkpoint.restore(core, Path(job["restore"]))
    losses, norms, steps, kept = [], [], [], []
    sizes: dict[str, int] = {}
    if hasattr(core.backend.optimizer, "register_step_pre_hook"):
        core.backend.optimizer.register_step_pre_hook(
            lambda *_: sizes.update(
                gradient=sum(
                    part(p.grad).numel() for p in core.model.hf.parameters() if p.grad is not None
                )
            )
        )
    cuts = job.get("sessions", [])
    for n in range(core.state.number, job["batches"] + len(cuts)):
        if n < job["batches"]:
            data = batch(n, seed=n)
            if job.get("held"):
                data = sampled_by(load_policy(job["model"], device="cpu"), data)
            if n == job.get("bad"):
                data.samples[0] = msgspec.structs.replace(data.samples[0], reward=math.nan)
        else:
            data = msgspec.structs.replace(sessions(cuts[n - job["batches"]]), number=n)
        metrics = core.train(data)
        kept.append(parameters(core))
        losses.append(metrics["loss/policy"])
        norms.append(metrics["optim/grad_norm"])
        names = ("optim/steps", "is/ess", "policy/entropy", "clip/share")
        steps.append([metrics[name] for name in names])
        if job.get("save") and n + 1 == job["save"][0]:
            Path(job["save"][1]).mkdir(parents=True, exist_ok=True)
            checkpoint.save(Path(job["save"][1]), core, {}, 3)
            if "stand" in job:
                stand(core, Path(job["stand"][0]), job["stand"][1])
    buffer = bytearray(count_flat_bytes(core.layout))
    core.backend.broadcast("publish")
    raw = core.backend.probe()
    core.backend.write_flat(memoryview(buffer))
    tensors = read_flat(memoryview(buffer), core.layout)
    if core.model.adapter is None:
        published = load_policy(job["model"], job.get("dtype", "float32"), "cpu")
        load_weights(published, tensors)
        probe_off = float(
            np.abs(np.frombuffer(raw, np.float32) - compute_probe_logprobs(published)).max()
        )
    else:
        probe_off = float(raw != core.model.adapter.base.encode())
    out = {
        "tied": "lm_head.weight" not in dict(core.model.hf.named_parameters()),
        "own_norms": digest_norms(core),
        "losses": losses,
        "norms": norms,
        "numbers": steps,
        "digest": compute_digest(buffer),
        "held": held(core),
        "pid": os.getpid(),
        "again": len(again),
        "names": list(tensors),
        "weights": torch.frombuffer(buffer, dtype=next(iter(tensors.values())).dtype)
        .float()[:: max(1, len(buffer) // 2000)]
        .tolist(),
        # between batches, and after the weights were published
        "parameters": max(*kept, parameters(core)),
        "probe_off": probe_off,
        "gathered": max(gathered),
        "metrics": metrics,
        **sizes,
    }
    core.backend.close()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
