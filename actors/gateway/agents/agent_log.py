"""The log of agents' output: a file of bounded size, with a head for each session."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from asyncrl.records import private

MOST_BYTES = 16 << 20  # a larger file becomes NAME.old, and a new one begins


class AgentLog:
    """The log file of one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writing = threading.Lock()

    def write(self, head: str, *texts: bytes) -> None:
        """Append a session's head and output.  Errors such as a full disk are ignored."""
        output = b"".join(text if text.endswith(b"\n") else text + b"\n" for text in texts if text)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with self.writing, contextlib.suppress(OSError):
            with os.fdopen(private.open_private(self.path, flags), "ab") as file:
                file.write(f"--- {head}\n".encode("utf-8", "replace") + output)
                size = file.tell()
            if size > MOST_BYTES:
                self.path.replace(self.path.with_suffix(".log.old"))
