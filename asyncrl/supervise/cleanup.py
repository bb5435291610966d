"""What is left to do when the supervisor was killed: `python -m asyncrl.supervise.cleanup RUN_DIR`,
with a pipe from it as stdin.

The kernel ends the children of a killed supervisor; sockets and shared memory would stay.  This
process sees its pipe close, waits until the run directory's lock is free, and removes them.  Ends
by itself, also after a run that ended well."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from asyncrl.contract.errors import ConfigError
from asyncrl.records import rundir

WAIT_S = 0.2
TRIES = 10


def main(run_dir: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        # it outlives the supervisor by a moment, whatever the terminal sends
        signal.signal(number, signal.SIG_IGN)
    outside = rundir.outside_directories(run_dir)
    sys.stdin.buffer.read()
    # the kernel frees the supervisor's lock, and ends the children, in its own time
    for _ in range(TRIES):
        time.sleep(WAIT_S)
        try:
            lock = rundir.RunLock(run_dir)
        except ConfigError:
            continue
        except FileNotFoundError:  # the directory itself was removed
            return rundir.remove(outside)
        rundir.remove(outside)
        return lock.close()
    # somebody goes on with the run already, and will clean up after it


if __name__ == "__main__":
    main(Path(sys.argv[1]))
