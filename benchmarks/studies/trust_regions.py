"""Compare trust regions at equal KL moved per batch, at lag 0, 4 and 16.

    # calibrate, then the runs; lags 0 and 4 before 16
    python benchmarks/studies/trust_regions.py --out runs/trust
    # only write the result of the finished runs
    python benchmarks/studies/trust_regions.py --out runs/trust --table

The arms are PPO, DPPO, CISPO, GSPO, decoupled PPO (anchored at the start of the batch, and between
that and the behavior policy) and IS-reshape with repair D.  At equal learning rates a
tighter trust region moves less, and looks safer for that reason alone.  So each arm first gets
the rate at which the mean of `kl/moved` (KL(policy before || after a batch), nats a token) over
short synchronous runs equals PPO's at --lr (or --target), by secant steps on the logarithms.
Then every arm runs at its rate at every lag, with several optimizer steps a batch, so that trust
regions act.  Differences are against PPO at the same lag, paired by seed.  Runs use the real
store, engine and learner in warm processes.  The same command resumes an interrupted study run by
run."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import results_file, rounds, studies

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.compare import grid, verdict
from asyncrl.experiments.compare.analysis import analyze_sweep
from asyncrl.experiments.compare.arms import CORRECTIONS, Arm
from asyncrl.experiments.compare.page import write_sweep
from asyncrl.experiments.compare.warm_pool import CellStore
from asyncrl.records.page_kit import clean
from asyncrl.supervise.preflight import preflight, say

PPO = "ppo"
# PPO's 0.2 over the root of an answer's 11 tokens, by which the mean log-ratio spreads less; as
# published (3e-4) it suits thousands
GSPO_EPS = 0.06
_ANCHORED = CORRECTIONS[PPO][1]  # pi_prox := mu
_DECOUPLED = (
    "correction.level=token",
    "correction.bound=truncate",
    "correction.hi=2.0",
    "loss.surrogate=decoupled_ppo",
)
ARMS: dict[str, tuple[str, list[str]]] = {
    PPO: ("clip 0.2 of pi / mu", _ANCHORED),
    "dppo": (
        "tokens whose probability has left mu's by 0.2 in the advantage's direction are masked",
        [*_ANCHORED, "loss.surrogate=dppo"],
    ),
    "cispo": (
        "pi / mu cut at 1.2 as a weight, no gradient is ever 0",
        [*_ANCHORED, "loss.surrogate=cispo"],
    ),
    "gspo": (
        f"clip {GSPO_EPS} of the answer's mean ratio, answers averaged",
        [
            *_ANCHORED,
            "loss.surrogate=gspo",
            f"loss.eps_low={GSPO_EPS}",
            f"loss.eps_high={GSPO_EPS}",
            "loss.reduction=seq-mean-token-mean",
        ],
    ),
    "decoupled": (
        "clip 0.2 of pi / start, truncated weights start / mu of tokens",
        ["correction.proximal=recompute", *_DECOUPLED],
    ),
    "interpolate": (
        "the same anchored at mu^a start^(1 - a), a = 1 / (lag + 1), in place of start",
        ["correction.proximal=interpolate", *_DECOUPLED],
    ),
    "reshape-D": (
        "IS-reshape v3.1; the rate of each step is scaled by what fits into 0.05 nats a token from "
        "mu (repair D on the learning rate)",
        [
            *CORRECTIONS["reshape"][1],
            "stop.kl_max=0.05",
            "stop.action=slow",
            "stop.against=behavior",
        ],
    ),
}
# batches left out at a run's start (Adam's); its early part; a calibration ends within this of the
# target
FIRST = 4
EARLY = 24
CLOSE = 0.05


def common(args: Any) -> list[str]:
    sets = [
        f"learner.steps={args.steps}",
        f"learner.groups={args.groups}",
        f"learner.minibatches={args.minibatches}",
        "record.kl_moved=4",
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
    return sets


def source(args: Any) -> str:
    return str(results_file.ROOT / "configs" / f"{args.task}.toml")


def moved(record: dict[str, Any], last: int = 1 << 30) -> float:
    """Mean of kl/moved from batch FIRST to batch `last`."""
    each = [
        r["kl/moved"] for r in record["curve"] if FIRST <= r["version"] <= last and "kl/moved" in r
    ]
    return statistics.fmean(each) if each else math.nan


def next_rate(tried: list[tuple[float, float]], target: float) -> float:
    """The next learning rate to try: (rate, KL) pairs so far; KL grows about as its square, then as
    the last two say (between 0.5 and 4).

    >>> next_rate([(1e-3, 4.0)], 1.0)
    0.0005
    >>> round(next_rate([(1e-3, 4.0), (5e-4, 2.0)], 1.0), 6)
    0.00025
    """
    (rate, kl), slope = tried[-1], 2.0
    if len(tried) > 1 and tried[-2][0] != rate:
        slope = min(4.0, max(0.5, math.log(kl / tried[-2][1]) / math.log(rate / tried[-2][0])))
    return float(f"{rate * math.exp(math.log(target / kl) / slope):.4g}")


def calibrate(args: Any) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """arm -> (rate, KL moved) of its short runs, the chosen one last; and the target.  Raises
    AsyncrlError when a run fails.
    """
    cells = CellStore(args.out / "calibration")
    short = [
        f"learner.steps={args.calibration}",
        "record.kl_moved=1",
        "evaluation.every=0",
        "evaluation.final_prompts=1",
        "staleness.max_lag=0",
    ]
    tried: dict[str, list[tuple[float, float]]] = {n: [] for n in ARMS}
    target = args.target

    def close(arm: str) -> bool:
        return bool(tried[arm]) and target > 0 and abs(tried[arm][-1][1] / target - 1) < CLOSE

    for n in range(args.rounds):
        todo = {}
        for arm, (_, items) in ARMS.items():
            if close(arm):
                continue
            rate = next_rate(tried[arm], target) if tried[arm] else float(args.lr)
            config = load.load(
                source(args), [*common(args), *items, *short, f"learner.lr={rate!r}"]
            )
            cells.add(f"{arm}-{n}", config, config.seed)
            todo[arm] = rate
        if args.table and any(not cells.get_path(f"{arm}-{n}").exists() for arm in todo):
            break
        cells.run(
            args.workers,
            lambda name, e: say(f"calibration: {name}") if "done" in e else None,
            abandon=False,
        )
        for arm, rate in todo.items():
            tried[arm].append((rate, moved(cells.read(f"{arm}-{n}"))))
        target = target or tried[PPO][0][1]
        say(
            f"target {target:.3g}: "
            + "; ".join(f"{a} {x[-1][0]:.3g} moves {x[-1][1]:.3g}" for a, x in tried.items() if x)
        )
        if not todo or all(map(close, ARMS)):
            break
    for x in tried.values():
        x.sort(key=lambda y: -abs(math.log(y[1] / target)))  # the best last
    return tried, target


def facts(cell: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """One arm at one lag, over its seeds."""

    def mean(key: str) -> float:
        each = [r[key] for x in records for r in x["curve"] if key in r]
        return statistics.fmean(each) if each else math.nan

    return {
        "seeds": len(records),
        "each": cell["each"],
        "final": cell["final"],
        "area": cell["area"],
        "ess": cell["ess"],
        "kl_behavior_max": cell["kl"],
        "kl_moved_early": statistics.fmean(moved(r, EARLY) for r in records),
        "kl_moved": statistics.fmean(moved(r) for r in records),
        "clip_share": mean("clip/share"),
        "lr_scale": mean("optim/lr_scale"),
        "unstable": cell["unstable"],
        "trouble": cell["trouble"],
        "given_up": cell["abandoned"],
        "grad_norm": mean("optim/grad_norm"),
    }


def analyse(s: grid.Sweep, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """lag -> arm -> facts and the difference from PPO at the same lag: paired by seed, t intervals,
    Holm over everything.
    """
    out: dict[str, dict[str, Any]] = {x: {} for x in found["limits"]}
    differences = {}
    for c in found["cells"]:
        seeds = [x for x in s.seeds if s.cells.get_path(s.name_run(c["arm"], x)).exists()]
        out[c["limit"]][c["correction"]] = facts(
            c, [s.cells.read(s.name_run(c["arm"], x)) for x in seeds]
        ) | {"of": seeds}
    for lag, arms in out.items():
        base = dict(zip(arms[PPO]["of"], arms[PPO]["each"], strict=True)) if PPO in arms else {}
        for name, about in arms.items():
            both = [
                (y, base[x]) for x, y in zip(about["of"], about["each"], strict=True) if x in base
            ]
            if name != PPO and both:
                differences[lag, name] = verdict.compare_pairs(
                    [a for a, _ in both], [b for _, b in both]
                )
    verdict.adjust_by_holm(differences)
    for (lag, name), d in differences.items():
        out[lag][name]["against_ppo"] = {
            "difference": d.mean,
            "interval": [d.low, d.high],
            "p_holm": d.adjusted,
        }
    return out


def lines(by_lag: dict[str, dict[str, Any]]) -> list[str]:
    out = [
        "|lag|arm|accuracy|against PPO|KL moved, early and all|clipped|KL(mu, pi) at most|",
        "|---" * 7 + "|",
    ]
    for lag, arms in by_lag.items():
        for name, a in arms.items():
            d = a.get("against_ppo")
            tail = (
                f"{d['difference']:+.3f} [{d['interval'][0]:+.2f}, {d['interval'][1]:+.2f}]"
                if d
                else ""
            )
            bad = (f" !{a['unstable']}/{a['seeds']}" if a["unstable"] else "") + (
                "" if a["seeds"] > 1 else " (1 seed)"
            )
            out.append(
                f"|{lag}|`{name}`|{a['final']:.3f}{bad}|{tail}|{a['kl_moved_early']:.2g}, "
                f"{a['kl_moved']:.2g}|{a['clip_share']:.1%}|{a['kl_behavior_max']:.2g}|"
            )
    return out


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("runs/trust"))
    p.add_argument("--task", default="rle", help="a config of configs/")
    p.add_argument("--lr", default="5e-4", help="PPO's, and where the others' calibration starts")
    p.add_argument(
        "--target",
        type=float,
        default=0.0,
        help="KL moved a batch, nats a token; 0: what PPO moves at --lr",
    )
    p.add_argument("--groups", type=int, default=32, help="in a batch, of 8 samples")
    p.add_argument("--minibatches", type=int, default=4)
    p.add_argument("--calibration", type=int, default=EARLY, help="batches of a calibration run")
    p.add_argument("--rounds", type=int, default=6, help="calibration runs of an arm, at most")
    p.add_argument("--lags", default="0,4,16")
    p.add_argument(
        "--first", default="0,4", help="lags that get all their seeds before the others start"
    )
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--table", action="store_true", help="run nothing")
    p.add_argument("--made-at", default="", help="commit of the runs, where it is not this one")
    args = p.parse_args()
    if args.quick:
        args.out = Path(f"{args.out}-quick")
        args.seeds = 1
        args.steps = 8
        args.lags = "0,1"
        args.first = ""
        args.calibration = 6
        args.rounds = 2
    if not args.table:
        preflight(load.load(source(args), common(args)))
    tried, target = calibrate(args)
    if not all(tried.values()):
        raise ConfigError(
            f"--out {args.out}: no calibration run is finished there; leave --table out"
        )
    rates = {arm: x[-1][0] for arm, x in tried.items() if x}
    arms = [Arm(n, [*ARMS[n][1], f"learner.lr={r!r}"]) for n, r in rates.items()]
    what = grid.SweepPlan(
        source(args),
        [*common(args), f"learner.lr={rates[PPO]!r}"],
        arms,
        grid.parse_limits(args.lags, True),
        injected=True,
    )
    s = grid.Sweep(args.out, what, args.seeds, say)
    if not args.table:
        studies.put_first(s, [float(x) for x in args.first.split(",") if x])
        s.run(args.workers, lambda name, e: say(f"{name}: done") if "done" in e else None)
    found = analyze_sweep(s)
    titles = {n: f"{ARMS[n][0]}; learning rate {r:.3g}" for n, r in rates.items()}
    subtitle = (
        f"{args.task}: {args.minibatches} optimizer steps a batch, each arm at the rate "
        f"that moves {target:.3g} nats a token a batch; {args.steps} steps"
    )
    told = what.describe(titles)
    page = write_sweep(s.directory, "Trust regions at equal KL moved", found, told, subtitle)
    by_lag = analyse(s, found)
    print("\n".join(lines(by_lag)), file=sys.stderr if args.json else sys.stdout)
    setting = {
        k: getattr(args, k)
        for k in ("task", "lr", "groups", "minibatches", "lags", "seeds", "steps")
    }
    result = clean(
        {
            "beside": args.beside,
            "runs_made_at": args.made_at or results_file.commit(),
            "setting": setting,
            "target": target,
            "calibration": tried,
            "arms": {n: what for n, (what, _) in ARMS.items()},
            "missing": found["missing"],
            "by_lag": by_lag,
        }
    )
    results_file.finish("trust_regions", result, page, args)


if __name__ == "__main__":
    main()
