import os
import sys
import time
from pathlib import Path
from typing import Any

from asyncrl.tasks.calc import Calculator


class Talks:
    """Answers every word with its length, three times; pays for each a tenth of it."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        self.first = options["first"]
        return options["prompt"].text, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        reward = len(text) / 10
        return f"{len(text)}=", reward, self.turns >= 3, False, {"parts": {"turns": 1.0}}


class Account:
    """Tools with a state, in the form of TRL's environments."""

    def __init__(self, fee: int = 0) -> None:
        self.fee = fee

    def reset(self, goal: int, **row: Any) -> str | None:
        self.goal, self.balance, self.row = goal, 0, row
        return f" (goal {goal}, tags {row['tags']})" if row.get("tags") else None

    def deposit(self, amount: int) -> str:
        """Deposit money.

        Args:
            amount (int): How much, in whole dollars.

        Returns:
            str: The balance."""
        self.balance += amount - self.fee
        return f"balance {self.balance}"

    async def audit(self) -> str:
        """Tell the balance."""
        return f"audited {self.balance}"

    def _secret(self) -> None:
        raise AssertionError

    def get_reward(self) -> float:
        return 1.0 if self.balance == self.goal else self.balance / 100


class Ledger(Account):
    """The same without a reward of its own."""

    get_reward = None


class Wordless:
    def reset(self) -> None:
        """Begin."""


class Resetless:
    def speak(self) -> str:
        return ""


class Endless(Talks):
    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"{len(text)}=", 0.25, False, False, {}


class Fails(Talks):
    """By the prompt: raises, returns no number, hangs, ends or garbles its process, or talks."""

    def step(self, text: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        what = self.kind
        if what == "raises":
            raise KeyError("gone")
        if what == "nan":
            return "", float("nan"), True, False, {}
        if what == "hangs":
            time.sleep(3600)
        if what == "dies":
            os._exit(3)
        if what == "garbles":
            os.write(int(sys.argv[1]), b"\xff" * 8)  # into the socket of its process
        return super().step(text)

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.kind = options["prompt"].meta.get("kind", "talks")
        if self.kind == "hangs at reset":
            time.sleep(3600)
        return super().reset(seed=seed, options=options)


class WaitsForGate:
    """Waits, in its second turn, until a file is there."""

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        gate = Path(os.environ["AGENT_GATE"])
        if self.turns == 1:
            gate.with_suffix(".reached").touch()
        while self.turns == 1 and not gate.exists():
            time.sleep(0.01)
        return super().step(text)


class Slow(WaitsForGate, Talks):
    pass


class Held(WaitsForGate, Calculator):
    pass


class Stuck(Talks):
    """One step of one session never ends: the first of training that comes to it."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.split = options["prompt"].split
        return super().reset(seed=seed, options=options)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            if self.split != "train":
                return super().step(text)
            Path(os.environ["AGENT_GATE"]).touch(exist_ok=False)
        except FileExistsError:
            return super().step(text)
        while True:
            time.sleep(3600)


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return int(a) + int(b)


def is_four(prompt: Any, text: str) -> float:
    return float(text == "4")


def plays(prompt: Any, session: Any) -> Any:
    """An agent as agent.function: by its prompt it returns, raises, waits or ends its process."""
    gate = Path(prompt.meta.get("gate", "/"))
    while not gate.exists():
        time.sleep(0.005)
    what = prompt.meta["kind"]
    if what == "raises":
        raise KeyError("gone")
    if what == "dies":
        os._exit(3)
    return {"pays": 0.5, "parts": {"reward": 1, "neat": 2}, "judge": None, "nan": "x"}.get(what)


async def plays_later(prompt: Any, session: Any) -> float:
    return float(session.first) + len(session.base_url.rpartition("/")[2])


class Longer:
    """A game of two: three moves each, any text is one; a player is told how long the last move of
    the other was.  Who wrote more wins 1, a draw pays both a half."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> None:
        self.said = options["prompt"].text
        self.kind = options["prompt"].meta.get("kind", "")
        self.lengths = [0, 0]
        self.turns = 0

    def turn(self) -> tuple[int, str]:
        if self.kind == "three":
            return 2, ""
        return self.turns % 2, self.said

    def play(self, text: str) -> tuple[float, float] | None:
        self.lengths[self.turns % 2] += len(text)
        self.said = f"{len(text)}="
        self.turns += 1
        if self.turns < 6 and not (self.kind == "quits" and text == "h"):
            return None
        ahead = self.lengths[0] - self.lengths[1]
        first = 0.5 + 0.5 * ((ahead > 0) - (ahead < 0))
        return first, 1 - first

    def moves(self) -> list[str]:
        return [] if self.kind == "mute" else ["a", "bb"]

    def parts(self, player: int) -> dict[str, float]:
        return {"length": float(self.lengths[player])}


def answers(text: str) -> Any:
    """An opponent: as many letters as it was told things; raises when told of nothing."""
    if text.endswith("0="):
        raise KeyError("gone")
    return None if text.endswith("1=") else "c" * (text.count("=") + 1)
