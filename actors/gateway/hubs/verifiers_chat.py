"""The harness `null` of verifiers 0.4 without a process for each session.

verifiers runs every harness as a program, even if it only chats. Starting Python with the packages
of that program takes longer than most sessions.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from functools import cache
from typing import Any, NamedTuple

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, omit
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness, NullHarnessConfig
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]  # verifiers takes the one harness that a module exports

HARNESS_ID = "asyncrl_chat"


def build_config(config: NullHarnessConfig) -> NullHarnessConfig:
    """Build the config of this harness from one of `null`."""
    return config.model_copy(update={"id": HARNESS_ID})


@cache
def get_http_client() -> DefaultAsyncHttpxClient:
    """Return the HTTP client of all sessions: making one takes longer than a call."""
    return DefaultAsyncHttpxClient(timeout=None)


class ChatHarness(NullHarness):  # type: ignore[misc]  # verifiers is not installed where mypy runs
    """A harness that calls the model and its tools until an answer calls none.

    It behaves as `null` does.
    """

    async def setup(self, runtime: Any) -> None:
        """Prepare nothing: `launch` prepares the program where it needs one."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        if tool_interception_url:  # the task's hooks judge each tool call, which the program sends
            return await super().launch(
                *(ctx, trace, runtime, endpoint, secret, mcp_urls, data), tool_interception_url
            )
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        client = AsyncOpenAI(
            base_url=endpoint, api_key=secret, timeout=None, http_client=get_http_client()
        )
        async with AsyncExitStack() as stack:
            tools = ToolServers(*await connect_mcp({"mcpServers": servers}, stack))
            return await converse(client, ctx.model, messages, tools)


class ToolServers(NamedTuple):
    """The tools of a session.

    schemas: for the model
    servers: the model's name of a tool -> the server and the tool's name there
    connections: by the server's name
    """

    schemas: list[dict[str, Any]]
    servers: dict[str, tuple[str, str]]
    connections: dict[str, Any]

    async def call(self, name: str, arguments: str) -> Any:
        """Call a tool; return its result, or the model's error in the words of `null`."""
        try:
            values = json.loads(arguments or "{}")
        except ValueError as error:
            return (
                f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
            )
        if not isinstance(values, dict):
            kind = type(values).__name__
            return f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
        if name not in self.servers:
            return f"error: unknown tool {name!r}"
        return await call_mcp(self.connections, self.servers, name, values)


async def converse(
    client: Any, model: str, messages: list[Any], tools: ToolServers
) -> ProgramResult:
    """Converse until an answer calls no tool.

    A refused call (4xx) ends the conversation, and the task scores it: a limit of the session was
    reached. Any other error counts as that of a failed program.
    """
    while True:
        try:
            completion = await client.chat.completions.create(
                model=model, messages=messages, tools=tools.schemas or omit
            )
        except APIStatusError as error:
            refused = 400 <= error.status_code < 500
            return ProgramResult(0 if refused else 1, "", str(error))
        message = completion.choices[0].message
        if not message.tool_calls:
            return ProgramResult(0, "", "")
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            function = call.function
            content = await tools.call(function.name, function.arguments)
            reply = {"role": "tool", "tool_call_id": call.id, "name": function.name}
            messages.append(bound_tool_message({**reply, "content": content}))
