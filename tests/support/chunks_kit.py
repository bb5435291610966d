from __future__ import annotations

import time
from typing import Any

WAIT_S = 600.0


def until(done: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
