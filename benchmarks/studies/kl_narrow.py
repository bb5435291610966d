"""Compare ways to keep what `rlenarrow` forgets: a KL term, early stopping, or a shorter run.

    # three seeds, each with its own warm start (850 steps)
    python benchmarks/studies/kl_narrow.py --out runs/narrow
    # only write the result of the finished runs
    python benchmarks/studies/kl_narrow.py --out runs/narrow --table

RL on runs of 1 and 2 forgets runs of 4 to 6.  Synchronous, rloo.  Held-out has runs of 1 and 2
(which RL trains), the out-of-distribution set runs of 4 to 6 (which it forgets); both are exact.
- KL terms: k1 in the reward, k3 in the loss, and distillation (see kl_placement.py).
- KL early stopping inside a batch (`stop.kl_max`, KL(pi_prox || pi_theta)) needs several optimizer
  steps a batch, so these arms and their base make four.  It bounds every step, but not their sum.
- A shorter run: the run without KL after n batches, bitwise the beginning of the longer one, so
  that n can be chosen by its KL to the warm start (`kl_ref_last`, on its last batch).  `no KL` has
  a term of coefficient 1e-9, to measure that KL."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

import kl_placement
from lib import studies

MEASURED = ["kl.reward.coefficient=0.0", "kl.loss.estimator=k3", "kl.loss.coefficient=1e-9"]
COLUMNS = {
    "start": "start",
    "end": "exact",
    "ood": "ood",
    "kl_ref_last": "KL ref",
    "reward_end": "reward",
    "swing": "swing",
    "grad_norm_mean": "|g|",
    "grad_norm_cv": "cv",
    "steps_mean": "steps",
}


def main() -> None:
    p = studies.parser(__doc__, "runs/kl_narrow", steps=60, groups=16)
    p.add_argument("--betas", default="0.1,0.3")
    p.add_argument("--lr", default="5e-4", help="at 2e-4 fifty of these batches forget nothing yet")
    p.add_argument(
        "--ends", default="10,20,30", help="batches after which the run without KL is ended"
    )
    p.add_argument(
        "--blocks", default="terms,ends,stops,distillation", help="which of them, in this order"
    )
    p.add_argument(
        "--limits", default="0.0003,0.001,0.003", help="of KL early stopping, in nats a token"
    )
    args = p.parse_args()
    if args.quick:
        args.steps = 3
        args.ends = "2"
    betas = args.betas.split(",")
    ends = args.ends.split(",")
    common = [
        "staleness.max_lag=0",
        f"learner.steps={args.steps}",
        f"learner.lr={args.lr}",
        *studies.EVALUATION,
    ]
    study = studies.Study(args, "rlenarrow", f"narrow-lr{args.lr}", common)
    four = [*MEASURED, "learner.minibatches=4"]
    blocks = {
        "terms": {"no KL": MEASURED}
        | {
            f"{p}, {b}": kl_placement.sets(p, b)
            for b in betas
            for p in ("k1 in reward", "k3 in loss")
        },
        "ends": {f"no KL, ended at {n}": [*MEASURED, f"learner.steps={n}"] for n in ends},
        "stops": {"4 steps": four}
        | {f"4 steps, stop at {x}": [*four, f"stop.kl_max={x}"] for x in args.limits.split(",")},
        "distillation": {
            f"distillation, {betas[-1]}": kl_placement.sets("distillation", betas[-1])
        },
    }
    for name in args.blocks.split(","):
        study.block(blocks[name])
    if not args.table:
        study.run()
    k1 = [f"k1 in reward, {b}" for b in betas]
    pairs = [(k, f"k3 in loss, {b}") for k, b in zip(k1, betas, strict=True)]
    pairs += [(f"no KL, ended at {n}", k) for n in ends for k in k1] + [
        (f"4 steps, stop at {x}", k1[-1]) for x in args.limits.split(",")
    ]
    pairs += [(f"4 steps, stop at {x}", "4 steps") for x in args.limits.split(",")]
    found = studies.analyse(study, "no KL", pairs=pairs)
    studies.finish(
        study,
        "kl_narrow",
        found,
        {
            "task": "rlenarrow",
            "lr": args.lr,
            "betas": args.betas,
            "ends": args.ends,
            "limits": args.limits,
        },
        COLUMNS,
    )


if __name__ == "__main__":
    main()
