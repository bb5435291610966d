"""Does IS-reshape v3.1 collapse at 16 epochs a batch, and which repair prevents it?

    # eight seeds of nine arms, resumed run by run when it is started again
    nice -n 19 python benchmarks/studies/reshape_collapse.py --out runs/collapse
    # eight seeds of repair D with the arms that it is compared with
    python benchmarks/studies/reshape_collapse.py --only "clip,no clip,v3.1,D,D on the rate"
    # only write the result of the finished runs
    python benchmarks/studies/reshape_collapse.py --out runs/collapse --table

Protocol, fixed before the runs.  Task `rle`, synchronous (lag 0), rloo, AdamW at 5e-4 for every
arm, 8 batches of 16 groups of 8, 16 passes over each batch with one optimizer step a pass: 128
steps.  Each seed has its own warm start, prompts and sampling; the arms of a seed share them.  The
arms are those of `asyncrl lab reshape` (asyncrl/experiments/lab/reshape.py: PPO's clip 0.2; A, B
and C with a budget of 0.05, a clip of 0.2 and a coefficient of 1; D with a budget of 0.05, on gamma
and on the learning rate) and repair B in the report's own wording, a clip of w^gamma.
`stop.every = "epoch"` has no arm: with one step a pass it is repair A.

Outcomes: held-out accuracy after the last batch (512 prompts) and its mean over the run (128
prompts after every second batch), both as differences from `clip`, paired by seed, with a t
interval of 95 % over seeds and Holm's correction over the arms of one outcome.  A run has collapsed
when it ends below half of its own start.  Beside them KL(mu || theta), by k3 on each optimizer
step's samples before the step, and the gradient norm before clipping; v3.1 is also paired with no
clip in both.  `steps_log` keeps the log of optimizer steps as means over the batches, by the number
of the step in its batch, and as means over a batch's steps, by batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib
sys.path.append(str(Path(__file__).resolve().parent))

import reshape_epochs
from lib import studies

EPOCHS = 16
RATE = "5e-4"
NAMES = {"clip": "clip", "no clip": "vanilla", "v3.1": "v3.1", "A": "A", "B": "B", "C": "C"}
NAMES |= {"D": "D coefficient", "D on the rate": "D learning rate"}
ON_POWER = "B on w^gamma"
MEASURES = ("end", "area", "ood", "kl_mu_mean", "grad_norm_mean")
LOGGED = {  # of optimizer_steps.jsonl -> its name in the result
    "kl/behavior_target_k3": "kl",
    "is/target_ratio": "ratio_mean",
    "is/target_ratio_max": "ratio_max",
    "optim/grad_norm": "grad_norm",
    "reshape/sigma2": "sigma2",
    "reshape/gamma_base": "gamma_base",
    "reshape/gamma": "gamma",
    "reshape/c": "c",
    "reshape/p_correct": "p_correct",
}
COLUMNS = reshape_epochs.COLUMNS | {"area": "mean"}


def arms(only: str) -> dict[str, list[str]]:
    """Return the --set items of each arm, or of those named in `only`."""
    every = {name: reshape_epochs.sets(arm) for name, arm in NAMES.items()}
    every |= {ON_POWER: [*every["B"], 'reshape.clip_on="w_gamma"']}
    return {name: every[name] for name in only.split(",")} if only else every


def summarize_steps(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Summarize a run's log of optimizer steps: by_update and by_batch, each name -> means."""
    summary: dict[str, dict[str, list[float]]] = {}
    for title, key in (("by_update", "update"), ("by_batch", "step")):
        numbers = sorted({int(row[key]) for row in rows})
        summary[title] = {
            short: [
                float(f"{fmean(row[name] for row in rows if row[key] == number):.4g}")
                for number in numbers
            ]
            for name, short in LOGGED.items()
            if all(name in row for row in rows)
        }
    return summary


def step_logs(study: studies.Study) -> dict[str, dict[str, Any]]:
    """Return arm -> seed -> the summary of its log, of finished runs."""
    return {
        arm: {
            str(seed): summarize_steps(study.cells.read(name)["optimizer_steps"])
            for seed, name in cells.items()
            if study.cells.get_path(name).exists()
        }
        for arm, cells in study.arms.items()
    }


def main() -> None:
    p = studies.parser(__doc__, "runs/reshape_collapse", seeds=8, steps=8, groups=16)
    p.add_argument("--only", default="", help="arms, separated by commas; empty: all")
    args = p.parse_args()
    if args.quick:
        args.steps = 2
    common = [
        "staleness.max_lag=0",
        f"learner.steps={args.steps}",
        f"learner.epochs={EPOCHS if not args.quick else 2}",
        f"learner.lr={RATE}",
        *studies.EVALUATION,
        "evaluation.every=2",
    ]
    study = studies.Study(args, "rle", "collapse", common)
    study.block(arms(args.only))
    if not args.table:
        study.run()
    found = studies.analyse(study, "clip", measures=MEASURES, pairs=[("v3.1", "no clip")])
    setting = {"task": "rle", "epochs": EPOCHS, "lr": RATE}
    logs = step_logs(study)
    studies.finish(study, "reshape_collapse", found, setting, COLUMNS, steps_log=logs)


if __name__ == "__main__":
    main()
