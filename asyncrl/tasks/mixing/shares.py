"""Which task of a mixture the next group is of: deterministic, and exact in every prefix."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config.tree import MixedTaskConfig, weight_at


def weights_at(parts: Mapping[str, MixedTaskConfig], batch: float) -> dict[str, float]:
    """Return the weights of the parts at a batch, without those of 0."""
    weights = {name: weight_at(part.weight, batch) for name, part in parts.items()}
    return {name: weight for name, weight in weights.items() if weight > 0}


def next_task(credit: dict[str, float], weights: Mapping[str, float]) -> str:
    """Choose the next task, and update `credit`, what each task is owed in groups.

    Every task earns its share, and the one that is owed most pays for a group (smooth weighted
    round robin): each prefix has the shares of the weights, to within about one group a task.

    >>> credit = {}
    >>> "".join(next_task(credit, {"a": 2.0, "b": 1.0}) for _ in range(9))
    'abaabaaba'
    """
    total = sum(weights.values())
    for name, weight in weights.items():
        credit[name] = credit.get(name, 0.0) + weight / total
    chosen = max(weights, key=credit.__getitem__)
    credit[chosen] -= 1.0
    return chosen
