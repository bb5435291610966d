"""Agents that demand a form of their answers, for runs under agent.forced = "constrain"; imported
by the clients' environment, which has no asyncrl."""

from typing import Any

from openai import OpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

TIMEOUT_S = 600.0


class Answer(BaseModel):
    value: int = Field(ge=0, le=9)


def by_openai(prompt: Any, session: Any) -> float:
    """With OpenAI's client: the schema as response_format."""
    policy = OpenAI(base_url=session.base_url, api_key=session.api_key, timeout=TIMEOUT_S)
    messages = [{"role": "user", "content": prompt.text}]
    said = policy.chat.completions.parse(model="policy", messages=messages, response_format=Answer)
    parsed = said.choices[0].message.parsed
    assert parsed is not None
    return parsed.value / 9


def by_pydantic_ai(prompt: Any, session: Any) -> float:
    """With pydantic-ai: the output type is a tool, which is required.  It may not ask again."""
    policy = OpenAI(base_url=session.base_url, api_key=session.api_key)
    provider = OpenAIProvider(base_url=str(policy.base_url), api_key=session.api_key)
    agent = Agent(
        OpenAIChatModel("policy", provider=provider),
        output_type=Answer,
        retries=0,
        model_settings={"parallel_tool_calls": False},
    )
    answer: Answer = agent.run_sync(prompt.text).output
    return answer.value / 9


def by_both(prompt: Any, session: Any) -> float:
    """Samples in turns by one and the other."""
    return (by_pydantic_ai if int(session.name.split(".")[1]) % 2 else by_openai)(prompt, session)
