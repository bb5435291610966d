"""Advantages from rewards.

Args of most functions: rewards float [B] and groups int64 [B], where the samples of one prompt
share a number. They return [B]. The token-level functions (reinforce_pp, gae, k_step, process_grpo,
otb) take and return packed tensors [N].

BY_ANSWER and BY_TOKEN, at the end, map config names to functions. To add an advantage, write a
function of (ResponseRewards, its struct of `settings`) or (TokenRewards, its struct) and add its
line there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.algorithms import settings
from asyncrl.algorithms.ratios import (
    PaddedRows,
    choose_function,
    discounted_suffix,
    running_sum,
    seq_max,
    seq_sum,
)
from asyncrl.contract.errors import ConfigError

# advantages that compare the samples of one prompt, and need at least two
BY_GROUP = (
    "rloo",
    "grpo",
    "dr_grpo",
    "opo",
    "gpg",
    "oapl",
    "asymre",
    "opob",
    "maxrl",
    "pass_at_k",
    "gdpo",
    "otb",
)
# numbers that differ by less than this share of the larger one count as equal: float32 rounding of
# equal rewards leaves such differences
EQUAL = 1e-6


def _sum(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the sum of x over each sample's group, [B]."""
    return seq_sum(x, groups, int(groups.max()) + 1)[groups]


def _counts(groups: torch.Tensor) -> torch.Tensor:
    return torch.bincount(groups)[groups]


def group_mean(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the mean of x over each sample's group, [B]."""
    return _sum(x, groups) / _counts(groups)


def zero_variance(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return bool [B]: samples of zero-variance groups, which carry no learning signal.

    Rewards are equal to within EQUAL of the largest.
    """
    every = torch.ones_like(groups, dtype=torch.bool)
    n = int(groups.max()) + 1
    most = seq_max(rewards, every, groups, n)
    least = -seq_max(-rewards, every, groups, n)
    return (most - least <= EQUAL * most.abs())[groups]


def centred(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return r_i minus its group's mean; exactly 0 in zero-variance groups.

    In floating point the mean of equal rewards is often not the reward itself (0.7 three times). A
    standard deviation as small, or Adam, would scale the remainder up to full size.
    """
    return torch.where(zero_variance(rewards, groups), 0.0, rewards - group_mean(rewards, groups))


def _less(rewards: torch.Tensor, baseline: torch.Tensor) -> torch.Tensor:
    """Return r - b, exactly 0 where the two are equal (to EQUAL)."""
    return torch.where((rewards - baseline).abs() <= EQUAL * rewards.abs(), 0.0, rewards - baseline)


def rloo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r_i minus the mean of the other G-1 (Ahmadian et al. 2024, arXiv 2402.14740).

    Raises ConfigError for a group of one.
    """
    n = _counts(groups)
    if int(n.min()) < 2:
        raise ConfigError(
            "advantage.name = rloo needs at least two samples of each prompt: raise "
            "learner.group_size"
        )
    return centred(rewards, groups) * n / (n - 1)


def grpo(
    rewards: torch.Tensor, groups: torch.Tensor, *, ddof: int = 1, eps: float = 1e-4
) -> torch.Tensor:
    """(r_i - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300).

    It is 0 in zero-variance groups, also with eps = 0. Raises ConfigError for ddof = 1 and a group
    of one.
    """
    n = _counts(groups)
    if int(n.min()) <= ddof:
        raise ConfigError(
            f"advantage.name = grpo with ddof = {ddof} needs more than {ddof} samples of each "
            "prompt: raise learner.group_size"
        )
    apart = centred(rewards, groups)
    var = group_mean(apart.square(), groups) * n / (n - ddof)
    return torch.where(apart == 0, 0.0, apart / (var.sqrt() + eps))


def batch_grpo(
    rewards: torch.Tensor, groups: torch.Tensor, *, ddof: int = 1, eps: float = 1e-4
) -> torch.Tensor:
    """(r_i - group's mean) / (std of the whole batch's rewards + eps).

    Groups with little variance are not scaled up (Liu et al. 2025, "Tricks or traps", arXiv
    2508.08221).
    """
    if len(rewards) <= ddof:
        raise ConfigError(
            f"advantage.name = grpo with ddof = {ddof} needs more than {ddof} samples in a batch"
        )
    return centred(rewards, groups) / (rewards.std(correction=ddof) + eps)


def maxrl(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r_i - mean) / mean, 0 where the group's mean is not above 0 (MaxRL, arXiv 2602.02710).

    For rewards of 0 and 1 it is the gradient of the log of the pass rate, to the order that the
    group size allows.
    """
    mean = group_mean(rewards, groups)
    return torch.where(mean > 0, centred(rewards, groups) / mean.clamp(min=1e-30), 0.0)


def pass_at_k(rewards: torch.Tensor, groups: torch.Tensor, *, k: int = 0) -> torch.Tensor:
    """The contribution of each sample to the best of k, never below 0.

    It is the mean, over all choices of k - 1 others of its group, of max(r_i, theirs) -
    max(theirs): the `loo - 1` estimator of PKPO (arXiv 2505.15201), times the group's size over k.
    k = 0 takes the whole group, where only a single best sample gets anything: its distance to the
    second.

    Raises ConfigError for a group of fewer than k.
    """
    added = torch.zeros_like(rewards)
    for group in sorted(set(groups.tolist())):
        inside = groups == group
        added[inside] = _added(rewards[inside], k)
    return added


def _added(rewards: torch.Tensor, k: int) -> torch.Tensor:
    """Return `pass_at_k` of one group [G].

    Sorted upwards, the best of k - 1 sampled from the samples below position i is at position j
    with probability C(j, k - 2) / C(G - 1, k - 1). Samples above i add nothing.
    """
    count = len(rewards)
    many = k or count
    if many > count or many < 2:
        raise ConfigError(
            f"advantage.k: pass_at_k of {many} needs 2 or more, and groups of as many samples, not "
            f"{count}: raise learner.group_size"
        )
    order = rewards.argsort()
    ranked = rewards[order].double()
    share = torch.tensor(
        [math.comb(j, many - 2) / math.comb(count - 1, many - 1) for j in range(count)],
        dtype=torch.float64,
        device=rewards.device,
    )
    # sum over j < i of share_j (r_i - r_j)
    share_below = share.cumsum(0) - share
    lower = (share * ranked).cumsum(0) - share * ranked
    added = torch.empty_like(rewards)
    added[order] = (share_below * ranked - lower).to(rewards.dtype)
    return added


def dr_grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r_i - mean, without division (Liu et al. 2025, arXiv 2503.20783)."""
    return centred(rewards, groups)


def reinforce(rewards: torch.Tensor, baseline: float) -> torch.Tensor:
    """r - b (Williams 1992)."""
    return _less(rewards, torch.full_like(rewards, baseline))


def opo(rewards: torch.Tensor, groups: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """r_i minus the length-weighted mean of the group's rewards.

    Hao et al. 2025, arXiv 2505.23585.

    Args:
        rewards: [B].
        groups: int64 [B].
        lengths: [B], in tokens.
    """
    t = lengths.to(rewards.dtype)
    apart = rewards - _sum(t * rewards, groups) / _sum(t, groups).clamp(min=1)
    return torch.where(zero_variance(rewards, groups), 0.0, apart)


def optimal_baseline(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    weights: torch.Tensor,
    squared_norms: torch.Tensor,
) -> torch.Tensor:
    """Return the variance-optimal constant b of each sample's group [B].

    b minimizes the variance of sum W (R - b) grad log pi(y): sum W^2 g^2 R / sum W^2 g^2 (OPOB of
    VCPO, arXiv 2602.17616). The sample's own reward is included, which biases it by the order of
    1/G.

    Args:
        rewards: [B].
        groups: int64 [B].
        weights: [B], W = pi_theta / mu of the whole sample, not truncated.
        squared_norms: [B], g^2 = |grad log pi_theta(y)|^2.
    """
    share = weights.double().square() * squared_norms.double()
    whole = _sum(share, groups)
    b = _sum(share * rewards, groups) / whole.clamp(min=1e-300)
    return torch.where(whole > 0, b, group_mean(rewards.double(), groups)).to(rewards.dtype)


def opob(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    weights: torch.Tensor,
    squared_norms: torch.Tensor,
) -> torch.Tensor:
    """(r - `optimal_baseline`) / (std of the group, ddof 0); 0 in zero-variance groups."""
    apart = rewards - optimal_baseline(rewards, groups, weights, squared_norms)
    std = group_mean(centred(rewards, groups).square(), groups).sqrt()
    return torch.where(zero_variance(rewards, groups), 0.0, apart / std.clamp(min=1e-8))


def gdpo(
    parts: torch.Tensor,
    groups: torch.Tensor,
    weights: torch.Tensor,
    *,
    ddof: int = 1,
    eps: float = 1e-4,
) -> torch.Tensor:
    """`grpo` of each named part of the reward, summed with weights, then whitened over the batch.

    No part is dominated by the variance of another (GDPO, arXiv 2601.05242).

    Args:
        parts: [B, P].
        groups: int64 [B].
        weights: [P].
    """
    by_part = [grpo(part, groups, ddof=ddof, eps=eps) for part in parts.unbind(1)]
    return whiten((torch.stack(by_part, 1) * weights).sum(1))


def otb(
    returns: torch.Tensor,
    energy: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    groups: torch.Tensor,
) -> torch.Tensor:
    """G_t - B_t [N], with a baseline for each position t of a group (OTB, arXiv 2602.07078).

    B_t = sum G_t E_t / sum E_t over the samples that have reached t, where E_t is the energy of a
    sample's tokens up to and including t. Positions are counted in tokens of the mask. Where only
    one sample of a group goes on, its baseline is its own return and the advantage is 0.

    Args:
        returns: [N].
        energy: [N].
        mask: bool [N].
        seq: int64 [N].
        groups: int64 [B].
    """
    if not bool(mask.any()):
        return torch.zeros_like(returns)
    spent = running_sum(torch.where(mask, energy, 0.0), seq)
    place = running_sum(mask.long(), seq) - 1
    slot = groups[seq] * (int(place.max()) + 1) + place
    n = int(slot.max()) + 1
    own = torch.where(mask, returns, 0.0)
    total, share = (seq_sum(torch.where(mask, x, 0.0), slot, n)[slot] for x in (own * spent, spent))
    baseline = total / share.clamp(min=1e-8)
    apart = own - baseline
    return torch.where(mask & (apart.abs() > EQUAL * own.abs()), apart, 0.0)


def remax(rewards: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """r_i minus the reward of a greedy completion of the same prompt.

    Li et al. 2023, arXiv 2310.10505.

    Args:
        rewards: [B].
        greedy: [B].
    """
    return _less(rewards, greedy)


def gpg(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r_i - mean) B / B', B' the number of samples outside zero-variance groups.

    GPG, Chu et al. 2025, arXiv 2504.02546.
    """
    live = (~zero_variance(rewards, groups)).sum().clamp(min=1)
    return dr_grpo(rewards, groups) * len(rewards) / live


def soft_value(rewards: torch.Tensor, groups: torch.Tensor, beta: float) -> torch.Tensor:
    """Return beta log mean e^(r / beta) over each sample's group [B].

    beta = 0 gives the largest reward, beta = inf the mean.
    """
    if beta == math.inf:
        return group_mean(rewards, groups)
    every = torch.ones_like(groups, dtype=torch.bool)
    most = seq_max(rewards, every, groups, int(groups.max()) + 1)[groups]
    if beta == 0:
        return most
    return most + beta * group_mean(((rewards - most) / beta).exp(), groups).log()


def oapl(rewards: torch.Tensor, groups: torch.Tensor, *, beta: float) -> torch.Tensor:
    """A* = r - V, V the group's `soft_value` (A*-PO, arXiv 2505.20686; OAPL, arXiv 2602.19362).

    beta = inf is `dr_grpo`.
    """
    apart = rewards - soft_value(rewards, groups, beta)
    return torch.where(zero_variance(rewards, groups), 0.0, apart)


def asymre(rewards: torch.Tensor, groups: torch.Tensor, *, shift: float) -> torch.Tensor:
    """r - (group mean + shift) (AsymRE, arXiv 2506.20520).

    With shift below 0, rewarded samples count for more than unrewarded ones, and a zero-variance
    group gets a positive advantage.
    """
    return centred(rewards, groups) - shift


def place_on_last_token(x: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor) -> torch.Tensor:
    """Place x [B] on each sample's last token of the mask, 0 elsewhere: [N]."""
    place = torch.arange(len(seq), device=seq.device)
    last = torch.full((len(x),), -1, device=seq.device).scatter_reduce_(
        0, seq, torch.where(mask, place, -1), "amax"
    )
    return torch.where(last[seq] == place, x[seq], 0.0)


def reinforce_pp(
    token_rewards: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, *, gamma: float = 1.0
) -> torch.Tensor:
    """Discounted return-to-go [N], whitened over the batch's tokens in the mask.

    REINFORCE++, Hu 2025, arXiv 2501.03262. Its group-baseline variant subtracts the group's mean
    reward first (`advantage.group_baseline`).
    """
    returns = _skipping(token_rewards, mask, seq, gamma)
    return masked_whiten(returns, mask)


def _skipping(
    x: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, discount: float
) -> torch.Tensor:
    """Return suffix sums [N] over the tokens of the mask; other tokens take no discount."""
    # two scalars of x's precision: `where` makes float32 of two Python floats
    d = torch.where(mask, x.new_full((), discount), x.new_ones(()))
    # S_t = x_t + discount S_{t'} with t' the next token in the mask: a skipped token passes S on
    # undiscounted
    return torch.where(mask, discounted_suffix(torch.where(mask, x, 0.0), seq, d), 0.0)


def _next_value(
    values: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, bootstrap: torch.Tensor
) -> torch.Tensor:
    """Return V at the next token of the mask; after the last one, bootstrap [B]."""
    rows = PaddedRows(seq)
    v = rows.matrix(torch.where(mask, values, 0.0))
    m = rows.matrix(mask)
    first = (
        seq[torch.cat([seq.new_ones(1, dtype=torch.bool), seq[1:] != seq[:-1]])]
        if len(seq)
        else seq
    )
    carry = bootstrap.to(v.dtype)[first]
    following = torch.empty_like(v)
    for t in range(v.shape[1] - 1, -1, -1):
        following[:, t] = carry
        carry = torch.where(m[:, t], v[:, t], carry)
    return rows.pack(following)


def td_residual(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    bootstrap: torch.Tensor,
    gamma: float = 1.0,
) -> torch.Tensor:
    """delta_t = r_t + gamma V_{t+1} - V_t over the tokens of the mask, 0 elsewhere: [N].

    bootstrap [B] is V after the last token, 0 where the sample ended by itself.
    """
    after = _next_value(values, mask, seq, bootstrap)
    return torch.where(mask, token_rewards + gamma * after - values, 0.0)


def gae(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    bootstrap: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns) [N]: A_t = sum_l (gamma lam)^l delta_{t+l}, returns = A + V.

    Schulman et al. 2015, arXiv 1506.02438. lam = 1 is return minus value, lam = 0 the TD residual.

    Args:
        token_rewards: [N].
        values: [N].
        mask: bool [N]; tokens outside it are skipped as if absent.
        seq: int64 [N].
        bootstrap: [B], 0 at EOS and V at truncation.
    """
    adv = _skipping(
        td_residual(token_rewards, values, mask, seq, bootstrap, gamma), mask, seq, gamma * lam
    )
    return adv, torch.where(mask, adv + values, 0.0)


def k_step(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    bootstrap: torch.Tensor,
    *,
    k: int,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> torch.Tensor:
    """GAE cut after k terms: sum_{l<k} (gamma lam)^l delta_{t+l}, k >= 1.

    Mnih et al. 2016, arXiv 1602.01783.
    """
    rows = PaddedRows(seq[mask])
    adv = torch.zeros_like(values)
    if not len(seq[mask]):
        return adv
    d = rows.matrix(td_residual(token_rewards, values, mask, seq, bootstrap, gamma)[mask])
    total = torch.zeros_like(d)
    for step in range(min(k, d.shape[1])):
        total[:, : d.shape[1] - step] += (gamma * lam) ** step * d[:, step:]
    adv[mask] = rows.pack(total)
    return adv


def process_grpo(
    token_rewards: torch.Tensor,
    step: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    groups: torch.Tensor,
    *,
    ddof: int = 1,
    eps: float = 1e-4,
) -> torch.Tensor:
    """The process-supervised form of GRPO (DeepSeekMath, section 4.1.3): [N].

    Step rewards are normalized by mean and std over all steps of the group. A token's advantage is
    the sum of the normalized rewards from it on. With one step per sample, on its last token, this
    is `grpo`.

    Args:
        token_rewards: [N].
        step: bool [N], tokens that end a step; a reward of 0 counts too (see `steps`).
        mask: bool [N].
        seq: int64 [N].
        groups: int64 [B].
    """
    step = step & mask
    normalized = torch.zeros_like(token_rewards)
    if bool(step.any()):
        group = groups[seq][step]
        r = token_rewards[step]
        n = _counts(group)
        apart = centred(r, group)
        std = (_sum(apart.square(), group) / (n - ddof)).sqrt()
        normalized[step] = torch.where(apart == 0, 0.0, apart / (std + eps))
    return _skipping(normalized, mask, seq, 1.0)


def steps(
    token_rewards: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int
) -> torch.Tensor:
    """Return bool [N]: the default ends of process-supervision steps.

    They are the tokens with a reward other than 0 and the last token of each sample.
    """
    last = (
        place_on_last_token(torch.ones(n, dtype=token_rewards.dtype, device=seq.device), mask, seq)
        > 0
    )
    return mask & ((token_rewards != 0) | last)


def _scatter_within_response(x: torch.Tensor, at: torch.Tensor, seq: torch.Tensor) -> torch.Tensor:
    """Add up x [N] at the positions `at` int64 [N].

    Values that would leave their own sample, or the batch (-1), are dropped.
    """
    padded = torch.cat([seq, seq.new_full((1,), -1)])
    return torch.zeros_like(x).index_add_(
        0, at.clamp(min=0), torch.where(padded[at] == seq, x, 0.0)
    )


def credit_trained_tokens(x: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor) -> torch.Tensor:
    """Move x [N] of tokens outside the mask to the last token of the mask before them: [N].

    That token led there. Values before a sample's first token of the mask are dropped.
    """
    place = torch.arange(len(seq), device=seq.device)
    return _scatter_within_response(x, torch.where(mask, place, -1).cummax(0).values, seq)


def sum_by_step(x: torch.Tensor, step: torch.Tensor, seq: torch.Tensor) -> torch.Tensor:
    """Sum x [N] over each step, on the token that ends it (step bool [N]): [N].

    Values after a sample's last step belong to that step.
    """
    place = torch.arange(len(seq), device=seq.device)
    n = len(seq)
    # the next end, at or after each token
    ends = torch.where(step, place, n).flip(0).cummin(0).values.flip(0)
    previous_end = torch.where(step, place, -1).cummax(0).values
    inside = torch.cat([seq, seq.new_full((1,), -1)])[ends] == seq
    return _scatter_within_response(x, torch.where(inside, ends, previous_end), seq)


def whiten(x: torch.Tensor, eps: float = 1e-8, over: torch.Tensor | None = None) -> torch.Tensor:
    """Scale to mean 0 and standard deviation 1 over the batch (ddof 1).

    A single value, or values that are all equal, become 0. `over` holds the values whose mean and
    deviation are taken, when they are not x itself.
    """
    over = x if over is None else over
    if len(over) < 2:
        return torch.zeros_like(x)
    return torch.where(_flat(over), 0.0, (x - over.mean()) / (over.std() + eps))


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return a bool scalar: all values are equal to within EQUAL of the largest."""
    return x.amax() - x.amin() <= EQUAL * x.abs().amax()


def masked_whiten(x: torch.Tensor, mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """Whiten over the tokens of the mask; 0 elsewhere."""
    whitened = torch.zeros_like(x)
    whitened[mask] = whiten(x[mask], eps)
    return whitened


def scale_to_unit(x: torch.Tensor, over: torch.Tensor | None = None) -> torch.Tensor:
    """Scale rewards to [0, 1] over the batch; equal rewards become 0.

    `over` holds the values that map to 0 and 1, when they are not x itself.
    """
    over = x if over is None else over
    return (
        torch.where(_flat(over), 0.0, (x - over.min()) / (over.max() - over.min()))
        if len(over)
        else x
    )


def overlong_penalty(lengths: torch.Tensor, limit: int, ramp: int) -> torch.Tensor:
    """A linear ramp [B] from 0 at `limit - ramp` tokens to 1 at `limit`.

    Soft overlong punishment of DAPO, arXiv 2503.14476.
    """
    return ((lengths - (limit - ramp)) / max(ramp, 1)).clamp(0.0, 1.0)


# ---- by name -------------------------------------------------------------------------------------


@dataclass
class ResponseRewards:
    """Inputs of an advantage of whole samples.

    rewards: [B], after truncation, scaling and KL.
    groups: int64 [B].
    lengths: [B], in tokens of the loss.
    greedy: [B], reward of a greedy completion of the same prompt, shaped like the rewards.
    ema: mean of the rewards over past batches, a float.
    weights: [B], start / mu of the whole samples, where the advantage needs them.
    squared_norms: [B], of their gradients, where the advantage needs them.
    baselines: [B], running means of the prompts' rewards, nan where there is none.
    parts: [B, P], the named parts of the rewards, unshaped; `part_names` are their names.
    """

    rewards: torch.Tensor
    groups: torch.Tensor
    lengths: torch.Tensor
    greedy: torch.Tensor | None
    ema: float
    weights: torch.Tensor | None = None
    squared_norms: torch.Tensor | None = None
    baselines: torch.Tensor | None = None
    parts: torch.Tensor | None = None
    part_names: tuple[str, ...] = ()


@dataclass
class TokenRewards:
    """Inputs of an advantage of tokens.

    answers: [B], rewards after truncation and scaling.
    mask: bool [N].
    seq: int64 [N].
    groups: int64 [B].
    charge: [N], the KL penalty in the reward.
    given: [N], the reward function's token rewards, unshaped; None: it gave none.
    tokens: [N], the same on trained tokens, after truncation and scaling.
    totals: [B], the sums of `tokens`.
    steps: bool [N], ends of process-supervision steps given by the reward function.
    values: [N], V of the tokens.
    after: [B], V after the last token of a truncated sample, else 0.
    energy: [N].
    """

    answers: torch.Tensor
    mask: torch.Tensor
    seq: torch.Tensor
    groups: torch.Tensor
    charge: torch.Tensor | None = None
    given: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    totals: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    values: torch.Tensor | None = None
    after: torch.Tensor | None = None
    energy: torch.Tensor | None = None

    def rewards(self, answers: torch.Tensor) -> torch.Tensor:
        """Return what each token earns, minus its KL penalty, [N]; answers [B] are the totals."""
        if self.tokens is None:
            earned = place_on_last_token(answers, self.mask, self.seq)
        else:
            assert self.totals is not None
            earned = self.tokens + place_on_last_token(answers - self.totals, self.mask, self.seq)
        return earned if self.charge is None else earned - self.charge

    def step_ends(self) -> torch.Tensor:
        """Return bool [N]: trained tokens that end a step, by what the reward function rewarded.

        A KL penalty never makes a step.
        """
        assert self.given is not None
        if self.steps is None:
            earned = credit_trained_tokens(self.given, self.mask, self.seq)
            return steps(earned, self.mask, self.seq, len(self.answers))
        return credit_trained_tokens(self.steps.to(self.answers.dtype), self.mask, self.seq) > 0


def _no_baseline(a: ResponseRewards) -> torch.Tensor:
    return reinforce(a.rewards, 0.0)


def _batch_baseline(a: ResponseRewards) -> torch.Tensor:
    return centred(a.rewards, torch.zeros_like(a.groups))


def _ema_baseline(a: ResponseRewards) -> torch.Tensor:
    return reinforce(a.rewards, a.ema)


def _prompt_baseline(a: ResponseRewards) -> torch.Tensor:
    if a.baselines is None:
        raise ConfigError(
            "advantage.baseline = prompt needs the prompts' running means (LossBatch.baselines)"
        )
    return _less(a.rewards, torch.where(a.baselines.isnan(), a.rewards.mean(), a.baselines))


# advantage.baseline, of reinforce -> [B]
BASELINES: dict[str, Callable[[ResponseRewards], torch.Tensor]] = {
    "none": _no_baseline,
    "batch": _batch_baseline,
    "ema": _ema_baseline,
    "prompt": _prompt_baseline,
}


def _reinforce(a: ResponseRewards, c: settings.ReinforceAdvantage) -> torch.Tensor:
    return choose_function("advantage.baseline", BASELINES, c.baseline)(a)


def _rloo(a: ResponseRewards, c: settings.Advantage) -> torch.Tensor:
    return rloo(a.rewards, a.groups)


def _grpo(a: ResponseRewards, c: settings.GrpoAdvantage) -> torch.Tensor:
    form = grpo if c.std == "group" else batch_grpo
    return form(a.rewards, a.groups, ddof=c.ddof, eps=c.eps)


def _maxrl(a: ResponseRewards, c: settings.Advantage) -> torch.Tensor:
    return maxrl(a.rewards, a.groups)


def _pass_at_k(a: ResponseRewards, c: settings.PassAtKAdvantage) -> torch.Tensor:
    return pass_at_k(a.rewards, a.groups, k=c.k)


def _dr_grpo(a: ResponseRewards, c: settings.Advantage) -> torch.Tensor:
    return dr_grpo(a.rewards, a.groups)


def _opo(a: ResponseRewards, c: settings.Advantage) -> torch.Tensor:
    return opo(a.rewards, a.groups, a.lengths)


def _gpg(a: ResponseRewards, c: settings.Advantage) -> torch.Tensor:
    return gpg(a.rewards, a.groups)


def _oapl(a: ResponseRewards, c: settings.OaplAdvantage) -> torch.Tensor:
    return oapl(a.rewards, a.groups, beta=c.beta)


def _asymre(a: ResponseRewards, c: settings.AsymreAdvantage) -> torch.Tensor:
    return asymre(a.rewards, a.groups, shift=c.shift)


def _opob(a: ResponseRewards, c: settings.Advantage) -> torch.Tensor:
    if a.weights is None or a.squared_norms is None:
        raise ConfigError(
            "advantage.name = opob needs the learner's start and the norms of the samples' "
            "gradients (LossBatch.start, squared_norms)"
        )
    return opob(a.rewards, a.groups, a.weights, a.squared_norms)


def _gdpo(a: ResponseRewards, c: settings.GdpoAdvantage) -> torch.Tensor:
    if a.parts is None:
        raise ConfigError(
            "advantage.name = gdpo needs the same named parts of the reward in every sample; the "
            "reward function returns them (docs/rewards.md)"
        )
    if unknown_part := next((name for name in c.part_weights if name not in a.part_names), ""):
        raise ConfigError(
            f"advantage.part_weights: no part {unknown_part}; the reward has "
            f"{', '.join(a.part_names)}"
        )
    weights = torch.tensor([c.part_weights.get(name, 1.0) for name in a.part_names])
    return gdpo(a.parts, a.groups, weights.to(a.parts), ddof=c.ddof, eps=c.eps)


def _remax(a: ResponseRewards, c: settings.Advantage) -> torch.Tensor:
    if a.greedy is None:
        raise ConfigError(
            "advantage.name = remax needs the reward of a greedy completion of each prompt "
            "(LossBatch.greedy)"
        )
    return remax(a.rewards, a.greedy)


def _reinforce_pp(t: TokenRewards, c: settings.ReinforcePpAdvantage) -> tuple[torch.Tensor, None]:
    answers = dr_grpo(t.answers, t.groups) if c.group_baseline else t.answers
    return reinforce_pp(t.rewards(answers), t.mask, t.seq, gamma=c.gamma), None


def _process_grpo(t: TokenRewards, c: settings.GrpoAdvantage) -> tuple[torch.Tensor, None]:
    ends = t.step_ends()
    earned = sum_by_step(t.rewards(t.answers), ends, t.seq)
    return process_grpo(earned, ends, t.mask, t.seq, t.groups, ddof=c.ddof, eps=c.eps), None


def _otb(t: TokenRewards, c: settings.Advantage) -> tuple[torch.Tensor, None]:
    if t.energy is None:
        raise ConfigError("advantage.name = otb needs each token's energy (LossBatch.energy)")
    returns = _skipping(t.rewards(t.answers), t.mask, t.seq, 1.0)
    return otb(returns, t.energy, t.mask, t.seq, t.groups), None


def _gae(t: TokenRewards, c: settings.GaeAdvantage) -> tuple[torch.Tensor, torch.Tensor]:
    if t.values is None:
        raise ConfigError("advantage.name = gae needs values (LossBatch.values): a value head")
    earned = t.rewards(t.answers)
    after = torch.zeros_like(t.answers) if t.after is None else t.after
    adv, returns = gae(earned, t.values, t.mask, t.seq, after, gamma=c.gamma, lam=c.lam)
    if c.k_step > 0:
        adv = k_step(earned, t.values, t.mask, t.seq, after, k=c.k_step, gamma=c.gamma, lam=c.lam)
    return masked_whiten(adv, t.mask) if c.whiten else adv, returns


# advantage.name, the tag of its struct in `settings` -> [B], broadcast to the answer's tokens; KL
# in the reward is charged to the answer
BY_ANSWER: dict[str, Callable[[ResponseRewards, Any], torch.Tensor]] = {
    "reinforce": _reinforce,
    "rloo": _rloo,
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "opo": _opo,
    "gpg": _gpg,
    "remax": _remax,
    "oapl": _oapl,
    "asymre": _asymre,
    "opob": _opob,
    "maxrl": _maxrl,
    "pass_at_k": _pass_at_k,
    "gdpo": _gdpo,
}
# advantage.name -> (advantage [N], returns [N] or None); KL in the reward is charged by token.  A
# name of both dicts is here where the reward function gives rewards of tokens, else there.
BY_TOKEN: dict[str, Callable[[TokenRewards, Any], tuple[torch.Tensor, torch.Tensor | None]]] = {
    "reinforce_pp": _reinforce_pp,
    "gae": _gae,
    "grpo": _process_grpo,
    "otb": _otb,
}
