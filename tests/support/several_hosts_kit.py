import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from process_kit import ENV, as_options

from asyncrl.contract.messages import RunStatus
from asyncrl.records import process_log
from asyncrl.supervise import live
from asyncrl.transport.keys import make_keys
from asyncrl.transport.sockets import BufferSocket

COMMAND = [sys.executable, "-m", "asyncrl.cli"]
WAIT_S = 1800.0


def free_address() -> str:
    """A loopback address that nobody listens on, and nobody else will: the host is our own."""
    host = ".".join(str(part) for part in random.SystemRandom().choices(range(1, 255), k=3))
    socket = BufferSocket(f"tcp://127.{host}:*")
    socket.close()
    return socket.address


def other_machine(keys: Path, path: Path, name: str = "generator-0") -> Path:
    """What docs/machines.md says to copy: the directory of a role."""
    return Path(shutil.copytree(keys / name, path))


class JoinedRun:
    """A run, and a machine with nothing but keys that joins it."""

    def __init__(self, tmp_path: Path) -> None:
        self.here, self.there, self.keys = (tmp_path / name for name in ("here", "there", "keys"))
        self.here.mkdir()
        self.there.mkdir()
        make_keys(self.keys, 3)
        other_machine(self.keys, self.there / "copied", "generator-2")
        self.address = free_address()
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, where: Path, *words: str) -> subprocess.Popen[str]:
        log = (where / "log").open("w")
        started = subprocess.Popen([*COMMAND, *words], cwd=where, env=ENV, stderr=log, text=True)
        self.processes[words[0]] = started
        return started

    def log(self, where: Path) -> str:
        return (where / "log").read_text()

    def wait_for(self, what: Callable[[RunStatus], object]) -> None:
        until = time.monotonic() + WAIT_S
        while not (now := live.request_status(self.address, str(self.keys), 5.0)) or not what(now):
            logs = self.log(self.here) + self.log(self.there)
            assert time.monotonic() < until and self.processes["run"].poll() is None, logs
            time.sleep(0.05)

    def scale(self, number: int) -> int:
        words = [*COMMAND, "scale", str(self.here / "runs" / "r"), str(number), "--json"]
        words += ["--wait", f"{WAIT_S}"]
        ended = subprocess.run(words, cwd=self.there, env=ENV, capture_output=True)
        return int(json.loads(ended.stdout)["generators"])

    def play(self, config: str, sets: list[str], *joins: str, batches: int) -> None:
        """The other machine samples alone for some batches, the run is scaled, and both end."""
        sets = [
            *sets,
            "name='r'",
            "learner.steps=100000",
            "learner.groups=2",
            "learner.group_size=4",
            "evaluation.every=0",
            "evaluation.final_prompts=4",
            f"wires.address={self.address!r}",
            f"wires.weights_address={free_address()!r}",
            f"wires.curve_dir={str(self.keys)!r}",
            "wires.lease_s=2",
            "wires.connect_s=600",
            # its generator stands still for as long as the other one needs
            "watchdog.floor_s=3600.0",
            "watchdog.startup_s=3600.0",
            "weights.transport='tcp'",
        ]
        run = self.start(self.here, "run", config, *as_options(sets))
        words = ("--keys", "copied", "--wait", f"{WAIT_S}", "--cache", str(self.there / "cache"))
        joined = self.start(self.there, "join", self.address, *words, *joins)
        try:
            self.wait_for(lambda now: {"generator-0", "generator-2"} <= now.peers.keys())
            rows = process_log.read_events(self.here / "runs" / "r")
            alone = next(row["pid"] for row in rows if row["name"] == "generator-0")
            os.kill(alone, signal.SIGSTOP)
            reached: list[int] = []
            # more batches than the stopped one can have sampled ahead: the other machine's
            self.wait_for(
                lambda now: reached.append(now.committed) or now.committed >= reached[0] + batches
            )
            os.kill(alone, signal.SIGCONT)
            assert self.scale(2) == 2
            self.wait_for(lambda now: "generator-1" in now.peers)
            joined.send_signal(signal.SIGINT)
            assert joined.wait(WAIT_S) == 130
            self.wait_for(lambda now: "generator-2" not in now.peers)
            assert self.scale(1) == 1
            self.wait_for(lambda _: "generator-1 has left" in self.log(self.here))
            run.send_signal(signal.SIGINT)
            assert run.wait(WAIT_S) == 130, self.log(self.here)
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()
        drawn = re.search(r"generator-2: ended after (\d+) tokens", self.log(self.there))
        assert drawn and int(drawn[1]) > 0
        ledger = json.loads((self.here / "runs" / "r" / "summary.json").read_text())["ledger"]
        assert ledger["generated"] == sum(ledger.values()) - ledger["generated"] > 0
