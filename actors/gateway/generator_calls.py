"""A generator's side of sessions: calls in, instead of tickets, and results out.

The schedule treats a call as a ticket with one sample: it starts with weights of its epoch, at or
above its session's minimum version, or with exactly the version of an evaluation, which stays
loaded while one of its calls is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from actors.decoding.constraints import GrammarCompiler, TokenConstraint
from actors.engine import Completion, CompletionRequest, Engine, Key
from actors.turn import GeneratorTurn, PromptTooLong, ScoredResponse
from asyncrl.config.tree import Config, EvaluationConfig, RewardConfig, TaskConfig
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, BadMessage
from asyncrl.contract.versions import Label
from asyncrl.models.tokenizer import read_vocabulary_size
from asyncrl.records.rundir import get_gateway_address, read_run_id
from asyncrl.tasks.arena import SeedPrompts
from asyncrl.transport import message_checks
from asyncrl.transport.sockets import PeerSocket

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
                message_checks.check_call(call, self.vocabulary, self.context)
                message_checks.check_call_images(call, images, self.tokenizer.image_shape)
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
                    np.ascontiguousarray(completion.tokens, dtype="<i4").tobytes(),
                    np.ascontiguousarray(completion.logprobs, dtype="<f4").tobytes(),
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
