"""What benchmarks/openai_agents.py does when a session goes wrong: the real client against scripted
answers of an endpoint; the framework, which is no dependency, is played by a few lines."""

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from process_kit import ROOT, load_program

URL = "http://endpoint"
SUM = "37*8+45="  # 341


class MaxTurnsExceeded(Exception):
    pass


class ModelBehaviorError(Exception):
    pass


class Runner:
    """One call, whose answer is the session's."""

    @staticmethod
    async def run(agent: Any, text: str, max_turns: int) -> Any:
        client = agent.model.openai_client
        messages = [{"role": "user", "content": text}]
        said = await client.chat.completions.create(model=agent.model.model, messages=messages)
        written = said.choices[0].message.content
        for error in (MaxTurnsExceeded, ModelBehaviorError):
            if written == error.__name__:
                raise error
        return SimpleNamespace(final_output=written)


@pytest.fixture()
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    framework, exceptions = ModuleType("agents"), ModuleType("agents.exceptions")
    framework.__dict__.update(
        Agent=SimpleNamespace,
        OpenAIChatCompletionsModel=SimpleNamespace,
        Runner=Runner,
        function_tool=lambda function: function,
        set_tracing_disabled=lambda _: None,
        version=SimpleNamespace(__version__="0"),
    )
    exceptions.__dict__.update(
        MaxTurnsExceeded=MaxTurnsExceeded, ModelBehaviorError=ModelBehaviorError
    )
    monkeypatch.setitem(sys.modules, "agents", framework)
    monkeypatch.setitem(sys.modules, "agents.exceptions", exceptions)
    return load_program(ROOT / "benchmarks" / "openai_agents.py")


class Endpoint:
    """Leases a session for each of `answers`, (status, the policy's text or an error's code), and
    then says that the run is over; `ended`: what was said of each."""

    def __init__(self, *answers: tuple[int, str], last: int = 410) -> None:
        self.answers = list(answers)
        self.last = last
        self.leased = 0
        self.leases: list[str] = []
        self.ended: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, asked: httpx2.Request) -> httpx2.Response:
        body = json.loads(asked.content)
        own, at = asked.headers["authorization"], asked.url.path
        if at == "/asyncrl/v1/sessions":
            assert own == "Bearer run" and body["lease"] not in self.leases
            self.leases.append(body["lease"])
            return self.lease()
        number, _, rest = at.removeprefix("/s/").partition("/")
        assert own == f"Bearer key{number}"
        status, text = self.answers[int(number)]
        if rest in ("reward", "end"):
            self.ended.append((at, body))
            return httpx2.Response(422 if text == "#0" else 200)
        assert rest == "v1/chat/completions" and body["model"] == "policy"
        if status == 0:
            raise httpx2.ConnectError("refused")
        final = {"x-should-retry": "false"}
        if status != 200:
            error = {"message": "no more", "code": text}
            return httpx2.Response(status, json={"error": error}, headers=final)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        said = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy"}
        return httpx2.Response(200, json=said | {"choices": [choice]})

    def lease(self) -> httpx2.Response:
        if len(self.leases) == 1:
            return httpx2.Response(204)  # none now
        if self.leased == len(self.answers):
            return httpx2.Response(self.last, text="why not")
        name = self.leased
        self.leased += 1
        opened = {"base_url": f"{URL}/s/{name}/v1", "api_key": f"key{name}", "model": "policy"}
        return httpx2.Response(200, json=opened | {"session": name, "task": {"text": SUM}})

    def client(self, **_: Any) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=httpx2.MockTransport(self))


def worked(program: Any, endpoint: Endpoint) -> int:
    async def whole() -> int:
        async with endpoint.client() as http:
            return int(await program.work(URL, "run", http))

    return asyncio.run(whole())


def test_the_policy_is_scored_and_what_the_endpoint_refuses_fails(program: Any) -> None:
    replies = ["#341", "#340", "MaxTurnsExceeded", "ModelBehaviorError"]
    refusals = [(400, "session_limit"), (400, "context_length_exceeded"), (410, "gone")]
    # the reward of the last but one is refused
    endpoint = Endpoint(*((200, x) for x in replies), *refusals, (200, "#0"), (200, "#341"))
    assert worked(program, endpoint) == 6
    failed = {"failed": "Error code: 400 - no more"}
    assert endpoint.ended == [
        ("/s/0/reward", {"reward": 1.0}),
        *[(f"/s/{name}/reward", {"reward": 0.0}) for name in range(1, 5)],
        ("/s/5/end", failed),
        ("/s/7/reward", {"reward": 0.0}),
        ("/s/8/reward", {"reward": 1.0}),
    ]
    assert len(endpoint.leases) == 11


@pytest.mark.parametrize("status", [401, 404])
def test_what_every_session_would_meet_ends_the_program(program: Any, status: int) -> None:
    endpoint = Endpoint((status, "wrong"), (200, "#341"))
    with pytest.raises(program.Hopeless, match=f"{URL}/s/0: Error code: {status} - .*no more"):
        worked(program, endpoint)
    ((at, said),) = endpoint.ended
    assert at == "/s/0/end" and "no more" in said["failed"] and endpoint.leased == 1


@pytest.mark.parametrize(
    ("answers", "last", "said"),
    [
        ([], 401, f"{URL}: no lease: 401 why not"),
        ([(0, "")], 410, f"{URL} has gone: APIConnectionError "),
        ([(200, "#341")] * 2, 410, ""),
    ],
)
def test_the_programs_last_line_says_what_became_of_it(
    program: Any,
    answers: list[tuple[int, str]],
    last: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    endpoint = Endpoint(*answers, last=last)
    monkeypatch.setattr(openai, "DefaultAsyncHttpxClient", endpoint.client)
    monkeypatch.setattr(openai.AsyncOpenAI, "_calculate_retry_timeout", lambda *_, **__: 0.0)
    monkeypatch.setattr(program, "AT_ONCE", 2)
    (tmp_path / "agent.url").write_text(f"{URL}\n")
    (tmp_path / "agent.key").write_text("run\n")
    if not said:
        asyncio.run(program.main(tmp_path))
        assert capsys.readouterr().out == "2 sessions by openai-agents 0\n"
        return
    with pytest.raises(SystemExit, match=said):
        asyncio.run(program.main(tmp_path))
