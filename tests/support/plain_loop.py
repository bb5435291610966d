"""Synchronous RL on one page, with transformers and torch alone: what every asynchronous run is
held against.

    OMP_NUM_THREADS=1 python tests/support/plain_loop.py MODEL_DIR TASK [--steps 150] [--lr 2e-4]
        [--seed 0]

A batch is 32 prompts with 8 samples each, leave-one-out advantages, one clipped PPO update (ratio
1: the samples are fresh). Nothing here knows of asyncrl's engine, buffer or losses; only the task's
prompts and rewards are shared."""

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.tree import TaskConfig as TaskConfig
from asyncrl.contract.messages import Prompt
from asyncrl.tasks import Task, get_task


@torch.no_grad()
def sample(
    hf: Any, tokenizer: Any, prompts: list[Prompt], most: int, r: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [B, P+T] left-padded prompts and answers, position ids [B, P+T], answer mask [B, T]);
    temperature 1, eos included."""
    coded = [tokenizer.encode(p.text, add_special_tokens=False) for p in prompts]
    width, eos = max(map(len, coded)), tokenizer.eos_token_id
    ids = torch.tensor([[0] * (width - len(c)) + c for c in coded])
    seen = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in coded])
    place = (seen.cumsum(1) - 1).clamp(min=0)
    out = hf(
        input_ids=ids, attention_mask=seen, position_ids=place, use_cache=True, logits_to_keep=1
    )
    cache = None
    live, mask = torch.ones(len(coded), dtype=torch.bool), []
    for _ in range(most):
        token = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1, generator=r)
        mask.append(live)
        ids = torch.cat([ids, torch.where(live[:, None], token, 0)], 1)
        seen = torch.cat([seen, live[:, None].long()], 1)
        place = torch.cat([place, place[:, -1:] + 1], 1)
        live = live & (token[:, 0] != eos)
        if not live.any():
            break
        cache = out.past_key_values
        out = hf(
            input_ids=ids[:, -1:],
            attention_mask=seen,
            position_ids=place[:, -1:],
            past_key_values=cache,
            use_cache=True,
        )
    return ids, place, torch.stack(mask, 1)


def texts(tokenizer: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[str]:
    answers = ids[:, -mask.shape[1] :]
    return [
        tokenizer.decode(a[m], skip_special_tokens=True) for a, m in zip(answers, mask, strict=True)
    ]


def score(task: Task, prompt: Prompt, text: str) -> float:
    value = task.reward(prompt, text)
    return float(value["reward"] if isinstance(value, dict) else value)


def accuracy(
    hf: Any, tokenizer: Any, task: Task, split: str, n: int, most: int, seed: int = 0
) -> float:
    """Mean reward over the first n prompts of a fixed split, one sample each, temperature 1."""
    r = torch.Generator().manual_seed(seed)
    prompts = [task.prompt(split, i, 0) for i in range(min(n, task.size(split) or n))]
    ids, _, mask = sample(hf, tokenizer, prompts, most, r)
    return sum(
        score(task, p, t) for p, t in zip(prompts, texts(tokenizer, ids, mask), strict=True)
    ) / len(prompts)


def logprobs(hf: Any, ids: torch.Tensor, place: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    answer = mask.shape[1]
    seen = torch.cat([(place[:, :-answer].cumsum(1) + (ids[:, :-answer] != 0)) > 0, mask], 1).long()
    logits = (
        hf(input_ids=ids, attention_mask=seen, position_ids=place, logits_to_keep=answer + 1)
        .logits[:, :-1]
        .float()
    )
    return logits.log_softmax(-1).gather(2, ids[:, -answer:, None])[:, :, 0]


def train(
    path: str,
    task: Task,
    steps: int = 150,
    lr: float = 2e-4,
    most: int = 48,
    groups: int = 32,
    size: int = 8,
    seed: int = 0,
    n: int = 1024,
) -> dict[str, Any]:
    """Train the model in `path`; accuracies before and after, on held-out and o.o.d. prompts."""
    torch.manual_seed(seed)
    hf, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    r, rewards, tokens, began = torch.Generator().manual_seed(seed), [], [], time.monotonic()
    out: dict[str, Any] = {
        f"{split}_start": accuracy(hf, tokenizer, task, split, n, most)
        for split in ("heldout", "ood")
    }
    ends = [time.monotonic()]
    for step in range(steps):
        prompts = [
            p for i in range(groups) for p in [task.prompt("train", step * groups + i, seed)] * size
        ]
        ids, place, mask = sample(hf, tokenizer, prompts, most, r)
        reward = torch.tensor(
            [score(task, p, t) for p, t in zip(prompts, texts(tokenizer, ids, mask), strict=True)]
        ).view(groups, size)
        advantage = ((reward - reward.mean(1, keepdim=True)) * size / (size - 1)).view(-1, 1)
        new = logprobs(hf, ids, place, mask)
        ratio = (new - new.detach()).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        optimizer.zero_grad()
        (-(gain * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
        rewards.append(reward.mean().item())
        tokens.append(int(mask.sum()))
        ends.append(time.monotonic())
    out |= {f"{s}_end": accuracy(hf, tokenizer, task, s, n, most) for s in ("heldout", "ood")}
    return out | {
        "reward_first": sum(rewards[:10]) / 10,
        "reward_last": sum(rewards[-10:]) / 10,
        "seconds": time.monotonic() - began,
        "tokens": tokens,
        "step_seconds": [b - a for a, b in pairwise(ends)],
    }


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model")
    p.add_argument("task")
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    print(
        json.dumps(
            {"task": a.task}
            | train(a.model, get_task(TaskConfig(name=a.task)), a.steps, a.lr, seed=a.seed)
        )
    )
