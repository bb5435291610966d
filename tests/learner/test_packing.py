"""Trajectories to tensors and back to micro-batches: fields at their places, cuts within limits."""

import math

import numpy as np
import pytest
import torch
from algorithms_catalogue_kit import vec, yes
from surrogate_kit import covariance, term

from asyncrl.algorithms import diagnostics, loss, ratios
from asyncrl.algorithms.surrogates import DUAL, HIGH, LOW, choose_highest, sample_by_covariance
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
    assert p.group_of == [0, 0, 1, 0] and p.places == [0, 1, 2, 3]
    assert p.offsets.tolist() == [0, 3, 4, 6, 10] and p.temperature.tolist() == [0.5, 1, 2, 1]
    loss = p
    assert loss.seq.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    assert loss.token_lag.tolist() == [4, 4, 1, 2, 0, 0, 3, 5, 5, 5]
    assert loss.behavior.tolist() == [-0.5 * t for t in (3, 4, 5, 6, 9, 10, 11, 12, 13, 14)]
    assert loss.behavior.dtype == torch.float32 and loss.mask.tolist() == [True, False] + [True] * 8
    assert loss.rewards.tolist() == [1, -2, 0.25, 3] and loss.groups.tolist() == [0, 0, 1, 0]
    assert loss.truncated.tolist() == [True, False, False, True] and loss.greedy is None
    assert loss.token_rewards is None and loss.steps is None
    assert p.find_token_positions([2, 0]).tolist() == [4, 5, 0, 1, 2]
    assert p.find_token_positions([3]).tolist() == [6, 7, 8, 9]
    assert p.to_device(torch.device("cpu")) is p


def test_the_first_of_a_group_is_left_out_where_it_is_the_baseline() -> None:
    p = pack(batch(SAMPLES, RUNS), greedy=True)
    assert p.places == [1, 3] and [len(r) for r in p.responses] == [1, 4]
    assert p.group_of == [0, 0] and p.offsets.tolist() == [0, 1, 5]
    loss = p
    assert loss.token_lag.tolist() == [2, 3, 5, 5, 5] and loss.rewards.tolist() == [-2, 3]
    assert loss.truncated.tolist() == [False, True] and loss.greedy is not None
    assert loss.greedy_lengths is not None and loss.greedy_truncated is not None
    assert loss.greedy.tolist() == [1, 1] and loss.greedy_lengths.tolist() == [2, 2]
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
    assert loss.token_rewards.dtype == torch.float32 and loss.steps is not None
    assert loss.steps.tolist() == [False, True, True, False, True, False, False, True]


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


D = torch.float64
SEQ = torch.tensor([0, 0, 0, 2, 2])  # sample 1 has no token


def test_sums_means_and_maxima_of_answers_with_a_mask_and_an_empty_one() -> None:
    x, m = vec(1, -2, 40, 3, 5), yes(1, 1, 0, 1, 1)
    assert ratios.sum_by_sample(x, SEQ, 3).tolist() == [39, 0, 8]
    assert ratios.average_by_sample(x, m, SEQ, 3).tolist() == [-0.5, 0, 4]
    assert ratios.find_sample_max(x, m, SEQ, 3).tolist() == [1, -math.inf, 5]
    assert ratios.find_sample_max(vec(-3, -2, 9, -1, -4), m, SEQ, 3).tolist() == [-2, -math.inf, -1]
    assert float(ratios.average_masked(x, m)) == pytest.approx(7 / 4)
    assert float(ratios.average_masked(x, m & False)) == 0
    assert float(ratios.average_masked(vec(1, math.nan), yes(1, 0))) == 1
    assert float(ratios.average_masked(vec(6, 1), yes(1, 0))) == 6


def test_rows_and_back() -> None:
    rows = ratios.PaddedRows(SEQ)
    m = rows.pad(vec(1, 2, 3, 4, 5))
    assert m.tolist() == [[1, 2, 3], [4, 5, 0]] and rows.pack(m).tolist() == [1, 2, 3, 4, 5]
    assert rows.shape == (2, 3) and ratios.PaddedRows(SEQ[:0]).shape == (0, 0)
    assert ratios.PaddedRows(torch.tensor([4])).shape == (1, 1)


def test_running_sums_and_discounted_suffixes_stay_in_their_answer() -> None:
    x = vec(1, 2, 3, 4, 5)
    assert ratios.compute_running_sum(x, SEQ).tolist() == [1, 3, 6, 4, 9]
    assert ratios.sum_discounted_suffix(x, SEQ, 0.5).tolist() == [1 + 1 + 0.75, 3.5, 3, 6.5, 5]
    assert ratios.sum_discounted_suffix(x, SEQ, vec(0, 1, 9, 2, 9)).tolist() == [1, 5, 3, 14, 5]
    assert ratios.sum_discounted_suffix(x[:0], SEQ[:0], 0.5).tolist() == []


def test_the_value_loss_is_half_a_square_and_clipped_only_when_asked() -> None:
    v, r = vec(3.0, 0.0, 1.0, 2.0, 4.0).requires_grad_(True), vec(1.0, 2.0, 1.0, 0.0, 6.0)
    old = vec(1.0, 1.0, 3.0, 4.0, 1.0)
    for more in ((), (old,), (None, 0.5)):
        assert loss.compute_value_loss(v, r, *more).tolist() == [2.0, 2.0, 0.0, 2.0, 2.0]
    # within 0.5 of the old value: 1.5, 0.5, 2.5, 3.5, 1.5; the larger square of the two counts
    got = loss.compute_value_loss(v, r, old, 0.5)
    assert got.tolist() == pytest.approx([2.0, 2.0, 0.5 * 1.5**2, 0.5 * 3.5**2, 0.5 * 4.5**2])
    assert torch.autograd.grad(got.sum(), v)[0].tolist() == [2.0, -2.0, 0.0, 0.0, 0.0]


def test_explained_variance_by_hand() -> None:
    """Of returns 1, 3, 5 (variance 4): errors 1, 1, 1 leave none of it, errors 1, 0, -1 leave 1 of
    4; a mask of one says nothing."""
    r, m = vec(1, 3, 5, 99), yes(1, 1, 1, 0)
    assert float(diagnostics.compute_explained_variance(vec(0, 2, 4, 0), r, m)) == pytest.approx(1)
    got = float(diagnostics.compute_explained_variance(vec(0, 3, 6, 0), r, m))
    assert got == (pytest.approx(0.75))
    assert float(diagnostics.compute_explained_variance(vec(3, 3, 3, 0), r, m)) == pytest.approx(0)
    assert diagnostics.compute_explained_variance(r, r, yes(1, 0, 0, 0)).tolist() == 0.0
    # two are enough
    got = float(diagnostics.compute_explained_variance(vec(0, 3), vec(1, 3), yes(1, 1)))
    assert got == pytest.approx(1 - 0.5 / 2)
    flat = diagnostics.compute_explained_variance(vec(1, 2), vec(1, 1), yes(1, 1))
    assert math.isfinite(float(flat))  # returns without variance


def test_reductions_of_nothing_and_of_answers_that_have_nothing() -> None:
    seq = torch.tensor([0, 0, 1])
    for how in loss.REDUCTIONS:
        assert loss.compute_factors(yes(0, 0, 0), seq, 2, how).tolist() == [0, 0, 0]
    # one answer has a token
    values = loss.compute_factors(yes(1, 0, 0), seq, 2, "seq-mean-token-sum")
    assert values.tolist() == [1, 0, 0]
    values = loss.compute_factors(yes(1, 1, 0), seq, 2, "seq-mean-token-mean")
    assert values.tolist() == [0.5, 0.5, 0]
    got = loss.compute_factors(yes(1, 1, 1), seq, 2, "seq-mean-token-sum-norm", 4.0)
    assert got.tolist() == [0.125] * 3
    got = loss.compute_factors(yes(1, 1, 1), seq, 2, "seq-mean-token-sum-norm")
    assert got.tolist() == [0.5] * 3


def test_ppo_marks_the_side_that_cut_and_is_open_at_its_edges() -> None:
    r = vec(0.7, 0.8, 1.0, 1.25, 1.3)
    for sign, marks in ((1, [0, 0, 0, 0, HIGH]), (-1, [LOW, 0, 0, 0, 0])):
        adv = torch.full((5,), float(sign), dtype=D)
        low, high = 1 - math.exp(math.log(0.8)), math.exp(math.log(1.25)) - 1
        t = term("ppo", r.log(), adv, eps_low=low, eps_high=high)
        assert t.clipped.tolist() == marks and t.clipped.dtype == torch.int8
        open_ = torch.tensor([k == 0 for k in marks])
        assert torch.allclose(t.coefficient, torch.where(open_, sign * r, 0.0))
        assert torch.allclose(t.objective, torch.minimum(sign * r, sign * r.clamp(0.8, 1.25)))
    zero = term("ppo", vec(2, 0.1).log(), vec(0, 0))
    assert zero.clipped.tolist() == [0, 0]  # without an advantage nothing is cut
    # 0.2 by default
    assert term("ppo", vec(1.21, 0.79).log(), vec(1, -1)).clipped.tolist() == [HIGH, LOW]
    assert term("ppo", vec(1.19, 0.81).log(), vec(1, -1)).clipped.tolist() == [0, 0]


def test_gspo_clips_the_mean_ratio_of_an_answer_by_its_own_range() -> None:
    """Means 0.1 (masked 9) and -0.1: s = e^0.1 and e^-0.1 for all of an answer's tokens; the range
    is 3e-4 below and 4e-4 above."""
    seq, m, x = torch.tensor([0, 0, 0, 1]), yes(1, 1, 0, 1), vec(0.3, -0.1, 9, -0.1)
    up, down = math.exp(0.1), math.exp(-0.1)
    t = term("gspo", x, vec(1, 1, 1, 1), None, m, seq)
    assert t.clipped.tolist() == [HIGH] * 3 + [0]
    assert t.coefficient.tolist() == pytest.approx([0, 0, 0, down])
    assert t.objective.tolist() == pytest.approx([1 + 4e-4] * 3 + [down])
    t = term("gspo", x, vec(-1, -1, -1, -1), None, m, seq)
    assert t.clipped.tolist() == [0, 0, 0, LOW]
    assert t.objective.tolist() == pytest.approx([-up] * 3 + [-(1 - 3e-4)])
    wide = term("gspo", x, vec(1, 1, 1, -1), None, m, seq, eps_low=0.05, eps_high=0.11)
    assert wide.clipped.tolist() == [0, 0, 0, LOW]
    assert wide.coefficient.tolist() == pytest.approx([up, up, up, 0])
    far = term("gspo", vec(30, 30), vec(-1, -1), None, yes(1, 1), torch.tensor([0, 0]))
    assert far.objective.tolist() == pytest.approx([-math.exp(20)] * 2)


def test_the_dual_clip_bounds_only_what_is_pushed_down() -> None:
    """c A for A < 0 where r A would be below it (r > c); between bound and c still r A."""
    x = vec(1.1, 2.0, 2.9, 4.0, 4.0).log()
    t = term("ppo", x, vec(-1, -1, -1, -1, 1), dual_clip=3.0)
    assert t.clipped.tolist() == [0, 0, 0, DUAL, HIGH]
    assert t.objective.tolist() == pytest.approx([-1.1, -2, -2.9, -3, 1.2])
    assert t.coefficient.tolist() == pytest.approx([-1.1, -2, -2.9, 0, 0])
    single = term("ppo", x, vec(-1, -1, -1, -1, 1))
    assert single.objective.tolist() == pytest.approx([-1.1, -2, -2.9, -4, 1.2])
    # at the bound itself it is open
    for r, bound, mark in ((1, 1.0, 0), (2, 1.5, DUAL), (2, 0.5, DUAL)):
        assert term("ppo", vec(r).log(), vec(-1), dual_clip=bound).clipped.tolist() == [mark]


def test_cispo_keeps_the_gradient_and_marks_its_bounds() -> None:
    r, adv, lp = vec(0.3, 0.5, 1.0, 1.2, 2.0), vec(1, 1, -1, 1, 2), vec(-1, -2, -3, -4, -5)
    t = term("cispo", r.log(), adv, lp)
    assert t.coefficient.tolist() == pytest.approx([0.3, 0.5, -1, 1.2, 2.4])
    assert t.objective.tolist() == pytest.approx([-0.3, -1.0, 3, -4.8, -12])
    assert t.clipped.tolist()[:3] == [0, 0, 0] and t.clipped.tolist()[4] == HIGH
    low = term("cispo", r.log(), adv, lp, eps_low=0.4999, eps_high=8.0)
    assert low.clipped.tolist() == [LOW, LOW, 0, 0, 0]
    assert float(low.coefficient[0]) == pytest.approx(0.5001)


def test_dppo_is_open_while_the_probability_stays_near() -> None:
    """From 0.5 to 0.75 (+0.25) and to 0.25 (-0.25), with both signs of A; the threshold decides."""
    prob, old, adv = vec(0.75, 0.75, 0.25, 0.25), vec(0.5, 0.5, 0.5, 0.5), vec(1, -1, 1, -1)
    x = (prob / old).log()
    t = term("dppo", x, adv, prob.log(), dppo_threshold=0.2)
    assert t.clipped.tolist() == [HIGH, 0, 0, LOW]
    assert t.coefficient.tolist() == pytest.approx([0, -1.5, 0.5, 0])
    assert t.objective.tolist() == pytest.approx([0, -1.5, 0.5, 0])
    assert term("dppo", x, adv, prob.log(), dppo_threshold=0.3).clipped.tolist() == [0] * 4
    assert term("dppo", x, adv, prob.log()).clipped.tolist() == t.clipped.tolist()  # 0.2 by default
    assert term("dppo", x, adv * 0, prob.log()).clipped.tolist() == [0] * 4


def test_sapo_topr_and_dro_by_hand() -> None:
    s = 1 / (1 + math.exp(-1.0))
    t = term("sapo", vec(2).log(), vec(3))
    assert t.coefficient.tolist() == pytest.approx([4 * s * (1 - s) * 2 * 3])
    assert t.objective.tolist() == pytest.approx([4 * s * 3])
    z = 1 / (1 + math.exp(-1.05))
    t = term("sapo", vec(2).log(), vec(-1))
    assert t.coefficient.tolist() == pytest.approx([-4 * z * (1 - z) * 2])
    assert t.objective.tolist() == pytest.approx([-4 / 1.05 * z], rel=1e-12)
    assert term("sapo", vec(2).log(), vec(0), sapo_tau_neg=2.0).objective.tolist() == [0]
    # topr: answers 0.5 x 0.8 (masked 9) and 2 x 3; only A < 0 is weighted, by at most 1
    seq, m = torch.tensor([0, 0, 0, 1, 1]), yes(1, 1, 0, 1, 1)
    x, lp = vec(0.5, 0.8, 9, 2, 3).log(), vec(-1, -2, -3, -4, -5)
    t = term("topr", x, vec(-1, -1, -1, -1, -1), lp, m, seq)
    assert t.coefficient.tolist() == pytest.approx([-0.4, -0.4, -0.4, -1, -1])
    assert t.objective.tolist() == pytest.approx([0.4, 0.8, 1.2, 4, 5])
    assert term("topr", x, vec(2, 2, 2, 0, 0), lp, m, seq).coefficient.tolist() == [2, 2, 2, 0, 0]
    far = term("topr", vec(0, 0, 0, -30, -30), vec(-1, -1, -1, -1, -1), lp, m, seq)
    assert far.coefficient.tolist()[3:] == pytest.approx([-math.exp(-20)] * 2)
    t = term("dro", vec(0.4), vec(2), vec(-3))
    assert t.coefficient.tolist() == pytest.approx([2 - 0.05 * 0.4])
    assert t.objective.tolist() == pytest.approx([-6 - 0.025 * 0.16])
    t = term("dro", vec(0.4), vec(2), vec(-3), dro_beta=1.0)
    assert t.coefficient.tolist() == pytest.approx([1.6])


def test_covariances_and_who_is_chosen_by_them() -> None:
    lp, adv, m = vec(-1, -3, 7, -5), vec(2, 0, 50, 1), yes(1, 1, 0, 1)  # means -3 and 1
    assert covariance(lp, adv, m).tolist() == pytest.approx([2, 0, 0, 0])
    assert covariance(lp, adv, m & False).tolist() == [0, 0, 0, 0]
    c = vec(5, 1, 9, 3, 2)
    m = yes(1, 1, 0, 1, 1)
    got = choose_highest(c, m, 0.5)
    assert got.tolist() == [True, False, False, True, False]  # 2 of 4
    # at least one
    assert choose_highest(c, m, 0.0).tolist() == [True, False, False, False, False]
    assert choose_highest(c, m, 1.0).tolist() == m.tolist()
    assert not choose_highest(c, m & False, 0.5).any()
    for seed in range(20):
        one = sample_by_covariance(c, m, 0.0, 1.0, 5.0, seed)
        # the bounds themselves are outside
        assert int(one.sum()) == 1 and not bool(one[[0, 1, 2]].any())
        assert sample_by_covariance(c, m, 0.5, 1.0, 9.0, seed).sum() == 2
    single = [sample_by_covariance(c, m, 0.0, 1.0, 5.0, seed) for seed in range(20)]
    assert {int(one.int().argmax()) for one in single} == {3, 4}
    assert not sample_by_covariance(c, m, 1.0, 6.0, 7.0, 0).any()
    assert torch.equal(*(sample_by_covariance(c, m, 0.5, 0.0, 9.0, 4) for _ in range(2)))


def test_kl_cov_and_clip_cov_touch_the_chosen_tokens_alone() -> None:
    x, adv, chosen = vec(0.3, -0.3, 0.5), vec(1, 1, 1), yes(1, 1, 0)
    t = term("kl_cov", x, adv, chosen=chosen, cov_coefficient=0.5)
    r = x.exp()
    assert torch.allclose(t.coefficient, r + vec(-0.5, 0.5, 0))
    assert torch.allclose(t.objective, r + vec(-0.15, -0.15, 0))
    t = term("kl_cov", x, adv, chosen=chosen)
    assert torch.allclose(t.coefficient, r + vec(-1, 1, 0))
    # 1.35 and 1.65 by the clip, the second as chosen
    narrow, second = {"eps_low": 0.5, "eps_high": 0.5}, yes(0, 1, 0)
    for sign, some, keys, marks in (
        (1, second, {}, [HIGH, HIGH, HIGH]),
        (1, second, narrow, [0, HIGH, HIGH]),
        (-1, yes(1, 0, 0), {}, [LOW, 0, LOW]),
        (-1, yes(0, 0, 0), {"eps_low": 0.9}, [0, 0, 0]),
    ):
        t = term("clip_cov", sign * x, sign * adv, chosen=some, **keys)
        assert t.clipped.tolist() == marks
