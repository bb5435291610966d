"""What a sweep found: each cell against the synchronous run, the speed of each limit, and the limit
to choose, with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.comparison import warm_cell
from asyncrl.experiments.compare.comparison_analysis import (
    cause,
    known,
    mean,
    reference_kl,
    signs_of,
)
from asyncrl.experiments.compare.sweep import SYNC, Plan, Sweep, label

ESS_LEAST = 0.5
ESS_WINDOW = 10
# few seeds make wide intervals: one that includes zero says little when the mean itself is far
# below it
MARGIN = 0.05
RULE = (
    f"largest limit whose interval against sync includes zero, whose mean is less than {MARGIN:g} "
    f"below sync, whose ESS stays above {ESS_LEAST:g} "
    "and whose runs are all stable"
)


def curve(record: dict[str, Any], last: int) -> tuple[list[float], list[float]]:
    """Steps and accuracies; an abandoned or failed run keeps its last accuracy up to step
    `last`.
    """
    steps, accuracy = record["accuracy"]
    return (
        (steps, accuracy)
        if not steps or steps[-1] >= last
        else ([*steps, float(last)], [*accuracy, accuracy[-1]])
    )


def ess(rows: Sequence[dict[str, float]]) -> float:
    """Lowest mean over ESS_WINDOW steps in a row of the ESS of the raw ratios target/behaviour; nan
    without rows.
    """
    x = [r["is/target_ess"] for r in rows if "is/target_ess" in r]
    width = min(ESS_WINDOW, len(x))
    return (
        min((mean(x[i : i + width]) for i in range(len(x) - width + 1)), default=math.nan)
        if x
        else math.nan
    )


def ood(record: dict[str, Any], last: int) -> tuple[float, float]:
    """Out-of-distribution accuracy at the start and after step `last`; nan where it was not
    measured: a run that was given up has no end.
    """
    found = dict(zip(*record.get("ood", ([], [])), strict=True))
    return found.get(0.0, math.nan), found.get(float(last), math.nan)


def trouble(record: dict[str, Any]) -> list[str]:
    """Why a run counts as unstable; empty: stable."""
    found = verdict.stability(record["accuracy"][1], record["curve"])
    return found + ([f"failed: {record['failed']}"] if record.get("failed") else [])


def lost(record: dict[str, Any]) -> float:
    """Share of the generated tokens that were neither trained nor left over when the run ended."""
    lines = {k: x["tokens"] for k, x in record["ledger_lines"].items()}
    total = sum(lines.values())
    return 1 - (lines.get("trained", 0) + lines.get("left_over", 0)) / total if total else 0.0


def summed(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The ledger's lines over all seeds: tokens, and tokens by answer length."""
    out: dict[str, dict[str, float]] = {}
    for r in records:
        for name, line in r["ledger_lines"].items():
            mine = out.setdefault(name, {})
            for k, x in line.items():
                if k == "tokens" or "upto_" in k:
                    mine[k] = mine.get(k, 0) + x
    return {name: line for name, line in out.items() if line.get("tokens")}


def analyse(s: Sweep) -> dict[str, Any]:
    """Everything the page and `--json` say, from the cells that are finished; an unfinished grid
    shows what it has.
    """
    p = s.plan
    last = s.plan.arms[SYNC].learner.steps
    records = {
        arm: {
            seed: s.cells.read(s.name(arm, seed))
            for seed in s.seeds
            if s.cells.path(s.name(arm, seed)).exists()
        }
        for arm in p.arms
    }
    speed = _speed(s)
    prompts = p.arms[SYNC].evaluation.final_prompts
    cells = []
    found = {}
    for (correction, limit), arm in p.cell.items():
        got = {seed: r for seed, r in records[arm].items() if seed in records[SYNC]}
        if not got:
            continue
        about = _cell([got[x] for x in sorted(got)], last)
        base = [_cell([records[SYNC][x]], last)["each"][0] for x in sorted(got)]
        d = verdict.paired(about["each"], base, prompts)
        if arm != SYNC:
            found[arm] = d
        runs = [warm_cell(arm, x, got[x], p.arms[arm]) for x in sorted(got)]
        cells.append(
            {
                "signs": signs_of(runs),
                "correction": correction,
                "limit": label(limit),
                "arm": arm,
                "difference": d,
                "speed": speed.get(label(limit), math.nan),
                "cause": cause(p.arms[arm], about["trouble"]),
                **about,
            }
        )
    verdict.holm(found)
    for c in cells:
        c["difference"] = _plain(c["difference"])
    missing = len(p.arms) * len(s.seeds) - sum(len(x) for x in records.values())
    out = {
        "corrections": list(p.corrections),
        "limits": [label(x) for x in p.limits],
        "injected": p.injected,
        "seeds": s.seeds,
        "missing": missing,
        "speed": speed,
        "sync": _cell(list(records[SYNC].values()), last),
        "cells": cells,
    }
    return out | {"suggestion": suggest(out, p)}


def _cell(records: Sequence[dict[str, Any]], last: int) -> dict[str, Any]:
    """One arm over its seeds."""
    curves = [curve(r, last) for r in records]
    lags: dict[int, int] = {}
    for r in records:
        for k, n in r["lag_histogram"].items():
            lags[int(k)] = lags.get(int(k), 0) + n
    total = max(sum(lags.values()), 1)
    bad = [trouble(r) for r in records]
    far = [ood(r, last) for r in records]
    return {
        "seeds": len(records),
        "each": [a[-1] for _, a in curves],
        "final": mean([a[-1] for _, a in curves]),
        "area": mean([verdict.area(*c) for c in curves]),
        "ess": min((ess(r["curve"]) for r in records), default=math.nan),
        "kl": max(
            (
                x["kl/behavior_target_k3"]
                for r in records
                for x in r["curve"]
                if "kl/behavior_target_k3" in x
            ),
            default=math.nan,
        ),
        "ood_start": mean(known(a for a, _ in far)),
        "ood_end": mean(known(b for _, b in far)),
        "ood_each": [b for _, b in far],
        "kl_ref": mean(known(reference_kl(r["curve"]) for r in records)),
        "lag": sum(k * n for k, n in lags.items()) / total,
        "lag_max": max(lags, default=0),
        "unstable": sum(map(bool, bad)),
        "trouble": sorted({x.split(":")[0] for b in bad for x in b}),
        "abandoned": [r["steps"] for r in records if r["abandoned"] or r.get("failed")],
        "ledger_lines": summed(records),
        "lost": mean([lost(r) for r in records]),
        "tokens": mean([float(sum(r["lag_histogram"].values())) for r in records]),
        "curves": [[list(x), list(y)] for x, y in curves],
        "digests": [r["weights_digest"] for r in records],
        "trained_ids": [r["trained_ids"] for r in records],
    }


def _plain(d: verdict.Difference) -> dict[str, Any]:
    return {
        "mean": d.mean,
        "interval": [d.low, d.high],
        "p": d.adjusted,
        "verdict": "no verdict" if d.seeds < 2 else d.word(),
        "interval_other_prompts": [d.prompt_low, d.prompt_high],
        "detectable": verdict.detectable(d.sd, d.seeds),
    }


def _speed(s: Sweep) -> dict[str, float]:
    """limit -> speed against limit 0, in decode steps of short runs at natural lag with learner and
    generators equally fast.
    """
    clocks = {}
    for limit in s.plan.probes:
        name = f"probe-limit{label(limit)}"
        if s.cells.path(name).exists():
            clocks[label(limit)] = s.cells.read(name)["clock"]
    return {k: clocks["0"] / max(x, 1) for k, x in clocks.items()} if "0" in clocks else {}


def judge(c: dict[str, Any]) -> str:
    """Why a cell is not good enough; empty: it is."""
    low, high = c["difference"]["interval"]
    if c["seeds"] < 2:
        return "one seed gives no interval"
    if c["unstable"]:
        return f"{c['unstable']} of {c['seeds']} runs unstable ({', '.join(c['trouble'])})"
    if high < 0:
        return f"accuracy {c['difference']['mean']:+.3f} [{low:+.3f}, {high:+.3f}] against sync"
    if c["difference"]["mean"] < -MARGIN:
        return (
            f"accuracy {c['difference']['mean']:+.3f} against sync, more than {MARGIN:g} "
            f"below, though the interval [{low:+.3f}, {high:+.3f}] includes zero"
        )
    if not c["ess"] > ESS_LEAST:
        return f"ESS falls to {c['ess']:.2f}"
    return ""


def suggest(found: dict[str, Any], p: Plan) -> dict[str, Any]:
    """The limit and correction to choose, by RULE; ties go to the higher mean accuracy.  `set` is
    to be pasted.
    """
    by = {
        n: sorted(
            (c for c in found["cells"] if c["correction"] == n and c["limit"] != "0"),
            key=lambda c: float(c["limit"]),
        )
        for n in p.corrections
    }
    each: dict[str, dict[str, Any]] = {}
    for name, cells in by.items():
        good = [c for c in cells if not judge(c)]
        best = good[-1] if good else None
        over = next(
            (c for c in cells if best is None or float(c["limit"]) > float(best["limit"])), None
        )
        each[name] = {
            "limit": best["limit"] if best else "0",
            "best": best,
            "why_not_more": f"at limit {over['limit']}: {judge(over)}" if over else "",
        }
    if len(found["seeds"]) < 2:
        return {
            "limit": None,
            "set": "",
            "reason": "one seed: no interval, so no limit can be suggested; use --seeds 3 or more",
            "by_correction": dict.fromkeys(each),
            "rule": RULE,
        }
    out = {
        "by_correction": {
            n: {"limit": x["limit"], "why_not_more": x["why_not_more"]} for n, x in each.items()
        },
        "rule": RULE,
    }
    able = [(n, x["best"]) for n, x in each.items() if x["best"]]
    if not able:
        why = "; ".join(f"{n}: {x['why_not_more']}" for n, x in each.items() if x["why_not_more"])
        return out | {
            "limit": "0",
            "correction": None,
            "set": "--set staleness.max_lag=0",
            "reason": f"no limit above 0 passes ({why}): stay synchronous",
        }
    name, best = max(able, key=lambda x: (float(x[1]["limit"]), x[1]["final"]))
    d = best["difference"]
    reason = (
        f"limit {best['limit']} with {name}: accuracy {d['mean']:+.3f} [{d['interval'][0]:+.3f}, "
        f"{d['interval'][1]:+.3f}] against sync at "
        f"{best['seeds']} seeds, ESS stays at {best['ess']:.2f} and more, every run stable"
    )
    if best["speed"] == best["speed"]:
        reason += (
            f"; {best['speed']:.2f} times the speed of sync if learner and generators are "
            "equally fast"
        )
    small = next((c for c in by[name] if not judge(c) and c["speed"] >= 0.98 * best["speed"]), best)
    if small is not best:
        reason += f"; limit {small['limit']} is as fast there"
    if each[name]["why_not_more"]:
        reason += f"; {each[name]['why_not_more']}"
    if d["detectable"] > 0.05:
        reason += f"; with these seeds a loss below {d['detectable']:.2f} would often go unseen"
    return out | {
        "limit": best["limit"],
        "correction": name,
        "set": set_line(p, name, float(best["limit"])),
        "reason": reason,
    }


def set_line(p: Plan, correction: str, limit: float) -> str:
    """What differs from the config as it is, as `--set` words."""
    arm, base = (_leaves(msgspec.to_builtins(p.arms[x])) for x in (p.cell[correction, limit], SYNC))
    keys = [
        k
        for k in arm
        if arm[k] != base.get(k)
        and arm[k] is not None
        and k != "staleness.inject"
        and k != "staleness.max_lag"
    ]
    words = [
        ("staleness.max_lag", label(limit)),
        *((k, str(arm[k]).lower() if isinstance(arm[k], bool) else arm[k]) for k in keys),
    ]
    return " ".join(f"--set {k}={v}" for k, v in words)


def _leaves(x: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for k, v in x.items():
        out |= _leaves(v, f"{prefix}{k}.") if isinstance(v, dict) else {f"{prefix}{k}": v}
    return out
