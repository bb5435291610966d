"""The ledger, in which every generated token ends in exactly one line."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.contract.messages import DISPOSITIONS, LedgerTotals, Numbers


@dataclass
class LedgerSums:
    """Sums over the samples of one ledger line, from which its means follow."""

    tokens: int = 0
    samples: int = 0
    length_sum: float = 0.0
    reward_sum: float = 0.0
    # tokens by length of their sample: upper bound 1, 2, 4, 8, ... -> tokens
    by_length: dict[int, int] = field(default_factory=dict)
    # the same for the weight that `downweight` removed: tokens times (1 - weight)
    faded: dict[int, float] = field(default_factory=dict)

    def add(
        self,
        tokens: int,
        samples: int = 0,
        length: float = 0.0,
        reward: float = 0.0,
        faded: float = 0.0,
    ) -> None:
        """Add `tokens` of `samples` samples with these sums of length and reward."""
        if samples and tokens:
            upto = 1 << max(0, int(length) - 1).bit_length()
            self.by_length[upto] = self.by_length.get(upto, 0) + tokens
            if faded:
                self.faded[upto] = self.faded.get(upto, 0.0) + faded
        self.tokens += tokens
        self.samples += samples
        self.length_sum += length
        self.reward_sum += reward

    def merge(self, other: LedgerSums) -> None:
        """Add the sums of `other`."""
        self.tokens += other.tokens
        self.samples += other.samples
        self.length_sum += other.length_sum
        self.reward_sum += other.reward_sum
        for upto, tokens in other.by_length.items():
            self.by_length[upto] = self.by_length.get(upto, 0) + tokens
        for upto, faded in other.faded.items():
            self.faded[upto] = self.faded.get(upto, 0.0) + faded

    def as_dict(self) -> Numbers:
        """Return the totals and means as in checkpoints, status messages and the summary."""
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
    """Totals of final dispositions. `Store.ledger` adds those that may still change."""

    lines: dict[str, LedgerSums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Add lines that a snapshot of an older version lacks."""
        self.lines = {name: self.lines.get(name) or LedgerSums() for name in DISPOSITIONS}

    def copy(self) -> Ledger:
        """Return an independent copy."""
        ledger = Ledger()
        ledger.merge(self)
        return ledger

    def merge(self, other: Ledger) -> None:
        """Add the lines of `other`."""
        for name, line in other.lines.items():
            self.lines[name].merge(line)

    def compute_totals(self) -> LedgerTotals:
        """Compute the totals and means of each line, by its name."""
        return {name: line.as_dict() for name, line in self.lines.items()}

    @classmethod
    def restore(cls, totals: LedgerTotals) -> Ledger:
        """Make a ledger from the `totals` of a checkpoint (`memory` durability).

        Raises KeyError, ValueError or OverflowError if they are not those of a ledger."""
        ledger = cls()
        for name, line in totals.items():
            samples = line["samples"]
            ledger.lines[name] = LedgerSums(
                int(line["tokens"]),
                int(samples),
                line["mean_length"] * samples,
                line["mean_reward"] * samples,
                {k: int(x) for k, x in read_bins(line, "upto_").items()},
                read_bins(line, "faded_upto_"),
            )
        return ledger


def read_bins(line: Numbers, prefix: str) -> dict[int, float]:
    """Read {upper bound of the samples' length: value} from one line of `compute_totals`.

    >>> read_bins({"tokens": 9, "upto_8": 6, "upto_16": 3, "faded_upto_16": 1.5}, "upto_")
    {8: 6, 16: 3}
    """
    return {int(k.removeprefix(prefix)): x for k, x in line.items() if k.startswith(prefix)}


def sum_tokens(totals: LedgerTotals) -> int:
    """Sum the tokens of all lines of `compute_totals`."""
    return sum(int(line["tokens"]) for line in totals.values())
