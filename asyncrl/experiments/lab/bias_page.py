"""The presentation of `lab bias`: prior claims and tables."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from asyncrl.experiments.lab.bias import CUTS, DISCOUNTS, DISTANCES, EXACT
from asyncrl.experiments.lab.page import LabClaim, LabFindings, make_table
from asyncrl.records.page_kit import TableBlock

ORDER = ("k1_in_reward", "k2_in_loss", "k3_in_loss", "k3_in_reward")
UNBIASED = ("k1_in_reward_sequence", "k1_in_reward_per_decision", "prefix", "prefix_full")
SHOWN = (
    "k1_in_reward",
    "k1_in_loss",
    "k2_in_loss",
    "k3_in_loss",
    "k3_in_reward",
    "k1_in_reward_sequence",
    "k1_in_reward_frozen",
    "ratio",
    "prefix",
    "prefix_full",
    "prefix_full_cut_2",
)


def present_findings(r: dict[str, Any]) -> LabFindings:
    """Present the result of `bias.measure`."""
    setting = (
        f"{r['vocabulary']} symbols, {r['length']} tokens: {r['answers']} responses, all "
        f"summed; means over {r['seeds']} random policies; KL to the reference {r['ref_kl']:g} "
        f"nats a token, off policy KL(mu || theta) = {r['distance']:g}. Relative bias "
        "|E g - exact| / |exact|, exact: gradient of KL(theta || ref) over whole responses; "
        "variance of one response's gradient over |exact|^2."
    )
    claims = [*_check_on_policy(r), *_check_off_policy(r)]
    return LabFindings("bias", setting, r, claims, _make_tables(r))


def _check_on_policy(r: dict[str, Any]) -> list[LabClaim]:
    on = r["estimators"]["on_policy"]
    bias = {n: on[n]["relative_bias"] for n in on}
    return [
        LabClaim(
            f"k1 in the reward is unbiased on policy "
            f"(worst seed {find_worst_bias(on, 'k1_in_reward'):.1e})",
            find_worst_bias(on, "k1_in_reward") < EXACT,
        ),
        LabClaim(
            "k1 in the loss has no expected gradient on policy, only variance",
            r["identities"]["k1_in_loss = 0"] < EXACT,
        ),
        LabClaim(
            "k3 in the loss is the token-level forward KL, to "
            f"{r['identities']['k3_in_loss = token-level forward KL']:.0e}; as a reverse KL it is "
            f"off by {bias['k3_in_loss']:.0%}",
            r["identities"]["k3_in_loss = token-level forward KL"] < EXACT,
        ),
        LabClaim(
            "k2 in the loss, and every + form, is the token-level reverse KL; off the whole "
            f"response's by {bias['k2_in_loss']:.0%}",
            max(
                r["identities"]["k2_in_loss = token-level reverse KL"],
                r["identities"]["k1+ = k3+ = abs+ = k2 in loss"],
            )
            < EXACT,
        ),
        LabClaim(
            f"k3 in the reward is strongly biased: {bias['k3_in_reward']:.0%}, cosine "
            f"{on['k3_in_reward']['cosine']:.2f}",
            bias["k3_in_reward"] > 0.5,
        ),
        LabClaim(
            "its error is exactly the path-wise part, which the reward lacks: k3 in the loss",
            r["identities"]["k3_in_reward = exact - k3_in_loss"] < EXACT,
        ),
        LabClaim(
            "published order of the bias: " + " < ".join(ORDER),
            all(bias[a] < bias[b] for a, b in pairwise(ORDER)),
        ),
    ]


def _check_off_policy(r: dict[str, Any]) -> list[LabClaim]:
    off = r["estimators"]["off_policy"]
    clamped = [d for d, share in r["clamped"].items() if share > 0]
    cases = [
        *(e for d, e in r["distances"].items() if d not in clamped),
        *(m["estimators"] for m in r["updates"].values()),
    ]
    worst = max(e[n]["relative_bias_max"] for e in cases for n in UNBIASED)
    has_least_variance = all(
        min(UNBIASED, key=lambda n: e[n]["relative_variance"]) == "prefix_full" for e in cases
    )
    noise = {n: off[n]["relative_variance"] for n in UNBIASED}
    gap = abs(off["ratio"]["relative_bias"] - off["k2_in_loss_token"]["relative_bias"])
    ratio = list(r["mse"]["sampled over formula, n = 128"].values())
    return [
        LabClaim(
            f"off policy, whole responses: {', '.join(UNBIASED)} are unbiased at every distance "
            f"and after every update (worst {worst:.1e})"
            + (
                f", but for {', '.join(clamped)}, where log-ratios of whole responses pass the "
                "clamp at 20"
                if clamped
                else ""
            ),
            worst < EXACT,
        ),
        LabClaim(
            "of these prefix_full has the least variance everywhere; at the distance above "
            + ", ".join(f"{n} {noise[n]:.1f}" for n in UNBIASED),
            has_least_variance,
        ),
        LabClaim(
            "`ratio` (gradient through the ratio) is the token-weighted k2: right on mu's states "
            f"only, off by {off['ratio']['relative_bias']:.0%}",
            gap < EXACT,
        ),
        LabClaim(
            f"sampled errors over the formula's: {min(ratio):.2f} to {max(ratio):.2f}",
            all(0.8 < x < 1.25 for x in ratio),
        ),
    ]


def find_worst_bias(group: dict[str, Any], name: str) -> float:
    """Return the worst seed's relative bias."""
    return float(group[name]["relative_bias_max"])


BIAS = ("relative_bias", "relative_bias_max", "cosine", "relative_variance", "variance")
PARTS = ("score", "path", "sum", "score_size", "path_size")


def _make_tables(r: dict[str, Any]) -> list[TableBlock]:
    estimators = (
        "estimator",
        "relative bias",
        "worst seed",
        "cosine",
        "variance / |exact|^2",
        "variance",
    )
    parts = ("k", "score (in reward)", "path (in loss)", "sum", "size of score", "size of path")
    by_distance = [r["distances"][f"{d:g}"] for d in DISTANCES]
    by_update = [update["estimators"] for update in r["updates"].values()]
    form = "{relative_bias:.3f} / {relative_variance:.1f}"
    return [
        *(
            make_table(
                policy.replace("_", " ").capitalize(),
                estimators,
                {n: [j[k] for k in BIAS] for n, j in r["estimators"][policy].items()},
            )
            for policy in ("on_policy", "off_policy")
        ),
        make_table(
            "The parts of the gradient of E[k], on policy (errors against the exact gradient; "
            "sizes over its size)",
            parts,
            {n: [p[k] for k in PARTS] for n, p in r["parts"].items()},
        ),
        make_table(
            "Relative bias by KL(mu || theta), nats a token",
            ("estimator", *(f"{d:g}" for d in DISTANCES)),
            {n: [e[n]["relative_bias"] for e in by_distance] for n in SHOWN},
        ),
        make_table(
            "Relative bias after minibatch updates on samples of mu",
            ("estimator", *(f"{m} (KL {x['kl']:.4f})" for m, x in r["updates"].items())),
            {n: [e[n]["relative_bias"] for e in by_update] for n in SHOWN},
        ),
        *(
            make_table(
                f"{which}: bias / variance by discount and truncation",
                ("", *(f"<= {c:g}" for c in CUTS)),
                {
                    f"discount {d:g}": [form.format(**curve[f"{d:g}"][f"{c:g}"]) for c in CUTS]
                    for d in DISCOUNTS
                },
            )
            for which, curve in r["curve"].items()
        ),
    ]
