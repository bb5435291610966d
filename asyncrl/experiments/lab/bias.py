"""Bias and variance of every KL configuration.

They are measured against the exact gradient of the reverse KL(theta || ref) over whole responses. A
term in the reward takes the score-function part of the gradient of E[k], a term in the loss the
path-wise part. Only their sum is the gradient of E[k]. All values are exact sums over all
responses, except those marked as sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, log_softmax

from asyncrl.algorithms import advantages, correction, kl, ratios
from asyncrl.contract.messages import Numbers
from asyncrl.contract.printable import Say
from asyncrl.contract.toml_writer import read_table
from asyncrl.experiments.lab.findings import LabFindings, make_table, transpose
from asyncrl.experiments.lab.policy import ResponseSpace, compute_relative_error, differentiate
from asyncrl.records.jsonl import JsonObject

DISTANCES, UPDATES, DISCOUNTS, CUTS, SIZES, ORDER, CHECKED, UNBIASED = read_table(__file__).values()
GROUP = 8
# of `update_policy`: responses, minibatches and learning rate
SAMPLES, MINIBATCHES, RATE = 256, 4, 0.5
EXACT = 1e-9  # a relative error below this is rounding
# coefficients [N] of grad lp, and of grad KL_k if it has any
Parts = Sequence[Tensor]


@dataclass
class EstimatorCase:
    """Samples of mu, a policy theta and a reference policy: tables [K, V]."""

    space: ResponseSpace
    theta: Tensor
    ref: Tensor
    mu: Tensor

    def __post_init__(self) -> None:
        s = self.space
        self.lp, self.lr, self.lm = map(s.compute_logprobs, (self.theta, self.ref, self.mu))
        self.step_kl = s.compute_step_kl(self.theta, self.ref)
        self.probability = s.compute_probability(self.mu)
        self.exact = differentiate(lambda t: s.compute_kl(t, self.ref), self.theta)[0]

    def sum_over_response(self, k: Tensor) -> Tensor:
        """Sum k [N] over each token's whole response: [N]."""
        return ratios.sum_by_sample(k, self.space.seq, self.space.n)[self.space.seq]

    def sum_from_token(self, k: Tensor) -> Tensor:
        """Sum k [N] over each token's response from the token on: [N]."""
        return ratios.sum_discounted_suffix(k, self.space.seq, 1.0)

    def compute_weight(self, level: str) -> Tensor:
        """Return pi_theta / mu at a level of `correction.level`: [N]."""
        s = self.space
        every = torch.ones_like(s.seq, dtype=torch.bool)
        return correction.compute_weights(
            ratios.subtract(self.lp, self.lm), every, s.seq, s.n, level
        )

    def make_loss(
        self, estimator: str = "k3", weight: Tensor | float = 1.0, **settings: Any
    ) -> Parts:
        """Return an estimator as a loss term, with its gradient by autograd.

        weight: [N], detached.
        settings: other keys of [kl.loss].
        """

        def compute(lp: Tensor, step: Tensor) -> Tensor:
            return weight * kl.compute_term(
                lp, self.lr, self.lm, self.space.seq, estimator=estimator, step_kl=step, **settings
            )

        return differentiate(compute, self.lp, self.step_kl)

    def compute_gradient_rows(self, parts: Parts) -> Tensor:
        return self.space.compute_gradient_rows(self.theta, *parts, ref=self.ref)

    def judge(self, estimators: dict[str, Parts]) -> dict[str, Numbers]:
        rows = {name: self.compute_gradient_rows(parts) for name, parts in estimators.items()}
        return {n: self.space.judge(x, self.probability, self.exact) for n, x in rows.items()}


def make_estimators(case: EstimatorCase) -> dict[str, Parts]:
    """Return the estimators that ignore the behavior policy.

    They are biased on stale samples.
    """
    x = ratios.compute_log_ratio(case.lp, case.lr)
    penalty = {n: case.sum_over_response(kl.estimate(n, x)) for n in kl.ESTIMATORS}
    baseline = (case.probability * penalty["k1"][:: case.space.length]).sum()
    return {
        **{f"{n}_in_reward": (k,) for n, k in penalty.items()},
        **{f"{n}_in_loss": case.make_loss(n) for n in (*kl.ESTIMATORS, "k1+", "k3+", "abs+")},
        "k1_in_reward_to_go": (case.sum_from_token(x),),
        "k1_in_reward_baseline": (penalty["k1"] - baseline,),
        # on policy their weights are 1
        **{n: case.make_loss(off_policy=n) for n in kl.PREFIX_FORMS},
    }


def make_stale_estimators(case: EstimatorCase) -> dict[str, Parts]:
    """Return the estimators that use pi_theta / mu."""
    token, sequence = map(case.compute_weight, ("token", "sequence"))
    x = ratios.compute_log_ratio(case.lp, case.lr)
    penalty = case.sum_over_response(x)
    prefix = kl.compute_prefix_weights(case.lp, case.lm, case.space.seq)
    frozen = case.sum_over_response(ratios.compute_log_ratio(case.lm, case.lr))
    return {
        "k1_in_reward_token": (token * penalty,),
        "k1_in_reward_sequence": (sequence * penalty,),
        "k1_in_reward_per_decision": (case.sum_from_token(prefix * x),),
        # the penalty of the sampling policy, with the weight of the vanilla surrogate
        "k1_in_reward_frozen": (token * frozen,),
        **{f"{n}_in_loss_token": case.make_loss(n, token) for n in ("k2", "k3", "k3+")},
        "ratio": case.make_loss(off_policy="ratio"),
        "ratio_k1": case.make_loss("k1", off_policy="ratio"),
        **{f"{n}_cut_2": case.make_loss(off_policy=n, truncate=2.0) for n in kl.PREFIX_FORMS},
        **{f"{n}_token": case.make_loss(off_policy=n, discount=0.0) for n in kl.PREFIX_FORMS},
    }


def judge_all(case: EstimatorCase) -> dict[str, Numbers]:
    return case.judge(make_estimators(case) | make_stale_estimators(case))


def check_identities(case: EstimatorCase, gradients: dict[str, Tensor]) -> Numbers:
    """Return relative errors of identities that hold exactly on policy.

    case.mu must be case.theta.
    gradients: expected, of `make_estimators`.
    """
    s = case.space
    p = case.probability
    visits = torch.zeros(s.prefixes, dtype=p.dtype).index_add_(0, s.place, p[s.seq])
    b = log_softmax(case.ref, -1)

    def compute_reverse(t: Tensor) -> Tensor:
        gap = log_softmax(t, -1) - b
        return (visits * (log_softmax(t, -1).exp() * gap).sum(-1)).sum()

    reverse = differentiate(compute_reverse, case.theta)[0]
    forward = differentiate(
        lambda t: -(visits * (b.exp() * log_softmax(t, -1)).sum(-1)).sum(), case.theta
    )[0]
    value = compute_reverse(case.theta) / s.compute_kl(case.theta, case.ref)
    k2, k3 = gradients["k2_in_loss"], gradients["k3_in_loss"]
    return {
        "chain rule: steps' KL sum to the answers'": abs(float(value - 1)),
        "k1_in_reward = exact": compute_relative_error(gradients["k1_in_reward"], case.exact),
        "k1_in_loss = 0": float(gradients["k1_in_loss"].norm() / case.exact.norm()),
        "k2_in_loss = token-level reverse KL": compute_relative_error(k2, reverse),
        "k3_in_loss = token-level forward KL": compute_relative_error(k3, forward),
        "k3_in_reward = exact - k3_in_loss": compute_relative_error(
            gradients["k3_in_reward"], case.exact - k3
        ),
        "k1+ = k3+ = abs+ = k2 in loss": max(
            compute_relative_error(gradients[f"{n}_in_loss"], k2) for n in ("k1+", "k3+", "abs+")
        ),
    }


def update_policy(space: ResponseSpace, mu: Tensor, count: int, seed: int) -> Tensor:
    """Return theta after `count` minibatch updates of vanilla policy gradient.

    The responses are sampled once from mu, and a third of them are right.
    """
    sampled = space.sample(mu, SAMPLES, seed)
    is_right = (torch.rand(space.n, generator=torch.Generator().manual_seed(seed + 1)) < 1 / 3).to(
        mu.dtype
    )
    adv = advantages.compute_rloo(is_right[sampled], torch.arange(SAMPLES) // GROUP)
    theta = mu.clone()
    lm = space.compute_logprobs(mu)
    for step in range(count):
        minibatch = torch.arange(SAMPLES)[step % MINIBATCHES :: MINIBATCHES]
        response_weight = torch.zeros(space.n, dtype=mu.dtype).index_add_(
            0, sampled[minibatch], adv[minibatch]
        ) / len(minibatch)
        log_r = ratios.compute_log_ratio(space.compute_logprobs(theta), lm)
        theta = theta + RATE * space.average(
            space.compute_gradient_rows(theta, log_r.exp() * response_weight[space.seq]),
            torch.ones(space.n, dtype=mu.dtype),
        )
    return theta


def sample_error(
    case: EstimatorCase, parts: Parts, size: int, draws: int, seed: int, rloo: bool = False
) -> float:
    """Return the mean squared error of a mean over `size` samples, over |exact|^2.

    rloo: subtract the mean penalty of the other responses in the group of 8.
    """
    s = case.space
    penalty = parts[0][:: s.length]
    rows = case.compute_gradient_rows([torch.ones_like(case.lp)] if rloo else parts)
    factor = torch.ones(size, dtype=rows.dtype)
    total = 0.0
    for sampled in s.sample(case.mu, size * draws, seed).reshape(draws, size):
        if rloo:
            factor = advantages.compute_rloo(penalty[sampled], torch.arange(size) // GROUP)
        weight = torch.zeros(s.n, dtype=rows.dtype).index_add_(0, sampled, factor)
        total += float((s.average(rows, weight / size) - case.exact).square().sum())
    return total / draws / float(case.exact.square().sum())


def average(trees: Sequence[JsonObject]) -> JsonObject:
    """Average equal trees of numbers over seeds.

    A leaf `relative_bias` also gets the worst seed's value as `relative_bias_max`.
    """
    means: JsonObject = {}
    for key, value in trees[0].items():
        if isinstance(value, dict):
            means[key] = average([e[key] for e in trees])
        else:
            means[key] = sum(e[key] for e in trees) / len(trees)
        if key == "relative_bias":
            means["relative_bias_max"] = max(e[key] for e in trees)
    return means


def measure(
    vocabulary: int,
    length: int,
    seeds: int,
    distance: float,
    ref_kl: float,
    draws: int,
    say: Say,
) -> JsonObject:
    """Run the experiment and return the result in the form of the JSON.

    Values are means over `seeds` random policies.
    """
    space = ResponseSpace(vocabulary, length)
    results: list[JsonObject] = []
    for seed in range(seeds):
        say(f"seed {seed + 1} of {seeds}")
        theta = space.draw_table(1000 * seed)
        ref = space.find_policy(theta, ref_kl, 1000 * seed + 1)
        results.append(_measure_case(space, theta, ref, distance, draws, 1000 * seed + 2))
    return {
        "vocabulary": vocabulary,
        "length": length,
        "seeds": seeds,
        "distance": distance,
        "ref_kl": ref_kl,
        "answers": space.n,
    } | average(results)


def _measure_case(
    space: ResponseSpace, theta: Tensor, ref: Tensor, distance: float, draws: int, seed: int
) -> JsonObject:
    on_policy, off_policy, *cases = (
        EstimatorCase(space, theta, ref, space.find_policy(theta, d, seed))
        for d in (0.0, distance, *DISTANCES)
    )
    by_distance = {f"{d:g}": case for d, case in zip(DISTANCES, cases, strict=True)}
    by_updates = {}
    for m in UPDATES:
        updated = update_policy(space, theta, m, seed)
        by_updates[str(m)] = {
            "kl": float(space.compute_kl(theta, updated)) / space.length,
            "estimators": judge_all(EstimatorCase(space, updated, ref, theta)),
        }
    estimators = make_estimators(on_policy)
    gradients = {
        n: space.average(on_policy.compute_gradient_rows(parts), on_policy.probability)
        for n, parts in estimators.items()
    }
    judged = {
        "on_policy": on_policy.judge(estimators),
        "off_policy": judge_all(off_policy),
    }
    return {
        "estimators": judged,
        # share of responses, by mu, whose log-ratio the formulas clamp, so that they are not exact
        "clamped": {
            d: float(
                case.probability[
                    ratios.sum_by_sample(case.lp - case.lm, space.seq, space.n).abs() > ratios.CLAMP
                ].sum()
            )
            for d, case in by_distance.items()
        },
        "identities": check_identities(on_policy, gradients),
        # of the gradient of E[k]: the score-function part is the term in the reward, the path-wise
        # part the term in the loss
        "parts": {
            name: {
                "score": compute_relative_error(score, on_policy.exact),
                "path": compute_relative_error(path, on_policy.exact),
                "sum": compute_relative_error(score + path, on_policy.exact),
                "score_size": float(score.norm() / on_policy.exact.norm()),
                "path_size": float(path.norm() / on_policy.exact.norm()),
            }
            for name in kl.ESTIMATORS
            for score, path in [(gradients[f"{name}_in_reward"], gradients[f"{name}_in_loss"])]
        },
        "distances": {d: judge_all(case) for d, case in by_distance.items()},
        "updates": by_updates,
        "curve": {
            form: {
                f"{d:g}": off_policy.judge(
                    {
                        f"{c:g}": off_policy.make_loss(off_policy=form, discount=d, truncate=c)
                        for c in CUTS
                    }
                )
                for d in DISCOUNTS
            }
            for form in kl.PREFIX_FORMS
        },
        "mse": _compute_errors(on_policy, off_policy, judged, draws, seed),
    }


def _compute_errors(
    on_policy: EstimatorCase,
    off_policy: EstimatorCase,
    judged: dict[str, dict[str, Numbers]],
    draws: int,
    seed: int,
) -> JsonObject:
    """Return relative_bias^2 + relative_variance / n for each batch size n.

    Some values are sampled instead, to check the formula or where no formula exists.
    """
    errors: JsonObject = {
        policy: {
            name: {str(n): j["relative_bias"] ** 2 + j["relative_variance"] / n for n in SIZES}
            for name, j in by_name.items()
        }
        for policy, by_name in judged.items()
    }
    cases = {"on_policy": on_policy, "off_policy": off_policy}
    errors["sampled over formula, n = 128"] = {
        f"{policy} {name}": sample_error(
            cases[policy], make_estimators(cases[policy])[name], 128, draws, seed + 4
        )
        / errors[policy][name]["128"]
        for policy, name in CHECKED
    }
    penalty = make_estimators(on_policy)["k1_in_reward"]
    errors["on_policy"]["k1_in_reward_rloo"] = {
        str(n): sample_error(on_policy, penalty, n, max(20, draws * 32 // n), seed + 3, rloo=True)
        for n in SIZES[:4]
    }
    return errors


# ---- the presentation ----------------------------------------------------------------------------


def present_findings(r: JsonObject) -> LabFindings:
    """Present the result of `measure`: prior claims and tables."""
    setting = (
        f"{r['vocabulary']} symbols, {r['length']} tokens: {r['answers']} responses, all "
        f"summed; means over {r['seeds']} random policies; KL to the reference {r['ref_kl']:g} "
        f"nats a token, off policy KL(mu || theta) = {r['distance']:g}. Relative bias "
        "|E g - exact| / |exact|, exact: gradient of KL(theta || ref) over whole responses, its "
        "maximum that of the worst seed; relative variance: of one response's gradient over "
        "|exact|^2."
    )
    updates = {
        f"{m} (KL {update['kl']:.4f})": update["estimators"] for m, update in r["updates"].items()
    }
    tables = [
        *(
            make_table(f"{policy.replace('_', ' ').capitalize()}, by estimator", by_name)
            for policy, by_name in r["estimators"].items()
        ),
        make_table(
            "The parts of the gradient of E[k], on policy: score (in the reward), path (in the "
            "loss) and sum against the exact gradient; sizes over its size",
            r["parts"],
        ),
        make_table(
            "Relative bias by KL(mu || theta), nats a token",
            transpose(r["distances"]),
            "{relative_bias:.3g}",
        ),
        make_table(
            "Relative bias after minibatch updates on samples of mu",
            transpose(updates),
            "{relative_bias:.3g}",
        ),
        *(
            make_table(
                f"{form}: bias / variance by discount (rows) and truncation",
                curve,
                "{relative_bias:.3f} / {relative_variance:.1f}",
            )
            for form, curve in r["curve"].items()
        ),
    ]
    return LabFindings(setting, r, _check_claims(r), tables)


def _check_claims(r: JsonObject) -> list[tuple[str, bool]]:
    on, off = r["estimators"].values()
    errors = r["identities"]
    bias = {n: judged["relative_bias"] for n, judged in on.items()}
    worst = on["k1_in_reward"]["relative_bias_max"]
    forward = errors["k3_in_loss = token-level forward KL"]
    reverse = ("k2_in_loss = token-level reverse KL", "k1+ = k3+ = abs+ = k2 in loss")
    clamped = [d for d, share in r["clamped"].items() if share > 0]
    cases = [
        *(e for d, e in r["distances"].items() if d not in clamped),
        *(m["estimators"] for m in r["updates"].values()),
    ]
    worst_off = max(e[n]["relative_bias_max"] for e in cases for n in UNBIASED)
    noise = ", ".join(f"{n} {off[n]['relative_variance']:.1f}" for n in UNBIASED)
    ratio_bias = off["ratio"]["relative_bias"]
    ratios_to_formula = r["mse"]["sampled over formula, n = 128"].values()
    exception = (
        f", but for {', '.join(clamped)}, where log-ratios of whole responses pass the clamp at 20"
    )
    return [
        (f"k1 in the reward is unbiased on policy (worst seed {worst:.1e})", worst < EXACT),
        (
            "k1 in the loss has no expected gradient on policy, only variance",
            errors["k1_in_loss = 0"] < EXACT,
        ),
        (
            f"k3 in the loss is the token-level forward KL, to {forward:.0e}; as a reverse KL it "
            f"is off by {bias['k3_in_loss']:.0%}",
            forward < EXACT,
        ),
        (
            "k2 in the loss, and every + form, is the token-level reverse KL; off the whole "
            f"response's by {bias['k2_in_loss']:.0%}",
            max(errors[identity] for identity in reverse) < EXACT,
        ),
        (
            f"k3 in the reward is strongly biased: {bias['k3_in_reward']:.0%}, cosine "
            f"{on['k3_in_reward']['cosine']:.2f}",
            bias["k3_in_reward"] > 0.5,
        ),
        (
            "its error is exactly the path-wise part, which the reward lacks: k3 in the loss",
            errors["k3_in_reward = exact - k3_in_loss"] < EXACT,
        ),
        (
            "published order of the bias: " + " < ".join(ORDER),
            all(bias[a] < bias[b] for a, b in pairwise(ORDER)),
        ),
        (
            f"off policy, whole responses: {', '.join(UNBIASED)} are unbiased at every distance "
            f"and after every update (worst {worst_off:.1e}){exception if clamped else ''}",
            worst_off < EXACT,
        ),
        (
            "of these prefix_full has the least variance everywhere; at the distance above "
            f"{noise}",
            all(
                min(UNBIASED, key=lambda n: e[n]["relative_variance"]) == "prefix_full"
                for e in cases
            ),
        ),
        (
            "`ratio` (gradient through the ratio) is the token-weighted k2: right on mu's states "
            f"only, off by {ratio_bias:.0%}",
            abs(ratio_bias - off["k2_in_loss_token"]["relative_bias"]) < EXACT,
        ),
        (
            f"sampled errors over the formula's: {min(ratios_to_formula):.2f} to "
            f"{max(ratios_to_formula):.2f}",
            all(0.8 < x < 1.25 for x in ratios_to_formula),
        ),
    ]
