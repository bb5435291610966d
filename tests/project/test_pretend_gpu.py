"""Engine, learner and a whole run on a pretended GPU: its tensors never meet those of the CPU."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_rivals_kit import program
from engine_kit import request, run
from holding import held
from learner_step_kit import batch, core, weights
from pretend_gpu import GPU, pretend_gpu, waits
from process_kit import ROOT

from actors.decoding.drafts import DraftPolicy
from actors.engine import Completion, load_model
from actors.engine_embedded import EmbeddedEngine
from actors.engine_generic import GenericEngine
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.tasks.synthetic import SortTask
from learner import checkpoint
from learner.step import LearnerCore

pytestmark = pytest.mark.slow


@pytest.fixture
def gpu() -> Iterator[None]:
    with pretend_gpu():
        yield


def test_it_computes_as_the_cpu_and_refuses_its_tensors(gpu: None) -> None:
    here = torch.arange(6.0).view(2, 3)
    there = here.to("cuda")
    assert there.device == GPU and torch.zeros(2, device="cuda").device == GPU
    assert torch.equal((there @ there.T + 1.0).cpu(), here @ here.T + 1.0)
    assert torch.equal(there[torch.tensor([1])].cpu(), here[[1]])  # the CPU's may index
    there[:, 1:].mul_(2)
    assert there.tolist() == [[0.0, 2.0, 4.0], [3.0, 8.0, 10.0]]
    with pytest.raises(RuntimeError, match="same device"):
        there + here
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    layer = torch.nn.Linear(3, 1).to("cuda")
    layer(there).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.device == GPU


# those without other processes
PARTS = (
    *("engine fp32", "engine bf16", "packed forward fp32", "learner step fp32"),
    *("learner step bf16", "weights by shared memory", "LoRA", "speculative decoding"),
    "routing replay",
)


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_of_the_check_work(
    gpu: None, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("gpu_check", monkeypatch)
    from lib import gpu_parts

    setting = gpu_parts.Setting("cuda", gpu_parts.SIZES["tiny"], tmp_path)
    found = gpu_parts.CHECKS[part](setting)
    assert found.logprobs is not None or part == "routing replay"
    if part == "LoRA":  # it also trains, with peft
        assert found.gradients < 1e-4 and found.note == ""


ENGINES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "kept keys": (EmbeddedEngine, {"kept_tokens": 256, "in_flight": "recompute_kv"}),
    "drafts": (EmbeddedEngine, {"drafts": DraftPolicy(3, 8)}),
    "int8": (EmbeddedEngine, {"quantize": "int8"}),
    "short mantissa": (EmbeddedEngine, {"mantissa_bits": 5}),
    "generic": (GenericEngine, {}),
    "llama": (EmbeddedEngine, {}),
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_samples_what_it_samples_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Weights arrive in the host's memory, also while completions are unfinished."""
    kind, more = ENGINES[name]
    family: dict[str, Any] = {"family": "llama", "kv_heads": 2} if name == "llama" else {}
    first, second = (
        dict(policy.list_named_weights(policy.build_model(tmp_path / f"{n}", "abcdefgh", **shape)))
        for n, shape in ((1, {"seed": 1} | family), (2, {"seed": 2} | family))
    )

    def generate(device: str) -> list[Completion]:
        model = policy.load_policy(tmp_path / "1", "float32", device)
        engine = kind(model, slots=8, context=64, max_new_tokens=20, **more)
        engine.load(first, Label(1, 0), "d0")
        cuts: list[dict[str, float]] = [{}, {"top_p": 0.8}, {"top_k": 3}]
        completions = []
        for turn in range(2):
            prompt = [3, 4, 5, 6, 7, 8, 9, 10, 3, 4, 5]
            engine.add([request(turn, n, prompt + [3 + n], **cut) for n, cut in enumerate(cuts)])
            completions += engine.step(3)
            engine.load(second, Label(1, 1 + turn), "d1")
            completions += run(engine, []).values()
        scores = engine.score([np.array([3, 4, 5, 6], np.int32)], 2)
        completions.sort(key=lambda completion: completion.key)
        return [*completions, *scores]

    here = generate("cpu")
    with pretend_gpu():
        there = generate("cuda")
    assert len(here) == 7
    for ours, theirs in zip(here[:-1], there[:-1], strict=True):
        assert np.array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    np.testing.assert_allclose(here[-1].logprobs, there[-1].logprobs, atol=1e-5)


def test_a_call_of_an_engine_reads_the_gpu_once(gpu: None, tmp_path: Path) -> None:
    policy.build_model(tmp_path / "m", "abcdefgh")
    e = EmbeddedEngine(policy.load_policy(tmp_path / "m", device="cuda"), slots=8, context=64)
    load_model(e, policy.load_policy(tmp_path / "m"), Label(1, 0))
    e.add([replace(request(n, 0, [3, 4, 5], 17 + n), stop=()) for n in range(3)])
    assert e.step(8) == [] and e.graphs
    waits.clear()
    assert e.step(8) == [] and waits == ["tolist"]
    lengths = [len(completion.tokens) for completion in e.step(8)]
    assert lengths == [17, 18, 19] and e.steps_made == 19


SETS = {
    **{"learner.steps": 2, "learner.groups": 2, "learner.group_size": 2, "generator.slots": 8},
    **{"generator.max_new_tokens": 8, "generator.context": 32, "evaluation.prompts": 4},
    **{"evaluation.final_prompts": 4, "evaluation.ood_prompts": 0, "model.warm_start": "false"},
    **{"advantage.name": '"gae"', "kl.loss.coefficient": 0.1, "generator.top_p": 0.9},
    **{"weights.in_flight": '"recompute_kv"', "generator.speculate": 2},
}


def test_a_run_of_the_config_for_one_gpu_ends(tmp_path: Path) -> None:
    policy.build_model(tmp_path / "models" / "m", SortTask.symbols, hidden=32, heads=2)
    path, runs = (json.dumps(str(tmp_path / name)) for name in ("models/m", "runs"))
    command = [sys.executable, "-m", "asyncrl.cli", "run", "--json", "configs/gpu_one.toml"]
    for key, value in (SETS | {"model.path": path, "runs": runs}).items():
        command += ["--set", f"{key}={value}"]
    ended = subprocess.run(
        command, cwd=ROOT, env=held(gpu=True), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads(ended.stdout.strip().splitlines()[-1])
    assert summary["steps"] == 2 and summary["tokens"] > 0


def test_a_checkpoint_of_a_gpu_continues_there(gpu: None, tmp_path: Path) -> None:
    path, folder = tmp_path / "m", tmp_path / "checkpoints"
    policy.build_model(path, "abcdefgh", hidden=32)
    folder.mkdir()

    def begin() -> LearnerCore:
        learner = {"optimizer": "adamw", "gradient_cosine": "log"}
        return core(path, model={"path": str(path), "device": "cuda"}, learner=learner)

    whole, second = begin(), begin()
    whole.train(batch(0))
    checkpoint.save(folder, whole, {}, 1, {})
    whole.train(batch(1, seed=1))
    found = checkpoint.find_newest_checkpoint(folder)
    assert found is not None
    checkpoint.restore(second, found)
    second.train(batch(1, seed=1))
    assert torch.equal(weights(second).cpu(), weights(whole).cpu())
