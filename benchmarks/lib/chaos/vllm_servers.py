"""Kill the servers of a generator's engine `vllm-serve`, and judge every answer by its tokens."""

from __future__ import annotations

import collections
import contextlib
import math
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch

from actors import engine_serve
from actors.engine import Completion, CompletionRequest, Key
from asyncrl.config import load
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from lib import results_file

SERVERS = 2
ACTIVE = 16  # answers at a time
EACH = 8  # answers to a version
END = 1
VARIANTS = 4  # models of real servers, by turns of the versions
PROGRAM = str(results_file.ROOT / "tests" / "support" / "played_vllm.py")
CLOSE = 1e-3  # between vLLM's log-probabilities and transformers'


class PlayedWeights:
    """Weights of tests/support/played_vllm.py: a number by which all log-probabilities are lower.
    It answers a prompt with its tokens and an end."""

    spread_s = 0.1  # of the instants of kills

    def __init__(self, path: Path) -> None:
        self.model = policy.build_model(path, "abcdefgh", heads=2, kv_heads=1)

    def give(self, engine: Any, number: int) -> None:
        size = len(policy.list_probe_ids(engine.shape)) - 1
        probe = np.full(size, -number / 8, "<f4").tobytes()
        engine.load({"w": torch.tensor([number / 8])}, Label(1, number), f"d{number}", probe)

    def judge(self, answer: Completion) -> str:
        if answer.tokens.tolist() != [*answer.prompt, END]:
            return f"{answer.key}: tokens of another prompt"
        lower = -answer.logprobs - answer.tokens
        for span in answer.spans:
            if set(lower[span.start : span.end]) != {span.label.number / 8}:
                return f"{answer.key}: not of version {span.label.number}"
        return ""


class RealWeights:
    """Random models that real servers get by turns."""

    spread_s = 5.0

    def __init__(self, path: Path) -> None:
        first = policy.build_model(path, "abcdefgh", heads=2, kv_heads=1)
        self.models = [first]
        generator = torch.Generator().manual_seed(0)
        for _ in range(VARIANTS - 1):
            other = policy.load_policy(path, "float32", "cpu", with_modules=True)
            with torch.no_grad():
                for parameter in other.hf.parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(noise * 0.05)
            self.models.append(other)

    def give(self, engine: Any, number: int) -> None:
        model = self.models[number % VARIANTS]
        layout = policy.build_manifest(model)
        buffer = bytearray(policy.count_flat_bytes(layout))
        policy.write_flat(model, memoryview(buffer))
        probe = policy.compute_probe_logprobs(model).astype("<f4").tobytes()
        weights = policy.read_flat(memoryview(buffer), layout)
        engine.load(weights, Label(1, number), f"d{number}", probe)

    @torch.no_grad()
    def judge(self, answer: Completion) -> str:
        ids = torch.from_numpy(np.concatenate([answer.prompt, answer.tokens]).astype(np.int64))
        for span in answer.spans:
            logits = self.models[span.label.number % VARIANTS].hf(input_ids=ids[None]).logits[0]
            logs = torch.log_softmax(logits[len(answer.prompt) - 1 : -1].float(), -1)
            want = logs.gather(1, ids[len(answer.prompt) :, None])[span.start : span.end, 0]
            gap = np.abs(answer.logprobs[span.start : span.end] - want.numpy()).max(initial=0.0)
            if gap > CLOSE:
                return f"{answer.key}: {gap:.4f} from version {span.label.number}"
        return ""


def build_request(ticket: int, prompt: list[int], limit: int, stop: tuple[int, ...]) -> Any:
    return CompletionRequest(
        (ticket, 0, 1),
        np.array(prompt, np.int32),
        ticket,
        limit,
        stop=stop,
        seed=7,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )


def find_victims(shell: int) -> list[psutil.Process]:
    """The processes of a server whose shell is `shell`."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(shell).children(recursive=True)
        return [child for child in children if child.name() not in ("sh", "cat")]
    return []


def run(
    work: Path, kills: int, seed: int, *, real: bool = False, seconds: float = math.inf
) -> dict[str, Any]:
    """Kill processes of two servers that the engine started, at any instant: amid answers, updates
    and starts.  Requests go on until all kills are made, or after `seconds`.

    Returns `wrong`, what was lost, doubled or mislabelled, and counts."""
    rng = random.Random(seed)
    weights: Any = (RealWeights if real else PlayedWeights)(work / "model")
    raw = {
        "model": {"path": str(work / "model"), "device": "cpu"},
        "task": {"name": "sort"},
        "weights": {"in_flight": "recompute_kv"},
        "generator": {
            "engine": "vllm-serve",
            "own_servers": SERVERS,
            "slots": ACTIVE,
            "context": 256 if real else 64,
            "max_new_tokens": 100 if real else 40,
        },
    }
    patched: dict[str, Any] = {"RESTARTS": 10**6, "RETRY_S": 0.05}
    if not real:
        patched["build_command"] = lambda config, host, port: [sys.executable, PROGRAM, f"{port}"]
    killed: dict[int, str] = {}

    def kill(server: engine_serve.Server) -> None:
        with contextlib.suppress(psutil.Error):
            victims = find_victims(server.process.pid) if server.process else []
            if victims:
                victim = rng.choice(victims)
                name = victim.name()
                victim.kill()
                killed[victim.pid] = name

    began = time.monotonic()
    number = after = 0
    asked: dict[Key, list[int]] = {}
    answers: list[Completion] = []
    with mock.patch.multiple(engine_serve, **patched):
        engine = engine_serve.make_engine(load.build(raw))
        try:
            while (
                goes_on := (len(killed) < kills or number < 6)
                and time.monotonic() - began < seconds
            ) or engine.active:
                # a real server takes long to start: most kills wait for an answer
                due = len(answers) >= after and rng.random() < 0.1
                if number and len(killed) < kills and due:
                    after = len(answers) + (rng.randrange(EACH) if real else 0)
                    instant = rng.random() * weights.spread_s
                    threading.Timer(instant, kill, [rng.choice(engine.servers)]).start()
                if len(answers) >= EACH * number:
                    weights.give(engine, number)
                    number += 1
                while goes_on and engine.active < ACTIVE:
                    prompt = rng.choices(range(4, 10), k=rng.randint(2, 20))
                    asked[len(asked), 0, 1] = prompt
                    stop = () if real else (END,)
                    limit = rng.randint(1, 100) if real else 40
                    engine.add([build_request(len(asked) - 1, prompt, limit, stop)])
                answers += engine.step()
        finally:
            engine.close()
    counts = collections.Counter(answer.key for answer in answers)
    wrong = [f"{key}: {counts[key]} answers" for key in asked if counts[key] != 1]
    wrong += [f"{key}: never asked for" for key in counts if key not in asked]
    wrong += filter(None, map(weights.judge, answers))
    return {
        "wrong": wrong,
        "servers": "vLLM's" if real else "played",
        "kills": len(killed),
        "victims": dict(collections.Counter(killed.values())),
        "versions": number,
        "answers": len(answers),
        "answers_of_several_versions": sum(len({s.label for s in a.spans}) > 1 for a in answers),
    }
