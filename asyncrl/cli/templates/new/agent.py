"""An agent and what it earns: `agent.function` of config.toml.

Called once for each sample, in a process of the run.  It asks the model by OpenAI's client, and any
other client of OpenAI's or Anthropic's API works as well.  An agent that raises is a failed sample:
played again, never trained on as 0.
"""

from typing import Any

from openai import AsyncOpenAI

from asyncrl.contract.messages import Prompt


async def play(prompt: Prompt, session: Any) -> float:
    """1 for the right number, half of it for one at the second try, else 0.

    prompt.text and prompt.answer are the columns of prompts.jsonl, prompt.meta[...] any other (as
    text); session.base_url, session.api_key and session.model lead to the model in training."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for reward in (1.0, 0.5):
            reply = await client.completions.create(model=session.model, prompt=prompt.text)
            if reply.choices[0].text.strip() == prompt.answer:
                return reward
    return 0.0


# With a model that has a chat template, and tools, memory or a framework around it:
#
#     messages = [{"role": "user", "content": prompt.text}]
#     reply = await client.chat.completions.create(model=session.model, messages=messages)
#     text = reply.choices[0].message.content
