"""Names of the metrics that the mathematics emits: name -> (unit, meaning).  Plain data, imports nothing."""

from __future__ import annotations

METRIC_NAMES: dict[str, tuple[str, str]] = {
    "reward/min": ("reward", "smallest reward of the batch"),
    "reward/max": ("reward", "largest reward of the batch"),
    "adv/mean": ("-", "mean advantage over valid tokens"),
    "adv/abs_max": ("-", "largest |advantage| of a valid token"),
    "answer/masked_share": ("share", "response tokens outside the loss: loss mask, staleness.on_exceed = mask, truncated answers"),
    "is/chi2": ("-", "mean of the squared proximal/behaviour ratio, minus 1"),
    "is/target_ess": ("share", "effective sample size of the raw ratios target/behaviour, whatever weights the loss uses"),
    "is/ess_by_answer": ("share", "effective sample size of the answers' mean weights"),
    "is/log_ratio_p50": ("nats", "median of |log proximal/behaviour| of a token (upper edge of its bin; bins grow by 15 %)"),
    "is/log_ratio_p99": ("nats", "99th percentile of |log proximal/behaviour| of a token (upper edge of its bin)"),
    "is/rejected_share": ("share", "valid tokens dropped by correction.reject"),
    "is/vetoed_share": ("share", "valid tokens dropped by correction.veto"),
    "is/masked_share": ("share", "valid tokens whose weight the bound or M2PO set to 0"),
    "is/rejected_answers": ("share", "answers that lost all their tokens to rejection or veto"),
    "is/rejected_length": ("tokens", "mean length of those answers"),
    "is/rejected_reward": ("reward", "mean reward of those answers"),
    "kl/prox_target_k1": ("nats/token", "k1 estimate of KL(proximal || target)"),
    "kl/behavior_target_k1": ("nats/token", "k1 estimate of KL(behaviour || target)"),
    "kl/ref_target": ("nats/token", "forward KL(reference || target) on the samples: mean of r log r - r + 1, r = reference/target"),
    "kl/gradient_share": ("-", "norm of the KL term's gradient over the policy term's, both with respect to the logprobs"),
    "clip/low": ("share", "tokens cut at the lower bound"),
    "clip/high": ("share", "tokens cut at the upper bound"),
    "clip/dual": ("share", "tokens cut by the dual clip"),
    "loss/entropy": ("-", "entropy bonus, before its coefficient, summed over the batch's optimizer steps"),
    "loss/value": ("-", "value loss, before its coefficient, summed over the batch's optimizer steps"),
    "loss/kl_penalty": ("-", "reshape.kl_penalty's term, before its coefficient, summed over the batch's optimizer steps"),
    "value/explained_variance": ("-", "1 - var(return - value) / var(return) at the start of the batch"),
    "perplexity/behavior": ("-", "exp of the mean -log mu over tokens"),
    "perplexity/proximal": ("-", "exp of the mean -log pi_prox over tokens"),
    "perplexity/target": ("-", "exp of the mean -log pi_theta over tokens"),
    "perplexity/reference": ("-", "exp of the mean -log pi_ref over tokens"),
    "perplexity_by_answer/behavior": ("-", "exp of the mean over answers of each one's mean -log mu"),
    "perplexity_by_answer/proximal": ("-", "the same for pi_prox"),
    "perplexity_by_answer/target": ("-", "the same for pi_theta"),
    "reshape/gamma": ("-", "mean gamma over valid tokens, all optimizer steps"),
    "reshape/gamma_away": ("-", "mean gamma of tokens that push further away (A log w > 0)"),
    "reshape/gamma_back": ("-", "mean gamma of tokens that come back (A log w < 0)"),
    "reshape/gamma_base": ("-", "gamma_base before the last optimizer step"),
    "reshape/sigma2": ("nats^2", "variance of log w before the last optimizer step"),
    "reshape/share": ("share", "g of the KL budget before the last optimizer step"),
    "reshape/ratio": ("-", "mean w = pi_theta / mu"),
    "reshape/used_ratio": ("-", "mean w^gamma"),
    "reshape/objective_mean": ("-", "mean of w^gamma A"),
    "reshape/objective_var": ("-", "variance of w^gamma A"),
    "optim/lr_scale": ("share", "learning-rate scale of the last optimizer step (stop.action = slow)"),
    "optim/stop_ess": ("share", "ESS of pi_theta / mu before the last optimizer step"),
}
BY_LAG = {
    "k1": ("nats/token", "kl/behavior_prox_k1"), "target_k3": ("nats/token", "kl/behavior_target_k3"), "ess": ("share", "is/ess"),
    "clip": ("share", "clip/share"), "zero": ("share", "is/zero_share"), "entropy": ("nats/token", "policy/entropy"),
}  # fmt: skip
for _kind, (_unit, _of) in BY_LAG.items():
    for _bucket in ("0", "1", "2", "3to4", "5to8", "9plus"):
        METRIC_NAMES[f"by_lag/{_kind}_{_bucket}"] = (_unit, f"{_of} of tokens at lag {_bucket}")
