"""The routes of the Tinker API under /api/v1."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tinker.types as sdk
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.printable import LONGEST_LINE, escape_line
from asyncrl.models.tokenizer import collect_model_stops, load_tokenizer
from asyncrl.records import atomic_write, jsonl
from asyncrl.records.jsonl import JsonObject
from asyncrl.tinker import wire
from asyncrl.tinker.links import WorkerLink, log
from asyncrl.tinker.model_records import (
    ModelRecord,
    TrainingCall,
    build_folder_name,
    find_saved,
    locate_note,
    strip_branch,
)
from asyncrl.tinker.models import ServedModel
from asyncrl.tinker.sample_log import TrainedSampleLog
from asyncrl.tinker.samplers import (
    CallPromise,
    SamplePromise,
    SamplerRecord,
    SamplerService,
    SessionShares,
)
from asyncrl.tinker.sequences import SequenceLedger
from asyncrl.tinker.settings import TinkerConfig
from asyncrl.tinker.wire import decode, parse_json, parse_object
from asyncrl.transport.connection_guard import raise_descriptor_limit
from asyncrl.transport.http_server import authorize, open_body

LEDGER_S = 2.0  # between updates of the ledger files
POLL_S = 20.0  # longest time that one request of a client waits for a result
WAITING_BYTES = 4 << 30  # on disk, of training calls that wait for earlier ones
METADATA_BYTES = 1 << 16
MODELS = 1000  # in a server's directory
_Outcome = TypeVar("_Outcome")
Reply = Response | JsonObject
Handler = Callable[[Request, bytes], Awaitable[Reply]]


class TinkerServer:
    """Sessions, models and samplers of a server, in its directory.

    key: the secret that clients send as X-API-Key.  on_failure: called when the server must end."""

    on_failure: Callable[[], None]

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
        stop_tokens = collect_model_stops(self.tokenizer, config.model.path)
        self.samplers = SamplerService(
            config, folder, self.sampling, self.ledger, stop_tokens, self.pace
        )
        self.session_rows = jsonl.JsonlAppender(folder / "sessions.jsonl")
        self.sessions = {row["id"] for row in jsonl.read(folder / "sessions.jsonl")}
        self.models = dict[str, ServedModel]()
        self.shares = SessionShares(WAITING_BYTES)
        # each model keeps files open, and a server opens those of all models when it starts
        self.places = SessionShares(min(MODELS, raise_descriptor_limit() // 16))
        self.tasks = list[asyncio.Task[None]]()
        self.reading = asyncio.Lock()  # the files of models, for a list of them, or deleting some
        self.failure: BaseException | None = None  # why the server ends

    async def start(self) -> None:
        """Continue the models of an earlier server, and start both processes."""
        for deleted in self.folder.glob("*/*weights/.*"):
            atomic_write.remove(deleted)
        for path in sorted(self.folder.glob("*/model.json")):
            record = msgspec.json.decode(path.read_bytes(), type=ModelRecord)
            self._serve(record)
        await self.trainer.start()
        await self.sampling.start()
        self._start_task(self._write_ledgers())

    async def _write_ledgers(self) -> None:
        """Keep the ledger files current while clients only sample."""
        while True:
            await asyncio.sleep(LEDGER_S)
            for model in [*self.models.values()]:
                await asyncio.sleep(0)  # requests go on between two models
                model.write_ledger()
            if self.ledger.is_long:
                await self.ledger.rewrite()

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
        folder = self.folder / build_folder_name(record.model)
        model = ServedModel(
            record,
            folder,
            self.config,
            self.trainer,
            self.ledger,
            TrainedSampleLog(folder, self.tokenizer),
            shares=self.shares,
            samplers=self.samplers,
        )
        self.models[record.model] = model
        self.places.used[record.session] += 1
        self._start_task(model.run())
        return model

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that ends only with the server: if it fails, the server ends."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._end_with)
        self.tasks.append(task)

    def _end_with(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self.failure = self.failure or failure
            self.on_failure()

    def pace(self, sampler: SamplerRecord, count: int) -> str:
        """Return why a request to sample `count` sequences must wait; "": it need not wait.

        With on_exceed = pace, a model may have as many untrained sequences within the limit as
        max_lag + 1 optimizer steps train. A request waits only while calls of the model are being
        carried out, so a client that trains only after it has its samples never deadlocks."""
        limit = self.config.staleness.max_lag
        model = self.models.get(strip_branch(sampler.model))
        if self.config.staleness.on_exceed != "pace" or model is None or model.is_idle:
            return ""
        if sampler.model != model.ancestry.model:
            return ""
        untrained = self.ledger.untrained[sampler.model].items()
        sampled_ahead = sum(n for version, n in untrained if version >= model.version - limit)
        sampled_ahead += self.samplers.in_flight[sampler.model]
        allowed = (limit + 1) * model.batch
        if not model.batch or not sampled_ahead or sampled_ahead + count <= allowed:
            return ""
        return (
            f"{sampled_ahead} sequences of {sampler.model} wait to be trained: with "
            f"staleness.max_lag = {limit:g} and {model.batch} sequences a step, more would be too "
            "old"
        )

    # ---- HTTP ------------------------------------------------------------------------------------

    def starlette(self) -> Starlette:
        """Return the ASGI application."""
        is_rust = self.config.server.client_transport == "rust"
        model = {
            "model_name": self.config.model.path,
            "max_context_length": self.config.sampling.context,
            "trainable": True,
            "sampleable": True,
        }
        post: dict[str, Handler] = {
            # Starlette tries routes in this order: those called for every sequence come first
            "retrieve_future": self.retrieve_future,
            "asample": self.sample,
            "client/config": _always(use_pyqwest_transport=is_rust),
            "client/dynamic_config": _always(),
            "telemetry": _always(status="accepted"),
            "create_session": self.create_session,
            "session_heartbeat": _always(type="session_heartbeat"),
            "sessions/{id}/finish": _always(),
            "create_model": self.create_model,
            "load_weights": self.load_weights,
            "get_info": self.get_info,
            "forward_backward": self.submit_loss,
            "forward": self.submit_loss,
            "optim_step": self.submit_training_call,
            "save_weights": self.submit_training_call,
            "save_weights_for_sampler": self.submit_training_call,
            "create_sampling_session": self.create_sampling_session,
            "join_sampling_session": self.join_sampling_session,
            "cancel_future": self.cancel_future,
            "weights_info": self.get_weights_info,
        }
        get: dict[str, Handler] = {
            "healthz": _always(status="ok"),
            "get_server_capabilities": _always(supported_models=[model]),
            "samplers/{id}": self.get_sampler,
            "training_runs": self.list_training_runs,
            "training_runs/{id}": self.get_training_run,
            "training_runs/{id}/checkpoints": self.list_checkpoints,
        }
        delete = {"training_runs/{id}/checkpoints/{kind}/{name}": self.delete_checkpoint}
        routes = [
            Route(f"/api/v1/{path}", self._guard(handler), methods=[method])
            for method, table in (("POST", post), ("GET", get), ("DELETE", delete))
            for path, handler in table.items()
        ]
        return Starlette(
            routes=routes,
            exception_handlers=dict.fromkeys(
                (HTTPException, AsyncrlError, OSError, ClientDisconnect), _reply_error
            ),
        )

    def _guard(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: check the key, then read the body up to the limit."""

        async def respond(request: Request) -> Response:
            if not authorize(request, self.key):
                raise HTTPException(
                    401,
                    "X-API-Key is not this server's key: set TINKER_API_KEY to the content of "
                    "its file api_key",
                )
            if coding := request.headers.get("content-encoding"):
                raise HTTPException(415, f"Content-Encoding: {coding} is not served")
            limit = self.config.server.body_mib << 20
            async with open_body(request, limit, " (server.body_mib)") as body:
                reply = await handler(request, body)
            return JSONResponse(reply) if isinstance(reply, dict) else reply

        return respond

    # ---- sessions --------------------------------------------------------------------------------

    async def create_session(self, request: Request, body: bytes) -> Reply:
        await decode(parse_json, sdk.CreateSessionRequest, body)
        session = f"s-{secrets.token_hex(6)}"
        self.session_rows.write({"id": session, "time": time.time()})
        self.sessions.add(session)
        return {"type": "create_session", "session_id": session}

    def _check_session(self, id: str | None) -> str:
        if id is None or id not in self.sessions:
            raise ConfigError(f"session_id = {id}: this server has no such session")
        return id

    def _check_base_model(self, name: str | None) -> None:
        path = self.config.model.path
        names = {path, str(self.path), "/".join(self.path.parts[-2:]), self.path.name}
        if name is not None and name not in names:
            raise ConfigError(f"base_model = {name}: this server has only {path}")

    # ---- models ----------------------------------------------------------------------------------

    async def create_model(self, request: Request, body: bytes) -> Reply:
        message = await decode(parse_json, sdk.CreateModelRequest, body)
        self._check_base_model(message.base_model)
        if message.optimizer_config.type != "adamw":
            raise ConfigError(
                f"optimizer_config.type = {message.optimizer_config.type}: only adamw"
            )
        rank = seed = 0
        if most := self.config.lora.rank:
            lora = message.lora_config
            rank = most if lora is None else lora.rank
            if not 1 <= rank <= most:
                raise ConfigError(
                    f"lora_config.rank = {rank}: the server's largest is lora.rank = {most}"
                )
            if lora is not None and not (lora.train_mlp and lora.train_attn):
                raise ConfigError(
                    "lora_config: train_mlp and train_attn = false are not served; "
                    "lora.target_modules of the server names the layers"
                )
            seed = self.config.seed if lora is None or lora.seed is None else lora.seed
        model = f"{self._check_session(message.session_id)}:train:{message.model_seq_id}"
        record = ModelRecord(
            model, message.session_id, rank, seed, time.time(), metadata=message.user_metadata
        )
        return await self._create_model(record, TrainingCall(0, "create_model", body))

    async def _create_model(self, record: ModelRecord, call: TrainingCall) -> JsonObject:
        """Create a model with its call 0."""
        if (size := len(json.dumps(record.metadata))) > METADATA_BYTES:
            raise ConfigError(
                f"user_metadata: {size} bytes of JSON, more than {METADATA_BYTES}: it stands in "
                "the list of all models"
            )
        model = self.models.get(record.model)
        if model is None:
            if not self.places.is_free(record.session, 1):
                raise ConfigError(
                    f"{record.session} has {self.places.used[record.session]} models, as many as "
                    f"all sessions leave free of {self.places.total}: it gets no more"
                )
            folder = self.folder / build_folder_name(record.model)
            folder.mkdir(exist_ok=True)
            atomic_write.write(folder / "model.json", msgspec.json.encode(record))
            model = self._serve(record)
        return await self._submit(model, call)

    async def load_weights(self, request: Request, body: bytes) -> Reply:
        message = await decode(parse_json, sdk.LoadWeightsRequest, body)
        if message.model_id is not None:
            return await self.submit_training_call(request, body)
        self._check_base_model(message.base_model)
        _, saved = find_saved(self.folder, message.path, "weights")
        session = self._check_session(message.session_id)
        record = ModelRecord(
            f"{session}:train:{message.model_seq_id}",
            session,
            saved.rank,
            self.config.seed,
            time.time(),
            source=message.path,
            optimizer=message.optimizer,
            version=saved.version,
            parents={saved.model: saved.version, **saved.parents},
            metadata=message.user_metadata,
        )
        return await self._create_model(record, TrainingCall(0, "load_weights", body))

    def _find_model(self, id: str | None) -> ServedModel:
        if (model := self.models.get(id or "")) is None:
            raise ConfigError(f"model_id = {id}: this server has no such model")
        return model

    async def _submit(self, model: ServedModel, call: TrainingCall) -> JsonObject:
        async with model.submitting:
            await model.submit(call)
        return {"request_id": f"{model.id}:call:{call.number}", "model_id": model.id}

    async def _submit_next(self, id: str | None, call: TrainingCall) -> JsonObject:
        model = self._find_model(id)
        if call.number < 1:
            raise ConfigError(f"seq_id = {call.number}: the calls of a model are numbered from 1")
        return await self._submit(model, call)

    async def submit_training_call(self, request: Request, body: bytes) -> Reply:
        values = await decode(parse_object, body)
        id, number = values.get("model_id"), values.get("seq_id")
        if not isinstance(id, str) or type(number) is not int:
            raise ConfigError(
                "the body must be JSON with model_id, a text, and seq_id, a whole number"
            )
        route = request.url.path.rpartition("/")[2]
        return await self._submit_next(id, TrainingCall(number, route, body))

    async def submit_loss(self, request: Request, body: bytes) -> Reply:
        if wire.PROTOBUF not in request.headers.get("content-type", ""):
            raise HTTPException(415, f"the body must be {wire.PROTOBUF}: update the client")
        message = await decode(wire.parse_loss_request, body)
        route = "forward" if message.forward_only else "forward_backward"
        return await self._submit_next(message.model_id, TrainingCall(message.seq_id, route, body))

    async def get_info(self, request: Request, body: bytes) -> Reply:
        message = await decode(parse_json, sdk.GetInfoRequest, body)
        record = self._find_model(message.model_id).record
        return {
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

    # ---- samplers --------------------------------------------------------------------------------

    async def create_sampling_session(self, request: Request, body: bytes) -> Reply:
        message = await decode(parse_json, sdk.CreateSamplingSessionRequest, body)
        session = self._check_session(message.session_id)
        id = f"{session}:sample:{message.sampling_session_seq_id}"
        if message.model_path:
            directory, saved = find_saved(self.folder, message.model_path)
            weights = directory / "model" if "/weights/" in message.model_path else directory
            record = SamplerRecord(
                id, session, saved.model, saved.version, str(weights), message.model_path
            )
        else:
            self._check_base_model(message.base_model)
            record = SamplerRecord(id, session)
        opened = self.samplers.open(record)
        if (opened.path, opened.weights) != (record.path, record.weights):
            raise ConfigError(
                f"sampling_session_seq_id {message.sampling_session_seq_id} of {session} was "
                "another sampler: each one needs the next number"
            )
        return {"type": "create_sampling_session", "sampling_session_id": id}

    async def join_sampling_session(self, request: Request, body: bytes) -> Reply:
        message = await decode(parse_json, sdk.JoinSamplingSessionRequest, body)
        sampler = self.samplers.find(message.sampling_session_id)
        self.samplers.clones[sampler.id] += 1
        return {"client_counter": self.samplers.clones[sampler.id]}

    async def get_sampler(self, request: Request, body: bytes) -> Reply:
        id = request.path_params["id"]
        if id not in self.samplers.samplers:
            raise HTTPException(404, f"this server has no sampler {id}")
        sampler = self.samplers.find(id)
        return {
            "sampler_id": id,
            "base_model": self.config.model.path,
            "model_path": sampler.path or None,
        }

    async def sample(self, request: Request, body: bytes) -> Reply:
        message = await decode(parse_json, sdk.SampleRequest, body)
        name, promise = self.samplers.submit(message, body)
        return {"request_id": name, "sample_sequence_ids": promise.sequences}

    async def cancel_future(self, request: Request, body: bytes) -> Reply:
        self.samplers.cancel(str((await decode(parse_object, body)).get("request_id")))
        return Response(status_code=204)

    # ---- results ---------------------------------------------------------------------------------

    async def retrieve_future(self, request: Request, body: bytes) -> Reply:
        message = await decode(parse_json, sdk.FutureRetrieveRequest, body)
        id = message.request_id
        name, _, number = id.rpartition(":call:")
        promise: CallPromise | None = self.samplers.promises.get(id)
        model = None
        if name and number.isdecimal() and len(number) < 19:
            model = self._find_model(name)
            promise = await model.find_promise(int(number))
        if promise is None:  # lost with an earlier server, or too long ago: it is made again
            raise HTTPException(410, f"{id} is not known here any more")
        outcome = await _wait(request, promise.future)
        if outcome is None:
            reason = (model or promise).waits_for
            state = {"queue_state": "paused_capacity", "queue_state_reason": reason}
            again = {"type": "try_again", **(state if reason else {"queue_state": "active"})}
            return JSONResponse(again, 408)
        if isinstance(promise, SamplePromise):
            promise.is_retrieved = not request.scope["asyncrl.connection"].is_closed
        if outcome.error:
            return {"error": outcome.error, "category": outcome.category}
        kind = wire.PROTOBUF if outcome.protobuf else "application/json"
        return Response(outcome.reply, media_type=kind)

    # ---- the REST client -------------------------------------------------------------------------

    async def get_weights_info(self, request: Request, body: bytes) -> Reply:
        path = str((await decode(parse_object, body)).get("tinker_path"))
        return self._describe_rank(find_saved(self.folder, path)[1].rank)

    def _describe_rank(self, rank: int) -> JsonObject:
        path = self.config.model.path
        return {"base_model": path, "is_lora": rank > 0, "lora_rank": rank or None}

    async def list_training_runs(self, request: Request, body: bytes) -> Reply:
        runs = await self._read_files(self._describe_run, *self.models.values())
        cursor = {"offset": 0, "limit": len(runs), "total_count": len(runs)}
        return {"training_runs": runs, "cursor": cursor}

    async def get_training_run(self, request: Request, body: bytes) -> Reply:
        id = request.path_params["id"]
        if id not in self.models:
            raise HTTPException(404, f"this server has no model {id}")
        [run] = await self._read_files(self._describe_run, self.models[id])
        return run

    async def _read_files(
        self, read: Callable[[ServedModel], _Outcome], *models: ServedModel
    ) -> list[_Outcome]:
        """Apply `read` to models in a thread, for one request at a time: the others go on."""
        async with self.reading:
            return [await asyncio.to_thread(read, model) for model in models]

    def _describe_run(self, model: ServedModel) -> JsonObject:
        record = model.record
        last = {saved["checkpoint_type"]: saved for saved in reversed(self._list_saved(model))}
        metadata = record.metadata
        if substitute := self.config.losses.stable_reinforce:
            metadata = (metadata or {}) | {"losses.stable_reinforce": substitute}
        return {
            **self._describe_rank(record.rank),
            "training_run_id": record.model,
            "model_owner": "local",
            "last_request_time": _format_time(model.last_request),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": metadata,
        }

    def _list_saved(self, model: ServedModel) -> list[JsonObject]:
        """List the weights that clients saved, newest first."""
        checkpoints = []
        for kind, checkpoint_type in (("weights", "training"), ("sampler_weights", "sampler")):
            for note in (model.folder / kind).glob("*.json"):
                path = f"tinker://{model.id}/{kind}/{note.stem}"
                try:
                    folder, saved = find_saved(self.folder, path)
                    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                except (ConfigError, OSError):  # not what this server wrote, or deleted meanwhile
                    continue
                checkpoints.append(
                    {
                        "checkpoint_id": f"{kind}/{note.stem}",
                        "checkpoint_type": checkpoint_type,
                        "time": _format_time(saved.time),
                        "tinker_path": path,
                        "size_bytes": size,
                    }
                )
        return sorted(checkpoints, key=lambda checkpoint: checkpoint["time"], reverse=True)

    async def list_checkpoints(self, request: Request, body: bytes) -> Reply:
        model = self._find_model(request.path_params["id"])
        [checkpoints] = await self._read_files(self._list_saved, model)
        return {"checkpoints": checkpoints}

    async def delete_checkpoint(self, request: Request, body: bytes) -> Reply:
        params = request.path_params
        path = f"tinker://{params['id']}/{params['kind']}/{params['name']}"
        folder, _ = find_saved(self.folder, path)
        locate_note(folder).unlink(missing_ok=True)
        deleted = folder.with_name(f".{secrets.token_hex(4)}")  # its name may be saved meanwhile
        with contextlib.suppress(FileNotFoundError):
            folder.rename(deleted)
        async with self.reading:
            await asyncio.to_thread(atomic_write.remove, deleted)
        return Response(status_code=204)


def _always(**reply: Any) -> Handler:
    """Return a handler that sends the same reply to every request."""

    async def handle(request: Request, body: bytes) -> Reply:
        return reply

    return handle


async def _wait(request: Request, future: asyncio.Future[_Outcome]) -> _Outcome | None:
    """Return the future's result, or None if it takes longer than POLL_S.

    Meanwhile the request's connection may be closed: its client asks again."""
    connection = request.scope["asyncrl.connection"]
    connection.is_polling = True
    finished, _ = await asyncio.wait([future], timeout=POLL_S)
    connection.is_polling = False
    return future.result() if finished else None


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


async def _reply_error(request: Request, error: Exception) -> Response:
    """Build the response of a request that failed.

    503: it could not be recorded and so changed nothing; clients repeat it."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    if isinstance(error, ClientDisconnect):  # a client that exits closes its connections
        return Response(status_code=499)
    is_refused = isinstance(error, ConfigError)
    if not is_refused:
        log(f"{request.url.path}: {error}")
    text = escape_line(str(error), LONGEST_LINE)
    return JSONResponse({"error": text}, 400 if is_refused else 503)
