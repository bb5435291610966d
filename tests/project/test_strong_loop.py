"""benchmarks/lib/strong_loop.py trains by the mathematics of plain_loop.py, transformers' own: a
rival that is fast because it leaves something out would prove nothing."""

from pathlib import Path
from typing import Any

import plain_loop
import pytest
import torch
from lib import strong_loop
from transformers import AutoModelForCausalLM

from asyncrl.config.tree import TaskConfig
from asyncrl.models.policy import build_model
from asyncrl.tasks import get_task

EOS, MOST, SIZE = 1, 14, 4
PROMPTS = [[3, 4, 5, 6], [7, 3], [5, 5, 8, 9, 3], [4]]
FAMILIES = [("qwen3", 2, True), ("llama", 4, False), ("qwen2", 2, True)]


def written(path: Path, family: str, kv: int, tied: bool) -> tuple[Any, Any, strong_loop.Answers]:
    """(the strong loop's policy, transformers' model, answers of the policy)."""
    build_model(path, "abcdefgh", hidden=32, family=family, kv_heads=kv, tied=tied, seed=3)
    policy = strong_loop.Policy(str(path))
    sampler = strong_loop.Sampler(policy, EOS, MOST)
    sampler.write(PROMPTS, SIZE, torch.Generator().manual_seed(9))  # what is left in its memory
    answers = sampler.write(PROMPTS, SIZE, torch.Generator().manual_seed(0))
    return policy, AutoModelForCausalLM.from_pretrained(path), answers


def as_the_plain_loop(
    answers: strong_loop.Answers,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [B, P+T], places [B, P+T], mask [B, T] as plain_loop has them: prompts padded on the
    left."""
    width = answers.prompts.shape[1]
    ids, place = [], []
    for prompt, n, tokens in zip(answers.prompts, answers.prompt, answers.tokens, strict=True):
        gap = [0] * (width - int(n))
        ids.append([*gap, *prompt[:n].tolist(), *tokens.tolist()])
        place.append([*gap, *range(int(n) + MOST)])
    mask = torch.arange(MOST) < answers.length[:, None]
    return torch.tensor(ids), torch.tensor(place), mask


@pytest.mark.parametrize("family,kv,tied", FAMILIES)
def test_what_it_says_it_sampled_from_is_what_transformers_says(
    tmp_path: Path, family: str, kv: int, tied: bool
) -> None:
    _, hf, answers = written(tmp_path, family, kv, tied)
    ids, place, mask = as_the_plain_loop(answers)
    with torch.no_grad():
        expected = plain_loop.logprobs(hf, ids, place, mask)
    torch.testing.assert_close(answers.logprobs[mask], expected[mask], atol=1e-5, rtol=1e-5)


def test_answers_end_where_they_should_and_rows_differ(tmp_path: Path) -> None:
    _, _, answers = written(tmp_path, "qwen3", 2, True)
    lengths = answers.length.tolist()
    for tokens, n in zip(answers.tokens.tolist(), lengths, strict=True):
        assert 1 <= n <= MOST and EOS not in tokens[: n - 1]
        assert tokens[n - 1] == EOS or n == MOST
    assert min(lengths) < 4 < MOST == max(lengths)  # so rows have left, and others gone on
    of_one_prompt = {
        tuple(t[:n]) for t, n in zip(answers.tokens[:SIZE].tolist(), lengths[:SIZE], strict=True)
    }
    assert len(of_one_prompt) > 1


def test_tokens_are_drawn_from_the_distribution(tmp_path: Path) -> None:
    build_model(tmp_path, "abcdefgh", hidden=32, seed=3)
    policy = strong_loop.Policy(str(tmp_path))
    with torch.no_grad():
        policy.last.mul_(6)  # far from uniform
    n = 20_000
    answers = strong_loop.Sampler(policy, EOS, 1).write(
        [[3, 4]], n, torch.Generator().manual_seed(0)
    )
    p = torch.zeros(11).scatter_(0, answers.tokens[:, 0], answers.logprobs[:, 0].exp())
    share = answers.tokens[:, 0].bincount(minlength=11) / n
    assert float(p.max()) > 0.25
    # five standard errors
    assert ((share - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-9).all()


def fused(hf: Any, name: str) -> list[torch.Tensor]:
    """The gradients in transformers' model of one entry of the strong loop's layers, by layer."""
    parts = {
        "qkv": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        "bias": ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"],
        "up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "in": ["input_layernorm.weight"],
        "o": ["self_attn.o_proj.weight"],
        "post": ["post_attention_layernorm.weight"],
        "down": ["mlp.down_proj.weight"],
        "q": ["self_attn.q_norm.weight"],
        "k": ["self_attn.k_norm.weight"],
    }[name]
    return [torch.cat([x.get_parameter(part).grad for part in parts]) for x in hf.model.layers]


@pytest.mark.parametrize("family,kv,tied", FAMILIES)
def test_its_gradient_is_the_plain_loop_s(tmp_path: Path, family: str, kv: int, tied: bool) -> None:
    policy, hf, answers = written(tmp_path, family, kv, tied)
    advantage = torch.randn(len(answers.length), generator=torch.Generator().manual_seed(1))
    ids, place, mask = as_the_plain_loop(answers)
    new = plain_loop.logprobs(hf, ids, place, mask)
    ratio = (new - new.detach()).exp()
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
    (-(gain * mask).sum() / mask.sum()).backward()

    strong_loop.gradient(policy, answers, advantage, rows=5)
    tokens = int(answers.length.sum())
    pairs = [(policy.embed.grad, hf.model.embed_tokens.weight.grad)]
    pairs += [(policy.last.grad, hf.model.norm.weight.grad)]
    pairs += [] if tied else [(policy.head.grad, hf.lm_head.weight.grad)]
    for name in policy.layers[0]:
        pairs += zip([w[name].grad for w in policy.layers], fused(hf, name), strict=True)
    assert len(pairs) == len(policy.parameters())
    assert sum(w.numel() for w in policy.parameters()) == sum(w.numel() for w in hf.parameters())
    ours, theirs = (torch.cat([x[i].flatten() for x in pairs]) for i in (0, 1))
    assert float((ours / tokens - theirs).norm() / theirs.norm()) < 1e-5


def test_a_step_is_the_plain_loop_s_optimizer_step(tmp_path: Path) -> None:
    """Clipping to norm 1 and AdamW, on the mean over tokens."""
    policy, hf, answers = written(tmp_path, "qwen3", 2, True)
    advantage = 50 * torch.randn(len(answers.length), generator=torch.Generator().manual_seed(1))
    ids, place, mask = as_the_plain_loop(answers)
    how: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.0}
    simple = torch.optim.AdamW(hf.parameters(), **how)
    fast = torch.optim.AdamW(policy.parameters(), **how, fused=True)
    new = plain_loop.logprobs(hf, ids, place, mask)
    (-((new - new.detach()).exp() * advantage[:, None] * mask).sum() / mask.sum()).backward()
    assert torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0) > 1.5  # it is clipped
    simple.step()
    strong_loop.gradient(policy, answers, advantage, rows=64)
    strong_loop.update(policy, fast, int(answers.length.sum()))
    # Adam's first step has the size of lr whatever the gradient: so the moments are compared too
    moment = [
        fast.state[policy.embed]["exp_avg"],
        simple.state[hf.model.embed_tokens.weight]["exp_avg"],
    ]
    torch.testing.assert_close(moment[0], moment[1], atol=1e-7, rtol=1e-3)
    torch.testing.assert_close(policy.embed, hf.model.embed_tokens.weight, atol=1e-4, rtol=1e-3)
    assert not policy.embed.grad.any()  # the next step begins at nothing


def test_it_learns_and_says_what_each_step_took(small_model: Path) -> None:
    out = strong_loop.train(
        str(small_model), get_task(TaskConfig(name="sort")), 3, most=12, groups=4
    )
    assert [len(out[k]) for k in ("reward", "tokens", "step_seconds")] == [3, 3, 3]
    assert all(0 < n <= 4 * 8 * 12 for n in out["tokens"]) and min(out["step_seconds"]) > 0
