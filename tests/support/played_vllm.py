"""A server that answers as vLLM's does: in a thread, or by `python played_vllm.py PORT`.

As a program its weights are one number, the last four bytes of the file of an update, by which all
log-probabilities are lower: a token that is given to another version shows.
"""

import asyncio
import json
import struct
import sys
import threading
from pathlib import Path
from typing import Any


class PlayedVllm:
    """It answers each prompt with its tokens and an end, in two parts, and does what a test plants.

    probe: its scores of any tokens; None: those of its weights.
    """

    def __init__(self, probe: list[float] | None = None) -> None:
        self.probe, self.vllm, self.finish = probe, "0.32.0", "stop"  # finish: of its answers
        self.version, self.weight = "default", 0.0
        self.status: dict[str, int] = {}  # path -> status of its answers
        self.label = ""  # the version that it claims for tokens, if not its own
        self.cut, self.left = 0, 0  # answers to break off in the middle; clients that went away
        self.raw = 0.0  # log-probability of a certain token
        self.error: dict[str, str] = {}  # amid an answer
        self.gate = threading.Event()  # answers wait for it in the middle
        self.gate.set()
        self.asked: list[str] = []
        # method, path and whether an answer is streamed -> the last body
        self.bodies: dict[tuple[str, str, bool], Any] = {}

    def start(self, port: int = 0) -> threading.Thread:
        """Serve in a thread at `url`."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self.handle, "127.0.0.1", port))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        return thread

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            size = head.lower().partition("content-length:")[2].partition("\r\n")[0]
            body = json.loads(await reader.readexactly(int(size or 0)) or b"{}")
            path = head.split()[1].partition("?")[0]
            self.asked.append(path)
            method, target, _ = head.split(maxsplit=2)
            self.bodies[method, target, "stream" in body] = body
            await asyncio.sleep(0.01 * (path == "/asyncrl/update"))  # it may be killed meanwhile
            status = self.status.get(path, 200)
            writer.write(f"HTTP/1.1 {status} played\r\nconnection: close\r\n\r\n".encode())
            if body.get("stream") and status == 200:
                await self.stream([*body["token_ids"], 1], reader, writer)
            else:
                writer.write(json.dumps(self.answer(path, body)).encode())
            await writer.drain()
        except ConnectionError:
            self.left += 1
        finally:
            writer.close()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path in self.status:
            return {"error": {"message": f"no {path}"}}
        if path == "/asyncrl/update":
            self.version = body["version"]
            if self.probe is None:
                [self.weight] = struct.unpack("<f", Path(body["path"]).read_bytes()[-4:])
        if not path.endswith("generate"):
            return {"version": self.vllm}
        probe = self.probe or [-self.weight] * (len(body["token_ids"]) - 1)
        scores = [None, *({"3": {"logprob": x}} for x in probe)]
        part = {"token_ids": [3], "logprobs": {"content": [{"logprob": self.raw}]}}
        part["weight_versions"] = [{"version": self.label or self.version}]
        return {"choices": [part], "prompt_logprobs": scores}

    async def stream(self, tokens: list[int], reader: Any, writer: asyncio.StreamWriter) -> None:
        middle = len(tokens) // 2
        spans: list[dict[str, Any]] = []
        for first, part in ((0, tokens[:middle]), (middle, tokens[middle:])):
            await asyncio.sleep(0.03 * (self.probe is None))
            while first and not self.gate.is_set():
                await asyncio.sleep(0.01)
                if reader.at_eof():
                    raise ConnectionError
            version, end = self.label or self.version, first + len(part)
            spans.append({"version": version, "start": first, "end": end})
            content = [{"logprob": -self.weight - token} for token in part]
            choice: dict[str, Any] = {"token_ids": part, "logprobs": {"content": content}}
            if first:
                choice |= {"finish_reason": self.finish, "weight_versions": spans}
            writer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            if self.error:
                writer.write(f"data: {json.dumps({'error': self.error})}\n\n".encode())
            if self.error or self.cut:
                self.cut = 0
                return


if __name__ == "__main__":
    PlayedVllm().start(int(sys.argv[1])).join()
