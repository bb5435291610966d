"""`asyncrl serve`, started as a user starts it, for the tests of its clients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from process_kit import ENV, ROOT

KEY = "a-key-of-the-tests"


class ModelServer(NamedTuple):
    """url: up to /v1.  log: what it printed to stderr so far."""

    url: str
    process: subprocess.Popen[str]
    log: Path


@contextmanager
def served(model: Path, folder: Path, *options: str) -> Iterator[ModelServer]:
    """Serve a model directory on a free port, under the name `tiny`."""
    log = folder / "serve.log"
    words = ["serve", str(model), "--name", "tiny", "--port", "0", "--threads", "1", *options]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.cli", *words],
            cwd=ROOT,
            env=ENV | {"OPENAI_API_KEY": KEY},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, log.read_text()
            yield ModelServer(url, process, log)
        finally:
            process.terminate()
            assert process.wait(60) == 0, log.read_text()
