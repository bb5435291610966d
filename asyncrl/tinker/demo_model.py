"""A tiny model for the cookbook's addition problems, which still makes mistakes."""

from __future__ import annotations

import json
import os
import string
from pathlib import Path

import numpy as np
import torch

from asyncrl.models.policy import build_model, export
from asyncrl.models.tokenizer import transformers_tokenizer
from asyncrl.records import atomic_write
from asyncrl.tasks.warm_start import BATCH, fit_answers

STEPS = 120
MISTAKES = 0.5  # share of demonstrations with another sum
SYMBOLS = string.ascii_letters + string.digits + string.punctuation + " \n"
BEFORE = "User: What is 4 + 5?\n\nAssistant: 9\n\n"  # the recipe's own example
CONTEXT = 512


def demonstrations(count: int, seed: int) -> list[tuple[str, str]]:
    """Return prompts and completions in the format role_colon."""
    random = np.random.default_rng(seed)
    pairs = []
    for first, second in random.integers(0, 101, (count, 2)).tolist():
        wrong = int(random.integers(1, 30)) if random.random() < MISTAKES else 0
        question = f"{BEFORE}User: What is {first} + {second}?\n\nAssistant:"
        pairs.append((question, f" {first + second + wrong}\n\nUser:"))
    return pairs


def keep_blank_lines(path: Path) -> None:
    """Let the tokenizer in `path` split consecutive newlines, which the format needs."""
    import tokenizers

    tokenizer = transformers_tokenizer(path)
    every = tokenizers.Regex(r"[\s\S]")
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(every, "isolated")
    tokenizer.save_pretrained(str(path))


def build(path: Path, seed: int, steps: int = STEPS) -> None:
    """Write the model to the directory `path`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with atomic_write.replacing(path, part=Path(f"{path}.part{os.getpid()}")) as part:
            model = build_model(part, SYMBOLS, seed=seed, max_positions=CONTEXT)
            keep_blank_lines(part)
            loss = fit_answers(model, demonstrations(steps * BATCH, seed), steps)
            export(model, part)
            note = {"task": "additions of the cookbook", "seed": seed, "steps": steps, "loss": loss}
            (part / "warm_start.json").write_text(json.dumps(note), encoding="utf-8")
    finally:
        torch.set_num_threads(before)
