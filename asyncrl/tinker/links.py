"""Links from the server to its training and sampling processes, which it restarts on exit."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from asyncrl.contract.importing import end_with_parent, make_command
from asyncrl.contract.printable import LONGEST_LINE, describe_exit, escape_line
from asyncrl.records import process_log
from asyncrl.tinker.messages import Cancel, Request, Result
from asyncrl.tinker.workers.worker import LENGTH_BYTES


def log(text: str, *, traceback: bool = False) -> None:
    """Write a line to stderr and to logs/server.log (`server.serve`).

    traceback: add that of the exception that is being handled."""
    line = escape_line(text, LONGEST_LINE)
    logging.getLogger("asyncrl.tinker").warning("%s", line, exc_info=traceback)


@dataclass(eq=False)
class WorkerExited(Exception):
    """The process exited before it replied.

    crashed: not by a signal from outside, so one of the calls that it carried out was the cause.
    oldest: this call was the one that it carried out, unless it carries out several at once."""

    text: str
    crashed: bool = False
    oldest: bool = False


@dataclass(eq=False)
class WorkerLink:
    """The link to the process of one role. `generation` counts its starts."""

    role: str
    config_path: Path
    log: Path

    def __post_init__(self) -> None:
        self.generation = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting = dict[int, asyncio.Future[Result]]()
        self.take_number = itertools.count(1).__next__
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self.closed = False

    async def start(self) -> None:
        """Start the process unless it runs."""
        async with self._starting:
            if self._writer is not None or self.closed:
                return
            own_end, worker_end = socket.socketpair()
            descriptor = worker_end.fileno()
            argv = make_command(
                "asyncrl.tinker.workers.worker", self.role, str(self.config_path), str(descriptor)
            )
            with worker_end, self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    argv,
                    pass_fds=[descriptor],
                    stdin=subprocess.DEVNULL,
                    stderr=log,
                    preexec_fn=end_with_parent(),
                )
            reader, self._writer = await asyncio.open_connection(sock=own_end)
            self.generation += 1
            self._append_event("began")
            self._reader = asyncio.create_task(self._read(reader))

    def _append_event(self, event: str, **fields: object) -> None:
        """Append a row to the process log, which `asyncrl doctor` and `watch` read."""
        assert self.process is not None
        folder = self.config_path.parent
        process_log.append_event(
            folder, self.role, self.process.pid, event, supervised=True, **fields
        )

    async def call(self, request: Request, number: int | None = None) -> Result:
        """Send a call and return its result.

        number: from `take_number`, for a call that may be canceled.  Raises WorkerExited."""
        await self.start()
        if self._writer is None:
            raise WorkerExited(f"the {self.role} process has ended")
        number = self.take_number() if number is None else number
        waiting = self._waiting[number] = asyncio.Future()
        self._writer.write(pickle.dumps((number, request)))
        try:
            result: Result = await waiting
        finally:
            self._waiting.pop(number, None)
        return result

    def cancel(self, number: int) -> None:
        """Cancel a call to the sampling process."""
        if self._writer is not None and number in self._waiting:
            self._writer.write(pickle.dumps((self.take_number(), Cancel(number))))
            self._waiting[number].cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                number, result = pickle.loads(await reader.readexactly(length))
                waiting = self._waiting.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(result)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        assert self.process is not None and self._writer is not None
        self._writer.close()
        self._writer = None
        code = self.process.wait()
        self._append_event("ended", code=process_log.INTERRUPTED if self.closed else code)
        if not self.closed:
            log(f"the {self.role} process ended ({describe_exit(code)}); see {self.log}")
        text = f"the {self.role} process ended ({describe_exit(code)})"
        crashed = -code not in (signal.SIGKILL, signal.SIGTERM)
        unfinished = [call for _, call in sorted(self._waiting.items()) if not call.done()]
        for index, call in enumerate(unfinished):
            call.set_exception(WorkerExited(text, crashed=crashed, oldest=index == 0))

    async def close(self) -> None:
        """End the process."""
        self.closed = True
        if self.process is not None and self._writer is not None:
            self.process.terminate()
            self._writer.close()
            if self._reader is not None:
                await self._reader
