"""Flash attention of long rows: the results are those of padded rows, no answer changes another's,
and what is stored grows with the tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_step_kit import batch, core
from pretend_gpu import pretend_gpu, waits

from asyncrl.models import packed_attention, policy


def samples(*shape: tuple[int, int]) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """Prompts, responses and groups: three answers for each (prompt's length, longest answer), one
    of one token; the groups' answers are mixed."""
    r = np.random.default_rng(0)
    rows = []
    for group, (prompt, length) in enumerate(shape):
        ids = r.integers(3, 23, prompt)
        rows += [(n, ids, r.integers(3, 23, n), group) for n in (length, 1, max(1, length - 3))]
    rows.sort(key=lambda row: -row[0])
    return [row[1] for row in rows], [row[2] for row in rows], [row[3] for row in rows]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four heads that share two of keys."""
    made: Path = tmp_path_factory.mktemp("flash") / "m"
    policy.build_model(made, "0123456789abcdefghij", max_positions=1024, kv_heads=2)
    return made


def outcome(model: policy.PolicyModel, of: Any) -> list[torch.Tensor]:
    """Log-probabilities, then gradients."""
    prompts, responses, groups = of
    model.hf.zero_grad()
    out = model.logprobs(prompts, responses, torch.ones(len(prompts)), groups=groups)
    (out.logprobs * torch.linspace(-1, 1, len(out.logprobs)).to(out.logprobs)).sum().backward()
    return [out.logprobs.detach().cpu(), *(p.grad.cpu() for p in model.hf.parameters())]


@pytest.mark.parametrize(
    "of",
    [samples((12, 300), (40, 290)), samples((200, 40)), samples((150, 400), (20, 30), (70, 1))],
    ids=["answers", "prompt", "both"],
)
def test_it_gives_what_padding_gives(path: Path, monkeypatch: pytest.MonkeyPatch, of: Any) -> None:
    model = policy.load_policy(path)
    flash = outcome(model, of)
    alone = outcome(model, tuple(part[:1] for part in of))[0]
    assert torch.equal(flash[0][: len(alone)], alone)  # and an answer is what it is by itself
    monkeypatch.setattr(packed_attention, "ROWS_UP_TO", 10**6)
    for ours, theirs in zip(flash, outcome(model, of), strict=True):
        assert float((ours - theirs).norm()) <= 2e-6 * float(theirs.norm())


@pytest.mark.parametrize("of", [samples((12, 90), (5, 70)), samples((9, 4))], ids=["long", "short"])
def test_a_gpus_calls_give_what_the_cpus_do(path: Path, of: Any) -> None:
    """In bfloat16, for rows of any length."""
    here = outcome(policy.load_policy(path, "bfloat16"), of)
    with pretend_gpu():
        there = outcome(policy.load_policy(path, "bfloat16", "cuda"), of)
    for ours, theirs in zip(here, there, strict=True):
        assert float((ours - theirs).float().norm()) <= 0.02 * float(theirs.float().norm())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_only_a_batch_waits_for_the_gpu_and_no_micro_batch(path: Path, dtype: str) -> None:
    counts = []
    with pretend_gpu():
        for tokens in (40, 1 << 12):
            model = {"device": "cuda", "dtype": dtype}
            one = core(path, model=model, learner={"micro_batch_tokens": tokens})
            one.train(batch(0))
            waits.clear()
            one.train(batch(1))
            counts.append(len(waits))
    assert counts == [5, 5], waits


def test_what_is_stored_grows_with_the_tokens(path: Path) -> None:
    model = policy.load_policy(path)
    parameters = {p.untyped_storage().data_ptr() for p in model.hf.parameters()}

    def count(length: int) -> int:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            ids = np.ones(length, np.int32)
            out = model.logprobs([ids], [ids], torch.ones(1))
        assert out.logprobs.requires_grad
        return sum(size for place, size in kept.items() if place not in parameters)

    short, long = count(100), count(400)
    assert long < 4.1 * short
