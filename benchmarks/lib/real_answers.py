"""Prompts, completions and log-probabilities that benchmarks/real_equal.py compares.

Prompts go through a model's chat template; completions come from an engine; log-probabilities
come from transformers and from the packed forward."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from actors.engine import CompletionRequest, Engine
from asyncrl.contract.messages import Prompt
from asyncrl.models.policy import PolicyModel, build_model
from asyncrl.models.tokenizer import encode_prompt, load_tokenizer
from lib.results_file import ROOT

ANSWER = 16  # tokens at most
GROUP = 2  # answers of a prompt, which share its keys and values
SLOTS = 6  # rows of an engine: answers wait, enter and leave
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<system>tiny\n' }}{% endif %}{{ '<' + message['role'] + '>' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


class Answered(NamedTuple):
    """A completion of an engine."""

    prompt: np.ndarray  # int32 [P]
    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T], as the engine recorded them
    group: int  # completions of one prompt have the same number


def tiny(path: Path) -> str:
    """A random model with a chat template and a token a character, where the real one would take
    minutes.
    """
    build_model(
        path,
        string.printable,
        family="llama",
        hidden=64,
        heads=2,
        kv_heads=1,
        tied=True,
        max_positions=1024,
    )
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


def prompts(path: str, lengths: Sequence[int]) -> list[np.ndarray]:
    """Of about `lengths` tokens, each with a system turn and without."""
    tokenizer = load_tokenizer(path)
    words = (ROOT / "README.md").read_text().split()
    out = []
    for length in lengths:
        for system in (False, True):
            turns = [{"role": "system", "content": "Be brief."}] if system else []
            count = 0
            ids = np.empty(0, np.int32)
            while len(ids) < length:
                count += max(1, (length - len(ids)) // 3)
                asked = {"role": "user", "content": " ".join(words[:count])}
                ids = encode_prompt(tokenizer, Prompt(0, "", messages=[*turns, asked]))
            out.append(ids)
    # the template alone is longer than the shortest: one prompt of plain text
    out.append(np.asarray(tokenizer.encode(" ".join(words[:40]))[: lengths[0]], np.int32))
    return out


def room(asked: list[np.ndarray]) -> int:
    """Tokens of the longest prompt with its answer, in whole blocks."""
    return -(-(max(map(len, asked)) + ANSWER) // 32) * 32


def drawn(engine: Engine, asked: list[np.ndarray]) -> list[Answered]:
    """GROUP answers to each prompt, in the order of `asked`."""
    engine.add(
        CompletionRequest((at, sample, 0), prompt, at, ANSWER, 1.0, 1.0, 0, (), 7)
        for at, prompt in enumerate(asked)
        for sample in range(GROUP)
    )
    done: dict[Any, Answered] = {}
    while len(done) < len(asked) * GROUP:
        for answer in engine.step():
            done[answer.key] = Answered(
                answer.prompt, answer.tokens, answer.logprobs, answer.key[0]
            )
    return [done[key] for key in sorted(done)]


@torch.no_grad()
def by_transformers(model: PolicyModel, answers: list[Answered]) -> np.ndarray:
    """Log-probabilities of all answers' tokens, one after the other; each answer alone."""
    out = []
    for prompt, tokens, *_ in answers:
        ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()[None]
        logits = model.hf(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
        out.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(out).numpy()


@torch.no_grad()
def by_packed(model: PolicyModel, answers: list[Answered]) -> np.ndarray:
    """The same by the packed forward, SLOTS answers of several prompts in a pass; each prompt is
    encoded once in it.
    """
    out = []
    for at in range(0, len(answers), SLOTS):
        part = answers[at : at + SLOTS]
        found = model.logprobs(
            [a.prompt for a in part],
            [a.tokens for a in part],
            torch.ones(len(part)),
            groups=[a.group for a in part],
        )
        out.append(found.logprobs)
    return torch.cat(out).numpy()


def recorded(answers: list[Answered]) -> np.ndarray:
    """The engine's own log-probabilities, one after the other."""
    return np.concatenate([a.logprobs for a in answers])


def far(found: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """Mean and largest distance, nats a token."""
    apart = np.abs(found.astype(np.float64) - want)
    return float(apart.mean()), float(apart.max())
