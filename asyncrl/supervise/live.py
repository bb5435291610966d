"""The live view of a run, on stderr: a table on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.contract.errors import PeerUnreachable
from asyncrl.contract.messages import RunStatus, StatusRequest
from asyncrl.contract.printable import LONGEST_LINE, escape_line
from asyncrl.records.health_checks import HELD_UP, calls_explain
from asyncrl.transport.sockets import PeerSocket

PLAIN_S = 10.0
LIVE_S = 0.25
UNUSED = 0.01  # smallest share of unused tokens in trained batches that is shown
SLOW_ACK_S = 1.0  # from a delivery to its acknowledgement; a near buffer takes milliseconds
PACE_BATCHES = 20


def receive_reply(socket: PeerSocket, timeout: float) -> object:
    """The next message within `timeout` seconds, or None.

    A buffer that sends invalid messages counts as one that does not answer: it must not end a
    process that only observes."""
    try:
        return socket.recv(timeout)
    except PeerUnreachable:
        socket.broken_in_a_row = 0
        return None


def ask(address: str, curve_dir: str, timeout: float) -> RunStatus | None:
    """The buffer's status, or None when it does not answer within `timeout` seconds."""
    socket = PeerSocket(address, curve_dir)
    try:
        socket.send(StatusRequest())
        reply = receive_reply(socket, timeout)
        return reply if isinstance(reply, RunStatus) else None
    finally:
        socket.close()


class ProgressPace:
    """Estimate how long the rest of a run takes, from its last batches.

    >>> pace = ProgressPace()
    >>> for n in range(5): pace.observe(n, 10.0 * n)
    >>> pace.seconds_left(10, now=40.0), pace.seconds_left(10, now=90.0)
    (60.0, 108.0)
    """

    def __init__(self) -> None:
        # (time, batches committed by then)
        self.commits: deque[tuple[float, int]] = deque(maxlen=PACE_BATCHES + 1)

    def observe(self, committed: int, now: float) -> None:
        if not self.commits or committed > self.commits[-1][1]:
            self.commits.append((now, committed))

    def seconds_left(self, steps: int, now: float) -> float | None:
        """Seconds until `steps` batches are committed; None before two commits were seen.

        The batch in progress counts too when it takes longer than the last ones."""
        if len(self.commits) < 2:
            return None
        (first, at_first), (last, committed) = self.commits[0], self.commits[-1]
        batches = committed - at_first
        return (steps - committed) * max((last - first) / batches, (now - first) / (batches + 1))


def duration(seconds: float) -> str:
    """Format an estimate for a reader: `40 s`, `12 min`, `3.5 h`, `2.1 days`."""
    for limit, unit, name, form in (
        (90, 1, "s", ".0f"),
        (5400, 60, "min", ".0f"),
        (129600, 3600, "h", ".1f"),
    ):
        if seconds < limit:
            return f"{seconds / unit:{form}} {name}"
    return f"{seconds / 86400:.1f} days"


def sets(metrics: Mapping[str, float]) -> str:
    """The newest results of the evaluation sets, without their bounds; "" without any.

    Those of a mixture's tasks are shown with the task.

    >>> sets({"eval/hard": 0.25, "eval/hard_n": 4, "eval/hard_pass_at_8": 0.5, "eval/ood": 0.1})
    'hard 0.250 pass@8 0.500'
    """
    parts: dict[str, list[str]] = {}
    for metric, value in metrics.items():
        name, label = set_label(metric)
        if label and f"task/{name}_weight" not in metrics:
            parts.setdefault(name, []).append(f"{label.removeprefix(name).strip()} {value:.3f}")
    return "  ".join(f"{name} {' '.join(each).strip()}" for name, each in parts.items())


TASK_COLUMNS = (
    ("share", ".0%"),
    ("reward", ".3f"),
    ("lag", ".2f"),
    ("ess", ".3f"),
    ("removed", ".0f"),
)


def task_rows(metrics: Mapping[str, float]) -> list[tuple[str, ...]]:
    """One row for each task of a mixture, from the last step with its samples; [] without one.

    The columns are title, share of the batch, reward, lag, ESS, removed groups, held-out reward.

    >>> task_rows({"task/a_share": 0.5, "task/a_removed": 3, "eval/a": 0.25})
    [('a', '50%', '-', '-', '-', '3', '0.250')]
    """
    titles = dict.fromkeys(
        name.removeprefix("task/").rpartition("_")[0]
        for name in metrics
        if name.startswith("task/")
    )

    def describe(name: str, form: str) -> str:
        return format(metrics[name], form) if name in metrics else "-"

    return [
        (
            title,
            *(describe(f"task/{title}_{column}", form) for column, form in TASK_COLUMNS),
            describe(f"eval/{title}", ".3f"),
        )
        for title in titles
    ]


class TaskTable:
    """The tasks of a mixture in columns, or one below the other where the terminal is narrow."""

    def __init__(self, metrics: Mapping[str, float]) -> None:
        self.rows = [
            (title, share, reward, heldout, lag, ess, removed)
            for title, share, reward, lag, ess, removed, heldout in task_rows(metrics)
        ]

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.table import Table
        from rich.text import Text

        columns = ("task", "share", "reward", "held-out", "lag", "ESS", "removed")
        grid = Table.grid(padding=(0, 2))
        for column in columns:
            grid.add_column(no_wrap=True, justify="left" if column == "task" else "right")
        for row in (columns, *self.rows):
            grid.add_row(*(Text(cell) for cell in row))
        if console.measure(grid, options=options.update(width=500)).maximum <= options.max_width:
            yield grid
            return
        for title, *cells in self.rows:
            lines = [title]
            for column, cell in zip(columns[1:], cells, strict=True):
                longer = f"{lines[-1]}  {column} {cell}"
                if len(longer) <= options.max_width:
                    lines[-1] = longer
                else:
                    lines.append(f"  {column} {cell}")
            yield Text("\n".join(lines))


def part_rows(metrics: Mapping[str, float]) -> list[tuple[str, Any]]:
    """The rows of the evaluation sets and the tasks of a mixture, for the live table."""
    from rich.text import Text

    of_sets = [("sets", Text(shown))] if (shown := sets(metrics)) else []
    return of_sets + ([("tasks", TaskTable(metrics))] if task_rows(metrics) else [])


def tasks(metrics: Mapping[str, float]) -> str:
    """The tasks of a mixture with share, reward and held-out reward; "" without one.

    >>> tasks({"task/a_share": 0.5, "task/a_reward": 0.25, "task/b_share": 0.5, "eval/b": 1.0})
    'a: share 50%, reward 0.250; b: share 50%, held-out 1.000'
    """
    shown = []
    for title, share, reward, *_, heldout in task_rows(metrics):
        named = (("share", share), ("reward", reward), ("held-out", heldout))
        values = ", ".join(f"{label} {value}" for label, value in named if value != "-")
        shown.append(f"{title}: {values}")
    return "; ".join(shown)


def set_label(metric: str) -> tuple[str, str]:
    """Return the set of a metric and its label in a plot; no label for another metric.

    >>> set_label("eval/hard"), set_label("eval/hard_pass_at_8"), set_label("eval/hard_greedy")
    (('hard', 'hard'), ('hard', 'hard pass@8'), ('hard', 'hard greedy'))
    >>> set_label("eval/hard_n"), set_label("eval/heldout"), set_label("eval/hard_pass_at_8_low")
    (('hard', ''), ('heldout', ''), ('hard', ''))
    """
    name, _, rest = metric.removeprefix("eval/").partition("_")
    if not metric.startswith("eval/") or name in ("heldout", "ood"):
        return name, ""
    if rest.startswith("pass_at_") and rest.count("_") == 2:
        return name, f"{name} pass@{rest.rpartition('_')[2]}"
    return name, f"{name} {rest}".strip() if rest in ("", "greedy") else ""


def rewards(metrics: Mapping[str, float]) -> str:
    """Describe how rewards hold the run up, at its last step; "" while they do not.

    >>> last = {"time/reward_wait_share": 0.42, "reward/queue": 120.0, "reward/call_s": 0.2}
    >>> print(rewards(last | {"reward/workers": 1.0}).replace(", ", ",\\n  "))
    rewards hold the generators up: idle 42% of the time for them,
      120 answers wait,
      0.2 s a call (processes: 1)
    """
    if metrics.get("time/reward_wait_share", 0.0) < HELD_UP:
        return ""
    queue, call, workers = (
        metrics.get(f"reward/{x}", math.nan) for x in ("queue", "call_s", "workers")
    )
    wait = metrics.get("reward/wait_s", 0.0)
    if math.isnan(call) or (wait and not calls_explain(queue, wait, call, workers)):
        return ""
    return (
        f"rewards hold the generators up: idle {metrics['time/reward_wait_share']:.0%} of the time "
        f"for them, {queue:.0f} answers wait, "
        f"{call:.2g} s a call (processes: {workers:.0f})"
    )


def describe_slow_link(metrics: Mapping[str, float]) -> str:
    """Describe how the generators' network link holds the run up, at its last step; "" if not.

    >>> describe_slow_link({"link/fetch_share": 0.42, "link/fetch_mb_per_s": 11.9}).split(": ")
    ['the link holds generators up', 'fetching weights takes 42% of their time, 11.9 MB/s each']
    >>> describe_slow_link({"link/fetch_share": 0.01, "link/ack_s": 3.2})
    'the link holds deliveries up: acknowledged after 3.2 s'
    >>> describe_slow_link({"link/ack_s": 0.03})
    ''
    """
    share, ack = metrics.get("link/fetch_share", 0.0), metrics.get("link/ack_s", 0.0)
    slow = []
    if share >= HELD_UP:
        rate = metrics.get("link/fetch_mb_per_s", math.nan)
        slow.append(
            f"generators up: fetching weights takes {share:.0%} of their time, {rate:.3g} MB/s each"
        )
    if ack >= SLOW_ACK_S:
        slow.append(f"deliveries up: acknowledged after {ack:.2g} s")
    return "the link holds " + "; the link holds ".join(slow) if slow else ""


def describe_unused_tokens(ledger: Mapping[str, Mapping[str, float]]) -> str:
    """Describe the tokens of trained batches that changed no weight; "" while they are few.

    >>> ledger = {"trained": {"tokens": 60.0}, "skipped": {"tokens": 30.0}}
    >>> describe_unused_tokens(ledger | {"rejected": {"tokens": 10.0}})
    'of the tokens of its batches 30% skipped by early stopping, 10% rejected'
    """
    tokens = {
        name: ledger.get(name, {}).get("tokens", 0.0) for name in ("trained", "skipped", "rejected")
    }
    total = max(sum(tokens.values()), 1.0)
    words = (("skipped", "skipped by early stopping"), ("rejected", "rejected"))
    shares = [
        f"{tokens[name] / total:.0%} {label}"
        for name, label in words
        if tokens[name] / total >= UNUSED
    ]
    return f"of the tokens of its batches {', '.join(shares)}" if shares else ""


def limit(metrics: Mapping[str, float]) -> str:
    """The adaptive lag limit and the reason for its last change; "" where it is constant.

    >>> limit({"limit/now": 3.0, "limit/before": 2.0, "limit/ess": 0.91, "limit/idle": 0.2})
    'limit 3 (was 2: ESS 0.91, learner idle 20%)'
    >>> limit({"limit/now": 1.0})
    'limit 1'
    """
    if "limit/now" not in metrics:
        return ""
    now = f"limit {metrics['limit/now']:.0f}"
    return f"{now} ({describe_limit_change(metrics)})" if "limit/before" in metrics else now


def describe_window(metrics: Mapping[str, float]) -> str:
    """The admission window, its waiting, and its price in lag; "" if the limit is always filled.

    >>> describe_window({"window/now": 1.375, "window/wait": 0.018, "window/lower": 0.25})
    'window 1.4 batches (learner waits 1.8%, half of that would cost 0.2 lag)'
    >>> describe_window({"window/now": 2.0, "window/wait": 0.24, "window/lower": 0.0})
    'window 2.0 batches (learner waits 24.0%)'
    """
    if "window/now" not in metrics:
        return ""
    price = f"{metrics['window/lower']:.1f}"
    half = f", half of that would cost {price} lag" if price != "0.0" else ""
    return (
        f"window {metrics['window/now']:.1f} batches "
        f"(learner waits {metrics['window/wait']:.1%}{half})"
    )


def describe_limit_change(metrics: Mapping[str, float]) -> str:
    """The reason for a change of the limit, at a step that has `limit/before`."""
    return (
        f"was {metrics['limit/before']:.0f}: ESS {metrics['limit/ess']:.2f}, learner idle "
        f"{metrics['limit/idle']:.0%}"
    )


def status_line(status: RunStatus, left: float | None = None) -> str:
    """One line: progress, time left, accuracy, speed of both sides, lag, and waits.

    left: seconds, None if unknown."""
    metrics = status.metrics

    def show(name: str, form: str) -> str:
        return format(metrics[name], form) if name in metrics else "-"

    rest = f" ({duration(left)} left)" if left else ""
    waits = [
        f"{escape_line(name)} waits {age:.0f} s for {escape_line(goal)}"
        for name, goal, _, age in status.waits
        if age > 1
    ]
    blocking = (
        [escape_line(status.held_up.describe(), LONGEST_LINE)]
        if status.held_up is not None and waits
        else []
    )
    slow = rewards(metrics), describe_slow_link(metrics), describe_unused_tokens(status.ledger)
    problems = "; ".join(filter(None, (*slow, *blocking, *waits)))
    return (
        f"step {status.committed}/{status.steps}{rest}  reward {show('reward/mean', '.3f')}  "
        f"held-out {show('eval/heldout', '.3f')}  "
        f"generate {show('throughput/generator_tokens_per_s', ',.0f')} tok/s  learn "
        f"{show('throughput/learner_tokens_per_s', ',.0f')} tok/s  "
        f"lag {show('lag/mean', '.2f')} (max {show('lag/max', '.0f')})"
        + "".join(
            f"  {shown}"
            for shown in (
                tasks(metrics),
                sets(metrics),
                limit(metrics),
                describe_window(metrics),
            )
            if shown
        )
        + (f"  {problems}" if problems else "")
    )


def _progress(status: RunStatus, left: float | None) -> Any:
    """The first row of `table`: steps, a bar, the time left."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    row = Table.grid(padding=(0, 2))
    row.add_column(no_wrap=True)
    row.add_column(max_width=40)
    row.add_column(no_wrap=True)
    row.add_row(
        f"{status.committed}/{status.steps}",
        ProgressBar(status.steps, status.committed),
        f"{duration(left)} left" if left else "",
    )
    return row


def table(status: RunStatus, left: float | None = None) -> Any:
    """The table for a terminal.

    left: seconds, None if unknown.  The most important rows come first: short windows cut the
    bottom."""
    from rich.table import Table
    from rich.text import Text

    metrics = status.metrics
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("step", _progress(status, left))

    def row(title: str, *parts: tuple[str, str, str]) -> None:
        grid.add_row(
            title,
            "   ".join(
                f"{label} {format(metrics[name], form) if name in metrics else '-'}"
                for label, name, form in parts
            ),
        )

    row(
        "accuracy",
        ("held-out", "eval/heldout", ".3f"),
        ("out of distribution", "eval/ood", ".3f"),
        ("reward", "reward/mean", ".3f"),
    )
    for title, part in part_rows(metrics):
        grid.add_row(title, part)
    row(
        "learner",
        ("tok/s", "throughput/learner_tokens_per_s", ",.0f"),
        ("idle", "time/learner_idle_share", ".0%"),
        ("step s", "time/step", ".2f"),
    )
    row(
        "generators",
        ("tok/s", "throughput/generator_tokens_per_s", ",.0f"),
        ("idle", "time/generator_idle_share", ".0%"),
    )
    if "reward/queue" in metrics:
        row(
            "rewards",
            ("waiting", "reward/queue", ".0f"),
            ("s until judged", "reward/wait_s", ".2g"),
            ("s a call", "reward/call_s", ".2g"),
            ("processes", "reward/workers", ".0f"),
            ("generators idle for them", "time/reward_wait_share", ".0%"),
        )
    row(
        "lag",
        ("mean", "lag/mean", ".2f"),
        ("max", "lag/max", ".0f"),
        ("ESS", "is/ess", ".3f"),
        ("KL mu-start", "kl/behavior_start_k3", ".2e"),
    )
    row(
        "policy",
        ("entropy", "policy/entropy", ".3f"),
        ("length", "answer/length", ".1f"),
        ("grad norm", "optim/grad_norm", ".3f"),
    )
    if shown := limit(metrics):
        grid.add_row("limit", shown)
    if shown := describe_window(metrics):
        grid.add_row("window", shown)
    if shown := describe_unused_tokens(status.ledger):
        grid.add_row("not used", shown)
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
    """Show the run until `tick`, called about 20 times a second, returns True."""
    socket = PeerSocket(address, curve_dir)
    fancy = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    live: Any = None
    if fancy:
        from rich.console import Console
        from rich.live import Live

        live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        live.start()
    asked = 0.0
    shown = time.monotonic()
    newest = None
    pace = ProgressPace()
    try:
        while not tick():
            now = time.monotonic()
            if now - asked > LIVE_S:
                asked = now
                socket.send(StatusRequest())
            reply = receive_reply(socket, 0.05)
            if isinstance(reply, RunStatus):
                newest = reply
                pace.observe(reply.committed, now)
                observe(reply)
            if newest is None:
                continue
            if live is not None and reply is not None:
                live.update(table(newest, pace.seconds_left(newest.steps, now)), refresh=True)
            elif live is None and now - shown > PLAIN_S:
                shown = now
                print(
                    status_line(newest, pace.seconds_left(newest.steps, now)),
                    file=sys.stderr,
                    flush=True,
                )
        if newest is not None and live is None:
            print(status_line(newest), file=sys.stderr, flush=True)
    finally:
        if live is not None:
            live.stop()
        socket.close()
