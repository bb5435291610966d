"""Refused requests of a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from asyncrl.contract.errors import AsyncrlError

Container = TypeVar("Container", dict[str, Any], list[Any])

TOO_LONG = "context_length_exceeded"  # the error code of a prompt longer than the context


class CallRefused(AsyncrlError):
    """A refused request.

    status: the HTTP status
    code: the error's name, on which a client may branch
    param: the wrong key of the body
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def build_refusal(param: str, reason: str, code: str = "invalid_value") -> CallRefused:
    """Build the refusal of a request for a key of its body, or a part of one: `tools[0]`."""
    return CallRefused(400, code, f"{param}: {reason}", param.partition("[")[0])


def take(body: Mapping[str, Any], name: str, kind: type[Container]) -> Container:
    """Return an object or a list of a body; an empty one where it has none.  Raises CallRefused."""
    value = body.get(name) or kind()
    if not isinstance(value, kind):
        raise build_refusal(name, f"give {'a list' if kind is list else 'an object'}")
    return value


def build_too_long_error(detail: str, context: int, param: str = "messages") -> CallRefused:
    """Build the refusal of a prompt longer than the context.

    The message begins as that of OpenAI's API: clients recognize the error by these words.

    detail: the length, as in "the prompt has 9 tokens"
    """
    text = (
        f"This model's maximum context length is {context} tokens, prompt and answer "
        f"(generator.context = {context}), but {detail}: shorten the history"
    )
    return CallRefused(400, TOO_LONG, text, param)
