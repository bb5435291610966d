from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from buffer.service import BufferService


def honest_hello(run: str, **more: Any) -> m.LearnerHello:
    return m.LearnerHello(
        protocol=m.PROTOCOL,
        run=run,
        epoch=1,
        label=Label(1, 0),
        parent=None,
        digest="d",
        next_ticket=0,
        origin=0,
        max_lag=1.0,
        source=m.WeightsSource(1, "here", "", ""),
        ring=[],
        **more,
    )


def greeting(service: BufferService) -> m.GeneratorHello:
    return m.GeneratorHello(
        protocol=m.PROTOCOL,
        run=service.run,
        producer="generator-0",
        session=7,
        slots=8,
        host="",
        pid=0,
    )


F4 = {name: np.float32(x).tobytes() for name, x in {"half": -0.5, "up": 0.5, "nan": np.nan}.items()}


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
