"""Signs that a run does not learn what it was meant to: rules over metrics.jsonl, with what to try.

Pure: reads no file and imports no torch.  `asyncrl run` says each sign once on the terminal; the
summary and the report's first lines keep them.  A rule is a function of the rows that returns a
`Sign` or None; it belongs into RULES, or into END_RULES if only a finished run can be judged by it.

>>> one = {"reward/mean": 0.0, "reward/no_spread_share": 1.0, "reward/min": 0.0, "reward/max": 0.0}
>>> stuck = [{"step": n} | one for n in range(8)]
>>> [s.name for s in signs(stuck)]
['constant_rewards']
>>> signs(stuck)[0].said
'every answer of the last 8 batches was given the reward 0: no group has a spread to learn from'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Rows = Sequence[Mapping[str, Any]]

LEAST, WINDOW = 5, 20  # batches that a rule looks at: at least, at most
NEARLY_ALL = 0.95
Z = 1.96  # of a 95 % interval


class Sign(NamedTuple):
    """One finding."""

    name: str  # a fixed name, for programs
    said: str  # what was seen, with its numbers
    try_this: str  # what to change, with its key

    def line(self) -> str:
        return f"{self.said}; {self.try_this}"


def trained(rows: Rows, least: int = LEAST, window: int = WINDOW) -> Rows:
    """The rows of the last `window` batches; none while there are fewer than `least`."""
    batches = [r for r in rows if "reward/mean" in r]
    return batches[-window:] if len(batches) >= least else []


def mean(rows: Rows, name: str) -> float | None:
    """Mean of a metric over the rows that have it."""
    values = [float(r[name]) for r in rows if name in r]
    return sum(values) / len(values) if values else None


def constant_rewards(rows: Rows) -> Sign | None:
    """Nearly no group has rewards that differ, so nearly every advantage is zero."""
    last = trained(rows)
    share = mean(last, "reward/no_spread_share")
    if share is None or share < NEARLY_ALL:
        return None
    values = {float(r[k]) for r in last for k in ("reward/min", "reward/max") if k in r}
    if len(values) != 1:
        said = (f"in {share:.0%} of the groups of the last {len(last)} batches all answers have the same "
                "reward: hardly anything to learn from")  # fmt: skip
    else:
        said = (f"every answer of the last {len(last)} batches was given the reward {values.pop():g}: "
                "no group has a spread to learn from")  # fmt: skip
    return Sign("constant_rewards", said, "look at rewards by `asyncrl task try`; prompts of another "
                "difficulty, or a reward with more steps, give a spread")  # fmt: skip


def all_truncated(rows: Rows) -> Sign | None:
    """Nearly no answer comes to its end."""
    last = trained(rows)
    share = mean(last, "answer/truncated_share")
    if share is None or share < NEARLY_ALL:
        return None
    said = f"{share:.0%} of the answers of the last {len(last)} batches were cut at generator.max_new_tokens"
    return Sign("all_truncated", said, "raise it, or look whether the model ends its answers at all "
                "(its end-of-sequence token)")  # fmt: skip


def interval(p: float, n: float, lo: float, hi: float) -> float:
    """Half the 95 % interval of a mean p of n values in [lo, hi]: their variance is at most (p - lo)(hi - p)."""
    return Z * math.sqrt(max((p - lo) * (hi - p), 0.0) / max(n, 1.0))


def unmoved_accuracy(rows: Rows) -> Sign | None:
    """Held-out accuracy at the end differs from that at the start by less than chance may make of it."""
    evals = sorted((r for r in rows if r.get("eval/heldout_n")), key=lambda r: r["step"])
    batches = trained(rows, least=1, window=len(rows))
    if len(evals) < 2 or not batches or evals[0]["step"] == evals[-1]["step"]:
        return None
    first, last = evals[0], evals[-1]
    a, b = float(first["eval/heldout"]), float(last["eval/heldout"])
    seen = [float(r[k]) for r in batches for k in ("reward/min", "reward/max") if k in r]
    lo, hi = min([0.0, a, b, *seen]), max([1.0, a, b, *seen])
    sizes = [float(r["eval/heldout_n"]) for r in (first, last)]
    half = math.hypot(interval(a, sizes[0], lo, hi), interval(b, sizes[1], lo, hi))
    if abs(b - a) > half:
        return None
    n = " and ".join(f"{x:g}" for x in dict.fromkeys(sizes))
    said = (f"held-out accuracy went from {a:.3f} to {b:.3f} in {len(batches)} batches, which is within "
            f"chance (+-{half:.3f} at n = {n})")  # fmt: skip
    return Sign("unmoved_accuracy", said, "more steps, a larger learner.lr, or more "
                "evaluation.final_prompts to see smaller gains")  # fmt: skip


def answers_missing(path: str, without: int, of: int) -> Sign:
    """`without` of the `of` prompts have nothing that the built-in reward could compare with."""
    said = (f"{path}: {without} of {of} prompts have no `answer`, which the task's own reward compares "
            "with: it is 0 for them")  # fmt: skip
    return Sign("answers_missing", said, "add answers to the file, or give reward.function")


RULES: tuple[Callable[[Rows], Sign | None], ...] = (constant_rewards, all_truncated)
END_RULES: tuple[Callable[[Rows], Sign | None], ...] = (unmoved_accuracy,)


def signs(rows: Rows, *, ended: bool = False) -> list[Sign]:
    """What the rules find in a run's rows so far; ended: also what only its end tells."""
    found = (rule(rows) for rule in (*RULES, *(END_RULES if ended else ())))
    return [s for s in found if s is not None]
