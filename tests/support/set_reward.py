from asyncrl.contract.messages import Prompt


def reward(prompt: Prompt, text: str) -> float:
    assert prompt.split == "hard"
    return (len(text) % 5) / 4
