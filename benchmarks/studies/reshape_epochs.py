"""Compare IS-reshape and its repairs with clip and no clip in training with 16 epochs a batch.

    # three seeds, each with its own warm start
    python benchmarks/studies/reshape_epochs.py --out runs/reshape
    # only write the result of the finished runs
    python benchmarks/studies/reshape_epochs.py --out runs/reshape --table

`rle`, synchronous, rloo, AdamW; the arms are those of `asyncrl lab reshape`
(asyncrl/experiments/lab/reshape.py), the repairs' budget is 0.05 nats a token.  All arms are
compared with `clip` (PPO) by accuracy, KL moved and gradient norm.  KL(mu || theta) is the k3
estimate of every optimizer step's batch before that step: kl_mu_mean averages it over the steps
of a batch and over batches, kl_mu_max is that of the batch with the largest mean.  steps_mean:
optimizer steps a batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import studies

from asyncrl.experiments.lab import reshape as lab

FIRST = ("clip", "vanilla", "v3.1", "A", "B", "C", "D coefficient", "D learning rate")
THEN = ("D global", "v3.1 box-cox", "B+D learning rate", "clip+D learning rate")
COLUMNS = {
    "start": "start",
    "end": "exact",
    "ood": "ood",
    "kl_mu_mean": "KL mean",
    "kl_mu_max": "KL max",
    "steps_mean": "steps",
    "gamma_mean": "gamma",
    "grad_norm_mean": "|g|",
    "grad_norm_max": "|g| max",
    "entropy_end": "entropy",
}


def sets(arm: str) -> list[str]:
    """--set items of an arm of the lab."""
    return [
        f"{section}.{key}={json.dumps(value)}"
        for section, keys in lab.ARMS[arm].items()
        for key, value in keys.items()
    ]


def main() -> None:
    p = studies.parser(__doc__, "runs/reshape_epochs", steps=8, groups=16)
    p.add_argument("--epochs", type=int, default=16)
    p.add_argument("--lr", default="2e-4")
    p.add_argument("--only", default="", help="arms, separated by commas; empty: all")
    args = p.parse_args()
    if args.quick:
        args.steps = 2
        args.epochs = 3
    common = [
        "staleness.max_lag=0",
        f"learner.steps={args.steps}",
        f"learner.epochs={args.epochs}",
        f"learner.lr={args.lr}",
        *studies.EVALUATION,
    ]
    common += ["evaluation.every=4"]
    study = studies.Study(args, "rle", f"epochs{args.epochs}-lr{args.lr}", common)
    only = args.only.split(",") if args.only else [*FIRST, *THEN]
    for arms in (FIRST, THEN):
        study.block({arm: sets(arm) for arm in arms if arm in only})
    if not args.table:
        study.run()
    found = studies.analyse(study, "clip", pairs=[(a, "v3.1") for a in only if a not in FIRST[:3]])
    studies.finish(
        study,
        "reshape_epochs",
        found,
        {"task": "rle", "epochs": args.epochs, "lr": args.lr},
        COLUMNS,
    )


if __name__ == "__main__":
    main()
