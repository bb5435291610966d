"""vLLM draws the calls of sessions: behind the keys of earlier calls with the log-probabilities of
one encoded whole, never with keys of other weights; a whole run."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from agent_run_kit import check, command, rows
from engine_kit import expected, request
from gateway_calls_kit import call
from process_kit import run_command
from vllm_kit import flat, vllm_config

from actors import engine_vllm
from actors.engine import Completion, CompletionRequest
from actors.engine_vllm import BLOCK, VllmEngine
from actors.generator import CallTurn
from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.tasks.calc import CalcTask

pytestmark = pytest.mark.slow

SLOTS = 8
CONTEXT = 160
KEPT = 4096  # tokens: more than any test here needs
SYSTEM = [3 + at * at % 8 for at in range(BLOCK + 7)]  # what every session begins with


class Engine:
    """One engine for all tests; `old` and `new` are two models of its shape."""

    def __init__(self, path: Path) -> None:
        shape: dict[str, Any] = {"heads": 2, "kv_heads": 1}  # 32 dimensions a head
        self.path = path / "old"
        self.old = policy.build_model(self.path, "abcdefgh", seed=3, **shape)
        self.new = policy.build_model(path / "new", "abcdefgh", seed=4, **shape)
        self.engine = VllmEngine(
            vllm_config(self.path, sessions=True, context=CONTEXT, prefix_cache_tokens=KEPT)
        )
        self.at = 0

    def load(self, model: policy.PolicyModel) -> Label:
        self.at += 1
        label = Label(1, self.at)
        probe = policy.compute_probe_logprobs(model).tobytes()
        self.engine.load(flat(model), label, f"d{self.at}", probe)
        return label

    def draw(self, requests: list[CompletionRequest]) -> dict[tuple[int, int, int], Completion]:
        self.engine.add(requests)
        answers: list[Completion] = []
        while self.engine.active:
            answers += self.engine.step(5)
        return {answer.key: answer for answer in answers}

    def counted(self, requests: list[CompletionRequest]) -> tuple[int, int, int]:
        """(prompts that began with kept keys, tokens reused, tokens encoded) of these calls."""
        before = self.engine.hits, self.engine.reused, self.engine.encoded
        self.draw(requests)
        after = self.engine.hits, self.engine.reused, self.engine.encoded
        hits, reused, encoded = (now - then for now, then in zip(after, before, strict=True))
        return hits, reused, encoded


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(tmp_path_factory.mktemp("calls"))
    yield made
    made.engine.close()


def worst(model: policy.PolicyModel, answer: Completion, part: slice = slice(None)) -> float:
    """How far its log-probabilities are off those of one plain forward."""
    want = expected(model, answer, request(0, 0, [0]))
    return float((torch.from_numpy(answer.logprobs) - want)[part].abs().max())


def known(prompt: list[int], kept: list[list[int]]) -> int:
    """Tokens in whole blocks that the prompt without its last token has in common with one kept."""
    most = 0
    for old in kept:
        same = [one == other for one, other in zip(prompt[:-1], old, strict=False)]
        most = max(most, (same.index(False) if False in same else len(same)) // BLOCK * BLOCK)
    return most


def test_calls_use_keys_of_one_version(vllm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six sessions of four turns, one of them edited and one begun anew, then the same with other
    weights: what is encoded is what no call since the load begins with, to the token."""
    monkeypatch.setattr(vllm.engine, "in_flight", "keep_kv")  # a load then drops no keys
    for model in (vllm.old, vllm.new):
        vllm.load(model)
        before = vllm.engine.collect_metrics()
        random = np.random.default_rng(1)
        histories = [list(SYSTEM) for _ in range(6)]
        kept: list[list[int]] = []
        due = hits = asked = 0
        for turn in range(4):
            histories[4][5] = 3 + turn
            histories[5] = list(SYSTEM)
            for history in histories:
                history += random.integers(3, 11, int(random.integers(6, 20))).tolist()
            calls = [request(100 * turn + at, 0, past, 5) for at, past in enumerate(histories)]
            for history in histories:
                found = known(history, kept)
                hits += found > 0
                asked += len(history)
                due += len(history) - found
                kept.append(list(history))
            answers = vllm.draw(calls)
            for asked_for, history in zip(calls, histories, strict=True):
                answer = answers[asked_for.key]
                assert worst(model, answer) < 1e-5
                history += answer.tokens.tolist()
                kept.append(history[:-1])
        now = vllm.engine.collect_metrics()
        told = {name: now[name] - before[name] for name in now}
        assert 12 < hits < 24 and due < 0.6 * asked
        assert told == {
            "prefix/hits": hits,
            "prefix/reused_tokens": asked - due,
            "prefix/encoded_tokens": due,
        }


def test_a_request_with_prompt_logprobs_reads_no_kept_keys(vllm: Engine) -> None:
    """As the probe of a swap is one, it is encoded with the weights that were loaded."""
    vllm.load(vllm.old)
    vllm.draw([request(0, 0, SYSTEM, 2)])
    llm = vllm.engine.llm
    for kept, how in ((BLOCK, {}), (0, {"prompt_logprobs": 0})):
        settings = engine_vllm.make_sampling_params(max_tokens=1, temperature=0.0, **how)
        llm.add_request("asked", vllm.engine._build_prompt(SYSTEM, 0), settings)
        outputs: list[Any] = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert [output.num_cached_tokens for output in outputs if output.finished] == [kept]


def test_keys_that_calls_may_keep_have_room_and_without_it_equal_prompts_alone_share(
    vllm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = vllm.engine.llm.vllm_config.cache_config.num_gpu_blocks
    assert blocks == (SLOTS + 1) * CONTEXT // BLOCK + KEPT // BLOCK + 16
    vllm.load(vllm.old)
    size = len(SYSTEM)
    first, again = request(0, 0, SYSTEM, 2), request(1, 0, SYSTEM, 2)
    assert vllm.counted([first]) == (0, 0, size)
    assert vllm.counted([again]) == (1, BLOCK, size - BLOCK)
    monkeypatch.setattr(vllm.engine, "kept_tokens", 0)
    assert vllm.counted([again]) == (0, 0, size) and vllm.counted([first]) == (0, 0, size)
    assert vllm.counted([first]) == (1, BLOCK, size - BLOCK) and vllm.engine.collect_metrics() == {}
    monkeypatch.setattr(vllm.engine, "kept_tokens", None)
    vllm.load(vllm.old)
    assert vllm.counted([again]) == (0, 0, size)
    assert vllm.counted([first]) == (1, BLOCK, size - BLOCK) and vllm.engine.collect_metrics() == {}


def test_runs_of_sessions_keep_keys_and_no_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []
    shape = SimpleNamespace(num_hidden_layers=1)
    monkeypatch.setattr(engine_vllm, "load_text_config", lambda path: shape)
    monkeypatch.setattr(engine_vllm, "list_probe_ids", lambda shape: [])
    for config, *sets in (
        ("calc", "generator.prefix_cache_tokens=80"),
        ("calc", "generator.prefix_cache_tokens=0"),
        ("vllm",),
    ):
        settings = load.load(config, ["generator.engine='vllm'", *sets])
        made.append(engine_vllm.ProbedEngine(settings).kept_tokens)
    assert made == [80, 0, None]


def calls_of(vllm: Engine, in_flight: str) -> CallTurn:
    vllm.engine.in_flight = in_flight
    raw = {
        "model": {"path": str(vllm.path), "device": "cpu"},
        "task": {"name": "sort"},
        "generator": {"engine": "vllm", "slots": SLOTS, "max_new_tokens": 12, "context": CONTEXT},
        "agent": {"env": "x:y"},
    }
    made = CallTurn(load.build(raw), vllm.engine)
    made.stops = (1,)
    return made


def asked(number: int, least: Label, **more: Any) -> m.GenerationCall:
    """A call of a session whose history is longer than a block."""
    prompt = np.array([*SYSTEM, 3 + number % 8], "<i4").tobytes()
    plain = call(number, least=least)
    return msgspec.structs.replace(plain, prompt=prompt, max_new_tokens=12, sample=number, **more)


@pytest.mark.parametrize("in_flight", ["keep_kv", "recompute_kv"])
def test_a_call_across_a_swap_has_a_span_for_each_version(vllm: Engine, in_flight: str) -> None:
    """Calls are admitted at or above their session's minimum; one that is cut tells its loss."""
    turn = calls_of(vllm, in_flight)
    first = vllm.load(vllm.old)
    second = Label(1, vllm.at + 1)
    turn.take_calls([asked(number, first) for number in range(6)] + [asked(6, second)])
    starting, _ = turn.build_requests(first)
    assert [each.key[0] for each in starting] == list(range(6))
    vllm.engine.add(starting)
    for answer in vllm.engine.step(4):
        turn.finish(answer)
    written = {key[0]: tokens for key, tokens in vllm.engine.count_tokens().items()}
    cut = max(written)
    assert len(written) >= 4 and set(written.values()) == {4}
    turn.cancel_calls([cut])
    assert vllm.load(vllm.new) == second
    late, _ = turn.build_requests(second)
    assert [each.key[0] for each in late] == [6]
    for answer in vllm.draw(late).values():
        turn.finish(answer)
    called = {each.id: each for each in turn.results}
    assert set(called) == set(range(7)) and not turn.calls and not turn.schedule.held
    assert (called[cut].lost, called[cut].tokens) == (4, b"")
    assert [span.label for span in called[6].spans] == [second]
    assert worst(vllm.new, drawn(asked(6, second), called[6])) < 1e-5
    two = [each for each in called.values() if len(each.spans) == 2]
    assert len(two) >= 2
    for each in two:
        answer = drawn(asked(each.id, first), each)
        keys = first if in_flight == "keep_kv" else second
        assert [(s.label, s.start, s.end, s.kv) for s in each.spans] == [
            (first, 0, 4, first),
            (second, 4, len(answer.tokens), keys),
        ]
        assert worst(vllm.old, answer, slice(0, 4)) < 1e-5
        off = worst(vllm.new, answer, slice(4, None))
        assert off > 1e-3 if in_flight == "keep_kv" else off < 1e-5


def drawn(of: m.GenerationCall, called: m.CallResult) -> Completion:
    """What the gateway hears of a call, as an answer."""
    prompt, tokens = (np.frombuffer(ids, "<i4") for ids in (of.prompt, called.tokens))
    logprobs = np.frombuffer(called.logprobs, "<f4").copy()
    ended = called.spans, called.finish
    return Completion((of.id, 0, 0), prompt, tokens, logprobs, *ended, support=None)


def test_the_same_call_drawn_again_is_the_same(vllm: Engine) -> None:
    """Behind kept keys too, whatever its number, and with another stream it is not."""
    turn = calls_of(vllm, "recompute_kv")
    label = vllm.load(vllm.old)
    for numbers in ((10, 11), (12, 13)):
        turn.take_calls(
            [
                msgspec.structs.replace(asked(2, label, stream=stream), id=number)
                for number, stream in zip(numbers, (0, 8), strict=True)
            ]
        )
        for answer in vllm.draw(turn.build_requests(label)[0]).values():
            turn.finish(answer)
    tokens = {each.id: each.tokens for each in turn.results}
    assert tokens[10] == tokens[12] != tokens[11] == tokens[13]


def test_a_run_of_sessions_with_vllm_and_deepspeed(tmp_path: Path) -> None:
    """At limit 0 the learner finds every probability that vLLM drew with, tools and all."""
    policy.build_model(tmp_path / "m", CalcTask.symbols, heads=2, layers=1)
    argv = command(
        *(tmp_path / "m", tmp_path, "v", "generator.engine='vllm'", "generator.slots=16"),
        *("learner.backend='deepspeed'", "learner.zero_stage=2"),
        *("learner.steps=3", "staleness.max_lag=0", "agent.deadline_s=7200.0"),
        *("wires.connect_s=1800", "watchdog.startup_s=3600.0", "watchdog.floor_s=3600.0"),
    )
    run_command(argv, timeout=7200).check()
    samples = check(tmp_path / "v", 0, 3)
    assert max(s["calls"] for s in samples) > 1 and any(0 in s["mask"] for s in samples)
    assert json.loads((tmp_path / "v" / "summary.json").read_text())["mismatch_k3_max"] < 1e-8
    found = [row.get("mismatch/k3_at_lag_0") for row in rows(tmp_path / "v" / "metrics.jsonl")]
    seen = [value for value in found if value is not None]
    assert seen and max(seen) < 1e-8
