"""The endpoint with the real OpenAI client over loopback: answers, streams, retries, closed sockets
and the routes of a session; and what a refusal says: status, code, parameter and the whole text."""

import asyncio
import asyncio.selector_events
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from gateway_kit import Served
from gateway_web_kit import WAIT_S, client, opened, patient, post, served, shared  # noqa: F401
from openai import OpenAI

from actors.gateway.endpoint import web
from actors.gateway.refusals import CallRefused
from actors.gateway.service import build_trajectory
from actors.gateway.sessions import Session, SessionLimits
from asyncrl.config.agents import AgentConfig
from asyncrl.contract import outcomes
from asyncrl.contract.errors import ConfigError
from asyncrl.transport import http_server
from asyncrl.transport.http_server import CoalescingTransport, ListenAddress

GO = [{"role": "user", "content": "go"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_leaves_in_one_write_and_nothing_waits_for_an_acknowledgement(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Nagle's algorithm and a client's delayed acknowledgement would cost a call 40 ms."""
    written: list[bytes] = []
    delays: list[int] = []
    write = asyncio.selector_events._SelectorSocketTransport.write

    def counted(transport: Any, data: bytes) -> None:
        if data:
            written.append(bytes(data))
            own = transport.get_extra_info("socket")
            delays.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        write(transport, data)

    transport = asyncio.selector_events._SelectorSocketTransport
    monkeypatch.setattr(transport, "write", counted)
    opened = served.do(served.service.open)
    said = {"model": "policy", "messages": GO, "stream": stream}
    answer = post(served, opened, "/v1/chat/completions", said)
    assert answer.status_code == 200 and all(delays)
    if stream:  # what is said at once, and the answer
        assert [b"keep-alive" in part for part in written] == [True, False]
        assert written[1].endswith(b"0\r\n\r\n") and b"DONE" in written[1]
    else:
        (whole,) = written
        assert whole.startswith(b"HTTP/1.1 200") and whole.endswith(answer.content)


def test_two_writes_are_one_and_what_is_held_leaves_at_the_end() -> None:
    class Transport:
        def __init__(self) -> None:
            self.events: list[bytes | str] = []

        def write(self, data: bytes) -> None:
            self.events.append(data)

        def close(self) -> None:
            self.events.append("closed")

        def get_extra_info(self, name: str) -> str:
            return name

    inner = Transport()
    out = CoalescingTransport(inner)
    out.write(b"1")
    out.hold()
    out.write(b"head")
    assert inner.events == [b"1"]
    out.hold()  # the held one stays
    out.write(b"body")
    out.write(b"2")
    assert inner.events == [b"1", b"headbody", b"2"] and out.get_extra_info("peer") == "peer"
    out.hold()
    out.write(b"late")
    out.close()
    out.close()
    assert inner.events[3:] == [b"late", "closed", "closed"]
    empty = Transport()
    out = CoalescingTransport(empty)
    out.hold()
    out.close()
    assert empty.events == ["closed"]


def test_a_head_is_asked_for_alone(served: Served, opened: Session) -> None:
    url = f"{served.url}/s/{opened.name}"
    own = {"authorization": f"Bearer {opened.api_key}"}
    with httpx.Client(headers=own, timeout=WAIT_S) as http:
        for path in ("", "/v1/models"):
            asked = http.head(url + path)
            assert asked.status_code == 200 and not asked.content
            assert asked.headers["content-length"] == str(len(http.get(url + path).content))


def test_a_chat_goes_on_in_one_row(served: Served) -> None:
    talk, opened = client(served)
    said: list[Any] = list(GO)
    for turn in range(3):
        answer = talk.chat.completions.create(model="policy", messages=said)
        choice = answer.choices[0]
        assert choice.message.content == f"answer {turn}" and choice.finish_reason == "stop"
        assert answer.id == f"chatcmpl-{opened.name}-{turn}" and answer.model == "policy"
        assert answer.usage and answer.usage.completion_tokens == len("answer 0") + 1
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + len("answer 0") + 1
        said += [choice.message, {"role": "user", "content": "more"}]
    assert len(opened.build_training_rows()) == 1 and opened.tree.forks == {}
    assert opened.build_training_rows()[0].mask.count(1) == 3 * (len("answer 0") + 1)


def test_tools_and_thinking_reach_the_client_and_come_back(served: Served) -> None:
    talk, opened = client(served)
    call = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
    served.service.say = lambda each: f"<think>hm</think>{call}" if not each.number else "3"
    choice = talk.chat.completions.create(model="policy", messages=GO, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (made,) = choice.message.tool_calls
    assert made.function.name == "add" and json.loads(made.function.arguments) == {"a": 1, "b": 2}
    assert choice.message.reasoning_content == "hm"
    more = [*GO, choice.message, {"role": "tool", "tool_call_id": made.id, "content": "3"}]
    done = talk.chat.completions.create(model="policy", messages=more, tools=TOOLS)
    assert done.choices[0].message.content == "3"
    # CHATML writes no thinking: the drawn text is not the template's, and stays as drawn
    assert len(opened.build_training_rows()) == 1


def test_a_stream_is_the_answer_in_chunks(served: Served) -> None:
    talk, _ = client(served)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    served.service.say = lambda each: f"so {call}"
    chunks = list(
        talk.chat.completions.create(
            model="policy", messages=GO, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    deltas = [choice.delta for choice in choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "so"
    (made,) = [each for delta in deltas for each in delta.tool_calls or []]
    assert made.index == 0 and made.function and made.function.name == "add"
    assert choices[-1].finish_reason == "tool_calls"
    *others, versions = [choice.model_extra.get("weight_versions") for choice in choices]
    assert not any(others) and versions[0]["version"] == "1.2"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == len(f"so {call}") + 1
    assert len({chunk.id for chunk in chunks}) == 1
    # the client's own accumulation
    with talk.chat.completions.stream(model="policy", messages=GO, tools=TOOLS) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.tool_calls and whole.choices[0].message.content == "so"
    texts = [
        part.choices[0].text
        for part in talk.completions.create(model="policy", prompt="2+2=", stream=True)
    ]
    assert "".join(texts) == f"so {call}"


def test_log_probabilities_and_ids_are_mu(served: Served) -> None:
    talk, opened = client(served)
    answer = talk.chat.completions.create(
        model="policy", messages=GO, logprobs=True, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    node = opened.tree.nodes[0]
    assert choice.logprobs and choice.logprobs.content and node.logprobs is not None
    np.testing.assert_array_equal(
        np.float32([each.logprob for each in choice.logprobs.content]), node.logprobs
    )
    assert "".join(each.token for each in choice.logprobs.content) == "answer 0<|im_end|>"
    assert choice.token_ids == node.ids.tolist()
    assert choice.prompt_token_ids == node.prompt_ids.tolist()
    made = talk.completions.create(model="policy", prompt="2+2=", logprobs=1).choices[0].logprobs
    assert made and made.tokens and made.token_logprobs and len(made.token_logprobs) == 9
    assert made.text_offset and made.text_offset[:3] == [0, 1, 2]


def test_text_and_token_routes(served: Served) -> None:
    talk, opened = client(served)
    first = talk.completions.create(model="policy", prompt="2+2=", max_tokens=4)
    assert first.choices[0].text == "answ" and first.choices[0].finish_reason == "length"
    assert first.choices[0].weight_versions == [{"version": "1.2", "start": 0, "end": 4}]
    talk.completions.create(model="policy", prompt=["2+2=answ and"])
    assert len(opened.build_training_rows()) == 1
    ids = [*opened.tree.nodes[1].build_token_ids().tolist(), 5, 6]
    by_ids = talk.completions.create(model="policy", prompt=ids)
    assert by_ids.choices[0].text == "answer 2" and len(opened.build_training_rows()) == 1
    more = [*opened.tree.nodes[2].build_token_ids().tolist(), 7]
    body = {"token_ids": more, "sampling_params": {"max_tokens": 3, "logprobs": 0}}
    said = post(served, opened, "/inference/v1/generate", body).json()
    (choice,) = said["choices"]
    drawn = opened.tree.nodes[3]
    assert drawn.ids is not None and choice["token_ids"] == drawn.ids.tolist()
    assert choice["weight_versions"] == [{"version": "1.2", "start": 0, "end": 3}]
    assert [each["token_id"] for each in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["finish_reason"] == "length" and len(opened.build_training_rows()) == 1


def test_stop_strings_and_lengths_cut(served: Served) -> None:
    talk, opened = client(served)
    served.service.say = lambda call: "one two three"
    answer = talk.chat.completions.create(model="policy", messages=GO, stop=[" three", " two"])
    assert answer.choices[0].message.content == "one" and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("one two")
    short = talk.chat.completions.create(model="policy", messages=GO, max_completion_tokens=2)
    assert short.choices[0].message.content == "on"
    assert short.choices[0].finish_reason == "length" and opened.finish == "stop"


def test_other_names_and_marks_are_set_aside_a_temperature_ignored(
    served: Served,
) -> None:
    talk, opened = client(served)
    talk.chat.completions.create(model="gpt-4o-mini", messages=GO)
    talk.chat.completions.create(model="policy", messages=GO, metadata={"asyncrl": "aside"})
    assert opened.build_training_rows() == ()
    assert opened.aside == 2 * (len("answer 0") + 1)
    opened.set_reward(1.0, now=0.0)
    why = build_trajectory(opened, None, AgentConfig(serve=True, model="tuned")).failed.why
    assert "all 2 answered calls of the session are excluded" in why and "model tuned" in why
    _, opened = client(served)
    body = {"model": "policy", "messages": GO, "temperature": 0, "seed": 3, "top_p": 1, "höhe": 3}
    said = post(served, opened, "/v1/chat/completions", body)
    assert said.headers["x-asyncrl-ignored"] == "temperature, seed, h?he"


def test_a_body_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    _, opened = client(served)
    monkeypatch.setattr(web, "LARGEST_BODY", 1000)
    body = {"messages": [{"role": "user", "content": "x" * 1000}]}
    said = post(served, opened, "/v1/chat/completions", body)
    assert said.status_code == 413 and said.headers["x-should-retry"] == "false"
    for path in ("/reward", "/end", "/beat"):
        large = {"reward": 1, "x": "y" * web.LARGEST_REPORT}
        assert post(served, opened, path, large).status_code == 413
    assert opened.state == "open"

    monkeypatch.setattr(http_server, "BODY_S", 0.05)
    with connected(served) as slow:
        slow.sendall(raw(opened, b"{" * 20)[:-10])
        assert b" 408 " in slow.recv(4096)


def test_an_open_address_needs_tls_or_a_proxy(tmp_path: Any) -> None:
    for host in ("0.0.0.0", "::", "example.org", "10.0.0.1"):
        with pytest.raises(ConfigError) as error:
            ListenAddress(host).require_encryption()
        assert str(error.value) == (
            f"agent.host: {host} is open to the network; give agent.certificate and its private "
            "key, or agent.behind_proxy = true, or use 127.0.0.1"
        )
        ListenAddress(host, behind_proxy=True).require_encryption()
        ListenAddress(host, certificate="c", private_key="k").require_encryption()
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.2"):
        ListenAddress(host).require_encryption()
    for keys in ({"certificate": "c"}, {"private_key": "k"}):
        with pytest.raises(ConfigError) as error:
            ListenAddress(**keys).require_encryption()
        assert str(error.value) == "agent.certificate and its private key: give both or none"
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    for name in ("agent.port", "--port"):
        with pytest.raises(ConfigError) as error:
            http_server.HttpServer(None, ListenAddress(port=port, port_name=name))
        problem = f"{name}: 127.0.0.1:{port}: Address already in use"
        assert str(error.value) == f"{problem}; choose another host or port"
    with pytest.raises(ConfigError, match=r"^agent\.port: "):
        Served(bind=ListenAddress(port=port))
    taken.close()


def test_a_request_of_more_entries_than_the_context_has_tokens_is_not_read() -> None:
    with closing(Served(limits=SessionLimits(max_calls=9, context=4))) as served:
        _, opened = client(served)
        for route, name in (
            ("/v1/chat/completions", "messages"),
            ("/v1/responses", "input"),
            ("/v1/completions", "prompt"),
            ("/inference/v1/generate", "token_ids"),
        ):
            for count in (4, 5):
                said = post(served, opened, route, {name: [None] * count}).json()["error"]
                long = f"but {name} has 5 entries of a token or more: shorten the history"
                assert said["message"].endswith(long) == (count == 5), said
                assert said["param"] == name and opened.shortened == (count == 5)
            opened.shortened = False


def test_a_run_that_ends_says_so(served: Served) -> None:
    talk, _ = client(served, max_retries=0)
    served.service.is_ending = True
    with pytest.raises(openai.InternalServerError) as again:
        talk.chat.completions.create(model="policy", messages=GO)
    assert again.value.status_code == 503 and "x-should-retry" not in again.value.response.headers
    served.service.is_over = True
    with pytest.raises(openai.APIStatusError) as caught:
        talk.chat.completions.create(model="policy", messages=GO)
    assert caught.value.status_code == 410
    assert caught.value.response.headers["x-should-retry"] == "false"


def raw(opened: Session, body: bytes, **headers: str) -> bytes:
    """A chat request as it goes over the wire."""
    lines = [
        f"POST /s/{opened.name}/v1/chat/completions HTTP/1.1",
        "host: x",
        f"authorization: Bearer {opened.api_key}",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), WAIT_S)


def ask(served: Served, opened: Session, body: bytes, **headers: str) -> bytes:
    """One request on a socket of its own; all that came back."""
    with connected(served) as line:
        line.sendall(raw(opened, body, **headers))
        got = b""
        while part := line.recv(65536):
            got += part
    return got


def leave(served: Served, opened: Session, body: bytes) -> None:
    """Ask, and close the socket while the endpoint draws."""

    def waiting() -> int:
        return sum(each.connections for each in opened.requests)

    before = served.do(waiting)
    with connected(served) as line:
        line.sendall(raw(opened, body))
        served.until(lambda: waiting() > before)
    served.until(lambda: waiting() == before)


def test_the_clients_own_retries_join_the_call_and_lose_nothing(served: Served) -> None:
    """Time-outs of a client that repeats its request by itself, until an answer comes in time: one
    draw, whichever attempt is answered."""
    talk, opened = client(served, timeout=0.3, max_retries=1000)
    served.do(served.service.gate.clear)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(talk.chat.completions.create, model="policy", messages=GO)
        # the first attempt has given up and a second one has joined
        served.until(lambda: opened.requests and opened.requests[0].lost)
        served.until(lambda: not opened.requests[0].lost)
        served.do(served.service.gate.set)
        answer = asked.result(WAIT_S)
    assert answer.choices[0].message.content == "answer 0"
    assert served.service.drawn == [0] and len(opened.build_training_rows()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_socket_closed_in_the_request_leaves_one_draw(stream: bool, served: Served) -> None:
    """Within the request: no call.  Behind it: one, which the next equal body joins."""
    _, opened = client(served)
    body = json.dumps({"model": "policy", "messages": GO, "stream": stream}).encode()
    whole = raw(opened, body)
    for cut in range(len(whole)):
        with connected(served) as line:
            line.sendall(whole[:cut])
    assert b"answer 0" in ask(served, opened, body)
    assert served.service.drawn == [0] and opened.calls == 1
    served.do(served.service.gate.clear)
    for _ in range(3):
        leave(served, opened, body)
        assert opened.calls == 2
    served.do(served.service.gate.set)
    assert b"answer 1" in ask(served, opened, body) and served.service.drawn == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_socket_closed_in_the_answer_loses_no_draw(stream: bool, served: Served) -> None:
    """The client reads so many bytes, closes, and repeats: it gets the answer it had begun."""
    _, opened = client(served)
    body = json.dumps({"model": "policy", "messages": GO, "stream": stream}).encode()
    length = len(ask(served, opened, body))
    for number, read in enumerate(range(1, length, max(1, length // 40)), start=1):
        message = {"role": "user", "content": f"{read}"}
        body = json.dumps({"model": "policy", "messages": [message], "stream": stream}).encode()
        with connected(served) as line:
            line.sendall(raw(opened, body))
            left = read
            while left and (part := line.recv(left)):
                left -= len(part)
        again = ask(served, opened, body, **{"x-stainless-retry-count": "1"})
        assert f"answer {number}".encode() in again
    assert served.service.drawn == list(range(number + 1))


def test_votes_of_which_one_loses_its_socket_keep_their_draws(served: Served) -> None:
    _, opened = client(served)
    body = json.dumps({"model": "policy", "messages": GO}).encode()
    served.do(served.service.gate.clear)
    with ThreadPoolExecutor(4) as pool:
        kept = [pool.submit(ask, served, opened, body) for _ in range(3)]
        served.until(lambda: opened.calls == 3)
        leave(served, opened, body)
        again = pool.submit(ask, served, opened, body, **{"x-stainless-retry-count": "1"})
        served.until(lambda: not any(each.lost for each in opened.requests))
        served.do(served.service.gate.set)
        answers = [each.result(WAIT_S) for each in [*kept, again]]
    assert sorted(served.service.drawn) == [0, 1, 2, 3]
    assert {f"answer {n}" for n in range(4)} == {
        json.loads(each.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
        for each in answers
    }


def test_a_draw_that_fails_is_said_and_may_be_asked_again(served: Served) -> None:
    talk, _ = client(served)
    says = iter(["", "fine"])

    def say(call: Any) -> str:
        if (text := next(says)) == "":
            raise RuntimeError("no engine")
        return text

    served.service.say = say
    answer = talk.chat.completions.create(model="policy", messages=GO)
    assert answer.choices[0].message.content == "fine"  # the client's retry of a 500


def lease(served: Served, body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {served.service.run_key}"}
    url = f"{served.url}/asyncrl/v1/sessions"
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(url, content=content, headers=headers, timeout=WAIT_S)


def test_a_harness_leases_runs_and_scores_or_lets_judge(served: Served) -> None:
    assert lease(served, {"lease": "a", "wait_s": 0}).status_code == 204
    served.service.free = 2
    got = lease(served, {"lease": "a"}).json()
    assert lease(served, {"lease": "a"}).json() == got and served.service.free == 1
    assert lease(served, {"lease": "b"}).json()["session"] != got["session"]
    judged = served.service.leases["b"]
    judged.calls = 1
    for _ in range(2):
        assert post(served, judged, "/end", {"score": True}).json()["state"] == "judging"
    assert judged.name in served.service.looked_at
    assert set(got) == {
        *("session", "base_url", "api_key", "task", "seed", "attempt", "first"),
        *("deadline_s", "model"),
    }
    assert "answer" not in json.dumps(got["task"])
    talk = OpenAI(base_url=got["base_url"], api_key=got["api_key"])
    answer = talk.chat.completions.create(model=got["model"], messages=GO)
    opened = served.service.leases["a"]
    assert post(served, opened, "/beat", {}).json()["state"] == "open"
    score = {"reward": 1, "parts": {"style": 0.5}, "calls": {answer.id: 0.25}}
    for _ in range(2):
        said = post(served, opened, "/reward", score)
        assert said.status_code == 200 and said.json()["state"] == "ended"
    assert post(served, opened, "/reward", {"reward": 0}).status_code == 422
    assert opened.outcome and opened.outcome.reward == 1.0
    assert opened.outcome.parts == {"style": 0.5}
    rewards = np.frombuffer(opened.build_training_rows()[0].token_rewards, "<f4")
    assert rewards[-1] == 1.0  # its own and what remains
    head = {"authorization": f"Bearer {opened.api_key}"}
    view = httpx.get(f"{served.url}/s/{got['session']}", headers=head, timeout=WAIT_S).json()
    assert view["calls"] == 1 and view["versions"] == ["1.2"] and view["rows"] == 1


def test_uvicorn_is_configured_for_an_api() -> None:
    app: Any = lambda scope, receive, send: None  # noqa: E731
    for host, proxy, url in (("127.0.0.1", True, "127.0.0.1"), ("::1", False, "[::1]")):
        server = http_server.HttpServer(app, ListenAddress(host, behind_proxy=proxy))
        try:
            assert server.socket.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
            assert re.fullmatch(rf"http://{re.escape(url)}:[1-9]\d*", server.url)
            assert (server.task, server.server.started) == (None, False)
            config = server.server.config
            assert config.app is app
            names = ("interface", "ws", "lifespan", "log_config", "access_log", "server_header")
            names += ("date_header", "timeout_graceful_shutdown", "ssl_certfile", "ssl_keyfile")
            found = [getattr(config, name) for name in names]
            assert found == ["asgi3", "none", "off", None, False, False, False, 1, None, None]
            assert (config.http, config.proxy_headers) == (http_server.BoundedConnection, proxy)
            server.bind = ListenAddress(certificate="c", private_key="k")
            assert server.url.startswith("https://")
        finally:
            server.socket.close()
    own = ListenAddress(certificate="c", private_key="k")
    server = http_server.HttpServer(app, own)
    server.socket.close()
    assert (server.server.config.ssl_certfile, server.server.config.ssl_keyfile) == ("c", "k")


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


def test_wrong_keys_and_unknown_routes(served: Served, opened: Session) -> None:
    key = {"authorization": "Bearer other"}
    for path in (f"/s/{opened.name}", "/s/9.9.9", f"/s/{opened.name}/v1/models"):
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
    for method, path in (("GET", "/nowhere"), ("DELETE", f"/s/{opened.name}")):
        reply = httpx.request(method, served.url + path, timeout=WAIT_S)
        text = f"there is no {method} {path}: see docs/http.md for the routes"
        assert error_of(reply) == (404, "no_such_route", None, text)
    long = f"/{'x' * 300}"
    reply = httpx.get(served.url + long, timeout=WAIT_S)
    assert error_of(reply)[3] == f"there is no GET {long[:200]}: see docs/http.md for the routes"
    reply = post(served, opened, "/v1/models/other", {})
    assert error_of(reply)[1] == "no_such_route"
    head = {"authorization": f"Bearer {opened.api_key}"}
    path = f"/s/{opened.name}/v1/models/gpt-4o/mini"
    found = httpx.get(served.url + path, headers=head)
    assert error_of(found) == (404, "model_not_found", "model", "there is no model 'gpt-4o/mini'")
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "asyncrl"}
    model["max_model_len"] = None
    models = f"{served.url}/s/{opened.name}/v1/models"
    assert httpx.get(f"{models}/policy", headers=head).json() == model
    assert httpx.get(models, headers=head).json() == {"object": "list", "data": [model]}


def test_a_wait_for_a_lease_is_bounded_and_what_is_none_refused(served: Served) -> None:
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
    for body, key, text in (
        ({}, "lease", "Object missing required field `lease`"),
        ({"lease": ""}, "lease", "Expected `str` of length >= 1"),
        ({"lease": 3}, "lease", "Expected `str`, got `int`"),
        ({"lease": "x" * 257}, "lease", "Expected `str` of length <= 256"),
        ({"lease": "x", "wait_s": "long"}, "wait_s", "Expected `float`, got `str`"),
        ({"lease": "x", "wait_s": True}, "wait_s", "Expected `float`, got `bool`"),
        ({"lease": "x", "wait": 1}, "wait", "Object contains unknown field `wait`"),
    ):
        assert error_of(lease(served, body)) == (400, "invalid_value", key, f"{key}: {text}")
    assert lease(served, {"lease": "x" * 256}).status_code == 204
    assert lease(served, b'{"lease": "x", "wait_s": NaN}').status_code == 204
    found = error_of(lease(served, b"[]"))
    assert found == (400, "invalid_json", None, "the body is not a JSON object")
    served.service.is_ending = True
    ending = lease(served, {"lease": "x"})
    assert error_of(ending) == (503, "ending", None, "the gateway is ending: come again")
    assert ending.headers["retry-after"] == "1"
    served.service.is_over = True
    assert error_of(lease(served, {"lease": "x"})) == (410, "run_over", None, "the run is over")


def test_rewards_that_are_refused(served: Served) -> None:
    talk, opened = client(served)
    name = opened.name
    talk.chat.completions.create(model="policy", messages=GO)

    def said(body: Any) -> tuple[int, str, str | None, str]:
        found = error_of(post(served, opened, "/reward", body))
        assert opened.state == "open"
        return found

    for body in (b"", {}, {"reward": "1"}, {"reward": True}, b'{"reward": 1%s}' % (b"0" * 400)):
        assert said(body)[:3] == (422, "invalid_value", "reward")
    for value in (b"NaN", b"Infinity"):
        status, code, param, _ = said(b'{"reward": ' + value + b"}")
        assert (status, code, param) == (422, "invalid_reward", "reward")
    for key in ("rewards", "-.x"):
        found = said({"reward": 1, key: 2})
        shown = key.partition(".")[0]
        text = f"{shown}: Object contains unknown field `{key}`"
        assert found == (422, "invalid_value", shown, text)
    assert len(said({"reward": 1, "x" * 9999: 2})[3]) < 300
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
        text = f"{key}: Expected `object | null`, got `array`"
        assert found == (422, "invalid_value", key, text)
        found = said({"reward": 1, key: {"a": "x"}})
        assert found == (422, "invalid_value", key, f"{key}: Expected `float`, got `str`")
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
    for path, body in (("/reward", {"reward": 1}), ("/end", {"score": True})):
        _, silent = client(served)
        for _ in range(2):  # its repetition gets the same response
            status, code, _, text = error_of(post(served, silent, path, body))
            assert (status, code) == (422, "no_call") and silent.state != "open"
            assert "has ended without a call, so its sample has failed" in text
    _, failed = client(served)
    assert post(served, failed, "/end", {"failed": "no"}).json()["state"] == "ended"
    found = error_of(post(served, failed, "/reward", {"reward": 1}))
    text = f"session {failed.name} has ended"
    assert found == (410, "session_ended", None, text)
    assert error_of(post(served, failed, "/end", {"score": True})) == found


def test_ends_that_are_refused(served: Served) -> None:
    _, opened = client(served)
    for body in ({}, {"score": False}, {"score": True, "failed": "no"}):
        found = error_of(post(served, opened, "/end", body))
        text = 'give either {"score": true} or {"failed": "why"}'
        assert found == (400, "invalid_value", None, text)
    for key, value in (("failed", ""), ("failed", 3), ("failed", False), ("score", 1), ("x", 1)):
        found = error_of(post(served, opened, "/end", {key: value}))
        assert found[:3] == (400, "invalid_value", key)
    status, code, param, text = error_of(post(served, opened, "/end", {"failed": "x" * 70_000}))
    assert (status, code, param) == (422, "invalid_value", "failed") and text[:8] == "failed: "
    assert "at most 65536 are allowed" in text and opened.state == "open"
    longest = {"failed": "x" * outcomes.REASON_LENGTH}
    assert post(served, opened, "/end", longest).json()["state"] == "ended"


def test_limits_of_a_session_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SessionLimits(parallel=1, max_calls=1, context=64, grace_s=7.0)
    with closing(Served(limits=limits)) as made:
        talk, opened = client(made, max_retries=0)
        name = opened.name
        opened.composing = 1
        reply = post(made, opened, "/v1/chat/completions", {"messages": GO})
        assert reply.headers["retry-after"] == "1" and error_of(reply) == (
            429,
            "parallel_calls",
            None,
            f"session {name} has 1 calls at once, agent.parallel = 1: wait for one of them",
        )
        opened.composing = 0
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
        assert opened.refusals.count == 4 and name in made.service.looked_at


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
