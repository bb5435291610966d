"""Choose the task of a mixture's next group: deterministic, and exact in every prefix."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config.tree import MixedTaskConfig, interpolate_weight


def compute_weights(parts: Mapping[str, MixedTaskConfig], batch: float) -> dict[str, float]:
    """Return the nonzero weights of the parts at a batch."""
    weights = {name: interpolate_weight(part.weight, batch) for name, part in parts.items()}
    return {name: weight for name, weight in weights.items() if weight > 0}


def choose_task(credit: dict[str, float], weights: Mapping[str, float]) -> str:
    """Choose the next task and update `credit`, the groups that each task is short of.

    This is smooth weighted round robin: every call adds its share to each task's credit, and the
    task with the most credit is chosen and charged one group. Each prefix has the shares of the
    weights, to within about one group per task.

    >>> credit = {}
    >>> "".join(choose_task(credit, {"a": 2.0, "b": 1.0}) for _ in range(9))
    'abaabaaba'
    """
    total = sum(weights.values())
    for name, weight in weights.items():
        credit[name] = credit.get(name, 0.0) + weight / total
    next_task = max(weights, key=credit.__getitem__)
    credit[next_task] -= 1.0
    return next_task
