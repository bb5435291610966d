"""The environment of agent.tools: plain functions, or a class whose methods are tools.

Such a class is what TRL calls an environment: `reset(**row)` begins a session, the other public
methods are tools, and `get_reward()`, if there is one, pays at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.reward_worker import first_line
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt

JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", list: "array"}
LONGEST = 1 << 20  # characters of an observation or a tool's result
OWN = ("reset", "get_reward")  # public methods that the model does not call
# a parameter in a docstring of Google's style: its name, its type, its description
PARAMETER = re.compile(r"(?m)^\s+(\w+)\s*(?:\([^)\n]*\))?:\s*(.+)$")

Message = dict[str, Any]


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Describe a tool to the template: name, first line of the docstring, parameters."""
    text = inspect.getdoc(function) or ""
    described = dict(PARAMETER.findall(text.partition("Args:")[2].partition("Returns:")[0]))
    properties = {}
    required = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        properties[name] = {"type": JSON_TYPES.get(parameter.annotation, "string")}
        if name in described:
            properties[name]["description"] = described[name].strip()
        if parameter.default is parameter.empty:
            required.append(name)
    description = {
        "name": function.__name__,
        "description": first_line(text),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": description}


def awaited(value: Any) -> Any:
    """Return a value, or the result of a coroutine."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


class ToolLoop:
    """A session of tools: runs them until an answer calls none."""

    pays = False  # whether it scores the session itself

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.tools = {function.__name__: function for function in functions}
        self.schemas = [schema(function) for function in functions]

    def reward(self) -> float:
        """Score the session, if `pays`."""
        raise AssertionError  # pragma: no cover - only where `pays`

    def reset(self, prompt: Prompt) -> list[Message]:
        return list(prompt.messages) or [{"role": "user", "content": prompt.text}]

    def answer(self, message: Mapping[str, Any]) -> list[Message]:
        """Run the tools that an answer calls; the messages are empty for the last answer."""
        messages = []
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            content = self._call_tool(name, call["function"].get("arguments") or {})
            tool_call_id = call.get("id", "")
            messages.append(
                {"role": "tool", "tool_call_id": tool_call_id, "content": content, "name": name}
            )
        return messages

    def _call_tool(self, name: str, arguments: Any) -> str:
        """Run a tool and return its result or its error, which the model sees too."""
        if name not in self.tools:
            return f"error: no tool {name!r}; there are {', '.join(self.tools)}"
        try:
            return str(awaited(self.tools[name](**arguments)))[:LONGEST]
        except Exception as error:
            return f"error: {type(error).__name__}: {first_line(str(error))}"


class StatefulTools(ToolLoop):
    """A session of a class with tools, which keeps its state between the calls.

    functions: tools without state beside its methods"""

    def __init__(self, made: Any, functions: Sequence[Callable[..., Any]]) -> None:
        super().__init__([*functions, *(getattr(made, name) for name in tool_names(type(made)))])
        self.made = made
        self.pays = pays(made)
        if hasattr(made, "close"):
            self.close = made.close

    def reset(self, prompt: Prompt) -> list[Message]:
        """Begin a session; what `reset` returns is appended to the prompt's last message."""
        messages = super().reset(prompt)
        text = awaited(self.made.reset(**row_of(prompt, messages, self.made.reset)))
        if text is None:
            return messages
        if not isinstance(text, str):
            raise ValueError(f"reset returned a {type(text).__name__}, not text or None")
        last = messages[-1]
        return [*messages[:-1], {**last, "content": last["content"] + text}]

    def reward(self) -> float:
        """Return what `get_reward` pays for the session so far."""
        return float(awaited(self.made.get_reward()))


def row_of(prompt: Prompt, messages: list[Message], reset: Callable[..., Any]) -> dict[str, Any]:
    """Return the row of the data set that a prompt came from, for the parameters of `reset`.

    A column is text. JSON becomes a list or an object again, and a number where the parameter is
    annotated as one."""
    parameters = inspect.signature(reset, eval_str=True).parameters
    row: dict[str, Any] = {"prompt": messages}
    for name, text in {**prompt.meta, "answer": prompt.answer}.items():
        kind = parameters[name].annotation if name in parameters else str
        row[name] = text
        if text[:1] in ("[", "{") or kind in (int, float, bool):
            with contextlib.suppress(ValueError):
                row[name] = json.loads(text)
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def tool_names(kind: type) -> list[str]:
    """Return the names of a class's methods that are tools."""
    functions = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [
        name for name, _ in functions if not name.startswith("_") and name not in (*OWN, "close")
    ]


def pays(made: Any) -> bool:
    """Return whether a class of tools, or one made of it, scores its sessions."""
    return callable(getattr(made, "get_reward", None))


def load(
    found: Sequence[tuple[str, Any]], args: Mapping[str, Any], *, judged: bool
) -> Callable[[], ToolLoop]:
    """Return what makes the tools of a session.

    found: the entries of agent.tools, and what was imported for each
    args: agent.args, with which a class is made
    judged: the config names a reward of its own

    Raises ConfigError for two classes, or one that has no `reset`, no tools, or pays beside the
    config's reward."""
    classes = [(path, each) for path, each in found if isinstance(each, type)]
    functions = [each for _, each in found if not isinstance(each, type)]
    if not classes:
        loop = ToolLoop(functions)
        return lambda: loop
    (path, kind), *others = classes
    if others:
        raise ConfigError(
            f"agent.tools: {path} and {others[0][0]} are classes: one keeps the state"
        )
    if not callable(getattr(kind, "reset", None)):
        raise ConfigError(f"agent.tools: {path} has no method reset, which begins a session")
    if not tool_names(kind):
        raise ConfigError(f"agent.tools: {path} has no public method that the model could call")

    if judged and pays(kind):
        raise ConfigError(
            f"agent.tools: {path} pays by get_reward, and so does [reward]: remove one of them"
        )
    make: Callable[[], ToolLoop] = lambda: StatefulTools(kind(**args), functions)  # noqa: E731
    make()
    return make
