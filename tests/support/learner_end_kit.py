from __future__ import annotations

from collections import deque
from pathlib import Path

from asyncrl.contract import messages as m


class Buffer:
    """Welcomes, and says Finished to a goodbye; `seen`: which of the run's files were there when
    each message came."""

    address = "ipc:///nowhere"

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.inbox = run_dir, deque[m.FromBuffer]()
        self.seen: dict[str, list[str]] = {}
        self.sent: list[m.FromPeer] = []
        self.moved = False  # it is elsewhere: told once

    def find_moved_buffer(self, silent: float) -> bool:
        moved, self.moved = self.moved, False
        return moved

    def send(self, message: m.FromPeer) -> None:
        self.sent.append(message)
        self.seen[type(message).__name__] = [
            n for n in ("model/config.json", "weights_digest") if (self.run_dir / n).exists()
        ]
        if isinstance(message, m.LearnerHello):
            self.inbox.append(m.Welcome(message.epoch, 0))
        if isinstance(message, m.LearnerGoodbye):
            self.inbox.append(m.RunFinished(message.epoch))

    def recv(self, timeout: float) -> m.FromBuffer | None:
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        pass
