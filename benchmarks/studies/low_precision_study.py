"""Which corrections hold when the engine's weights are fp8 or int8, at lag 0 and 4?

    python benchmarks/studies/low_precision_study.py --out runs/low_precision --lag 0
    python benchmarks/studies/low_precision_study.py --out runs/low_precision --lag 4
    # only write the result of the finished runs
    python benchmarks/studies/low_precision_study.py --out runs/low_precision --lag 4 --table

Protocol. Task `rle`, an fp32 learner, five seeds with a warm start each, 40 batches of 16 x 8 at a
learning rate of 5e-4. Lag 0 is synchronous; at lag 4 every batch is injected with samples of the
version 4 before it. Engines: `fp32`, `int8` and `fp8` (generator.quantize), `int8 shared` and `fp8
shared` (the same with learner.shared_rounding). Corrections: those of the study `mismatch` under
lag (none, bypass, tis, mis, rejection); the shared engines run without a correction and with the
bypass alone, because the question there is whether they need one.

Fixed before the first run: the measure is held-out accuracy at the end, of the run's own
generator, as a difference paired by seed with Holm's correction. A correction holds under a format
if the interval of its difference from the same arm in fp32 lies above -0.05. Shared rounding makes
corrections unnecessary if the same is true of `fp8 shared, none` against the best corrected fp8
arm. Out-of-distribution accuracy, k3 at equal weights and collapsed runs are reported beside it.
95 runs a lag.

Added after the others: `fp8, mis drop` against `fp8, mis`.  Both give rejected tokens no gradient;
`mis` still counts them in the loss's mean, `mis drop` does not (correction.denominator)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

import mismatch
from lib import studies

SHARED = ["learner.shared_rounding=true"]
ENGINES = {
    "fp32": [],
    **{name: [f"generator.quantize={name}"] for name in ("int8", "fp8")},
    **{f"{name} shared": [f"generator.quantize={name}", *SHARED] for name in ("int8", "fp8")},
}
CORRECTIONS = mismatch.UNDER_LAG
ALONE = ("none", "bypass")  # with shared rounding


def plan(args: Any) -> studies.Study:
    study = studies.Study(args, "rle", f"lag{args.lag}", mismatch.common(args))
    for correction in CORRECTIONS:
        study.block(
            {
                f"{engine}, {correction}": [*sets, *mismatch.ARMS[correction]]
                for engine, sets in ENGINES.items()
                if correction in ALONE or "shared" not in engine
            }
        )
    drop = [*mismatch.ARMS["mis"], "correction.denominator=after"]
    study.block({"fp8, mis drop": [*ENGINES["fp8"], *drop]})
    return study


def pairs(study: studies.Study) -> list[tuple[str, str]]:
    """(arm, other) compared: with the same correction in fp32, and shared with corrected arms."""
    found = []
    for arm in study.arms:
        engine, _, correction = arm.partition(", ")
        if correction == "mis drop":
            found.append((arm, "fp8, mis"))
        elif engine != "fp32":
            found.append((arm, f"fp32, {correction}"))
        if engine.endswith("shared"):
            alone = engine.removesuffix(" shared")
            found += [(arm, f"{alone}, {other}") for other in CORRECTIONS]
    return found


def main() -> None:
    p = studies.parser(__doc__, "runs/low_precision", seeds=5, steps=40, groups=16)
    p.add_argument("--lr", default="5e-4")
    p.add_argument("--lag", type=int, default=0, help="versions of lag to inject")
    args = p.parse_args()
    if args.quick:
        args.steps = 2
    study = plan(args)
    if not args.table:
        study.run()
    found = studies.analyse(study, "fp32, bypass", pairs=pairs(study))
    studies.finish(
        study,
        f"low_precision_lag{args.lag}",
        found,
        {"task": "rle", "lr": args.lr, "lag": args.lag},
        mismatch.COLUMNS,
    )


if __name__ == "__main__":
    main()
