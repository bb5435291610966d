"""Compute the share of a run's wall time, under kills, that trained tokens that stayed trained.

It uses only rows that the buffer wrote and the times when they were seen, without assumptions
about the effect of a kill."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Commit:
    """A batch's row in trained.jsonl."""

    at: float  # seconds
    batch: int
    tokens: int
    voided: float = float("inf")  # seconds: when a roll-back removed it


@dataclass(frozen=True)
class Kill:
    """A kill and the victim's recovery, in seconds."""

    victim: str
    state: str
    at: float
    back: float  # when its new process reported
    start_s: float  # from the start of the new process to that (imports, model, hello)


@dataclass
class History:
    """Every commit in the order of its row, including those that a roll-back removed."""

    commits: list[Commit] = field(default_factory=list)
    standing: dict[int, Commit] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any], at: float) -> None:
        """A row of trained.jsonl, seen at `at`."""
        if "from" in row:
            for batch in [batch for batch in self.standing if batch >= row["from"]]:
                self.standing.pop(batch).voided = at
            return
        if row["batch"] in self.standing:
            self.standing[row["batch"]].voided = at
        commit = Commit(at, row["batch"], sum(row["lags"].values()))
        self.commits.append(commit)
        self.standing[commit.batch] = commit


@dataclass(frozen=True)
class Window:
    """From the last batch before a kill to the first one that was trained after its victim was
    back, and never taken out again; several kills, where the next came before that."""

    begin: float
    end: float
    kills: tuple[Kill, ...]


def windows(history: History, kills: Iterable[Kill], until: float) -> list[Window]:
    """Disjoint, in order; one that has not ended by `until` ends there."""
    found: list[Window] = []
    made = [commit.at for commit in history.commits]
    kept = sorted(commit.at for commit in history.standing.values())
    for kill in sorted(kills, key=lambda kill: kill.at):
        end = next((at for at in kept if at >= kill.back), until)
        begin = max((at for at in made if at <= kill.at), default=kill.at)
        if found and begin < found[-1].end:
            last = found.pop()
            found.append(Window(last.begin, max(last.end, end), (*last.kills, kill)))
        else:
            found.append(Window(begin, end, (kill,)))
    return found


def measure(
    history: History, kills: Sequence[Kill], launched: float, until: float
) -> dict[str, Any]:
    """Compute useful time over wall time, and the cost of each kill.

    The pace is that of the undisturbed run: all tokens trained outside `windows`, over that time.
    Useful time is the tokens that are still trained at the end, at that pace.  The cost of a window
    is its length minus its tokens at that pace; removed tokens do not count.  Times are from the
    first commit on; `start included`: from the launch on, with the startup.  `starts apart`: the
    startup of a new process, as far as the run waited for it, is not part of the wall time.

    Raises ValueError for a run without two commits, or never undisturbed."""
    if len(history.commits) < 2:
        raise ValueError("fewer than two batches were trained: let it run for longer")
    first = history.commits[0]
    disturbed = windows(history, [kill for kill in kills if kill.at >= first.at], until)
    span = until - first.at

    def between(begin: float, end: float) -> list[Commit]:
        return [commit for commit in history.commits if begin < commit.at <= end]

    # the first commit's own tokens were made before
    made = sum(commit.tokens for commit in between(first.at, until))
    disturbed_made = sum(x.tokens for one in disturbed for x in between(one.begin, one.end))
    calm_s = span - sum(one.end - one.begin for one in disturbed)
    if made <= disturbed_made or calm_s <= 0.0:
        raise ValueError("nothing was trained undisturbed: fewer kills, or let it run for longer")
    pace = (made - disturbed_made) / calm_s
    costs: list[dict[str, Any]] = []
    for one in disturbed:
        gained = sum(x.tokens for x in between(one.begin, one.end) if x.voided > one.end)
        gained -= sum(
            x.tokens
            for x in history.commits[1:]
            if x.at <= one.begin and one.begin < x.voided <= one.end
        )
        lost_s = (one.end - one.begin) - gained / pace
        for kill in one.kills:
            costs.append(
                {
                    "victim": kill.victim,
                    "state": kill.state,
                    "back_s": round(kill.back - kill.at, 2),
                    "start_s": round(kill.start_s, 2),
                    "cost_s": round(lost_s / len(one.kills), 2),
                }
            )
    kept = sum(x.tokens for x in history.commits[1:] if x.voided > until)
    useful_s = kept / pace
    starts_s = sum(of_start(row) for row in costs)
    return {
        "kills": len(costs),
        "batches": len(history.commits),
        "trained_again": sum(x.voided <= until for x in history.commits),
        "tokens_kept": kept,
        "tokens_per_s_undisturbed": round(pace, 1),
        "tokens_per_s": round(kept / span, 1),
        "seconds_to_the_first_batch": round(first.at - launched, 1),
        "seconds_from_it_on": round(span, 1),
        "effective": round(useful_s / span, 4),
        "effective_start_included": round(useful_s / (until - launched), 4),
        "effective_starts_apart": round(useful_s / (span - starts_s), 4),
        "each_kill": costs,
    }


def of_start(row: Mapping[str, Any]) -> float:
    """The startup in a kill's cost, in seconds: at most the whole cost."""
    return float(max(0.0, min(row["start_s"], row["cost_s"])))


def by_victim(costs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`victim: state` -> how many kills, the mean of what they cost and of the start-up in it."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in costs:
        found.setdefault(f"{row['victim']}: {row['state']}", []).append(row)
    return {
        name: {
            "kills": len(rows),
            "cost_s": round(statistics.mean(row["cost_s"] for row in rows), 2),
            "start_s": round(statistics.mean(row["start_s"] for row in rows), 2),
        }
        for name, rows in sorted(found.items())
    }


def followed(costs: Sequence[Mapping[str, Any]], an_hour: float) -> dict[str, float]:
    """Predict the effect of `an_hour` kills an hour: mean cost, with equally frequent victims."""
    victims: dict[str, list[Mapping[str, Any]]] = {}
    for row in costs:
        victims.setdefault(row["victim"], []).append(row)
    cost = statistics.mean(
        statistics.mean(row["cost_s"] for row in rows) for rows in victims.values()
    )
    start = statistics.mean(statistics.mean(map(of_start, rows)) for rows in victims.values())
    return {
        "effective": round(1 - an_hour * cost / 3600, 4),
        "effective_starts_apart": round(1 - an_hour * (cost - start) / 3600, 4),
    }
