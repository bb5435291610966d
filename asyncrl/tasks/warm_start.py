"""Build a tiny model for a task and train it on demonstrations with mistakes on purpose."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.engines import ENGINES
from asyncrl.config.sft import SftTraining
from asyncrl.config.tree import Config
from asyncrl.contract.messages import Prompt
from asyncrl.records import atomic_write
from asyncrl.tasks import Task, calc, file, fit, get_task, guess_task, nim, synthetic
from asyncrl.tasks.mixing.mixture import MixtureTask

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
    own_part = Path(f"{path}.part{os.getpid()}")
    own_part.parent.mkdir(parents=True, exist_ok=True)
    before = torch.get_num_threads()
    began = time.monotonic()
    torch.set_num_threads(threads)
    try:
        with atomic_write.replacing(Path(path), part=own_part) as part:
            model = models.build_model(
                part,
                task.symbols,
                seed=config.seed,
                heads=ENGINES[config.generator.engine].warm_start_heads,
                max_positions=max(256, config.generator.context),
                family="qwen3_moe" if config.model.warm_start_experts else "qwen3",
                experts=config.model.warm_start_experts,
            )
            loss = fit_answers(model, demonstrations, count)
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


def fit_answers(model: Any, pairs: list[tuple[str, str]], steps: int) -> float:
    """Train on the answers, each once and in order, and return the last loss.

    The learning rate decays linearly after a short warm-up."""
    from asyncrl.models.tokenizer import transformers_tokenizer

    tokenizer = transformers_tokenizer(model.tokenizer_dir)
    coded = [
        tokenizer(list(side), add_special_tokens=False)["input_ids"]
        for side in zip(*pairs, strict=True)
    ]
    rows = [
        fit.FitExample(np.array(p, np.int32), np.array([*a, tokenizer.eos_token_id], np.int32))
        for p, a in zip(*coded, strict=True)
    ]
    training = SftTraining(steps=steps, batch=BATCH, lr=LR, micro_batch_tokens=ONE_PASS)
    fitter = fit.ModelFitter(model, training)
    value = 0.0
    for step in range(steps):
        value = fitter.step(rows[step * BATCH : (step + 1) * BATCH])
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
    texts = _sample_continuations(model, [p.text for p in prompts], MOST)
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


def _sample_continuations(model: Any, before: list[str], most: int) -> list[str]:
    """Sample a continuation of each text, up to `most` tokens."""
    from asyncrl.models.tokenizer import transformers_tokenizer

    tokenizer = transformers_tokenizer(model.tokenizer_dir)
    tokenizer.padding_side = "left"
    coded = tokenizer(before, add_special_tokens=False, padding=True, return_tensors="pt")
    out = model.hf.generate(
        input_ids=coded["input_ids"].to(model.device),
        attention_mask=coded["attention_mask"].to(model.device),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=most,
    )
    written = out[:, coded["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(written, skip_special_tokens=True))
