"""Measure what the Tinker API costs beside the same engine and learner without it.

    make env; OMP_NUM_THREADS=1 python benchmarks/tinker_cost.py [--quick] [--json]

Both make synchronous steps of the recipe of docs/tinker.md on the demo's model, with the weights in
a file for the sampler, as the server has them: publish the adapter, sample 16 prompts 8 times, one
request a sequence as the cookbook asks, compute the loss, make the optimizer step.  Direct: the
classes of the training and the sampling process, called in this process.  Server: `asyncrl tinker`
and the unmodified client, with HTTP, its messages, the calls on disk, the ledger and the lags, with
each of the client's two HTTP transports.  By turns, wall seconds.  Then the same with an untrained
model of 11 million parameters, whose step takes seconds.  Of both also: the CPU time of the
server's process, which handles HTTP, messages, ledger and calls, as a share of the direct step's.
--quick: one round of few steps on small untrained models, goals not judged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil
from lib import rounds
from lib.results_file import ROOT

from actors.engine import CompletionRequest
from asyncrl.models.policy import build_model
from asyncrl.models.tokenizer import collect_model_stops, load_tokenizer
from asyncrl.tinker import demo_model, settings
from asyncrl.tinker.messages import (
    CallFailure,
    Datum,
    SampleCall,
    SampleResult,
)

CONFIG = ROOT / "configs" / "examples" / "tinker_demo.toml"
GROUPS, SIZE = 16, 8  # of the recipe in docs/tinker.md
MOST_TOKENS, STOP = 5, "\n\nUser:"  # the recipe's own
RANK, RATE = 32, 3e-4
MOST = 1.15  # of the direct step's seconds
MOST_SHARE = 0.15  # of the direct step's CPU seconds
TRANSPORTS = ("python", "rust")  # server.client_transport
PARTS = ("publish", "sample", "train")


class SampledAnswer(NamedTuple):
    """int32 tokens and float32 log-probabilities."""

    tokens: np.ndarray
    logprobs: np.ndarray


def prompts(tokenizer: Any, number: int) -> list[list[int]]:
    """The prompts of a step."""
    random = np.random.default_rng(number)
    pairs = random.integers(0, demo_model.LARGEST + 1, (GROUPS, 2)).tolist()
    return [tokenizer.encode(f"{demo_model.PREFIX}{a} + {b}?\n\nAssistant:") for a, b in pairs]


def advantage(place: int) -> float:
    return 1.0 if place % 2 else -1.0


class DirectSteps:
    """The classes of both processes in this process."""

    def __init__(self, config: settings.TinkerConfig, folder: Path) -> None:
        from asyncrl.tinker.workers.sampler import Sampler
        from asyncrl.tinker.workers.trainer import ServedModels

        self.folder = folder
        self.results: dict[int, SampleResult | CallFailure] = {}
        self.sampler = Sampler(config, self.results.__setitem__)
        self.trainer = ServedModels(config)
        self.ends = collect_model_stops(load_tokenizer(config.model.path), config.model.path)
        self.handle("load", "m", RANK, 0)
        self.version = 0

    def handle(self, *call: Any) -> Any:
        result = self.trainer.handle(*call)
        if isinstance(result, CallFailure):
            raise RuntimeError(result.error)
        return result

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each process so far."""
        return {"direct": time.process_time()}

    def close(self) -> None:
        """Nothing runs on."""

    def publish(self) -> None:
        self.version += 1
        shutil.rmtree(self.folder / str(self.version - 8), ignore_errors=True)
        self.handle("save", "m", self.folder / str(self.version))

    def sample(self, asked: Sequence[list[int]]) -> list[SampledAnswer]:
        for number, prompt in enumerate(asked):
            first = CompletionRequest(
                key=(number, 0, 0),
                prompt=np.array(prompt, "<i4"),
                group=0,
                max_new_tokens=MOST_TOKENS,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                stop=self.ends,
                seed=self.version,
            )
            version = str(self.folder / str(self.version)), "", self.version
            self.sampler.add(number, SampleCall(version, first, 1, [STOP]))
        while self.sampler.is_busy:
            self.sampler.work()
        answers = []
        for number in range(len(asked)):
            result = self.results.pop(number)
            assert isinstance(result, SampleResult)
            [sequence] = result.sequences
            tokens = np.frombuffer(sequence.tokens, "<i4")
            answers.append(SampledAnswer(tokens, np.frombuffer(sequence.logprobs, "<f4")))
        return answers

    def train(self, asked: Sequence[list[int]], answers: Sequence[SampledAnswer]) -> None:
        data = []
        for place, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
            before = np.zeros(len(prompt) - 1)
            signed = np.full(len(answer.tokens), advantage(place))
            fields = {
                "logprobs": np.concatenate([before, answer.logprobs]),
                "advantages": np.concatenate([before, signed]),
            }
            data.append(
                Datum(
                    np.array([*prompt, *answer.tokens[:-1]], "<i4"),
                    np.concatenate([before, answer.tokens]).astype("<i4"),
                    {name: row.astype("<f4") for name, row in fields.items()},
                    np.concatenate([before - 2, 0 * answer.tokens]).astype("<i4"),
                )
            )
        self.handle("forward_backward", "m", data, "importance_sampling", {})
        self.handle("step", "m", RATE, (0.9, 0.95), 1e-8, 0.0, 0.0)


class ServerSteps:
    """`asyncrl tinker` and the unmodified client."""

    def __init__(self, folder: Path, transport: str) -> None:
        import tinker

        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "asyncrl.cli", "tinker", str(CONFIG)),
                *("--set", "server.port=0", "--set", f"name={transport}"),
                *("--set", f"server.client_transport={transport}"),
                *("--set", f"model.path='{folder}/models/tinker_demo'"),
            ],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()[1:]
        if not words:
            sys.exit("the server did not start")
        values = dict(word.split("=", 1) for word in words)
        self.types = tinker.types
        self.service = tinker.ServiceClient(
            base_url=values["TINKER_BASE_URL"], api_key=values["TINKER_API_KEY"]
        )
        self.client = self.service.create_lora_training_client("tinker_demo", rank=RANK).result()

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each process so far."""
        workers = {
            word: child.pid
            for child in psutil.Process(self.process.pid).children()
            for word in ("training", "sampling")
            if word in child.cmdline()
        }
        pids = {"server": self.process.pid} | workers
        assert len(pids) == 3
        return {"client": time.process_time()} | {
            name: rounds.cpu_of(pid) for name, pid in pids.items()
        }

    def publish(self) -> None:
        self.sampler = self.client.save_weights_and_get_sampling_client().result()

    def sample(self, asked: Sequence[list[int]]) -> list[SampledAnswer]:
        params = self.types.SamplingParams(max_tokens=MOST_TOKENS, stop=[STOP])
        futures = [
            self.sampler.sample(self.types.ModelInput.from_ints(prompt), 1, params)
            for prompt in asked
        ]
        answers = [future.result().sequences[0] for future in futures]
        return [SampledAnswer(np.array(x.tokens), np.array(x.logprobs)) for x in answers]

    def train(self, asked: Sequence[list[int]], answers: Sequence[SampledAnswer]) -> None:
        data = []
        for place, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
            before = np.zeros(len(prompt) - 1)
            fields = {
                "target_tokens": np.concatenate([before, answer.tokens]).astype(np.int64),
                "logprobs": np.concatenate([before, answer.logprobs]).astype(np.float32),
                "advantages": np.concatenate(
                    [before, np.full(len(answer.tokens), advantage(place))]
                ).astype(np.float32),
            }
            data.append(
                self.types.Datum(
                    model_input=self.types.ModelInput.from_ints([*prompt, *answer.tokens[:-1]]),
                    loss_fn_inputs={
                        name: self.types.TensorData.from_numpy(row) for name, row in fields.items()
                    },
                )
            )
        scored = self.client.forward_backward(data, "importance_sampling")
        stepped = self.client.optim_step(self.types.AdamParams(learning_rate=RATE))
        scored.result()
        metrics = stepped.result().metrics
        assert metrics is not None and metrics["lag_max"] == metrics["lag_unknown_share"] == 0

    def close(self) -> None:
        self.service.close("success").result()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def timed_steps(steps: DirectSteps | ServerSteps, tokenizer: Any, count: int) -> dict[str, float]:
    """Make steps; return the seconds of one, in all and by its parts, and the processes' CPU
    seconds."""
    seconds = dict.fromkeys(PARTS, 0.0)
    before = steps.cpu()

    def timed(part: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        seconds[part] += (time.perf_counter() - began) / count
        return result

    for number in range(count):
        asked = [prompt for prompt in prompts(tokenizer, number) for _ in range(SIZE)]
        timed("publish", steps.publish)
        answers = timed("sample", lambda asked=asked: steps.sample(asked))
        timed("train", lambda asked=asked, answers=answers: steps.train(asked, answers))
    cpu = {f"cpu_{name}": (x - before[name]) / count for name, x in steps.cpu().items()}
    return seconds | {"step": sum(seconds.values())} | cpu


def build_larger(path: Path, *, quick: bool) -> None:
    """Write an untrained model of 11 million parameters with the demo's tokens."""
    symbols = [*demo_model.CHARACTERS, *demo_model.WORDS, *demo_model.NUMBERS]
    hidden, layers = (96, 2) if quick else (384, 6)
    build_model(
        *(path, symbols),
        hidden=hidden,
        layers=layers,
        heads=6,
        intermediate=3 * hidden,
        max_positions=demo_model.CONTEXT,
    )


def build_demo(path: Path, *, quick: bool) -> None:
    """Write the demo's model."""
    if quick:
        demo_model.build(path, seed=0, steps=1)
    elif (ROOT / "models" / "tinker_demo").exists():
        shutil.copytree(ROOT / "models" / "tinker_demo", path)
    else:
        demo_model.build(path, seed=0)


def measure(
    folder: Path, build: Callable[..., None], count: int, *, quick: bool
) -> list[dict[str, dict[str, float]]]:
    """Make steps of both kinds by turns with one model; return the seconds of each round."""
    model = folder / "models" / "tinker_demo"
    model.parent.mkdir(parents=True)
    build(model, quick=quick)
    config = settings.read(str(CONFIG), (f"model.path='{model}'",))
    tokenizer = load_tokenizer(model)
    alternatives: dict[str, DirectSteps | ServerSteps] = {
        "direct": DirectSteps(config, folder / "direct"),
    } | {name: ServerSteps(folder, name) for name in TRANSPORTS}

    def one_round(number: int) -> dict[str, dict[str, float]]:
        order = list(alternatives)[:: 1 if number % 2 else -1]
        return {name: timed_steps(alternatives[name], tokenizer, count) for name in order}

    try:
        for steps in alternatives.values():
            timed_steps(steps, tokenizer, min(2, count))
        return rounds.quiet(1 if quick else 5, one_round)
    finally:
        for steps in alternatives.values():
            steps.close()


def main() -> None:
    args = rounds.parser(__doc__).parse_args()
    sizes = {
        "the demo's model": (build_demo, 2),
        "a model of 11 million parameters": (build_larger, 1),
    }
    goals, data = [], {}
    for number, (size, (build, count)) in enumerate(sizes.items()):
        with tempfile.TemporaryDirectory() as directory:
            rows = measure(Path(directory) / str(number), build, count, quick=args.quick)
        seconds = {
            name: {
                part: round(median(row[name][part] for row in rows), 4) for part in rows[0][name]
            }
            for name in rows[0]
        }
        print(size, seconds, file=sys.stderr)
        for name in TRANSPORTS:
            ratios = [row[name]["step"] / row["direct"]["step"] for row in rows]
            what = f"a step through the Tinker API ({name} transport), as a multiple of the same "
            what += f"step without it: {size}"
            goals.append(rounds.figure(what, ratios, MOST, at_least=False))
        shares = [row["python"]["cpu_server"] / row["direct"]["cpu_direct"] for row in rows]
        what = f"CPU time of the API's server process, as a share of that of a step without: {size}"
        goals.append(rounds.figure(what, shares, MOST_SHARE, at_least=False))
        data[size] = {"seconds": seconds, "rows": rows, "steps": count}
    rounds.report("tinker_cost", goals, data, args)


if __name__ == "__main__":
    main()
