"""Compare orders of service and rules at the limit by time, accuracy, and lost tokens by length.

    # rle, limit 4, long-tailed delays by ticket, 3 seeds
    python benchmarks/studies/orders.py --out runs/orders
    # only write the result of the finished runs
    python benchmarks/studies/orders.py --out runs/orders --table

`pace` in ticket order waits for the oldest sample and loses nothing; `drop`, `mask` and
`downweight` take groups in completion order or freshest first, at the cost of tokens.  Natural
lag in warm processes: time is counted in decode steps, an update takes as long as the generation
of a batch, and a ticket's samples are late by `staleness.delay` (sampled once per ticket, the
same in all arms).  The same command resumes an interrupted study run by run."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import results_file, rounds

from asyncrl.experiments.compare import grid, verdict
from asyncrl.experiments.compare.analysis import analyze_sweep, sum_ledgers
from asyncrl.experiments.compare.arms import Arm
from asyncrl.experiments.compare.page import write_sweep
from asyncrl.records.page_kit import clean
from asyncrl.supervise.preflight import preflight, say

TICKET = "ticket"
ARMS: dict[str, tuple[str, list[str]]] = {
    TICKET: (
        "on_exceed = pace: batches in ticket order, nothing is lost, the oldest answer is waited "
        "for",
        [],
    )
} | {
    f"{rule}-{order}": (
        f"on_exceed = {rule}, order = {order}",
        [f"staleness.on_exceed={rule}", f"staleness.order={order}"],
    )
    for rule in ("drop", "mask", "downweight")
    for order in ("completion", "freshest")
}
TAKEN = ("dropped_stale", "abandoned", "masked_stale")


def make(args: Any) -> grid.Sweep:
    sets = [
        f"learner.lr={args.lr}",
        f"learner.steps={args.steps}",
        f"learner.groups={args.groups}",
        f"staleness.delay={args.delay}",
        f"evaluation.every={args.steps // 8}",
        "evaluation.prompts=128",
        "evaluation.final_prompts=512",
        "evaluation.ood_prompts=0",
    ]
    if args.quick:
        sets += [
            "learner.groups=4",
            "learner.group_size=4",
            "generator.slots=32",
            "evaluation.final_prompts=16",
            "evaluation.prompts=16",
        ]
    source = str(results_file.ROOT / "configs" / f"{args.task}.toml")
    arms = [Arm(n, items) for n, (_, items) in ARMS.items()]
    return grid.Sweep(
        args.out,
        grid.SweepPlan(source, sets, arms, [float(args.limit)], injected=False),
        args.seeds,
        say,
    )


def by_length(lines: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """upper bound of the answers' length -> tokens judged, and the share of them that the rule took
    (dropped, abandoned, masked, faded).
    """
    out: dict[str, dict[str, float]] = {}
    bins = sorted(
        {
            int(k.removeprefix("upto_"))
            for n in ("trained", *TAKEN)
            for k in lines.get(n, {})
            if k.startswith("upto_")
        }
    )
    for upto in bins:
        gone = sum(lines.get(n, {}).get(f"upto_{upto}", 0) for n in TAKEN)
        trained = lines.get("trained", {}).get(f"upto_{upto}", 0)
        faded = lines.get("trained", {}).get(f"faded_upto_{upto}", 0)
        out[str(upto)] = {
            "tokens": gone + trained,
            "taken": (gone + faded) / max(gone + trained, 1),
        }
    return out


def facts(cell: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """One arm over its seeds: time in decode steps a batch, lag, and where its tokens went (shares
    of all written).
    """
    lines = sum_ledgers(records)
    total = sum(x["tokens"] for x in lines.values())
    faded = sum(v for k, v in lines["trained"].items() if k.startswith("faded_"))
    return {
        "seeds": len(records),
        "each": cell["each"],
        "final": cell["final"],
        "area": cell["area"],
        "ess": cell["ess"],
        "kl": cell["kl"],
        "lag": cell["lag"],
        "lag_max": cell["lag_max"],
        "unstable": cell["unstable"],
        "trouble": cell["trouble"],
        "given_up": cell["abandoned"],
        "decode_steps_a_batch": statistics.fmean(r["clock"] / r["steps"] for r in records),
        "tokens_a_batch": total / sum(r["steps"] for r in records),
        "shares": {n: x["tokens"] / total for n, x in lines.items()}
        | ({"faded": faded / total} if faded else {}),
        "by_length": by_length(lines),
    }


def analyse(s: grid.Sweep, found: dict[str, Any]) -> dict[str, Any]:
    """The arms, each against ticket order: paired by seed, t intervals, Holm's correction."""
    out = {}
    for c in found["cells"]:
        seeds = [x for x in s.seeds if s.cells.get_path(s.name_run(c["arm"], x)).exists()]
        out[c["correction"]] = facts(c, [s.cells.read(s.name_run(c["arm"], x)) for x in seeds]) | {
            "of": seeds
        }
    values = {
        name: dict(zip(about["of"], about["each"], strict=True)) for name, about in out.items()
    }
    differences = verdict.compare_arms({TICKET: {}, **values}, TICKET)
    for name, d in differences.items():
        out[name]["against_ticket"] = {
            "difference": d.mean,
            "interval": [d.low, d.high],
            "p_holm": d.adjusted,
        }
    return out


def lines(arms: dict[str, Any]) -> list[str]:
    bins = sorted({int(k) for a in arms.values() for k in a["by_length"]})
    out = [
        "|order|accuracy|against ticket order|steps a batch|mean lag, most|lost|"
        + "|".join(f"to {b}" for b in bins)
        + "|",
        "|---" * (6 + len(bins)) + "|",
    ]
    for name, a in arms.items():
        d = a.get("against_ticket")
        tail = (
            f"{d['difference']:+.3f} [{d['interval'][0]:+.2f}, {d['interval'][1]:+.2f}]"
            if d
            else ""
        )
        lost = sum(a["shares"].get(n, 0) for n in (*TAKEN, "faded"))
        shares = "|".join(f"{a['by_length'].get(str(b), {}).get('taken', 0):.1%}" for b in bins)
        bad = f" !{a['unstable']}/{a['seeds']}" if a["unstable"] else ""
        out.append(
            f"|`{name}`|{a['final']:.3f}{bad}|{tail}|{a['decode_steps_a_batch']:.0f}|"
            f"{a['lag']:.2f}, "
            f"{a['lag_max']}|{lost:.1%}|{shares}|"
        )
    return out


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("runs/orders"))
    p.add_argument("--task", default="rle", help="a config of configs/")
    p.add_argument("--lr", default="5e-4")
    p.add_argument("--limit", type=int, default=4)
    p.add_argument("--delay", type=float, default=2.0, help="staleness.delay")
    p.add_argument("--groups", type=int, default=32, help="in a batch, of 8 samples")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--table", action="store_true", help="run nothing")
    p.add_argument("--made-at", default="", help="commit of the runs, where it is not this one")
    args = p.parse_args()
    if args.quick:
        args.out = Path(f"{args.out}-quick")
        args.seeds = 1
        args.steps = 4
    s = make(args)
    if not args.table:
        preflight(s.plan.arms[grid.SYNC])
        s.run(args.workers, lambda name, e: say(f"{name}: done") if "done" in e else None)
    found = analyze_sweep(s)
    size = f"{args.steps} steps of {args.groups} x 8"
    subtitle = (
        f"{args.task}, learning rate {args.lr}, limit {args.limit}, delay {args.delay:g}: "
        f"{size} at natural lag, {len(s.seeds)} seed(s)"
    )
    page = write_sweep(
        s.directory,
        "Orders of service",
        found,
        s.plan.describe({n: what for n, (what, _) in ARMS.items()}),
        subtitle,
    )
    arms = analyse(s, found)
    print("\n".join(lines(arms)), file=sys.stderr if args.json else sys.stdout)
    setting = {
        k: getattr(args, k) for k in ("task", "lr", "limit", "delay", "groups", "seeds", "steps")
    }
    result = clean(
        {
            "beside": args.beside,
            "runs_made_at": args.made_at or results_file.commit(),
            "setting": setting,
            "missing": found["missing"],
            "synchronous": found["sync"]["final"],
            "arms": arms,
        }
    )
    results_file.finish("orders", result, page, args)


if __name__ == "__main__":
    main()
