"""Bias and variance of the policy gradient under every correction.

They are measured for samples of mu, against the distance between mu and theta and the response
length.

The setting is one update on stale responses: pi_prox = theta, so a token's coefficient is its
weight times the advantage. Rewards are 1 for the third of the responses that score highest in a
random sum over their tokens. The baseline is mu's mean reward. The mean weight of a batch is that
of an infinite batch. The bias that a finite batch adds through it is not included.

Proximal policies are compared by decoupled PPO with its clip and weights of at most 2, where
versions are a random walk to theta, and mu is a small distance away from the version that sampled.
"""

from itertools import pairwise

import torch
from torch import Tensor, log_softmax

from asyncrl.algorithms import correction, ratios, surrogates
from asyncrl.algorithms.settings import AveragedCorrection, Correction, RecomputedCorrection
from asyncrl.config.presets import PRESETS
from asyncrl.contract.messages import Numbers
from asyncrl.contract.printable import Say
from asyncrl.contract.toml_writer import read_table
from asyncrl.experiments.lab.bias import EXACT, average
from asyncrl.experiments.lab.findings import LabFindings, make_table, transpose
from asyncrl.experiments.lab.policy import ResponseSpace, differentiate
from asyncrl.records.jsonl import JsonObject

SIZES, DISTANCES, CANDIDATES, CENTERED = read_table(__file__).values()
LAGS = range(5)
HISTORY = 16  # versions before the samples', for ema
# KL between neighboring versions, and of mu to its version, in nats a token
STEP, ROUNDING = 0.01, 0.001


def draw_rewards(space: ResponseSpace, seed: int) -> Tensor:
    """Return rewards [S]: 1 for the third of the responses with the highest score.

    The score is the sum of random values of (position, symbol).
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
    """Samples of mu, the policy theta, and rewards [S].

    proximal: its table; None: theta.
    """

    def __init__(
        self,
        space: ResponseSpace,
        theta: Tensor,
        mu: Tensor,
        right: Tensor,
        proximal: Tensor | None = None,
    ) -> None:
        self.space, self.theta, self.mu = space, theta, mu
        self.p = space.compute_probability(mu)
        self.mask = torch.ones_like(space.seq, dtype=torch.bool)
        self.lp = space.compute_logprobs(theta if proximal is None else proximal)
        self.log_rho = ratios.subtract(self.lp, space.compute_logprobs(mu))
        log_r = ratios.subtract(space.compute_logprobs(theta), self.lp)
        self.adv = (right - (self.p * right).sum())[space.seq]
        self.coefficient = surrogates.compute_ppo(log_r, self.adv).coefficient
        self.exact = differentiate(lambda t: space.compute_probability(t) * right, theta)[0]

    def compute_weights(self, c: Correction) -> Tensor:
        """Return the weight of every token, with the statistics of an infinite batch: [N]."""
        s = self.space
        one = torch.ones((), dtype=torch.float64)
        w = correction.correct(self.log_rho, self.lp, self.mask, s.seq, n=s.n, c=c, mean=one)
        if not c.self_normalize:
            return w.weight
        if c.level == "token":
            weight, chance = w.weight, self.p[s.seq] * w.kept
        else:  # one weight a response
            weight = ratios.average_by_sample(w.weight, w.kept, s.seq, s.n)
            chance = self.p * (ratios.sum_by_sample(w.kept.double(), s.seq, s.n) > 0)
        mean = (chance * weight).sum() / chance.sum()
        # if everything is rejected, the weights are 0, as in the learner
        return w.weight / torch.where(mean > 0, mean, 1.0)

    def judge(self, c: Correction, top: int | None = None) -> Numbers:
        """Return bias, variance and weight statistics of a correction.

        With score centering on `top` symbols (0: on all).

        - relative_bias, cosine, relative_variance: of `ResponseSpace.judge`
        - mean_weight: mean weight of a token
        - ess: effective sample size of the tokens
        - left: share of tokens with a weight above 0
        """
        s = self.space
        w = self.compute_weights(c)
        rows = s.compute_gradient_rows(self.theta, w * self.coefficient)
        if top is not None:
            logs, sampled = (log_softmax(table, -1) for table in (self.theta, self.mu))
            slope = correction.compute_score_center(logs, sampled, c, top)[1]
            rows = rows - self.adv[:, None] * slope[s.place]
        judged = s.judge(rows, self.p, self.exact)
        del judged["variance"]
        chance = self.p[s.seq] / s.length
        mean_weight = float((chance * w).sum())
        return judged | {
            "mean_weight": mean_weight,
            "ess": mean_weight**2 / max(float((chance * w.square()).sum()), 1e-300),
            "left": float((chance * (w > 0)).sum()),
        }


def judge_proximal(
    space: ResponseSpace, theta: Tensor, right: Tensor, seed: int
) -> dict[str, dict[str, Numbers]]:
    """Return [lag][proximal policy] for a random walk of versions that ends at theta."""
    versions = [theta]  # newest first
    for age in range(LAGS[-1] + HISTORY):
        versions.append(space.find_policy(versions[-1], STEP, seed + age))
    decay = 0.5 ** (1 / AveragedCorrection().ema_half_life)
    shares = torch.tensor([decay**age for age in range(len(versions))], dtype=theta.dtype)
    average_weights = torch.tensordot(shares / shares.sum(), torch.stack(versions), 1)
    by_lag = {}
    for lag in LAGS:
        mu = space.find_policy(versions[lag], ROUNDING, seed + 100)
        policies = {
            "behavior": mu,
            "recompute": theta,
            "version": versions[lag],
            "ema": average_weights,
        }
        by_lag[str(lag)] = {
            name: StaleSamples(space, theta, mu, right, table).judge(RecomputedCorrection())
            for name, table in policies.items()
        }
    return by_lag


def measure(vocabulary: int, length: int, seeds: int, say: Say) -> JsonObject:
    """Return estimators[length][distance][name].

    Values are means over `seeds` random policies, directions of mu, and rewards.
    """
    fields = CANDIDATES | {
        f"preset {name}": {key: value for key, value in keys.items() if key != "proximal"}
        for name, keys in PRESETS.items()
        if name != "none"
    }
    corrections = {name: RecomputedCorrection(**keys) for name, keys in fields.items()}
    results, proximal = {}, []
    for tokens in sorted({n for n in (2, 4, 8, 16) if n < length} | {length}):
        space = ResponseSpace(vocabulary, tokens)
        by_seed = []
        for seed in range(seeds):
            say(f"length {tokens}, seed {seed + 1} of {seeds}")
            theta = space.draw_table(1000 * seed)
            right = draw_rewards(space, 1000 * seed + 1)
            cases = {
                f"{d:g}": StaleSamples(
                    space, theta, space.find_policy(theta, d, 1000 * seed + 2), right
                )
                for d in DISTANCES
            }
            if tokens == length:
                proximal.append(judge_proximal(space, theta, right, 1000 * seed + 3))
            by_seed.append(
                {
                    d: {name: case.judge(c) for name, c in corrections.items()}
                    | {n: case.judge(corrections[of], top) for n, (of, top) in CENTERED.items()}
                    for d, case in cases.items()
                }
            )
        results[str(tokens)] = average(by_seed)
    sizes = {"vocabulary": vocabulary, "length": length, "seeds": seeds}
    return sizes | {"estimators": results, "proximal": average(proximal)}


# ---- the presentation ----------------------------------------------------------------------------


def present_findings(r: JsonObject) -> LabFindings:
    """Present the result of `measure`: prior claims and tables."""
    setting = (
        f"{r['vocabulary']} symbols, responses of up to {r['length']} tokens, all summed; "
        f"means over {r['seeds']} random policies, directions of mu "
        "and rewards. Relative bias |E g - exact| / |exact|, exact: the gradient of theta's "
        "expected reward; variance of one response's gradient over "
        "|exact|^2; distances KL(mu || theta) in nats a token; default bounds."
    )
    by_length = r["estimators"]
    longest, by_distance = list(by_length.items())[-1]
    tables = [
        make_table(
            f"{longest} tokens: relative bias / variance / share left, by distance",
            transpose(by_distance),
            "{relative_bias:.2f} / {relative_variance:.0f} / {left:.2f}",
        ),
        make_table(
            f"{longest} tokens: mean weight / effective sample size of tokens, by distance",
            transpose(by_distance),
            "{mean_weight:.2f} / {ess:.2f}",
        ),
        make_table(
            f"{longest} tokens: bias / variance of decoupled PPO, by proximal policy and lag",
            transpose(r["proximal"]),
            "{relative_bias:.2f} / {relative_variance:.0f}",
        ),
        make_table(
            "Distance 0.01: bias / variance by length",
            transpose({length: x["0.01"] for length, x in by_length.items()}),
            "{relative_bias:.3g} / {relative_variance:.3g}",
        ),
        make_table(
            "Correction with the least squared error, by distance",
            {
                f"{length} tokens, {size} responses": {
                    # the shortest name among equals
                    d: min(
                        by_name,
                        key=lambda name: (
                            round(
                                by_name[name]["relative_bias"] ** 2
                                + by_name[name]["relative_variance"] / size,
                                9,
                            ),
                            len(name),
                        ),
                    )
                    for d, by_name in x.items()
                    if d != "0"
                }
                for size in SIZES
                for length, x in by_length.items()
            },
        ),
    ]
    return LabFindings(setting, r, _check_claims(by_length), tables)


def _check_claims(e: JsonObject) -> list[tuple[str, bool]]:
    longest, by_distance = list(e.items())[-1]
    away = [x[d] for x in e.values() for d in x if d != "0"]
    worst = max(
        x["sequence none"]["relative_bias_max"] for by_d in e.values() for x in by_d.values()
    )
    worst_at_zero = max(j["relative_bias"] for x in e.values() for j in x["0"].values())
    none = [x["none"]["relative_bias"] for x in by_distance.values()]
    noise = [x["sequence none"]["relative_variance"] for x in by_distance.values()]
    return [
        (
            f"at distance 0 every correction is exact and drops nothing "
            f"(worst {worst_at_zero:.1e})",
            worst_at_zero < EXACT,
        ),
        (
            "weights of whole responses without a bound are unbiased at every distance and length "
            f"(worst {worst:.1e})",
            worst < EXACT,
        ),
        (
            f"their variance grows with distance: {noise[0]:.0f} -> {noise[-1]:.0f} at "
            f"{longest} tokens",
            noise[-1] > 2 * noise[0],
        ),
        (
            f"without a correction the bias grows with distance: {none[1]:.0%} -> {none[-1]:.0%} "
            f"at {longest} tokens",
            all(a < b for a, b in pairwise(none)),
        ),
        (
            "token weights remove only part of the bias: the states remain mu's",
            all(
                EXACT < x["token none"]["relative_bias"] < x["none"]["relative_bias"] for x in away
            ),
        ),
        (
            "truncation never adds variance, at token and at sequence level",
            all(
                x[f"{level} truncate"]["relative_variance"]
                <= x[f"{level} none"]["relative_variance"] * (1 + EXACT)
                for x in away
                for level in ("token", "sequence")
            ),
        ),
    ]
