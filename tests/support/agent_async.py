"""Agents that are coroutines and share what their module made: for test_pushed."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

connections = openai.DefaultAsyncHttpxClient(timeout=600)
both = asyncio.Barrier(2)


async def plays(prompt: Any, session: Any) -> float:
    """By its prompt: a call; a call when another session is here, too; an exit, its own or of a
    task it started; a wait that ends when it is cancelled.
    """
    what = prompt.meta["kind"]
    if what == "exits":
        raise SystemExit(3)
    if what == "task exits":
        await asyncio.create_task(leave())
    if what == "waits":
        await asyncio.Event().wait()
    if what == "together":
        await both.wait()
    policy = openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, http_client=connections, max_retries=0
    )
    said = await policy.completions.create(model=session.model, prompt="2+2=")
    return float(len(said.choices[0].text))


async def leave() -> None:
    raise SystemExit(4)
