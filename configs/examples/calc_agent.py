"""An agent that the run calls for each session: sums with a calculator, by OpenAI's client.

    asyncrl run configs/calc_http.toml
    asyncrl run configs/calc_form.toml

`agent.function` names `play` or `play_in_form`; it gets the prompt and its session's address and
key, and returns the reward."""

from __future__ import annotations

import functools
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from asyncrl.contract.messages import Prompt
from asyncrl.tasks.calc import TURNS, calculate

TIMEOUT_S = 600.0  # a call waits for weights, swaps and restarts
# each answer is a call of the calculator or a result; needs agent.forced = "constrain"
FORM = {"structured_outputs": {"regex": r"\?\d{1,4}[*+-]\d{1,4}|#\d{1,4}"}}


def played(policy: OpenAI, text: str, answer: str, form: dict[str, Any] | None = None) -> float:
    """One session from what is asked: the reward."""
    for _ in range(TURNS):
        reply = policy.completions.create(model="policy", prompt=text, extra_body=form)
        said = reply.choices[0].text
        if said.startswith("#"):
            return float(said == answer)
        text += said + calculate(said)
    return 0.0


@functools.cache
def connections() -> DefaultHttpxClient:
    """Shared by all sessions of a process: to make them costs more than a session."""
    return DefaultHttpxClient(timeout=TIMEOUT_S)


def play(prompt: Prompt, session: Any) -> float:
    """A session.  session: `base_url` and `api_key` are its own."""
    policy = OpenAI(base_url=session.base_url, api_key=session.api_key, http_client=connections())
    return played(policy, prompt.text, prompt.answer)


def play_in_form(prompt: Prompt, session: Any) -> float:
    """A session whose answers all have the form FORM."""
    policy = OpenAI(base_url=session.base_url, api_key=session.api_key, http_client=connections())
    return played(policy, prompt.text, prompt.answer, FORM)
