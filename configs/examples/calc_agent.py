"""An agent that the run calls for each session: sums with a calculator, by OpenAI's client.

    asyncrl run configs/calc_http.toml

`agent.function` names `play`; it gets the prompt and its session's address and key, and returns the
reward."""

from __future__ import annotations

import functools
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from asyncrl.contract.messages import Prompt
from asyncrl.tasks.calc import TURNS, calculated

TIMEOUT_S = 600.0  # a call waits for weights, swaps and restarts


def played(policy: OpenAI, text: str, answer: str) -> float:
    """One session from what is asked: the reward."""
    for _ in range(TURNS):
        said = policy.completions.create(model="policy", prompt=text).choices[0].text
        if said.startswith("#"):
            return float(said == answer)
        text += said + calculated(said)
    return 0.0


@functools.cache
def connections() -> DefaultHttpxClient:
    """Shared by all sessions of a process: to make them costs more than a session."""
    return DefaultHttpxClient(timeout=TIMEOUT_S)


def play(prompt: Prompt, session: Any) -> float:
    """A session.  session: `base_url` and `api_key` are its own."""
    policy = OpenAI(base_url=session.base_url, api_key=session.api_key, http_client=connections())
    return played(policy, prompt.text, prompt.answer)
