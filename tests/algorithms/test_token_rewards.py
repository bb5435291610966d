"""Rewards per token, from the reward function to the gradient: through the learner's own step, and
in a run with a file of prompts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_kit import batch, core
from models_kit import model_fixture
from shared_reward import digit

from actors import rewards
from actors.reward_worker import call
from asyncrl.algorithms import loss
from asyncrl.config import load
from asyncrl.contract.messages import Batch, Prompt
from asyncrl.experiments import serial
from learner.step import LearnerCore

model_dir = model_fixture("0123456789=:,#", layers=1)


def rewarded(*, every: int = 1) -> Batch:
    """1 on the first token where it is below 8, 1/2 on the last one; only every `every`-th answer
    has rewards per token."""
    b = batch()
    for i, s in enumerate(b.samples):
        if i % every == 0:
            given = np.zeros(s.length, "<f4")
            given[0] += s.reward
            given[-1] += 0.5
            s.token_rewards = given.tobytes()
    return b


def advantages_of(c: LearnerCore, b: Batch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """[N], as the learner's own step prepared them."""
    seen: list[loss.PreparedBatch] = []
    real = loss.prepare

    def prepare(*args: Any, **keys: Any) -> loss.PreparedBatch:
        seen.append(real(*args, **keys))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(loss, "prepare", prepare)
        c.train(b)
    return seen[0].advantage


def to_go(b: Batch) -> np.ndarray:
    """Sum of each answer's rewards from every token on; its one reward where it has no others."""
    out = []
    for s in b.samples:
        if s.token_rewards:
            given = np.frombuffer(s.token_rewards, "<f4")
        else:
            given = np.eye(s.length, dtype="<f4")[-1] * s.reward
        out.append(given[::-1].cumsum()[::-1])
    return np.concatenate(out)


@pytest.mark.parametrize("every", [1, 3])
def test_they_reach_gradients(model_dir: Path, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gae with V = 0 and lambda 1: the rewards to go; reinforce_pp: these, whitened; grpo: the
    normalised steps to go."""
    b = rewarded(every=every)
    wanted = to_go(b)
    gae = core(model_dir, advantage={"name": "gae", "lam": 1.0}, value={"init": "zeros"})
    for s in b.samples:
        s.finish = "stop"
    assert np.allclose(advantages_of(gae, b, monkeypatch), wanted, atol=1e-6)
    pp = core(model_dir, advantage={"name": "reinforce_pp"})
    assert np.allclose(
        advantages_of(pp, b, monkeypatch), (wanted - wanted.mean()) / wanted.std(ddof=1), atol=1e-5
    )
    steps = [(i // 4, at, r) for i, s in enumerate(b.samples) for at, r in by_step(s)]
    values: dict[int, list[float]] = {}
    for group, _, r in steps:
        values.setdefault(group, []).append(r)
    out = []
    for i, s in enumerate(b.samples):
        mean, std = np.mean(values[i // 4]), np.std(values[i // 4], ddof=1)
        given = np.zeros(s.length)
        for at, r in by_step(s):
            given[at] = (r - mean) / (std + 1e-4) if std > 1e-6 else 0.0
        out.append(given[::-1].cumsum()[::-1])
    grpo = core(model_dir, advantage={"name": "grpo"})
    assert np.allclose(advantages_of(grpo, b, monkeypatch), np.concatenate(out), atol=1e-4)
    moved = weights(grpo)
    scalar = core(model_dir, advantage={"name": "grpo"})
    scalar.train(batch())
    assert not torch.equal(moved, weights(scalar)), "the gradient is another"


def by_step(s: Any) -> list[tuple[int, float]]:
    if not s.token_rewards:
        return [(s.length - 1, s.reward)]
    given = np.frombuffer(s.token_rewards, "<f4")
    return [(t, float(r)) for t, r in enumerate(given) if r != 0 or t == s.length - 1]


def weights(c: LearnerCore) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in c.model.hf.parameters()])


def test_what_uses_none_is_said_once(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c = core(model_dir, advantage={"name": "rloo"})
    plain = core(model_dir, advantage={"name": "rloo"})
    for n in range(2):
        b = rewarded()
        c.train(Batch(1, n, b.samples, [0] * 16, [0] * 16, b.token_lags, {}, 4, {}))
    said = capsys.readouterr().err
    assert said.count("uses one reward per sample") == 1
    assert (
        "learner: advantage.name = rloo uses one reward per sample, so the reward function's "
        "token_rewards are not trained on; reinforce_pp, gae, grpo, otb, function use them\n"
    ) in said
    plain.train(batch())
    plain.train(Batch(1, 1, batch().samples, [0] * 16, [0] * 16, batch().token_lags, {}, 4, {}))
    assert torch.equal(weights(c), weights(plain))
    core(model_dir, advantage={"name": "grpo"}).train(rewarded())
    assert not capsys.readouterr().err


def first_of_two(prompt: Prompt, text: str, tokens: list[int]) -> dict[str, Any]:
    """1 for the first token, nothing of the others; the answer's own reward is its length."""
    return {"reward": float(len(tokens)), "token_rewards": [1.0, *[None] * (len(tokens) - 1)]}


async def later(prompt: Prompt, text: str, *, tokens: list[int]) -> float:
    return float(sum(tokens))


def test_a_function_with_a_parameter_for_them_is_given_the_token_ids() -> None:
    p = Prompt(0, "x")
    reward, parts, per_token = call(first_of_two, p, "ab", [5, 6, 7])
    assert reward == 3 and parts == {"reward": 3} and per_token is not None
    assert per_token[0] == 1.0 and all(x != x for x in per_token[1:]) and len(per_token) == 3
    assert call(later, p, "ab", [5, 6]) == (11.0, {}, None)
    assert call(lambda prompt, text: len(text), p, "ab", [5, 6, 7]) == (2.0, {}, None)


def test_in_a_run_with_prompts_and_a_reward_of_ones_own(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer, the engine and the learner's step in one process: every step is an answer's first
    token, so only that one is trained."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "{n}:{n + 1}=", "answer": "{n}"}}\n' for n in range(9))
    )
    seen: list[tuple[Batch, loss.PreparedBatch]] = []
    prepare, train = loss.prepare, LearnerCore.train

    def prepared(*args: Any, **keys: Any) -> loss.PreparedBatch:
        seen[-1] = (seen[-1][0], prepare(*args, **keys))
        return seen[-1][1]

    def trained(self: LearnerCore, b: Batch) -> dict[str, float]:
        seen.append((b, None))  # type: ignore[arg-type]
        return train(self, b)

    monkeypatch.setattr(loss, "prepare", prepared)
    monkeypatch.setattr(LearnerCore, "train", trained)
    text = (
        "reward.function='shared_reward:digit' reward.workers=0 advantage.name=grpo "
        "learner.steps=2 learner.groups=2 learner.group_size=4 generator.slots=8 "
        "generator.max_new_tokens=6 evaluation.every=0 evaluation.prompts=1 "
        "evaluation.final_prompts=1 evaluation.ood_prompts=0 staleness.max_lag=0 task.name=file "
        "reward.deadline_s=3600.0"
    )
    sets = (
        f"model.path='{model_dir}'",
        f"task.prompts='{tmp_path / 'prompts.jsonl'}'",
        *text.split(),
    )
    found = serial.run_serial(load.load("configs/demo.toml", sets), 3)
    assert "failed" not in found and len(seen) == 2
    for b, prep in seen:
        firsts = [np.frombuffer(s.token_rewards, "<f4")[0] for s in b.samples]
        assert all(len(s.token_rewards) == 4 * s.length for s in b.samples)
        at = 0
        for i, s in enumerate(b.samples):
            group = np.array(
                [r for r, t in zip(firsts, b.samples, strict=True) if t.ticket == s.ticket]
            )
            wanted = (firsts[i] - group.mean()) / (group.std(ddof=1) + 1e-4)
            assert float(prep.advantage[at]) == pytest.approx(wanted, abs=1e-4)
            assert not prep.advantage[at + 1 : at + s.length].any()
            at += s.length
    assert any(float(prep.advantage.abs().max()) > 0.1 for _, prep in seen)


@pytest.mark.parametrize(("deadline_s", "wanted"), [(1.0, 60.0), (600.0, 600.0)])
def test_a_functions_import_has_a_calls_time_or_a_minute(deadline_s: float, wanted: float) -> None:
    sets = ("reward.function='shared_reward:digit'", f"reward.deadline_s={deadline_s}")
    pool = rewards._RewardPool(load.load("configs/demo.toml", sets))
    try:
        (worker,) = pool.workers
        assert pool.compute_deadline(worker) == worker.since + wanted
        worker.ready = True
        assert pool.compute_deadline(worker) == np.inf  # it has nothing to do
    finally:
        pool.end()


def test_a_callable_without_a_signature_is_asked_the_plain_way() -> None:
    from actors.reward_worker import takes_tokens

    assert not takes_tokens(min) and takes_tokens(digit)
