"""Processes on this machine: each has its own session and is killed when its parent exits."""

from __future__ import annotations

import os
import signal
import subprocess

from asyncrl.contract import refusal
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.parent import die_with_parent
from asyncrl.supervise.hosts import ProcessSpec, last_lines


class LocalProcess:
    """A child of this process."""

    def __init__(self, order: ProcessSpec) -> None:
        self.order = order
        self._pipe, theirs = os.pipe()  # the child reports its refusal here
        env = os.environ | {
            "OMP_NUM_THREADS": str(order.threads),
            "ASYNCRL_SUPERVISED": "1",
            "PYTHONUNBUFFERED": "1",
            refusal.VARIABLE: str(theirs),
        }
        try:
            with order.log.open("ab") as log:
                self.popen = subprocess.Popen(
                    order.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                    pass_fds=[theirs],
                    preexec_fn=die_with_parent(),
                )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(theirs)
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
        return last_lines(self.order.log, lines)

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


class LocalLauncher:
    """The launcher for this machine."""

    def prepare(self) -> None:
        """Do nothing: this machine needs no preparation."""

    def start(self, order: ProcessSpec) -> LocalProcess:
        return LocalProcess(order)

    def free_slots(self) -> int | None:
        return None

    def close(self) -> None:
        """Do nothing: the kernel kills the children when this process exits."""
