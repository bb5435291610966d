"""The judge's replies and spending of a run on this machine: RUN/judge.sqlite.

Each of its parts is updated in one transaction:

- replies, by the digest of their request,
- the requests of the last minute, and the pause that a server asked for,
- the spending of the whole run. A process killed during a request leaves its estimate spent.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from actors.scorers.deadline_pause import JudgeBudgetSpent
from asyncrl.config.tree import JudgeConfig

ACCOUNT = "judge.sqlite"
WINDOW_S = 60.0
BUSY_S = 60.0  # for another process's transaction, of a few statements
# over the whole run: requests and tokens in both directions (bounded by budgets), replies, retried
# requests, requests answered by 429, cached replies, seconds of requests
SUMS = ("requests", "tokens", "replies", "retries", "throttled", "cached", "seconds")
TABLES = """
CREATE TABLE IF NOT EXISTS replies (digest BLOB PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sent (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, tokens INTEGER);
CREATE TABLE IF NOT EXISTS sums (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
"""


def read_totals(path: Path, settings: JudgeConfig) -> dict[str, float]:
    """Return metrics of this machine's judge requests in the whole run.

    One per entry of SUMS, and the rest of each budget. Empty before the first request and while the
    file cannot be read.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            sums = dict(connection.execute("SELECT name, value FROM sums"))
    except sqlite3.Error:
        return {}
    metrics = {f"judge/{name}": float(sums.get(name, 0.0)) for name in SUMS}
    for name in ("requests", "tokens"):
        if budget := getattr(settings, f"budget_{name}"):
            metrics[f"judge/{name}_left"] = max(0.0, budget - metrics[f"judge/{name}"])
    return metrics


class JudgeBudget:
    """The judge's cache, limits and budget. Times are CLOCK_MONOTONIC seconds.

    All processes of a machine share that clock until the next boot. path None: in memory, for one
    process.
    """

    def __init__(self, path: Path | None, settings: JudgeConfig) -> None:
        self.settings = settings
        self.connection = sqlite3.connect(
            str(path) if path else ":memory:", timeout=BUSY_S, isolation_level=None
        )
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=NORMAL")
        self.connection.executescript(TABLES)

    @contextmanager
    def _begin_transaction(self) -> Iterator[sqlite3.Connection]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    # ---- replies ---------------------------------------------------------------------------------

    def find_reply(self, digest: bytes) -> str | None:
        """Return the cached reply to the request with this digest, if any."""
        cursor = self.connection.execute("SELECT reply FROM replies WHERE digest = ?", (digest,))
        row = cursor.fetchone()
        return None if row is None else str(row[0])

    def store_reply(self, digest: bytes, reply: str) -> None:
        """Cache the reply to the request with this digest."""
        self.connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (digest, reply))

    # ---- limits ----------------------------------------------------------------------------------

    def reserve(self, now: float, tokens: int) -> tuple[int, float]:
        """Count a request of about `tokens` tokens if the limits permit it now.

        Returns (id, 0), or (0, seconds until the next attempt). Raises JudgeBudgetSpent. A request
        above tokens_per_minute is permitted when nothing else was sent within the minute.
        """
        settings = self.settings
        with self._begin_transaction() as connection:
            for name, budget, amount in (
                ("requests", settings.budget_requests, 1),
                ("tokens", settings.budget_tokens, tokens),
            ):
                used = self.read_sum(name)
                if budget and used + amount > budget:
                    raise JudgeBudgetSpent(
                        f"reward.judge.budget_{name}: {budget} for the whole run, {used:.0f} are "
                        f"spent and the next request takes {amount}; resume with a higher one"
                    )
            # a time later than now is from before the machine's last boot
            connection.execute("DELETE FROM sent WHERE at <= ? OR at > ?", (now - WINDOW_S, now))
            until = self.read_sum("until")
            if now < until <= now + 2 * WINDOW_S:
                return 0, until - now
            count, sent_tokens, oldest = connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(tokens), 0), MIN(at) FROM sent"
            ).fetchone()
            most_requests = settings.requests_per_minute
            most_tokens = settings.tokens_per_minute
            if (most_requests and count >= most_requests) or (
                most_tokens and count and sent_tokens + tokens > most_tokens
            ):
                return 0, oldest + WINDOW_S - now
            row = connection.execute("INSERT INTO sent (at, tokens) VALUES (?, ?)", (now, tokens))
            self._add("requests", 1)
            self._add("tokens", tokens)
            return int(row.lastrowid or 0), 0.0

    def record_cost(self, request_id: int, estimate: int, tokens: int) -> None:
        """Replace the estimate of request `request_id` by its actual tokens."""
        with self._begin_transaction() as connection:
            connection.execute("UPDATE sent SET tokens = ? WHERE id = ?", (tokens, request_id))
            self._add("tokens", tokens - estimate)

    def count(self, **sums: float) -> None:
        """Add to entries of SUMS, for the metrics."""
        with self._begin_transaction():
            for name, amount in sums.items():
                self._add(name, amount)

    def hold(self, until: float) -> None:
        """Stop all processes from sending before `until`, as the server asked."""
        with self._begin_transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO sums VALUES ('until', ?)", (until,))

    def read_sum(self, name: str) -> float:
        """Return an entry of SUMS; "until": when the next request may be sent."""
        row = self.connection.execute("SELECT value FROM sums WHERE name = ?", (name,)).fetchone()
        return 0.0 if row is None else float(row[0])

    def _add(self, name: str, amount: float) -> None:
        self.connection.execute(
            "INSERT INTO sums VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + ?",
            (name, amount, amount),
        )

    def close(self) -> None:
        """Close the database."""
        self.connection.close()
