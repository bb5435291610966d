"""The experts of each token: recorded by the engines, checked, and used again by the learner."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import engine, request, run

from actors.engine import Completion
from actors.engine_embedded import EmbeddedEngine
from actors.engine_generic import GenericEngine
from asyncrl.contract.errors import BadMessage, ConfigError
from asyncrl.contract.messages import ModelShape, RoutingShape, TrainingSequence
from asyncrl.contract.routed_experts import HEAD, RoutedExperts
from asyncrl.contract.versions import Label
from asyncrl.models import fetch, policy, router_hooks
from asyncrl.transport import arrays

SYMBOLS = "abcdefghijklmnopqrstuvwxyz"


def build(path: Path, family: str, *, seed: int = 0, spread: float = 0.15, **more: int) -> Path:
    """A tiny mixture of experts with weights so large that its routers are far from uniform."""
    model = policy.build_model(path, SYMBOLS, family=family, kv_heads=2, seed=seed, **more)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.hf.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, spread)
    fetch.save(model.hf, path)
    return path


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe") / request.param
    return build(path, request.param, hidden=32, intermediate=16)


def load(path: Path, dtype: str = "float32") -> policy.PolicyModel:
    return policy.load_policy(path, dtype, "cpu")


def generate(
    model: policy.PolicyModel, master: policy.PolicyModel, *, tickets: int = 6, **more: bool
) -> list[Completion]:
    """Two answers to each of several prompts, by an engine with the weights of `master`."""
    e = engine(model, record_routing=True, **more)
    e.load(dict(policy.list_named_weights(master)), Label(2, 0), "d1")
    r = np.random.default_rng(3)
    prompts = [r.integers(2, 29, 1 + 5 * t).tolist() for t in range(tickets)]
    return list(run(e, [request(t, s, p) for t, p in enumerate(prompts) for s in (0, 1)]).values())


def relogged(
    model: policy.PolicyModel, answers: list[Completion], routed: list[RoutedExperts | None] | None
) -> torch.Tensor:
    """Samples without recorded experts share no prompt with others."""
    some = routed or [a.routed for a in answers]
    return model.logprobs(
        [a.prompt for a in answers],
        [a.tokens for a in answers],
        torch.ones(len(answers)),
        groups=[a.key[0] if one else 99 for a, one in zip(answers, some, strict=True)],
        routed=routed,
    ).logprobs


def other_experts(answers: list[Completion], shape: RoutingShape) -> list[RoutedExperts | None]:
    """Random experts for all samples but one; the same ones for a ticket's prompt."""
    drawn: list[RoutedExperts | None] = []
    for a in answers:
        r = np.random.default_rng(a.key[0])
        ids = np.argsort(r.random((len(a.prompt) + 19, shape.layers, shape.experts)), -1)
        r = np.random.default_rng(a.key[:2])
        r.shuffle(ids[len(a.prompt) :])
        chosen = ids[: len(a.prompt) + len(a.tokens) - 1, :, : shape.chosen]
        drawn.append(RoutedExperts(chosen.astype(np.uint16), shape.experts))
    drawn[-1] = None
    return drawn


def gradient(model: policy.PolicyModel, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient by name, without that of the padding token, which transformers leaves out."""
    named = dict(model.hf.named_parameters())
    grads = dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True))
    grads["model.embed_tokens.weight"][0] = 0
    return grads


@pytest.mark.parametrize("experts", [8, 255, 256, 60_000])
def test_ids_are_read_as_they_were_written(experts: int) -> None:
    r = np.random.default_rng(0)
    ids = np.argsort(r.random((5, 3, min(experts, 300))), -1)[..., :4] + experts - min(experts, 300)
    ids[2, 1] = experts  # not recorded
    routed = RoutedExperts(ids.astype(np.uint16), experts)
    data = routed.encode()
    assert len(data) == HEAD.size + ids.size * (1 if experts < 256 else 2)
    back = RoutedExperts.decode(data, 5)
    assert np.array_equal(back.ids, ids) and back.shape == (3, experts, 4)
    assert back.ids.dtype == np.uint16
    assert (RoutedExperts.make_unrecorded(5, back.shape).ids == [[[experts] * 4] * 3] * 5).all()
    for parts in ([back], [back, routed]):
        joined = RoutedExperts.join(parts)
        assert np.array_equal(joined.ids, [*ids] * len(parts)) and joined.shape == back.shape


def test_malformed_ids_are_refused_at_the_door() -> None:
    shape = RoutingShape(2, 8, 2)
    good = RoutedExperts(np.array([[[0, 1], [7, 3]]] * 4, np.uint16), 8)

    def row(data: bytes) -> TrainingSequence:
        return TrainingSequence(b"\0" * 8, b"\0" * 12, b"\0" * 12, b"\1" * 3, [], routed=data)

    def changed(at: int, value: int) -> bytes:
        ids = good.ids.copy()
        ids[3, 1, at] = value
        return RoutedExperts(ids, 8).encode()

    for fit in (good, RoutedExperts.make_unrecorded(4, shape)):
        arrays.check_sequence_numbers(row(fit.encode()), "it", ModelShape(9, shape))
    arrays.check_sequence_numbers(row(b""), "it", ModelShape(9))
    one_expert = RoutedExperts(good.ids[:, :, :1], 8).encode()
    for data, said in (
        (b"", "it: it has no experts, and the learner replays them"),
        (b"\1\2", "it: the experts of its tokens: 2 bytes$"),
        (HEAD.pack(8, 2, 2), "5 bytes for 4 tokens and 2 layers with 2 experts$"),
        (HEAD.pack(8, 2, 0), "2 layers with 0 of 8 experts$"),
        (good.encode()[:-1], "bytes for 4 tokens and 2 layers with 2 experts"),
        (RoutedExperts(good.ids[:3], good.experts).encode(), "bytes for 4 tokens"),
        (HEAD.pack(8, 0, 2), "0 layers with 2 of 8 experts"),
        (HEAD.pack(1, 2, 2) + b"\0" * 16, "2 layers with 2 of 1 experts"),
        (changed(0, 9), "ids that are not 2 different ones below 8$"),
        (changed(0, 8), "ids that are not 2 different ones below 8"),
        (changed(0, 3), "ids that are not 2 different ones below 8"),
        (one_expert, "are of 2 layers with 1 of 8 experts; the model has 2 layers with 2 of 8"),
    ):
        with pytest.raises(BadMessage, match=said) as refused:
            arrays.check_sequence_numbers(row(data), "it", ModelShape(9, shape))
        assert refused.value.reason == "shape"
    partly = RoutedExperts(np.array([[[8, 8, 9]]], np.uint16), 8).encode()
    with pytest.raises(ValueError, match="ids that are not 3 different ones below 8"):
        RoutedExperts.decode(partly, 1)


@pytest.mark.parametrize("replayed", [False, True])
def test_packed_is_transformers_in_value_and_gradient(model: Path, replayed: bool) -> None:
    """Two implementations: sorted tokens with ids as an argument; hooks around `torch.topk`."""
    ours = load(model)
    assert ours.fast is not None and ours.routing == (2, 8, 2)
    answers = generate(ours, ours)
    routed = other_experts(answers, ours.routing) if replayed else None
    found = []
    for path in ("packed", "transformers", "one pass", "recomputed"):
        if path in ("transformers", "one pass"):
            ours.fast = None
        ours.one_pass = path == "one pass"
        if path == "recomputed":
            ours = load(model)
            ours.recompute = True
        lp = relogged(ours, answers, routed)
        weights = torch.linspace(-1, 2, len(lp))
        found.append((lp.detach(), gradient(ours, (lp * weights).sum())))
    for lp, grads in found[1:]:
        torch.testing.assert_close(lp, found[0][0], atol=2e-5, rtol=1e-4)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, found[0][1][name], atol=2e-3, rtol=2e-3)
    if replayed:
        own = relogged(load(model), answers, None).detach()
        assert float((own - found[0][0]).abs().max()) > 0.1
    assert float(found[0][1]["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-3


@pytest.mark.parametrize("exact", [False, True])
def test_the_gradient_under_replay_is_the_finite_difference(model: Path, exact: bool) -> None:
    """Along the gradient of one matrix at a time, routers among them."""
    ours = load(model)
    answers = generate(ours, ours)
    assert ours.routing is not None
    routed = other_experts(answers, ours.routing)
    ours.exact = exact

    def loss() -> torch.Tensor:
        lp = relogged(ours, answers, routed).double()
        return (lp * torch.linspace(-1, 2, len(lp))).sum() / len(lp)

    grads = gradient(ours, loss())
    named = dict(ours.hf.named_parameters())
    prefix = "model.layers.1.mlp."
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        parameter, grad = named[prefix + name], grads[prefix + name]
        direction = grad / grad.norm()
        ends = []
        for step in (1, -1):
            with torch.no_grad():
                kept = parameter.clone()
                parameter += step * 2e-3 * direction
                ends.append(float(loss()))
                parameter.copy_(kept)
        assert (ends[0] - ends[1]) / 4e-3 == pytest.approx(float(grad.norm()), rel=0.02)


def test_replay_of_the_own_experts_changes_no_bit(model: Path) -> None:
    """At equal weights and precision the engine's experts are the learner's."""
    ours = load(model)
    with torch.no_grad():
        for exact in (False, True):
            answers = generate(load(model), ours, fixed=exact)
            ours.exact = exact
            own, again = (relogged(ours, answers, r) for r in (None, [a.routed for a in answers]))
            assert torch.equal(own, again)
            sampled = torch.from_numpy(np.concatenate([a.logprobs for a in answers]))
            if exact:
                assert torch.equal(own, sampled)
            torch.testing.assert_close(own, sampled, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_replay_removes_nearly_all_of_a_bf16_mismatch(seed: int, tmp_path: Path) -> None:
    """k3 at equal weights, an fp32 learner: at least 30 times lower."""
    path = build(tmp_path / "m", "qwen3_moe", seed=seed, layers=4, experts=16)
    learner = load(path)
    answers = generate(load(path, "bfloat16"), learner, tickets=9)
    k3 = []
    for routed in (None, [a.routed for a in answers]):
        with torch.no_grad():
            own = relogged(learner, answers, routed).double()
        ratio = own - torch.from_numpy(np.concatenate([a.logprobs for a in answers]))
        k3.append(float((ratio.exp() - 1 - ratio).mean()))
    assert k3[0] > 1e-3 and k3[0] >= 30 * k3[1], k3


def own_choice(model: policy.PolicyModel, tokens: np.ndarray) -> np.ndarray:
    """The experts of a plain transformers forward, sorted: [tokens, layers, k]."""
    recorded: list[torch.Tensor] = []
    with torch.no_grad(), router_hooks.replay_routing(model.hf, recorded=recorded):
        model.hf(input_ids=torch.from_numpy(tokens.astype(np.int64))[None])
    return np.sort(torch.stack(recorded, 1).numpy(), -1)


def test_an_engine_records_the_experts_of_every_token(model: Path) -> None:
    ours = load(model)
    for answers in (generate(load(model), ours), generate(load(model), ours, fixed=True)):
        for a in answers:
            assert a.routed is not None and a.routed.shape == ours.routing
            wanted = own_choice(ours, np.concatenate([a.prompt, a.tokens])[:-1])
            found = np.sort(a.routed.ids, -1)
            assert found.shape == wanted.shape
            # a last layer encodes no prompt but its last token
            prompt = len(a.prompt) - 1
            assert (found[:prompt, -1] == 8).all() and np.array_equal(found[:, 0], wanted[:, 0])
            assert np.array_equal(found[prompt:], wanted[prompt:])
    assert run(engine(load(model)), [request(0, 0, [3, 4])])[0, 0, 1].routed is None


def rolled(model: policy.PolicyModel) -> policy.PolicyModel:
    """The weights of another version, whose routers choose other experts."""
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter.copy_(parameter.roll(1, -1))
    return model


@pytest.mark.parametrize("in_flight", ["keep_kv", "recompute_kv"])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_swap_keeps_the_samplers_experts(model: Path, in_flight: str, fixed: bool) -> None:
    """Keys that are computed again are computed by the experts that the learner replays: else the
    later tokens were sampled by a policy that no learner computes."""
    second = rolled(load(model))
    asked = [request(t, 0, [3 + t, 4, 5, 6][: t + 1]) for t in range(4)]
    plain = run(engine(load(model), record_routing=True, fixed=fixed), asked)
    e = engine(load(model), record_routing=True, in_flight=in_flight, fixed=fixed)
    e.add(asked)
    e.step(4)
    e.load(dict(policy.list_named_weights(second)), Label(2, 0), "d1")
    answers = []
    while e.active:
        answers += e.step(5)
    learner = rolled(load(model))
    learner.exact = fixed
    off = []
    for a in answers:
        before = a.spans[0].end
        assert len(a.spans) == 2 and before == 4
        alone = plain[a.key]
        assert a.routed is not None and alone.routed is not None
        read = len(a.prompt) - 1 + before  # tokens read by the first version
        assert np.array_equal(a.routed.ids[:read], alone.routed.ids[:read])
        with torch.no_grad():
            replayed = relogged(learner, [a], [a.routed])
        off.append((replayed - torch.from_numpy(a.logprobs))[before:].abs().max())
    worst = float(torch.stack(off).max())
    if in_flight == "keep_kv":
        assert worst > 0.1
    else:
        assert worst == 0 if fixed else worst < 1e-4


def keeping(model: policy.PolicyModel, length: int) -> EmbeddedEngine:
    sizes = {"slots": 4, "context": 64, "max_new_tokens": length, "kept_tokens": 512}
    e = EmbeddedEngine(model, **sizes, record_routing=True)
    e.load(dict(policy.list_named_weights(model)), Label(1, 0), "d0")
    return e


def test_a_later_call_repeats_the_experts_of_the_keys_that_it_reuses(model: Path) -> None:
    ours = load(model)
    e = keeping(ours, 20)
    (first,) = run(e, [request(0, 0, list(range(3, 24)))]).values()
    longer = [*first.prompt.tolist(), *first.tokens.tolist(), 5, 6, 7]
    (second,) = run(e, [request(1, 0, longer, 8)]).values()
    assert e.hits == 1 and first.routed is not None and second.routed is not None
    assert len(second.routed.ids) == len(longer) + len(second.tokens) - 1
    assert np.array_equal(second.routed.ids[: e.reused], first.routed.ids[: e.reused])
    wanted = own_choice(ours, np.concatenate([longer, second.tokens])[:-1])
    assert np.array_equal(np.sort(second.routed.ids, -1)[:, 0], wanted[:, 0])


def test_a_model_of_one_layer_records_no_prompt(tmp_path: Path) -> None:
    path = build(tmp_path / "m", "qwen3_moe", hidden=32, intermediate=16, layers=1)
    ours = load(path)
    e = keeping(ours, 8)
    for call in range(2):
        prompt = list(range(3, 24 + call))
        (a,) = run(e, [request(call, 0, prompt, 8)]).values()
        assert a.routed is not None and e.hits == call
        assert (a.routed.ids[: len(prompt) - 1] == 8).all()
        wanted = own_choice(ours, np.concatenate([prompt, a.tokens])[:-1])
        found = np.sort(a.routed.ids, -1)
        assert np.array_equal(found[len(prompt) - 1 :], wanted[len(prompt) - 1 :])


SIZES = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_experts_per_tok": 2, "pad_token_id": 0}


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> policy.PolicyModel:
    """A mixture of experts without a packed forward."""
    import transformers

    torch.manual_seed(0)
    more = {"num_attention_heads": 4, "num_experts": 8, "initializer_range": 0.3}
    config = transformers.OlmoeConfig(**SIZES, **more)
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    return policy.PolicyModel(hf, str(tmp_path_factory.mktemp("olmoe")))


def test_any_transformers_mixture_records_and_replays(olmoe: policy.PolicyModel) -> None:
    assert olmoe.fast is None and olmoe.routing == (2, 8, 2)
    e = GenericEngine(olmoe, slots=3, context=64, record_routing=True)
    e.load(dict(policy.list_named_weights(olmoe)), Label(1, 0), "d0")
    asked = [request(t, 0, [3 + t, 4, 5][: t + 1], 6) for t in range(3)]
    answers = list(run(e, asked).values())  # type: ignore[arg-type]
    for a in answers:
        assert a.routed is not None
        wanted = own_choice(olmoe, np.concatenate([a.prompt, a.tokens])[:-1])
        assert np.array_equal(np.sort(a.routed.ids, -1), wanted)
    with torch.no_grad():
        own = relogged(olmoe, answers, None)
        assert torch.equal(own, relogged(olmoe, answers, [a.routed for a in answers]))
        other = relogged(olmoe, answers, other_experts(answers, RoutingShape(2, 8, 2)))
        assert float((own - other).abs().max()) > 1e-3


def test_any_mixture_keeps_its_experts_across_a_swap(olmoe: policy.PolicyModel) -> None:
    first = {name: weight.clone() for name, weight in policy.list_named_weights(olmoe)}
    second = {name: weight.roll(1, -1) for name, weight in first.items()}
    e = GenericEngine(olmoe, slots=3, context=64, record_routing=True)
    e.load(first, Label(1, 0), "d0")
    e.add([request(t, 0, [3 + t, 4, 5], 9) for t in range(3)])
    answers = e.step(4)
    e.load(second, Label(2, 0), "d1")
    while e.active:
        answers += e.step(4)
    swapped = [a for a in answers if len(a.spans) == 2]
    assert swapped
    with torch.no_grad():
        for a in swapped:
            later = slice(a.spans[0].end, None)
            sampled = torch.from_numpy(a.logprobs)[later]
            assert torch.allclose(relogged(olmoe, [a], [a.routed])[later], sampled, atol=1e-4)
            assert not torch.allclose(relogged(olmoe, [a], None)[later], sampled, atol=1e-2)
    policy.load_weights(olmoe, first)


def test_a_load_balancing_loss_keeps_its_own_statistics(olmoe: policy.PolicyModel) -> None:
    """They are those of the router's logits: E sum_e f_e P_e with the share f_e of tokens that
    would choose an expert, and its mean probability P_e."""
    ids = torch.arange(3, 23)[None]
    first = torch.zeros(2, 20, 2, dtype=torch.long) + torch.tensor([0, 1])
    with torch.no_grad():
        plain = olmoe.hf(input_ids=ids, output_router_logits=True)
        with router_hooks.replay_routing(olmoe.hf, first):
            replayed = olmoe.hf(input_ids=ids, output_router_logits=True)
    assert torch.equal(plain.router_logits[0], replayed.router_logits[0])
    assert not torch.equal(plain.logits, replayed.logits)
    shares = torch.cat(replayed.router_logits).softmax(-1)
    chosen = torch.nn.functional.one_hot(shares.topk(2).indices, 8).float()
    torch.testing.assert_close(replayed.aux_loss, 8 * (chosen.mean(0) * shares.mean(0)).sum())


def test_routers_that_choose_in_several_steps_and_dense_models_are_refused(
    olmoe: policy.PolicyModel, tmp_path: Path
) -> None:
    import transformers

    assert olmoe.require_replayable_routing() == (2, 8, 2)
    more = {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_attention_heads": 2}
    more |= {"num_key_value_heads": 2, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    config = transformers.DeepseekV3Config(**SIZES, **more, q_lora_rank=8, kv_lora_rank=8)
    other = policy.PolicyModel(transformers.AutoModelForCausalLM.from_config(config), "d")
    with pytest.raises(ConfigError, match=r"routers of a deepseek_v3 choose .* by 3 calls"):
        other.require_replayable_routing()
    dense = policy.build_model(tmp_path / "d", "ab", hidden=32)
    assert dense.routing is None
    with pytest.raises(ConfigError, match=r"replay_routing: .* is a dense qwen3, it has no"):
        dense.require_replayable_routing()
