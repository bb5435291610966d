"""`asyncrl tinker`: the server's directory, key and socket."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write, private
from asyncrl.records.process_log import INTERRUPTED, ProcessIncarnation
from asyncrl.tinker import settings
from asyncrl.tinker.settings import TinkerConfig

if TYPE_CHECKING:
    from asyncrl.tinker.app import TinkerServer

CONFIG = "tinker.toml"
KEY = "api_key"
PROGRESS_S = 5.0  # between two lines while the server starts
KEEP_ALIVE_S = 120  # longer than a training step: otherwise every client reconnects after each one


def prepare_directory(config: TinkerConfig, source: str) -> Path:
    """Create or continue the server's directory.

    Raises ConfigError if it belongs to another base model."""
    folder = Path(config.runs) / (config.name or Path(source).stem)
    path = folder / CONFIG
    private.create_directory(folder)
    if path.exists():
        earlier = settings.read(str(path))
        for key in ("model", "lora", "losses"):
            # a loss that takes another's place stays the same when calls are repeated
            if getattr(earlier, key) not in (getattr(config, key), settings.TinkerLosses()):
                raise ConfigError(
                    f"{folder} belongs to a server with another [{key}]: choose another name "
                    "with --set name=..."
                )
    atomic_write.write(path, load.dump(config))
    return folder


def log_progress(text: str) -> None:
    """Print a line about the start of the server."""
    print(text, file=sys.stderr)


async def log_waiting() -> None:
    """Print a line every PROGRESS_S until the task is cancelled."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(PROGRESS_S)
        log_progress(f"starting trainer and samplers ({time.monotonic() - began:.0f} s)")


def serve(config: TinkerConfig, source: str) -> None:
    """Serve until interrupted.  Raises ConfigError."""
    from asyncrl.transport.http_server import HttpServer, ListenAddress

    log_progress("loading the server")
    try:
        from asyncrl.tinker.app import TinkerServer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"asyncrl tinker needs {error.name}, which is not installed: pip install "
            "'asyncrl[tinker]'"
        ) from error
    if config.lora.rank and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"lora.rank = {config.lora.rank}: needs peft: pip install 'asyncrl[tinker]'; with "
            "lora.rank = 0 all weights are trained"
        )
    path = Path(config.model.path)
    if config.model.warm_start and not path.exists():
        from asyncrl.tinker import demo_model

        log_progress(f"building {path} and training it on additions")
        demo_model.build(path, config.seed, say=log_progress)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path: {path} is not a model directory (it has no config.json); `asyncrl model "
            "get` downloads one, model.warm_start = true builds a tiny one"
        )
    folder = prepare_directory(config, source)
    logger = logging.getLogger("asyncrl.tinker")
    address = ListenAddress(config.server.host, config.server.port, port_name="server.port")

    def announce(url: str) -> None:
        print(f"serving {config.model.path} from {folder}", file=sys.stderr)
        if config.losses.stable_reinforce:
            logger.warning(
                "losses.stable_reinforce: for loss_fn = stable_reinforce, which is not published, "
                "this server computes %s",
                config.losses.stable_reinforce,
            )
        print(f"export TINKER_BASE_URL={url} TINKER_API_KEY={key}", flush=True)

    async def run() -> None:
        server = TinkerServer(config, folder, key)
        web = HttpServer(server.starlette(), address, keep_alive_s=KEEP_ALIVE_S)
        atomic_write.write(folder / "url", web.url + "\n")
        server.on_failure = web.end
        await web.serve(announce, run_workers(server))
        if server.failure is not None:
            raise server.failure

    with record_process(folder):
        path = folder / KEY  # no other user can write into the folder
        path.touch(0o600)
        key = private.require_private(path).read_text(encoding="utf-8").strip()
        if not key:
            key = f"tml-{secrets.token_urlsafe(24)}"
            path.write_text(f"{key}\n", encoding="utf-8")
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        file = logging.FileHandler(logs / "server.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        logger.propagate = False
        logger.handlers += [logging.StreamHandler(sys.stderr), file]
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        asyncio.run(run())


@contextlib.contextmanager
def record_process(folder: Path) -> Iterator[None]:
    """Record the start and the end of this process in the process log.

    Raises ConfigError while another server uses the directory."""
    process = ProcessIncarnation(folder, "server", alone=True)
    code, reason = 0, ""
    try:
        yield
    except BaseException as error:
        code, reason = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, str(error)
        raise
    finally:
        process.end(code, reason)
        process.release()


@contextlib.asynccontextmanager
async def run_workers(server: TinkerServer) -> AsyncIterator[None]:
    """Start and stop the processes of a server."""
    log_progress("starting trainer and samplers")
    waiting = asyncio.create_task(log_waiting())
    try:
        try:
            await server.start()
        finally:
            waiting.cancel()
        yield
    finally:
        await server.stop()
