"""Weights rounded to int8 and fp8: what the engine samples from, what the learner shares."""

import json
import sys
from pathlib import Path

import learner_step_kit
import numpy as np
import pytest
import torch
from bench_rivals_kit import program
from engine_kit import engine, request, run

from actors.engine import Completion
from actors.engine_embedded import make_engine
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.serial import run_serial
from asyncrl.models import policy
from asyncrl.models.weight_rounding import (
    list_linear_layers,
    load_learner_policy,
    round_rows,
    share_rounding,
)
from asyncrl.records import health_checks

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ["int8", "fp8"]


def emulated(weight: np.ndarray, number_format: str) -> np.ndarray:
    """Round rows in float64 by the definition of the formats, without a cast."""
    largest = np.abs(weight).max(1, keepdims=True)
    if number_format == "int8":
        return np.rint(weight / largest * 127) * largest / 127
    scaled = weight / largest * 448
    # e4m3: 3 stored mantissa bits, the smallest normal exponent is -6, subnormals below it
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(scaled), 1e-30))), -6) - 3)
    return np.rint(scaled / step) * step * largest / 448


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose distribution is far from uniform, on disk."""
    path = tmp_path_factory.mktemp("model")
    made = policy.build_model(path, "abcdefgh", family=request.param, kv_heads=2, seed=3)
    with torch.no_grad():
        for name, weight in made.hf.named_parameters():
            if weight.ndim == 2:
                weight.mul_(6.0 if "embed" not in name else 2.0)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.5)
    policy.export(made, path / "m")
    return path / "m"


def sampled(model: policy.PolicyModel, **how: str) -> list[Completion]:
    requests = [request(t, s, [3 + t % 8] * (1 + t % 5), 20) for t in range(8) for s in range(2)]
    return list(run(engine(model, slots=16, **how), requests).values())


def log_probabilities(model: policy.PolicyModel, answers: list[Completion]) -> torch.Tensor:
    with torch.no_grad():
        out = model.logprobs(
            [a.prompt for a in answers],
            [a.tokens for a in answers],
            torch.ones(len(answers)),
            groups=[a.key[0] for a in answers],
        )
    return out.logprobs


def in_float64(path: Path, answers: list[Completion], number_format: str | None) -> torch.Tensor:
    """Log-probabilities by transformers in float64, of the model or of its emulated rounding."""
    hf = policy.load_policy(path, with_modules=True).hf.double()
    if number_format is not None:
        with torch.no_grad():
            for _, layer in list_linear_layers(hf):
                layer.weight.copy_(torch.from_numpy(emulated(layer.weight.numpy(), number_format)))
    widest = max(len(a.prompt) + len(a.tokens) for a in answers)
    ids = torch.zeros(len(answers), widest, dtype=torch.long)  # padded at the right
    for row, a in zip(ids, answers, strict=True):
        tokens = np.concatenate([a.prompt, a.tokens])
        row[: len(tokens)] = torch.from_numpy(tokens)
    with torch.no_grad():
        logs = hf(input_ids=ids).logits.log_softmax(-1)
    picked = logs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    parts = [
        row[len(a.prompt) - 1 : len(a.prompt) + len(a.tokens) - 1]
        for row, a in zip(picked, answers, strict=True)
    ]
    return torch.cat(parts)


def k3(learner: torch.Tensor, engine: torch.Tensor) -> float:
    ratio = (learner - engine).double()
    return float((ratio.exp() - 1 - ratio).mean())


@pytest.mark.parametrize("number_format", FORMATS)
def test_mismatch_is_the_formats_less_by_shared_rounding(model: Path, number_format: str) -> None:
    plain = policy.load_policy(model)
    answers = sampled(plain, quantize=number_format)
    recorded = torch.from_numpy(np.concatenate([a.logprobs for a in answers]))
    apart = k3(log_probabilities(plain, answers), recorded)
    emulation = k3(in_float64(model, answers, None), in_float64(model, answers, number_format))
    assert apart > 1e-6 and 0.8 * emulation < apart < 1.2 * emulation
    sections = {"generator": {"quantize": number_format}, "learner": {"shared_rounding": True}}
    config = load.convert(
        {"model": {"path": str(model)}, "task": {"name": "sort"}, **sections}, "c.toml"
    )
    assert k3(log_probabilities(load_learner_policy(model, config), answers), recorded) < apart / 20


@pytest.mark.parametrize("number_format", FORMATS)
def test_the_gradient_is_that_at_the_rounded_weights(model: Path, number_format: str) -> None:
    prompts = [np.array([3, 4], np.int32)] * 2
    responses = [np.array([5, 6, 7], np.int32), np.array([8, 3], np.int32)]

    def gradients(policy_model: policy.PolicyModel) -> dict[str, torch.Tensor]:
        policy_model.logprobs(prompts, responses, torch.ones(2)).logprobs.sum().backward()
        return {name: p.grad.clone() for name, p in policy_model.hf.named_parameters()}

    shared = share_rounding(policy.load_policy(model), number_format)
    names = [name for name, _ in list_linear_layers(shared.hf)]
    assert len(names) == 2 * 7 and not any("head" in name for name in names)
    before = {name: p.detach().clone() for name, p in shared.hf.named_parameters()}
    rounded = policy.load_policy(model)
    with torch.no_grad():
        for _, layer in list_linear_layers(rounded.hf):
            layer.weight.copy_(round_rows(layer.weight, number_format))
    found, wanted = gradients(shared), gradients(rounded)
    for name, parameter in shared.hf.named_parameters():
        assert torch.equal(parameter, before[name]), "the parameters keep their precision"
        torch.testing.assert_close(found[name], wanted[name])
    assert any(found[name].abs().max() > 0 for name in found if "proj" in name)


@pytest.mark.parametrize("number_format", FORMATS)
def test_rounding_is_that_of_the_format(number_format: str) -> None:
    weight = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    weight[:, ::5] *= 1e-4
    weight[7] = 0
    found = round_rows(weight, number_format)
    wanted = emulated(weight[torch.arange(64) != 7].double().numpy(), number_format)
    assert not found[7].any()
    codes = {"int8": 255, "fp8": 253}[number_format]
    assert all(len(row.unique()) <= codes for row in found)
    torch.testing.assert_close(
        found[torch.arange(64) != 7].double(), torch.from_numpy(wanted), atol=1e-7, rtol=1e-6
    )


def test_earlier_versions_share_the_rounding(model: Path) -> None:
    core = learner_step_kit.core(
        model, generator={"quantize": "int8"}, learner={"shared_rounding": True}
    )
    flat = bytearray(policy.count_flat_bytes(core.layout))
    policy.write_flat(core.model, memoryview(flat))
    packed = core._pack_batch(learner_step_kit.batch())
    with core.measure.use_weights(flat) as earlier:
        found = core._forward(earlier, packed)
    assert torch.equal(found, core._forward(core.model, packed))


def test_the_shipped_config_has_no_mismatch_but_that_of_the_sums(sort_model: Path) -> None:
    """Nothing is learned, so that the policy is its own reference, with the same rounding."""
    small = [
        *("learner.steps=2", "learner.groups=4", "learner.group_size=4", "learner.lr=0"),
        *("evaluation.every=0", "evaluation.final_prompts=1", "evaluation.ood_prompts=0"),
        *("record.reference_kl_every=1", f"model.path='{sort_model}'"),
    ]
    curves = {}
    beside = {"shared": [], "kl": ["kl.loss.coefficient=0.1"]}
    for name, sets in (beside | {"alone": ["learner.shared_rounding=false"]}).items():
        config = load.load(ROOT / "configs" / "fp8.toml", [*small, *sets])
        assert config.generator.quantize == "fp8"
        curves[name] = run_serial(config, 0)["curve"]
    for name in ("shared", "kl"):
        assert max(row["kl/behavior_start_k3"] for row in curves[name]) < 1e-9
        assert max(row["kl/target_ref_k3"] for row in curves[name]) < 1e-9
    assert min(row["kl/behavior_start_k3"] for row in curves["alone"]) > 1e-5


def test_the_finding_of_a_mismatch_names_its_cause() -> None:
    def remedy(**learner: bool) -> str:
        sections = {"generator": {"quantize": "fp8"}, "learner": learner}
        config = load.convert(
            {"model": {"path": "m"}, "task": {"name": "sort"}, **sections}, "c.toml"
        )
        rows = [{"step": n, "reward/mean": 0.0, "split/mismatch_k3": 0.1} for n in range(9)]
        found = health_checks.check_engine_mismatch(rows, health_checks.RunFacts(config))
        assert found is not None
        return found.try_this

    assert "generator.quantize = fp8 causes it: set learner.shared_rounding = true" in remedy()
    assert "shared_rounding" not in remedy(shared_rounding=True)


def test_experts_whose_weights_it_does_not_round_are_refused(tmp_path: Path) -> None:
    policy.build_model(tmp_path, "abcdefgh", family="qwen3_moe")
    sections = {"task": {"name": "sort"}, "generator": {"quantize": "int8"}}
    config = load.convert({"model": {"path": str(tmp_path)}, **sections}, "c.toml")
    said = "round the experts of a mixture, which are most of its weights; set it to none$"
    with pytest.raises(ConfigError, match=rf"^generator\.quantize: does not {said}"):
        make_engine(config)


def test_the_benchmark_shows_swaps_products_and_mismatch(
    sort_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = program("low_precision", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["low_precision.py", str(sort_model), "--quick", "--json"])
    monkeypatch.setattr(bench, "WIDTH", 64)
    bench.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["swap_ratio"]) == {"int8", "fp8"} and min(result["swap_ratio"].values()) > 0
    k3s = result["k3"]
    assert k3s["none"]["alone"] < 1e-9 < 1e-5 < k3s["fp8"]["alone"]
    assert max(way["shared"] for way in k3s.values()) < 1e-9
