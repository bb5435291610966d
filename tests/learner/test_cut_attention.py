"""Long rows of packed attention are cut into runs of queries over the keys they see: the results
are those of rows that are not cut, in exact mode bit for bit, and no more is computed than that."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.models import packed_attention, policy
from asyncrl.models.packed_attention import QueryBlock, cut_queries


def test_short_rows_are_not_cut() -> None:
    assert cut_queries(64, 76, 12, "cpu") == [QueryBlock(0, 64, 76)]
    assert cut_queries(0, 12, 12, "cpu") == [QueryBlock(0, 0, 12)]
    assert cut_queries(256, 268, 12, "cuda") == [QueryBlock(0, 256, 268)]


def test_a_cut_sees_the_keys_up_to_its_last_query_rounded_up_and_the_last_one_all() -> None:
    # 65 queries in two runs of 33 rounded up to 48; 12 before: 60 keys, rounded up to 64
    assert cut_queries(65, 77, 12, "cpu") == [QueryBlock(0, 48, 64), QueryBlock(48, 65, 77)]
    assert cut_queries(257, 269, 12, "cuda") == [QueryBlock(0, 144, 160), QueryBlock(144, 257, 269)]
    # at most 32 runs, each a multiple of 16
    many = cut_queries(8200, 8200, 0, "cpu")
    assert [cut.end - cut.first for cut in many] == [272] * 30 + [40]
    assert [cut.columns for cut in many] == [272 * (at + 1) for at in range(30)] + [8200]
    # never more keys than there are
    assert cut_queries(96, 100, 30, "cpu") == [QueryBlock(0, 48, 80), QueryBlock(48, 96, 100)]
    assert cut_queries(96, 96, 60, "cpu") == [QueryBlock(0, 48, 96), QueryBlock(48, 96, 96)]
    # and never more queries than asked for, down to a multiple of 16
    assert cut_queries(64, 64, 0, "cpu", 64) == [QueryBlock(0, 64, 64)]
    assert cut_queries(64, 64, 0, "cpu", 47) == [QueryBlock(0, 32, 32), QueryBlock(32, 64, 64)]
    got = cut_queries(40, 40, 0, "cpu", 1)
    assert got == [QueryBlock(0, 16, 16), QueryBlock(16, 32, 32), QueryBlock(32, 40, 40)]
    assert {cut.end - cut.first for cut in cut_queries(32_000, 32_000, 0, "cpu", 100)} == {96, 32}


def samples(*shape: tuple[int, int]) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """Prompts, responses and groups: two answers for each (prompt's length, answers' length)."""
    r = np.random.default_rng(0)
    prompts, responses, groups = [], [], []
    for group, (prompt, length) in enumerate(shape):
        ids = r.integers(3, 23, prompt)
        for less in (0, 3):
            prompts.append(ids)
            responses.append(r.integers(3, 23, length - less))
            groups.append(group)
    return prompts, responses, groups


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> policy.PolicyModel:
    """Four heads that share two of keys."""
    path: Path = tmp_path_factory.mktemp("cut") / "m"
    return policy.build_model(path, "0123456789abcdefghij", max_positions=1024, kv_heads=2)


def outcome(model: policy.PolicyModel, of: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    prompts, responses, groups = of
    model.hf.zero_grad()
    out = model.logprobs(prompts, responses, torch.ones(len(prompts)), groups=groups)
    weight = torch.linspace(-1, 1, len(out.logprobs))
    (out.logprobs * weight).sum().backward()
    return out.logprobs.detach(), [p.grad.clone() for p in model.hf.parameters() if p.requires_grad]


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
@pytest.mark.parametrize(
    "of",
    [
        samples((12, 300), (40, 290)),
        samples((200, 40)),  # a long prompt, short answers
        samples((150, 700), (20, 30)),
    ],
    ids=["answers", "prompt", "both"],
)
def test_cut_rows_give_what_whole_rows_give(
    model: policy.PolicyModel, monkeypatch: pytest.MonkeyPatch, of: Any, exact: bool
) -> None:
    model.exact = exact
    try:
        cut, of_cut = outcome(model, of)
        monkeypatch.setattr(packed_attention, "UNCUT", {"cpu": 10**6})
        whole, of_whole = outcome(model, of)
    finally:
        model.exact = False
    if exact:
        assert torch.equal(cut, whole)
    assert torch.allclose(cut, whole, atol=2e-6)
    for ours, theirs in zip(of_cut, of_whole, strict=True):
        assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm()) + 1e-7


def test_half_of_the_scores_of_long_answers_are_made(
    model: policy.PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    plain = torch.softmax

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(x.numel())
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(torch, "softmax", counted)
    of = samples((12, 800))
    outcome(model, of)
    cut = sum(made)
    made.clear()
    monkeypatch.setattr(packed_attention, "UNCUT", {"cpu": 10**6})
    outcome(model, of)
    assert cut < 0.56 * sum(made)
