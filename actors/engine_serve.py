"""vLLM's own servers behind the engine interface: requests over HTTP, weights by a file.

The generator process stays thin: tickets, rewards and delivery.  Each completion is one streamed
request for tokens at the server with the fewest.  A new version pauses every server between two of
its steps, is read from a safetensors file (actors/vllm_transfer.py), named, and probed as the
engine inside this process is (`ProbedEngine`).  Threads make the updates, which need no turn of the
event loop that has the answers.  vLLM names the version of every token.  A server that ends, hangs
or answers with another version gets no requests until it has the current weights again; its
unfinished requests go to the others, and their lost tokens count as sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import msgspec
import numpy as np
import torch
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
    BLOCK,
    CPU_SETTINGS,
    ProbedEngine,
    choose_dtype,
    count_cache_bytes,
)
from asyncrl.config.engines import ENGINES
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable
from asyncrl.contract.versions import Label
from asyncrl.models.installed import explain_missing
from asyncrl.models.policy import load_text_config
from asyncrl.records import rundir

SILENT_S = 300.0  # without a byte: longer than the longest update, during which answers wait
CALL_S = 60.0  # of any call beside updates and answers
CONNECT_S = 60.0  # until another's does
RETRY_S = 2.0  # between two attempts to reach a lost server
RESTARTS = 3  # of a server of our own
STEP_S = 0.05  # the longest wait of a step
EXTENSION = "actors.vllm_transfer.FileTransferExtension"
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens the routes for weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
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


LOST = (ServerLost, httpx2.TransportError, msgspec.DecodeError)


class ServedVersion(NamedTuple):
    """A version that `load` was given."""

    version: str  # its name at vLLM
    label: Label
    loads: int  # the number of the load
    path: Path  # its file
    expected: np.ndarray  # log-probabilities of its probe


class LiveRequest:
    """A request between `add` and its completion."""

    def __init__(self, request: CompletionRequest, seed: int) -> None:
        self.request = request
        self.seed = seed
        self.lost = 0  # tokens of attempts whose server was lost
        self.born = Label(0, 0)  # the version under which its prompt was sent
        self.clear()
        self.answer: Future[None] = Future()

    def clear(self) -> None:
        """Begin a new attempt."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []


class Server:
    """A vLLM server; command: of one that this process starts."""

    def __init__(self, url: str, command: Sequence[str] = (), gpus: Sequence[int] = ()) -> None:
        self.url = url
        self.command = command
        self.settings = (CPU_SETTINGS if "--enforce-eager" in command else {}) | SETTINGS
        if gpus:
            self.settings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.log = tempfile.TemporaryFile()
        self.live = 0
        self.weights: ServedVersion | None = None  # None: it gets no requests
        self.probe: Future[None] = Future()  # of its newest weights
        self.given: set[str] = set()  # all versions that it got
        self.is_lost = False
        self.lock = threading.Lock()  # of an update

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
        self.servers = (
            [Server(url.rstrip("/")) for url in settings.servers]
            if settings.servers
            else [make_own_server(config, index) for index in range(settings.own_servers or 1)]
        )
        command = shlex.join(build_command(config, "0.0.0.0", 8000))
        self.hint = f"VLLM_SERVER_DEV_MODE=1 {command}"
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
        self.losing = threading.Lock()
        self.readied = asyncio.Event()  # a server has become ready
        self.requests: dict[Key, LiveRequest] = {}
        self.finished: queue.SimpleQueue[LiveRequest | Exception] = queue.SimpleQueue()
        self.tls = httpx2.create_ssl_context()
        self.client = httpx2.Client(**self._say_how())
        # for each server a thread for its update, one for its return and one for its probe
        self.callers = ThreadPoolExecutor(3 * len(self.servers), "vllm-calls")
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self.runner.get_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        list(self.callers.map(self._connect, self.servers))

    def _say_how(self) -> dict[str, Any]:
        """Return the settings of a client."""
        return {
            "headers": {"content-type": "application/json"},
            "timeout": httpx2.Timeout(SILENT_S, connect=30.0, pool=None),
            # uvloop closes an idle connection before it looks whether a request has arrived on it:
            # a server that is short of a processor would break off requests
            "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            "verify": self.tls,
        }

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
        self.newest = ServedVersion(self.version, label, self.loads, path, expected)
        servers = [server for server in self.servers if not server.is_lost]
        list(self.callers.map(self._update_or_lose, servers))
        if old != path:
            old.unlink()

    def begin(self, request: CompletionRequest, seed: int) -> None:
        live = self.requests[request.key] = LiveRequest(request, seed)
        live.answer = asyncio.run_coroutine_threadsafe(self._complete(live), self.loop)

    def step(self, steps: int = 8) -> list[Completion]:
        """Wait a moment for answers, and return the completions that have ended."""
        completions = []
        timeout = STEP_S
        while self.requests:
            try:
                ended = self.finished.get(timeout=timeout)
            except queue.Empty:
                break
            timeout = 0.0
            if isinstance(ended, Exception):
                raise ended
            if self.requests.get(ended.request.key) is ended:
                request = self.requests.pop(ended.request.key).request
                spans = self.build_spans(ended.spans, ended.born)
                completions.append(build_completion(request, ended.tokens, ended.logprobs, spans))
        self.steps_made += 1
        return completions

    def abort(self, keys: Iterable[Key]) -> TokenCounts:
        counts = self.count_tokens()
        aborted = [self.requests.pop(key) for key in set(keys) & self.requests.keys()]
        for live in aborted:
            live.answer.cancel()  # closes the connection, and the server aborts it
        return {live.request.key: counts[live.request.key] for live in aborted}

    def count_tokens(self) -> TokenCounts:
        return {
            # the buffer takes no more of a sample
            key: min(live.lost + len(live.tokens), live.request.max_new_tokens)
            for key, live in self.requests.items()
        }

    def close(self) -> None:
        """End requests and the servers of our own, and forget the weights."""
        self.client.close()  # a lost server is looked for no longer
        for server in self.servers:
            server.command = ()  # not to start again
            server.stop()
            server.probe.cancel()
        self.callers.shutdown(wait=False, cancel_futures=True)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.runner.close()
        self.folder.cleanup()

    # ---- requests --------------------------------------------------------------------------------

    async def _complete(self, live: LiveRequest) -> None:
        """Ask servers until one has answered whole."""
        try:
            while True:
                while not (ready := [server for server in self.servers if server.weights]):
                    self.readied.clear()
                    await self.readied.wait()
                server = min(ready, key=lambda server: server.live)
                if (weights := server.weights) is None:  # a thread has begun an update
                    continue
                server.live += 1
                try:
                    await self._stream(server, live, weights)
                    await asyncio.shield(asyncio.wrap_future(server.probe))
                    break
                except LOST as error:
                    live.lost += len(live.tokens)
                    live.clear()
                    self._lose(server, error)
                finally:
                    server.live -= 1
            self.finished.put(live)
        except Exception as error:
            self.finished.put(error)

    async def _stream(self, server: Server, live: LiveRequest, weights: ServedVersion) -> None:
        request = live.request
        live.born = weights.label
        body = {
            "token_ids": request.prompt.tolist(),
            "cache_salt": self.salt(request.group, f"{self.folder.name[-8:]}-{weights.loads}"),
            "stream": True,
            "sampling_params": {
                "max_tokens": request.max_new_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "stop_token_ids": list(request.stop),
                "logprobs": 0,
                "seed": live.seed,
                "ignore_eos": True,
                "detokenize": False,
            },
        }
        url = f"{server.url}/inference/v1/generate"
        content = msgspec.json.encode(body)
        async with (
            # one for each answer: a pool looks at all connections for each
            httpx2.AsyncClient(**self._say_how()) as client,
            client.stream("POST", url, content=content) as response,
        ):
            if response.status_code != 200:
                await response.aread()
                raise_for_answer(server, response)
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                part = msgspec.json.decode(line[6:])
                for choice in part.get("choices", [{"finish_reason": f"{part}"[:300]}]):
                    if choice.get("finish_reason") not in (None, "stop", "length"):
                        raise ServerLost(f"an answer was ended: {choice['finish_reason']}")
                    live.tokens += choice.get("token_ids") or ()
                    logprobs = choice.get("logprobs") or {"content": ()}
                    live.logprobs += [token["logprob"] for token in logprobs["content"]]
                    if spans := choice.get("weight_versions"):
                        live.spans = msgspec.convert(spans, list[Span])
        covered = [end for span in live.spans for end in (span.start, span.end)]
        is_whole = (
            live.tokens
            and len(live.logprobs) == len(live.tokens)
            and [0, *covered[1::2]] == [*covered[::2], len(live.tokens)]
        )
        if not is_whole:
            raise ServerLost(f"an answer of {len(live.tokens)} tokens was cut off")
        if any(span.version not in server.given for span in live.spans):
            raise ServerLost(f"it sampled with weights that it was not given: {live.spans}")

    # ---- servers ---------------------------------------------------------------------------------

    def _call(self, server: Server, path: str, body: Any = None) -> Any:
        """Call a route of a server, GET without a body, else POST, and return its answer."""
        data = None if body is None else msgspec.json.encode(body)
        method = "GET" if body is None else "POST"
        seconds = SILENT_S if path == "/update_weights" else CALL_S
        response = self.client.request(method, server.url + path, content=data, timeout=seconds)
        raise_for_answer(server, response)
        return msgspec.json.decode(response.content or b"null")

    def _generate(self, server: Server, tokens: list[int], **sampling: Any) -> Any:
        """Sample one token behind `tokens`."""
        sampling = {"max_tokens": 1, "logprobs": 0, "detokenize": False} | sampling
        body = {"token_ids": tokens, "sampling_params": sampling}
        return self._call(server, "/inference/v1/generate", body)

    def _connect(self, server: Server) -> None:
        """Wait for a server, and check that it can do what is needed."""
        server.start()
        deadline = time.monotonic() + (self.startup_s if server.command else CONNECT_S)
        while True:
            try:
                self._call(server, "/health")
                break
            except (httpx2.TransportError, ServerLost) as error:
                if ended := server.explain_end():
                    raise (ServerLost if server.given else PeerUnreachable)(ended) from error
                if time.monotonic() > deadline:
                    if server.given:
                        server.stop()
                        raise ServerLost(f"{error}") from error
                    raise PeerUnreachable(
                        f"generator.servers: no vLLM server answers at {server.url} "
                        f"({type(error).__name__} {error}); start it with: {self.hint}"
                    ) from error
                time.sleep(0.5)
        try:
            version = self._call(server, "/version")["version"]
            needed = ENGINES["vllm"].pinned
            if not version.startswith(needed):
                raise ConfigError(
                    f"generator.servers: {server.url} is vLLM {version}; asyncrl needs {needed}"
                )
            if self._call(server, "/is_paused")["is_paused"]:  # an update was cut off
                with contextlib.suppress(ServerLost):  # before it began or after it ended
                    self._call(server, "/finish_weight_update", {})
                self._call(server, "/resume", {})
            answer = self._generate(server, self.ids[:1], temperature=1.0, top_k=1)
            if answer["choices"][0]["logprobs"]["content"][0]["logprob"] != 0.0:
                raise ConfigError(
                    f"generator.servers: {server.url} gives log-probabilities of before the "
                    "temperature; start it with --logprobs-mode processed_logprobs"
                )
            self._call(server, "/init_weight_transfer_engine", {"init_info": {}})
            self._call(server, "/collective_rpc", {"method": "asyncrl_seed_rows"})
        except (*LOST, KeyError, TypeError) as error:
            if server.given:  # it was right before
                raise ServerLost(str(error)) from error
            raise ConfigError(
                f"generator.servers: {server.url} is no vLLM server that takes weights: {error}; "
                f"start it with: {self.hint}"
            ) from error

    def _update(self, server: Server) -> None:
        """Give a server the newest weights, if it lacks them, and probe it."""
        with server.lock:
            while server.weights != (weights := self.newest):
                was_ready, server.weights = server.weights is not None, None  # requests wait
                if was_ready:
                    server.probe.result()  # so that it meets no later weights
                probe = server.probe = Future()  # from now on answers wait for it
                try:
                    # without its cache, a server reads the tokens of running requests again
                    clear = "false" if self.in_flight == "keep_kv" else "true"
                    self._call(server, f"/pause?mode=keep&clear_cache={clear}", {})
                    self._call(server, "/start_weight_update", {})
                    self._call(
                        server, "/update_weights", {"update_info": {"path": str(weights.path)}}
                    )
                    server.given.add(weights.version)
                    self._call(server, "/finish_weight_update", {"weight_version": weights.version})
                    self._call(server, "/resume", {})
                except LOST as error:
                    probe.set_exception(error)
                    if not server.given and not isinstance(error, httpx2.TransportError):
                        raise ConfigError(
                            f"generator.servers: {server.url} cannot take the weights of "
                            f"model.path = {self.path}: {error}"
                        ) from error
                    raise
                # the probe waits behind the tokens of running requests: no update waits for it
                self.callers.submit(self._probe, server, weights, probe)
                server.weights = weights
                self.loop.call_soon_threadsafe(self.readied.set)
            if server.is_lost or len(server.given) == 1:
                server.probe.result()

    def _probe(self, server: Server, weights: ServedVersion, probe: Future[None]) -> None:
        """Compare a server's log-probabilities with the learner's; its answers wait for it.

        It waits behind the tokens of running requests, which are read again: `load` does not wait.
        """
        try:
            answer = self._generate(server, self.ids, temperature=0.0, prompt_logprobs=0)
            positions = filter(None, answer["prompt_logprobs"])
            measured = [next(iter(x.values()))["logprob"] for x in positions]
            self.check_probe(weights.expected, measured)
        except Exception as error:
            probe.set_exception(error)
        else:
            probe.set_result(None)

    def _update_or_lose(self, server: Server) -> None:
        try:
            self._update(server)
        except LOST as error:
            self._lose(server, error)

    def _lose(self, server: Server, error: Exception) -> None:
        """Give a server no requests until it has the newest weights again."""
        server.weights = None
        with self.losing:
            was_lost, server.is_lost = server.is_lost, True
        if not was_lost:
            why = server.explain_end() or f"{type(error).__name__}: {error}"
            print(
                f"generator: the vLLM server at {server.url} is lost, its requests wait for "
                f"another or for its return: {why}",
                file=sys.stderr,
            )
            self.callers.submit(self._revive, server)

    def _revive(self, server: Server) -> None:
        """Bring a lost server back."""
        try:
            while server.is_lost:
                time.sleep(RETRY_S)
                with contextlib.suppress(*LOST):
                    self._connect(server)
                    self._update(server)
                    server.is_lost = False
            print(f"generator: the vLLM server at {server.url} is back", file=sys.stderr)
            self._update_or_lose(server)  # a version loaded meanwhile
        except Exception as error:
            self.finished.put(error)


def raise_for_answer(server: Server, response: httpx2.Response) -> None:
    """Raise ServerLost for an answer that is an error, AsyncrlError if it is our request's."""
    if response.status_code == 200:
        return
    said = response.text.strip().replace("\n", " ")[:300]
    path = response.request.url.path
    error = f"{path} answered {response.status_code}: {said}"
    if response.status_code in (400, 422) and path.startswith("/inference"):
        raise AsyncrlError(f"the vLLM server at {server.url} refuses a request: {error}")
    raise ServerLost(error)


def build_command(config: Config, host: str, port: int) -> list[str]:
    """Return the command of a server for this config."""
    settings = config.generator
    shape = load_text_config(config.model.path)
    slots = -(-settings.slots // (len(settings.servers) or settings.own_servers or 1))
    width = settings.tensor_parallel or 1
    heads = getattr(shape, "num_key_value_heads", None) or width
    cache = count_cache_bytes(config, shape, slots) // min(width, heads)
    options = {
        "model": str(Path(config.model.path).resolve()),
        "host": host,
        "port": port,
        "dtype": choose_dtype(config),
        "seed": config.seed,
        "tensor-parallel-size": width,
        "max-model-len": settings.context,
        "max-num-seqs": slots + 1,
        "block-size": BLOCK,
        "kv-cache-memory-bytes": cache,  # of each GPU
        "gpu-memory-utilization": 0.05,  # only a check at the start
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": 1,
        "stream-interval": 8,  # tokens in a message
        "generation-config": "vllm",
        "weight-transfer-config": '{"backend": "asyncrl"}',
        "worker-extension-cls": EXTENSION,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    flags = ["--skip-tokenizer-init", "--enable-scale-out", "--disable-log-stats"]
    if config.model.device == "cpu" or not torch.cuda.is_available():
        flags.append("--enforce-eager")
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *flags]


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
