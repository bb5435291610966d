"""KL estimators on sampled tokens, x = lp - lp_ref [N].

For samples of pi_theta, k1 and k3 are unbiased values, but their gradients differ. On policy, the
place of the term decides its gradient in expectation:

- k1 in the reward: the exact sequence-level reverse KL.
- k1 in the loss: nothing.
- k2 in the loss: the token-level reverse KL.
- k3 in the loss: the token-level forward KL.
- k3 in the reward: biased.

Schulman, "Approximating KL divergence" (2020); Tang and Munos 2025, arXiv 2506.09477.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.ratios import (
    CLAMP,
    compute_log_ratio,
    compute_running_sum,
    subtract,
    sum_discounted_suffix,
)
from asyncrl.algorithms.settings import KLReward
from asyncrl.contract.errors import ConfigError


def estimate_k2(x: Tensor) -> Tensor:
    """Return x^2 / 2: its gradient in the loss is that of the token-level reverse KL."""
    return x.square() / 2


def estimate_k3(x: Tensor) -> Tensor:
    """Return exp(-x) - 1 + x: its gradient in the loss is that of the token-level forward KL.

    It is constant below -20, where exp would overflow.
    """
    x = x.clamp(min=-CLAMP)
    return torch.expm1(-x) + x


def compute_exact_kl(logs: Tensor, ref_logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(theta || ref) [n] over the vocabulary, and its gradient by the logits [n, V].

    Args:
        logs, ref_logs: [n, V], log-probabilities; -inf where a token is not in the support.
    """
    gap = torch.where(logs == -torch.inf, 0.0, logs - ref_logs)
    p = logs.exp()
    kl = (p * gap).sum(-1)
    return kl, p * (gap - kl[:, None])


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    # unbiased, with a gradient of mean 0 in the loss on policy
    "k1": lambda x: x,
    "k2": estimate_k2,
    "k3": estimate_k3,
    "abs": torch.abs,
    # never negative, and without gradient beyond 10
    "low_var_kl": lambda x: estimate_k3(x).clamp(max=10),
}


def estimate(name: str, x: Tensor) -> Tensor:
    """Apply the estimator `name` to x [N]. Raises ConfigError for an unknown name.

    With `+` it has the estimator's value and the gradient of k2 (straight-through).
    """
    if (base := name.removesuffix("+")) not in ESTIMATORS:
        raise ConfigError(
            f"kl.loss.estimator, kl.reward.estimator = {name}: choose one of "
            f"{', '.join([*ESTIMATORS, *(n + '+' for n in ESTIMATORS)])}"
        )
    value = ESTIMATORS[base](x)
    return value if base == name else estimate_k2(x) - estimate_k2(x).detach() + value.detach()


def estimate_forward_k3(x: Tensor) -> Tensor:
    """Estimate the forward KL(ref || theta) from samples of theta; never negative.

    r log r - (r - 1) with r = exp(-x), x clamped from below at -20.
    """
    x = x.clamp(min=-CLAMP)
    return -x * torch.exp(-x) - torch.expm1(-x)


def compute_prefix_weights(
    lp: Tensor, behavior: Tensor, seq: Tensor, truncate: float = torch.inf
) -> Tensor:
    """W_{1:t} = prod_{u<=t} pi_theta / mu [N], detached, at most `truncate`.

    The running sum is clamped, not each of its tokens.
    """
    log_w = subtract(lp.detach(), behavior)
    return compute_running_sum(log_w, seq).clamp(-CLAMP, CLAMP).exp().clamp(max=truncate)


@dataclass(frozen=True)
class KLInputs:
    """Inputs of the KL term of the loss.

    lp: [N], log pi_theta.
    ref: [N], log pi_ref.
    behavior: [N], log mu.
    seq: int64 [N].
    estimator, discount, truncate: the keys of [kl.loss].
    step_kl: [N], the exact KL(theta || ref) over the vocabulary at each state, with gradient, where
        a model gives it.
    """

    lp: Tensor
    ref: Tensor
    behavior: Tensor
    seq: Tensor
    estimator: str = "k3"
    discount: float = 1.0
    truncate: float = torch.inf
    step_kl: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """lp - ref [N], unclamped.

        Estimators that exponentiate it clamp it. k1, k2 and abs pull however far the policy has
        moved.
        """
        return subtract(self.lp, self.ref)


def _add_later_terms(p: KLInputs, value: Tensor, coefficient: Tensor | float) -> Tensor:
    """Return `value` with the gradient (coefficient + sum of the later values) * grad lp.

    value, coefficient: [N], detached.
    """
    later_terms = sum_discounted_suffix(value, p.seq, p.discount) - value
    return (coefficient + later_terms) * subtract(p.lp, p.lp.detach()) + value


def _apply_prefix(p: KLInputs) -> Tensor:
    """W_{1:k} k3_k per token [N]: the exact sequence-level gradient of the reverse KL.

    It sums to L = sum_k W_{1:k} k3_k with nothing detached, for any mu with support. Its gradient
    is sum_t grad lp_t [W_{1:t} k1_t + sum_{k>t} discount^(k-t) W_{1:k} k3_k], written here as a
    straight-through. (discount, truncate) = (1, inf) is exact, discount 0 the token level. Compare
    Tang and Munos 2025, arXiv 2506.09477.
    """
    x = p.x.detach()
    w = compute_prefix_weights(p.lp, p.behavior, p.seq, p.truncate)
    return _add_later_terms(p, w * estimate_k3(x), w * x)


def _apply_full_prefix(p: KLInputs) -> Tensor:
    """W_{1:k-1} KL_k per token [N]: exact like `_apply_prefix`, with less variance.

    Tang and Munos 2025, arXiv 2506.09477.
    """
    if p.step_kl is None:
        raise ConfigError(
            "kl.loss.off_policy = prefix_full (needs the exact KL of each step over the "
            "vocabulary): choose one of none, ratio, prefix"
        )
    log_w = subtract(p.lp.detach(), p.behavior)
    w = (compute_running_sum(log_w, p.seq) - log_w).clamp(-CLAMP, CLAMP).exp().clamp(max=p.truncate)
    step_kl = p.step_kl.detach()
    return w * (p.step_kl - step_kl) + _add_later_terms(p, w * step_kl, 0.0)


# kl.loss.off_policy -> the term per token [N], with gradient
OFF_POLICY: dict[str, Callable[[KLInputs], Tensor]] = {
    "none": lambda p: estimate(p.estimator, p.x),
    # exp(lp - lp_behavior) times the estimator, with gradient through the ratio too (DeepSeek-V3.2,
    # arXiv 2512.02556). It is exact only on the states of the behavior policy: the distribution of
    # states is not corrected
    "ratio": lambda p: compute_log_ratio(p.lp, p.behavior).exp() * estimate(p.estimator, p.x),
    "prefix": _apply_prefix,
    "prefix_full": _apply_full_prefix,
}
# forms whose loss has a product over a sample's tokens
PREFIX_FORMS = ("prefix", "prefix_full")


def compute_term(
    lp: Tensor, ref: Tensor, behavior: Tensor, seq: Tensor, *, off_policy: str = "none", **more: Any
) -> Tensor:
    """Return the KL term of the loss per token [N], with gradient.

    more: other fields of `KLInputs`.
    """
    inputs = KLInputs(lp, ref, behavior, seq, **more)
    return OFF_POLICY[off_policy](inputs)


def adapt_beta(beta: float, kl: float, samples: int, terms: KLReward) -> float:
    """Return the beta of the next batch, after `samples` samples with mean `kl`.

    It is fixed, or adapted to kl = target (Ziegler et al. 2019, arXiv 1909.08593). A kl that is not
    finite changes nothing. kl and target are in nats per sample (as published), horizon in samples.
    """
    if terms.controller == "adaptive" and abs(kl) < torch.inf:
        error = min(max(kl / terms.target - 1, -0.2), 0.2)
        beta *= 1 + error * samples / terms.horizon
    return beta
