"""What an answer is worth: `reward.function` of config.toml.

Called in processes of its own, under `reward.deadline_s`.  A call that raises, hangs or returns no
finite number is a failed sample: written again, never trained on as 0.
"""

from asyncrl.contract.messages import Prompt


def reward(prompt: Prompt, text: str) -> float:
    """1 for the right number, else 0.

    prompt.text and prompt.answer are the columns of prompts.jsonl, prompt.meta[...] any other (as
    text); `text` is what the model wrote."""
    return float(text.strip() == prompt.answer)


# Several parts: return {"reward": ..., "short": ...}; `reward` is trained on, the others are
# plotted.
#
# It waits for something, as a server's answer: up to `reward.concurrency` calls are awaited
# together in a process.  reward.function = "{here}/reward.py:waiting"
#
# import asyncio
#
#
# async def waiting(prompt: Prompt, text: str) -> float:
#     await asyncio.sleep(0.01)
#     return reward(prompt, text)
#
#
# It judges many answers at once, as a model does: lists of up to `reward.batch`.
# reward.function = "{here}/reward.py:together"
#
# def together(prompts: list[Prompt], texts: list[str]) -> list[float]:
#     return [reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
#
#
# together.batched = True
