"""Any transformers causal LM directory: GPT-2 and a Gemma, which have no packed forward, through
engine, learner and a whole run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from any_model_kit import directory
from engine_kit import request, run
from process_kit import Ended

from actors.engine_generic import GenericEngine
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.tasks.synthetic import TASKS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_engine_and_learner_agree_with_transformers(family: str, tmp_path: Path) -> None:
    path = directory(tmp_path, family, "abcdefgh")
    model = policy.load_policy(path, "float32", "cpu")
    engine = GenericEngine(policy.load_policy(path, "float32", "cpu"), slots=4, context=64)
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
    requests = [
        request(t, 0, [3 + t] * (1 + t), 4 + t, temperature=0.7 if t % 2 else 1.0) for t in range(6)
    ]
    answers = run(engine, requests)  # type: ignore[arg-type]
    assert len(answers) == 6
    assert engine.steps_made >= max(len(a.tokens) for a in answers.values())
    for r in requests:
        a = answers[r.key]
        ids = torch.from_numpy(np.concatenate([a.prompt, a.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = (
                model.hf(input_ids=ids).logits[0, len(a.prompt) - 1 : -1].float() / r.temperature
            )
        want = torch.log_softmax(logits, -1).gather(1, ids[0, len(a.prompt) :, None])[:, 0]
        assert np.allclose(a.logprobs, want.numpy(), atol=1e-5)
        ours = model.logprobs(
            [a.prompt], [a.tokens], torch.tensor([r.temperature]), groups=[0], want_entropy=False
        ).logprobs
        assert torch.allclose(ours.detach(), want, atol=1e-5)


def test_a_whole_run_of_another_architecture(asyncrl: Callable[..., Ended], tmp_path: Path) -> None:
    path = directory(tmp_path, "gpt2", TASKS["sort"].symbols)
    done = asyncrl(
        "run",
        f"model.path={str(path)!r}",
        "model.warm_start=false",
        "learner.steps=3",
        "learner.groups=4",
        "learner.group_size=4",
        "generator.slots=16",
        "generator.max_new_tokens=8",
        "evaluation.prompts=8",
        "evaluation.final_prompts=8",
        "evaluation.ood_prompts=0",
        "name='other'",
    )
    assert done.code == 0, done.err[-3000:]
    assert done.json["steps"] == 3 and done.json["mismatch_k3_max"] < 1e-9
    trained = transformers.AutoModelForCausalLM.from_pretrained(
        Path(done.json["run_dir"]) / "model"
    )
    assert type(trained).__name__ == "GPT2LMHeadModel"


def test_ones_own_prompts_and_reward(asyncrl: Callable[..., Ended]) -> None:
    """The example of docs/rewards.md: configs/examples, its parts of the reward in the metrics."""
    done = asyncrl(
        "run",
        "learner.steps=3",
        "task.name='file'",
        "task.prompts='configs/examples/prompts.jsonl'",
        "evaluation.final_prompts=20",
        "evaluation.prompts=20",
        "evaluation.ood_prompts=0",
        "reward.function='configs.examples.my_reward:reward'",
        "reward.workers=1",
        "reward.deadline_s=600.0",
        "name='own'",
    )
    assert done.code == 0, done.err[-3000:]
    rows = [
        json.loads(x)
        for x in (Path(done.json["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    ]
    parts = {k for r in rows for k in r if k.startswith("reward_part/")}
    assert parts and done.json["failures"] == {}
