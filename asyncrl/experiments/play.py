"""Play one session of a config's environment or tools, turn by turn.

You or a model plays. Processes, limits, chat template and token ids are those of a run's gateway.
"""

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from actors.gateway.call_tree import CallNode
from actors.gateway.chat import ChatFormat, find_parser
from actors.gateway.environment_pool import EnvironmentPool
from actors.gateway.environment_worker import EnvironmentEvent, EnvironmentOperation
from actors.gateway.refusals import CallRefused
from actors.gateway.service import build_limits, compute_env_seed
from actors.gateway.sessions import Session, SessionPlayer
from actors.rewards import judge_all
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import Numbers, Prompt, SamplingSettings, Ticket
from asyncrl.contract.versions import Label
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks import get_task

POLL_S = 0.01
LOADED = Label(1, 0)


class PlayEvent(msgspec.Struct, frozen=True):
    """One event of a session.

    reward, parts: of the previous response.
    tokens: of the model's context ("asked") or sampled ("answered"), 0 for a human player.
    row: the response starts a training sequence that is not the first.
    other: the event belongs to the other side of a game.
    """

    kind: Literal["asked", "answered", "ended"]
    turn: int
    text: str = ""
    reward: float = 0.0
    parts: Numbers = {}
    tokens: int = 0
    row: bool = False
    other: bool = False


class PlayerAnswer(msgspec.Struct, frozen=True):
    """One response. ids: the sampled tokens, empty for a human player."""

    text: str
    message: JsonObject
    ids: list[int] = []


class HumanPlayer:
    """A person. `read_line` returns the next response, or None at the end."""

    def __init__(self, config: Config, read_line: Callable[[], str | None]) -> None:
        self.read_line = read_line
        self.parse = find_parser(config.agent.parser)
        self.most = config.agent.max_calls
        self.calls = 0

    def receive_event(self, event: EnvironmentEvent, tools: list[JsonObject]) -> tuple[int, bool]:
        """Receive the next observation, of either side of a game.

        Returns the number of tokens in the context, and whether the response starts another
        training sequence. Raises CallRefused at a limit.
        """
        if self.most and self.calls >= self.most:
            raise CallRefused(400, "session_limit", f"agent.max_calls = {self.most}")
        self.calls += 1
        return 0, False

    def answer(self) -> PlayerAnswer | None:
        """Return the next response, or None to stop."""
        text = self.read_line()
        if text is None:
            return None
        return PlayerAnswer(text, {**self.parse(text), "role": "assistant"})


class ModelPlayer:
    """The model at config.model.path, sampled as in a run, with the config's seed."""

    def __init__(self, config: Config, ticket: Ticket) -> None:
        from actors.engine import build_engine, load_model
        from asyncrl.models import tokenizer as tokenizers
        from asyncrl.models.policy import load_policy

        self.ticket = ticket
        self.engine = build_engine(config)
        model = load_policy(Path(config.model.path), config.model.dtype, config.model.device)
        load_model(self.engine, model, LOADED)
        tokenizer = tokenizers.load_tokenizer(config.model.path)
        self.stops = tokenizers.collect_stop_tokens(tokenizer, config)
        parser, history = find_parser(config.agent.parser), config.agent.history
        self.chat = ChatFormat(tokenizer, self.stops, parser=parser, history=history)
        self.templated = tokenizers.has_template(config.model.path)
        if config.agent.tools and not self.templated:
            raise ConfigError(
                f"agent.tools: the tokenizer in {config.model.path} has no chat template, which "
                "defines how a model calls tools"
            )
        self.session = Session(
            ticket,
            0,
            1,
            build_limits(config, config.agent),
            self.chat.with_date(datetime.now()),
            own_prompt=tokenizers.encode_prompt(tokenizer, ticket.prompt),
            opened=time.monotonic(),
        )
        self.players: dict[int, SessionPlayer] = {}  # by their games
        self.active: SessionPlayer  # has the turn
        self.call: CallNode | None = None

    def receive_event(self, event: EnvironmentEvent, tools: list[JsonObject]) -> tuple[int, bool]:
        player = SessionPlayer(self.templated, event.asked)
        self.active = self.players.setdefault(event.asked, player)
        now = time.monotonic()
        sequences = self.session.tree.count_rows()
        self.call = self.active.place_observation(self.session, event.obs, tools, now)
        return len(self.call.prompt_ids), self.session.tree.count_rows() > sequences > 0

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
            top_k=sampling.get_top_k(0),
            stop=self.stops,
            seed=self.ticket.seed,
            beside=call.stream_key,
            drawn_for=(self.ticket.ticket, 0),
        )
        self.engine.add([request])
        while not (completions := self.engine.step()):
            pass
        (completion,) = completions
        node = self.session.on_result(
            call,
            completion.tokens,
            completion.logprobs,
            completion.spans,
            completion.finish,
            now=time.monotonic(),
            support=completion.support,
            routed=completion.routed,
        )
        if node is None:
            return None
        self.active.on_answer(node)
        text = self.chat.decode_visible(completion.tokens)
        message = node.answer or {"role": "assistant", "content": text}
        return PlayerAnswer(text, message, [int(token) for token in completion.tokens])


Player = HumanPlayer | ModelPlayer


def make_ticket(config: Config, index: int) -> Ticket:
    """Make a run's ticket for one sample of a training prompt."""
    own = config.generator
    prompt: Prompt = get_task(config.task).prompt("train", index, config.seed)
    sampling = SamplingSettings(own.temperature, own.top_p, own.top_k, own.max_new_tokens)
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
    """Play one session and yield its events.

    The last one is "ended" with the session's reward; its text describes the end of the session.
    Raises AsyncrlError if the environment or the reward fails.
    """
    pool = EnvironmentPool(
        msgspec.structs.replace(config.agent, workers=1), judged=config.reward.uses_reward_processes
    )
    try:
        start = EnvironmentOperation(
            1,
            "reset",
            prompt=ticket.prompt,
            seed=compute_env_seed(config, ticket),
            opponent=config.agent.choose_opponent(ticket.kind),
        )
        pool.reset(start)
        event = _wait(pool)
        tools, pays = event.tools, event.pays
        total_reward = 0.0
        parts: Numbers = {}
        last_answer: PlayerAnswer | None = None
        turn = 0
        ending = ""
        yield from _list_opponent_moves(event, turn)
        while not event.ended:
            turn += 1
            other_side = event.asked > 0
            try:
                tokens, row = player.receive_event(event, tools)
            except CallRefused as error:
                if error.code not in ("session_limit", "context_length_exceeded"):
                    raise ConfigError(str(error)) from error
                ending = f"cut: {error}"
                break
            text = event.obs
            if not isinstance(text, str):
                text = "\n".join(f"[{m['role']}] {m.get('content') or ''}" for m in text)
            yield PlayEvent(
                "asked",
                turn,
                text,
                event.reward,
                event.parts,
                tokens=tokens,
                row=row,
                other=other_side,
            )
            answer = player.answer()
            if answer is None:
                yield PlayEvent("ended", turn, "the player stopped", total_reward, parts)
                return
            last_answer = answer
            yield PlayEvent("answered", turn, answer.text, tokens=len(answer.ids), other=other_side)
            pool.step(EnvironmentOperation(1, "step", text=answer.text, message=answer.message))
            event = _wait(pool)
            yield from _list_opponent_moves(event, turn)
            tools = event.tools or tools
            total_reward += event.reward
            for name, value in event.parts.items():
                parts[name] = parts.get(name, 0.0) + value
        if ending and pays:
            pool.step(EnvironmentOperation(1, "score"))
            total_reward = _wait(pool).reward
        elif config.agent.tools if ending else event.judge:
            if last_answer is None:
                raise AsyncrlError(
                    "the environment asked to score the session before its first response"
                )
            answers = [(ticket.prompt, last_answer.text, last_answer.ids)]
            (result,) = judge_all(config, get_task(config.task), answers)
            if result.failed:
                raise AsyncrlError(f"the reward failed: {result.failed}")
            total_reward, parts = result.reward, parts | result.parts
            ending = ending or "judged by the config's reward"
        side = "cut" if event.truncated else "ended"
        yield PlayEvent("ended", turn, ending or f"{side} by the environment", total_reward, parts)
    finally:
        pool.close()


def _list_opponent_moves(event: EnvironmentEvent, turn: int) -> Iterator[PlayEvent]:
    """Yield an opponent's moves after the policy's turn (0: before the first)."""
    for observation, move in event.told:
        yield PlayEvent("asked", turn, observation, other=True)
        yield PlayEvent("answered", turn, move, other=True)


def _wait(pool: EnvironmentPool) -> EnvironmentEvent:
    while not (events := pool.poll()):
        time.sleep(POLL_S)
    if events[0].kind != "ok":
        raise AsyncrlError(events[0].why)
    return events[0]
