"""The ledger: every generated token ends in exactly one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.contract.messages import DISPOSITIONS, LedgerLine


@dataclass
class Line:
    """Sums over the samples that ended in one way; means follow from them."""

    tokens: int = 0
    samples: int = 0
    length_sum: float = 0.0
    reward_sum: float = 0.0
    # tokens of answers up to 1, 2, 4, 8, ... long
    by_length: dict[int, int] = field(default_factory=dict)
    # of these, what `downweight` took: tokens times (1 - weight)
    faded: dict[int, float] = field(default_factory=dict)

    def add(
        self,
        tokens: int,
        samples: int = 0,
        length: float = 0.0,
        reward: float = 0.0,
        faded: float = 0.0,
    ) -> None:
        if samples and tokens:
            upto = 1 << max(0, int(length) - 1).bit_length()
            self.by_length[upto] = self.by_length.get(upto, 0) + tokens
            if faded:
                self.faded[upto] = self.faded.get(upto, 0.0) + faded
        self.tokens += tokens
        self.samples += samples
        self.length_sum += length
        self.reward_sum += reward

    def add_whole(self, tokens: int, reward: float) -> None:
        """`add` for a sample that ends here with all its tokens: hundreds are folded a batch."""
        if tokens:
            upto = 1 << (tokens - 1).bit_length()
            self.by_length[upto] = self.by_length.get(upto, 0) + tokens
        self.tokens += tokens
        self.samples += 1
        self.length_sum += tokens
        self.reward_sum += reward

    def copy(self) -> Line:
        return Line(
            self.tokens,
            self.samples,
            self.length_sum,
            self.reward_sum,
            self.by_length.copy(),
            self.faded.copy(),
        )

    def merge(self, other: Line) -> None:
        self.tokens += other.tokens
        self.samples += other.samples
        self.length_sum += other.length_sum
        self.reward_sum += other.reward_sum
        for upto, tokens in other.by_length.items():
            self.by_length[upto] = self.by_length.get(upto, 0) + tokens
        for upto, faded in other.faded.items():
            self.faded[upto] = self.faded.get(upto, 0.0) + faded

    def as_dict(self) -> dict[str, float]:
        samples = max(self.samples, 1)
        means = {
            "tokens": self.tokens,
            "samples": self.samples,
            "mean_length": self.length_sum / samples,
            "mean_reward": self.reward_sum / samples,
        }
        return (
            means
            | {f"upto_{k}": v for k, v in sorted(self.by_length.items())}
            | {f"faded_upto_{k}": v for k, v in sorted(self.faded.items())}
        )


@dataclass
class Ledger:
    """Totals of what is final for good.  The store adds what may still change (see
    `Store.ledger`).
    """

    lines: dict[str, Line] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Every line is there, also of a snapshot that an older version wrote."""
        self.lines = {name: self.lines.get(name) or Line() for name in DISPOSITIONS}

    def copy(self) -> Ledger:
        return Ledger({name: x.copy() for name, x in self.lines.items()})

    def add(
        self,
        what: LedgerLine,
        tokens: int,
        samples: int = 0,
        length: float = 0.0,
        reward: float = 0.0,
        faded: float = 0.0,
    ) -> None:
        self.lines[what].add(tokens, samples, length, reward, faded)

    def merge(self, other: Ledger) -> None:
        for name, line in other.lines.items():
            self.lines[name].merge(line)

    def totals(self) -> dict[str, dict[str, float]]:
        return {name: line.as_dict() for name, line in self.lines.items()}

    @classmethod
    def restore(cls, totals: dict[str, dict[str, float]]) -> Ledger:
        """From `totals`, as a checkpoint keeps them (`memory` durability)."""
        out = cls()
        for name, line in totals.items():
            samples = line["samples"]
            out.lines[name] = Line(
                int(line["tokens"]),
                int(samples),
                line["mean_length"] * samples,
                line["mean_reward"] * samples,
                {k: int(x) for k, x in binned(line, "upto_").items()},
                binned(line, "faded_upto_"),
            )
        return out


def binned(line: dict[str, float], prefix: str) -> dict[int, float]:
    """upper bound of the answers' length -> value, from one line of `totals`.

    >>> binned({"tokens": 9, "upto_8": 6, "upto_16": 3, "faded_upto_16": 1.5}, "upto_")
    {8: 6, 16: 3}
    """
    return {int(k.removeprefix(prefix)): x for k, x in line.items() if k.startswith(prefix)}


def tokens_of(totals: dict[str, dict[str, float]], names: Iterable[str] = DISPOSITIONS) -> int:
    return sum(int(totals[n]["tokens"]) for n in names if n in totals)
