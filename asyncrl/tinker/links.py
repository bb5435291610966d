"""Links from the server to its training and sampling processes, which it restarts on exit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.contract.importing import end_with_parent, make_command
from asyncrl.contract.printable import LONGEST_LINE, describe_exit, escape_line
from asyncrl.records import process_log
from asyncrl.tinker.messages import (
    LENGTH_BYTES,
    CallFailure,
    ErrorCategory,
    decode_frame,
    encode_frame,
)


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
    category: ErrorCategory = "server"


@dataclass(eq=False)
class WorkerLink:
    """The link to the process of one role.

    role: training or sampling, one of `worker.ROLES`.
    config_path: the server's config, which the process reads.
    log: the file of its standard error.
    generation: the number of its starts.

    Calls go to its standard input one after the other. A reply names its call by number, so the
    sampling process may reply in another order."""

    role: str
    config_path: Path
    log: Path

    def __post_init__(self) -> None:
        self.generation = 0
        self.process: asyncio.subprocess.Process | None = None
        self._waiting = dict[int, asyncio.Future[Any]]()
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self.closed = False

    async def start(self) -> None:
        """Start the process unless it runs."""
        async with self._starting:
            if self.process is not None or self.closed:
                return
            argv = make_command("asyncrl.tinker.workers.worker", self.role, str(self.config_path))
            with self.log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    preexec_fn=end_with_parent(),
                )
            self.generation += 1
            self._append_event(self.process, "began")
            self._reader = asyncio.create_task(self._read(self.process))

    def _append_event(
        self, process: asyncio.subprocess.Process, event: str, **fields: object
    ) -> None:
        """Append a row to the process log, which `asyncrl doctor` and `watch` read."""
        folder = self.config_path.parent
        process_log.append_event(folder, self.role, process.pid, event, supervised=True, **fields)

    def _send(self, *call: Any) -> None:
        if self.process is None or self.process.stdin is None:
            raise WorkerExited(f"the {self.role} process has ended")
        self.process.stdin.write(encode_frame(*call))

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method in the process, which is started if need be, and return its result.

        A canceled call is canceled in the process, too. Raises CallFailure if the method failed,
        and WorkerExited if the process ended before its reply."""
        await self.start()
        number = next(self._numbers)
        self._send(number, method, arguments, options)
        waiting = self._waiting[number] = asyncio.Future()
        try:
            result = await waiting
        except asyncio.CancelledError:
            if self.process is not None and not self.closed:
                self._send(number, "cancel", (), {})
            raise
        finally:
            self._waiting.pop(number, None)
        if isinstance(result, CallFailure):
            raise result
        return result

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while True:
                length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES))
                number, result = decode_frame(await process.stdout.readexactly(length))
                waiting = self._waiting.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(result)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        code = await process.wait()
        self.process = None
        self._append_event(process, "ended", code=process_log.INTERRUPTED if self.closed else code)
        text = f"the {self.role} process ended ({describe_exit(code)})"
        if not self.closed:
            log(f"{text}; see {self.log}")
        crashed = -code not in (signal.SIGKILL, signal.SIGTERM)
        unfinished = [call for _, call in sorted(self._waiting.items()) if not call.done()]
        for index, call in enumerate(unfinished):
            call.set_exception(WorkerExited(text, crashed=crashed, oldest=index == 0))

    async def close(self) -> None:
        """End the process."""
        self.closed = True
        if self.process is not None and self._reader is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            await self._reader
