"""The contenders of benchmarks/loop.py, which train in separate processes and report step times.

All get the same cores, OMP_WAIT_POLICY, malloc settings and learning rate.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncrl.models import memory
from asyncrl.records.metrics import compute_idle_shares
from lib import rounds  # first: it puts the repository before benchmarks/

ROOT = rounds.results_file.ROOT
HERE = ROOT / "benchmarks" / "lib"
GROUPS = 32
SIZE = 8
BATCH = GROUPS * SIZE
SKIP = 8  # steps until the pipeline is full
MOST = 56  # configs/demo.toml's generator.max_new_tokens
SMALL = [
    "evaluation.every=0",
    "evaluation.prompts=1",
    "evaluation.final_prompts=1",
    "evaluation.ood_prompts=0",
    "learner.checkpoint_every=1000",
    "record.samples_every=0",
]
STILL = "learner.lr=0.0"


def env(threads: int, policy: str = "PASSIVE") -> dict[str, str]:
    """The environment of a contender.

    policy: OpenMP's wait policy, the same for all.  All get the malloc settings that a process of a
    run makes itself (asyncrl/models/memory.py)."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": policy,
        "MALLOC_TRIM_THRESHOLD_": str(memory.KEPT),
        "MALLOC_MMAP_THRESHOLD_": str(memory.MAPPED),
        "PYTHONPATH": str(ROOT),
    }


def output(argv: list[str], cores: list[int], threads: int, policy: str) -> str:
    """Run a program on `cores` and return its stdout; exits with its errors if it fails."""
    argv = ["taskset", "-c", ",".join(map(str, cores)), *argv]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, check=False, env=env(threads, policy)
    )
    if done.returncode:
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def asyncrl(
    work: Path,
    name: str,
    model: Path,
    cores: list[int],
    steps: int,
    *sets: str,
    policy: str = "PASSIVE",
    config: str = "configs/demo.toml",
    skip: int = SKIP,
    samples: int = BATCH,
) -> dict[str, float]:
    """One run; seconds a step after the first `skip`, and what its metrics say of publishing and
    swapping (medians) and of idle time (its share of all time).  samples: of a batch.
    """
    every = [
        f"runs={str(work)!r}",
        f"name={name!r}",
        f"model.path={str(model)!r}",
        f"learner.steps={steps}",
        *SMALL,
        *sets,
    ]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", config, "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = output([*argv, *[x for s in every for x in ("--set", s)]], cores, 1, policy)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "reward/mean" in r]
    seconds = rows[-1]["t"] - rows[skip]["t"]
    ended = json.loads(said.splitlines()[-1])
    out = {
        "step": seconds / (len(rows) - 1 - skip),
        "token": seconds / sum(r["answer/length"] * samples for r in rows[skip + 1 :]),
    }
    out |= {k: ended[k] for k in ("heldout_start", "heldout_end")}
    # of all its processes, starts included
    out["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    for key in (
        "time/train",
        "time/publish",
        "time/swap",
        "lag/mean",
        "answer/length",
    ):
        found = [r[key] for r in rows[skip:] if key in r]
        if found:
            out[key] = statistics.median(found)
    idle = compute_idle_shares(rows[skip:])
    return out | {f"time/{side}_idle_share": share for side, share in idle.items()}


def summary(out: dict[str, list[float]], samples: int = BATCH) -> dict[str, float]:
    """Of a loop that says seconds and tokens of each step, those after the first few."""
    seconds, tokens = out["step_seconds"][SKIP + 1 :], out["tokens"][SKIP + 1 :]
    return {
        "step": statistics.fmean(seconds),
        "token": sum(seconds) / sum(tokens),
        "answer/length": sum(tokens) / len(tokens) / samples,
    }


# name -> threads of a rank, ranks
STRONG = {"one thread": (1, 1), "two threads": (2, 1), "two ranks": (1, 2)}


def strong(
    name: str,
    model: Path,
    cores: list[int],
    steps: int,
    seed: int,
    lr: float = 0.0,
    policy: str = "PASSIVE",
    rows: int = 64,
    heldout: int = 0,
    most: int = MOST,
    groups: int = GROUPS,
) -> dict[str, float]:
    """benchmarks/lib/strong_loop.py, as STRONG has `name`: on one core, or on two."""
    threads, ranks = STRONG[name]
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    argv = [*start, str(HERE / "strong_loop.py"), str(model), "sort"]
    argv += [f"--steps={steps}", f"--seed={seed}", f"--lr={lr}", f"--rows={rows}"]
    argv += [f"--threads={threads}", f"--heldout={heldout}", f"--most={most}", f"--groups={groups}"]
    said = output(argv, cores[: threads * ranks], threads, policy)
    out = json.loads(next(x for x in said.splitlines() if x.startswith("{")))
    ends = dict(zip(("heldout_start", "heldout_end"), out["heldout"], strict=False))
    return summary(out, groups * SIZE) | ends


# name -> settings of TRL's GRPO; which is the fastest is found before the rounds
TRL = {
    f"{rows} rows, {attention}, {cache} cache, {threads} thread{'s' * (threads > 1)}": {
        "rows": rows,
        "attention": attention,
        "cache": cache,
        "threads": threads,
    }
    for rows, attention, cache, threads in (
        (256, "sdpa", "dynamic", 2),
        (256, "sdpa", "dynamic", 1),
        (256, "sdpa", "static", 2),
        (64, "sdpa", "dynamic", 2),
        (32, "sdpa", "dynamic", 2),
        (256, "eager", "dynamic", 2),
        (256, "eager", "static", 2),
        (64, "eager", "dynamic", 2),
        (32, "eager", "dynamic", 2),
    )
}


def trl(
    name: str,
    python: str,
    model: Path,
    cores: list[int],
    steps: int,
    seed: int,
    policy: str = "PASSIVE",
    most: int = MOST,
    groups: int = GROUPS,
) -> dict[str, float]:
    """benchmarks/lib/trl_loop.py, as TRL has `name`; python: one that has the extra `bench`."""
    options: Any = TRL[name] | {"most": most, "groups": groups}
    options["rows"] = min(options["rows"], groups * SIZE)
    argv = [python, str(HERE / "trl_loop.py"), str(model), f"--steps={steps}", f"--seed={seed}"]
    argv += [f"--{option}={value}" for option, value in options.items()]
    said = output(argv, cores[: options["threads"]], options["threads"], policy)
    line = next(x for x in said.splitlines() if x.startswith('{"step_seconds'))
    return summary(json.loads(line), groups * SIZE)


def has_trl(python: str) -> bool:
    code = "import sys, importlib.util as u; sys.exit(u.find_spec('trl') is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0
