"""One reward process, `python -m actors.reward_worker FD PARENT`.

Started by actors/rewards.py; it ends with its parent or its socket. A frame is four bytes of length
(big endian) and msgpack, never pickle. In: RewardWorkerSetup, then lists of RewardUnit. Out:
RewardReply("ready" or "broken"), then one RewardReply for each unit, at once. From the unanswered
units the parent knows which calls were running when this process hangs or exits. A unit is one
response, or a list of them for a function that takes lists (`batched`). A coroutine function has
several units running.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import math
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from actors.scorers.deadline_pause import DeadlinePause, JudgeBudgetSpent, current_pause
from actors.scorers.user_function import FailureLog, adapt_function, is_async
from asyncrl.config.tree import RewardConfig, TaskConfig
from asyncrl.contract import outcomes
from asyncrl.contract.errors import BadMessage, ConfigError
from asyncrl.contract.importing import import_function
from asyncrl.contract.messages import Numbers, Prompt
from asyncrl.contract.printable import (
    describe_exception,
    escape_line,
    format_last_frame,
    get_first_line,
)
from asyncrl.tasks import get_task
from asyncrl.transport import worker_pool
from asyncrl.transport.worker_pool import FRAME_BYTES, frame, read_frame

Judged = tuple[float, Numbers, list[float] | None]
Outcome = Judged | str  # of one response: its reward, or an error
BEAT_S = 1.0  # how often a process of coroutines reports that its loop is not blocked


class RewardWorkerSetup(Struct, frozen=True):
    """Runner to worker, once: the reward's source, the deadline, the run directory.

    run_dir "" means none. deadline_s bounds the calls of a coroutine function.
    """

    reward: RewardConfig
    task: TaskConfig
    deadline_s: float = 10.0
    run_dir: str = ""


class RewardCall(Struct, frozen=True, array_like=True):
    """One response to judge; tokens: its ids, including the stop token."""

    prompt: Prompt
    text: str
    tokens: list[int]


class RewardUnit(Struct, frozen=True, array_like=True):
    """Runner to worker: the responses that one call of the function judges.

    One response, or several when the function takes lists.
    """

    id: int
    calls: list[RewardCall]


class RewardReply(Struct, frozen=True, array_like=True):
    """Worker to runner. `results` has one entry per response: the reward, or an error.

    "failed": the call raised. "hung": a coroutine passed its deadline. "broken": the run cannot
    continue. "alive": coroutines are not blocked. Times are CLOCK_MONOTONIC seconds.
    """

    kind: Literal["ready", "broken", "ok", "failed", "hung", "alive"]
    id: int = -1
    results: list[Outcome] = []
    why: str = ""
    began: float = 0.0
    ended: float = 0.0
    batched: bool = False  # ready: the function takes lists
    window: int = 1  # ready: units running at once


# ---- return values -------------------------------------------------------------------------------


def check_value(value: Any, tokens: int) -> Judged:
    """Check the return value of a reward function for a response of `tokens` tokens.

    Returns (reward, parts, token rewards), with nan for a token given None. Raises ValueError that
    names the defect: not a number, not finite, too large, a dict without `reward`, a wrong count of
    token rewards.
    """
    reward_parts: Numbers = {}
    per_token = None
    if isinstance(value, ValueError):  # of one of several functions
        raise value
    if isinstance(value, dict):
        value = dict(value)
        per_token = value.pop("token_rewards", None)
        if isinstance(value.get("parts"), dict):
            value = value.pop("parts") | value
        if "reward" not in value:
            raise ValueError(f"a dict without `reward`: {sorted(map(str, value))}")
        reward_parts = {str(k): check_number(v, escape_line(str(k))) for k, v in value.items()}
        outcomes.check_parts(reward_parts)
        value = value["reward"]
    if per_token is not None:
        per_token = per_token.tolist() if hasattr(per_token, "tolist") else per_token
        if not isinstance(per_token, list | tuple) or len(per_token) != tokens:
            raise ValueError(f"token_rewards must be a list of {tokens} numbers, one a token")
        # nan: no reward for this token
        per_token = [math.nan if x is None else check_number(x, "token_rewards") for x in per_token]
    return check_number(value, "reward"), reward_parts, per_token


def check_number(value: Any, name: str) -> float:
    """Convert to a finite float, also from bool or numpy numbers. Raises ValueError."""
    if not (isinstance(value, bool | int | float) or hasattr(value, "__float__")):
        raise ValueError(f"{name} is a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    outcomes.check_number(number, name)
    return number


def check_or_explain(value: Any, tokens: int) -> Outcome:
    """Return `check_value`, or its error as text."""
    try:
        return check_value(value, tokens)
    except Exception as error:
        return get_first_line(
            "the reward function returned an unusable value: "
            f"{error if type(error) in (ValueError, BadMessage) else describe_exception(error)}"
        )


NOT_APPLICABLE = check_or_explain(None, 0)


def split_results(values: Any, calls: list[RewardCall]) -> list[Outcome]:
    """Split the return value of a function that takes lists by response.

    Without one value for each, all have failed: no value belongs to a response.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple) or len(values) != len(calls):
        returned = f"a {type(values).__name__}"
        if isinstance(values, list | tuple):
            returned = f"{len(values)} values"
        reason = (
            f"the reward function takes lists (`batched`), and returned {returned} for "
            f"{len(calls)} responses: return a list of the same length"
        )
        return [reason] * len(calls)
    return [check_or_explain(v, len(c.tokens)) for v, c in zip(values, calls, strict=True)]


# ---- the function --------------------------------------------------------------------------------


class RewardFunction:
    """A reward function, called with the responses of a unit.

    named: further arguments of each call
    batched: it takes lists, as marked by `function.batched = True`; otherwise a unit has a single
        response
    """

    def __init__(self, function: Callable[..., Any], **named: Any) -> None:
        self.function = function
        self.named = named
        self.batched = bool(getattr(function, "batched", False))
        self.is_async = is_async(function)
        try:
            self.takes_tokens = "tokens" in inspect.signature(function).parameters
        except (TypeError, ValueError):  # a builtin without a signature
            self.takes_tokens = False

    def call(self, calls: list[RewardCall]) -> Any:
        """Call the function; return its value, or an awaitable of it."""
        prompts: Any = [x.prompt for x in calls]
        texts: Any = [x.text for x in calls]
        tokens: Any = [x.tokens for x in calls]
        if not self.batched:
            prompts, texts, tokens = prompts[0], texts[0], tokens[0]
        named = self.named | ({"tokens": tokens} if self.takes_tokens else {})
        return self.function(prompts, texts, **named)

    def check(self, value: Any, calls: list[RewardCall]) -> list[Outcome]:
        """Check the value of a call, by response: the reward, or an error."""
        if self.batched:
            return split_results(value, calls)
        return [check_or_explain(value, len(calls[0].tokens))]


class WeightedFunctions(RewardFunction):
    """The weighted sum of reward functions, with them as its parts.

    It takes lists if one of them does, and is async if one of them is. As in TRL, the sum is over
    the functions that do not return None. functions: by their names as parts.
    """

    def __init__(self, functions: dict[str, RewardFunction], weights: list[float]) -> None:
        self.functions = functions
        self.weights = weights
        self.batched = any(function.batched for function in functions.values())
        self.is_async = any(function.is_async for function in functions.values())

    async def call(self, calls: list[RewardCall]) -> list[Any]:
        async def judge_unit(function: RewardFunction, unit: list[RewardCall]) -> list[Outcome]:
            value = function.call(unit)
            value = await value if inspect.isawaitable(value) else value
            return function.check(value, unit)

        judged = []
        for function in self.functions.values():
            units = [calls] if function.batched else [[one] for one in calls]
            results = await asyncio.gather(*(judge_unit(function, unit) for unit in units))
            judged.append(itertools.chain(*results))
        return [self._add_parts(row) for row in zip(*judged, strict=True)]

    def check(self, value: Any, calls: list[RewardCall]) -> list[Outcome]:
        return split_results(value, calls)

    def _add_parts(self, judged: Sequence[Outcome]) -> Any:
        """Return the dict of a sum, None without a term, or the ValueError of a failed one."""
        parts: Numbers = {}
        total = 0.0
        for name, result, weight in zip(self.functions, judged, self.weights, strict=True):
            if result == NOT_APPLICABLE:
                continue
            if isinstance(result, str) or result[2] is not None:
                reason = (
                    result if isinstance(result, str) else "token_rewards need a single function"
                )
                return ValueError(f"{name}: {reason}")
            total += weight * result[0]
            parts |= {name: result[0]} | {
                f"{name}.{part}": value for part, value in result[1].items() if part != "reward"
            }
        return {"reward": total, **parts} if parts else None


def load_judge(setup: RewardWorkerSetup) -> RewardFunction:
    """Build the reward function that the config asks for. Raises ConfigError."""
    settings = setup.reward
    if settings.model.path:
        from actors.scorers.reward_model import RewardModelScorer

        return RewardFunction(RewardModelScorer(settings.model))
    function = None
    if settings.function:
        bound_names = ("judge",) if settings.judge.url else ()
        found = import_function(settings.function, "reward.function")
        function = adapt_function(found, settings.function, bound_names)
    if settings.functions:
        parts = {}
        for name, path in settings.function_names.items():
            found = import_function(path, "reward.functions")
            parts[name] = RewardFunction(adapt_function(found, path, ()))
        return WeightedFunctions(parts, settings.weights or [1.0] * len(parts))
    if not settings.judge.url:
        return RewardFunction(function or get_task(setup.task).reward)
    from actors.scorers import judge

    client = judge.build_client(settings.judge, setup.run_dir)
    if function is None:
        return RewardFunction(judge.JudgeReward(client))
    if not is_async(function) or "judge" not in inspect.signature(function).parameters:
        raise ConfigError(
            f"reward.function = {settings.function}: with [reward.judge], write `async def "
            "reward(prompt, text, judge)`, which calls `await judge.ask(messages)`"
        )
    return RewardFunction(function, judge=client)


make_reward_function = functools.cache(RewardFunction)


def call(function: Callable[..., Any], prompt: Prompt, text: str, tokens: list[int]) -> Judged:
    """Judge one response here, awaiting the function when it is async.

    Raises the function's exception, and ValueError for an unusable return value.
    """
    calls = [RewardCall(prompt, text, tokens)]
    reward_function = make_reward_function(function)
    value = await_value(reward_function.call(calls))
    if not reward_function.batched:
        return check_value(value, len(tokens))
    (result,) = split_results(value, calls)
    if isinstance(result, str):
        raise ValueError(result)
    return result


def await_value(value: Any) -> Any:
    """Return a value, or the result of an awaitable."""
    return asyncio.run(asyncio.wait_for(value, None)) if inspect.isawaitable(value) else value


# ---- the loop ------------------------------------------------------------------------------------


def encode_reply(reply: RewardReply) -> bytes:
    """Encode one frame; a reply that cannot be encoded becomes a failure."""
    try:
        payload = msgspec.msgpack.encode(reply)
        if len(payload) > FRAME_BYTES:
            raise ValueError(f"it makes {len(payload)} bytes, more than {FRAME_BYTES}")
    except Exception as error:
        payload = msgspec.msgpack.encode(
            msgspec.structs.replace(reply, kind="failed", results=[], why=describe_exception(error))
        )
    return frame(payload)


def build_reply(
    function: RewardFunction, unit: RewardUnit, value: Any, began: float, log: FailureLog
) -> RewardReply:
    """Build the reply to a call that returned `value`, and log its unusable results."""
    results = function.check(value, unit.calls)
    for call_, value in zip(unit.calls, results, strict=True):
        if isinstance(value, str):
            log.note(call_.prompt, call_.text, value)
    return RewardReply("ok", unit.id, results, "", began, time.monotonic())


def build_failure_reply(
    unit: RewardUnit, error: BaseException, began: float, log: FailureLog
) -> RewardReply:
    """Build the reply to a call that raised, and log the reason.

    Of several responses each is judged again, alone.
    """
    reason = describe_exception(error) + format_last_frame(error)
    count = len(unit.calls)
    note = reason if count == 1 else f"a call with {count} responses, this one first, {reason}"
    log.note(unit.calls[0].prompt, unit.calls[0].text, note, error)
    return RewardReply("failed", unit.id, [], reason, began, time.monotonic())


def judge(function: RewardFunction, unit: RewardUnit, log: FailureLog) -> RewardReply:
    """Call the function now. Any exception, an exit included, fails only this call."""
    began = time.monotonic()
    try:
        value = await_value(function.call(unit.calls))
        return build_reply(function, unit, value, began, log)
    except BaseException as error:
        return build_failure_reply(unit, error, began, log)


async def judge_later(
    function: RewardFunction, unit: RewardUnit, deadline_s: float, log: FailureLog
) -> RewardReply:
    """Call an async function beside others, with a deadline.

    A call that ignores both the deadline and its cancellation is abandoned.
    """
    began = time.monotonic()

    async def judge_guarded() -> RewardReply:
        try:
            value = await function.call(unit.calls)
            return build_reply(function, unit, value, began, log)
        except JudgeBudgetSpent as error:  # every further call would fail the same way
            return RewardReply("broken", unit.id, [], str(error), began, time.monotonic())
        except BaseException as error:  # an exit in a task would end the loop
            return build_failure_reply(unit, error, began, log)

    pause = DeadlinePause()
    current_pause.set(pause)
    task = asyncio.create_task(judge_guarded())
    remaining_s = deadline_s
    while remaining_s > 0:
        done, _ = await asyncio.wait({task}, timeout=remaining_s)
        if done:
            return task.result()
        now = time.monotonic()
        remaining_s = began + deadline_s + pause.count_seconds(now) - now
    task.cancel()
    return RewardReply("hung", unit.id, [], "", began, time.monotonic())


def serve(wire: socket.socket) -> None:
    """Answer calls until the parent closes the socket."""
    stream = wire.makefile("rb")
    setup = msgspec.msgpack.decode(read_frame(stream) or b"", type=RewardWorkerSetup)
    try:
        function = load_judge(setup)
    except ConfigError as error:
        wire.sendall(encode_reply(RewardReply("broken", why=str(error))))
        return
    window = setup.reward.concurrency if function.is_async else 1
    wire.sendall(encode_reply(RewardReply("ready", batched=function.batched, window=window)))
    if function.is_async:
        asyncio.run(_serve_async(wire, function, setup))
        return
    decode = msgspec.msgpack.Decoder(list[RewardUnit]).decode
    log = FailureLog(setup.run_dir)
    while (payload := read_frame(stream)) is not None:
        for unit in decode(payload):
            wire.sendall(encode_reply(judge(function, unit, log)))


async def _serve_async(
    wire: socket.socket, function: RewardFunction, setup: RewardWorkerSetup
) -> None:
    """Run units in arrival order, at most `concurrency` at once."""
    reader, writer = await asyncio.open_unix_connection(sock=wire, limit=FRAME_BYTES)
    gate = asyncio.Semaphore(setup.reward.concurrency)
    running = set[asyncio.Task[None]]()
    log = FailureLog(setup.run_dir)

    async def send_heartbeats() -> None:
        """Report liveness: the parent does not know how long calls wait their turn."""
        while True:
            await asyncio.sleep(BEAT_S)
            writer.write(encode_reply(RewardReply("alive", ended=time.monotonic())))

    async def judge_unit(unit: RewardUnit) -> None:
        writer.write(encode_reply(await judge_later(function, unit, setup.deadline_s, log)))
        gate.release()

    if setup.reward.judge.url:
        running.add(asyncio.create_task(send_heartbeats()))
    while (units := await worker_pool.receive(reader, list[RewardUnit])) is not None:
        for unit in units:
            await gate.acquire()
            task = asyncio.create_task(judge_unit(unit))
            running.add(task)
            task.add_done_callback(running.discard)


if __name__ == "__main__":
    worker_pool.run(serve)
