"""The fast path is the plain path: value and gradient; flat weights come back; directories load
with transformers."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_rivals_kit import program
from models_kit import FAMILIES, sample_batch
from process_kit import run_command

from asyncrl.contract.errors import ConfigError
from asyncrl.models import policy
from asyncrl.models.packed_attention import AttentionRows, AttentionSide


@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize("family,kv,tied", FAMILIES)
def test_packed_logprobs_equal_plain_ones_in_value_and_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kv: int, tied: bool, tables: int
) -> None:
    monkeypatch.setitem(policy.packed_forward.WORTH_A_TABLE, "cpu", 70 if tables > 1 else 1 << 13)
    model = policy.build_model(tmp_path, "abcdefgh", family=family, kv_heads=kv, tied=tied)
    assert model.fast is not None
    prompts, responses, owner = sample_batch(11)
    rows = policy.ForwardInput(prompts, responses, torch.ones(6), owner)
    attention = policy.packed_forward.plan_packing(rows, model.fast, torch.empty(0)).attention
    assert isinstance(attention, AttentionRows) and len(attention.answers) == tables
    temperature = torch.tensor([1.0, 0.7, 1.3, 1.0, 2.0, 0.5])
    grads = []
    for path in ("fast", "plain"):
        model.hf.zero_grad()
        if path == "fast":
            out = model.logprobs(
                prompts, responses, temperature, groups=owner, want_entropy=True, want_hidden=True
            )
        else:
            rows = policy.ForwardInput(prompts, responses, temperature, None, True, True)
            out = policy.compute_plain_logprobs(model.hf, rows, 4)
        weight = torch.linspace(-1, 1, len(out.logprobs))
        assert out.entropy is not None and out.hidden is not None
        ((out.logprobs * weight).sum() + 0.3 * (out.entropy * weight).sum()).backward()
        grads.append((out, {n: p.grad.clone() for n, p in model.hf.named_parameters()}))
    (a, ga), (b, gb) = grads
    torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.entropy, b.entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.hidden, b.hidden, atol=1e-5, rtol=1e-4)
    for name in ga:
        torch.testing.assert_close(ga[name], gb[name], atol=2e-5, rtol=1e-4)


def test_packed_gradients_in_bfloat16_and_of_answers_of_one_token(tmp_path: Path) -> None:
    model = policy.build_model(tmp_path, "abcdefgh", kv_heads=2)
    prompts, responses, owner = sample_batch(11)
    cases = {"long": responses, "one token": [response[:1] for response in responses]}
    for what, answers in cases.items():
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            model.hf.to(dtype)
            model.hf.zero_grad()
            out = model.logprobs(prompts, answers, torch.ones(len(answers)), groups=owner)
            out.logprobs.sum().backward()
            gradient = torch.cat([p.grad.float().flatten() for p in model.hf.parameters()])
            found.append((out.logprobs.detach(), gradient))
        (whole, right), (rounded, near) = found
        assert (whole - rounded).abs().max() < 0.1, what
        assert (right - near).norm() < 0.1 * right.norm(), what


def test_answers_are_padded_with_others_of_like_length(tmp_path: Path) -> None:
    lay = policy.build_model(tmp_path, "abcdefgh").fast
    assert lay is not None
    r = np.random.default_rng(0)
    lengths = r.permutation([*[4] * 40, *[20] * 40, 50])
    prompts = [np.arange(12, dtype=np.int32)] * len(lengths)

    def plan(answers: list[np.ndarray], *, fixed: bool = False) -> list[AttentionSide]:
        rows = policy.ForwardInput(prompts, answers, torch.ones(81), None if fixed else [0] * 81)
        made = policy.packed_forward.plan_packing(rows, lay, torch.empty(0), fixed).attention
        assert isinstance(made, AttentionRows)
        return made.answers

    answers = [np.ones(n + 1, np.int32) for n in lengths]
    sides = plan(answers)
    widths = [side.shape[1] for side in sides]
    assert widths == sorted(widths) and widths[0] == 4 and widths[-1] == 50
    padded = sum(math.prod(side.shape) for side in sides)
    least = sum(n * (12 + n) for n in lengths)
    assert padded < 1.6 * least and len(sides) < 8, (padded / least, widths)
    assert len(plan([np.ones(21, np.int32)] * len(lengths))) == 1  # nothing to save
    shapes = [side.shape[1:] for side in plan(answers, fixed=True)]
    assert shapes[0] == (4, 16) and shapes[-1] == (52, 64)  # exact mode: in steps of 4 and 16


def test_chunked_head_equals_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy.build_model(tmp_path, "abcdefgh")
    prompts, responses, owner = sample_batch(11)
    results = []
    for chunk in (1 << 24, 11 * 3):  # three rows at a time
        monkeypatch.setattr(policy.packed_forward, "LOGIT_CHUNK", chunk)
        model.hf.zero_grad()
        out = model.logprobs(prompts, responses, torch.ones(6), groups=owner, want_entropy=True)
        assert out.entropy is not None
        (out.logprobs.sum() + out.entropy.square().sum()).backward()
        results.append([out.logprobs.detach(), *[p.grad.clone() for p in model.hf.parameters()]])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_flat_weights_come_back_and_have_a_digest(tmp_path: Path) -> None:
    model = policy.build_model(tmp_path / "a", "abc", seed=1)
    other = policy.build_model(tmp_path / "b", "abc", seed=2)
    layout = policy.build_manifest(model)
    buffer = bytearray(policy.count_flat_bytes(layout))
    policy.write_flat(model, memoryview(buffer))
    assert (
        policy.compute_weights_digest(other)
        != policy.compute_digest(buffer)
        == policy.compute_weights_digest(model)
    )
    policy.load_weights(other, policy.read_flat(memoryview(buffer), layout))
    assert policy.compute_weights_digest(other) == policy.compute_digest(buffer)
    policy.export(other, tmp_path / "c")
    assert policy.compute_weights_digest(
        policy.load_policy(tmp_path / "c")
    ) == policy.compute_digest(buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flat_weights_come_with_a_bound_of_the_largest(tmp_path: Path, dtype: torch.dtype) -> None:
    """What a publication looks at before anything else is asked of the weights."""
    model = policy.build_model(tmp_path, "abc")
    model.hf.to(dtype)
    layout = policy.build_manifest(model)
    buffer = bytearray(policy.count_flat_bytes(layout))

    def bound() -> float:
        return float(policy.copy_flat(policy.list_named_weights(model), memoryview(buffer), layout))

    weights = model.hf.model.embed_tokens.weight
    for last in (0.0, -300.0, 3e5):
        with torch.no_grad():
            weights[1, 2] = last
        largest = max(float(p.detach().abs().amax()) for p in model.hf.parameters())
        assert largest**2 <= bound() * (1 + 1e-5) <= 2e4 * max(largest, 1.0) ** 2
        assert policy.compute_digest(buffer) == policy.compute_weights_digest(model)
    for last in (math.inf, -math.inf, math.nan):
        with torch.no_grad():
            weights[1, 2] = last
        assert not bound() < 1e6


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        policy.load_policy(tmp_path)


def test_a_model_is_written_without_deepspeed(tmp_path: Path) -> None:
    """accelerate, where it is installed, would import it to see what it has wrapped."""
    code = (
        "import sys; from pathlib import Path; from asyncrl.models import policy; "
        "policy.build_model(Path(sys.argv[1]), 'abc'); assert 'accelerate' in sys.modules; "
        "assert 'deepspeed' not in sys.modules; import transformers.modeling_utils as t; "
        "assert t.unwrap_model.__name__ == 'unwrap_model'"
    )
    done = run_command([sys.executable, "-c", code, str(tmp_path / "m")])
    assert done.code == 0 and not done.out, done.out + done.err[-2000:]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("real_equal", monkeypatch)


def test_engine_packed_forward_exact_mode_and_ring(bench: Any, tmp_path: Path) -> None:
    held = bench.measure(bench.tiny(tmp_path), ["forms", "exact"], bench.SHORT)
    assert all(goal["met"] for goal in held.goals)
    ways = [f"{way}, {d}" for d in bench.DTYPES for way in ("packed forward", "embedded engine")]
    ways += ["transformers, bfloat16", "exact mode, float32"]
    assert sorted(held.result["rows"]) == sorted(ways)
    # both lengths with and without a system turn, plain text; two answers each behind one prompt
    assert len(held.asked) == 5 and min(map(len, held.asked)) == 10
    assert [a.group for a in held.answers] == [at for at in range(5) for _ in range(2)]
    assert held.result["tokens"] == sum(len(a.tokens) for a in held.answers) == 10 * bench.ANSWER
    pairs = zip(held.answers[::2], held.answers[1::2], strict=True)
    assert all((one.prompt == other.prompt).all() for one, other in pairs)
    rows = held.result["rows"]
    assert 1e-4 < rows["packed forward, bfloat16"][0] < rows["packed forward, bfloat16"][1]


def test_missed_goals_are_said(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = bench.by_packed

    def off(model: Any, answers: Any) -> np.ndarray:
        found: np.ndarray = plain(model, answers)
        found[3] += np.float32(2e-4)
        return found

    monkeypatch.setattr(bench, "by_packed", off)
    held = bench.measure(bench.tiny(tmp_path), ["forms", "exact"], bench.SHORT[:1])
    assert {g["figure"] for g in held.goals if not g["met"]} == {
        "packed forward, float32: largest distance, nats",
        "exact mode: tokens of engine and learner that differ",
        "exact mode, float32: largest distance, nats",
    }


def test_a_learners_row_is_held_to_what_it_says(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each learner gets the answers with short prompts alone; its largest distance counts, and how
    far its weights are from torch's."""
    jobs: list[dict[str, Any]] = []

    def learned(job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        stage = job["learner"].get("zero_stage")
        off = None if stage is None else 0.02 if stage == 2 else 1e-6
        sent = bench.msgspec.msgpack.decode(Path(job["batch"]).read_bytes())
        assert len(sent["samples"]) == 4  # of three prompts one is too long
        most = 1e-3 if stage == 3 and job["dtype"] == "float32" else 1e-6
        return {"largest": most, "norm": 1.0, "weights_off": off, "names": ["a"]}

    monkeypatch.setattr(bench, "learned", learned)
    path = bench.tiny(tmp_path)
    lengths = bench.SHORT[:1]
    longest = max(len(prompt) for prompt in bench.prompts(path, lengths))
    monkeypatch.setattr(bench, "LEARNED", longest - 1)
    held = bench.measure(path, ["deepspeed"], lengths)
    stages = [job["learner"].get("zero_stage") for job in jobs]
    assert stages == [None, 0, 1, 2, 3, None, 2, 3]
    assert {g["figure"] for g in held.goals if not g["met"]} == {
        "ZeRO stage 2, two ranks, float32: weights off torch's, of a step",
        "ZeRO stage 3, two ranks, float32: largest distance, nats",
    }
