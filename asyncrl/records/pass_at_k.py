"""Estimates from k samples a prompt: pass@k, its interval, and the metrics of an evaluation set.

Pure."""

import math
from collections.abc import Mapping, Sequence

from asyncrl.contract.messages import Numbers

Z_95 = 1.959963984540054  # quantile of the normal distribution for a 95 % interval


def estimate_pass_at_k(samples: int, passed: int, count: int) -> float:
    """Estimate the probability that at least one of `count` samples of a prompt passes.

    It is the share of all subsets of `count` of the samples that hold a passed one, which is
    unbiased for any `samples` >= `count` (Chen et al. 2021, arXiv:2107.03374).

    samples: scored samples of the prompt. passed: of these, those that pass. Raises ValueError for
    fewer samples than `count`.

    >>> estimate_pass_at_k(4, 1, 1), estimate_pass_at_k(4, 1, 4), estimate_pass_at_k(4, 2, 2)
    (0.25, 1.0, 0.8333333333333334)
    """
    if not 1 <= count <= samples:
        raise ValueError(f"pass@{count} needs at least {count} samples, not {samples}")
    return 1.0 - math.comb(samples - passed, count) / math.comb(samples, count)


def compute_share_interval(shares: Sequence[float], most: float) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `shares`, one in [0, 1] for each prompt.

    Prompts are independent, samples of a prompt are not. It is Wilson's score interval (1927) with
    an effective number of trials: the one whose binomial variance is that of the prompts' mean.
    Unlike the normal interval it has a width where all shares are 0 or 1, and stays in [0, 1].

    most: the largest effective number of trials, the number of all samples.

    >>> [round(bound, 3) for bound in compute_share_interval([1.0] * 20, 20)]
    [0.839, 1.0]
    """
    prompts = len(shares)
    mean = math.fsum(shares) / prompts
    squares = math.fsum((share - mean) ** 2 for share in shares)
    trials = float(prompts)
    if squares > 0 and prompts > 1:
        trials = mean * (1 - mean) * prompts * (prompts - 1) / squares
    elif 0 < mean < 1:
        trials = most
    trials = min(max(trials, prompts), max(most, prompts))
    squared = Z_95**2 / trials
    center = (mean + squared / 2) / (1 + squared)
    half = Z_95 * math.sqrt(mean * (1 - mean) / trials + squared / (4 * trials)) / (1 + squared)
    return max(0.0, min(center - half, mean)), min(1.0, max(center + half, mean))  # rounding


def compute_set_metrics(
    name: str,
    rewards: Mapping[int, Sequence[float]],
    greedy: Sequence[float],
    lengths: Sequence[int],
    passing: float,
    counts: Sequence[int],
) -> Numbers:
    """Return the metrics of one evaluation of a set.

    rewards: prompt -> rewards of its samples. greedy: rewards of the greedy completions. lengths:
    tokens of the samples. passing: a sample passes from this reward on. counts: the k of pass@k. A
    prompt with fewer scored samples than k has no part in pass@k.
    """
    all_rewards = [reward for samples in rewards.values() for reward in samples]
    scored = max(len(all_rewards), 1)
    metrics = {
        f"eval/{name}": math.fsum(all_rewards) / scored,  # rounded once: they come in any order
        f"eval/{name}_n": float(len(rewards)),
        f"eval/{name}_length": sum(lengths) / scored,
    }
    if greedy:
        metrics[f"eval/{name}_greedy"] = math.fsum(greedy) / len(greedy)
    for count in counts:
        shares = [
            estimate_pass_at_k(len(samples), sum(reward >= passing for reward in samples), count)
            for _, samples in sorted(rewards.items())
            if len(samples) >= count
        ]
        if shares:
            low, high = compute_share_interval(shares, len(all_rewards))
            metrics |= {
                f"eval/{name}_pass_at_{count}": math.fsum(shares) / len(shares),
                f"eval/{name}_pass_at_{count}_low": low,
                f"eval/{name}_pass_at_{count}_high": high,
            }
    return metrics
