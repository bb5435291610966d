"""Build a tiny model for a task and train it on demonstrations with deliberate mistakes."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.config.sft import SftTraining
from asyncrl.config.tree import Config
from asyncrl.contract.printable import Say
from asyncrl.models import image_tokens
from asyncrl.records import atomic_write
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks import file, fit, get_task, synthetic
from asyncrl.tasks.mixture import MixtureTask
from asyncrl.tasks.pictures.count import CELL, SIDE, CountTask

BATCH = 64
LR = 3e-3
PROGRESS_S = 5.0  # between two lines of progress
WARMUP = 20  # steps
LR_END = 0.05  # smallest share of LR after the warm-up
ONE_PASS = 1 << 40  # tokens of a forward pass: a step is never split into micro-batches


def warm_start(
    config: Config,
    path: str | Path,
    *,
    steps: int | None = None,
    threads: int = 2,
    say: Say = lambda _: None,
) -> JsonObject:
    """Write a warm-started model as a Hugging Face directory at `path`, atomically.

    The result is deterministic for (task, seed, threads).  say: prints the progress.

    Return steps, seconds and the last loss.  Raises ConfigError if a tiny model cannot be built for
    the task."""
    import torch

    from asyncrl.models import policy as models

    task = get_task(config.task)
    assert isinstance(task, synthetic.SyntheticTask | file.FileTask | MixtureTask)
    count = task.steps if steps is None else steps
    demonstrations = task.make_demonstrations(count * BATCH, config.seed)
    images = None
    if isinstance(task, CountTask):
        solved = task.solve_demonstrations(count * BATCH, config.seed)
        images = [task.draw_images(problem) for problem, _ in solved]
    temporary = Path(f"{path}.part{os.getpid()}")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    previous_threads = torch.get_num_threads()
    began = time.monotonic()
    torch.set_num_threads(threads)
    try:
        with atomic_write.replace(Path(path), part=temporary) as folder:
            positions = max(256, config.generator.context)
            if isinstance(task, CountTask):
                model = models.build_llava(
                    folder,
                    task.symbols,
                    side=SIDE,
                    patch=CELL,
                    max_positions=positions,
                    seed=config.seed,
                )
            else:
                model = models.build_model(
                    folder,
                    task.symbols,
                    seed=config.seed,
                    heads=config.generator.abilities.warm_start_heads,
                    max_positions=positions,
                    family="qwen3_moe" if config.model.warm_start_experts else "qwen3",
                    experts=config.model.warm_start_experts,
                )
            loss = fit_answers(model, demonstrations, count, images, say)
            models.export(model, folder)
            note = {
                "task": task.name,
                "seed": config.seed,
                "steps": count,
                "loss": loss,
                "seconds": round(time.monotonic() - began, 1),
            }
            (folder / "warm_start.json").write_text(json.dumps(note), encoding="utf-8")
    finally:
        torch.set_num_threads(previous_threads)
    return note


def fit_answers(
    model: Any,
    pairs: synthetic.Demonstrations,
    steps: int,
    images: list[list[bytes]] | None,
    say: Say,
) -> float:
    """Train once on each answer, in order, and return the last loss.

    images: the blobs of each pair; None: without images. The learning rate decays linearly after a
    short warm-up."""
    from asyncrl.models.tokenizer import load_transformers_tokenizer

    tokenizer = load_transformers_tokenizer(model.tokenizer_dir)
    token_ids = [
        tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        for texts in zip(*pairs, strict=True)
    ]
    if images is not None:
        token_ids[0] = [image_tokens.expand(ids, model.vision.shape) for ids in token_ids[0]]
    examples = [
        fit.FitExample(np.array(p, np.int32), np.array([*a, tokenizer.eos_token_id], np.int32), i)
        for p, a, i in zip(*token_ids, images or [[]] * len(pairs), strict=True)
    ]
    return fit_in_order(
        model,
        examples,
        SftTraining(steps=steps, batch=BATCH, lr=LR),
        lambda step: LR * min((step + 1) / WARMUP, max(LR_END, 1 - step / steps)),
        say,
    )


def fit_in_order(
    model: Any,
    examples: Sequence[fit.FitExample],
    training: SftTraining,
    rate: Callable[[int], float],
    say: Say,
) -> float:
    """Train a small model once on each example, each batch in one pass; return the last loss.

    Prints a line every PROGRESS_S seconds."""
    training = msgspec.structs.replace(training, micro_batch_tokens=ONE_PASS)
    fitter = fit.ModelFitter(model, training, rate)
    model.one_pass = True
    last_loss = 0.0
    reported_at = time.monotonic()
    for step in range(training.steps):
        if time.monotonic() - reported_at > PROGRESS_S:
            reported_at = time.monotonic()
            say(f"warm start: step {step}/{training.steps}, loss {last_loss:.3f}")
        batch = slice(step * training.batch, (step + 1) * training.batch)
        last_loss = fitter.step(examples[batch])
    model.one_pass = False
    model.hf.eval()
    return last_loss
