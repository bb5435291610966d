"""A language model small enough to sum over everything it can say.

V symbols, answers of exactly T of them: S = V^T answers, N = S T tokens, K = (V^T - 1) / (V - 1)
prefixes.  A policy is a table of logits [K, V], one row a prefix, in float64: every autoregressive
distribution over these answers is such a table.  Packed notation as in asyncrl.algorithms.  Tokens
of one answer stand in different rows, so the squared norm of an answer's gradient is the sum over
its tokens'."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from asyncrl.contract.errors import ConfigError

LARGEST = 400_000  # tokens N: a few seconds for each pass over them


class ResponseSpace:
    """All answers.  seq, place (row of the prefix) and symbol are int64 [N].  Raises ConfigError
    where there are too many answers.
    """

    def __init__(self, vocabulary: int, length: int) -> None:
        if vocabulary < 2 or length < 1 or vocabulary**length * length > LARGEST:
            raise ConfigError(
                f"--vocabulary {vocabulary} --length {length}: at least 2 and 1, and at most "
                f"{LARGEST:,} tokens over all answers"
            )
        self.vocabulary = vocabulary
        self.length = length
        self.answers = torch.tensor(list(itertools.product(range(vocabulary), repeat=length)))
        self.n = len(self.answers)
        self.prefixes = (vocabulary**length - 1) // (vocabulary - 1)
        place = []
        row = torch.zeros(self.n, dtype=torch.long)
        first = 0
        # row of a prefix: those of its length in the order of base-V numbers, after all shorter
        # ones
        for t in range(length):
            place.append(first + row)
            row = row * vocabulary + self.answers[:, t]
            first = first + vocabulary**t
        self.place, self.symbol = torch.stack(place, 1).reshape(-1), self.answers.reshape(-1)
        self.seq = torch.arange(self.n).repeat_interleave(length)

    # ---- policies --------------------------------------------------------------------------------

    def table(self, seed: int, spread: float = 1.0) -> torch.Tensor:
        """A random policy [K, V]: normal logits."""
        return spread * torch.randn(
            self.prefixes,
            self.vocabulary,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )

    def logprobs(self, theta: torch.Tensor) -> torch.Tensor:
        """Of every token of every answer: [N], with gradient if theta has one."""
        return torch.log_softmax(theta, -1)[self.place, self.symbol]

    def probability(self, theta: torch.Tensor) -> torch.Tensor:
        """Of every answer: [S]."""
        return self.logprobs(theta).reshape(self.n, -1).sum(1).exp()

    def step_kl(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Exact KL(p || q) over the next symbol at each token's state: [N], with gradient."""
        a = torch.log_softmax(p, -1)
        b = torch.log_softmax(q, -1)
        return (a.exp() * (a - b)).sum(-1)[self.place]

    def kl(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Exact KL(p || q) over whole answers, in nats an answer: a scalar with gradient."""
        lp = self.logprobs(p).reshape(self.n, -1).sum(1)
        lq = self.logprobs(q).reshape(self.n, -1).sum(1)
        return (lp.exp() * (lp - lq)).sum()

    def entropy(self, p: torch.Tensor) -> float:
        """Nats a token."""
        lp = self.logprobs(p).reshape(self.n, -1).sum(1)
        return float(-(lp.exp() * lp).sum() / self.length)

    def policy_at_distance(self, theta: torch.Tensor, kl: float, seed: int) -> torch.Tensor:
        """A policy mu = theta + a noise with KL(mu || theta) = kl nats a token, a found by
        halving.
        """
        if kl <= 0:
            return theta.clone()
        noise = self.table(seed)
        low = 0.0
        high = 1.0
        while float(self.kl(theta + high * noise, theta)) / self.length < kl:
            high *= 2
            if high > 1e6:
                raise ConfigError(
                    f"no policy of this size lies {kl:g} nats a token away; choose a smaller "
                    "distance"
                )
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if float(self.kl(theta + middle * noise, theta)) / self.length < kl
                else (low, middle)
            )
        return theta + high * noise

    def draw(self, mu: torch.Tensor, count: int, seed: int) -> torch.Tensor:
        """Answers drawn from mu: int64 [count] among S."""
        return torch.multinomial(
            self.probability(mu),
            count,
            replacement=True,
            generator=torch.Generator().manual_seed(seed),
        )

    # ---- gradients -------------------------------------------------------------------------------

    def gradient_rows(
        self,
        theta: torch.Tensor,
        coefficient: torch.Tensor,
        step: torch.Tensor | None = None,
        ref: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each token's part of its answer's gradient, on its own row of the table: [N, V].

        coefficient [N] of grad lp; step [N] of grad KL(theta || ref) at the token's state.
        """
        log_p = torch.log_softmax(theta, -1)
        one = torch.nn.functional.one_hot(self.symbol, self.vocabulary).to(theta.dtype)
        out = coefficient[:, None] * (one - log_p.exp()[self.place])
        if step is not None and ref is not None:
            gap = log_p - torch.log_softmax(ref, -1)
            slope = log_p.exp() * (gap - (log_p.exp() * gap).sum(-1, keepdim=True))
            out = out + step[:, None] * slope[self.place]
        return out

    def mean(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Gradient sum_s weight_s g_s, weight [S]: [K, V]."""
        return torch.zeros(self.prefixes, self.vocabulary, dtype=rows.dtype).index_add_(
            0, self.place, weight[self.seq, None] * rows
        )

    def moments(self, rows: torch.Tensor, probability: torch.Tensor) -> tuple[torch.Tensor, float]:
        """(expected gradient [K, V], trace of one answer's covariance), under the answers'
        probabilities [S].
        """
        mean = self.mean(rows, probability)
        second = float((probability[self.seq] * rows.square().sum(1)).sum())
        return mean, max(0.0, second - float(mean.square().sum()))


def coefficients(term: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> list[torch.Tensor]:
    """d sum(term) / d leaf for each leaf [N] (a loss term's coefficient of grad lp, and of grad
    KL_k); zeros where none flows.
    """
    own = [x.detach().clone().requires_grad_(True) for x in leaves]
    total = term(*own).sum()
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in own]
    return [
        torch.zeros_like(x) if g is None else g
        for g, x in zip(torch.autograd.grad(total, own, allow_unused=True), own, strict=True)
    ]


def exact_gradient(f: Callable[[torch.Tensor], torch.Tensor], theta: torch.Tensor) -> torch.Tensor:
    """Gradient [K, V] of a scalar function of the table."""
    leaf = theta.detach().clone().requires_grad_(True)
    return torch.autograd.grad(f(leaf), leaf)[0]


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """|got - exact| / |exact|."""
    return float((got - exact).norm() / exact.norm().clamp(min=1e-300))


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Between two gradients; 0 where one vanishes."""
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size > 1e-24 else 0.0
