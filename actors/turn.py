"""The steps of a generator from ticket to trajectory, shared by all drivers.

```
tickets --take--> schedule --requests--> engine --finished--> responses --submit--> rewards
                                                 (text)       (held back until due)   |
                                              trajectory <------------- results ------+
```

The generator process (actors/generator.py) makes these steps between two reads of its socket, a run
in one process (asyncrl/experiments/serial.py) between two updates, and an evaluation without a run
(asyncrl/experiments/model_evaluation.py) until all samples are scored. A simulated generator
(asyncrl/experiments/simulate/simulation.py) keeps the same schedule and requests tickets by the
same rule; its engine is simulated.

The caller has the clock and the weights. It decides when to load, how long to decode, when a
delayed sample is due, and how long to wait for a reward.
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from actors.engine import Completion, CompletionRequest, Engine, Key
from actors.rewards import RewardResult, RewardRunner
from actors.schedule import TicketSchedule
from asyncrl.config.tree import Config
from asyncrl.contract import admission
from asyncrl.contract.blobs.images import digest
from asyncrl.contract.errors import NotFiniteLogprob
from asyncrl.contract.messages import AttemptTokens, RewardFailure, Ticket, Trajectory, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.models.tokenizer import collect_stop_tokens, encode_prompt, load_tokenizer
from asyncrl.tasks.evaluation_sets import build_task


def compute_delay_steps(config: Config, ticket: Ticket, sample: int, tokens: int) -> float:
    """Compute by how many decode steps a sample of `tokens` tokens is late.

    The delay is a factor per token, as if each token had taken that much longer; 0 for evaluation.
    """
    if ticket.kind != "train" or not config.staleness.delay:
        return 0.0
    scope = (ticket.ticket, sample) if config.staleness.delay_of == "answer" else (ticket.ticket,)
    return tokens * admission.sample_delay(config.staleness.delay, ticket.seed, *scope)


DECODE_STEPS = 8  # between two reads of the socket
IDLE_POLL_S = 0.02  # how long an idle generator waits at its socket
EVERYTHING = 1 << 30  # samples


class ScoredResponse(NamedTuple):
    """A completion for a ticket, and the text that its reward function sees.

    The text has no stop tokens, and all other special tokens.
    """

    ticket: Ticket
    completion: Completion
    text: str


class PromptTooLong(NamedTuple):
    """A sample whose prompt leaves no room for a response."""

    ticket: Ticket
    key: Key
    failure: RewardFailure


class GeneratorTurn:
    """The parts of a generator and the steps between them.

    lockstep: evaluation and training never share the engine, and all available tickets are
    requested together, so that a run repeats bitwise.
    """

    def __init__(
        self, config: Config, engine: Engine, *, lockstep: bool, run_dir: Path | None = None
    ) -> None:
        self.engine = engine
        self.config = config
        self.context = config.generator.context
        self.schedule = TicketSchedule(
            drain_first=config.weights.in_flight == "between_groups", lockstep=lockstep
        )
        # a gateway renders the chats of sessions
        self.tokenizer = load_tokenizer(config.model.path, renders_chats=not config.uses_sessions)
        self.stops = collect_stop_tokens(self.tokenizer, config)
        self.task = build_task(config)
        self.rewards = RewardRunner(config, self.task, run_dir)
        self.unscored: dict[Key, ScoredResponse] = {}  # waiting for their reward
        # of these, when they are due by staleness.delay, in the caller's unit, and their keys
        self.delayed: list[tuple[float, Key]] = []

    def count_samples_to_request(self, *, unsent: bool = False) -> int:
        """Compute how many samples to request; unsent: finished samples await delivery."""
        unfinished = bool(self.unscored) or unsent
        return count_samples_to_request(
            self.schedule, self.engine.slots, self.engine.active, unfinished
        )

    def accept_tickets(self, tickets: Iterable[Ticket]) -> None:
        """Take the new tickets and tokenize their prompts."""
        for ticket in self.schedule.add_tickets(tickets):
            leased = self.schedule.held[ticket.ticket, ticket.attempt]
            leased.prompt = encode_prompt(self.tokenizer, ticket.prompt)

    def build_requests(
        self, loaded: Label | None, room: int | None = None
    ) -> tuple[list[CompletionRequest], list[PromptTooLong]]:
        """Build engine requests for the samples that may start with the weights `loaded`.

        Returns the requests, and the samples whose prompts are too long. room: the number of
        samples; None means all free rows of the engine.
        """
        if room is None:
            room = self.engine.slots - self.engine.active
        requests: list[CompletionRequest] = []
        refused: list[PromptTooLong] = []
        for leased, sample in self.schedule.admit(loaded, room):
            ticket = leased.ticket
            sampling = ticket.sampling
            key = (ticket.ticket, sample, ticket.attempt)
            limit = min(sampling.max_new_tokens, self.context - len(leased.prompt))
            if limit < 1:
                reason = (
                    f"the prompt has {len(leased.prompt)} tokens, "
                    f"generator.context is {self.context}"
                )
                refused.append(PromptTooLong(ticket, key, RewardFailure("data", reason)))
                continue
            requests.append(
                CompletionRequest(
                    key=key,
                    prompt=leased.prompt,
                    group=ticket.ticket,
                    max_new_tokens=limit,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.get_top_k(sample),
                    stop=self.stops,
                    seed=ticket.seed,
                    images=tuple(ticket.prompt.images),
                )
            )
        return requests, refused

    def finish(self, completion: Completion) -> ScoredResponse | None:
        """Decode a finished completion, which then waits for its reward.

        Returns None if its ticket was dropped.
        """
        ticket, _, attempt = completion.key
        leased = self.schedule.held.get((ticket, attempt))
        if leased is None:
            return None
        self.schedule.finish_sample(completion.key, len(completion.tokens))
        text = self.tokenizer.decode(
            [token for token in completion.tokens.tolist() if token not in self.stops]
        )
        self.unscored[completion.key] = ScoredResponse(leased.ticket, completion, text)
        return self.unscored[completion.key]

    def hold(self, completion: Completion, now: float, step: float = 1.0) -> None:
        """Finish a completion, and hold its response until its artificial delay is over.

        now: when it ended, in the caller's unit. step: the length of a decode step in that unit.
        """
        if (response := self.finish(completion)) is not None:
            length = len(completion.tokens)
            steps = compute_delay_steps(self.config, response.ticket, completion.key[1], length)
            insort(self.delayed, (now + steps * step, completion.key), key=itemgetter(0))

    def pop_due(self, now: float) -> list[ScoredResponse]:
        """Return the delayed responses that are due by `now`, in the caller's unit."""
        count = bisect_right(self.delayed, now, key=itemgetter(0))
        due, self.delayed = self.delayed[:count], self.delayed[count:]
        return [self.unscored[key] for _, key in due]

    def submit(self, response: ScoredResponse) -> None:
        """Submit a response for its reward."""
        completion = response.completion
        tokens = completion.tokens.tolist()
        self.rewards.submit(completion.key, response.ticket.prompt, response.text, tokens)

    def poll_results(self) -> list[tuple[ScoredResponse, RewardResult]]:
        """Return the finished rewards, each with its response."""
        return [(self.unscored.pop(result.key), result) for result in self.rewards.poll()]

    def list_progress(self) -> list[AttemptTokens]:
        """Return (ticket, attempt, tokens generated so far) for every held ticket."""
        tokens = {name: leased.tokens for name, leased in self.schedule.held.items()}
        for (ticket, _, attempt), count in self.engine.count_tokens().items():
            if (ticket, attempt) in tokens:
                tokens[ticket, attempt] += count
        return [(ticket, attempt, count) for (ticket, attempt), count in tokens.items()]


def count_samples_to_request(
    schedule: TicketSchedule, slots: int, active: int, unfinished: bool
) -> int:
    """Compute how many samples will find a free row soon.

    In lockstep, request everything, and only when the engine is empty and everything is delivered.
    The samples that share the engine then do not depend on message timing, so that runs repeat
    bitwise.
    """
    if schedule.lockstep:
        return 0 if active or schedule.count_waiting() or unfinished else EVERYTHING
    return slots - active - schedule.count_waiting()


def build_trajectory(response: ScoredResponse, result: RewardResult) -> Trajectory:
    """Build the record of one sample, with token ids exactly as sampled.

    Raises NotFiniteLogprob for a log-probability that is not finite.
    """
    ticket, completion, text = response
    if not np.isfinite(completion.logprobs).all():
        raise NotFiniteLogprob(
            f"the engine gave a logprob that is not finite for ticket {ticket.ticket}, sample "
            f"{completion.key[1]}, with weights {completion.spans[-1].label}: if optim/grad_norm "
            "or kl/prox_target_k3 grew before, learner.lr is too large"
        )
    token_rewards = b""
    if result.token_rewards is not None:
        token_rewards = np.asarray(result.token_rewards, dtype="<f4").tobytes()
    return Trajectory(
        *completion.key,
        prompt_tokens=np.ascontiguousarray(completion.prompt, dtype="<i4").tobytes(),
        tokens=completion.tokens.tobytes(),
        behavior_logprobs=completion.logprobs.tobytes(),
        mask=b"\x01" * len(completion.tokens),
        spans=completion.spans,
        reward=float(result.reward),
        reward_parts=result.parts,
        finish=completion.finish,
        temperature=ticket.sampling.temperature,
        text=text,
        prompt_text=ticket.prompt.text,
        segments=[("model", 0, len(completion.tokens))],
        token_rewards=token_rewards,
        generated_at=time.monotonic(),
        failed=result.failed,
        support=completion.support_bytes,
        routed=completion.routed_bytes,
        images=[digest(blob) for blob in ticket.prompt.images],
    )


def build_failed_trajectory(refused: PromptTooLong, label: Label, digest: str) -> Trajectory:
    """Build the record of a sample that could not be generated.

    It counts as failed, which is never trained on as a reward of 0.
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
        failed=refused.failure,
    )
