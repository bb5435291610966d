"""The parts of benchmarks/gpu_bench.py.  Each runs in a process of its own and returns figures.

Models have the shapes of Qwen3 and random weights, made on the device.  A completion ends at each
token with the probability 1 / `mean`, whatever its text, so that lengths have the long tail of
real answers: one coordinate of the hidden state is held constant, and only the end token's row
reads it."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    StoppingCriteria,
    StoppingCriteriaList,
)

from actors.engine import CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from actors.turn import build_trajectory
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.messages import Batch, Trajectory
from asyncrl.contract.versions import Label
from asyncrl.experiments import serial
from asyncrl.models import policy
from learner.step import LearnerCore
from lib import learner_batch
from lib.gpu_parts import run_command

END = 1  # the id of the end token
GROUP = 8  # samples of a prompt


@dataclass(frozen=True)
class Scale:
    """How much the parts compute."""

    shapes: Mapping[str, Mapping[str, int]]  # arguments of Qwen3Config
    prompt: int  # tokens
    mean: int  # tokens of a completion
    most: int  # tokens of a completion
    slots: int  # rows decoded at the same time
    rows: int  # sequences of a learner's batch
    groups: int  # prompts of a run's batch
    steps: int  # of a run; half as many at limit 0, where each waits for the longest answer
    seconds: float  # a measurement lasts about so long
    matrix: int  # rows and columns of the matrices that find the device's peak
    copied: int  # bytes of the copy that finds the memory's bandwidth


def _shape(hidden: int, layers: int, heads: int, inner: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 128 if hidden >= 1024 else 16,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


SCALES = {
    "tiny": Scale(
        {"0.5B": _shape(64, 2, 4, 96, 500), "1.5B": _shape(64, 3, 4, 96, 500)},
        *(6, 8, 16, 8, 8, 2, 4, 0.2, 64, 1 << 16),
    ),
    # the shapes of Qwen3-0.6B and Qwen3-1.7B
    "full": Scale(
        {"0.5B": _shape(1024, 28, 16, 3072, 151_936), "1.5B": _shape(2048, 28, 16, 6144, 151_936)},
        *(64, 512, 2048, 128, 32, 8, 8, 20.0, 8192, 1 << 30),
    ),
}


@dataclass(frozen=True)
class Setting:
    """Where a part computes, and how much."""

    device: str  # cuda or cpu
    scale: Scale
    work: Path  # shared by all parts

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def model_directory(self, size: str) -> Path:
        """Return the directory of a model; the first part that needs it builds it."""
        path = self.work / f"model-{size}"
        if not path.is_dir():
            part = path.with_suffix(".part")
            build_model(part, self, size)
            part.rename(path)
        return path

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_gib(self) -> float | None:
        """Return the most memory that tensors had on the device, in GiB."""
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        return round(peak / 2**30, 2) or None


def build_model(path: Path, setting: Setting, size: str) -> None:
    """Build a model whose completions end with probability 1 / mean at each token."""
    shape = setting.scale.shapes[size]
    config = Qwen3Config(
        **shape,
        tie_word_embeddings=True,
        max_position_embeddings=2 * setting.scale.most,
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config, dtype=setting.dtype)
    with torch.no_grad():
        for layer in model.model.layers:  # coordinate 0 of the residual stream stays constant
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        rows = model.model.embed_tokens.weight
        rows[:, 0] = 1
        ids = torch.randint(2, shape["vocab_size"], (4, 64), device=setting.device)
        held = float(model.model(ids).last_hidden_state[..., 0].float().mean())
        rows[END] = 0
        # exp(z) / sum exp = 1 / mean, where the other rows' logits are about those of coordinate 0
        rows[END, 0] = 1 + math.log(shape["vocab_size"] / setting.scale.mean) / held
    model.save_pretrained(path)
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>"])}
    words |= {chr(code): len(words) + code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(path)


def draw_lengths(scale: Scale, count: int) -> np.ndarray:
    """Return lengths of completions, int [count]: geometric, cut at `most`."""
    return np.minimum(np.random.default_rng(0).geometric(1 / scale.mean, count), scale.most)


def count_parameters(shape: Mapping[str, int]) -> int:
    """Count the weights that multiply a token: all, with the tied head once."""
    hidden, head = shape["hidden_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = hidden * head * (2 * queries + 2 * keys) + 3 * hidden * shape["intermediate_size"]
    return shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]


# ---- what the device can do ----------------------------------------------------------------------


def measure_peaks(setting: Setting, size: str) -> dict[str, Any]:
    """Measure the rate of a matrix product, and of a copy within the device's memory."""
    scale = setting.scale
    a = torch.randn(scale.matrix, scale.matrix, device=setting.device, dtype=setting.dtype)
    source = torch.zeros(scale.copied, device=setting.device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def repeat(run: Callable[[], Any]) -> float:
        run()
        setting.synchronize()
        began, calls = time.perf_counter(), 0
        while time.perf_counter() - began < min(scale.seconds, 3.0):
            for _ in range(10):
                run()
            setting.synchronize()
            calls += 10
        return (time.perf_counter() - began) / calls

    return {
        "flop_per_s": 2 * scale.matrix**3 / repeat(lambda: a @ a),
        "bytes_per_s": 2 * scale.copied / repeat(lambda: target.copy_(source)),
    }


# ---- generation ----------------------------------------------------------------------------------


def draw_prompts(setting: Setting, count: int) -> np.ndarray:
    """Return prompts, int32 [count, prompt], of tokens that the tokenizer knows."""
    r = np.random.default_rng(1)
    return r.integers(3, 90, (count, setting.scale.prompt)).astype(np.int32)


def measure_engine(setting: Setting, size: str) -> dict[str, Any]:
    """Decode with the embedded engine, with waiting requests for every free slot, for a while."""
    scale = setting.scale
    model = policy.load_policy(
        setting.model_directory(size), str(setting.dtype).removeprefix("torch."), setting.device
    )
    engine = EmbeddedEngine(
        model, slots=scale.slots, context=scale.prompt + scale.most, max_new_tokens=scale.most
    )
    weights = dict(policy.list_named_weights(model))
    engine.load(weights, Label(1, 0), "d")
    rows = 16 * scale.slots
    prompts = draw_prompts(setting, rows // GROUP)
    engine.add(
        CompletionRequest(
            key=(row // GROUP, row % GROUP, 1),
            prompt=prompts[row // GROUP],
            group=row // GROUP,
            max_new_tokens=scale.most,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            stop=(END,),
            seed=7,
        )
        for row in range(rows)
    )
    finished = 0

    def decode(seconds: float) -> tuple[int, float, int, float]:
        """Return new tokens, seconds, forward passes, and the bytes of keys that these read."""
        nonlocal finished
        before, steps = finished + sum(engine.count_tokens().values()), engine.steps_made
        setting.synchronize()
        began, cached = time.perf_counter(), 0.0
        while engine.active and time.perf_counter() - began < seconds:
            made = engine.steps_made
            finished += sum(len(completion.tokens) for completion in engine.step(8))
            lengths = [scale.prompt + sampled for sampled in engine.count_tokens().values()]
            cached += float((engine.steps_made - made) * sum(lengths) * engine.token_bytes)
        setting.synchronize()
        elapsed = time.perf_counter() - began
        tokens = finished + sum(engine.count_tokens().values()) - before
        return tokens, elapsed, engine.steps_made - steps, cached

    decode(scale.seconds / 4)
    tokens, seconds, passes, cached = decode(scale.seconds)
    began = time.perf_counter()
    engine.load(weights, Label(1, 1), "e")
    setting.synchronize()
    swap_s = time.perf_counter() - began
    return {
        "tokens_per_s": tokens / seconds,
        "passes_per_s": passes / seconds,
        # what a forward pass must read: weights, and keys and values of the rows' tokens
        "weight_bytes": sum(w.numel() * w.element_size() for w in weights.values()),
        "cache_bytes": cached / passes,
        "graphs": sum(not isinstance(step, partial | None) for step in engine.graphs.values()),
        "swap_s": swap_s,
        "peak_gib": setting.peak_gib(),
    }


class LengthsCriteria(StoppingCriteria):  # type: ignore[misc]
    """Row i ends after lengths[i] tokens, all rows after a time."""

    def __init__(self, lengths: torch.Tensor, prompt: int, seconds: float) -> None:
        self.lengths = lengths
        self.prompt = prompt
        self.end = time.perf_counter() + seconds
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.steps = input_ids.shape[1] - self.prompt
        if time.perf_counter() > self.end:
            return torch.ones_like(self.lengths, dtype=torch.bool)
        return self.lengths <= self.steps


def measure_generate(setting: Setting, size: str) -> dict[str, Any]:
    """Decode one batch with transformers' `generate` and its static cache."""
    scale = setting.scale
    model = load_plain(setting, size)
    lengths = torch.from_numpy(draw_lengths(scale, scale.slots)).to(setting.device)
    rows = draw_prompts(setting, scale.slots // GROUP).repeat(GROUP, axis=0)
    prompts = torch.from_numpy(rows).long().to(setting.device)
    model.generation_config.eos_token_id = None

    def run(most: int, seconds: float) -> tuple[int, float]:
        criteria = LengthsCriteria(lengths, scale.prompt, seconds)
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                stopping_criteria=StoppingCriteriaList([criteria]),
                cache_implementation="static",
                disable_compile=setting.device == "cpu",
                do_sample=True,
                top_k=0,
                max_new_tokens=most,
                pad_token_id=0,
            )
        setting.synchronize()
        elapsed = time.perf_counter() - began
        return int(lengths.clamp(max=criteria.steps).sum()), elapsed

    run(scale.most, scale.seconds / 4)  # compiles
    tokens, seconds = run(scale.most, scale.seconds)
    return {"tokens_per_s": tokens / seconds, "peak_gib": setting.peak_gib()}


def measure_continuous(setting: Setting, size: str) -> dict[str, Any]:
    """Decode with transformers' continuous batching, which needs a GPU."""
    from transformers import GenerationConfig

    if setting.device == "cpu":
        raise ValueError("continuous batching takes its keys and values from a GPU's free memory")
    scale = setting.scale
    model = load_plain(setting, size)
    count = 2 * scale.slots
    prompts = draw_prompts(setting, count // GROUP).repeat(GROUP, axis=0).tolist()
    how = GenerationConfig(
        max_new_tokens=scale.most, do_sample=True, top_k=0, eos_token_id=END, pad_token_id=0
    )
    began = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=how)
    seconds = time.perf_counter() - began
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    return {"tokens_per_s": tokens / seconds, "peak_gib": setting.peak_gib()}


def load_plain(setting: Setting, size: str) -> Any:
    """Load a model as transformers has it."""
    model = AutoModelForCausalLM.from_pretrained(
        setting.model_directory(size), dtype=setting.dtype, attn_implementation="sdpa"
    )
    return model.to(setting.device)


# ---- training ------------------------------------------------------------------------------------


def make_batch(setting: Setting) -> Batch:
    """Return a batch of `rows` sequences whose lengths have the long tail."""
    scale = setting.scale
    r = np.random.default_rng(2)
    prompts = draw_prompts(setting, scale.rows // GROUP)
    samples = []
    for row, length in enumerate(draw_lengths(scale, scale.rows)):
        tokens = r.integers(3, 90, length).astype("<i4").tobytes()
        logprobs = np.full(length, -5, "<f4").tobytes()
        ticket = row // GROUP
        samples.append(
            Trajectory(
                *(ticket, row % GROUP, 1, prompts[ticket].tobytes(), tokens, logprobs),
                *(bytes([1] * int(length)), [], float(row % 2), {}, "stop", 1.0),
            )
        )
    lags = [[(0, sample.length, 0)] for sample in samples]
    empty = [0] * len(samples)
    groups = scale.rows // GROUP
    return Batch(1, 0, samples, [1] * len(samples), empty, lags, {}, groups, {})


def measure_learner(setting: Setting, size: str) -> dict[str, Any]:
    """Train with the learner on one batch again and again."""
    path = setting.model_directory(size)
    config = learner_batch.config(
        path,
        model={
            "path": str(path),
            "device": setting.device,
            "dtype": str(setting.dtype).removeprefix("torch."),
        },
        task={"name": "client"},
        generator={"max_new_tokens": setting.scale.most, "context": 2 * setting.scale.most},
        learner={"steps": 10**6, "lr": 1e-7, "group_size": GROUP},
    )
    core = LearnerCore(config, path)
    batch = make_batch(setting)
    parameters = count_parameters(setting.scale.shapes[size])
    return {"parameters": parameters} | measure_training(setting, batch, lambda: core.train(batch))


def measure_training(setting: Setting, batch: Batch, train: Callable[[], Any]) -> dict[str, Any]:
    train()
    setting.synchronize()
    began, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - began < setting.scale.seconds:
        train()
        setting.synchronize()
        calls += 1
    seconds = (time.perf_counter() - began) / calls
    prompt = setting.scale.prompt
    return {
        "tokens_per_s": sum(sample.length for sample in batch.samples) / seconds,
        "positions_per_s": sum(prompt + sample.length for sample in batch.samples) / seconds,
        "step_s": seconds,
        "peak_gib": setting.peak_gib(),
    }


def measure_plain_learner(setting: Setting, size: str) -> dict[str, Any]:
    """Train as a plain loop does: rows one by one, transformers' forward, fused AdamW."""
    model = load_plain(setting, size)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)
    batch = make_batch(setting)
    rows = [
        (
            torch.from_numpy(np.frombuffer(sample.prompt_tokens + sample.tokens, "<i4").copy()),
            2 * sample.reward - 1,
        )
        for sample in batch.samples
    ]
    total = sum(sample.length for sample in batch.samples)

    def train() -> None:
        for row, advantage in rows:
            ids = row.long().to(setting.device)[None]
            logits = model(ids, use_cache=False).logits[0, setting.scale.prompt - 1 : -1].float()
            own = logits.gather(1, ids[0, setting.scale.prompt :, None])[:, 0]
            logprobs = own - logits.logsumexp(1)
            (-advantage * logprobs.sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return measure_training(setting, batch, train)


# ---- whole steps ---------------------------------------------------------------------------------


def write_config(setting: Setting, size: str, limit: int) -> tuple[Path, list[str]]:
    """Return the config of a run at a staleness limit, and its settings as `key=value`."""
    scale = setting.scale
    name = f"limit-{limit}"
    r = np.random.default_rng(3)
    lines = [
        json.dumps({"prompt": "".join(map(chr, r.integers(65, 91, scale.prompt))), "answer": "A"})
        for _ in range(512)
    ]
    prompts, heldout = setting.work / "prompts.jsonl", setting.work / "heldout.jsonl"
    prompts.write_text("\n".join(lines[8:]))
    heldout.write_text("\n".join(lines[:8]))
    reward = setting.work / "bench_reward.py"
    reward.write_text(
        "def score(prompt, completion, **_):\n    return float(len(completion) % 2)\n"
    )
    sets: dict[str, Any] = {
        "name": name,
        "runs": str(setting.work / "runs"),
        "model.path": str(setting.model_directory(size)),
        "model.device": setting.device,
        "model.dtype": str(setting.dtype).removeprefix("torch."),
        "task.name": "file",
        "task.prompts": str(prompts),
        "task.heldout": str(heldout),
        "reward.function": f"{reward}:score",
        "staleness.max_lag": limit,
        "learner.steps": scale.steps if limit else scale.steps // 2,
        "learner.groups": scale.groups,
        "learner.group_size": GROUP,
        "learner.lr": 1e-7,
        "generator.slots": scale.slots,
        "generator.max_new_tokens": scale.most,
        "generator.context": 2 * scale.most,
        "evaluation.every": 10**6,
        "evaluation.prompts": 1,
        "evaluation.final_prompts": 1,
        "evaluation.ood_prompts": 0,
        "learner.checkpoint_every": 10**6,
        "wires.connect_s": 60,
    }
    config = setting.work / f"{name}.toml"
    config.write_text("")
    return config, [f"{key}={json.dumps(value)}" for key, value in sets.items()]


def measure_run(setting: Setting, size: str, limit: int) -> dict[str, Any]:
    """Run `asyncrl run` with generator and learner on the one device, at a staleness limit."""
    config, sets = write_config(setting, size, limit)
    command = [sys.executable, "-m", "asyncrl.cli", "run", str(config), "--json"]
    for item in sets:
        command += ["--set", item]
    summary = run_command(command)
    rows = (Path(summary["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    times = [row["t"] for line in rows if "t" in (row := msgspec.json.decode(line))]
    # the first step has the engine's start
    return {
        "step_s": (times[-1] - times[0]) / max(len(times) - 1, 1),
        "tokens_per_s": summary["tokens"] / summary["wall_s"],
        "lag": summary["lag"],
        "idle_share": summary["speed"]["idle_share"],
    }


class SharedRun(serial.SerialRun):
    """Engine and learner by turns in one process; versions never leave the device."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.update_steps = 1  # an update ends before the next decode step
        self.copies: dict[Label, dict[str, torch.Tensor]] = {}

    def publish(self) -> tuple[Label, str]:
        label = Label(serial.EPOCH, self.core.state.number)
        weights = policy.list_named_weights(self.core.model)
        self.copies = {label: {name: weight.clone() for name, weight in weights}}
        return label, str(label.number)

    def swap(self) -> None:
        goal = self.turn.schedule.next_version(self.loaded)
        if goal is not None and goal in self.copies:
            self.turn.engine.load(self.copies[goal], goal, str(goal.number))
            self.loaded = goal

    def deliver(self) -> None:
        """Score beside decoding, as processes do: `SerialRun` waits for each reward."""
        for finished in self.turn.pop_due(self.clock + serial.SLICE):
            self.turn.submit(finished)
        for judged, result in self.turn.poll_results():
            sample = build_trajectory(judged, result)
            self.numbers.record_answer(sample)
            self.store.deliver(sample, self.clock)
            if self.store.is_complete(sample.ticket):
                self.meter.on_complete([sample.ticket], self.clock)


def measure_shared(setting: Setting, size: str) -> dict[str, Any]:
    """Make the run of `measure_run` at limit 2 in one process."""
    config, sets = write_config(setting, size, 2)
    with mock.patch.object(serial, "SLICE", 8):  # decode steps between two looks at the rest
        record = SharedRun(load.load(str(config), sets)).run()
    times = [row["t"] for row in record["curve"]]
    return {
        "step_s": (times[-1] - times[0]) / max(len(times) - 1, 1),
        "tokens_per_s": record["tokens"] / record["wall_s"],
        "lags": record["lag_histogram"],
        "peak_gib": setting.peak_gib(),
    }


MEASURES: dict[str, Callable[[Setting, str], dict[str, Any]]] = {
    "peaks": measure_peaks,
    "engine": measure_engine,
    "generate": measure_generate,
    "learner": measure_learner,
    "plain learner": measure_plain_learner,
    "synchronous": lambda setting, size: measure_run(setting, size, 0),
    "asynchronous": lambda setting, size: measure_run(setting, size, 2),
    "shared": measure_shared,
    "continuous batching": measure_continuous,
}


def run_part(name: str, device: str, scale: str, work: Path) -> dict[str, Any]:
    """Run a part, such as "engine 0.5B"."""
    measure, _, size = name.rpartition(" ")
    return MEASURES[measure](Setting(device, SCALES[scale], work), size)
