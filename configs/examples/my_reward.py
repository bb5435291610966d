"""A reward function of one's own: `reward.function = "{here}/examples/my_reward.py:reward"` in
configs/file_example.toml, where `{here}` is the config's folder.

It runs in processes of its own under `reward.deadline_s`; what raises, hangs or returns no finite
number is a failed sample. It may be `async def` too (calls are awaited together, up to
`reward.concurrency`), or take lists, as `rewards` below does."""

from __future__ import annotations

from asyncrl.contract.messages import Prompt


def reward(prompt: Prompt, text: str) -> dict[str, float]:
    """1 for the sorted digits after the last `#`, and a little for each digit in its place;
    `reward` is what is trained on.

    prompt.text, prompt.answer and prompt.meta (the file's other columns, as text) say what was
    asked; text is the answer without its end token."""
    result = text.rpartition("#")[2] if "#" in text else ""
    exact = float(result == prompt.answer)
    placed = sum(a == b for a, b in zip(result, prompt.answer, strict=False)) / len(prompt.answer)
    return {"reward": 0.8 * exact + 0.2 * placed, "exact": exact, "placed": placed}


def rewards(prompts: list[Prompt], texts: list[str]) -> list[dict[str, float]]:
    """The same for up to `reward.batch` answers at once, as a model that judges would have them:
    one reward for each, in their order.
    """
    return [reward(p, t) for p, t in zip(prompts, texts, strict=True)]


rewards.batched = True  # type: ignore[attr-defined]
