"""The `sort` task's reward as a custom function: for one sample, for lists, and as a coroutine.

It measures the transport to reward processes and back.
"""

from __future__ import annotations

from typing import Any

from asyncrl.config.tree import TaskConfig
from asyncrl.contract.messages import Prompt
from asyncrl.tasks import get_task

TASK = get_task(TaskConfig(name="sort"))


def reward(prompt: Prompt, text: str) -> Any:
    return TASK.reward(prompt, text)


def lists(prompts: list[Prompt], texts: list[str]) -> list[Any]:
    return [TASK.reward(p, t) for p, t in zip(prompts, texts, strict=True)]


lists.batched = True  # type: ignore[attr-defined]


async def coroutine(prompt: Prompt, text: str) -> Any:
    return TASK.reward(prompt, text)
