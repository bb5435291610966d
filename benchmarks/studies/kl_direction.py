"""Does forward or reverse KL keep more of the reference?  And what if the reference is another?

    python benchmarks/studies/kl_direction.py --out runs/kl_direction
    # only write the result of the finished runs
    python benchmarks/studies/kl_direction.py --out runs/kl_direction --table

Protocol, fixed before the runs.  Task `rlehack`, whose training checker can be gamed; accuracies
are exact.  Synchronous, 50 batches of 32 groups of 8, rloo, five seeds with a warm start each.
At every token k2 in the loss has the gradient of the reverse KL, KL(pi || ref), and k3 in the loss
that of the forward KL, KL(ref || pi).  Each runs at two coefficients and towards two references:
its own warm start, and that of the next seed, which is as good and was never the policy.

Outcomes, at the end: accuracy of one sample; pass@16 of 128 held-out prompts, which is what the
policy still covers; pass@16 less pass@1, and entropy, as its diversity; out-of-distribution
accuracy.  Differences between forward and reverse at the same coefficient and reference, and
between the two references of a term, are paired by seed, with t intervals of 95 % and Holm's
correction over the pairs of one outcome."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import studies

SAMPLES = 16
DIRECTIONS = {"reverse": "k2", "forward": "k3"}
REFERENCES = ("own", "other")
OUTCOMES = ("end", "pass_at_16", "spread", "entropy_end", "ood")
COLUMNS = {
    "start": "start",
    "end": "exact",
    "pass_at_1": "pass@1",
    "pass_at_16": "pass@16",
    "spread": "spread",
    "entropy_end": "entropy",
    "ood": "ood",
    "reward_end": "reward",
}


def term(direction: str, beta: str, reference: str, model: str) -> list[str]:
    """Return the --set items of one KL term; model: the reference, if it is not the warm start."""
    return [
        "kl.reward.coefficient=0.0",
        f"kl.loss.estimator={DIRECTIONS[direction]}",
        f"kl.loss.coefficient={beta}",
        *([f"model.reference={model!r}"] if reference == "other" else []),
    ]


def name(direction: str, beta: str, reference: str) -> str:
    return f"{direction}, {beta}, {reference}"


class DirectionStudy(studies.Study):
    """A study whose facts have the numbers of the set `wide`."""

    def found(self, arm: str) -> dict[int, dict[str, Any]]:
        found = super().found(arm)
        for seed, facts in found.items():
            metrics = self.cells.read(self.arms[arm][seed])["evaluation_metrics"]
            for k in (1, SAMPLES):
                by_version = metrics[f"eval/wide_pass_at_{k}"]
                facts[f"pass_at_{k}"] = by_version[max(by_version, key=int)]
                facts[f"pass_at_{k}_start"] = by_version["0"]
            facts["spread"] = facts[f"pass_at_{SAMPLES}"] - facts["pass_at_1"]
        return found


def plan(args: Any) -> DirectionStudy:
    prompts = 16 if args.quick else 128
    study = DirectionStudy(
        args,
        "rlehack",
        "direction",
        [
            "staleness.max_lag=0",
            f"learner.steps={args.steps}",
            *studies.EVALUATION,
            f"evaluation.sets=[{{name='wide', samples={SAMPLES}, prompts={prompts}, every=0}}]",
        ],
    )
    seeds = 1 if args.quick else args.seeds
    for seed in range(seeds):
        other = f"{study.out}/models/{study.task}-{(seed + 1) % seeds}"
        study.block(
            {"no KL": ["kl.reward.coefficient=0.0"]}
            | {
                name(direction, beta, reference): term(direction, beta, reference, other)
                for beta in args.betas.split(",")
                for direction in DIRECTIONS
                for reference in REFERENCES
            },
            seeds=1,
            first=seed,
        )
    return study


def main() -> None:
    p = studies.parser(__doc__, "runs/kl_direction", seeds=5)
    p.add_argument("--betas", default="0.1,0.3")
    args = p.parse_args()
    if args.quick:
        args.betas = "0.1"
        args.steps = 2
    study = plan(args)
    if not args.table:
        study.warm_starts(list(study.arms["no KL"].values()))  # references, too
        study.run()
    betas = args.betas.split(",")
    pairs = [(name("forward", b, r), name("reverse", b, r)) for b in betas for r in REFERENCES]
    pairs += [(name(d, b, "other"), name(d, b, "own")) for b in betas for d in DIRECTIONS]
    found = studies.analyse(study, "no KL", measures=OUTCOMES, pairs=pairs)
    studies.finish(study, "kl_direction", found, {"betas": args.betas}, COLUMNS)


if __name__ == "__main__":
    main()
