"""Measure what a session through the adapter of verifiers costs beside the package's own rollout.

    make env; OMP_NUM_THREADS=1 python benchmarks/environment_cost.py [--quick] [--json]

Both play an environment of four turns against a server that answers at once, so that nothing but
the environment, its client and the adapter takes time.  Bare: `run_rollout` for all sessions in one
event loop with one client.  Adapter: the same sessions as a gateway orders them from a process of
agent.workers, with its messages and the reward's way back.  By turns, wall seconds.  --quick: one
round of few sessions, goals not judged."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from lib import rounds

from actors.gateway.agents.session_messages import (
    AgentSetup,
    SessionAccess,
    SessionOrders,
    SessionResult,
)
from actors.gateway.session_api import _AgentProcess
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.messages import Prompt

LIB = Path(__file__).resolve().parent / "lib"
PYTHON = Path(sys.prefix) / "clients" / "bin" / "python"
AT_ONCE = 16
ENV = "verifiers:environment_four_turns"
PROMPT = Prompt(
    0, "begin", messages=[{"role": "user", "content": "begin"}], meta={"dataset": "train"}
)
MOST = 1.05  # of the bare rollouts' seconds


class Adapter:
    """A worker process with the environment."""

    def __init__(self, url: str, log: str) -> None:
        agent = AgentConfig(env=ENV, python=str(PYTHON))
        self.worker = _AgentProcess(AgentSetup(agent, log))
        self.decode = msgspec.msgpack.Decoder(SessionResult).decode
        self.url = url
        self.number = self.received = 0
        self.receive(1)  # ready

    def receive(self, count: int) -> None:
        """Wait for so many results."""
        while self.received < count:
            self.worker.flush()
            for result in self.worker.receive_messages(self.decode):
                if result.kind not in ("ready", "scored"):
                    raise RuntimeError(result.why)
                self.received += 1
            if self.worker.closed:
                raise RuntimeError("the environment's process has ended")
            select.select([self.worker.wire], [], [], 1.0)  # as the gateway waits
        self.received -= count

    def order(self) -> None:
        self.number += 1
        seat = SessionAccess(
            self.number, "s", self.url, "k", "policy", PROMPT, 0, 1, True, deadline_s=600.0
        )
        self.worker.send(SessionOrders([seat]))

    def play(self, sessions: int) -> float:
        """Return the seconds of so many sessions, of which AT_ONCE are under way."""
        self.order()
        self.receive(1)
        began = time.perf_counter()
        for _ in range(AT_ONCE):
            self.order()
        for number in range(sessions):
            self.receive(1)
            if number + AT_ONCE < sessions:
                self.order()
        return time.perf_counter() - began


def bare(url: str, sessions: int) -> float:
    argv = [str(PYTHON), str(LIB / "environment_side.py"), "play", url, str(sessions), str(AT_ONCE)]
    ended = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(ended.stdout))


def main() -> None:
    args = rounds.parser(__doc__).parse_args()
    sessions = 32 if args.quick else 400
    os.chdir(LIB)  # where the worker finds the environment
    argv = [str(PYTHON), str(LIB / "environment_side.py"), "serve"]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        with tempfile.NamedTemporaryFile() as log:
            adapter = Adapter(url, log.name)
            shares = rounds.quiet(
                1 if args.quick else 5,
                lambda _: adapter.play(sessions) / bare(url, sessions),
            )
            adapter.worker.kill()
    finally:
        server.kill()
        server.wait()
    what = "a session through the adapter, as a multiple of the environment's own time"
    goals = [rounds.figure(what, shares, MOST, at_least=False)]
    rounds.report("environment_cost", goals, {"what": "sessions of verifiers"}, args)


if __name__ == "__main__":
    main()
