"""A whole batch before its first step: tokens in the loss, shaped rewards and advantages.

Nothing here carries a gradient. `loss` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrl.algorithms import advantages, diagnostics, kl, ratios, settings
from asyncrl.algorithms.settings import Settings
from asyncrl.contract.errors import ConfigError


@dataclass
class LossBatch:
    """The packed batch that the loss takes: N response tokens of B samples.

    Required:
        seq: int64 [N], the sample of each token. All training sequences of a session have one
            sample number, one after another, so lengths, sequence ratios and weights cover all of
            them.
        behavior: fp32 [N], log mu.
        mask: bool [N], tokens that may be trained.
        token_lag: int64 [N], versions between the sampling policy and the start.
        rewards: fp32 [B].
        groups: int64 [B].
        truncated: bool [B].

    Optional:
        start: [N], the learner's policy at the start of the batch, the origin of all measurements.
        proximal: [N], pi_prox, the denominator of the loss: the start (correction.proximal =
            recompute), mu (behavior), between the two (interpolate) or `version`.
        version: [N], the learner's weights of the version that sampled each token; nan: unknown.
        reference: [N], the reference policy of the loss and the metrics.
        reward_reference: [N], the reference of KL in the reward where it differs.
        token_rewards: [N]; a sample without any has its reward on its last token.
        steps: bool [N], the last token of each step of process supervision; absent: see
            `advantages.find_step_ends`.
        values: [N].
        bootstrap: [B], V after the last token of a truncated sample.
        greedy: [B], reward of a greedy completion of the same prompt.
        greedy_truncated: bool [B] of that completion.
        greedy_lengths: int64 [B] of that completion, in tokens.
        age: int64 [N], versions between the weights that sampled a token and the oldest weights
            that computed any key or value it attended to.
        squared_norms: [B], of each sample's gradient.
        energy: [N], squared norm of each token's gradient with respect to the logits.
        baselines: [B], running mean of the prompt's rewards; nan: its first batch.
        parts: [B, P], the named parts of the reward, where all samples have the same ones.

    All log-probabilities are at the sample's own temperature.
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
    token_rewards: torch.Tensor | None = None
    values: torch.Tensor | None = None
    bootstrap: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    start: torch.Tensor | None = None
    greedy_truncated: torch.Tensor | None = None
    greedy_lengths: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    reward_reference: torch.Tensor | None = None
    age: torch.Tensor | None = None
    squared_norms: torch.Tensor | None = None
    energy: torch.Tensor | None = None
    version: torch.Tensor | None = None
    baselines: torch.Tensor | None = None
    parts: torch.Tensor | None = None
    part_names: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of samples B."""
        return len(self.rewards)


@dataclass
class ShapedRewards:
    """Rewards after the handling of truncated samples and scaling, before KL.

    answers: [B].
    greedy: [B], of the greedy completions, shaped the same way.
    tokens: [N], on trained tokens, where the batch has token rewards and the advantage uses them.
    totals: [B], sums of `tokens`; `answers - totals` on the last token completes `answers`.
    """

    answers: torch.Tensor
    greedy: torch.Tensor | None
    tokens: torch.Tensor | None = None
    totals: torch.Tensor | None = None


def _shape_truncated(
    rewards: torch.Tensor, truncated: torch.Tensor, lengths: torch.Tensor, config: Settings
) -> torch.Tensor:
    """Apply `advantage.truncated`: rewards [B], truncated bool [B], lengths int64 [B] in tokens."""
    a = config.advantage
    penalty = float(a.truncation_penalty)
    if a.truncated == "penalty":
        return rewards - penalty * truncated
    if a.truncated == "soft":
        return rewards - penalty * advantages.compute_overlong_penalty(
            lengths, config.generator.max_new_tokens, a.truncation_ramp
        )
    if a.truncated in ("zero", "fixed"):
        return torch.where(truncated, -penalty if a.truncated == "fixed" else 0.0, rewards)
    return rewards


# advantage.rewards -> rewards scaled by those of the batch, `over`
SCALES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "raw": lambda rewards, batch_rewards: rewards,
    "unit": advantages.scale_to_unit,
    "whiten": lambda rewards, batch_rewards: advantages.whiten(rewards, reference=batch_rewards),
}


def shape_rewards(batch: LossBatch, valid: torch.Tensor, config: Settings) -> ShapedRewards:
    """Apply `advantage.truncated` and `advantage.rewards` to the rewards and greedy baselines."""
    a = config.advantage
    n = batch.count
    token_rewards = batch.token_rewards if a.name in advantages.BY_TOKEN else None
    earned = (
        batch.rewards
        if token_rewards is None
        else ratios.sum_by_sample(token_rewards, batch.seq, n)
    )
    lengths = ratios.sum_by_sample(batch.mask.long(), batch.seq, n)
    rewards = _shape_truncated(earned, batch.truncated, lengths, config)
    greedy = None
    if batch.greedy is not None:
        assert batch.greedy_truncated is not None and batch.greedy_lengths is not None
        greedy = _shape_truncated(
            batch.greedy, batch.greedy_truncated, batch.greedy_lengths, config
        )
    batch_rewards = rewards if greedy is None else torch.cat([rewards, greedy])
    scale = ratios.choose_function("advantage.rewards", SCALES, a.rewards)
    shaped = ShapedRewards(
        scale(rewards, batch_rewards), None if greedy is None else scale(greedy, batch_rewards)
    )
    if token_rewards is not None:
        ends = torch.tensor([1.0, 0.0], dtype=rewards.dtype, device=rewards.device)
        scaled_one, scaled_zero = scale(ends, batch_rewards)
        factor = (scaled_one - scaled_zero).expand(n)
        if a.truncated in ("zero", "fixed"):  # replaces all token rewards of a truncated sample
            factor = torch.where(batch.truncated, 0.0, factor)
        shaped.tokens = advantages.credit_trained_tokens(
            factor[batch.seq] * token_rewards, valid, batch.seq
        )
        shaped.totals = factor * earned
    return shaped


def _compute_reference_ratio(batch: LossBatch, config: Settings) -> torch.Tensor:
    """Return log pi / pi_ref [N] for KL in the reward.

    pi is the learner's start, or mu where kl.reward.at = behavior.
    """
    policy = batch.behavior if config.kl.reward.at == "behavior" else batch.start
    ref = batch.reference if batch.reward_reference is None else batch.reward_reference
    if policy is None or ref is None:
        raise ConfigError(
            "kl.reward.coefficient: the batch has no log-probabilities of the learner's start or "
            "of the reference"
        )
    return ratios.subtract(policy, ref)


def compute_advantage(
    batch: LossBatch, valid: torch.Tensor, config: Settings, baseline: float, beta: float
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return (advantage [N], returns [N] or None, scalars for the metrics)."""
    rewards = shape_rewards(batch, valid, config)
    kl_penalty = None
    if beta > 0:
        reference_ratio = torch.where(valid, _compute_reference_ratio(batch, config), 0.0)
        estimate = kl.estimate(config.kl.reward.estimator, reference_ratio)
        kl_penalty = beta * torch.where(valid, estimate, 0.0)
        # the k1 estimate of KL(start || reference) in nats per sample: the mean over samples with
        # a token in the loss of the sum over their tokens
        has_tokens = ratios.sum_by_sample(valid.to(estimate.dtype), batch.seq, batch.count) > 0
        sample_kl = reference_ratio.sum() / has_tokens.sum().clamp(min=1)
    adv, returns = _compute_penalized(batch, valid, rewards, kl_penalty, config, baseline)
    net_rewards = (
        rewards.answers
        if kl_penalty is None
        else rewards.answers - ratios.sum_by_sample(kl_penalty, batch.seq, batch.count)
    )
    scalars = {
        "reward/mean": batch.rewards.mean(),
        "reward/std": _compute_std(batch.rewards),
        "reward/min": batch.rewards.amin(),
        "reward/max": batch.rewards.amax(),
        "reward/used_mean": net_rewards.mean(),
        "advantage/std": _compute_std(
            ratios.average_by_sample(adv, batch.mask, batch.seq, batch.count)
        ),
        "reward/no_spread_share": advantages.find_zero_variance(batch.rewards, batch.groups)
        .float()
        .mean(),
        "answer/truncated_share": batch.truncated.float().mean(),
    }
    if kl_penalty is not None and config.loss.surrogate != "sft":
        unpenalized = _compute_penalized(batch, valid, rewards, None, config, baseline)[0]
        norm, penalty_norm = (
            torch.where(valid, x, 0.0).norm() for x in (unpenalized, adv - unpenalized)
        )
        scalars["kl/reward_gradient_share"] = penalty_norm / norm.clamp(min=1e-15)
    if kl_penalty is not None:
        scalars["kl/answer"] = sample_kl
    if batch.greedy is not None:
        scalars["reward/greedy"] = batch.greedy.mean()
    if returns is not None and batch.values is not None:
        scalars["value/explained_variance"] = diagnostics.compute_explained_variance(
            batch.values, returns, valid
        )
        scalars["value/mean"] = ratios.average_masked(batch.values, valid)
    return torch.where(valid, adv, 0.0), returns, scalars


def _compute_penalized(
    batch: LossBatch,
    valid: torch.Tensor,
    rewards: ShapedRewards,
    kl_penalty: torch.Tensor | None,
    config: Settings,
    baseline: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (advantage [N], returns [N] or None) of the rewards minus the KL penalty [N]."""
    a = config.advantage
    if config.loss.surrogate == "sft":
        return (batch.rewards > 0).to(batch.rewards.dtype)[batch.seq], None
    by_token = rewards.tokens is not None or a.name not in advantages.BY_ANSWER
    if by_token and a.name in advantages.BY_TOKEN:
        bootstrap = batch.bootstrap
        token_rewards = advantages.TokenRewards(
            answers=rewards.answers,
            mask=valid,
            seq=batch.seq,
            groups=batch.groups,
            kl_penalty=kl_penalty,
            unshaped=batch.token_rewards,
            tokens=rewards.tokens,
            totals=rewards.totals,
            steps=batch.steps,
            values=batch.values,
            bootstrap=None if bootstrap is None else torch.where(batch.truncated, bootstrap, 0.0),
            energy=batch.energy,
        )
        return advantages.BY_TOKEN[a.name](token_rewards, a)
    by_name = ratios.choose_function("advantage.name", advantages.BY_ANSWER, a.name)
    net = rewards.answers
    if kl_penalty is not None:
        net = net - ratios.sum_by_sample(kl_penalty, batch.seq, len(net))
    lengths = ratios.sum_by_sample(batch.mask.to(net.dtype), batch.seq, len(net))
    answers = advantages.ResponseRewards(net, batch.groups, lengths, rewards.greedy, baseline)
    answers.baselines = batch.baselines
    answers.parts, answers.part_names = batch.parts, batch.part_names
    if a.name == "opob" and batch.start is not None:
        answers.weights = _compute_sample_ratios(batch)
        answers.squared_norms = batch.squared_norms
    adv = by_name(answers, a)
    whiten = isinstance(a, settings.AnswerAdvantage) and a.whiten
    return (advantages.whiten(adv) if whiten else adv)[batch.seq], None


def _compute_sample_ratios(batch: LossBatch) -> torch.Tensor:
    """Return start / mu of each whole sample [B], not truncated."""
    assert batch.start is not None
    log_w = torch.where(batch.mask, ratios.subtract(batch.start, batch.behavior), 0.0)
    log_ratios = ratios.sum_by_sample(log_w, batch.seq, batch.count)
    return log_ratios.clamp(-ratios.CLAMP, ratios.CLAMP).exp()


def _compute_std(x: torch.Tensor) -> torch.Tensor:
    return x.std() if len(x) > 1 else x.new_zeros(())
