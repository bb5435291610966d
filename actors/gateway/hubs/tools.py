"""The environment of agent.tools: functions, or a class with tools as methods.

TRL calls such a class an environment: `reset(**row)` begins a session, the other public methods are
tools, and `get_reward()`, if there is one, pays at the end.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.reward_worker import await_value
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.contract.printable import get_first_line

Function = Callable[..., Any]

JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", list: "array"}
LONGEST = 1 << 20  # characters of an observation or a tool's result
OWN = ("reset", "get_reward")  # public methods that the model does not call
# a parameter in a docstring of Google's style: its name, its type, its description
PARAMETER = re.compile(r"(?m)^\s+(\w+)\s*(?:\([^)\n]*\))?:\s*(.+)$")

Message = dict[str, Any]
Messages = list[Message]


def build_schema(function: Function) -> dict[str, Any]:
    """Describe a tool to the template: name, first line of the docstring, parameters."""
    text = inspect.getdoc(function) or ""
    parameter_texts = dict(PARAMETER.findall(text.partition("Args:")[2].partition("Returns:")[0]))
    properties = {}
    required = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        properties[name] = {"type": JSON_TYPES.get(parameter.annotation, "string")}
        if name in parameter_texts:
            properties[name]["description"] = parameter_texts[name].strip()
        if parameter.default is parameter.empty:
            required.append(name)
    description = {
        "name": function.__name__,
        "description": get_first_line(text),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": description}


class ToolLoop:
    """A session of tools: runs them until an answer calls none.

    functions: tools without state
    instance: of a class with tools, which keeps its state between the calls; None: there is none
    """

    def __init__(self, functions: Sequence[Function], instance: Any = None) -> None:
        methods = () if instance is None else list_tool_names(type(instance))
        tools = [*functions, *(getattr(instance, name) for name in methods)]
        self.tools = {tool.__name__: tool for tool in tools}
        self.schemas = [build_schema(tool) for tool in tools]
        self.instance = instance
        self.pays = has_reward(instance)  # whether it scores the session itself
        if hasattr(instance, "close"):
            self.close = instance.close

    def reset(self, prompt: Prompt) -> Messages:
        """Begin a session; append the text of the instance's `reset` to the last message."""
        messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        if self.instance is None:
            return messages
        text = await_value(self.instance.reset(**build_row(prompt, messages, self.instance.reset)))
        if text is None:
            return messages
        if not isinstance(text, str):
            raise ValueError(f"reset returned a {type(text).__name__}, not text or None")
        last_message = messages[-1]
        return [
            *messages[:-1],
            {**last_message, "content": (last_message.get("content") or "") + text},
        ]

    def compute_reward(self) -> float:
        """Return the reward of `get_reward` for the session so far."""
        return float(await_value(self.instance.get_reward()))

    def run_calls(self, message: Mapping[str, Any]) -> Messages:
        """Run the tools that an answer calls; the messages are empty for the last answer.

        A message holds a tool's result or its error, both for the model.
        """
        messages = []
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
            content = f"error: no tool {name!r}; there are {', '.join(self.tools)}"
            if name in self.tools:
                try:
                    content = str(await_value(self.tools[name](**arguments)))[:LONGEST]
                except Exception as error:
                    content = f"error: {type(error).__name__}: {get_first_line(str(error))}"
            tool_call_id = call.get("id", "")
            messages.append(
                {"role": "tool", "tool_call_id": tool_call_id, "content": content, "name": name}
            )
        return messages


def build_row(prompt: Prompt, messages: Messages, reset: Function) -> dict[str, Any]:
    """Build the row of a prompt's data set, for the parameters of `reset`.

    A column is text. JSON becomes a list or an object again, and a number if the parameter is
    annotated as one.
    """
    parameters = inspect.signature(reset, eval_str=True).parameters
    row: dict[str, Any] = {"prompt": messages}
    for name, text in {**prompt.meta, "answer": prompt.answer}.items():
        kind = parameters[name].annotation if name in parameters else str
        row[name] = text
        if text[:1] in ("[", "{") or kind in (int, float, bool):
            with contextlib.suppress(ValueError):
                row[name] = json.loads(text)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def list_tool_names(kind: type) -> list[str]:
    """Return the names of a class's methods that are tools."""
    functions = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [
        name for name, _ in functions if not name.startswith("_") and name not in (*OWN, "close")
    ]


def has_reward(instance: Any) -> bool:
    """Whether a class of tools, or an instance of one, scores its sessions."""
    return callable(getattr(instance, "get_reward", None))


def load(
    imported: Sequence[tuple[str, Any]], args: Mapping[str, Any], *, judged: bool
) -> Callable[[], ToolLoop]:
    """Return a function that makes the tools of a session.

    imported: the entries of agent.tools, each with its imported object
    args: agent.args, the arguments of a class
    judged: the config names a reward

    Raises ConfigError for two classes, or one that has no `reset`, no tools, or pays beside the
    config's reward.
    """
    classes = [(path, each) for path, each in imported if isinstance(each, type)]
    functions = [each for _, each in imported if not isinstance(each, type)]
    if not classes:
        loop = ToolLoop(functions)
        return lambda: loop
    (path, tool_class), *others = classes
    if others:
        raise ConfigError(
            f"agent.tools: {path} and {others[0][0]} are classes: one keeps the state"
        )
    if not callable(getattr(tool_class, "reset", None)):
        raise ConfigError(f"agent.tools: {path} has no method reset, which begins a session")
    if not list_tool_names(tool_class):
        raise ConfigError(f"agent.tools: {path} has no public method that the model could call")

    if judged and has_reward(tool_class):
        raise ConfigError(
            f"agent.tools: {path} pays by get_reward, and so does [reward]: remove one of them"
        )

    def make() -> ToolLoop:
        return ToolLoop(functions, tool_class(**args))

    make()
    return make
