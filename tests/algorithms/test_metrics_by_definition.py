"""Every metric of the loss reckoned again in plain Python by token and answer.  float64."""

import math
from statistics import fmean
from typing import Any

import pytest
import torch
from algorithms_catalogue_kit import k3

from asyncrl.algorithms import diagnostics
from asyncrl.algorithms.surrogates import DUAL, HIGH, LOW, OPEN

D = torch.float64
LAGS = {
    "0": range(1),
    "1": range(1, 2),
    "2": range(2, 3),
    "3to4": range(3, 5),
    "5to8": range(5, 9),
    "9plus": range(9, 1000),
}


def view(seed: int, part: slice = slice(None), **more: Any) -> diagnostics.DiagnosticTokens:
    """60 answers of 1 to 8 tokens, whole or (part) those of a range; some masked, rejected, vetoed,
    of weight 0, not known."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (60,), generator=g)
    seq = torch.repeat_interleave(torch.arange(60), lengths)
    n = len(seq)
    mu = -3 * torch.rand(n, generator=g, dtype=D) - 0.1
    start = mu + 0.4 * torch.randn(n, generator=g, dtype=D)
    kept, vetoed = torch.rand(n, generator=g) < 0.8, (torch.rand(60, generator=g) < 0.1)[seq]
    kept = kept & ~vetoed & ~(torch.rand(60, generator=g) < 0.1)[seq]
    weight = torch.where(
        kept & (torch.rand(n, generator=g) < 0.9), torch.rand(n, generator=g, dtype=D) + 0.1, 0.0
    )
    fields = {
        "seq": seq,
        "lag": torch.randint(0, 12, (n,), generator=g),
        "valid": torch.rand(n, generator=g) < 0.85,
        "kept": kept,
        "vetoed": vetoed,
        "behavior": mu,
        "start": start,
        "target": start + 0.3 * torch.randn(n, generator=g, dtype=D),
        "weight": weight,
        "clipped": torch.randint(0, 4, (n,), generator=g).to(torch.int8),
        "reference": mu + 0.5 * torch.randn(n, generator=g, dtype=D),
        "entropy": torch.rand(n, generator=g, dtype=D) + 0.1,
        "known": (torch.rand(60, generator=g) < 0.7)[seq],
    }
    at = (seq >= (part.start or 0)) & (seq < (part.stop or 60))
    return diagnostics.DiagnosticTokens(
        **({k: x[at] for k, x in fields.items()} | more),
        rewards=torch.rand(60, generator=g, dtype=D),
    )


def tokens_of(v: diagnostics.DiagnosticTokens) -> list[dict[str, Any]]:
    """The valid tokens as dictionaries."""
    columns = {"seq": v.seq, "lag": v.lag, "mu": v.behavior, "s": v.start, "t": v.target}
    columns |= {"w": v.weight, "kept": v.kept, "vetoed": v.vetoed, "clip": v.clipped}
    columns |= {"known": v.valid if v.known is None else v.known, "ref": v.reference}
    columns |= {"h": v.entropy, "valid": v.valid}
    tokens = [
        {name: None if column is None else column[i].item() for name, column in columns.items()}
        for i in range(len(v.seq))
    ]
    return [token for token in tokens if token["valid"]]


def ess(w: list[float]) -> float:
    return sum(w) ** 2 / (len(w) * sum(x * x for x in w))


def share(xs: list[bool]) -> float:
    return sum(xs) / len(xs)


def wanted(v: diagnostics.DiagnosticTokens) -> dict[str, float]:
    ts = tokens_of(v)
    ks = [x for x in ts if x["known"]]
    rejected = [not x["kept"] and not x["vetoed"] for x in ts]
    masked = [x["kept"] and x["w"] == 0 for x in ts]
    vetoed = [x["vetoed"] for x in ts]
    out = {
        "is/mean_weight": fmean(x["w"] for x in ts),
        "is/weight_ess": ess([x["w"] for x in ts]),
        "is/target_ess": ess([math.exp(x["t"] - x["mu"]) for x in ts]),
        "is/target_ratio": fmean(math.exp(x["t"] - x["mu"]) for x in ts),
        "is/target_ratio_max": max(math.exp(x["t"] - x["mu"]) for x in ts),
        "is/zero_share": share(rejected) + share(vetoed) + share(masked),
        "is/rejected_share": share(rejected),
        "is/vetoed_share": share(vetoed),
        "is/masked_share": share(masked),
        "kl/behavior_target_k1": fmean(x["mu"] - x["t"] for x in ts),
        "kl/behavior_target_k3": fmean(k3(x["mu"] - x["t"]) for x in ts),
        "clip/low": share([x["clip"] == LOW for x in ts]),
        "clip/high": share([x["clip"] == HIGH for x in ts]),
        "clip/dual": share([x["clip"] == DUAL for x in ts]),
        "clip/share": share([x["clip"] != OPEN for x in ts]),
        "policy/behavior_nll": fmean(-x["mu"] for x in ts),
        "perplexity/behavior": math.exp(fmean(-x["mu"] for x in ts)),
        "perplexity/target": math.exp(fmean(-x["t"] for x in ts)),
        "is/chi2": fmean(math.exp(2 * (x["s"] - x["mu"])) for x in ks) - 1,
        "is/ess": ess([math.exp(x["s"] - x["mu"]) for x in ks]),
        "kl/behavior_start_k1": fmean(x["mu"] - x["s"] for x in ks),
        "kl/behavior_start_k3": fmean(k3(x["mu"] - x["s"]) for x in ks),
        "kl/start_target_k1": fmean(x["s"] - x["t"] for x in ks),
        "kl/start_target_k3": fmean(k3(x["s"] - x["t"]) for x in ks),
        "perplexity/start": math.exp(fmean(-x["s"] for x in ks)),
        "is/ratio_max": max(math.exp(x["s"] - x["mu"]) for x in ks),
    }
    if v.entropy is not None:
        out["policy/entropy"] = fmean(x["h"] for x in ts)
    if v.reference is not None:
        out |= {
            "kl/target_ref_k1": fmean(x["t"] - x["ref"] for x in ts),
            "kl/target_ref_k3": fmean(k3(x["t"] - x["ref"]) for x in ts),
            "kl/ref_target": fmean(
                (r := math.exp(x["ref"] - x["t"])) * (x["ref"] - x["t"]) - r + 1 for x in ts
            ),
            "perplexity/reference": math.exp(fmean(-x["ref"] for x in ts)),
        }
    for name, lags in LAGS.items():
        here, seen = [x for x in ts if x["lag"] in lags], [x for x in ks if x["lag"] in lags]
        if here:
            out |= {
                f"by_lag/tokens_{name}": len(here),
                f"by_lag/weight_{name}": fmean(x["w"] for x in here),
                f"by_lag/target_k3_{name}": fmean(k3(x["mu"] - x["t"]) for x in here),
                f"by_lag/clip_{name}": share([x["clip"] != OPEN for x in here]),
                f"by_lag/zero_{name}": share([not x["kept"] or x["w"] == 0 for x in here]),
            }
            if v.entropy is not None:
                out[f"by_lag/entropy_{name}"] = fmean(x["h"] for x in here)
        if seen:
            out |= {
                f"by_lag/k1_{name}": fmean(x["mu"] - x["s"] for x in seen),
                f"by_lag/k3_{name}": fmean(k3(x["mu"] - x["s"]) for x in seen),
                f"by_lag/update_{name}": fmean(x["s"] - x["t"] for x in seen),
                f"by_lag/ess_{name}": ess([math.exp(x["s"] - x["mu"]) for x in seen]),
            }
    fresh = [x for x in ks if x["lag"] == 0]
    if fresh:
        out |= {
            "mismatch/k3_at_lag_0": fmean(k3(x["mu"] - x["s"]) for x in fresh),
            "mismatch/max_at_lag_0": max(abs(x["s"] - x["mu"]) for x in fresh),
        }
    return out | by_answer(v, ts)


def by_answer(v: diagnostics.DiagnosticTokens, ts: list[dict[str, Any]]) -> dict[str, float]:
    answers: dict[int, list[dict[str, Any]]] = {}
    for x in ts:
        answers.setdefault(x["seq"], []).append(x)
    each = list(answers.items())
    whole = [a for _, a in each if all(x["known"] for x in a)]
    w = [fmean(x["w"] for x in a) for _, a in each]
    out = {
        f"perplexity_by_answer/{name}": math.exp(fmean(fmean(-x[key] for x in a) for a in those))
        for name, key, those in (
            ("behavior", "mu", answers.values()),
            ("target", "t", answers.values()),
            ("start", "s", whole),
        )
    }
    out["is/ess_by_answer"] = ess(w)
    gone = [(i, a) for i, a in each if all(not x["kept"] for x in a)]
    vetoed = [(i, a) for i, a in each if any(x["vetoed"] for x in a)]
    out |= {
        "is/rejected_answers": len(gone) / len(each),
        "is/vetoed_answers": len(vetoed) / len(each),
    }
    for name, those in (("rejected", gone), ("vetoed", vetoed)):
        if those:
            out |= {
                f"is/{name}_length": fmean(len(a) for _, a in those),
                f"is/{name}_reward": fmean(float(v.rewards[i]) for i, _ in those),
            }
    # each such token counts its answer
    zero = [(len(a), float(v.rewards[i])) for i, a in each for x in a if x["kept"] and x["w"] == 0]
    if zero:
        out["is/masked_length"], out["is/masked_reward"] = map(fmean, zip(*zero, strict=True))
    return out


@pytest.mark.parametrize("seed", [0, 1])
def test_every_metric_is_its_definition(seed: int) -> None:
    v = view(seed)
    v.task, v.tasks = v.seq % 2, 3
    got = diagnostics.compute_metrics(diagnostics.sum_statistics(v), tasks=("a", "b", "none"))
    want = wanted(v)
    for n, task in enumerate("ab"):
        known = [x for x in tokens_of(v) if x["known"] and x["seq"] % 2 == n]
        want[f"task/{task}_ess"] = ess([math.exp(x["s"] - x["mu"]) for x in known])
    quantiles = {f"is/log_ratio_{q}" for q in ("p50", "p99")}
    assert got.keys() - quantiles == want.keys() and got.keys() >= quantiles
    wrong = {
        k: (got[k], want[k]) for k in want if got[k] != pytest.approx(want[k], rel=1e-9, abs=1e-12)
    }
    assert not wrong


def test_parts_of_a_batch_add_up_to_it_and_take_the_larger_maximum() -> None:
    whole = diagnostics.compute_metrics(diagnostics.sum_statistics(view(2)))
    total: dict[str, torch.Tensor] = {}
    for part in (slice(0, 20), slice(20, 21), slice(21, 60)):
        diagnostics.add_sums(total, diagnostics.sum_statistics(view(2, part)))
    got = diagnostics.compute_metrics(total)
    assert got.keys() == whole.keys()
    assert all(got[k] == pytest.approx(whole[k], rel=1e-9) for k in whole)


def test_what_nobody_knows_is_not_said() -> None:
    v = view(3)
    v.known = torch.zeros_like(v.valid)
    got = diagnostics.compute_metrics(diagnostics.sum_statistics(v))
    of_start = ["start", "mismatch", *(f"by_lag/{x}" for x in ("k1", "k3", "update", "ess"))]
    of_start += [f"is/{x}" for x in ("ess", "chi2", "ratio_max", "log_ratio")]
    assert not [k for k in got if any(x in k for x in of_start) and k != "is/ess_by_answer"]
    bare = diagnostics.compute_metrics(
        diagnostics.sum_statistics(view(3, reference=None, entropy=None))
    )
    assert not [k for k in bare if "ref" in k or "entropy" in k]
    everywhere = diagnostics.compute_metrics(diagnostics.sum_statistics(view(3, known=None)))
    v.known = torch.ones_like(v.valid)
    assert everywhere == diagnostics.compute_metrics(diagnostics.sum_statistics(v))
    v.vetoed[:], v.weight = False, v.weight + 0.1  # none to give the length of
    v.lag += 1
    v.lag[v.lag == 3] = 500
    late = diagnostics.compute_metrics(diagnostics.sum_statistics(v))
    assert late == {k: pytest.approx(x) for k, x in wanted(v).items()} | {
        k: late[k] for k in late if "log_ratio" in k
    }
    assert "mismatch/k3_at_lag_0" not in late and "mismatch/max_at_lag_0" not in late
    assert "by_lag/tokens_0" not in late


def test_maxima_below_one_and_behind_the_mask() -> None:
    v = view(3)
    v.known, v.start = None, v.behavior - 0.5
    v.start[~v.valid] += 5
    got = diagnostics.compute_metrics(diagnostics.sum_statistics(v))
    assert got["is/ratio_max"] == pytest.approx(math.exp(-0.5))
    assert got["mismatch/max_at_lag_0"] == pytest.approx(0.5)
    v.start[v.lag > 0] += 2
    got = diagnostics.compute_metrics(diagnostics.sum_statistics(v))
    assert got["is/ratio_max"] == pytest.approx(math.exp(1.5))
    assert got["mismatch/max_at_lag_0"] == pytest.approx(0.5)


def test_nothing_at_all_is_no_error() -> None:
    empty = diagnostics.sum_statistics(view(0, slice(60, 60)))
    assert diagnostics.compute_metrics({}) == {}
    got = diagnostics.compute_metrics(empty)
    assert got["is/mean_weight"] == 0 and got["clip/share"] == 0
    assert not [k for k in got if k.startswith("by_lag")]
    given = {"a": [[1.0, 2.0], [3.0, 4.0]], "b": 5, "c": [6.0]}
    host = diagnostics.HostReads().read_dict({name: torch.tensor(x) for name, x in given.items()})
    assert host == {"a": [1, 2, 3, 4], "b": [5], "c": [6]}


def test_quantiles_are_the_upper_edges_of_their_bins() -> None:
    """Bin i ends at 0.01 x 1.15^i; the last edge stands for all beyond it."""
    edges = [0.01 * 1.15**i for i in range(48)]
    counts = [0.0] * 49
    counts[3], counts[10], counts[48] = 50, 49, 1
    assert diagnostics._find_quantile(counts, 0.5) == pytest.approx(edges[3])
    assert diagnostics._find_quantile(counts, 0.51) == pytest.approx(edges[10])
    assert diagnostics._find_quantile(counts, 0.99) == pytest.approx(edges[10])
    assert diagnostics._find_quantile(counts, 1.0) == pytest.approx(edges[47])
    assert diagnostics._find_quantile([0.0] * 49, 0.5) == 0
    assert diagnostics._find_quantile(counts, 0.0) == pytest.approx(edges[3])
    v = view(4)
    v.start = v.behavior + torch.where(torch.arange(len(v.seq)) % 2 == 0, 0.0105, -3.0)
    got = diagnostics.compute_metrics(diagnostics.sum_statistics(v))
    assert got["is/log_ratio_p99"] == pytest.approx(next(e for e in edges if e >= 3.0), rel=1e-6)


NAMES = "gamma ratio used_ratio objective_mean objective_var gamma_away gamma_back c p_correct"
RESHAPED = [f"reshape/{name}" for name in NAMES.split()]


def test_terms_and_reshape_sums_become_metrics() -> None:
    v = view(5)
    extra = {
        "loss/policy": torch.tensor(0.5),
        "sq/kl": torch.tensor(9.0),
        "sq/policy": torch.tensor(4.0),
        "other": torch.tensor(1.0),
        "reshape": torch.tensor([4.0, 2.0, 8.0, 6.0, 2.0, 5.0, 3.0, 2.0, 1.0, 4.0, -1.0, 3.0]),
    }
    got = diagnostics.compute_metrics(diagnostics.sum_statistics(v) | extra)
    assert got["loss/policy"] == 0.5 and got["kl/gradient_share"] == pytest.approx(1.5)
    assert "other" not in got and "sq/kl" not in got
    values = (0.5, 2.0, 1.5, 0.5, 5 / 4 - 0.25, 1.5, 0.25, -0.25, 0.75)
    found = {k: x for k, x in got.items() if k.startswith("reshape/")}
    assert found == pytest.approx(dict(zip(RESHAPED, values, strict=True)))
    assert set(diagnostics._compute_reshape_metrics([0.0] * 12).values()) == {0.0}
    sums = [1.0, 0.5, 3.0, 2.0, 4.0, 20.0, 0.25, 1.0, 0.75, 1.0, 6.0]
    values = dict(zip(RESHAPED, (0.5, 3, 2, 4, 4, 0.25, 0.75, 6), strict=False))
    assert diagnostics._compute_reshape_metrics(sums) == values
    assert diagnostics._exponentiate(60) == math.exp(50)
    assert diagnostics._exponentiate(1.0) == math.e


def test_the_split_is_its_definition_by_lag_and_by_age() -> None:
    g = torch.Generator().manual_seed(1)
    n = 80
    mu = -torch.rand(n, generator=g, dtype=D)
    version = mu + 0.1 * torch.randn(n, generator=g, dtype=D)
    start = mu + 0.2 * torch.randn(n, generator=g, dtype=D)
    target = start + 0.3 * torch.randn(n, generator=g, dtype=D)
    lag = torch.randint(0, 12, (n,), generator=g)
    age = torch.randint(0, 12, (n,), generator=g)
    got = diagnostics.compute_split_metrics(mu, version, start, target, lag, age)
    parts = {"mismatch": version - mu, "staleness": start - version, "update": target - start}
    want: dict[str, float] = {"split/total": fmean((mu - target).tolist())}
    for name, x in parts.items():
        want |= {
            f"split/{name}": fmean((-x).tolist()),
            f"split/{name}_k3": fmean(k3(-y) for y in x.tolist()),
        }

    def select(part: str, column: torch.Tensor, values: range) -> list[float]:
        pairs = zip(parts[part].tolist(), column.tolist(), strict=True)
        return [y for y, value in pairs if value in values]

    one = select("mismatch", age, range(1))
    want["mismatch/k3_one_version"] = fmean(k3(-y) for y in one)
    want["mismatch/max_one_version"] = max(map(abs, one))
    for name, lags in LAGS.items():
        for part in ("mismatch", "staleness"):
            here = select(part, lag, lags)
            want[f"by_lag/{part}_{name}"] = fmean(-y for y in here)
            want[f"by_lag/{part}_k3_{name}"] = fmean(k3(-y) for y in here)
        here = select("mismatch", age, lags)
        want[f"by_age/mismatch_k3_{name}"] = fmean(k3(-y) for y in here)
    assert got == pytest.approx(want)
    assert got["split/mismatch"] + got["split/staleness"] + got["split/update"] == pytest.approx(
        got["split/total"]
    )
    columns = mu, version, start, target, lag * 0 + 1, age * 0 + 2
    none, old = (diagnostics.compute_split_metrics(*(x[:n] for x in columns)) for n in (0, 1))
    assert none == {} and "mismatch/k3_one_version" not in old
    by_lag = {
        f"by_lag/{name}_1" for part in ("mismatch", "staleness") for name in (part, f"{part}_k3")
    }
    assert {k for k in old if "by_" in k} == by_lag | {"by_age/mismatch_k3_2"}
