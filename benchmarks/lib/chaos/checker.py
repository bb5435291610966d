"""Check from the files of a `benchmarks/chaos.py` run what became of every sample.

It uses no code of the product.

```
chaos/PRODUCER-N.PID.jsonl    every sample made, every acknowledgement received
chaos/learner.jsonl           every start, publication and trained batch
chaos/ended.jsonl             processes that ended without an error
checkpoints/.../witness.json  what the weights of that checkpoint were trained on
buffer_summary.json           the ledger
set_aside/*.jsonl             batches on which the learner repeatedly failed
```
"""

from __future__ import annotations

import collections
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[int, int]  # (ticket, sample)
MOST_FAILURES = 3


@dataclass
class History:
    """The records of a run.  witness: (batch, epoch, ticket, sample, attempt, tokens)."""

    witness: list[tuple[int, ...]] = field(default_factory=list)
    # (ticket, sample, attempt) -> tokens; -> dispositions received
    made: dict[tuple[int, ...], int] = field(default_factory=dict)
    acks: dict[tuple[int, ...], set[str]] = field(default_factory=dict)
    # by processes that ran to the end
    made_by_survivors: set[tuple[int, ...]] = field(default_factory=set)
    lives: dict[int, tuple[int, int]] = field(default_factory=dict)  # epoch -> (origin, number)
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # label -> weights
    # (batch, epoch) -> samples: ticket, sample, attempt, tokens, labels
    trained: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    ledger: dict[str, int] = field(default_factory=dict)  # line -> tokens
    # tickets of batches that killed their learner again and again, kept for a look
    set_aside: set[int] = field(default_factory=set)


def rows(path: Path) -> list[dict[str, Any]]:
    """A last row may be torn: its process was killed."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def read(run_dir: Path) -> History:
    history = History()
    # pids of the processes that ended well
    survivors = {row["pid"] for row in rows(run_dir / "chaos" / "ended.jsonl")}
    for path in sorted((run_dir / "chaos").glob("*-*.jsonl")):
        alive = int(path.name.split(".")[1]) in survivors
        for row in rows(path):
            if "made" in row:
                *key, tokens = row["made"]
                history.made[tuple(key)] = tokens
                if alive:
                    history.made_by_survivors.add(tuple(key))
            for *key, disposition in row.get("acks", ()):
                history.acks.setdefault(tuple(key), set()).add(disposition)
    for row in rows(run_dir / "chaos" / "learner.jsonl"):
        if "life" in row:
            history.lives[row["life"]] = (row["origin"], row["number"])
        elif "published" in row:
            epoch, number = row["published"]
            history.digests[epoch, number] = row["digest"]
        elif "trained" in row:
            history.trained[row["trained"], row["epoch"]] = row["samples"]
    for path in (run_dir / "set_aside").glob("*.jsonl"):
        history.set_aside |= {row["ticket"] for row in rows(path)}
    epochs = [p for p in (run_dir / "checkpoints").glob("epoch_*") if p.name[6:].isdigit()]
    newest = max(epochs, key=lambda p: int(p.name[6:]))
    last = max(newest.glob("number_*"), key=lambda p: int(p.name[7:]))
    history.witness = [tuple(row) for row in json.loads((last / "witness.json").read_text())]
    history.ledger = json.loads((run_dir / "buffer_summary.json").read_text())["ledger"]
    return history


def path_of(history: History, label: tuple[int, int]) -> list[str]:
    """The updates that made a version, as digests of the weights after each."""
    epoch, number = label
    start: list[str] = []
    if epoch in history.lives:
        origin, begun = history.lives[epoch]
        if origin:
            start = path_of(history, (origin, begun))
    own = [
        history.digests.get((epoch, n), f"{epoch}.{n}") for n in range(len(start) + 1, number + 1)
    ]
    return (start + own)[:number]


def lag(history: History, token: tuple[int, int], start: tuple[int, int]) -> int:
    """Updates between the version that drew a token and the one its batch starts from."""
    ours, theirs = path_of(history, token), path_of(history, start)
    common = 0
    while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
        common += 1
    return len(ours) - common + len(theirs) - common


def check(
    history: History, steps: int, groups: int, size: int, limit: float, *, memory: bool = False
) -> dict[str, Any]:
    """Counts of what should not be.  memory: acknowledged samples may die with the buffer."""
    count = collections.Counter[Key]((t, s) for _, _, t, s, *_ in history.witness)
    trained = {ticket for ticket, _ in count}
    given_up_on = abandoned(history, trained) | (history.set_aside - trained)
    tickets = [t for t in range(steps * groups + len(given_up_on)) if t not in given_up_on]
    planned = {(t, s) for t in tickets[: steps * groups] for s in range(size)}
    final = {(t, s): a for _, _, t, s, a, _ in history.witness}
    batches = {(number, epoch) for number, epoch, *_ in history.witness}
    never = [key for key in planned if not count[key]]
    replaced = [
        key
        for key, said in history.acks.items()
        if "accepted" in said
        and (key[0], key[1]) in planned
        and final.get((key[0], key[1])) != key[2]
    ]
    given_up = sum(
        history.ledger.get(line, 0)
        for line in ("orphaned", "dropped_stale", "abandoned", "filtered", "fatal")
    )
    twice = [key for key, said in history.acks.items() if {"accepted", "duplicate"} <= said]
    unanswered = [
        key
        for key in history.made_by_survivors
        if key not in history.acks
        and key[0] < (steps - 4) * groups
        and final.get((key[0], key[1])) != key[2]  # it was trained: the run ended before the word
    ]
    over = 0
    for number, epoch in sorted(batches):
        for *_, labels in history.trained.get((number, epoch), ()):
            over += any(lag(history, tuple(x), (epoch, number)) > limit for x in labels)
    counted = sum(
        history.ledger.get(line, 0) for line in ("trained", "skipped", "rejected", "masked_stale")
    )
    tokens = sum(row[5] for row in history.witness)
    foreign = [
        (number, epoch)
        for number, epoch in batches
        if not any(e == epoch or epoch in ancestors(history, e) for e in [max(history.lives)])
    ]
    # samples that were taken and then written anew have a line of their own, in tokens
    told = sum(history.made.get(key, 0) for key in replaced) <= given_up
    lost_acked = 0 if memory or told else len(replaced)
    return {
        "lost": len(never) + lost_acked + len(unanswered),
        "duplicated": sum(n - 1 for n in count.values() if n > 1)
        + sum(key not in planned for key in count)
        + len(twice),
        "over_limit": over,
        "miscounted": int(abs(counted - tokens)),
        "foreign": len(foreign),
        "trained": len(history.witness),
        "replaced": len(replaced),
        "given_up": given_up,
        "set_aside": len(history.set_aside),
    }


def abandoned(history: History, trained: set[int]) -> set[int]:
    """Groups that left the plan by rule: three of their answers failed, each acknowledged so."""
    failures = collections.Counter(
        ticket for (ticket, *_), said in history.acks.items() if "failed" in said
    )
    return {t for t, count in failures.items() if count >= MOST_FAILURES and t not in trained}


def ancestors(history: History, epoch: int) -> set[int]:
    found: set[int] = set()
    while epoch in history.lives and (epoch := history.lives[epoch][0]):
        found.add(epoch)
    return found
