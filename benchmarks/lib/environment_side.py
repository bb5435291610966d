"""Rollouts of an environment of verifiers as the package itself makes them.

Started by benchmarks/environment_cost.py in an environment that has verifiers:
`python environment_side.py serve` answers chat calls on a free port, which it prints;
`python environment_side.py play URL SESSIONS AT_ONCE` prints the seconds of that many rollouts."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def serve() -> None:
    """Answer every chat call at once with one word."""
    import uvicorn

    answer = {
        "id": "a",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "on"},
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    }
    body = json.dumps(answer).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(app, log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[listening])


async def play(url: str, sessions: int, at_once: int) -> float:
    """Return the seconds of so many rollouts, of which `at_once` are under way."""
    import verifiers
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    environment = verifiers.load_environment("environment_four_turns")
    row = environment.get_dataset()[0]
    client = OpenAIChatCompletionsClient(AsyncOpenAI(base_url=f"{url}/v1", api_key="k"))
    gate = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with gate:
            await environment.run_rollout(row, client, "policy", {})

    await one()
    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(sessions)))
    return time.perf_counter() - began


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        print(asyncio.run(play(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
