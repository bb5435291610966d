"""Trajectories to tensors and back to micro-batches: every field at its own place, and no cut that
breaks its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import Batch, Trajectory
from asyncrl.models.trainer import ROWS
from learner.batch import PackedBatch, pack, split_micro_batches


def answer(
    ticket: int,
    sample: int,
    prompt: list[int],
    tokens: list[int],
    *,
    reward: float = 0.5,
    mask: list[int] | None = None,
    finish: str = "stop",
    temperature: float = 1.0,
    token_rewards: list[float] | None = None,
) -> Trajectory:
    lp = np.array([-0.5 * t for t in tokens], "<f4").tobytes()
    return Trajectory(
        ticket,
        sample,
        0,
        np.array(prompt, "<i4").tobytes(),
        np.array(tokens, "<i4").tobytes(),
        lp,
        bytes(mask or [1] * len(tokens)),
        [],
        reward,
        {},
        finish,
        temperature,
        token_rewards=b"" if token_rewards is None else np.array(token_rewards, "<f4").tobytes(),
    )


def batch(samples: list[Trajectory], runs: list[list[tuple[int, int, int]]] | None = None) -> Batch:
    runs = runs or [[(0, s.length, 0)] for s in samples]
    return Batch(1, 0, samples, [0] * len(samples), [0] * len(samples), runs, {}, 9, {})


SAMPLES = [
    answer(7, 0, [1, 2], [3, 4, 5], reward=1.0, mask=[1, 0, 1], temperature=0.5, finish="length"),
    answer(7, 1, [1, 2], [6], reward=-2.0),
    answer(5, 0, [8], [9, 10], reward=0.25, temperature=2.0),
    answer(7, 2, [1, 2], [11, 12, 13, 14], reward=3.0, finish="length"),
]
RUNS = [[(0, 2, 4), (2, 3, 1)], [(0, 1, 2)], [(0, 2, 0)], [(0, 1, 3), (1, 4, 5)]]


def test_every_field_lies_at_its_tokens_place() -> None:
    p = pack(batch(SAMPLES, RUNS))
    assert [x.tolist() for x in p.prompts] == [[1, 2], [1, 2], [8], [1, 2]]
    assert [x.tolist() for x in p.responses] == [[3, 4, 5], [6], [9, 10], [11, 12, 13, 14]]
    assert p.group_of == [0, 0, 1, 0]
    assert p.places == [0, 1, 2, 3]
    assert p.offsets.tolist() == [0, 3, 4, 6, 10]
    assert p.temperature.tolist() == [0.5, 1, 2, 1]
    loss = p
    assert loss.seq.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    assert loss.token_lag.tolist() == [4, 4, 1, 2, 0, 0, 3, 5, 5, 5]
    assert loss.behavior.tolist() == [-0.5 * t for t in (3, 4, 5, 6, 9, 10, 11, 12, 13, 14)]
    assert loss.behavior.dtype == torch.float32
    assert loss.mask.tolist() == [True, False] + [True] * 8
    assert loss.rewards.tolist() == [1, -2, 0.25, 3]
    assert loss.groups.tolist() == [0, 0, 1, 0]
    assert loss.truncated.tolist() == [True, False, False, True]
    assert loss.greedy is None
    assert loss.token_rewards is None
    assert loss.steps is None
    assert p.find_token_positions([2, 0]).tolist() == [4, 5, 0, 1, 2]
    assert p.find_token_positions([3]).tolist() == [6, 7, 8, 9]
    assert p.to_device(torch.device("cpu")) is p


def test_the_first_of_a_group_is_left_out_where_it_is_the_baseline() -> None:
    p = pack(batch(SAMPLES, RUNS), greedy=True)
    assert p.places == [1, 3]
    assert [len(r) for r in p.responses] == [1, 4]
    assert p.group_of == [0, 0]
    assert p.offsets.tolist() == [0, 1, 5]
    loss = p
    assert loss.token_lag.tolist() == [2, 3, 5, 5, 5]
    assert loss.rewards.tolist() == [-2, 3]
    assert loss.truncated.tolist() == [False, True]
    assert loss.greedy is not None
    assert loss.greedy_lengths is not None
    assert loss.greedy_truncated is not None
    assert loss.greedy.tolist() == [1, 1]
    assert loss.greedy_lengths.tolist() == [2, 2]
    assert loss.greedy_truncated.tolist() == [True, True]


def test_rewards_per_token_of_those_that_have_them_and_of_those_that_do_not() -> None:
    """Numbers for every token: steps end where one is not 0, and at the end; numbers for some:
    there alone; none: the reward on the last."""
    nan = float("nan")
    samples = [
        answer(1, 0, [1], [2, 3, 4], token_rewards=[0, 2, 0]),
        answer(1, 1, [1], [2, 3, 4], token_rewards=[nan, 0, nan]),
        answer(1, 2, [1], [2, 3], reward=4.0),
        answer(1, 3, [1], [], token_rewards=[]),
    ]
    loss = pack(batch(samples))
    assert loss.token_rewards is not None
    assert loss.token_rewards.tolist() == [0, 2, 0, 0, 0, 0, 0, 4]
    assert loss.token_rewards.dtype == torch.float32
    assert loss.steps is not None
    assert loss.steps.tolist() == [False, True, True, False, True, False, False, True]
    with pytest.raises(AsyncrlError, match="ticket 1, sample 0: 2 token rewards for 3 tokens"):
        pack(batch([answer(1, 0, [1], [2, 3, 4], token_rewards=[0, 2])]))


def packed(lengths: list[tuple[int, int]]) -> PackedBatch:
    return pack(batch([answer(i, 0, [1] * p, [2] * r) for i, (p, r) in enumerate(lengths)]))


def test_micro_batches_by_group_share_their_prompts() -> None:
    lengths = {(0, 0): 2, (0, 1): 9, (1, 0): 3, (1, 1): 5, (2, 0): 1, (2, 1): 4}
    p = pack(batch([answer(*name, [7], [2] * n) for name, n in lengths.items()]))
    both = {"by_group": True}
    assert split_micro_batches(p, range(6), 10**6, rows=2, **both) == [[4, 5], [2, 3], [0, 1]]
    assert split_micro_batches(p, range(6), 10**6, rows=3, **both) == [[4, 5, 2], [3, 0, 1]]
    # the widest so far bounds the padding: 4 rows of 6, then 2 of 10
    assert split_micro_batches(p, range(6), 24, **both) == [[4, 5, 2, 3], [0, 1]]
    assert split_micro_batches(p, range(6), 23, **both) == [[4, 5, 2], [3, 0], [1]]
    assert split_micro_batches(p, [1, 5, 4], 10**6, **both) == [[4, 5, 1]]
    # a group stands by its longest, wherever that comes: 9 and 2, then 5 and 3
    assert split_micro_batches(p, [1, 0, 3, 2], 10**6, rows=2, **both) == [[2, 3], [0, 1]]


def test_micro_batches_are_sorted_by_length_and_hold_their_padded_tokens() -> None:
    p = packed([(2, 3), (1, 1), (2, 2), (1, 4), (1, 3)])  # 5, 2, 4, 5, 4 tokens
    assert split_micro_batches(p, range(5), 10**6) == [[1, 2, 4, 0, 3]]
    got = split_micro_batches(p, range(5), 12)
    assert got == [[1, 2, 4], [0, 3]]  # 3 rows of 4 fit, 4 of 5 do not
    assert split_micro_batches(p, range(5), 11) == [[1, 2], [4, 0], [3]]
    assert split_micro_batches(p, range(5), 1) == [[1], [2], [4], [0], [3]]  # one at least
    assert split_micro_batches(p, range(5), 10**6, rows=2) == [[1, 2], [4, 0], [3]]
    assert split_micro_batches(p, [3, 1], 10**6) == [[1, 3]] and split_micro_batches(p, [], 5) == []
    many = packed([(1, 1)] * (ROWS + 1))
    assert [len(m) for m in split_micro_batches(many, range(ROWS + 1), 10**6)] == [ROWS, 1]
    assert ROWS == 96
