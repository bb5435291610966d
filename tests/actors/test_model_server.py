"""`asyncrl serve` with OpenAI's client: completions, log-probabilities of prompts, refusals; and
what the bodies of its requests ask for."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import numpy as np
import openai
import pytest
import torch
from model_server_kit import KEY, served, served_here

from actors import completions_app
from actors.completions_app import (
    MOST_CONTEXT,
    CompletionBody,
    CompletionOrder,
    CompletionsApp,
    EngineThread,
    build_config,
    parse_order,
)
from actors.engine import Completion
from actors.gateway.refusals import CallRefused
from asyncrl.cli import main
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.transport.http_server import ListenAddress

GO = [{"role": "user", "content": "go"}]


def encode(prompt: Prompt) -> np.ndarray:
    """A token for each character, and one more for each turn."""
    text = prompt.text or "".join(turn["content"] + ":" for turn in prompt.messages)
    return np.array([ord(letter) % 50 for letter in text], np.int32)


def order(context: int = 64, *, chat: bool | None = None, **body: Any) -> CompletionOrder:
    return parse_order(
        json.dumps(body).encode(),
        chat="messages" in body if chat is None else chat,
        name="tiny",
        context=context,
        vocabulary=50,
        encode=encode,
    )


def fields(found: CompletionOrder) -> dict[str, Any]:
    """The fields that are not those of a plain completion."""
    body = msgspec.structs.asdict(found.body)
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "count": 1, "seed": None, "echo": False}
    plain |= {"max_new_tokens": 16, "stop": (), "most_likely": None}
    given = {name: body.get(name, getattr(found, name, None)) for name in plain}
    given["stop"] = found.stop
    changed = {name: value for name, value in given.items() if value != plain[name]}
    return {**changed, "prompts": [prompt.tolist() for prompt in found.prompts]}


def test_plain_requests_of_both_routes() -> None:
    assert fields(order(prompt="ab")) == {"prompts": [[47, 48]]}
    assert fields(order(prompt="ab", model="tiny", max_tokens=5)) == {
        **{"prompts": [[47, 48]], "max_new_tokens": 5}
    }
    # a chat's answer may fill the context, a completion has its default or what is left
    assert fields(order(messages=GO)) == {"prompts": [[3, 11, 8]], "max_new_tokens": 61}
    assert order(prompt="a" * 50).max_new_tokens == 14
    assert order(prompt=["a", "a" * 60]).max_new_tokens == 4
    assert order(prompt=[[1, 2], [3]]).prompts[1].tolist() == [3]
    assert order(prompt=[1, 2]).prompts[0].tolist() == [1, 2]
    assert order(messages=[*GO, {"role": "assistant", "content": None}]).prompts[0].tolist() == [
        *(3, 11, 8, 8)
    ]


def test_every_option_that_is_followed() -> None:
    kept = {"temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 7, "echo": True}
    other = {"n": 2, "stop": ["x", "yz"], "logprobs": 2, "max_tokens": 9}
    neutral = {"stream": False, "repetition_penalty": 1, "logit_bias": {}, "tools": []}
    neutral |= {"response_format": {"type": "text"}, "suffix": None}
    neutral |= dict.fromkeys(("user", "store", "metadata", "stream_options", "best_of"), 1)
    neutral |= dict.fromkeys(("presence_penalty", "frequency_penalty"), 0)
    found = order(prompt="ab", max_completion_tokens=3, **kept, **other, **neutral)
    expected = {"prompts": [[47, 48]], "max_new_tokens": 3, "count": 2, "stop": ("x", "yz")}
    assert fields(found) == kept | expected | {"most_likely": 2}
    assert order(prompt="ab", max_tokens=0, echo=True, logprobs=0).most_likely == 0
    assert order(prompt="ab", logprobs=False).most_likely is None
    assert order(prompt="ab", logprobs=True).most_likely == 1
    assert order(messages=GO, logprobs=True).most_likely == 0
    assert order(messages=GO, logprobs=True, top_logprobs=3).most_likely == 3
    assert order(messages=GO, top_logprobs=3).most_likely is None
    assert order(messages=GO, logprobs=False).most_likely is None
    assert order(prompt=["a"] * 512, n=2, max_tokens=63).body.count == 2


EMPTY = "prompt: is empty; give at least one token"
SCORED = "max_tokens: 0 needs echo = true and logprobs, to score the prompt"
UP_TO_20 = "give a whole number of at least 0 and at most 20"
NO_TEXT = {"role": "user", "content": 3}
NO_CALL = {"role": "assistant", "tool_calls": [1]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, EMPTY),
        ({"prompt": ["a", ""]}, EMPTY),
        ({"prompt": None}, "prompt: give text or a list of token ids"),
        ({"prompt": ["a", 3]}, "prompt: give text or a list of token ids"),
        ({"prompt": [1, 50]}, "prompt: give token ids in [0, 50)"),
        ({"prompt": "a", "max_tokens": 0, "echo": True}, SCORED),
        ({"prompt": "a", "max_tokens": 0, "logprobs": 1}, SCORED),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens: -1: give a whole number of at least 0"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: 'hot': give a number of at least 0"),
        (
            {"prompt": "a", "top_logprobs": 1},
            "top_logprobs: belongs to /v1/chat/completions; give logprobs a number",
        ),
        ({"messages": GO, "top_logprobs": -1}, f"top_logprobs: -1: {UP_TO_20}"),
        ({"messages": GO, "top_logprobs": 21}, f"top_logprobs: 21: {UP_TO_20}"),
        ({"prompt": "a", "stop": 3}, "stop: give a text, or a list of texts"),
        ({"prompt": ["a"] * 513, "n": 2}, "n: asks for more than 1024 completions in one request"),
        (
            {"messages": GO, "logprobs": 3},
            "logprobs: give true or false, and top_logprobs a number",
        ),
        (
            {"messages": [*GO, NO_TEXT]},
            "messages[1]: content is int; give text, or a list of text parts",
        ),
        (
            {"messages": [*GO, NO_CALL]},
            "messages[1].tool_calls: give a list of objects with `id` and `function`",
        ),
        ({"messages": []}, "messages: give a list of at least one message"),
    ],
)
def test_what_cannot_be_answered_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(CallRefused) as refused:
        order(**body)
    param = re.split(r"\W", message)[0]  # what the message begins with
    found = refused.value
    assert (str(found), found.status, found.param) == (message, 400, param)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "a", "logit_bias": {"1": 3}}, "logit_bias", "{'1': 3} is not served"),
        ({"prompt": "a", "stream": True}, "stream", "True is not served"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "0 is not served"),
        ({"prompt": "a", "unknown": "x" * 99}, "unknown", f"'{'x' * 79} is not served"),
    ],
)
def test_what_is_not_followed_is_refused(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(CallRefused) as refused:
        order(**body)
    error = refused.value
    assert str(error) == f"{param}: {message}; leave it out"
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", param)


def test_keys_of_the_other_route_and_other_models_are_refused() -> None:
    for body, param in (({"prompt": "a"}, "prompt"), ({"echo": True}, "echo")):
        with pytest.raises(CallRefused) as refused:
            order(messages=GO, **body)
        assert str(refused.value) == f"{param}: belongs to /v1/completions"
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)
    with pytest.raises(CallRefused) as refused:
        order(prompt="a", model="gpt")
    assert str(refused.value) == "no model 'gpt': this server has 'tiny'"
    found = refused.value
    assert (found.status, found.code, found.param) == (404, "model_not_found", "model")


def test_more_tokens_than_there_are_is_refused() -> None:
    order(prompt="a" * 60, max_tokens=4)
    with pytest.raises(CallRefused) as refused:
        order(prompt=["a", "a" * 60], max_tokens=5)
    assert str(refused.value) == (
        "the prompt has 60 tokens and max_tokens is 5, and --context = 64 is for both: shorten the "
        "prompt, or serve with a larger one"
    )
    found = refused.value
    assert (found.status, found.code, found.param) == (400, "context_length_exceeded", "prompt")
    few = {"chat": False, "name": "tiny", "context": 9, "vocabulary": 3, "encode": encode}
    assert parse_order(b'{"prompt": [1], "logprobs": 3}', **few).most_likely == 3
    with pytest.raises(CallRefused) as refused:
        parse_order(b'{"prompt": [1], "logprobs": 4}', **few)
    assert str(refused.value) == "logprobs: 4: the model has 3 tokens"


SYMBOLS = "abcdefgh"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template and 64 positions."""
    path = tmp_path_factory.mktemp("model")
    policy.build_model(path, SYMBOLS + ":\n", max_positions=64, seed=3)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ raise_exception('no tools') if m['role'] == 'tool' else '' }}"
        "{{ m['content'] }}:{% endfor %}"
    )
    return path


@pytest.fixture(scope="module")
def app(directory: Path) -> Iterator[tuple[str, CompletionsApp]]:
    with served_here(directory) as found:
        yield found


@pytest.fixture(scope="module")
def url(app: tuple[str, CompletionsApp]) -> str:
    return app[0]


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)


def logprobs_of(directory: Path, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids) - 1, V], by transformers."""
    model = policy.load_policy(directory, "float32", "cpu")
    with torch.no_grad():
        return torch.log_softmax(model.hf(input_ids=torch.tensor([ids])).logits[0, :-1], -1)


def test_the_context_is_that_of_the_model_and_bounded_without_an_option(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"slots": 3, "dtype": "float32", "device": "cpu"}
    for positions, asked, context in (
        (64, 0, 64),
        (64, 32, 32),
        (MOST_CONTEXT + 1, 0, MOST_CONTEXT),
        (MOST_CONTEXT + 1, MOST_CONTEXT + 1, MOST_CONTEXT + 1),
    ):
        path = tmp_path / f"{positions}"
        if not path.exists():
            policy.build_model(path, SYMBOLS, hidden=16, layers=1, max_positions=positions)
        made = build_config(str(path), context=asked, threads=0, **keys)
        assert (made.generator.context, made.generator.slots) == (context, 3)
        assert made.generator.threads == len(os.sched_getaffinity(0))
        assert (made.model.dtype, made.model.device) == ("float32", "cpu")
    assert build_config(str(path), context=8, threads=2, **keys).generator.threads == 2
    with pytest.raises(ConfigError, match=r"^MODEL: .* \(it has no config.json\)$"):
        build_config(str(tmp_path), context=0, threads=1, **keys)
    with pytest.raises(ConfigError, match="has 4097 positions"):
        build_config(str(path), context=MOST_CONTEXT + 2, threads=1, **keys)


def test_a_prompt_is_scored_with_likeliest_tokens(client: openai.OpenAI, directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    texts = ["abcd", "hgfea"]
    done = client.completions.create(
        model="tiny", prompt=texts, max_tokens=0, echo=True, logprobs=2
    )
    assert [choice.index for choice in done.choices] == [0, 1] and done.usage is not None
    assert done.usage.prompt_tokens == 9 and done.usage.completion_tokens == 0
    for text, choice in zip(texts, done.choices, strict=True):
        found = choice.logprobs
        assert choice.text == text and choice.finish_reason == "length"
        assert found is not None and found.tokens == list(text)
        assert found.token_logprobs is not None and found.top_logprobs is not None
        assert found.text_offset == list(range(len(text)))
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        ids = tokenizer.encode(text)
        logs = logprobs_of(directory, ids)
        picked = logs.gather(1, torch.tensor(ids)[1:, None])[:, 0]
        assert np.allclose(found.token_logprobs[1:], picked, atol=1e-4)
        best, best_ids = logs.topk(2)
        for likely, values, names in zip(found.top_logprobs[1:], best, best_ids, strict=True):
            assert list(likely) == [tokenizer.decode([int(name)]) for name in names.flip(0)]
            assert np.allclose(list(likely.values()), values.flip(0), atol=1e-4)


def test_as_lm_eval_asks_the_greedy_token_is_its_positions_most_likely(
    client: openai.OpenAI, directory: Path
) -> None:
    """One token more, which is dropped: token ids, temperature 0, echo and one log-probability."""
    greedy = client.completions.create(model="tiny", prompt="abc", max_tokens=6, temperature=0)
    assert greedy.choices[0].text
    ids = load_tokenizer(directory).encode("abc" + greedy.choices[0].text)
    scored = client.completions.create(
        model="tiny", prompt=[ids], max_tokens=1, temperature=0, echo=True, logprobs=1, seed=1234
    )
    found = scored.choices[0].logprobs
    assert found is not None and found.token_logprobs and found.top_logprobs
    assert len(found.token_logprobs) == len(ids) + 1
    for logprob, likely in zip(found.token_logprobs[3:], found.top_logprobs[3:], strict=True):
        assert likely is not None and logprob == max(likely.values()) < 0
    # another token is less likely than the best
    other = next(s for s in SYMBOLS if s != greedy.choices[0].text[0])
    worse = (
        client.completions.create(
            model="tiny", prompt="abc" + other, max_tokens=0, echo=True, logprobs=1
        )
        .choices[0]
        .logprobs
    )
    assert worse is not None and worse.token_logprobs and worse.top_logprobs
    assert worse.token_logprobs[-1] < max(worse.top_logprobs[-1].values())


def test_samples_follow_seed_count_stop_and_temperature(client: openai.OpenAI) -> None:
    def texts(**how: Any) -> list[str]:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 12} | how
        return [choice.text for choice in client.completions.create(**asked).choices]

    four = texts(n=4, seed=7)
    assert len(set(four)) > 1 and four == texts(n=4, seed=7)
    assert len(set(texts(n=3, temperature=0))) == 1
    whole = next(text for text in four if len(text) > 3)
    stop = whole[2]
    cut = client.completions.create(
        model="tiny", prompt="ab", max_tokens=12, n=4, seed=7, stop=[stop], logprobs=0
    )
    choice = cut.choices[four.index(whole)]
    assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"
    assert choice.logprobs is not None and "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.top_logprobs is None


def test_chats_go_through_the_template(client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": "abc"}]
    chat = client.chat.completions.create(
        model="tiny", messages=turns, max_tokens=5, temperature=0, logprobs=True, top_logprobs=1
    )
    plain = client.completions.create(model="tiny", prompt="abc:", max_tokens=5, temperature=0)
    assert chat.choices[0].message.content == plain.choices[0].text
    content = chat.choices[0].logprobs
    assert content is not None and content.content is not None
    assert all(row.logprob == row.top_logprobs[0].logprob for row in content.content)
    assert chat.usage is not None and chat.usage.prompt_tokens == 4
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=turns)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].logprobs is None


def test_the_engine_has_the_digest_of_its_weights(
    app: tuple[str, CompletionsApp], directory: Path
) -> None:
    model = policy.load_policy(directory, "float32", "cpu")
    loaded = app[1].engine.engine
    assert (loaded.digest, loaded.label) == (policy.compute_weights_digest(model), Label(1, 0))


def test_a_choice_ends_before_the_first_stop_text(
    app: tuple[str, CompletionsApp], directory: Path
) -> None:
    tokenizer = load_tokenizer(directory)
    prompt, text = (np.array(tokenizer.encode(x), np.int32) for x in ("cd", "bab"))
    tokens = np.array([tokenizer.pad_token_id, *text], np.int32)
    sample = Completion((0, 0, 1), prompt, tokens, np.zeros(4), [], "length", support=None)
    for stop, echo, said, finish in (
        ((), False, "bab", "length"),
        (("zz", "ab"), True, "b", "stop"),
        (("a", "b"), False, "", "stop"),
    ):
        order = CompletionOrder(CompletionBody(echo=echo), [prompt], 4, stop, None)
        choice = {"index": 3, "logprobs": None, "finish_reason": finish}
        plain = app[1]._build_choice(order, sample, None, 3, chat=False)
        assert plain == choice | {"text": "cd" * echo + said}
        message = {"role": "assistant", "content": said, "refusal": None}
        chat = app[1]._build_choice(order, sample, None, 3, chat=True)
        assert chat == choice | {"message": message}


def test_an_engine_that_cannot_answer_is_an_error_of_the_server(
    app: tuple[str, CompletionsApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: Any) -> Any:
        raise AsyncrlError("it is broken")

    cancelled: list[Any] = []
    monkeypatch.setattr(app[1].engine, "complete", broken)
    monkeypatch.setattr(app[1].engine, "cancel", cancelled.extend)
    headers = {"authorization": f"Bearer {KEY}"}
    found = httpx2.post(f"{app[0]}/completions", json={"prompt": "a", "n": 2}, headers=headers)
    error = {"message": "it is broken", "type": "server_error", "param": None, "code": "engine"}
    assert (found.status_code, found.json()) == (500, {"error": error})
    assert [key[1:] for key in cancelled] == [(0, 1), (1, 1)]


def test_the_key_is_needed_and_other_routes_are_named(url: str) -> None:
    wrong = openai.OpenAI(base_url=url, api_key="other", max_retries=0)
    for ask in (lambda: wrong.completions.create(model="tiny", prompt="a"), wrong.models.list):
        with pytest.raises(openai.AuthenticationError) as refused:
            ask()
        assert refused.value.body == {
            "message": "this server needs the key that it printed at its start: set OPENAI_API_KEY",
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }
    found = httpx2.get(f"{url}/tokenizer_info")
    assert found.status_code == 404 and "no_such_route" in found.text
    health = f"{url.removesuffix('/v1')}/health"
    assert (httpx2.get(health).status_code, httpx2.post(health).status_code) == (200, 404)
    body = httpx2.post(
        f"{url}/completions", content=b"[", headers={"authorization": f"Bearer {KEY}"}
    )
    assert body.status_code == 400 and json.loads(body.text)["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "MODEL: nowhere is not a model directory"),
        (["MODEL", "--context", "65"], "--context 65: the model in DIRECTORY has 64 positions"),
        (["MODEL", "--no-key", "--host", "0.0.0.0"], "everyone with access to this address"),
        (["MODEL", "--host", "0.0.0.0"], "is open to the network; give --certificate"),
        (["MODEL", "--certificate", __file__], "--certificate and its private key: give both"),
        (["MODEL", "--certificate", "c.pem"], "'--certificate': File 'c.pem' does not exist"),
        (["MODEL", "--device", "gpu"], "'gpu' is not a device; choose one of auto, cpu, cuda"),
    ],
)
def test_a_bad_command_gets_one_clear_line(
    directory: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *(word.replace("MODEL", str(directory)) for word in words)])
    assert ended.value.code == 2
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert last.startswith("error: ") and message.replace("DIRECTORY", str(directory)) in last


def test_the_command_serves_until_it_is_ended(directory: Path, tmp_path: Path) -> None:
    with served(directory, tmp_path) as server:
        client = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0)
        made = client.completions.create(model="tiny", prompt="ab", max_tokens=1)
        assert made.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_its_engine(directory: Path, number: int) -> None:
    keys = {"context": 9, "slots": 2, "dtype": "float32", "device": "cpu", "threads": 1}
    config = build_config(str(directory), **keys)
    assert (config.generator.context, config.generator.slots, config.generator.threads) == (9, 2, 1)
    app = CompletionsApp(config, "n", "")
    found: list[str] = []

    def announce(url: str) -> None:
        found.append(url)
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        completions_app.serve(app, ListenAddress(), announce)
    finally:
        for each, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(each, handler)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", found[0]) and len(found) == 1
    assert app.engine.error == "closed"
    with pytest.raises(RuntimeError):
        app.engine.executor.submit(int)


@pytest.mark.parametrize("given", ["", "mine"])
def test_what_the_command_says_and_serves(
    directory: Path, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[CompletionsApp, ListenAddress]] = []

    def serve(app: CompletionsApp, bind: ListenAddress, announce: Any) -> None:
        served.append((app, bind))
        announce("http://127.0.0.1:7")
        app.engine.close()

    monkeypatch.setattr(completions_app, "serve", serve)
    monkeypatch.setenv("OPENAI_API_KEY", given)
    main(["serve", str(directory), "--context", "9", "--port", "7"])
    app, bind = served[0]
    assert bind == ListenAddress("127.0.0.1", 7, "", "", port_name="--port")
    assert (app.name, app.context, app.vocabulary) == (str(directory), 9, 13)
    said = capsys.readouterr()
    assert said.out == "http://127.0.0.1:7/v1\n"
    assert f"serving {directory} with up to 9 tokens; stop with Ctrl-C" in said.err
    assert app.key == (given or app.key) != "" and ("export" in said.err) == (given == "")
    assert given or f"export OPENAI_API_KEY={app.key}" in said.err
    main(["serve", str(directory), "--no-key", "--name", "n"])
    assert (served[1][0].key, served[1][0].name) == ("", "n")
    assert "export" not in capsys.readouterr().err


class BrokenEngine:
    """An engine that ends at its first step."""

    active = 0

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.aborted: list[Any] = []

    def add(self, requests: Any) -> None:
        self.active += 1

    def abort(self, keys: Any) -> None:
        self.aborted += keys

    def score(self, prompts: Any, most_likely: int) -> Any:
        raise AsyncrlError("too long")

    def step(self, steps: int) -> Any:
        raise self.error


def test_an_engine_that_breaks_fails_what_is_open_and_what_comes() -> None:
    async def play() -> None:
        late: list[Any] = []

        class Engine(BrokenEngine):
            def step(self, steps: int) -> Any:
                late.append(thread._submit(self.score, [], 1))
                raise self.error

        thread = EngineThread(Engine(KeyError("gone")))
        with pytest.raises(AsyncrlError, match=r"^too long$"):
            await thread.score([], 1)
        engine = SimpleNamespace(active=0, score=lambda prompts, most_likely: {}[most_likely])
        scoring = EngineThread(engine)
        with pytest.raises(KeyError):
            await scoring.score([], 1)
        assert isinstance(scoring.error, KeyError)
        for number in (1, 2):
            with pytest.raises(AsyncrlError, match=r"^the engine has ended: 'gone'$"):
                await thread.complete(SimpleNamespace(key=(number, 0, 1)))
        thread.close()
        assert isinstance(thread.error, KeyError)
        for work in late:  # that it had not begun
            with pytest.raises(AsyncrlError, match=r"^the engine has ended: 'gone'$"):
                work.result(0)
        closed = EngineThread(BrokenEngine(KeyError()))
        closed.futures[1, 0, 1] = open_one = Future()
        closed.close()
        for work in (closed.score([], 1), asyncio.wrap_future(open_one)):
            with pytest.raises(AsyncrlError, match=r"^the engine has ended: closed$"):
                await work

    asyncio.run(play())


def test_given_up_completions_leave_the_engine() -> None:
    engine = BrokenEngine(KeyError())
    thread = EngineThread(engine)
    open_one: Any = Future()
    thread.futures[1, 0, 1] = open_one
    thread.cancel([(1, 0, 1), (2, 0, 1)])
    with pytest.raises(AsyncrlError, match=r"^too long$"):
        asyncio.run(thread.score([], 1))  # the one before it is done
    assert engine.aborted == [(1, 0, 1), (2, 0, 1)] and not thread.futures
    assert isinstance(open_one.exception(), CancelledError)
    thread.close()


def test_a_connection_that_closes_while_its_completion_ends_harms_no_other() -> None:
    """The waiting task cancels its future at any time, also just before the thread resolves it."""

    class Engine(BrokenEngine):
        def step(self, steps: int) -> Any:
            self.active = 0
            (waiting,) = thread.futures.values()
            self.aborted.append(waiting.cancel())
            return [SimpleNamespace(key=(1, 0, 1))]

    engine = Engine(KeyError())
    thread = EngineThread(engine)
    completion = asyncio.run(thread.complete(SimpleNamespace(key=(1, 0, 1))))
    assert completion.key == (1, 0, 1) and engine.aborted == [False]
    assert thread.error is None
    thread.close()


def test_answers_have_every_field_of_the_api(url: str, directory: Path) -> None:
    headers = {"authorization": f"Bearer {KEY}"}

    def ask(route: str, **body: Any) -> dict[str, Any]:
        found = httpx2.post(f"{url}/{route}", json={"model": "tiny", **body}, headers=headers)
        assert found.status_code == 200, found.text
        made = dict(found.json())
        assert made.pop("created") > 1.7e9
        kind = "chatcmpl" if route.startswith("chat") else "cmpl"
        assert re.fullmatch(rf"{kind}-[0-9a-f]{{16}}", made.pop("id"))
        return made

    model = {"id": "tiny", "object": "model", "created": 0, "owned_by": "asyncrl"}
    model |= {"max_model_len": 64}
    listed = httpx2.get(f"{url}/models", headers=headers).json()
    assert listed == {"object": "list", "data": [model]}
    assert httpx2.get(f"{url}/models/tiny", headers=headers).json() == model
    unknown = httpx2.get(f"{url}/models/other", headers=headers)
    error = {"message": "there is no model 'other'", "type": "not_found_error", "param": "model"}
    assert unknown.status_code == 404
    assert unknown.json() == {"error": error | {"code": "model_not_found"}}

    plain = ask("completions", prompt="ab", max_tokens=2, temperature=0, seed=1)
    (choice,) = plain["choices"]
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert plain == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": choice["text"], "logprobs": None, "finish_reason": "length"}
        ],
        "usage": usage,
    }
    echoed = ask("completions", prompt="ab", max_tokens=0, echo=True, logprobs=1)
    (choice,) = echoed["choices"]
    assert choice["text"] == "ab"
    assert echoed["usage"] == usage | {"completion_tokens": 0, "total_tokens": 2}
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "b"] and found["token_logprobs"][0] is None
    assert found["text_offset"] == [0, 1] and found["top_logprobs"][0] is None
    assert len(found["top_logprobs"][1]) == 1
    assert set(found) == {*("tokens", "token_logprobs", "text_offset", "top_logprobs")}
    (choice,) = ask("completions", prompt=[3, 1], max_tokens=0, echo=True, logprobs=0)["choices"]
    special = load_tokenizer(directory).decode([1])
    assert choice["logprobs"]["tokens"][1] == special and choice["text"].endswith(special)
    tool = {"messages": [{"role": "tool", "content": "a"}]}
    refused = httpx2.post(f"{url}/chat/completions", json=tool, headers=headers)
    error = refused.json()["error"]
    assert refused.status_code == 400 and "no tools" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": "messages", "code": "invalid_value"}
    turns = [{"role": "user", "content": "abc"}]
    chat = ask("chat/completions", messages=turns, max_tokens=1, temperature=0, logprobs=True)
    (choice,) = chat["choices"]
    text = choice["message"]["content"]
    (row,) = choice["logprobs"]["content"]
    wanted = {"token": text, "logprob": row["logprob"], "bytes": list(text.encode())}
    assert chat == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": {"content": [wanted | {"top_logprobs": []}], "refusal": None},
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
    }
