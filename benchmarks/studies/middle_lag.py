"""Which method learns best at lag 8, each at a learning rate of its own?  And at other lags?

    # six methods, resumed run by run when it is started again
    nice -n 19 python benchmarks/studies/middle_lag.py --out runs/middle [--lags 8 12]
    # only write the result of the finished runs
    python benchmarks/studies/middle_lag.py --out runs/middle --table

Protocol, fixed before the runs.  Task `rle`, 120 batches of 16 groups of 8, one update a batch,
rloo where the method has no advantage of its own, AdamW.  Every batch is injected with samples of
the version exactly 8 before it, or another of --lags (the first batches with less).  Each seed has
its own warm start, prompts and sampling; the arms of a seed share them.  Methods by their names in
`asyncrl methods`: no correction (`none`), PPO on the behavior policy (`ppo`), that with 0.1 of k3
towards the initial model in the loss (`k3`), GMPO, VESPO and decoupled PPO with truncated weights
of whole sequences (`seq_tis`).

Rates.  For each lag and method the factor of 5e-4 with the highest mean accuracy over two tuning
seeds, of 2, 1, 1/2, 1/4 and 1/8, and for `none` also 1/16.  The comparison has other seeds.

Outcomes: held-out accuracy after the last batch (512 prompts) and its mean over the run (128
prompts after every tenth batch), both as differences from `ppo` at the same lag, paired by seed,
with a t interval of 95 % over seeds and Holm's correction over all methods and lags of one outcome.
Beside them runs that are unstable by the rule of `asyncrl compare`.  A method is recommended at a
lag if its interval of the mean accuracy lies above 0; otherwise PPO is.  Synchronous PPO at the
rate of the first lag runs beside them, to show what the lag costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import studies

from asyncrl.experiments.compare import grid, verdict
from asyncrl.experiments.compare.arms import CORRECTIONS

BASE = "ppo"
METHODS = ("none", BASE, "k3", "gmpo", "vespo", "seq_tis")
RATE = 5e-4
FACTORS = (2.0, 1.0, 0.5, 0.25, 0.125)
LOWEST = 0.0625  # for `none` alone
TUNING_SEEDS = 2
MEASURES = ("end", "area")
COLUMNS = {"start": "start", "end": "final", "area": "mean", "kl_mu_mean": "KL(mu)"}


def arm(lag: int, method: str, factor: float) -> list[str]:
    """Return the --set items of a method at an injected lag and a factor of RATE."""
    own = CORRECTIONS[method][1]
    return [*grid.list_limit_sets(lag, True), f"learner.lr={RATE * factor:g}", *own]


def factors_of(method: str) -> tuple[float, ...]:
    return (*FACTORS, LOWEST) if method == "none" else FACTORS


def tuned(study: studies.Study, lag: int, method: str) -> dict[float, float]:
    """Return factor -> mean accuracy over the tuning seeds, of factors that have all of them."""
    means = {}
    for factor in factors_of(method):
        runs = study.found(f"lag{lag} {method} x{factor:g}")
        if runs and len(runs) == len(study.arms[f"lag{lag} {method} x{factor:g}"]):
            means[factor] = fmean(run["area"] for run in runs.values())
    return means


def choose(means: dict[float, float]) -> float:
    """Return the factor with the highest mean accuracy, the lower of two equal ones."""
    return max(means, key=lambda factor: (means[factor], -factor))


def differences(study: studies.Study, lags: Sequence[int]) -> dict[str, dict[str, Any]]:
    """measure -> arm -> difference from PPO at its lag, Holm over all arms of the measure."""
    found: dict[str, dict[str, Any]] = {}
    for what in MEASURES:
        every: dict[str, verdict.PairedDifference] = {}
        for lag in lags:
            arms = {f"lag{lag} {m}": study.found(f"lag{lag} {m}") for m in METHODS}
            every |= studies.compare(arms, f"lag{lag} {BASE}", what)
        verdict.adjust_by_holm(every)
        found[what] = {name: studies.shown(difference) for name, difference in every.items()}
    return found


def main() -> None:
    p = studies.parser(__doc__, "runs/middle_lag", seeds=6, steps=120, groups=16)
    p.add_argument("--lags", type=int, nargs="+", default=[8])
    args = p.parse_args()
    if args.quick:
        args.steps = 2
    common = [
        f"learner.steps={args.steps}",
        *studies.EVALUATION,
        "evaluation.ood_prompts=0",
    ]
    study = studies.Study(args, "rle", "middle", common)
    pairs = [(lag, method) for lag in args.lags for method in METHODS]
    tuning = {
        f"lag{lag} {method} x{factor:g}": arm(lag, method, factor)
        for lag, method in pairs
        for factor in factors_of(method)
    }
    study.block(tuning, TUNING_SEEDS)
    if not args.table:
        study.run()
    rates = {f"lag{lag} {method}": tuned(study, lag, method) for lag, method in pairs}
    chosen = {name: choose(means) for name, means in rates.items() if means}
    arms = {
        f"lag{lag} {method}": arm(lag, method, chosen[f"lag{lag} {method}"])
        for lag, method in pairs
        if f"lag{lag} {method}" in chosen
    }
    synchronous = f"lag{args.lags[0]} {BASE}"
    if synchronous in chosen:
        arms[f"lag0 {BASE}"] = arm(0, BASE, chosen[synchronous])
    study.block(arms, first=TUNING_SEEDS)
    if not args.table:
        study.run()
    found = studies.analyse(study, f"lag0 {BASE}", measures=MEASURES)
    found = {name: facts for name, facts in found.items() if name in arms}
    setting = {"task": "rle", "rate": RATE, "tuning_seeds": TUNING_SEEDS, "chosen": chosen}
    studies.finish(
        study,
        "middle_lag",
        found,
        setting,
        COLUMNS,
        rates=rates,
        against_ppo=differences(study, args.lags),
    )


if __name__ == "__main__":
    main()
