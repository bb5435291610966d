"""One fault of `benchmarks/chaos.py`: the victim, its point, the action, and its recovery."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Any

from lib.chaos import board as b

AWAIT_S = 4.0  # how long a victim has to reach its point


@dataclass(frozen=True)
class Wanted:
    """The kinds, points and actions that faults are sampled from; empty: all."""

    kinds: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    topology: str = "tickets"

    def choices(self) -> list[tuple[str, str, str]]:
        """(kind, point, action)"""
        return [
            (kind, point, action)
            for kind in b.TOPOLOGIES[self.topology]
            for point in b.POINTS[kind]
            for action in b.MAY[kind]
            if (not self.kinds or kind in self.kinds)
            and (not self.points or point in self.points)
            and (not self.actions or action in self.actions)
            # a disk is full when something is written
            and (action != "disk" or point in ("idle", "mid-journal", "mid-checkpoint"))
        ]


class Fault:
    """From the order to the victim's next work and the next trained batch.

    `turn` is called again and again, until `state` is "over" (recovered), or "none" (the run ended
    before)."""

    def __init__(self, board: b.Board, drawn: tuple[str, str, str], choice: random.Random) -> None:
        self.board = board
        kind, self.point, self.action = drawn
        roles = [role for role in b.ROLES if b.kind_of(role) == kind]
        self.role = choice.choice(roles)
        self.kind = kind
        # beyond the lease now and then
        self.stop_s = 3.5 if choice.random() < 0.05 else choice.uniform(0.05, 0.5)
        self.jump_s = choice.uniform(0.5, 8.0)
        self.state = "ordered"
        self.anywhere = False
        self.reported: tuple[int, int, int] = (0, 0, 0)
        self.ordered = self.struck = self.went_on = time.perf_counter()
        self.seconds = 0.0
        self.beside: list[str] = []  # the faults of others at the same time
        board.give(self.role, self.point, self.action, self.jump_s)

    @property
    def name(self) -> str:
        """victim: what, where"""
        what = "kill" if self.anywhere else self.action
        return f"{self.kind}: {what} {'anywhere' if self.anywhere else self.point}"

    def numbers(self) -> tuple[int, int, int]:
        """The victim's lives and work, and the batches trained."""
        return (
            self.board.number(self.role, b.LIVES),
            self.board.number(self.role, b.WORK),
            self.board.number("learner", b.WORK),
        )

    def turn(self) -> None:
        now = time.perf_counter()
        if self.state == "ordered":
            if self.board.obeyed(self.role):
                self.strike(now)
            elif now - self.ordered > AWAIT_S:
                self.board.take_back(self.role)
                if self.board.obeyed(self.role):
                    return self.strike(now)
                self.anywhere = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.board.number(self.role, b.PID), signal.SIGKILL)
                self.strike(now)
        elif self.state == "stopped" and now - self.struck > self.stop_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.board.number(self.role, b.PID), signal.SIGCONT)
            self.state = "going on"
            self.went_on = now
        elif self.state == "dead" and self.board.number(self.role, b.LIVES) > self.reported[0]:
            # count from here on: earlier work of other processes does not show its recovery
            self.reported = self.numbers()
            self.state = "going on"
        elif self.state == "going on":
            _, work, batches = self.numbers()
            if work > self.reported[1] and batches > self.reported[2]:
                self.state = "over"
                self.seconds = now - self.went_on

    def strike(self, now: float) -> None:
        self.struck = self.went_on = now
        self.reported = self.numbers()
        if self.anywhere or self.action in ("kill", "flip"):
            self.state = "dead"
        else:
            self.state = "stopped" if self.action == "stop" else "going on"

    def give_up(self) -> None:
        """The run has ended: what was done and needs no more is over; the rest never was."""
        self.board.take_back(self.role)
        self.state = "over" if self.state in ("dead", "going on") else "none"
        self.seconds = time.perf_counter() - self.went_on

    def row(self) -> dict[str, Any]:
        return {
            "what": self.name,
            "kind": self.kind,
            "killed": self.anywhere or self.action in ("kill", "flip"),
            "seconds": round(self.seconds, 4),
            "beside": self.beside,
        }
