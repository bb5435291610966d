"""What all processes of a run on this machine have asked of a judge: RUN/judge.sqlite.

Three things, each one transaction: replies by the digest of their request; what was sent in the
last minute and how long everybody is to wait; what the whole run has spent.  A process killed amid
a request leaves its estimate spent."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from actors.scorers.deadline_pause import JudgeBudgetSpent
from asyncrl.config.scorers import JudgeConfig

ACCOUNT = "judge.sqlite"
WINDOW_S = 60.0
BUSY_S = 60.0  # for another process's transaction, of a few statements
# of the whole run: requests sent and tokens of both ways, which budgets bound; replies that came of
# them; requests that were sent again; that were answered by 429; questions whose reply was known;
# seconds that requests took
SUMS = ("requests", "tokens", "replies", "retries", "throttled", "cached", "seconds")
TABLES = """
CREATE TABLE IF NOT EXISTS replies (digest BLOB PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sent (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, tokens INTEGER);
CREATE TABLE IF NOT EXISTS sums (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
"""


def totals(path: Path, settings: JudgeConfig) -> dict[str, float]:
    """What the processes of this machine have asked in the whole run, as the metrics are called:
    each of SUMS, and what the budgets leave.  {} before the first question, and while the file
    cannot be read.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as wire:
            found = dict(wire.execute("SELECT name, value FROM sums"))
    except sqlite3.Error:
        return {}
    said = {f"judge/{name}": float(found.get(name, 0.0)) for name in SUMS}
    for name in ("requests", "tokens"):
        if most := getattr(settings, f"budget_{name}"):
            said[f"judge/{name}_left"] = max(0.0, most - said[f"judge/{name}"])
    return said


class JudgeBudget:
    """path None: in memory, for one process.  Times are seconds of CLOCK_MONOTONIC, which all
    processes of a machine share until it boots.
    """

    def __init__(self, path: Path | None, settings: JudgeConfig) -> None:
        self.settings = settings
        self.wire = sqlite3.connect(
            str(path) if path else ":memory:", timeout=BUSY_S, isolation_level=None
        )
        self.wire.execute("PRAGMA journal_mode=WAL")
        self.wire.execute("PRAGMA synchronous=NORMAL")
        self.wire.executescript(TABLES)

    @contextmanager
    def _alone(self) -> Iterator[sqlite3.Connection]:
        self.wire.execute("BEGIN IMMEDIATE")
        try:
            yield self.wire
        except BaseException:
            self.wire.execute("ROLLBACK")
            raise
        self.wire.execute("COMMIT")

    # ---- replies ---------------------------------------------------------------------------------

    def reply(self, digest: bytes) -> str | None:
        found = self.wire.execute("SELECT reply FROM replies WHERE digest = ?", (digest,))
        row = found.fetchone()
        return None if row is None else str(row[0])

    def store_reply(self, digest: bytes, reply: str) -> None:
        self.wire.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (digest, reply))

    # ---- limits ----------------------------------------------------------------------------------

    def reserve(self, now: float, tokens: int) -> tuple[int, float]:
        """(id, 0) when a request of about so many tokens may be sent now, and is counted; else
        (0, seconds after which to ask again).  Raises Spent.

        A request above tokens_per_minute is sent when nothing else was within the minute."""
        settings = self.settings
        with self._alone() as wire:
            self._check_budget(tokens)
            # later than now: of a life before the machine's last boot
            wire.execute("DELETE FROM sent WHERE at <= ? OR at > ?", (now - WINDOW_S, now))
            until = self.sum("until")
            if now < until <= now + 2 * WINDOW_S:
                return 0, until - now
            count, before, oldest = wire.execute(
                "SELECT COUNT(*), COALESCE(SUM(tokens), 0), MIN(at) FROM sent"
            ).fetchone()
            most = settings.requests_per_minute
            most_tokens = settings.tokens_per_minute
            if (most and count >= most) or (
                most_tokens and count and before + tokens > most_tokens
            ):
                return 0, oldest + WINDOW_S - now
            row = wire.execute("INSERT INTO sent (at, tokens) VALUES (?, ?)", (now, tokens))
            self._add("requests", 1)
            self._add("tokens", tokens)
            return int(row.lastrowid or 0), 0.0

    def record_cost(self, sent: int, estimate: int, tokens: int) -> None:
        """It came to so many tokens."""
        with self._alone() as wire:
            wire.execute("UPDATE sent SET tokens = ? WHERE id = ?", (tokens, sent))
            self._add("tokens", tokens - estimate)

    def count(self, **sums: float) -> None:
        """Add to sums of SUMS, for the metrics."""
        with self._alone():
            for name, more in sums.items():
                self._add(name, more)

    def hold(self, until: float) -> None:
        """Nobody sends before: the server asked for it."""
        with self._alone() as wire:
            wire.execute("INSERT OR REPLACE INTO sums VALUES ('until', ?)", (until,))

    def sum(self, name: str) -> float:
        """One of SUMS, of the whole run; until: when the next may be sent."""
        found = self.wire.execute("SELECT value FROM sums WHERE name = ?", (name,)).fetchone()
        return 0.0 if found is None else float(found[0])

    def _add(self, name: str, more: float) -> None:
        self.wire.execute(
            "INSERT INTO sums VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + ?",
            (name, more, more),
        )

    def _check_budget(self, tokens: int) -> None:
        for name, most, more in (
            ("requests", self.settings.budget_requests, 1),
            ("tokens", self.settings.budget_tokens, tokens),
        ):
            spent = self.sum(name)
            if most and spent + more > most:
                raise JudgeBudgetSpent(
                    f"reward.judge.budget_{name}: {most} for the whole run, {spent:.0f} are spent "
                    f"and the next request takes {more}; resume with a higher one"
                )

    def close(self) -> None:
        self.wire.close()
