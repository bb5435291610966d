"""learner.gradient_checkpointing: the same bits, each layer computed again in the backward pass."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_step_kit import batch, core, weights
from models_kit import model_fixture

from asyncrl.contract.errors import ConfigError
from asyncrl.models import packed_forward, policy

LAYERS = 3


model_dir = model_fixture("abcdefgh", layers=LAYERS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a layer was computed: in a forward pass, and within a backward one."""
    count: Counter[str] = Counter()
    for name in ("apply_block", "_apply_fixed_block"):
        plain = getattr(packed_forward, name)

        def counted(*args: Any, plain: Any = plain, **more: Any) -> torch.Tensor:
            count["backward" if torch._C._current_graph_task_id() != -1 else "forward"] += 1
            return plain(*args, **more)

        monkeypatch.setattr(packed_forward, name, counted)
    return count


@pytest.mark.parametrize("exact", [False, True])
def test_packing_has_the_same_bits(exact: bool, model_dir: Path, calls: Counter[str]) -> None:
    model = policy.load_policy(model_dir, "float32", "cpu")
    model.exact = exact
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 8, 5).astype(np.int32)] * 4
    answers = [draw.integers(2, 8, n).astype(np.int32) for n in (4, 1, 9, 2)]
    found = []
    for again in (False, True):
        model.recompute = again
        model.hf.zero_grad()
        calls.clear()
        out = model.logprobs(
            prompts, answers, torch.ones(4), groups=[0] * 4, want_entropy=True, want_hidden=True
        )
        assert out.entropy is not None and out.hidden is not None
        (out.logprobs.sum() + 0.3 * out.entropy.sum() + 0.1 * out.hidden.sum()).backward()
        assert calls == {"forward": LAYERS} | ({"backward": LAYERS} if again else {})
        grads = [p.grad.clone() for p in model.hf.parameters()]
        found.append([out.logprobs, out.entropy, out.hidden, *grads])
        calls.clear()
        with torch.no_grad():
            model.logprobs(prompts, answers, torch.ones(4), groups=[0] * 4)
        assert calls == {"forward": LAYERS}
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"lora": {"rank": 2}},
        {"advantage": {"name": "gae"}, "value": {"trunk": "own"}},
        {"kl": {"loss": {"coefficient": 0.1, "estimator": "k3"}}},
    ],
    ids=str,
)
def test_bits_are_the_same(sections: dict[str, Any], model_dir: Path, calls: Counter[str]) -> None:
    found = []
    for again in (False, True):
        one = core(model_dir, learner={"gradient_checkpointing": again}, **sections)
        calls.clear()
        metrics = one.train(batch())
        # the critic's trunk has a backward pass of its own
        passes = 2 if "value" in sections else 1
        assert calls["backward"] == (LAYERS * passes if again else 0)
        shown = {k: v for k, v in metrics.items() if not k.startswith(("time/", "perf/"))}
        trunk = [] if one.critic is None else [p.detach() for p in one.critic.trainer.parameters]
        found.append((shown, [weights(one), *trunk]))
    (plain, before), (again_metrics, after) = found
    assert {k for k, v in plain.items() if again_metrics[k] != v} <= {"memory/peak_mb"}
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def told(module: torch.nn.Module) -> list[bool]:
    """For each later call of `module`: was it within a backward pass?"""
    within: list[bool] = []
    module.register_forward_hook(lambda *_: within.append(torch._C._current_graph_task_id() != -1))
    return within


def test_transformers_own_modules_do_so_too(model_dir: Path) -> None:
    """As ZeRO stage 3 runs them; one that cannot says so."""
    found = []
    for again in (False, True):
        model = policy.load_policy(model_dir, "float32", "cpu", with_modules=True)
        model.fast, model.one_pass = None, True
        mlp = model.hf.model.layers[0].mlp
        within = told(mlp.gate_proj)
        if again:
            policy.recompute_modules(model.hf)
        prompts = [np.array([2, 3, 4], np.int32)] * 2
        answers = [np.array([5, 6, 7, 3], np.int32), np.array([4], np.int32)]
        out = model.logprobs(prompts, answers, torch.ones(2))
        out.logprobs.sum().backward()
        assert within == [False, True] if again else within == [False]
        assert not mlp.training  # nothing in a layer trains otherwise than before
        found.append([out.logprobs, *(p.grad for p in model.hf.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    class Cannot(torch.nn.Module):
        def gradient_checkpointing_enable(self, **_: Any) -> None:
            raise ValueError("Cannot does not support gradient checkpointing.")

    with pytest.raises(ConfigError, match=r"gradient_checkpointing: .* set it to false"):
        policy.recompute_modules(Cannot())
