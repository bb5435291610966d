from typing import Any

from openai import OpenAI
from vision_kit import picture

from asyncrl.contract.blobs.images import to_data_url


def look_twice(prompt: Any, session: Any) -> float:
    """Ask about the sample's own picture, then about another one."""
    policy = OpenAI(base_url=session.base_url, api_key=session.api_key, timeout=600.0)
    history: list[Any] = []
    for url in (prompt.image_urls[0], to_data_url(picture(7))):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "r="}]
        history.append({"role": "user", "content": parts})
        answer = policy.chat.completions.create(model="policy", messages=history)
        history.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    return float(len(history[-1]["content"]) % 2)
