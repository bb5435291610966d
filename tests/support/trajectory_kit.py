from typing import Any

import numpy as np

from asyncrl.contract.messages import Trajectory


def trajectory(
    key: tuple[int, int, int], prompt: Any = (), tokens: Any = (), logprobs: Any = (), **fields: Any
) -> Trajectory:
    """key: ticket, sample, attempt.  Unless `fields` say otherwise, every token is trained on."""
    given = {"mask": b"\1" * len(tokens), "spans": [], "reward": 0.0, "reward_parts": {}}
    given |= {"finish": "stop", "temperature": 1.0} | fields
    ids = (np.asarray(each, "<i4").tobytes() for each in (prompt, tokens))
    return Trajectory(*key, *ids, np.asarray(logprobs, "<f4").tobytes(), **given)
