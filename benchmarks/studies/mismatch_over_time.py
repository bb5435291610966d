"""Does the engine's mismatch fall with the policy's perplexity, and does it grow late in a run?

    python benchmarks/studies/mismatch_over_time.py --out runs/mismatch_time
    # only write the result of the finished runs
    python benchmarks/studies/mismatch_over_time.py --out runs/mismatch_time --table

Protocol, fixed before the runs.  Task `rle`, synchronous, so that engine and learner have the same
version: what remains is the mismatch.  600 batches of 16 groups of 8 at 2e-4 without a correction,
an fp32 learner, three seeds with a warm start each.  Engines: `bf16` computes in bfloat16, `fp8`
has weights rounded to e4m3 (generator.quantize).

Per run, over its batches behind the first twenty: the rank correlation of the mismatch k3 with the
policy's entropy per token (the logarithm of its perplexity); the mean k3 of the last hundred
batches over that of the hundred with the lowest mean, as a logarithm; and the same of k3 divided by
entropy.  k3 "falls with perplexity" if the correlation is above 0 in all runs of an engine, and
"grows late" if the interval of the logarithm over seeds, 95 %, lies above log 1.1."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

import mismatch
from lib import studies
from scipy import stats

ENGINES = {"bf16": ["generator.dtype=bfloat16"], "fp8": ["generator.quantize=fp8"]}
K3 = "mismatch/k3_at_lag_0"
ENTROPY = "policy/entropy"
FIRST = 20  # batches left out at a run's start
BIN = 20  # batches of a point of the stored series
WINDOW = 100  # batches


def plan(args: Any) -> studies.Study:
    study = studies.Study(
        args,
        "rle",
        "time",
        [
            "staleness.max_lag=0",
            f"learner.steps={args.steps}",
            *mismatch.ARMS["none"],
            *studies.EVALUATION,
            "evaluation.every=100",
        ],
    )
    study.block(ENGINES)
    return study


def windows(values: Sequence[float], size: int) -> list[float]:
    """Return the means of consecutive windows; a rest at the end is left out.

    >>> windows([1.0, 3.0, 5.0, 7.0, 9.0], 2)
    [2.0, 6.0]
    """
    return [fmean(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]


def late_growth(values: Sequence[float], size: int) -> float:
    """Return log(mean of the last `size` values / lowest mean of a window of that size).

    >>> late_growth([4.0, 4.0, 1.0, 1.0, 2.0, 2.0], 2) == math.log(2.0)
    True
    """
    return math.log(fmean(values[-size:]) / min(windows(values, size)))


def over_time(curve: Sequence[dict[str, float]], size: int) -> dict[str, Any]:
    """Return one run's outcomes; size: of the windows, in batches."""
    rows = [row for row in curve[FIRST:] if K3 in row and ENTROPY in row]
    k3, entropy = [row[K3] for row in rows], [row[ENTROPY] for row in rows]
    relative = [a / b for a, b in zip(k3, entropy, strict=True)]
    return {
        "rank_correlation": float(stats.spearmanr(k3, entropy).statistic),
        "late_growth": late_growth(k3, size),
        "late_growth_per_entropy": late_growth(relative, size),
        "k3_series": windows(k3, BIN),
        "entropy_series": windows(entropy, BIN),
    }


def interval(values: Sequence[float]) -> list[float]:
    """Return the mean and the bounds of its 95 % t interval."""
    if len(values) < 2:
        return [values[0], math.nan, math.nan]
    low, high = stats.t.interval(0.95, len(values) - 1, fmean(values), stats.sem(values))
    return [fmean(values), float(low), float(high)]


def verdicts(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the outcomes of one engine over its seeds."""
    growth = interval([run["late_growth"] for run in runs])
    return {
        "rank_correlations": [run["rank_correlation"] for run in runs],
        "falls_with_perplexity": all(run["rank_correlation"] > 0 for run in runs),
        "late_growth": growth,
        "late_growth_per_entropy": interval([run["late_growth_per_entropy"] for run in runs]),
        "grows_late": growth[1] > math.log(1.1),
        "runs": list(runs),
    }


def main() -> None:
    p = studies.parser(__doc__, "runs/mismatch_time", seeds=3, steps=600, groups=16)
    args = p.parse_args()
    if args.quick:
        args.steps = FIRST + 4
    study = plan(args)
    if not args.table:
        study.run()
    size = 2 if args.quick else WINDOW
    found = studies.analyse(study, "bf16")
    runs = {
        arm: [
            over_time(study.cells.read(name)["curve"], size)
            for name in names.values()
            if study.cells.get_path(name).exists()
        ]
        for arm, names in study.arms.items()
    }
    over = {arm: verdicts(each) for arm, each in runs.items() if each}
    for arm, told in over.items():
        print(
            f"{arm}: rank correlation {', '.join(f'{x:+.2f}' for x in told['rank_correlations'])};"
            f" last {size} batches over the lowest {size}, logarithm: "
            "{:+.2f} [{:+.2f}, {:+.2f}]".format(*told["late_growth"]),
            file=sys.stderr,
        )
    studies.finish(study, "mismatch_over_time", found, {"window": size}, over_time=over)


if __name__ == "__main__":
    main()
