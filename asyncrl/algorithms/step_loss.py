"""One batch's loss, as the learner uses it.

    prep = prepare(batch, config)                  # once a batch: advantages, and weights if the proximal policy is known
    norm = norms(prep, seqs, config)               # once an optimizer step: the reduction's factors over that step's samples
    loss, sums = micro_loss(prep, norm, part, lp)  # per micro-batch; losses and sums add up to the step's

Everything is packed over response tokens, N in the batch, B samples.  A micro-batch holds whole samples, so sequence-level
quantities need nothing outside it; what is a statistic of the batch is computed in `prepare`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from asyncrl.algorithms import advantages, kl, ratios, surrogates
from asyncrl.algorithms import weights as weighting

BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 10**9))


@dataclass
class LossBatch:
    """seq, token_lag int64 [N]; behavior fp32 [N]; mask bool [N]; rewards fp32 [B]; groups int64 [B]; truncated bool [B].

    proximal, reference fp32 [N] or None.
    """

    seq: torch.Tensor
    behavior: torch.Tensor
    mask: torch.Tensor
    token_lag: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor
    truncated: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None


@dataclass
class Prepared:
    batch: LossBatch
    config: Any
    advantage: torch.Tensor  # [N]
    valid: torch.Tensor  # bool [N]: tokens in the loss
    fade: torch.Tensor  # [N] factor of staleness.on_exceed = downweight
    weight: torch.Tensor | None  # [N] importance weights, or None: taken from the forward of the only optimizer step
    beta: float
    metrics: dict[str, float] = field(default_factory=dict)


def needs_proximal_first(config: Any) -> bool:
    """Must the proximal logprobs be known before the first optimizer step of a batch?"""
    several = config.learner.epochs * config.learner.minibatches > 1
    return bool(several or config.correction.self_normalize or (config.kl.coefficient > 0 and config.kl.placement == "reward"))


def prepare(batch: LossBatch, config: Any, *, baseline: float = 0.0, beta: float | None = None) -> Prepared:
    """The pre-pass over the whole batch.  baseline: of advantage.name = reinforce.  Nothing here carries a gradient."""
    beta = config.kl.coefficient if beta is None else beta
    valid = batch.mask & _kept(batch, config)
    fade = torch.ones_like(batch.behavior)
    if config.staleness.on_exceed == "downweight":
        excess = (batch.token_lag - config.staleness.max_lag).clamp(min=0).to(fade.dtype)
        fade = torch.pow(0.5, excess / config.staleness.half_life)
    rewards = _shaped(batch, config, beta)
    adv = _advantages(rewards, batch, config, baseline)
    weight = None
    if batch.proximal is not None:
        weight = importance(ratios.log_ratio(batch.proximal, batch.behavior), valid, batch.seq, len(batch.rewards), config)
    metrics = {
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std()) if len(batch.rewards) > 1 else 0.0,
        "advantage/std": float(adv.std()) if len(adv) > 1 else 0.0,
        "reward/no_spread_share": _no_spread(batch),
        "answer/truncated_share": float(batch.truncated.float().mean()),
    }
    return Prepared(batch, config, adv[batch.seq], valid, fade, weight, beta, metrics)


def _kept(batch: LossBatch, config: Any) -> torch.Tensor:
    """Tokens that staleness.on_exceed = mask and advantage.truncated = mask leave in the loss."""
    keep = torch.ones_like(batch.mask)
    if config.staleness.on_exceed == "mask":
        keep &= batch.token_lag <= config.staleness.max_lag
    if config.advantage.truncated == "mask":
        keep &= ~batch.truncated[batch.seq]
    return keep


def _shaped(batch: LossBatch, config: Any, beta: float) -> torch.Tensor:
    """Rewards after the truncation penalty and a KL term in the reward (k of pi_prox against pi_ref, summed over the answer)."""
    rewards = batch.rewards.clone()
    if config.advantage.truncated == "penalty":
        rewards = rewards - config.advantage.truncation_penalty * batch.truncated
    if beta > 0 and config.kl.placement == "reward":
        assert batch.proximal is not None and batch.reference is not None
        k = kl.estimate(config.kl.estimator, ratios.log_ratio(batch.proximal, batch.reference))
        rewards = rewards - beta * ratios.seq_sum(torch.where(batch.mask, k, 0.0), batch.seq, len(rewards))
    return rewards


def _advantages(rewards: torch.Tensor, batch: LossBatch, config: Any, baseline: float) -> torch.Tensor:
    a = config.advantage
    if a.name == "rloo":
        adv = advantages.rloo(rewards, batch.groups)
    elif a.name == "grpo":
        adv = advantages.grpo(rewards, batch.groups, ddof=a.ddof, eps=a.eps)
    elif a.name == "dr_grpo":
        adv = advantages.dr_grpo(rewards, batch.groups)
    else:
        b = {"none": 0.0, "batch": float(rewards.mean()), "ema": baseline}[a.baseline]
        adv = advantages.reinforce(rewards, b)
    return advantages.whiten(adv) if a.whiten else adv


def _no_spread(batch: LossBatch) -> float:
    spread = (batch.rewards - advantages.group_mean(batch.rewards, batch.groups)).abs()
    return float((advantages.group_mean(spread, batch.groups) < 1e-9).float().mean())


def importance(log_rho: torch.Tensor, valid: torch.Tensor, seq: torch.Tensor, n: int, config: Any) -> torch.Tensor:
    """Bounded, perhaps self-normalised importance weights prox / behaviour [N]."""
    c = config.correction
    lo, hi = weighting.DEFAULT_BOUNDS[c.level]
    w = weighting.bounded(weighting.weights(log_rho, valid, seq, n, c.level), c.bound, lo if c.lo is None else c.lo, hi if c.hi is None else c.hi)
    return weighting.self_normalized(w, valid, seq, n, c.level) if c.self_normalize else w


def norms(prep: Prepared, seqs: torch.Tensor, config: Any) -> torch.Tensor:
    """Factor [N] of each token in one optimizer step over the samples `seqs`: global counts, so micro-batches add up."""
    n = len(prep.batch.rewards)
    inside = torch.zeros(n, dtype=torch.bool)
    inside[seqs] = True
    mine = prep.valid & inside[prep.batch.seq]
    tokens = ratios.seq_sum(mine.float(), prep.batch.seq, n)
    samples = (tokens > 0).sum().clamp(min=1)
    how = config.loss.reduction
    if how == "token-mean":
        factor = torch.full((n,), 1.0) / tokens.sum().clamp(min=1)
    elif how == "seq-mean-token-sum":
        factor = torch.full((n,), 1.0) / samples
    elif how == "seq-mean-token-mean":
        factor = 1.0 / (samples * tokens.clamp(min=1))
    else:
        factor = torch.full((n,), 1.0) / (samples * (config.loss.norm_length or config.generator.max_new_tokens))
    return torch.where(mine, factor[prep.batch.seq], 0.0)


def _trust(log_r: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, valid: torch.Tensor, seq: torch.Tensor, n: int, loss: Any) -> surrogates.Pair:
    def eps(default_low: float, default_high: float) -> dict[str, float]:
        return {"low": default_low if loss.eps_low is None else loss.eps_low, "high": default_high if loss.eps_high is None else loss.eps_high}

    if loss.surrogate == "vanilla":
        return surrogates.vanilla(log_r, adv)
    if loss.surrogate in ("ppo", "decoupled_ppo"):
        return surrogates.ppo(log_r, adv, dual=loss.dual_clip, **eps(0.2, 0.2))
    if loss.surrogate == "cispo":
        return surrogates.cispo(log_r, adv, high=eps(0.2, 0.2)["high"])
    if loss.surrogate == "gspo":
        return surrogates.gspo(log_r, adv, valid, seq, n, **eps(3e-4, 4e-4))
    if loss.surrogate == "sapo":
        return surrogates.sapo(log_r, adv, tau_pos=loss.sapo_tau_pos, tau_neg=loss.sapo_tau_neg)
    return surrogates.dppo(log_r, adv, lp.exp(), threshold=loss.dppo_threshold)


def micro_loss(prep: Prepared, norm: torch.Tensor, part: torch.Tensor, lp: torch.Tensor,
               entropy: torch.Tensor | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Loss of one micro-batch (its share of the step's) and sums for the metrics.

    part int64 [n]: its tokens' places among N, whole samples; lp [n] with gradient; entropy [n] or None.
    """
    b, c = prep.batch, prep.config
    seq, beh, valid, adv, factor = b.seq[part], b.behavior[part], prep.valid[part], prep.advantage[part], norm[part]
    n, now = len(b.rewards), lp.detach()
    prox = now if b.proximal is None else b.proximal[part]
    log_r = ratios.log_ratio(now, prox)
    w = importance(ratios.log_ratio(prox, beh), valid, seq, n, c) if prep.weight is None else prep.weight[part]
    if c.correction.proximal == "behavior":
        w = torch.ones_like(w)
    phi, value = _trust(log_r, adv, now, valid, seq, n, c.loss)
    coefficient = torch.where(valid, adv * phi * w * prep.fade[part] * factor, 0.0)
    lp_safe = torch.where(valid, lp, 0.0)
    loss = -(coefficient * lp_safe).sum()
    if entropy is not None and c.loss.entropy:
        loss = loss - c.loss.entropy * (torch.where(valid, entropy, 0.0) * factor).sum()
    sums = _sums(prep, part, valid, now, prox, w, phi, entropy)
    sums["loss/policy"] = -torch.where(valid, value * w * prep.fade[part] * factor, 0.0).sum()
    if b.reference is not None:
        x = torch.where(valid, torch.nan_to_num(lp_safe - b.reference[part]).clamp(-ratios.CLAMP, ratios.CLAMP), 0.0)
        if prep.beta > 0 and c.kl.placement == "loss":
            term = (kl.estimate(c.kl.estimator, x) * factor).sum()
            loss = loss + prep.beta * term
            sums["loss/kl"] = term.detach()
        sums["sum/ref_k1"], sums["sum/ref_k3"] = x.detach().sum(), kl.k3(x.detach()).sum()
    return loss, sums


def _sums(prep: Prepared, part: torch.Tensor, valid: torch.Tensor, now: torch.Tensor, prox: torch.Tensor, w: torch.Tensor, phi: torch.Tensor,
          entropy: torch.Tensor | None) -> dict[str, torch.Tensor]:  # fmt: skip
    """Token sums over the valid tokens of a micro-batch."""
    beh, lag = prep.batch.behavior[part][valid], prep.batch.token_lag[part][valid]
    now, prox, w = now[valid], prox[valid], w[valid]
    a, b, t = ratios.log_ratio(prox, beh), ratios.log_ratio(now, prox), ratios.log_ratio(now, beh)
    k_ab, k_t = kl.k3(-a), kl.k3(-t)
    out = {
        "count": torch.tensor(float(len(now))), "sum/w": w.sum(), "sum/w2": w.square().sum(), "max/ratio": a.exp().amax() if len(a) else a.sum(),
        "sum/beh_prox_k1": -a.sum(), "sum/beh_prox_k3": k_ab.sum(), "sum/prox_target_k3": kl.k3(-b).sum(), "sum/beh_target_k3": k_t.sum(),
        "sum/staleness": -a.sum(), "sum/update": -b.sum(), "sum/behavior_nll": -beh.sum(), "sum/clipped": (phi[valid] == 0).sum().float(),
        "sum/zero_w": (w == 0).sum().float(),
    }  # fmt: skip
    fresh = lag == 0
    out["sum/fresh"], out["sum/fresh_k3"] = fresh.sum().float(), k_ab[fresh].sum()
    for lo, hi in BUCKETS:
        at = (lag >= lo) & (lag <= hi)
        name = f"{lo}" if lo == hi else (f"{lo}plus" if hi > 10**6 else f"{lo}to{hi}")
        out[f"bucket/{name}/n"], out[f"bucket/{name}/k3"], out[f"bucket/{name}/w"] = at.sum().float(), k_ab[at].sum(), w[at].sum()
    if entropy is not None:
        out["sum/entropy"] = entropy.detach()[valid].sum()
    return out


def add_sums(total: dict[str, torch.Tensor], more: dict[str, torch.Tensor]) -> None:
    """Accumulate in place: sums add, maxima take the larger."""
    for name, x in more.items():
        if name not in total:
            total[name] = x
        else:
            total[name] = torch.maximum(total[name], x) if name.startswith("max/") else total[name] + x


def finish(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Metrics of a batch from its sums; one synchronisation with the device."""
    names = list(sums)
    v = dict(zip(names, torch.stack([sums[n].float() for n in names]).tolist(), strict=True)) if names else {}
    n = max(v.get("count", 0.0), 1.0)
    out = {
        "is/mean_weight": v.get("sum/w", 0) / n, "is/ess": v.get("sum/w", 0) ** 2 / max(n * v.get("sum/w2", 0), 1e-30), "is/ratio_max": v.get("max/ratio", 1),
        "is/zero_share": v.get("sum/zero_w", 0) / n, "kl/behavior_prox_k1": v.get("sum/beh_prox_k1", 0) / n,
        "kl/behavior_prox_k3": v.get("sum/beh_prox_k3", 0) / n, "kl/prox_target_k3": v.get("sum/prox_target_k3", 0) / n,
        "kl/behavior_target_k3": v.get("sum/beh_target_k3", 0) / n, "split/staleness_and_mismatch": v.get("sum/staleness", 0) / n,
        "split/update": v.get("sum/update", 0) / n, "clip/share": v.get("sum/clipped", 0) / n, "loss/policy": v.get("loss/policy", 0),
        "policy/behavior_nll": v.get("sum/behavior_nll", 0) / n,
    }  # fmt: skip
    if v.get("sum/fresh", 0) > 0:
        out["mismatch/k3_at_lag_0"] = v["sum/fresh_k3"] / v["sum/fresh"]
    if "sum/entropy" in v:
        out["policy/entropy"] = v["sum/entropy"] / n
    if "sum/ref_k1" in v:
        out |= {"kl/target_ref_k1": v["sum/ref_k1"] / n, "kl/target_ref_k3": v["sum/ref_k3"] / n}
    if "loss/kl" in v:
        out["loss/kl"] = v["loss/kl"]
    for name in [x.split("/")[1] for x in v if x.startswith("bucket/") and x.endswith("/n")]:
        if (m := v[f"bucket/{name}/n"]) > 0:
            out |= {f"by_lag/k3_{name}": v[f"bucket/{name}/k3"] / m, f"by_lag/weight_{name}": v[f"bucket/{name}/w"] / m, f"by_lag/tokens_{name}": m}
    return out


def stop_statistic(prep: Prepared, part: torch.Tensor, lp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted sum, weight) of r - 1 - log r over a micro-batch: their quotient estimates KL(prox || theta).

    r = exp(lp - lp_prox); the weights are the truncated prox / behaviour ratios, because the samples are mu's.  With
    stop.against = behavior the anchor is mu itself and what the batch arrived with is subtracted by the caller.
    """
    b, valid = prep.batch, prep.valid[part]
    assert b.proximal is not None
    anchor = b.behavior[part] if prep.config.stop.against == "behavior" else b.proximal[part]
    log_r = ratios.log_ratio(lp.detach(), anchor)
    w = torch.ones_like(log_r)
    if prep.config.stop.against == "proximal" and prep.config.correction.proximal == "recompute":
        w = ratios.log_ratio(b.proximal[part], b.behavior[part]).exp().clamp(max=2.0)
    k = torch.expm1(log_r) - log_r
    return torch.where(valid, w * k, 0.0).sum(), torch.where(valid, w, 0.0).sum()
