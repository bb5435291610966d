"""`asyncrl serve` with OpenAI's client: completions, log-probabilities of prompts, refusals."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
from model_server_kit import KEY, ModelServer, served

from actors.model_server.model_server import MOST_CONTEXT, config_of
from asyncrl.cli import main
from asyncrl.contract.errors import ConfigError
from asyncrl.models import policy
from asyncrl.models.tokenizer import load_tokenizer

SYMBOLS = "abcdefgh"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template and 64 positions."""
    path = tmp_path_factory.mktemp("model")
    policy.build_model(path, SYMBOLS + ":\n", max_positions=64, seed=3)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}:{% endfor %}"
    )
    return path


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with served(directory, tmp_path_factory.mktemp("log")) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: ModelServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0)


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
        made = config_of(str(path), context=asked, threads=0, **keys)
        assert (made.generator.context, made.generator.slots) == (context, 3)
        assert made.generator.threads == len(os.sched_getaffinity(0))
        assert (made.model.dtype, made.model.device) == ("float32", "cpu")
    assert config_of(str(path), context=8, threads=2, **keys).generator.threads == 2
    with pytest.raises(ConfigError, match="has 4097 positions"):
        config_of(str(path), context=MOST_CONTEXT + 2, threads=1, **keys)


def test_a_prompt_is_scored_with_its_most_likely_tokens(
    client: openai.OpenAI, directory: Path
) -> None:
    tokenizer = load_tokenizer(directory)
    texts = ["abcd", "hgfea"]
    done = client.completions.create(
        model="tiny", prompt=texts, max_tokens=0, echo=True, logprobs=2
    )
    assert [choice.index for choice in done.choices] == [0, 1]
    assert done.usage is not None
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
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").to_dict()["max_model_len"] == 64


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": ""}, 400, "prompt: is empty"),
        ({"prompt": "a" * 60, "max_tokens": 5}, 400, "60 tokens and max_tokens is 5.*context = 64"),
        ({"prompt": [1, 99]}, 400, r"prompt: give token ids in \[0, 13\)"),
        ({"prompt": ["a", 3]}, 400, "prompt: give text or a list of token ids"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens: 0 needs echo = true and logprobs"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens: Expected `int` >= 0"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs: Expected `int` <= 20"),
        ({"prompt": "a", "logprobs": 14}, 400, "logprobs: 14: the model has 13 tokens"),
        ({"prompt": "a", "top_logprobs": 1}, 400, "top_logprobs: belongs to /v1/chat/completions"),
        ({"prompt": "a", "logit_bias": {"1": 3}}, 400, "logit_bias: {'1': 3} is not served"),
        ({"prompt": "a", "stream": True}, 400, "stream: True is not served; leave it out"),
        ({"prompt": ["a"] * 100, "n": 11}, 400, "n: asks for more than 1024 completions"),
        ({"prompt": "a", "model": "gpt"}, 404, "no model 'gpt': this server has 'tiny'"),
        ({"messages": "a"}, 400, "messages: give a list"),
        ({"messages": [{"role": "user", "content": "a"}], "echo": True}, 400, "echo: belongs to"),
        (
            {"messages": [{"role": "user", "content": "a"}], "logprobs": 3},
            400,
            "give true or false",
        ),
    ],
)
def test_a_bad_request_gets_one_clear_line(
    server: ModelServer, body: dict[str, Any], status: int, message: str
) -> None:
    route = "chat/completions" if "messages" in body else "completions"
    found = httpx2.post(
        f"{server.url}/{route}", json=body, headers={"authorization": f"Bearer {KEY}"}
    )
    assert found.status_code == status, found.text
    error = found.json()["error"]["message"]
    assert "\n" not in error
    assert re.search(message, error), error


def test_the_key_is_needed_and_other_routes_are_named(server: ModelServer) -> None:
    wrong = openai.OpenAI(base_url=server.url, api_key="other", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="the key that it printed"):
        wrong.completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    found = httpx2.get(f"{server.url}/tokenizer_info")
    assert found.status_code == 404 and "no_such_route" in found.text
    assert httpx2.get(f"{server.url.removesuffix('/v1')}/health").status_code == 200
    body = httpx2.post(
        f"{server.url}/completions", content=b"[", headers={"authorization": f"Bearer {KEY}"}
    )
    assert body.status_code == 400 and json.loads(body.text)["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "MODEL: nowhere is not a model directory"),
        (["MODEL", "--context", "65"], "--context 65: the model in DIRECTORY has 64 positions"),
        (["MODEL", "--no-key", "--host", "0.0.0.0"], "everyone who reaches this address"),
        (["MODEL", "--host", "0.0.0.0"], "is open to the network; give --certificate"),
        (["MODEL", "--certificate", "c.pem"], "--certificate and --private-key: give both"),
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
