"""A reward that an untrained model earns some of: the share of distinct characters.  Used as
reward.function by real runs."""

from typing import Any

from asyncrl.contract.messages import Prompt


def reward(prompt: Prompt, text: str) -> float:
    return len(set(text)) / 12 + 0.1 * text.count(prompt.text[:1])


def digit(prompt: Prompt, text: str, tokens: list[int]) -> dict[str, Any]:
    """The parity of the first token; a random model writes both."""
    return {"reward": 0.0, "token_rewards": [float(tokens[0] % 2), *[None] * (len(tokens) - 1)]}
