"""vLLM as the generator's engine: logprobs against transformers, swaps, spans, probe, a run."""

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import CUTS, expected, request
from packaging.requirements import Requirement
from process_kit import ROOT, run_command
from vllm_kit import flat, vllm_config
from wrong_model_kit import chat_model, check_ends
from wrong_model_kit import config as chat_config

from actors.decoding.constraints import GrammarCompiler
from actors.engine import Completion, CompletionRequest
from actors.engine_vllm import (
    AHEAD,
    PLAIN,
    DirectWriter,
    ProbedEngine,
    ReferenceWeights,
    SeededSampler,
    UnsupportedModel,
    VllmEngine,
    draw_numbers,
    make_engine,
)
from asyncrl.config import load as config_load
from asyncrl.config.engines import ENGINES
from asyncrl.contract.errors import ConfigError, ProtocolError
from asyncrl.contract.versions import Label
from asyncrl.models import adapter_files, adapters, installed, policy
from asyncrl.models.tokenizer import collect_stop_tokens, load_tokenizer

pytestmark = pytest.mark.slow

SHAPE: dict[str, Any] = {"heads": 2, "kv_heads": 1}  # 32 dimensions a head
CASES = {
    "tied": ("qwen3", True, "float32", "keep_kv", 1e-5),
    "untied": ("llama", False, "float32", "recompute_kv", 1e-5),
    "bias": ("qwen2", True, "float32", "recompute_kv", 1e-5),
    "bfloat16": ("qwen3", False, "bfloat16", "recompute_kv", 5e-2),
}


def test_answers_end_at_any_of_several_tokens(tmp_path: Path) -> None:
    model = chat_model(tmp_path, **SHAPE)
    e = VllmEngine(vllm_config(tmp_path))
    e.load(flat(model), Label(1, 1), "d", policy.compute_probe_logprobs(model).tobytes())
    stops = collect_stop_tokens(load_tokenizer(tmp_path), chat_config(tmp_path))
    e.add([replace(request(t, 0, [4, 5, 13], 12), stop=stops) for t in range(64)])
    answers: list[Completion] = []
    while e.active:
        answers += e.step(5)
    assert len(answers) == 64
    check_ends({a.key: a for a in answers}, stops, 12)


def test_adapters_are_added_to_the_base_at_the_swap(tmp_path: Path) -> None:
    """Every version anew: the probe is computed here, of the merged weights."""
    policy.build_model(tmp_path / "m", "abcdefgh", **SHAPE)
    policy.build_model(tmp_path / "n", "abcdefgh", seed=1, **SHAPE)
    sets = ["generator.engine='vllm'", "lora.rank=4", "generator.slots=4", "generator.context=32"]
    sets += ["generator.max_new_tokens=12"]
    config = config_load.load("demo", [f"model.path='{tmp_path / 'm'}'", *sets])
    engine = make_engine(config)
    models = []
    for seed, name in ((7, "m"), (8, "m"), (7, "n")):
        model = policy.load_policy(tmp_path / name, "float32", "cpu")
        adapters.attach(model, config.lora, 0)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, tensor in adapter_files.list_adapter_weights(model.hf):
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.2)
        models.append(model)
    one, other, wrong = models
    seen = []
    for number, model in enumerate((one, other, one)):
        assert model.adapter is not None
        base = model.adapter.base.encode()
        engine.load(flat(model), Label(1, number), f"d{number}", base)
        asked = request(0, 0, [4, 5, 3], 12)
        engine.add([asked])
        answers: list[Completion] = []
        while engine.active:
            answers += engine.step(5)
        seen.append(answers[0])
        want = expected(adapters.merge_model(model, "cpu"), answers[0], asked)
        assert float((torch.from_numpy(answers[0].logprobs) - want).abs().max()) < 1e-5
    assert engine.probes == 3 and np.array_equal(seen[0].logprobs, seen[2].logprobs)
    assert not np.array_equal(seen[0].logprobs, seen[1].logprobs) and wrong.adapter is not None
    with pytest.raises(ConfigError, match="the learner's adapter belongs to"):
        engine.load(flat(wrong), Label(1, 3), "d3", wrong.adapter.base.encode())
    engine.close()


class Case:
    """One engine with its first weights loaded; `old` and `new` are two models of its shape."""

    def __init__(self, path: Path, name: str) -> None:
        family, tied, dtype, self.in_flight, self.bound = CASES[name]
        shape = {"family": family, "tied": tied, **SHAPE}
        self.old = policy.build_model(path / "old", "abcdefgh", seed=3, **shape)
        self.new = policy.build_model(path / "new", "abcdefgh", seed=4, **shape)
        self.engine = VllmEngine(vllm_config(path / "old", in_flight=self.in_flight, dtype=dtype))
        self.at = 0
        self.path = path / "old"
        self.load(self.old)

    def load(self, model: policy.PolicyModel) -> Label:
        self.at += 1
        probe = policy.compute_probe_logprobs(model).tobytes()
        self.engine.load(flat(model), Label(1, self.at), f"d{self.at}", probe)
        return Label(1, self.at)

    @property
    def worker(self) -> Any:
        return self.engine.llm.model_executor.driver_worker.worker

    def finish(self, n: int = 5) -> dict[tuple[int, int, int], Completion]:
        answers = []
        while self.engine.active:
            answers += self.engine.step(n)
        return {a.key: a for a in answers}

    def worst(
        self,
        model: policy.PolicyModel,
        a: Completion,
        r: CompletionRequest,
        part: slice = slice(None),
    ) -> float:
        return float((torch.from_numpy(a.logprobs) - expected(model, a, r))[part].abs().max())


@pytest.fixture(scope="module", params=list(CASES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    made = Case(tmp_path_factory.mktemp(request.param), request.param)
    yield made
    made.engine.close()


def test_logprobs_before_and_after_a_swap(case: Case) -> None:
    """Those of what was sampled from, at any temperature, top-p and top-k; every answer ends at its
    stop token or its limit."""
    # rounding in bf16 moves tokens across the edge of a cut
    cuts = CUTS if case.bound < 1e-3 else CUTS[:2]
    for model in (case.old, case.new, case.old):
        label = case.load(model)
        requests = [
            request(t, s, [3 + t % 8] * (1 + t), 5 + (3 * t + s) % 16, **cuts[t % len(cuts)])
            for t in range(10)
            for s in range(2)
        ]
        case.engine.add(requests)
        answers = case.finish()
        assert answers.keys() == {r.key for r in requests}
        for r in requests:
            a = answers[r.key]
            assert 0 < len(a.tokens) == len(a.logprobs) <= r.max_new_tokens
            assert (a.prompt == r.prompt).all()
            assert (a.finish == "stop") == (a.tokens[-1] == 1) and 1 not in a.tokens[:-1]
            assert [(s.label, s.start, s.end, s.kv) for s in a.spans] == [
                (label, 0, len(a.tokens), label)
            ]
            assert case.worst(model, a, r) < case.bound
        assert {a.finish for a in answers.values()} == {"stop", "length"}


def test_logprobs_of_vllms_own_sampler(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has no other: vLLM returns those before temperature and cuts unless it is told."""
    label = case.load(case.old)
    native = case.worker.model_runner.sampler.topk_topp_sampler.forward_native
    monkeypatch.setattr(SeededSampler, "__call__", lambda self, *args: native(*args))
    cuts = CUTS if case.bound < 1e-3 else CUTS[:2]
    requests = [request(t, 0, [3, 4, 3 + t], 8, **cut) for t, cut in enumerate(cuts)]
    case.engine.add(requests)
    for r, answer in zip(requests, sorted(case.finish().items()), strict=True):
        assert case.worst(case.old, answer[1], r) < case.bound and answer[1].spans[0].label == label


def test_swap_in_mid_answer(case: Case) -> None:
    """recompute_kv: each token follows from the weights that its span names; keep_kv: the new
    weights attend to old keys."""
    first = case.load(case.old)
    case.engine.add([request(t, 0, [3, 4, 3 + t], 20) for t in range(8)])
    made = case.engine.steps_made
    early = case.engine.step(6)
    assert case.engine.steps_made == made + 6
    assert all(n == 6 for n in case.engine.count_tokens().values())
    second = case.load(case.new)
    # the same prompt, after the swap: it must not see the old keys
    case.engine.add([request(50, 0, [3, 4, 3], 6)])
    answers = {a.key: a for a in early} | case.finish()
    two = [a for a in answers.values() if len(a.spans) == 2]
    assert len(two) >= 3
    far = 0.0
    for a in two:
        assert [(s.label, s.digest, s.start, s.end) for s in a.spans] == [
            (first, f"d{first.number}", 0, 6),
            (second, f"d{second.number}", 6, len(a.tokens)),
        ]
        assert a.spans[1].kv == (second if case.in_flight == "recompute_kv" else first)
        r = request(*a.key[:2], [0])
        assert case.worst(case.old, a, r, slice(0, 6)) < case.bound
        far = max(far, case.worst(case.new, a, r, slice(6, None)))
    assert far > 1e-2 if case.in_flight == "keep_kv" else far < case.bound
    late = answers[50, 0, 1]
    assert [s.label for s in late.spans] == [second]
    assert case.worst(case.new, late, request(50, 0, [0])) < case.bound


def test_what_is_drawn_follows_the_seed_and_not_the_neighbours(case: Case) -> None:
    case.load(case.old)
    requests = [request(t, s, [3, 4 + t]) for t in range(4) for s in range(2)]
    drawn = []
    for order in (requests, requests[:3], requests[::-1]):
        case.engine.add(order)
        drawn.append(case.finish())
    assert len({tuple(a.tokens) for a in drawn[0].values()}) > 4
    if case.bound < 1e-3:
        assert all(
            a.tokens.tolist() == drawn[0][k].tokens.tolist()
            for d in drawn[1:]
            for k, a in d.items()
        )


def test_prompts_that_are_encoded_in_parts_draw_as_whole_ones_do(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens than a step may encode: vLLM cuts prompts, and drops samples of a part."""
    case.load(case.old)
    requests = [request(t, 0, [3 + (t + n) % 8 for n in range(24 + t)]) for t in range(8)]
    case.engine.add(in_form(case, requests))
    whole = case.finish()
    case.load(case.old)  # forgets what it has encoded
    scheduler = case.engine.llm.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 11)
    runner, partial = case.worker.model_runner, set()
    keep_books = runner._bookkeeping_sync

    def spy(*args: Any, **more: Any) -> Any:
        for row in np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs]):
            partial.add(runner.input_batch.req_ids[row])
        return keep_books(*args, **more)

    monkeypatch.setattr(runner, "_bookkeeping_sync", spy)
    case.engine.add(in_form(case, requests))
    parts = case.finish()
    assert len(partial) == 8 and parts.keys() == whole.keys()
    if case.bound < 1e-3:
        for key, answer in whole.items():
            assert parts[key].tokens.tolist() == answer.tokens.tolist(), key
            assert parts[key].support_bytes == answer.support_bytes
    assert not case.engine.recorder.requests


def in_form(case: Case, requests: list[CompletionRequest]) -> list[CompletionRequest]:
    """Every second one is decoded under a pattern, three quarters of them with top-p."""
    compiler = GrammarCompiler(load_tokenizer(case.path), str(case.path), (1,))
    begun = [compiler.begin("start: /[abc]{3,9}/") if n % 2 else None for n in range(len(requests))]
    return [
        replace(r, constraint=one, top_p=0.9 if n % 4 else 1.0)
        for n, (r, one) in enumerate(zip(requests, begun, strict=True))
    ]


def test_the_tokens_that_were_left_are_recorded(case: Case) -> None:
    """By top-p, top-k and patterns, across a swap in mid-answer: over them the learner has the
    recorded log-probabilities, and over the whole vocabulary it has not."""
    case.load(case.old)
    requests = in_form(case, [request(t, s, [3 + t, 4]) for t in range(6) for s in range(2)])
    requests = [replace(r, top_k=4 if r.key[0] % 3 == 2 else 0) for r in requests]
    case.engine.add(requests)
    answers = {a.key: a for a in case.engine.step(3)}
    case.load(case.old)
    answers |= case.finish()
    every = [answers[r.key] for r in requests]
    names = load_tokenizer(case.path).get_vocab()
    for r, a in zip(requests, every, strict=True):
        assert (a.support is None) == (not r.has_support)
        if a.support is not None:
            assert len(a.support.sizes) == len(a.tokens) and a.support.contains(a.tokens).all()
            assert a.support.vocabulary == len(names) and a.support.sizes.max() <= (r.top_k or 11)
        if r.constraint is not None:
            text = load_tokenizer(case.path).decode(a.tokens.tolist(), skip_special_tokens=True)
            assert re.fullmatch("[abc]{3,9}", text) and a.finish == "stop"
    recorded = torch.from_numpy(np.concatenate([a.logprobs for a in every]))
    apart = []
    for supports in ([a.support for a in every], None):
        with torch.no_grad():
            out = case.old.logprobs(
                [a.prompt for a in every],
                [a.tokens for a in every],
                torch.tensor([r.temperature for r in requests]),
                supports=supports,
            )
        apart.append(out.logprobs - recorded)
    k3 = [float((torch.expm1(x) - x).mean()) for x in apart]
    assert k3[0] < (1e-10 if case.bound < 1e-3 else 1e-3) and k3[1] > 1e-2, k3


def test_the_number_of_a_token_is_that_of_its_requests_generator() -> None:
    for seed in (0, 7):
        generator = torch.Generator().manual_seed(seed)
        one_by_one = [int(torch.randint(0, 2**31, (1,), generator=generator)) for _ in range(130)]
        numbers = [draw_numbers(seed, at // AHEAD)[at % AHEAD] for at in range(130)]
        assert numbers == one_by_one and len(set(numbers)) == 130


def test_abort_and_what_does_not_fit(case: Case) -> None:
    case.load(case.old)
    case.engine.add([request(t, 0, [3, 4], 20) for t in range(3)])
    done = {a.key for a in case.engine.step(3)}
    left = {(t, 0, 1) for t in range(3)} - done
    tokens = case.engine.abort(left)
    assert tokens.keys() == left and set(tokens.values()) <= {3} and case.engine.active == 0
    assert case.engine.count_tokens() == {}
    with pytest.raises(ConfigError, match=r"generator\.context"):
        case.engine.add([request(9, 0, [3] * 60, 20)])


def test_a_swap_that_did_not_take_stops_the_run(case: Case) -> None:
    """The probe: weights that the engine does not compute with are an error before any answer."""
    before = case.engine.probes
    case.load(case.old)
    case.engine.add([request(0, 0, [3, 4], 20)])
    case.engine.step(2)
    assert case.engine.probes == before + 1
    true = case.engine.llm.collective_rpc
    case.engine.llm.collective_rpc = lambda *a, **k: None  # the reload is lost
    try:
        case.load(case.new)
        with pytest.raises(
            ProtocolError, match=r"probe are .* nats off those that the learner published"
        ):
            case.engine.step(20)
    finally:
        case.engine.llm.collective_rpc = true
    case.load(case.new)
    case.finish()
    case.engine.step(3)
    assert case.engine.probes == before + 2


def test_seeds_of_neighbours_are_not_consecutive() -> None:
    """vLLM's own groups have consecutive seeds."""
    seeds: list[int] = []
    seeding = SimpleNamespace(context=64, begin=lambda _, seed: seeds.append(seed))
    asked = [request(t, s, [3, 4, 5]) for t in range(8) for s in range(4)]
    ProbedEngine.add(seeding, asked)
    assert len(set(seeds)) == 32 and min(np.diff(sorted(seeds))) > 8


def test_how_far_a_probe_may_be_off_by_type_depth_and_likelihood() -> None:
    published = np.array([-21.3, -8.0, -9.7, -17.9, -13.5, -6.3, -5.4], np.float32)
    # vLLM's rounding of SmolLM2 in bfloat16, and one of its 30 layers left out
    rounded = np.array([0.017, -0.353, -0.1, -0.112, -0.163, 0.132, 0], np.float32)
    left_out = np.array([0.001, 0, 0.49, 1.831, 0.61, 0.236, 0.614], np.float32)

    def check(off: np.ndarray, dtype: torch.dtype, layers: int) -> int:
        engine = VllmEngine.__new__(VllmEngine)
        engine.dtype, engine.layers = dtype, layers
        engine.label, engine.digest, engine.probes = Label(1, 2), "d", 0
        engine.check_probe(published, (published + off).tolist())
        return engine.probes

    assert check(rounded, torch.bfloat16, 30) == 1 and check(rounded / 100, torch.float32, 30) == 1
    broken = rounded.copy()
    broken[6] = np.nan
    for off, dtype, layers, said in (
        (left_out, torch.bfloat16, 30, r"1\.8 nats off .* \(limit 0\.89\)"),
        (rounded, torch.bfloat16, 8, r"0\.35 nats off .* \(limit 0\.26\)"),
        (rounded, torch.bfloat16, 2, r"\(limit 0\.26\)"),  # never below eight layers'
        (rounded, torch.float32, 30, r"\(limit 0\.005\)"),
        (broken, torch.bfloat16, 30, "nan nats off"),
    ):
        with pytest.raises(ProtocolError, match=said):
            check(off, dtype, layers)


def test_without_a_published_probe_the_generator_computes_it(case: Case) -> None:
    """A version from before a resume; and a published probe of other weights is found out like
    weights that were not loaded."""
    assert case.engine.reference is None
    before = case.engine.probes
    case.engine.load(flat(case.old), Label(1, 900), "d")
    case.engine.step(3)
    assert case.engine.probes == before + 1 and case.engine.reference is not None
    case.engine.reference = None
    case.engine.load(
        flat(case.old), Label(1, 901), "d", policy.compute_probe_logprobs(case.new).tobytes()
    )
    with pytest.raises(ProtocolError, match="nats off"):
        case.engine.step(3)
    case.load(case.old)
    case.engine.step(3)
    assert case.engine.probes == before + 2


def test_every_way_of_loading_gives_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain products, packed ones, and vLLM's own reload, each after another one.  A reload leaves
    a tied head packed from the weights before: without `repack` the probe would find it."""
    direct = case.worker.asyncrl_direct
    assert isinstance(direct, DirectWriter)
    requests = [request(t, 0, [3, 4 + t], 12) for t in range(6)]
    for model in (case.new, case.old):
        for way in (PLAIN, 0, "reload", 0, PLAIN, "reload", PLAIN):
            monkeypatch.setattr("actors.engine_vllm.PLAIN", PLAIN if way == "reload" else way)
            case.worker.asyncrl_direct = "told to" if way == "reload" else direct
            case.load(model)
            case.engine.add(requests)
            answers = case.finish()
            assert max(case.worst(model, answers[r.key], r) for r in requests) < case.bound, way
            layer = next(p.layer for p in direct.parts if p.product)
            assert ("Direct" in layer.cpu_linear.__qualname__) == (
                way == PLAIN and case.engine.dtype == torch.float32
            )
    assert case.worker.asyncrl_direct is direct


def test_what_cannot_be_written_directly_is_known(case: Case) -> None:
    """A layer without a published weight, a weight without a layer, another shape, and values that
    vLLM's own loading made differ."""
    runner, weights = case.worker.model_runner, flat(case.old)
    model, dtype = runner.get_model(), case.engine.dtype
    case.load(case.old)
    DirectWriter(model, weights, dtype).check_same(weights)
    up = "model.layers.1.mlp.up_proj.weight"
    for planted, said in (
        ({k: v for k, v in weights.items() if k != up}, up),
        (weights | {"more": weights[up]}, "no layer of vLLM's takes more"),
        (weights | {"model.norm.weight": weights["model.norm.weight"][:-1]}, "another shape"),
    ):
        with pytest.raises(UnsupportedModel, match=said):
            DirectWriter(model, planted, dtype)
    for name in ("model.norm.weight", up, "model.embed_tokens.weight"):
        with pytest.raises(UnsupportedModel, match="own loading changes"):
            DirectWriter(model, weights, dtype).check_same(weights | {name: weights[name] * 1.5})


def test_the_reference_holds_no_copy_of_the_weights(tmp_path: Path) -> None:
    model = policy.build_model(tmp_path, "abcdefgh", seed=3, **SHAPE)
    reference = ReferenceWeights(str(tmp_path), "float32")
    got = reference.compute_logprobs(dict(policy.list_named_weights(model)))
    ids = torch.tensor([policy.list_probe_ids(model.hf.config)])
    with torch.no_grad():
        want = torch.log_softmax(model.hf(input_ids=ids).logits[0, :-1], -1).gather(
            1, ids[0, 1:, None]
        )[:, 0]
    assert np.allclose(got, want.numpy(), atol=1e-6)
    # the packed forward's, as the learner publishes them
    assert np.allclose(policy.compute_probe_logprobs(model), want.numpy(), atol=1e-6)
    assert sum(p.numel() for p in reference.model.hf.parameters()) == 0


def test_a_head_that_vllm_has_no_kernel_for(tmp_path: Path) -> None:
    policy.build_model(tmp_path, "abcdefgh", hidden=32, heads=4)
    config = config_load.load(
        "configs/vllm.toml", [f"model.path={str(tmp_path)!r}", "model.device='cpu'"]
    )
    with pytest.raises(ConfigError, match=r"8 dimensions a head.*32, 64.*embedded"):
        make_engine(config)
    with pytest.raises(ConfigError, match=r"generator\.temperature: 0\.001; vLLM raises"):
        config_load.load("configs/vllm.toml", ["generator.temperature=0.001"])
    with pytest.raises(ConfigError, match=r"exact: needs generator\.engine = embedded"):
        config_load.load("configs/vllm.toml", ["exact=true"])


def test_the_requirement_files_hold_what_the_project_asks_for() -> None:
    """`make env` installs from them with --no-deps: what is not in them is missing; what breaks the
    CPU torch must not be in them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for target in ("cpu", "gpu"):
        lines = (ROOT / "requirements" / f"{target}.txt").read_text().split()
        pinned = {name.lower(): v for name, _, v in (x.partition("==") for x in lines)}
        extras = project["optional-dependencies"]
        for wanted in map(
            Requirement, [*project["dependencies"], *extras["dev"], *extras[f"engines-{target}"]]
        ):
            assert wanted.name.lower() in pinned, (
                f"{wanted} is not in requirements/{target}.txt: make requirements"
            )
            assert wanted.specifier.contains(pinned[wanted.name.lower()]), (
                f"{wanted} against requirements/{target}.txt: make requirements"
            )
        assert not set(installed.VISION) & pinned.keys()


def test_engines_command() -> None:
    done = run_command([sys.executable, "-m", "asyncrl.cli", "engines", "--json"]).check()
    rows = {r["name"]: r for r in done.json["engines"]}
    assert rows.keys() == {"embedded", "vllm", "vllm-serve", "torch", "deepspeed"}
    assert all(r["works"] and not r["why"] for r in rows.values())
    assert rows["vllm"]["version"] == ENGINES["vllm"].pinned
    assert rows["vllm"]["setting"] == 'generator.engine = "vllm"'
