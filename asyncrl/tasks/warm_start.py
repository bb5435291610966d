"""Build a tiny model for a task and train it on demonstrations with deliberate mistakes."""

import json
import os
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.config.sft import SftTraining
from asyncrl.config.tree import Config
from asyncrl.contract.blobs.images import MARKER
from asyncrl.contract.messages import Prompt
from asyncrl.contract.printable import Say
from asyncrl.models import image_tokens
from asyncrl.records import atomic_write
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks import Task, calc, file, fit, get_task, synthetic
from asyncrl.tasks.mixture import MixtureTask
from asyncrl.tasks.pictures.count import CELL, SIDE, CountTask

BATCH = 64
LR = 3e-3
PROGRESS_S = 5.0  # between two lines of progress
WARMUP = 20  # steps
LR_END = 0.05  # smallest share of LR after the warm-up
ONE_PASS = 1 << 40  # tokens of a forward pass: a step is never split into micro-batches
MOST = 56  # tokens of the longest answer of any built-in task


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

    Return steps, seconds, the last loss and the accuracy before RL.  Raises ConfigError if a tiny
    model cannot be built for the task."""
    import torch

    from asyncrl.models import policy as models
    from asyncrl.models import tiny_llava

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
                model = tiny_llava.build_llava(
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
            say("warm start: measuring the accuracy before RL")
            note = {
                "task": task.name,
                "seed": config.seed,
                "steps": count,
                "loss": loss,
                "accuracy": measure_accuracy(model, task, config.seed),
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


def measure_accuracy(model: Any, task: Task, seed: int, count: int = 512) -> float:
    """Return the mean reward of one completion or session for each of `count` held-out prompts.

    The completions are sampled at temperature 1 with transformers."""
    import torch

    prompts = [task.prompt("heldout", i, seed) for i in range(count)]
    total = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for title, part in (task.tasks if isinstance(task, MixtureTask) else {"": task}).items():
            asked = [p for p in prompts if p.task == title]
            if asked and isinstance(part, synthetic.PlayedTask):
                total += _play_sessions(model, part, asked)
            elif asked:
                images = [blob for p in asked for blob in p.images]
                texts = _sample_continuations(model, [p.text for p in asked], MOST, images)
                for prompt, text in zip(asked, texts, strict=True):
                    reward = part.reward(prompt, text)
                    total += reward["reward"] if isinstance(reward, dict) else reward
    return total / count


def _play_sessions(model: Any, task: synthetic.PlayedTask, prompts: list[Prompt]) -> float:
    """Return the sum of the rewards of one session per prompt in the task's environment."""
    environments = [task.make_environment() for _ in prompts]
    texts = {
        index: str(env.reset(seed=index, options={"prompt": prompt})[0])
        for index, (env, prompt) in enumerate(zip(environments, prompts, strict=True))
    }
    total = 0.0
    for turn in range(1, task.turns + 1):
        completions = _sample_continuations(model, list(texts.values()), task.longest)
        for index, text in zip(list(texts), completions, strict=True):
            observation, reward, terminated, truncated, _ = environments[index].step(text)
            total += reward
            if terminated or truncated or turn == task.turns:
                del texts[index]
            else:
                texts[index] += text + calc.END + observation
        if not texts:
            break
    return total


def _sample_continuations(
    model: Any, texts: list[str], max_tokens: int, images: Sequence[bytes] = ()
) -> list[str]:
    """Sample a continuation of each text, up to `max_tokens` tokens or the end token.

    The texts have all other special tokens, like those that a run scores.

    images: one for each text, or empty."""
    import torch

    from asyncrl.models.tokenizer import load_transformers_tokenizer

    tokenizer = load_transformers_tokenizer(model.tokenizer_dir)
    tokenizer.padding_side = "left"
    image_inputs: JsonObject = {}
    if images:
        length = model.vision.shape.length
        texts = [text.replace(MARKER, MARKER * length) for text in texts]
        pixels = [model.vision.load_pixels(blob) for blob in images]
        image_inputs = {"pixel_values": torch.stack(pixels).to(model.device)}
    encoded = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    sequences = model.hf.generate(
        input_ids=encoded["input_ids"].to(model.device),
        attention_mask=encoded["attention_mask"].to(model.device),
        **image_inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_tokens,
    )
    continuations = sequences[:, encoded["input_ids"].shape[1] :].tolist()
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    visible = (list(takewhile(lambda token: token not in ends, row)) for row in continuations)
    return list(map(tokenizer.decode, visible))
