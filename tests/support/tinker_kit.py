"""A real server of the Tinker API as a process, and the unmodified client."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

from asyncrl.models.policy import build_model
from asyncrl.tinker.model_records import find_saved

SYMBOLS = "0123456789+-*=? abcdefghijklmnopqrstuvwxyz:\n"
PROMPT = [5, 13, 5, 16]
# tests of another client than the server's run by another interpreter (test_tinker_client.py)
PYTHON = os.environ.get("TINKER_SERVER_PYTHON", sys.executable)


def write_config(folder: Path, **keys: object) -> Path:
    model = folder / "tiny"
    if not model.exists():
        build_model(model, SYMBOLS, hidden=32, layers=1, heads=2, max_positions=256)
    path = folder / "server.toml"
    path.write_text(
        f'name = "server"\nruns = "{folder}"\n[model]\npath = "{model}"\n'
        "[server]\nport = 0\n[sampling]\ncontext = 128\n[lora]\nrank = 8\n"
    )
    return path


class ServerProcess:
    """`asyncrl tinker`, until `stop` or `kill`."""

    def __init__(self, config: Path, *sets: str) -> None:
        options = [word for item in sets for word in ("--set", item)]
        self.process = subprocess.Popen(
            [PYTHON, "-m", "asyncrl.cli", "tinker", str(config), *options],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("export "), f"the server did not start: {line!r}"
        values = dict(word.split("=", 1) for word in line.split()[1:])
        self.url, self.key = values["TINKER_BASE_URL"], values["TINKER_API_KEY"]
        self.port = int(self.url.rpartition(":")[2])
        self.folder = config.parent / "server"

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=self.key)

    def saved(self, path: str) -> Path:
        return find_saved(self.folder, path)[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def created(client: Any) -> Any:
    return client.result() if hasattr(client, "result") else client


def prompt() -> types.ModelInput:
    return types.ModelInput.from_ints(PROMPT)


def draw(
    sampler: tinker.SamplingClient, count: int = 2, max_tokens: int = 5
) -> list[types.SampledSequence]:
    params = types.SamplingParams(max_tokens=max_tokens)
    return sampler.sample(prompt(), count, params).result().sequences


def policy_datum(
    sequence: types.SampledSequence, advantage: float = 1.0, *, spans: bool = False
) -> types.Datum:
    tokens = list(sequence.tokens)
    before = len(PROMPT) - 1
    datum = types.Datum(
        model_input=prompt().append(types.EncodedTextChunk(tokens=tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": torch.tensor([0] * before + tokens),
            "logprobs": torch.tensor([0.0] * before + list(sequence.logprobs)),
            "advantages": torch.tensor([0.0] * before + [advantage] * len(tokens)),
        },
    )
    if not spans:
        return datum
    asked = types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=before + 1)
    first = types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=before)
    rest = types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=len(tokens) - 1)
    whole = types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=len(tokens))
    return datum.with_provenance([asked, rest], [first, whole])


def tuned_datum(text: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(text[:-1]),
        loss_fn_inputs={
            "target_tokens": torch.tensor(text[1:]),
            "weights": torch.ones(len(text) - 1),
        },
    )


def output_logprobs(result: types.ForwardBackwardOutput, place: int = 0) -> np.ndarray:
    return np.asarray(result.loss_fn_outputs[place]["logprobs"].data, np.float32)
