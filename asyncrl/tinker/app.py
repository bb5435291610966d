"""The routes of the Tinker API under /api/v1."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tinker.types as sdk
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import LONGEST_LINE, escape_line
from asyncrl.models.tokenizer import collect_model_stops, load_tokenizer
from asyncrl.records import atomic_write, jsonl
from asyncrl.tinker import wire
from asyncrl.tinker.call_log import TrainingCall, TrainingOutcome
from asyncrl.tinker.links import WorkerLink
from asyncrl.tinker.model_records import (
    ModelRecord,
    branch_name,
    find_saved,
    folder_name,
    model_of,
)
from asyncrl.tinker.models import ServedModel
from asyncrl.tinker.sample_log import TrainedSampleLog
from asyncrl.tinker.samplers import SampleOutcome, SamplerRecord, SamplerService
from asyncrl.tinker.sequences import SequenceLedger
from asyncrl.tinker.settings import TinkerConfig

LEDGER_S = 2.0  # between looks at the ledgers
POLL_S = 20.0  # longest wait of a client for a result in one request
_Outcome = TypeVar("_Outcome")
Handler = Callable[[Request, bytes], Awaitable[Response]]


class TinkerServer:
    """Sessions, models and samplers of a server, in its directory.

    key: what clients send as X-API-Key."""

    def __init__(self, config: TinkerConfig, folder: Path, key: str) -> None:
        self.config = config
        self.folder = folder
        self.key = key
        self.path = Path(config.model.path).resolve()
        self.ledger = SequenceLedger(folder / "sequences.jsonl")
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        settings = folder / "tinker.toml"
        self.trainer = WorkerLink("training", settings, logs / "training.log")
        self.sampling = WorkerLink("sampling", settings, logs / "sampling.log")
        self.tokenizer = load_tokenizer(config.model.path)
        ends = collect_model_stops(self.tokenizer, config.model.path)
        self.samplers = SamplerService(config, folder, self.sampling, self.ledger, ends)
        self.samplers.pace = self.pace
        self.session_rows = jsonl.JsonlAppender(folder / "sessions.jsonl")
        self.sessions = {row["id"] for row in jsonl.read(folder / "sessions.jsonl")}
        self.models: dict[str, ServedModel] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Continue the models of an earlier server, and start both processes."""
        for path in sorted(self.folder.glob("*/model.json")):
            record = msgspec.json.decode(path.read_bytes(), type=ModelRecord)
            self._serve(record)
        await self.trainer.start()
        await self.sampling.start()
        self.tasks.append(asyncio.create_task(self._write_ledgers(), name="ledgers"))

    async def _write_ledgers(self) -> None:
        """Keep the ledger files current while clients only sample."""
        while True:
            await asyncio.sleep(LEDGER_S)
            for model in self.models.values():
                model.write_ledger()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.trainer.close()
        await self.sampling.close()
        for model in self.models.values():
            model.close()
        for file in (self.ledger, self.samplers, self.session_rows):
            file.close()

    def _serve(self, record: ModelRecord) -> ServedModel:
        folder = self.folder / folder_name(record.model)
        source = find_saved(self.folder, record.source)[0] if record.source else Path()
        samples = TrainedSampleLog(folder, self.tokenizer)
        model = ServedModel(
            record, folder, self.config, self.trainer, self.ledger, samples=samples, saved=source
        )
        self.models[record.model] = model
        model.on_change = self.samplers.released.set
        self.tasks.append(asyncio.create_task(model.run(), name=record.model))
        return model

    def pace(self, sampler: SamplerRecord, count: int) -> str:
        """Return why a request to sample `count` sequences must wait; "": it need not.

        With on_exceed = pace a model may have as many untrained sequences within the limit as
        max_lag + 1 optimizer steps train. A request waits only while calls of the model are being
        carried out, so that a client that waits for it is never stuck."""
        limit = self.config.staleness.max_lag
        model = self.models.get(model_of(sampler.model))
        if self.config.staleness.on_exceed != "pace" or model is None or model.is_idle:
            return ""
        if sampler.model != model.ancestry.model:
            return ""
        untrained = self.ledger.of_model(sampler.model).untrained
        ahead = sum(n for version, n in untrained.items() if version >= model.version - limit)
        ahead += self.samplers.in_flight(sampler.model)
        room = (limit + 1) * model.batch
        if not model.batch or not ahead or ahead + count <= room:
            return ""
        return (
            f"{ahead} sequences of {sampler.model} wait to be trained: with staleness.max_lag = "
            f"{limit:g} and {model.batch} sequences a step, more would be too old"
        )

    # ---- HTTP ------------------------------------------------------------------------------------

    def starlette(self) -> Starlette:
        """Return the ASGI application."""
        post: dict[str, Handler] = {
            # looked up in this order: first what a client calls for every sequence
            "retrieve_future": self.retrieve_future,
            "asample": self.sample,
            "client/config": self.client_config,
            "client/dynamic_config": self.empty,
            "telemetry": self.telemetry,
            "create_session": self.create_session,
            "session_heartbeat": self.session_heartbeat,
            "sessions/{id}/finish": self.empty,
            "create_model": self.create_model,
            "load_weights": self.load_weights,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "forward": self.forward_backward,
            "optim_step": self.training_call,
            "save_weights": self.training_call,
            "save_weights_for_sampler": self.training_call,
            "create_sampling_session": self.create_sampling_session,
            "join_sampling_session": self.join_sampling_session,
            "cancel_future": self.cancel_future,
            "weights_info": self.weights_info,
        }
        get: dict[str, Handler] = {
            "healthz": self.health,
            "get_server_capabilities": self.capabilities,
            "samplers/{id}": self.get_sampler,
            "training_runs": self.training_runs,
            "training_runs/{id}": self.training_run,
            "training_runs/{id}/checkpoints": self.checkpoints,
        }
        delete: dict[str, Handler] = {
            "training_runs/{id}/checkpoints/{kind}/{name}": self.delete_checkpoint,
        }
        routes = [
            Route(f"/api/v1/{path}", self._guarded(handler), methods=[method])
            for method, table in (("POST", post), ("GET", get), ("DELETE", delete))
            for path, handler in table.items()
        ]
        return Starlette(
            routes=routes,
            exception_handlers={
                HTTPException: _http_error,
                ConfigError: _config_error,
                ClientDisconnect: _disconnected,
            },
        )

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Check the key, and read the body up to the limit."""

        async def respond(request: Request) -> Response:
            key = request.headers.get("x-api-key", "")
            if not hmac.compare_digest(key.encode(), self.key.encode()):
                raise HTTPException(
                    401,
                    "X-API-Key is not this server's key: set TINKER_API_KEY to the content of "
                    "its file api_key",
                )
            if coding := request.headers.get("content-encoding"):
                raise HTTPException(415, f"Content-Encoding: {coding} is not served")
            return await handler(request, await self._body(request))

        return respond

    async def _body(self, request: Request) -> bytes:
        limit = self.config.server.body_mib << 20
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise HTTPException(
                    413, f"the body exceeds server.body_mib = {self.config.server.body_mib}"
                )
        return bytes(body)

    # ---- sessions --------------------------------------------------------------------------------

    async def empty(self, request: Request, body: bytes) -> Response:
        return JSONResponse({})

    async def client_config(self, request: Request, body: bytes) -> Response:
        is_rust = self.config.server.client_transport == "rust"
        return JSONResponse({"use_pyqwest_transport": is_rust})

    async def telemetry(self, request: Request, body: bytes) -> Response:
        return JSONResponse({"status": "accepted"})

    async def health(self, request: Request, body: bytes) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(self, request: Request, body: bytes) -> Response:
        shown = {
            "model_name": self.config.model.path,
            "max_context_length": self.config.sampling.context,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [shown]})

    async def create_session(self, request: Request, body: bytes) -> Response:
        wire.parse_json(sdk.CreateSessionRequest, body)
        session = f"s-{secrets.token_hex(6)}"
        self.sessions.add(session)
        self.session_rows.write({"id": session, "time": time.time()})
        return JSONResponse({"type": "create_session", "session_id": session})

    async def session_heartbeat(self, request: Request, body: bytes) -> Response:
        return JSONResponse({"type": "session_heartbeat"})

    def _session(self, id: str | None) -> str:
        if id not in self.sessions:
            raise ConfigError(f"session_id = {id}: this server has no such session")
        assert id is not None
        return id

    def _base_model(self, name: str | None) -> None:
        path = self.config.model.path
        known = {path, str(self.path), "/".join(self.path.parts[-2:]), self.path.name}
        if name is not None and name not in known:
            raise ConfigError(f"base_model = {name}: this server has {path} alone")

    # ---- models ----------------------------------------------------------------------------------

    async def create_model(self, request: Request, body: bytes) -> Response:
        given = wire.parse_json(sdk.CreateModelRequest, body)
        self._base_model(given.base_model)
        if given.optimizer_config.type != "adamw":
            raise ConfigError(f"optimizer_config.type = {given.optimizer_config.type}: only adamw")
        rank = seed = 0
        if self.config.lora.rank:
            lora = given.lora_config
            rank = self.config.lora.rank if lora is None else lora.rank
            if not 1 <= rank <= self.config.lora.rank:
                raise ConfigError(
                    f"lora_config.rank = {rank}: the server's largest is lora.rank = "
                    f"{self.config.lora.rank}"
                )
            if lora is not None and not (lora.train_mlp and lora.train_attn):
                raise ConfigError(
                    "lora_config: train_mlp and train_attn = false are not served; "
                    "lora.target_modules of the server names the layers"
                )
            seed = self.config.seed if lora is None or lora.seed is None else lora.seed
        model = f"{self._session(given.session_id)}:train:{given.model_seq_id}"
        record = ModelRecord(
            model, given.session_id, rank, seed, time.time(), metadata=given.user_metadata
        )
        return self._created(record, "create_model", body)

    def _created(self, record: ModelRecord, route: str, body: bytes) -> Response:
        """Create a model by its call 0."""
        model = self.models.get(record.model)
        if model is None:
            folder = self.folder / folder_name(record.model)
            folder.mkdir(exist_ok=True)
            atomic_write.write(folder / "model.json", msgspec.json.encode(record))
            model = self._serve(record)
        model.submit(TrainingCall(0, route, body))
        return self._promised(model, 0)

    async def load_weights(self, request: Request, body: bytes) -> Response:
        given = wire.parse_json(sdk.LoadWeightsRequest, body)
        if given.model_id is not None:
            return await self.training_call(request, body)
        self._base_model(given.base_model)
        _, saved = find_saved(self.folder, given.path, "weights")
        model = f"{self._session(given.session_id)}:train:{given.model_seq_id}"
        record = ModelRecord(
            model,
            self._session(given.session_id),
            saved.rank,
            self.config.seed,
            time.time(),
            source=given.path,
            optimizer=given.optimizer,
            version=saved.version,
            parents={saved.model: saved.version, **saved.parents},
            metadata=given.user_metadata,
        )
        return self._created(record, "load_weights", body)

    def _model(self, id: str | None) -> ServedModel:
        if id not in self.models:
            raise ConfigError(f"model_id = {id}: this server has no such model")
        assert id is not None
        return self.models[id]

    def _promised(self, model: ServedModel, number: int) -> Response:
        name = model.record.model
        return JSONResponse({"request_id": f"{name}:call:{number}", "model_id": name})

    def _submit(self, id: str | None, number: int | None, route: str, body: bytes) -> Response:
        model = self._model(id)
        if number is None or number < 1:
            raise ConfigError(f"seq_id = {number}: the calls of a model are numbered from 1")
        model.submit(TrainingCall(number, route, body))
        return self._promised(model, number)

    async def training_call(self, request: Request, body: bytes) -> Response:
        route = request.url.path.rpartition("/")[2]
        raw = wire.parse_object(body)
        id, number = raw.get("model_id"), raw.get("seq_id")
        if not isinstance(id, str) or not isinstance(number, int):
            raise ConfigError(
                "the body must be JSON with model_id, a text, and seq_id, a whole number"
            )
        return self._submit(id, number, route, body)

    async def forward_backward(self, request: Request, body: bytes) -> Response:
        if wire.PROTOBUF not in request.headers.get("content-type", ""):
            raise HTTPException(415, f"the body must be {wire.PROTOBUF}: update the client")
        message = wire.parse_loss_request(body)
        route = "forward" if message.forward_only else "forward_backward"
        return self._submit(message.model_id, message.seq_id, route, body)

    async def get_info(self, request: Request, body: bytes) -> Response:
        given = wire.parse_json(sdk.GetInfoRequest, body)
        record = self._model(given.model_id).record
        return JSONResponse(
            {
                "type": "get_info",
                "model_data": {
                    "arch": "causal_lm",
                    "model_name": self.config.model.path,
                    "tokenizer_id": str(self.path),
                },
                "model_id": record.model,
                "is_lora": record.rank > 0,
                "lora_rank": record.rank or None,
                "model_name": self.config.model.path,
            }
        )

    # ---- samplers --------------------------------------------------------------------------------

    async def create_sampling_session(self, request: Request, body: bytes) -> Response:
        given = wire.parse_json(sdk.CreateSamplingSessionRequest, body)
        session = self._session(given.session_id)
        id = f"{session}:sample:{given.sampling_session_seq_id}"
        if given.model_path:
            found, saved = find_saved(self.folder, given.model_path)
            weights = found / "model" if "/weights/" in given.model_path else found
            record = SamplerRecord(
                id, session, saved.model, saved.version, str(weights), given.model_path
            )
        else:
            self._base_model(given.base_model)
            record = SamplerRecord(id, session)
        self.samplers.open(record)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": id})

    async def join_sampling_session(self, request: Request, body: bytes) -> Response:
        given = wire.parse_json(sdk.JoinSamplingSessionRequest, body)
        return JSONResponse({"client_counter": self.samplers.next_clone(given.sampling_session_id)})

    async def get_sampler(self, request: Request, body: bytes) -> Response:
        id = request.path_params["id"]
        if id not in self.samplers.samplers:
            raise HTTPException(404, f"this server has no sampler {id}")
        sampler = self.samplers.find(id)
        return JSONResponse(
            {
                "sampler_id": id,
                "base_model": self.config.model.path,
                "model_path": sampler.path or None,
            }
        )

    async def sample(self, request: Request, body: bytes) -> Response:
        given = wire.parse_json(sdk.SampleRequest, body)
        name, promise = self.samplers.submit(given, body)
        return JSONResponse({"request_id": name, "sample_sequence_ids": promise.sequences})

    async def cancel_future(self, request: Request, body: bytes) -> Response:
        self.samplers.cancel(str(wire.parse_object(body).get("request_id")))
        return Response(status_code=204)

    # ---- results ---------------------------------------------------------------------------------

    async def retrieve_future(self, request: Request, body: bytes) -> Response:
        given = wire.parse_json(sdk.FutureRetrieveRequest, body)
        name, _, number = given.request_id.rpartition(":call:")
        if name and number.isdecimal() and len(number) < 19:
            return await self._training_result(self._model(name), int(number))
        promise = self.samplers.promises.get(given.request_id)
        if promise is None:  # lost with an earlier server: the client samples again
            raise HTTPException(410, f"{given.request_id} is not known here any more")
        outcome = await _wait(promise.future)
        if outcome is None:
            return _try_again(promise.paced)
        return _result(outcome, protobuf=True)

    async def _training_result(self, model: ServedModel, number: int) -> Response:
        promise = model.find_promise(number)
        if promise is None:
            raise HTTPException(
                410, f"{model.record.model} has no call {number}, or it is too long ago"
            )
        outcome = await _wait(promise)
        if outcome is not None:
            if not outcome.error and model.log.read_call(number) is not None:
                self._open_sampler(model, outcome)
            return _result(outcome, protobuf=outcome.protobuf)
        missing = model.waits_for
        waits = "" if missing is None else f"waits for seq_id {missing} of {model.record.model}"
        return _try_again(waits)

    def _open_sampler(self, model: ServedModel, outcome: TrainingOutcome) -> None:
        """Make the sampler that a call of save_weights_for_sampler has promised."""
        if outcome.protobuf:
            return
        values = json.loads(outcome.reply)
        id = values.get("sampling_session_id")
        if id is not None:
            weights = model.version_path(outcome.branch, outcome.version)
            name = branch_name(model.record.model, outcome.branch)
            session = model.record.session
            self.samplers.open(SamplerRecord(id, session, name, outcome.version, str(weights)))

    # ---- the REST client -------------------------------------------------------------------------

    async def weights_info(self, request: Request, body: bytes) -> Response:
        path = str(wire.parse_object(body).get("tinker_path"))
        _, saved = find_saved(self.folder, path)
        return JSONResponse(
            {
                "base_model": self.config.model.path,
                "is_lora": saved.rank > 0,
                "lora_rank": saved.rank or None,
            }
        )

    async def training_runs(self, request: Request, body: bytes) -> Response:
        runs = [self._run(model) for model in self.models.values()]
        cursor = {"offset": 0, "limit": len(runs), "total_count": len(runs)}
        return JSONResponse({"training_runs": runs, "cursor": cursor})

    async def training_run(self, request: Request, body: bytes) -> Response:
        id = request.path_params["id"]
        if id not in self.models:
            raise HTTPException(404, f"this server has no model {id}")
        return JSONResponse(self._run(self.models[id]))

    def _run(self, model: ServedModel) -> dict[str, Any]:
        record = model.record
        saved = self._saved(model)
        return {
            "training_run_id": record.model,
            "base_model": self.config.model.path,
            "model_owner": "local",
            "is_lora": record.rank > 0,
            "lora_rank": record.rank or None,
            "last_request_time": _time(model.last_request),
            "last_checkpoint": next((x for x in saved if x["checkpoint_type"] == "training"), None),
            "last_sampler_checkpoint": next(
                (x for x in saved if x["checkpoint_type"] == "sampler"), None
            ),
            "user_metadata": record.metadata,
        }

    def _saved(self, model: ServedModel) -> list[dict[str, Any]]:
        """List the weights that a client saved, the newest first."""
        found = []
        for kind, shown in (("weights", "training"), ("sampler_weights", "sampler")):
            for note in (model.folder / kind).glob("*.json"):
                path = f"tinker://{model.record.model}/{kind}/{note.stem}"
                folder, saved = find_saved(self.folder, path)
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                found.append(
                    {
                        "checkpoint_id": f"{kind}/{note.stem}",
                        "checkpoint_type": shown,
                        "time": _time(saved.time),
                        "tinker_path": path,
                        "size_bytes": size,
                    }
                )
        return sorted(found, key=lambda row: str(row["time"]), reverse=True)

    async def checkpoints(self, request: Request, body: bytes) -> Response:
        model = self._model(request.path_params["id"])
        return JSONResponse({"checkpoints": self._saved(model)})

    async def delete_checkpoint(self, request: Request, body: bytes) -> Response:
        parts = request.path_params
        path = f"tinker://{parts['id']}/{parts['kind']}/{parts['name']}"
        folder, _ = find_saved(self.folder, path)
        folder.with_name(f"{folder.name}.json").unlink(missing_ok=True)
        atomic_write.remove(folder)
        return Response(status_code=204)


async def _wait(future: asyncio.Future[_Outcome]) -> _Outcome | None:
    """Return a future's result, or None after POLL_S."""
    done, _ = await asyncio.wait([future], timeout=POLL_S)
    return future.result() if done else None


def _result(outcome: TrainingOutcome | SampleOutcome, *, protobuf: bool) -> Response:
    if outcome.error:
        return JSONResponse({"error": outcome.error, "category": outcome.category})
    kind = wire.PROTOBUF if protobuf else "application/json"
    return Response(outcome.reply, media_type=kind)


def _try_again(reason: str) -> Response:
    state = {"queue_state": "paused_capacity", "queue_state_reason": reason}
    return JSONResponse(
        {"type": "try_again", **(state if reason else {"queue_state": "active"})}, 408
    )


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


async def _disconnected(request: Request, error: Exception) -> Response:
    """End quietly: a client that ends closes its connections amid requests."""
    return Response(status_code=499)


async def _config_error(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": escape_line(str(error), LONGEST_LINE)}, 400)
