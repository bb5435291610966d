"""A learner's step written plainly with transformers: the rival of benchmarks/learner.py and
real_model.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.contract.messages import Batch


def advantages(b: Batch) -> torch.Tensor:
    """Leave-one-out, [samples]: those of a group stand side by side."""
    groups = len({s.ticket for s in b.samples})
    reward = torch.tensor([s.reward for s in b.samples]).view(groups, -1)
    size = reward.shape[1]
    return ((reward - reward.mean(1, keepdim=True)) * size / (size - 1)).flatten()


class Plain:
    """The step on half a page: rows sorted by length, the model's own forward, log_softmax over the
    answers' logits.  rows: of a micro-batch.  Prompts are of one length.
    """

    def __init__(self, path: Path, rows: int, attention: str) -> None:
        from transformers import AutoModelForCausalLM

        self.hf = AutoModelForCausalLM.from_pretrained(
            str(path), attn_implementation=attention, dtype=torch.float32
        )
        self.rows = rows
        self.optimizer = torch.optim.AdamW(
            self.hf.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )

    def train(self, b: Batch) -> None:
        advantage = advantages(b)
        tokens = sum(s.length for s in b.samples)
        order = sorted(range(len(b.samples)), key=lambda i: b.samples[i].length)
        self.optimizer.zero_grad()
        for at in range(0, len(order), self.rows):
            part = order[at : at + self.rows]
            (-self.gain([b.samples[i] for i in part], advantage[part]) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.hf.parameters(), 1.0)
        self.optimizer.step()

    def gain(self, part: list[Any], advantage: torch.Tensor) -> torch.Tensor:
        """The clipped objective, summed over the tokens of a micro-batch."""
        answers = [np.frombuffer(s.tokens, "<i4") for s in part]
        prompt = len(part[0].prompt_tokens) // 4
        width = prompt + max(map(len, answers))
        ids = np.zeros((len(part), width), np.int64)
        seen = np.zeros((len(part), width), np.int64)
        old = np.zeros((len(part), width - prompt), np.float32)
        for i, (s, a) in enumerate(zip(part, answers, strict=True)):
            ids[i, :prompt] = np.frombuffer(s.prompt_tokens, "<i4")
            ids[i, prompt : prompt + len(a)] = a
            seen[i, : prompt + len(a)] = 1
            old[i, : len(a)] = np.frombuffer(s.behavior_logprobs, "<f4")
        mask = torch.from_numpy(seen[:, prompt:]).bool()
        targets = torch.from_numpy(ids)[:, prompt:, None]
        out = self.hf(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(seen),
            use_cache=False,
            logits_to_keep=width - prompt + 1,
        )
        logs = out.logits[:, :-1].float().log_softmax(-1).gather(2, targets)[:, :, 0]
        ratio = (logs - torch.from_numpy(old)).exp()
        weight = advantage[:, None]
        clipped = ratio.clamp(0.8, 1.2)
        return (torch.minimum(ratio * weight, clipped * weight) * mask).sum()
