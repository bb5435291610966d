"""KL placement x estimator x beta on `rlehack`, where only a KL term keeps the truth: which claims
do small models show?

    python benchmarks/kl_placement.py --out runs/kl  # beta 0.1 and 0.3, three seeds, synchronous
    python benchmarks/kl_placement.py --out runs/kl --betas 0.1,0.3,0.01,0.05,1 --lag 4
    python benchmarks/kl_placement.py --out runs/kl --lag 8 --places "k1 in reward,k3 in loss"
    # the result of what is finished, run nothing
    python benchmarks/kl_placement.py --out runs/kl --table

k1, k2, k3 in the reward and in the loss, with rloo and PPO's clip on the behaviour policy, beside
no KL.  --lag k > 0: every sample is trained exactly k versions after it was written
(staleness.inject).  Accuracies are exact (`==`), where training's checker says `in`.

Beside them plain distillation, with the warm start as the teacher, in two forms.  `distillation,
beta`: the task's reward and beta times the exact reverse KL over the vocabulary at every state of
the policy's own answers (on-policy distillation, Agarwal et al. 2024, arXiv 2306.13649): what k2
and k3 in the loss estimate from one token; it is kl.loss.off_policy = prefix_full with discount 0.
`distillation alone, 1`: the same without the task's reward (every policy weight cut at 1e-9), which
must stay where it began: the floor that a KL term alone gives."""

from __future__ import annotations

from typing import Any

from lib import studies

PLACES = [f"{k} in {where}" for where in ("reward", "loss") for k in ("k1", "k2", "k3")]
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
    return [f'kl.{where}.estimator="{place[:2]}"', f"kl.{where}.coefficient={beta}", *off]


def plan(args: Any) -> studies.Study:
    """No KL and every place at the first beta, then at each other; distillation last."""
    lag = [
        f"staleness.max_lag={args.lag}",
        f"learner.steps={args.steps}",
        *([f"staleness.inject={args.lag}"] if args.lag else []),
    ]
    study = studies.Study(
        args, args.task, f"{args.task}-lag{args.lag}", [*lag, *studies.EVALUATION]
    )
    places = args.places.split(",") if args.places else PLACES
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
    p.add_argument("--places", default="", help=f"of {', '.join(PLACES)}; empty: all")
    p.add_argument("--distillation", default="", help="betas of the distillation arms; empty: none")
    p.add_argument("--lag", type=int, default=0, help="lag of every sample; 0: synchronous")
    args = p.parse_args()
    if args.quick:
        args.betas = "0.1"
        args.steps = 2
    study = plan(args)
    if not args.table:
        study.run()
    pairs = [(f"k1 in reward, {b}", f"k3 in loss, {b}") for b in args.betas.split(",")]
    pairs += [
        (f"k1 in reward, {b}", f"distillation, {b}") for b in args.distillation.split(",") if b
    ]
    found = studies.analyse(study, "no KL", pairs=pairs)
    setting = {
        "task": args.task,
        "lag": args.lag,
        "betas": args.betas,
        "places": args.places or "all",
        "distillation": args.distillation,
    }
    studies.finish(study, f"kl_placement_{args.task}_lag{args.lag}", found, setting)


if __name__ == "__main__":
    main()
