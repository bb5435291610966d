"""Synchronous RL on one page: no engine, no cache, no buffer, no tickets, no packing of our losses.
What `max_lag = 0` is held against, bitwise.

Every answer grows by one whole forward a token, all answers of a batch side by side; advantages,
the clipped loss, clipping of the gradient and AdamW are written out with torch.  Shared with the
runs: the model's operators in exact mode (`PolicyModel.logprobs`: a forward by transformers' own
kernels rounds differently), the task's prompts, and the random numbers of (seed, ticket, sample,
position)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from actors.engine import draw_uniform_rows
from asyncrl.contract.messages import Prompt
from asyncrl.models.policy import PolicyModel, load_policy


@torch.no_grad()
def next_logs(model: PolicyModel, rows: list[np.ndarray]) -> torch.Tensor:
    """Log-probabilities [B, V] of the token after each row: every token of the vocabulary is tried
    as an answer of its own."""
    words = [np.array([v], np.int32) for v in range(model.hf.config.vocab_size)]
    flat = [(i, row, w) for i, row in enumerate(rows) for w in words]
    out = model.logprobs(
        [x[1] for x in flat],
        [x[2] for x in flat],
        torch.ones(len(flat)),
        groups=[x[0] for x in flat],
    )
    return out.logprobs.view(len(rows), len(words))


def write(
    model: PolicyModel,
    prompts: list[np.ndarray],
    keys: list[tuple[int, int]],
    most: int,
    seed: int,
    eos: int,
) -> list[np.ndarray]:
    """One answer [T] a prompt, by inverse CDF; keys: (ticket, sample), which name the stream."""
    streams = draw_uniform_rows([(seed, ticket, sample) for ticket, sample in keys], most)
    answers: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    for t in range(most):
        c = (
            next_logs(
                model, [np.concatenate([prompts[i], np.array(answers[i], np.int32)]) for i in live]
            )
            .exp()
            .cumsum(-1)
        )
        u = torch.tensor([streams[i][t] for i in live])[:, None]
        for i, token in zip(
            live, torch.searchsorted(c, u * c[:, -1:], right=True)[:, 0].tolist(), strict=True
        ):
            answers[i].append(token)
        live = [i for i in live if answers[i][-1] != eos]
        if not live:
            break
    return [np.array(a, np.int32) for a in answers]


def train(
    path: Path,
    prompt: Callable[[int], Prompt],
    reward: Callable[[Prompt, str], float],
    *,
    steps: int,
    groups: int,
    size: int,
    most: int,
    lr: float,
    seed: int = 0,
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """(weights, mean rewards, policy losses) after `steps` batches of groups x size answers."""
    torch.set_num_threads(1)
    model, tokenizer = load_policy(path, device="cpu"), AutoTokenizer.from_pretrained(path)
    model.exact = True
    optimizer = torch.optim.AdamW(
        model.hf.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    told: list[dict[str, float]] = []
    for step in range(steps):
        asked = [prompt(step * groups + g) for g in range(groups)]
        coded = [
            np.array(tokenizer.encode(p.text, add_special_tokens=False), np.int32)
            for p in asked
            for _ in range(size)
        ]
        owner = [g for g in range(groups) for _ in range(size)]
        keys = [(step * groups + g, s) for g in range(groups) for s in range(size)]
        answers = write(model, coded, keys, most, seed, tokenizer.eos_token_id)
        texts = [
            tokenizer.decode(
                [int(t) for t in a if t != tokenizer.eos_token_id], skip_special_tokens=False
            )
            for a in answers
        ]
        r = torch.tensor([reward(asked[g], x) for g, x in zip(owner, texts, strict=True)]).view(
            groups, size
        )
        advantage = ((r - r.mean(1, keepdim=True)) * size / (size - 1)).flatten()
        # rounding follows the order of rows: groups beside each other, by their longest row
        width = [len(c) + len(a) for c, a in zip(coded, answers, strict=True)]
        longest = [max(w for w, o in zip(width, owner, strict=True) if o == g) for g in owner]
        order = sorted(range(len(answers)), key=lambda i: (longest[i], owner[i], width[i], i))
        new = model.logprobs(
            [coded[i] for i in order],
            [answers[i] for i in order],
            torch.ones(len(order)),
            groups=[owner[i] for i in order],
        ).logprobs
        a = torch.cat([advantage[i].expand(len(answers[i])) for i in order])
        ratio = (new - new.detach()).exp()
        loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / len(a)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.hf.parameters(), 1.0)
        optimizer.step()
        told.append({"reward/mean": float(r.mean()), "loss/policy": float(loss.detach())})
    return weights(model), told


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.hf.named_parameters()}
