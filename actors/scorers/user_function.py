"""A user's reward function: its accepted signatures, and the log of failed calls."""

from __future__ import annotations

import inspect
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.contract.printable import list_user_frames

Function = Callable[..., Any]

LOG = "reward.log"  # in the run directory
LOG_BYTES = 1 << 20  # further entries are dropped
SHOWN = 80  # characters of a prompt, or of a response, in an error
LOGS_OF_TRL = ("log_extra", "log_metric")
ONLY_IN_TRL = ("trainer_state", "environments")  # keywords of its trainer


# ---- signatures ----------------------------------------------------------------------------------


def is_async(function: Function) -> bool:
    """Whether the function's calls are awaited."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def adapt_function(function: Function, path: str, bound_names: Sequence[str]) -> Any:
    """Adapt `function`, named `path` in the config, to a call with (prompt, text).

    It also receives `tokens` if it has such a parameter. A function in TRL's form, with a parameter
    `completions`, is wrapped. bound_names: parameters that are bound later. Raises ConfigError for
    parameters that fit neither form.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return function
    names = list(signature.parameters)
    if "completions" in names:
        for name in set(names) & {*ONLY_IN_TRL}:
            if signature.parameters[name].default is inspect.Parameter.empty:
                raise ConfigError(
                    f"reward.function = {path}: takes {name}, which only TRL's trainer has; give "
                    f"it a default, as in {name}=None, and do without"
                )
        return wrap_trl_function(function, signature)
    keywords = [name for name in ("tokens", *bound_names) if name in names]
    hint = "parameters do not fit"
    try:
        signature.bind(None, None, **dict.fromkeys(keywords))
        if names[1:2] == ["prompt"]:
            hint = "the prompt comes first"
        elif names[:1] == ["prompts"] and not getattr(function, "batched", False):
            hint = f"mark one that takes lists by {path.rpartition(':')[2]}.batched = True"
        else:
            return function
    except TypeError as error:
        hint = str(error)
    raise ConfigError(
        f"reward.function = {path}: takes {signature} ({hint}); write "
        "reward(prompt, text), or reward(prompts, completions, **columns) as TRL calls one"
    )


def wrap_trl_function(function: Function, signature: inspect.Signature) -> Function:
    """Wrap a function in TRL's form as one that takes lists.

    It is called by keyword: `prompts` and `completions` (texts, or lists of messages where the
    prompt has `messages`), `completion_ids`, each column of the prompts as a list, and, where it
    has them, `log_extra` and `log_metric`, which do nothing here.
    """
    parameters = signature.parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    required = {
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }

    def build_arguments(
        prompts: list[Prompt], texts: list[str], tokens: list[list[int]]
    ) -> dict[str, Any]:
        columns = sorted({name for prompt in prompts for name in prompt.meta})
        values: dict[str, Any] = {
            name: [prompt.meta.get(name) for prompt in prompts] for name in columns
        }
        values |= {
            "answer": [prompt.answer for prompt in prompts],
            "prompts": [prompt.messages or prompt.text for prompt in prompts],
            "completions": [
                prompt.join_answer(text)[-1:] if prompt.messages else text
                for prompt, text in zip(prompts, texts, strict=True)
            ],
            "completion_ids": tokens,
        }
        for name in LOGS_OF_TRL:
            if name in signature.parameters:
                values[name] = lambda *_, **__: None
        if missing := sorted(required - set(values)):
            raise TypeError(
                f"it takes {', '.join(missing)}, but the prompts have no such column: they have "
                f"{', '.join([*columns, 'answer'])} (task.columns renames)"
            )
        if takes_any:
            return values
        return {name: value for name, value in values.items() if name in signature.parameters}

    async def call_async(prompts: Any, texts: Any, tokens: Any) -> Any:
        return await function(**build_arguments(prompts, texts, tokens))

    wrapped: Function = call_async
    if not is_async(function):
        wrapped = lambda prompts, texts, tokens: function(  # noqa: E731
            **build_arguments(prompts, texts, tokens)
        )
    wrapped.batched = True  # type: ignore[attr-defined]
    return wrapped


# ---- failed calls --------------------------------------------------------------------------------


def format_text(text: str) -> str:
    """Quote and shorten the text of a prompt or response."""
    return repr(text[:SHOWN]) + ("..." if len(text) > SHOWN else "")


class FailureLog:
    """RUN/reward.log: failed calls with traceback, prompt, response; up to LOG_BYTES."""

    def __init__(self, run_dir: str) -> None:
        self.path = Path(run_dir) / LOG if run_dir else None

    def note(
        self, prompt: Prompt, text: str, reason: str, error: BaseException | None = None
    ) -> None:
        """Append a failed call. If the log cannot be written, only the entry is lost."""
        if self.path is None:
            return
        lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} prompt {prompt.id}: {reason}"]
        lines += [f"prompt:   {prompt.text!r}", f"response: {text!r}"]
        if error is not None:
            lines += ["Traceback (most recent call last):"]
            lines += ["".join(traceback.format_list(list_user_frames(error))).rstrip()]
            lines += ["".join(traceback.format_exception_only(error)).rstrip()]
        entry = "\n".join(lines) + "\n\n"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                if os.fstat(descriptor).st_size < LOG_BYTES:
                    os.write(descriptor, entry.encode("utf-8", "backslashreplace")[:LOG_BYTES])
            finally:
                os.close(descriptor)
        except OSError:
            pass
