from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from process_kit import ROOT

from actors.engine import Completion, CompletionRequest
from actors.generator import Generator
from asyncrl.config import load as config_load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import rundir

CONNECT_S, STARTUP_S = 5000, 7000  # longer than any test stands still


TINY = (
    f"wires.connect_s={CONNECT_S}",
    f"watchdog.startup_s={STARTUP_S}",
    "reward.deadline_s=600",
    "generator.context=48",
    "generator.max_new_tokens=12",
)


class Engine:
    """Rows that end when the test says so."""

    slots = 8
    steps_made = 0

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, int], CompletionRequest] = {}
        self.loads: list[Label] = []
        self.aborted: list[tuple[int, int, int]] = []
        self.closed = False

    @property
    def active(self) -> int:
        return len(self.rows)

    def load(self, tensors: Any, label: Label, digest: str, probe: bytes) -> None:
        self.loads.append(label)
        self.given = tensors, digest, probe

    def add(self, requests: Sequence[CompletionRequest]) -> None:
        self.rows |= {r.key: r for r in requests}

    def abort(self, keys: Sequence[tuple[int, int, int]]) -> None:
        self.aborted += keys
        for key in keys:
            self.rows.pop(key)

    def step(self, steps: int) -> list[Completion]:
        return []

    def count_tokens(self) -> dict[tuple[int, int, int], int]:
        return dict.fromkeys(self.rows, 3)

    def collect_metrics(self) -> dict[str, float]:
        return {"prefix/hits": 4.0}

    def close(self) -> None:
        self.closed = True


class Wire:
    """The socket: what the buffer says comes from `inbox`, what the generator says is in `said`."""

    address = "ipc:///nowhere"

    def __init__(self) -> None:
        self.inbox: deque[m.FromBuffer] = deque()
        self.said: list[m.FromPeer] = []
        self.closed = False
        self.moved = False  # the buffer is elsewhere: told once

    def send(self, message: m.FromPeer) -> None:
        assert not self.closed
        self.said.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.FromPeer))

    def find_moved_buffer(self, silent: float) -> bool:
        moved, self.moved = self.moved, False
        return moved

    def recv(self, timeout: float) -> m.FromBuffer | None:
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        self.closed = True


class Weights:
    """Where weights come from; `missing` sources raise as a ring does that was removed."""

    def __init__(self) -> None:
        self.missing: set[int] = set()

    def collect_metrics(self) -> dict[str, float]:
        return {"link/fetch_s": 0.0}

    def pull(
        self, source: m.WeightsSource, label: Label, digest: str | None
    ) -> tuple[dict[str, Any], str, bytes]:
        if source.epoch in self.missing:
            raise FileNotFoundError(2, "No such file or directory", f"{source.directory}/manifest")
        return {}, digest or "d", b""

    def close(self) -> None:
        pass


def announcement(epoch: int, number: int = 0) -> m.PolicyAnnouncement:
    source = m.WeightsSource(epoch, "here", f"ring_{epoch}", "")
    return m.PolicyAnnouncement(Label(epoch, number), f"d{epoch}.{number}", source)


def ticket(number: int, attempt: int, epoch: int, samples: int = 2) -> m.Ticket:
    prompt = m.Prompt(number, "31=")
    which, sampling = list(range(samples)), m.SamplingSettings(max_new_tokens=12)
    return m.Ticket(number, attempt, "train", prompt, which, sampling, Label(epoch, 0), None, 0)


@pytest.fixture
def make(tmp_path: Path, small_model: Path) -> Iterator[Callable[..., Generator]]:
    made: list[Generator] = []

    def generator(*sets: str) -> Generator:
        config = config_load.load(
            ROOT / "configs" / "demo.toml", [f"model.path={str(small_model)!r}", *TINY, *sets]
        )
        rundir.ensure("", tmp_path / "run")
        g = Generator(config, tmp_path / "run", 0, Engine())
        g.socket.close()
        g.socket, g.weights = Wire(), Weights()
        made.append(g)
        return g

    yield generator
    for g in made:
        g.rewards.close()
        g.tracer.close()
    rundir.clean(tmp_path / "run")


def one_pass(g: Generator, *heard: m.FromBuffer) -> None:
    """What the loop does between two looks at whether it is to end."""
    g.socket.inbox.extend(heard)
    steps = (g.read, g.swap, g.admit, g.decode, g.collect, g.deliver, g.request_samples, g.renew)
    for step in steps:
        step()


def tickets(
    g: Generator, said: m.PolicyAnnouncement | None, *given: m.Ticket, finished: bool = False
) -> m.TicketGrant:
    return m.TicketGrant(g.session, g.want_sequence, list(given), said, finished)
