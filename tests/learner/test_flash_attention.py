"""Flash attention and gradient checkpointing give the bits or numbers of the plain step."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_step_kit import batch, core, weights
from models_kit import model_fixture
from pretend_gpu import pretend_gpu, waits

from actors import decoder
from asyncrl.contract.errors import ConfigError
from asyncrl.models import packed_attention, packed_forward, policy


def samples(*shape: tuple[int, int]) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """Prompts, responses and groups: three answers for each (prompt's length, longest answer), one
    of one token; the groups' answers are mixed."""
    r = np.random.default_rng(0)
    rows = []
    for group, (prompt, length) in enumerate(shape):
        ids = r.integers(3, 23, prompt)
        rows += [(n, ids, r.integers(3, 23, n), group) for n in (length, 1, max(1, length - 3))]
    rows.sort(key=lambda row: -row[0])
    return [row[1] for row in rows], [row[2] for row in rows], [row[3] for row in rows]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four heads that share two of keys."""
    made: Path = tmp_path_factory.mktemp("flash") / "m"
    policy.build_model(made, "0123456789abcdefghij", max_positions=1024, kv_heads=2)
    return made


def outcome(model: policy.PolicyModel, of: Any) -> list[torch.Tensor]:
    """Log-probabilities, then gradients."""
    prompts, responses, groups = of
    model.hf.zero_grad()
    out = model.logprobs(prompts, responses, torch.ones(len(prompts)), groups=groups)
    (out.logprobs * torch.linspace(-1, 1, len(out.logprobs)).to(out.logprobs)).sum().backward()
    return [out.logprobs.detach().cpu(), *(p.grad.cpu() for p in model.hf.parameters())]


@pytest.mark.parametrize(
    "of",
    [samples((12, 300), (40, 290)), samples((200, 40)), samples((150, 400), (20, 30), (70, 1))],
    ids=["answers", "prompt", "both"],
)
def test_it_gives_what_padding_gives(path: Path, monkeypatch: pytest.MonkeyPatch, of: Any) -> None:
    model = policy.load_policy(path)
    flash = outcome(model, of)
    alone = outcome(model, tuple(part[:1] for part in of))[0]
    assert torch.equal(flash[0][: len(alone)], alone)  # and an answer is what it is by itself
    monkeypatch.setattr(packed_attention, "ROWS_UP_TO", 10**6)
    for ours, theirs in zip(flash, outcome(model, of), strict=True):
        assert float((ours - theirs).norm()) <= 2e-6 * float(theirs.norm())


@pytest.mark.parametrize("of", [samples((12, 90), (5, 70)), samples((9, 4))], ids=["long", "short"])
def test_a_gpus_calls_give_what_the_cpus_do(path: Path, of: Any) -> None:
    """In bfloat16, for rows of any length."""
    here = outcome(policy.load_policy(path, "bfloat16"), of)
    with pretend_gpu():
        there = outcome(policy.load_policy(path, "bfloat16", "cuda"), of)
    for ours, theirs in zip(here, there, strict=True):
        assert float((ours - theirs).float().norm()) <= 0.02 * float(theirs.float().norm())


@pytest.mark.parametrize(
    ("width", "kernel"), [(1, "works"), (3, "works"), (3, "refuses"), (3, "errs")]
)
def test_a_gpus_decode_step_gives_what_the_cpus_does(
    path: Path, monkeypatch: pytest.MonkeyPatch, width: int, kernel: str
) -> None:
    """In bfloat16, for rows of different lengths; behind their tokens are numbers of others. A
    kernel that refuses the cache, or reads it wrongly, is not used."""

    def attend(q: torch.Tensor, layer: int) -> torch.Tensor:
        if kernel == "refuses":
            raise RuntimeError("a contiguous tensor is expected")
        return torch.zeros_like(q.flatten(1))

    if kernel != "works":
        monkeypatch.setattr(decoder, "_plan_own_keys", lambda cache, positions: attend)

    def decode(device: str) -> torch.Tensor:
        model = policy.load_policy(path, "bfloat16", device)
        assert model.fast is not None
        w = decoder.FusedWeights(model.fast, 64)
        assert w.flash == (device == "cuda" and kernel == "works")
        w.load(dict(policy.list_named_weights(model)))
        like = torch.empty(0, dtype=torch.bfloat16, device=device)
        cache = decoder.ColumnCache(model.fast, w.layers, 4, 40, like)
        source = torch.Generator().manual_seed(0)
        for stored in cache.stored:
            stored.copy_(torch.randn(stored.shape, generator=source))
        tokens = torch.arange(3, 3 + 3 * width).view(3, width).to(device)
        positions = torch.tensor([[5], [31], [0]]) + torch.arange(width)
        return decoder.decode(w, cache, tokens, positions.to(device), 35).cpu()

    here = decode("cpu")
    with pretend_gpu():
        there = decode("cuda")
    assert float((here - there).norm()) <= 0.02 * float(here.norm())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_only_a_batch_waits_for_the_gpu_and_no_micro_batch(path: Path, dtype: str) -> None:
    counts = []
    with pretend_gpu():
        for tokens in (40, 1 << 12):
            model = {"device": "cuda", "dtype": dtype}
            one = core(path, model=model, learner={"micro_batch_tokens": tokens})
            one.train(batch(0))
            waits.clear()
            one.train(batch(1))
            counts.append(len(waits))
    assert counts == [1, 1], waits


def test_what_is_stored_grows_with_the_tokens(path: Path) -> None:
    model = policy.load_policy(path)
    parameters = {p.untyped_storage().data_ptr() for p in model.hf.parameters()}

    def count(length: int) -> int:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            ids = np.ones(length, np.int32)
            out = model.logprobs([ids], [ids], torch.ones(1))
        assert out.logprobs.requires_grad
        return sum(size for place, size in kept.items() if place not in parameters)

    short, long = count(100), count(400)
    assert long < 4.1 * short


LAYERS = 3


model_dir = model_fixture("abcdefgh", layers=LAYERS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a layer was computed: in a forward pass, and within a backward one."""
    count: Counter[str] = Counter()
    for name in ("apply_block", "_apply_fixed_block"):
        plain = getattr(packed_forward, name)

        def counted(*args: Any, plain: Any = plain, **more: Any) -> torch.Tensor:
            count["backward" if torch._C._current_graph_task_id() != -1 else "forward"] += 1
            return plain(*args, **more)

        monkeypatch.setattr(packed_forward, name, counted)
    return count


@pytest.mark.parametrize("exact", [False, True])
def test_packing_has_the_same_bits(exact: bool, model_dir: Path, calls: Counter[str]) -> None:
    model = policy.load_policy(model_dir, "float32", "cpu")
    model.exact = exact
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 8, 5).astype(np.int32)] * 4
    answers = [draw.integers(2, 8, n).astype(np.int32) for n in (4, 1, 9, 2)]
    found = []
    for again in (False, True):
        model.recompute = again
        model.hf.zero_grad()
        calls.clear()
        out = model.logprobs(
            prompts, answers, torch.ones(4), groups=[0] * 4, want_entropy=True, want_hidden=True
        )
        assert out.entropy is not None and out.hidden is not None
        (out.logprobs.sum() + 0.3 * out.entropy.sum() + 0.1 * out.hidden.sum()).backward()
        assert calls == {"forward": LAYERS} | ({"backward": LAYERS} if again else {})
        grads = [p.grad.clone() for p in model.hf.parameters()]
        found.append([out.logprobs, out.entropy, out.hidden, *grads])
        calls.clear()
        with torch.no_grad():
            model.logprobs(prompts, answers, torch.ones(4), groups=[0] * 4)
        assert calls == {"forward": LAYERS}
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"lora": {"rank": 2}},
        {"advantage": {"name": "gae"}, "value": {"trunk": "own"}},
        {"kl": {"loss": {"coefficient": 0.1, "estimator": "k3"}}},
    ],
    ids=str,
)
def test_bits_are_the_same(sections: dict[str, Any], model_dir: Path, calls: Counter[str]) -> None:
    found = []
    for again in (False, True):
        one = core(model_dir, learner={"gradient_checkpointing": again}, **sections)
        calls.clear()
        metrics = one.train(batch())
        # the critic's trunk has a backward pass of its own
        passes = 2 if "value" in sections else 1
        assert calls["backward"] == (LAYERS * passes if again else 0)
        shown = {k: v for k, v in metrics.items() if not k.startswith(("time/", "perf/"))}
        trunk = [] if one.critic is None else [p.detach() for p in one.critic.trainer.parameters]
        found.append((shown, [weights(one), *trunk]))
    (plain, before), (again_metrics, after) = found
    assert {k for k, v in plain.items() if again_metrics[k] != v} <= {"memory/peak_mb"}
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def told(module: torch.nn.Module) -> list[bool]:
    """For each later call of `module`: was it within a backward pass?"""
    within: list[bool] = []
    module.register_forward_hook(lambda *_: within.append(torch._C._current_graph_task_id() != -1))
    return within


def test_transformers_own_modules_do_so_too(model_dir: Path) -> None:
    """As ZeRO stage 3 runs them; one that cannot says so."""
    found = []
    for again in (False, True):
        model = policy.load_policy(model_dir, "float32", "cpu", with_modules=True)
        model.fast, model.one_pass = None, True
        mlp = model.hf.model.layers[0].mlp
        within = told(mlp.gate_proj)
        if again:
            policy.recompute_modules(model.hf)
        prompts = [np.array([2, 3, 4], np.int32)] * 2
        answers = [np.array([5, 6, 7, 3], np.int32), np.array([4], np.int32)]
        out = model.logprobs(prompts, answers, torch.ones(2))
        out.logprobs.sum().backward()
        assert within == [False, True] if again else within == [False]
        assert not mlp.training  # nothing in a layer trains otherwise than before
        found.append([out.logprobs, *(p.grad for p in model.hf.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    class Cannot(torch.nn.Module):
        def gradient_checkpointing_enable(self, **_: Any) -> None:
            raise ValueError("Cannot does not support gradient checkpointing.")

    with pytest.raises(ConfigError, match=r"gradient_checkpointing: .* set it to false"):
        policy.recompute_modules(Cannot())
