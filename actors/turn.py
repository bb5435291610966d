"""A generator's turn: tickets in, trajectories out, whoever makes the turns.

```
tickets --take--> schedule --requests--> engine --finished--> answers --submit--> rewards
                                                 (text)       (held back until due)   |
                                              trajectory <------------- results ------+
```

The generator process (actors/generator.py) makes these steps between two looks at its socket, a run
in one process (asyncrl/experiments/serial.py) between two updates, an evaluation without a run
(asyncrl/experiments/replay/offline_eval.py) until its answers are in.  A simulated generator
(asyncrl/experiments/simulate/simulated_processes.py) keeps the same schedule and asks by the same
rule; its
engine is reckoned.

The caller has the clock and the weights: when they are loaded, how long the engine decodes, when an
answer that comes late on purpose is due, and how long a reward is waited for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from actors.delay import DelayQueue
from actors.engine import Completion, CompletionRequest, Engine, Key
from actors.rewards import RewardResult, RewardRunner
from actors.schedule import TicketSchedule
from asyncrl.config.tree import Config
from asyncrl.contract.errors import NotFiniteLogprob
from asyncrl.contract.messages import RewardFailure, Ticket, Trajectory, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.models.tokenizer import encode_prompt, load_tokenizer, stop_tokens
from asyncrl.tasks import get_task

DECODE_STEPS = 8  # between two looks at the socket
IDLE_POLL_S = 0.02  # a look at the socket with nothing else to do
RENEW_S = 0.5  # between two reports of what is written
EVERYTHING = 1 << 30  # samples


class ScoredResponse(NamedTuple):
    """An answer to a ticket, and its text as a reward function reads it: without stop tokens."""

    ticket: Ticket
    answer: Completion
    text: str


class PromptTooLong(NamedTuple):
    """A sample whose prompt leaves no token for an answer."""

    ticket: Ticket
    key: Key
    why: RewardFailure


class GeneratorTurn:
    """The parts of a generator, and the steps from one to the next.

    lockstep: evaluation and training never share the engine, and all tickets there are are asked
    for together; the run then repeats bitwise."""

    def __init__(
        self, config: Config, engine: Engine, *, lockstep: bool, run_dir: Path | None = None
    ) -> None:
        self.engine = engine
        self.context = config.generator.context
        self.schedule = TicketSchedule(
            drain_first=config.weights.in_flight == "between_groups", lockstep=lockstep
        )
        self.tokenizer = load_tokenizer(config.model.path)
        self.stops = stop_tokens(self.tokenizer, config)
        self.task = get_task(config.task)
        self.rewards = RewardRunner(config, self.task, run_dir)
        self.judged: dict[Key, ScoredResponse] = {}  # waiting for their reward
        self.late: DelayQueue[Key] = DelayQueue()  # of these, those held back (staleness.delay)

    def samples_to_request(self, *, unsent: bool = False) -> int:
        """Samples to ask for; unsent: some are finished and not delivered."""
        unfinished = bool(self.judged) or unsent
        return samples_to_ask_for(self.schedule, self.engine.slots, self.engine.active, unfinished)

    def accept_tickets(self, tickets: Iterable[Ticket]) -> None:
        """Keep those that are new, their prompts as tokens."""
        for ticket in self.schedule.add_tickets(tickets):
            held = self.schedule.held[ticket.ticket, ticket.attempt]
            held.prompt = encode_prompt(self.tokenizer, ticket.prompt)

    def requests(
        self, loaded: Label | None, room: int | None = None
    ) -> tuple[list[CompletionRequest], list[PromptTooLong]]:
        """What may start now with the weights `loaded`, for the engine; and what never can.

        room: of so many samples; None: as many as the engine has free rows."""
        if room is None:
            room = self.engine.slots - self.engine.active
        requests: list[CompletionRequest] = []
        refused: list[PromptTooLong] = []
        for held, sample in self.schedule.admit(loaded, room):
            ticket = held.ticket
            sampling = ticket.sampling
            key = (ticket.ticket, sample, ticket.attempt)
            limit = min(sampling.max_new_tokens, self.context - len(held.prompt))
            if limit < 1:
                why = (
                    f"the prompt has {len(held.prompt)} tokens, generator.context is {self.context}"
                )
                refused.append(PromptTooLong(ticket, key, RewardFailure("data", why)))
                continue
            requests.append(
                CompletionRequest(
                    key=key,
                    prompt=held.prompt,
                    group=ticket.ticket,
                    max_new_tokens=limit,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k_of(sample),
                    stop=self.stops,
                    seed=ticket.seed,
                )
            )
        return requests, refused

    def finished(self, answer: Completion) -> ScoredResponse | None:
        """An answer has left the engine and waits for its reward; None: its ticket was dropped."""
        ticket, _, attempt = answer.key
        held = self.schedule.held.get((ticket, attempt))
        if held is None:
            return None
        self.schedule.finish_sample(answer.key, len(answer.tokens))
        shown = [int(token) for token in answer.tokens if int(token) not in self.stops]
        text = self.tokenizer.decode(shown, skip_special_tokens=True)
        self.judged[answer.key] = ScoredResponse(held.ticket, answer, text)
        return self.judged[answer.key]

    def due(self, now: float) -> list[ScoredResponse]:
        """Answers that were held back (`late.hold`) until now, in the caller's unit of time."""
        return [self.judged[key] for key in self.late.due(now)]

    def submit(self, written: ScoredResponse) -> None:
        """Hand an answer to its reward."""
        answer = written.answer
        self.rewards.submit(answer.key, written.ticket.prompt, written.text, answer.tokens)

    def results(self) -> list[tuple[ScoredResponse, RewardResult]]:
        """The rewards that have come, each with the answer that it is of."""
        return [(self.judged.pop(result.key), result) for result in self.rewards.poll()]

    def progress(self) -> list[tuple[int, int, int]]:
        """(ticket, attempt, tokens written of it so far) of every ticket held."""
        return ticket_progress(self.schedule, self.engine.progress())


def samples_to_ask_for(schedule: TicketSchedule, slots: int, active: int, unfinished: bool) -> int:
    """As many as will find a free row soon.

    In lockstep all there is, and only with empty hands and everything delivered: what then shares
    the engine does not hang on when messages arrive, and runs repeat bitwise."""
    if schedule.lockstep:
        return 0 if active or schedule.waiting() or unfinished else EVERYTHING
    return slots - active - schedule.waiting()


def ticket_progress(
    schedule: TicketSchedule, live: Mapping[Key, int]
) -> list[tuple[int, int, int]]:
    """(ticket, attempt, tokens) of every ticket held; live: the tokens of each row in the
    engine.
    """
    tokens = {name: held.tokens for name, held in schedule.held.items()}
    for (ticket, _, attempt), count in live.items():
        if (ticket, attempt) in tokens:
            tokens[ticket, attempt] += count
    return [(ticket, attempt, count) for (ticket, attempt), count in tokens.items()]


def trajectory(written: ScoredResponse, result: RewardResult) -> Trajectory:
    """The record of one answer: token ids exactly as sampled.  Raises NotFiniteLogprob for a
    log-probability that is not finite.
    """
    ticket, answer, text = written
    if not np.isfinite(answer.logprobs).all():
        raise NotFiniteLogprob(
            f"the engine gave a logprob that is not finite for ticket {ticket.ticket}, sample "
            f"{answer.key[1]}, with weights "
            f"{answer.spans[-1].label}: if optim/grad_norm or kl/prox_target_k3 grew before, "
            "learner.lr is too large"
        )
    token_rewards = b""
    if result.token_rewards is not None:
        token_rewards = np.asarray(result.token_rewards, dtype="<f4").tobytes()
    return Trajectory(
        *answer.key,
        prompt_tokens=np.ascontiguousarray(answer.prompt, dtype="<i4").tobytes(),
        tokens=np.ascontiguousarray(answer.tokens, dtype="<i4").tobytes(),
        behavior_logprobs=np.ascontiguousarray(answer.logprobs, dtype="<f4").tobytes(),
        mask=b"\x01" * len(answer.tokens),
        spans=answer.spans,
        reward=float(result.reward),
        reward_parts=result.parts,
        finish=answer.finish,
        temperature=ticket.sampling.temperature,
        text=text,
        prompt_text=ticket.prompt.text,
        segments=[("model", 0, len(answer.tokens))],
        token_rewards=token_rewards,
        generated_at=time.monotonic(),
        failed=result.failed,
    )


def failed_trajectory(refused: PromptTooLong, label: Label, digest: str) -> Trajectory:
    """The record of a sample that cannot be written: it has failed, which is never trained on as a
    reward of 0.
    """
    return Trajectory(
        *refused.key,
        prompt_tokens=b"",
        tokens=b"",
        behavior_logprobs=b"",
        mask=b"",
        spans=[VersionSpan(label, digest, 0, 0, label)],
        reward=0.0,
        reward_parts={},
        finish="stop",
        temperature=refused.ticket.sampling.temperature,
        failed=refused.why,
    )
