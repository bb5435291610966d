"""Run agent.command: `python -m actors.gateway.agents.agent_programs FD PARENT`.

Each session is a program in its own process group.  When the program or this process ends, all
descendants are killed, also those that left the group.  A running program adopts its orphaned
descendants (PR_SET_CHILD_SUBREAPER), and when it ends they become children of this process.  So any
child of this process that is not a running program belongs to a session that has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from actors.gateway.agents.session_messages import (
    NO_REWARD,
    AgentLog,
    AgentSetup,
    SessionAccess,
    SessionOrders,
    SessionResult,
    parse_outcome,
    send,
)
from asyncrl.contract.printable import get_first_line
from asyncrl.transport import worker_pool

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
    number: int, code: int, stdout: bytes, stderr: bytes, reward_file: bytes | None
) -> SessionResult:
    """Read the result of a program that ended by itself.

    code: its exit code, or minus the number of a signal
    stdout, stderr: the last bytes that it printed
    reward_file: the content of $ASYNCRL_REWARD, if it wrote that file
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
    text = reward_file.decode("utf-8", "replace").strip() if reward_file is not None else ""
    text = text or (lines[-1] if lines else "")
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


class AgentProgram:
    """A session's program: its process, output and temporary folder."""

    def __init__(self, seat: SessionAccess, setup: AgentSetup) -> None:
        self.seat = seat
        self.started_at = time.monotonic()
        self.kill_at = 0.0  # when SIGKILL follows SIGTERM; 0: no SIGTERM was sent
        self.folder = Path(tempfile.mkdtemp(prefix="asyncrl-agent-"))
        try:
            task = self.folder / "task.json"
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
                self.process = subprocess.Popen(
                    setup.agent.command,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=select_inherited(setup.agent.env_pass)
                    | {
                        "OPENAI_BASE_URL": seat.base_url,
                        "OPENAI_API_KEY": seat.api_key,
                        "ANTHROPIC_BASE_URL": seat.url,
                        "ANTHROPIC_API_KEY": seat.api_key,
                        "ASYNCRL_URL": seat.url,
                        **dict.fromkeys(MODEL_VARIABLES, seat.model),
                        "ASYNCRL_TASK": str(self.folder / "task.json"),
                        "ASYNCRL_REWARD": str(self.folder / "reward"),
                        "ASYNCRL_SESSION": seat.name,
                    },
                    start_new_session=True,
                    preexec_fn=_prepare_child,  # no other thread is in this process
                )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        assert self.process.stdout is not None and self.process.stderr is not None
        self.streams: tuple[IO[bytes], IO[bytes]] = (self.process.stdout, self.process.stderr)
        self.printed = (bytearray(), bytearray())
        for stream in self.streams:
            os.set_blocking(stream.fileno(), False)
        self.pidfd = os.pidfd_open(self.process.pid)

    def read(self, stream: IO[bytes]) -> bool:
        """Read the output on one stream; False at its end."""
        output = self.printed[self.streams.index(stream)]
        try:
            while data := os.read(stream.fileno(), CHUNK):
                output += data
                del output[:-KEPT_BYTES]
            return False
        except BlockingIOError:
            return True

    def signal(self, number: int) -> None:
        """Send a signal to the process group; its id is valid until `finish`."""
        os.killpg(self.process.pid, number)

    def finish(self, running: set[int]) -> SessionResult:
        """Kill the program with its descendants, remove its folder and return its result.

        running: process ids of the other programs
        """
        self.signal(signal.SIGKILL)
        code = self.process.wait()
        end_strays(running)
        for stream in self.streams:
            self.read(stream)
        stdout, stderr = map(bytes, self.printed)
        path = self.folder / "reward"
        reward_file = None
        if path.is_file():
            with path.open("rb") as file:
                reward_file = file.read(KEPT_BYTES)
        shutil.rmtree(self.folder, ignore_errors=True)
        for stream in self.streams:
            stream.close()
        os.close(self.pidfd)
        if self.kill_at:
            reason = "was stopped because its session was over"
            return SessionResult(self.seat.number, "failed", why=reason)
        return judge_exit(self.seat.number, code, stdout, stderr, reward_file)


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
    """The programs of this process, with the loop that waits for them."""

    def __init__(self, wire: socket.socket, setup: AgentSetup) -> None:
        self.wire = wire
        self.setup = setup
        self.log = AgentLog(Path(setup.log))
        self.running: dict[int, AgentProgram] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(wire, selectors.EVENT_READ)
        self.incoming = bytearray()

    @property
    def processes(self) -> set[int]:
        return {program.process.pid for program in self.running.values()}

    def start(self, seat: SessionAccess) -> None:
        """Start a session's program; one that cannot be started fails the session."""
        try:
            program = self.running[seat.number] = AgentProgram(seat, self.setup)
        except OSError as error:
            reason = f"cannot be started: {error.strerror or error}"
            send(self.wire, SessionResult(seat.number, "failed", why=reason))
            return
        for stream in program.streams:
            self.selector.register(stream, selectors.EVENT_READ, (program, stream))
        self.selector.register(program.pidfd, selectors.EVENT_READ, (program, None))

    def stop(self, number: int) -> None:
        """Send SIGTERM to a session's program; SIGKILL follows after POLITE_S."""
        program = self.running.get(number)
        if program is not None and not program.kill_at:
            program.kill_at = time.monotonic() + POLITE_S
            program.signal(signal.SIGTERM)

    def finish(self, program: AgentProgram) -> None:
        """End a program, log its output and send its result."""
        for source in (*program.streams, program.pidfd):
            with contextlib.suppress(KeyError):
                self.selector.unregister(source)
        del self.running[program.seat.number]
        result = program.finish(self.processes)
        outcome = result.why or result.kind
        if result.kind == "scored":
            outcome = f"scored {result.reward:g}"
        elapsed = time.monotonic() - program.started_at
        head = f"session {program.seat.name} {elapsed:.1f} s: {outcome}"
        self.log.write(head, *map(bytes, program.printed))
        send(self.wire, result)

    def step(self) -> bool:
        """Handle the events until the next deadline; False when the gateway has ended."""
        deadlines = [program.kill_at for program in self.running.values() if program.kill_at]
        wait = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        is_open = True
        for key, _ in self.selector.select(wait):
            if key.data is None:
                try:
                    data = self.wire.recv(CHUNK)
                except ConnectionResetError:  # the gateway ended with unread data
                    data = b""
                is_open = is_open and bool(data)  # the gateway has closed the socket
                self.incoming += data
                for payload in worker_pool.take_frames(self.incoming):
                    orders = msgspec.msgpack.decode(payload, type=SessionOrders)
                    for seat in orders.seats:
                        self.start(seat)
                    for number in orders.stop:
                        self.stop(number)
                continue
            program, stream = key.data
            if program.seat.number not in self.running:
                continue
            if stream is None:
                self.finish(program)
            elif not program.read(stream):  # closed, though the program may go on
                self.selector.unregister(stream)
        for program in list(self.running.values()):
            if program.kill_at and time.monotonic() >= program.kill_at:
                self.finish(program)
        return is_open

    def close(self) -> None:
        """End all programs."""
        while self.running:
            _, program = self.running.popitem()
            program.finish(self.processes)
        end_strays(set())


def serve(wire: socket.socket) -> None:
    """Run programs until the other side closes the socket, then end all of them."""
    # no signal when the gateway ends: the socket closes then, and the programs must end first
    _libc.prctl(PR_SET_PDEATHSIG, 0)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    size = int.from_bytes(wire.recv(4, socket.MSG_WAITALL), "big")
    if not (setup := wire.recv(size, socket.MSG_WAITALL)):
        return
    programs = AgentPrograms(wire, msgspec.msgpack.decode(setup, type=AgentSetup))
    send(wire, SessionResult(-1, "ready"))
    try:
        while programs.step():
            pass
    finally:
        programs.close()


if __name__ == "__main__":
    worker_pool.run(serve)
