"""The learner's ranks without their start-up: a program that has everything imported and forks
the ranks of each job it is told of, which meet as a launcher's do.

    python tests/support/forked_ranks.py       one JSON object a line in, one out

    {"job": JOB of ranks_program.py, "ranks": 2, "env": {"TORCH_EXTENSIONS_DIR": "..."}}
    {"code": 0, "out": "what rank 0 printed", "err": "what all said"}"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from warm_python import LOADED


def rank(number: int, order: dict[str, Any], port: int, out: int, err: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.update(order["env"])
        os.environ.update(
            {
                "WORLD_SIZE": str(order["ranks"]),
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        )
        import ranks_program

        sys.argv = ["ranks_program.py", json.dumps(order["job"])]
        ranks_program.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Every rank to its end; when one fails the others are killed."""
    from learner.distributed import ranks

    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as nothing,
        tempfile.TemporaryFile("w+") as err,
        ranks.reserve_port() as meet,
    ):
        port = meet.getsockname()[1]
        live = {
            rank(number, order, port, (nothing if number else out).fileno(), err.fileno())
            for number in range(order["ranks"])
        }
        code = 0
        while live:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                time.sleep(0.01)
                continue
            live.discard(pid)
            if ended := os.waitstatus_to_exitcode(status):
                code = code or ended
                for other in live:
                    os.kill(other, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        return {"code": code, "out": out.read(), "err": err.read()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in ("ranks_program", *LOADED.split()):
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread does not survive a fork"
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
