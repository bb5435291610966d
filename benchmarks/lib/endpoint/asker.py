"""A minimal HTTP client for sessions, with kept-alive sockets and hand-written requests.

It takes so little time that the server is measured.

    python benchmarks/lib/endpoint/asker.py '{"url": ..., "key": ..., "at_once": 8, ...}'

One process, one thread.  With a run's key, sessions are leased and scored; without (vLLM's own
server), a session is only its calls.  A session is a chat: a system message of `history`
characters, then `calls` calls, each with the whole history.  `pauses`: the time that a stand-in
takes for a completion, by its first character, which is subtracted from the latency.  `ramp_s`:
the connections start one after another, over so many seconds.  Prints one line of JSON; latencies
in seconds, sorted."""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from typing import Any

import msgspec

RECV = 1 << 20
PATIENCE_S = 300.0
decode = msgspec.json.Decoder().decode
encode = msgspec.json.Encoder().encode


class Asker:
    """One session after another, over one connection."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.socket = socket.create_connection(bench.address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.got = bytearray()
        self.state = ""
        self.number = 0  # of calls in this session
        self.sent_at = 0.0
        self.messages: list[dict[str, str]] = []
        self.session: dict[str, Any] = {}

    def begin(self) -> None:
        """The next session."""
        self.number = 0
        self.messages = [{"role": "system", "content": self.bench.history}]
        if not self.bench.leases:
            self.call()
            return
        self.bench.leased += 1
        lease = f"{self.bench.name}-{self.bench.leased}"
        said = {"lease": lease, "wait_s": 30}
        self.send("lease", "/asyncrl/v1/sessions", self.bench.key, said)

    def call(self) -> None:
        self.messages.append({"role": "user", "content": f"turn {self.number:2d} now"})
        path, key = "/v1/chat/completions", "none"
        if self.session:
            path, key = f"/s/{self.session['session']}{path}", self.session["api_key"]
        self.send(
            "call", path, key, {"model": "policy", "messages": self.messages} | self.bench.more
        )

    def send(self, state: str, path: str, key: str, said: dict[str, Any]) -> None:
        body = encode(said)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.state = state
        self.sent_at = time.perf_counter()
        self.socket.sendall(head.encode() + body)

    def read(self) -> None:
        """Take in what came; with a whole reply, go on."""
        part = self.socket.recv(RECV)
        if not part:
            raise ConnectionError("the server closed a connection")
        self.got += part
        end = self.got.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.got[:end]).lower()
        length = int((head.partition(b"content-length:")[2] or b"0").split(b"\r\n")[0])
        if len(self.got) < end + 4 + length:
            return
        body = bytes(self.got[end + 4 : end + 4 + length])
        del self.got[: end + 4 + length]
        status = int(head.split(b" ", 2)[1])
        if status not in (200, 204):
            raise RuntimeError(f"{self.state}: {status} {body[:500]!r}")
        self.replied(status, body)

    def replied(self, status: int, body: bytes) -> None:
        if self.state == "call":
            taken = time.perf_counter() - self.sent_at
            said = decode(body)
            self.bench.tokens += said["usage"]["completion_tokens"]
            text = said["choices"][0]["message"]["content"] or ""
            self.bench.latencies.append(taken - self.bench.pauses.get(text[:1], 0.0))
            self.messages.append({"role": "assistant", "content": text})
            self.number += 1
            if self.number < self.bench.calls:
                self.call()
            elif self.session:
                path = f"/s/{self.session['session']}/reward"
                self.send("reward", path, self.session["api_key"], {"reward": 1.0})
            else:
                self.bench.over(self)
        elif self.state == "lease":
            if status == 204:
                self.begin()
                return
            self.session = decode(body)
            self.call()
        else:
            self.session = {}
            self.bench.over(self)


class Bench:
    """The sessions to play and their results.  sessions: in all; at_once: connections."""

    def __init__(self, asked: dict[str, Any]) -> None:
        host, _, port = asked["url"].removeprefix("http://").partition(":")
        self.address = host, int(port)
        self.key = asked.get("key", "")
        self.leases = bool(self.key)
        self.name = asked.get("name", "bench")
        self.calls = asked["calls"]
        self.history = "0123456789" * (asked.get("history", 20) // 10)
        self.more = asked.get("more", {})
        self.pauses: dict[str, float] = asked.get("pauses", {})
        self.ramp_s: float = asked.get("ramp_s", 0.0)
        self.left = asked["sessions"]
        self.at_once = asked["at_once"]
        self.leased = self.tokens = self.open = 0
        self.latencies: list[float] = []

    def over(self, asker: Asker) -> None:
        """A session has ended."""
        self.open -= 1
        self.next(asker)

    def next(self, asker: Asker) -> None:
        if self.left:
            self.left -= 1
            self.open += 1
            asker.begin()

    def run(self) -> dict[str, Any]:
        """Raises TimeoutError when no server says anything for PATIENCE_S."""
        selector = selectors.DefaultSelector()
        cpu, wall = time.process_time(), time.perf_counter()
        begun = 0
        while begun < self.at_once or self.open:
            due = wall + self.ramp_s * begun / self.at_once - time.perf_counter()
            if begun < self.at_once and due <= 0.0:
                asker = Asker(self)
                selector.register(asker.socket, selectors.EVENT_READ, asker)
                self.next(asker)
                begun += 1
                continue
            found = selector.select(due if begun < self.at_once else PATIENCE_S)
            if not found and begun == self.at_once:
                raise TimeoutError(f"no reply for {PATIENCE_S:g} s")
            for key, _ in found:
                key.data.read()
        return {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "calls": len(self.latencies),
            "tokens": self.tokens,
            "latencies": sorted(self.latencies),
        }


if __name__ == "__main__":
    print(json.dumps(Bench(json.loads(sys.argv[1])).run()))
