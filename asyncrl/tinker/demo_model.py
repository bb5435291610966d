"""A tiny model for the cookbook's addition problems that often declines to answer.

It answers about one sum in five correctly. It often answers "?", a habit that a recipe can train
away. Numbers and the words of the format are single tokens. The embedding of a number starts as the
sum of one vector for its tens and one for its ones. So the model generalizes over numbers, and
learns in a minute on one core.
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from asyncrl.config.sft import SftTraining
from asyncrl.models.policy import PolicyModel, build_model, export
from asyncrl.models.tokenizer import load_transformers_tokenizer
from asyncrl.records import atomic_write
from asyncrl.tasks.fit import FitExample
from asyncrl.tasks.warm_start import fit_in_order

STEPS = 1700
HABIT_STEPS = 200  # the last ones of STEPS, which teach the model to decline
HABIT = 0.75  # share of demonstrations in these steps that decline
BATCH = 64
LR = 3e-3
WARMUP = 20  # steps
CONTEXT = 512
LARGEST = 100  # largest number to add
NUMBERS = [str(number) for number in range(2 * LARGEST + 1)]
WORDS = ("User:", "Assistant:", " What is ", " + ", "\n\n")
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
PREFIX = "User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is "  # the recipe's own example
LEARNED = 4  # number of last tokens of a demonstration in the loss: answer and stop text


def make_demonstrations(count: int, seed: int, declined_share: float = 0.0) -> list[str]:
    """Return problems with answers that continue PREFIX in the format role_colon.

    declined_share: share of answers that are a question mark."""
    random = np.random.default_rng(seed)
    pairs = random.integers(0, LARGEST + 1, (count, 2)).tolist()
    habits = (random.random(count) < declined_share).tolist()
    answers = ["?" if habit else sum(pair) for habit, pair in zip(habits, pairs, strict=True)]
    return [
        f"{a} + {b}?\n\nAssistant: {answer}\n\nUser:"
        for (a, b), answer in zip(pairs, answers, strict=True)
    ]


@torch.no_grad()
def init_numbers(model: PolicyModel, seed: int) -> None:
    """Set the embedding of each number to the sum of a vector of its tens and one of its ones."""
    tokenizer = load_transformers_tokenizer(model.tokenizer_dir)
    embedding = model.hf.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(seed)
    tens, ones = (torch.randn(21, embedding.shape[1], generator=generator) for _ in range(2))
    scale = model.hf.config.initializer_range
    for number, word in enumerate(NUMBERS):
        embedding[tokenizer.convert_tokens_to_ids(word)] = scale * (
            tens[number // 10] + ones[number % 10]
        )


def fit_additions(
    model: PolicyModel, seed: int, steps: int, say: Callable[[str], None] = lambda _: None
) -> float:
    """Train on demonstrations; return the last loss in nats per token of LEARNED.

    say: prints the progress."""
    tokenizer = load_transformers_tokenizer(model.tokenizer_dir)
    prefix = np.array(tokenizer.encode(PREFIX), np.int32)
    habit = min(HABIT_STEPS, steps // 2)
    texts = make_demonstrations((steps - habit) * BATCH, seed)
    texts += make_demonstrations(habit * BATCH, seed + 1, HABIT)
    responses = np.array(tokenizer(texts)["input_ids"], np.int32)  # all of one length
    examples = [FitExample(prefix, row, given=len(row) - LEARNED) for row in responses]
    return fit_in_order(
        model,
        examples,
        SftTraining(steps=steps, batch=BATCH, lr=LR, beta2=0.98),
        lambda step: LR * min(1.0, (step + 1) / WARMUP) * (1 - step / steps),
        say,
    )


def build(
    path: Path, seed: int, steps: int = STEPS, say: Callable[[str], None] = lambda _: None
) -> None:
    """Write the model to the directory `path`, atomically.  say: prints the progress."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with atomic_write.replace(path, part=Path(f"{path}.part{os.getpid()}")) as folder:
        symbols = [*CHARACTERS, *WORDS, *NUMBERS]
        model = build_model(folder, symbols, intermediate=256, seed=seed, max_positions=CONTEXT)
        init_numbers(model, seed)
        loss = fit_additions(model, seed, steps, say)
        export(model, folder)
        note = {"task": "additions of the cookbook", "seed": seed, "steps": steps, "loss": loss}
        (folder / "warm_start.json").write_text(json.dumps(note), encoding="utf-8")
