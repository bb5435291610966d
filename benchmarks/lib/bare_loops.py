"""The engine and the learner of a run as bare loops, each alone on a core, then side by side: no
buffer, no wires.  An asynchronous step takes at least as long as the slower of the two.

    python benchmarks/lib/bare_loops.py MODEL_DIR   used by benchmarks/loop.py

In: `WHAT SECONDS` a line, WHAT engine or learner.  Out: seconds a token of the answers.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, but the one above

from lib.contenders import BATCH, GROUPS, ROOT, SIZE, env  # isort: skip

import msgspec
import numpy as np

from actors.engine import Completion, CompletionRequest
from actors.engine_embedded import make_engine
from asyncrl.config.load import load
from asyncrl.config.tree import Config, TaskConfig
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.models import policy as models
from asyncrl.models.tokenizer import collect_stop_tokens, encode_prompt, load_tokenizer
from asyncrl.tasks import get_task
from learner.step import LearnerCore


class Work:
    """A run's engine with its prompts, and its learner with a batch that the engine wrote."""

    def __init__(self, model_dir: str) -> None:
        sets = [f"model.path={model_dir!r}", "learner.steps=1000000", "learner.lr=0.0"]
        self.config: Config = load(ROOT / "configs" / "demo.toml", sets)
        self.tokenizer = load_tokenizer(model_dir)
        self.stop = collect_stop_tokens(self.tokenizer, self.config)
        self.task = get_task(TaskConfig(name="sort"))
        self.engine: Any = make_engine(self.config)
        weights = dict(models.list_named_weights(models.load_policy(model_dir)))
        self.engine.load(weights, Label(1, 0), "d")
        self.cursor = 0
        self.engine.add(self.requests(GROUPS))
        answers: list[Completion] = []
        while self.engine.active:
            answers += self.engine.step()
        self.learner = LearnerCore(self.config, model_dir)
        self.batch = batch(sorted(answers, key=lambda answer: answer.key))
        self.tokens = sum(sample.length for sample in self.batch.samples)

    def requests(self, groups: int) -> list[CompletionRequest]:
        settings = self.config.generator
        first, self.cursor = self.cursor, self.cursor + groups
        out = []
        for ticket in range(first, self.cursor):
            ids = encode_prompt(self.tokenizer, self.task.prompt("train", ticket, 0))
            most = min(settings.max_new_tokens, settings.context - len(ids))
            out += [
                CompletionRequest(
                    key=(ticket, sample, 1),
                    prompt=ids,
                    group=ticket,
                    max_new_tokens=most,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    stop=self.stop,
                    seed=0,
                )
                for sample in range(SIZE)
            ]
        return out

    def write(self, seconds: float) -> float:
        """Seconds a token while answers come and go and the rows' ages are mixed."""
        end = time.perf_counter() + seconds
        slots = self.config.generator.slots
        warm, finished, tokens, began = 2 * BATCH, 0, 0, 0.0
        while time.perf_counter() < end or finished < warm + BATCH:
            while self.engine.active < slots + BATCH:
                self.engine.add(self.requests(SIZE))
            answers = self.engine.step()
            finished += len(answers)
            if began:
                tokens += sum(len(answer.tokens) for answer in answers)
            elif finished >= warm:
                warm, began = finished, time.perf_counter()
        took = time.perf_counter() - began
        self.engine.abort([r.key for r in self.engine.queue] + list(self.engine.count_tokens()))
        return took / tokens

    def learn(self, seconds: float) -> float:
        """Seconds a token of a step, by the median step that measures nothing but its own metrics:
        what is measured at intervals, like KL to the reference, makes some of a run's longer."""
        end = time.perf_counter() + seconds
        took = []
        while time.perf_counter() < end:
            began = time.perf_counter()
            self.learner.state.number = 1
            self.learner.train(msgspec.structs.replace(self.batch, number=1))
            took.append(time.perf_counter() - began)
        return statistics.median(took) / self.tokens


def batch(answers: list[Completion]) -> m.Batch:
    """As a buffer would lease it, all fresh; every other reward is 1."""
    samples = [
        m.Trajectory(
            ticket=a.key[0],
            sample=a.key[1],
            attempt=a.key[2],
            prompt_tokens=a.prompt.astype("<i4").tobytes(),
            tokens=a.tokens.astype("<i4").tobytes(),
            behavior_logprobs=a.logprobs.astype("<f4").tobytes(),
            mask=bytes(np.ones(len(a.tokens), np.uint8)),
            spans=[],
            reward=float(len(a.tokens) % 2),
            reward_parts={},
            finish=a.finish,  # type: ignore[arg-type]
            temperature=1.0,
        )
        for a in answers
    ]
    return m.Batch(
        epoch=1,
        number=0,
        samples=samples,
        lags=[1] * BATCH,
        in_flight=[0] * BATCH,
        token_lags=[[(0, s.length, 1)] for s in samples],
        stats={},
        next_ticket=GROUPS,
        ledger={},
    )


class Bare:
    """A process with a `Work`, bound to one core."""

    def __init__(self, model: Path, core: int, policy: str) -> None:
        argv = ["taskset", "-c", str(core), sys.executable, __file__, str(model)]
        self.process = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env(1, policy),
        )
        assert self.result() == "ready"

    def start(self, what: str, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {seconds}\n")
        self.process.stdin.flush()

    def result(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, what: str, seconds: float) -> float:
        self.start(what, seconds)
        return float(self.result())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def limit(left: Bare, right: Bare, seconds: float) -> dict[str, float]:
    """Seconds a token: Tg, Tl alone, then k max(Tg, Tl), k what they cost each other side by side.

    Tx, bringing a batch over, is 0: the next one comes while this one is trained."""
    alone = {"Tg": left.run("engine", seconds), "Tl": right.run("learner", seconds)}
    left.start("engine", seconds)
    right.start("learner", seconds)
    both = {"Tg": float(left.result()), "Tl": float(right.result())}
    k = max(both.values()) / max(alone.values())
    slower = {f"k_{name}": both[name] / alone[name] for name in alone}
    return alone | slower | {"k": k, "token": k * max(alone.values())}


def main() -> None:
    work = Work(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        what, seconds = line.split()
        does: Any = {"engine": work.write, "learner": work.learn}[what]
        print(json.dumps(does(float(seconds))), flush=True)


if __name__ == "__main__":
    main()
