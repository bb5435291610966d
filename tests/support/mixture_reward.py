from asyncrl.contract.messages import Prompt


def reward(prompt: Prompt, text: str) -> dict[str, float]:
    assert prompt.task == "mine" and prompt.meta["level"] == "3", prompt
    return {"reward": 0.25 + 0.5 * (len(text) % 2), "length": float(len(text))}
