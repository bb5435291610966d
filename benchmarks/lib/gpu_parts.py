"""The parts of benchmarks/gpu_check.py.  Each runs in a process of its own.

A part computes on the device and on the CPU (log-probabilities of engines in float64, learners in
float32), and raises an error where the two differ by more than LIMITS."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from actors.decoding.drafts import DraftPolicy
from actors.engine import Completion, CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from actors.generator import WeightsReceiver
from asyncrl.config import load
from asyncrl.config.tree import Config, LoraConfig
from asyncrl.contract.messages import Batch, Trajectory, WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.models import adapters, fetch, policy
from asyncrl.models.policy import PolicyModel
from asyncrl.models.weight_rounding import list_linear_layers
from asyncrl.records import rundir
from asyncrl.tasks.synthetic import SortTask
from learner.distributed.fsdp_backend import get_local_part
from learner.publisher import Publisher
from learner.step import LearnerCore
from lib import learner_batch, results_file

PROGRAM = Path(__file__).resolve().parents[1] / "gpu_check.py"
# largest differences from the CPU: of a log-probability (nats), and of the gradient (relative)
LIMITS = {"float32": (1e-3, 1e-2), "bfloat16": (0.2, 0.2)}
PROMPT = 12  # tokens
LONGEST = 56  # tokens of a response in the learner's batch
DRAFT = 4  # tokens
DRAFTED = 32  # completions with drafts, which pay while few are decoded
UNUSED = "set_reduce_scatter_unused_params"  # torch 2.11 lacks it; one rank does not need it
ROUTED = 64  # completions of a mixture of experts, at least
Truncations = Sequence[tuple[float, int]]  # (top-p, top-k) of the engine's requests, in turn
TRUNCATIONS: Truncations = ((1.0, 0), (0.8, 0), (1.0, 5))
Sections = Mapping[str, dict[str, object]]  # of a config
NO_SECTIONS: Sections = MappingProxyType({})


class PartError(Exception):
    """A part ran, but its result is wrong."""


@dataclass(frozen=True)
class Size:
    """How much a part computes."""

    model: Mapping[str, int]  # arguments of `policy.build_model`
    groups: int  # of 8 samples, in the learner's batch
    completions: int  # of the engine
    new_tokens: int
    slots: int
    steps: int  # of the demo
    seconds: float  # spent on repeating a timed call, at least


SIZES = {
    "tiny": Size({"hidden": 32, "layers": 2, "heads": 2}, 2, 12, 8, 8, 2, 0.0),
    "full": Size({"hidden": 512, "layers": 8, "heads": 8}, 8, 512, 128, 256, 20, 2.0),
}


@dataclass(frozen=True)
class Setting:
    """Where a part computes, and how much."""

    device: str  # cuda or cpu
    size: Size
    work: Path  # shared by all parts

    @property
    def threads(self) -> int:
        """Threads of the CPU's share of the work."""
        return 1 if self.size is SIZES["tiny"] else min(8, os.cpu_count() or 1)

    @property
    def learner(self) -> dict[str, object]:
        """The section of a learner that makes visible steps."""
        return {"steps": 10**6, "lr": 1e-3, "threads": self.threads}

    def model_directory(self) -> Path:
        """Return the model that all parts use; the first part builds it."""
        path = self.work / "model"
        if not path.is_dir():
            part = self.work / f"model.part{os.getpid()}"
            policy.build_model(
                part,
                SortTask.symbols,
                **self.size.model,  # type: ignore[arg-type]
            )
            part.rename(path)
        return path

    def load(self, dtype: str) -> PolicyModel:
        """Return the model on the device."""
        return policy.load_policy(self.model_directory(), dtype, self.device)

    def load_reference(self) -> PolicyModel:
        """Return the model on the CPU, in float64; its log-probabilities are rounded at the end."""
        torch.set_num_threads(self.threads)
        model = policy.load_policy(self.model_directory(), "float32", "cpu")
        model.hf.double()
        return model

    def config(
        self, dtype: str = "float32", device: str = "", replaced: Sections = NO_SECTIONS
    ) -> Config:
        """Return a learner's config, with the sections `replaced`."""
        path = self.model_directory()
        sections: dict[str, dict[str, object]] = {
            "model": {"path": str(path), "dtype": dtype, "device": device or self.device},
            "learner": self.learner,
        }
        return learner_batch.config(path, **(sections | dict(replaced)))


@dataclass
class PartResult:
    """What a part reports."""

    logprobs: float | None = None  # largest difference from the CPU, in nats
    gradients: float | None = None  # |device - CPU| / |CPU|
    tokens_per_s: float | None = None
    note: str = ""

    def check(self, dtype: str) -> PartResult:
        """Return this result.  Raises PartError where it differs too much from the CPU."""
        of_logprobs, of_gradients = LIMITS[dtype]
        # a value that is not a number fails, too
        if self.logprobs is not None and not self.logprobs <= of_logprobs:
            raise PartError(
                f"log-probabilities differ from the CPU by {self.logprobs:.1e} nats (at most "
                f"{of_logprobs:g})"
            )
        if self.gradients is not None and not self.gradients <= of_gradients:
            raise PartError(
                f"the gradient differs from the CPU by {self.gradients:.1e} of its norm (at most "
                f"{of_gradients:g})"
            )
        return self


def synchronize(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def measure_seconds(setting: Setting, run: Callable[[], Any]) -> float:
    """Return the seconds of one call, after the calls before it have warmed the device up."""
    synchronize(setting)
    began = time.perf_counter()
    calls = 0
    while calls == 0 or time.perf_counter() - began < setting.size.seconds:
        run()
        synchronize(setting)
        calls += 1
    return (time.perf_counter() - began) / calls


# ---- engine --------------------------------------------------------------------------------------


def make_engine(setting: Setting, model: PolicyModel, **more: Any) -> EmbeddedEngine:
    size = setting.size
    return EmbeddedEngine(
        model,
        slots=size.slots,
        context=PROMPT + size.new_tokens,
        max_new_tokens=size.new_tokens,
        **more,
    )


def generate(
    setting: Setting, engine: EmbeddedEngine, truncations: Truncations = TRUNCATIONS
) -> list[Completion]:
    """Generate completions of groups of four, with each of the truncations in turn."""
    size = setting.size
    random = np.random.default_rng(0)
    vocabulary = engine.lay.hf.config.vocab_size
    requests = []
    for group in range(size.completions // 4):
        prompt = random.integers(3, vocabulary, PROMPT).astype(np.int32)
        top_p, top_k = truncations[group % len(truncations)]
        requests += [
            CompletionRequest(
                (group, sample, 1), prompt, group, size.new_tokens, 1.0, top_p, top_k, (), 7
            )
            for sample in range(4)
        ]
    engine.add(requests)
    completions: list[Completion] = []
    while engine.active:
        completions += engine.step()
    if len(completions) != len(requests):
        raise PartError(f"{len(completions)} of {len(requests)} completions were generated")
    return completions


def measure_move(
    completions: Sequence[Completion], model: PolicyModel, *, replay: bool = False
) -> torch.Tensor:
    """Return the model's log-probabilities less the recorded ones, [tokens], of 64 completions.

    replay: use the recorded experts."""
    part = completions[:64]
    with torch.no_grad():
        output = model.logprobs(
            [completion.prompt for completion in part],
            [completion.tokens for completion in part],
            torch.ones(len(part)),
            groups=[completion.key[0] for completion in part],
            supports=[completion.support for completion in part],
            routed=[completion.routed for completion in part] if replay else None,
        )
    recorded = torch.from_numpy(np.concatenate([completion.logprobs for completion in part]))
    return output.logprobs.float().cpu() - recorded


def compare_completions(completions: Sequence[Completion], reference: PolicyModel) -> float:
    """Return the largest difference of the recorded log-probabilities from the reference's."""
    return float(measure_move(completions, reference).abs().max())


def measure_tokens(
    setting: Setting, engine: EmbeddedEngine, truncations: Truncations = TRUNCATIONS
) -> tuple[list[Completion], float]:
    """Return completions, and the tokens a second of generating them once more."""
    completions = generate(setting, engine, truncations)
    seconds = measure_seconds(setting, lambda: generate(setting, engine, truncations))
    return completions, sum(len(completion.tokens) for completion in completions) / seconds


def check_engine(setting: Setting, dtype: str) -> PartResult:
    """Generate, and compare the recorded log-probabilities with the CPU's."""
    model = setting.load(dtype)
    engine = make_engine(setting, model)
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "gpu-check")
    completions, tokens_per_s = measure_tokens(setting, engine)
    difference = compare_completions(completions, setting.load_reference())
    return PartResult(difference, tokens_per_s=tokens_per_s).check(dtype)


def check_drafts(setting: Setting) -> PartResult:
    """Generate few completions by speculative decoding, and compare their log-probabilities."""
    few = replace(setting.size, completions=DRAFTED, slots=min(setting.size.slots, DRAFTED // 2))
    setting = replace(setting, size=few)
    model = setting.load("float32")
    engine = make_engine(setting, model, drafts=DraftPolicy(DRAFT, setting.size.slots))
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "gpu-check")
    completions, tokens_per_s = measure_tokens(setting, engine)
    if not engine.proposed:
        raise PartError("no draft was verified")
    difference = compare_completions(completions, setting.load_reference())
    result = PartResult(difference, tokens_per_s=tokens_per_s)
    result.note = f"{engine.accepted / engine.proposed:.0%} of {engine.proposed:,} drafted tokens"
    return result.check("float32")


def check_routing(setting: Setting) -> PartResult:
    """Generate with a mixture of experts in bfloat16, and replay its routing in another pass.

    Both round.  Without the replay, close routers choose other experts."""
    # with fewer completions on a small model, no router might choose other experts
    many = replace(setting.size, completions=max(setting.size.completions, ROUTED))
    setting = replace(setting, size=many)
    path = setting.work / "mixture"
    size = {**setting.size.model, "intermediate": setting.size.model["hidden"] // 2}
    built = policy.build_model(path, SortTask.symbols, family="qwen3_moe", experts=16, **size)  # type: ignore[arg-type]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in built.hf.parameters():
            if parameter.dim() > 1:
                # so large that the routers are far from uniform
                parameter.normal_(0, 0.85 / size["hidden"] ** 0.5)
    fetch.save(built.hf, path)
    model = policy.load_policy(path, "bfloat16", setting.device)
    engine = make_engine(setting, model, record_routing=True)
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "gpu-check")
    completions, tokens_per_s = measure_tokens(setting, engine, [(1.0, 0)])
    moves = [measure_move(completions, model, replay=replay) for replay in (False, True)]
    own, replayed = (float((move.exp() - 1 - move).mean()) for move in moves)
    if not replayed <= own:
        raise PartError(f"the replay does not lower k3: {own:.1e} to {replayed:.1e}")
    note = f"replay lowers k3 from {own:.1e} to {replayed:.1e}"
    return PartResult(tokens_per_s=tokens_per_s, note=note)


# ---- packed forward and learner ------------------------------------------------------------------


def make_batch(setting: Setting) -> Batch:
    """Return a learner's batch without lag, whose behavior log-probabilities are the CPU's.

    The learner's mismatch is then its difference from the CPU."""
    reference = setting.load_reference()
    vocabulary = reference.hf.config.vocab_size
    batch = learner_batch.batch(setting.size.groups, vocabulary=vocabulary)
    with torch.no_grad():
        logprobs = run_forward(reference, batch.samples).numpy()
    ends = np.cumsum([sample.length for sample in batch.samples])
    samples = [
        msgspec.structs.replace(sample, behavior_logprobs=own.astype("<f4").tobytes())
        for sample, own in zip(batch.samples, np.split(logprobs, ends[:-1]), strict=True)
    ]
    return msgspec.structs.replace(
        batch,
        samples=samples,
        lags=[0] * len(samples),
        token_lags=[[(0, sample.length, 0)] for sample in samples],
    )


def run_forward(model: PolicyModel, samples: Sequence[Trajectory]) -> torch.Tensor:
    output = model.logprobs(
        [np.frombuffer(sample.prompt_tokens, "<i4") for sample in samples],
        [np.frombuffer(sample.tokens, "<i4") for sample in samples],
        torch.ones(len(samples)),
        groups=[sample.ticket for sample in samples],
    )
    return output.logprobs


def run_backward(model: PolicyModel, samples: Sequence[Trajectory]) -> torch.Tensor:
    """Set the gradient of a weighted sum of log-probabilities, which are returned."""
    model.hf.zero_grad(set_to_none=True)
    logprobs = run_forward(model, samples)
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    (logprobs * weights.to(logprobs.device)).sum().backward()
    return logprobs.detach()


def gradient_difference(model: PolicyModel, reference: PolicyModel) -> float:
    """Return |gradient - reference's| / |reference's|, over all trained parameters."""
    squares = [0.0, 0.0]
    theirs = dict(reference.hf.named_parameters())
    for module in model.hf.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a shard has the gradient
    for name, parameter in model.hf.named_parameters():
        if not parameter.requires_grad:
            continue
        expected, found = theirs[name].grad.double(), parameter.grad
        if isinstance(found, DTensor):
            found = found.full_tensor()
        squares[0] += float((found.cpu().double() - expected).square().sum())
        squares[1] += float(expected.square().sum())
    if not squares[1] > 0:
        raise PartError("the gradient on the CPU is 0")
    return float((squares[0] / squares[1]) ** 0.5)


def check_packed_forward(setting: Setting, dtype: str) -> PartResult:
    """Compare log-probabilities and gradients of the packed forward with the CPU's."""
    samples = make_batch(setting).samples
    model, reference = setting.load(dtype), setting.load_reference()
    ours, theirs = run_backward(model, samples), run_backward(reference, samples)
    result = PartResult(
        float((ours.float().cpu() - theirs).abs().max()), gradient_difference(model, reference)
    )
    seconds = measure_seconds(setting, lambda: run_backward(model, samples))
    result.tokens_per_s = sum(sample.length for sample in samples) / seconds
    return result.check(dtype)


def check_learner(
    setting: Setting, dtype: str, replaced: Sections = NO_SECTIONS, backend: str = "torch"
) -> PartResult:
    """Train on one batch, and compare its gradient and log-probabilities with the CPU's.

    replaced: sections of both configs.
    backend: learner.backend on the device; the CPU's is torch."""
    batch = make_batch(setting)
    path = setting.model_directory()
    config = setting.config(dtype, replaced=replaced)
    learner = msgspec.structs.replace(config.learner, backend=backend)
    core = LearnerCore(msgspec.structs.replace(config, learner=learner), path)
    reference = LearnerCore(setting.config(device="cpu", replaced=replaced), path)
    if core.model.adapter is not None:  # random matrices, which may differ between devices
        policy.load_weights(reference.model, dict(policy.list_named_weights(core.model)))
    weights = [get_local_part(weight) for _, weight in policy.list_named_weights(core.model)]
    before = [weight.clone() for weight in weights]
    metrics = core.train(batch)
    reference.train(batch)
    if not all(bool(weight.isfinite().all()) for weight in weights):
        raise PartError("the step made weights that are not finite")
    if all(torch.equal(old, new) for old, new in zip(before, weights, strict=True)):
        raise PartError("the step changed no weight")
    result = PartResult(
        metrics["mismatch/max_at_lag_0"], gradient_difference(core.model, reference.model)
    )
    seconds = measure_seconds(setting, lambda: core.train(batch))
    core.backend.close()
    result.tokens_per_s = sum(sample.length for sample in batch.samples) / seconds
    return result.check(dtype)


def check_fsdp2(setting: Setting) -> PartResult:
    """Train with FSDP2 on one rank; then with its parameters and moments in the host's memory."""
    if not hasattr(FSDPModule, UNUSED):
        setattr(FSDPModule, UNUSED, lambda *_, **__: None)
    results = []
    for offload in (False, True):
        learner = setting.learner | {"offload": offload}
        results.append(check_learner(setting, "float32", {"learner": learner}, "fsdp2"))
    whole, offloaded = results
    ratio = (offloaded.tokens_per_s or 0.0) / (whole.tokens_per_s or 1.0)
    return PartResult(
        max(result.logprobs or 0.0 for result in results),
        max(result.gradients or 0.0 for result in results),
        whole.tokens_per_s,
        f"with offload {ratio:.2f} of the tokens a second",
    )


# ---- publication of weights ----------------------------------------------------------------------


def hash_weights(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash over names and bytes of the tensors."""
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        digest.update(name.encode())
        flat = tensors[name].detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return str(digest.hexdigest())


def make_publisher(setting: Setting, name: str, replaced: Sections = NO_SECTIONS) -> Publisher:
    """Return the publisher of a learner that has made one step."""
    config = setting.config(replaced=replaced)
    core = LearnerCore(config, setting.model_directory())
    core.train(make_batch(setting))
    run_dir = setting.work / name
    rundir.ensure(load.dump(config), run_dir)
    return Publisher(config, run_dir, 1, core)


def check_ring(setting: Setting) -> PartResult:
    """Publish by shared memory, load the version into an engine, and generate with it."""
    publisher = make_publisher(setting, "ring")
    receiver = WeightsReceiver(setting.config(), "generator-0")
    digest = publisher.publish(1)
    pulled = receiver.pull(publisher.source, Label(1, 1), digest)
    expected = dict(policy.list_named_weights(publisher.core.model))
    if pulled is None or hash_weights(pulled.tensors) != hash_weights(expected):
        raise PartError("the version that arrived differs from the published one")
    engine = make_engine(setting, setting.load("float32"))
    engine.load(pulled.tensors, Label(1, 1), digest)
    reference = setting.load_reference()
    policy.load_weights(reference, pulled.tensors)
    result = PartResult(compare_completions(generate(setting, engine), reference))

    def transfer() -> None:
        version = next(versions)
        if receiver.pull(publisher.source, Label(1, version), publisher.publish(version)) is None:
            raise PartError(f"version {version} did not arrive")

    versions = itertools.count(2)

    seconds = measure_seconds(setting, transfer)
    result.note = f"{publisher.ring.size / 1e6:.1f} MB in {1e3 * seconds:.1f} ms"
    receiver.close()
    publisher.close()
    rundir.clean(setting.work / "ring")
    return result.check("float32")


def check_pairs(setting: Setting) -> PartResult:
    """Publish from GPU to GPU to another process; from CPU to CPU with fewer than two GPUs."""
    both = setting.device == "cuda" and torch.cuda.device_count() > 1
    transport = "nccl" if both else "gloo"
    sections: dict[str, dict[str, object]] = {"weights": {"transport": transport}}
    env = dict(os.environ)
    if both:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        env["CUDA_VISIBLE_DEVICES"] = visible[1]
        sections["generator"] = {"gpus": [1]}
        sections["learner"] = setting.learner | {"gpus": [0]}
    publisher = make_publisher(setting, "pairs", sections)
    digest = publisher.publish(1)
    offer = {
        "transport": transport,
        "digest": digest,
        "source": msgspec.to_builtins(publisher.source),
        "config": str(setting.work / "pairs" / "config.toml"),
    }
    command = [sys.executable, str(PROGRAM), "--receive", json.dumps(offer)]
    received = run_command(command, env)
    publisher.close()
    rundir.clean(setting.work / "pairs")
    if received["hash"] != hash_weights(dict(policy.list_named_weights(publisher.core.model))):
        raise PartError("the version that arrived differs from the published one")
    return PartResult(note="NCCL" if both else "Gloo between CPUs: NCCL needs two GPUs")


def receive(offer: dict[str, Any]) -> dict[str, Any]:
    """Be the other process of `check_pairs`."""
    config = load.load(offer["config"])
    receiver = WeightsReceiver(config, "generator-0")
    source = msgspec.convert(offer["source"], WeightsSource)
    pulled = receiver.pull(source, Label(1, 1), offer["digest"])
    if pulled is None:
        raise PartError("the published version did not arrive")
    result = {"hash": hash_weights(pulled.tensors)}
    receiver.close()
    return result


# ---- whole commands ------------------------------------------------------------------------------


def run_command(command: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON object in the last line of a command's stdout.

    Its stderr is the part's own.  Raises PartError if it fails."""
    paths = [str(results_file.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(
        command, env={**(env or os.environ), **more}, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = ended.stdout.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if ended.returncode:
        reason = found.get("error", "no reason given")
        raise PartError(f"`{' '.join(command[1:4])}` exits with {ended.returncode}: {reason}")
    return found


def check_exact(setting: Setting) -> PartResult:
    """Run the self-test of exact mode, which holds on the CPU."""
    command = [sys.executable, "-m", "asyncrl.cli", "doctor", "--exact", "--json"]
    if setting.size is SIZES["tiny"]:
        file = setting.work / "exact.toml"
        short: Sections = {"generator": {"slots": 8, "max_new_tokens": 8, "context": 32}}
        file.write_text(load.dump(setting.config(device="cpu", replaced=short)))
        command.append(str(file))
    found = run_command(command)
    if not found["equal"]:
        raise PartError("engine and learner differ")
    return PartResult(0.0, note=f"on the CPU, {len(found['operators'])} rows bitwise equal")


def check_demo(setting: Setting) -> PartResult:
    """Run the demo by its real processes, shortened, with the model of the other parts."""
    size = setting.size
    sets = {
        "runs": json.dumps(str(setting.work / "runs")),
        "name": '"demo"',
        "model.path": json.dumps(str(setting.model_directory())),
        "model.warm_start": "false",
        "model.device": json.dumps(setting.device),
        "learner.steps": size.steps,
        "evaluation.prompts": 8,
        "evaluation.final_prompts": 8,
        "evaluation.ood_prompts": 0,
        "wires.connect_s": 60,
    }
    if size is SIZES["tiny"]:
        sets |= {"learner.groups": 2, "learner.group_size": 2, "generator.slots": size.slots}
        sets |= {"generator.max_new_tokens": size.new_tokens, "generator.context": 32}
    demo = str(results_file.ROOT / "configs" / "demo.toml")
    command = [sys.executable, "-m", "asyncrl.cli", "run", demo, "--json"]
    for key, value in sets.items():
        command += ["--set", f"{key}={value}"]
    summary = run_command(command)
    if summary["steps"] != size.steps:
        raise PartError(f"the run made {summary['steps']} of {size.steps} steps")
    mismatch = summary["mismatch_k3_max"]
    note = f"{size.steps} steps" + ("" if mismatch is None else f", mismatch k3 {mismatch:.1e}")
    return PartResult(tokens_per_s=summary["tokens"] / summary["wall_s"], note=note)


# ---- adapters ------------------------------------------------------------------------------------


def check_lora(setting: Setting) -> PartResult:
    """Generate with a merged adapter; with peft, also train adapters."""
    lora = LoraConfig(rank=4)
    model, reference = setting.load("float32"), setting.load_reference()
    random = torch.Generator().manual_seed(2)
    adapter: dict[str, torch.Tensor] = {}
    for name, _ in list_linear_layers(reference.hf):
        rows, columns = reference.hf.get_submodule(name).weight.shape
        adapter[f"{name}.lora_A.weight"] = torch.randn(4, columns, generator=random) * 0.1
        adapter[f"{name}.lora_B.weight"] = torch.randn(rows, 4, generator=random) * 0.01
    engine = make_engine(setting, model, base=adapters.AdapterBase(model, lora))
    engine.load(adapter, Label(1, 1), "gpu-check")
    completions = generate(setting, engine)
    unmerged = compare_completions(completions, reference)
    merged = adapters.merge_weights(
        dict(policy.list_named_weights(reference)), adapter, lora.alpha / lora.rank
    )
    policy.load_weights(reference, merged)
    result = PartResult(compare_completions(completions, reference)).check("float32")
    if not unmerged > 10 * (result.logprobs or 0.0):
        raise PartError("the adapter changed no log-probability")
    if importlib.util.find_spec("peft") is None:
        result.note = "engine only: training needs peft"
        return result
    trained = check_learner(setting, "float32", {"lora": {"rank": 4}})
    trained.logprobs = max(trained.logprobs or 0.0, result.logprobs or 0.0)
    return trained


# ---- one part ------------------------------------------------------------------------------------


def describe_device() -> dict[str, Any]:
    """Describe what torch sees, as JSON."""
    found: dict[str, Any] = {"device": "cpu", "gpus": [], "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["device"] = "cuda"
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            found["gpus"].append(
                {
                    "name": facts.name,
                    "memory_gib": round(facts.total_memory / 2**30, 1),
                    "capability": f"{facts.major}.{facts.minor}",
                }
            )
        torch.ones(8, device="cuda").sum().item()
    return found


CHECKS: dict[str, Callable[[Setting], PartResult]] = {
    "engine fp32": lambda setting: check_engine(setting, "float32"),
    "engine bf16": lambda setting: check_engine(setting, "bfloat16"),
    "packed forward fp32": lambda setting: check_packed_forward(setting, "float32"),
    "packed forward bf16": lambda setting: check_packed_forward(setting, "bfloat16"),
    "learner step fp32": lambda setting: check_learner(setting, "float32"),
    "learner step bf16": lambda setting: check_learner(setting, "bfloat16"),
    "weights by shared memory": check_ring,
    "weights by pairs": check_pairs,
    "LoRA": check_lora,
    "FSDP2": check_fsdp2,
    "speculative decoding": check_drafts,
    "routing replay": check_routing,
    "exact mode": check_exact,
    "demo run": check_demo,
}


def run_part(name: str, device: str, size: str, work: Path) -> dict[str, Any]:
    """Run a part of CHECKS, or describe the device."""
    if name == "device":
        return describe_device()
    return asdict(CHECKS[name](Setting(device, SIZES[size], work)))
