"""Compare placement, estimator and beta of the KL term on `rlehack`, which needs one.

    # beta 0.1 and 0.3, three seeds, synchronous
    python benchmarks/studies/kl_placement.py --out runs/kl
    python benchmarks/studies/kl_placement.py --out runs/kl --betas 0.1,0.3,0.01,0.05,1 --lag 4
    python benchmarks/studies/kl_placement.py --out runs/kl --lag 8 \
        --places "k1 in reward,k3 in loss"
    # with lag, including terms that are exact off policy
    python benchmarks/studies/kl_placement.py --out runs/kl --lag 4 --places all,late
    # `rlenarrow`: what KL keeps out of distribution, at every place
    python benchmarks/studies/kl_placement.py --out runs/kl --task rlenarrow --lr 5e-4 \
        --groups 16 --steps 60 --betas 0.3,1.0 --distillation 0.3,1.0
    # only write the result of the finished runs
    python benchmarks/studies/kl_placement.py --out runs/kl --table

The arms are k1, k2 and k3 in the reward and in the loss, with rloo and PPO's clip on the behavior
policy, and no KL.  --lag k > 0: every sample is trained exactly k versions after it was generated
(staleness.inject).  Accuracies are exact (`==`), where training's checker accepts `in`.

Two placements only differ with lag.  `k1 at mu in reward` uses the KL of the behavior policy
(kl.reward.at = behavior), `k1 in reward` that of the policy to be trained.  `k3 prefix in loss`
is weighted by its prefix's ratio to the behavior policy, which makes it unbiased for whole
completions (kl.loss.off_policy = prefix).

Two more arms are plain distillation with the warm start as the teacher.  `distillation, beta` has
the task's reward and beta times the exact reverse KL over the vocabulary at every state of the
policy's own samples (on-policy distillation, Agarwal et al. 2024, arXiv 2306.13649), which k2 and
k3 in the loss estimate from one token; it is kl.loss.off_policy = prefix_full with discount 0.
`distillation alone, 1` is the same without the task's reward (every policy weight cut at 1e-9).
It must stay at its start, and gives the floor of a KL term alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import studies

from asyncrl.contract.errors import AsyncrlError, ConfigError

PLACES = [f"{k} in {where}" for where in ("reward", "loss") for k in ("k1", "k2", "k3")]
LATE = {
    "k1 at mu in reward": ['kl.reward.at="behavior"'],
    "k3 prefix in loss": ['kl.loss.off_policy="prefix"'],
}
TEACHER = [
    "kl.reward.coefficient=0.0",
    "kl.loss.estimator=k3",
    "kl.loss.off_policy=prefix_full",
    "kl.loss.discount=0.0",
]
SILENT = [
    "correction.proximal=recompute",
    "correction.level=token",
    "correction.bound=truncate",
    "correction.hi=1e-9",
    "loss.surrogate=decoupled_ppo",
]


def sets(place: str, beta: str) -> list[str]:
    """--set items of one arm."""
    if place.startswith("distillation"):
        return [
            *TEACHER,
            f"kl.loss.coefficient={beta}",
            *(SILENT if place.endswith("alone") else []),
        ]
    where = place.split()[-1]
    off = [] if where == "reward" else ["kl.reward.coefficient=0.0"]  # the config's own
    term = [f'kl.{where}.estimator="{place[:2]}"', f"kl.{where}.coefficient={beta}"]
    return [*term, *off, *LATE.get(place, [])]


def places_of(text: str) -> list[str]:
    """Names, `all` for PLACES and `late` for LATE, separated by commas.  Raises ConfigError."""
    known = {"all": PLACES, "late": list(LATE)} | {name: [name] for name in (*PLACES, *LATE)}
    words = text.split(",")
    if wrong := [word for word in words if word not in known]:
        raise ConfigError(f"--places {wrong[0]}: unknown; choose of {', '.join(known)}")
    return [name for word in words for name in known[word]]


def plan(args: Any) -> studies.Study:
    """No KL and every place at the first beta, then at each other; distillation last."""
    lag = [
        f"staleness.max_lag={args.lag}",
        f"learner.steps={args.steps}",
        *([f"learner.lr={args.lr}"] if args.lr else []),
        *([f"staleness.inject={args.lag}"] if args.lag else []),
    ]
    rate = f"-lr{args.lr}" if args.lr else ""
    study = studies.Study(
        args, args.task, f"{args.task}-lag{args.lag}{rate}", [*lag, *studies.EVALUATION]
    )
    places = places_of(args.places)
    for beta in args.betas.split(","):
        study.block(
            ({} if "no KL" in study.arms else {"no KL": ["kl.reward.coefficient=0.0"]})
            | {f"{p}, {beta}": sets(p, beta) for p in places}
        )
    if args.distillation:
        study.block(
            {f"distillation, {b}": sets("distillation", b) for b in args.distillation.split(",")}
        )
        study.block({"distillation alone, 1": sets("distillation alone", "1.0")})
    return study


def main() -> None:
    p = studies.parser(__doc__, "runs/kl_placement", steps=100)
    p.add_argument("--task", choices=["rlehack", "rlenarrow"], default="rlehack")
    p.add_argument("--betas", default="0.1,0.3")
    p.add_argument("--places", default="all", help=f"of {', '.join((*PLACES, *LATE))}; all, late")
    p.add_argument("--lr", default="", help="learning rate; empty: the config's")
    p.add_argument("--distillation", default="", help="betas of the distillation arms; empty: none")
    p.add_argument("--lag", type=int, default=0, help="lag of every sample; 0: synchronous")
    args = p.parse_args()
    if args.quick:
        args.betas = "0.1"
        args.steps = 2
    study = plan(args)
    if not args.table:
        study.run()
    betas = args.betas.split(",")
    pairs = [(f"k1 in reward, {b}", f"k3 in loss, {b}") for b in betas]
    pairs += [(f"k1 at mu in reward, {b}", f"k1 in reward, {b}") for b in betas]
    pairs += [(f"k3 prefix in loss, {b}", f"k3 in loss, {b}") for b in betas]
    pairs += [
        (f"k1 in reward, {b}", f"distillation, {b}") for b in args.distillation.split(",") if b
    ]
    found = studies.analyse(study, "no KL", pairs=pairs)
    setting = {
        "task": args.task,
        "lag": args.lag,
        "betas": args.betas,
        "places": args.places,
        "lr": args.lr or "the config's",
        "distillation": args.distillation,
    }
    studies.finish(study, f"kl_placement_{args.task}_lag{args.lag}", found, setting)


if __name__ == "__main__":
    try:
        main()
    except AsyncrlError as error:
        sys.exit(f"error: {error}")
