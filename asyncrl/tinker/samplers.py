"""The samplers of a server: pinned versions of its models, and requests to sample from them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tinker.types as sdk
import xxhash
from starlette.exceptions import HTTPException

from asyncrl.contract.errors import ConfigError
from asyncrl.models.tokenizer import read_vocabulary_size
from asyncrl.records import jsonl
from asyncrl.tinker import wire
from asyncrl.tinker.links import WorkerExited, WorkerLink, log
from asyncrl.tinker.messages import CallFailure, SampleCall, SampleResult
from asyncrl.tinker.model_records import CallOutcome, find_saved
from asyncrl.tinker.sequences import SequenceLedger
from asyncrl.tinker.settings import REFUSAL, TinkerConfig

KEPT = 4096  # requests from which on results that clients have are forgotten
REQUEST_BYTES = 1 << 30  # of all requests and their results
TURN = 4  # times the slots of the engine: sequences that a session has in the sampling process
UNCLAIMED_S = 600.0  # after which a result counts as one that its client has
REMEMBERED = 10_000  # samplers that stay usable
INFLIGHT = ":inflight:"  # in the ids of samplers that follow the newest weights of their kind


@dataclass
class SessionShares:
    """Bytes in use by session.

    A session may take as many as all sessions leave free, so every session finds some."""

    total: int
    used: Counter[str] = field(default_factory=Counter)

    def is_free(self, session: str, size: int) -> bool:
        """Return whether a session may take `size` bytes more."""
        return self.used[session] + size <= self.total - self.used.total()

    def refuse(self, session: str, what: str) -> HTTPException:
        """Build the error after which a client repeats its request."""
        return HTTPException(429, f"too many {what} of {session} wait", {"retry-after": "1"})


class SamplerRecord(msgspec.Struct, frozen=True):
    """A sampler, as a row of samplers.jsonl.

    model: branch of its weights; "": the base model.  weights: their directory; "": the base model.
    path: the tinker path that it was created from, or "".
    """

    id: str
    session: str
    model: str = ""
    version: int = 0
    weights: str = ""
    path: str = ""


@dataclass(eq=False)
class CallPromise:
    """A pending or finished request.

    digest: of its body.
    size: the bytes of disk or memory that it and its result take at most."""

    digest: bytes
    size: int

    def __post_init__(self) -> None:
        self.future = asyncio.Future[CallOutcome]()
        self.waits_for = ""  # why it waits, or ""


@dataclass(eq=False)
class SamplePromise(CallPromise):
    """A request to sample.

    sequences: the ids of its sequences.
    sampler: whose weights it samples from.
    is_retrieved: its client has the result, or asked for it long ago, so it may be forgotten.
    task: which samples them."""

    sequences: list[str]
    sampler: SamplerRecord
    is_retrieved: bool = False
    task: asyncio.Task[None] = field(init=False)


def compute_digest(body: bytes) -> bytes:
    """Return the digest by which a repeated request is recognized; b"" without a body."""
    return xxhash.xxh3_128_digest(body) if body else b""


@dataclass(eq=False)
class SamplerService:
    """The samplers of a server and their requests.

    folder: the server's directory.
    link: to the sampling process.
    ledger: which records each sequence before its client receives it.
    stop_tokens: the model's own stop tokens.
    pace: called before sampling with the sampler and the number of sequences; returns the reason
        why the request must wait, or ""."""

    config: TinkerConfig
    folder: Path
    link: WorkerLink
    ledger: SequenceLedger
    stop_tokens: Sequence[int]
    pace: Callable[[SamplerRecord, int], str]
    remembered = REMEMBERED  # samplers that stay usable; up to twice as many are stored

    def __post_init__(self) -> None:
        self.vocabulary = read_vocabulary_size(self.config.model.path) or 1 << 31
        path = self.folder / "samplers.jsonl"
        records = [msgspec.convert(record, SamplerRecord) for record in jsonl.read(path)]
        self.samplers = {record.id: record for record in records}  # the one used last comes last
        self.inflight = dict[str, SamplerRecord]()  # model -> the newest one
        for record in records:
            self._follow(record)
        self.file = jsonl.JsonlAppender(path)
        self.promises = dict[str, SamplePromise]()
        self.shares = SessionShares(REQUEST_BYTES)
        self.suspects: set[SamplePromise] = set()  # sampled when the process crashed
        self.one_by_one = asyncio.Lock()
        self.clones = Counter[str]()  # sampler -> further clients
        # a restarted server must not repeat random streams for new requests
        self.ticket = self.ledger.sampled_total
        self.released = asyncio.Event()
        self.in_flight = Counter[str]()  # model -> sequences that need not wait for training
        # session -> its turns, and its free places in the sampling process
        self.turns = dict[str, tuple[asyncio.Lock, asyncio.Semaphore]]()

    def open(self, record: SamplerRecord) -> SamplerRecord:
        """Create a sampler, or return the existing one with this id."""
        if record.id not in self.samplers:
            self.file.write(msgspec.to_builtins(record))
            self.samplers[record.id] = record
            self._follow(record)
            if len(self.samplers) > 2 * self.remembered:
                # drop samplers whose weights were deleted, then the least recently used ones
                stored = self.samplers.values()
                usable = [x for x in stored if not x.weights or Path(x.weights).exists()]
                self.samplers = {x.id: x for x in usable[-self.remembered :]}
                self.clones &= Counter(dict.fromkeys(self.samplers, self.clones.total()))
                self.file.replace(jsonl.encode(map(msgspec.to_builtins, self.samplers.values())))
        return self.samplers[record.id]

    def _follow(self, record: SamplerRecord) -> None:
        """Let all inflight samplers of a model sample from a new one's weights."""
        model, kind, _ = record.id.partition(INFLIGHT)
        if kind:  # the number of the call that saved its weights is the last part of an id
            both = record, self.inflight.get(model, record)
            self.inflight[model] = max(both, key=lambda one: int(one.id.rpartition(":")[2]))

    def find(self, id: str | None) -> SamplerRecord:
        """Return a sampler.  Raises ConfigError."""
        if id is None or id not in self.samplers:
            raise ConfigError(
                f"sampling_session_id = {id}: this server has no such sampler among the "
                f"{self.remembered} used last; create a new sampling client"
            )
        self.samplers[id] = self.samplers.pop(id)
        return self.samplers[id]

    def submit(self, request: sdk.SampleRequest, body: bytes) -> tuple[str, SamplePromise]:
        """Accept a request; a repeated one returns the same promise.

        Raises ConfigError, and HTTPException as `_make_room` does."""
        sampler = self.find(request.sampling_session_id)
        name = f"{sampler.id}:sample:{request.seq_id}"
        digest = compute_digest(body)
        if request.seq_id is not None and name in self.promises:
            if self.promises[name].digest != digest:
                raise ConfigError(f"seq_id {request.seq_id} of {sampler.id} was another request")
            return name, self.promises[name]
        if request.record_stability_info and not self.config.losses.stable_reinforce:
            # the client will train with stable_reinforce: refuse it before anything is sampled
            raise ConfigError(f"record_stability_info: {REFUSAL}")
        if sampler.path:
            _, saved = find_saved(self.folder, sampler.path)
            if (saved.model, saved.version) != (sampler.model, sampler.version):
                raise ConfigError(
                    f"{sampler.path} were saved again: create a new sampling client for them"
                )
        sampler = self.inflight.get(sampler.id.partition(INFLIGHT)[0], sampler)
        seed = request.sampling_params.seed
        job = wire.parse_sample_request(
            request,
            (sampler.weights, sampler.model, sampler.version),
            stop_tokens=self.stop_tokens,
            limit=self.config.sampling.context,
            default=self.config.sampling.max_new_tokens,
            vocabulary=self.vocabulary,
            seed=self.config.seed if seed is None else seed,
            ticket=self.ticket + 1 if seed is None else 0,
        )
        self.ticket += 1
        size = len(body) + 4096 + job.count * (256 + 8 * job.first.max_new_tokens)
        size += 8 * job.prompt_topk * len(job.first.prompt)
        self._make_room(sampler.session, size)
        sequences = self.ledger.mint(job.count)
        if request.seq_id is None:  # it must not take the name of another, which still counts
            name = f"{sampler.id}:sample:{sequences[0]}"
        promise = SamplePromise(digest, size, sequences, sampler)
        self.promises[name] = promise
        promise.task = asyncio.create_task(self._sample(job, promise))
        return name, promise

    def _make_room(self, session: str, size: int) -> None:
        """Count a new request, and forget results, if need be.

        Results that clients have go first, then those that larger sessions have not fetched.

        Raises ConfigError for a request that never fits, and HTTPException 429, after which clients
        repeat the request."""
        if 2 * size > self.shares.total:
            raise ConfigError(
                f"the result may take {size >> 20} MiB: lower num_samples or max_tokens"
            )
        shares, used = self.shares, self.shares.used
        forgettable = (
            name
            for is_retrieved in (True, False)
            for name, promise in [*self.promises.items()]
            if promise.future.done() and promise.is_retrieved == is_retrieved
            if is_retrieved or used[promise.sampler.session] > used[session] + size
        )
        while not (has_room := shares.is_free(session, size)) or len(self.promises) >= KEPT:
            name = next(forgettable, "")
            if not name or (has_room and not self.promises[name].is_retrieved):
                break
            promise = self.promises.pop(name)
            used -= Counter({promise.sampler.session: promise.size})
        if not has_room:
            raise shares.refuse(session, "requests to sample")
        used[session] += size

    async def _sample(self, job: SampleCall, promise: SamplePromise) -> None:
        sampler = promise.sampler
        try:
            while reason := self.pace(sampler, job.count):
                promise.waits_for = reason
                self.released.clear()
                await self.released.wait()
            promise.waits_for = ""
            self.in_flight[sampler.model] += job.count
            try:
                outcome = await self._take_turn(job, promise)
            finally:
                self.in_flight[sampler.model] -= job.count
        except asyncio.CancelledError:
            outcome = CallOutcome(error="the request was canceled")
        except (CallFailure, WorkerExited) as error:
            outcome = CallOutcome(error=str(error), category=error.category)
        except Exception as error:  # a client waits for the outcome
            log(f"{sampler.id}: {error!r}")
            outcome = CallOutcome(error=repr(error), category="server")
        self.suspects.discard(promise)
        if not promise.future.done():
            promise.future.set_result(outcome)
        asyncio.get_running_loop().call_later(UNCLAIMED_S, setattr, promise, "is_retrieved", True)

    async def _take_turn(self, job: SampleCall, promise: SamplePromise) -> CallOutcome:
        """Sample as soon as the session has few sequences in the sampling process.

        That process takes requests in their order, so those of other sessions wait for these few.
        """
        window = TURN * self.config.sampling.slots
        new = asyncio.Lock(), asyncio.Semaphore(window)
        turn, places = self.turns.setdefault(promise.sampler.session, new)
        async with contextlib.AsyncExitStack() as taken:
            async with turn:
                for _ in range(min(job.count, window)):
                    await taken.enter_async_context(places)
            return await self._call_sampler(job, promise)

    async def _call_sampler(self, job: SampleCall, promise: SamplePromise) -> CallOutcome:
        """Sample; if the process exits, a new one samples the same sequences.

        If it crashed, one of its requests was the cause.  They and later ones are then sampled one
        by one, and the one on which it crashes again is not repeated."""
        for attempt in range(self.config.restarts + 1):
            is_alone = bool(self.suspects)
            try:
                async with self.one_by_one if is_alone else contextlib.nullcontext():
                    result: SampleResult = await self.link.call("add", job)
            except WorkerExited as error:
                if attempt == self.config.restarts or (error.crashed and is_alone):
                    raise
                if error.crashed:
                    self.suspects.add(promise)
                continue
            _, model, version = job.version
            for id, sequence in zip(promise.sequences, result.sequences, strict=True):
                self.ledger.record(id, model, version, sequence.tokens, sequence.logprobs)
            return CallOutcome(wire.encode_samples(result), protobuf=True)
        raise AssertionError("unreachable")

    def cancel(self, name: str) -> None:
        """Cancel a request that its client no longer waits for."""
        promise = self.promises.get(name)
        if promise is not None and not promise.future.done():
            promise.is_retrieved = True
            promise.task.cancel()

    def close(self) -> None:
        self.file.close()
