"""Adapters: their gradient is that of transformers with peft, they alone are trained, published and
kept, an engine adds them to the base anew each time, and the base is the reference."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from learner_step_kit import batch, core, model_dir

from actors.engine import CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from actors.engine_generic import GenericEngine
from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.config.tree import LoraConfig
from asyncrl.contract.errors import ConfigError, DamagedDataError
from asyncrl.contract.versions import Label
from asyncrl.models import adapter_files, adapters, installed, model_check, policy
from asyncrl.models.policy import PolicyModel, build_model, list_named_weights, load_policy
from asyncrl.models.weight_rounding import WeightRounder
from learner import checkpoint
from learner.batch import pack
from learner.step import LearnerCore

pytestmark = pytest.mark.slow

__all__ = ["model_dir"]

LORA = {"rank": 4, "alpha": 8.0}
PROMPTS = [np.array([3, 4, 5], np.int32), np.array([4], np.int32)]
ANSWERS = [np.array([5, 6, 7, 1], np.int32), np.array([3, 1], np.int32)]


def adapted(path: Path, *, whole: bool = False, seed: int = 7, **keys: Any) -> PolicyModel:
    """A model with adapters that are not zero."""
    model = load_policy(path, keys.pop("dtype", "float32"), "cpu", with_modules=whole)
    adapters.attach(model, LoraConfig(**(LORA | keys)), 3)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in adapter_files.list_adapter_weights(model.hf):
            tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.2)
    return model


def logprobs(model: PolicyModel) -> torch.Tensor:
    return model.logprobs(PROMPTS, ANSWERS, torch.ones(2)).logprobs


def lora_core(path: Path, **sections: Any) -> LearnerCore:
    return core(path, lora=LORA | sections.pop("lora", {}), **sections)


@pytest.mark.parametrize("whole", [False, True], ids=["bare", "modules"])
def test_the_gradient_is_that_of_peft(model_dir: Path, tmp_path: Path, whole: bool) -> None:
    model = adapted(model_dir, whole=whole)
    policy.export(model, tmp_path / "adapter")
    ours = logprobs(model)
    ours.sum().backward()
    base = load_policy(model_dir, device="cpu", with_modules=True).hf
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    rows = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *answer.tolist()]])
        logs = theirs(input_ids=ids).logits[0].log_softmax(-1)
        rows.append(logs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0])
    torch.testing.assert_close(ours, torch.cat(rows), atol=1e-5, rtol=0)
    torch.cat(rows).sum().backward()
    want = {
        name.removeprefix("base_model.model."): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    got = {name: p.grad for name, p in model.hf.named_parameters() if p.requires_grad}
    assert set(got) == set(want) and len(got) == 2 * 7 * 2  # A and B, seven layers, two blocks
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-5)
        assert float(gradient.abs().max()) > 0
    frozen = [p for name, p in model.hf.named_parameters() if "lora" not in name]
    assert all(p.grad is None and not p.requires_grad for p in frozen)


def test_at_first_an_adapter_changes_nothing_and_is_drawn_by_the_seed(model_dir: Path) -> None:
    base = load_policy(model_dir, device="cpu")
    before = torch.get_rng_state()
    models = [load_policy(model_dir, device="cpu") for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        adapters.attach(model, LoraConfig(rank=2, target_modules=["q_proj"]), seed)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(logprobs(models[0]), logprobs(base))
    first, same, other = (policy.compute_weights_digest(model) for model in models)
    assert first == same != other
    assert [name for name, _ in list_named_weights(models[0])] == [
        f"model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
        for layer in (0, 1)
        for part in "AB"
    ]


def test_alpha_over_rank_is_the_scale(model_dir: Path) -> None:
    base = load_policy(model_dir, device="cpu")
    model = adapted(model_dir, alpha=6.0)
    tensors = dict(adapter_files.list_adapter_weights(model.hf))
    name = "model.layers.1.mlp.up_proj"
    product = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    want = dict(list_named_weights(base))[f"{name}.weight"] + 1.5 * product
    got = dict(list_named_weights(adapters.merge_model(model, "cpu")))
    torch.testing.assert_close(got[f"{name}.weight"], want)
    with torch.no_grad():
        beside, together = (logprobs(x) for x in (model, adapters.merge_model(model, "cpu")))
    torch.testing.assert_close(beside, together, atol=1e-5, rtol=1e-5)
    untouched = "model.embed_tokens.weight"
    assert torch.equal(got[untouched], dict(list_named_weights(base))[untouched])


def test_a_bfloat16_base_keeps_its_adapters_in_float32(model_dir: Path) -> None:
    model = adapted(model_dir, dtype="bfloat16")
    assert {tensor.dtype for _, tensor in list_named_weights(model)} == {torch.float32}
    merged = adapters.merge_model(model, "cpu")
    assert {tensor.dtype for _, tensor in list_named_weights(merged)} == {torch.bfloat16}
    base = load_policy(model_dir, device="cpu")
    with torch.no_grad():
        beside, together, without = (logprobs(each) for each in (model, merged, base))
    assert float((beside - together).abs().max()) < 0.05  # two ways to round a sum to bfloat16
    assert float((beside - without).abs().max()) > 0.1


def engine_of(path: Path, kind: Any, **keys: Any) -> Any:
    model = load_policy(path, device="cpu", with_modules=kind is GenericEngine)
    if kind is GenericEngine:
        model.fast = None
    base = adapters.AdapterBase(model, LoraConfig(**(LORA | keys)))
    return kind(model, slots=4, context=32, max_new_tokens=8, base=base)


def drawn(engine: Any) -> tuple[np.ndarray, np.ndarray]:
    engine.add([CompletionRequest((0, 0, 0), PROMPTS[0], 0, 8, 1.0, 1.0, 0, (1,), 5)])
    answers = []
    while not answers:
        answers = engine.step(4)
    return answers[0].tokens, answers[0].logprobs


def test_an_engine_rounds_the_sum_of_base_and_adapter(model_dir: Path) -> None:
    model = adapted(model_dir)
    assert model.adapter is not None
    weights, probe = dict(list_named_weights(model)), model.adapter.base.encode()
    hf = load_policy(model_dir, device="cpu")
    base = adapters.AdapterBase(hf, LoraConfig(**LORA))
    sizes = {"slots": 4, "context": 32, "max_new_tokens": 8}
    rounding = EmbeddedEngine(hf, base=base, quantize="fp8", **sizes)
    rounding.load(weights, Label(1, 0), "d", probe)
    plain = EmbeddedEngine(hf, **sizes)
    plain.load(WeightRounder(hf.hf, "fp8")(base.merge(weights, probe)), Label(1, 0), "d")
    for found, wanted in zip(drawn(rounding), drawn(plain), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", [EmbeddedEngine, GenericEngine])
def test_an_engine_merges_anew_from_the_base(model_dir: Path, kind: Any) -> None:
    """The same version has the same bits whatever was loaded in between, and they are the
    learner's to rounding."""
    model, other = adapted(model_dir), adapted(model_dir, seed=8)
    assert model.adapter is not None
    probe = model.adapter.base.encode()
    engine = engine_of(model_dir, kind)
    seen = []
    for number, policy_model in enumerate((model, other, other, model)):
        engine.load(dict(list_named_weights(policy_model)), Label(1, number), "d", probe)
        seen.append(drawn(engine))
        tokens, found = seen[-1]
        with torch.no_grad():
            want = policy_model.logprobs([PROMPTS[0]], [tokens], torch.ones(1)).logprobs
        np.testing.assert_allclose(found, want.numpy(), atol=2e-6)
    for one, again in ((0, 3), (1, 2)):
        assert np.array_equal(seen[one][0], seen[again][0])
        assert np.array_equal(seen[one][1], seen[again][1])
    assert not np.array_equal(seen[0][1], seen[1][1])


def test_an_engine_refuses_an_adapter_of_another_base(model_dir: Path, tmp_path: Path) -> None:
    build_model(tmp_path / "other", "abcdefgh", hidden=32, layers=2, seed=1)
    model = adapted(tmp_path / "other")
    assert model.adapter is not None
    engine = engine_of(model_dir, EmbeddedEngine)
    with pytest.raises(ConfigError, match=r"the learner's adapter belongs to [0-9a-f]{16}"):
        engine.load(dict(list_named_weights(model)), Label(1, 0), "d", model.adapter.base.encode())


def test_the_learner_trains_and_publishes_adapters_alone(model_dir: Path) -> None:
    learner = lora_core(model_dir)
    adapter = learner.model.adapter
    assert adapter is not None
    base = {n: p.clone() for n, p in learner.model.hf.named_parameters() if "lora" not in n}
    before = {n: t.clone() for n, t in list_named_weights(learner.model)}
    learner.train(batch(0))
    for name, parameter in learner.model.hf.named_parameters():
        assert "lora" in name or torch.equal(parameter, base[name])
    after = dict(list_named_weights(learner.model))
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    flat = bytearray(policy.count_flat_bytes(learner.layout))
    learner.backend.write_flat(memoryview(flat))
    read = policy.read_flat(memoryview(flat), learner.layout)
    assert set(read) == set(after) and all(torch.equal(read[n], t) for n, t in after.items())
    assert learner.backend.probe() == adapter.base.encode()
    full = policy.build_manifest(load_policy(model_dir, device="cpu"))
    assert adapter.base_bytes == policy.count_flat_bytes(full) > 2 * len(flat)
    assert adapter.base == adapters.compute_base_digest(load_policy(model_dir, device="cpu"))


@pytest.mark.parametrize(
    "terms",
    [
        {"loss": {"coefficient": 0.1, "estimator": "k3"}},
        {"loss": {"coefficient": 0.1, "off_policy": "prefix_full"}},
        {"reward": {"coefficient": 0.1, "estimator": "k1"}},
    ],
    ids=["loss", "full", "reward"],
)
def test_the_reference_is_the_base_without_a_second_model(
    model_dir: Path, tmp_path: Path, terms: dict[str, Any]
) -> None:
    """The same step as with a copy of the base loaded as reference."""
    shutil.copytree(model_dir, tmp_path / "copy")
    ours = lora_core(model_dir, kl=terms)
    copied = {k: v | {"reference": str(tmp_path / "copy")} for k, v in terms.items()}
    theirs = lora_core(model_dir, kl=copied)
    assert ours.reference is not None and ours.reference.hf is ours.model.hf
    assert theirs.reference is not None and theirs.reference.hf is not theirs.model.hf
    for number in range(2):
        found, want = ours.train(batch(number)), theirs.train(batch(number))
        assert found.keys() == want.keys()
        for key, value in want.items():
            assert found[key] == pytest.approx(value, abs=1e-6, nan_ok=True), key
    assert policy.compute_weights_digest(ours.model) == policy.compute_weights_digest(theirs.model)
    assert [value for key, value in found.items() if key.startswith("kl/") and value > 1e-9]


def test_the_measured_reference_is_the_base_too(model_dir: Path) -> None:
    learner = lora_core(model_dir, record={"reference_kl_every": 1})
    learner.train(batch(0))
    found = learner.train(batch(1))
    (reference,) = learner.references.values()
    assert reference.hf is learner.model.hf and found["kl/target_ref_k3"] > 1e-9


def test_an_earlier_version_is_measured_in_place(model_dir: Path) -> None:
    learner = lora_core(model_dir)
    packed = pack(batch(0))
    everyone = list(range(packed.count))
    before = learner._forward(learner.model, packed, everyone)
    flat = bytearray(policy.count_flat_bytes(learner.layout))
    learner.backend.write_flat(memoryview(flat))
    learner.train(batch(0))
    digest = policy.compute_weights_digest(learner.model)
    with learner.measure.use_weights(flat) as earlier:
        assert torch.equal(learner._forward(earlier, packed, everyone), before)
    assert policy.compute_weights_digest(learner.model) == digest and learner.measure.shadow is None
    assert not torch.equal(learner._forward(learner.model, packed, everyone), before)


def test_a_checkpoint_is_the_adapter_and_goes_on_bitwise(model_dir: Path, tmp_path: Path) -> None:
    adam = {"learner": {"optimizer": "adamw", "lr": 1e-2}}
    whole = lora_core(model_dir, **adam)
    whole.train(batch(0))
    checkpoint.save(tmp_path, whole, {"a": 1}, 2)
    path = checkpoint.find_newest_checkpoint(tmp_path)
    assert path is not None
    held = {p.name for p in (path / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= held
    assert "model.safetensors" not in held and "config.json" not in held
    again = lora_core(model_dir, **adam)
    assert checkpoint.restore(again, path) == {"a": 1}
    for learner in (whole, again):
        learner.train(batch(1))
    assert policy.compute_weights_digest(whole.model) == policy.compute_weights_digest(again.model)
    with pytest.raises(DamagedDataError, match=r"another lora.rank or other lora.target_modules"):
        checkpoint.restore(lora_core(model_dir, lora={"rank": 2}, **adam), path)
    # a backend with parts of its own compares only: FSDP2
    adapters.read_fitting(again.model, path / "model")
    with pytest.raises(DamagedDataError, match=r"another lora.rank or other lora.target_modules"):
        adapters.read_fitting(lora_core(model_dir, lora={"rank": 2}, **adam).model, path / "model")
    build_model(tmp_path / "other", "abcdefgh", hidden=32, layers=2, seed=1)
    with pytest.raises(DamagedDataError, match="belongs to another base"):
        checkpoint.restore(lora_core(tmp_path / "other", **adam), path)
    with pytest.raises(DamagedDataError, match="belongs to another base"):
        adapters.merge_directory(load_policy(tmp_path / "other", device="cpu"), path / "model")
    full = core(model_dir, **adam)
    (tmp_path / "full").mkdir()
    checkpoint.save(tmp_path / "full", full, {}, 2)
    with pytest.raises(DamagedDataError, match=r"the adapter in .* cannot be read"):
        checkpoint.restore(whole, tmp_path / "full" / "number_0")


@pytest.mark.parametrize("how", ["merged", "adapter"])
def test_export_of_a_run_that_was_cut_short(
    model_dir: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = lora_core(model_dir, learner={"lr": 1.0})
    learner.train(batch(0))
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints" / "epoch_1").mkdir(parents=True)
    checkpoint.save(run_dir / "checkpoints" / "epoch_1", learner, {}, 2)
    config = load.load(
        "demo",
        (f"model.path='{model_dir}'", "lora.rank=4", "lora.alpha=8.0", f"export.lora='{how}'"),
    )
    (run_dir / "config.toml").write_text(load.dump(config))
    main(["export", str(run_dir), str(tmp_path / "out")], standalone_mode=False)
    with torch.no_grad():
        want = logprobs(learner.model)
        if how == "adapter":
            assert not (tmp_path / "out" / "model.safetensors").exists()
            base = load_policy(model_dir, device="cpu")
            got = logprobs(adapters.merge_directory(base, tmp_path / "out"))
        else:
            got = logprobs(load_policy(tmp_path / "out", device="cpu"))
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    assert float((want - logprobs(load_policy(model_dir, device="cpu"))).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            ("learner.backend='deepspeed'", "learner.zero_stage=3"),
            "learner.zero_stage: 3 partitions whole models; adapters need no more than 2",
        ),
        (("generator.dtype='bfloat16'",), "generator.dtype: the engine must merge"),
        (("weights.transport='gloo'",), "weights.transport: gloo sends whole weights only"),
        (("exact=true", "weights.in_flight='recompute_kv'"), "exact: the learner adds the adapter"),
        (("record.stream=true",), "record.stream: replay trains whole weights only"),
        (("advantage.name='gae'",), "advantage.name: gae was never tested"),
        (("lora.rank=0", "lora.alpha=3.0"), "lora.alpha: acts only where lora.rank is set"),
        (
            ("lora.rank=0", "lora.target_modules=['x']"),
            "lora.target_modules: acts only where lora.rank is set",
        ),
        (("lora.rank=0", "export.lora='adapter'"), "export.lora: acts only where lora.rank is set"),
    ],
)
def test_what_adapters_cannot_be_combined_with(settings: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        load.load("demo", ("lora.rank=4", *settings))
    assert why in str(error.value)


def test_modules_that_do_not_exist_are_named_before_anything_starts(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(*targets: str) -> Any:
        return load.load(
            "demo",
            (
                f"model.path='{model_dir}'",
                "lora.rank=4",
                f"lora.target_modules={json.dumps(list(targets))}",
                "generator.context=100",
            ),
        )

    said = (
        r"lora.target_modules: no linear layer of the model is called 'proj'; it has down_proj, "
        r"gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    with pytest.raises(ConfigError, match=said):
        model_check.check(config("q_proj", "proj"))
    with pytest.raises(ConfigError, match=said):
        adapted(model_dir, target_modules=["proj"])
    with pytest.raises(ConfigError, match=said):
        engine_of(model_dir, EmbeddedEngine, target_modules=["proj"])
    # the head is none: its weight is read by the loss itself
    for whole in (False, True):
        with pytest.raises(ConfigError, match="called 'lm_head'"):
            adapted(model_dir, whole=whole, target_modules=["lm_head"])
    with pytest.raises(ConfigError, match="called 'lm_head'"):
        model_check.check(config("lm_head"))
    model_check.check(config("q_proj", "mlp.up_proj"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "peft" or None)
    assert installed.find_missing_package(config()).startswith("lora.rank: needs peft")


def test_a_run_on_adapters_and_one_whose_learner_is_killed(
    forked: Callable[..., dict[str, Any]], small_model: Path, tmp_path: Path
) -> None:
    sets = ("lora.rank=2", "staleness.max_lag=0", "record.split_every=1", "learner.lr=1e-2")
    whole = forked(tmp_path / "whole", *sets)
    killed = forked(tmp_path / "killed", *sets, "export.lora='adapter'", die={"learner": 4})
    for found in (whole, killed):
        rows = [row for row in found["rows"] if "weights/bytes" in row]
        sizes = {(row["weights/bytes"], row["weights/full_bytes"]) for row in rows}
        assert len(rows) >= 6 and len(sizes) == 1
        sent, full = sizes.pop()
        assert sent < full / 2
        # the engine's merged weights are the learner's policy
        assert max(row["mismatch/max_at_lag_0"] for row in rows) < 1e-5
    digests = [(found["run_dir"] / "weights_digest").read_text() for found in (whole, killed)]
    assert digests[0] == digests[1]
    merged = load_policy(whole["run_dir"] / "model", device="cpu")
    base = load_policy(small_model, device="cpu")
    assert not torch.equal(logprobs(merged), logprobs(base))
    again = adapters.merge_directory(base, killed["run_dir"] / "model")
    assert policy.compute_weights_digest(again) == policy.compute_weights_digest(merged)
