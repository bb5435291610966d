"""Remove a run's sockets and shared memory when its supervisor was killed.

The supervisor starts `python -m asyncrl.supervise.cleanup RUN_DIR` with a pipe as stdin.  The
kernel ends the children of a killed supervisor, but sockets and shared memory would stay.  This
process sees the pipe close, waits until the run directory's lock is free, and removes them.  It
ends by itself, also after a run without errors."""

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
        # a signal from the terminal must not end it before it has cleaned up
        signal.signal(number, signal.SIG_IGN)
    outside = rundir.outside_directories(run_dir)
    sys.stdin.buffer.read()
    # the kernel takes a moment to free the supervisor's lock and to end the children
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
    # another supervisor has resumed the run already and will clean up after it


if __name__ == "__main__":
    main(Path(sys.argv[1]))
