"""A reward that an untrained model earns some of: the share of distinct characters.  Used as
reward.function by real runs.
"""

from __future__ import annotations

from asyncrl.contract.messages import Prompt


def reward(prompt: Prompt, text: str) -> float:
    return len(set(text)) / 12 + 0.1 * text.count(prompt.text[:1])
