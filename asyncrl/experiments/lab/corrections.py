"""Bias and variance of the policy gradient under every correction for samples of mu, against
distance mu-theta and answer length.

One update on stale answers: pi_prox = theta, so a token's coefficient is its weight times the
advantage.  Rewards are 1 for the third of the answers that score highest in a random sum over their
tokens; the baseline is mu's mean reward.  Statistics of a batch (the mean weight, M2PO's threshold)
are those of an endless one; what a finite batch adds to the bias through them is not seen here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncrl.algorithms import correction, ratios
from asyncrl.algorithms.settings import Correction, RecomputedCorrection
from asyncrl.config.presets import PRESETS
from asyncrl.experiments.lab.bias import average
from asyncrl.experiments.lab.policy import ResponseSpace, cosine, exact_gradient, relative

DISTANCES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)
SIZES = (64, 256, 1024, 4096, 16384)
MANY = 20_000  # answers that stand for an endless batch where a threshold has no formula


def candidates() -> dict[str, Correction]:
    """Every level with every bound, plain and self-normalised; rejection alone; the presets."""
    out: dict[str, Correction] = {"none": RecomputedCorrection(level="none")}
    for level in ("token", "sequence", "geometric"):
        for bound in ("none", "truncate", "clip", "mask"):
            out[f"{level} {bound}"] = RecomputedCorrection(level=level, bound=bound)
            out[f"{level} {bound} normalised"] = RecomputedCorrection(
                level=level, bound=bound, self_normalize=True
            )
    for over in ("token", "sum", "mean", "max"):
        out[f"reject ratio {over}"] = RecomputedCorrection(
            level="none", reject="ratio", reject_over=over
        )
    out["reject k3 max"] = RecomputedCorrection(
        level="none", reject="k3", reject_over="max", reject_hi=0.1
    )
    return out | {
        f"preset {name}": RecomputedCorrection(
            **{key: value for key, value in fields.items() if key != "proximal"}
        )
        for name, fields in PRESETS.items()
        if name != "none"
    }


def rewards(space: ResponseSpace, seed: int) -> torch.Tensor:
    """1 for the third of the answers with the highest sum of random values of (position, symbol):
    [S].
    """
    value = torch.randn(
        space.length,
        space.vocabulary,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    )
    score = value[torch.arange(space.length), space.answers].sum(1)
    return (score.argsort().argsort() >= space.n * 2 // 3).to(torch.float64)


class StaleSamples:
    """Samples of mu, the policy theta, and rewards [S]."""

    def __init__(
        self,
        space: ResponseSpace,
        theta: torch.Tensor,
        mu: torch.Tensor,
        right: torch.Tensor,
        seed: int,
    ) -> None:
        self.space = space
        self.theta = theta
        self.seed = seed
        self.p = space.probability(mu)
        self.mask = torch.ones_like(space.seq, dtype=torch.bool)
        self.lp = space.logprobs(theta)
        self.log_rho = ratios.difference(self.lp, space.logprobs(mu))
        self.adv = (right - (self.p * right).sum())[space.seq]
        self.exact = exact_gradient(lambda t: (space.probability(t) * right).sum(), theta)
        self.drawn = space.draw(mu, MANY, seed)

    def correct(self, c: Correction) -> correction.ImportanceWeights:
        """Weights of all answers, with the statistics of an endless batch."""
        s = self.space
        stats = correction.WeightStatistics()
        if c.m2:
            many = self.log_rho.reshape(s.n, -1)[self.drawn].reshape(-1)
            stats.m2 = correction.m2_threshold(many, torch.ones_like(many, dtype=torch.bool), c.m2)
        if c.self_normalize:
            stats.mean = torch.ones((), dtype=torch.float64)
            w = self._weights(c, stats)
            if c.level == "token":
                chance = self.p[s.seq] * w.kept
                stats.mean = (chance * w.weight).sum() / chance.sum()
            else:  # one weight an answer
                chance = self.p * (ratios.seq_sum(w.kept.double(), s.seq, s.n) > 0)
                stats.mean = (
                    chance * ratios.seq_mean(w.weight, w.kept, s.seq, s.n)
                ).sum() / chance.sum()
            # nothing is left: weights of 0, as the learner has them
            stats.mean = torch.where(stats.mean > 0, stats.mean, 1.0)
        return self._weights(c, stats)

    def _weights(
        self, c: Correction, stats: correction.WeightStatistics
    ) -> correction.ImportanceWeights:
        s = self.space
        return correction.correct(self.log_rho, self.lp, self.mask, s.seq, n=s.n, c=c, stats=stats)

    def judge(self, c: Correction) -> dict[str, float]:
        """Bias, cosine, variance over |exact|^2, mean weight, effective sample size of the tokens,
        and the share that is left (weight above 0).
        """
        s = self.space
        w = self.correct(c).weight
        mean, variance = s.moments(s.gradient_rows(self.theta, w * self.adv), self.p)
        chance = self.p[s.seq] / s.length
        first = float((chance * w).sum())
        second = float((chance * w.square()).sum())
        return {
            "relative_bias": relative(mean, self.exact),
            "cosine": cosine(mean, self.exact),
            "relative_variance": variance / float(self.exact.square().sum()),
            "mean_weight": first,
            "ess": first**2 / max(second, 1e-300),
            "left": float((chance * (w > 0)).sum()),
        }


def lengths(longest: int) -> list[int]:
    """2, 4, 8, ... and the longest."""
    return sorted({n for n in (2, 4, 8, 16) if n < longest} | {longest})


def measure(
    vocabulary: int, longest: int, seeds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """estimators[length][distance][name], means over `seeds` random policies, directions of mu and
    rewards.
    """
    chosen = candidates()
    found = {}
    for length in lengths(longest):
        space = ResponseSpace(vocabulary, length)
        each = []
        for seed in range(seeds):
            say(f"length {length}, seed {seed + 1} of {seeds}")
            theta = space.table(1000 * seed)
            right = rewards(space, 1000 * seed + 1)
            cases = {
                f"{d:g}": StaleSamples(
                    space, theta, space.policy_at_distance(theta, d, 1000 * seed + 2), right, seed
                )
                for d in DISTANCES
            }
            each.append(
                {
                    d: {name: case.judge(c) for name, c in chosen.items()}
                    for d, case in cases.items()
                }
            )
        found[str(length)] = average(each)
    return {"vocabulary": vocabulary, "length": longest, "seeds": seeds, "estimators": found}


def squared_error(j: dict[str, float], size: int) -> float:
    """Of the mean over `size` answers, over |exact|^2."""
    return j["relative_bias"] ** 2 + j["relative_variance"] / size
