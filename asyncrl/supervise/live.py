"""The live view of a run on stderr: a table on a terminal, otherwise a line every ten seconds."""

import math
import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncrl.contract.errors import PeerUnreachable
from asyncrl.contract.messages import RunStatus, StatusRequest
from asyncrl.contract.printable import LONGEST_LINE, escape_line
from asyncrl.contract.toml_writer import read_table
from asyncrl.records.health_checks import add_reward_wait, match_rules
from asyncrl.records.page_kit import TableBlock
from asyncrl.transport.sockets import PeerSocket

Metrics = Mapping[str, float]  # the newest value of each
PLAIN_S = 10.0
LIVE_S = 0.25
UNUSED = 0.01  # smallest share of unused tokens in trained batches that is shown
PACE_BATCHES = 20
ROWS: dict[str, dict[str, tuple[str, str]]] = read_table(__file__)


def receive_reply(socket: PeerSocket, timeout: float) -> object:
    """Return the next message within `timeout` seconds, or None.

    A buffer that sends invalid messages counts as one that does not reply, because it must not end
    a process that only observes."""
    try:
        return socket.recv(timeout)
    except PeerUnreachable:
        socket.broken_in_a_row = 0
        return None


def request_status(address: str, curve_dir: str, timeout: float) -> RunStatus | None:
    """Return the buffer's status, or None if it does not reply within `timeout` seconds."""
    socket = PeerSocket(address, curve_dir)
    try:
        socket.send(StatusRequest())
        reply = receive_reply(socket, timeout)
        return reply if isinstance(reply, RunStatus) else None
    finally:
        socket.close()


class ProgressPace:
    """Estimate the remaining time of a run from its last batches.

    >>> pace = ProgressPace()
    >>> for n in range(5): pace.observe(n, 10.0 * n)
    >>> pace.estimate_seconds(10, now=40.0), pace.estimate_seconds(10, now=90.0)
    (60.0, 108.0)
    """

    def __init__(self) -> None:
        # (time, batches committed by then)
        self.commits: deque[tuple[float, int]] = deque(maxlen=PACE_BATCHES + 1)

    def observe(self, committed: int, now: float) -> None:
        if not self.commits or committed > self.commits[-1][1]:
            self.commits.append((now, committed))

    def estimate_seconds(self, steps: int, now: float) -> float | None:
        """Return the seconds until `steps` batches are committed, or None before two commits.

        The batch in progress also counts if it takes longer than the last ones."""
        if len(self.commits) < 2:
            return None
        (first_time, first_committed), (last_time, committed) = self.commits[0], self.commits[-1]
        batches = committed - first_committed
        return (steps - committed) * max(
            (last_time - first_time) / batches, (now - first_time) / (batches + 1)
        )


def format_duration(seconds: float) -> str:
    """Format an estimate: `40 s`, `12 min`, `3.5 h`, `2.1 days`."""
    for limit, unit, name, form in (
        (90, 1, "s", ".0f"),
        (5400, 60, "min", ".0f"),
        (129600, 3600, "h", ".1f"),
    ):
        if seconds < limit:
            return f"{seconds / unit:{form}} {name}"
    return f"{seconds / 86400:.1f} days"


def format_sets(metrics: Metrics) -> str:
    """Format the newest results of the evaluation sets, without bounds; "" without any.

    The results of a mixture's tasks are shown with the task.

    >>> format_sets({"eval/hard": 0.25, "eval/hard_n": 4, "eval/hard_pass_at_8": 0.5})
    'hard 0.250 pass@8 0.500'
    """
    labels: dict[str, list[str]] = {}
    for metric, value in metrics.items():
        name, label = label_set(metric)
        if label and f"task/{name}_weight" not in metrics:
            labels.setdefault(name, []).append(f"{label.removeprefix(name).strip()} {value:.3f}")
    return "  ".join(f"{name} {' '.join(texts).strip()}" for name, texts in labels.items())


TASK_COLUMNS = (
    ("share", ".0%"),
    ("reward", ".3f"),
    ("lag", ".2f"),
    ("ess", ".3f"),
    ("removed", ".0f"),
)


def format_metric(metrics: Metrics, name: str, form: str) -> str:
    return format(metrics[name], form) if name in metrics else "-"


def build_task_rows(metrics: Metrics) -> list[tuple[str, ...]]:
    """Return a row for each task of a mixture, from the last step with its samples.

    The columns are title, share of the batch, reward, lag, ESS, removed groups, held-out reward.

    >>> build_task_rows({"task/a_share": 0.5, "task/a_removed": 3, "eval/a": 0.25})
    [('a', '50%', '-', '-', '-', '3', '0.250')]
    """
    titles = dict.fromkeys(
        name.removeprefix("task/").rpartition("_")[0]
        for name in metrics
        if name.startswith("task/")
    )

    return [
        (
            title,
            *(format_metric(metrics, f"task/{title}_{name}", form) for name, form in TASK_COLUMNS),
            format_metric(metrics, f"eval/{title}", ".3f"),
        )
        for title in titles
    ]


class TaskTable:
    """The tasks of a mixture in columns, or one below the other on a narrow terminal."""

    def __init__(self, metrics: Metrics) -> None:
        self.rows = [(*row[:3], row[-1], *row[3:-1]) for row in build_task_rows(metrics)]

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        columns = ("task", "share", "reward", "held-out", "lag", "ESS", "removed")
        table = TableBlock(columns, self.rows).as_text()
        if max(map(len, table.splitlines())) <= options.max_width:
            yield Text(table)
            return
        for title, *cells in self.rows:
            # a space that does not end a line joins a column with its cell
            pairs = (f"{column}\xa0{cell}" for column, cell in zip(columns[1:], cells, strict=True))
            text = "  ".join([title, *pairs])
            lines = textwrap.wrap(
                text, options.max_width, subsequent_indent="  ", break_on_hyphens=False
            )
            yield Text("\n".join(lines).replace("\xa0", " "))


def format_tasks(metrics: Metrics) -> str:
    """Format the tasks of a mixture with share, reward and held-out reward; "" without one.

    >>> shares = {"task/a_share": 0.5, "task/b_share": 0.5}
    >>> format_tasks(shares | {"task/a_reward": 0.25, "eval/b": 1.0})
    'a: share 50%, reward 0.250; b: share 50%, held-out 1.000'
    """
    descriptions = []
    for title, share, reward, *_, heldout in build_task_rows(metrics):
        values_by_label = (("share", share), ("reward", reward), ("held-out", heldout))
        values = ", ".join(f"{label} {value}" for label, value in values_by_label if value != "-")
        descriptions.append(f"{title}: {values}")
    return "; ".join(descriptions)


def label_set(metric: str) -> tuple[str, str]:
    """Return the set of a metric and its label in a plot, or "" for other metrics.

    >>> label_set("eval/hard"), label_set("eval/hard_pass_at_8"), label_set("eval/hard_greedy")
    (('hard', 'hard'), ('hard', 'hard pass@8'), ('hard', 'hard greedy'))
    >>> label_set("eval/hard_n"), label_set("eval/heldout"), label_set("eval/hard_pass_at_8_low")
    (('hard', ''), ('heldout', ''), ('hard', ''))
    """
    name, _, suffix = metric.removeprefix("eval/").partition("_")
    if not metric.startswith("eval/") or name in ("heldout", "ood"):
        return name, ""
    if suffix.startswith("pass_at_") and suffix.count("_") == 2:
        return name, f"{name} pass@{suffix.rpartition('_')[2]}"
    return name, f"{name} {suffix}".strip() if suffix in ("", "greedy") else ""


def describe(table: str, metrics: Metrics) -> str:
    """Describe what a table of health_checks.toml finds in the last step; "" for nothing.

    `rewards`, `link`: rewards or links that hold the run up.  `limit`: the adaptive lag limit.
    `window`: the admission window, its waiting and its price in lag.

    >>> last = {"time/reward_wait_share": 0.42, "reward/queue": 120.0, "reward/call_s": 0.2}
    >>> times = {"reward/workers": 1.0, "reward/wait_s": 20.0}
    >>> print(describe("rewards", last | times).replace(", ", ",\\n  "))
    rewards hold the generators up: idle 42% of the time for them,
      120 answers wait,
      0.2 s a call (processes: 1)
    >>> describe("link", {"link/fetch_share": 0.42, "link/fetch_mb_per_s": 11.9}).split(": ")
    ['the link holds generators up', 'fetching weights takes 42% of their time, 11.9 MB/s each']
    >>> change = {"limit/before": 2.0, "limit/ess": 0.91, "limit/idle": 0.2}
    >>> describe("limit", {"limit/now": 3.0} | change)
    'limit 3 (was 2: ESS 0.91, learner idle 20%)'
    >>> describe("window", {"window/now": 2.0, "window/wait": 0.24, "window/lower": 0.0})
    'window 2.0 batches (learner waits 24.0%)'
    """
    values = add_reward_wait({"link/fetch_mb_per_s": math.nan, **metrics})
    return ("; " if table == "link" else "").join(x.said for x in match_rules(table, values))


def describe_unused_tokens(ledger: Mapping[str, Metrics]) -> str:
    """Describe the tokens of trained batches that changed no weight; "" if they are few.

    >>> ledger = {"trained": {"tokens": 60.0}, "skipped": {"tokens": 30.0}}
    >>> describe_unused_tokens(ledger | {"rejected": {"tokens": 10.0}})
    'of the tokens of its batches 30% skipped by early stopping, 10% rejected'
    """
    tokens = {
        name: ledger.get(name, {}).get("tokens", 0.0) for name in ("trained", "skipped", "rejected")
    }
    total = max(sum(tokens.values()), 1.0)
    labels = (("skipped", "skipped by early stopping"), ("rejected", "rejected"))
    shares = [
        f"{tokens[name] / total:.0%} {label}"
        for name, label in labels
        if tokens[name] / total >= UNUSED
    ]
    return f"of the tokens of its batches {', '.join(shares)}" if shares else ""


def format_status(status: RunStatus, seconds_left: float | None = None) -> str:
    """Format progress, time left, accuracy, speed of both sides, lag and waits as one line.

    seconds_left: None if unknown."""
    metrics = status.metrics

    show = partial(format_metric, metrics)
    remaining = f" ({format_duration(seconds_left)} left)" if seconds_left else ""
    waits = [
        f"{escape_line(name)} waits {age:.0f} s for {escape_line(goal)}"
        for name, goal, _, age in status.waits
        if age > 1
    ]
    blocking = []
    if status.held_up is not None and waits:
        blocking = [escape_line(status.held_up.describe(), LONGEST_LINE)]
    slow = (
        describe("rewards", metrics),
        describe("link", metrics),
        describe_unused_tokens(status.ledger),
    )
    problems = "; ".join(filter(None, (*slow, *blocking, *waits)))
    return (
        f"step {status.committed}/{status.steps}{remaining}  reward {show('reward/mean', '.3f')}  "
        f"held-out {show('eval/heldout', '.3f')}  "
        f"generate {show('throughput/generator_tokens_per_s', ',.0f')} tok/s  learn "
        f"{show('throughput/learner_tokens_per_s', ',.0f')} tok/s  "
        f"lag {show('lag/mean', '.2f')} (max {show('lag/max', '.0f')})"
        + "".join(
            f"  {text}"
            for text in (
                format_tasks(metrics),
                format_sets(metrics),
                describe("limit", metrics),
                describe("window", metrics),
            )
            if text
        )
        + (f"  {problems}" if problems else "")
    )


class StatusLines:
    """Print a line about a run to stderr every PLAIN_S seconds."""

    def __init__(self) -> None:
        self.pace = ProgressPace()
        self.printed_at = time.monotonic()

    def show(self, status: RunStatus, now: float) -> None:
        """Print the line of this status if it is due.  now: CLOCK_MONOTONIC seconds."""
        self.pace.observe(status.committed, now)
        if now - self.printed_at > PLAIN_S:
            self.printed_at = now
            line = format_status(status, self.pace.estimate_seconds(status.steps, now))
            print(line, file=sys.stderr)


def _build_progress(status: RunStatus, seconds_left: float | None) -> Any:
    """Build the first row of the table: steps, a bar, the time left."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    row = Table.grid(padding=(0, 2))
    row.add_column(no_wrap=True)
    row.add_column(max_width=40)
    row.add_column(no_wrap=True)
    row.add_row(
        f"{status.committed}/{status.steps}",
        ProgressBar(status.steps, status.committed),
        f"{format_duration(seconds_left)} left" if seconds_left else "",
    )
    return row


def build_table(status: RunStatus, seconds_left: float | None = None) -> Any:
    """Build the table for a terminal; seconds_left: None if unknown.

    The most important rows come first, because short windows cut the bottom."""
    from rich.table import Table
    from rich.text import Text

    metrics = status.metrics
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("step", _build_progress(status, seconds_left))

    for title, entries in ROWS.items():
        if title != "rewards" or "reward/queue" in metrics:
            cells = (
                f"{label} {format_metric(metrics, name, form)}"
                for name, (label, form) in entries.items()
            )
            grid.add_row(title, "   ".join(cells))
        if title == "accuracy" and (text := format_sets(metrics)):
            grid.add_row("sets", Text(text))
        if title == "accuracy" and build_task_rows(metrics):
            grid.add_row("tasks", TaskTable(metrics))
    for title in ("limit", "window"):
        if text := describe(title, metrics):
            grid.add_row(title, text)
    if text := describe_unused_tokens(status.ledger):
        grid.add_row("not used", text)
    if status.held_up is not None:
        grid.add_row("held up", Text(escape_line(status.held_up.describe(), LONGEST_LINE)))
    for name, goal, holder, age in status.waits:
        grid.add_row(
            "waits",
            Text(
                f"{escape_line(name)} {age:.1f} s for {escape_line(goal)} ({escape_line(holder)})"
            ),
        )
    return grid


def follow(
    address: str,
    curve_dir: str,
    tick: Callable[[], bool],
    observe: Callable[[RunStatus], None] = lambda _: None,
) -> None:
    """Show the run until `tick`, which is called about 10 times per second, returns True."""
    socket = PeerSocket(address, curve_dir)
    live: Any = None
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console
        from rich.live import Live

        live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        live.start()
    requested_at = 0.0
    status = None
    lines = StatusLines()
    try:
        while not tick():
            now = time.monotonic()
            if now - requested_at > LIVE_S:
                requested_at = now
                socket.send(StatusRequest())
            reply = receive_reply(socket, 0.1)
            if isinstance(reply, RunStatus):
                status = reply
                lines.pace.observe(reply.committed, now)
                observe(reply)
            if status is None:
                continue
            if live is not None and reply is not None:
                seconds_left = lines.pace.estimate_seconds(status.steps, now)
                live.update(build_table(status, seconds_left), refresh=True)
            elif live is None:
                lines.show(status, now)
        if status is not None and live is None:
            print(format_status(status), file=sys.stderr)
    finally:
        if live is not None:
            live.stop()
        socket.close()
