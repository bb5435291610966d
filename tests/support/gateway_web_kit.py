import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from gateway_kit import Served
from openai import OpenAI

from actors.gateway.chat import parse_hermes
from actors.gateway.endpoint import web
from actors.gateway.sessions import Session
from asyncrl.transport import http_server

WAIT_S = 600.0


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """No request is late, and no stream says more, because a process stood still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "HEAD_S", 3600.0)
        patch.setattr(http_server, "BODY_S", 3600.0)
        patch.setattr(web, "KEEP_ALIVE_S", 3600.0)
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    made = Served(parser=parse_hermes)
    yield made
    made.close()


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """The endpoint with an open gate, as it begins."""
    yield shared
    service = shared.service
    service.say = lambda call: f"answer {call.number}"
    service.is_over = service.is_ending = False
    service.skew = 0.0
    service.clock = time.monotonic
    service.drawn.clear()
    shared.do(service.gate.set)


@pytest.fixture
def opened(served: Served) -> Session:
    return served.do(served.service.open)


def client(served: Served, opened: Session | None = None, **more: Any) -> tuple[OpenAI, Session]:
    opened = opened or served.do(served.service.open)
    base = f"{served.url}/s/{opened.name}/v1"
    return OpenAI(base_url=base, api_key=opened.api_key, **more), opened


def post(served: Served, opened: Session, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(
        f"{served.url}/s/{opened.name}{path}",
        content=body if isinstance(body, bytes) else json.dumps(body),
        headers={"authorization": f"Bearer {opened.api_key}", **headers},
        timeout=WAIT_S,
    )
