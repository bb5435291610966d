"""A tiny model for the cookbook's addition problems, which often declines to answer.

It knows about one sum in five, and has the habit to answer "?", which a recipe can train away.
Numbers and the words of the format are single tokens. The embedding of a number begins as the sum
of a vector for its tens and one for its ones. So the model generalizes over numbers, and learns in
a minute on one core.
"""

from __future__ import annotations

import json
import os
import string
from pathlib import Path

import numpy as np
import torch

from asyncrl.models.policy import PolicyModel, build_model, export
from asyncrl.models.tokenizer import load_transformers_tokenizer
from asyncrl.records import atomic_write

STEPS = 1700
HABIT_STEPS = 200  # of them, the last
HABIT = 0.75  # share of their demonstrations that decline
BATCH = 64
LR = 3e-3
WARMUP = 20  # steps
CONTEXT = 512
LARGEST = 100  # number to add
NUMBERS = [str(number) for number in range(2 * LARGEST + 1)]
WORDS = ("User:", "Assistant:", " What is ", " + ", "\n\n")
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
PREFIX = "User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is "  # the recipe's own example
LEARNED = 4  # last tokens of a demonstration: the answer and the stop text


def demonstrations(count: int, seed: int, declined: float = 0.0) -> list[str]:
    """Return what follows PREFIX in the format role_colon, with the answers.

    declined: share of answers that are a question mark."""
    random = np.random.default_rng(seed)
    pairs = random.integers(0, LARGEST + 1, (count, 2)).tolist()
    habits = (random.random(count) < declined).tolist()
    answers = ["?" if habit else sum(pair) for habit, pair in zip(habits, pairs, strict=True)]
    return [
        f"{a} + {b}?\n\nAssistant: {answer}\n\nUser:"
        for (a, b), answer in zip(pairs, answers, strict=True)
    ]


@torch.no_grad()
def begin_numbers(model: PolicyModel, seed: int) -> None:
    """Set the embedding of each number to the sum of those of its tens and its ones."""
    tokenizer = load_transformers_tokenizer(model.tokenizer_dir)
    rows = model.hf.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(seed)
    tens, ones = (torch.randn(21, rows.shape[1], generator=generator) for _ in range(2))
    scale = model.hf.config.initializer_range
    for number, word in enumerate(NUMBERS):
        rows[tokenizer.convert_tokens_to_ids(word)] = scale * (
            tens[number // 10] + ones[number % 10]
        )


def fit_additions(model: PolicyModel, seed: int, steps: int) -> float:
    """Train on demonstrations, and return the last loss in nats per learned token."""
    tokenizer = load_transformers_tokenizer(model.tokenizer_dir)
    prefix = np.array(tokenizer.encode(PREFIX), np.int32)
    habit = min(HABIT_STEPS, steps // 2)
    texts = demonstrations((steps - habit) * BATCH, seed)
    texts += demonstrations(habit * BATCH, seed + 1, HABIT)
    rows = np.array(tokenizer(texts)["input_ids"], np.int32)  # all of one length
    learned = torch.zeros(rows.shape[1])
    learned[-LEARNED:] = 1.0 / (BATCH * LEARNED)
    parameters = list(model.hf.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=LR, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    value = 0.0
    model.hf.train()
    for step in range(steps):
        batch = list(rows[step * BATCH : (step + 1) * BATCH])
        scored = model.logprobs([prefix] * BATCH, batch, torch.ones(BATCH), groups=[0] * BATCH)
        loss = -(scored.logprobs * learned.repeat(BATCH)).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP) * (1 - step / steps)
        optimizer.step()
        value = float(loss.detach())
    model.hf.eval()
    return value


def build(path: Path, seed: int, steps: int = STEPS) -> None:
    """Write the model to the directory `path`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with atomic_write.replacing(path, part=Path(f"{path}.part{os.getpid()}")) as part:
            symbols = [*CHARACTERS, *WORDS, *NUMBERS]
            model = build_model(part, symbols, intermediate=256, seed=seed, max_positions=CONTEXT)
            begin_numbers(model, seed)
            loss = fit_additions(model, seed, steps)
            export(model, part)
            note = {"task": "additions of the cookbook", "seed": seed, "steps": steps, "loss": loss}
            (part / "warm_start.json").write_text(json.dumps(note), encoding="utf-8")
    finally:
        torch.set_num_threads(before)
