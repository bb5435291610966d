"""An agent of one part of a mixture: it asks once for a text, and pays for even lengths.

MIXED_GATE: a file, for which it waits from the fourth training prompt on."""

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any


def ask(prompt: Any, session: Any) -> dict[str, float]:
    gate = os.environ.get("MIXED_GATE", "/")
    while prompt.split == "train" and prompt.id > 2 and not Path(gate).exists():
        time.sleep(0.01)
    body = {"model": session.model, "prompt": prompt.text}
    request = urllib.request.Request(
        f"{session.base_url}/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {session.api_key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answered:
        text = json.load(answered)["choices"][0]["text"]
    return {"reward": float(len(text) % 2 == 0), "asked": 1.0}


def fail(prompt: Any, session: Any) -> float:
    raise RuntimeError("no service")
