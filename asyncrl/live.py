"""The live view of a run: a table on a terminal, a plain line every ten seconds elsewhere; both on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from asyncrl.messages import Status, Watch
from asyncrl.wires import PeerSocket

PLAIN_S, LIVE_S = 10.0, 0.25


def ask(address: str, curve_dir: str, timeout: float) -> Status | None:
    """The buffer's status, or None when nobody answers in time."""
    socket = PeerSocket(address, curve_dir)
    try:
        socket.send(Watch())
        reply = socket.recv(timeout)
        return reply if isinstance(reply, Status) else None
    finally:
        socket.close()


def line(s: Status) -> str:
    """One line: progress, accuracy, speed of both sides, lag, who waits."""
    m = s.metrics

    def show(name: str, form: str) -> str:
        return format(m[name], form) if name in m else "-"

    waits = "; ".join(f"{who} waits {age:.0f} s for {what}" for who, what, _, age in s.waits if age > 1)
    return (
        f"step {s.committed}/{s.steps}  reward {show('reward/mean', '.3f')}  held-out {show('eval/heldout', '.3f')}  "
        f"generate {show('throughput/generator_tokens_per_s', ',.0f')} tok/s  learn {show('throughput/learner_tokens_per_s', ',.0f')} tok/s  "
        f"lag {show('lag/mean', '.2f')} (max {show('lag/max', '.0f')})" + (f"  {waits}" if waits else "")
    )


def table(s: Status) -> Any:
    """The terminal's view; the learner and what matters most come first, because short windows cut the bottom."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    m = s.metrics
    t = Table.grid(padding=(0, 2))
    t.add_row("step", f"{s.committed}/{s.steps}", ProgressBar(s.steps, s.committed, width=40))

    def row(title: str, *parts: tuple[str, str, str]) -> None:
        t.add_row(title, "", "   ".join(f"{label} {format(m[name], form) if name in m else '-'}" for label, name, form in parts))

    row("accuracy", ("held-out", "eval/heldout", ".3f"), ("out of distribution", "eval/ood", ".3f"), ("reward", "reward/mean", ".3f"))
    row("learner", ("tok/s", "throughput/learner_tokens_per_s", ",.0f"), ("idle", "time/learner_idle_share", ".0%"), ("step s", "time/step", ".2f"))
    row("generators", ("tok/s", "throughput/generator_tokens_per_s", ",.0f"), ("idle", "time/generator_idle_share", ".0%"))
    row("lag", ("mean", "lag/mean", ".2f"), ("max", "lag/max", ".0f"), ("ESS", "is/ess", ".3f"), ("KL mu-start", "kl/behavior_start_k3", ".2e"))
    row("policy", ("entropy", "policy/entropy", ".3f"), ("length", "answer/length", ".1f"), ("grad norm", "optim/grad_norm", ".3f"))
    for who, what, on, age in s.waits:
        t.add_row("waits", who, f"{age:.1f} s for {what} ({on})")
    return t


def follow(address: str, curve_dir: str, tick: Callable[[], bool], observe: Callable[[Status], None] = lambda _: None) -> None:
    """Show the run until `tick` (called about 20 times a second) says that it is over."""
    socket = PeerSocket(address, curve_dir)
    fancy = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    live: Any = None
    if fancy:
        from rich.console import Console
        from rich.live import Live

        live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        live.start()
    asked, shown, newest = 0.0, time.monotonic(), None
    try:
        while not tick():
            now = time.monotonic()
            if now - asked > LIVE_S:
                asked = now
                socket.send(Watch())
            reply = socket.recv(0.05)
            if isinstance(reply, Status):
                newest = reply
                observe(reply)
            if newest is None:
                continue
            if live is not None and reply is not None:
                live.update(table(newest), refresh=True)
            elif live is None and now - shown > PLAIN_S:
                shown = now
                print(line(newest), file=sys.stderr, flush=True)
        if newest is not None and live is None:
            print(line(newest), file=sys.stderr, flush=True)
    finally:
        if live is not None:
            live.stop()
        socket.close()
