"""Synchronous against asynchronous runs of real processes, against the limit, and against a plain
loop of one page; by turns.

    OMP_NUM_THREADS=1 python benchmarks/loop.py [--quick] [--json] [--model DIR] [--parts limit
    speed curves ...]

The learner's rate is 0 in all of them, so that all write and learn answers of the same lengths (a
policy that drifts towards longer ones would be charged for it): every other part of a step is that
of any run.  `curves` has runs that learn.

Proves, on two cores:
- limit        asynchronous speed-up / S_max >= 0.9, S_max = (b Tg + Tl + Tw) / (k max(Tg, Tl +
               Tx)): Tg, Tl of one batch in the
               bare loops of engine and learner (no buffer, no wires), b what draining adds to a
               synchronous batch, k what the bare loops cost each other side by side, Tw publishing
               and loading weights, Tx bringing a batch over
- speed        a step takes at most 0.65 of the plain loop's (tests/plain_loop.py, with one thread
               or two, whichever is faster); beside
               it, synchronous runs on one core, and synchronous with both cores for each phase
- curves       runs of 120 steps at the demo's rate against the plain loop at the same: seconds a
               step and a token, and held-out accuracy
- reward       with rewards of 0.2 s and a long tail at least 1.5 times synchronous
- own          a step with a cheap reward function of one's own, in one process, takes at most 1.05
               of a step with the built-in reward; beside
               it, the same as lists and as coroutines, and the process of the task's own reward
               (reward.workers = 1)
- publication  at most 1 % of a step for a model of at least 100 MB
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib import rounds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# SKIP: steps until the pipeline is full
BATCH = 256
SKIP = 8
PEER_S = 5.0
PARTS = ["limit", "speed", "curves", "reward", "own", "publication"]
SMALL = [
    "evaluation.every=0",
    "evaluation.prompts=1",
    "evaluation.final_prompts=1",
    "evaluation.ood_prompts=0",
    "learner.checkpoint_every=1000",
    "record.samples_every=0",
]


def env(threads: int) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}


def asyncrl(
    work: Path, name: str, model: Path, cores: list[int], steps: int, *sets: str
) -> dict[str, float]:
    """One run; seconds a step after the first few, and what its metrics say of publishing, swapping
    and idleness (medians).
    """
    every = [
        f"runs={str(work)!r}",
        f"name={name!r}",
        f"model.path={str(model)!r}",
        f"learner.steps={steps}",
        *SMALL,
        *sets,
    ]
    argv = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "run",
        "configs/demo.toml",
        "--json",
        *[x for s in every for x in ("--set", s)],
    ]
    argv = ["taskset", "-c", ",".join(map(str, cores)), *argv]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, env=env(1))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "reward/mean" in r]
    seconds = rows[-1]["t"] - rows[SKIP]["t"]
    ended = json.loads(done.stdout.splitlines()[-1])
    out = {
        "step": seconds / (len(rows) - 1 - SKIP),
        "token": seconds / sum(r["answer/length"] * BATCH for r in rows[SKIP + 1 :]),
    }
    out |= {k: ended[k] for k in ("heldout_start", "heldout_end")}
    # of all its processes, starts included
    out["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    for key in (
        "time/train",
        "time/publish",
        "time/swap",
        "time/learner_idle_share",
        "time/generator_idle_share",
        "lag/mean",
        "answer/length",
    ):
        out[key] = statistics.median(r[key] for r in rows[SKIP:] if key in r)
    return out


def plain(
    model: Path, cores: list[int], steps: int, seed: int, lr: float, prompts: int = 1
) -> dict[str, float]:
    code = (
        "import json, sys, torch; sys.path.insert(0, 'tests'); import plain_loop; from "
        "asyncrl.config.tree import Task; from asyncrl.tasks import get_task;"
        f"torch.set_num_threads({len(cores)}); print(json.dumps(plain_loop.train({str(model)!r}, "
        f"get_task(Task(name='sort')), {steps}, most=56,"
        f"n={prompts}, seed={seed}, lr={lr})))"
    )
    argv = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-c", code]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, check=True, env=env(len(cores))
    )
    out = json.loads(done.stdout.splitlines()[-1])
    seconds = out["step_seconds"][SKIP + 1 :]
    tokens = out["tokens"][SKIP + 1 :]
    return {
        "step": statistics.fmean(seconds),
        "token": sum(seconds) / sum(tokens),
        "answer/length": sum(tokens) / len(tokens) / BATCH,
        "heldout_start": out["heldout_start"],
        "heldout_end": out["heldout_end"],
    }


# ---- the bare loops ------------------------------------------------------------------------------


def bare(model_dir: str) -> None:
    """A process that runs an engine or a learner alone.  In: `WHAT SECONDS` a line.  Out: seconds a
    batch, for each batch.
    """
    import msgspec
    import torch

    from actors.engine import Request
    from actors.engine_embedded import EmbeddedEngine
    from asyncrl.config.load import load
    from asyncrl.config.tree import Task
    from asyncrl.contract import messages as m
    from asyncrl.contract.versions import Label
    from asyncrl.models import policy as models
    from asyncrl.models.tokenizer import encode_prompt, load_tokenizer, stop_tokens
    from asyncrl.tasks import get_task
    from learner.step import LearnerCore

    torch.set_num_threads(1)
    config = load(
        ROOT / "configs" / "demo.toml",
        [f"model.path={model_dir!r}", "learner.steps=1000000", "learner.lr=0.0"],
    )
    model = models.load_policy(model_dir)
    tokenizer = load_tokenizer(model_dir)
    task = get_task(Task(name="sort"))
    g = config.generator
    engine = EmbeddedEngine(
        model, slots=g.slots, context=g.context, max_new_tokens=g.max_new_tokens
    )
    engine.load(dict(models.named_weights(model)), Label(1, 0), "d")
    core = LearnerCore(config, model_dir)
    stop = stop_tokens(tokenizer, config)
    cursor = 0

    def requests(groups: int) -> list[Request]:
        nonlocal cursor
        cursor += groups
        out = []
        for t in range(cursor - groups, cursor):
            ids = encode_prompt(tokenizer, task.prompt("train", t, 0))
            out += [
                Request(
                    (t, s, 1),
                    ids,
                    t,
                    min(g.max_new_tokens, g.context - len(ids)),
                    1.0,
                    1.0,
                    0,
                    stop,
                    0,
                )
                for s in range(8)
            ]
        return out

    def drained() -> list[Any]:
        engine.add(requests(32))
        answers = []
        while engine.active:
            answers += engine.step()
        return answers

    done = sorted(drained(), key=lambda a: a.key)
    samples = [
        m.Trajectory(
            *a.key,
            a.prompt.astype("<i4").tobytes(),
            a.tokens.astype("<i4").tobytes(),
            a.logprobs.astype("<f4").tobytes(),
            b"\1" * len(a.tokens),
            [],
            float(len(a.tokens) % 2),
            {},
            a.finish,
            1.0,
        )
        for a in done
    ]
    batch = m.Batch(
        1, 0, samples, [1] * BATCH, [0] * BATCH, [[(0, s.length, 1)] for s in samples], {}, 32, {}
    )
    print("ready", flush=True)
    for line in sys.stdin:
        what, seconds = line.split()
        end = time.perf_counter() + float(seconds)
        out = []
        if what == "steady":
            engine.abort(list(engine.progress()) + [r.key for r in engine.queue])
            warm = 2 * BATCH
            finished = 0
            began = 0.0
            while time.perf_counter() < end or finished < warm + BATCH:
                while engine.active < engine.slots + BATCH:
                    engine.add(requests(8))
                before = finished
                finished += len(engine.step())
                if before < warm <= finished:
                    # the rows' ages have mixed: time counts from here
                    began = time.perf_counter()
                    warm = finished
            out = [(time.perf_counter() - began) * BATCH / (finished - warm)]
            engine.abort(list(engine.progress()) + [r.key for r in engine.queue])
        while what != "steady" and time.perf_counter() < end:
            began = time.perf_counter()
            if what == "learner":
                core.state.number = 0
                core.train(msgspec.structs.replace(batch, number=0))
            else:
                drained()
            out.append(time.perf_counter() - began)
        print(json.dumps(statistics.median(out)), flush=True)


class Bare:
    def __init__(self, model: Path, core: int) -> None:
        argv = ["taskset", "-c", str(core), sys.executable, __file__, "--bare", str(model)]
        self.p = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env(1)
        )

    def start(self, what: str, seconds: float) -> None:
        assert self.p.stdin is not None
        self.p.stdin.write(f"{what} {seconds}\n")
        self.p.stdin.flush()

    def result(self) -> str:
        assert self.p.stdout is not None
        return self.p.stdout.readline().strip()

    def run(self, what: str, seconds: float) -> float:
        self.start(what, seconds)
        return float(self.result())

    def end(self) -> None:
        assert self.p.stdin is not None
        self.p.stdin.close()
        self.p.wait()


def bare_round(left: Bare, right: Bare, seconds: float) -> dict[str, float]:
    """Tg (steady), b, Tl alone; both side by side."""
    tg = left.run("steady", seconds)
    drained = left.run("drained", seconds)
    tl = right.run("learner", seconds)
    left.start("steady", seconds)
    right.start("learner", seconds)
    tg2 = float(left.result())
    tl2 = float(right.result())
    return {
        "Tg": tg,
        "b": drained / tg,
        "Tl": tl,
        "k": max(tg2, tl2) / max(tg, tl),
        "k_generator": tg2 / tg,
        "k_learner": tl2 / tl,
    }


# ---- the parts -----------------------------------------------------------------------------------


def speed(
    work: Path, model: Path, cores: list[int], n: int, steps: int, only: list[str], *, limit: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each round: the plain loop, synchronous runs, asynchronous runs, the bare loops; ratios
    within the round.
    """
    two = ["generator.threads=2", "learner.threads=2"]
    still = "learner.lr=0.0"
    rows: list[dict[str, Any]] = []
    pair = [Bare(model, cores[0]), Bare(model, cores[1])] if limit else []
    for b in pair:
        assert b.result() == "ready"
    for r in range(n):
        kinds = {
            "plain two threads": lambda r=r: plain(model, cores, steps, r, 0.0),
            "plain one thread": lambda r=r: plain(model, cores[:1], steps, r, 0.0),
            "sync one core": lambda r=r: asyncrl(
                work, f"one{r}", model, cores[:1], steps, "staleness.max_lag=0", f"seed={r}", still
            ),
            "sync both cores": lambda r=r: asyncrl(
                work,
                f"both{r}",
                model,
                cores,
                steps,
                "staleness.max_lag=0",
                f"seed={r}",
                *two,
                still,
            ),
            "sync": lambda r=r: asyncrl(
                work, f"sync{r}", model, cores, steps, "staleness.max_lag=0", f"seed={r}", still
            ),
            "async": lambda r=r: asyncrl(
                work, f"async{r}", model, cores, steps, f"seed={r}", still
            ),
        } | ({"bare": lambda: bare_round(*pair, PEER_S)} if limit else {})
        kinds = {
            name: run for name, run in kinds.items() if not only or name in only or name == "bare"
        }
        row = {
            name: kinds[name]() for name in (list(kinds) if r % 2 == 0 else reversed(list(kinds)))
        }
        rows.append(row)
        print(
            f"round {r}: "
            + ", ".join(f"{k} {1e3 * v['step']:.0f} ms" for k, v in row.items() if "step" in v),
            file=sys.stderr,
        )
    for b in pair:
        b.end()

    def ratio(a: str, b: str) -> float:
        return statistics.median(row[a]["step"] / row[b]["step"] for row in rows)

    ms = {
        k: round(1e3 * statistics.median(row[k]["step"] for row in rows))
        for k in rows[0]
        if k != "bare"
    }
    plains = [k for k in ms if k.startswith("plain")]
    # of either, the faster in that round
    best = statistics.median(
        row["async"]["step"] / min(row[k]["step"] for k in plains) for row in rows
    )
    goals = [
        rounds.goal(
            "step, asynchronous / plain loop",
            best,
            0.65,
            at_least=False,
            ours_ms=ms["async"],
            plain_ms={k: ms[k] for k in plains},
        )
    ]
    result: dict[str, Any] = {
        "step_ms": ms,
        "async_over_plain": {k: ratio("async", k) for k in plains},
        "rounds": rows,
        "speedup": {
            k: ratio(k, "async")
            for k in ("sync", "sync one core", "sync both cores")
            if k in rows[0]
        },
    }
    if limit:
        shares = []
        for row in rows:
            b = row["bare"]
            a = row["async"]
            # the next batch comes while this one is trained: nothing to add
            tw = a["time/publish"] + a["time/swap"]
            tx = 0.0
            row["S_max"] = (b["b"] * b["Tg"] + b["Tl"] + tw) / (b["k"] * max(b["Tg"], b["Tl"] + tx))
            row["S"] = row["sync"]["step"] / a["step"]
            row["bound"] = b["k"] * max(b["Tg"], b["Tl"] + tx) / a["step"]
            shares.append(row["S"] / row["S_max"])
        result |= {
            "S_max": statistics.median(r["S_max"] for r in rows),
            "S": statistics.median(r["S"] for r in rows),
        }
        bound = statistics.median(r["bound"] for r in rows)
        goals.append(
            rounds.goal(
                "speed-up, share of S_max",
                statistics.median(shares),
                0.9,
                at_least=True,
                S=round(result["S"], 2),
                S_max=round(result["S_max"], 2),
            )
        )
        goals.append(
            rounds.goal("bare loops side by side / asynchronous step", bound, 0.9, at_least=True)
        )
    return goals, result


def curves(
    work: Path, model: Path, cores: list[int], n: int, steps: int, threads: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs that learn, a seed a round: ours against the plain loop on `threads` threads, both at
    the demo's rate.
    """
    final = ["evaluation.final_prompts=1024"]
    rows = []
    for r in range(n):
        kinds = {
            "plain": lambda r=r: plain(model, cores[:threads], steps, r, 3e-4, 1024),
            "async": lambda r=r: asyncrl(
                work, f"curve{r}", model, cores, steps, f"seed={r}", "learner.lr=3e-4", *final
            ),
        }
        row = {k: kinds[k]() for k in (list(kinds) if r % 2 == 0 else reversed(list(kinds)))}
        rows.append(row)
        said = (
            f"{k} {1e3 * v['step']:.0f} ms a step, {1e6 * v['token']:.0f} us a token, "
            f"{v['heldout_end']:.3f}"
            for k, v in row.items()
        )
        print(f"round {r}: " + "; ".join(said), file=sys.stderr)
    by = {
        k: statistics.median(row["async"][k] / row["plain"][k] for row in rows)
        for k in ("step", "token")
    }
    more = {
        k: round(statistics.fmean(row[k]["heldout_end"] for row in rows), 3)
        for k in ("async", "plain")
    }
    goal = rounds.goal(
        f"{steps} steps that learn: token, async / plain loop",
        by["token"],
        0.65,
        at_least=False,
        by_step=round(by["step"], 3),
        heldout=more,
    )
    return [goal], {"rounds": rows, "steps": steps, "plain_threads": threads, "heldout": more} | by


def slow_rewards(
    work: Path, model: Path, cores: list[int], n: int, steps: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    sets = [
        "reward.function='benchmarks.lib.slow_reward:reward'",
        "reward.workers=32",
        "learner.groups=8",
        "generator.slots=64",
    ]
    rows = []
    for r in range(n):
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
        rows.append(row)
        print(
            f"round {r}: " + ", ".join(f"{k} {v['step']:.2f} s" for k, v in row.items()),
            file=sys.stderr,
        )
    value = statistics.median(r["sync"]["step"] / r["async"]["step"] for r in rows)
    return [
        rounds.goal(
            "rewards of 0.2 s and more: synchronous / async step", value, 1.5, at_least=True
        )
    ], {"rounds": rows, "workers": 32, "batch": "8 x 8"}


def own_rewards(
    work: Path,
    model: Path,
    cores: list[int],
    n: int,
    steps: int,
    only: list[str],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The built-in reward in place, and the same function as one's own in a process, in its three
    forms.
    """
    rows: list[dict[str, Any]] = []
    for r in range(n):
        sets = ["learner.lr=0.0", f"seed={r}"]
        kinds = {
            "built in": sets,
            "own": [
                *sets,
                "reward.workers=1",
                "reward.function='benchmarks.lib.cheap_reward:reward'",
            ],
        }
        for name in ("lists", "coroutine"):
            kinds[name] = [
                *sets,
                "reward.workers=1",
                f"reward.function='benchmarks.lib.cheap_reward:{name}'",
            ]
        kinds["in a process"] = [*sets, "reward.workers=1"]
        kinds = {k: v for k, v in kinds.items() if not only or k in only}
        order = list(kinds) if r % 2 == 0 else list(reversed(kinds))
        load = os.getloadavg()[0]
        row: dict[str, Any] = {
            k: asyncrl(work, f"own_{k.replace(' ', '_')}{r}", model, cores, steps, *kinds[k])
            for k in order
        }
        row["load"] = [load, os.getloadavg()[0]]
        rows.append(row)
        said = ", ".join(f"{k} {1e3 * row[k]['step']:.0f} ms" for k in kinds)
        print(
            f"round {r}: {said}, load {row['load'][0]:.1f} to {row['load'][1]:.1f}", file=sys.stderr
        )
    others = [k for k in kinds if k != "built in"]
    ratios = {
        k: statistics.median(row[k]["step"] / row["built in"]["step"] for row in rows)
        for k in others
    }
    ms = {k: round(1e3 * statistics.median(row[k]["step"] for row in rows)) for k in kinds}
    cpu = {
        k: statistics.median(row[k]["cpu"] / row["built in"]["cpu"] for row in rows) for k in others
    }
    said = "a cheap reward function of one's own / the built-in reward, step"
    goal = rounds.goal(said, ratios["own"], 1.05, at_least=False, ms=ms, cpu=round(cpu["own"], 3))
    return [goal], {
        "rounds": rows,
        "step_ms": ms,
        "over_built_in": ratios,
        "cpu_over_built_in": cpu,
    }


def publication(work: Path, n: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ring writes against learner steps of 32 x 8 samples, for a model of at least 100 MB."""
    import torch
    from lib.learner_batch import batch, config

    from asyncrl.contract.versions import Label
    from asyncrl.models import policy as models
    from asyncrl.transport.ring import Ring
    from learner.step import LearnerCore

    torch.set_num_threads(1)
    models.build_model(
        work / "big", "0123456789abcdefghij", hidden=512, layers=8, heads=8, intermediate=2048
    )
    core = LearnerCore(config(work / "big"), work / "big")
    layout = models.manifest(core.model)
    size = models.flat_bytes(layout)
    ring = Ring(Path("/dev/shm") / f"asyncrl-bench-{os.getpid()}", size, 4, layout, 1)
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


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--model", default="", help="a warm-started `sort` model; absent: built")
    p.add_argument("--parts", nargs="+", default=PARTS)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument(
        "--kinds",
        nargs="+",
        default=[],
        help="of `speed` and `own`: some of the alternatives, by name; absent: all",
    )
    p.add_argument(
        "--plain-threads",
        type=int,
        default=1,
        help="of the plain loop in `curves`: what `speed` found the faster",
    )
    p.add_argument("--bare", default="", help="used by the program itself")
    args = p.parse_args()
    if args.bare:
        return bare(args.bare)
    cores = rounds.idle_cores(2)
    n, steps = (1, 12) if args.quick else (args.rounds, args.steps)
    goals: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "what": "real runs of three processes on two cores, by turns",
        "steps": steps,
    }
    with tempfile.TemporaryDirectory() as tmp:
        work = Path(tmp)
        model = Path(args.model).resolve() if args.model else work / "model"
        if not args.model:
            code = (
                "import sys; from asyncrl.config.load import load; from asyncrl.tasks.warm_start "
                "import warm_start;"
                "c = load('configs/demo.toml', ['model.path=' + repr(sys.argv[1])]); warm_start(c, "
                "sys.argv[1])"
            )
            subprocess.run(
                [sys.executable, "-c", code, str(model)], cwd=ROOT, check=True, env=env(2)
            )
        if "speed" in args.parts:
            found, result["speed"] = speed(
                work, model, cores, n, steps, args.kinds, limit="limit" in args.parts
            )
            goals += found
        if "curves" in args.parts:
            found, result["curves"] = curves(
                work, model, cores, n, 12 if args.quick else 120, args.plain_threads
            )
            goals += found
        if "reward" in args.parts:
            found, result["reward"] = slow_rewards(work, model, cores, n, 8 if args.quick else 24)
            goals += found
        if "own" in args.parts:
            found, result["own"] = own_rewards(work, model, cores, n, steps, args.kinds)
            goals += found
        if "publication" in args.parts and not args.quick:
            found, result["publication"] = publication(work, 5)
            goals += found
    whole = len(args.parts) == len(PARTS)
    rounds.report("loop" if whole else "loop_" + "_".join(args.parts), goals, result, args)


if __name__ == "__main__":
    main()
