"""The model server for the tests of its clients: as a user starts it, and in this process."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from process_kit import ENV, ROOT

from actors.completions_app import CompletionsApp, build_config
from asyncrl.transport.http_server import HttpServer, ListenAddress

KEY = "a-key-of-the-tests"


class ModelServer(NamedTuple):
    """url: up to /v1.  log: what it printed to stderr so far."""

    url: str
    process: subprocess.Popen[str]
    log: Path


@contextmanager
def served(model: Path, folder: Path, *options: str) -> Iterator[ModelServer]:
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


@contextmanager
def served_here(model: Path) -> Iterator[tuple[str, CompletionsApp]]:
    """Serve a model directory from a thread: the URL up to /v1, and the application."""
    keys = {"context": 0, "slots": 64, "dtype": "float32", "device": "cpu", "threads": 1}
    app = CompletionsApp(build_config(str(model), **keys), "tiny", KEY)
    server = HttpServer(app.app, ListenAddress())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield f"{server.url}/v1", app
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        app.engine.close()
