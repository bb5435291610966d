"""KL estimators on a model small enough to sum over every sequence: gradients in expectation,
without sampling error.

Two symbols, three steps; the next symbol's logits are a table over the prefix, so theta has 7 x 2
entries."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.algorithms import kl

STEPS, PREFIXES = 3, 7
SEQUENCES = list(itertools.product((0, 1), repeat=STEPS))


def place(prefix: tuple[int, ...]) -> int:
    """Row of a prefix in the table: 0, 1..2, 3..6."""
    return 2 ** len(prefix) - 1 + int("".join(map(str, prefix)) or "0", 2)


def table(seed: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(
        PREFIXES, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_(grad)


def token_logprobs(theta: torch.Tensor, s: tuple[int, ...]) -> torch.Tensor:
    logs = torch.log_softmax(theta, -1)
    return torch.stack([logs[place(s[:t]), s[t]] for t in range(STEPS)])


def step_kls(theta: torch.Tensor, ref: torch.Tensor, s: tuple[int, ...]) -> torch.Tensor:
    a, b = torch.log_softmax(theta, -1), torch.log_softmax(ref, -1)
    full = (a.exp() * (a - b)).sum(-1)
    return torch.stack([full[place(s[:t])] for t in range(STEPS)])


def expected(
    theta: torch.Tensor,
    mu: torch.Tensor,
    term: Callable[[tuple[int, ...], torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Gradient of sum_s mu(s) term(s, lp), mu held fixed."""
    total = torch.zeros((), dtype=torch.float64)
    for s in SEQUENCES:
        total = (
            total
            + token_logprobs(mu, s).sum().exp().detach() * term(s, token_logprobs(theta, s)).sum()
        )
    return torch.autograd.grad(total, theta)[0] if total.requires_grad else torch.zeros_like(theta)


def reverse_kl(theta: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Gradient of KL(theta || ref) over whole sequences."""
    total = torch.zeros((), dtype=torch.float64)
    for s in SEQUENCES:
        lp = token_logprobs(theta, s).sum()
        total = total + lp.exp() * (lp - token_logprobs(ref, s).sum())
    return torch.autograd.grad(total, theta)[0]


@pytest.fixture
def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return table(1, grad=True), table(2), table(3)


ONE = torch.zeros(STEPS, dtype=torch.long)


def test_k1_in_the_reward_is_the_exact_sequence_level_reverse_kl(
    tables: tuple[torch.Tensor, ...],
) -> None:
    theta, ref, _ = tables
    g = expected(theta, theta, lambda s, lp: lp * (lp.detach() - token_logprobs(ref, s)).sum())
    assert torch.allclose(g, reverse_kl(theta, ref), atol=1e-12)


def test_k2_in_the_loss_is_the_token_level_reverse_kl(tables: tuple[torch.Tensor, ...]) -> None:
    """States from theta, held fixed; at each the gradient of KL(theta || ref) over the next
    symbol."""
    theta, ref, _ = tables
    g = expected(theta, theta, lambda s, lp: kl.estimate("k2", lp - token_logprobs(ref, s)))
    exact = expected(theta, theta, lambda s, lp: step_kls(theta, ref, s))
    assert torch.allclose(g, exact, atol=1e-12)


def test_k3_in_the_loss_is_the_token_level_forward_kl(tables: tuple[torch.Tensor, ...]) -> None:
    theta, ref, _ = tables
    g = expected(theta, theta, lambda s, lp: kl.estimate("k3", lp - token_logprobs(ref, s)))
    a, b = torch.log_softmax(theta, -1), torch.log_softmax(ref, -1)
    forward = (b.exp() * (b - a)).sum(-1)
    exact = expected(
        theta, theta, lambda s, lp: torch.stack([forward[place(s[:t])] for t in range(STEPS)])
    )
    assert torch.allclose(g, exact, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_both_prefix_estimators_are_exact_for_any_behaviour_policy(seed: int) -> None:
    theta, ref, mu = table(seed, grad=True), table(seed + 50), table(seed + 100)
    exact = reverse_kl(theta, ref)
    g = expected(
        theta,
        mu,
        lambda s, lp: kl.compute_term(
            lp,
            token_logprobs(ref, s),
            token_logprobs(mu, s),
            ONE,
            estimator="k3",
            off_policy="prefix",
        ),
    )
    assert torch.allclose(g, exact, atol=1e-10)
    g = expected(
        theta,
        mu,
        lambda s, lp: kl.compute_term(
            lp,
            token_logprobs(ref, s),
            token_logprobs(mu, s),
            ONE,
            off_policy="prefix_full",
            step_kl=step_kls(theta, ref, s),
        ),
    )
    assert torch.allclose(g, exact, atol=1e-10)


def test_values_are_unbiased_on_policy(tables: tuple[torch.Tensor, ...]) -> None:
    theta, ref, _ = tables

    def average(policy: torch.Tensor, value: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Of a value of log theta / ref by token [T], over the policy's sequences."""
        logs = {s: (token_logprobs(theta, s), token_logprobs(ref, s)) for s in SEQUENCES}
        return sum(
            token_logprobs(policy, s).sum().exp() * value(a - b) for s, (a, b) in logs.items()
        )

    exact = average(theta, torch.sum)
    for f in (kl.estimate_k1, kl.estimate_k3):
        assert torch.allclose(average(theta, lambda x, f=f: f(x).sum()), exact, atol=1e-12)
    states = average(theta, lambda x: kl.estimate_forward_k3(x)[0])
    a, b = torch.log_softmax(theta[0], -1), torch.log_softmax(ref[0], -1)
    assert torch.allclose(states, (b.exp() * (b - a)).sum(), atol=1e-12)
    assert float(average(ref, lambda x: -x.sum())) > 0
