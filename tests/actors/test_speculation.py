"""Speculative decoding: the samples are those of an engine without drafts."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import CUTS, engine, request, run

from actors.decoding.drafts import DraftBook, DraftPolicy, GroupDrafts
from actors.engine import Completion, CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.config import load
from asyncrl.contract.versions import Label
from asyncrl.experiments.serial import get_engine, run_serial
from asyncrl.models import policy

ROOT = Path(__file__).resolve().parents[2]
Answers = dict[tuple[int, int, int], Completion]
MOST = 4


def repetitive(path: Path, family: str = "qwen3", kv_heads: int = 2, seed: int = 3) -> Any:
    """A model whose completions repeat n-grams: the likeliest next token is the last one."""
    model = policy.build_model(
        path, "abcdefgh", family=family, kv_heads=kv_heads, seed=seed, max_positions=128
    )
    with torch.no_grad():
        model.hf.get_input_embeddings().weight.mul_(3.0)  # tied to the head
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return repetitive(tmp_path_factory.mktemp("repeats"))


def drafting(model: Any, rows: int = 64, **more: Any) -> EmbeddedEngine:
    return engine(model, drafts=DraftPolicy(MOST, rows), **more)


def requests(groups: int = 4, samples: int = 4, **how: Any) -> list[CompletionRequest]:
    return [
        request(t, s, [3 + t % 8, 4] * (1 + t), 6 + (5 * t + 7 * s) % 15, **(CUTS[s % 5] | how))
        for t in range(groups)
        for s in range(samples)
    ]


def assert_same(found: Answers, wanted: Answers, *, bitwise: bool) -> None:
    assert found.keys() == wanted.keys() and found
    for key, a in wanted.items():
        np.testing.assert_array_equal(found[key].tokens, a.tokens)
        assert found[key].finish == a.finish and found[key].spans == a.spans
        if bitwise:
            np.testing.assert_array_equal(found[key].logprobs, a.logprobs)
            assert found[key].support_bytes == a.support_bytes
            assert found[key].routed_bytes == a.routed_bytes
        else:
            np.testing.assert_allclose(found[key].logprobs, a.logprobs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("family", "kv_heads"), [("qwen3", 4), ("qwen3_moe", 2), ("llama", 1), ("qwen2", 2)]
)
def test_answers_stay_as_they_are(tmp_path: Path, family: str, kv_heads: int, exact: bool) -> None:
    """With temperatures, top-p, top-k, stop tokens, a refill of rows and their compaction."""
    made = repetitive(tmp_path, family, kv_heads)
    how = {"fixed": exact, "slots": 8, "record_routing": family == "qwen3_moe"}
    plain = run(engine(made, **how), requests())
    speculates = drafting(made, **how)
    assert_same(run(speculates, requests()), plain, bitwise=exact)
    found = speculates.collect_metrics()
    assert 5 < found["draft/accepted"] < found["draft/proposed"]
    assert not speculates.draft_book.groups
    assert {a.finish for a in plain.values()} == {"stop", "length"}
    assert any(a.support is not None for a in plain.values())
    assert all((a.routed is not None) == how["record_routing"] for a in plain.values())


@pytest.mark.parametrize("guess", ["right", "wrong", "half"])
def test_drafts_leave_bits_alone(model: Any, guess: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests(2, 2)
    plain = run(engine(model, fixed=True), wanted)

    def propose(
        book: DraftBook, asked: CompletionRequest, new_tokens: list[int], most: int
    ) -> list[int]:
        begun = speculates.count_tokens()[asked.key]
        right = plain[asked.key].tokens.tolist()[begun : begun + most]
        assert most <= asked.max_new_tokens - begun - 1
        wrong = {"right": len(right), "wrong": 0, "half": len(right) // 2}[guess]
        return [token if at < wrong else (token + 1) % 8 for at, token in enumerate(right)]

    monkeypatch.setattr(DraftBook, "propose", propose)
    speculates = drafting(model, fixed=True)
    assert_same(run(speculates, wanted), plain, bitwise=True)
    longest = max(len(a.tokens) for a in plain.values())
    if guess == "right":
        assert speculates.steps_made <= -(-longest // (MOST + 1)) + 1
    elif guess == "wrong":
        assert speculates.steps_made == longest and speculates.accepted == 0


@pytest.mark.parametrize("exact", [True, False])
def test_answers_across_a_swap_are_those_of_tokens(model: Any, tmp_path: Path, exact: bool) -> None:
    """Rows advance by different numbers of tokens, and each span says where its swap came."""
    in_flight = "recompute_kv" if exact else "keep_kv"
    other = dict(policy.list_named_weights(repetitive(tmp_path, seed=5)))
    wanted = requests()
    speculates = drafting(model, slots=16, fixed=exact, in_flight=in_flight)
    speculates.add(wanted)
    answers = speculates.step(3)
    speculates.load(other, Label(1, 1), "d1")
    while speculates.active:
        answers += speculates.step(2)
    crossed = [a for a in answers if len(a.spans) == 2]
    assert len({a.spans[0].end for a in crossed}) > 1 and speculates.accepted > 3
    for a in answers:
        (asked,) = (r for r in wanted if r.key == a.key)
        alone = engine(model, slots=1, fixed=exact, in_flight=in_flight)
        alone.add([asked])
        found = alone.step(a.spans[0].end)
        alone.load(other, Label(1, 1), "d1")
        while alone.active:
            found += alone.step(5)
        assert_same({a.key: a}, {a.key: found[0]}, bitwise=exact)


def test_calls_of_a_session_read_the_keys_that_drafts_have_left(model: Any) -> None:
    def turns(e: EmbeddedEngine) -> Answers:
        first = run(e, [request(t, 0, [3, 4 + t] * 5, 20) for t in range(4)])
        prompts = {k: [*a.prompt.tolist(), *a.tokens.tolist(), 5] for k, a in first.items()}
        return run(e, [request(k[0], 1, prompt, 10) for k, prompt in prompts.items()])

    plain, speculates = (make(model, kept_tokens=512, slots=4) for make in (engine, drafting))
    assert_same(turns(speculates), turns(plain), bitwise=False)
    assert speculates.accepted > 0
    for name in ("prefix/hits", "prefix/reused_tokens", "prefix/encoded_tokens"):
        assert speculates.collect_metrics()[name] == plain.collect_metrics()[name] > 0


def test_longer_requests_grow_a_cache_that_holds_drafts(model: Any) -> None:
    def grown(e: EmbeddedEngine) -> Answers:
        e.add([request(0, s, [3, 4], 20) for s in range(2)])
        answers = e.step(2)
        e.add([request(1, s, [3, 4] * 9, 40) for s in range(2)])
        while e.active:
            answers += e.step(3)
        return {a.key: a for a in answers}

    assert_same(grown(drafting(model, fixed=True)), grown(engine(model, fixed=True)), bitwise=True)


def test_aborted_requests_leave_the_book(model: Any) -> None:
    e = drafting(model, slots=2)
    e.add([request(t, s, [3, 4, 3, 4], 20) for t in range(2) for s in range(2)])
    answers = e.step(2)
    progress = e.count_tokens()
    assert progress and all(tokens >= 2 for tokens in progress.values())
    tokens = e.abort([(t, s, 1) for t in range(2) for s in range(2)])
    assert {k: tokens[k] for k in progress} == progress
    assert len(tokens) + len(answers) == 4 and e.active == 0 and e.count_tokens() == {}
    assert not e.draft_book.groups


def test_a_draft_is_what_followed_the_longest_ngram_last() -> None:
    group = GroupDrafts()
    keys = [(0, sample, 1) for sample in range(4)]
    group.extend(keys[0], [1, 2])
    assert group.propose(keys[0], 4) == [], "nothing has followed it"
    group.extend(keys[1], [1, 2, 3, 4, 5, 6])
    assert group.propose(keys[0], 4) == [3, 4, 5, 6] and group.propose(keys[0], 2) == [3, 4]
    group.extend(keys[2], iter([9, 3, 4, 8, 1, 2, 7]))
    assert group.propose(keys[0], 9) == [7], "the sequence that had it last"
    group.extend(keys[3], [2, 3, 4])
    assert group.propose(keys[3], 2) == [5, 6], "three tokens say more than two"
    group.extend(keys[3], [0])
    assert group.propose(keys[3], 2) == [] and group.sequences[keys[3]] == [2, 3, 4, 0]
    lengths = {len(ngram) for ngram in group.continuations}
    first = group.sequences[keys[1]]
    assert lengths == {2, 3, 4} and group.continuations[1, 2, 3, 4] == (first, 4)


def test_the_book_counts_the_requests_of_each_group() -> None:
    book = DraftBook()
    first, second, third = (request(0, s, [3, 4, 5], 20) for s in range(3))
    other = request(1, 0, [8], 20)
    for entering in (first, second, third, other):
        book.open(entering)
    assert {name: group.outstanding for name, group in book.groups.items()} == {0: 3, 1: 1}
    assert book.propose(first, [6, 7], 4) == [] and book.count_indexed(first) == 2
    assert book.count_indexed(second) == 0, "another of its group is indexed alone"
    book.close(first, np.array([6, 7, 8, 9], np.int32))
    ((key, tokens),) = book.groups[0].finished
    assert key == first.key and tokens.tolist() == [3, 4, 5, 6, 7, 8, 9]
    book.close(third)
    assert len(book.groups[0].finished) == 1, "an aborted request leaves no completion"
    assert book.propose(second, [6, 7], 4) == [8, 9]
    sequences = book.groups[0].sequences
    assert sequences == {first.key: [3, 4, 5, 6, 7, 8, 9], second.key: [3, 4, 5, 6, 7]}
    assert not book.groups[0].finished and book.count_indexed(other) == 0
    book.close(other, np.array([1], np.int32))
    assert list(book.groups) == [0] and book.groups[0].outstanding == 1
    book.close(second, np.array([1], np.int32))
    assert not book.groups


def test_a_row_without_drafts_keeps_no_other_from_them(model: Any) -> None:
    """A free row, one under a grammar and one at its last token come before one that drafts."""

    class Grammar:
        """Everything is allowed."""

    e = drafting(model, slots=4)
    e.add([request(t, 0, [3, 4] * 4, 20) for t in range(4)])
    e.step(2)
    assert e.drafts is not None
    policy = DraftPolicy(MOST, 64)
    policy.pays = lambda live: True
    counts = (e._propose(policy) >= 0).sum(1).tolist()
    assert counts[3] > 0, counts
    del e.rows[0]
    second, third, _ = e.rows.values()
    second.request = dataclasses.replace(second.request, constraint=Grammar())
    third.request = dataclasses.replace(third.request, max_new_tokens=third.sampled + 1)
    assert (e._propose(policy) >= 0).sum(1).tolist() == [0, 0, 0, counts[3]]


def test_drafts_pay_while_the_gain_is_above_their_cost() -> None:
    policy = DraftPolicy(6, "auto")
    assert vars(policy) == {
        **{"draft_tokens": 6, "rows": "auto", "seconds": {}, "lookup_s": 0.0, "looked_up": 0},
        **{"drafted": 64.0, "yielded": 64.0 * 4},
    }
    assert not policy.pays(1), "nothing is measured"
    policy.seconds = {2: (2.0, 6.0), 8: (1.0, 3.75)}
    assert policy.pays(2) and policy.pays(3) and not policy.pays(9)
    policy.looked_up, policy.lookup_s = 20, 1.25
    assert policy.pays(3) and not policy.pays(4), "at four rows the look-up takes all of the gain"
    policy.count(64, 128)
    policy.count(128, 512)
    assert (policy.drafted, policy.yielded) == (256.0, 896.0)
    assert policy.pays(2) and not policy.pays(3), "3.5 tokens a row"
    policy.begin_version()
    assert (policy.drafted, policy.yielded) == (64.0, 256.0)
    assert [DraftPolicy(6, 3).pays(rows) for rows in (3, 4)] == [True, False]
    policy.looked_up, policy.lookup_s = 1, 0.25
    policy.seconds = {1: (1.0, 3.8)}
    assert not policy.pays(1), "the whole time of the only row"


def test_no_drafts_above_the_given_number_of_rows(model: Any) -> None:
    full = drafting(model, rows=3, slots=4)
    full.add([request(t, 0, [3, 4] * 4, 20) for t in range(4)])
    full.step(1)
    assert len(full.count_tokens()) == 4
    full.step(3)
    assert full.proposed == 0
    full.abort(list(full.count_tokens())[:1])
    while full.active:
        full.step(1)
    assert full.proposed > 0


def test_the_first_weights_cost_is_measured(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(e: EmbeddedEngine, rows: int, width: int) -> float:
        return 1.0 if width == 1 else 0.9 + 0.5 * rows

    monkeypatch.setattr(EmbeddedEngine, "_time_verification", seconds)
    e = engine(model, slots=64, drafts=DraftPolicy(MOST, "auto"))
    assert e.drafts is not None
    assert e.drafts.seconds == {rows: (1.0, 0.9 + 0.5 * rows) for rows in (1, 2, 4, 8, 16)}
    assert [e.drafts.pays(rows) for rows in (2, 4, 5, 64)] == [True, True, False, False]
    e.drafts.count(64, 64)  # nothing was accepted: 2 tokens a row, with the assumed ones
    assert [e.drafts.pays(rows) for rows in (2, 4)] == [True, False]
    monkeypatch.setattr(EmbeddedEngine, "_time_verification", None)  # is not called again
    e.load(dict(policy.list_named_weights(model)), Label(1, 1), "d1")
    assert e.drafts.pays(4), "new weights may repeat themselves more"
    e.drafts.looked_up, e.drafts.lookup_s = 10, 0.5
    assert e.drafts.pays(1) and not e.drafts.pays(4), "the look-up of a row takes 0.05 s"


@pytest.mark.parametrize("exact", [True, False])
def test_the_measurement_leaves_nothing_behind(model: Any, exact: bool) -> None:
    e = engine(model, slots=2, fixed=exact, drafts=DraftPolicy(MOST, "auto"))
    assert e.drafts is not None and 1 in e.drafts.seconds
    assert all(plain > 0 < verified for plain, verified in e.drafts.seconds.values())
    plain = run(engine(model, slots=2, fixed=exact), requests(2, 2))
    assert_same(run(e, requests(2, 2)), plain, bitwise=exact)


def test_a_run_of_the_shipped_config_ends_with_the_same_weights(sort_model: Path) -> None:
    small = [
        *("learner.steps=2", "learner.groups=4", "learner.group_size=4", "evaluation.every=0"),
        *("evaluation.final_prompts=1", "evaluation.ood_prompts=0", f"model.path='{sort_model}'"),
    ]
    digests = set()
    for sets in (["generator.draft_rows=16"], ["generator.speculate=0"]):
        config = load.load(ROOT / "configs" / "speculate.toml", [*small, *sets])
        made = get_engine(config)
        assert isinstance(made, EmbeddedEngine)
        digests.add(run_serial(config, 0)["weights_digest"])
        if config.generator.speculate:
            assert made.drafts is not None
            assert (made.drafts.draft_tokens, made.drafts.rows) == (config.generator.speculate, 16)
            assert made.collect_metrics()["draft/accepted"] > 5
        else:
            assert made.collect_metrics() == {}
    assert len(digests) == 1
