"""KL estimators on sampled tokens.  x = lp - lp_ref [N].  For samples of pi_theta k1 and k3 are
unbiased VALUES; gradients differ.

Where the term stands decides its gradient in expectation, on policy: k1 in the reward is the exact
sequence-level reverse KL; k1 in the loss nothing; k2 in the loss the token-level reverse KL; k3 in
the loss the token-level forward KL; k3 in the reward is biased. Schulman, "Approximating KL
divergence" (2020); Tang and Munos 2025, arXiv 2506.09477."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrl.algorithms.ratios import (
    CLAMP,
    choose_function,
    difference,
    discounted_suffix,
    log_ratio,
    running_sum,
    unknown,
)


def k1(x: torch.Tensor) -> torch.Tensor:
    """x."""
    return x


def k2(x: torch.Tensor) -> torch.Tensor:
    """x^2 / 2: its gradient in the loss is that of the token-level reverse KL."""
    return x.square() / 2


def k3(x: torch.Tensor) -> torch.Tensor:
    """exp(-x) - 1 + x: its gradient in the loss is that of the token-level forward KL.  Below -20,
    where exp would overflow, constant.
    """
    x = x.clamp(min=-CLAMP)
    return torch.expm1(-x) + x


def low_var_kl(x: torch.Tensor) -> torch.Tensor:
    """k3 clamped to [-10, 10]: no gradient beyond."""
    return k3(x).clamp(-10, 10)


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": torch.abs,
    "low_var_kl": low_var_kl,
}


def estimate(name: str, x: torch.Tensor) -> torch.Tensor:
    """The estimator `name`; with `+`: its value with the gradient of k2 (straight-through).  Raises
    ConfigError for another name.
    """
    if (base := name.removesuffix("+")) not in ESTIMATORS:
        raise unknown(
            "kl.loss.estimator, kl.reward.estimator",
            name,
            [*ESTIMATORS, *(n + "+" for n in ESTIMATORS)],
        )
    value = ESTIMATORS[base](x)
    return value if base == name else k2(x) - k2(x).detach() + value.detach()


def forward_k3(x: torch.Tensor) -> torch.Tensor:
    """Estimate of the forward KL(ref || theta) from samples of theta: r log r - (r - 1) with r =
    exp(-x), x from -20; never negative.
    """
    x = x.clamp(min=-CLAMP)
    return -x * torch.exp(-x) - torch.expm1(-x)


def ratio(name: str, x: torch.Tensor, lp: torch.Tensor, behavior: torch.Tensor) -> torch.Tensor:
    """exp(lp - lp_behavior) times the estimator, gradient through the ratio too (DeepSeek-V3.2,
    arXiv 2512.02556).

    Right on the behaviour policy's states only: the states' own distribution is not corrected.
    """
    return log_ratio(lp, behavior).exp() * estimate(name, x)


def _straight_through(
    coefficient: torch.Tensor, lp: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Value `value`, gradient coefficient * grad lp."""
    return coefficient.detach() * difference(lp, lp.detach()) + value.detach()


def prefix_weights(
    lp: torch.Tensor, behavior: torch.Tensor, seq: torch.Tensor, truncate: float = torch.inf
) -> torch.Tensor:
    """W_{1:t} = prod_{u<=t} pi_theta / mu [N], detached; min(W, truncate).  The running sum is
    clamped, not each of its tokens.
    """
    log_w = difference(lp.detach(), behavior)
    return running_sum(log_w, seq).clamp(-CLAMP, CLAMP).exp().clamp(max=truncate)


def prefix(
    lp: torch.Tensor,
    ref: torch.Tensor,
    behavior: torch.Tensor,
    seq: torch.Tensor,
    *,
    discount: float = 1.0,
    truncate: float = torch.inf,
) -> torch.Tensor:
    """Per token [N], summing to L = sum_k W_{1:k} k3_k with nothing detached: the exact
    sequence-level gradient of the reverse KL for any mu with support.

    Its gradient is sum_t grad lp_t [W_{1:t} k1_t + sum_{k>t} discount^(k-t) W_{1:k} k3_k], written
    here as a straight-through; (discount, truncate) = (1, inf) is exact, discount 0 the token
    level.  Compare Tang and Munos 2025, arXiv 2506.09477."""
    x = difference(lp.detach(), ref)
    w = prefix_weights(lp, behavior, seq, truncate)
    value = w * k3(x)
    later = discounted_suffix(value, seq, discount) - value
    return _straight_through(w * k1(x) + later, lp, value)


def prefix_full(
    step_kl: torch.Tensor,
    lp: torch.Tensor,
    behavior: torch.Tensor,
    seq: torch.Tensor,
    *,
    discount: float = 1.0,
    truncate: float = torch.inf,
) -> torch.Tensor:
    """Per token [N], summing to L = sum_k W_{1:k-1} KL_k; step_kl [N]: the exact KL(theta || ref)
    over the vocabulary at each state, with gradient.  Exact like `prefix` with less variance (Tang
    and Munos 2025, arXiv 2506.09477)."""
    log_w = difference(lp.detach(), behavior)
    w = (running_sum(log_w, seq) - log_w).clamp(-CLAMP, CLAMP).exp().clamp(max=truncate)
    value = w * step_kl.detach()
    later = discounted_suffix(value, seq, discount) - value
    return w * (step_kl - step_kl.detach()) + _straight_through(later, lp, value)


@dataclass(frozen=True)
class KLInputs:
    """A term of the loss [N]: theta's, the reference's and mu's logprobs, the tokens' answers, the
    keys of [kl.loss], and the exact KL(theta || ref) of each step where a model gives it."""

    lp: torch.Tensor
    ref: torch.Tensor
    behavior: torch.Tensor
    seq: torch.Tensor
    estimator: str = "k3"
    discount: float = 1.0
    truncate: float = torch.inf
    step_kl: torch.Tensor | None = None

    @property
    def x(self) -> torch.Tensor:
        """lp - ref: what exponentiates it clamps it; k1, k2 and abs pull however far the policy
        has gone."""
        return difference(self.lp, self.ref)


def _on_policy(p: KLInputs) -> torch.Tensor:
    return estimate(p.estimator, p.x)


def _ratio(p: KLInputs) -> torch.Tensor:
    return ratio(p.estimator, p.x, p.lp, p.behavior)


def _prefix(p: KLInputs) -> torch.Tensor:
    return prefix(p.lp, p.ref, p.behavior, p.seq, discount=p.discount, truncate=p.truncate)


def _prefix_full(p: KLInputs) -> torch.Tensor:
    if p.step_kl is None:
        raise unknown(
            "kl.loss.off_policy",
            "prefix_full (needs the exact KL of each step over the vocabulary)",
            [name for name in OFF_POLICY if name != "prefix_full"],
        )
    return prefix_full(p.step_kl, p.lp, p.behavior, p.seq, discount=p.discount, truncate=p.truncate)


# kl.loss.off_policy -> the term per token [N], with gradient
OFF_POLICY: dict[str, Callable[[KLInputs], torch.Tensor]] = {
    "none": _on_policy,
    "ratio": _ratio,
    "prefix": _prefix,
    "prefix_full": _prefix_full,
}
# those that are a product over an answer's tokens in the loss
PREFIXES = ("prefix", "prefix_full")


def term(
    lp: torch.Tensor,
    ref: torch.Tensor,
    behavior: torch.Tensor,
    seq: torch.Tensor,
    *,
    estimator: str = "k3",
    off_policy: str = "none",
    discount: float = 1.0,
    truncate: float = torch.inf,
    step_kl: torch.Tensor | None = None,
) -> torch.Tensor:
    """The KL term of the loss per token [N], with gradient: any estimator, off-policy form of it or
    none.
    """
    pair = KLInputs(lp, ref, behavior, seq, estimator, discount, truncate=truncate, step_kl=step_kl)
    return choose_function("kl.loss.off_policy", OFF_POLICY, off_policy)(pair)


def adaptive(beta: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The next beta (Ziegler et al. 2019, arXiv 1909.08593)."""
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon)


@dataclass
class KLController:
    """beta over a run: `fixed`, or `adaptive` towards kl = target, both in nats an answer (as
    published).  horizon in samples.
    """

    beta: float
    kind: str = "fixed"
    target: float = 6.0
    horizon: int = 10000

    def update(self, kl: float, samples: int) -> float:
        """The beta of the next batch, after `samples` samples with mean `kl`; a kl that is not
        finite changes nothing.
        """
        if self.kind not in ("fixed", "adaptive"):
            raise unknown("kl.reward.controller", self.kind, ("fixed", "adaptive"))
        if self.kind == "adaptive" and abs(kl) < torch.inf:
            self.beta = adaptive(self.beta, kl, self.target, samples, self.horizon)
        return self.beta
