"""HTTP routes behind uvicorn's own protocol, without a socket: bytes in, a verdict out."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import pickle
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from asyncrl.models.policy import build_model

# in the answer to what is not even JSON or protobuf
NOT_DECODED = (
    b"invalid_json",
    b"Invalid HTTP request",
    b"is not JSON",
    b"is not a JSON object",
    b"is not a F",
)
FRESH = 200  # requests of a server's life
SYMBOLS = "0123456789+-*=? abcdefghijklmnopqrstuvwxyz:\n"
KEY = "the-servers-key"
TINKER = "/api/v1/"
PROTOBUF = b"application/x-protobuf"


class Wire:
    """A connection that keeps what is written to it."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.closing = False

    def write(self, data: bytes) -> None:
        self.out += data

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        """Everything has come at once."""

    resume_reading = pause_reading

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 80) if name == "sockname" else None


def request(path: str, body: bytes, *, method: str = "POST", more: str = "") -> bytes:
    """Return the bytes of a request with the key in both of its usual headers."""
    head = f"{method} {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n"
    head += f"x-api-key: {KEY}\r\n{more}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class HttpConnections:
    """One connection after the other to an ASGI application."""

    def __init__(self, app: Any) -> None:
        import uvicorn
        from uvicorn.server import ServerState

        from asyncrl.transport.http_server import BoundedConnection

        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # a line each bad request
        self.protocol = BoundedConnection
        self.config = uvicorn.Config(
            app,
            http=BoundedConnection,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        self.config.load()
        self.state = ServerState()

    async def serve(self, data: bytes) -> bytes:
        """Return the answer to a request."""
        wire: Any = Wire()
        loop = asyncio.get_running_loop()
        protocol = self.protocol(self.config, self.state, {}, loop)
        protocol.connection_made(wire)
        protocol.data_received(data)
        for _ in range(20):
            if not self.state.tasks:
                break
            await asyncio.sleep(0)
        tasks = [*self.state.tasks]
        is_whole = protocol.cycle is not None and not protocol.cycle.more_body
        if tasks and is_whole:
            await asyncio.wait(tasks, timeout=30)
        protocol.connection_lost(None)
        if tasks and (await asyncio.wait(tasks, timeout=30))[1]:
            raise AssertionError("a request that never ends")
        return bytes(wire.out)


def verdict(answer: bytes) -> str:
    """Raise AssertionError for an answer of 500 or above."""
    status = answer[9:12].decode()
    if status.startswith("5"):
        raise AssertionError(f"answered with {answer[:600]!r}")
    if not status or (status == "400" and any(text in answer for text in NOT_DECODED)):
        return "undecodable"
    return f"refused: {status}" if status > "299" else "taken"


class DirectLink:
    """The Tinker server's link to a worker's own code, in this process."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act = act
        self.generation = 1
        self.number = 0

    async def start(self) -> None:
        """It runs."""

    close = start

    async def call(self, *call: Any, **options: Any) -> Any:
        self.number += 1
        call, options = pickle.loads(pickle.dumps((call, options)))
        result = self.act(self.number, *call, **options)
        if isinstance(result, Exception):
            raise result
        return result


class Tinker:
    """The routes of the Tinker API, with both workers' own code behind them."""

    def __init__(self) -> None:
        from asyncrl.tinker import app, settings
        from asyncrl.tinker.workers.sampler import Sampler
        from asyncrl.tinker.workers.trainer import ServedModels

        self.app = app
        app.POLL_S = 0.0  # no client waits
        self.work = tempfile.TemporaryDirectory()
        model = Path(self.work.name) / "tiny"
        build_model(model, SYMBOLS, hidden=32, layers=1, heads=2, max_positions=256)
        path = Path(self.work.name) / "server.toml"
        path.write_text(
            f'[model]\npath = "{model}"\n[sampling]\ncontext = 32\nmax_new_tokens = 4\n'
            "[lora]\nrank = 4\n[staleness]\nmax_lag = 2\n"
        )
        self.config = settings.read(str(path))
        self.trainer = ServedModels(self.config)
        self.results: dict[int, Any] = {}
        self.sampler = Sampler(self.config, self.results.__setitem__)
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.requests = self.lives = 0
        self.server: Any = None
        self.frames = self._frames()

    def _frames(self) -> list[bytes]:
        """What the client sends in a small run, in its order."""
        session, model = "s-fuzz", "s-fuzz:train:0"
        sampler = f"{session}:sample:0"
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 13, 5, 16]}]}
        params = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 3}
        adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        adam |= {"weight_decay": 0.0, "grad_clip_norm": 1.0}
        model_of: dict[str, Any] = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        weights = f"tinker://{model}/weights/first"
        posts: list[tuple[str, dict[str, Any]]] = [
            ("create_model", model_of | {"lora_config": {"rank": 4, "seed": 1}}),
            (
                "create_sampling_session",
                {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"},
            ),
            ("create_session", {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "1"}),
            (
                "asample",
                {"sampling_session_id": sampler, "seq_id": 1, "num_samples": 2, "prompt": prompt}
                | {"sampling_params": params | {"stop": ["a"]}, "prompt_logprobs": True},
            ),
            (
                "asample",
                {"sampling_session_id": sampler, "seq_id": 2, "num_samples": 1, "prompt": prompt}
                | {"sampling_params": params | {"stop": [7]}, "topk_prompt_logprobs": 2},
            ),
            ("optim_step", {"model_id": model, "seq_id": 2, "adam_params": adam}),
            ("save_weights", {"model_id": model, "seq_id": 3, "path": "first"}),
            ("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "path": "second"}),
            ("save_weights_for_sampler", {"model_id": model, "seq_id": 5}),
            ("load_weights", {"model_id": model, "seq_id": 6, "path": weights, "optimizer": True}),
            ("load_weights", model_of | {"model_seq_id": 1, "path": weights, "optimizer": False}),
            ("get_info", {"model_id": model}),
            ("retrieve_future", {"request_id": f"{model}:call:1"}),
            ("retrieve_future", {"request_id": f"{sampler}:sample:1"}),
            ("cancel_future", {"request_id": f"{sampler}:sample:1"}),
            ("join_sampling_session", {"sampling_session_id": sampler}),
            ("weights_info", {"tinker_path": weights}),
            ("telemetry", {"events": []}),
        ]
        frames = [request(TINKER + path, json.dumps(body).encode()) for path, body in posts]
        frames.insert(5, self._loss_frame(model))
        gets = ("training_runs", f"training_runs/{model}/checkpoints", f"samplers/{sampler}")
        frames += [request(TINKER + path, b"", method="GET") for path in gets]
        gone = f"{TINKER}training_runs/{model}/checkpoints/weights/first"
        return [*frames, request(gone, b"", method="DELETE")]

    @staticmethod
    def _loss_frame(model: str) -> bytes:
        import numpy as np
        from tinker.proto import tinker_public_pb2 as pb

        message = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="ppo")
        message.loss_fn_config["clip_low_threshold"] = 0.8
        row = message.data.add()
        row.model_input.add().encoded_text.tokens = np.arange(3, 8, dtype="<i4").tobytes()
        fields = {"target_tokens": np.arange(4, 9), "logprobs": [0, 0, -1.0, -2.0, -1.5]}
        for name, values in (fields | {"advantages": [0, 0, 1.0, 1.0, 1.0]}).items():
            kind = "<i8" if name == "target_tokens" else "<f4"
            tensor = row.loss_fn_inputs[name]
            tensor.dense = np.array(values, kind).tobytes()
            tensor.dtype = pb.DTYPE_INT64 if kind == "<i8" else pb.DTYPE_FLOAT32
            tensor.shape.append(5)
        more = f"content-type: {PROTOBUF.decode()}\r\n"
        body: bytes = message.SerializeToString()
        return request(TINKER + "forward_backward", body, more=more)

    def _train(self, _: int, *call: Any, **options: Any) -> Any:
        return self.trainer.handle(*call, **options)

    def _sample(self, number: int, method: str, asked: Any) -> Any:
        getattr(self.sampler, method)(number, asked)
        while number not in self.results:
            self.sampler.work()
        return self.results.pop(number)

    async def _begin(self) -> None:
        """A fresh server, after the requests of a small run."""
        if self.server is not None:
            await self.server.stop()
            await asyncio.sleep(0)
        self.lives += 1
        folder = Path(self.work.name) / f"server{self.lives}"
        folder.mkdir()
        self.trainer.models.clear()
        self.sampler.versions = {"": self.sampler.base}
        self.server = self.app.TinkerServer(self.config, folder, KEY)
        self.server.ledger.prefix = "fuzz"  # the same in every life
        self.server.sessions.add("s-fuzz")
        self.server.trainer = DirectLink(self._train)
        self.server.samplers.link = self.server.sampling = DirectLink(self._sample)
        self.connections = HttpConnections(self.server.starlette())
        for first in self.frames[: 7 if self.lives % 2 else 3]:
            assert (await self.connections.serve(first))[9:12] == b"200", first
            await self._settle()

    async def _settle(self) -> None:
        """Let the calls that can be carried out be carried out.  Raises AssertionError."""
        for _ in range(12):
            await asyncio.sleep(0)
        tables = [self.server.samplers.promises, *(x.promises for x in self.server.models.values())]
        futures = [promise.future for promises in tables for promise in promises.values()]
        for future in futures:
            if future.done() and future.result().category == "server":
                raise AssertionError(f"the server failed: {future.result().error}")

    def feed(self, data: bytes) -> str:
        return self.loop.run_until_complete(self._feed(data))

    async def _feed(self, data: bytes) -> str:
        with (
            contextlib.redirect_stderr(io.StringIO()),
            mock.patch.object(secrets, "token_hex") as t,
        ):
            t.side_effect = lambda size: f"{self.requests:0{2 * size}x}"
            if self.requests % FRESH == 0:
                await self._begin()
            self.requests += 1
            found = verdict(await self.connections.serve(data))
            await self._settle()
        return found

    def close(self) -> None:
        self.loop.run_until_complete(self.server.stop())
        self.loop.close()
        self.work.cleanup()


class Completions:
    """The routes of `asyncrl serve`, with its engine."""

    def __init__(self) -> None:
        from actors import completions_app

        self.work = tempfile.TemporaryDirectory()
        model = Path(self.work.name) / "tiny"
        build_model(model, SYMBOLS, hidden=32, layers=1, heads=2, max_positions=256)
        config = completions_app.build_config(
            str(model), context=32, slots=8, dtype="float32", device="cpu", threads=1
        )
        self.server = completions_app.CompletionsApp(config, "tiny", KEY)
        self.connections = HttpConnections(self.server.app)
        self.loop = asyncio.new_event_loop()
        bodies: tuple[tuple[str, dict[str, Any]], ...] = (
            ("completions", {"prompt": "abc", "max_tokens": 3, "n": 1, "stop": ["x"]}),
            (
                "completions",
                {"prompt": [[3, 4], [5]], "max_tokens": 0, "echo": True, "logprobs": 2},
            ),
            ("completions", {"prompt": ["a"], "temperature": 0, "top_p": 0.9, "seed": 7}),
            ("chat/completions", {"max_completion_tokens": 2, "top_logprobs": 2, "logprobs": True}),
        )
        said = [{"role": "user", "content": "go"}]
        self.frames = [
            request(
                f"/v1/{path}",
                json.dumps(
                    {"model": "tiny"} | ({"messages": said} if "chat" in path else {}) | body
                ).encode(),
            )
            for path, body in bodies
        ]
        self.frames.append(request("/v1/models/tiny", b"", method="GET"))

    def feed(self, data: bytes) -> str:
        found = verdict(self.loop.run_until_complete(self.connections.serve(data)))
        if self.server.engine.error is not None:
            raise AssertionError(f"the engine has ended: {self.server.engine.error!r}")
        return found

    def close(self) -> None:
        self.server.engine.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.work.cleanup()
