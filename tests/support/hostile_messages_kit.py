from typing import Any

import numpy as np

from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from buffer.service import BufferService


def honest_hello(run: str, **more: Any) -> m.LearnerHello:
    fields = {"epoch": 1, "label": Label(1, 0), "parent": None, "digest": "d", "next_ticket": 0}
    fields |= {"source": m.WeightsSource(1, "here", "", ""), "ring": [], "origin": 0}
    return m.LearnerHello(**{"protocol": m.PROTOCOL, "run": run, "max_lag": 1.0} | fields | more)


def greet(run: str, producer: str, session: int) -> m.GeneratorHello:
    return m.GeneratorHello(m.PROTOCOL, run, producer, session, slots=8, host="here", pid=0)


def greeting(service: BufferService) -> m.GeneratorHello:
    return greet(service.run, "generator-0", 7)


NUMBERS = {"half": -0.5, "up": 0.5, "nan": np.nan, "inf": np.inf, "-inf": -np.inf, "low": -1e9}
F4 = {name: np.float32(x).tobytes() for name, x in NUMBERS.items()}


GOOD = {
    "prompt_tokens": b"\3\0\0\0",
    "tokens": b"\0\0\0\0\4\0\0\0",
    "behavior_logprobs": F4["half"] * 2,
    "mask": b"\1\1",
    "spans": [
        m.VersionSpan(Label(1, 0), "", 0, 1, Label(1, 0)),
        m.VersionSpan(Label(1, 0), "", 1, 2, Label(1, 0)),
    ],
    "token_rewards": F4["up"] * 2,
}
