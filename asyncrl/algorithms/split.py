"""The log-ratio target / behavior in three parts that add up exactly, token by token.

    log pi_theta - log mu =   log pi_v - log mu            engine mismatch
                            + log pi_start - log pi_v      staleness
                            + log pi_theta - log pi_start  update

v is the version that sampled the token, and pi_v the learner's own forward with the weights of that
version. The first part holds what engine and learner compute differently for the same weights, the
second how far the weights have moved since.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms import kl
from asyncrl.algorithms.diagnostics import BUCKET_NAMES, BUCKETS
from asyncrl.algorithms.ratios import compute_log_ratio

PARTS = ("mismatch", "staleness", "update")


@dataclass
class LogRatioSplit:
    """Log-probabilities of n tokens under four policies, with their lag and age.

    behavior: [n], log mu.
    version: [n], log pi_v.
    start: [n], under the learner's start.
    target: [n].
    lag: int64 [n].
    age: int64 [n], versions between the weights that sampled a token and the oldest weights that
        computed any key or value it attended to; 0: one version computed all of it.
    """

    behavior: Tensor
    version: Tensor
    start: Tensor
    target: Tensor
    lag: Tensor
    age: Tensor


def compute_metrics(split: LogRatioSplit) -> dict[str, float]:
    """Return means over the tokens; empty without tokens.

    `split/PART` is minus the log-ratio (k1; the parts add up to split/total), `split/PART_k3` its
    k3, and both are repeated by lag and age.
    """
    if not len(split.lag):
        return {}
    pairs = (
        (split.version, split.behavior),
        (split.start, split.version),
        (split.target, split.start),
    )
    parts = {name: a - b for name, (a, b) in zip(PARTS, pairs, strict=True)}
    zeros = torch.zeros_like(split.behavior)
    k3 = {name: kl.estimate_k3(-compute_log_ratio(x, zeros)).double() for name, x in parts.items()}
    means = {f"split/{name}": -_average(x) for name, x in parts.items()}
    means |= {f"split/{name}_k3": _average(x) for name, x in k3.items()}
    means["split/total"] = -_average(split.target - split.behavior)
    one_version = split.age == 0
    if one_version.any():
        means["mismatch/k3_one_version"] = _average(k3["mismatch"][one_version])
        means["mismatch/max_one_version"] = float(parts["mismatch"][one_version].abs().amax())
    for name, (low, high) in zip(BUCKET_NAMES, BUCKETS, strict=True):
        in_bucket = (split.lag >= low) & (split.lag <= high)
        if in_bucket.any():
            for part in PARTS[:2]:
                means[f"by_lag/{part}_{name}"] = -_average(parts[part][in_bucket])
                means[f"by_lag/{part}_k3_{name}"] = _average(k3[part][in_bucket])
        in_bucket = (split.age >= low) & (split.age <= high)
        if in_bucket.any():
            means[f"by_age/mismatch_k3_{name}"] = _average(k3["mismatch"][in_bucket])
    return means


def _average(x: Tensor) -> float:
    return float(x.double().mean())
