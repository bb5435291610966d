import math
from typing import Any

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.records import health_checks

Row = dict[str, Any]


def config(*sets: str) -> health_checks.RunFacts:
    return health_checks.RunFacts(load.load("configs/demo.toml", sets))


def apply_rules(
    given: list[Row],
    facts: health_checks.RunFacts = config()._replace(mismatch=math.inf),
    **ended: bool,
) -> list[health_checks.Finding]:
    return health_checks.apply_rules(given, facts, **ended)


LOST = [0.008 * n for n in range(50)]  # and under one that does not: 0.39 at the end


def rows(n: int = 50, **lists: list[float]) -> list[Row]:
    """n batches; a list is a metric by batch (`__` for `/`)."""
    usual = {
        "reward/mean": 0.5,
        "reward/no_spread_share": 0.3,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "answer/truncated_share": 0.1,
    }
    return [
        {"step": i, "t": float(i)}
        | usual
        | {k.replace("__", "/"): x[i] for k, x in lists.items() if i < len(x)}
        for i in range(n)
    ]


def evals(split: str, n: int, *points: tuple[int, float]) -> list[Row]:
    return [{"step": s, "t": 0.0, f"eval/{split}": p, f"eval/{split}_n": n} for s, p in points]


def names(found: list[health_checks.Finding]) -> list[str]:
    return [s.name for s in found]


def fired(given: list[Row], *sets: str) -> list[str]:
    return names(health_checks.apply_rules(given, config(*sets)))


def split_share(settings: Config) -> float:
    """Most that the split of the log ratio adds to a step, in tokens of forward passes.

    A backward pass counts as two.  The samples of a split are computed once under the updated
    policy, and once under each earlier version that may have sampled tokens of them."""
    record, learner = settings.record, settings.learner
    passes = record.split_samples * (1 + settings.staleness.max_lag)
    return passes / (3 * learner.groups * learner.group_size * record.split_every)
