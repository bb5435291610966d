"""The presentation of `lab reshape`."""

from __future__ import annotations

from typing import Any

from asyncrl.experiments.lab.page import LabClaim, LabFindings, Lines, format_number, plot_lines
from asyncrl.experiments.lab.reshape import ARMS
from asyncrl.records.page_kit import PagePlot, TableBlock

MAIN = (
    "vanilla",
    "clip",
    "v3.1",
    "A",
    "B",
    "C",
    "D coefficient",
    "D learning rate",
    "D global",
    "gamma 0.001",
)
NEAR = 1.05  # of the budget: repair D is exact to second order, so allow 5 %


def present_findings(r: dict[str, Any]) -> LabFindings:
    """Present the result of `reshape.measure`."""
    rates = ", ".join(f"{o} {x:g}" for o, x in r["rates"].items())
    setting = (
        f"{r['vocabulary']} symbols, {r['length']} tokens; {r['batches']} batch(es) of "
        f"{r['samples']} responses, {r['epochs']} epochs of {r['minibatches']} step(s); rates: "
        f"{rates}; {r['seeds']} seeds; budget {r['budget']:g}. KL(mu || theta) a token, mu the "
        "batch's start: exact over all responses; `by the batch`: the k3 estimate on its samples, "
        "which the repairs use. A early stop, B clip, C KL penalty, D KL budget."
    )
    return LabFindings("reshape", setting, r, _check_claims(r), _make_tables(r), _plot_figures(r))


def average(x: list[float]) -> float:
    return sum(x) / len(x)


def _check_claims(r: dict[str, Any]) -> list[LabClaim]:
    claims = []
    budget = r["budget"]
    per_batch = r["epochs"] * r["minibatches"]
    first_kls = {
        o: {a: average(h["kl_first"]) for a, h in arms.items()} for o, arms in r["highest"].items()
    }
    for o, kl in first_kls.items():
        run = r["runs"][o]
        agree = min(run["v3.1"]["cosine"][1:per_batch])
        small = max(_compare_norms(run, "gamma 0.001"))
        batch_kl = r["highest"][o]["D learning rate"]["kl_batch"]
        claims += [
            LabClaim(
                f"{o}: v3.1 drifts past clip: KL {kl['v3.1']:.3f} against {kl['clip']:.3f} after "
                f"the first batch, {kl['v3.1'] / kl['clip']:.1f} times "
                f"(vanilla {kl['vanilla']:.3f})",
                kl["v3.1"] > 2 * kl["clip"],
            ),
            LabClaim(f"{o}: its successive gradients agree: least cosine {agree:.3f}", agree > 0.8),
            LabClaim(
                f"{o}: D on the learning rate keeps the batch's own KL within {NEAR - 1:.0%} of "
                f"its budget for every seed (highest {max(batch_kl):.4f})",
                max(batch_kl) <= NEAR * budget,
            ),
            LabClaim(
                f"{o}: D in the report's wording (one gamma for the batch) does not bound it: "
                f"{kl['D global']:.3f}",
                kl["D global"] > 2 * budget,
            ),
        ]
        if o == "adam":
            claims += [
                LabClaim(
                    f"adam: with gamma = 0.001 the gradient is at most {small:.4f} of vanilla's "
                    f"but the KL is {kl['gamma 0.001']:.3f}: steps are "
                    "normalized, so a small consistent gradient drifts as far",
                    small < 0.01 and kl["gamma 0.001"] > 0.5 * kl["vanilla"],
                ),
                LabClaim(
                    f"adam: D on the coefficient is not a bound: {kl['D coefficient']:.3f}",
                    kl["D coefficient"] > budget,
                ),
            ]
        else:
            claims.append(
                LabClaim(
                    f"{o}: with gamma = 0.001 the policy does not move: KL {kl['gamma 0.001']:.1e}",
                    kl["gamma 0.001"] < 0.01 * kl["vanilla"],
                )
            )
    return claims


def _compare_norms(run: dict[str, Any], arm: str) -> list[float]:
    """Return the gradient norm over vanilla's at each step.

    Steps at which vanilla's norm has vanished are left out.
    """
    return [
        a / b
        for a, b in zip(run[arm]["grad_norm"], run["vanilla"]["grad_norm"], strict=True)
        if b > 1e-6
    ] or [0.0]


def _make_tables(r: dict[str, Any]) -> list[TableBlock]:
    head = (
        "arm",
        "KL, first batch",
        "highest KL",
        "worst seed",
        "by the batch",
        "KL to the start",
        "reward",
        "steps",
        "gradient norm, first",
        "last",
        "least cosine",
        "gamma, last",
        "coefficient var, last",
    )
    tables = []
    for o, arms in r["runs"].items():
        rows = []
        for a in ARMS:
            x = arms[a]
            h = r["highest"][o][a]
            norms, gammas, noise = (
                [v for v in x[k] if v == v] for k in ("grad_norm", "gamma", "coefficient_var")
            )
            rows.append(
                [
                    a,
                    *(
                        f"{v:.4f}"
                        for v in (
                            average(h["kl_first"]),
                            average(h["kl"]),
                            max(h["kl"]),
                            average(h["kl_batch"]),
                        )
                    ),
                    f"{x['kl_start'][-1]:.3f}",
                    f"{average(h['reward']):.3f}",
                    f"{average(h['steps']):.1f}",
                    format_number(norms[0]),
                    format_number(norms[-1]),
                    format_number(min([v for v in x["cosine"] if v == v], default=0.0)),
                    format_number(gammas[-1]) if gammas else "-",
                    format_number(noise[-1]),
                ]
            )
        tables.append(TableBlock(head, rows, heading=f"{o}, learning rate {r['rates'][o]:g}"))
    return tables


def _plot_figures(r: dict[str, Any]) -> list[PagePlot]:
    figures = []
    for key, title, log in (
        ("kl", "KL(mu || theta), exact, nats a token", "y"),
        ("grad_norm", "Gradient norm", "y"),
        ("cosine", "Cosine of successive gradients", ""),
        ("gamma", "gamma, mean", ""),
        ("reward", "Expected reward", ""),
        ("coefficient_var", "Variance of a token's coefficient", "y"),
    ):
        for o, arms in r["runs"].items():
            lines: Lines = {}
            for a in MAIN:
                points = [(n + 1, v) for n, v in enumerate(arms[a][key]) if v == v]
                if points:
                    lines[a] = [float(n) for n, _ in points], [v for _, v in points]
            figures.append(plot_lines(f"{o}: {title}", lines, "optimizer step", title, log=log))
    return figures
