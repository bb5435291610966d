"""KL placement x estimator x beta on `rlehack`, where only a KL term keeps the truth: which claims do small models show?

    python benchmarks/kl_placement.py --out runs/kl                              # beta 0.1 and 0.3, three seeds, synchronous
    python benchmarks/kl_placement.py --out runs/kl --betas 0.01,0.05,0.1,0.3,1 --lag 4
    python benchmarks/kl_placement.py --out runs/kl --table                      # the result of what is finished, run nothing

k1, k2, k3 in the reward and in the loss, with rloo, beside no KL.  Each seed has a warm start of its own.  Runs go through the real store,
engine and learner in one warm process; interrupted, the same command goes on run by run.  Accuracies are exact (`==`), where training's
checker says `in`.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import results_file
import rounds

from asyncrl import config_load
from asyncrl.compare import judgement
from asyncrl.compare.page import clean
from asyncrl.compare.pool import Cells
from asyncrl.run import preflight, say

PLACES = [f"{k} in {where}" for where in ("reward", "loss") for k in ("k1", "k2", "k3")]


def cell(args: Any, cells: Cells, arm: str, seed: int) -> str:
    """Add one run; its name."""
    place, _, beta = arm.partition(", ")
    term = [f'kl.estimator="{place[:2]}"', f'kl.placement="{place.split()[-1]}"', f"kl.coefficient={beta}"] if beta else ["kl.coefficient=0.0"]
    sets = [*term, f'model.path="{args.out}/models/{args.task}-{seed}"', f"seed={seed}", f"learner.steps={args.steps}", f"staleness.max_lag={args.lag}",
            "evaluation.every=10", "evaluation.prompts=128", "evaluation.final_prompts=512", "evaluation.ood_prompts=256"]  # fmt: skip
    if args.quick:
        sets += ["learner.groups=4", "learner.group_size=4", "evaluation.final_prompts=16", "evaluation.prompts=16", "evaluation.ood_prompts=16"]
    config = config_load.load(results_file.ROOT / "configs" / f"{args.task}.toml", sets)
    if not (Path(config.model.path) / "config.json").exists():
        preflight(config)  # makes the seed's warm start
    name = f"{args.task}-lag{args.lag}-{arm.replace(', ', '-').replace(' ', '_')}-seed{seed}"
    cells.add(name, config, seed)
    return name


def plan(args: Any, cells: Cells) -> dict[str, list[str]]:
    """arm -> its cells, one a seed; for each beta every arm of a seed before the next seed, so that what is there can be paired."""
    betas = args.betas.split(",")
    arms: dict[str, list[str]] = {"no KL": []} | {f"{p}, {b}": [] for b in betas for p in PLACES}
    for beta in betas:
        for seed in range(args.seeds):
            for arm in (["no KL"] if beta == betas[0] else []) + [f"{p}, {beta}" for p in PLACES]:
                arms[arm].append(cell(args, cells, arm, seed))
    return arms


def facts(record: dict[str, Any], rows: list[dict[str, float]]) -> dict[str, Any]:
    """What one run comes to."""
    (steps, accuracy), ood = record["accuracy"], record["evals"].get("ood", {})
    norms = [r["optim/grad_norm"] for r in rows]
    trouble = judgement.stability(accuracy, rows)
    return {
        "accuracy": accuracy, "steps": steps, "start": accuracy[0], "end": accuracy[-1], "ood": statistics.fmean(list(ood.values())[-1]) if ood else None,
        "reward_end": statistics.fmean(r["reward/mean"] for r in rows[-10:]), "swing": statistics.fmean(abs(a - b) for a, b in pairwise(accuracy)),
        "grad_norm_mean": statistics.fmean(norms), "grad_norm_cv": statistics.pstdev(norms) / statistics.fmean(norms),
        "collapsed": accuracy[-1] < accuracy[0] / 2, "trouble": trouble, "weights_digest": record["weights_digest"],
    }  # fmt: skip


def analyse(cells: Cells, arms: dict[str, list[str]]) -> dict[str, Any]:
    """Means over seeds, and differences from no KL, paired by seed with t intervals and Holm's correction."""
    found: dict[str, Any] = {}
    for arm, names in arms.items():
        done = [n for n in names if cells.path(n).exists()]
        if done:
            each = [facts(r, r["curve"]) for r in map(cells.read, done)]
            found[arm] = {"seeds": len(done), "each": each} | {
                k: statistics.fmean(e[k] for e in each) for k in ("start", "end", "ood", "reward_end", "swing", "grad_norm_mean", "grad_norm_cv", "collapsed")
            }
    base = found.get("no KL", {"each": []})["each"]
    ends: dict[str, list[float]] = {a: [e["end"] for e in x["each"]] for a, x in found.items()}
    differences = {a: judgement.paired(x, ends["no KL"]) for a, x in ends.items() if a != "no KL" and len(x) == len(base) > 1}
    judgement.holm(differences)
    for a, d in differences.items():
        found[a]["against_no_kl"] = {"difference": d.mean, "interval": [d.low, d.high], "p_holm": d.adjusted}
    for beta in sorted({a.split(", ")[1] for a in found if ", " in a}):
        pair = [f"k1 in reward, {beta}", f"k3 in loss, {beta}"]
        if all(len(ends.get(a, [])) == len(base) > 1 for a in pair):
            d = judgement.paired(ends[pair[0]], ends[pair[1]])
            found[pair[0]]["against_k3_in_loss"] = {"difference": d.mean, "interval": [d.low, d.high], "p": d.p}
    return found


def lines(found: dict[str, Any]) -> list[str]:
    out = [f"{'arm':22}{'seeds':>6}{'start':>7}{'exact':>7}{'ood':>7}{'reward':>8}{'swing':>7}{'|g|':>7}{'cv':>6}{'collapsed':>10}  against no KL"]
    for a, x in found.items():
        d = x.get("against_no_kl")
        tail = f"{d['difference']:+.3f} [{d['interval'][0]:+.3f}, {d['interval'][1]:+.3f}] p {d['p_holm']:.3f}" if d else ""
        out.append(f"{a:22}{x['seeds']:6}{x['start']:7.3f}{x['end']:7.3f}{x['ood']:7.3f}{x['reward_end']:8.3f}{x['swing']:7.3f}{x['grad_norm_mean']:7.3f}"
                   f"{x['grad_norm_cv']:6.2f}{x['collapsed'] * x['seeds']:7.0f}/{x['seeds']}  {tail}")  # fmt: skip
    return out


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("runs/kl_placement"))
    p.add_argument("--task", choices=["rlehack", "rlenarrow"], default="rlehack")
    p.add_argument("--betas", default="0.1,0.3")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--lag", type=int, default=0, help="staleness limit; 0: synchronous")
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--table", action="store_true", help="run nothing")
    p.add_argument("--made-at", default="", help="commit of the runs, where it is not this one")
    args = p.parse_args()
    if args.quick:
        args.out, args.betas, args.seeds, args.steps = Path(f"{args.out}-quick"), "0.1", 1, 2
    cells = Cells(args.out)
    arms = plan(args, cells)
    if not args.table:
        cells.run(args.workers, lambda name, e: say(f"{name}: {e}") if "done" in e else None, abandon=False)
    found = analyse(cells, arms)
    print("\n".join(lines(found)), file=sys.stderr if args.json else sys.stdout)
    setting = {k: getattr(args, k) for k in ("task", "betas", "seeds", "steps", "lag")}
    result = clean(
        {"beside": args.beside, "runs_made_at": args.made_at or results_file.commit(), "setting": setting, "missing": len(cells.todo()), "arms": found}
    )
    if not args.quick:
        say(str(results_file.write(f"kl_placement_{args.task}_lag{args.lag}", result)))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
