"""One session of a config's environment or tools, by hand or by a model, turn by turn: what a run's
gateway does, with the same processes, limits, template and ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from actors.gateway.chat import ChatFormat, parser_for
from actors.gateway.environment_pool import EnvironmentPool
from actors.gateway.environment_worker import EnvironmentEvent, EnvironmentOperation, Observation
from actors.gateway.service import env_seed, limits
from actors.gateway.sessions import CallRefused, Session, SessionCall, SessionPlayers
from actors.rewards import judge_all
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import Prompt, SamplingSettings, Ticket
from asyncrl.contract.versions import Label
from asyncrl.tasks import get_task

POLL_S = 0.01
LOADED = Label(1, 0)


class PlayEvent(msgspec.Struct, frozen=True):
    """One thing that happened.  reward: of the answer before; tokens: of the model's context so far
    ("asked") or drawn ("answered"), 0 by hand; row: its answer begins a row, not the first; other:
    the other side of a game is asked, or answers.
    """

    kind: Literal["asked", "answered", "ended"]
    turn: int
    text: str = ""
    reward: float = 0.0
    parts: dict[str, float] = {}
    tokens: int = 0
    row: bool = False
    other: bool = False


class PlayerAnswer(msgspec.Struct, frozen=True):
    """An answer.  ids: as drawn; empty by hand."""

    text: str
    message: dict[str, Any]
    ids: list[int] = []


class Player(Protocol):
    """Who answers."""

    def receive_event(
        self, happened: EnvironmentEvent, tools: list[dict[str, Any]]
    ) -> tuple[int, bool]:
        """What it is asked now, on whichever side: the tokens so far, and whether it begins a row.
        Raises CallRefused at a limit.
        """

    def answer(self) -> PlayerAnswer | None:
        """None: it has nothing more to say."""


class HumanPlayer:
    """A person: `line` gives the next answer, None at the end."""

    def __init__(self, config: Config, line: Callable[[], str | None]) -> None:
        self.line = line
        self.parse = parser_for(config.agent.parser)
        self.most = config.agent.max_calls
        self.calls = 0

    def receive_event(
        self, happened: EnvironmentEvent, tools: list[dict[str, Any]]
    ) -> tuple[int, bool]:
        if self.most and self.calls >= self.most:
            raise CallRefused(400, "session_limit", f"agent.max_calls = {self.most}")
        self.calls += 1
        return 0, False

    def answer(self) -> PlayerAnswer | None:
        text = self.line()
        if text is None:
            return None
        return PlayerAnswer(text, {**self.parse(text), "role": "assistant"})


class ModelPlayer:
    """The model of config.model.path: its engine draws as in a run, from the config's seed."""

    def __init__(self, config: Config, ticket: Ticket) -> None:
        from actors.engine import engine_for
        from asyncrl.models.policy import load_policy, named_weights, weights_digest
        from asyncrl.models.tokenizer import encode_prompt, has_template, load_tokenizer
        from asyncrl.models.tokenizer import stop_tokens as stops_of

        self.ticket = ticket
        self.engine = engine_for(config)
        model = load_policy(Path(config.model.path), config.model.dtype, config.model.device)
        self.engine.load(dict(named_weights(model)), LOADED, weights_digest(model))
        tokenizer = load_tokenizer(config.model.path)
        self.stops = stops_of(tokenizer, config)
        parser, history = parser_for(config.agent.parser), config.agent.history
        self.chat = ChatFormat(tokenizer, self.stops, parser=parser, history=history)
        self.templated = has_template(config.model.path)
        if config.agent.tools and not self.templated:
            raise ConfigError(
                f"agent.tools: the tokenizer in {config.model.path} has no chat template, which "
                "says how a model calls tools"
            )
        own = encode_prompt(tokenizer, ticket.prompt)
        chat = self.chat.with_date(datetime.now())
        opened = time.monotonic()
        self.session = Session(ticket, 0, 1, limits(config), chat, own_prompt=own, opened=opened)
        self.sides = SessionPlayers(self.templated)
        self.call: SessionCall | None = None

    def receive_event(
        self, happened: EnvironmentEvent, tools: list[dict[str, Any]]
    ) -> tuple[int, bool]:
        self.sides.set_turn(happened.asked)
        now = time.monotonic()
        begun = self.session.forest.rows_begun()
        self.call = self.sides.now.place_observation(self.session, happened.obs, tools, now)
        return len(self.call.prompt_ids), self.session.forest.rows_begun() > begun > 0

    def answer(self) -> PlayerAnswer | None:
        from actors.engine import CompletionRequest

        call = self.call
        assert call is not None
        sampling = self.ticket.sampling
        request = CompletionRequest(
            key=(call.number, 0, 1),
            prompt=call.prompt_ids,
            group=call.number,
            max_new_tokens=call.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k_of(0),
            stop=self.stops,
            seed=self.ticket.seed,
            beside=call.stream_key,
            drawn_for=(self.ticket.ticket, 0),
        )
        self.engine.add([request])
        while not (done := self.engine.step()):
            pass
        (got,) = done
        node = self.session.on_result(
            call, got.tokens, got.logprobs, got.spans, got.finish, now=time.monotonic()
        )
        if node is None:
            return None
        self.sides.now.on_answer(node)
        text = self.chat.visible_text(got.tokens)
        message = node.answer or {"role": "assistant", "content": text}
        return PlayerAnswer(text, message, [int(token) for token in got.tokens])


def as_text(obs: Observation) -> str:
    """What an environment said, for a reader; messages with their roles."""
    if isinstance(obs, str):
        return obs
    return "\n".join(f"[{said['role']}] {said.get('content') or ''}" for said in obs)


def ticket_of(config: Config, index: int) -> Ticket:
    """A training prompt, as a run's ticket for one sample."""
    settings = config.generator
    prompt: Prompt = get_task(config.task).prompt("train", index, config.seed)
    sampling = SamplingSettings(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens,
    )
    return Ticket(
        ticket=index,
        attempt=1,
        kind="train",
        prompt=prompt,
        samples=[0],
        sampling=sampling,
        min_version=LOADED,
        exact_version=None,
        seed=config.seed,
    )


def play(config: Config, ticket: Ticket, player: Player) -> Iterator[PlayEvent]:
    """One session, as it goes.  The last one is "ended", with the session's reward and, in text,
    how it ended.  Raises AsyncrlError for an environment that fails.
    """
    drive = EnvironmentPool(msgspec.structs.replace(config.agent, workers=1))
    try:
        yield from _played(config, ticket, player, drive)
    finally:
        drive.close()


def _played(
    config: Config, ticket: Ticket, player: Player, drive: EnvironmentPool
) -> Iterator[PlayEvent]:
    seed = env_seed(config, ticket)
    opponent = config.agent.opponent_for(ticket.kind)
    drive.reset(
        EnvironmentOperation(1, "reset", prompt=ticket.prompt, seed=seed, opponent=opponent)
    )
    happened = _wait(drive)
    tools = happened.tools
    total = 0.0
    parts: dict[str, float] = {}
    last: PlayerAnswer | None = None
    turn = 0
    yield from _opponent_moves(happened, turn)
    while not happened.ended:
        turn += 1
        other = happened.asked > 0
        try:
            tokens, row = player.receive_event(happened, tools)
        except CallRefused as error:
            if error.code not in ("session_limit", "context_length_exceeded"):
                raise ConfigError(str(error)) from error
            total, more = _score_answer(config, ticket, last) if config.agent.tools else (total, {})
            yield PlayEvent("ended", turn, f"cut: {error}", total, parts | more)
            return
        said_now = as_text(happened.obs)
        paid, more = happened.reward, happened.parts
        yield PlayEvent("asked", turn, said_now, paid, more, tokens=tokens, row=row, other=other)
        last = player.answer()
        if last is None:
            yield PlayEvent("ended", turn, "nobody answers any more", total, parts)
            return
        yield PlayEvent("answered", turn, last.text, tokens=len(last.ids), other=other)
        drive.step(EnvironmentOperation(1, "step", text=last.text, message=last.message))
        happened = _wait(drive)
        yield from _opponent_moves(happened, turn)
        tools = happened.tools or tools
        total += happened.reward
        for name, value in happened.parts.items():
            parts[name] = parts.get(name, 0.0) + value
    if happened.judge:
        total, more = _score_answer(config, ticket, last)
        parts |= more
    how = "cut by the environment" if happened.truncated else "the environment ended it"
    how = "judged by the config's reward" if happened.judge else how
    yield PlayEvent("ended", turn, how, total, parts)


def _opponent_moves(happened: EnvironmentEvent, turn: int) -> Iterator[PlayEvent]:
    """The moves of an opponent that is none of ours, behind the policy's turn (0: before its
    first).
    """
    for told, move in happened.told:
        yield PlayEvent("asked", turn, told, other=True)
        yield PlayEvent("answered", turn, move, other=True)


def _wait(drive: EnvironmentPool) -> EnvironmentEvent:
    while not (found := drive.poll()):
        time.sleep(POLL_S)
    if found[0].kind != "ok":
        raise AsyncrlError(found[0].why)
    return found[0]


def _score_answer(
    config: Config, ticket: Ticket, last: PlayerAnswer | None
) -> tuple[float, dict[str, float]]:
    """The config's reward of the last answer.  Raises AsyncrlError where it fails."""
    if last is None:
        raise AsyncrlError("the session was to be judged before its first answer")
    asked = [(ticket.prompt, last.text, last.ids)]
    (found,) = judge_all(config, get_task(config.task), asked)
    if found.failed:
        raise AsyncrlError(f"the reward failed: {found.failed}")
    return found.reward, found.parts
