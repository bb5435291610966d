"""Sums over tokens and samples, by lag bucket, and the metrics computed from them.

Sums of micro-batches add up; keys with `max/` take the larger. Each micro-batch makes one matrix
[statistics, 1 + buckets + tasks]: column 0 covers all valid tokens, and each further column a lag
bucket or a task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from asyncrl.algorithms import kl
from asyncrl.algorithms.ratios import compute_log_ratio
from asyncrl.algorithms.surrogates import DUAL, HIGH, LOW

BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 10**9))
BUCKET_STARTS = torch.tensor([low for low, _ in BUCKETS[1:]])
BUCKET_NAMES = ("0", "1", "2", "3to4", "5to8", "9plus")
# Columns up to "known" cover every valid token, the rest those whose log-probability at the
# learner's start is known (b behavior, s start, t target).
TOKENS = (
    "n",
    "w",
    "w2",
    "bt_k1",
    "bt_k3",
    "nll_mu",
    "nll",
    "entropy",
    "low",
    "high",
    "dual",
    "rejected",
    "vetoed",
    "masked",
    "ref_k1",
    "ref_k3",
    "ref_forward",
    "ref_nll",
    "t",
    "t2",
    "known",
    "rho",
    "rho2",
    "bs_k1",
    "bs_k3",
    "st_k1",
    "st_k3",
    "nll_start",
)
START_STATISTICS = TOKENS[TOKENS.index("known") :]
# of tokens whose gradient the correction removed
CAUSES = ("rejected", "vetoed", "masked")
SAMPLES = (
    *("n", "nll_mu", "nll", "w", "w2", "known", "nll_start"),
    *(f"{cause}{quantity}" for cause in CAUSES for quantity in ("", "_length", "_reward")),
)
# by_lag/NAME -> the metric of all tokens
BY_LAG = {
    "target_k3": "kl/behavior_target_k3",
    "weight": "is/mean_weight",
    "clip": "clip/share",
    "zero": "is/zero_share",
    "entropy": "policy/entropy",
    "k1": "kl/behavior_start_k1",
    "k3": "kl/behavior_start_k3",
    "update": "kl/start_target_k1",
    "ess": "is/ess",
}
EDGES = 0.01 * 1.15 ** torch.arange(48)  # |log rho| histogram: from 0.01 to about 7
UPPER_EDGES: list[float] = EDGES.tolist()  # a copy on the host


@dataclass
class DiagnosticTokens:
    """Inputs of the metrics: n tokens of whole samples, detached.

    seq, lag: int64 [n].
    valid, kept, vetoed: bool [n].
    behavior, target: [n], log-probabilities.
    start: [n], the learner's policy at the start of the batch; ignored outside `known`.
    weight: [n].
    clipped: int8 [n].
    rewards: [B].
    reference, entropy: [n] or None.
    known: bool [n], where the start is known; None: everywhere.
    age: int64 [n], versions between the weights that sampled a token and the oldest of its keys and
        values; None: one version computed all.
    task: int64 [n], the task of each token, of `tasks` in a mixture.
    """

    seq: Tensor
    lag: Tensor
    valid: Tensor
    kept: Tensor
    vetoed: Tensor
    behavior: Tensor
    start: Tensor
    target: Tensor
    weight: Tensor
    clipped: Tensor
    rewards: Tensor
    reference: Tensor | None = None
    entropy: Tensor | None = None
    known: Tensor | None = None
    age: Tensor | None = None
    task: Tensor | None = None
    tasks: int = 0


@cache
def _copy_edges(device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy BUCKET_STARTS and EDGES to a device, which a host would wait for each time."""
    return BUCKET_STARTS.to(device), EDGES.to(device, torch.float64)


def sum_statistics(v: DiagnosticTokens) -> dict[str, Tensor]:
    """Return the sums of a micro-batch, float64 on the tokens' device.

    tokens: [TOKENS, 1 + buckets + tasks].
    samples: [SAMPLES].
    ratios: [bins].
    at_lag_0: [2], count and k3 of tokens that the start's own weights computed entirely.
    max/ratio, max/target_ratio, max/at_lag_0: scalars.
    """
    a = compute_log_ratio(v.start, v.behavior)
    b = compute_log_ratio(v.target, v.start)
    t = compute_log_ratio(v.target, v.behavior)
    zero = torch.zeros_like(a)
    rho = a.exp()
    known = v.valid if v.known is None else v.valid & v.known
    own_version = known & (v.lag == 0) if v.age is None else known & (v.lag == 0) & (v.age == 0)
    mismatch = kl.estimate_k3(-a)
    columns = {
        "n": torch.ones_like(a),
        "w": v.weight,
        "w2": v.weight.square(),
        "bt_k1": -t,
        "bt_k3": kl.estimate_k3(-t),
        "nll_mu": -v.behavior,
        "nll": -v.target,
        "low": v.clipped == LOW,
        "high": v.clipped == HIGH,
        "dual": v.clipped == DUAL,
        "rejected": ~v.kept & ~v.vetoed,
        "vetoed": v.vetoed,
        "masked": v.kept & (v.weight == 0),
        "t": t.exp(),
        "t2": (2 * t).exp(),
        "known": torch.ones_like(a),
        "rho": rho,
        "rho2": rho.square(),
        "bs_k1": -a,
        "bs_k3": mismatch,
        "st_k1": -b,
        "st_k3": kl.estimate_k3(-b),
        "nll_start": -v.start,
    }
    if v.entropy is not None:
        columns["entropy"] = v.entropy
    if v.reference is not None:
        x = compute_log_ratio(v.target, v.reference)
        columns |= {
            "ref_k1": x,
            "ref_k3": kl.estimate_k3(x),
            "ref_forward": kl.estimate_forward_k3(x),
            "ref_nll": -v.reference,
        }
    # one pass over all rows: with few tokens the number of calls is the cost
    table = torch.stack([columns.get(name, zero) for name in TOKENS]).double()
    table[: -len(START_STATISTICS)].masked_fill_(~v.valid, 0.0)
    table[-len(START_STATISTICS) :].masked_fill_(~known, 0.0)
    starts, edges = _copy_edges(a.device)
    bucket = torch.bucketize(v.lag, starts, right=True)[:, None]
    in_column = [torch.ones_like(bucket), bucket == torch.arange(len(BUCKETS), device=a.device)]
    if v.task is not None:
        in_column.append(v.task[:, None] == torch.arange(v.tasks, device=a.device))
    bins = torch.bucketize(a.abs().double(), edges)
    return {
        "tokens": table @ torch.cat(in_column, 1).double(),
        "samples": _sum_samples(table, v.seq, v.rewards.double()),
        "max/ratio": _find_largest(rho, known),
        "max/target_ratio": _find_largest(t.exp(), v.valid),
        "max/at_lag_0": _find_largest(a.abs(), own_version),
        "at_lag_0": torch.stack(
            [own_version.double().sum(), torch.where(own_version, mismatch.double(), 0.0).sum()]
        ),
        "ratios": torch.zeros(len(EDGES) + 1, dtype=torch.float64, device=a.device).index_add_(
            0, bins, known.double()
        ),
    }


def _find_largest(x: Tensor, mask: Tensor) -> Tensor:
    """Return the largest of x [n] (at least 0) over the mask, 0 without tokens, float64."""
    return torch.where(mask, x, 0.0).amax().double() if len(x) else x.sum().double()


def _sum_samples(table: Tensor, seq: Tensor, rewards: Tensor) -> Tensor:
    """Sum the token means of all samples with a valid token: float64 [SAMPLES].

    table: [TOKENS, n], 0 outside the valid tokens.
    """
    totals = table.new_zeros(len(table), len(rewards)).index_add_(1, seq, table)
    of_sample = dict(zip(TOKENS, totals, strict=True))
    length = of_sample["n"]
    has_tokens = (length > 0).double()
    rows = {name: of_sample[name] / length.clamp(min=1) for name in ("nll_mu", "nll", "w")}
    # a pass covers whole samples
    known = (of_sample["known"] == length) * has_tokens
    rows |= {
        "n": has_tokens,
        "w2": rows["w"].square(),
        "known": known,
        "nll_start": known * of_sample["nll_start"] / length.clamp(min=1),
    }
    causes = {
        "rejected": (of_sample["rejected"] + of_sample["vetoed"] == length) * has_tokens,
        "vetoed": (of_sample["vetoed"] > 0).double(),
        "masked": of_sample["masked"],
    }
    for cause, x in causes.items():
        rows |= {cause: x, f"{cause}_length": x * length, f"{cause}_reward": x * rewards}
    return torch.stack([rows[name].sum() for name in SAMPLES])


def add_sums(total: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Accumulate in place: sums add up, maxima take the larger."""
    for name, x in sums.items():
        if name not in total:
            total[name] = x
        else:
            total[name] = (
                torch.maximum(total[name], x) if name.startswith("max/") else total[name] + x
            )


class HostReads:
    """Numbers of tensors on the host: one read copies all that are planned, and waits once.

    A tensor must not change after it is planned or read.

    >>> reads = HostReads()
    >>> first, second = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> reads.planned.append(second)
    >>> reads.read(first)
    [[1.0, 2.0]]
    >>> len(reads.copies)
    2
    """

    def __init__(self) -> None:
        self.planned: list[Tensor] = []
        # by id, with the tensor, which keeps the id its own
        self.copies: dict[int, tuple[Tensor, list[float]]] = {}

    def read(self, *tensors: Tensor) -> list[list[float]]:
        """Return the numbers of each tensor, as a flat list."""
        if any(id(x) not in self.copies for x in tensors):
            wanted = {id(x): x for x in (*tensors, *self.planned) if id(x) not in self.copies}
            self.planned = []
            numbers = torch.cat([x.detach().double().reshape(-1) for x in wanted.values()]).tolist()
            start = 0
            for name, x in wanted.items():
                self.copies[name] = x, numbers[start : start + x.numel()]
                start += x.numel()
        return [self.copies[id(x)][1] for x in tensors]

    def read_dict(self, tensors: dict[str, Tensor]) -> dict[str, list[float]]:
        return dict(zip(tensors, self.read(*tensors.values()), strict=True))

    def read_scalars(self, tensors: dict[str, Tensor]) -> dict[str, float]:
        return {name: x[0] for name, x in self.read_dict(tensors).items()}


def compute_metrics(
    total: dict[str, Tensor], reads: HostReads | None = None, tasks: Sequence[str] = ()
) -> dict[str, float]:
    """Return the metrics of a batch from its sums, as `records/metrics.toml` lists them.

    tasks: the names of the tasks of a mixture.
    """
    host = (reads or HostReads()).read_dict(total)
    if "tokens" not in host:
        return {}
    width = 1 + len(BUCKETS) + len(tasks)
    columns = [dict(zip(TOKENS, host["tokens"][i::width], strict=True)) for i in range(width)]
    of_columns = [_compute_token_metrics(column) for column in columns]
    computed = of_columns[0].copy()
    s = dict(zip(SAMPLES, host["samples"], strict=True))
    n = max(s["n"], 1.0)
    computed |= {
        "perplexity_by_answer/behavior": _exponentiate(s["nll_mu"] / n),
        "perplexity_by_answer/target": _exponentiate(s["nll"] / n),
        "is/ess_by_answer": compute_ess(s["w"], s["w2"], n),
        "is/rejected_answers": s["rejected"] / n,
        "is/vetoed_answers": s["vetoed"] / n,
        "is/target_ratio_max": host["max/target_ratio"][0],
    }
    if s["known"]:
        computed["perplexity_by_answer/start"] = _exponentiate(s["nll_start"] / s["known"])
    for cause in CAUSES:
        for quantity in ("length", "reward") if s[cause] else ():
            computed[f"is/{cause}_{quantity}"] = s[f"{cause}_{quantity}"] / s[cause]
    if columns[0]["known"] > 0:
        quantiles = {
            f"is/log_ratio_{name}": _find_quantile(host["ratios"], q)
            for name, q in (("p50", 0.5), ("p99", 0.99))
        }
        computed |= {"is/ratio_max": host["max/ratio"][0]} | quantiles
    if host["at_lag_0"][0] > 0:
        computed |= {
            "mismatch/k3_at_lag_0": host["at_lag_0"][1] / host["at_lag_0"][0],
            "mismatch/max_at_lag_0": host["max/at_lag_0"][0],
        }
    for bucket, column, of_bucket in zip(BUCKET_NAMES, columns[1:], of_columns[1:], strict=False):
        if column["n"] > 0:
            computed[f"by_lag/tokens_{bucket}"] = column["n"]
            computed |= {
                f"by_lag/{name}_{bucket}": of_bucket[metric]
                for name, metric in BY_LAG.items()
                if metric in of_bucket
            }
    for task, of_task in zip(tasks, of_columns[1 + len(BUCKETS) :], strict=True):
        if "is/ess" in of_task:
            computed[f"task/{task}_ess"] = of_task["is/ess"]
    computed |= {name: values[0] for name, values in host.items() if name.startswith("loss/")}
    if "reshape" in host:
        computed |= _compute_reshape_metrics(host["reshape"])
    if "sq/kl" in host and host["sq/policy"][0] > 0:
        computed["kl/gradient_share"] = math.sqrt(host["sq/kl"][0] / host["sq/policy"][0])
    return computed


def compute_explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - var(R - V) / var(R) over the mask: 1 for a perfect critic, 0 for a constant one."""
    v = values[mask]
    r = returns[mask]
    if len(r) < 2:
        return values.new_zeros(())
    return 1 - (r - v).var() / r.var().clamp(min=1e-12)


def compute_ess(w: float, w2: float, n: float) -> float:
    """Return the effective sample size as a share, from n weights' sum and sum of squares."""
    return w * w / max(n * w2, 1e-30)


def _compute_token_metrics(s: dict[str, float]) -> dict[str, float]:
    n = max(s["n"], 1.0)
    m = {name: x / n for name, x in s.items()}
    computed = {
        "is/mean_weight": m["w"],
        "is/weight_ess": compute_ess(s["w"], s["w2"], n),
        "is/target_ess": compute_ess(s["t"], s["t2"], n),
        "is/target_ratio": m["t"],
        "is/zero_share": m["masked"] + m["rejected"] + m["vetoed"],
        "is/rejected_share": m["rejected"],
        "is/vetoed_share": m["vetoed"],
        "is/masked_share": m["masked"],
        "kl/behavior_target_k1": m["bt_k1"],
        "kl/behavior_target_k3": m["bt_k3"],
        "clip/low": m["low"],
        "clip/high": m["high"],
        "clip/dual": m["dual"],
        "clip/share": m["low"] + m["high"] + m["dual"],
        "policy/behavior_nll": m["nll_mu"],
        "perplexity/behavior": _exponentiate(m["nll_mu"]),
        "perplexity/target": _exponentiate(m["nll"]),
    }
    if s["known"]:
        # relative to the learner's start: means over its known tokens
        k = {name: s[name] / s["known"] for name in START_STATISTICS}
        computed |= {
            "is/chi2": k["rho2"] - 1,
            "kl/behavior_start_k1": k["bs_k1"],
            "kl/behavior_start_k3": k["bs_k3"],
            "kl/start_target_k1": k["st_k1"],
            "kl/start_target_k3": k["st_k3"],
            "perplexity/start": _exponentiate(k["nll_start"]),
            "is/ess": compute_ess(s["rho"], s["rho2"], s["known"]),
        }
    if s["entropy"]:
        computed["policy/entropy"] = m["entropy"]
    if s["ref_nll"]:
        computed |= {
            "kl/target_ref_k1": m["ref_k1"],
            "kl/target_ref_k3": m["ref_k3"],
            "kl/ref_target": m["ref_forward"],
            "perplexity/reference": _exponentiate(m["ref_nll"]),
        }
    return computed


def _compute_reshape_metrics(s: list[float]) -> dict[str, float]:
    """Return IS-reshape's metrics from the sums of `surrogates`.

    They are n, gamma, w, w^gamma, w^gamma A and its square, then gamma and count of tokens that
    push away, then of those that come back, then C and, in mode v3.1, P_correct.
    """
    n = max(s[0], 1.0)
    gate = {"reshape/p_correct": s[11] / n} if len(s) > 11 else {}
    return gate | {
        "reshape/gamma": s[1] / n,
        "reshape/ratio": s[2] / n,
        "reshape/used_ratio": s[3] / n,
        "reshape/objective_mean": s[4] / n,
        "reshape/objective_var": s[5] / n - (s[4] / n) ** 2,
        "reshape/gamma_away": s[6] / max(s[7], 1.0),
        "reshape/gamma_back": s[8] / max(s[9], 1.0),
        "reshape/c": s[10] / n,
    }


def _exponentiate(x: float) -> float:
    return math.exp(min(x, 50.0))


def _find_quantile(counts: list[float], q: float) -> float:
    """Return the upper edge of the bin that holds the quantile; 0 without counts."""
    target = q * sum(counts)
    total = 0.0
    for i, count in enumerate(counts):
        total += count
        if count and total >= target:
            return UPPER_EDGES[min(i, len(UPPER_EDGES) - 1)]
    return 0.0


# ---- the log-ratio target / behavior in three parts, which add up exactly, token by token --------
#
#     log pi_theta - log mu =   log pi_v - log mu            engine mismatch
#                             + log pi_start - log pi_v      staleness
#                             + log pi_theta - log pi_start  update
#
# v is the version that sampled the token, and pi_v the learner's own forward with the weights of
# that version. The first part holds what engine and learner compute differently for the same
# weights, the second how far the weights have moved since.

PARTS = ("mismatch", "staleness", "update")


def compute_split_metrics(
    behavior: Tensor, version: Tensor, start: Tensor, target: Tensor, lag: Tensor, age: Tensor
) -> dict[str, float]:
    """Return means over n tokens; empty without tokens.

    `split/PART` is minus the log-ratio (k1; the parts add up to split/total), `split/PART_k3` its
    k3, and both are repeated by lag and age.

    Args:
        behavior: [n], log mu.
        version: [n], log pi_v.
        start: [n], under the learner's start.
        target: [n].
        lag: int64 [n].
        age: int64 [n], versions between the weights that sampled a token and the oldest weights
            that computed any key or value it attended to; 0: one version computed all of it.
    """
    if not len(lag):
        return {}
    policies = pairwise((behavior, version, start, target))
    parts = {name: b - a for name, (a, b) in zip(PARTS, policies, strict=True)}
    zeros = torch.zeros_like(behavior)
    k3 = {name: kl.estimate_k3(-compute_log_ratio(x, zeros)).double() for name, x in parts.items()}
    means = {f"split/{name}": -average(x) for name, x in parts.items()}
    means |= {f"split/{name}_k3": average(x) for name, x in k3.items()}
    means["split/total"] = -average(target - behavior)
    one_version = age == 0
    if one_version.any():
        means["mismatch/k3_one_version"] = average(k3["mismatch"][one_version])
        means["mismatch/max_one_version"] = float(parts["mismatch"][one_version].abs().amax())
    for name, (low, high) in zip(BUCKET_NAMES, BUCKETS, strict=True):
        in_bucket = (lag >= low) & (lag <= high)
        if in_bucket.any():
            for part in PARTS[:2]:
                means[f"by_lag/{part}_{name}"] = -average(parts[part][in_bucket])
                means[f"by_lag/{part}_k3_{name}"] = average(k3[part][in_bucket])
        in_bucket = (age >= low) & (age <= high)
        if in_bucket.any():
            means[f"by_age/mismatch_k3_{name}"] = average(k3["mismatch"][in_bucket])
    return means


def average(x: Tensor) -> float:
    return float(x.double().mean()) if len(x) else 0.0
