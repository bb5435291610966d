"""Run the agents of sessions: `python -m actors.gateway.agents.agent_process FD PARENT`.

All sessions of this process are tasks of one event loop, so that a client made in the agent's
module serves all of them.

- A coroutine function (agent.function), or an environment, is awaited.  To stop a session, its task
  is cancelled.
- A plain function runs in a thread for each session, because it mostly waits for the model.  It
  cannot be stopped, and the gateway kills this process if it does not end.
- A program (agent.command) runs in its own process group.  When it or this process ends, all its
  descendants are killed, also those that left the group.  A running program adopts its orphaned
  descendants (PR_SET_CHILD_SUBREAPER), and when it ends they become children of this process.  So
  any child of this process that is not a running program belongs to a session that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fnmatch
import inspect
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from actors.gateway.agents.session_messages import (
    NO_REWARD,
    AgentLog,
    AgentSetup,
    SessionAccess,
    SessionOrders,
    SessionResult,
    parse_outcome,
)
from actors.gateway.hubs import self_playing
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import import_function
from asyncrl.contract.messages import Prompt
from asyncrl.contract.printable import describe_exception, get_first_line
from asyncrl.transport import worker_pool
from asyncrl.transport.worker_pool import FRAME_BYTES, frame

Function = Callable[[Prompt, SessionAccess], Any]

MOST_THREADS = 1024  # for blocking calls of coroutines (asyncio.to_thread)
END_S = 1.0  # for the sessions that are open when the gateway ends


# ---- programs ------------------------------------------------------------------------------------

KEPT_BYTES = 64 << 10  # the last bytes of each of a program's two streams
POLITE_S = 5.0  # from SIGTERM to SIGKILL
CHUNK = 1 << 16
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Patterns of the variables that a program inherits.  Others, such as API keys, need agent.env_pass.
BASE_ENVIRONMENT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("TMPDIR", "TEMP", "TMP", "XDG_*_HOME", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "NODE_PATH", "NVM_DIR"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
# The variables from which clients read the name of a model.
MODEL_VARIABLES = (
    "ASYNCRL_MODEL",
    "OPENAI_MODEL",
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
)

_libc = ctypes.CDLL(None)


def select_inherited(patterns: Sequence[str]) -> dict[str, str]:
    """Select the variables of this process that match BASE_ENVIRONMENT or `patterns`."""
    allowed = (*BASE_ENVIRONMENT, *patterns)
    return {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)
    }


def judge_exit(
    number: int, code: int, stdout: bytes, stderr: bytes, reward_file: bytes
) -> SessionResult:
    """Read the result of a program that ended by itself.

    code: its exit code, or minus the number of a signal
    stdout, stderr: the last bytes that it printed
    reward_file: the content of $ASYNCRL_REWARD
    """
    lines = [
        line.strip() for line in stdout.decode("utf-8", "replace").splitlines() if line.strip()
    ]
    if code:
        ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        lines = stderr.decode("utf-8", "replace").splitlines() or lines
        reason = next((line for line in reversed(lines) if line.strip()), "")
        reason = get_first_line(f"{ending}: {reason}" if reason else ending)
        return SessionResult(number, "failed", why=reason)
    text = reward_file.decode("utf-8", "replace").strip() or (lines[-1] if lines else "")
    if not text:
        reason = f"{NO_REWARD}: print it as the last line, or write it to the file $ASYNCRL_REWARD"
        return SessionResult(number, "failed", why=reason)
    try:
        value = json.loads(text)
    except ValueError:
        reason = f"gave an invalid reward, not a number or JSON: {get_first_line(text)!r:.100}"
        return SessionResult(number, "failed", why=reason)
    return parse_outcome(number, value)


def _prepare_child() -> None:
    """Prepare the new process, before it runs the program.

    It is killed with this process, handles Ctrl-C by default and adopts its orphaned descendants.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_strays(running: set[int]) -> None:
    """Kill and reap all children of this process that are not running programs.

    Their descendants become children of this process when they are orphaned, and follow.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    reaped = True
    while reaped:
        reaped = False
        for pid in set(map(int, children.read_text(encoding="utf-8").split())) - running:
            with contextlib.suppress(OSError):  # EPERM: it runs as another user now
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                reaped = True


class AgentPrograms:
    """The programs of this process; `play` is their agent function.

    running: process ids
    """

    def __init__(self, agent: AgentConfig, log: AgentLog) -> None:
        self.agent = agent
        self.log = log
        self.running: set[int] = set()
        # no signal when the gateway ends: the socket closes then, and the programs must end first
        _libc.prctl(PR_SET_PDEATHSIG, 0)
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)

    async def play(self, _: Prompt, seat: SessionAccess) -> SessionResult:
        """Run a session's program in a temporary folder, log its output and judge its end.

        When the task is cancelled, the program gets SIGTERM, and SIGKILL after POLITE_S or when the
        task is cancelled again.
        """
        began, stopped = time.monotonic(), False
        with tempfile.TemporaryDirectory(
            prefix="asyncrl-agent-", ignore_cleanup_errors=True
        ) as name:
            folder = Path(name)
            try:
                process = self._start(folder, seat)
            except OSError as error:
                reason = f"cannot be started: {error.strerror or error}"
                return SessionResult(seat.number, "failed", why=reason)
            self.running.add(process.pid)
            output = ProgramOutput(process)
            try:
                await output.ended.wait()
            except asyncio.CancelledError:
                stopped = True
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                    await asyncio.wait_for(output.ended.wait(), POLITE_S)
            os.killpg(process.pid, signal.SIGKILL)  # the group's id is valid until `wait`
            code = process.wait()
            self.running.remove(process.pid)
            end_strays(self.running)
            stdout, stderr = output.close()
            reward_file = b""
            if (path := folder / "reward").is_file():
                with path.open("rb") as file:
                    reward_file = file.read(KEPT_BYTES)
        result = judge_exit(seat.number, code, stdout, stderr, reward_file)
        if stopped:
            reason = "was stopped because its session was over"
            result = SessionResult(seat.number, "failed", why=reason)
        outcome = f"scored {result.reward:g}" if result.kind == "scored" else result.why or "judge"
        head = f"session {seat.name} {time.monotonic() - began:.1f} s: {outcome}"
        self.log.write(head, stdout, stderr)
        return result

    def _start(self, folder: Path, seat: SessionAccess) -> subprocess.Popen[bytes]:
        task = folder / "task.json"
        sample = seat.prompt.describe_task() | {
            "session": seat.name,
            "seed": seat.seed,
            "attempt": seat.attempt,
            "first": seat.first,
            "deadline_s": seat.deadline_s,
            "model": seat.model,
        }
        task.write_text(json.dumps(sample), encoding="utf-8")
        with task.open("rb") as stdin:
            return subprocess.Popen(
                self.agent.command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=select_inherited(self.agent.env_pass)
                | {
                    "OPENAI_BASE_URL": seat.base_url,
                    "OPENAI_API_KEY": seat.api_key,
                    "ANTHROPIC_BASE_URL": seat.url,
                    "ANTHROPIC_API_KEY": seat.api_key,
                    "ASYNCRL_URL": seat.url,
                    **dict.fromkeys(MODEL_VARIABLES, seat.model),
                    "ASYNCRL_TASK": str(task),
                    "ASYNCRL_REWARD": str(folder / "reward"),
                    "ASYNCRL_SESSION": seat.name,
                },
                start_new_session=True,
                preexec_fn=_prepare_child,  # no other thread is in this process
            )


class ProgramOutput:
    """The last bytes that a program prints on its two streams, and its end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.pidfd = os.pidfd_open(process.pid)
        self.loop.add_reader(self.pidfd, self.ended.set)
        self.streams = (process.stdout, process.stderr)
        self.printed: dict[int, bytearray] = {}  # by descriptor
        for stream in self.streams:
            assert stream is not None
            self.printed[stream.fileno()] = bytearray()
            os.set_blocking(stream.fileno(), False)
            self.loop.add_reader(stream.fileno(), self.read, stream.fileno())

    def read(self, descriptor: int) -> None:
        """Read what has arrived on one stream, which a running program may also close."""
        output = self.printed[descriptor]
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, CHUNK):
                output += data
                del output[:-KEPT_BYTES]
            self.loop.remove_reader(descriptor)

    def close(self) -> list[bytes]:
        """Read the rest, close the streams and return the last bytes of each."""
        self.loop.remove_reader(self.pidfd)
        os.close(self.pidfd)
        for descriptor in self.printed:
            self.read(descriptor)
            self.loop.remove_reader(descriptor)
        for stream in self.streams:
            if stream is not None:
                stream.close()
        return list(map(bytes, self.printed.values()))


# ---- sessions ------------------------------------------------------------------------------------


async def call(function: Function, seat: SessionAccess) -> Any:
    """Call an agent function, which may return an awaitable; a plain one in a thread."""
    if inspect.iscoroutinefunction(function):
        return function(seat.prompt, seat)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def run() -> None:
        value, error = None, None
        try:
            value = function(seat.prompt, seat)
        except BaseException as raised:
            error = raised
        loop.call_soon_threadsafe(ended.set_result, (value, error))

    threading.Thread(target=run, name=seat.name, daemon=True).start()
    value, error = await ended
    if error is not None:
        raise error
    return value


class SessionRunner:
    """The sessions of this process, each run in a task and reported to the gateway."""

    def __init__(self, function: Function, log: AgentLog) -> None:
        self.function = function
        self.log = log
        self.tasks: dict[int, asyncio.Task[None]] = {}  # number of the session -> task
        self.stoppable: set[int] = set()  # not those in a thread
        self.over = False

    async def run(self, wire: socket.socket) -> None:
        """Begin and stop sessions as the gateway orders, until it closes the socket."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_THREADS, "agent"))
        reader, self.writer = await asyncio.open_unix_connection(sock=wire, limit=FRAME_BYTES)
        while (orders := await worker_pool.receive(reader, SessionOrders)) is not None:
            for seat in orders.seats:
                self.tasks[seat.number] = asyncio.create_task(self.play(seat))
            for number in self.stoppable.intersection(orders.stop):
                self.stoppable.remove(number)
                self.tasks[number].cancel()
        self.over = True
        for _ in range(2):  # a program that is cancelled again is killed
            for task in self.tasks.values():
                task.cancel()
            await asyncio.sleep(0)
        if self.tasks:
            await asyncio.wait(self.tasks.values(), timeout=END_S)

    async def play(self, seat: SessionAccess) -> None:
        """Play a session; any exception of the function fails only this session."""
        began = time.monotonic()
        try:
            value = await call(self.function, seat)
            if inspect.isawaitable(value):
                self.stoppable.add(seat.number)
                value = await value
            is_result = isinstance(value, SessionResult)
            result = value if is_result else parse_outcome(seat.number, value)
        except BaseException as error:  # SystemExit raised here would end the loop
            reason = describe_exception(error)
            result = SessionResult(seat.number, "failed", why=reason)
            if not self.over:
                head = f"session {seat.name} {reason} after {time.monotonic() - began:.1f} s"
                trace = "".join(traceback.format_exception(error))
                self.log.write(head, trace.encode("utf-8", "replace"))
        self.stoppable.discard(seat.number)
        del self.tasks[seat.number]
        if not self.over:
            self.writer.write(frame(msgspec.msgpack.encode(result)))


def serve(wire: socket.socket) -> None:
    """Run sessions until the other side closes the socket."""
    size = int.from_bytes(wire.recv(4, socket.MSG_WAITALL), "big")
    if not (payload := wire.recv(size, socket.MSG_WAITALL)):  # and none of the orders behind it
        return
    setup = msgspec.msgpack.decode(payload, type=AgentSetup)
    agent, log = setup.agent, AgentLog(Path(setup.log))
    function: Function
    try:
        if agent.command:
            function = AgentPrograms(agent, log).play
        elif agent.env:
            function = self_playing.load(agent.env, agent.args).play
        else:
            function = import_function(agent.function, "agent.function")
    except ConfigError as error:
        wire.sendall(frame(msgspec.msgpack.encode(SessionResult(-1, "broken", why=str(error)))))
        return
    wire.sendall(frame(msgspec.msgpack.encode(SessionResult(-1, "ready"))))
    loop = asyncio.new_event_loop()
    main = loop.create_task(SessionRunner(function, log).run(wire))
    while not main.done():
        # SystemExit in a task of an agent ends the loop; the awaiting code gets it as well
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(main)


if __name__ == "__main__":
    worker_pool.run(serve)
