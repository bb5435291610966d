"""What only FSDP2 does over several ranks: methods that DeepSpeed refuses, models without a packed
forward, parts of a predictable size; and the table of what each backend supports."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lib import memory_arithmetic as sums
from models_kit import model_fixture
from process_kit import ROOT
from ranks_kit import LEARNER, forked, trained

from asyncrl.config import load, rules
from asyncrl.contract.errors import ConfigError
from asyncrl.models.policy import build_character_tokenizer

pytestmark = pytest.mark.slow

TWO = {"backend": "fsdp2", "ranks": 2}
WHOLE = {"backend": "torch", "ranks": 2}
FULL_KL = {"coefficient": 0.1, "off_policy": "prefix_full"}
METHODS: dict[str, dict[str, Any]] = {
    "gae, a trunk of its own": {"advantage": {"name": "gae"}},
    "gae, the policy's trunk": {"advantage": {"name": "gae"}, "value": {"trunk": "shared"}},
    "prefix_full, its base as reference": {"kl": {"loss": FULL_KL}, "lora": {"rank": 4}},
    "distillation": {"kl": {"preset": "distill"}},
    "functions": {
        "loss": {"surrogate": "function", "function": "own_methods:ppo"},
        "advantage": {"name": "function", "function": "own_methods:to_go"},
    },
    "opob": {"advantage": {"name": "opob"}},
    "otb": {"advantage": {"name": "otb"}},
    "projected gradients": {"learner": {"gradient_cosine": "project", "cosine_max": 0.1}},
}


model_dir = model_fixture("abcdefgh", layers=2)


def compare(
    model: Path,
    sections: dict[str, Any],
    save: Path | None = None,
    backend: dict[str, Any] = TWO,
    **more: Any,
) -> tuple[Any, Any]:
    """(what torch printed, what two ranks printed) of two batches; the latter save."""
    learner = sections.get("learner", {})
    rest = {name: section for name, section in sections.items() if name != "learner"}
    plain, two = (
        trained(model, learner | one, batches=2, sections=rest, **more, **saves)[0]
        for one, saves in (
            ({"backend": "torch"}, {}),
            (backend, {"save": [1, str(save)]} if save else {}),
        )
    )
    assert two["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    assert two["weights"] == pytest.approx(plain["weights"], abs=1e-5)
    assert two["metrics"].keys() == plain["metrics"].keys()
    assert two["metrics"] == pytest.approx(plain["metrics"], rel=1e-3, abs=1e-5, nan_ok=True)
    return plain, two


@pytest.mark.parametrize("backend", [TWO, WHOLE], ids=["fsdp2", "torch"])
@pytest.mark.parametrize("method", METHODS)
def test_methods_that_deepspeed_refuses_are_those_of_torch(
    method: str, backend: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    """Also resumed by one rank: a value head and the last gradient are in the checkpoint."""
    sections = METHODS[method]
    resumes = method.startswith("gae") or "learner" in sections
    plain, _ = compare(model_dir, sections, tmp_path if resumes else None, backend)
    if resumes:
        rest = {name: section for name, section in sections.items() if name != "learner"}
        one, _ = trained(
            model_dir,
            sections.get("learner", {}) | backend | {"ranks": 1},
            batches=2,
            restore=str(tmp_path / "number_1"),
            sections=rest,
        )
        assert one["weights"] == pytest.approx(plain["weights"], abs=1e-5)


@pytest.mark.parametrize("rank", [0, 4], ids=["whole", "adapters"])
def test_rank_0_runs_the_versions_of_tokens_without_the_others(rank: int, model_dir: Path) -> None:
    """As proximal policies: pi_v / mu is 1, and the clip sees the lag; for the split; and the KL to
    the base."""
    sections = {
        "lora": {"rank": rank},
        "correction": {"proximal": "version"},
        "loss": {"surrogate": "decoupled_ppo", "eps_low": 0.01, "eps_high": 0.01},
        "weights": {"slots": 8},
        "record": {"split_every": 1, "reference_kl_every": 1},
    }
    plain, *others = (
        trained(model_dir, backend, batches=2, held=True, sections=sections)[0]
        for backend in (
            {"backend": "torch"},
            TWO,
            WHOLE,
            {"backend": "deepspeed", "ranks": 2, "zero_stage": 2},
        )
    )
    assert plain["metrics"]["clip/share"] > 0.05
    for made in (plain, *others):
        metrics = made["metrics"]
        assert metrics["is/mean_weight"] == pytest.approx(1, abs=1e-6)
        assert metrics["is/fallback_share"] == 0 and metrics["split/coverage"] == 1
        assert abs(metrics["split/mismatch"]) < 1e-6 < abs(metrics["split/staleness"])
        assert {"kl/target_ref_k3", "split/update_k3"} <= metrics.keys()
        assert made["norms"] == pytest.approx(plain["norms"], rel=1e-4)
        assert made["weights"] == pytest.approx(plain["weights"], abs=1e-5)


@pytest.mark.parametrize("two", [TWO, WHOLE, {"backend": "deepspeed", "ranks": 2, "zero_stage": 3}])
def test_each_rank_averages_its_part(two: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    """As torch does; a resumed learner of the same ranks has the same bits."""
    sections = {
        "correction": {"proximal": "ema"},
        "loss": {"surrogate": "decoupled_ppo", "eps_low": 0.01, "eps_high": 0.01},
    }
    plain = trained(model_dir, {"backend": "torch"}, batches=3, sections=sections)[0]
    made = trained(model_dir, two, batches=3, sections=sections, save=[2, str(tmp_path)])[0]
    assert made["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert made["weights"] == pytest.approx(plain["weights"], abs=1e-5)
    assert plain["metrics"]["clip/share"] > 0.05
    saved = str(tmp_path / "number_2")
    again = trained(model_dir, two, batches=3, sections=sections, restore=saved)[0]
    assert again["digest"] == made["digest"]
    job = {"batches": 3, "config": {"learner": LEARNER | two | {"ranks": 1}, **sections}}
    code, _, err = forked(job | {"model": str(model_dir), "restore": saved})
    # whole copies are the same at any number of ranks
    assert (code == 0) == (two is WHOLE) != ("has no average of these weights" in err), err


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen2Moe"])
def test_experts_that_no_token_of_a_rank_chose(family: str, tmp_path: Path) -> None:
    """Through the packed forward and through transformers' modules, whose layers are computed
    again; a checkpoint holds a model directory."""
    import torch
    import transformers

    tokenizer = build_character_tokenizer("abcdefgh")
    more = {"Qwen3Moe": {"head_dim": 8}, "Qwen2Moe": {"shared_expert_intermediate_size": 16}}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=1,
        max_position_embeddings=64,
        **more[family],
    )
    torch.manual_seed(0)
    model = tmp_path / "moe"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    sections = {"learner": {"gradient_checkpointing": family == "Qwen2Moe"}}
    _, two = compare(model, sections, tmp_path / "saved")
    saved = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved" / "number_1" / "model"
    )
    assert type(saved).__name__ == f"{family}ForCausalLM"
    numbers = torch.cat([p.detach().flatten() for p in saved.parameters()])
    assert numbers.abs().sum() > 0
    assert len(numbers) == pytest.approx(2 * two["parameters"], rel=0.02)


def test_a_weight_without_gradients_is_resumed_by_another_number_of_ranks(
    model_dir: Path, tmp_path: Path
) -> None:
    """Its moments are not in the checkpoint, which torch's own loading refuses."""
    how: dict[str, Any] = {"batches": 2, "frozen": "model.layers.0.mlp.up_proj.weight"}
    two, _ = trained(model_dir, TWO, **how, save=[1, str(tmp_path)])
    saved = str(tmp_path / "number_1")
    three, others = trained(model_dir, TWO | {"ranks": 3}, **how, restore=saved)
    assert three["losses"] == pytest.approx(two["losses"][1:], abs=1e-5)
    assert three["weights"] == pytest.approx(two["weights"], abs=1e-5)
    held = three["held"] + sum(other["held"] for other in others.values())
    assert held == three["parameters"] + sum(o["parameters"] for o in others.values()) - 64 * 32


def test_a_rank_holds_what_the_arithmetic_says(model_dir: Path) -> None:
    """Of weights, gradient and moments; and, while a layer runs, that layer and the embeddings."""
    shape = sums.Shape(32, 2, 4, 4, 8, 64, 11, norms=True)
    one, _ = trained(model_dir, TWO | {"ranks": 1}, batches=1)
    assert one["parameters"] == shape.parameters
    for ranks in (2, 4):
        mine, others = trained(model_dir, TWO | {"ranks": ranks}, batches=1)
        bytes_held = sums.learner(shape, "float32", stage="fsdp2", ranks=ranks)
        padding = 4 * 32 * ranks
        assert len(others) == ranks - 1
        assert abs(4 * mine["parameters"] - bytes_held["weights"]) <= padding
        assert abs(4 * mine["gradient"] - bytes_held["gradient"]) <= padding
        assert abs(8 * mine["held"] - bytes_held["moments"]) <= 2 * padding
        assert mine["gathered"] == shape.root + shape.layer < one["parameters"]
        assert bytes_held["gathered"] >= 4 * mine["gathered"]


def test_the_table_of_backends_is_what_the_rules_refuse() -> None:
    """Every row of docs/engines.md: "yes" is accepted, "no" is refused in one line that names what
    is needed."""
    page = (ROOT / "docs" / "engines.md").read_text()
    backends = ("torch", "deepspeed", "fsdp2")
    for ability in rules.TABLES["backends"]:
        (cells,) = re.findall(rf"^\| {re.escape(ability.title)} \|(.*)\|$", page, re.MULTILINE)
        documented = dict(zip(backends, [cell.strip() for cell in cells.split("|")], strict=True))
        for backend, cell in documented.items():
            sets = [*ability.sets, f"learner.backend={backend}"]
            if cell == "yes":
                load.load(ROOT / "configs" / "demo.toml", sets)
                continue
            assert cell == "no"
            with pytest.raises(ConfigError) as refused:
                load.load(ROOT / "configs" / "demo.toml", sets)
            needed = " or ".join(ability.unless["learner.backend"])
            assert f"learner.backend = {needed}, not {backend}" in str(refused.value)
    assert page.count("| yes |") > len(rules.TABLES["backends"])


def test_the_shipped_config_is_two_ranks_of_fsdp2() -> None:
    config = load.load(ROOT / "configs" / "fsdp2.toml")
    assert (config.learner.backend, config.learner.ranks) == ("fsdp2", 2)
    assert json.dumps(config.learner.gpus) == "[]"
