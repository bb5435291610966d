"""Compare a step of real runs with the strongest rivals, synchronous runs and the possible limit.

    OMP_NUM_THREADS=1 python benchmarks/loop.py [--quick] [--json] [--model DIR] [--parts speed ...]
        [--trl-python PYTHON]

The learning rate is 0 in all of them, so that all generate and train completions of the same
lengths (a policy that drifts to longer ones would be at a disadvantage); all other parts of a
step are those of any run.  In `curves` the runs learn.  Alternatives run by turns.

Proves, on two cores, `sort`, 32 x 8 completions:
- speed        a step takes at most 0.60 of the strong loop's (benchmarks/lib/strong_loop.py) with
               one thread, two threads or two ranks, whichever is fastest, and at most 0.30 of TRL's
               GRPO with its best settings; with the `file` task and a custom reward function in
               a process at most 1.05 of a step with the built-in reward; synchronous (max_lag = 0)
               at most 1.1 of the strong loop's; and at least 0.9 of the speed-up over
               synchronous that is possible, S_max = synchronous step / (k max(Tg, Tl + Tx)): Tg, Tl
               of the bare engine and learner, k their mutual slowdown, Tx = 0.  Synchronous is the
               fastest of one core, both cores for each phase and a core for each side.
- curves       runs of 120 steps at the demo's rate against the strong loop at the same: seconds a
               step and a token, and held-out accuracy
- reward       with rewards of 0.2 s and a long tail at least 1.5 times synchronous
- own          a step with a cheap custom reward function in one process takes at most 1.05 of a
               step with the built-in reward; also measured: the same function for lists and as a
               coroutine, and the built-in reward in a process (reward.workers = 1)
- publication  at most 1 % of a step for a model of at least 100 MB
- cores        with 84k and 2.6M parameters, the demo's lengths and a tail (answers that end by
               chance, 147 tokens on average, 512 at most): a step of a run with learner.ranks =
               auto takes at most 0.70, 0.95 and 0.75 (tail) of the strong loop's with one process
               or two ranks, whichever is faster, and at most 0.30 of TRL's GRPO. Untrained models,
               whose rewards are all 0

Rivals' settings (threads, their wait policy, rows of a micro-batch, TRL's batch and attention,
the synchronous run's use of cores) are chosen by one short run of each before the rounds.
OpenMP's wait policy is the best one for the strong loop, and the same for all."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lib import rounds
from lib.bare_loops import Bare, limit
from lib.contenders import (
    ROOT,
    SIZE,
    SKIP,
    STILL,
    TRL,
    asyncrl,
    env,
    has_trl,
    strong,
    trl,
)

from asyncrl.config.tree import TaskConfig
from asyncrl.tasks import get_task

PEER_S = 4.0
PARTS = ["speed", "curves", "reward", "own", "publication", "cores"]
OWN = ["reward.function='benchmarks.lib.cheap_reward:reward'", "reward.workers=1"]
FILE_PROMPTS = 4096
Row = dict[str, dict[str, float]]


# ---- the step ------------------------------------------------------------------------------------


def fastest(what: str, candidates: Mapping[str, Callable[[], dict[str, float]]]) -> dict[str, Any]:
    """One short run of each; `name` of the fastest and `step_ms` of all."""
    step_ms: dict[str, float] = {}
    for name, run in candidates.items():
        step_ms[name] = round(1e3 * run()["step"], 1)
        print(f"{what}: {name} {step_ms[name]} ms", file=sys.stderr)
    return {"name": min(step_ms, key=lambda name: step_ms[name]), "step_ms": step_ms}


def choose_strong(
    model: Path, cores: list[int], steps: int, *, quick: bool, **size: int
) -> dict[str, Any]:
    """The best the strong loop does in one process: `threads`, `policy`, `rows`.  size: `most`
    tokens and `groups` of a batch."""
    tried = {
        f"{threads}, {policy}, {rows} rows": (threads, policy, rows)
        for threads, policy, rows in (
            ("two threads", "PASSIVE", 64),
            ("two threads", "ACTIVE", 64),
            ("two threads", "PASSIVE", 256),
            ("one thread", "PASSIVE", 64),
        )
    }
    if quick:
        tried = dict(list(tried.items())[:1])
    found = fastest(
        "strong loop",
        {
            name: partial(strong, threads, model, cores, steps, 0, policy=policy, rows=rows, **size)
            for name, (threads, policy, rows) in tried.items()
        },
    )
    return found | dict(zip(("threads", "policy", "rows"), tried[found["name"]], strict=True))


def choose_trl(
    run: Callable[..., dict[str, float]], names: Sequence[str], steps: int, args: Any
) -> dict[str, Any]:
    """Return TRL's fastest setting of `names`, or {} if TRL is not installed."""
    if not has_trl(args.trl_python):
        print(
            f"TRL is left out: {args.trl_python} has none; pip install 'asyncrl[bench]', or name a "
            "Python that has it: --trl-python",
            file=sys.stderr,
        )
        return {}
    some = names[:1] if args.quick else names
    return fastest("TRL", {name: partial(run, name, steps=steps, seed=0) for name in some})


def share_of_limit(row: Row) -> float:
    """S / S_max of a round, all by the token: S is synchronous over asynchronous, S_max synchronous
    over the limit.
    """
    synchronous = row["sync"]["token"]
    speedup = synchronous / row["async"]["token"]
    most = synchronous / row["bare"]["token"]
    return speedup / most


def checked(shares: list[float]) -> list[float]:
    """Raises ValueError for a share above 1: nothing is faster than its limit, so one of the two
    was measured wrong.
    """
    if statistics.median(shares) > 1:
        raise ValueError(
            f"share of the limit {statistics.median(shares):.3f}: it cannot exceed 1; the bare "
            "loops were slowed, or do more than a run does (benchmarks/lib/bare_loops.py)"
        )
    return shares


def file_task(work: Path) -> list[str]:
    """`sort` as prompts in a file: what a run must be told to use them."""
    task = get_task(TaskConfig(name="sort"))
    prompts = [task.prompt("train", i, 10**6) for i in range(FILE_PROMPTS)]
    path = work / "sort.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": p.text, "answer": p.answer}) + "\n" for p in prompts)
    )
    return ["task.name='file'", f"task.prompts={str(path)!r}"]


def speed(
    work: Path,
    model: Path,
    cores: list[int],
    n: int,
    steps: int,
    args: Any,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each round: everybody once, and the bare loops; ratios within the round."""
    short = SKIP + 4 if args.quick else SKIP + 6
    chosen = choose_strong(model, cores, short, quick=args.quick)
    policy = chosen["policy"]

    def run(
        name: str, on: list[int], many: int, *sets: str, wait: str = policy
    ) -> Callable[[int], dict[str, float]]:
        return lambda r: asyncrl(
            work, f"{name}-{r}", model, on, many, f"seed={r}", STILL, *sets, policy=wait
        )

    still = "staleness.max_lag=0"
    ways: dict[str, tuple[list[int], list[str]]] = {
        "one core": (cores[:1], []),
        "both cores for each phase": (cores, ["generator.threads=2", "learner.threads=2"]),
        "a core for each side": (cores, []),
        "two generators": (cores, ["generators=2"]),
    }

    def synchronously(name: str, way: str, many: int) -> Callable[[int], dict[str, float]]:
        on, sets = ways[way]
        return run(name, on, many, still, *sets, wait="PASSIVE")

    some = list(ways)[:1] if args.quick else list(ways)
    synchronous = fastest(
        "synchronous",
        {way: partial(synchronously(way.split()[0], way, short), 0) for way in some},
    )
    sync = synchronously("sync", synchronous["name"], steps)
    kinds: dict[str, Callable[[int], dict[str, float]]] = {
        "strong": lambda r: strong(
            chosen["threads"], model, cores, steps, r, policy=policy, rows=chosen["rows"]
        ),
        "two ranks": lambda r: strong("two ranks", model, cores, steps, r, policy=policy),
        "sync": sync,
        "async": run("async", cores, steps),
        "file, own": run("own", cores, steps, *file_task(work), *OWN),
    }
    result: dict[str, Any] = {"strong": chosen, "synchronous": synchronous, "wait_policy": policy}
    run_trl = partial(trl, python=args.trl_python, model=model, cores=cores, policy=policy)
    if best := choose_trl(run_trl, list(TRL), short, args):
        result["trl"] = best
        kinds["TRL"] = lambda r: run_trl(best["name"], steps=min(steps, 24), seed=r)
    left, right = (Bare(model, core, policy) for core in cores)
    kinds["bare"] = lambda r: limit(left, right, 1.0 if args.quick else PEER_S)

    def one_round(r: int) -> Row:
        order = list(kinds) if r % 2 == 0 else list(reversed(kinds))
        row = {name: kinds[name](r) for name in order}
        said = ", ".join(f"{k} {1e3 * v['step']:.0f} ms" for k, v in row.items() if "step" in v)
        print(f"round {r}: {said}, share of the limit {share_of_limit(row):.3f}", file=sys.stderr)
        return row

    rows: list[Row] = rounds.quiet(n, one_round)
    for bare in (left, right):
        bare.end()
    return judged(rows, result)


def judged(rows: list[Row], result: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The goals of `speed`, from its rounds."""

    def over(ours: str, rival: str) -> list[float]:
        return [row[ours]["step"] / row[rival]["step"] for row in rows]

    ms = {
        name: round(1e3 * statistics.median(row[name]["step"] for row in rows))
        for name in rows[0]
        if name != "bare"
    }
    strongest = min(("strong", "two ranks"), key=lambda name: ms[name])
    other = "two ranks" if strongest == "strong" else "strong"
    which = result["strong"]["name"] if strongest == "strong" else strongest
    goals = [
        rounds.figure(
            "step, asynchronous / strong loop",
            over("async", strongest),
            0.6,
            at_least=False,
            ours_ms=ms["async"],
            rival_ms=ms[strongest],
            rival=which,
            over_the_other=round(statistics.median(over("async", other)), 3),
        )
    ]
    if "TRL" in rows[0]:
        goals.append(
            rounds.figure(
                "step, asynchronous / TRL's GRPO",
                over("async", "TRL"),
                0.3,
                at_least=False,
                rival_ms=ms["TRL"],
                rival=result["trl"]["name"],
            )
        )
    goals += [
        rounds.figure(
            "step, file task and own reward / built in",
            over("file, own", "async"),
            1.05,
            at_least=False,
            ours_ms=ms["file, own"],
        ),
        rounds.figure(
            "step, synchronous / strong loop",
            over("sync", strongest),
            1.1,
            at_least=False,
            ours_ms=ms["sync"],
            rival=which,
            way=result["synchronous"]["name"],
        ),
    ]
    result |= {"step_ms": ms, "rounds": rows}
    try:
        shares = checked([share_of_limit(row) for row in rows])
        speedup = statistics.median(over("sync", "async"))
        goals.append(
            rounds.figure(
                "speed-up over synchronous, share of S_max",
                shares,
                0.9,
                at_least=True,
                S=round(speedup, 2),
            )
        )
    except ValueError as error:  # the other figures are written all the same
        result["error"] = str(error)
    return goals, result


# ---- the other parts -----------------------------------------------------------------------------


def curves(
    work: Path, model: Path, cores: list[int], n: int, steps: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs that learn at the demo's rate, against the strong loop at the same."""

    def one_round(r: int) -> Row:
        kinds = {
            "strong": lambda: strong("two threads", model, cores, steps, r, lr=3e-4, heldout=1024),
            "async": lambda: asyncrl(
                work,
                f"curve{r}",
                model,
                cores,
                steps,
                f"seed={r}",
                "evaluation.final_prompts=1024",
            ),
        }
        row = {k: kinds[k]() for k in (list(kinds) if r % 2 == 0 else reversed(list(kinds)))}
        said = [
            f"{k} {1e3 * v['step']:.0f} ms, {1e6 * v['token']:.1f} us a token, "
            f"{v['heldout_end']:.3f}"
            for k, v in row.items()
        ]
        print(f"round {r}: " + "; ".join(said), file=sys.stderr)
        return row

    rows: list[Row] = rounds.quiet(n, one_round)
    token, step = (
        [row["async"][key] / row["strong"][key] for row in rows] for key in ("token", "step")
    )
    heldout = {
        k: round(statistics.fmean(row[k]["heldout_end"] for row in rows), 3)
        for k in ("async", "strong")
    }
    goal = rounds.figure(
        f"{steps} steps that learn: token, async / strong loop",
        token,
        0.65,
        at_least=False,
        by_step=round(statistics.median(step), 3),
        heldout=heldout,
    )
    return [goal], {"rounds": rows, "steps": steps, "heldout": heldout}


def slow_rewards(
    work: Path, model: Path, cores: list[int], n: int, steps: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    sets = [
        "reward.function='benchmarks.lib.slow_reward:reward'",
        "reward.workers=32",
        "learner.groups=8",
        "generator.slots=64",
    ]

    def one_round(r: int) -> Row:
        kinds = {"sync": 0, "async": 4}
        row = {
            k: asyncrl(
                work,
                f"slow_{k}{r}",
                model,
                cores,
                steps,
                f"staleness.max_lag={kinds[k]}",
                f"seed={r}",
                *sets,
            )
            for k in (list(kinds) if r % 2 == 0 else reversed(list(kinds)))
        }
        print(
            f"round {r}: " + ", ".join(f"{k} {v['step']:.2f} s" for k, v in row.items()),
            file=sys.stderr,
        )
        return row

    rows: list[Row] = rounds.quiet(n, one_round)
    each = [r["sync"]["step"] / r["async"]["step"] for r in rows]
    what = "rewards of 0.2 s and more: synchronous / async step"
    return [rounds.figure(what, each, 1.5, at_least=True)], {
        "rounds": rows,
        "workers": 32,
        "batch": "8 x 8",
    }


def own_rewards(
    work: Path,
    model: Path,
    cores: list[int],
    n: int,
    steps: int,
    only: list[str],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the built-in reward in place, and a custom function in a process in three forms."""
    forms = {"built in": [], "own": OWN}
    for name in ("lists", "coroutine"):
        function = f"reward.function='benchmarks.lib.cheap_reward:{name}'"
        forms[name] = ["reward.workers=1", function]
    forms["in a process"] = ["reward.workers=1"]
    forms = {k: v for k, v in forms.items() if not only or k in only or k == "built in"}

    def one_round(r: int) -> Row:
        order = list(forms) if r % 2 == 0 else list(reversed(forms))
        row = {
            k: asyncrl(
                work,
                f"own_{k.replace(' ', '_')}{r}",
                model,
                cores,
                steps,
                STILL,
                f"seed={r}",
                *forms[k],
            )
            for k in order
        }
        said = ", ".join(f"{k} {1e3 * row[k]['step']:.0f} ms" for k in forms)
        print(f"round {r}: {said}", file=sys.stderr)
        return row

    rows: list[Row] = rounds.quiet(n, one_round)
    others = [k for k in forms if k != "built in"]
    each = {k: [row[k]["step"] / row["built in"]["step"] for row in rows] for k in others}
    ms = {k: round(1e3 * statistics.median(row[k]["step"] for row in rows)) for k in forms}
    cpu = {
        k: statistics.median(row[k]["cpu"] / row["built in"]["cpu"] for row in rows) for k in others
    }
    said = "a cheap reward function of one's own / the built-in reward, step"
    which = "own" if "own" in each else others[0]
    more = {"form": which, "ms": ms, "cpu": round(cpu[which], 3)}
    goal = rounds.figure(said, each[which], 1.05, at_least=False, **more)
    return [goal], {
        "rounds": rows,
        "step_ms": ms,
        "over_built_in": {k: statistics.median(v) for k, v in each.items()},
        "cpu_over_built_in": cpu,
    }


def publication(work: Path, n: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ring writes against learner steps of 32 x 8 samples, for a model of at least 100 MB."""
    import torch
    from lib.learner_batch import batch, config

    from asyncrl.contract.versions import Label
    from asyncrl.models import policy as models
    from asyncrl.transport.ring import WeightRing
    from learner.step import LearnerCore

    torch.set_num_threads(1)
    models.build_model(
        work / "big", "0123456789abcdefghij", hidden=512, layers=8, heads=8, intermediate=2048
    )
    core = LearnerCore(config(work / "big"), work / "big")
    layout = models.build_manifest(core.model)
    size = models.count_flat_bytes(layout)
    ring = WeightRing(Path("/dev/shm") / f"asyncrl-bench-{os.getpid()}", size, 4, layout, 1)
    steps = []
    writes = []
    try:
        for r in range(n):
            began = time.perf_counter()
            core.train(batch())
            steps.append(time.perf_counter() - began)
            for w in range(3):
                began = time.perf_counter()
                ring.write(
                    Label(1, 3 * r + w + 1), lambda buffer: models.write_flat(core.model, buffer)
                )
                writes.append(time.perf_counter() - began)
    finally:
        ring.close()
    share = statistics.median(writes) / statistics.median(steps)
    result = {
        "bytes": size,
        "write_s": writes,
        "step_s": steps,
        "gb_per_s": size / 1e9 / statistics.median(writes),
    }
    return [
        rounds.goal(
            f"publication of {size / 1e6:.0f} MB, share of a step", share, 0.01, at_least=False
        )
    ], result


# parameters -> arguments of `build_model`
SIZES: dict[str, dict[str, Any]] = {"84k": {}, "2.6M": {"hidden": 256, "layers": 4, "heads": 8}}
# lengths -> symbols of the model (an answer ends at each token with about one chance in so many),
# most tokens, groups in a batch, goals by size
LENGTHS: dict[str, tuple[int, int, int, dict[str, float]]] = {
    "demo": (0, 56, 16, {"84k": 0.70, "2.6M": 0.95}),
    "tail": (150, 512, 8, {"84k": 0.75, "2.6M": 0.75}),
}
# TRL's settings that are tried here; a static cache and one thread were slower in `speed`
TRL_HERE = [name for name in TRL if "2 threads" in name and "static" not in name]
DECIDED = 24  # batches after which `auto` has decided and tried


def divided_cores(
    work: Path, cores: list[int], n: int, args: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rivals, synchronous and asynchronous runs, and one that divides the cores."""
    from asyncrl.models.policy import build_model

    task: Any = get_task(TaskConfig(name="sort"))
    symbols = list(task.symbols)
    goals: list[dict[str, Any]] = []
    result: dict[str, Any] = {"step_ms": {}, "rounds": {}, "strong": {}, "trl": {}}
    cases = {f"{size}, {lengths}": (size, lengths) for lengths in LENGTHS for size in SIZES}
    short = SKIP + 4
    for case in args.kinds or list(cases)[: 1 if args.quick else None]:
        size, lengths = cases[case]
        count, most, groups, targets = LENGTHS[lengths]
        model = work / case
        more = [chr(0x4E00 + i) for i in range(count - len(symbols))]
        build_model(model, [*symbols, *more], max_positions=1024, **SIZES[size])
        batch: dict[str, Any] = {"most": most, "groups": groups}
        best = choose_strong(model, cores, short, quick=args.quick, **batch)
        result["strong"][case] = best
        policy = best["policy"]
        common = [
            STILL,
            f"learner.groups={groups}",
            f"generator.slots={groups * 8}",
            f"generator.max_new_tokens={most}",
            f"generator.context={most + 32}",
        ]
        ours = partial(_run_case, work, model, cores, common, policy, quick=args.quick)
        loop = partial(
            strong, model=model, cores=cores, steps=SKIP + 12, policy=policy, rows=best["rows"]
        )
        run_trl = partial(
            trl, python=args.trl_python, model=model, cores=cores, policy=policy, **batch
        )
        kinds: dict[str, Callable[[int], dict[str, float]]] = {
            "one process": partial(_seeded, partial(loop, best["threads"], **batch)),
            "two ranks": partial(_seeded, partial(loop, "two ranks", **batch)),
            "sync": partial(ours, "sync", ["staleness.max_lag=0"], groups),
            "async": partial(ours, "async", [], groups),
            "auto": partial(ours, "auto", ["learner.ranks='auto'"], groups, skip=DECIDED),
        }
        if fastest_trl := choose_trl(run_trl, TRL_HERE, short, args):
            result["trl"][case] = fastest_trl
            kinds["TRL"] = partial(_seeded, partial(run_trl, fastest_trl["name"], steps=SKIP + 8))

        def one_round(r: int, kinds: Any = kinds, case: str = case) -> Row:
            row = {name: kinds[name](r) for name in (kinds if r % 2 == 0 else reversed(kinds))}
            ms = ", ".join(f"{name} {1e3 * row[name]['step']:.0f} ms" for name in kinds)
            print(f"{case}, round {r}: {ms}", file=sys.stderr)
            return row

        rows: list[Row] = [one_round(r) for r in range(n)]
        ms = {k: round(1e3 * statistics.median(row[k]["step"] for row in rows)) for k in kinds}
        rival = min(("one process", "two ranks"), key=lambda name: ms[name])
        for other, target in ((rival, targets[size]), ("TRL", 0.3)):
            if other in kinds:
                goals.append(
                    rounds.figure(
                        f"step, auto / {'TRL' if other == 'TRL' else 'strong loop'}: {case}",
                        [row["auto"]["step"] / row[other]["step"] for row in rows],
                        target,
                        at_least=False,
                        rival=other,
                        **{
                            f"{k}_over_rival": round(ms[k] / ms[other], 3)
                            for k in ("async", "sync")
                        },
                    )
                )
        result["step_ms"][case], result["rounds"][case] = ms, rows
    return goals, result


def _seeded(run: Callable[..., dict[str, float]], r: int) -> dict[str, float]:
    return run(seed=r)


def _run_case(
    work: Path,
    model: Path,
    cores: list[int],
    common: list[str],
    policy: str,
    name: str,
    sets: list[str],
    groups: int,
    r: int,
    *,
    quick: bool,
    skip: int = SKIP,
) -> dict[str, float]:
    """A run of `divided_cores`."""
    return asyncrl(
        work,
        f"{model.name}-{name}-{r}",
        model,
        cores,
        skip + (4 if quick else 12),
        f"seed={r}",
        *common,
        *sets,
        policy=policy,
        skip=skip,
        samples=groups * SIZE,
    )


def parsed() -> Any:
    p = rounds.parser(__doc__)
    p.add_argument("--model", default="", help="a warm-started `sort` model; absent: built")
    p.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=32)
    p.add_argument(
        "--kinds",
        nargs="+",
        default=[],
        help="of `own` and `cores`: some of the alternatives, by name; absent: all",
    )
    p.add_argument(
        "--trl-python", default=sys.executable, help="a Python with the extra `bench`; absent: this"
    )
    return p.parse_args()


def main() -> None:
    args = parsed()
    cores = rounds.idle_cores(2)
    n, steps = (1, SKIP + 4) if args.quick else (args.rounds, args.steps)
    goals: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "what": "real runs of three processes on two cores, by turns",
        "steps": steps,
    }
    with tempfile.TemporaryDirectory() as tmp:
        work = Path(tmp)
        model = Path(args.model).resolve() if args.model else work / "model"
        if not args.model and args.parts != ["cores"]:
            code = (
                "import sys; from asyncrl.config.load import load; from asyncrl.tasks.warm_start "
                "import warm_start;"
                "c = load('configs/demo.toml', ['model.path=' + repr(sys.argv[1])]); warm_start(c, "
                "sys.argv[1])"
            )
            argv = [sys.executable, "-c", code, str(model)]
            subprocess.run(argv, cwd=ROOT, check=True, env=env(2))
        parts: dict[str, Callable[[], tuple[list[dict[str, Any]], dict[str, Any]]]] = {
            "speed": lambda: speed(work, model, cores, n, steps, args),
            "curves": lambda: curves(work, model, cores, n, SKIP + 4 if args.quick else 120),
            "reward": lambda: slow_rewards(work, model, cores, n, SKIP + 4 if args.quick else 24),
            "own": lambda: own_rewards(work, model, cores, n, steps, args.kinds),
            "publication": lambda: publication(work, 5),
            "cores": lambda: divided_cores(work, cores, n, args),
        }
        for part in args.parts:
            if part != "publication" or not args.quick:
                found, result[part] = parts[part]()
                goals += found
    whole = len(args.parts) == len(PARTS)
    names = args.parts
    if names == ["cores"]:
        for size, lengths in (kind.split(", ") for kind in args.kinds):
            names = [*names, lengths, *([size.lower().replace(".", "_")] if size != "84k" else [])]
    rounds.report("loop" if whole else "loop_" + "_".join(names), goals, result, args)
    if error := result.get("speed", {}).get("error"):
        sys.exit(error)


if __name__ == "__main__":
    main()
