"""Build a tiny model for a task and train it on demonstrations with mistakes on purpose."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.engines import ENGINES
from asyncrl.config.sft import SftTraining
from asyncrl.config.tree import Config
from asyncrl.contract.blobs.images import MARKER, digest
from asyncrl.contract.messages import Prompt
from asyncrl.models.vision import image_tokens
from asyncrl.records import atomic_write
from asyncrl.tasks import Task, calc, file, fit, get_task, guess_task, nim, synthetic
from asyncrl.tasks.mixing.mixture import MixtureTask
from asyncrl.tasks.pictures.count import CELL, SIDE, CountTask

BATCH = 64
LR = 3e-3
ONE_PASS = 1 << 40  # tokens of a forward pass: a step's rows are never divided
MOST = 56  # tokens of the longest answer of any built-in task

Played = calc.CalcTask | guess_task.GuessTask | nim.NimTask  # in an environment


def warm_start(
    config: Config, path: str | Path, *, steps: int | None = None, threads: int = 2
) -> dict[str, Any]:
    """Write a warm-started model as a Hugging Face directory at `path`, atomically.

    Deterministic for (task, seed, threads).  Returns steps, seconds, the last loss and the accuracy
    before RL.  Raises ConfigError for a user's task that a tiny model cannot be built for."""
    import torch

    from asyncrl.models import policy as models

    task = get_task(config.task)
    # each that there is
    assert isinstance(task, synthetic.SyntheticTask | file.FileTask | MixtureTask)
    count = task.steps if steps is None else steps
    demonstrations = task.demonstrations(count * BATCH, config.seed)
    images = (
        task.demonstration_images(count * BATCH, config.seed)
        if isinstance(task, CountTask)
        else None
    )
    own_part = Path(f"{path}.part{os.getpid()}")
    own_part.parent.mkdir(parents=True, exist_ok=True)
    before = torch.get_num_threads()
    began = time.monotonic()
    torch.set_num_threads(threads)
    try:
        with atomic_write.replacing(Path(path), part=own_part) as part:
            model = _random_model(config, task, part)
            loss = fit_answers(model, demonstrations, count, images)
            models.export(model, part)
            what = {
                "task": task.name,
                "seed": config.seed,
                "steps": count,
                "loss": loss,
                "accuracy": accuracy(model, task, config.seed),
                "seconds": round(time.monotonic() - began, 1),
            }
            (part / "warm_start.json").write_text(json.dumps(what), encoding="utf-8")
    finally:
        torch.set_num_threads(before)
    return what


def _random_model(config: Config, task: Any, path: Path) -> Any:
    """Build the tiny model of a task, with random weights."""
    from asyncrl.models import policy as models
    from asyncrl.models.vision import tiny_llava

    positions = max(256, config.generator.context)
    if isinstance(task, CountTask):
        return tiny_llava.build_llava(
            path, task.symbols, side=SIDE, patch=CELL, max_positions=positions, seed=config.seed
        )
    return models.build_model(
        path,
        task.symbols,
        seed=config.seed,
        heads=ENGINES[config.generator.engine].warm_start_heads,
        max_positions=positions,
        family="qwen3_moe" if config.model.warm_start_experts else "qwen3",
        experts=config.model.warm_start_experts,
    )


def fit_answers(
    model: Any,
    pairs: list[tuple[str, str]],
    steps: int,
    images: list[list[bytes]] | None = None,
) -> float:
    """Train on the answers, each once and in order, and return the last loss.

    images: the blobs of each pair; None: there are none. The learning rate decays linearly after a
    short warm-up."""
    from asyncrl.models.tokenizer import load_transformers_tokenizer

    tokenizer = load_transformers_tokenizer(model.tokenizer_dir)
    coded = [
        tokenizer(list(side), add_special_tokens=False)["input_ids"]
        for side in zip(*pairs, strict=True)
    ]
    if images is not None:
        coded[0] = [image_tokens.expand(ids, model.vision.shape) for ids in coded[0]]
    rows = [
        fit.FitExample(np.array(p, np.int32), np.array([*a, tokenizer.eos_token_id], np.int32), i)
        for p, a, i in zip(*coded, images or [[]] * len(pairs), strict=True)
    ]
    training = SftTraining(steps=steps, batch=BATCH, lr=LR, micro_batch_tokens=ONE_PASS)
    fitter = fit.ModelFitter(model, training)
    model.one_pass = True  # the models are small
    value = 0.0
    for step in range(steps):
        value = fitter.step(rows[step * BATCH : (step + 1) * BATCH])
    model.one_pass = False
    model.hf.eval()
    return value


def accuracy(model: Any, task: Task, seed: int, count: int = 512) -> float:
    """Return the mean reward of one completion or session for each of `count` held-out prompts.

    Samples at temperature 1 with transformers."""
    import torch

    prompts = [task.prompt("heldout", i, seed) for i in range(count)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not isinstance(task, MixtureTask):
            return mean_reward(model, task, prompts)
        parts = {title: [p for p in prompts if p.task == title] for title in task.tasks}
        means = (mean_reward(model, task.tasks[x], own) * len(own) for x, own in parts.items())
        return sum(means) / count


def mean_reward(model: Any, task: Task, prompts: list[Prompt]) -> float:
    """Return the mean reward of one completion or session for each prompt."""
    if not prompts:
        return 0.0
    if isinstance(task, Played):
        return _played(model, task, prompts)
    texts = _sample_continuations(
        model, [p.text for p in prompts], MOST, [blob for p in prompts for blob in p.images]
    )
    judged = [task.reward(p, t) for p, t in zip(prompts, texts, strict=True)]
    return sum(j["reward"] if isinstance(j, dict) else j for j in judged) / len(prompts)


def _played(model: Any, task: Played, prompts: list[Prompt]) -> float:
    """Return the mean reward of one session per prompt in the task's environment."""
    environments = [task.environment() for _ in prompts]
    live = {
        place: str(env.reset(seed=place, options={"prompt": prompt})[0])
        for place, (env, prompt) in enumerate(zip(environments, prompts, strict=True))
    }
    total = 0.0
    for turn in range(1, task.turns + 1):
        written = _sample_continuations(model, list(live.values()), task.longest)
        for place, text in zip(list(live), written, strict=True):
            says, reward, terminated, truncated, _ = environments[place].step(text)
            total += reward
            if terminated or truncated or turn == task.turns:
                del live[place]
            else:
                live[place] += text + calc.END + says
        if not live:
            break
    return total / len(prompts)


def _sample_continuations(
    model: Any, before: list[str], most: int, images: Sequence[bytes] = ()
) -> list[str]:
    """Sample a continuation of each text, up to `most` tokens.

    images: one of each text, or none at all."""
    import torch

    from asyncrl.models.tokenizer import load_transformers_tokenizer

    tokenizer = load_transformers_tokenizer(model.tokenizer_dir)
    tokenizer.padding_side = "left"
    seen: dict[str, Any] = {}
    if images:
        length = model.vision.shape.length
        before = [text.replace(MARKER, MARKER * length) for text in before]
        pixels = [model.vision.load_pixels(digest(blob), blob) for blob in images]
        seen = {"pixel_values": torch.stack(pixels).to(model.device)}
    coded = tokenizer(before, add_special_tokens=False, padding=True, return_tensors="pt")
    out = model.hf.generate(
        input_ids=coded["input_ids"].to(model.device),
        attention_mask=coded["attention_mask"].to(model.device),
        **seen,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=most,
    )
    written = out[:, coded["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(written, skip_special_tokens=True))
