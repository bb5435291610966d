import signal
from pathlib import Path

import pytest
from process_kit import ROOT

from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError
from asyncrl.supervise.hosts import ProcessSpec
from asyncrl.supervise.run import Supervisor


class Pretended:
    """A process of nobody: it runs until `code` is set."""

    def __init__(self, order: ProcessSpec, events: list[str]) -> None:
        self.order = order
        self.events = events
        self.pid = 4711
        self.code: int | None = None
        self.refusal: AsyncrlError | None = None
        self.deaf = False
        self.closed = 0

    def poll(self) -> int | None:
        return self.code

    def signal(self, number: int) -> None:
        self.events.append(f"{self.order.name} {signal.Signals(number).name}")
        if not self.deaf:
            self.code = 130 if number == signal.SIGTERM else -number

    def kill(self) -> None:
        self.events.append(f"{self.order.name} killed")
        self.code = -signal.SIGKILL

    def read_refusal(self) -> AsyncrlError | None:
        return self.refusal

    def tail(self, lines: int) -> list[str]:
        return [f"the last {lines} lines of {self.order.name}"]

    def close(self) -> None:
        self.closed += 1


class Pretender:
    def __init__(self) -> None:
        self.made: list[Pretended] = []
        self.events: list[str] = []
        self.places: int | None = None

    def prepare(self) -> None:
        self.events.append("prepared")

    def start(self, order: ProcessSpec) -> Pretended:
        self.made.append(Pretended(order, self.events))
        return self.made[-1]

    def count_slots(self) -> int | None:
        return self.places

    def close(self) -> None:
        self.events.append("closed")

    def newest(self, name: str) -> Pretended:
        return [process for process in self.made if process.order.name == name][-1]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, said: list[str]) -> Supervisor:
    sets = ["generators=2", "watchdog.restarts=2", "learner.threads=3"]
    made = Supervisor(
        load.load(ROOT / "configs" / "demo.toml", sets), tmp_path, said.append, Pretender()
    )
    made.start()
    return made


def maker(supervisor: Supervisor) -> Pretender:
    assert isinstance(supervisor.launcher, Pretender)
    return supervisor.launcher
