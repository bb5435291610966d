"""What the endpoint says when it refuses: status, code, parameter and the whole text."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from gateway_kit import Served
from gateway_web_kit import WAIT_S, client, post, served, shared  # noqa: F401

from actors.gateway.endpoint import web
from actors.gateway.refusals import CallRefused
from actors.gateway.sessions import SessionLimits
from asyncrl.contract import outcomes
from asyncrl.transport import http_server

GO = [{"role": "user", "content": "go"}]


def error_of(reply: httpx.Response) -> tuple[int, str, str | None, str]:
    """Status, code, parameter and message of a refusal."""
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return reply.status_code, error["code"], error["param"], error["message"]


def refused(function: Any, *given: Any, **more: Any) -> tuple[int, str, str | None, str]:
    with pytest.raises(CallRefused) as error:
        function(*given, **more)
    found = error.value
    return found.status, found.code, found.param, str(found)


def test_wrong_keys_and_unknown_routes(served: Served) -> None:
    opened = served.do(served.service.open)
    key = {"authorization": "Bearer other"}
    for path in (f"/s/{opened.session.name}", "/s/9.9.9", f"/s/{opened.session.name}/v1/models"):
        assert error_of(httpx.get(served.url + path, headers=key, timeout=WAIT_S)) == (
            401,
            "invalid_api_key",
            None,
            "this session's URL and key do not match: use OPENAI_BASE_URL and OPENAI_API_KEY of "
            "the same lease",
        )
    lease = httpx.post(f"{served.url}/asyncrl/v1/sessions", json={}, headers=key, timeout=WAIT_S)
    key_text = "the key is not the one in RUN/agent.key"
    assert error_of(lease) == (401, "invalid_api_key", None, key_text)
    for method, path in (("GET", "/nowhere"), ("DELETE", f"/s/{opened.session.name}")):
        reply = httpx.request(method, served.url + path, timeout=WAIT_S)
        text = f"there is no {method} {path}: see docs/http.md for the routes"
        assert error_of(reply) == (404, "no_such_route", None, text)
    long = f"/{'x' * 300}"
    reply = httpx.get(served.url + long, timeout=WAIT_S)
    assert error_of(reply)[3] == f"there is no GET {long[:200]}: see docs/http.md for the routes"
    reply = post(served, opened, "/v1/models/other", {})
    assert error_of(reply)[1] == "no_such_route"
    head = {"authorization": f"Bearer {opened.key}"}
    path = f"/s/{opened.session.name}/v1/models/gpt-4o/mini"
    found = httpx.get(served.url + path, headers=head)
    assert error_of(found) == (404, "model_not_found", "model", "there is no model 'gpt-4o/mini'")
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "asyncrl"}
    model["max_model_len"] = None
    models = f"{served.url}/s/{opened.session.name}/v1/models"
    assert httpx.get(f"{models}/policy", headers=head).json() == model
    assert httpx.get(models, headers=head).json() == {"object": "list", "data": [model]}


def lease(served: Served, body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {served.service.run_key}"}
    url = f"{served.url}/asyncrl/v1/sessions"
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(url, content=content, headers=headers, timeout=WAIT_S)


def test_leases_that_are_refused(served: Served) -> None:
    text = (
        "lease: give a text of 1 to 256 characters, a new one for each session; an equal one gets "
        "the same session"
    )
    for body in ({}, {"lease": ""}, {"lease": 3}, {"lease": "x" * 257}):
        assert error_of(lease(served, body)) == (400, "invalid_value", "lease", text)
    assert lease(served, {"lease": "x" * 256}).status_code == 204
    for wait_s in ("long", True, None):
        found = error_of(lease(served, {"lease": "x", "wait_s": wait_s}))
        assert found == (422, "invalid_value", "wait_s", "wait_s: give a number")
    found = error_of(lease(served, b'{"lease": "x", "wait_s": Infinity}'))
    assert found == (422, "invalid_value", "wait_s", "wait_s: give a finite number")
    found = error_of(lease(served, b"[]"))
    assert found == (400, "invalid_json", None, "the body is not a JSON object")
    served.service.is_ending = True
    ending = lease(served, {"lease": "x"})
    assert error_of(ending) == (503, "ending", None, "the gateway is ending: come again")
    assert ending.headers["retry-after"] == "1"
    served.service.is_over = True
    assert error_of(lease(served, {"lease": "x"})) == (410, "run_over", None, "the run is over")


def test_a_wait_for_a_lease_is_bounded(served: Served) -> None:
    waits: list[float] = []

    async def wait(name: str, wait_s: float) -> None:
        waits.append(wait_s)

    real = served.service.lease
    served.service.lease = wait
    try:
        for wait_s in (-1, 0, 2.5, 1e9):
            assert lease(served, {"lease": "x", "wait_s": wait_s}).status_code == 204
        assert lease(served, {"lease": "x"}).status_code == 204
    finally:
        served.service.lease = real
    assert waits == [0.0, 0.0, 2.5, web.LONGEST_WAIT_S, 0.0]


def test_rewards_that_are_refused(served: Served) -> None:
    talk, opened = client(served)
    name = opened.session.name
    talk.chat.completions.create(model="policy", messages=GO)

    def said(body: Any) -> tuple[int, str, str | None, str]:
        found = error_of(post(served, opened, "/reward", body))
        assert opened.session.state == "open"
        return found

    for body in (b"", {}, {"reward": "1"}, {"reward": True}):
        assert said(body) == (422, "invalid_value", "reward", "reward: give a number")
    for value in (b"NaN", b"Infinity", b"1" + b"0" * 400):
        status, code, param, _ = said(b'{"reward": ' + value + b"}")
        assert (status, code, param) == (422, "invalid_reward", "reward")
    for bad, param, bound in (
        ({"reward": 1e19}, "reward", "1e+15"),
        ({"reward": -2e15}, "reward", "1e+15"),
        (b'{"reward": 1e999}', "reward", "not a finite"),
        ({"reward": 1, "parts": {f"p{i}": 0 for i in range(300)}}, "parts", "at most 256 are"),
        ({"reward": 1, "parts": {"x" * 300: 0}}, "parts", "at most 200 are"),
        ({"reward": 1, "parts": {"a": 1e16}}, "parts", "1e+15"),
        ({"reward": 1, "calls": {"0": 1e19}}, "calls", "1e+15"),
        ({"reward": 1e15, "calls": {"0": -1e15}}, "calls", "1e+15"),
    ):
        status, _, *found = said(bad)
        assert (status, found[0]) == (422, param) and bound in found[1], found
    for key in ("parts", "calls"):
        found = said({"reward": 1, key: [1]})
        assert found == (422, "invalid_value", key, f"{key}: give an object of numbers")
        found = said({"reward": 1, key: {"a": "x"}})
        assert found == (422, "invalid_value", key, f"{key}: give a number")
    for call in ("x", "-1", "chatcmpl-9.9.9-0", f"chatcmpl-{name}-x", f"x{name}-0", "٣", "1" * 19):
        found = said({"reward": 1, "calls": {call: 1}})
        text = f"calls: no call has the id {call!r}"
        assert found == (422, "no_such_call", "calls", text), call
    found = said({"reward": 1, "calls": {"y" * 99: 1}})
    assert found[3] == f"calls: no call has the id '{'y' * 79}"
    twice = {"0": 1, f"msg_{name}-0": 1}
    found = said({"reward": 1, "calls": twice})
    assert found == (422, "invalid_value", "calls", "calls: 0 has two shares")
    found = said({"reward": 1, "calls": {"7": 1}})
    assert found == (422, "no_such_call", "calls", f"calls: {name} has no trained call 7")
    assert post(served, opened, "/reward", {"reward": 0.5}).json()["state"] == "ended"
    found = error_of(post(served, opened, "/reward", {"reward": 1}))
    assert found == (422, "reward_differs", None, f"session {name} has the reward 0.5")
    found = error_of(post(served, opened, "/end", {"failed": "no"}))
    assert found == (422, "session_scored", None, f"session {name} has a reward")
    _, failed = client(served)
    assert post(served, failed, "/end", {"failed": "no"}).json()["state"] == "ended"
    found = error_of(post(served, failed, "/reward", {"reward": 1}))
    text = f"session {failed.session.name} has ended"
    assert found == (410, "session_ended", None, text)
    assert error_of(post(served, failed, "/end", {"score": True})) == found


def test_ends_that_are_refused(served: Served) -> None:
    _, opened = client(served)
    for body in ({}, {"score": 1}, {"score": False}):
        found = error_of(post(served, opened, "/end", body))
        text = 'give {"score": true} or {"failed": "why"}'
        assert found == (400, "invalid_value", None, text)
    for failed in ("", 3, False):
        found = error_of(post(served, opened, "/end", {"failed": failed}))
        assert found == (400, "invalid_value", "failed", "failed: give the reason as text")
    status, code, param, text = error_of(post(served, opened, "/end", {"failed": "x" * 70_000}))
    assert (status, code, param) == (422, "invalid_value", "failed") and text[:8] == "failed: "
    assert "at most 65536 are allowed" in text and opened.session.state == "open"
    longest = {"failed": "x" * outcomes.REASON_LENGTH}
    assert post(served, opened, "/end", longest).json()["state"] == "ended"


def test_limits_of_a_session_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SessionLimits(parallel=1, max_calls=1, context=64, grace_s=7.0)
    made = Served(limits=limits)
    try:
        talk, opened = client(made, max_retries=0)
        name = opened.session.name
        opened.session.composing = 1
        reply = post(made, opened, "/v1/chat/completions", {"messages": GO})
        assert reply.headers["retry-after"] == "1" and error_of(reply) == (
            429,
            "parallel_calls",
            None,
            f"session {name} has 1 calls at once, agent.parallel = 1: wait for one of them",
        )
        opened.session.composing = 0
        long = {"messages": [{"role": "user", "content": "x" * 60}]}
        count = 60 + len("<|im_start|>user\n") - 11 + len("\nassistant\n")
        status, code, param, text = error_of(post(made, opened, "/v1/chat/completions", long))
        assert (status, code, param) == (400, "context_length_exceeded", "messages")
        assert text.startswith(
            "This model's maximum context length is 64 tokens, prompt and answer "
            "(generator.context = 64), but the prompt has "
        ) and text.endswith(": shorten the history")
        assert 64 <= int(text.split()[-4].rstrip(":")) <= count + 20
        empty = error_of(post(made, opened, "/v1/completions", {"prompt": ""}))
        assert empty == (400, "empty_prompt", None, "the prompt has no token: send some text")
        talk.chat.completions.create(model="policy", messages=GO)
        found = error_of(post(made, opened, "/v1/messages", {"messages": GO, "max_tokens": 1}))
        text = f"session {name} has reached agent.max_calls: send its reward within 7 s"
        assert found == (400, "session_limit", None, text)
        assert opened.session.refusals.count == 4 and name in made.service.looked_at
    finally:
        made.close()


class Streamed:
    """A request whose body comes in parts, or never."""

    def __init__(self, *parts: bytes, length: str | None = None, ends: bool = True) -> None:
        self.parts = parts
        self.headers = {} if length is None else {"content-length": length}
        self.ends = ends

    async def stream(self) -> Any:
        for part in self.parts:
            yield part
        if not self.ends:
            await asyncio.Event().wait()


def test_a_body_is_read_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*parts: bytes, most: int = 4, **more: Any) -> bytes:
        async def run() -> bytes:
            async with web.open_body(Streamed(*parts, **more), most) as body:
                assert http_server.BodyMemory.used == used + len(body)
                return body

        used = http_server.BodyMemory.used
        try:
            return asyncio.run(run())
        finally:
            assert http_server.BodyMemory.used == used

    assert read(b"ab", b"cd") == b"abcd" == read(b"abcd", length="4")
    large = (413, "body_too_large", None, "the body has more than 4 bytes")
    assert refused(read, b"ab", b"cde") == large == refused(read, b"", length="5")
    monkeypatch.setattr(http_server, "BODY_BYTES", 5)
    with monkeypatch.context() as patch:
        patch.setattr(http_server.BodyMemory, "used", 3)
        many = (429, "too_many_bodies", None, "too many bodies are being received: try again")
        assert refused(read, b"ab", b"c") == many == refused(read, length="3")
        assert read(b"ab") == b"ab"
    monkeypatch.setattr(http_server, "BODY_S", 0.01)
    late = (408, "body_late", None, "the body took over 0.01 s")
    assert refused(read, b"a", ends=False) == late


def test_a_gateway_that_fails_says_how(served: Served) -> None:
    _, opened = client(served)

    def say(call: Any) -> str:
        raise RuntimeError("no engine")

    served.service.say = say
    reply = post(served, opened, "/v1/chat/completions", {"messages": GO})
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "gateway"
    assert "RuntimeError: no engine" in reply.json()["error"]["message"]
    reply = post(served, opened, "/v1/messages", {"messages": GO, "max_tokens": 2})
    assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == "server_error"
    body = {"messages": GO, "max_tokens": 2, "stream": True}
    event, data = post(served, opened, "/v1/messages", body).text.splitlines()[-3:-1]
    assert event == "event: error" and json.loads(data.removeprefix("data: "))["type"] == "error"
    *_, data, _ = post(served, opened, "/v1/chat/completions", body).text.splitlines()
    assert json.loads(data.removeprefix("data: ")).keys() == {"error"}
    reply = post(served, opened, "/v1/messages/count_tokens", {"messages": GO, "max_tokens": 2})
    assert set(reply.json()) == {"input_tokens"}
