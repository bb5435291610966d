"""The measured servers: the gateway with stand-ins or a real engine, `vllm serve`, and a stub.

Each gives its URL and the CPU time of its processes."""

from __future__ import annotations

import os
import signal
import socket
import string
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import end_with_parent
from asyncrl.records import rundir
from lib import rounds
from lib.endpoint import stage

ROOT = rounds.results_file.ROOT
HERE = Path(__file__).resolve().parent
START_S = 600.0  # an engine's imports, beside whatever runs
END_S = 15.0
AT_ONCE = 64  # sessions that the engines have room for
TOKENS = 32  # of each answer
CONTEXT = 1024  # of the engines: a chat of 8 calls fits twice
KEPT = 65_536  # tokens of earlier calls: with AT_ONCE x CONTEXT as many as `vllm serve` holds
LONG = 120_000  # of a gateway without an engine: 100 kB of history, a token a character
TEMPLATE = (
    "{%- for m in messages -%}<{{ m.role }}>{{ m.content or '' }}"
    "{%- if m.role == 'assistant' -%}<eos>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
# of `vllm serve`: what our own engine has (actors/engine_vllm.py), and nothing that counts or logs
SERVE = ["--dtype=float32", "--enforce-eager", "--block-size=32", "--generation-config=vllm"]
SERVE += ["--gpu-memory-utilization=0.05", "--disable-log-stats", "--disable-uvicorn-access-log"]
SERVE += ["--served-model-name=policy", f"--max-model-len={CONTEXT}"]
SERVE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def model(path: Path) -> Path:
    """The tiny model of all engines, with a chat template."""
    from asyncrl.models.policy import build_model  # torch takes seconds

    # 32 dimensions a head: vLLM's kernels for a CPU want so many
    build_model(
        path, string.printable[:95] + "\n", hidden=64, layers=2, heads=2, max_positions=2 * LONG
    )
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


class Server:
    """url, key ("" where there are no sessions) and `pauses` (asker.py) are for who asks; `more`:
    keys of each call."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True)
        self.work = work
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = self.key = ""
        self.pauses: dict[str, float] = {}
        self.more: dict[str, Any] = {}

    def start(self, name: str, argv: list[str], **env: str) -> None:
        with (self.work / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that `end` reaches what it starts
                preexec_fn=end_with_parent(),
            )

    def wait(self, what: str, there: Callable[[], bool]) -> None:
        """Until `there`.  Ends all and raises RuntimeError when a process ends before that, or it
        takes too long.
        """
        deadline = time.monotonic() + START_S
        try:
            while not there():
                if (gone := self.gone()) or time.monotonic() > deadline:
                    late = f"not there after {START_S:g} s\n{self.said(list(self.processes)[-1])}"
                    raise RuntimeError(f"{what}: {gone or late}")
                time.sleep(0.1)
        except BaseException:
            self.end()
            raise

    def gone(self) -> str:
        """Which of its processes have ended, with the end of what each said; "": none has."""
        ended = [name for name, p in self.processes.items() if p.poll() is not None]
        return "\n".join(f"{name} has ended\n{self.said(name)}" for name in ended)

    def said(self, name: str) -> str:
        return (self.work / f"{name}.log").read_text(errors="replace")[-3000:]

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each process so far; of what it has started under `NAME's`."""
        out = {}
        for name, popen in self.processes.items():
            process = psutil.Process(popen.pid)
            out[name] = sum(process.cpu_times()[:2])
            for child in process.children(recursive=True):
                try:
                    below = sum(child.cpu_times()[:2])
                except psutil.NoSuchProcess:
                    continue
                out[f"{name}'s"] = out.get(f"{name}'s", 0.0) + below
        return out

    def end(self) -> None:
        # who was killed is gone at last, also where a busy machine takes its time
        for kind, seconds in ((signal.SIGTERM, END_S), (signal.SIGKILL, START_S)):
            for popen in self.processes.values():
                try:
                    os.killpg(popen.pid, kind)
                except ProcessLookupError:
                    continue
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and any(
                popen.poll() is None for popen in self.processes.values()
            ):
                time.sleep(0.05)
        self.processes.clear()


def stand_in(*words: str) -> list[str]:
    return [sys.executable, str(HERE / "stage.py"), *words]


def settings(path: Path, engine: str) -> list[str]:
    """--set of a run whose sessions are leased over HTTP."""
    drawn = engine == "drawn"
    return [
        f"model.path={str(path)!r}",
        "model.device='cpu'",
        "model.warm_start=false",
        "agent.env=''",
        "agent.serve=true",
        "agent.parser='none'",
        "agent.max_calls=64",
        "agent.max_tokens=100000",
        "agent.sessions=256",
        f"generator.max_new_tokens={TOKENS}",
        f"generator.engine={'embedded' if drawn else engine!r}",
        f"generator.context={LONG if drawn else CONTEXT}",
        f"generator.slots={256 if drawn else AT_ONCE}",
        f"generator.prefix_cache_tokens={KEPT}",
    ]


def refused(path: Path, engine: str) -> str:
    """Why no run has sessions with this engine; empty when it can."""
    try:
        load.load("configs/calc.toml", settings(path, engine))
    except ConfigError as error:
        return str(error)
    return ""


class Gateway(Server):
    """`asyncrl gateway` of a run whose buffer grants without end.  engine: "drawn" (pause_s a
    call), "embedded" or "vllm"."""

    def __init__(self, work: Path, path: Path, engine: str, pause_s: float = 0.0) -> None:
        super().__init__(work)
        run = work / "run"
        config = load.load("configs/calc.toml", settings(path, engine))
        rundir.prepare(load.dump(config), run)
        self.run = run
        if engine == "drawn":
            from asyncrl.models.tokenizer import load_tokenizer

            symbols = load_tokenizer(path)
            for number, pause in enumerate(stage.pauses(pause_s)):
                self.pauses[symbols.decode([stage.FIRST_TOKEN + number])] = pause
            self.start("generator", stand_in("drawn", str(run), str(pause_s)))
        else:
            self.start("generator", stand_in("engine", str(run)))
        self.start("buffer", stand_in("buffer", str(run)))
        words = ["-m", "asyncrl.cli", "gateway", str(run / "config.toml"), "--run-dir", str(run)]
        self.start("endpoint", [sys.executable, *words])
        self.wait(f"gateway, {engine}", (run / "agent.url").exists)
        self.url = (run / "agent.url").read_text().strip()
        self.key = (run / "agent.key").read_text().strip()

    def end(self) -> None:
        super().end()
        rundir.clean(self.run)


class Serve(Server):
    """`vllm serve` of the same model; every answer has TOKENS tokens, its log-probabilities where
    `logprobs`."""

    def __init__(self, work: Path, path: Path) -> None:
        super().__init__(work)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        argv = [sys.executable, str(HERE / "vllm_server.py"), "serve", str(path), *SERVE]
        argv += [f"--max-num-seqs={AT_ONCE}", f"--kv-cache-memory-bytes={128 << 20}"]
        self.start("endpoint", [*argv, "--host=127.0.0.1", f"--port={port}"], **SERVE_ENV)
        self.url = f"http://127.0.0.1:{port}"
        self.wait("vllm serve", self.healthy)
        self.more = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as said:
                return bool(said.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class Stub(Server):
    """An endpoint that gives one answer, at once."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        file = work / "url"
        self.start("endpoint", stand_in("stub", str(file)))
        self.wait("stub", file.exists)
        self.url = file.read_text()
