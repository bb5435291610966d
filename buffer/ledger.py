"""The ledger: every generated token ends in exactly one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.messages import DISPOSITIONS


@dataclass
class Line:
    """Sums over the samples that ended in one way; means follow from them."""

    tokens: int = 0
    samples: int = 0
    length_sum: float = 0.0
    reward_sum: float = 0.0

    def add(self, tokens: int, samples: int = 0, length: float = 0.0, reward: float = 0.0) -> None:
        self.tokens += tokens
        self.samples += samples
        self.length_sum += length
        self.reward_sum += reward

    def as_dict(self) -> dict[str, float]:
        n = max(self.samples, 1)
        return {"tokens": self.tokens, "samples": self.samples, "mean_length": self.length_sum / n, "mean_reward": self.reward_sum / n}


@dataclass
class Ledger:
    """Totals of what is final for good.  The store adds what may still change (see `Store.ledger`)."""

    lines: dict[str, Line] = field(default_factory=lambda: {name: Line() for name in DISPOSITIONS})

    def copy(self) -> Ledger:
        return Ledger({name: Line(**vars(line)) for name, line in self.lines.items()})

    def add(self, what: str, tokens: int, samples: int = 0, length: float = 0.0, reward: float = 0.0) -> None:
        self.lines[what].add(tokens, samples, length, reward)

    def totals(self) -> dict[str, dict[str, float]]:
        return {name: line.as_dict() for name, line in self.lines.items()}

    @classmethod
    def restore(cls, totals: dict[str, dict[str, float]]) -> Ledger:
        """From `totals`, as a checkpoint keeps them (`memory` durability)."""
        out = cls()
        for name, t in totals.items():
            n = t["samples"]
            out.lines[name] = Line(int(t["tokens"]), int(n), t["mean_length"] * n, t["mean_reward"] * n)
        return out


def tokens_of(totals: dict[str, dict[str, float]], names: Iterable[str] = DISPOSITIONS) -> int:
    return sum(int(totals[n]["tokens"]) for n in names if n in totals)
