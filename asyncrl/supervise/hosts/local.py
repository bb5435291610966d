"""Processes on this machine: each has its own session and is killed when its parent exits."""

from __future__ import annotations

import os
import signal
import subprocess

from asyncrl.contract import refusal
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.parent import end_with_parent
from asyncrl.supervise.hosts import ProcessSpec, read_last_lines


class LocalProcess:
    """A child of this process."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._pipe, child_end = os.pipe()  # the child reports its refusal here
        env = os.environ | {
            "OMP_NUM_THREADS": str(spec.threads),
            "ASYNCRL_SUPERVISED": "1",
            "PYTHONUNBUFFERED": "1",
            refusal.VARIABLE: str(child_end),
        }
        try:
            with spec.log.open("ab") as log:
                self.popen = subprocess.Popen(
                    spec.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                    pass_fds=[child_end],
                    preexec_fn=end_with_parent(),
                )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(child_end)
        self.pid = self.popen.pid

    def poll(self) -> int | None:
        return self.popen.poll()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def read_refusal(self) -> AsyncrlError | None:
        return refusal.read_refusal(self._pipe) if self._pipe >= 0 else None

    def tail(self, lines: int) -> list[str]:
        return read_last_lines(self.spec.log, lines)

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


class LocalLauncher:
    """The launcher for this machine."""

    def prepare(self) -> None:
        """Do nothing: this machine needs no preparation."""

    def start(self, spec: ProcessSpec) -> LocalProcess:
        return LocalProcess(spec)

    def count_slots(self) -> int | None:
        return None

    def close(self) -> None:
        """Do nothing: the kernel kills the children when this process exits."""
