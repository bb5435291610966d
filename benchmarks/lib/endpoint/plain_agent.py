"""configs/examples/calc_agent.py with a client that does as little as a client can: what of a step
through HTTP is the endpoint's, and what is OpenAI's client's."""

from __future__ import annotations

import http.client
import threading
from typing import Any
from urllib.parse import urlsplit

import msgspec

from asyncrl.contract.messages import Prompt
from asyncrl.tasks.calc import TURNS, calculate

TIMEOUT_S = 600.0  # a call waits for weights, swaps and restarts
decode = msgspec.json.Decoder().decode
encode = msgspec.json.Encoder().encode
kept = threading.local()  # a connection for each thread


def connection(host: str) -> http.client.HTTPConnection:
    if getattr(kept, "host", "") != host:
        kept.host, kept.connection = host, http.client.HTTPConnection(host, timeout=TIMEOUT_S)
    made: http.client.HTTPConnection = kept.connection
    return made


def complete(base_url: str, api_key: str, prompt: str) -> str:
    """One call's answer.  Raises RuntimeError when it is refused."""
    url = urlsplit(base_url)
    head = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    body = encode({"model": "policy", "prompt": prompt})
    one = connection(url.netloc)
    one.request("POST", f"{url.path}/completions", body, head)
    reply = one.getresponse()
    said = reply.read()
    if reply.status != 200:
        raise RuntimeError(f"{reply.status} {said[:200]!r}")
    text: str = decode(said)["choices"][0]["text"]
    return text


def play(prompt: Prompt, session: Any) -> float:
    """A session: its reward."""
    text = prompt.text
    for _ in range(TURNS):
        said = complete(session.base_url, session.api_key, text)
        if said.startswith("#"):
            return float(said == prompt.answer)
        text += said + calculate(said)
    return 0.0
