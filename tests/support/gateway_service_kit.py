from typing import Any

import msgspec

from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label

PATIENCE_S = 600.0


AT = Label(1, 3)


class Wire:
    """In the place of the socket to the buffer."""

    address = "nowhere"

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.replies: list[Any] = []
        self.moved = False  # the buffer is elsewhere: told once

    def send(self, message: Any) -> None:
        self.sent.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.FromPeer))

    def find_moved_buffer(self, silent: float) -> bool:
        moved, self.moved = self.moved, False
        return moved

    def recv(self, timeout: float) -> Any:
        return self.replies.pop(0) if self.replies else None

    def close(self) -> None:
        pass
