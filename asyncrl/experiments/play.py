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

from actors.gateway.chat import Chat, parser_for
from actors.gateway.drive import Drive
from actors.gateway.env_worker import Happened, Observation, Op
from actors.gateway.service import env_seed, limits
from actors.gateway.sessions import Call, CallRefused, Session, Sides
from actors.rewards import judge_all
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import Prompt, Sampling, Ticket
from asyncrl.contract.versions import Label
from asyncrl.tasks import get_task

POLL_S = 0.01
LOADED = Label(1, 0)


class Shown(msgspec.Struct, frozen=True):
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


class Said(msgspec.Struct, frozen=True):
    """An answer.  ids: as drawn; empty by hand."""

    text: str
    message: dict[str, Any]
    ids: list[int] = []


class Player(Protocol):
    """Who answers."""

    def hear(self, happened: Happened, tools: list[dict[str, Any]]) -> tuple[int, bool]:
        """What it is asked now, on whichever side: the tokens so far, and whether it begins a row.
        Raises CallRefused at a limit.
        """

    def answer(self) -> Said | None:
        """None: it has nothing more to say."""


class ByHand:
    """A person: `line` gives the next answer, None at the end."""

    def __init__(self, config: Config, line: Callable[[], str | None]) -> None:
        self.line = line
        self.parse = parser_for(config.agent.parser)
        self.most = config.agent.max_calls
        self.calls = 0

    def hear(self, happened: Happened, tools: list[dict[str, Any]]) -> tuple[int, bool]:
        if self.most and self.calls >= self.most:
            raise CallRefused(400, "session_limit", f"agent.max_calls = {self.most}")
        self.calls += 1
        return 0, False

    def answer(self) -> Said | None:
        text = self.line()
        if text is None:
            return None
        return Said(text, {**self.parse(text), "role": "assistant"})


class ByModel:
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
        self.chat = Chat(tokenizer, self.stops, parser=parser, history=history)
        self.templated = has_template(config.model.path)
        if config.agent.tools and not self.templated:
            raise ConfigError(
                f"agent.tools: the tokenizer in {config.model.path} has no chat template, which "
                "says how a model calls tools"
            )
        own = encode_prompt(tokenizer, ticket.prompt)
        chat = self.chat.at(datetime.now())
        opened = time.monotonic()
        self.session = Session(ticket, 0, 1, limits(config), chat, own_prompt=own, opened=opened)
        self.sides = Sides(self.templated)
        self.call: Call | None = None

    def hear(self, happened: Happened, tools: list[dict[str, Any]]) -> tuple[int, bool]:
        self.sides.turn(happened.asked)
        now = time.monotonic()
        begun = self.session.forest.rows_begun()
        self.call = self.sides.now.place(self.session, happened.obs, tools, now)
        return len(self.call.prompt_ids), self.session.forest.rows_begun() > begun > 0

    def answer(self) -> Said | None:
        from actors.engine import Request

        call = self.call
        assert call is not None
        sampling = self.ticket.sampling
        request = Request(
            key=(call.number, 0, 1),
            prompt=call.prompt_ids,
            group=call.number,
            max_new_tokens=call.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.kept(0),
            stop=self.stops,
            seed=self.ticket.seed,
            beside=call.stream_key,
            drawn_for=(self.ticket.ticket, 0),
        )
        self.engine.add([request])
        while not (done := self.engine.step()):
            pass
        (got,) = done
        node = self.session.drawn(
            call, got.tokens, got.logprobs, got.spans, got.finish, now=time.monotonic()
        )
        if node is None:
            return None
        self.sides.now.drew(node)
        text = self.chat.shown(got.tokens)
        message = node.answer or {"role": "assistant", "content": text}
        return Said(text, message, [int(token) for token in got.tokens])


def as_text(obs: Observation) -> str:
    """What an environment said, for a reader; messages with their roles."""
    if isinstance(obs, str):
        return obs
    return "\n".join(f"[{said['role']}] {said.get('content') or ''}" for said in obs)


def ticket_of(config: Config, index: int) -> Ticket:
    """A training prompt, as a run's ticket for one sample."""
    settings = config.generator
    prompt: Prompt = get_task(config.task).prompt("train", index, config.seed)
    sampling = Sampling(
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


def play(config: Config, ticket: Ticket, player: Player) -> Iterator[Shown]:
    """One session, as it goes.  The last one is "ended", with the session's reward and, in text,
    how it ended.  Raises AsyncrlError for an environment that fails.
    """
    drive = Drive(msgspec.structs.replace(config.agent, workers=1))
    try:
        yield from _played(config, ticket, player, drive)
    finally:
        drive.close()


def _played(config: Config, ticket: Ticket, player: Player, drive: Drive) -> Iterator[Shown]:
    seed = env_seed(config, ticket)
    opponent = config.agent.opposed_by(ticket.kind)
    drive.reset(Op(1, "reset", prompt=ticket.prompt, seed=seed, opponent=opponent))
    happened = _wait(drive)
    tools = happened.tools
    total = 0.0
    parts: dict[str, float] = {}
    last: Said | None = None
    turn = 0
    yield from _told(happened, turn)
    while not happened.ended:
        turn += 1
        other = happened.asked > 0
        try:
            tokens, row = player.hear(happened, tools)
        except CallRefused as error:
            if error.code not in ("session_limit", "context_length_exceeded"):
                raise ConfigError(str(error)) from error
            total, more = _judged(config, ticket, last) if config.agent.tools else (total, {})
            yield Shown("ended", turn, f"cut: {error}", total, parts | more)
            return
        said_now = as_text(happened.obs)
        paid, more = happened.reward, happened.parts
        yield Shown("asked", turn, said_now, paid, more, tokens=tokens, row=row, other=other)
        last = player.answer()
        if last is None:
            yield Shown("ended", turn, "nobody answers any more", total, parts)
            return
        yield Shown("answered", turn, last.text, tokens=len(last.ids), other=other)
        drive.step(Op(1, "step", text=last.text, message=last.message))
        happened = _wait(drive)
        yield from _told(happened, turn)
        tools = happened.tools or tools
        total += happened.reward
        for name, value in happened.parts.items():
            parts[name] = parts.get(name, 0.0) + value
    if happened.judge:
        total, more = _judged(config, ticket, last)
        parts |= more
    how = "cut by the environment" if happened.truncated else "the environment ended it"
    how = "judged by the config's reward" if happened.judge else how
    yield Shown("ended", turn, how, total, parts)


def _told(happened: Happened, turn: int) -> Iterator[Shown]:
    """The moves of an opponent that is none of ours, behind the policy's turn (0: before its
    first).
    """
    for told, move in happened.told:
        yield Shown("asked", turn, told, other=True)
        yield Shown("answered", turn, move, other=True)


def _wait(drive: Drive) -> Happened:
    while not (found := drive.poll()):
        time.sleep(POLL_S)
    if found[0].kind != "ok":
        raise AsyncrlError(found[0].why)
    return found[0]


def _judged(config: Config, ticket: Ticket, last: Said | None) -> tuple[float, dict[str, float]]:
    """The config's reward of the last answer.  Raises AsyncrlError where it fails."""
    if last is None:
        raise AsyncrlError("the session was to be judged before its first answer")
    asked = [(ticket.prompt, last.text, last.ids)]
    (found,) = judge_all(config, get_task(config.task), asked)
    if found.failed:
        raise AsyncrlError(f"the reward failed: {found.failed}")
    return found.reward, found.parts
