"""An agent and its reward: `agent.function` of config.toml.

It is called once for each sample, in a process of the run.  It calls the model with OpenAI's
client; other clients of OpenAI's or Anthropic's API work as well.  If it raises, the sample has
failed: it is played again and never counts as 0.
"""

from typing import Any

from openai import AsyncOpenAI

from asyncrl.contract.messages import Prompt

client = AsyncOpenAI(base_url="http://session", api_key="session")  # one for each session is slow


async def play(prompt: Prompt, session: Any) -> float:
    """Return 1 for the right number, 0.5 for the right one at the second try, else 0.

    prompt.text and prompt.answer are columns of prompts.jsonl, prompt.meta[...] the others as text;
    session.base_url, session.api_key and session.model lead to the model in training."""
    policy = client.with_options(base_url=session.base_url, api_key=session.api_key)
    for reward in (1.0, 0.5):
        reply = await policy.completions.create(model=session.model, prompt=prompt.text)
        if reply.choices[0].text.strip() == prompt.answer:
            return reward
    return 0.0


# With a model that has a chat template, and tools, memory or a framework around it:
#
#     messages = [{"role": "user", "content": prompt.text}]
#     reply = await policy.chat.completions.create(model=session.model, messages=messages)
#     text = reply.choices[0].message.content
