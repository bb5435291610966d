"""A trained model of a server: its ordered calls, its version, its lags and its files.

```
MODEL/config.toml      a run's config, so that `asyncrl watch` and `asyncrl report` show the model
MODEL/metrics.jsonl    a row for each optimizer step
MODEL/trained.jsonl    the sequences and lags of each optimizer step
MODEL/token_samples.jsonl  some trained datums with every token
MODEL/ledger.json      sequences of the model by how often they were trained
MODEL/model.json       what the model was created from
MODEL/calls, checkpoints  see model_records.py
MODEL/weights/NAME, MODEL/sampler_weights/NAME   saved by the client, with NAME.json
MODEL/versions/B-V     weights of version V of branch B for samplers without a name
```
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tinker.types as sdk
from starlette.exceptions import HTTPException

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write, jsonl, metrics
from asyncrl.records.jsonl import JsonObject
from asyncrl.tinker import wire
from asyncrl.tinker.links import WorkerExited, WorkerLink, log
from asyncrl.tinker.messages import (
    FREE_BYTES,
    NOT_SAMPLED,
    CallFailure,
    Datum,
)
from asyncrl.tinker.model_records import (
    NAME,
    CallLog,
    ModelRecord,
    SavedWeights,
    TrainingCall,
    TrainingOutcome,
    find_saved,
    locate_note,
)
from asyncrl.tinker.sample_log import TrainedSampleLog
from asyncrl.tinker.samplers import (
    INFLIGHT,
    CallPromise,
    SamplerRecord,
    SamplerService,
    SessionShares,
    compute_digest,
)
from asyncrl.tinker.sequences import (
    ModelAncestry,
    SampledRun,
    SequenceLedger,
    build_trained_row,
    check_lags,
    measure_lag_metrics,
    measure_lags,
)
from asyncrl.tinker.settings import TinkerConfig, build_run_config

CALL_BYTES = 1 << 30  # of calls and results after which a model gets a checkpoint
FARTHEST = 10_000  # most calls that a call may be ahead of the next one


@dataclass(eq=False)
class ServedModel:
    """A model since its creation; a restarted server continues it.

    record: what it was created from.
    folder: MODEL, with the files above.
    trainer: the link to the training process.
    ledger: the sampled sequences of the server.
    samples: the log of its trained datums.
    shares: the disk space of calls that wait.
    samplers: which sample from its versions."""

    record: ModelRecord
    folder: Path
    config: TinkerConfig
    trainer: WorkerLink
    ledger: SequenceLedger
    samples: TrainedSampleLog
    shares: SessionShares
    samplers: SamplerService

    def __post_init__(self) -> None:
        """Open the model's folder."""
        record, folder = self.record, self.folder
        self.id = record.model
        self.log = CallLog(folder)
        self.logged = self.log.measure()  # bytes
        self.branch = 0  # number of the load_weights call that its weights descend from
        self.ancestry = ModelAncestry(record.model, dict(record.parents))
        self.version = record.version
        self.next = 0  # the number of the call that is carried out next
        self.unusable = ""  # why every call fails
        self.loaded = 0  # generation of the training process that holds the model
        self.promises = dict[int, CallPromise]()
        self.arrived = asyncio.Event()
        self.submitting = asyncio.Lock()
        self.last_request = record.time
        self.batch = 0  # sequences in the last optimizer step
        self.stepped = math.inf  # when this server made the last optimizer step
        self.written_totals: dict[str, int] = {}  # in ledger.json
        self._begin_step()
        path = folder / "config.toml"
        if not path.exists():
            atomic_write.write(path, load.dump(build_run_config(self.config, record.rank)))
        path = folder / "trained.jsonl"
        rows = jsonl.read(path)
        self.recorded = max((row["call"] for row in rows), default=0)
        self.listed = sum(len(row["sequences"]) for row in rows)  # ids in trained.jsonl
        self.supervised = sum(row["supervised"] for row in rows)  # tokens
        counted = self.ledger.counted.get(record.model, -1)
        for row in rows:
            if (number := row["call"]) > counted:
                self.ledger.mark_trained(row["sequences"], record.model, number)
        self.trained_file = jsonl.JsonlAppender(path)
        self.metrics = metrics.MetricsWriter(folder)
        self.clock = metrics.RunClock(folder)
        self.clock.start(time.monotonic())

        # restore the state after the calls whose outcomes are on disk
        for number in self.log.list_numbers("outcome"):
            outcome = self.log.read_outcome(number)
            call = self.log.read_call(number)
            assert outcome is not None
            self._apply_outcome(number, call.route if call else None, outcome)
        for number in self.log.list_numbers("call"):
            if number >= self.next and (waiting := self.log.read_call(number)) is not None:
                self._open_promise(waiting, compute_digest(waiting.body))

    def _begin_step(self) -> None:
        """Clear the bookkeeping of the previous optimizer step."""
        self.lags = Counter[int]()
        self.sequences = list[str]()
        self.refused = ""  # why a call of this step failed
        self.samples.drop()

    def _apply_outcome(self, number: int, route: str | None, outcome: TrainingOutcome) -> None:
        """Continue after a call whose outcome is on disk, and write the rows that follow from it.

        route: None if the call itself was pruned.  Raises AsyncrlError and OSError for a row that
        cannot be written; the next server then writes it."""
        self.next = number + 1
        if not number and outcome.error:
            self.unusable = f"{self.id} was not created: {outcome.error}"
        if outcome.row and number > self.recorded:
            self.samples.write(self.version)
            seconds = self.clock.seconds_at(time.monotonic())
            self.metrics.write(outcome.row["batch"], outcome.metrics, seconds)
            self.trained_file.write(outcome.row)
            self.ledger.mark_trained(outcome.row["sequences"], self.id, number)
            self.recorded = number
            self.supervised += outcome.row["supervised"]
            self.listed += len(outcome.row["sequences"])
            self.write_ledger()
        self.version = outcome.version
        self.branch = outcome.branch
        branch = f"{self.id}@{outcome.branch}" if outcome.branch else self.id
        self.ancestry = ModelAncestry(branch, dict(outcome.parents))
        if route == "forward_backward":
            self.lags.update(outcome.lags)
            self.sequences += outcome.sequences
            self.refused = self.refused or outcome.error
        elif route == "optim_step":
            self.batch = len(set(self.sequences)) or self.batch
            self._begin_step()
        elif route == "load_weights" and not outcome.error:
            self._begin_step()

    def _drop_sequences(self) -> None:
        """Drop the ids of sequences from trained.jsonl, after the ledger's file counts them.

        Without that, the file would grow with every sequence."""
        rows = jsonl.read(self.trained_file.path)
        self.trained_file.replace(jsonl.encode(row | {"sequences": []} for row in rows))
        self.listed = 0

    # ---- calls -----------------------------------------------------------------------------------

    async def submit(self, call: TrainingCall) -> None:
        """Accept a call, after those in `submitting`; a repeated request is the same call.

        Raises ConfigError, and HTTPException 429, after which clients repeat the request."""
        self.last_request = time.time()
        number, digest = call.number, compute_digest(call.body)
        if number < self.next or number in self.promises:
            first = b""
            if number in self.promises:
                first = self.promises[number].digest
            elif (old := self.log.read_call(number)) is not None:
                first = compute_digest(old.body)
            if first not in (b"", digest):
                raise ConfigError(
                    f"seq_id {number} of {self.id} was another call: each call of a "
                    "model needs the next seq_id"
                )
            return
        if number > self.next + FARTHEST:
            raise ConfigError(
                f"seq_id {number} of {self.id} is far ahead of the next one, {self.next}"
            )
        if shutil.disk_usage(self.folder).free - len(call.body) < FREE_BYTES // 4:
            raise HTTPException(
                503, f"the disk of {self.folder} is full: delete saved weights, or free other space"
            )
        # the one that all others wait for is always accepted
        if number > self.next and not self.shares.is_free(self.record.session, len(call.body)):
            raise self.shares.refuse(self.record.session, "training calls")
        is_full = self.logged > 2 * CALL_BYTES and (self.lags or self.refused)  # see `_carry_out`
        if is_full and call.route.startswith("forward"):
            call = msgspec.structs.replace(call, body=b"")  # refused in its turn, also if repeated
        await asyncio.to_thread(self.log.write, number, "call", call)
        self.logged += len(call.body)
        self._open_promise(call, digest)
        self.arrived.set()

    def _open_promise(self, call: TrainingCall, digest: bytes) -> None:
        self.shares.used[self.record.session] += len(call.body)
        self.promises[call.number] = CallPromise(digest, len(call.body))

    async def find_promise(self, number: int) -> CallPromise | None:
        """Return the promise of a call, also of one before a restart; None: unknown call."""
        promise = self.promises.get(number)
        if promise is not None:
            return promise
        outcome = await asyncio.to_thread(self.log.read_outcome, number)
        if outcome is None:
            return None
        promise = CallPromise(b"", 0)
        promise.future.set_result(outcome)
        return promise

    @property
    def is_idle(self) -> bool:
        """Whether the model waits for a call from its client."""
        return self.next not in self.promises

    @property
    def waits_for(self) -> str:
        """Which missing call the later calls wait for, or ""."""
        is_early = any(number > self.next for number in self.promises)
        return f"waits for seq_id {self.next} of {self.id}" if is_early and self.is_idle else ""

    async def run(self) -> None:
        """Carry out the calls in the order of their numbers."""
        while True:
            self.arrived.clear()
            while not self.is_idle:
                await self._carry_out(self.next)
                self.samplers.released.set()
            await self.arrived.wait()

    async def _carry_out(self, number: int) -> None:
        # the bodies of calls that wait would fill the memory
        call = await asyncio.to_thread(self.log.read_call, number)
        assert call is not None
        try:
            outcome = await self._perform(call)
        except (ConfigError, CallFailure, WorkerExited) as error:
            log(f"{self.id}, call {number}, {call.route}: {error}")
            category = getattr(error, "category", "user")
            outcome = self._build_outcome(error=str(error), category=category)
        except Exception as error:  # a client waits for the outcome, and later calls must run
            log(f"{self.id}, call {number}, {call.route}", traceback=True)
            outcome = self._build_outcome(error=repr(error), category="server")
        await asyncio.to_thread(self.log.write, number, "outcome", outcome)
        # from here on the call's effect is permanent
        self.logged += len(outcome.reply)
        self._apply_outcome(number, call.route, outcome)
        if self.listed > 2 * self.ledger.remembered:
            await self.ledger.rewrite()
            await asyncio.to_thread(self._drop_sequences)
        promise = self.promises[number]
        self.shares.used -= Counter({self.record.session: promise.size})
        promise.future.set_result(outcome)
        for finished in [call for call in self.promises if call < number - 16]:
            del self.promises[finished]  # `find_promise` reads it from disk
        is_due = not (outcome.error or self.version % self.config.training.checkpoint_every)
        # between two steps, all that a checkpoint lacks is a gradient, or that one was refused
        is_large = self.logged > CALL_BYTES and not (self.lags or self.refused)
        has_checkpoint = call.route == "load_weights"
        if not (has_checkpoint or is_large or (call.route == "optim_step" and is_due)):
            return
        self.logged = 0  # calls that come meanwhile find room
        if not has_checkpoint:
            path = self.log.locate_checkpoint(number, self.version)
            try:
                await self._call_trainer("save", path, state=True)
            except (WorkerExited, CallFailure) as error:
                log(f"{self.id}: the checkpoint was not written: {error}")
        left = await asyncio.to_thread(self.log.prune)
        self.logged += left

    async def _perform(self, call: TrainingCall) -> TrainingOutcome:
        if self.unusable:
            raise ConfigError(self.unusable)
        match call.route:
            case "forward" | "forward_backward":
                if not call.body:
                    raise ConfigError(
                        f"the calls of {self.id} since its last optimizer step take "
                        f"{self.logged >> 20} MiB of the disk, which is too much: call optim_step"
                    )
                return await self._compute_loss(call.body)
            case "create_model":
                await self._call_trainer()
                return self._reply({"type": "create_model", "model_id": self.id})
            case "load_weights":
                return await self._load(call)
            case "optim_step":
                return await self._make_step(call)
            case "save_weights":
                return await self._save(call)
            case _:
                return await self._save_for_sampler(call)

    def _build_outcome(self, **values: Any) -> TrainingOutcome:
        """Build an outcome; by default, version and branch stay as they are."""
        unchanged = {"version": self.version, "branch": self.branch}
        return TrainingOutcome(**unchanged | {"parents": self.ancestry.parents} | values)

    def _reply(self, reply: JsonObject, **values: Any) -> TrainingOutcome:
        return self._build_outcome(reply=json.dumps(reply).encode(), **values)

    # ---- the training process --------------------------------------------------------------------

    async def _call_trainer(self, method: str = "", *arguments: Any, **options: Any) -> Any:
        """Call a method in the training process, after restoring the model there if needed.

        method: "" only restores the model.  A process that exits is started again, and the calls
        since the last checkpoint are repeated.  The one that it crashed on is not.  Raises
        CallFailure, and WorkerExited for that call or after `restarts` restarts."""
        for attempt in range(self.config.restarts + 1):
            try:
                await self.trainer.start()
                if self.loaded != self.trainer.generation:
                    generation = self.trainer.generation
                    await self._restore()
                    self.loaded = generation
                if not method:
                    return None
                return await self.trainer.call(method, self.id, *arguments, **options)
            except WorkerExited as error:
                if attempt == self.config.restarts or (error.crashed and error.oldest):
                    raise
            except CallFailure as failure:
                if failure.spoiled:
                    self.loaded = 0
                raise
        raise AssertionError("unreachable")

    async def _restore(self) -> None:
        """Load the newest checkpoint in a new training process, and repeat the calls after it."""
        # a checkpoint without an outcome is that of a load_weights call that is made again
        checkpoints = [saved for saved in self.log.list_checkpoints() if saved[0] < self.next]
        first, path = 0, None
        if checkpoints:
            last_call, version = checkpoints[-1]
            first, path = last_call + 1, self.log.locate_checkpoint(last_call, version)
        record = self.record
        await self._repeat("load", record.rank, record.seed, path, optimizer=True)
        for number in range(first, self.next):
            if call := await asyncio.to_thread(self._read_request, number):
                await self._repeat(*call)

    def _read_request(self, number: int) -> tuple[Any, ...]:
        """Return method and arguments that repeat a call of an earlier training process.

        (): the call left the model as it was.  Raises ConfigError if the call or its result is no
        longer on the disk."""
        call, outcome = self.log.read_call(number), self.log.read_outcome(number)
        if call is None or outcome is None or (not outcome.error and call.route == "load_weights"):
            raise ConfigError(f"{self.id}: the newest checkpoint of its weights is gone")
        if call.route == "optim_step":
            return ("drop_gradient",) if outcome.error else ("step", *wire.parse_step(call.body))
        if outcome.error or call.route != "forward_backward":
            return ()
        message = wire.parse_loss_request(call.body)
        loss = wire.parse_loss_call(message, self.config.losses.stable_reinforce)
        lags = np.frombuffer(outcome.token_lags, "<i4")
        splits = np.cumsum([len(datum.tokens) for datum in loss.data])[:-1]
        # that of the call's own time; an earlier version of the server did not write it
        limit = self.config.staleness.max_lag if outcome.limit is None else outcome.limit
        datum_lags = zip(loss.data, np.split(lags, splits), strict=True)
        loss.data[:] = [add_lags(datum, lags, limit) for datum, lags in datum_lags]
        return "forward_backward", *loss

    async def _repeat(self, method: str, *arguments: Any, **options: Any) -> None:
        try:
            await self.trainer.call(method, self.id, *arguments, **options)
        except CallFailure as failure:
            raise WorkerExited(f"{self.id} cannot be restored: {failure}") from failure

    # ---- forward_backward ------------------------------------------------------------------------

    async def _compute_loss(self, body: bytes) -> TrainingOutcome:
        """Compute a loss after measuring the lags of its tokens.

        Raises ConfigError for tokens above the limit, and for requests that are not served."""
        staleness = self.config.staleness
        sequences, token_lags, sampled = list[str](), list[bytes](), list[list[SampledRun]]()
        lags = Counter[int]()
        matched = Counter(self.sequences)

        def measure(body: bytes) -> tuple[wire.LossCall, str]:
            message = wire.parse_loss_request(body)
            loss = wire.parse_loss_call(message, self.config.losses.stable_reinforce)
            for index, datum in enumerate(loss.data):
                spans = wire.parse_spans(message.data[index])
                model = self.ancestry, self.version
                try:
                    runs = self.ledger.resolve(datum, spans, matched, self.ancestry)
                    measured = measure_lags(datum, runs, *model)
                    if not loss.forward_only:
                        check_lags(measured, runs, *model, staleness)
                except ConfigError as error:
                    raise ConfigError(f"datum {index}, {error}") from error
                sampled.append(runs)
                token_lags.append(measured.tobytes())
                loss.data[index] = add_lags(datum, measured, staleness.max_lag)
                lags.update(loss.data[index].lags.tolist())
                sequences.extend(run.sequence.id for run in runs if run.sequence is not None)
            return loss, message.loss_fn

        loss, requested = await wire.decode(measure, body)
        result = await self._call_trainer("forward_backward", *loss)
        reply = wire.encode_scores(result, loss.loss, requested)
        if loss.forward_only:
            return self._build_outcome(protobuf=True, reply=reply)
        if self.samples.is_due(self.version):
            self.samples.collect(loss.data, sampled, result.logprobs)
        del lags[NOT_SAMPLED]
        return self._build_outcome(
            protobuf=True,
            reply=reply,
            lags=dict(lags),
            sequences=sequences,
            token_lags=b"".join(token_lags),
            limit=staleness.max_lag,
        )

    # ---- optim_step ------------------------------------------------------------------------------

    async def _make_step(self, call: TrainingCall) -> TrainingOutcome:
        refused = self.refused and f"because a forward_backward call of it failed: {self.refused}"
        try:
            adamw = wire.parse_step(call.body)
        except ConfigError as error:
            refused = str(error)
        if refused:
            await self._call_trainer("drop_gradient")
            raise ConfigError(f"the step was not made, {refused}")
        step_metrics = await self._call_trainer("step", *adamw) | measure_lag_metrics(self.lags)
        found = filter(None, map(self.ledger.sequences.get, set(self.sequences)))
        if lengths := [sequence.length for sequence in found]:
            step_metrics["answer/length"] = sum(lengths) / len(lengths)
        now = time.monotonic()
        seconds, self.stepped = now - self.stepped, now
        if seconds > 0:
            step_metrics["throughput/learner_tokens_per_s"] = self.lags.total() / seconds
            step_metrics["time/step"] = seconds
        names = ["optim/grad_norm", "optim/lr", "lag/mean", "lag/max", "lag/unknown_share"]
        reply_metrics = {
            name.replace("/", "_"): step_metrics[name] for name in names if name in step_metrics
        }
        return self._reply(
            {"type": "optim_step", "metrics": reply_metrics},
            version=self.version + 1,
            row=build_trained_row(self.version, self.lags, self.sequences, call.number),
            metrics=step_metrics,
        )

    def write_ledger(self) -> None:
        """Write ledger.json if it has changed."""
        totals = self.ledger.sum_totals(self.id) | {"supervised_tokens": self.supervised}
        if totals != self.written_totals:
            atomic_write.write(self.folder / "ledger.json", json.dumps(totals, indent=1))
            self.written_totals = totals

    # ---- weights ---------------------------------------------------------------------------------

    async def _write_saved(self, path: Path, number: int, *, state: bool = False) -> None:
        """Save the model under a name or as a version, and write its record."""
        label, named = f"{self.version} {self.ancestry.model}", path.parent.name != "versions"
        await self._call_trainer("save", path, state=state, label=label, named=named)
        note = SavedWeights(
            self.ancestry.model,
            self.record.rank,
            self.version,
            self.ancestry.parents,
            time.time(),
            number,
        )
        atomic_write.write(locate_note(path), msgspec.json.encode(note))

    def _locate_unused(self, kind: str, name: str, number: int, overwrite: bool) -> Path:
        """Return the directory of new weights.

        Raises ConfigError for an invalid name, or if another call has saved weights there."""
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"path: {name!r} must be a name of letters, digits, dots, dashes and underscores "
                "that does not end in .json or .part"
            )
        try:
            path, saved = find_saved(self.folder.parent, f"tinker://{self.id}/{kind}/{name}")
        except ConfigError:
            return self.folder / kind / name
        if saved.call != number and not overwrite:
            raise ConfigError(f"{kind} {name} exist already: choose another name")
        return path

    async def _save(self, call: TrainingCall) -> TrainingOutcome:
        request = wire.parse_json(sdk.SaveWeightsRequest, call.body)
        name = request.path or f"{self.version:06d}"
        path = self._locate_unused("weights", name, call.number, request.overwrite)
        await self._write_saved(path, call.number, state=True)
        return self._reply({"type": "save_weights", "path": f"tinker://{self.id}/weights/{name}"})

    async def _save_for_sampler(self, call: TrainingCall) -> TrainingOutcome:
        request = wire.parse_json(sdk.SaveWeightsForSamplerRequest, call.body)
        values: JsonObject = {"type": "save_weights_for_sampler", "path": None}
        if (name := request.path) is not None:
            if request.kind != "snapshot":
                raise ConfigError(f"path = {name}: weights of kind = {request.kind} have none")
            path = self._locate_unused("sampler_weights", name, call.number, False)
            await self._write_saved(path, call.number)
            return self._reply(values | {"path": f"tinker://{self.id}/sampler_weights/{name}"})
        path = self.locate_version(self.branch, self.version)
        if not locate_note(path).exists():
            await self._write_saved(path, call.number)
        notes = (self.folder / "versions").glob("*-*.json")
        versions = sorted(tuple(map(int, note.stem.split("-"))) for note in notes)
        for version in versions[: -self.config.weights.slots]:
            old = self.locate_version(*version)
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
            locate_note(old).unlink(missing_ok=True)
        kind = ":" if request.kind == "snapshot" else INFLIGHT
        id = f"{self.id}{kind}v{self.version}:{call.number}"
        self.samplers.open(
            SamplerRecord(id, self.record.session, self.ancestry.model, self.version, str(path))
        )
        return self._reply(values | {"sampling_session_id": id})

    def locate_version(self, branch: int, version: int) -> Path:
        """Return the directory of the weights of samplers without a name."""
        return self.folder / "versions" / f"{branch}-{version}"

    async def _load(self, call: TrainingCall) -> TrainingOutcome:
        """Load saved weights, which become the model's own checkpoint.

        After that the client may replace or delete them."""
        message = wire.parse_json(sdk.LoadWeightsRequest, call.body)
        path, saved = find_saved(self.folder.parent, message.path, "weights")
        if saved.rank != self.record.rank:
            raise ConfigError(
                f"{message.path} has rank {saved.rank}, the model has {self.record.rank}"
            )
        checkpoint = self.log.locate_checkpoint(call.number, saved.version)
        origin = self.record.rank, self.record.seed, path
        options = {"optimizer": message.optimizer, "checkpoint": checkpoint}
        await self._call_trainer("load", *origin, **options)
        return self._reply(
            {"type": "load_weights", "path": message.path, "model_id": self.id},
            version=saved.version,
            branch=call.number,
            parents={saved.model: saved.version, **saved.parents},
        )

    def close(self) -> None:
        self.write_ledger()
        self.trained_file.close()
        self.samples.close()
        self.metrics.close()


def add_lags(datum: Datum, lags: np.ndarray, limit: float) -> Datum:
    """Return a datum with the lags of its tokens in the gradient.

    Args:
        lags: int32 [n], as `measure_lags` returns them.
        limit: the largest lag of a token in the gradient.

    Tokens above the limit are masked; with another on_exceed than mask, none reach this place."""
    exceeds = lags > limit
    fields = datum.fields
    if exceeds.any():
        mask = np.where(exceeds, 0.0, fields.get("mask", lags != NOT_SAMPLED))
        fields = fields | {"mask": mask.astype("<f4")}
    gradient_lags = np.where(exceeds, NOT_SAMPLED, lags).astype("<i4")
    return Datum(datum.tokens, datum.targets, fields, gradient_lags)
