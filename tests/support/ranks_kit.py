"""Ranks of a learner for tests: started for real, or forked from a process that has everything
imported.
"""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from process_kit import ENV, ROOT
from warm_python import SERVERS

# no rank is taken for lost because others have the cores
PATIENT_S = 1800.0
LEARNER = {
    "lr": 0.003,
    "steps": 100,
    "groups": 6,
    "group_size": 3,
    "micro_batch_tokens": 60,
    "rank_timeout_s": PATIENT_S,
}
PATHS = ENV | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(job: dict[str, Any], launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    argv = [sys.executable, *launcher, "tests/support/ranks_program.py", json.dumps(job)]
    return subprocess.Popen(
        argv, cwd=ROOT, env=PATHS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


FORKED = ("forked",)


@functools.cache
def forge() -> subprocess.Popen[str]:
    """The process that forks ranks (forked_ranks.py), one for all tests of a worker."""
    argv, env = [sys.executable, "tests/support/forked_ranks.py"], PATHS
    process = subprocess.Popen(
        argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    SERVERS.append(process)
    atexit.register(process.stdin.close)  # type: ignore[union-attr]
    return process


def forked(job: dict[str, Any]) -> tuple[int, str, str]:
    env = {key: value for key, value in ENV.items() if PATHS.get(key) != value}
    order = {"job": job, "ranks": job["config"]["learner"].get("ranks", 1), "env": env}
    process = forge()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(order) + "\n")
    line = process.stdout.readline()
    assert line, "the process that forks ranks has ended"
    answer = json.loads(line)
    return answer["code"], answer["out"], answer["err"]


def trained(
    model: Path, learner: dict[str, Any], batches: int = 20, **more: Any
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """(what rank 0 printed, rank -> what the others printed)."""
    sections, launcher = more.pop("sections", {}), more.pop("launcher", FORKED)
    job = {
        "model": str(model),
        "batches": batches,
        "config": {"learner": LEARNER | learner, **sections},
        **more,
    }
    if launcher == FORKED:
        code, out, err = forked(job)
    else:
        p = start(job, launcher)
        out, err = p.communicate(timeout=7200)
        code = p.returncode
    assert code == 0, err[-4000:]
    rows = [json.loads(x) for x in err.splitlines() if x.startswith('{"rank"')]
    return json.loads(out.strip().splitlines()[-1]), {r["rank"]: r for r in rows}
