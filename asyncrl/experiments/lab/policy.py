"""A language model small enough to sum over all its responses.

There are V symbols, and responses have exactly T of them: S = V^T responses, N = S T tokens, K =
(V^T - 1) / (V - 1) prefixes. A policy is a table of logits [K, V] in float64, one row a prefix.
Every autoregressive distribution over these responses is such a table.

Tensors are packed as in asyncrl.algorithms. Tokens of one response have different rows, so the
squared norm of a response's gradient is the sum over its tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor, log_softmax

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers

LARGEST = 400_000  # tokens N: a few seconds for each pass over them


class ResponseSpace:
    """All responses.

    seq: response of each token, int64 [N].
    place: row of each token's prefix, int64 [N].
    symbol: each token's symbol, int64 [N].

    Raises ConfigError if there are too many responses.
    """

    def __init__(self, vocabulary: int, length: int) -> None:
        if vocabulary < 2 or length < 1 or vocabulary**length * length > LARGEST:
            raise ConfigError(
                f"--vocabulary {vocabulary} --length {length}: at least 2 and 1, and at most "
                f"{LARGEST:,} tokens over all responses"
            )
        self.vocabulary = vocabulary
        self.length = length
        self.n: int = vocabulary**length
        self.prefixes = (self.n - 1) // (vocabulary - 1)
        number = torch.arange(self.n)  # a response, whose symbols are its digits in base V
        sizes = [vocabulary**t for t in range(length + 1)]
        self.answers = torch.stack(
            [number // size % vocabulary for size in reversed(sizes[:-1])], 1
        )
        # prefixes of one length are ordered as base-V numbers, after all shorter ones
        rows = [(size - 1) // (vocabulary - 1) + number // (self.n // size) for size in sizes[:-1]]
        self.place, self.symbol = torch.stack(rows, 1).reshape(-1), self.answers.reshape(-1)
        self.seq = torch.arange(self.n).repeat_interleave(length)

    # ---- policies --------------------------------------------------------------------------------

    def draw_table(self, seed: int) -> Tensor:
        """Return a random policy [K, V] with normal logits."""
        return torch.randn(
            self.prefixes,
            self.vocabulary,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )

    def compute_logprobs(self, theta: Tensor) -> Tensor:
        """Return the log-probability of every token: [N], with gradient if theta has one."""
        return log_softmax(theta, -1)[self.place, self.symbol]

    def compute_probability(self, theta: Tensor) -> Tensor:
        """Return the probability of every response: [S]."""
        return self._sum_logprobs(theta).exp()

    def _sum_logprobs(self, theta: Tensor) -> Tensor:
        return self.compute_logprobs(theta).reshape(self.n, -1).sum(1)

    def compute_step_kl(self, p: Tensor, q: Tensor) -> Tensor:
        """Return exact KL(p || q) over the next symbol at each token's state.

        The result is [N], with gradient.
        """
        a = log_softmax(p, -1)
        return (a.exp() * (a - log_softmax(q, -1))).sum(-1)[self.place]

    def compute_kl(self, p: Tensor, q: Tensor) -> Tensor:
        """Return exact KL(p || q) over whole responses, in nats a response.

        The result is a scalar with gradient.
        """
        lp = self._sum_logprobs(p)
        return (lp.exp() * (lp - self._sum_logprobs(q))).sum()

    def find_policy(self, theta: Tensor, kl: float, seed: int) -> Tensor:
        """Return a policy mu = theta + a noise with KL(mu || theta) = kl nats a token.

        The factor a is found by bisection.
        """
        if kl <= 0:
            return theta.clone()
        noise = self.draw_table(seed)
        low = 0.0
        high = 1.0
        while float(self.compute_kl(theta + high * noise, theta)) / self.length < kl:
            high *= 2
            if high > 1e6:
                raise ConfigError(
                    f"no policy of this size lies {kl:g} nats a token away; choose a smaller "
                    "distance"
                )
        for _ in range(60):
            middle = (low + high) / 2
            if float(self.compute_kl(theta + middle * noise, theta)) / self.length < kl:
                low = middle
            else:
                high = middle
        return theta + high * noise

    def sample(self, mu: Tensor, count: int, seed: int) -> Tensor:
        """Sample responses from mu: int64 [count], indices into S."""
        return torch.multinomial(
            self.compute_probability(mu),
            count,
            replacement=True,
            generator=torch.Generator().manual_seed(seed),
        )

    # ---- gradients -------------------------------------------------------------------------------

    def compute_gradient_rows(
        self,
        theta: Tensor,
        coefficient: Tensor,
        step: Tensor | None = None,
        *,
        ref: Tensor | None = None,
    ) -> Tensor:
        """Return each token's part of its response's gradient, on its row of the table.

        The result is [N, V].

        coefficient: of grad lp, [N].
        step: of grad KL(theta || ref) at the token's state, [N].
        """
        log_p = log_softmax(theta, -1)
        one_hot = torch.nn.functional.one_hot(self.symbol, self.vocabulary).to(theta.dtype)
        rows = coefficient[:, None] * (one_hot - log_p.exp()[self.place])
        if step is not None and ref is not None:
            gap = log_p - log_softmax(ref, -1)
            slope = log_p.exp() * (gap - (log_p.exp() * gap).sum(-1, keepdim=True))
            rows = rows + step[:, None] * slope[self.place]
        return rows

    def average(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient sum_s weight_s g_s, [K, V], for weights [S]."""
        return torch.zeros(self.prefixes, self.vocabulary, dtype=rows.dtype).index_add_(
            0, self.place, weight[self.seq, None] * rows
        )

    def judge(self, rows: Tensor, probability: Tensor, exact: Tensor) -> Numbers:
        """Return bias and variance of an estimator of the gradient `exact`.

        - relative_bias: |E g - exact| / |exact|
        - cosine: of E g and exact
        - variance: trace of the covariance of one response's gradient
        - relative_variance: the same over |exact|^2

        probability: of the responses, [S].
        """
        mean = self.average(rows, probability)
        square = float((probability[self.seq] * rows.square().sum(1)).sum())
        variance = max(0.0, square - float(mean.square().sum()))
        return {
            "relative_bias": compute_relative_error(mean, exact),
            "cosine": compute_cosine(mean, exact),
            "variance": variance,
            "relative_variance": variance / float(exact.square().sum()),
        }


def differentiate(term: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    """Return d sum(term) / d leaf for each leaf; zeros if no gradient flows.

    For leaves lp and KL_k [N] these are a loss term's coefficients of grad lp and of grad KL_k.
    """
    copies = [x.detach().clone().requires_grad_(True) for x in leaves]
    total = term(*copies).sum()
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in copies]
    return list(torch.autograd.grad(total, copies, materialize_grads=True))


def compute_relative_error(estimate: Tensor, exact: Tensor) -> float:
    """Return |estimate - exact| / |exact|."""
    return float((estimate - exact).norm() / exact.norm().clamp(min=1e-300))


def compute_cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of two gradients; 0 if one vanishes."""
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size > 1e-24 else 0.0
