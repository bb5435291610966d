"""Attacks on the HTTP routes: outcomes that cannot be, text that is none, keys and names of other
sessions, what is oversized, slow or out of order.  Each is refused, and others are served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from gateway_kit import Served

from actors.delivery import Outbox
from actors.gateway import service, web
from actors.gateway.sessions import Limits
from actors.gateway.web import Opened
from asyncrl.config.tree import Agent, Wires
from asyncrl.contract import outcomes

WAIT_S = 600.0
GO = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """No request is late because a process stood still."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HEAD_S", "BODY_S", "KEEP_ALIVE_S"):
            patch.setattr(web, name, 3600.0)
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    made = Served(limits=Limits(max_calls=0, rows=0, context=4096))
    yield made
    made.close()


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    yield shared
    shared.service.over = shared.service.ending = False
    shared.do(shared.service.gate.set)


def post(
    served: Served, opened: Opened, path: str, body: Any, key: str | None = None
) -> httpx.Response:
    return httpx.post(
        f"{served.url}/s/{opened.session.name}{path}",
        content=body if isinstance(body, bytes) else json.dumps(body),
        headers={"authorization": f"Bearer {opened.key if key is None else key}"},
        timeout=WAIT_S,
    )


def chat(served: Served, opened: Opened) -> httpx.Response:
    return post(served, opened, "/v1/chat/completions", {"model": "policy", "messages": GO})


def finish(served: Served, opened: Opened) -> None:
    """The session is still open, takes a call and a reward, and its sample can be sent."""
    assert chat(served, opened).status_code == 200
    assert post(served, opened, "/reward", {"reward": 0.5}).status_code == 200
    made = served.do(lambda: service.trajectory(opened.session, served.service.tokenizer, Agent()))
    box = Outbox(Wires(), "gateway-0", 1)
    box.add(made)
    (frame,) = box.frames(0.0, flush=True)
    (sent,) = msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=type(frame)).samples
    assert sent.reward == 0.5 and not sent.failed


# ---- outcomes that cannot be ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, param, bound",
    [
        ({"reward": 1e19}, "reward", "1e+15"),
        ({"reward": -2e15}, "reward", "1e+15"),
        (b'{"reward": 1e999}', "reward", "not a finite"),
        ({"reward": 1, "parts": {f"p{i}": 0 for i in range(300)}}, "parts", "it may have 256"),
        ({"reward": 1, "parts": {"x" * 300: 0}}, "parts", "it may have 200"),
        ({"reward": 1, "parts": {"a": 1e16}}, "parts", "1e+15"),
        ({"reward": 1, "calls": {"0": 1e19}}, "calls", "1e+15"),
        ({"reward": 1e15, "calls": {"0": -1e15}}, "calls", "1e+15"),
    ],
)
def test_a_reward_is_checked_as_a_reward_functions_is(
    body: Any, param: str, bound: str, served: Served
) -> None:
    opened = served.do(served.service.open)
    assert chat(served, opened).status_code == 200
    said = post(served, opened, "/reward", body)
    assert said.status_code == 422, said.text
    assert said.json()["error"]["param"] == param and bound in said.json()["error"]["message"]
    finish(served, opened)


def test_a_reason_is_bounded(served: Served) -> None:
    opened = served.do(served.service.open)
    said = post(served, opened, "/end", {"failed": "x" * 100_000})
    assert said.status_code == 422 and "it may have 65536" in said.json()["error"]["message"]
    finish(served, opened)
    other = served.do(served.service.open)
    longest = "x" * outcomes.REASON_LENGTH
    assert post(served, other, "/end", {"failed": longest}).status_code == 200


HALVES = [r'"\ud800"', r'"a\udc00b"', r'"\udc00\ud800"']


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "path, body",
    [
        ("/reward", '{"reward": 1, "parts": {%s: 1}}'),
        ("/reward", '{"reward": 1, "calls": {%s: 1}}'),
        ("/end", '{"failed": %s}'),
        ("/beat", '{"lease": %s}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": %s, "content": "a"}]}'),
        ("/v1/completions", '{"prompt": %s}'),
        ("/v1/responses", '{"input": %s}'),
        ("/v1/messages", '{"max_tokens": 9, "messages": [{"role": "user", "content": %s}]}'),
        ("/v1/messages/count_tokens", '{"messages": [{"role": "user", "content": %s}]}'),
    ],
)
def test_half_of_a_character_is_refused_at_the_door(
    path: str, body: str, half: str, served: Served
) -> None:
    opened = served.do(served.service.open)
    said = post(served, opened, path, (body % half).encode())
    if path == "/beat":  # what it holds is not looked at
        assert said.status_code == 200
    else:
        assert said.status_code == 400 and said.json()["error"]["code"] == "invalid_json"
    assert served.do(lambda: opened.session.view(0.0)["calls"]) == 0
    finish(served, opened)


def test_half_of_a_character_within_a_tools_arguments_is_refused(served: Served) -> None:
    """It is JSON within JSON: the body itself is sound."""
    opened = served.do(served.service.open)
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": r'{"a":"\ud800"}'},
    }
    told = [*GO, {"role": "assistant", "tool_calls": [call]}]
    said = post(served, opened, "/v1/chat/completions", {"messages": told})
    assert said.status_code == 400 and said.json()["error"]["code"] == "invalid_text"
    finish(served, opened)


def test_bytes_that_are_no_utf_8_are_refused(served: Served) -> None:
    opened = served.do(served.service.open)
    for path in ("/reward", "/end", "/v1/chat/completions"):
        for body in (b'{"reward": 1, "parts": {"\xed\xa0\x80": 1}}', b"\xff\xfe{}"):
            assert post(served, opened, path, body).status_code == 400
    finish(served, opened)


# ---- what was refused is remembered --------------------------------------------------------------


def test_a_session_remembers_what_was_refused(served: Served) -> None:
    """Its agent may keep silent about it: then nobody else knows why nothing was drawn."""
    opened = served.do(served.service.open)
    for body in ({"messages": []}, {"messages": GO, "stop": [""]}, b"{"):
        assert post(served, opened, "/v1/chat/completions", body).status_code == 400
    state = post(served, opened, "/beat", {}).json()
    assert state["refused"] == 3 and state["refusal"]["code"] == "invalid_json"
    assert post(served, opened, "/reward", {"reward": 0.0}).status_code == 200
    made = served.do(lambda: service.trajectory(opened.session, served.service.tokenizer, Agent()))
    assert made.failed and made.failed.why.startswith(
        "the session ended without an answer; 3 of its calls were refused, the last one with "
        "invalid_json: the body is no JSON"
    )


def test_a_failure_tells_what_was_refused_before_it(served: Served) -> None:
    opened = served.do(served.service.open)
    bad = {"messages": GO, "n": 3}
    assert post(served, opened, "/v1/chat/completions", bad).status_code == 400
    assert post(served, opened, "/end", {"failed": "gave up"}).status_code == 200
    made = served.do(lambda: service.trajectory(opened.session, served.service.tokenizer, Agent()))
    assert made.failed and made.failed.why.startswith("gave up; 1 of its calls was refused")
    other = served.do(served.service.open)
    state = post(served, other, "/beat", {}).json()
    assert state["refused"] == 0 and state["refusal"] is None
