"""`benchmarks/gpu_check.py` whose parts are forks of a process that has imported what they need:
each still has its own process group, files and end, and saves the imports.

    python tests/support/forked_gpu_check.py [the words of gpu_check.py]"""

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_check
from lib import gpu_parts

PLAIN = subprocess.Popen


class ForkedPart(subprocess.Popen):
    def _execute_child(self, args: Any, *rest: Any) -> None:
        if list(args)[1:2] != [gpu_check.__file__]:
            super()._execute_child(args, *rest)
            return
        stdin, _, _, stdout, _, stderr = files = rest[9:15]
        self.pid = os.fork()
        if self.pid == 0:
            run_part([*args], stdin, stdout, stderr)
        self._child_created = True
        self._close_pipe_fds(*files)


def run_part(command: list[str], *streams: int) -> None:
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        subprocess.Popen = PLAIN
        sys.argv = command[1:]
        code = gpu_check.main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    assert gpu_parts.CHECKS.keys() == gpu_check.PARTS.keys()
    subprocess.Popen = ForkedPart
    sys.exit(gpu_check.main())
