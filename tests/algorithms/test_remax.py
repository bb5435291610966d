"""remax: the first sample of every group is greedy, a baseline for the others, and never trained
on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Batch, SamplingSettings
from asyncrl.experiments import serial
from asyncrl.models.policy import build_model, load_policy
from learner.batch import pack
from learner.step import LearnerCore


def test_only_the_first_sample_of_a_group_is_greedy() -> None:
    s = SamplingSettings(1.0, 1.0, 5, 8, True)
    assert [s.get_top_k(i) for i in range(3)] == [1, 5, 5]
    assert [SamplingSettings().get_top_k(i) for i in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("exact", ["false", "true"])
def test_in_a_real_run_the_baseline_is_the_likeliest_answer_and_left_out_of_the_loss(
    exact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model(tmp_path / "m", "0123456789=:,#", hidden=32, layers=1)
    seen: list[Batch] = []
    mismatch: list[float] = []
    real = LearnerCore.train

    def train(self: LearnerCore, batch: Batch) -> dict[str, float]:
        seen.append(batch)
        row = real(self, batch)
        mismatch.append(row["mismatch/max_at_lag_0"])
        return row

    monkeypatch.setattr(LearnerCore, "train", train)  # looks on; the run's own step does the work
    text = (
        "learner.steps=2 learner.groups=3 learner.group_size=4 generator.slots=12 "
        "generator.max_new_tokens=6 evaluation.every=0 evaluation.final_prompts=4 "
        "evaluation.ood_prompts=0 staleness.max_lag=0"
    )
    small = text.split()
    config = load.load(
        "configs/demo.toml",
        [f"model.path='{tmp_path / 'm'}'", "advantage.name=remax", f"exact={exact}", *small],
    )
    serial.run_serial(config, 3)
    # the others are sampled from the whole distribution beside the greedy one
    assert max(mismatch) < 1e-5 and (exact == "false" or mismatch == [0.0, 0.0])
    first = seen[0]
    model = load_policy(tmp_path / "m", device="cpu")
    for s in first.samples:
        lp = np.frombuffer(s.behavior_logprobs, "<f4")
        if s.sample:
            assert float(lp.max()) < -0.1, "sampled from the whole distribution"
            continue
        assert np.all(lp == 0), "the likeliest token has probability 1 under top_k = 1"
        ids = torch.from_numpy(
            np.concatenate(
                [np.frombuffer(s.prompt_tokens, "<i4"), np.frombuffer(s.tokens, "<i4")]
            ).astype(np.int64)
        )
        logits = model.hf(input_ids=ids[None]).logits[0].detach()
        at = len(s.prompt_tokens) // 4 - 1
        assert torch.equal(logits[at : at + len(lp)].argmax(-1), ids[at + 1 :])
    packed = pack(first, greedy=True)
    assert len(packed.responses) == 3 * 3 and packed.greedy is not None
    baseline = {s.ticket: s.reward for s in first.samples if s.sample == 0}
    assert packed.greedy.tolist() == pytest.approx(
        [baseline[s.ticket] for s in first.samples if s.sample]
    )
    assert len(packed.token_lag) == sum(s.length for s in first.samples if s.sample)


def test_advantages_are_rewards_less_the_greedy_ones(tmp_path: Path) -> None:
    """The step equals that of `reinforce` without a baseline on rewards that had the greedy reward
    taken off by hand."""
    from critic_kit import batch, core

    build_model(tmp_path / "m", "0123456789=:,#", hidden=32, layers=1)
    a = core(tmp_path / "m", advantage={"name": "remax"})
    b = core(tmp_path / "m", advantage={"name": "reinforce", "baseline": "none"})
    whole, less = batch(), batch()
    baseline = {s.ticket: s.reward for s in whole.samples if s.sample == 0}
    keep = [i for i, s in enumerate(less.samples) if s.sample]
    for s in less.samples:
        s.reward -= baseline[s.ticket]
    less = Batch(
        1,
        0,
        [less.samples[i] for i in keep],
        [0] * len(keep),
        [0] * len(keep),
        [less.token_lags[i] for i in keep],
        {},
        4,
        {},
    )
    metrics, _ = a.train(whole), b.train(less)
    pairs = list(zip(a.model.hf.parameters(), b.model.hf.parameters(), strict=True))
    assert all(torch.equal(x, y) for x, y in pairs)
    assert metrics["reward/greedy"] == pytest.approx(sum(baseline.values()) / 4)
    assert {0.0, 1.0} == set(baseline.values()), "otherwise the baseline is a constant"


def test_a_baseline_alone_is_refused() -> None:
    sets = ["advantage.name=remax", "learner.group_size=1"]
    with pytest.raises(ConfigError, match="the first sample of a group is remax's greedy baseline"):
        load.load("configs/demo.toml", sets)
