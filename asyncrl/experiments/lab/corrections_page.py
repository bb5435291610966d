"""The presentation of `lab corrections`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from asyncrl.experiments.lab.corrections import (
    DISTANCES,
    SIZES,
    compute_squared_error,
    list_candidates,
)
from asyncrl.experiments.lab.page import LabClaim, LabFindings, make_table
from asyncrl.records.page_kit import TableBlock

EXACT = 1e-9
AWAY = [f"{d:g}" for d in DISTANCES if d > 0]


def present_findings(r: dict[str, Any]) -> LabFindings:
    """Present the result of `corrections.measure`."""
    setting = (
        f"{r['vocabulary']} symbols, responses of up to {r['length']} tokens, all summed; "
        f"means over {r['seeds']} random policies, directions of mu "
        "and rewards. Relative bias |E g - exact| / |exact|, exact: the gradient of theta's "
        "expected reward; variance of one response's gradient over "
        "|exact|^2; distances KL(mu || theta) in nats a token; default bounds."
    )
    return LabFindings("corrections", setting, r, _check_claims(r["estimators"]), _make_tables(r))


def find_best_correction(by_name: dict[str, Any], size: int) -> str:
    """Return the correction with the least squared error at `size` responses.

    Among equals it is the one with the shortest name.
    """
    return min(by_name, key=lambda n: (round(compute_squared_error(by_name[n], size), 9), len(n)))


def _check_claims(e: dict[str, Any]) -> list[LabClaim]:
    longest = list(e)[-1]

    def holds_everywhere(f: Any) -> bool:
        return all(f(e[n][d]) for n in e for d in AWAY)

    def list_values(name: str, key: str) -> list[float]:
        return [e[longest][d][name][key] for d in e[longest]]

    def is_quieter(x: dict[str, Any], level: str) -> bool:
        return bool(
            x[f"{level} truncate"]["relative_variance"]
            <= x[f"{level} none"]["relative_variance"] * (1 + EXACT)
        )

    worst = max(e[n][d]["sequence none"]["relative_bias_max"] for n in e for d in e[n])
    worst_at_zero = max(e[n]["0"][name]["relative_bias"] for n in e for name in list_candidates())
    none = list_values("none", "relative_bias")
    noise = list_values("sequence none", "relative_variance")
    return [
        LabClaim(
            f"at distance 0 every correction is exact and drops nothing "
            f"(worst {worst_at_zero:.1e})",
            worst_at_zero < EXACT,
        ),
        LabClaim(
            "weights of whole responses without a bound are unbiased at every distance and length "
            f"(worst {worst:.1e})",
            worst < EXACT,
        ),
        LabClaim(
            f"their variance grows with distance: {noise[0]:.0f} -> {noise[-1]:.0f} at "
            f"{longest} tokens",
            noise[-1] > 2 * noise[0],
        ),
        LabClaim(
            f"without a correction the bias grows with distance: {none[1]:.0%} -> {none[-1]:.0%} "
            f"at {longest} tokens",
            all(a < b for a, b in pairwise(none)),
        ),
        LabClaim(
            "token weights remove only part of the bias: the states remain mu's",
            holds_everywhere(
                lambda x: EXACT < x["token none"]["relative_bias"] < x["none"]["relative_bias"]
            ),
        ),
        LabClaim(
            "truncation never adds variance, at token and at sequence level",
            holds_everywhere(lambda x: all(is_quieter(x, n) for n in ("token", "sequence"))),
        ),
    ]


def _make_tables(r: dict[str, Any]) -> list[TableBlock]:
    e = r["estimators"]
    longest = list(e)[-1]
    names = list_candidates()

    def tabulate_distances(heading: str, form: str) -> TableBlock:
        by_distance = e[longest].values()
        return make_table(
            f"{longest} tokens: {heading}, by distance",
            ("correction", *e[longest]),
            {n: [form.format(**x[n]) for x in by_distance] for n in names},
        )

    pair = ("relative_bias", "relative_variance")
    return [
        tabulate_distances(
            "relative bias / variance / share left",
            "{relative_bias:.2f} / {relative_variance:.0f} / {left:.2f}",
        ),
        make_table(
            "Distance 0.01: bias and variance by length",
            ("correction", *(f"{k} {n}" for n in e for k in ("bias", "var"))),
            {n: [x["0.01"][n][k] for x in e.values() for k in pair] for n in names},
        ),
        tabulate_distances(
            "mean weight / effective sample size of tokens", "{mean_weight:.2f} / {ess:.2f}"
        ),
        *(
            make_table(
                f"Least squared error with {size} responses",
                ("", *AWAY),
                {
                    f"{length} tokens": [find_best_correction(x[d], size) for d in AWAY]
                    for length, x in e.items()
                },
            )
            for size in SIZES
        ),
    ]
