"""Remove a run's sockets and shared memory when its supervisor was killed.

The supervisor starts `python -m asyncrl.supervise.cleanup RUN_DIR` with a pipe as stdin.  The
kernel kills the children of a killed supervisor, but sockets and shared memory would remain.  This
process detects that the pipe was closed, waits until the run directory's lock is free, and removes
them.  It also exits after a run without errors."""

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
        # a signal from the terminal must not end this process before it has cleaned up
        signal.signal(number, signal.SIG_IGN)
    outside = rundir.list_outside_directories(run_dir)
    sys.stdin.buffer.read()
    # the kernel needs a moment to free the supervisor's lock and to kill the children
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
    # another supervisor has already resumed the run and will clean up


if __name__ == "__main__":
    main(Path(sys.argv[1]))
