"""A caller without a config: the mathematics' own sections, each with no more keys than are given;
what is left out is what the configuration's own defaults are.  float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from algorithms_kit import D, batch, config, theta

from asyncrl.algorithms import loss as sl
from asyncrl.algorithms import settings
from asyncrl.algorithms.batch import LossBatch


def bare(advantage: dict[str, Any], **more: Any) -> Any:
    keys = {key: value for key, value in advantage.items() if key != "name"}
    kinds = {
        kind.__struct_config__.tag: kind for kind in settings.list_variants(settings.Advantage)
    }
    sections = {
        "seed": 0,
        "staleness": SimpleNamespace(on_exceed="pace"),
        "correction": settings.RecomputedCorrection(),
        "advantage": kinds[advantage["name"]](**keys),
        "learner": SimpleNamespace(epochs=1, minibatches=1, distributed=False),
        "loss": settings.PpoLoss(),
        "kl": settings.KL(),
        "reshape": settings.Reshape(),
        "stop": settings.Stop(),
        "value": settings.Value(),
        "generator": SimpleNamespace(max_new_tokens=64),
    }
    return SimpleNamespace(**{**sections, **more})


def with_values(b: LossBatch) -> LossBatch:
    b.values = torch.randn(len(b.seq), generator=torch.Generator().manual_seed(1), dtype=D)
    b.bootstrap = torch.rand(len(b.rewards), generator=torch.Generator().manual_seed(2), dtype=D)
    return b


def prepared(c: Any, per_token: bool) -> sl.PreparedBatch:
    b = with_values(batch(3))
    if per_token:
        b.token_rewards = torch.rand(
            len(b.seq), generator=torch.Generator().manual_seed(3), dtype=D
        )
    return sl.prepare(b, c)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", ["gae", "reinforce_pp", "grpo"])
def test_an_advantage_of_a_name_alone(name: str, per_token: bool) -> None:
    keys: dict[str, Any] = (
        {"name": name}
        if name != "grpo" or per_token
        else {"name": name, "ddof": 1, "eps": 1e-4, "whiten": False}
    )
    got = prepared(bare(keys), per_token)
    want = prepared(config(advantage={"name": name}), per_token)
    assert torch.equal(got.advantage, want.advantage) and float(want.advantage.abs().max()) > 0
    assert (got.returns is None) == (want.returns is None)
    assert got.returns is None or torch.equal(got.returns, want.returns)  # type: ignore[arg-type]
    assert got.metrics == want.metrics


@pytest.mark.parametrize("truncated", ["penalty", "soft", "fixed", "zero"])
def test_a_penalty_nobody_gave_is_none(truncated: str) -> None:
    b, c = batch(3), bare({"name": "rloo", "whiten": False, "truncated": truncated})
    b.truncated = torch.arange(12) % 2 == 0
    want = torch.where(b.truncated, 0.0, b.rewards) if truncated in ("zero", "fixed") else b.rewards
    assert sl.prepare(b, c).metrics["reward/used_mean"] == pytest.approx(float(want.mean()))
    if truncated == "soft":  # a ramp of one token: below the limit nothing, at it the whole
        c.advantage = settings.RlooAdvantage(
            truncated="soft", truncation_penalty=1.0, truncation_ramp=1
        )
        drawn = torch.bincount(b.seq[b.mask], minlength=12)  # what stands between turns is not
        c.generator = SimpleNamespace(max_new_tokens=int(drawn.max()))
        longest = drawn == c.generator.max_new_tokens
        assert sl.prepare(b, c).metrics["reward/used_mean"] == pytest.approx(
            float((b.rewards - longest.to(D)).mean())
        )


def test_a_whole_step_with_bare_sections_is_that_of_the_defaults() -> None:
    lp = theta(batch(3))
    found = []
    for c in (bare({"name": "rloo", "whiten": False}), config()):
        b = batch(3)
        prep = sl.prepare(b, c)
        assert not sl.needs_current(prep)
        assert not sl.needs_proximal_first(c)
        assert not sl.needs_start_first(c)
        step = sl.begin_step(prep, torch.arange(12))
        loss, sums = sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp)
        gradient = torch.autograd.grad(loss, lp)[0]
        found.append((gradient, sl.finish(sums), step.metrics, step.lr_scale, step.prepass))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]
    assert found[0][2:] == ({}, 1.0, {})


def test_terms_of_bare_sections_have_the_defaults_of_the_configuration() -> None:
    """KL in the loss: k3, on policy; the value loss: 0.1 of it, not clipped."""
    lp = theta(batch(3))
    now = torch.randn(
        len(batch(3).seq), generator=torch.Generator().manual_seed(9), dtype=D, requires_grad=True
    )
    kl = settings.KL(loss=settings.KLLoss(coefficient=0.3))
    found = []
    for c in (
        bare({"name": "gae"}, kl=kl),
        config(advantage={"name": "gae"}, kl={"loss": {"coefficient": 0.3}}),
    ):
        b = with_values(batch(3))
        prep = sl.prepare(b, c)
        loss, sums = sl.compute_micro_loss(
            prep, sl.begin_step(prep, torch.arange(12)), torch.arange(len(b.seq)), lp, None, now
        )
        found.append((torch.autograd.grad(loss, (lp, now)), sl.finish(sums)))
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] == found[1][1]
    assert found[0][1]["loss/kl"] > 0 and found[0][1]["loss/value"] > 0


def test_a_stop_of_a_limit_alone_skips_from_the_start() -> None:
    for stop in (settings.Stop(kl_max=0.5), config(stop={"kl_max": 0.5}).stop):
        prep = sl.prepare(batch(3), bare({"name": "rloo", "whiten": False}, stop=stop))
        assert prep.budget is None and not sl.needs_current(prep)
        at = torch.arange(len(prep.batch.seq))
        a, w = sl.sum_update_kl(prep, at, theta(batch(3)).detach())
        x = theta(batch(3)).detach() - prep.start
        weight = (prep.start - prep.batch.behavior).exp().clamp(max=2.0)
        assert float(a) == pytest.approx(float((weight * (x.exp() - 1 - x))[prep.valid].sum()))
        assert float(w) == pytest.approx(float(weight[prep.valid].sum()))


def test_draws_of_bare_sections_are_those_of_the_configuration() -> None:
    loss = settings.ClipCovLoss(cov_share=0.3, cov_lo=-1.0, cov_hi=1.0)
    whole = config(
        loss={"surrogate": "clip_cov", "cov_share": 0.3, "cov_lo": -1.0, "cov_hi": 1.0}, seed=0
    )
    chosen = []
    for c in (bare({"name": "rloo", "whiten": False}, loss=loss), whole):
        prep = sl.prepare(batch(3), c, number=2)
        chosen.append(
            sl.begin_step(prep, torch.arange(12), theta(batch(3)).detach()).prepass["chosen"]
        )
    assert torch.equal(chosen[0], chosen[1]) and chosen[0].any()
