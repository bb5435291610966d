"""A reward of an evaluation set: in quarters, by the length of the text."""

from __future__ import annotations

from asyncrl.contract.messages import Prompt


def reward(prompt: Prompt, text: str) -> float:
    assert prompt.split == "hard"
    return (len(text) % 5) / 4
