"""Read, filter and order the samples of token_samples.jsonl, and format them as colored text.

`learner/sample_log.py` writes the file. `asyncrl/tinker/sample_log.py` writes that of a
Tinker server's model, without rewards, weights and clips.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.contract.toml_writer import read_table
from asyncrl.records import jsonl
from asyncrl.records.jsonl import JsonObject

FILE = "token_samples.jsonl"
RULES = ("group", "best", "worst", "off_policy", "longest", "random")
ORDERS = ("batch", "reward", "lag", "length", "kl", "weight")  # by a value of the rows
SHADES: dict[str, str] = read_table(__file__)
_decoder = msgspec.json.Decoder(JsonObject)


@dataclass(frozen=True)
class SampleFilter:
    """The choice of samples to show, and their order.

    step, reward, lag: ranges, `3`, `3..`, `..3` or `1..3`. text: a regular expression searched in
    prompt and response.
    """

    step: str = ".."
    reward: str = ".."
    lag: str = ".."
    ticket: int | None = None
    group_key: str | None = None
    rule: str | None = None
    text: str = ""
    sort: str = "batch"
    limit: int = 50


def measure_token_kl(row: JsonObject) -> float:
    """Return the mean k3 = r - 1 - log r (Schulman 2020) of the start policy, in nats a token."""
    terms: list[float] = [
        math.exp(min(start - behavior, 50.0)) - 1 - (start - behavior)
        for s in row["sequences"]
        for _, first, end in s["versions"]
        for start, behavior in zip(s["start"][first:end], s["behavior"][first:end], strict=True)
        if start is not None and behavior is not None
    ]
    return sum(terms) / max(len(terms), 1)


@dataclass
class SampleStore:
    """token_samples.jsonl of a run; rows are located by offset and decoded on demand."""

    path: Path
    offsets: list[tuple[int, int]] = field(default_factory=list)  # (offset, bytes) of each row
    heads: list[JsonObject] = field(default_factory=list)  # rows without their tokens
    damaged: int = 0

    def __post_init__(self) -> None:
        self.file = jsonl.GrowingFile(self.path)

    def refresh(self) -> None:
        """Read new rows. A missing file is an empty one."""
        data = self.file.read_new()
        if self.file.begins:
            self.offsets.clear()
            self.heads.clear()
            self.damaged = 0
        offset = self.file.offset - len(data)
        for line in data.split(b"\n")[:-1]:
            self._add(line, offset)
            offset += len(line) + 1

    def _add(self, line: bytes, offset: int) -> None:
        try:
            row = _decoder.decode(line)
            head = {k: v for k, v in row.items() if k != "sequences"}
            head["kl"] = measure_token_kl(row)
            weights = [w for s in row["sequences"] for w in s.get("weight", ()) if w is not None]
            head["weight"] = max(weights, default=0.0)
            head["text"] = "\x00".join(s["prompt"] + "".join(s["pieces"]) for s in row["sequences"])
            _ = head["batch"], head["reward"], head["lag_mean"], head["rules"]
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError):
            self.damaged += 1
            return
        self.offsets.append((offset, len(line)))
        self.heads.append(head)

    def find(self, query: SampleFilter) -> list[int]:
        """Return the numbers of the matching rows in the requested order, largest value first.

        Raises ConfigError for a regular expression that does not compile.
        """
        try:
            pattern = re.compile(query.text) if query.text else None
        except re.error as error:
            raise ConfigError(f"--text {query.text}: not a regular expression: {error}") from None
        bounds = {}
        for value, key in (("batch", "step"), ("reward", "reward"), ("lag_mean", "lag")):
            text = getattr(query, key)
            lowest, dots, highest = text.partition("..")
            try:
                low, high = float(lowest or -math.inf), float(highest or math.inf)
            except ValueError:
                raise ConfigError(
                    f"--{key} {text}: give a number or a range: 3, 3.., ..3, 1..3"
                ) from None
            # without bounds it also matches rows without rewards, as those of a Tinker server
            if lowest or highest:
                bounds[value] = (low, high if dots else low)
        matches = [
            number
            for number, head in enumerate(self.heads)
            if all(
                head[value] is not None and low <= head[value] <= high
                for value, (low, high) in bounds.items()
            )
            and query.ticket in (None, head.get("ticket"))
            and query.group_key in (None, head.get("group_key"))
            and (query.rule is None or query.rule in head["rules"])
            and (pattern is None or pattern.search(head["text"]))
        ]
        if query.rule is not None and query.rule not in RULES:
            raise ConfigError(f"--rule {query.rule}: choose one of {', '.join(RULES)}")
        if query.sort not in ORDERS:
            raise ConfigError(f"--sort {query.sort}: choose one of {', '.join(ORDERS)}")
        value = "lag_mean" if query.sort == "lag" else query.sort
        matches.sort(key=lambda number: self.heads[number][value] or 0.0, reverse=True)
        return matches[: query.limit]

    def read_row(self, number: int) -> JsonObject:
        """Read a complete row with the shades of each token."""
        offset, length = self.offsets[number]
        with self.path.open("rb") as file:
            file.seek(offset)
            row: JsonObject = _decoder.decode(file.read(length))
        for sequence in row["sequences"]:
            sequence["shades"] = compute_shades(sequence)
        return row | {"number": number, "kl": self.heads[number]["kl"]}


def _subtract(left: Sequence[Any] | None, right: Sequence[Any] | None) -> list[float | None] | None:
    if left is None or right is None:
        return None
    return [
        None if a is None or b is None else round(a - b, 4)
        for a, b in zip(left, right, strict=True)
    ]


def compute_shades(sequence: JsonObject) -> dict[str, list[Any]]:
    """Return the value of each of SHADES for every token, without shades that were not measured."""
    versions: list[str | None] = [None] * len(sequence["tokens"])
    for label, start, end in sequence["versions"]:
        versions[start:end] = [label] * (end - start)
    all_shades = {
        "version": versions,
        "lag": sequence["lag"],
        "log_ratio": _subtract(sequence["start"], sequence["behavior"]),
        "mismatch": _subtract(sequence.get("sampler"), sequence["behavior"]),
        "staleness": _subtract(sequence["start"], sequence.get("sampler")),
        "update": _subtract(sequence.get("target"), sequence["start"]),
        "weight": sequence.get("weight"),
        "advantage": sequence["advantage"],
        "clip": sequence.get("clip"),
        "used": sequence["used"],
        "logprob": sequence["behavior"],
    }
    return {name: values for name, values in all_shades.items() if values is not None}


# ---- text for the terminal -----------------------------------------------------------------------

BLUE, WHITE, RED = (59, 130, 246), (148, 148, 148), (239, 68, 68)
PALETTE = ((59, 130, 246), (217, 119, 6), (5, 150, 105), (190, 24, 93), (124, 58, 237))


def format_terminal(row: JsonObject, shade: str, color: bool) -> str:
    """Format a sample as text: a head line, then prompt and response of each sequence.

    Control characters are escaped, so that sampled text cannot move the cursor or forge lines.
    """
    parts = "".join(f"  {k} {v:.3g}" for k, v in row["parts"].items())
    names = row.get("sequence_ids")  # only from a Tinker server, which receives no rewards
    origin = (
        f"datum {row['ticket']}  {' '.join(names)}"
        if names is not None
        else f"ticket {row['ticket']}  sample {row['sample']}  reward {row['reward']:.3g}{parts}"
    )
    finish = f"  {row['finish']}" if row["finish"] else ""
    title = (
        f"batch {row['batch']}  {origin}  lag {row['lag_mean']:.2f} (max {row['lag_max']})  "
        f"{row['length']} tokens{finish}  kl {row['kl']:.2e}  [{', '.join(row['rules'])}]"
    )
    lines = [escape_line(title, 400)]
    for sequence in row["sequences"]:
        lines.append("  prompt    " + escape_line(sequence["prompt"], 2000))
        lines += [
            escape_line("  image     {} x {} pixels, {}".format(*x["size"], x["digest"]), 212)
            for x in sequence.get("images", ())
        ]
        values = sequence["shades"].get(shade) or sequence["shades"]["lag"]
        lines.append("  response  " + _color_pieces(sequence["pieces"], values, color))
    return "\n".join(lines)


def _color_pieces(pieces: Sequence[str], values: Sequence[Any], color: bool) -> str:
    escaped = [escape_line(piece, 200) for piece in pieces]
    if not color:
        return "".join(escaped)
    largest = max((abs(v) for v in values if isinstance(v, int | float)), default=0.0) or 1.0
    labels = sorted({v for v in values if isinstance(v, str)})

    def paint(piece: str, value: Any) -> str:
        if isinstance(value, str):
            shade = PALETTE[labels.index(value) % len(PALETTE)]
        else:
            ends = zip(WHITE, RED if value > 0 else BLUE, strict=True)
            share = abs(value) / largest
            shade = tuple(round(white + (end - white) * share) for white, end in ends)
        return f"\x1b[38;2;{';'.join(map(str, shade))}m{piece}\x1b[0m"

    return "".join(
        piece if value is None else paint(piece, value)
        for piece, value in zip(escaped, values, strict=True)
    )
