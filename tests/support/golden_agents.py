"""One agent in several spellings, for the golden test: three turns, each answered by its length;
the length of all is the reward."""

import functools
import json
import urllib.request
from pathlib import Path
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from asyncrl.models.tokenizer import load_tokenizer

TURNS = 3


class Lengths:
    """As an environment."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.turns = self.drawn = 0
        return options["prompt"].text, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        self.drawn += len(text)
        ended = self.turns == TURNS
        return f"{len(text)}=", float(self.drawn) if ended else 0.0, ended, False, {}


@functools.cache
def connections() -> DefaultHttpxClient:
    return DefaultHttpxClient(timeout=600)


def by_client(prompt: Any, session: Any) -> float:
    """With OpenAI's client, by text."""
    policy = OpenAI(base_url=session.base_url, api_key=session.api_key, http_client=connections())
    text, drawn = prompt.text, 0
    for _ in range(TURNS):
        said = policy.completions.create(model="policy", prompt=text).choices[0].text
        drawn += len(said)
        text += said + f"{len(said)}="
    return drawn


@functools.cache
def tokenizer() -> Any:
    return load_tokenizer(str(Path("m")))


def by_ids(prompt: Any, session: Any) -> float:
    """By the token route: the drawn ids go back as they came."""
    encode = functools.partial(tokenizer().encode, add_special_tokens=False)
    ids, drawn = encode(prompt.text), 0
    for _ in range(TURNS):
        body = {"model": "policy", "token_ids": ids, "sampling_params": {}}
        request = urllib.request.Request(
            f"{session.url}/inference/v1/generate",
            json.dumps(body).encode(),
            {"authorization": f"Bearer {session.api_key}"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            got = json.load(answer)["choices"][0]["token_ids"]
        ended = got[-1:] == [tokenizer().eos_token_id]
        said = tokenizer().decode(got[:-1] if ended else got)
        drawn += len(said)
        ids = ids + got + encode(f"{len(said)}=")
    return drawn


def by_both(prompt: Any, session: Any) -> float:
    """Samples in turns by one and the other."""
    return (by_ids if int(session.name.split(".")[1]) % 2 else by_client)(prompt, session)
