"""Chats by OpenAI's own Python client, one call after another: what a call costs with the client
that people use.

    python benchmarks/lib/endpoint/openai_asker.py '{"url": ..., "sessions": 8, "calls": 8}'

With a run's key, sessions are leased and scored; without, a session is only its calls.  Prints one
line of JSON; latencies in seconds, sorted."""

from __future__ import annotations

import json
import sys
import time
import uuid
from typing import Any

from openai import DefaultHttpxClient, OpenAI

TIMEOUT_S = 300.0


def chat(client: OpenAI, calls: int, latencies: list[float]) -> int:
    """One session's calls; the tokens that were drawn."""
    messages: list[Any] = [{"role": "system", "content": "0123456789"}]
    tokens = 0
    for number in range(calls):
        messages.append({"role": "user", "content": f"turn {number:2d} now"})
        began = time.perf_counter()
        said = client.chat.completions.create(model="policy", messages=messages)
        latencies.append(time.perf_counter() - began)
        tokens += said.usage.completion_tokens  # type: ignore[union-attr]
        messages.append({"role": "assistant", "content": said.choices[0].message.content})
    return tokens


def ask(asked: dict[str, Any]) -> dict[str, Any]:
    url, key = asked["url"], asked.get("key", "")
    latencies: list[float] = []
    tokens = 0
    with DefaultHttpxClient(timeout=TIMEOUT_S) as http:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(asked["sessions"]):
            if not key:
                made = OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
                tokens += chat(made, asked["calls"], latencies)
                continue
            said = {"lease": uuid.uuid4().hex, "wait_s": 30}
            head = {"authorization": f"Bearer {key}"}
            got = http.post(f"{url}/asyncrl/v1/sessions", json=said, headers=head)
            got.raise_for_status()
            lease = got.json()
            made = OpenAI(base_url=lease["base_url"], api_key=lease["api_key"], http_client=http)
            tokens += chat(made, asked["calls"], latencies)
            head = {"authorization": f"Bearer {lease['api_key']}"}
            at = f"{url}/s/{lease['session']}/reward"
            http.post(at, json={"reward": 1.0}, headers=head).raise_for_status()
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "calls": len(latencies),
        "tokens": tokens,
        "latencies": sorted(latencies),
    }


if __name__ == "__main__":
    print(json.dumps(ask(json.loads(sys.argv[1]))))
