"""Keys and values that outlive their rows: what a later call draws with them has the
log-probabilities of one encoded whole, and no token that is known is encoded again."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import engine, expected, request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import decoder
from actors.decoder import KEPT_BLOCK
from actors.engine import Completion, CompletionRequest
from actors.engine_embedded import EmbeddedEngine, make_engine
from asyncrl.config import load
from asyncrl.contract.versions import Label
from asyncrl.models import policy

LIMIT = 4096  # tokens: more than any test here needs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> policy.PolicyModel:
    return policy.build_model(tmp_path_factory.mktemp("m"), "abcdefgh", seed=3)


class Told:
    """What a sequence begins with of those kept, looked up one by one."""

    def __init__(self) -> None:
        self.kept: list[list[int]] = []

    def known(self, tokens: list[int]) -> int:
        return max((self.shared(tokens, old) for old in self.kept), default=0)

    @staticmethod
    def shared(one: list[int], other: list[int]) -> int:
        most = min(len(one), len(other)) // KEPT_BLOCK
        return KEPT_BLOCK * next(
            (
                count
                for count in range(most, 0, -1)
                if one[: count * KEPT_BLOCK] == other[: count * KEPT_BLOCK]
            ),
            0,
        )


def sessions(turns: int, seed: int) -> list[list[tuple[str, list[int]]]]:
    """By turn, what becomes of each of six sessions' history: (what is done to it, tokens)."""
    rng = np.random.default_rng(seed)
    kinds = ["goes on", "goes on", "goes on", "is edited", "is cut", "begins anew"]
    return [
        [
            (str(rng.choice(kinds)), rng.integers(3, 11, int(rng.integers(1, 7))).tolist())
            for _ in range(6)
        ]
        for _ in range(turns)
    ]


SYSTEM = [3, 4, 5, 6, 7, 8, 9, 10, 10, 9, 8]  # what every session begins with


def talk(
    e: EmbeddedEngine, told: Told, seed: int
) -> tuple[list[tuple[CompletionRequest, Completion]], int]:
    """Six sessions of four turns, each turn's calls at once: what was drawn, and how many tokens
    have to be encoded if nothing kept is encoded again."""
    histories: list[list[int]] = [list(SYSTEM) for _ in range(6)]
    drawn: list[tuple[CompletionRequest, Completion]] = []
    due = 0
    cuts = [{}, {"temperature": 0.7}, {"top_k": 4}]
    for turn, each in enumerate(sessions(4, seed)):
        for at, (what, new) in enumerate(each):
            if what == "is edited":
                histories[at][len(histories[at]) // 2] = 3 + turn
            elif what == "is cut":
                histories[at] = histories[at][: len(SYSTEM) + 3]
            elif what == "begins anew":
                histories[at] = list(SYSTEM)
            histories[at] += new
        calls = [
            request(100 * turn + at, 0, history, 5, **cuts[at % 3])
            for at, history in enumerate(histories)
        ]
        whole = [history[:-1] for history in histories]
        due += sum(len(prompt) - told.known(prompt) for prompt in whole)
        told.kept += whole
        answers = run(e, calls)
        for call, history in zip(calls, histories, strict=True):
            answer = answers[call.key]
            drawn.append((call, answer))
            history += answer.tokens.tolist()
            told.kept.append(history[:-1])
    return drawn, due


def check(model: policy.PolicyModel, drawn: list[tuple[CompletionRequest, Completion]]) -> None:
    for call, answer in drawn:
        torch.testing.assert_close(
            torch.from_numpy(answer.logprobs), expected(model, answer, call), atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize(("family", "kv", "tied"), [("qwen3", 2, True), ("qwen2", 4, False)])
def test_kept_keys_draw_as_encoded(tmp_path: Path, family: str, kv: int, tied: bool) -> None:
    """With and without: the same tokens, the probabilities of transformers' own forward; and
    encoded is what no earlier prompt or answer begins with, to the token."""
    model = policy.build_model(tmp_path, "abcdefgh", family=family, kv_heads=kv, tied=tied, seed=3)
    plain, keeps = engine(model), engine(model, kept_tokens=LIMIT)
    old, _ = talk(plain, Told(), 1)
    new, due = talk(keeps, Told(), 1)
    assert [a.tokens.tolist() for _, a in new] == [a.tokens.tolist() for _, a in old]
    check(model, new)
    assert keeps.collect_metrics()["prefix/encoded_tokens"] == keeps.encoded == due
    assert keeps.encoded + keeps.reused == plain.encoded
    assert due < 0.6 * plain.encoded and plain.collect_metrics() == {}
    assert 12 < keeps.collect_metrics()["prefix/hits"] < 24
    assert keeps.collect_metrics()["prefix/reused_tokens"] == keeps.reused


def test_a_prompt_of_several_rows_is_looked_up_once(model: policy.PolicyModel) -> None:
    """Rows of a group share what is known and what is new, beside rows that know nothing, and
    while others are being written."""
    e = engine(model, slots=16, kept_tokens=LIMIT)
    first = [request(0, 0, [*SYSTEM, 3, 4, 5, 6, 7, 8], 4)]
    drawn = [(call, answer) for call, answer in zip(first, run(e, first).values(), strict=True)]
    long = request(1, 0, [4, 4, 4], 20)
    e.add([long])
    answers = e.step(2)
    calls = [request(2, sample, [*SYSTEM, 3, 4, 5, 6, 7, 9, 9], 6) for sample in range(3)]
    calls += [request(3, sample, [5, 5, 5, 5], 6) for sample in range(2)]
    calls += [request(4, 0, [*SYSTEM, 3, 4, 5, 6, 7], 6)]  # whole blocks, but for the last token
    calls += [request(5, 0, [*SYSTEM, 4, 4], 6)]
    e.add(calls)
    while e.active:
        answers += e.step(3)
    found = {answer.key: answer for answer in answers}
    check(model, drawn + [(call, found[call.key]) for call in [long, *calls]])
    assert e.hits == 3 and e.reused == 16 + 8 + 8
    assert e.encoded == 16 + 2 + (17 - 16) + 3 + (15 - 8) + (12 - 8)


def test_rows_that_know_much_stand_beside_rows_that_know_little(model: policy.PolicyModel) -> None:
    """The padding of one behind the columns of another is beyond every position there is."""
    e = engine(model, slots=4, kept_tokens=LIMIT)
    long, short = [3, 4, 5, 6, 7, 8, 9] * 8, [10, 9, 8, 7, 6, 5, 4, 3, 3]
    run(e, [request(0, 0, long, 1), request(1, 0, short, 1)])
    calls = [request(2, 0, [*long, 3, 3], 4), request(3, 0, [*short, *long[:49]], 4)]
    found = run(e, calls)
    check(model, [(call, found[call.key]) for call in calls])
    assert e.hits == 2 and e.reused == 56 + 8 and len(e.weights.cos) < 56 + 49


@pytest.mark.parametrize("in_flight", ["keep_kv", "recompute_kv"])
def test_keys_of_older_weights_serve_no_newer_version(tmp_path: Path, in_flight: str) -> None:
    """A row that lives through a swap leaves its keys behind only where they were computed again,
    and nothing of before is found."""
    old = policy.build_model(tmp_path / "a", "abcdefgh", seed=1)
    new = policy.build_model(tmp_path / "b", "abcdefgh", seed=2)
    e = engine(old, in_flight=in_flight, kept_tokens=LIMIT)
    ended = [request(at, 0, [*SYSTEM, 3 + at, 4], 3) for at in range(3)]
    before = run(e, ended)
    crossing = [request(10 + at, 0, [*SYSTEM, 3 + at, 9, 4, 5, 6], 20) for at in range(8)]
    e.add(crossing)
    answers = e.step(5)
    e.load(dict(policy.list_named_weights(new)), Label(1, 1), "d1")
    while e.active:
        answers += e.step(5)
    found = {answer.key: answer for answer in answers}
    crossed = [call for call in crossing if len(found[call.key].spans) == 2]
    assert len(crossed) >= 3
    after = [
        request(20 + at, 0, [*call.prompt.tolist(), *before[call.key].tokens.tolist(), 5], 4)
        for at, call in enumerate(ended)
    ]
    was = e.reused
    check(new, list(zip(after, run(e, after).values(), strict=True)))
    # of the rows that crossed: the block that all share
    assert e.reused - was == (0 if in_flight == "keep_kv" else len(after) * KEPT_BLOCK)
    more = [
        request(30 + at, 0, [*call.prompt.tolist(), *found[call.key].tokens.tolist(), 5], 4)
        for at, call in enumerate(crossed)
    ]
    was = e.reused
    later = run(e, more)
    check(new, [(call, later[call.key]) for call in more])
    known = [len(SYSTEM) if in_flight == "keep_kv" else len(call.prompt) - 2 for call in more]
    assert e.reused - was == sum(each // KEPT_BLOCK * KEPT_BLOCK for each in known)


def test_a_call_that_is_cut_leaves_its_prompt_alone(model: policy.PolicyModel) -> None:
    e = engine(model, kept_tokens=LIMIT)
    prompt = [*SYSTEM, 3, 4, 5, 6, 7, 8]
    calls = [request(at, 0, prompt, 20) for at in range(6)]
    e.add(calls)
    done = {answer.key for answer in e.step(4)}
    assert e.abort(call.key for call in calls).keys() == {c.key for c in calls} - done
    assert e.active == 0
    again = request(9, 0, [*prompt, 9, 9, 9, 9, 9, 9, 9, 9, 9], 10)
    check(model, list(zip([again], run(e, [again]).values(), strict=True)))
    assert e.reused % KEPT_BLOCK == 0 and e.reused >= 2 * KEPT_BLOCK and e.hits == 1


def test_memory_is_bounded_and_what_was_used_last_stays(model: policy.PolicyModel) -> None:
    e = engine(model, kept_tokens=9 * KEPT_BLOCK + 3)
    drawn, _ = talk(e, Told(), 2)
    check(model, drawn)
    assert e.prefix_cache is not None
    assert e.prefix_cache.k.shape[2] == 9 * KEPT_BLOCK == e.prefix_cache.tokens
    assert 0 < e.reused < talk_reused(model, 2)
    none = engine(model, kept_tokens=KEPT_BLOCK - 1)
    check(model, talk(none, Told(), 3)[0])
    assert none.reused == 0 and none.prefix_cache is not None and none.prefix_cache.tokens == 0


def talk_reused(model: policy.PolicyModel, seed: int) -> int:
    e = engine(model, kept_tokens=LIMIT)
    talk(e, Told(), seed)
    return e.reused


class Numbered:
    """A store of blocks whose keys say which sequence they end, so that a wrong one shows."""

    def __init__(self, model: policy.PolicyModel, tokens: int) -> None:
        assert model.fast is not None
        self.store = decoder.PrefixCache(model.fast, 1, tokens, torch.zeros(0))
        self.heads, self.width = model.fast.kv_heads, model.fast.head_dim
        self.names: dict[tuple[int, ...], float] = {}

    def keys(self, tokens: list[int]) -> torch.Tensor:
        """[1, kv heads, L, d]: a number for each beginning."""
        ends = [
            float(self.names.setdefault(tuple(tokens[: at + 1]), len(self.names)))
            for at in range(len(tokens))
        ]
        return torch.tensor(ends)[None, None, :, None].expand(1, self.heads, -1, self.width)

    def keep(self, tokens: list[int]) -> None:
        keys = self.keys(tokens)
        backwards = np.arange(len(tokens))[::-1].copy()  # columns are in no order of their own
        self.store.store(np.array(tokens, np.int32), keys.flip(2), -keys.flip(2), backwards)

    def find(self, tokens: list[int]) -> int:
        numbers = self.store.find(np.array(tokens, np.int32))
        columns = torch.from_numpy(self.store.list_columns(numbers))
        assert torch.equal(self.store.k[:, :, columns], self.keys(tokens)[:, :, : len(columns)])
        assert torch.equal(self.store.v[:, :, columns], -self.keys(tokens)[:, :, : len(columns)])
        return len(numbers)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_block_is_of_its_sequence(model: policy.PolicyModel, data: st.DataObject) -> None:
    """Whatever was kept, used and thrown away before: beginnings are found whole or in part, never
    another's, and what was just kept is there."""
    most = data.draw(st.integers(1, 6))
    kept = Numbered(model, most * KEPT_BLOCK)
    blocks = st.lists(st.integers(3, 4), min_size=1, max_size=5)
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = [each for each in data.draw(blocks) for _ in range(KEPT_BLOCK)]
        if data.draw(st.booleans()):
            kept.keep(tokens)
            assert kept.find(tokens) == min(most, len(tokens) // KEPT_BLOCK)
        else:
            kept.find(tokens)
        store = kept.store
        assert store.tokens <= most * KEPT_BLOCK
        assert len(set(store.blocks.values())) == len(store.blocks)
        order = list(store.blocks)
        numbers = {number: name for name, number in store.blocks.items()}
        for name in order:  # a block's beginning is there, and used after it
            assert name[0] == -1 or order.index(numbers[name[0]]) > order.index(name)


def test_the_least_recently_used_goes_first(model: policy.PolicyModel) -> None:
    kept = Numbered(model, 4 * KEPT_BLOCK)
    a, b, c = ([token] * (2 * KEPT_BLOCK) for token in (3, 4, 5))
    kept.keep(a)
    kept.keep(b)
    assert kept.find(a) == 2
    kept.keep(c[:KEPT_BLOCK])  # the end of b goes before its beginning
    assert (kept.find(a), kept.find(b)) == (2, 1)
    kept.keep(c)
    assert (kept.find(a), kept.find(b), kept.find(c)) == (1, 1, 2)
    kept.store.clear()
    assert not any(map(kept.find, (a, b, c)))
    kept.keep(a)
    assert kept.find(a) == 2


def test_runs_of_sessions_keep_keys_and_no_others_do(tmp_path: Path) -> None:
    policy.build_model(tmp_path / "m", "0123456789+-*=() ?", hidden=32, layers=1)

    def kept(config: str, *sets: str) -> decoder.PrefixCache | None:
        made = make_engine(load.load(config, [f"model.path='{tmp_path / 'm'}'", *sets]))
        assert isinstance(made, EmbeddedEngine)
        return made.prefix_cache

    on = kept("calc", "generator.prefix_cache_tokens=80")
    assert on is not None and on.max_blocks == 80 // KEPT_BLOCK
    assert kept("calc", "generator.prefix_cache_tokens=0") is None
    assert kept("calc", "exact=true", "weights.in_flight='recompute_kv'") is None
    assert kept("demo") is None
