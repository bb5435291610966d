import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tinker_kit import SYMBOLS

from asyncrl.config.methods import METHODS
from asyncrl.models.policy import build_model
from asyncrl.tinker.messages import (
    CallFailure,
    Datum,
    ScoreResult,
)
from asyncrl.tinker.settings import (
    TinkerConfig,
    TinkerLora,
    TinkerModel,
    TinkerSampling,
    TinkerTraining,
)
from asyncrl.tinker.workers.trainer import ServedModels

TEXTS = [[5, 6, 7, 8, 1], [9, 10, 1], [4, 4, 12, 20, 21, 6, 1], [3, 2]]
PLAIN = ("step", "m", 1e-2, (0.9, 0.95), 1e-8, 0.0, 0.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TinkerConfig:
    path = tmp_path_factory.mktemp("tinker") / "tiny"
    build_model(path, SYMBOLS, hidden=32, layers=1, heads=2, max_positions=64)
    return TinkerConfig(
        model=TinkerModel(path=str(path)),
        sampling=TinkerSampling(context=16),
        training=TinkerTraining(micro_batch_tokens=12),
    )


@pytest.fixture
def trainer(config: TinkerConfig) -> ServedModels:
    made = ServedModels(config)
    made.handle("load", "m", rank=0, seed=0)
    return made


def datum(text: list[int], **fields: list[float]) -> Datum:
    count = len(text) - 1
    named = {name: np.array(row, "<f4") for name, row in fields.items()}
    rows = named or {"weights": np.ones(count, "<f4")}
    lags = np.where(rows["advantages"] != 0, 1, -2) if "advantages" in rows else [-2] * count
    return Datum(np.array(text[:-1], "<i4"), np.array(text[1:], "<i4"), rows, np.array(lags, "<i4"))


DATA = [datum(text) for text in TEXTS]


def train(
    trainer: ServedModels, data: list[Datum], loss: str = "cross_entropy", **more: Any
) -> Any:
    return trainer.handle("forward_backward", "m", data, loss, {}, **more)


def gradient(trainer: ServedModels) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in trainer.models["m"].trainer.parameters])


def weights(trainer: ServedModels) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in trainer.models["m"].trainer.parameters])


def test_steps_are_those_of_adamw(trainer: ServedModels) -> None:
    steps = [
        PLAIN,
        ("step", "m", 3e-3, (0.5, 0.7), 1e-3, 0.25, 0.0),
        ("step", "m", 1e-2, (0.8, 0.9), 1e-6, 0.0, 0.125),
    ]
    theirs = [x.detach().clone().requires_grad_() for x in trainer.models["m"].trainer.parameters]
    optimizer = torch.optim.AdamW(theirs, fused=True)
    for step in steps:
        train(trainer, DATA)
        norm = float(gradient(trainer).norm())
        for mine, weight in zip(theirs, trainer.models["m"].trainer.parameters, strict=True):
            mine.grad = weight.grad.clone()
        rate, betas, eps, weight_decay, clip_norm = step[2:]
        if clip_norm:
            assert norm > 2 * clip_norm
            torch.nn.utils.clip_grad_norm_(theirs, clip_norm)
        group = {"lr": rate, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        optimizer.param_groups[0].update(group)
        optimizer.step()
        result = trainer.handle(*step)
        assert result["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert result["optim/lr"] == rate
        assert torch.equal(weights(trainer), torch.cat([x.detach().flatten() for x in theirs]))
        assert all(weight.grad is None for weight in trainer.models["m"].trainer.parameters)


def test_calls_add_up_and_a_dropped_gradient_is_gone(trainer: ServedModels) -> None:
    scored = train(trainer, DATA)
    whole = gradient(trainer)
    trainer.handle("drop_gradient", "m")
    losses = []
    for part in (DATA[:1], DATA[1:]):
        one = train(trainer, part)
        losses.append(one.loss)
    assert torch.allclose(gradient(trainer), whole, rtol=1e-5, atol=1e-6)
    assert sum(losses) == pytest.approx(scored.loss, rel=1e-6)
    sums = -sum(float(row.sum()) for row in scored.logprobs)
    assert scored.loss == pytest.approx(sums, rel=1e-6)
    metrics = trainer.handle(*PLAIN)
    assert metrics["loss/policy"] == pytest.approx(scored.loss, rel=1e-6)
    assert set(metrics) == {"loss/policy", "optim/grad_norm", "optim/lr"}
    again = train(trainer, DATA, forward_only=True)
    assert all(weight.grad is None for weight in trainer.models["m"].trainer.parameters)
    assert "loss/policy" not in trainer.handle(*PLAIN) and again.loss < scored.loss


def test_rows_come_back_in_the_clients_order(trainer: ServedModels, monkeypatch: Any) -> None:
    calls: list[list[int]] = []
    score = ServedModels.score

    def counted(policy: Any, data: Any) -> torch.Tensor:
        calls.append([len(one.tokens) for one in data])
        return score(policy, data)

    monkeypatch.setattr(ServedModels, "score", staticmethod(counted))
    together = train(trainer, DATA, forward_only=True)
    # sorted by length; at most 12 tokens, padded, in a forward pass
    assert calls == [[1, 2, 4], [6]]
    for one, row in zip(DATA, together.logprobs, strict=True):
        alone = np.frombuffer(train(trainer, [one], forward_only=True).logprobs[0], "<f4")
        assert np.allclose(np.frombuffer(row, "<f4"), alone, atol=1e-6)
        assert len(row) == len(one.tokens)


def test_a_gradient_that_is_not_finite_changes_nothing(trainer: ServedModels) -> None:
    before = weights(trainer)
    train(trainer, [datum(TEXTS[0], weights=[3e38] * 4)])
    failed = trainer.handle(*PLAIN)
    text = "the gradient is not finite: it was dropped, and the step was not made"
    assert failed == CallFailure(text) and not trainer.models["m"].sums
    assert torch.equal(weights(trainer), before)
    train(trainer, DATA)
    assert isinstance(trainer.handle(*PLAIN), dict)
    assert not torch.equal(weights(trainer), before)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_loss_without_data_adds_nothing(trainer: ServedModels, method: str) -> None:
    result = trainer.handle("forward_backward", "m", [], "ppo", {"method": method})
    assert result == ScoreResult([], 0.0) or "more than a loss" in result.error
    assert trainer.handle("forward_backward", "m", [], "cross_entropy", {}) == ScoreResult([], 0.0)
    for proximal in ("version", "ema"):
        earlier = {"method": "ppo", "correction.proximal": proximal}
        refused = trainer.handle("forward_backward", "m", [], "ppo", earlier)
        assert "version or ema and loss.center are more than a loss" in refused.error


@pytest.mark.parametrize("rank", [0, 4])
def test_a_state_continues(
    trainer: ServedModels, tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the state was written on a GPU and there is none."""
    trainer.handle("load", "m", rank=rank, seed=2)
    train(trainer, DATA)
    trainer.handle(*PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        saved = trainer.handle("save", "m", tmp_path / "state", state=True)
    assert saved is None
    trainer.handle("save", "m", tmp_path / "sampler")
    assert not (tmp_path / "sampler" / "state.pt").exists()
    at = weights(trainer)
    train(trainer, DATA)
    trainer.handle(*PLAIN)
    expected = weights(trainer)
    for optimizer in (True, False):
        request = {"rank": rank, "seed": 0, "path": tmp_path / "state", "optimizer": optimizer}
        assert trainer.handle("load", "m", **request) is None and torch.equal(weights(trainer), at)
        train(trainer, DATA)
        trainer.handle(*PLAIN)
        assert torch.equal(weights(trainer), expected) == optimizer
    missing = trainer.handle("load", "m", rank, 0, tmp_path / "none")
    assert isinstance(missing, CallFailure) and str(tmp_path / "none") in missing.error


def test_adapters_share_the_base(trainer: ServedModels) -> None:
    base = trainer.base.hf.state_dict()
    places = {row.data_ptr() for row in base.values()}
    before = {name: row.clone() for name, row in base.items()}
    train(trainer, DATA)
    trainer.handle(*PLAIN)  # of rank 0: it has weights of its own
    trainer.handle("load", "m", rank=4, seed=1)
    first = weights(trainer)
    assert places <= {row.data_ptr() for row in trainer.models["m"].policy.hf.state_dict().values()}
    trainer.handle("load", "m", rank=4, seed=1)
    assert torch.equal(weights(trainer), first)
    trainer.handle("load", "m", rank=4, seed=2)
    assert not torch.equal(weights(trainer), first)
    train(trainer, DATA)
    trainer.handle(*PLAIN)
    assert all(torch.equal(before[name], row) for name, row in base.items())
    wrong = trainer.handle("save", "m", None)
    text = "AttributeError: 'NoneType' object has no attribute 'parent'"
    assert wrong == CallFailure(text, "server", spoiled=True)


def test_an_adapter_has_scale_and_rank_as_asked(config: TinkerConfig, tmp_path: Path) -> None:
    lora = TinkerLora(alpha=6.0, target_modules=["q_proj"])
    trainer = ServedModels(msgspec.structs.replace(config, lora=lora))
    trainer.handle("load", "m", rank=4, seed=1)
    trainer.handle("save", "m", tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["target_modules"]) == (4, 6.0, ["q_proj"])


BEHAVIOR = [0.0, -1.0, -2.0, -0.5]
SIGNS = [0.0, 1.0, -1.0, 2.0]


def test_masks_and_weights_scale_tokens(trainer: ServedModels) -> None:
    """Of the loss -sum of mask * weight * advantage * ratio."""
    mask, factors = [0.0, 1.0, 0.5, 1.0], [1.0, 2.0, 1.0, 0.0]
    given = datum(TEXTS[0], logprobs=BEHAVIOR, advantages=SIGNS, mask=mask, weights=factors)
    result = train(trainer, [given], "importance_sampling")
    lp = torch.from_numpy(np.frombuffer(result.logprobs[0], "<f4").copy())
    terms = (lp - torch.tensor(BEHAVIOR)).exp() * torch.tensor(SIGNS)
    scale = torch.tensor(mask) * torch.tensor(factors)
    assert result.loss == pytest.approx(-float((terms * scale).sum()), rel=1e-5)
    ours = gradient(trainer)
    assert trainer.models["m"].sums["loss/policy"] == pytest.approx(result.loss)
    trainer.handle("drop_gradient", "m")
    train(trainer, [datum(TEXTS[0], weights=(terms * scale).tolist())])
    assert torch.allclose(ours, gradient(trainer), rtol=1e-5, atol=1e-6)
    supervised = train(trainer, [datum(TEXTS[0], weights=factors, mask=mask)])
    assert supervised.loss == pytest.approx(-float((lp * scale).sum()), rel=1e-5)


def test_gspo_reads_the_mask_of_its_ratio(trainer: ServedModels) -> None:
    """rl_loop sends it since 0.6.1."""
    gradients = []
    for mask in ({}, {"sequence_ratio_mask": [0, 1, 1, 1]}, {"sequence_ratio_mask": [0, 1, 0, 0]}):
        given = datum(TEXTS[0], logprobs=BEHAVIOR, advantages=SIGNS, **mask)
        options = {"clip_low_threshold": 0.0, "clip_high_threshold": 99.0}
        result = trainer.handle("forward_backward", "m", [given], "gspo", options)
        assert isinstance(result, ScoreResult), result
        gradients.append(gradient(trainer))
        trainer.handle("drop_gradient", "m")
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0], gradients[2])
    assert "ppo has no loss_fn_inputs.seq" in train(trainer, [given], "ppo").error


def test_the_step_reports_what_its_tokens_measure(trainer: ServedModels) -> None:
    given = datum(TEXTS[0], logprobs=BEHAVIOR, advantages=SIGNS)
    result = train(trainer, [given], "ppo")
    raw = np.frombuffer(result.logprobs[0], "<f4")[1:].astype(float) - np.array(BEHAVIOR[1:])
    metrics = trainer.handle(*PLAIN)
    assert metrics["kl/behavior_target_k1"] == pytest.approx(-raw.mean(), rel=1e-4)
    clipped = [
        (r > math.log(1.2)) if sign > 0 else (r < math.log(0.8))
        for r, sign in zip(raw, SIGNS[1:], strict=True)
    ]
    assert metrics["clip/share"] == pytest.approx(np.mean(clipped))
    assert not [name for name in metrics if name.startswith(("kl/start_target", "by_lag/update"))]
    lags = np.array([-2, 0, -1, 0], "<i4")  # tokens of unknown lag are left out
    train(trainer, [msgspec.structs.replace(given, lags=lags)], "ppo", forward_only=False)
    now = train(trainer, [given], "ppo", forward_only=True)
    raw = np.frombuffer(now.logprobs[0], "<f4")[1:].astype(float) - np.array(BEHAVIOR[1:])
    known = trainer.handle(*PLAIN)["kl/behavior_target_k1"]
    assert known == pytest.approx(-(raw[0] + raw[2]) / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "fields", "message"),
    [
        ("ppo", {"advantages": SIGNS}, "datum 0: ppo needs loss_fn_inputs.logprobs"),
        ("ppo", {"logprobs": BEHAVIOR}, "datum 0: ppo needs loss_fn_inputs.advantages"),
        ("cross_entropy", {"logprobs": BEHAVIOR}, "cross_entropy needs loss_fn_inputs.weights"),
        (
            "cross_entropy",
            {"weights": SIGNS, "advantages": SIGNS},
            "cross_entropy has no loss_fn_inputs.advantages; it reads target_tokens, mask, weights",
        ),
        (
            "ppo",
            {"logprobs": BEHAVIOR, "advantages": SIGNS, "values": SIGNS},
            "ppo has no loss_fn_inputs.values; it reads target_tokens, advantages, logprobs, mask",
        ),
    ],
)
def test_fields_are_checked(
    trainer: ServedModels, loss: str, fields: dict[str, list[float]], message: str
) -> None:
    failed = train(trainer, [datum(TEXTS[0], **fields)], loss)
    assert isinstance(failed, CallFailure) and message in failed.error and failed.category == "user"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([5] * 18, "datum 1: 17 tokens exceed sampling.context = 16"),
        ([5, 47, 5], "datum 1: model_input has a token outside the vocabulary of 47"),
        ([5, -1, 5], "datum 1: model_input has a token outside"),
        ([5, 5, 47], "datum 1: target_tokens has a token outside"),
    ],
)
def test_tokens_are_checked(trainer: ServedModels, text: list[int], message: str) -> None:
    assert trainer.vocabulary == 47
    failed = train(trainer, [DATA[0], datum(text)])
    assert isinstance(failed, CallFailure) and message in failed.error
    assert all(weight.grad is None for weight in trainer.models["m"].trainer.parameters)
    edge = [5, 46, 0] if len(text) == 3 else [5] * 17
    assert isinstance(train(trainer, [datum(edge)]), ScoreResult)


def test_only_a_method_reports_importance_weights(trainer: ServedModels) -> None:
    """The API's own losses have none: their metrics would be the same in every step."""
    weighted = {
        *("is/mean_weight", "is/weight_ess", "is/ess_by_answer", "is/zero_share"),
        *("is/rejected_share", "is/rejected_answers", "is/vetoed_share", "is/vetoed_answers"),
        "is/masked_share",
    }
    given = datum(TEXTS[0], logprobs=BEHAVIOR, advantages=SIGNS)
    found = []
    for config in ({}, {"method": "vespo"}, {}):
        scored = trainer.handle("forward_backward", "m", [given], "ppo", config)
        assert isinstance(scored, ScoreResult)
        found.append(trainer.handle(*PLAIN).keys() & weighted)
    assert found[0] == found[2] == set() and found[1] == weighted
    trainer.handle("forward_backward", "m", [given], "ppo", {"method": "vespo"})
    trainer.handle("drop_gradient", "m")
    train(trainer, [given], "ppo")
    assert not trainer.handle(*PLAIN).keys() & weighted
    # a call without gradient leaves the step as it was
    train(trainer, [given], "ppo")
    method = ("forward_backward", "m", [given], "ppo", {"method": "vespo"}, True)
    assert trainer.handle(*method).loss == 0.0
    assert not trainer.handle(*PLAIN).keys() & weighted
