import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
from gateway_kit import Served
from process_kit import until

from actors.gateway.agents import agent_process
from actors.gateway.agents.session_messages import (
    AgentSetup,
    SessionAccess,
    SessionOrders,
    SessionResult,
)
from actors.gateway.session_api import _AgentProcess
from actors.gateway.sessions import Session
from asyncrl.config.agents import AgentConfig
from asyncrl.contract import messages as m
from asyncrl.transport.worker_pool import frame, read_frame

PATIENCE_S = 300.0
HERE = Path(__file__).parent
DECODE = msgspec.msgpack.Decoder(SessionResult).decode


PROGRAM = AgentConfig(command=["sh", str(HERE / "agent_command.sh")])


class Commands:
    """A process that starts programs, or calls a function, and what it said."""

    def __init__(self, path: Path, agent: AgentConfig = PROGRAM) -> None:
        self.log = path / "agent-0.log"
        passed = ["PIDS", "PYTHON", "ASKS", "GIVEN_*"]
        agent = msgspec.structs.replace(agent, env_pass=passed)
        self.worker = _AgentProcess(AgentSetup(agent, str(self.log)))
        self.lefts: dict[int, SessionResult] = {}

    def begin(self, number: int, kind: str, url: str = "http://a/s/1.2.3", key: str = "k") -> None:
        prompt = m.Prompt(5, "ab=", answer="secret", meta={"kind": kind})
        seat = SessionAccess(number, f"{number}.2.3", url, key, "policy", prompt, 9, 1, True, 60.0)
        self.worker.send(SessionOrders([seat]))

    def play(self, served: Served, opened: Session, prompt: m.Prompt) -> SessionResult:
        """Play a session of the endpoint; its result."""
        number, url = len(self.lefts), f"{served.url}/s/{opened.name}"
        seat = SessionAccess(
            number, opened.name, url, opened.api_key, "policy", prompt, 9, 1, True, 600.0
        )
        self.worker.send(SessionOrders([seat]))
        return self.left(number)

    def left(self, number: int) -> SessionResult:
        def look() -> bool:
            self.worker.flush()
            self.lefts |= {each.number: each for each in self.worker.receive_messages(DECODE)}
            assert not self.worker.closed
            return number in self.lefts

        until(look)
        return self.lefts[number]


class AgentLoop:
    """The loop of an agents' process in a thread, and our end of its socket."""

    def __init__(self, agent: AgentConfig, log: Path) -> None:
        self.wire, self.theirs = socket.socketpair()
        self.wire.settimeout(PATIENCE_S)
        self.stream = self.wire.makefile("rb")
        self.thread = threading.Thread(target=agent_process.serve, args=(self.theirs,))
        self.thread.start()
        self.send(AgentSetup(agent, str(log)))

    def send(self, message: Any) -> None:
        self.wire.sendall(frame(msgspec.msgpack.encode(message)))

    def result(self) -> SessionResult:
        payload = read_frame(self.stream)
        assert payload is not None
        return msgspec.msgpack.decode(payload, type=SessionResult)

    def play(self, *seats: SessionAccess) -> list[SessionResult]:
        """The results in the order of the sessions' numbers."""
        self.send(SessionOrders(seats=list(seats)))
        return sorted((self.result() for _ in seats), key=lambda result: result.number)

    def close(self) -> None:
        self.stream.close()
        self.wire.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "it ends with its gateway"
        self.theirs.close()
