"""A generator's side of sessions: calls in the place of tickets, what was drawn in the place of
trajectories.

A call is to the schedule what a ticket of one sample is: it starts with weights of its epoch, at or
above its session's minimum, or with exactly those that it names, and an evaluation's weights stay
while one of its calls is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from actors.engine import Completion, CompletionRequest, Engine, Key
from actors.turn import GeneratorTurn, PromptTooLong, ScoredResponse
from asyncrl.config.tree import Config, RewardConfig
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, BadMessage
from asyncrl.contract.versions import Label
from asyncrl.models.tokenizer import vocabulary
from asyncrl.records.rundir import gateway_address, run_id
from asyncrl.transport import message_checks
from asyncrl.transport.sockets import PeerSocket

SAY_S = 0.5  # between two words of what is held


class CallTurn(GeneratorTurn):
    """A turn that draws calls: no rewards, no tickets of its own."""

    def __init__(self, config: Config, engine: Engine) -> None:
        judged_elsewhere = msgspec.structs.replace(config, reward=RewardConfig(workers=0))
        super().__init__(judged_elsewhere, engine, lockstep=False)
        self.vocabulary = vocabulary(config.model.path)
        self.calls: dict[int, m.GenerationCall] = {}
        self.keys: dict[int, Key] = {}  # of each call, in the schedule
        self.served = 0  # calls taken, which numbers them
        self.answered: list[m.CallResult] = []

    def samples_to_request(self, *, unsent: bool = False) -> int:
        return 0

    def take_calls(self, calls: Iterable[m.GenerationCall]) -> None:
        """Keep those that are new; one that cannot be drawn is answered by a failure at once."""
        for call in calls:
            if call.id in self.calls:
                continue
            try:
                message_checks.call(call, self.vocabulary, self.context)
            except BadMessage as error:
                self.answered.append(
                    m.CallResult(call.id, b"", b"", [], "length", failed=str(error))
                )
                continue
            self.served += 1
            ticket = m.Ticket(
                ticket=call.id,
                attempt=self.served,
                kind=call.kind,
                prompt=m.Prompt(call.id, ""),
                samples=[call.sample],
                sampling=call.sampling,
                min_version=call.min_version,
                exact_version=call.exact_version,
                seed=call.seed,
            )
            self.calls[call.id] = call
            self.keys[call.id] = (call.id, call.sample, self.served)
            self.schedule.add_tickets([ticket])
            self.schedule.held[call.id, self.served].prompt = np.frombuffer(call.prompt, "<i4")

    def requests(
        self, loaded: Label | None, room: int | None = None
    ) -> tuple[list[CompletionRequest], list[PromptTooLong]]:
        """What may start now with the weights `loaded`.  The gateway sizes calls: all fit."""
        room = self.engine.slots - self.engine.active if room is None else room
        out = []
        for held, sample in self.schedule.admit(loaded, room):
            call = self.calls[held.ticket.ticket]
            sampling = call.sampling
            out.append(
                CompletionRequest(
                    key=self.keys[call.id],
                    prompt=held.prompt,
                    group=call.prompt,
                    max_new_tokens=call.max_new_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k_of(sample),
                    stop=self.stops,
                    seed=call.seed,
                    beside=call.stream,
                    drawn_for=(call.ticket, call.sample),
                )
            )
        return out, []

    def finished(self, answer: Completion) -> ScoredResponse | None:
        """A call is drawn: it waits to be sent."""
        self.schedule.finish_sample(answer.key, len(answer.tokens))
        if self.calls.pop(answer.key[0], None) is not None:
            del self.keys[answer.key[0]]
            self.answered.append(
                m.CallResult(
                    answer.key[0],
                    np.ascontiguousarray(answer.tokens, dtype="<i4").tobytes(),
                    np.ascontiguousarray(answer.logprobs, dtype="<f4").tobytes(),
                    answer.spans,
                    answer.finish,
                )
            )
        return None

    def cancel_calls(self, ids: Iterable[int]) -> None:
        """End calls; how much of each was drawn is told."""
        for each in ids:
            if self.calls.pop(each, None) is None:
                continue
            key = self.keys.pop(each)
            tokens = self.engine.abort([key]).get(key, 0)
            if (held := self.schedule.held.get((key[0], key[2]))) is not None:
                self.schedule.drop(held)
            self.answered.append(m.CallResult(each, b"", b"", [], "length", tokens))

    def drop_call(self, call: int) -> None:
        """A call of an epoch that is over: its session has ended with it."""
        self.calls.pop(call, None)
        self.keys.pop(call, None)

    def progress(self) -> list[tuple[int, int, int]]:
        """Nothing: the gateway tells of the tickets."""
        return []


class CallPeer:
    """The wire to the gateway: calls for `turn` come in, what it drew goes out."""

    def __init__(self, turn: CallTurn, run_dir: Path, producer: str, session: int) -> None:
        self.turn = turn
        self.run = run_id(run_dir)
        self.socket = PeerSocket(
            gateway_address(run_dir, 0), reads=m.FromGateway, run=self.run, key="agent"
        )
        self.producer = producer
        self.session = session
        self.heard = 0  # the highest number of a message
        self.said = -SAY_S

    def read(self) -> None:
        """Take in what has come."""
        while (message := self.socket.recv(0)) is not None:
            if isinstance(message, m.Refusal):
                error = AsyncrlError(message.reason)
                error.exit_code = message.exit_code
                raise error
            if message.session == self.session:
                self.heard = max(self.heard, message.sequence)
                self.turn.schedule.announce(message.announcement)
                self.turn.take_calls(message.calls)
                self.turn.cancel_calls(message.cut)

    def send_report(self, now: float, slots: int) -> None:
        """Send what was drawn, and now and then what is held."""
        for called in self.turn.answered:
            self.socket.send(called)
        self.turn.answered = []
        if now - self.said >= SAY_S:
            self.said = now
            self.socket.send(
                m.ServingReport(
                    protocol=m.PROTOCOL,
                    run=self.run,
                    producer=self.producer,
                    session=self.session,
                    slots=slots,
                    held=sorted(self.turn.calls),
                    heard=self.heard,
                )
            )

    def close(self) -> None:
        self.socket.close()
