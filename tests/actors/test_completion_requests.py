"""Bodies of the model server's requests: what they ask for, and what each refusal says."""

import json
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.completions_app import CompletionOrder, parse_order
from actors.gateway.refusals import CallRefused
from asyncrl.contract.messages import Prompt

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
    found = order(
        prompt="ab",
        max_completion_tokens=3,
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=4,
        n=2,
        seed=7,
        stop=["x", "yz"],
        echo=True,
        logprobs=2,
        **dict.fromkeys(("user", "store", "metadata", "stream_options", "best_of"), 1),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0),
        stream=False,
        repetition_penalty=1,
        logit_bias={},
        tools=[],
        response_format={"type": "text"},
        suffix=None,
    )
    assert fields(found) == {
        "prompts": [[47, 48]],
        "max_new_tokens": 3,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "count": 2,
        "seed": 7,
        "stop": ("x", "yz"),
        "echo": True,
        "most_likely": 2,
    }
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
