"""Two network namespaces joined by a veth pair, and the processes in them.

They are made with `ip netns` (iproute2), as root.  `Pair.close` ends the processes and removes
the namespaces with their ends of the pair.  The next program removes what a killed one has left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

PREFIX = "asyncrl-"
END_S = 30.0


class NoNamespaces(Exception):
    """Network namespaces cannot be created on this machine, with the reason."""


def ip(*words: str) -> str:
    """Run `ip` and return its stdout.  Raises NoNamespaces with its error message."""
    if shutil.which("ip") is None:
        raise NoNamespaces("there is no program `ip`: install iproute2")
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        who = "" if os.geteuid() == 0 else " (this needs root)"
        raise NoNamespaces(f"`ip {' '.join(words)}` says: {done.stderr.strip()}{who}")
    return done.stdout


def ours() -> dict[str, int]:
    """Namespaces of programs of this kind -> the program's process."""
    names = [line.split()[0] for line in ip("netns", "list").splitlines() if line.strip()]
    parts = {name: name.removeprefix(PREFIX).partition("-")[0] for name in names}
    return {
        name: int(pid) for name, pid in parts.items() if name.startswith(PREFIX) and pid.isdecimal()
    }


def tidy() -> None:
    """Remove what killed programs have left; another program may be doing so at this moment."""
    for name, pid in ours().items():
        if Path(f"/proc/{pid}").exists():
            continue
        try:
            ip("netns", "del", name)
        except NoNamespaces:
            if name in ours():
                raise


class Pair:
    """A near namespace, where learner and buffer are at `near_host`, and a far one.

    Raises NoNamespaces; nothing is left then."""

    near_host = "10.213.0.1"
    far_host = "10.213.0.2"

    def __init__(self) -> None:
        tidy()
        self.near, self.far = (f"{PREFIX}{os.getpid()}-{side}" for side in ("near", "far"))
        self.processes: list[subprocess.Popen[str]] = []
        try:
            for name in (self.near, self.far):
                ip("netns", "add", name)
                # which is also whether a process can be started there
                ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
            peer = ["peer", "name", "veth0", "netns", self.far]
            ip("link", "add", "veth0", "netns", self.near, "type", "veth", *peer)
            for name, host in ((self.near, self.near_host), (self.far, self.far_host)):
                ip("-n", name, "address", "add", f"{host}/24", "dev", "veth0")
                ip("-n", name, "link", "set", "veth0", "up")
        except BaseException:
            self.close()
            raise

    def start(self, side: str, argv: list[str], log: Path, cwd: Path) -> subprocess.Popen[str]:
        """A process on one side; its stdout and stderr go to `log`."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", side, *argv],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        )
        self.processes.append(process)
        return process

    def end(self, *processes: subprocess.Popen[str]) -> None:
        """SIGTERM, and after END_S SIGKILL."""
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.processes.remove(process)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []
        for name in ours():
            if name in (self.near, self.far):
                # also one whose start an interruption broke off
                for pid in ip("netns", "pids", name).split():
                    os.kill(int(pid), signal.SIGKILL)
                ip("netns", "del", name)
