"""A strong synchronous loop in plain torch, the rival of a run's step.

tests/support/plain_loop.py has the same mathematics in a readable form.

    OMP_NUM_THREADS=2 python benchmarks/lib/strong_loop.py MODEL_DIR TASK [--steps 40] [--lr 2e-4]
    torchrun --standalone --nproc-per-node=2 benchmarks/lib/strong_loop.py ...   two ranks, gloo

Its optimizations:

- one forward with fused projections for prompts, decoding and training;
- a prompt is encoded once for its group;
- keys and values are stored in memory that is allocated once;
- rows leave the batch when they end;
- completions are sorted by length into micro-batches, so that little is padding;
- logits are computed only for response tokens;
- fused AdamW on the fused parameters.

It covers Llama, Qwen2, Qwen3 and Mistral, and uses only a task's prompts and rewards of asyncrl.

Shapes: G prompts of at most P tokens, B = G * size completions of at most T tokens, H hidden, D a
head's width, V symbols."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

SHRINK = 0.8  # live share of the rows below which they are moved together
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Norm(torch.autograd.Function):
    """x / rms(x) * weight with its backward by hand: half the passes of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.shape[-1]).add_(
            eps
        )
        unit = x * scale.rsqrt_()
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        both = grads[0] * unit
        mean = (both @ weight).div_(-unit.shape[-1])[..., None]
        to_x = torch.addcmul(grads[0] * weight, unit, mean).mul_(scale)
        return to_x, both.flatten(0, -2).sum(0), None


class Policy:
    """A Llama-like model whose parameters are fused: q, k, v in one matrix, gate and up in one."""

    def __init__(self, path: str) -> None:
        hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        c = hf.config
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.eps = c.rms_norm_eps
        places = torch.arange(c.max_position_embeddings)[None]
        with torch.no_grad():
            cos, sin = hf.model.rotary_emb(hf.model.embed_tokens.weight[:1], places)
        self.cos, self.sin = cos[0, :, None], sin[0, :, None]  # [places, 1, D]
        self.embed, self.pad = hf.model.embed_tokens.weight, hf.model.embed_tokens.padding_idx
        self.head = hf.get_output_embeddings().weight
        self.last = hf.model.norm.weight
        self.layers: list[dict[str, Any]] = []
        for layer in hf.model.layers:
            a, mlp = layer.self_attn, layer.mlp
            parts = (a.q_proj, a.k_proj, a.v_proj)
            fused = {
                "qkv": torch.cat([part.weight for part in parts]),
                "up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            } | (
                {"bias": torch.cat([part.bias for part in parts])}
                if a.q_proj.bias is not None
                else {}
            )
            own = {
                "in": layer.input_layernorm.weight,
                "o": a.o_proj.weight,
                "post": layer.post_attention_layernorm.weight,
                "down": mlp.down_proj.weight,
            } | ({"q": a.q_norm.weight, "k": a.k_norm.weight} if hasattr(a, "q_norm") else {})
            self.layers.append({k: torch.nn.Parameter(v.detach()) for k, v in fused.items()} | own)

    def parameters(self) -> list[torch.Tensor]:
        found = [self.embed, self.last, *(w for layer in self.layers for w in layer.values())]
        return found if self.head is self.embed else [*found, self.head]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return Norm.apply(x, weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    def forward(self, ids: torch.Tensor, places: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Last states [..., H] of tokens ids [...] at `places`; attend(layer, q, k, v [..., heads,
        D]) -> [..., heads * D].
        """
        x = F.embedding(ids, self.embed, self.pad)
        cos, sin = self.cos[places], self.sin[places]
        cut = [self.heads, self.kv_heads, self.kv_heads]
        for number, w in enumerate(self.layers):
            qkv = F.linear(self.norm(x, w["in"]), w["qkv"], w.get("bias"))
            q, k, v = qkv.unflatten(-1, (-1, self.dim)).split(cut, -2)
            if "q" in w:
                q, k = self.norm(q, w["q"]), self.norm(k, w["k"])
            out = attend(number, self.turn(q, cos, sin), self.turn(k, cos, sin), v)
            x = x + F.linear(out, w["o"])
            gate, up = F.linear(self.norm(x, w["post"]), w["up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return self.norm(x, self.last)

    def causal(
        self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention within rows [B, T, heads, D]; padding is on the right, where no token looks."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        many = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=many)
        return out.transpose(1, 2).flatten(2)


@dataclass
class Answers:
    """prompts [B, P] padded on the right, prompt [B] their lengths; tokens [B, T], length [B],
    logprobs [B, T]: of what was sampled.
    """

    prompts: torch.Tensor
    prompt: torch.Tensor
    tokens: torch.Tensor
    length: torch.Tensor
    logprobs: torch.Tensor


class Sampler:
    """Writes answers at temperature 1.  Its memory is allocated once: keys [layers, B, heads, D,
    columns], values [layers, B, heads, columns, D]; a step's products read both as they lie.
    """

    def __init__(self, policy: Policy, eos: int, most: int) -> None:
        self.policy, self.eos, self.most = policy, eos, most
        self.keys = self.values = torch.empty(0)

    @torch.inference_mode()
    def write(self, coded: Sequence[Sequence[int]], size: int, r: torch.Generator) -> Answers:
        """`size` answers to each of the G prompts, those of a prompt side by side."""
        p, total, width = self.policy, len(coded) * size, max(map(len, coded))
        prompt = torch.tensor([len(c) for c in coded])
        prompts = torch.tensor([[*c, *[0] * (width - len(c))] for c in coded])
        shape = (len(p.layers), total, p.kv_heads, width + self.most, p.dim)
        if self.values.shape != shape:
            self.values = torch.zeros(shape)
            self.keys = torch.zeros_like(self.values.transpose(3, 4).contiguous())
        tokens = torch.zeros(total, self.most, dtype=torch.long)
        logprobs = torch.zeros(total, self.most)
        length = torch.zeros(total, dtype=torch.long)
        rows = torch.arange(total)  # of the answers still in the batch, and three facts of each
        live = torch.ones(total, dtype=torch.bool)
        seen = (torch.arange(width) < prompt[:, None]).repeat_interleave(size, 0)
        places = prompt.repeat_interleave(size)
        bias = torch.zeros(total, p.kv_heads, 1, width + self.most)
        bias[..., :width].masked_fill_(~seen[:, None, None], -torch.inf)

        def keep(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            spread = (x.transpose(1, 2).repeat_interleave(size, 0) for x in (k, v))
            self.keys[number, ..., :width] = next(spread).transpose(2, 3)
            self.values[number, :, :, :width] = next(spread)
            return p.causal(number, q, k, v)

        def look(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            n, end = len(q), width + step
            self.keys[number, :n, ..., end - 1] = k
            self.values[number, :n, :, end - 1] = v
            keys, values = (x[number, :n].flatten(0, 1) for x in (self.keys, self.values))
            q = q.reshape(n * p.kv_heads, -1, p.dim)  # the heads that share keys, side by side
            hide = bias[:n].flatten(0, 1)[..., :end]
            scores = torch.baddbmm(hide, q, keys[..., :end], alpha=p.dim**-0.5)
            return torch.bmm(scores.softmax(-1), values[:, :end]).view(n, -1)

        states = p.forward(prompts, torch.arange(width).expand_as(prompts), keep)
        state = states[torch.arange(len(coded)), prompt - 1].repeat_interleave(size, 0)
        for step in range(1, self.most + 1):
            logs = F.linear(state, p.head).log_softmax(-1)
            # the largest p / Exp(1) is a draw from p
            token = logs.exp().div_(torch.empty_like(logs).exponential_(generator=r)).argmax(-1)
            tokens[rows, step - 1] = token
            logprobs[rows, step - 1] = logs.gather(1, token[:, None])[:, 0]
            length[rows] += live
            live = live & (token != self.eos)
            left = int(live.sum())
            if left == 0 or step == self.most:
                break
            if left < SHRINK * len(rows):
                stay, end = live.nonzero()[:, 0], width + step - 1
                self.keys[:, :left, ..., :end] = self.keys[:, stay, ..., :end]
                self.values[:, :left, :, :end] = self.values[:, stay, :, :end]
                bias[:left, ..., :width] = bias[stay, ..., :width]
                rows, places, live, token = (x[stay] for x in (rows, places, live, token))
            state = p.forward(token, places, look)
            places = places + 1
        spread = prompt.repeat_interleave(size)
        return Answers(prompts.repeat_interleave(size, 0), spread, tokens, length, logprobs)


def gradient(policy: Policy, answers: Answers, advantage: torch.Tensor, rows: int) -> None:
    """Add the gradient of the clipped loss, summed over the answers' tokens, for advantage [B];
    `rows` answers of about equal length a micro-batch.
    """
    ends = answers.prompt + answers.length
    both = torch.cat([answers.prompts, answers.tokens], 1)
    column = torch.arange(both.shape[1])
    shift = answers.prompts.shape[1] - answers.prompt[:, None]  # an answer follows its prompt
    at = torch.where(column < answers.prompt[:, None], column, (column + shift)).clamp(
        max=both.shape[1] - 1
    )
    ids = both.gather(1, at)
    for part in ends.argsort().split(rows):
        width = int(ends[part].max()) - 1  # the last token is a target only
        first = answers.prompt[part, None] - 1
        place = column[None, :width]
        mask = (place >= first) & (place < ends[part, None] - 1)
        x = ids[part, :width]
        states = policy.forward(x, place.expand_as(x), policy.causal)[mask]
        targets = ids[part, 1 : width + 1][mask]
        old = answers.logprobs[part].gather(
            1, (place - first).clamp(0, answers.tokens.shape[1] - 1)
        )
        new = F.linear(states, policy.head).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        ratio = (new - old[mask]).exp()
        a = advantage[part, None].expand(mask.shape)[mask]
        (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum()).backward()


def update(policy: Policy, optimizer: torch.optim.Optimizer, tokens: int) -> None:
    """One step on the mean over all tokens of all ranks."""
    found = [w for w in policy.parameters() if w.grad is not None]
    grads = [w.grad for w in found if w.grad is not None]
    if dist.is_initialized():
        flat = torch.cat([*(g.flatten() for g in grads), torch.tensor([float(tokens)])])
        dist.all_reduce(flat)
        for g, x in zip(grads, flat[:-1].split([g.numel() for g in grads]), strict=True):
            g.copy_(x.view_as(g))
        tokens = int(flat[-1])
    torch._foreach_div_(grads, float(tokens))
    torch.nn.utils.clip_grad_norm_(found, 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def scores(words: Any, task: Any, prompts: list[Any], answers: Answers) -> torch.Tensor:
    """Rewards [B] of the answers to the prompts, in their order."""
    size = len(answers.length) // len(prompts)
    lists = zip(answers.tokens.tolist(), answers.length.tolist(), strict=True)
    texts = words.decode_batch([t[:n] for t, n in lists], skip_special_tokens=True)
    found = [task.reward(prompts[i // size], text) for i, text in enumerate(texts)]
    return torch.tensor([float(x["reward"] if isinstance(x, dict) else x) for x in found])


def codes(words: Any, prompts: list[Any]) -> list[list[int]]:
    return [words.encode(p.text, add_special_tokens=False).ids for p in prompts]


def train(
    path: str,
    task: Any,
    steps: int = 40,
    lr: float = 2e-4,
    most: int = 56,
    groups: int = 32,
    size: int = 8,
    seed: int = 0,
    rows: int = 64,
    heldout: int = 0,
) -> dict[str, Any]:
    """Train the model in `path` (with torchrun: the groups shared out among the ranks); seconds,
    tokens and mean reward of each step, and the accuracy on `heldout` prompts before and after.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    policy, tokenizer = Policy(path), AutoTokenizer.from_pretrained(path)
    words = tokenizer.backend_tokenizer
    parameters = policy.parameters()
    optimizer = torch.optim.AdamW(
        parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    sampler = Sampler(policy, tokenizer.eos_token_id, most)
    r = torch.Generator().manual_seed(seed * ranks + rank)

    def accuracy() -> float:
        prompts = [task.prompt("heldout", i, 0) for i in range(heldout)]
        answers = Sampler(policy, sampler.eos, most).write(codes(words, prompts), 1, r)
        return float(scores(words, task, prompts, answers).mean())

    accuracies = [accuracy()] if heldout else []
    ends, rewards, tokens = [time.monotonic()], [], []
    for step in range(steps):
        mine = range(step * groups + rank, (step + 1) * groups, ranks)
        prompts = [task.prompt("train", index, seed) for index in mine]
        answers = sampler.write(codes(words, prompts), size, r)
        reward = scores(words, task, prompts, answers)
        grouped = reward.view(-1, size)
        advantage = (grouped - grouped.mean(1, keepdim=True)) * size / (size - 1)
        gradient(policy, answers, advantage.flatten(), rows)
        tokens.append(int(answers.length.sum()))
        update(policy, optimizer, tokens[-1])
        rewards.append(float(reward.mean()))
        ends.append(time.monotonic())
    accuracies += [accuracy()] if heldout else []
    return {
        "heldout": accuracies,
        "reward": rewards,
        "tokens": [n * ranks for n in tokens],  # of this rank's share, times the ranks
        "step_seconds": [b - a for a, b in pairwise(ends)],
    }


def main() -> None:
    from asyncrl.config.tree import TaskConfig
    from asyncrl.tasks import get_task

    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model")
    p.add_argument("task")
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--rows", type=int, default=64, help="answers a micro-batch")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--heldout", type=int, default=0, help="prompts of each accuracy; 0: none")
    p.add_argument("--most", type=int, default=56, help="tokens of an answer")
    p.add_argument("--groups", type=int, default=32)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    task = get_task(TaskConfig(name=args.task))
    how = {"seed": args.seed, "rows": args.rows, "heldout": args.heldout}
    out = train(args.model, task, args.steps, args.lr, args.most, args.groups, **how)
    if not dist.is_initialized() or dist.get_rank() == 0:
        step = statistics.median(out["step_seconds"])
        print(json.dumps(out | {"median_step_ms": round(1e3 * step, 1)}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
