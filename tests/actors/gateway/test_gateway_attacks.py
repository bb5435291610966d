"""Attacks on the HTTP routes: outcomes that cannot be, text that is none, keys and names of other
sessions, what is oversized, slow or out of order.  Each is refused, and others are served."""

import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from gateway_kit import Served
from gateway_web_kit import opened, patient, post, served  # noqa: F401

from actors.delivery import Outbox
from actors.gateway import service
from actors.gateway.sessions import Session, SessionLimits
from asyncrl.config.tree import AgentConfig, WiresConfig
from asyncrl.transport import http_server

WAIT_S = 120.0
GO = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    made = Served(limits=SessionLimits(max_calls=0, rows=0, context=4096))
    yield made
    made.close()


def chat(served: Served, opened: Session) -> httpx.Response:
    return post(served, opened, "/v1/chat/completions", {"model": "policy", "messages": GO})


def deliver(served: Served, opened: Session) -> Any:
    return served.do(
        lambda: service.build_trajectory(opened, served.service.tokenizer, AgentConfig())
    )


def finish(served: Served, opened: Session) -> None:
    """The session is still open, takes a call and a reward, and its sample can be sent."""
    assert chat(served, opened).status_code == 200
    assert post(served, opened, "/reward", {"reward": 0.5}).status_code == 200
    made = deliver(served, opened)
    box = Outbox(WiresConfig(), "gateway-0", 1)
    box.add(made)
    (frame,) = box.take_frames(0.0, flush=True)
    (sent,) = msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=type(frame)).samples
    assert sent.reward == 0.5 and not sent.failed


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
def test_half_a_character_is_refused(path: str, body: str, half: str, served: Served) -> None:
    opened = served.do(served.service.open)
    said = post(served, opened, path, (body % half).encode())
    if path == "/beat":  # what it holds is not looked at
        assert said.status_code == 200
    else:
        assert said.status_code == 400 and said.json()["error"]["code"] == "invalid_json"
    assert served.do(lambda: opened.describe(0.0)["calls"]) == 0
    finish(served, opened)


def test_half_a_character_in_a_tools_arguments_is_refused(served: Served, opened: Session) -> None:
    """It is JSON within JSON: the body itself is sound."""
    call = {"id": "a", "function": {"name": "f", "arguments": r'{"a":"\ud800"}'}}
    told = [*GO, {"role": "assistant", "tool_calls": [call]}]
    said = post(served, opened, "/v1/chat/completions", {"messages": told})
    assert said.status_code == 400 and said.json()["error"]["code"] == "invalid_text"
    finish(served, opened)


def test_a_session_remembers_what_was_refused(served: Served, opened: Session) -> None:
    """Its agent may keep silent about it: then nobody else knows why nothing was drawn."""
    for body in ({"messages": []}, {"messages": GO, "stop": [""]}, b"{"):
        assert post(served, opened, "/v1/chat/completions", body).status_code == 400
    state = post(served, opened, "/beat", {}).json()
    assert state["refused"] == 3 and state["refusal"]["code"] == "invalid_json"
    assert post(served, opened, "/reward", {"reward": 0.0}).status_code == 422
    made = deliver(served, opened)
    assert made.failed and made.failed.why.startswith(
        "the session ended without an answer; 3 of its calls were refused, the last one with "
        "invalid_json: the body is not JSON"
    )
    opened = served.do(served.service.open)
    assert post(served, opened, "/v1/chat/completions", {"messages": GO, "n": 3}).status_code == 400
    assert post(served, opened, "/end", {"failed": "gave up"}).status_code == 200
    made = deliver(served, opened)
    assert made.failed and made.failed.why.startswith("gave up; 1 of its calls was refused")
    other = served.do(served.service.open)
    state = post(served, other, "/beat", {}).json()
    assert state["refused"] == 0 and state["refusal"] is None


LONG = 1_000_000


def far_too_long(served: Served) -> list[tuple[str, Any]]:
    chat, line = "/v1/chat/completions", {"role": "user", "content": "a"}
    return [
        (chat, {"messages": [{"role": "user", "content": "low er " * (LONG // 7)}]}),
        (chat, {"messages": [{"role": "user", "content": "a" * LONG}]}),
        (chat, {"messages": [line] * (LONG // 40)}),
        ("/v1/completions", {"prompt": "low er " * (LONG // 7)}),
        ("/v1/completions", {"prompt": [1] * (LONG // 3)}),
        ("/inference/v1/generate", {"token_ids": [1] * (LONG // 3)}),
        ("/v1/responses", {"input": "low er " * (LONG // 7)}),
        ("/v1/messages", {"max_tokens": 9, "messages": [line] * (LONG // 40)}),
        ("/v1/messages/count_tokens", {"messages": [{**line, "content": "a" * LONG}]}),
    ]


def test_an_overlong_prompt_costs_little(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 MB the tokenizer would take 13 s and 1.5 GiB."""
    tokenizer = served.service.tokenizer
    encoded: list[int] = []

    class Counting:
        def encode(self, text: str, **more: Any) -> Any:
            encoded.append(len(text))
            return tokenizer.encode(text, **more)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    opened = served.do(served.service.open)
    context = opened.limits.context
    assert context == 4096
    chat_of = opened.composer
    monkeypatch.setattr(chat_of, "tokenizer", Counting())
    monkeypatch.setattr(chat_of, "context", context)
    bodies = far_too_long(served)
    for path, body in bodies:
        said = post(served, opened, path, body)
        assert said.status_code == 400, (path, said.text)
        assert said.json()["error"]["code"] == "context_length_exceeded"
        assert "generator.context = 4096" in said.json()["error"]["message"]
    assert sum(encoded) <= len(bodies) * 8 * context and served.do(lambda: opened.shortened)
    monkeypatch.undo()
    finish(served, opened)


def test_a_long_prompt_holds_up_no_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the calls of its own session keep their order, whatever is answered meanwhile."""
    opened, other = served.do(served.service.open), served.do(served.service.open)
    entered, leave = threading.Event(), threading.Event()
    order: list[str] = []
    encode, shared_chat = opened.composer.encode, opened.composer

    class Slow(type(shared_chat)):
        def encode(self, text: str) -> Any:
            if "long" in text:
                entered.set()
                assert leave.wait(WAIT_S)
            order.append("long" if "long" in text else "short")
            return encode(text)

    slow = Slow.__new__(Slow)
    slow.__dict__.update(shared_chat.__dict__, context=0)
    opened.composer = slow
    monkeypatch.setattr(opened, "limits", SessionLimits(max_calls=0, rows=0, parallel=2))

    def ask(content: str) -> httpx.Response:
        body = {"model": "policy", "messages": [{"role": "user", "content": content}]}
        return post(served, opened, "/v1/chat/completions", body)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(ask, "long " * 10_000)
        assert entered.wait(WAIT_S)
        assert chat(served, other).status_code == 200  # another session
        assert post(served, opened, "/beat", {}).status_code == 200  # this one, too
        second = pool.submit(ask, "short")
        served.until(lambda: opened.composing == 2)
        third = ask("short too")  # what waits counts against agent.parallel
        assert third.status_code == 429 and not first.done() and not second.done() and not order
        leave.set()
        assert first.result().status_code == second.result().status_code == 200
    assert order == ["long", "short"] and served.do(lambda: opened.composing) == 0
    assert [n.number for n in opened.tree.nodes] == [0, 1]


class SlowComposer:
    """A session's composer that waits in `encode` until it may go on."""

    def __init__(self, opened: Session) -> None:
        self.composer: Any = opened.composer
        self.entered, self.leave = threading.Event(), threading.Event()
        opened.composer = self

    def encode(self, text: str) -> Any:
        self.entered.set()
        assert self.leave.wait(WAIT_S)
        return self.composer.encode(text)[:9]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.composer, name)


def test_a_session_that_ends_while_its_prompt_is_composed_draws_nothing(served: Served) -> None:
    opened = served.do(served.service.open)
    slow = SlowComposer(opened)
    long = {"model": "policy", "messages": [{"role": "user", "content": "a" * 50_000}]}
    drawn = len(served.service.drawn)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, served, opened, "/v1/chat/completions", long)
        assert slow.entered.wait(WAIT_S)
        assert post(served, opened, "/end", {"failed": "over"}).status_code == 200
        slow.leave.set()
        assert asked.result().status_code == 410
    assert len(served.service.drawn) == drawn and not opened.open_calls
    assert served.do(lambda: not opened.requests and not served.endpoint.web.answering)


def test_a_retry_joins_a_call_whose_prompt_is_being_composed(served: Served) -> None:
    """The client's socket closed meanwhile: its retry gets the one answer."""
    opened = served.do(served.service.open)
    slow = SlowComposer(opened)
    body = {"model": "policy", "messages": [{"role": "user", "content": "a" * 50_000}]}
    head = {"x-stainless-retry-count": "1"}

    def ask() -> httpx.Response:
        return post(served, opened, "/v1/chat/completions", body, **head)

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(ask), pool.submit(ask)]
        assert slow.entered.wait(WAIT_S)
        served.until(lambda: opened.requests[0].connections == 2)
        slow.leave.set()
        answers = {one.result().json()["id"] for one in both}
    assert len(answers) == 1 and opened.calls == 1


def test_there_are_fewer_connections_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (257, 257))
    assert http_server.count_allowed_connections() == 128
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert http_server.count_allowed_connections() == 4096


ROUTES = [
    ("/v1/chat/completions", {"messages": GO}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/messages", {"max_tokens": 3, "messages": GO}),
    ("/v1/messages/count_tokens", {"messages": GO}),
    ("/v1/responses", {"input": "a"}),
    ("/inference/v1/generate", {"token_ids": [3]}),
    ("/reward", {"reward": 1}),
    ("/end", {"failed": "why"}),
    ("/beat", {}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_no_key_but_its_own_opens_a_session(path: str, body: Any, served: Served) -> None:
    opened, other = served.do(served.service.open), served.do(served.service.open)
    own = opened.api_key
    keys = [other.api_key, served.service.run_key, own[:-1], own + "x", own.upper()]
    for key in (*keys, "Bearer", "\xff"):
        said = httpx.post(
            f"{served.url}/s/{opened.name}{path}?api_key={own}",
            json=body,
            headers={b"authorization": b"Bearer " + key.encode("latin-1")},
            timeout=WAIT_S,
        )
        assert said.status_code == 401 and own not in said.text
    view = served.do(lambda: opened.describe(0.0))
    zero = dict.fromkeys(("calls", "open_calls", "tokens", "aside", "rows", "refused"), 0)
    nothing = {"forks": {}, "versions": [], "refusal": None, "limit": ""}
    name, left = opened.name, view["left_s"]
    assert view == zero | nothing | {"state": "open", "session": name, "left_s": left}
    finish(served, opened)


def test_a_session_names_no_file_and_no_other_route(served: Served, opened: Session) -> None:
    name = opened.name
    host, port = served.url.removeprefix("http://").split(":")
    for path in (
        *(f"/s/{name}/../{name}", f"/s/{name}/%2e%2e/{name}", f"/s/{name}//reward"),
        *(f"/s/{name}/reward/", f"/s/%00{name}", "/s/", "/s//reward"),
        *(f"/asyncrl/v1/sessions/{name}", "/../../etc/passwd"),
        f"/s/{name}/v1/models/../../reward",
    ):
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {opened.api_key}\r\n"
        with socket.create_connection((host, int(port)), WAIT_S) as raw:
            raw.sendall(f"{head}content-length: 13\r\n\r\n".encode() + b'{"reward": 1}')
            status = raw.recv(65536).split(b" ", 2)[1]
        assert status in (b"404", b"401", b"400"), (path, status)
    finish(served, opened)


def test_numbers_in_headers_have_few_digits(served: Served, opened: Session) -> None:
    for count in ("9" * 5000, "\u00b2".encode("latin-1"), "-1"):
        said = httpx.post(
            f"{served.url}/s/{opened.name}/v1/chat/completions",
            json={"model": "policy", "messages": GO},
            headers={
                b"authorization": f"Bearer {opened.api_key}".encode(),
                b"x-stainless-retry-count": count if isinstance(count, bytes) else count.encode(),
            },
            timeout=WAIT_S,
        )
        assert said.status_code == 200, said.text
    finish(served, opened)


def test_an_idempotency_key_is_of_its_own_session(served: Served) -> None:
    opened, other = served.do(served.service.open), served.do(served.service.open)
    ids = []
    for each in (opened, other, opened):
        body = {"model": "policy", "messages": GO}
        said = post(served, each, "/v1/chat/completions", body, **{"idempotency-key": "one"})
        ids.append(said.json()["id"])
    assert ids[0] == ids[2] != ids[1]


def test_what_comes_after_the_end_changes_nothing(served: Served, opened: Session) -> None:
    finish(served, opened)
    outcome = opened.outcome
    for path, body in ROUTES:
        said = post(served, opened, path, body)
        expected = {"/reward": 422, "/end": 422, "/beat": 200, "/v1/messages/count_tokens": 200}
        assert said.status_code == expected.get(path, 410), (path, said.text)
    assert opened.outcome is outcome
    lost = served.do(served.service.open)
    assert post(served, lost, "/end", {"failed": "first"}).status_code == 200
    assert post(served, lost, "/reward", {"reward": 1}).status_code == 410
    assert post(served, lost, "/end", {"score": True}).status_code == 410
    assert post(served, lost, "/end", {"failed": "second"}).status_code == 200
    assert lost.outcome and lost.outcome.failed == "first"
