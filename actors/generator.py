"""The generator process: turn tickets into trajectories with the newest weights.

One pass of the loop reads replies, loads the weights that the schedule asks for, starts samples,
decodes a few steps, collects rewards and delivers. It never waits while a row is live. An idle
generator waits for the buffer and reports the reason. `actors.turn` holds the steps from ticket to
trajectory. This module adds what a process needs: messages, weights from shared memory, in chunks
over tcp or by NCCL, leases and waits.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from actors.decoding.constraints import GrammarCompiler, TokenConstraint
from actors.engine import Completion, CompletionRequest, Engine, Key, build_engine
from actors.ticket_holder import TicketHolder
from actors.turn import (
    DECODE_STEPS,
    IDLE_POLL_S,
    GeneratorTurn,
    PromptTooLong,
    ScoredResponse,
    build_failed_trajectory,
    build_trajectory,
)
from asyncrl.config.tree import Config, EvaluationConfig, RewardConfig, TaskConfig
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, BadMessage, PeerUnreachable
from asyncrl.contract.messages import AttemptTokens, IntPair, Numbers, WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import ProcessWait
from asyncrl.models.devices import bind
from asyncrl.models.policy import build_views, count_flat_bytes, read_flat
from asyncrl.models.tokenizer import read_vocabulary_size
from asyncrl.records import buffer_leadership, process_log
from asyncrl.records.rundir import (
    get_current_buffer_address,
    get_gateway_address,
    note_longest_prompt,
    read_run_id,
)
from asyncrl.records.trace import Tracer
from asyncrl.tasks.arena import SeedPrompts
from asyncrl.transport import chunks, message_checks, weight_transport
from asyncrl.transport.ring import RingReader
from asyncrl.transport.sockets import PeerSocket, wait
from asyncrl.transport.weight_transport import WeightsClient


class PulledWeights(NamedTuple):
    """The weights of one version.

    tensors: name -> view of a private buffer.
    probe: the learner's log-probabilities, to check an engine.
    """

    tensors: dict[str, Any]
    digest: str
    probe: bytes


class WeightsReceiver:
    """A reader of announced versions.

    A version is copied into a private buffer and verified before the engine sees it. Nothing
    computes from the shared mapping.
    """

    def __init__(self, config: Config, reader_id: str) -> None:
        self.config = config
        self.transport = config.weights.transport
        self.reader_id = reader_id
        self.epoch = -1
        self.buffer = memoryview(b"")
        self.tensors: dict[str, Any] = {}  # views of `buffer`
        self.client: WeightsClient | None = None
        self.fetch_s = self.fetched_mb = 0.0  # seconds and megabytes over a socket, summed

    def collect_metrics(self) -> Numbers:
        """Return metrics for the buffer, summed since the start."""
        return {"link/fetch_s": self.fetch_s, "link/fetched_mb": self.fetched_mb}

    def is_local(self, source: WeightsSource) -> bool:
        """Whether the shared memory of `source` can be read from this process."""
        if self.transport == "auto":
            return source.host == socket.gethostname() and Path(source.directory).is_dir()
        return self.transport == "shared_memory"

    def pull(self, source: WeightsSource, label: Label, digest: str | None) -> PulledWeights | None:
        """Copy version `label`; return None while it is unavailable.

        Raises PeerUnreachable, and FileNotFoundError when the ring's files are missing.
        """
        if source.epoch != self.epoch:
            self.open(source)
        client = self.client
        assert client is not None
        began, bytes_before = time.monotonic(), client.bytes_received
        try:
            digest = client.fetch(label, digest or "", self.buffer)
        finally:
            if client.bytes_received:
                self.fetch_s += time.monotonic() - began
                self.fetched_mb += (client.bytes_received - bytes_before) / 1e6
            if client.is_broken:
                self.close()  # the next pull connects again
        return PulledWeights(self.tensors, digest, client.probe) if digest else None

    def open(self, source: WeightsSource) -> None:
        """Connect to `source` and allocate the buffer for its weights."""
        self.close()
        if self.is_local(source):
            self.client = RingReader(Path(source.directory), self.reader_id)
        else:
            transport = weight_transport.import_transport(self.transport)
            self.client = transport.connect(self.config, source, self.reader_id)
        layout = self.client.fetch_layout()
        if (flat := getattr(self.client, "flat", None)) is not None:
            self.tensors = build_views(flat, layout)
        else:
            # every pull writes all of it, so its pages are touched once; numpy asks for large pages
            self.buffer = np.empty(count_flat_bytes(layout), np.uint8).data
            self.tensors = read_flat(self.buffer, layout)
        self.epoch = source.epoch

    def close(self) -> None:
        """Close the connection to the source; the next pull opens another."""
        if self.client is not None:
            self.client.close()
        self.client = None
        self.epoch = -1


# ---- the calls of sessions -----------------------------------------------------------------------


NO_IMAGES: Mapping[str, bytes] = {}
REPORT_S = 0.5  # between two reports


class OpenCall(NamedTuple):
    """A call that a generator samples, and its key in the schedule."""

    call: m.GenerationCall
    key: Key
    constraint: TokenConstraint | None  # of its grammar


class CallTurn(GeneratorTurn):
    """A generator's turn that samples calls, without rewards and tickets."""

    def __init__(self, config: Config, engine: Engine) -> None:
        # the task's files may be on another machine; the gateway has prompts and rewards
        without_task = structs.replace(
            config,
            reward=RewardConfig(workers=0),
            task=TaskConfig(name=SeedPrompts.name),
            evaluation=EvaluationConfig(),
        )
        super().__init__(without_task, engine, lockstep=False)
        self.vocabulary = read_vocabulary_size(config.model.path)
        self.grammars = GrammarCompiler(self.tokenizer, config.model.path, self.stops)
        self.calls: dict[int, OpenCall] = {}  # by their ids
        self.served = 0  # calls accepted, which numbers them
        self.results: list[m.CallResult] = []

    def take_calls(
        self, calls: Iterable[m.GenerationCall], images: Mapping[str, bytes] = NO_IMAGES
    ) -> None:
        """Accept the new calls; an invalid one gets a failure as its result at once.

        images: digest -> blob, of all calls
        """
        for call in calls:
            if call.id in self.calls:
                continue
            try:
                shape = self.tokenizer.image_shape
                message_checks.check_call(call, self.vocabulary, self.context, images, shape)
                constraint = self.grammars.begin(call.grammar) if call.grammar else None
            except (BadMessage, ValueError) as error:
                self.results.append(
                    m.CallResult(call.id, b"", b"", [], "length", failed=str(error))
                )
                continue
            self.served += 1
            ticket = m.Ticket(
                ticket=call.id,
                attempt=self.served,
                kind=call.kind,
                prompt=m.Prompt(call.id, "", images=[images[name] for name in call.images]),
                samples=[call.sample],
                sampling=structs.replace(call.sampling, max_new_tokens=call.max_new_tokens),
                min_version=call.min_version,
                exact_version=call.exact_version,
                seed=call.seed,
            )
            key = (call.id, call.sample, self.served)
            self.calls[call.id] = OpenCall(call, key, constraint)
            self.schedule.add_tickets([ticket])
            self.schedule.held[call.id, self.served].prompt = np.frombuffer(call.prompt, "<i4")

    def build_requests(
        self, loaded: Label | None, room: int | None = None
    ) -> tuple[list[CompletionRequest], list[PromptTooLong]]:
        """List the calls that may start now with the weights `loaded`.

        No prompt is too long: the gateway checks their lengths.
        """
        requests, refused = super().build_requests(loaded, room)
        calls = [self.calls[request.key[0]] for request in requests]
        return [
            replace(
                request,
                group=call.prompt,
                beside=call.stream,
                drawn_for=(call.ticket, call.sample),
                constraint=constraint,
            )
            for request, (call, _, constraint) in zip(requests, calls, strict=True)
        ], refused

    def finish(self, completion: Completion) -> ScoredResponse | None:
        """Queue the result of a finished call."""
        self.schedule.finish_sample(completion.key, len(completion.tokens))
        if self.calls.pop(completion.key[0], None) is not None:
            self.results.append(
                m.CallResult(
                    completion.key[0],
                    completion.tokens.tobytes(),
                    completion.logprobs.tobytes(),
                    completion.spans,
                    completion.finish,
                    support=completion.support_bytes,
                    routed=completion.routed_bytes,
                )
            )
        return None

    def cancel_calls(self, ids: Iterable[int]) -> None:
        """Cancel calls; their results hold the number of tokens that were sampled."""
        for number in ids:
            if (cancelled := self.calls.pop(number, None)) is None:
                continue
            key = cancelled.key
            tokens = self.engine.abort([key]).get(key, 0)
            if (leased := self.schedule.held.get((key[0], key[2]))) is not None:
                self.schedule.drop(leased)
            self.results.append(m.CallResult(number, b"", b"", [], "length", tokens))


class CallPeer:
    """The connection to the gateway, for the calls of `turn` and their results."""

    def __init__(
        self, config: Config, turn: CallTurn, run_dir: Path, producer: str, session: int
    ) -> None:
        self.turn = turn
        self.socket = PeerSocket(
            get_gateway_address(config, run_dir, 0),
            config.wires.curve_dir,
            producer,
            reads=m.FromGateway,
            run=read_run_id(run_dir),
            key="wires.gateway_address",
        )
        self.producer = producer
        self.session = session
        self.received_sequence = 0  # the highest number of a received message
        self.reported_at = -REPORT_S  # time of the last report

    def read(self) -> None:
        """Handle the gateway's messages.  Raises AsyncrlError for a refusal."""
        while (message := self.socket.recv(0)) is not None:
            if isinstance(message, m.Refusal):
                raise AsyncrlError(message.reason, message.exit_code)
            if message.session == self.session:
                self.received_sequence = max(self.received_sequence, message.sequence)
                self.turn.schedule.announce(message.announcement)
                self.turn.take_calls(message.calls, message.images)
                self.turn.cancel_calls(message.cut)

    def send_report(self, now: float, slots: int) -> None:
        """Send the results, and every REPORT_S a report of the calls that are open."""
        for result in self.turn.results:
            self.socket.send(result)
        self.turn.results = []
        if now - self.reported_at >= REPORT_S:
            self.reported_at = now
            self.socket.send(
                m.ServingReport(
                    protocol=m.PROTOCOL,
                    run=self.socket.run,
                    producer=self.producer,
                    session=self.session,
                    slots=slots,
                    held=sorted(self.turn.calls),
                    heard=self.received_sequence,
                )
            )

    def close(self) -> None:
        self.socket.close()


# upper bound for one decode call: a slow engine makes fewer steps a call, because leases are
# renewed and rewards delivered between calls
CALL_S = 2.0
# with rewards outstanding and nothing to decode: a longer sleep leaves the core to the rewards
REWARD_POLL_S = 0.002


class LoadedWeights(NamedTuple):
    """The version of the weights in the engine."""

    label: Label
    digest: str


@dataclass
class GeneratorUsage:
    """Tokens, swaps and seconds of this generator, summed since its start."""

    tokens: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    swap_s: float = 0.0
    swaps: float = 0.0
    reward_idle_s: float = 0.0  # the part of idle_s that waited for rewards

    def collect_metrics(self) -> Numbers:
        """Return the metrics, by name."""
        return {f"generator/{name}": value for name, value in asdict(self).items()}


class Generator(TicketHolder):
    """One generator process. `loop` returns at the run's end or after SIGTERM."""

    def __init__(self, config: Config, run_dir: Path, index: int, engine: Engine) -> None:
        self.lockstep = config.staleness.limit == 0 and config.generators == 1
        self.calls: CallPeer | None = None  # the gateway's calls, when samples are sessions
        self.turn: GeneratorTurn
        if config.uses_sessions:
            self.lockstep = False
            self.turn = turn = CallTurn(config, engine)
        else:
            self.turn = GeneratorTurn(config, engine, lockstep=self.lockstep, run_dir=run_dir)
        self.engine = engine
        super().__init__(config, run_dir, f"generator-{index}", engine.slots, self.turn.schedule)
        if config.uses_sessions:
            self.has_tickets = False
            self.calls = CallPeer(config, turn, run_dir, self.producer, self.session)
        self.rewards = self.turn.rewards
        self.unscored = self.turn.unscored
        self.tracer = Tracer(run_dir, self.producer)
        self.reward_tracer = (
            Tracer(run_dir, f"{self.producer}-rewards") if self.rewards.pool is not None else None
        )
        if self.reward_tracer is not None:
            self.rewards.timed = self.reward_tracer.add
        self.weights = WeightsReceiver(config, self.producer)
        self.loaded: LoadedWeights | None = None
        self.longest_prompt = 0
        self.steps = DECODE_STEPS  # of the next decode call
        self.read_until = time.monotonic()  # the end of the last `read`
        self.lacks_weights = False  # the weights to load are unavailable now
        self.missing: m.WeightsSource | None = None  # unavailable since `missing_since`
        self.missing_since = 0.0  # CLOCK_MONOTONIC seconds
        limits = config.wires.connect_s, config.watchdog.startup_s
        self.patience_s = math.inf if process_log.is_supervised() else max(limits)
        self.usage = GeneratorUsage()
        self.idle_since = time.monotonic()

    # ---- the loop --------------------------------------------------------------------------------

    def loop(self) -> None:
        """Make passes until the run ends or SIGTERM arrives."""
        self.greet()
        while True:
            self.read()
            if self.ending or self.over:
                break
            self.swap()
            self.admit()
            self.decode()
            self.collect()
            self.deliver()
            self.renew()  # before the request: tickets reported as held are not granted again
            self.request_samples()
        if not self.over:  # after SIGTERM: unfinished samples are reported as lost
            self.send_samples(flush=True)
            self.renew_now()
        elif self.loaded is None:
            raise self.make_end_error(self.producer)

    def read(self) -> None:
        """Handle the messages that have arrived. When idle, wait a little for more."""
        timeout = 0.0 if self.engine.active else REWARD_POLL_S if self.unscored else IDLE_POLL_S
        self.unread = (self.read_until, time.monotonic())
        if self.calls is not None:
            wait([self.socket, self.calls.socket], [], timeout)
            timeout = 0.0
            self.calls.read()
        self.read_replies(timeout)
        self.read_until = time.monotonic()

    def accept_tickets(self, tickets: list[m.Ticket]) -> None:
        self.turn.accept_tickets(tickets)

    def find_buffer_address(self) -> str:
        """Look up where the buffer listens now.

        A shared run directory holds its address. Without one, the learner that serves the weights
        gives it.
        """
        announcement = self.schedule.announced
        shared = buffer_leadership.get_directory(self.run_dir).exists()
        if (
            shared
            or announcement is None
            or not announcement.source.address
            or self.weights.is_local(announcement.source)
        ):
            return get_current_buffer_address(self.config, self.run_dir)
        return chunks.find_buffer(self.config, announcement.source, self.producer)

    def swap(self) -> None:
        """Abort samples of an older epoch, then load the version the schedule asks for.

        Runs between two decode steps.
        """
        for leased in self.schedule.find_outdated():
            self.engine.abort(self.schedule.drop(leased))
            if self.calls is not None:
                self.calls.turn.calls.pop(leased.ticket.ticket, None)
        target_version = self.schedule.next_version(self.loaded.label if self.loaded else None)
        announcement = self.schedule.announced
        self.lacks_weights = announcement is None
        if announcement is None and self.has_reply:
            self.set_wait("the learner: no weights have been announced yet")
        if target_version is None or announcement is None:
            return
        began = time.monotonic()
        with self.tracer.time_span("weights"):
            pulled = self.pull(announcement, target_version)
            # its slot was reused or is being written: the next announcement or a retry succeeds
            if pulled is None:
                self.lacks_weights = True
                if self.missing is None:
                    self.set_wait(f"weights {target_version}")
                time.sleep(0.001 if self.missing is None or self.engine.active else IDLE_POLL_S)
                return
            tensors, digest, probe = pulled
            self.engine.load(tensors, target_version, digest, probe)
        if self.loaded is None or self.loaded.label.epoch != target_version.epoch:
            self.log_change(f"samples with weights {target_version} and its successors")
        self.loaded = LoadedWeights(target_version, digest)
        self.usage.swap_s += time.monotonic() - began
        self.usage.swaps += 1

    def pull(self, announcement: m.PolicyAnnouncement, version: Label) -> PulledWeights | None:
        """Copy weights `version` from their source; None while they are unavailable.

        The source may be unreachable because its learner exited and the next one is still starting;
        the buffer then announces another source. Raises PeerUnreachable when the source stays
        unreachable for longer than any start takes, but never under a supervisor, whose watchdog
        decides.
        """
        try:
            pulled = self.weights.pull(
                announcement.source,
                version,
                announcement.digest if version == announcement.label else None,
            )
        except (PeerUnreachable, FileNotFoundError) as error:
            if self.missing != announcement.source:
                self.missing, self.missing_since = announcement.source, time.monotonic()
            gone_s = time.monotonic() - self.missing_since
            if gone_s > self.patience_s:
                raise PeerUnreachable(
                    f"weights {version} have been unavailable for {gone_s:.0f} s: {error}; is the "
                    "learner running?"
                ) from error
            self.set_wait(
                f"weights {version}, which are unavailable ({error}); the learner's next "
                "incarnation announces others"
            )
            return None
        self.missing = None
        return pulled

    def admit(self) -> None:
        """Start the samples that may start with the loaded weights."""
        if self.loaded is None or self.engine.slots <= self.engine.active:
            return
        requests, refused = self.turn.build_requests(self.loaded.label)
        for sample in refused:
            self.schedule.finish_sample(sample.key, 0)
            self.outbox.add(build_failed_trajectory(sample, *self.loaded))
        if requests:
            with self.tracer.time_span("prefill", len(requests)):
                longest = max(len(request.prompt) for request in requests)
                if longest > self.longest_prompt:
                    self.longest_prompt = longest
                    note_longest_prompt(self.run_dir, self.producer, longest)
                self.engine.add(requests)

    def decode(self) -> None:
        """Decode a few steps, and accept the completions that ended."""
        now = time.monotonic()
        if not self.engine.active:
            self.usage.idle_s += now - self.idle_since
            if self.rewards.waiting:
                self.usage.reward_idle_s += now - self.idle_since
            self.idle_since = now
            return
        row_count = self.engine.active
        made_before = self.engine.steps_made
        began = time.monotonic()
        completions = self.engine.step(self.steps)
        ended = time.monotonic()
        self.tracer.add("decode", began, ended, row_count, self.engine.steps_made - made_before)
        elapsed = ended - now
        if not self.lockstep:  # lockstep repeats bitwise, so no count may depend on time
            self.steps = (
                max(1, min(DECODE_STEPS, int(self.steps * CALL_S / elapsed)))
                if elapsed > CALL_S
                else min(DECODE_STEPS, self.steps + 1)
            )
        for completion in completions:
            self.usage.tokens += len(completion.tokens)
            self.accept_completion(completion)
        self.usage.busy_s += time.monotonic() - self.idle_since
        self.idle_since = time.monotonic()
        self.set_wait("")

    def accept_completion(self, completion: Completion) -> None:
        """Hold a finished completion until its artificial delay is over."""
        step_s = self.usage.busy_s / max(self.engine.steps_made, 1)
        self.turn.hold(completion, time.monotonic(), step_s)

    def collect(self) -> None:
        """Submit due responses for their rewards, and queue the scored samples."""
        for response in self.turn.pop_due(time.monotonic()):
            self.turn.submit(response)
        for response, result in self.turn.poll_results():
            if result.failed and self.config.reward.on_error == "stop":
                raise AsyncrlError(
                    f"the reward function failed on prompt {response.ticket.prompt.id}: "
                    f"{result.failed} (reward.on_error = stop)"
                )
            self.outbox.add(build_trajectory(response, result))

    def deliver(self) -> None:
        """Send the queued samples, and the results of calls."""
        if self.calls is not None:
            self.calls.send_report(time.monotonic(), self.engine.slots)
        self.send_samples(flush=not self.engine.active)

    def current_wait(self, now: float) -> ProcessWait | None:
        wait = super().current_wait(now)
        if wait is not None and wait.what == m.REWARDS_WAITED_FOR:
            return wait._replace(on=f"{self.producer}-rewards")
        return wait

    def request_samples(self) -> None:
        """Request tickets for as many samples as `actors.turn` says.

        One request at a time, repeated when unanswered.
        """
        holding = self.loaded.label if self.loaded else None
        if self.calls is not None:  # only announcements and the run's end: the gateway has samples
            if time.monotonic() - self.want_sent > self.config.wires.retry_s:
                self.send_ticket_request(0, holding)
            is_idle = not self.engine.active and not self.schedule.count_waiting()
            if is_idle and not self.lacks_weights:
                self.set_wait(m.CALL_WAITED_FOR)
            return
        sample_count = self.turn.count_samples_to_request(unsent=bool(self.outbox.fresh))
        if not self.has_credit():
            return
        self.request_tickets(sample_count, holding)
        if (
            not self.engine.active
            and not self.unscored
            and not self.schedule.count_waiting()
            and not self.lacks_weights
        ):
            self.set_wait(m.TICKET_WAITED_FOR)
        elif not self.engine.active and self.rewards.waiting:
            self.set_wait(m.REWARDS_WAITED_FOR)

    def list_judging(self) -> list[IntPair]:
        """List the fully generated (ticket, attempt) pairs that wait only for rewards."""
        if not self.rewards.is_working:
            return []
        return list({(t, a) for t, _, a in self.unscored} - self.schedule.held.keys())

    def list_unacknowledged(self) -> set[IntPair]:
        return {(t, a) for t, _, a in self.unscored} | super().list_unacknowledged()

    def list_progress(self) -> list[AttemptTokens]:
        return self.turn.list_progress() if self.calls is None else []

    def collect_metrics(self) -> Numbers:
        sources = (self.usage, self.rewards, self.weights, self.outbox, self.engine)
        return {name: x for source in sources for name, x in source.collect_metrics().items()}

    def close(self) -> None:
        self.rewards.close()
        self.tracer.close()
        if self.reward_tracer is not None:
            self.reward_tracer.close()
        self.weights.close()
        if self.calls is not None:
            self.calls.close()
        self.leave()
        getattr(self.engine, "close", list)()  # vLLM's engines have processes or threads


def main(config: Config, run_dir: Path, index: int) -> bool:
    """Run generator `index` of the run in `run_dir`.

    Returns True when the run is finished, False when SIGTERM ended this process.
    """
    bind(config.generator.gpus, index, "generator.gpus")
    engine = build_engine(config)
    generator = Generator(config, run_dir, index, engine)
    is_over = generator.run_until_signal(generator.loop)
    generator.log_change(f"ended after {generator.usage.tokens:.0f} tokens")
    return is_over
