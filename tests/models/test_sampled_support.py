"""Log-probabilities over the tokens that top-p and top-k kept: their wire form, the ratio without
bias, value and gradient in every forward, and what the engines record."""

from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import CUTS, engine, request, run
from hypothesis import given
from hypothesis import strategies as st

from actors.decoder import sample
from actors.engine_generic import GenericEngine
from asyncrl.algorithms import kl
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import ModelShape, TrainingSequence
from asyncrl.contract.sampled_support import HEAD, MOST_TOKENS, SampledSupport
from asyncrl.contract.versions import Label
from asyncrl.models import packed_forward, policy
from asyncrl.models.packed_forward import find_kept_tokens, renormalize
from asyncrl.transport import arrays

D = torch.float64


def random_support(sizes: list[int], vocabulary: int, seed: int = 0) -> SampledSupport:
    draw = np.random.default_rng(seed)
    kept = [np.sort(draw.choice(vocabulary, n, replace=False)) for n in sizes]
    return SampledSupport.from_lists(kept, vocabulary)


@given(st.lists(st.integers(0, 37), max_size=9), st.sampled_from([37, 300, 65535, 65536, 70_000]))
def test_a_support_is_read_as_it_was_written(sizes: list[int], vocabulary: int) -> None:
    sizes = [*sizes, 9000] if vocabulary > 60_000 else sizes  # as a bitmap
    support = random_support(sizes, vocabulary)
    data = support.encode()
    back = SampledSupport.decode(data, len(sizes))
    assert back.sizes.tolist() == sizes and np.array_equal(back.ids, support.ids)
    assert (data == b"") == (not any(sizes))
    # a position never takes more than a bitmap
    width = 2 if vocabulary < 1 << 16 else 4
    assert len(data) <= HEAD.size + sum(width + min(n * width, -(-vocabulary // 8)) for n in sizes)


@pytest.mark.parametrize(
    ("data", "length", "said"),
    [
        (b"x", 1, "1 bytes"),
        (HEAD.pack(0), 0, "vocabulary of 0"),
        (HEAD.pack(9), 1, "4 bytes for 1 tokens"),
        (HEAD.pack(1 << 25) + b"\1\0\0\0", 1, "a vocabulary of 33554432"),
        (HEAD.pack(MOST_TOKENS), 1, "4 bytes for 1 tokens"),
        (HEAD.pack(90) + b"\2\0" + b"\1\0", 1, "do not hold its sizes"),
        (HEAD.pack(90) + b"\2\0" + b"\1\0\3\0\4\0", 1, "do not hold its sizes"),
        (HEAD.pack(90) + b"\2\0" + b"\3\0\3\0", 1, "not ascending below 90"),
        (HEAD.pack(90) + b"\2\0" + b"\3\0\132\0", 1, "not ascending below 90"),
        (HEAD.pack(9) + b"\2\0" + b"\1\0", 1, "another number of tokens"),
        (HEAD.pack(9) + b"\2\0" + b"\0\6", 1, "not ascending below 9"),
        (HEAD.pack(9) + b"\12\0" + b"\377\3", 1, "do not hold its sizes"),
    ],
)
def test_another_form_is_refused(data: bytes, length: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SampledSupport.decode(data, length)


def test_stretches_are_joined_and_cut() -> None:
    a, b = random_support([3, 0, 2], 50, 1), random_support([1, 4], 50, 2)
    whole = SampledSupport.join([a, SampledSupport.make_untruncated(2), b])
    assert whole.sizes.tolist() == [3, 0, 2, 0, 0, 1, 4] and whole.vocabulary == 50
    assert np.array_equal(whole.ids, np.concatenate([a.ids, b.ids]))
    assert whole.take_first(3).ids.tolist() == a.ids.tolist()
    assert SampledSupport.decode(whole.encode(), 7).ids.tolist() == whole.ids.tolist()
    empty = SampledSupport.join([])
    assert (empty.encode(), empty.vocabulary) == (b"", 0)


def test_a_token_outside_its_support_is_refused() -> None:
    support = random_support([2, 0, 3], 40)
    tokens = np.array([support.ids[0], 7, support.ids[4]], "<i4")

    def check(tokens: np.ndarray, mask: bytes = b"\1\1\1", vocabulary: int = 40) -> None:
        row = TrainingSequence(
            b"", tokens.tobytes(), b"\0" * 12, mask, [], support=support.encode()
        )
        arrays.check_sequence_numbers(row, "it", ModelShape(vocabulary))

    check(tokens)
    check(tokens, vocabulary=0)
    outside = tokens.copy()
    outside[2] = next(x for x in range(40) if x not in support.ids[2:])
    with pytest.raises(BadMessage, match="it: the token at position 2 is not among") as refused:
        check(outside)
    assert refused.value.reason == "token"
    check(outside, b"\1\1\0")  # not sampled here
    with pytest.raises(BadMessage, match="is of 40 tokens, of a model with 39") as refused:
        check(tokens, vocabulary=39)
    assert refused.value.reason == "token"
    with pytest.raises(BadMessage, match="the support of its sampling: ") as refused:
        check(tokens[:2], b"\1\1")
    assert refused.value.reason == "shape"


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 0), (1.0, 3), (0.6, 4)])
def test_the_ratio_over_the_support_has_no_bias(top_p: float, top_k: int) -> None:
    """By enumeration: E_q[p / q] is 1 and the score has mean 0 over the support, and neither over
    the whole vocabulary."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 9, generator=source, dtype=D).requires_grad_(True)
    old = torch.log_softmax(
        logits.detach() + 0.3 * torch.randn(1, 9, generator=source, dtype=D), -1
    )
    kept = find_kept_tokens(old, torch.tensor([top_p]), torch.tensor([top_k]))
    assert 1 < int(kept.sum()) < 9
    q = renormalize(old, kept).exp()
    whole = torch.log_softmax(logits, -1)
    over = renormalize(whole, kept)
    for log_p, unbiased in ((over, True), (whole, False)):
        ratio = torch.where(kept, q * (log_p.detach() - q.log()).exp(), 0.0).sum()
        on_policy = torch.where(kept, over.detach().exp() * log_p, 0.0).sum()
        score = torch.autograd.grad(on_policy, logits, retain_graph=True)[0]
        assert (abs(float(ratio) - 1) < 1e-12) == unbiased
        assert (float(score.abs().max()) < 1e-12) == unbiased


def test_nothing_is_truncated_by_rounding() -> None:
    """Sums of float32 reach 1 before the last token: a row without a cut keeps all."""
    logs = torch.log_softmax(torch.linspace(30, -30, 50).expand(3, 50), -1)
    kept = find_kept_tokens(logs, torch.tensor([1.0, 1.0, 0.5]), torch.tensor([0, 2, 0]))
    assert kept.sum(1).tolist() == [50, 2, 1] and torch.equal(renormalize(logs, kept)[0], logs[0])


def test_the_last_uniform_samples_a_kept_token() -> None:
    """A uniform that rounds to 1 stays within the support."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).repeat(2, 1)
    cut = torch.tensor([1.0, 1.0]), torch.tensor([2, 0])
    tokens, logprobs, kept = sample(logits, torch.ones(2), torch.ones(2), cut)
    assert tokens.tolist() == [1, 4] and bool(logprobs.isfinite().all())
    assert kept is not None and kept.sum(1).tolist() == [2, 5]
    halves = torch.tensor([[-torch.inf, 0.0, 0.0]]).repeat(3, 1)
    tokens, _, _ = sample(halves, torch.tensor([1e-30, 0.5, 1.0]), None, None)
    assert tokens.tolist() == [1, 2, 2], "a share begins at its lower edge"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> policy.PolicyModel:
    path = tmp_path_factory.mktemp("model")
    return policy.build_model(path, "abcdefgh", family="qwen3", kv_heads=2, seed=3)


def sequences(vocabulary: int) -> tuple[Any, ...]:
    """Prompts, responses, temperature, groups and supports; the second is not truncated."""
    draw = np.random.default_rng(1)
    prompts = [np.array(p, np.int32) for p in ([3, 4], [3, 4], [5, 6, 7])]
    responses, supports = [], []
    for length in (4, 3, 6):
        ids = np.arange(2, vocabulary)  # not the padding, whose embedding is 0
        kept = [np.sort(draw.choice(ids, n, replace=False)) for n in range(1, length + 1)]
        kept[-2] = np.zeros(0, np.int64)  # all
        responses.append(np.array([draw.choice(x) if len(x) else 5 for x in kept], np.int32))
        supports.append(SampledSupport.from_lists(kept, vocabulary))
    supports[1] = None
    return prompts, responses, torch.tensor([1.0, 0.7, 1.3]), [0, 0, 1], supports


def by_hand(model: policy.PolicyModel, given: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Log-probabilities, entropy and masks [n, V] by one plain forward a row."""
    prompts, responses, temperature, _, supports = given
    lp, entropy, masks = [], [], []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        logits = model.hf(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / temperature[i]
        mask = torch.ones(logits.shape, dtype=torch.bool)
        if supports[i] is not None:
            ends = np.cumsum(supports[i].sizes)
            for t, size in enumerate(supports[i].sizes):
                if size:
                    mask[t] = False
                    mask[t, supports[i].ids[ends[t] - size : ends[t]].tolist()] = True
        logs = torch.log_softmax(logits, -1)
        entropy.append(-(logs.exp() * logs).sum(-1))
        total = torch.logsumexp(logits.masked_fill(~mask, -torch.inf), -1, keepdim=True)
        lp.append((logits - total).gather(1, ids[0, len(prompt) :, None])[:, 0])
        masks.append(mask)
    return torch.cat(lp), torch.cat(entropy), torch.cat(masks)


def gradient(model: policy.PolicyModel, value: torch.Tensor) -> torch.Tensor:
    parameters = [p for p in model.hf.parameters() if p.requires_grad]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return torch.cat([x.double().flatten() for x in found if x is not None])


@pytest.mark.parametrize("path", ["packed", "chunks", "exact", "plain", "one pass"])
def test_every_forward_is_the_definition_in_value_and_gradient(
    model: policy.PolicyModel, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = model.hf.config.vocab_size
    prompts, responses, temperature, groups, supports = given_rows = sequences(vocabulary)
    expected, entropy, _ = by_hand(model, given_rows)
    weights = torch.linspace(-1, 2, len(expected))
    wanted = gradient(model, (expected * weights).sum() + 0.3 * entropy.sum())
    if path == "chunks":
        monkeypatch.setattr(packed_forward, "LOGIT_CHUNK", 5 * vocabulary)
    if path == "exact":
        monkeypatch.setattr(model, "exact", True)
    if path in ("plain", "one pass"):
        monkeypatch.setattr(model, "fast", None)
        monkeypatch.setattr(model, "one_pass", path == "one pass")
    out = model.logprobs(
        prompts, responses, temperature, groups=groups, want_entropy=True, supports=supports
    )
    assert out.entropy is not None
    torch.testing.assert_close(out.logprobs.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(out.entropy.double(), entropy, atol=2e-6, rtol=1e-5)
    got = gradient(model, (out.logprobs * weights).sum() + 0.3 * out.entropy.sum())
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-4)
    with torch.no_grad():
        plain, none = (
            model.logprobs(prompts, responses, temperature, groups=groups, supports=untruncated)
            for untruncated in (None, [None] * len(prompts))
        )
    assert torch.equal(plain.logprobs, none.logprobs)
    assert float((plain.logprobs - out.logprobs).detach().abs().max()) > 0.1


def test_kl_and_energies_are_those_over_the_support(model: policy.PolicyModel) -> None:
    vocabulary = model.hf.config.vocab_size
    prompts, responses, temperature, groups, supports = given_rows = sequences(vocabulary)
    _, _, mask = by_hand(model, given_rows)
    lay = model.fast
    assert lay is not None
    more = {"groups": groups, "supports": supports, "want_hidden": True}
    out = model.logprobs(prompts, responses, temperature, **more)
    assert out.hidden is not None
    hidden = out.hidden.detach().requires_grad_(True)
    other = hidden.detach().roll(1, 0)
    scale, table = out.scale, out.support
    assert scale is not None and table is not None
    weight = lay.hf.get_output_embeddings().weight.detach()

    def logs(states: torch.Tensor) -> torch.Tensor:
        logits = (states @ weight.T).double() * scale[:, None]
        return torch.log_softmax(logits.masked_fill(~mask, -torch.inf), -1)

    a, b = logs(hidden), logs(other)
    p = a.exp()
    expected = (p * (torch.where(mask, a, 0.0) - torch.where(mask, b, 0.0))).sum(-1)
    got = packed_forward.compute_vocabulary_term(
        kl.compute_exact_kl, lay, hidden, (other, weight), scale, table
    )
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    found, wanted = (torch.autograd.grad(x.sum(), hidden)[0] for x in (got, expected))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    squares = packed_forward.compute_squared_probabilities(lay, hidden, scale, table)
    torch.testing.assert_close(squares.double(), p.detach().square().sum(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["embedded", "generic"])
def test_an_engine_records_the_tokens_that_it_kept(model: policy.PolicyModel, kind: str) -> None:
    """At equal weights the learner's log-probabilities over them are the recorded ones; over the
    whole vocabulary they are far off."""
    requests = [
        request(t, s, [3 + t % 8] * (1 + t), 5 + (3 * t + s) % 16, **CUTS[t % 5])
        for t in range(10)
        for s in range(2)
    ]
    if kind == "embedded":
        answers = run(engine(model, slots=5), requests)
    else:
        other = GenericEngine(model, slots=5, context=64)
        other.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
        answers = run(other, requests)  # type: ignore[arg-type]
    every = [answers[r.key] for r in requests]
    for r, a in zip(requests, every, strict=True):
        assert (a.support is None) == (not r.truncates)
        assert (a.support_bytes == b"") == (a.support is None or not a.support.sizes.any())
        if a.support is not None:
            assert len(a.support.sizes) == len(a.tokens) and a.support.contains(a.tokens).all()
            assert not r.top_k or a.support.sizes.max() <= r.top_k
            assert a.support.vocabulary == model.hf.config.vocab_size
    recorded = torch.from_numpy(np.concatenate([a.logprobs for a in every]))
    apart, temperature = [], torch.tensor([r.temperature for r in requests])
    for supports in ([a.support for a in every], None):
        with torch.no_grad():
            rows = [a.prompt for a in every], [a.tokens for a in every]
            out = model.logprobs(*rows, temperature, supports=supports)
        apart.append(out.logprobs - recorded)
    k3 = [float((torch.expm1(x) - x).mean()) for x in apart]
    assert k3[0] < 1e-10 and k3[1] > 1e-2, k3


def test_beside_truncated_rows_the_others_are_sampled_as_alone(model: policy.PolicyModel) -> None:
    plain = [request(t, 0, [3, 4, 5], 12) for t in range(3)]
    cut = [request(9, s, [6], 12, top_p=0.5) for s in range(2)]
    alone, beside = (run(engine(model, fixed=True), some) for some in (plain, [*plain, *cut]))
    for r in plain:
        assert np.array_equal(alone[r.key].tokens, beside[r.key].tokens)
        assert np.array_equal(alone[r.key].logprobs, beside[r.key].logprobs)
