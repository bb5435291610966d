"""The reward function, `reward.function` in config.toml.

It runs in separate processes, under `reward.deadline_s`.  If a call raises, hangs or returns no
finite number, the sample has failed: it is generated again and never counts as 0.
"""

from asyncrl.contract.messages import Prompt


def reward(prompt: Prompt, text: str) -> float:
    """Return 1 for the right number, else 0.

    prompt.text and prompt.answer are columns of prompts.jsonl, prompt.meta[...] the others as text;
    `text` is the completion."""
    return float(text.strip() == prompt.answer)


# Several parts: return {"reward": ..., "short": ...}; `reward` is trained on, the others are
# plotted.
#
# If it waits, for example for a server, each process awaits up to `reward.concurrency` calls at the
# same time.  reward.function = "{here}/reward.py:waiting"
#
# import asyncio
#
#
# async def waiting(prompt: Prompt, text: str) -> float:
#     await asyncio.sleep(0.01)
#     return reward(prompt, text)
#
#
# If it judges many completions at once, as a model does, it takes lists of up to `reward.batch`.
# reward.function = "{here}/reward.py:together"
#
# def together(prompts: list[Prompt], texts: list[str]) -> list[float]:
#     return [reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
#
#
# together.batched = True
