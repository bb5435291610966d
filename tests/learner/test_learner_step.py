"""One learner step: the gradient does not know how the batch was cut, the trust region can stop it,
bad numbers are skipped."""

import itertools
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from algorithms_kit import parse_settings
from learner_step_kit import ANCHORS, GROUPS, SIZE, batch, core, model_dir, weights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import get_scheduler

from asyncrl.algorithms import loss as step_loss
from asyncrl.config import load
from asyncrl.config.sft import SftTraining
from asyncrl.config.tree import LearnerConfig, compute_learning_rate_share
from asyncrl.contract.errors import AsyncrlError, ConfigError, DamagedDataError, NotFiniteError
from asyncrl.contract.messages import Batch, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.experiments import serial
from asyncrl.models.policy import (
    build_model,
    copy_flat_bytes,
    count_flat_bytes,
    load_weights,
    read_flat,
)
from asyncrl.models.weight_rounding import load_learner_policy
from learner import checkpoint, step
from learner.batch import pack
from learner.state import WeightAverage
from learner.step import LearnerCore

VARIANTS: list[dict[str, Any]] = [
    {},
    *ANCHORS[:2],
    {"correction": {"preset": "icepop"}},
    {"loss": {"surrogate": "gspo"}},
    {"kl": {"loss": {"coefficient": 0.1, "estimator": "k3"}}},
    {"kl": {"reward": {"coefficient": 0.1, "estimator": "k1"}}},
    parse_settings(
        "kl.loss.coefficient=0.1 kl.loss.off_policy=prefix_full kl.loss.discount=0.9 "
        "kl.loss.truncate=2.0"
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_micro_batches_sum_to_the_big_gradient(model_dir: Path, variant: dict[str, Any]) -> None:
    moved, metrics = [], []
    for tokens in (100_000, 40, 1):
        c = core(model_dir, learner={"micro_batch_tokens": tokens}, **variant)
        before = weights(c)
        metrics.append(c.train(batch()))
        moved.append(weights(c) - before)
    assert float(moved[0].norm()) > 1e-4
    for other, seen in zip(moved[1:], metrics[1:], strict=True):
        assert torch.allclose(other, moved[0], atol=1e-6 + 1e-4 * float(moved[0].abs().max()))
        for name in ("loss/policy", "policy/entropy", "is/ess", "clip/share", "optim/grad_norm"):
            assert seen[name] == pytest.approx(metrics[0][name], rel=1e-4, abs=1e-6), name


def test_groups_stand_together_where_a_prompt_is_encoded_once(model_dir: Path) -> None:
    c, packed = core(model_dir), pack(batch())

    def order() -> list[int]:
        return [i for m, _ in c._select_own_micro_batches(packed, range(packed.count)) for i in m]

    groups = [packed.group_of[i] for i in order()]
    assert sum(a != b for a, b in itertools.pairwise(groups)) == GROUPS - 1
    c.model.exact = True
    assert [packed.group_of[i] for i in order()] == groups
    c.model.fast = None  # encodes every row whole: by length
    lengths = [packed.count_sample_tokens()[i] for i in order()]
    assert lengths == sorted(lengths)
    assert order() != sorted(order(), key=lambda i: packed.group_of[i])


def test_what_a_batch_moved_is_measured_and_changes_nothing(model_dir: Path) -> None:
    """kl/moved is KL(before || after) by k3 on the batch's tokens, each weighed by before /
    behaviour, at most 2."""
    how: dict[str, Any] = {"learner": {"minibatches": 2}, **ANCHORS[0]}
    c = core(model_dir, record={"kl_moved": 2, "split_every": 1}, **how)
    plain = core(model_dir, record={"split_every": 0}, **how)
    packed = pack(batch())
    everyone = range(GROUPS * SIZE)
    before = c._forward(c.model, packed, everyone).double()
    said = c.train(batch())
    x = c._forward(c.model, packed, everyone).double() - before
    weight = (before - packed.behavior).exp().clamp(max=2.0)
    by_hand = float((weight * (x.exp() - 1 - x)).sum() / weight.sum())
    assert by_hand > 1e-5 and said["kl/moved"] == pytest.approx(by_hand, rel=1e-3)
    assert "kl/moved" not in plain.train(batch()) and torch.equal(weights(c), weights(plain)), (
        "measuring leaves training alone"
    )
    assert "kl/moved" not in c.train(batch(1)) and "kl/moved" in c.train(batch(2))
    still = core(model_dir, record={"kl_moved": 1}, learner={"lr": 0.0})
    assert abs(still.train(batch())["kl/moved"]) < 1e-9


def test_bad_loss_is_skipped_and_a_third_saves_the_batch(model_dir: Path, tmp_path: Path) -> None:
    c = core(model_dir, tmp_path)
    before = weights(c)
    for n in range(2):
        assert c.train(batch(n, reward=math.nan))["optim/skipped"] == n + 1
        assert torch.equal(weights(c), before)
    c.backend.accumulate(c.backend.parameters[0].sum())  # its gradient is finite
    assert math.isnan(c.backend.apply(1.0, torch.tensor(math.inf)))
    assert torch.equal(weights(c), before)
    c.train(batch(2))  # a good one between: the count starts again
    assert not torch.equal(weights(c), before)
    for n in range(3, 5):
        c.train(batch(n, reward=math.nan))
    with pytest.raises(NotFiniteError, match="3 times in a row, last in batch 5") as error:
        c.train(batch(5, reward=math.nan))
    assert error.value.exit_code == 1 and str(tmp_path / "bad_batch.msgpack") in str(error.value)
    c.run_dir = None
    with pytest.raises(NotFiniteError, match=r"3 times in a row, last in batch 5$"):
        c.train(batch(5, reward=math.nan))
    rows = msgspec.msgpack.decode((tmp_path / "bad_batch.msgpack").read_bytes())
    assert len(rows) == GROUPS * SIZE
    assert rows[0]["tokens"] == np.frombuffer(batch(5).samples[0].tokens, "<i4").tolist()


def test_prefix_full_is_the_plain_formula_on_both_logits(model_dir: Path, tmp_path: Path) -> None:
    """With equal rewards the KL term is all there is: one SGD step is -lr grad of beta/N sum_k
    W_{1:k-1} KL_k, W with gradient too, written out on transformers' own logits.  The step KLs
    carry the temperature."""
    build_model(tmp_path / "ref", "abcdefgh", hidden=32, layers=2, seed=5)
    kl = {"loss": {"coefficient": 0.5, "off_policy": "prefix_full"}}
    b = batch(reward=1.0)
    for s in b.samples:
        s.temperature = 0.7
    for tokens in (100_000, 1):
        learner = {"micro_batch_tokens": tokens}
        c = core(model_dir, reference=tmp_path / "ref", kl=kl, learner=learner)
        before = weights(c)
        assert c.reference is not None
        total, packed = torch.zeros(()), pack(b)
        for p, r, s in zip(packed.prompts, packed.responses, b.samples, strict=True):
            ids = torch.from_numpy(np.concatenate([p, r]).astype(np.int64))[None]
            at = slice(len(p) - 1, len(p) + len(r) - 1)
            here, there = (
                torch.log_softmax(m.hf(input_ids=ids).logits[0, at] / 0.7, -1)
                for m in (c.model, c.reference)
            )
            step = (here.exp() * (here - there.detach())).sum(-1)
            log_w = here.gather(1, ids[0, len(p) :, None])[:, 0] - torch.from_numpy(
                np.frombuffer(s.behavior_logprobs, "<f4").copy()
            )
            total = total + ((log_w.cumsum(0) - log_w).exp() * step).sum()
        total = 0.5 * total / len(packed.seq)
        total.backward()
        exact = torch.cat([p.grad.flatten() for p in c.model.hf.parameters()])
        c.train(b)
        assert torch.allclose(weights(c) - before, -0.1 * exact, atol=1e-6)
        assert float(exact.norm()) > 1e-3


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(
    "center, bound",
    [("exact", "none"), ("exact", "clip"), ("exact", "mask"), ("top", "none"), ("top", "truncate")],
)
def test_score_centering_is_the_formula_on_both_models_logits(
    model_dir: Path, tmp_path: Path, center: str, bound: str, epochs: int
) -> None:
    """One SGD step less that without centering is lr times the gradient of the mean of A C, C of
    the formula over transformers' own logits of the policy and of the weights that sampled.

    With two steps on a batch, tokens of lag 0 are centered on the start, on which C has no
    gradient: the first step moves the policy as if alone, the second does not."""
    build_model(tmp_path / "sampled", "abcdefgh", hidden=32, layers=2, seed=5)
    sampled = core(tmp_path / "sampled")
    flat = bytearray(count_flat_bytes(sampled.layout))
    sampled.backend.write_flat(memoryview(flat))
    made = batch(reward=1.0)
    lags = [[(0, sample.length, place % 2)] for place, sample in enumerate(made.samples)]
    made = msgspec.structs.replace(made, token_lags=lags)
    for sample in made.samples:
        sample.spans = [VersionSpan(Label(1, 0), "", 0, sample.length, Label(1, 0))]
    corrected: dict[str, Any] = {"level": "none"}
    if bound != "none":
        corrected = {"level": "token", "bound": bound, "hi": 1.02}
        corrected |= {} if bound == "truncate" else {"lo": 0.98}
    moved = []
    for keys in ({}, {"center": center} | ({"center_top": 3} if center == "top" else {})):
        sections: dict[str, Any] = {"loss": {"surrogate": "reinforce", **keys}}
        sections |= {"advantage": {"name": "reinforce", "baseline": "none"}}
        sections |= {"learner": {"epochs": epochs, "micro_batch_tokens": 40}}
        c = core(model_dir, correction=corrected, staleness={"max_lag": 1}, **sections)
        c.measure.read_weights = lambda label, digest: flat
        before = weights(c)
        c.train(made)
        moved.append(weights(c) - before)
    model = core(model_dir).model
    total, packed = torch.zeros(()), pack(made)
    bounds = {
        "none": torch.ones_like,
        "clip": lambda w: w.clamp(0.98, 1.02),
        "truncate": lambda w: w.clamp(max=1.02),
        "mask": lambda w: w * (w >= 0.98) * (w <= 1.02),
    }[bound]
    for place, (p, r) in enumerate(zip(packed.prompts, packed.responses, strict=True)):
        ids = torch.from_numpy(np.concatenate([p, r]).astype(np.int64))[None]
        at = slice(len(p) - 1, len(p) + len(r) - 1)
        here, there = (
            torch.log_softmax(m.hf(input_ids=ids).logits[0, at], -1) for m in (model, sampled.model)
        )
        p_now, q = here.detach().exp(), there.detach().exp()
        chosen = q >= q.topk(3).values[:, -1:] if center == "top" else torch.ones_like(q).bool()
        rho = (q * ~chosen).sum(-1, keepdim=True) / (p_now * ~chosen).sum(-1, keepdim=True)
        rest = rho * bounds(1 / rho) * p_now if center == "top" else 0.0
        total = total + place % 2 * ((chosen * (bounds(p_now / q) * q - rest)) * here).sum()
    (total / len(packed.seq)).backward()
    exact = torch.cat([p.grad.flatten() for p in model.hf.parameters()])
    assert float(exact.norm()) > 1e-3
    assert torch.allclose(moved[1] - moved[0], -0.1 * exact, atol=1e-6) == (epochs == 1)


def test_score_centering_and_prefix_full_are_refused_where_they_cannot_work() -> None:
    on = ["loss.surrogate=reinforce", "loss.center=exact", "correction.proximal=recompute"]
    for more, message in (
        (["learner.backend=fsdp2", "learner.ranks=2"], "hidden states in one process, which"),
        (["learner.ranks=2"], "hidden states in one process; set learner.ranks = 1"),
        (["correction.level=sequence"], "knows bounded weights of single tokens"),
        (["correction.bound=none"], "the weights need no center"),
        (["generator.top_p=0.9"], "over the whole vocabulary"),
        (["weights.slots=2", "staleness.max_lag=4"], "loss.center needs the weights of max_lag"),
        (["staleness.max_lag=inf"], "need the weights of all versions"),
    ):
        with pytest.raises(ConfigError, match=message):
            load.load("configs/demo.toml", [*on, *more])
    assert load.load("configs/demo.toml", on).reads_versions

    on = ["kl.loss.coefficient=0.1", "kl.loss.off_policy=prefix_full"]
    said = r"prefix_full reads both models' last hidden states, which needs learner\.backend"
    with pytest.raises(ConfigError, match=said):
        load.load("configs/demo.toml", [*on, "learner.backend=deepspeed", "learner.ranks=2"])
    assert load.load("configs/demo.toml", on).kl.loss.off_policy == "prefix_full"


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device: numbers read from tensors, and indexing by a
    mask, whose size must be known."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[1] if "aten.index" in str(func) and isinstance(args[1], list) else []
        masks = any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in given)
        self.count += masks or any(
            name in str(func) for name in ("_local_scalar_dense", "nonzero", "masked_select")
        )
        return func(*args, **(kwargs or {}))


def reads(c: LearnerCore, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of one batch; `tolist` reads memory past the dispatcher, so it is counted at its call."""
    seen, real = Reads(), torch.Tensor.tolist

    def tolist(self: torch.Tensor) -> Any:
        seen.count += 1
        return real(self)

    with monkeypatch.context() as patch, seen:
        patch.setattr(torch.Tensor, "tolist", tolist)
        c.train(batch())
    return seen.count


READERS: list[dict[str, Any]] = [
    {},
    {"kl": {"loss": {"coefficient": 0.1, "estimator": "k3"}}, "loss": {"entropy": 0.01}},
    {"correction": {"preset": "mis"}},
    {"loss": {"surrogate": "reshape"}, "correction": {"proximal": "behavior"}},
]


@pytest.mark.parametrize("variant", READERS, ids=str)
def test_the_host_waits_once_a_step_however_many_micro_batches(
    model_dir: Path, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm and loss are read together, before the weights move; every diagnostic once a batch.
    `reshape` also needs K before its gradient."""

    def cost(epochs: int, tokens: int) -> int:
        return reads(
            core(model_dir, learner={"epochs": epochs, "micro_batch_tokens": tokens}, **variant),
            monkeypatch,
        )

    whole, pieces = cost(2, 100_000), cost(2, 100)
    assert whole == pieces, "a micro-batch reads nothing"
    for_each_step = cost(3, 100) - pieces
    assert for_each_step == (2 if "loss" in variant and "surrogate" in variant["loss"] else 1)


@pytest.mark.parametrize("how", [*ANCHORS, ANCHORS[0] | {"learner": {"epochs": 2}}], ids=str)
def test_the_start_is_measured_under_every_anchor(model_dir: Path, how: dict[str, Any]) -> None:
    """By hand from one forward before the batch: x = log pi_start - log mu over all tokens; ess,
    chi2, KL and the split of both."""
    c, packed = core(model_dir, **how), pack(batch())
    start = c._forward(c.model, packed, range(GROUPS * SIZE)).double()
    x = start - packed.behavior.double()
    m = c.train(batch())
    ratio = x.exp()
    assert m["kl/behavior_start_k1"] == pytest.approx(float(-x.mean()), rel=1e-5)
    assert m["kl/behavior_start_k3"] == pytest.approx(float((ratio - 1 - x).mean()), rel=1e-5)
    assert m["kl/behavior_start_k3"] > 0.01
    assert m["is/ess"] == pytest.approx(
        float(ratio.sum() ** 2 / (len(x) * ratio.square().sum())), rel=1e-5
    )
    assert m["is/ess"] < 0.99
    assert m["is/chi2"] == pytest.approx(float(ratio.square().mean() - 1), rel=1e-5)
    assert m["is/ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-5)
    assert m["perplexity/start"] == pytest.approx(float((-start).mean().exp()), rel=1e-5)
    at_zero = packed.token_lag == 0
    assert m["mismatch/k3_at_lag_0"] == pytest.approx(
        float((ratio - 1 - x)[at_zero].mean()), rel=1e-5
    )
    assert m["by_lag/ess_0"] == pytest.approx(
        float(ratio[at_zero].sum() ** 2 / (at_zero.sum() * ratio[at_zero].square().sum())), rel=1e-5
    )
    # two passes over the same answers: the second is under the policy that the first step made
    if how.get("learner"):
        assert m["kl/start_target_k3"] > 1e-8
    else:
        assert "kl/start_target_k3" not in m, "the one pass is the start itself"
    assert m["kl/behavior_start_k1"] + m.get("kl/start_target_k1", 0.0) == pytest.approx(
        m["kl/behavior_target_k1"], abs=1e-6
    )


def test_m2po_masks_each_minibatch_anew(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second optimizer step is masked by the policy after the first, on its own samples."""
    made = {"loss": {"surrogate": "vanilla"}, "correction": {"proximal": "behavior", "m2": 0.01}}
    c = core(model_dir, learner={"minibatches": 2, "lr": 5.0}, **made)
    packed = pack(batch())
    begin_step, masks = step_loss.begin_step, []

    def begin(prep: Any, samples: torch.Tensor, current: torch.Tensor | None = None) -> Any:
        now = c._forward(c.model, packed, range(packed.count))
        assert current is not None and torch.allclose(current, now, atol=1e-6)
        step = begin_step(prep, samples, current)
        inside = prep.valid & torch.isin(prep.batch.seq, samples)
        pushing = inside & ((now - prep.batch.behavior) * prep.advantage > 0)
        assert step.m2_excluded.any() and not (step.m2_excluded & ~pushing).any()
        left = pushing & ~step.m2_excluded
        far = (now - prep.batch.behavior).abs()
        assert not left.any() or far[left].max() < far[step.m2_excluded].min()
        assert not left.any() or float(far[left].square().mean()) <= 0.01 + 1e-6
        masks.append((set(samples.tolist()), now.clone()))
        return step

    monkeypatch.setattr(step_loss, "begin_step", begin)
    c.train(batch())
    (first, before), (second, after) = masks
    assert not first & second and len(first | second) == GROUPS * SIZE
    assert not torch.allclose(before, after, atol=1e-3)


def lengths(b: Batch) -> list[int]:
    return [s.length for s in b.samples]


STOPPED = {"stop": {"kl_max": 1e-12}}
ADAM = {"optimizer": "adamw", "lr": 0.01}


def test_minibatches_that_early_stopping_leaves_out_are_counted_whole(model_dir: Path) -> None:
    b = batch()
    used_up = core(model_dir, learner={"minibatches": 3, "epochs": 2})
    used_up.train(batch())
    assert used_up.unused == []
    c = core(model_dir, learner={**ADAM, "minibatches": 3}, **STOPPED)
    assert c.train(b)["optim/steps"] == 1
    c.state.number = b.number  # the permutation is the batch's
    (made, *_) = c._choose_minibatches(pack(b), 0)
    assert len(made) == len(b.samples) // 3
    assert c.unused == [(0, 0) if i in made else (n, 0) for i, n in enumerate(lengths(b))]
    again = core(model_dir, learner={**ADAM, "epochs": 3}, **STOPPED)
    # its first pass had used all of it
    assert again.train(batch())["optim/early_stops"] == 1 and again.unused == []


def test_rejected_tokens_are_those_that_no_step_weighed(model_dir: Path) -> None:
    b = batch()
    c = core(model_dir, correction={"reject": "ratio", "reject_lo": 0.8, "reject_hi": 1.1})
    c.train(b)
    assert 0 < sum(r for _, r in c.unused) < sum(lengths(b)) and all(s == 0 for s, _ in c.unused)
    icepop = core(model_dir, correction={"bound": "mask", "lo": 0.8, "hi": 1.1})
    zero = icepop.train(batch())["is/zero_share"]
    assert sum(r for _, r in icepop.unused) == pytest.approx(zero * sum(lengths(b))) and zero > 0


def test_a_baseline_that_is_not_trained_on_is_not_counted_as_unused(model_dir: Path) -> None:
    learner, b = {**ADAM, "minibatches": 3}, batch()
    c = core(model_dir, advantage={"name": "remax"}, learner=learner, **STOPPED)
    c.train(b)
    assert all(x == (0, 0) for x, s in zip(c.unused, b.samples, strict=True) if s.sample == 0)
    assert sum(n for n, _ in c.unused) > 0


__all__ = ["model_dir"]


def test_the_present_coefficient_is_charged_not_configs(model_dir: Path, tmp_path: Path) -> None:
    """Resumed at 0 the run is that without the term; twice the coefficient charges double."""
    build_model(tmp_path / "ref", "abcdefgh", hidden=32, layers=2, seed=5)
    kl = {"reward": {"coefficient": 0.1, "reference": str(tmp_path / "ref")}}
    plain = core(model_dir)
    none, once, twice = (core(model_dir, kl=kl) for _ in range(3))
    none.state.beta, twice.state.beta = 0.0, 0.2
    without, at_zero = plain.train(batch()), none.train(batch())
    assert torch.equal(weights(plain), weights(none))
    assert "kl/answer" not in at_zero and at_zero["reward/used_mean"] == without["reward/mean"]
    a, b = once.train(batch()), twice.train(batch())
    assert b["kl/reward_gradient_share"] == pytest.approx(2 * a["kl/reward_gradient_share"])
    assert (a["kl/beta"], b["kl/beta"]) == (0.1, 0.2)
    charged, doubly = (row["reward/mean"] - row["reward/used_mean"] for row in (a, b))
    assert doubly == pytest.approx(2 * charged, rel=1e-3) != 0


def test_exact_runs_end_at_the_first_difference(model_dir: Path) -> None:
    """The behaviour policy here is nobody's: at lag 0 it differs by its largest log ratio."""
    c = core(model_dir)
    c.config = msgspec.structs.replace(c.config, exact=True)
    packed = pack(batch())
    apart = c._forward(c.model, packed, range(len(packed.responses))) - packed.behavior
    off = apart.abs()[packed.token_lag == 0].max()
    with pytest.raises(AsyncrlError) as e:
        c.train(batch(3))
    assert str(e.value) == (
        f"exact: engine and learner differ at lag 0 in batch 3 by {float(off):.1e} nats; see "
        '`asyncrl doctor --exact`, or exact = "try"'
    )


def test_exact_kl_needs_both_packed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of another kind has no packed forward: the policy's own, or the reference's."""
    kl = {"loss": {"coefficient": 0.1, "off_policy": "prefix_full"}}
    for without in (0, 1):
        loaded = []

        def load(
            *args: object, without: int = without, loaded: list[object] = loaded, **more: object
        ) -> object:
            model = load_learner_policy(*args, **more)
            if len(loaded) == without:
                model.fast = None
            loaded.append(model)
            return model

        monkeypatch.setattr(step, "load_learner_policy", load)
        with pytest.raises(ConfigError) as e:
            core(model_dir, kl=kl)
        assert str(e.value) == (
            "kl.loss.off_policy: prefix_full needs a model of the packed forward (Llama, Qwen2, "
            "Qwen3, Mistral, Qwen3-MoE, Mixtral), also as its reference; use another"
        )
        loaded.clear()
        # the others do without it
        core(model_dir, kl={"loss": {"coefficient": 0.1, "off_policy": "prefix"}})
    centers: Any = {"loss": {"surrogate": "reinforce", "center": "exact"}}
    otb: Any = {"advantage": {"name": "otb"}}
    for key, keys in (("loss.center", centers), ("advantage.name: otb", otb)):
        loaded.clear()
        monkeypatch.setattr(step, "load_learner_policy", partial(load, without=0, loaded=loaded))
        with pytest.raises(ConfigError) as e:
            core(model_dir, **keys)
        assert str(e.value) == (
            f"{key} needs a model of the packed forward (Llama, Qwen2, Qwen3, Mistral, "
            "Qwen3-MoE, Mixtral); use another"
        )


def test_the_fresher_a_token_the_nearer_its_anchor_to_the_behaviour(model_dir: Path) -> None:
    """1 / (lag + 1) of mu's log-probability, the rest the learner's own: mu itself at lag 0."""
    c = core(model_dir, correction={"proximal": "interpolate"})
    data = batch()
    packed = pack(data)
    c._set_proximal(data, packed)
    loss, own = packed, c._forward(c.model, packed)
    assert loss.proximal is not None and set(loss.token_lag.tolist()) == {0, 1, 2, 3}
    share = torch.tensor([1, 1 / 2, 1 / 3, 1 / 4])[loss.token_lag]
    assert torch.allclose(loss.proximal, share * loss.behavior + (1 - share) * own)
    assert not torch.allclose(own, loss.behavior)
    assert torch.equal(loss.proximal[loss.token_lag == 0], loss.behavior[loss.token_lag == 0])


@pytest.mark.parametrize("rank", [0, 4])
def test_an_average_of_versions_is_proximal(rank: int, model_dir: Path, tmp_path: Path) -> None:
    """By hand; a checkpoint continues it, of adapters too, and one without it is refused."""
    correction = {"proximal": "ema", "ema_half_life": 0.5}
    c, again, by_hand = (core(model_dir, correction=correction, lora={"rank": rank}) for _ in "123")
    versions = [copy_flat_bytes(c.model)]
    for n in range(2):
        c.train(batch(n, seed=n))
        versions.append(copy_flat_bytes(c.model))
    rows = [read_flat(memoryview(flat), c.layout) for flat in versions]
    mean = {name: sum(x[name] * 4.0**k for k, x in enumerate(rows)) / 21 for name in rows[0]}
    load_weights(by_hand.model, mean)
    packed = pack(batch())
    c._set_proximal(batch(), packed)
    expected = by_hand._forward(by_hand.model, packed)
    assert packed.proximal is not None and torch.allclose(packed.proximal, expected, atol=1e-6)
    assert copy_flat_bytes(c.model) == versions[-1]
    assert not torch.allclose(c._forward(c.model, packed), expected, atol=1e-4)
    checkpoint.save(tmp_path, c, {}, 1)
    checkpoint.restore(again, tmp_path / "number_2")
    assert again.train(batch(2)) == c.train(batch(2))
    assert again.average is not None and c.average is not None
    assert all(map(torch.equal, again.average.values, c.average.values))
    average = tmp_path / "number_2" / "average_0.pt"
    torch.save([SimpleNamespace(shape=x.shape) for x in c.average.values], average)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):  # no code is run
        checkpoint.restore(again, tmp_path / "number_2")
    average.unlink()
    with pytest.raises(DamagedDataError) as error:
        checkpoint.restore(again, tmp_path / "number_2")
    assert str(error.value) == (
        f"checkpoint {tmp_path / 'number_2'} has no average of these weights (correction.proximal "
        "= ema): continue with the correction.proximal, learner.backend and learner.ranks it was "
        "made with, or replay from version 0"
    )
    parts = SimpleNamespace(rank=3, sharded=True, list_parts=list)
    assert WeightAverage(parts, 1.0).locate(tmp_path).name == "average_3.pt"  # type: ignore[arg-type]
    parts.sharded = False
    assert WeightAverage(parts, 1.0).locate(tmp_path).name == "average_0.pt"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "count", "made"),
    [
        ("deepspeed", 1, "deepspeed_backend.DeepSpeedBackend"),
        ("fsdp2", 2, "fsdp_backend.FsdpBackend"),
        ("torch", 2, "ranks.ReplicatedBackend"),
        ("torch", 1, ""),
    ],
)
def test_the_backend_is_the_configured_one(
    backend: str, count: int, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = SimpleNamespace(learner=SimpleNamespace(backend=backend, process_count=count))
    model: Any = object()
    monkeypatch.setattr(step, "TorchBackend", lambda *how: ("", *how))
    if made:
        monkeypatch.setattr(f"learner.distributed.{made}", lambda *how: (made, *how))
    assert step.make_backend(config, model) == (made, config, model)


def transformers_rates(name: str, warmup: int, steps: int, **keys: float) -> list[float]:
    """Return the learning rates of transformers' scheduler at a rate of 0.3, also past the end."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = get_scheduler(name, optimizer, warmup, steps, dict(keys))
    rates = []
    for _ in range(steps + 3):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 2, 5, 6, 9])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_a_schedule_is_that_of_transformers_to_the_last_bit(name: str, warmup: int) -> None:
    """Also past the end, and in supervised training, where `lr_end` is their min_lr_rate."""
    keys: dict[str, Any] = {"schedule": name, "warmup_steps": warmup, "lr": 0.3}
    theirs = "constant_with_warmup" if name == "constant" else name
    for steps in (1, 6, 7, 23):
        learner = LearnerConfig(steps=steps, **keys)
        for settings in (learner, SftTraining(steps=steps, lr_end=0.0, **keys)):
            ours = [0.3 * compute_learning_rate_share(settings, n) for n in range(steps + 3)]
            assert ours == transformers_rates(theirs, warmup, steps), steps
    settings = SftTraining(steps=23, lr_end=0.2, **keys)
    ours = [0.3 * compute_learning_rate_share(settings, n) for n in range(26)]
    assert max(ours) == 0.3, "the rate of the config is reached"
    if name == "cosine":
        assert ours == transformers_rates("cosine_with_min_lr", warmup, 23, min_lr_rate=0.2)
    assert ours[23] == pytest.approx(0.3 if name == "constant" else 0.2 * 0.3)


def run_that_raises(error: Exception) -> Callable[..., Any]:
    class Raising:
        def __init__(self, *_: object) -> None: ...

        def run(self) -> None:
            raise error

        def make_record(self, seconds: float) -> dict[str, Any]:
            return {"seconds": seconds}

    return Raising


def test_experiments_record_divergence_and_raise_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load.load("configs/demo.toml")
    monkeypatch.setattr(serial, "SerialRun", run_that_raises(NotFiniteError("in other words")))
    assert serial.run_serial(config, 1) == {"seconds": 0.0, "failed": "in other words"}
    other = AsyncrlError("a lag that is not finite")
    monkeypatch.setattr(serial, "SerialRun", run_that_raises(other))
    with pytest.raises(AsyncrlError, match="a lag that is not finite"):
        serial.run_serial(config, 1)
