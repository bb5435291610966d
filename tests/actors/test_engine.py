"""The embedded engine against transformers: it records the log-probability it sampled from."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import CUTS, EOS, engine, expected, request, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from actors import decoder, engine_embedded
from actors.decoder import KEPT_BLOCK
from actors.engine import Completion, CompletionRequest, draw_uniform_rows
from actors.engine_embedded import EmbeddedEngine, make_engine, round_mantissa
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.models import packed_attention, policy
from asyncrl.records import machine_memory


@pytest.mark.parametrize(
    "family,kv,tied", [("qwen3", 2, True), ("llama", 4, False), ("qwen2", 2, True)]
)
def test_logprobs_are_of_what_was_sampled(tmp_path: Path, family: str, kv: int, tied: bool) -> None:
    model = policy.build_model(tmp_path, "abcdefgh", family=family, kv_heads=kv, tied=tied, seed=3)
    requests = [
        request(t, s, [3 + t % 8] * (1 + t), 5 + (3 * t + s) % 16, **CUTS[t % 5])
        for t in range(10)
        for s in range(3)
    ]
    answers = run(engine(model), requests)
    assert len(answers) == len(requests)
    for r in requests:
        a = answers[r.key]
        assert 0 < len(a.tokens) <= r.max_new_tokens
        assert (a.finish == "stop") == (a.tokens[-1] == EOS) and EOS not in a.tokens[:-1]
        torch.testing.assert_close(
            torch.from_numpy(a.logprobs), expected(model, a, r), atol=2e-5, rtol=1e-4
        )


def test_an_engine_with_rounded_weights_samples_from_those_and_records_it(tmp_path: Path) -> None:
    model = policy.build_model(tmp_path, "abcdefgh", seed=3)
    requests = [request(t, s, [3 + t % 8] * (1 + t), 12) for t in range(4) for s in range(3)]
    answers = run(engine(model, mantissa_bits=3), requests)
    before = [expected(model, answers[r.key], r) for r in requests]
    with torch.no_grad():
        for w in model.hf.parameters():
            coarse = round_mantissa(w, 3)
            assert (coarse - w).abs().le(w.abs() / 16).all()
            assert coarse.frexp().mantissa.mul(16).frac().eq(0).all()
            w.copy_(coarse)
    for r, was in zip(requests, before, strict=True):
        said = torch.from_numpy(answers[r.key].logprobs)
        torch.testing.assert_close(said, expected(model, answers[r.key], r), atol=2e-5, rtol=1e-4)
        assert (said - was).abs().max() > 1e-3  # and not from the learner's


def test_a_bfloat16_engine_takes_the_learners_float32_weights(tmp_path: Path) -> None:
    learners = policy.build_model(tmp_path, "abcdefgh", seed=3)
    policy.export(learners, tmp_path / "m")
    own = policy.load_policy(tmp_path / "m", "bfloat16", "cpu")
    e = EmbeddedEngine(own, slots=8, context=64, max_new_tokens=20)
    assert (e.label, e.digest) == (Label(0, 0), "")
    requests = [request(t, s, [3 + t % 8] * (1 + t), 12) for t in range(4) for s in range(3)]
    for version in (1, 2):
        e.load(dict(policy.list_named_weights(learners)), Label(1, version), f"d{version}")
        off = max(
            float((torch.from_numpy(a.logprobs) - expected(learners, a, requests[0])).abs().max())
            for a in run(e, requests).values()
        )
        assert 1e-5 < off < 0.1


def test_what_is_drawn_does_not_depend_on_neighbours_slots_or_order(tmp_path: Path) -> None:
    model = policy.build_model(tmp_path, "abcdefgh", seed=3)
    requests = [request(t, s, [3, 4 + t]) for t in range(6) for s in range(2)]
    one = run(engine(model, slots=12), requests)
    two = run(engine(model, slots=3), requests[::-1], n=1)
    assert all(one[k].tokens.tolist() == two[k].tokens.tolist() for k in one)
    assert len({tuple(a.tokens) for a in one.values()}) > 6  # streams differ between samples


@pytest.mark.parametrize("in_flight", ["recompute_kv", "keep_kv"])
def test_swap_in_mid_answer(tmp_path: Path, in_flight: str) -> None:
    """Under recompute_kv a token's logprob follows its span's weights; keep_kv sees old keys."""
    old = policy.build_model(tmp_path / "a", "abcdefgh", seed=1)
    new = policy.build_model(tmp_path / "b", "abcdefgh", seed=2)
    e = engine(old, in_flight=in_flight)
    e.add([request(t, 0, [3, 4, 3 + t], 20) for t in range(8)])
    answers = e.step(6)
    e.load(dict(policy.list_named_weights(new)), Label(1, 1), "d1")
    while e.active:
        answers += e.step(3)
    two = [a for a in answers if len(a.spans) == 2]
    assert len(two) >= 3
    far = 0.0
    for a in two:
        assert [(s.label, s.digest) for s in a.spans] == [((1, 0), "d0"), ((1, 1), "d1")]
        assert [(s.start, s.end) for s in a.spans] == [(0, 6), (6, len(a.tokens))]
        assert a.spans[1].kv == ((1, 1) if in_flight == "recompute_kv" else (1, 0))
        r = request(*a.key[:2], [0])
        want = torch.cat([expected(old, a, r)[:6], expected(new, a, r)[6:]])
        off = (torch.from_numpy(a.logprobs) - want).abs()
        assert off[:6].max() < 2e-5
        far = max(far, float(off[6:].max()))
    assert far < 2e-5 if in_flight == "recompute_kv" else far > 1e-3


def test_growing_prompts_and_answers_keep_what_is_live(tmp_path: Path) -> None:
    model = policy.build_model(tmp_path, "abcdefgh", seed=3)
    e = engine(model)
    first = [request(t, 0, [3, 4 + t], 20) for t in range(4)]
    e.add(first)
    answers = e.step(7)
    late = [request(9, s, [3] * 20, 40) for s in range(2)]
    answers += run(e, late).values()
    made = e.steps_made
    assert made >= max(len(a.tokens) for a in answers) and not e.step(5)
    assert e.steps_made == made, "an empty engine makes no step"
    e.add([dataclasses.replace(request(t, 0, [3], 2 * t), stop=()) for t in range(1, 5)])
    rows = []
    while e.active:
        e.step(1)
        rows.append(e.used)
    assert rows == [4, 4, 4, 4, 2, 2, 1, 1], "compacted below three quarters"
    for r in first + late:
        a = next(a for a in answers if a.key == r.key)
        torch.testing.assert_close(
            torch.from_numpy(a.logprobs), expected(model, a, r), atol=2e-5, rtol=1e-4
        )


def test_uniforms_are_a_counter_stream() -> None:
    a, other = draw_uniform_rows([(1, 2, 3), (1, 3, 2)], 1000)
    assert (draw_uniform_rows([(1, 2, 3)], 10) == a[:10]).all() and ((a > 0) & (a < 1)).all()
    assert abs(a.mean() - 0.5) < 0.05 and (other != a).mean() > 0.99
    # any number is a key, and a row does not know what is drawn beside it
    keys = [(1, 2, 3), (-3, 2**62, 7), (2**70 + 1, 0, 0)]
    rows = draw_uniform_rows(keys, 100)
    assert all((draw_uniform_rows([key], 100) == rows[n]).all() for n, key in enumerate(keys))
    assert len({row.tobytes() for row in rows}) == 3
    first = np.float32([0.5003024339675903, 0.540410041809082, 0.3515719473361969])
    assert (rows[0, :3] == first).all()  # runs of earlier versions repeat


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns that each step's attention looked at."""
    found: list[int] = []
    plain = decoder.decode

    def spy(*args: Any, **more: Any) -> torch.Tensor:
        found.append(args[-1])
        return plain(*args, **more)

    monkeypatch.setattr(decoder, "decode", spy)
    return found


def test_attention_looks_at_the_columns_in_use_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked: list[int]
) -> None:
    """A long limit costs short answers nothing: they stay as they were, also as columns grow."""
    model = policy.build_model(tmp_path, "abcdefgh", hidden=32, layers=2)
    answers = []
    for block in (4, 10**6):
        monkeypatch.setattr(decoder, "BLOCK", block)
        one = EmbeddedEngine(model, slots=4, context=60, max_new_tokens=24)
        one.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
        looked.clear()
        out = {}
        for start, most in ((0, 7), (4, 24), (8, 5), (12, 20), (16, 40), (20, 30)):
            prompt = np.array([3, 4, 5], np.int32)
            one.add(
                CompletionRequest((i, 0, 1), prompt, i, most - i % 3, 1.0, 1.0, 0, (), 0)
                for i in range(start, start + 4)
            )
            for answer in one.step(6):  # the next ones come while these are being written
                out[answer.key] = answer
        while one.active:
            out |= {answer.key: answer for answer in one.step()}
        assert len(out) == 24
        if block == 4:
            assert looked[0] == 12 and max(looked) == 8 + 40  # 8 columns for prompts
            assert looked[:7] == [12, 12, 12, 12, 16, 16, 16]
        answers.append(out)
    for key, found in answers[0].items():
        assert (found.tokens == answers[1][key].tokens).all()
        np.testing.assert_allclose(found.logprobs, answers[1][key].logprobs, atol=1e-5)


@settings(deadline=None)
@given(st.data())
def test_a_column_is_taken_again_when_no_live_row_has_keys_in_it(data: st.DataObject) -> None:
    """The lowest free one at each look; what rows wrote is found by their steps, also after
    growing; the highest in use is never below one that a row has."""
    count = data.draw(st.integers(1, 12))
    columns = decoder.StepColumns(count)
    rows: dict[int, int] = {}  # row -> the step it was born at
    where: dict[int, int] = {}
    for step in range(data.draw(st.integers(1, 80))):
        for row, born in list(rows.items()):
            if step - born >= count - 1 or data.draw(st.booleans()):
                del rows[row]
        rows[step] = step
        oldest = min(rows.values())
        column = columns.allocate(step, lambda oldest=oldest: oldest)
        live = {where[at] for at in range(oldest, step)}
        assert column not in live and 0 <= column < columns.count
        where[step] = column
        wanted = [where[at] for at in range(oldest, step + 1)]
        assert columns.list_columns(oldest, step + 1).tolist() == wanted
        assert columns.high > max(live | {column})
        if data.draw(st.booleans()) and count < 12:
            count += 1
            columns.grow(count)
            assert columns.list_columns(oldest, step + 1).tolist() == wanted
    columns.clear()
    assert columns.high == 0 and columns.allocate(0, lambda: 0) == 0


class LargestTensor(TorchDispatchMode):
    """The most numbers that any one tensor has, of those that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return made


@pytest.mark.parametrize(
    ("fixed", "begun"), [(False, 0), (False, 1000), (True, 0)], ids=["plain", "begun", "exact"]
)
def test_a_long_prompt_is_encoded_in_blocks_of_queries(
    fixed: bool, begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are those of a prompt that is not cut, in exact mode bit for bit; no tensor
    has more than a fixed number of scores, or some numbers a token."""
    model = policy.build_model(tmp_path / "m", "0123456789", max_positions=4096, kv_heads=2)
    e = EmbeddedEngine(model, slots=2, context=4000, fixed=fixed)
    e.load(dict(policy.list_named_weights(model)), Label(1, 0), "d0")
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 12, (2, 1600)))
    start = None
    if begun:
        past = decoder.encode(e.weights, ids[:, :begun])
        keys, values = (torch.stack([layer[at] for layer in past]) for at in (0, 1))
        start = decoder.PrefilledPrefix(keys, values, torch.tensor([begun, begun - 300]))

    def encoded() -> tuple[int, list[Any]]:
        with torch.inference_mode(), LargestTensor() as largest:
            if fixed:
                found = decoder.encode(e.weights, ids)
            else:
                found = decoder.encode(e.weights, ids, start)
        return largest.numbers, [x for layer in found for x in layer]

    monkeypatch.setattr(decoder, "SCORES", 1 << 18)
    most, in_blocks = encoded()
    assert most <= max(1 << 18, ids.numel() * 4 * model.hf.config.intermediate_size)
    monkeypatch.setattr(decoder, "SCORES", 1 << 40)
    monkeypatch.setitem(packed_attention.UNCUT, "cpu", 1 << 20)
    whole_most, whole = encoded()
    if fixed or begun:  # exact mode has all scores, a prefix a mask, which all heads share
        assert whole_most >= 2 * (4 if fixed else 1) * 1600 * (1600 + begun) > 2 * most
    else:
        assert whole_most == most  # scores are never stored
    for cut, uncut in zip(in_blocks, whole, strict=True):
        assert torch.equal(cut, uncut) if fixed else torch.allclose(cut, uncut, atol=1e-5)


def test_rows_are_cut_into_even_blocks_of_at_most_a_number_of_queries() -> None:
    def cut(*args: Any) -> list[int]:
        return [block.stop for block in packed_attention.cut_queries(*args)]

    assert cut(64, 64, "cpu") == [64] and cut(256, 999, "cuda") == [256]
    assert cut(65, 999, "cpu") == [48, 65] and cut(257, 999, "cuda") == [144, 257]
    assert cut(8200, 9999, "cpu") == [*range(272, 8161, 272), 8200]  # at most 32 blocks
    assert cut(64, 47, "cpu") == [32, 64] and cut(40, 1, "cpu") == [16, 32, 40]


def test_prompts_are_encoded_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is the same, and a long prompt pads no short ones."""
    model = policy.build_model(tmp_path / "m", "0123456789")
    prompts = [[3 + (at + i) % 9 for i in range(length)] for at, length in enumerate((9, 2, 30, 3))]
    requests = [request(at, 0, prompt, 6) for at, prompt in enumerate(prompts)]
    together = run(engine(model), requests)
    monkeypatch.setattr(engine_embedded, "TOGETHER", 32)
    seen = []
    plain = decoder.encode

    def spy(w: decoder.FusedWeights, ids: torch.Tensor, **more: Any) -> Any:
        seen.append(tuple(ids.shape))
        return plain(w, ids, **more)

    monkeypatch.setattr(decoder, "encode", spy)
    apart = run(engine(model), requests)
    assert seen == [(3, 8), (1, 29)]
    for key, answer in together.items():
        assert np.array_equal(answer.tokens, apart[key].tokens)


def test_a_context_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy.build_model(tmp_path / "m", "0123456789")
    e = engine(model)
    of_token = e.token_bytes
    assert of_token == 2 * 2 * 4 * 16 * 4  # keys and values, layers, heads, their width, float32
    monkeypatch.setattr(machine_memory, "read_free_bytes", lambda: of_token * 63)
    with pytest.raises(ConfigError, match=r"generator.context = 64: .* set a lower context"):
        engine(model)
    for free, refused in ((1 << 30, False), (of_token * 60, True)):
        monkeypatch.setattr(machine_memory, "read_free_bytes", lambda free=free: free)
        e.add([request(free, 0, [3] * 40)])
        if not refused:
            assert len(run(e, [])) == 1
            continue
        # rows of the cache are as wide as the longest prompt so far: this one widens them
        e.add([request(free, 1, [3] * 43)])
        with pytest.raises(ConfigError, match=r"a prompt of 43 tokens: .*generator.slots"):
            e.step()


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
    assert e.hits == 2 and e.reused == 56 + 8 and e.weights.positions < 56 + 49


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
    # one that would have ended before the others, which are too many to be moved up
    more = [dataclasses.replace(request(20 + n, 0, prompt, 6 + n), stop=()) for n in range(6)]
    e.add(more)
    assert not e.step(2) and e.abort([more[0].key]) == {more[0].key: 2}
    assert list(run(e, [])) == [one.key for one in more[1:]]


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
        like = torch.zeros(1, 0, model.fast.kv_heads, 0, model.fast.head_dim)
        self.store = decoder.PrefixCache(tokens, like)
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
    grown = Numbered(model, 70 * KEPT_BLOCK)
    for blocks, allocated in ((1, 32), (32, 32), (33, 64), (65, 70)):
        grown.keep([3] * (blocks * KEPT_BLOCK))
        assert grown.store.k.shape[2] == grown.store.v.shape[2] == allocated * KEPT_BLOCK


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
