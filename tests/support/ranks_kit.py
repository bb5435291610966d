"""Ranks of a learner for tests: as torchrun or rank 0 starts them, or side by side."""

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from process_kit import ENV, ROOT

# no rank is taken for lost because others have the cores
PATIENT_S = 1800.0
LEARNER = {
    **{"lr": 0.003, "steps": 100, "groups": 6, "group_size": 3, "micro_batch_tokens": 60},
    **{"rank_timeout_s": PATIENT_S},
}
PATHS = ENV | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(job: dict[str, Any], launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    argv = [sys.executable, *launcher, "tests/support/ranks_program.py", json.dumps(job)]
    return subprocess.Popen(
        argv, cwd=ROOT, env=PATHS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


FORKED = ("forked",)


def forked(job: dict[str, Any]) -> tuple[int, str, str]:
    """(exit code, what rank 0 printed, what all said) of ranks that meet as a launcher's do.

    When one fails the others are killed."""
    from learner.distributed.ranks import reserve_port

    ranks = job["config"]["learner"].get("ranks", 1)
    argv = [sys.executable, "tests/support/ranks_program.py", json.dumps(job)]
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        reserve_port() as meet,
    ):
        port = str(meet.getsockname()[1])
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        live = []
        for number in map(str, range(ranks)):
            env = ENV | PATHS | world | {"RANK": number, "LOCAL_RANK": number}
            stdout = subprocess.DEVNULL if live else out
            live.append(subprocess.Popen(argv, cwd=ROOT, env=env, stdout=stdout, stderr=err))
        code = 0
        while live:
            for ended in [process for process in live if process.poll() is not None]:
                live.remove(ended)
                code = code or ended.returncode
            for other in live if code else []:
                other.kill()
            time.sleep(0.01)
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


@functools.cache
def forked_once(job: str) -> tuple[int, str, str]:
    """`forked`; a job that was done, as the plain one of several backends, is not done again."""
    return forked(json.loads(job))


def trained(
    model: Path, learner: dict[str, Any], batches: int = 20, **more: Any
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """(what rank 0 printed, rank -> what the others printed)."""
    sections, launcher = more.pop("sections", {}), more.pop("launcher", FORKED)
    job = {"model": str(model), "batches": batches, **more}
    job["config"] = {"learner": LEARNER | learner, **sections}
    if launcher == FORKED:
        code, out, err = forked_once(json.dumps(job))
    else:
        p = start(job, launcher)
        out, err = p.communicate(timeout=7200)
        code = p.returncode
    assert code == 0, err[-4000:]
    rows = [json.loads(x) for x in err.splitlines() if x.startswith('{"rank"')]
    return json.loads(out.strip().splitlines()[-1]), {r["rank"]: r for r in rows}
