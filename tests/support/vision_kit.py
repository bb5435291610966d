from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.contract.blobs import images
from asyncrl.models.policy import build_llava
from asyncrl.tasks.pictures import count

TEMPLATES = {  # of strings, and of parts as LLaVA's own
    "text": "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:",
    "parts": (
        "{% for m in messages %}{{ m.role }}:{% for c in m.content if c.type == 'image' %}<image>"
        "{% endfor %}{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %};"
        "{% endfor %}assistant:"
    ),
}
LETTERS = "rgb=0123456789 :;?acdehiklmnopstuvwxy"


def seeing_model(path: Path, *, template: str = "", **more: Any) -> Path:
    """Build the model of the task `count` in `path`, smaller and with random weights."""
    build_llava(path, LETTERS, **{"side": count.SIDE, "patch": count.CELL, "hidden": 32} | more)
    if template:
        (path / "chat_template.jinja").write_text(TEMPLATES[template])
    return path


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("llava") / "model", layers=1, seed=3)


def picture(seed: int, side: int = count.SIDE) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, 3 * side * side).astype(np.uint8)
    return images.encode_png(side, side, pixels.tobytes())
