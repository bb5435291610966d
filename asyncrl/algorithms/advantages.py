"""Rewards to advantages.  rewards [B] float, groups [B] int64 (samples of one prompt share a number); these return [B].

The token-level ones (reinforce_pp, gae, k_step, process_grpo) take and return [N], packed.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.ratios import Rows, discounted_suffix, seq_sum
from asyncrl.errors import ConfigError

NAMES = ("reinforce", "rloo", "grpo", "dr_grpo", "reinforce_pp", "opo", "gpg", "remax", "gae")
TOKEN_LEVEL = ("reinforce_pp", "gae")  # a KL term in the reward is charged token by token; elsewhere to the whole answer


def _sum(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Sum of x over each sample's group, [B]."""
    return seq_sum(x, groups, int(groups.max()) + 1)[groups]


def _counts(groups: torch.Tensor) -> torch.Tensor:
    return torch.bincount(groups)[groups]


def group_mean(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Mean of x over each sample's group."""
    return _sum(x, groups) / _counts(groups)


def no_spread(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Bool [B]: samples of groups whose rewards are all equal, which teach nothing."""
    return group_mean((rewards - group_mean(rewards, groups)).abs(), groups) < 1e-9


def rloo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r_i minus the mean of the other G-1 (Ahmadian et al. 2024, arXiv 2402.14740).  Raises ConfigError for a group of one."""
    n = _counts(groups)
    if int(n.min()) < 2:
        raise ConfigError("advantage.name = rloo needs at least two samples of each prompt: raise learner.group_size")
    return (rewards - group_mean(rewards, groups)) * n / (n - 1)


def grpo(rewards: torch.Tensor, groups: torch.Tensor, *, ddof: int = 1, eps: float = 1e-4) -> torch.Tensor:
    """(r_i - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300).  Raises ConfigError for ddof = 1 and a group of one."""
    n = _counts(groups)
    if int(n.min()) <= ddof:
        raise ConfigError(f"advantage.name = grpo with ddof = {ddof} needs more than {ddof} samples of each prompt: raise learner.group_size")
    centred = rewards - group_mean(rewards, groups)
    var = group_mean(centred.square(), groups) * n / (n - ddof)
    return centred / (var.sqrt() + eps)


def dr_grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r_i - mean, no division (Liu et al. 2025, arXiv 2503.20783)."""
    return rewards - group_mean(rewards, groups)


def reinforce(rewards: torch.Tensor, baseline: float) -> torch.Tensor:
    """r - b (Williams 1992)."""
    return rewards - baseline


def opo(rewards: torch.Tensor, groups: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """r_i minus the length-weighted mean of the group's rewards; lengths [B] in tokens (Hao et al. 2025, arXiv 2505.23585)."""
    t = lengths.to(rewards.dtype)
    return rewards - _sum(t * rewards, groups) / _sum(t, groups).clamp(min=1)


def remax(rewards: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """r_i minus the reward [B] of a greedy answer to the same prompt (Li et al. 2023, arXiv 2310.10505)."""
    return rewards - greedy


def gpg(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r_i - mean) B / B', B' the samples of groups with any spread (GPG, Chu et al. 2025, arXiv 2504.02546)."""
    live = (~no_spread(rewards, groups)).sum().clamp(min=1)
    return dr_grpo(rewards, groups) * len(rewards) / live


def on_last_token(x: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor) -> torch.Tensor:
    """x [B] on each sample's last token of the mask, 0 elsewhere: [N]."""
    place = torch.arange(len(seq), device=seq.device)
    last = torch.full((len(x),), -1, device=seq.device).scatter_reduce_(0, seq, torch.where(mask, place, -1), "amax")
    return torch.where(last[seq] == place, x[seq], 0.0)


def reinforce_pp(token_rewards: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, *, gamma: float = 1.0) -> torch.Tensor:
    """Discounted return-to-go [N], whitened over the batch's tokens in the mask (REINFORCE++, Hu 2025, arXiv 2501.03262).

    Its group-baseline variant subtracts the group's mean reward before (`advantage.group_baseline`).
    """
    returns = _skipping(token_rewards, mask, seq, gamma)
    return masked_whiten(returns, mask)


def _skipping(x: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, discount: float) -> torch.Tensor:
    """Suffix sums over the tokens of the mask only: others add nothing and take no discount; 0 there."""
    d = torch.where(mask, discount, 1.0).to(x.dtype)
    # S_t = x_t + discount S_{t'} with t' the next token in the mask: a skipped token hands S on undiscounted.
    return torch.where(mask, discounted_suffix(torch.where(mask, x, 0.0), seq, d), 0.0)


def _next_value(values: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, bootstrap: torch.Tensor) -> torch.Tensor:
    """V at the next token of the mask; after the last one, bootstrap [B]."""
    rows = Rows(seq)
    v, m = rows.matrix(torch.where(mask, values, 0.0)), rows.matrix(mask)
    first = seq[torch.cat([seq.new_ones(1, dtype=torch.bool), seq[1:] != seq[:-1]])] if len(seq) else seq
    carry, out = bootstrap.to(v.dtype)[first], torch.empty_like(v)
    for t in range(v.shape[1] - 1, -1, -1):
        out[:, t] = carry
        carry = torch.where(m[:, t], v[:, t], carry)
    return rows.packed(out)


def td_residual(token_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, bootstrap: torch.Tensor,
                gamma: float = 1.0) -> torch.Tensor:  # fmt: skip
    """delta_t = r_t + gamma V_{t+1} - V_t over the tokens of the mask, 0 elsewhere: [N].  bootstrap [B]: V after the last token,
    0 where the answer ended by itself."""
    after = _next_value(values, mask, seq, bootstrap)
    return torch.where(mask, token_rewards + gamma * after - values, 0.0)


def gae(token_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, bootstrap: torch.Tensor, *,
        gamma: float = 1.0, lam: float = 0.95) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(advantages, returns) [N]: A_t = sum_l (gamma lam)^l delta_{t+l}, returns = A + V (Schulman et al. 2015, arXiv 1506.02438).

    token_rewards, values [N]; bootstrap [B] is 0 at EOS and V at truncation.  Tokens outside the mask are skipped, as if absent.
    lam = 1: return minus value; lam = 0: the TD residual.
    """
    adv = _skipping(td_residual(token_rewards, values, mask, seq, bootstrap, gamma), mask, seq, gamma * lam)
    return adv, torch.where(mask, adv + values, 0.0)


def k_step(token_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, bootstrap: torch.Tensor, *,
           k: int, gamma: float = 1.0, lam: float = 1.0) -> torch.Tensor:  # fmt: skip
    """gae cut after k terms: sum_{l<k} (gamma lam)^l delta_{t+l} (Mnih et al. 2016, arXiv 1602.01783); k >= 1."""
    rows = Rows(seq[mask])
    out = torch.zeros_like(values)
    if not len(seq[mask]):
        return out
    d = rows.matrix(td_residual(token_rewards, values, mask, seq, bootstrap, gamma)[mask])
    total = torch.zeros_like(d)
    for step in range(min(k, d.shape[1])):
        total[:, : d.shape[1] - step] += (gamma * lam) ** step * d[:, step:]
    out[mask] = rows.packed(total)
    return out


def process_grpo(token_rewards: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, groups: torch.Tensor, *, ddof: int = 1,
                 eps: float = 1e-4) -> torch.Tensor:  # fmt: skip
    """The process-supervised form of grpo (DeepSeekMath, section 4.1.3): [N].

    Steps are the tokens whose reward is not 0; each is normalised by mean and std over all steps of its group, and a token's
    advantage is the sum of the normalised rewards from it on.
    """
    step = mask & (token_rewards != 0)
    group, many = groups[seq], int(groups.max()) + 1
    one, r = step.to(token_rewards.dtype), torch.where(step, token_rewards, 0.0)
    count = seq_sum(one, group, many).clamp(min=1)
    mean = seq_sum(r, group, many) / count
    centred = torch.where(step, token_rewards - mean[group], 0.0)
    std = (seq_sum(centred.square(), group, many) / (count - ddof).clamp(min=1)).sqrt()
    return _skipping(centred / (std[group] + eps), mask, seq, 1.0)


def whiten(x: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """Mean 0, standard deviation 1 over the batch (ddof 1); a single value becomes 0."""
    return (x - x.mean()) / (x.std() + eps) if len(x) > 1 else torch.zeros_like(x)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """whiten over the tokens of the mask; 0 elsewhere."""
    out = torch.zeros_like(x)
    out[mask] = whiten(x[mask], eps)
    return out


def to_unit(x: torch.Tensor) -> torch.Tensor:
    """Rewards scaled to [0, 1] over the batch; all equal: 0."""
    return (x - x.min()) / (x.max() - x.min()).clamp(min=1e-12) if len(x) else x


def overlong_penalty(lengths: torch.Tensor, limit: int, ramp: int) -> torch.Tensor:
    """A linear ramp [B] from 0 at `limit - ramp` tokens to 1 at `limit` (soft overlong punishment of DAPO, arXiv 2503.14476)."""
    return ((lengths - (limit - ramp)) / max(ramp, 1)).clamp(0.0, 1.0)
