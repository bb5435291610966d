"""Names of the metrics that the mathematics emits: name -> (unit, meaning).

Plain data; imports nothing.
"""

from __future__ import annotations

METRIC_NAMES: dict[str, tuple[str, str]] = {
    "reward/min": ("reward", "smallest reward of the batch"),
    "reward/max": ("reward", "largest reward of the batch"),
    "reward/used_mean": (
        "reward",
        "mean reward that enters the advantage, after truncation, scaling and KL; baseline = "
        "ema follows it",
    ),
    "reward/greedy": (
        "reward",
        "mean reward of the groups' greedy completions, the baseline of remax; no other "
        "metric of the loss contains them",
    ),
    "advantage/mean": ("-", "mean advantage over valid tokens"),
    "advantage/abs_max": ("-", "largest |advantage| of a valid token"),
    "answer/masked_share": (
        "share",
        "response tokens outside the loss: by the loss mask, staleness.on_exceed = mask, or "
        "as truncated completions",
    ),
    "is/chi2": (
        "-",
        "mean of the squared ratio start/behavior, minus 1; start is the learner as the "
        "batch begins, whatever the proximal policy",
    ),
    "is/weight_ess": ("share", "effective sample size of the weights that the loss uses"),
    "is/target_ess": (
        "share",
        "effective sample size of the raw ratios target/behavior, whatever weights the loss uses",
    ),
    "is/target_ratio": (
        "-",
        "mean of the raw ratios target/behavior, whatever weights the loss uses",
    ),
    "is/target_ratio_max": ("-", "largest raw ratio target/behavior of a token in the loss"),
    "is/ess_by_answer": ("share", "effective sample size of the completions' mean weights"),
    "is/log_ratio_p50": (
        "nats",
        "median of |log start/behavior| of a token (upper edge of its bin; bins grow by 15 %)",
    ),
    "is/log_ratio_p99": (
        "nats",
        "99th percentile of |log start/behavior| of a token (upper edge of its bin)",
    ),
    "is/rejected_share": ("share", "valid tokens excluded by correction.reject"),
    "is/vetoed_share": ("share", "valid tokens excluded by correction.veto"),
    "is/masked_share": ("share", "valid tokens whose weight the bound or M2PO set to 0"),
    "is/rejected_answers": ("share", "completions that lost all their tokens to rejection or veto"),
    "is/rejected_length": ("tokens", "mean length of those completions"),
    "is/rejected_reward": ("reward", "mean reward of those completions"),
    "is/vetoed_answers": (
        "share",
        "completions excluded by correction.veto; the rejected ones include them",
    ),
    "is/vetoed_length": ("tokens", "mean length of those completions"),
    "is/vetoed_reward": ("reward", "mean reward of those completions"),
    "is/masked_length": (
        "tokens",
        "mean length of the completions that hold the tokens of is/masked_share",
    ),
    "is/masked_reward": (
        "reward",
        "mean reward of the completions that hold the tokens of is/masked_share",
    ),
    "kl/start_target_k1": (
        "nats/token",
        "k1 estimate of KL(start || target): the mean of log pi_start - log pi_theta over "
        "the passes of the batch's updates; only where a later pass repeats completions of "
        "the first",
    ),
    "kl/behavior_target_k1": ("nats/token", "k1 estimate of KL(behavior || target)"),
    "kl/ref_target": (
        "nats/token",
        "forward KL(reference || target) on the samples: mean of r log r - r + 1, r = "
        "reference/target",
    ),
    "kl/loss_beta": ("-", "coefficient of the KL penalty in the loss"),
    "kl/answer": (
        "nats/answer",
        "with a KL penalty in the reward: k1 estimate of KL(start || reference) over whole "
        "completions, which kl.reward.controller steers",
    ),
    "kl/gradient_share": (
        "-",
        "KL penalty in the loss: norm of its gradient over that of the policy term, both "
        "with respect to the logprobs; not with kl.loss.off_policy = prefix_full or without a "
        "policy term",
    ),
    "kl/reward_gradient_share": (
        "-",
        "KL penalty in the reward: norm of the change that it makes to the advantages over "
        "the norm of the advantages without it",
    ),
    "clip/low": ("share", "tokens clipped at the lower bound"),
    "clip/high": ("share", "tokens clipped at the upper bound"),
    "clip/dual": ("share", "tokens clipped by the dual clip"),
    "loss/entropy": (
        "-",
        "entropy bonus, before its coefficient, summed over the batch's optimizer steps",
    ),
    "loss/value": (
        "-",
        "value loss, before its coefficient, summed over the batch's optimizer steps",
    ),
    "loss/kl_penalty": (
        "-",
        "term of reshape.kl_penalty, before its coefficient, summed over the batch's "
        "optimizer steps",
    ),
    "value/explained_variance": (
        "-",
        "1 - var(return - value) / var(return) at the start of the batch",
    ),
    "value/mean": ("reward", "mean value of the batch's tokens at its start"),
    "value/grad_norm": (
        "-",
        "gradient norm of the value head (and of its trunk, if it has one), mean over the "
        "batch's optimizer steps",
    ),
    "perplexity/behavior": ("-", "exp of the mean -log mu over tokens"),
    "perplexity/start": (
        "-",
        "exp of the mean -log pi_start over tokens; start is the learner as the batch begins",
    ),
    "perplexity/target": ("-", "exp of the mean -log pi_theta over tokens"),
    "perplexity/reference": ("-", "exp of the mean -log pi_ref over tokens"),
    "perplexity_by_answer/behavior": (
        "-",
        "exp of the mean over completions of the mean -log mu of each",
    ),
    "perplexity_by_answer/start": ("-", "the same for the learner as the batch begins"),
    "perplexity_by_answer/target": ("-", "the same for pi_theta"),
    "reshape/gamma": ("-", "mean gamma over valid tokens and optimizer steps"),
    "reshape/gamma_away": ("-", "mean gamma of tokens that push further away (A log w > 0)"),
    "reshape/gamma_back": ("-", "mean gamma of tokens that return (A log w < 0)"),
    "reshape/gamma_base": ("-", "gamma_base before the last optimizer step"),
    "reshape/sigma2": ("nats^2", "variance of log w before the last optimizer step"),
    "reshape/share": ("share", "g of the KL budget before the last optimizer step"),
    "reshape/ratio": ("-", "mean w = pi_theta / mu"),
    "reshape/used_ratio": ("-", "mean w^gamma"),
    "reshape/c": ("-", "mean C = A log w: above 0 where tokens move as their advantage says"),
    "reshape/p_correct": (
        "share",
        "mean P_correct = sigmoid(C / tau), the gate from gamma_base to gamma_target (mode v3.1)",
    ),
    "reshape/objective_mean": ("-", "mean of w^gamma A"),
    "reshape/objective_var": ("-", "variance of w^gamma A"),
    "optim/lr_scale": (
        "share",
        "learning-rate scale of the last optimizer step (stop.action = slow, stop.lr_by_ess)",
    ),
    "optim/answer_ess": (
        "share",
        "effective sample size of the last optimizer step's completions, by their whole "
        "ratios pi_theta / mu (stop.lr_by_ess)",
    ),
    "optim/stop_ess": ("share", "ESS of pi_theta / mu before the last optimizer step"),
}
BY_LAG = {
    "k1": ("nats/token", "kl/behavior_start_k1"),
    "update": ("nats/token", "kl/start_target_k1"),
    "target_k3": ("nats/token", "kl/behavior_target_k3"),
    "ess": ("share", "is/ess"),
    "clip": ("share", "clip/share"),
    "zero": ("share", "is/zero_share"),
    "entropy": ("nats/token", "policy/entropy"),
}
for _kind, (_unit, _of) in BY_LAG.items():
    for _bucket in ("0", "1", "2", "3to4", "5to8", "9plus"):
        METRIC_NAMES[f"by_lag/{_kind}_{_bucket}"] = (_unit, f"{_of} of tokens at lag {_bucket}")
