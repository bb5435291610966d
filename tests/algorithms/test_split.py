"""The log ratio in three parts: engine mismatch, staleness and update, measured with the weights
that drew each token."""

import math
from pathlib import Path
from typing import Any

import learner_step_kit
import msgspec
import numpy as np
import pytest
import torch
from algorithms_catalogue_kit import answers
from models_kit import model_fixture
from signs_kl_kit import split_share
from trajectory_kit import trajectory

from asyncrl.algorithms import loss
from asyncrl.config import load
from asyncrl.config.tree import StalenessConfig
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import Batch, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.models.policy import (
    PolicyModel,
    build_manifest,
    count_flat_bytes,
    list_named_weights,
    load_policy,
    load_weights,
    read_flat,
    write_flat,
)
from learner.batch import pack
from learner.step import LearnerCore

GROUPS, SIZE, LENGTH = 6, 2, 8
NOISE = 0.25


def k3(x: float) -> float:
    """Of log b/a, tokens drawn by a."""
    return math.exp(x) - 1 - x


model_dir = model_fixture("abcdefgh", layers=2)


class Ring:
    """Versions 0, 1, 2 of a policy on its way; the learner stands at 2."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir, self.model = model_dir, load_policy(model_dir, device="cpu")
        self.held: dict[Label, bytes] = {}
        self.asked: list[Label] = []
        source = torch.Generator().manual_seed(5)
        for number in range(3):
            with torch.no_grad():
                for _, p in list_named_weights(self.model):
                    p.add_(0.05 * torch.randn(p.shape, generator=source))
            self.held[Label(1, number)] = self.flat()

    def flat(self) -> bytes:
        data = bytearray(count_flat_bytes(build_manifest(self.model)))
        write_flat(self.model, memoryview(data))
        return bytes(data)

    def logprobs(
        self, number: int, prompts: list[np.ndarray], answers: list[np.ndarray]
    ) -> torch.Tensor:
        flat = memoryview(bytearray(self.held[Label(1, number)]))
        load_weights(self.model, read_flat(flat, build_manifest(self.model)))
        with torch.no_grad():
            return self.model.logprobs(prompts, answers, torch.ones(len(prompts))).logprobs

    def __call__(self, label: Label, digest: str) -> bytes:
        self.asked.append(label)
        return self.held.get(label, b"")


@pytest.fixture
def ring(model_dir: Path) -> Ring:
    return Ring(model_dir)


def batch(ring: Ring, number: int = 2, noise: float = NOISE) -> Batch:
    """Answers of 8 tokens, four by version 0 and four by version 1 or 2; behaviour is their own
    forward with `noise` added on every token."""
    r = np.random.default_rng(0)
    prompts = [r.integers(3, 11, 3).astype(np.int32) for _ in range(GROUPS)]
    answers = [r.integers(3, 11, LENGTH).astype(np.int32) for _ in range(GROUPS * SIZE)]
    whose = [prompts[i // SIZE] for i in range(GROUPS * SIZE)]
    by_version = [ring.logprobs(v, whose, answers).reshape(-1, LENGTH) for v in range(3)]
    samples, runs = [], []
    for i, answer in enumerate(answers):
        second = 1 + i % 2
        mu = torch.cat([by_version[0][i, :4], by_version[second][i, 4:]]) + noise
        spans = [
            VersionSpan(Label(1, 0), "", 0, 4, Label(1, 0)),
            VersionSpan(Label(1, second), "", 4, 8, Label(1, 0)),
        ]
        fields = {"spans": spans, "reward": float(r.random())}
        samples.append(trajectory((i // SIZE, i % SIZE, 0), whose[i], answer, mu, **fields))
        runs.append([(0, 4, 2), (4, 8, 2 - second)])
    return Batch(1, number, samples, [2] * len(samples), [0] * len(samples), runs, {}, GROUPS, {})


def core(ring: Ring, **sections: Any) -> LearnerCore:
    learner = {"groups": GROUPS, "group_size": SIZE, "clip_norm": 1.0}
    record = {"split_every": 2, "split_samples": 100, "reference_kl_every": 0}
    made: dict[str, Any] = {"correction": {"proximal": "behavior"}, "loss": {"surrogate": "ppo"}}
    made |= sections | {"record": record | sections.get("record", {})}
    made["learner"] = learner | sections.get("learner", {})
    c = learner_step_kit.core(ring.model_dir, **made)
    flat = memoryview(bytearray(ring.held[Label(1, 2)]))
    load_weights(c.model, read_flat(flat, build_manifest(c.model)))
    c.measure.read_weights = ring
    return c


def by_hand(ring: Ring, b: Batch) -> tuple[torch.Tensor, ...]:
    """(mu, pi_v, pi_start) of every token."""
    packed = pack(b)
    at = [ring.logprobs(v, packed.prompts, packed.responses).reshape(-1, LENGTH) for v in range(3)]
    second = torch.stack([at[1 + i % 2][i, 4:] for i in range(GROUPS * SIZE)])
    return packed.behavior, torch.cat([at[0][:, :4], second], 1).reshape(-1), at[2].reshape(-1)


def test_the_split_is_what_the_versions_own_weights_say(ring: Ring) -> None:
    """The noise is the mismatch, at every lag; then staleness, 0 where the start drew the token;
    then what the batch's own update has moved."""
    b = batch(ring)
    mu, version, start = by_hand(ring, b)
    c = core(ring)
    m = c.train(b)
    after = c._forward(c.model, pack(b), range(GROUPS * SIZE))
    assert m["split/mismatch"] == pytest.approx(NOISE, abs=1e-5)
    assert m["split/mismatch_k3"] == pytest.approx(k3(-NOISE), abs=1e-5)
    x = (start - version).double()
    assert m["split/staleness"] == pytest.approx(float(-x.mean()), abs=1e-5)
    assert m["split/staleness_k3"] == pytest.approx(float((x.exp() - 1 - x).mean()), abs=1e-5)
    assert m["split/staleness_k3"] > 0.01
    assert m["split/update"] == pytest.approx(float((start - after).mean()), abs=1e-6)
    assert m["split/update_k3"] > 1e-7 and m["split/coverage"] == 1
    assert m["split/total"] == pytest.approx(float((mu - after).mean()), abs=1e-5)
    assert m["by_lag/staleness_0"] == 0 and m["by_lag/staleness_k3_1"] > 0.01
    assert m["by_lag/mismatch_2"] == pytest.approx(NOISE, abs=1e-5)
    assert "mismatch/k3_at_lag_0" not in m, (
        "the start's own tokens here were drawn on keys and values of version 0"
    )
    assert m["by_age/mismatch_k3_0"] == pytest.approx(k3(-NOISE), abs=1e-5)
    assert "by_age/mismatch_k3_1" in m and "by_age/mismatch_k3_2" in m
    assert set(ring.asked) == {Label(1, 0), Label(1, 1)}, (
        "the start's own version needs no second forward"
    )


def test_equal_weights_are_those_of_all_keys_and_values_too(ring: Ring) -> None:
    """Half of the answers end under the start itself; it is the engine's mismatch alone only where
    the start computed all they attended to."""
    b = batch(ring)
    for i, sample in enumerate(b.samples):
        if i % 4 == 1:
            sample.spans = [sample.spans[0], VersionSpan(Label(1, 2), "", 4, 8, Label(1, 2))]
    m = core(ring).train(b)
    assert m["mismatch/k3_at_lag_0"] == pytest.approx(k3(-NOISE), abs=1e-5)
    assert m["mismatch/max_at_lag_0"] == pytest.approx(NOISE, abs=1e-4)
    other = batch(ring)
    # as much again off, on older keys and values: not counted
    for i, sample in enumerate(other.samples):
        if i % 4 == 3:
            mu = np.frombuffer(sample.behavior_logprobs, "<f4").copy()
            mu[4:] += NOISE
            sample.behavior_logprobs = mu.tobytes()
        elif i % 4 == 1:
            sample.spans = [sample.spans[0], VersionSpan(Label(1, 2), "", 4, 8, Label(1, 2))]
    assert core(ring).train(other)["mismatch/k3_at_lag_0"] == pytest.approx(
        m["mismatch/k3_at_lag_0"], abs=1e-6
    )


@pytest.mark.parametrize(
    "sections",
    [
        {"learner": {"lr": 1.0}},
        {"learner": {"epochs": 2, "lr": 1.0}},
        {"learner": {"epochs": 3, "lr": 1.0}, "stop": {"kl_max": 1e-12}},  # ends after one step
    ],
    ids=["one update", "two epochs", "stopped after the first"],
)
def test_an_update_is_of_the_batch_against_the_start(ring: Ring, sections: dict[str, Any]) -> None:
    """Nothing of it is a constant, however many updates there were; nor is kl/moved."""
    b = batch(ring)
    _, _, start = by_hand(ring, b)
    c = core(ring, **sections)
    m = c.train(b)
    packed = pack(b)
    x = (start - c._forward(c.model, packed, range(GROUPS * SIZE))).double()
    assert m["optim/steps"] == (2 if sections["learner"].get("epochs") == 2 else 1)
    assert m["split/update"] == pytest.approx(float(x.mean()), abs=1e-6)
    assert m["split/update_k3"] == pytest.approx(float(((-x).exp() - 1 + x).mean()), rel=1e-3)
    assert m["split/update_k3"] > 1e-6
    assert m["split/total"] == pytest.approx(
        m["split/mismatch"] + m["split/staleness"] + m["split/update"], abs=1e-6
    )
    weight = (start - packed.behavior).double().exp().clamp(max=2.0)
    moved = float((weight * ((-x).exp() - 1 + x)).sum() / weight.sum())
    assert m["kl/moved"] == pytest.approx(moved, rel=1e-3)
    # what only a later pass could see is said of no batch without one
    constant = [n for n in m if n.startswith(("kl/start_target_", "by_lag/update_"))]
    assert bool(constant) == (m["optim/steps"] > 1) and all(m[n] for n in constant)


def test_measuring_changes_nothing_and_happens_when_it_is_due(ring: Ring) -> None:
    measured, plain = core(ring), core(ring, record={"split_every": 0})
    for number in (2, 3, 4):
        b = batch(ring, number)
        seen, not_seen = measured.train(b), plain.train(b)
        assert ("split/mismatch" in seen) == (number % 2 == 0) and "split/mismatch" not in not_seen
    for a, b2 in zip(measured.model.hf.parameters(), plain.model.hf.parameters(), strict=True):
        assert torch.equal(a, b2)


def test_versions_that_the_ring_no_longer_holds_are_left_out_and_said(ring: Ring) -> None:
    """Half of all tokens are by version 0; without it the others are measured alone."""
    b = batch(ring)
    c = core(ring)
    del ring.held[Label(1, 0)]
    m = c.train(b)
    assert m["split/coverage"] == 0.5 and m["split/mismatch"] == pytest.approx(NOISE, abs=1e-5)
    assert "by_lag/mismatch_2" not in m


def test_a_few_answers_are_drawn_by_seed_and_batch(ring: Ring) -> None:
    c = core(ring, record={"split_samples": 3, "reference_kl_every": 2})
    drawn: list[tuple[list[int], list[int]]] = []
    plain = c.measure.choose_samples
    # type: ignore[func-returns-value, method-assign]
    c.measure.choose_samples = lambda *args: drawn.append(plain(*args)) or drawn[-1]
    c.train(batch(ring))
    c.train(batch(ring, 4))
    again = core(ring, record={"split_samples": 3, "reference_kl_every": 2})
    # type: ignore[func-returns-value, method-assign]
    again.measure.choose_samples = lambda *args: drawn.append(plain(*args)) or drawn[-1]
    again.train(batch(ring))
    assert [len(x) for x, _ in drawn] == [3, 3, 3] and drawn[0] == drawn[2] != drawn[1]
    # of the 12 answers in six groups of two: as few groups as can be, beside any mixture
    assert all(len({i // SIZE for i in x}) == 2 for x, _ in drawn)
    assert [len(x) for _, x in drawn] == [GROUPS * SIZE] * 3
    for (found, _), number in zip(drawn, (2, 4), strict=False):
        source = torch.Generator().manual_seed(c.config.seed * 1_000_003 + number)
        order = torch.randperm(GROUPS * SIZE, generator=source).tolist()
        groups = list(dict.fromkeys(i // SIZE for i in order))
        assert found == sorted(sorted(order, key=lambda i: groups.index(i // SIZE))[:3])


def test_several_minibatches_split_the_first_ones_answers(ring: Ring) -> None:
    """Only their forward was the learner's start: the noise is still all of the mismatch."""
    m = core(ring, learner={"minibatches": 3, "lr": 3.0}).train(batch(ring))
    assert m["split/mismatch"] == pytest.approx(NOISE, abs=1e-5) and m["by_lag/staleness_0"] == 0
    assert m["split/update"] != 0 and "kl/start_target_k1" not in m


def test_exact_ends_a_run_whose_engine_differs_at_a_lag(ring: Ring) -> None:
    """No token is at lag 0 here: only the split sees it, for tokens of a single version."""
    b = batch(ring)
    b = msgspec.structs.replace(b, token_lags=[[(0, 8, 2)]] * len(b.samples))
    for sample in b.samples:
        sample.spans = [VersionSpan(Label(1, 0), "", 0, 8, Label(1, 0))]
    c = core(ring, exact=True)
    said = "exact: engine and learner differ under the same weights in batch 2 by"
    with pytest.raises(AsyncrlError, match=said):
        c.train(b)
    assert core(ring, exact="try").train(b)["mismatch/max_one_version"] > 0.1
    mixed = core(ring, exact=True)
    for sample in b.samples:
        # older keys and values: no engine could be exact
        sample.spans = [VersionSpan(Label(1, 0), "", 0, 8, Label(0, -1))]
    assert "mismatch/max_one_version" not in mixed.train(b)


def test_kl_to_the_reference_is_measured_where_no_term_is_on(ring: Ring) -> None:
    """x = log pi_theta - log pi_ref on the batch's tokens, the reference the initial model; a KL
    term's own measure takes its place."""
    b = batch(ring)
    c = core(ring, record={"split_every": 0, "reference_kl_every": 2})
    _, _, start = by_hand(ring, b)
    packed = pack(b)
    initial = load_policy(ring.model_dir, device="cpu")
    with torch.no_grad():
        ref = initial.logprobs(
            packed.prompts, packed.responses, torch.ones(len(packed.prompts))
        ).logprobs
    x = (start - ref).double()
    m = c.train(b)
    assert m["kl/target_ref_k1"] == pytest.approx(float(x.mean()), abs=1e-5)
    assert m["kl/target_ref_k3"] == pytest.approx(float(((-x).exp() - 1 + x).mean()), rel=1e-4)
    assert m["kl/target_ref_k3"] > 1e-3
    assert m["kl/ref_target"] == pytest.approx(
        float((-x * (-x).exp() - (-x).exp() + 1).mean()), rel=1e-4
    )
    assert "kl/target_ref_k1" not in c.train(batch(ring, 3))
    assert "kl/target_ref_k1" in c.train(batch(ring, 4))


def test_the_reference_is_measured_on_answers_of_its_own(ring: Ring) -> None:
    """As many as record.reference_samples says, spread over the groups."""
    c = core(ring, record={"reference_kl_every": 2, "reference_samples": 5, "split_every": 0})
    seen: list[int] = []
    real = c.measure.measure_reference_kl
    c.measure.measure_reference_kl = lambda packed, prep, answers: (  # type: ignore[method-assign]
        seen.extend(answers) or real(packed, prep, answers)  # type: ignore[func-returns-value]
    )
    assert "kl/target_ref_k3" in c.train(batch(ring))
    assert len(seen) == 5 and len({i // SIZE for i in seen}) > 3


def test_a_split_costs_its_reckoned_passes(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """`split_share` counts the samples of a split under each earlier version that may have sampled
    them and under the updated policy; a step is three forward passes of each of its samples."""
    passes: list[float] = []
    plain = PolicyModel.logprobs

    def counted(self: PolicyModel, prompts: Any, responses: Any, *args: Any, **how: Any) -> Any:
        passes.append(len(responses) * (3.0 if torch.is_grad_enabled() else 1.0))
        return plain(self, prompts, responses, *args, **how)

    c = core(ring, record={"split_samples": 4, "split_every": 1})
    made = batch(ring)
    monkeypatch.setattr(PolicyModel, "logprobs", counted)
    c.train(made)
    own = GROUPS * SIZE * 3.0
    assert sum(passes) > own
    config = msgspec.structs.replace(c.config, staleness=StalenessConfig(max_lag=2))
    assert (sum(passes) - own) / own <= split_share(config) == 1 / 3


VERSION: dict[str, Any] = {
    "correction": {"proximal": "version", "bound": "none"},
    "loss": {"surrogate": "decoupled_ppo"},
}


def test_the_version_of_each_token_is_its_proximal_policy(ring: Ring) -> None:
    """Two versions wrote each answer: the weight is the mismatch alone, at every lag."""
    b = batch(ring)
    c = core(ring, **VERSION)
    passes = []
    forward = c._forward
    c._forward = c.measure.forward = lambda model, packed, answers: (  # type: ignore[method-assign]
        passes.append((model is c.model, list(answers))) or forward(model, packed, answers)
    )
    packed = c._pack_batch(b)
    _, version, _ = by_hand(ring, b)
    assert packed.proximal is not None and torch.allclose(packed.proximal, version, atol=1e-5)
    odd, everyone = list(range(1, GROUPS * SIZE, 2)), list(range(GROUPS * SIZE))
    assert passes == [(False, everyone), (False, everyone[::2]), (True, odd)], (
        "each answer is run once under each version that wrote it"
    )
    m = c.train(b)
    assert m["is/mean_weight"] == pytest.approx(math.exp(-NOISE), abs=1e-5)
    assert m["is/weight_ess"] == pytest.approx(1, abs=1e-6) and m["is/ess"] < 0.99
    assert m["is/fallback_share"] == 0
    assert ring.asked == [Label(1, 0), Label(1, 1)] * 2, "the split needs no pass of its own"
    assert m["split/mismatch"] == pytest.approx(NOISE, abs=1e-5) and m["split/coverage"] == 1


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_version_that_left_the_ring_falls_back_to_the_start(ring: Ring, minibatches: int) -> None:
    b = batch(ring)
    mu, version, start = by_hand(ring, b)
    del ring.held[Label(1, 0)]
    c = core(ring, **VERSION, learner={"minibatches": minibatches})
    expected = torch.where(torch.arange(len(mu)) % LENGTH < 4, start, version)
    packed = c._pack_batch(b)
    assert packed.proximal is not None and torch.allclose(packed.proximal, expected, atol=1e-5)
    m = c.train(b)
    assert m["is/fallback_share"] == 0.5
    ratios = (expected - mu).double().exp()
    if minibatches == 1:
        assert m["is/mean_weight"] == pytest.approx(float(ratios.mean()), abs=1e-5)


def test_excluded_tokens_need_no_version(ring: Ring) -> None:
    """The start is needed for no token in the loss: no pass for the excluded ones of lag 0."""
    b = batch(ring)
    for sample in b.samples[1::2]:
        sample.mask = bytes([1] * 4 + [0] * 4)
    c = core(ring, **VERSION)
    packed = c._pack_batch(b)
    assert packed.proximal is not None and packed.proximal.isfinite().all()
    assert c.train(b)["is/mean_weight"] == pytest.approx(math.exp(-NOISE), abs=1e-5)


def test_the_loss_with_versions_by_hand() -> None:
    """float64: weights pi_v / mu, at most 2, the clip of pi_theta / pi_v; the last is unknown."""
    tables = {"model": {"path": "m"}, "task": {"name": "sort"}, "advantage": {"name": "reinforce"}}
    config = load.build({**tables, "method": "tis-version"})
    mu, version, start, theta = (
        torch.tensor(x, dtype=torch.float64)
        for x in (
            [-1.0, -1.5, -2.0, -0.7, -2.1],
            [-1.1, -1.3, -2.2, -0.7, math.nan],
            [-1.4, -1.0, -2.0, -0.9, -1.3],
            [-1.3, -0.9, -2.1, -0.8, -1.2],
        )
    )
    adv = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5], dtype=torch.float64)
    proximal_by_hand = [-1.1, -1.3, -2.2, -0.7, -1.3]
    lag = torch.tensor([2, 2, 1, 0, 3])
    b = answers([3, 2], [1, 0], behavior=mu, token_lag=lag, version=version)
    b.proximal = loss.choose_proximal(b, config, start)
    assert b.proximal is not None and b.proximal.tolist() == proximal_by_hand
    prep = loss.prepare(b, config, advantages=adv)
    assert prep.metrics["is/fallback_share"] == pytest.approx(0.2)
    step = loss.begin_step(prep, torch.arange(2))
    lp = theta.clone().requires_grad_()
    total, _ = loss.compute_micro_loss(prep, step, torch.arange(5), lp)
    total.backward()
    gradient = []
    for m, p, t, a in zip(mu.tolist(), proximal_by_hand, theta.tolist(), adv.tolist(), strict=True):
        r = math.exp(t - p)
        cut = (a > 0 and r > 1.2) or (a < 0 and r < 0.8)
        gradient.append(0.0 if cut else -min(math.exp(p - m), 2) * r * a / 5)
    assert gradient[1] == 0, "the clip sees the lag"
    assert lp.grad is not None and lp.grad.tolist() == pytest.approx(gradient, abs=1e-14)
