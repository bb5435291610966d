"""The methods of `asyncrl.config.methods` as arms of `compare` and `sweep`.

`CORRECTIONS` maps each name to its summary and its `--set` items.
"""

from __future__ import annotations

from asyncrl.config.methods import METHODS

CORRECTIONS: dict[str, tuple[str, list[str]]] = {
    **{name: (method.summary, [f"method={name}"]) for name, method in METHODS.items()},
    "configured": ("as the config says", []),
}
