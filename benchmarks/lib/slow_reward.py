"""The `sort` task's reward by way of a subprocess that takes 0.2 s or more, with a long tail
(Pareto, exponent 2.5, at most 4 s).
"""

from __future__ import annotations

import random
import subprocess
import time

import xxhash

from asyncrl.config.tree import TaskConfig
from asyncrl.contract.messages import Prompt
from asyncrl.tasks import get_task

LEAST_S = 0.2
EXPONENT = 2.5
MOST_S = 4.0
TASK = get_task(TaskConfig(name="sort"))


def reward(prompt: Prompt, text: str) -> float:
    """The same answer takes the same time."""
    u = (xxhash.xxh3_64_intdigest(f"{prompt.id} {text}".encode()) + 1) / 2**64
    subprocess.run(["sleep", f"{min(MOST_S, LEAST_S * u ** (-1 / EXPONENT)):.3f}"], check=True)
    return _value(prompt, text)


def waiting(prompt: Prompt, text: str) -> float:
    """As for a judge elsewhere: it takes time and no core, each call its own."""
    time.sleep(min(MOST_S, LEAST_S * (1 - random.random()) ** (-1 / EXPONENT)))
    return _value(prompt, text)


def _value(prompt: Prompt, text: str) -> float:
    value = TASK.reward(prompt, text)
    return float(value["reward"] if isinstance(value, dict) else value)
