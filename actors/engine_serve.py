"""vLLM's own servers behind the engine interface: requests over HTTP, weights by a file.

The generator process stays thin: tickets, rewards and delivery.  Each completion is one streamed
request for tokens at the server with the fewest.  A new version pauses every server between two of
its steps, is read from a safetensors file (actors/vllm_transfer.py), named, and probed as the
engine inside this process is (`ProbedEngine`).  All happens in one event loop, which runs within
`step` and `load`.  vLLM names the version of every token.  A server that ends, hangs or answers
with another version gets no requests until it has the current weights again; its unfinished
requests go to the others, and their lost tokens count as sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.torch import save_file

from actors.engine import (
    Completion,
    CompletionRequest,
    Key,
    TokenCounts,
    build_completion,
)
from actors.engine_vllm import (
    CPU_SETTINGS,
    SETTINGS,
    UPDATE,
    ProbedEngine,
    list_options,
)
from asyncrl.config.engines import ENGINES
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable
from asyncrl.contract.versions import Label
from asyncrl.models.installed import explain_missing
from asyncrl.models.policy import load_text_config
from asyncrl.records import rundir

SILENT_S = 300.0  # without a byte: longer than the longest update, during which answers wait
CONNECT_S = 60.0  # until another's does
RETRY_S = 2.0  # between two attempts to reach a lost server
RESTARTS = 3  # of a server of our own
GENERATE = "/inference/v1/generate"
STEP_S = 0.05  # the longest wait of a step
LINGER_S = 0.005  # for answers that end with one
POLL_S = 0.01  # between two looks for a server
# vLLM's processes outlive one that is killed: all end with this process, and with the server
TOGETHER = """exec 3<&0
(cat <&3 >/dev/null; kill -KILL 0) &
"$@" </dev/null
echo "exit code $?" >&2
kill -KILL 0"""


class Span(msgspec.Struct, frozen=True):
    """The tokens start..end-1 of an answer, and the version that sampled them."""

    version: str
    start: int
    end: int


class ServerLost(Exception):
    """A server ended, hangs, or does not do what was asked of it."""


LOST = (ServerLost, OSError, httptools.HttpParserError, msgspec.DecodeError)


class ServedVersion(NamedTuple):
    """A version that `load` was given."""

    label: Label
    path: Path  # its file, of the name that it has at vLLM
    expected: np.ndarray  # log-probabilities of its probe


class AnswerStream(asyncio.Protocol):
    """A request to a server, and what has come of the answer.

    An HTTP client takes several times the processor time (docs/log/engines.md).

    born: the version under which a prompt is sent.
    """

    def __init__(self, born: Label) -> None:
        self.born = born
        self.message = b""  # to send
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.parser = httptools.HttpResponseParser(self)
        self.body = b""  # without the lines that were read
        self.timeout: asyncio.Timeout
        self.error: Exception | None = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        if (until := time.monotonic() + SILENT_S) > (self.timeout.when() or 0.0) + 1.0:
            self.timeout.reschedule(until)
        try:
            self.parser.feed_data(data)
            if self.parser.get_status_code() == 200:
                *lines, self.body = self.body.split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        self._read_message(msgspec.json.decode(line[6:]))
        except LOST as error:
            self.connection_lost(error)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.error = self.error or error
        self.ended.set()

    def _read_message(self, message: dict[str, Any]) -> None:
        for choice in message.get("choices", [{"finish_reason": f"{message}"[:300]}]):
            if choice.get("finish_reason") not in (None, "stop", "length"):
                raise ServerLost(f"an answer was ended: {choice['finish_reason']}")
            self.tokens += choice.get("token_ids") or ()
            logprobs = choice.get("logprobs") or {"content": ()}
            self.logprobs += [token["logprob"] for token in logprobs["content"]]
            if spans := choice.get("weight_versions"):
                self.spans = msgspec.convert(spans, list[Span])


class LiveRequest:
    """A request between `add` and its completion."""

    def __init__(self, request: CompletionRequest, seed: int) -> None:
        self.request = request
        self.seed = seed
        self.lost = 0  # tokens of attempts whose server was lost
        self.stream = AnswerStream(Label(0, 0))  # of this attempt
        self.answer: asyncio.Task[None]


class Server:
    """A vLLM server; command: of one that this process starts."""

    def __init__(self, url: str, command: Sequence[str] = (), gpus: Sequence[int] = ()) -> None:
        self.url = url
        self.command = command
        self.settings = SETTINGS | {"HF_HUB_OFFLINE": "1"}
        if "--enforce-eager" in command:
            self.settings |= CPU_SETTINGS
        if gpus:
            self.settings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.log = tempfile.TemporaryFile()
        self.live = 0
        self.weights: ServedVersion | None = None  # None: it gets no requests
        self.probe: asyncio.Future[None]  # of its newest weights
        self.probing: asyncio.Task[None]
        self.revival: asyncio.Task[None]  # asyncio forgets a task that nothing holds
        self.given: set[str] = set()  # all versions that it got
        self.is_lost = False
        self.lock = asyncio.Lock()  # of an update

    def start(self) -> None:
        """Start a server of our own, unless it runs or has ended too often."""
        if self.command and (self.process is None or self.process.poll() is not None):
            if self.starts > RESTARTS:
                raise PeerUnreachable(self.explain_end())
            self.starts += 1
            self.process = subprocess.Popen(
                ["sh", "-c", TOGETHER, "sh", *self.command],
                stdin=subprocess.PIPE,
                stdout=self.log,
                stderr=self.log,
                env=os.environ | self.settings,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End a server of our own, with all its processes."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def explain_end(self) -> str:
        """Say how a server of our own has ended; "": it has not."""
        if self.process is None or self.process.poll() is None:
            return ""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - 4000))
        lines = self.log.read().decode("utf-8", "replace").strip().splitlines()
        return (
            f"the vLLM server at {self.url} ended: "
            f"{' | '.join(line.strip() for line in lines[-2:]) or 'it said nothing'}"
        )


class ServeEngine(ProbedEngine):
    """See `actors.engine.Engine`. Raises ConfigError for a server that cannot be used."""

    def __init__(self, config: Config) -> None:
        settings = config.generator
        super().__init__(config)
        self.servers = [Server(url.rstrip("/")) for url in settings.servers] or [
            make_own_server(config, index) for index in range(settings.own_servers or 1)
        ]
        self.hint = f"start it with: {shlex.join(build_command(config, '0.0.0.0', 8000))}"
        folder = settings.weights_dir or (str(rundir.SHM) if rundir.SHM.is_dir() else None)
        prefix = f"asyncrl-{os.getuid()}-weights-"
        try:
            self.folder = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
        except OSError as error:
            raise ConfigError(f"generator.weights_dir: cannot write there: {error}") from error
        # held, so that a later run sweeps what a killed process left in memory
        self.held = (Path(self.folder.name) / rundir.HELD).open("a")
        fcntl.flock(self.held, fcntl.LOCK_SH)
        if settings.weights_dir:  # servers may run as other users
            Path(self.folder.name).chmod(0o755)
        self.startup_s = config.watchdog.startup_s
        self.newest: ServedVersion
        self.requests: dict[Key, LiveRequest] = {}
        self.finished: asyncio.Queue[LiveRequest | Exception] = asyncio.Queue()
        self.tls = ssl.create_default_context()
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self.runner.get_loop()
        self.loop.run_until_complete(self._serve_all(self._connect))

    # ---- the protocol ----------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return len(self.requests)

    def load(
        self, weights: Mapping[str, Any], label: Label, digest: str, probe: bytes = b""
    ) -> None:
        weights, expected = self.merge(weights, probe)
        self.label, self.digest, self.loads = label, digest, self.loads + 1
        path = Path(self.folder.name) / self.version
        try:
            save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, path)
        except (OSError, SafetensorError) as error:
            raise AsyncrlError(f"generator.weights_dir: cannot write {path}: {error}") from error

        old = self.newest.path if self.loads > 1 else path
        self.newest = ServedVersion(label, path, expected)
        self.loop.run_until_complete(self._serve_all(self._update_or_lose))
        if old != path:
            old.unlink()

    def begin(self, request: CompletionRequest, seed: int) -> None:
        live = self.requests[request.key] = LiveRequest(request, seed)
        live.answer = self.loop.create_task(self._complete(live))

    def step(self, steps: int = 8) -> list[Completion]:
        """Wait a moment for answers, and return the completions that have ended."""
        completions = []
        ended = self.loop.run_until_complete(self._wait())
        while ended is not None:
            if isinstance(ended, Exception):
                raise ended
            request, stream = ended.request, ended.stream
            if self.requests.get(request.key) is ended:
                del self.requests[request.key]
                spans = self.build_spans(stream.spans, stream.born)
                completions.append(build_completion(request, stream.tokens, stream.logprobs, spans))
            ended = None if self.finished.empty() else self.finished.get_nowait()
        self.steps_made += 1
        return completions

    def abort(self, keys: Iterable[Key]) -> TokenCounts:
        counts = self.count_tokens()
        aborted = [self.requests.pop(key) for key in set(keys) & self.requests.keys()]
        for live in aborted:
            live.answer.cancel()  # closes the connection, and the server aborts it
        if aborted:
            self.loop.run_until_complete(asyncio.wait([live.answer for live in aborted]))
        return {live.request.key: counts[live.request.key] for live in aborted}

    def count_tokens(self) -> TokenCounts:
        return {
            # the buffer takes no more of a sample
            key: min(live.lost + len(live.stream.tokens), live.request.max_new_tokens)
            for key, live in self.requests.items()
        }

    def close(self) -> None:
        """End requests and the servers of our own, and forget the weights."""
        for server in self.servers:
            server.stop()
        self.runner.close()
        self.folder.cleanup()

    # ---- requests --------------------------------------------------------------------------------

    async def _wait(self) -> LiveRequest | Exception | None:
        """Handle what has come, and wait for the end of an answer, at most STEP_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEP_S):
                ended = await self.finished.get()
            await asyncio.sleep(LINGER_S)
            return ended
        return None

    async def _complete(self, live: LiveRequest) -> None:
        """Ask servers until one has answered whole."""
        try:
            while True:
                while not (ready := [server for server in self.servers if server.weights]):
                    await asyncio.sleep(POLL_S)
                server = min(ready, key=lambda server: server.live)
                server.live += 1
                try:
                    await self._stream(server, live)
                    await asyncio.shield(server.probe)
                    break
                except LOST as error:
                    live.lost += len(live.stream.tokens)
                    live.stream.tokens = []
                    self._lose(server, error)
                finally:
                    server.live -= 1
            self.finished.put_nowait(live)
        except Exception as error:
            self.finished.put_nowait(error)

    async def _stream(self, server: Server, live: LiveRequest) -> None:
        request, weights = live.request, server.weights
        assert weights is not None
        stream = live.stream = AnswerStream(weights.label)
        body = {
            "token_ids": request.prompt.tolist(),
            "cache_salt": self.salt(request.group, f"{self.folder.name[-8:]}-{weights.path.name}"),
            "stream": True,
            "sampling_params": self.describe_sampling(request, live.seed),
        }
        await self._ask(server, GENERATE, body, stream)
        covered = [end for span in stream.spans for end in (span.start, span.end)]
        if (
            not stream.tokens
            or len(stream.logprobs) != len(stream.tokens)
            or [0, *covered[1::2]] != [*covered[::2], len(stream.tokens)]
        ):
            raise ServerLost(f"an answer of {len(stream.tokens)} tokens was cut off")
        if any(span.version not in server.given for span in stream.spans):
            raise ServerLost(f"it sampled with weights that it was not given: {stream.spans}")

    # ---- servers ---------------------------------------------------------------------------------

    async def _serve_all(self, act: Callable[[Server], Awaitable[None]]) -> None:
        """Do something with all servers at once."""
        await asyncio.gather(*map(act, self.servers))

    async def _ask(self, server: Server, path: str, body: Any, stream: AnswerStream) -> None:
        """Send a request, GET without a body, else POST, and wait for the end of the answer."""
        content = b"" if body is None else msgspec.json.encode(body)
        url = urlsplit(server.url)
        head = (
            f"{'GET' if body is None else 'POST'} {url.path}{path} HTTP/1.1\r\n"
            f"host: {url.netloc}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        stream.message = head.encode() + content
        async with asyncio.timeout(SILENT_S) as stream.timeout:
            transport, _ = await self.loop.create_connection(
                lambda: stream,
                str(url.hostname),
                url.port or url.scheme,  # type: ignore[arg-type]
                ssl=self.tls if url.scheme == "https" else None,
            )
            try:
                await stream.ended.wait()
            finally:
                transport.abort()
        if stream.error is not None:
            raise stream.error
        if (status := stream.parser.get_status_code()) != 200:
            said = " ".join(stream.body.decode(errors="replace").split())[:300]
            error = f"{path} answered {status or 'nothing'}: {said}"
            if status in (400, 422) and path == GENERATE:
                raise AsyncrlError(f"the vLLM server at {server.url} refuses a request: {error}")
            raise ServerLost(error)

    async def _call(self, server: Server, path: str, body: Any = None) -> Any:
        """Call a route of a server, and return its answer."""
        stream = AnswerStream(self.label)
        await self._ask(server, path, body, stream)
        return msgspec.json.decode(stream.body or b"null")

    async def _generate(self, server: Server, tokens: list[int], **sampling: Any) -> Any:
        """Sample one token behind `tokens`."""
        sampling = {"max_tokens": 1, "logprobs": 0, "detokenize": False} | sampling
        body = {"token_ids": tokens, "sampling_params": sampling}
        return await self._call(server, GENERATE, body)

    async def _connect(self, server: Server) -> None:
        """Wait for a server, and check that it can do what is needed."""
        server.start()
        deadline = time.monotonic() + (self.startup_s if server.command else CONNECT_S)
        while True:
            try:
                await self._call(server, "/health")
                break
            except LOST as error:
                if ended := server.explain_end():
                    raise (ServerLost if server.given else PeerUnreachable)(ended) from error
                if time.monotonic() > deadline:
                    if server.given:
                        server.stop()
                        raise ServerLost(f"{error}") from error
                    raise PeerUnreachable(
                        f"generator.servers: no vLLM server answers at {server.url} "
                        f"({type(error).__name__} {error}); {self.hint}"
                    ) from error
                await asyncio.sleep(0.5)
        try:
            version = (await self._call(server, "/version"))["version"]
            needed = ENGINES["vllm"].pinned
            if not version.startswith(needed):
                raise ConfigError(
                    f"generator.servers: {server.url} is vLLM {version}; asyncrl needs {needed}"
                )
            answer = await self._generate(server, self.ids[:1], temperature=1.0, top_k=1)
            if answer["choices"][0]["logprobs"]["content"][0]["logprob"] != 0.0:
                raise ConfigError(
                    f"generator.servers: {server.url} gives log-probabilities of before the "
                    "temperature; start it with --logprobs-mode processed_logprobs"
                )
        except (*LOST, KeyError, TypeError) as error:
            if server.given:  # it was right before
                raise ServerLost(str(error)) from error
            raise ConfigError(
                f"generator.servers: {server.url} is no vLLM server that takes weights: {error}; "
                f"{self.hint}"
            ) from error

    async def _update(self, server: Server) -> None:
        """Give a server the newest weights, if it lacks them, and probe it."""
        async with server.lock:
            while server.weights is not (weights := self.newest):
                ready, server.weights = server.weights, None  # requests wait
                if ready is not None:
                    await server.probe  # so that it meets no later weights
                probe = server.probe = self.loop.create_future()  # from now on answers wait for it
                version = weights.path.name
                update = {
                    "path": str(weights.path),
                    "version": version,
                    # without its cache, a server reads the tokens of running requests again
                    "clear_cache": self.in_flight != "keep_kv",
                }
                server.given.add(version)
                try:
                    await self._call(server, UPDATE, update)
                except LOST as error:
                    probe.set_exception(error)
                    probe.exception()  # asyncio complains of one that is not looked at
                    server.given.remove(version)
                    if not server.given and not isinstance(error, OSError):
                        raise ConfigError(
                            f"generator.servers: {server.url} cannot take the weights of "
                            f"model.path = {self.path}: {error}; {self.hint}"
                        ) from error
                    raise
                # the probe waits behind the tokens of running requests: no update waits for it
                server.probing = self.loop.create_task(self._probe(server, weights, probe))
                server.weights = weights
            if server.is_lost or len(server.given) == 1:
                await server.probe

    async def _probe(
        self, server: Server, weights: ServedVersion, probe: asyncio.Future[None]
    ) -> None:
        """Compare a server's log-probabilities with the learner's; its answers wait for it.

        It waits behind the tokens of running requests, which are read again: `load` does not wait.
        """
        try:
            answer = await self._generate(server, self.ids, temperature=0.0, prompt_logprobs=0)
            [span] = answer["choices"][0]["weight_versions"]
            if span["version"] != weights.path.name:  # another process has its place
                raise ServerLost(f"it has the weights {span['version']}")
            scores = filter(None, answer["prompt_logprobs"])
            self.check_probe(weights.expected, [next(iter(x.values()))["logprob"] for x in scores])
        except Exception as error:
            probe.set_exception(error)
            probe.exception()
        else:
            probe.set_result(None)

    async def _update_or_lose(self, server: Server) -> None:
        try:
            if not server.is_lost:
                await self._update(server)
        except LOST as error:
            self._lose(server, error)

    def _lose(self, server: Server, error: Exception) -> None:
        """Give a server no requests until it has the newest weights again."""
        server.weights = None
        if not server.is_lost:
            server.is_lost = True
            why = server.explain_end() or f"{type(error).__name__}: {error}"
            print(
                f"generator: the vLLM server at {server.url} is lost, its requests wait for "
                f"another or for its return: {why}",
                file=sys.stderr,
            )
            server.revival = self.loop.create_task(self._revive(server))

    async def _revive(self, server: Server) -> None:
        """Bring a lost server back."""
        try:
            while server.is_lost:
                await asyncio.sleep(RETRY_S)
                with contextlib.suppress(*LOST):
                    await self._connect(server)
                    await self._update(server)
                    server.is_lost = False
            print(f"generator: the vLLM server at {server.url} is back", file=sys.stderr)
            await self._update_or_lose(server)  # a version loaded meanwhile
        except Exception as error:
            self.finished.put_nowait(error)


def build_command(config: Config, host: str, port: int) -> list[str]:
    """Return the command of a server for this config."""
    settings = config.generator
    shape = load_text_config(config.model.path)
    slots = -(-settings.slots // (len(settings.servers) or settings.own_servers or 1))
    width = settings.tensor_parallel or 1
    heads = getattr(shape, "num_key_value_heads", None) or width
    options = list_options(config, shape, slots) | {
        "host": host,
        "port": port,
        "tensor_parallel_size": width,
        "stream_interval": 16,  # tokens in a message
        "enable_scale_out": True,
        "worker_extension_cls": "actors.vllm_transfer.FileExtension",
        "middleware": "actors.vllm_transfer.UpdateRoute",
    }
    options["kv_cache_memory_bytes"] //= min(width, heads)  # of each GPU
    words = [
        word
        for name, value in options.items()
        if value is not False
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]


def make_own_server(config: Config, index: int) -> Server:
    """Prepare a server that this process starts and ends, at a free port of this machine."""
    if reason := explain_missing("vllm"):
        raise ConfigError(f"generator.own_servers: {reason}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    width = config.generator.tensor_parallel or 1
    gpus = config.generator.gpus[index * width : (index + 1) * width]
    if config.generator.gpus and len(gpus) < width:
        raise ConfigError(
            f"generator.gpus: server {index} of {config.generator.own_servers or 1} has no {width} "
            "GPU(s) (generator.tensor_parallel) of its own; list more, or start fewer servers"
        )
    return Server(f"http://127.0.0.1:{port}", build_command(config, "127.0.0.1", port), gpus)


make_engine = ServeEngine
