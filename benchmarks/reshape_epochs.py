"""IS-reshape and its repairs against clip and no clip in real training, 16 epochs on every batch:
accuracy, KL moved, gradient norm.

    # three seeds, each with a warm start of its own
    python benchmarks/reshape_epochs.py --out runs/reshape
    # the result of what is finished, run nothing
    python benchmarks/reshape_epochs.py --out runs/reshape --table

`rle`, synchronous, rloo, AdamW; the arms are those of `asyncrl lab reshape`
(asyncrl/experiments/lab/reshape.py), the repairs' budget 0.05 nats a token. Compared with `clip`
(PPO).  KL(mu || theta) is the k3 estimate of every optimizer step's batch at that step, before it
is taken: kl_mu_mean averages it over the steps of a batch and over batches, kl_mu_max is the batch
where that mean is largest.  steps_mean: optimizer steps a batch."""

from __future__ import annotations

import json

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
