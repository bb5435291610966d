"""Run the processes of a run as forks of one process that has imported everything.

The product's supervisor and generators start their processes with `subprocess.Popen`, and get a
fork that carries out the command line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lib.chaos.board import LIVES, PID, ROLES, Board, Notes

# role, what is left to run in it -> what a process of it is made of
Life = Callable[[str], None]


# processes of generators and gateways, which a socket connects with them
CHILDREN = {"actors.reward_worker": "reward", "actors.gateway.environment_worker": "environment"}


def role_of(argv: Sequence[str]) -> str:
    """The role of a command line of `importing.make_command`."""
    module, *rest = argv[argv.index("asyncrl.supervise.start") + 1 :]
    if module in CHILDREN:
        return CHILDREN[module]
    if module != "asyncrl.cli":
        return module
    if rest[0] in ("generator", "gateway"):
        return f"{rest[0]}-{rest[rest.index('--index') + 1]}"
    return rest[0]


def begin(board: Board, role: str) -> None:
    """Register a new process on the board, and give it its clocks."""
    board.put(role, PID, os.getpid())
    board.count(role, LIVES)
    board.own_clocks(role)


def fork(body: Callable[[], Any]) -> int:
    """Fork a child that runs `body` and exits with its code; returns the child's pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        code = body()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


class Forked:
    """The part of `subprocess.Popen` that the product uses."""

    def __init__(self, make: Callable[[Forked], Any], argv: Sequence[str], **said: Any) -> None:
        self.argv = argv
        self.said = said
        self.returncode: int | None = None
        self.stdin: Any = None
        theirs = -1
        if said.get("stdin") == subprocess.PIPE:
            theirs, ours = os.pipe()
            self.stdin = os.fdopen(ours, "wb")
        kept = [*said.get("pass_fds", ()), *([theirs] if theirs >= 0 else [])]

        def body() -> Any:
            self._become(kept, theirs)
            return make(self)

        self.pid = fork(body)
        if theirs >= 0:
            os.close(theirs)

    def _become(self, kept: Sequence[int], theirs: int) -> None:
        """Do what Popen does between fork and exec."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if self.said.get("start_new_session"):
            os.setsid()
        log = self.said.get("stdout")
        if log is not None:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.dup2(theirs if theirs >= 0 else os.open(os.devnull, os.O_RDONLY), 0)
        last = 2
        for fd in sorted(kept):
            os.closerange(last + 1, fd)
            last = fd
        os.closerange(last + 1, 4096)
        if preexec := self.said.get("preexec_fn"):
            preexec()
        if env := self.said.get("env"):
            os.environ.clear()
            os.environ.update(env)

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.perf_counter() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.perf_counter() > until:
                raise subprocess.TimeoutExpired(list(self.argv), timeout or 0.0)
            time.sleep(0.001)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[None, None]:
        if self.stdin is not None:
            self.stdin.close()
        self.wait()
        return None, None


def instead(make: Callable[[Forked], Any]) -> Any:
    """Stands where a module of the product has imported `subprocess`."""

    def start(argv: Sequence[str], **said: Any) -> Forked:
        return Forked(make, argv, **said)

    return SimpleNamespace(
        Popen=start,
        PIPE=subprocess.PIPE,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )


def install(board: Board, notes: Path, config: Any, hook: Callable[[str], None]) -> None:
    """In the supervisor's process, before it starts anything.  config: the run's, read once; hook:
    what is done to a role's code in its own process."""
    from actors import reward_worker
    from actors.gateway import environment_worker
    from asyncrl.cli import main
    from asyncrl.config import load
    from asyncrl.supervise import cleanup, hosts
    from asyncrl.supervise import run as supervised
    from asyncrl.transport import worker_pool

    load.load = lambda *_: config
    mine = "supervisor"

    def make(forked: Forked) -> Any:
        nonlocal mine
        argv = list(forked.argv)
        role = role_of(argv)
        if role == "asyncrl.supervise.cleanup":
            return cleanup.main(Path(argv[-1]))
        if role == "environment":
            return worker_pool.run(environment_worker.serve, argv[-2:])
        if role == "reward":
            role = f"reward-{mine.partition('-')[2]}"
            if role in ROLES:  # a third generator's is not
                begin(board, role)
                hook(role)
            return worker_pool.run(reward_worker.serve, argv[-2:])
        mine = role
        begin(board, role)
        hook(role)
        code: Any = 0
        try:
            main(argv[argv.index("asyncrl.cli") + 1 :])
        except SystemExit as end:
            code = end.code
        if not code:
            Notes(notes / "ended.jsonl").add({"role": role, "pid": os.getpid()})
        return code

    for module in (hosts, supervised, worker_pool):
        module.subprocess = instead(make)  # type: ignore[attr-defined]
