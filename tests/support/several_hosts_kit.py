"""Helpers of the several_hosts tests that other test files use."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

from process_kit import ENV, ROOT, Ended

from asyncrl.transport.sockets import BufferSocket


def asyncrl(*words: str) -> Ended:
    return Ended(
        subprocess.run(
            [sys.executable, "-m", "asyncrl.cli", *words],
            cwd=ROOT,
            env=ENV,
            capture_output=True,
            text=True,
            timeout=600,
        )
    )


def free_address() -> str:
    """A loopback address that nobody listens on, and nobody else will: the host is our own."""
    host = ".".join(str(part) for part in random.SystemRandom().choices(range(1, 255), k=3))
    socket = BufferSocket(f"tcp://127.{host}:*")
    socket.close()
    return socket.address


def other_machine(keys: Path, path: Path, name: str = "generator-0") -> Path:
    """What docs/machines.md says to copy: the directory of a role."""
    return Path(shutil.copytree(keys / name, path))
