"""The pre-pass over a whole batch: which tokens are in the loss, and their advantages.  No gradient; see step_loss for the whole."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from asyncrl.algorithms import advantages, kl, ratios, values
from asyncrl.errors import ConfigError


@dataclass
class LossBatch:
    """seq, token_lag int64 [N]; behavior fp32 [N]; mask bool [N]; rewards fp32 [B]; groups int64 [B]; truncated bool [B].

    Optional: start, anchor, reference, token_rewards, values [N]; bootstrap [B]: V after the last token of a truncated answer;
    greedy [B]: reward of a greedy answer to the same prompt.  All logprobs at the sample's own temperature.

    start: the learner's policy as the batch begins, which is what is measured against.  anchor: pi_prox, what the loss divides by; it
    is the start (correction.proximal = recompute), mu (behavior) or between the two (interpolate).
    """

    seq: torch.Tensor
    behavior: torch.Tensor
    mask: torch.Tensor
    token_lag: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor
    truncated: torch.Tensor
    anchor: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    token_rewards: torch.Tensor | None = None
    values: torch.Tensor | None = None
    bootstrap: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    start: torch.Tensor | None = None


def section(config: Any, key: str, /, **defaults: Any) -> Any:
    """config.key, or a stand-in with the defaults; keys that the section lacks are filled in too."""
    found = getattr(config, key, None)
    missing = {k: v for k, v in defaults.items() if not hasattr(found, k)}
    if found is not None and not missing:
        return found
    return SimpleNamespace(**missing, **{k: getattr(found, k) for k in defaults if k not in missing})


def kept(batch: LossBatch, config: Any) -> torch.Tensor:
    """Tokens that staleness.on_exceed = mask and advantage.truncated = mask leave in the loss."""
    keep = torch.ones_like(batch.mask)
    if config.staleness.on_exceed == "mask":
        keep &= batch.token_lag <= config.staleness.max_lag
    if config.advantage.truncated == "mask":
        keep &= ~batch.truncated[batch.seq]
    return keep


def fade(batch: LossBatch, config: Any) -> torch.Tensor:
    """Factor [N]: half for each `half_life` versions above max_lag, under staleness.on_exceed = downweight."""
    factor = torch.ones_like(batch.behavior)
    if config.staleness.on_exceed == "downweight":
        factor = torch.pow(0.5, (batch.token_lag - config.staleness.max_lag).clamp(min=0).to(factor.dtype) / config.staleness.half_life)
    return factor


def _shaped(batch: LossBatch, config: Any) -> torch.Tensor:
    """Rewards [B] after the truncation penalty and scaling."""
    a = section(config, "advantage", truncated="keep", truncation_penalty=0.0, truncation_ramp=1, rewards="raw")
    rewards = batch.rewards.clone()
    if a.truncated == "penalty":
        rewards = rewards - a.truncation_penalty * batch.truncated
    elif a.truncated == "soft":
        lengths = torch.bincount(batch.seq, minlength=len(rewards))
        rewards = rewards - a.truncation_penalty * advantages.overlong_penalty(lengths, config.generator.max_new_tokens, a.truncation_ramp)
    if a.rewards == "unit":
        return advantages.to_unit(rewards)
    return advantages.whiten(rewards) if a.rewards == "whiten" else rewards


def _kl_in_reward(batch: LossBatch, config: Any, beta: float) -> torch.Tensor | None:
    """beta * sg[k] per token [N], k of the learner's start against pi_ref, never of mu; None without such a term."""
    if beta <= 0 or config.kl.placement != "reward":
        return None
    if batch.start is None or batch.reference is None:
        raise ConfigError("kl.placement = reward: the batch carries no logprobs of the learner's start, or none of the reference")
    k = kl.estimate(config.kl.estimator, ratios.log_ratio(batch.start, batch.reference))
    return beta * torch.where(batch.mask, k, 0.0)


def advantage(batch: LossBatch, valid: torch.Tensor, config: Any, baseline: float,
                beta: float) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:  # fmt: skip
    """(advantage [N], returns [N] or None, numbers for the metrics)."""
    rewards, charge = _shaped(batch, config), _kl_in_reward(batch, config, beta)
    adv, returns = _charged(batch, valid, rewards, charge, config, baseline)
    numbers = {
        "reward/mean": batch.rewards.mean(), "reward/std": _std(batch.rewards),
        "reward/min": batch.rewards.amin(), "reward/max": batch.rewards.amax(),
        "advantage/std": _std(ratios.seq_mean(adv, batch.mask, batch.seq, len(rewards))),
        "reward/no_spread_share": advantages.no_spread(batch.rewards, batch.groups).float().mean(),
        "answer/truncated_share": batch.truncated.float().mean(),
    }  # fmt: skip
    if charge is not None and config.loss.surrogate != "sft":
        plain = _charged(batch, valid, rewards, None, config, baseline)[0]
        norm, own = (torch.where(valid, x, 0.0).norm() for x in (plain, adv - plain))
        numbers["kl/gradient_share"] = own / norm.clamp(min=1e-15)
    if batch.greedy is not None:
        numbers["reward/greedy"] = batch.greedy.mean()
    if returns is not None and batch.values is not None:
        numbers["value/explained_variance"] = values.explained_variance(batch.values, returns, valid)
        numbers["value/mean"] = ratios.masked_mean(batch.values, valid)
    return torch.where(valid, adv, 0.0), returns, numbers


def _charged(batch: LossBatch, valid: torch.Tensor, rewards: torch.Tensor, charge: torch.Tensor | None, config: Any,
             baseline: float) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(advantage [N], returns [N] or None) of rewards [B] less the KL charge [N]."""
    a = config.advantage
    if config.loss.surrogate == "sft":
        return (batch.rewards > 0).to(rewards.dtype)[batch.seq], None
    if a.name in advantages.TOKEN_LEVEL or (batch.token_rewards is not None and a.name == "grpo"):
        return _token_level(batch, valid, rewards, charge, config)
    if charge is not None:
        rewards = rewards - ratios.seq_sum(charge, batch.seq, len(rewards))
    adv = _by_answer(rewards, batch, a, baseline)
    return (advantages.whiten(adv) if a.whiten else adv)[batch.seq], None


def _std(x: torch.Tensor) -> torch.Tensor:
    return x.std() if len(x) > 1 else x.new_zeros(())


def _by_answer(rewards: torch.Tensor, batch: LossBatch, a: Any, baseline: float) -> torch.Tensor:
    """One advantage an answer: [B]."""
    if a.name == "rloo":
        return advantages.rloo(rewards, batch.groups)
    if a.name == "grpo":
        return advantages.grpo(rewards, batch.groups, ddof=a.ddof, eps=a.eps)
    if a.name == "dr_grpo":
        return advantages.dr_grpo(rewards, batch.groups)
    if a.name == "opo":
        return advantages.opo(rewards, batch.groups, ratios.seq_sum(batch.mask.to(rewards.dtype), batch.seq, len(rewards)))
    if a.name == "gpg":
        return advantages.gpg(rewards, batch.groups)
    if a.name == "remax":
        if batch.greedy is None:
            raise ConfigError("advantage.name = remax needs the reward of a greedy answer to each prompt (LossBatch.greedy)")
        return advantages.remax(rewards, batch.greedy)
    if a.name != "reinforce":
        raise ratios.unknown("advantage.name", a.name, advantages.NAMES)
    if a.baseline not in ("none", "batch", "ema"):
        raise ratios.unknown("advantage.baseline", a.baseline, ("none", "batch", "ema"))
    if a.baseline == "batch":
        return rewards - rewards.mean()
    return advantages.reinforce(rewards, baseline if a.baseline == "ema" else 0.0)


def _token_level(batch: LossBatch, valid: torch.Tensor, rewards: torch.Tensor, charge: torch.Tensor | None,
                 config: Any) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """reinforce_pp, gae and process-supervised grpo: (advantage [N], returns [N] or None)."""
    a = section(config, "advantage", name="", gamma=1.0, lam=0.95, k_step=0, group_baseline=False, whiten=False, ddof=1, eps=1e-4)
    if a.name == "reinforce_pp" and a.group_baseline:
        rewards = advantages.dr_grpo(rewards, batch.groups)
    given = advantages.on_last_token(rewards, valid, batch.seq) if batch.token_rewards is None else batch.token_rewards
    per_token = torch.where(valid, given if charge is None else given - charge, 0.0)
    if a.name == "grpo":
        return advantages.process_grpo(per_token, valid, batch.seq, batch.groups, ddof=a.ddof, eps=a.eps), None
    if a.name == "reinforce_pp":
        return advantages.reinforce_pp(per_token, valid, batch.seq, gamma=a.gamma), None
    if batch.values is None:
        raise ConfigError("advantage.name = gae needs values (LossBatch.values): a value head")
    end = rewards.new_zeros(len(rewards)) if batch.bootstrap is None else torch.where(batch.truncated, batch.bootstrap, 0.0)
    adv, returns = advantages.gae(per_token, batch.values, valid, batch.seq, end, gamma=a.gamma, lam=a.lam)
    if a.k_step > 0:
        adv = advantages.k_step(per_token, batch.values, valid, batch.seq, end, k=a.k_step, gamma=a.gamma, lam=a.lam)
    return advantages.masked_whiten(adv, valid) if a.whiten else adv, returns
