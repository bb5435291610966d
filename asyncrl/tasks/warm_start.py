"""Build a tiny model for a task and warm-start it by supervised learning on demonstrations that were spoiled on purpose."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.tasks import synthetic

BATCH, LR = 64, 3e-3


def warm_start(config: Config, path: str | Path, *, steps: int | None = None, threads: int = 2) -> dict[str, Any]:
    """Write a Hugging Face directory at `path`, atomically.  Deterministic for (task, seed).  Returns what it did."""
    import torch

    from asyncrl import models

    if config.task.name not in synthetic.TASKS:
        raise ConfigError(f"model.warm_start needs a built-in task, not {config.task.name}: point model.path at a model of your own")
    task, part = synthetic.TASKS[config.task.name](), Path(f"{path}.part{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    before, began = torch.get_num_threads(), time.monotonic()
    torch.set_num_threads(threads)
    try:
        model = models.build_model(part, task.symbols, seed=config.seed)
        count = task.steps if steps is None else steps
        loss = _fit(model, task.demonstrations(count * BATCH, config.seed), count)
        models.export(model, part)
        what = {"task": task.name, "seed": config.seed, "steps": count, "loss": loss, "seconds": round(time.monotonic() - began, 1)}
        (part / "warm_start.json").write_text(json.dumps(what))
        shutil.rmtree(path, ignore_errors=True)
        os.replace(part, path)
    finally:
        torch.set_num_threads(before)
        shutil.rmtree(part, ignore_errors=True)
    return what


def _fit(model: Any, pairs: list[tuple[str, str]], steps: int) -> float:
    """Next-token training on the answers; linear decay after a short warm-up.  Returns the last loss."""
    import torch

    from asyncrl import models

    tokenizer = models.load_tokenizer(model.tokenizer_dir)
    optimizer = torch.optim.AdamW(model.hf.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 20, max(0.05, 1 - s / steps)))
    model.hf.train()
    value = 0.0
    for step in range(steps):
        part = pairs[step * BATCH : (step + 1) * BATCH]
        prompts = [np.array(tokenizer.encode(p, add_special_tokens=False), np.int32) for p, _ in part]
        answers = [np.array([*tokenizer.encode(a, add_special_tokens=False), tokenizer.eos_token_id], np.int32) for _, a in part]
        loss = -model.logprobs(prompts, answers, torch.ones(len(part))).logprobs.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.hf.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        value = float(loss.detach())
    model.hf.eval()
    return value
