"""Advantages from rewards: their shaping, KL in the reward, and the estimators.

Of functions with them, rewards are float [B] and groups int64 [B], where the samples of one prompt
share a number. They return [B].

BY_ANSWER and BY_TOKEN, at the end, map config names to functions. To add an advantage, write a
function of (RewardedBatch, its struct of `settings`) and add its line there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, where, zeros_like

from asyncrl.algorithms import diagnostics, kl, own_functions, ratios, settings
from asyncrl.algorithms.batch import LossBatch
from asyncrl.algorithms.ratios import (
    CLAMP,
    PaddedRows,
    compute_running_sum,
    find_sample_max,
    sum_by_sample,
    sum_discounted_suffix,
)
from asyncrl.algorithms.settings import Settings
from asyncrl.contract.errors import ConfigError

# numbers that differ by less than this share of the larger one count as equal: float32 rounding of
# equal rewards leaves such differences
EQUAL = 1e-6


def _sum_by_group(x: Tensor, groups: Tensor) -> Tensor:
    """Return the sum of x over each sample's group, [B]."""
    # as many groups as samples, so that the device is not asked for their number
    return sum_by_sample(x, groups, len(groups))[groups]


def _count_by_group(groups: Tensor) -> Tensor:
    return _sum_by_group(torch.ones_like(groups), groups)


def average_by_group(x: Tensor, groups: Tensor) -> Tensor:
    """Return the mean of x over each sample's group, [B]."""
    return _sum_by_group(x, groups) / _count_by_group(groups)


def find_group_max(x: Tensor, groups: Tensor) -> Tensor:
    """Return the largest x of each sample's group, [B]."""
    all_samples = torch.ones_like(groups, dtype=torch.bool)
    return find_sample_max(x, all_samples, groups, len(groups))[groups]


def find_zero_variance(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return bool [B]: samples of zero-variance groups, which carry no learning signal.

    Rewards are equal to within EQUAL of the largest.
    """
    largest, smallest = find_group_max(rewards, groups), -find_group_max(-rewards, groups)
    return largest - smallest <= EQUAL * largest.abs()


def center_by_group(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return r_i minus its group's mean; exactly 0 in zero-variance groups.

    In floating point the mean of equal rewards is often not the reward itself (0.7 three times). A
    standard deviation as small, or Adam, would scale the remainder up to full size.
    """
    return where(
        find_zero_variance(rewards, groups), 0.0, rewards - average_by_group(rewards, groups)
    )


def subtract_baseline(rewards: Tensor, baseline: Tensor | float) -> Tensor:
    """Return r - b, exactly 0 where the two are equal (to EQUAL)."""
    return where((rewards - baseline).abs() <= EQUAL * rewards.abs(), 0.0, rewards - baseline)


def compute_rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """r_i minus the mean of the other G-1 (Ahmadian et al. 2024, arXiv 2402.14740)."""
    n = _count_by_group(groups)
    return center_by_group(rewards, groups) * n / (n - 1)


def compute_grpo(
    rewards: Tensor, groups: Tensor, c: settings.GrpoAdvantage | settings.GdpoAdvantage
) -> Tensor:
    """(r_i - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300).

    It is 0 in zero-variance groups, also with eps = 0.
    """
    n = _count_by_group(groups)
    deviation = center_by_group(rewards, groups)
    var = average_by_group(deviation.square(), groups) * n / (n - c.ddof)
    return where(deviation == 0, 0.0, deviation / (var.sqrt() + c.eps))


def place_on_last_token(x: Tensor, mask: Tensor, seq: Tensor) -> Tensor:
    """Place x [B] on each sample's last token of the mask, 0 elsewhere: [N]."""
    position = torch.arange(len(seq), device=seq.device)
    last_positions = torch.full((len(x),), -1, device=seq.device).scatter_reduce_(
        0, seq, where(mask, position, -1), "amax"
    )
    return where(last_positions[seq] == position, x[seq], 0.0)


def _sum_masked_suffix(x: Tensor, mask: Tensor, seq: Tensor, discount: float) -> Tensor:
    """Return suffix sums [N] over the tokens of the mask; other tokens take no discount."""
    # two scalars of x's precision: `where` makes float32 of two Python floats
    d = where(mask, x.new_full((), discount), x.new_ones(()))
    # S_t = x_t + discount S_{t'} with t' the next token in the mask: a skipped token passes S on
    # undiscounted
    return where(mask, sum_discounted_suffix(where(mask, x, 0.0), seq, d), 0.0)


def _scatter_within_response(x: Tensor, at: Tensor, seq: Tensor) -> Tensor:
    """Add up x [N] at the positions `at` int64 [N].

    Values that would leave their own sample, or the batch (-1), are dropped.
    """
    padded = torch.cat([seq, seq.new_full((1,), -1)])
    return zeros_like(x).index_add_(0, at.clamp(min=0), where(padded[at] == seq, x, 0.0))


def credit_trained_tokens(x: Tensor, mask: Tensor, seq: Tensor) -> Tensor:
    """Move x [N] of tokens outside the mask to the last token of the mask before them: [N].

    That token led there. Values before a sample's first token of the mask are dropped.
    """
    position = torch.arange(len(seq), device=seq.device)
    return _scatter_within_response(x, where(mask, position, -1).cummax(0).values, seq)


def _find_next(flags: Tensor) -> Tensor:
    """Return the next flagged position at or after each token, N without any: int64 [N]."""
    position = torch.arange(len(flags), device=flags.device)
    return where(flags, position, len(flags)).flip(0).cummin(0).values.flip(0)


def sum_by_step(x: Tensor, step: Tensor, seq: Tensor) -> Tensor:
    """Sum x [N] over each step, on the token that ends it (step bool [N]): [N].

    Values after a sample's last step belong to that step.
    """
    position = torch.arange(len(seq), device=seq.device)
    ends = _find_next(step)
    previous_end = where(step, position, -1).cummax(0).values
    has_end = torch.cat([seq, seq.new_full((1,), -1)])[ends] == seq
    return _scatter_within_response(x, where(has_end, ends, previous_end), seq)


def whiten(x: Tensor, reference: Tensor | None = None) -> Tensor:
    """Scale to mean 0 and standard deviation 1 over the batch (ddof 1).

    A single value, or values that are all equal, become 0. `reference` holds the values whose mean
    and deviation are taken, when they are not x itself.
    """
    reference = x if reference is None else reference
    if len(reference) < 2:
        return zeros_like(x)
    return where(_are_equal(reference), 0.0, (x - reference.mean()) / (reference.std() + 1e-8))


def _are_equal(x: Tensor) -> Tensor:
    """Return a bool scalar: all values are equal to within EQUAL of the largest."""
    return x.amax() - x.amin() <= EQUAL * x.abs().amax()


def whiten_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Whiten over the tokens of the mask; 0 elsewhere."""
    whitened = zeros_like(x)
    whitened[mask] = whiten(x[mask])
    return whitened


def scale_to_unit(x: Tensor, reference: Tensor | None = None) -> Tensor:
    """Scale rewards to [0, 1] over the batch; equal rewards become 0.

    `reference` holds the values that map to 0 and 1, when they are not x itself.
    """
    reference = x if reference is None else reference
    if not len(reference):
        return x
    low, high = reference.aminmax()
    return where(_are_equal(reference), 0.0, (x - low) / (high - low))


# ---- by name -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class RewardedBatch(LossBatch):
    """Inputs of an advantage: the batch, its mask without tokens that the config excludes.

    rewards: [B], after truncation and scaling; of whole samples, after KL too.
    greedy: [B], shaped like the rewards.
    bootstrap: [B], V after the last token of a truncated sample, else 0.
    lengths: int64 [B], in tokens.
    ema: mean of the rewards over past batches.
    weights: [B], start / mu of the whole samples, where the advantage needs them.
    kl_penalty: [N], the KL penalty in the reward.
    tokens: [N], the token rewards on trained tokens, after truncation and scaling.
    totals: [B], the sums of `tokens`; `rewards - totals` on the last token completes `rewards`.
    returns: [N], set by an advantage with a value head.
    """

    lengths: Tensor
    ema: float
    weights: Tensor | None = None
    kl_penalty: Tensor | None = None
    tokens: Tensor | None = None
    totals: Tensor | None = None
    returns: Tensor | None = None

    def compute_rewards(self, totals: Tensor) -> Tensor:
        """Return what each token earns, minus its KL penalty, [N]; answers [B] are the totals."""
        if self.tokens is None:
            token_rewards = place_on_last_token(totals, self.mask, self.seq)
        else:
            assert self.totals is not None
            token_rewards = self.tokens + place_on_last_token(
                totals - self.totals, self.mask, self.seq
            )
        return token_rewards if self.kl_penalty is None else token_rewards - self.kl_penalty

    def require_groups(self, least: int, name: str) -> Tensor:
        """Return the groups, [B]. Raises ConfigError where one has fewer than `least` samples."""
        smallest = self.smallest_group or int(_count_by_group(self.groups).min())
        if smallest < least:
            raise ConfigError(
                f"advantage.name = {name} needs at least {least} samples of each prompt: raise "
                "learner.group_size"
            )
        return self.groups

    @property
    def net_rewards(self) -> Tensor:
        """The rewards minus each sample's KL penalty, [B]."""
        if self.kl_penalty is None:
            return self.rewards
        return self.rewards - sum_by_sample(self.kl_penalty, self.seq, self.count)

    def find_step_ends(self) -> Tensor:
        """Return bool [N]: trained tokens that end a step.

        By default they are those that the reward function rewarded and the last one of each sample.
        A KL penalty never makes a step.
        """
        assert self.token_rewards is not None
        if self.steps is not None:
            steps = self.steps.to(self.rewards.dtype)
            return credit_trained_tokens(steps, self.mask, self.seq) > 0
        token_rewards = credit_trained_tokens(self.token_rewards, self.mask, self.seq)
        is_last = place_on_last_token(torch.ones_like(self.rewards), self.mask, self.seq) > 0
        return self.mask & ((token_rewards != 0) | is_last)


def _subtract_prompt_mean(a: RewardedBatch) -> Tensor:
    if a.baselines is None:
        raise ConfigError(
            "advantage.baseline = prompt needs the prompts' running means (LossBatch.baselines)"
        )
    return subtract_baseline(a.rewards, where(a.baselines.isnan(), a.rewards.mean(), a.baselines))


# advantage.baseline, of reinforce -> r - b [B] (Williams 1992)
BASELINES: dict[str, Callable[[RewardedBatch], Tensor]] = {
    "none": lambda a: subtract_baseline(a.rewards, 0.0),
    "batch": lambda a: center_by_group(a.rewards, zeros_like(a.groups)),
    "ema": lambda a: subtract_baseline(a.rewards, a.ema),
    "prompt": _subtract_prompt_mean,
}


def _apply_grpo(a: RewardedBatch, c: settings.GrpoAdvantage) -> Tensor:
    """`compute_grpo`, or (r_i - group's mean) / (std of the whole batch's rewards + eps).

    With the latter, groups with little variance are not scaled up (Liu et al. 2025, "Tricks or
    traps", arXiv 2508.08221).
    """
    if c.std == "group":
        return compute_grpo(a.rewards, a.require_groups(c.ddof + 1, "grpo with ddof = 1"), c)
    if a.count <= c.ddof:
        raise ConfigError(
            f"advantage.name = grpo with ddof = {c.ddof} needs more than {c.ddof} samples in a "
            "batch"
        )
    return center_by_group(a.rewards, a.groups) / (a.rewards.std(correction=c.ddof) + c.eps)


def _apply_maxrl(a: RewardedBatch, c: settings.Advantage) -> Tensor:
    """(r_i - mean) / mean, 0 where the group's mean is not above 0 (MaxRL, arXiv 2602.02710).

    For rewards of 0 and 1 it is the gradient of the log of the pass rate, to the order that the
    group size allows.
    """
    mean = average_by_group(a.rewards, a.groups)
    return where(mean > 0, center_by_group(a.rewards, a.groups) / mean.clamp(min=1e-30), 0.0)


def _apply_pass_at_k(a: RewardedBatch, c: settings.PassAtKAdvantage) -> Tensor:
    """The contribution of each sample to the best of k, never below 0.

    It is the mean, over all choices of k - 1 others of its group, of max(r_i, theirs) -
    max(theirs): the `loo - 1` estimator of PKPO (arXiv 2505.15201), times the group's size over k.
    k = 0 takes the whole group, where only a single best sample gets anything: its distance to the
    second.

    Sorted upwards, the best of k - 1 sampled from the samples below position i is at position j
    with probability C(j, k - 2) / C(G - 1, k - 1). Samples above i add nothing.

    Raises ConfigError for a group of fewer than k.
    """
    contributions = zeros_like(a.rewards)
    for group in sorted(set(a.groups.tolist())):
        (members,) = torch.nonzero(a.groups == group, as_tuple=True)
        count = len(members)
        chosen = c.k or count
        if chosen > count or chosen < 2:
            raise ConfigError(
                f"advantage.k: pass_at_k of {chosen} needs 2 or more, and groups of as many "
                f"samples, not {count}: raise learner.group_size"
            )
        order = members[a.rewards[members].argsort()]
        ranked = a.rewards[order].double()
        share = ranked.new_tensor(
            [math.comb(j, chosen - 2) / math.comb(count - 1, chosen - 1) for j in range(count)]
        )
        # sum over j < i of share_j (r_i - r_j)
        share_below = share.cumsum(0) - share
        lower_sum = (share * ranked).cumsum(0) - share * ranked
        contributions[order] = (share_below * ranked - lower_sum).to(contributions.dtype)
    return contributions


def _apply_opo(a: RewardedBatch, c: settings.Advantage) -> Tensor:
    """r_i minus the length-weighted mean of the group's rewards.

    Hao et al. 2025, arXiv 2505.23585.
    """
    t = a.lengths.to(a.rewards.dtype)
    total, length = (_sum_by_group(x, a.groups) for x in (t * a.rewards, t))
    deviation = a.rewards - total / length.clamp(min=1)
    return where(find_zero_variance(a.rewards, a.groups), 0.0, deviation)


def _apply_opob(a: RewardedBatch, c: settings.Advantage) -> Tensor:
    """(r - b) / (std of the group, ddof 0); 0 in zero-variance groups.

    b is the constant of the group that minimizes the variance of sum W (R - b) grad log pi(y):
    sum W^2 g^2 R / sum W^2 g^2 (OPOB of VCPO, arXiv 2602.17616). The sample's own reward is
    included, which biases it by the order of 1/G.
    """
    if a.weights is None or a.squared_norms is None:
        raise ConfigError(
            "advantage.name = opob needs the learner's start and the norms of the samples' "
            "gradients (LossBatch.start, squared_norms)"
        )
    rewards, groups = a.rewards, a.groups
    share = a.weights.double().square() * a.squared_norms.double()
    total_share = _sum_by_group(share, groups)
    b = _sum_by_group(share * rewards, groups) / total_share.clamp(min=1e-300)
    b = where(total_share > 0, b, average_by_group(rewards.double(), groups))
    std = average_by_group(center_by_group(rewards, groups).square(), groups).sqrt()
    deviation = (rewards - b.to(rewards.dtype)) / std.clamp(min=1e-8)
    return where(find_zero_variance(rewards, groups), 0.0, deviation)


def _apply_gdpo(a: RewardedBatch, c: settings.GdpoAdvantage) -> Tensor:
    """Sum `compute_grpo` of each named part of the reward, weighted, and whiten over the batch.

    No part is dominated by the variance of another (GDPO, arXiv 2601.05242).
    """
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
    weights = a.parts.new_tensor([c.part_weights.get(name, 1.0) for name in a.part_names])
    groups = a.require_groups(c.ddof + 1, "grpo with ddof = 1")
    by_part = [compute_grpo(part, groups, c) for part in a.parts.unbind(1)]
    return whiten((torch.stack(by_part, 1) * weights).sum(1))


def _apply_gpg(a: RewardedBatch, c: settings.Advantage) -> Tensor:
    """(r_i - mean) B / B', B' the number of samples outside zero-variance groups.

    GPG, Chu et al. 2025, arXiv 2504.02546.
    """
    informative = (~find_zero_variance(a.rewards, a.groups)).sum().clamp(min=1)
    return center_by_group(a.rewards, a.groups) * a.count / informative


def _apply_oapl(a: RewardedBatch, c: settings.OaplAdvantage) -> Tensor:
    """A* = r - V with V = beta log mean e^(r / beta) over the group.

    A*-PO, arXiv 2505.20686; OAPL, arXiv 2602.19362. beta = 0 makes V the largest reward, and
    beta = inf the mean.
    """
    if c.beta == math.inf:
        value = average_by_group(a.rewards, a.groups)
    else:
        value = find_group_max(a.rewards, a.groups)
        if c.beta:
            mean = average_by_group(((a.rewards - value) / c.beta).exp(), a.groups)
            value = value + c.beta * mean.log()
    return where(find_zero_variance(a.rewards, a.groups), 0.0, a.rewards - value)


def _apply_remax(a: RewardedBatch, c: settings.Advantage) -> Tensor:
    """r_i minus the reward of a greedy completion of the same prompt.

    Li et al. 2023, arXiv 2310.10505.
    """
    if a.greedy is None:
        raise ConfigError(
            "advantage.name = remax needs the reward of a greedy completion of each prompt "
            "(LossBatch.greedy)"
        )
    return subtract_baseline(a.rewards, a.greedy)


def _apply_reinforce_pp(t: RewardedBatch, c: settings.ReinforcePpAdvantage) -> Tensor:
    """Discounted return-to-go [N], whitened over the batch's tokens in the mask.

    REINFORCE++, Hu 2025, arXiv 2501.03262. Its group-baseline variant subtracts the group's mean
    reward first (`advantage.group_baseline`).
    """
    answers = center_by_group(t.rewards, t.groups) if c.group_baseline else t.rewards
    returns = _sum_masked_suffix(t.compute_rewards(answers), t.mask, t.seq, c.gamma)
    return whiten_masked(returns, t.mask)


def _apply_process_grpo(t: RewardedBatch, c: settings.GrpoAdvantage) -> Tensor:
    """The process-supervised form of GRPO (DeepSeekMath, section 4.1.3): [N].

    Step rewards are normalized by mean and std over all steps of the group. A token's advantage is
    the sum of the normalized rewards from it on. With one step per sample, on its last token, this
    is `compute_grpo`.
    """
    step = t.find_step_ends() & t.mask
    rewards = sum_by_step(t.compute_rewards(t.rewards), step, t.seq)
    normalized = zeros_like(rewards)
    if bool(step.any()):
        group = torch.unique(t.groups[t.seq][step], return_inverse=True)[1]
        normalized[step] = compute_grpo(rewards[step], group, c)
    return _sum_masked_suffix(normalized, t.mask, t.seq, 1.0)


def _apply_otb(t: RewardedBatch, c: settings.Advantage) -> Tensor:
    """G_t - B_t [N], with a baseline for each position t of a group (OTB, arXiv 2602.07078).

    B_t = sum G_t E_t / sum E_t over the samples that have reached t, where E_t is the energy of a
    sample's tokens up to and including t. Positions are counted in tokens of the mask. Where only
    one sample of a group goes on, its baseline is its own return and the advantage is 0.
    """
    if t.energy is None:
        raise ConfigError("advantage.name = otb needs each token's energy (LossBatch.energy)")
    mask, seq = t.mask, t.seq
    returns = _sum_masked_suffix(t.compute_rewards(t.rewards), mask, seq, 1.0)
    if not bool(mask.any()):
        return returns
    energy = compute_running_sum(where(mask, t.energy, 0.0), seq)
    position = compute_running_sum(mask.long(), seq) - 1
    slot = t.groups[seq] * (int(position.max()) + 1) + position
    total, share = (
        sum_by_sample(where(mask, x, 0.0), slot, int(slot.max()) + 1)[slot]
        for x in (returns * energy, energy)
    )
    deviation = returns - total / share.clamp(min=1e-8)
    is_new = mask & (deviation.abs() > EQUAL * returns.abs())
    return where(is_new, deviation, 0.0)


def _apply_function(t: RewardedBatch, c: settings.FunctionAdvantage) -> Tensor:
    """Call `advantage.function`; its rewards and token rewards are those after KL."""
    rows, tokens, net = PaddedRows(t.seq), t.token_rewards, t.net_rewards
    value = own_functions.call(
        "advantage.function",
        c.function,
        net,
        t.groups,
        rows.pad(t.mask),
        baseline=t.ema,
        truncated=t.truncated,
        behavior=rows.pad(t.behavior),
        reference=None if t.reference is None else rows.pad(t.reference),
        token_rewards=None if tokens is None else rows.pad(t.compute_rewards(t.rewards)),
        parts=t.parts,
        part_names=t.part_names if t.parts is not None else None,
    )
    shape = [*value.shape] if isinstance(value, Tensor) else None
    if shape not in ([t.count], [*rows.shape]):
        raise ConfigError(
            f"advantage.function = {c.function}: returned {own_functions.describe(value)}; return "
            f"a tensor of rows, [{t.count}], or of their tokens, {[*rows.shape]}"
        )
    adv = value.detach().to(net)
    return adv[t.seq] if shape == [t.count] else rows.pack(adv)


def _apply_gae(t: RewardedBatch, c: settings.GaeAdvantage) -> Tensor:
    """A_t = sum_l (gamma lam)^l delta_{t+l} over the tokens of the mask; sets the returns A + V.

    delta_t = r_t + gamma V_{t+1} - V_t, with the bootstrap after the last token (Schulman et al.
    2015, arXiv 1506.02438). lam = 1 is return minus value, lam = 0 the TD residual. k_step cuts the
    sum after k terms (Mnih et al. 2016, arXiv 1602.01783).
    """
    if t.values is None:
        raise ConfigError("advantage.name = gae needs values (LossBatch.values): a value head")
    values, mask, seq = t.values, t.mask, t.seq
    discount = c.gamma * c.lam
    bootstrap = zeros_like(t.rewards) if t.bootstrap is None else t.bootstrap
    # the next token of the mask, and whether it is of the same sample
    following_place = torch.cat([_find_next(mask)[1:], seq.new_full((1,), len(seq))])
    is_last = torch.cat([seq, seq.new_full((1,), -1)])[following_place] != seq
    next_values = torch.cat([values, values.new_zeros(1)])[following_place]
    next_values = where(is_last, bootstrap.to(values.dtype)[seq], next_values)
    following = t.compute_rewards(t.rewards) + c.gamma * next_values
    residuals = where(mask, following - values, 0.0)
    adv = _sum_masked_suffix(residuals, mask, seq, discount)
    t.returns = where(mask, adv + values, 0.0)
    if c.k_step > 0:
        rows = PaddedRows(seq[mask])
        padded = rows.pad(residuals[mask])
        total = zeros_like(padded)
        for step in range(min(c.k_step, rows.shape[1])):
            total[:, : rows.shape[1] - step] += discount**step * padded[:, step:]
        adv = zeros_like(adv).masked_scatter(mask, rows.pack(total))
    return whiten_masked(adv, mask) if c.whiten else adv


# advantage.name, the tag of its struct in `settings` -> [B], broadcast to the sample's tokens. The
# KL penalty in the reward is subtracted from the sample's reward
BY_ANSWER: dict[str, Callable[[RewardedBatch, Any], Tensor]] = {
    "reinforce": lambda a, c: BASELINES[c.baseline](a),
    "rloo": lambda a, c: compute_rloo(a.rewards, a.require_groups(2, "rloo")),
    "grpo": _apply_grpo,
    # r_i - mean, without division (Liu et al. 2025, arXiv 2503.20783)
    "dr_grpo": lambda a, c: center_by_group(a.rewards, a.groups),
    "opo": _apply_opo,
    "gpg": _apply_gpg,
    "remax": _apply_remax,
    "oapl": _apply_oapl,
    # r - (group mean + shift) (AsymRE, arXiv 2506.20520): with shift below 0 rewarded samples count
    # for more than unrewarded ones, and a zero-variance group gets a positive advantage
    "asymre": lambda a, c: center_by_group(a.rewards, a.groups) - c.shift,
    "opob": _apply_opob,
    "maxrl": _apply_maxrl,
    "pass_at_k": _apply_pass_at_k,
    "gdpo": _apply_gdpo,
}
# advantage.name -> advantage [N]. The KL penalty in the reward is subtracted token by token. A name
# of both dicts is read here where the reward function returns token rewards, otherwise in BY_ANSWER
BY_TOKEN: dict[str, Callable[[RewardedBatch, Any], Tensor]] = {
    "reinforce_pp": _apply_reinforce_pp,
    "gae": _apply_gae,
    "grpo": _apply_process_grpo,
    "otb": _apply_otb,
    "function": _apply_function,
}


# ---- of a whole batch ----------------------------------------------------------------------------


def _shape_truncated(
    rewards: Tensor, truncated: Tensor, lengths: Tensor, config: Settings
) -> Tensor:
    """Apply `advantage.truncated`: rewards [B], truncated bool [B], lengths int64 [B] in tokens."""
    a = config.advantage
    penalty = float(a.truncation_penalty)
    if a.truncated == "penalty":
        return rewards - penalty * truncated
    if a.truncated == "soft":
        # a linear ramp up to max_new_tokens: soft overlong punishment of DAPO, arXiv 2503.14476
        ramp = int(a.truncation_ramp)
        over = lengths - (int(config.generator.max_new_tokens) - ramp)
        return rewards - penalty * (over / ramp).clamp(0.0, 1.0)
    if a.truncated in ("zero", "fixed"):
        return where(truncated, -penalty if a.truncated == "fixed" else 0.0, rewards)
    return rewards


# advantage.rewards -> rewards scaled by those of the batch, `over`
SCALES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "raw": lambda rewards, batch_rewards: rewards,
    "unit": scale_to_unit,
    "whiten": whiten,
}


def shape_rewards(
    batch: LossBatch, valid: Tensor, config: Settings, baseline: float
) -> RewardedBatch:
    """Apply `advantage.truncated` and `advantage.rewards` to the rewards and greedy baselines."""
    a = config.advantage
    n = batch.count
    token_rewards = batch.token_rewards if a.name in BY_TOKEN else None
    earned = batch.rewards if token_rewards is None else sum_by_sample(token_rewards, batch.seq, n)
    lengths = sum_by_sample(batch.mask.long(), batch.seq, n)
    rewards = _shape_truncated(earned, batch.truncated, lengths, config)
    greedy = None
    if batch.greedy is not None:
        assert batch.greedy_truncated is not None and batch.greedy_lengths is not None
        greedy = _shape_truncated(
            batch.greedy, batch.greedy_truncated, batch.greedy_lengths, config
        )
    batch_rewards = rewards if greedy is None else torch.cat([rewards, greedy])
    scale = SCALES[a.rewards]
    columns = {field.name: getattr(batch, field.name) for field in fields(LossBatch)}
    shaped = RewardedBatch(**columns, lengths=lengths, ema=baseline)
    shaped.rewards, shaped.mask = scale(rewards, batch_rewards), valid
    shaped.greedy = None if greedy is None else scale(greedy, batch_rewards)
    if batch.bootstrap is not None:
        shaped.bootstrap = where(batch.truncated, batch.bootstrap, 0.0)
    if a.name == "opob" and batch.start is not None:  # start / mu of whole samples, not truncated
        log_w = where(batch.mask, ratios.subtract(batch.start, batch.behavior), 0.0)
        shaped.weights = sum_by_sample(log_w, batch.seq, n).clamp(-CLAMP, CLAMP).exp()
    if token_rewards is not None:
        ends = torch.tensor([1.0, 0.0], dtype=rewards.dtype, device=rewards.device)
        scaled_one, scaled_zero = scale(ends, batch_rewards)
        factor = (scaled_one - scaled_zero).expand(n)
        if a.truncated in ("zero", "fixed"):  # replaces all token rewards of a truncated sample
            factor = where(batch.truncated, 0.0, factor)
        shaped.tokens = credit_trained_tokens(factor[batch.seq] * token_rewards, valid, batch.seq)
        shaped.totals = factor * earned
    return shaped


def compute_advantage(
    batch: LossBatch, valid: Tensor, config: Settings, baseline: float, beta: float
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Return (advantage [N], returns [N] or None, scalars for the metrics)."""
    shaped = shape_rewards(batch, valid, config, baseline)
    if beta > 0:
        policy = batch.behavior if config.kl.reward.at == "behavior" else batch.start
        ref = batch.reference if batch.reward_reference is None else batch.reward_reference
        if policy is None or ref is None:
            raise ConfigError(
                "kl.reward.coefficient: the batch has no log-probabilities of the learner's start "
                "or of the reference"
            )
        reference_ratio = where(valid, ratios.subtract(policy, ref), 0.0)
        shaped.kl_penalty = beta * kl.estimate(config.kl.reward.estimator, reference_ratio)
        # the k1 estimate of KL(start || reference) in nats per sample: the mean over samples with
        # a token in the loss of the sum over their tokens
        has_tokens = sum_by_sample(valid.long(), batch.seq, batch.count) > 0
        sample_kl = reference_ratio.sum() / has_tokens.sum().clamp(min=1)
    if config.loss.surrogate == "sft":
        adv = (batch.rewards > 0).to(batch.rewards.dtype)[batch.seq]
    else:
        adv = _compute_by_name(shaped, config)
    scalars = {
        "reward/mean": batch.rewards.mean(),
        "reward/std": _compute_std(batch.rewards),
        "reward/min": batch.rewards.amin(),
        "reward/max": batch.rewards.amax(),
        "reward/used_mean": shaped.net_rewards.mean(),
        "advantage/std": _compute_std(
            ratios.average_by_sample(adv, batch.mask, batch.seq, batch.count)
        ),
        "reward/no_spread_share": find_zero_variance(batch.rewards, batch.groups).float().mean(),
        "answer/truncated_share": batch.truncated.float().mean(),
    }
    if beta > 0 and config.loss.surrogate != "sft":
        unpenalized = _compute_by_name(replace(shaped, kl_penalty=None), config)
        norm, penalty_norm = (where(valid, x, 0.0).norm() for x in (unpenalized, adv - unpenalized))
        scalars["kl/reward_gradient_share"] = penalty_norm / norm.clamp(min=1e-15)
    if beta > 0:
        scalars["kl/answer"] = sample_kl
    if batch.greedy is not None:
        scalars["reward/greedy"] = batch.greedy.mean()
    if shaped.returns is not None and batch.values is not None:
        scalars["value/explained_variance"] = diagnostics.compute_explained_variance(
            batch.values, shaped.returns, valid
        )
        scalars["value/mean"] = ratios.average_masked(batch.values, valid)
    return where(valid, adv, 0.0), shaped.returns, scalars


def _compute_by_name(shaped: RewardedBatch, config: Settings) -> Tensor:
    """Return the advantage [N] of the rewards minus the KL penalty."""
    a = config.advantage
    by_token = shaped.tokens is not None or a.name not in BY_ANSWER
    if by_token and a.name in BY_TOKEN:
        return BY_TOKEN[a.name](shaped, a)
    adv = BY_ANSWER[a.name](replace(shaped, rewards=shaped.net_rewards), a)
    if isinstance(a, settings.AnswerAdvantage) and a.whiten:
        adv = whiten(adv)
    return adv[shaped.seq]


def _compute_std(x: Tensor) -> Tensor:
    return x.std() if len(x) > 1 else x.new_zeros(())
