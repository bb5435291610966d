"""Models of several families, with and without transformers."""

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from bare_kit import edit
from bench_rivals_kit import program
from models_kit import FAMILIES, sample_batch
from process_kit import run_command

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.models import layout, policy, tokenizer, without_transformers
from asyncrl.models.packed_attention import AttentionRows, AttentionSide
from asyncrl.models.tokenizer import PlainTokenizer, encode_prompt, load_tokenizer
from asyncrl.models.trainer import PlainAdamW
from asyncrl.models.without_transformers import BareModel


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
    assert isinstance(attention, AttentionRows) and len(attention.sides) == 1 + tables
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
    lengths = np.random.default_rng(0).permutation([*[4] * 40, *[20] * 40, 50])
    prompts = [np.arange(12, dtype=np.int32)] * len(lengths)

    def plan(answers: list[np.ndarray], *, fixed: bool = False) -> list[AttentionSide]:
        rows = policy.ForwardInput(prompts, answers, torch.ones(81), None if fixed else [0] * 81)
        made = policy.packed_forward.plan_packing(rows, lay, torch.empty(0), fixed).attention
        assert isinstance(made, AttentionRows)
        return made.sides[1:]

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
    layout, digest_of = policy.build_manifest(model), policy.compute_weights_digest
    buffer = bytearray(policy.count_flat_bytes(layout))
    policy.write_flat(model, memoryview(buffer))
    digest = policy.compute_digest(buffer)
    assert digest_of(other) != digest == digest_of(model)
    policy.load_weights(other, policy.read_flat(memoryview(buffer), layout))
    assert digest_of(other) == digest
    policy.export(other, tmp_path / "c")
    assert digest_of(policy.load_policy(tmp_path / "c")) == digest


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
    with pytest.raises(ConfigError, match=r"no config\.json"):
        policy.load_policy(tmp_path / "none")


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


TEXTS = ["932849=", "", "x9 y", "<eos>12<pad>3", "9<unk>", "αβ=1", " 1 ", "1\n2"]


def add_tensors(path: Path, added: dict[str, torch.Tensor]) -> None:
    file = path / "model.safetensors"
    tensors = added | safetensors.torch.load_file(file)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def biased(path: Path) -> None:
    """Give the Llama in `path` every bias that its config can ask for, with values."""
    edit(path, "config.json", attention_bias=True, mlp_bias=True)
    shapes = layout.list_shapes(json.loads((path / "config.json").read_text()))
    torch.manual_seed(1)
    add_tensors(path, {name: torch.randn(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family,kv,tied",
    [*FAMILIES, ("llama with biases", 4, False), ("qwen3 of older files", 2, True)],
)
def test_a_bare_model_is_transformers_model(
    family: str, kv: int, tied: bool, dtype: str, tmp_path: Path
) -> None:
    path = tmp_path / "m"
    policy.build_model(path, "abcdefgh", family=family.split()[0], kv_heads=kv, tied=tied)
    if "biases" in family:
        biased(path)
    if "older" in family:  # as published models have it
        gone = dict.fromkeys(("rope_parameters", "rope_scaling", "dtype", "layer_types"))
        edit(path, "config.json", **gone, rope_theta=1e6, torch_dtype="float32")
        (path / "generation_config.json").unlink()
    ours = policy.load_policy(path, dtype, "cpu")
    theirs = policy.load_policy(path, dtype, "cpu", with_modules=True)
    assert isinstance(ours.hf, BareModel) and not isinstance(theirs.hf, BareModel)
    assert ours.fast is not None and theirs.fast is not None
    # in its order, which sums of norms follow
    assert [*dict(ours.hf.named_parameters())] == [*dict(theirs.hf.named_parameters())]
    assert list(ours.hf.state_dict()) == list(theirs.hf.state_dict())
    assert policy.compute_weights_digest(ours) == policy.compute_weights_digest(theirs)
    rope = [each.fast.compute_rope(torch.arange(300)) for each in (ours, theirs)]
    assert all(map(torch.equal, *rope))
    assert all(p.data_ptr() % policy.ALIGN == 0 for m in (ours, theirs) for p in m.hf.parameters())
    prompts, responses, owner = sample_batch(11)
    found = []
    for model in (ours, theirs):
        out = model.logprobs(prompts, responses, torch.ones(6), groups=owner, want_entropy=True)
        assert out.entropy is not None
        (out.logprobs.sum() + out.entropy.sum()).backward()
        found.append([out.logprobs, out.entropy, *[p.grad for p in model.hf.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    # Asked for more, it is transformers' own modules over these very parameters.
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(ours.hf(input_ids=ids).logits, theirs.hf(input_ids=ids).logits)
    full = ours.hf.get_full_model()
    assert [*map(id, ours.hf.parameters())] == [*map(id, full.parameters())]

    # And it is written as transformers writes it.
    written = []
    for name, model in (("ours", ours), ("theirs", theirs)):
        policy.export(model, tmp_path / name)
        names = {p.name for p in (tmp_path / name).iterdir()}
        config = transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict()
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        written.append((names, weights, config | {"_name_or_path": ""}))
    assert written[1][0] - written[0][0] <= {"generation_config.json"}
    assert written[0][1:] == written[1][1:]
    again = policy.load_policy(tmp_path / "ours", dtype, "cpu", with_modules=True)
    assert policy.compute_weights_digest(again) == policy.compute_weights_digest(ours)


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
# another file of weights, keys of config.json, or its text
UNUSUAL: dict[str, Any] = {
    "a sliding window": {"use_sliding_window": True, "sliding_window": 16},
    "scaled rotary embeddings": {"rope_parameters": LINEAR},
    "quantized": {"quantization_config": {"bits": 4}},
    "another architecture": {"architectures": ["Qwen3ForSequenceClassification"]},
    "a key left to its default": {"head_dim": None},
    "a tensor too many": lambda p: add_tensors(p, {"model.more.weight": torch.zeros(1)}),
    "another shape": {"intermediate_size": 96},
    "weights cut short": lambda p: os.truncate(p / "model.safetensors", 500),
    "no safetensors": lambda p: (p / "model.safetensors").unlink(),
    "a config that is no JSON": lambda p: (p / "config.json").write_text("{"),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_the_unusual_is_left_to_transformers(what: str, tmp_path: Path, small_model: Path) -> None:
    path, change = shutil.copytree(small_model, tmp_path / "m"), UNUSUAL[what]
    assert without_transformers.load(path, "float32") is not None
    if callable(change):
        change(path)
    else:
        edit(path, "config.json", **change)
    assert without_transformers.load(path, "float32") is None


def test_the_bare_tokenizer_is_transformers(small_model: Path, tmp_path: Path) -> None:
    ours = load_tokenizer(small_model)
    theirs = transformers.AutoTokenizer.from_pretrained(small_model)
    assert isinstance(ours, PlainTokenizer)
    assert all((t.eos_token_id, t.pad_token_id) == (1, 0) for t in (ours, theirs))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
        for skip in (False, True):
            got = ours.decode([*ids, 1, 0], skip_special_tokens=skip)
            assert got == (theirs.decode([*ids, 1, 0], skip_special_tokens=skip))
    path = shutil.copytree(small_model, tmp_path / "m")
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}={% endfor %}")
    turns = [{"role": "user", "content": content} for content in ("12", "3")]
    got = encode_prompt(load_tokenizer(path), Prompt(0, "", messages=turns))
    assert got.tolist() == theirs.encode("12=3=", add_special_tokens=False)


QWEN = """
import json, sys
from asyncrl.models.tokenizer import load_tokenizer
t = load_tokenizer(sys.argv[1])
turns = t.apply_chat_template([{"role": "user", "content": sys.argv[2]}],
    add_generation_prompt=True, tokenize=True, return_dict=False)
print(json.dumps([type(t).__name__, t.encode("12 low<|im_end|>", add_special_tokens=False),
    t.eos_token_id, "torch" in sys.modules, turns]))
"""


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}1{% endif %}"
)


def test_a_chat_template_is_rendered_without_torch(small_model: Path, tmp_path: Path) -> None:
    """torch would cost a gateway 330 MiB at its first call by messages."""
    path = shutil.copytree(small_model, tmp_path / "m")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    done = run_command([sys.executable, "-c", QWEN, str(path), "932"]).check()
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    ids = theirs.encode("12 low<|im_end|>", add_special_tokens=False)
    turns = theirs.encode(f"932{theirs.eos_token}1", add_special_tokens=False)
    assert json.loads(done.out) == ["PlainTokenizer", ids, theirs.eos_token_id, False, turns]


def test_a_qwen_tokenizer_is_transformers_without_torch(small_model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(small_model, tmp_path / "m")
    vocab = {c: i for i, c in enumerate(["l", "o", "w", "1", "2", "Ġ", "lo", "low"])}
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    made = transformers.Qwen2Tokenizer(vocab=vocab, merges=[("l", "o"), ("lo", "w")], **ends)
    made.chat_template = TEMPLATE
    made.save_pretrained(path)
    done = run_command([sys.executable, "-c", QWEN, str(path), "low"]).check()
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    ids = theirs.encode("12 low<|im_end|>", add_special_tokens=False)
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    turns = theirs.apply_chat_template([{"role": "user", "content": "low"}], **how)
    assert json.loads(done.out) == ["Qwen2Tokenizer", ids, theirs.eos_token_id, False, turns]
    assert type(theirs).__name__ == "Qwen2Tokenizer" and 7 in ids and turns[-1] == 3


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("tokenizer_config.json", {"clean_up_tokenization_spaces": True}),
        ("tokenizer_config.json", {"eos_token": "<new>"}),
        ("config.json", {"model_type": "qwen2"}),
        ("tokenizer.json", {"truncation": {"max_length": 3}}),
        ("special_tokens_map.json", {"bos_token": "<unk>"}),
    ],
)
def test_a_tokenizer_that_transformers_would_change_is_left_to_it(
    file: str, keys: dict[str, Any], tmp_path: Path, small_model: Path
) -> None:
    path = shutil.copytree(small_model, tmp_path / "m")
    assert tokenizer.read_plain_settings(path) is not None
    if not (path / file).exists():
        (path / file).write_text("{}")
    edit(path, file, **keys)
    assert tokenizer.read_plain_settings(path) is None


def test_the_optimizer_is_torchs_bit_by_bit_and_so_are_its_states() -> None:
    torch.manual_seed(0)
    start, pairs = [torch.randn(7, 5), torch.randn(3)], []
    for kind in (PlainAdamW, torch.optim.AdamW):
        parameters = [torch.nn.Parameter(x.clone()) for x in start]
        optimizer = kind(parameters, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        for n in range(6):
            # type: ignore[union-attr]
            sum((p * (n + 1) - 1).square().sum() for p in parameters).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if n == 2:  # through a checkpoint of the other kind
                state = optimizer.state_dict()
                other = torch.optim.AdamW if kind is PlainAdamW else PlainAdamW
                optimizer = other(parameters, lr=1.0, fused=True)
                optimizer.load_state_dict(state)
        pairs.append((parameters, optimizer.state_dict()))
    (a, sa), (b, sb) = pairs
    assert all(torch.equal(x, y) and x.requires_grad for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], start[0]) and sa["param_groups"] == sb["param_groups"]
    assert all(
        torch.equal(sa["state"][i][k], sb["state"][i][k])
        for i in range(2)
        for k in ("step", "exp_avg", "exp_avg_sq")
    )


LEARNER_AND_ENGINE = """
import sys
from pathlib import Path
import numpy as np, torch
import actors.generator, learner.loop, asyncrl.supervise.run
from actors.engine import CompletionRequest
from asyncrl.config import load
from asyncrl.models import policy
from asyncrl.models.tokenizer import encode_prompt, load_tokenizer
from asyncrl.contract.versions import Label
from learner import checkpoint
from learner_step_kit import batch
config = load.load("configs/demo.toml", [f"model.path={sys.argv[1]!r}", "model.device=cpu", "kl.reward.coefficient=0.1"])
core = learner.loop.LearnerCore(config, sys.argv[1])
assert core.train(batch())["optim/steps"] == 1
root = Path(sys.argv[2])
saved = checkpoint.claim(checkpoint.start_epoch(root)[2], 0)
checkpoint.save(saved, core, {}, 2)
checkpoint.restore(core, checkpoint.find_newest_checkpoint(saved))
engine, tokenizer = actors.generator.build_engine(config), load_tokenizer(sys.argv[1])
engine.load(dict(policy.list_named_weights(core.model)), Label(1, 0), "d")
engine.add([CompletionRequest((0, 0, 1), np.array(tokenizer.encode("12="), np.int32), 0, 8, 1.0, 1.0, 0, (1,), 0)])
while engine.active:
    for a in engine.step():
        tokenizer.decode(a.tokens.tolist())
"""  # noqa: E501
SUPERVISOR = """
import sys
import asyncrl.cli, asyncrl.supervise.run, asyncrl.supervise.cleanup
from asyncrl.config import load
from asyncrl.supervise import run
run.preflight(load.load("configs/demo.toml", [f"model.path={sys.argv[1]!r}"]))
"""
NEVER = ("transformers", "torch._dynamo", "sympy", "scipy", "torch")
SHOW = f"print([m for m in {NEVER} if m in sys.modules])"


@pytest.mark.parametrize(
    ("code", "imported"),
    [(LEARNER_AND_ENGINE, ["torch"]), (SUPERVISOR, [])],
    ids=["learner and engine", "supervisor"],
)
def test_no_process_of_a_run_imports_what_it_does_not_need(
    code: str, imported: list[str], small_model: Path, tmp_path: Path
) -> None:
    done = run_command([sys.executable, "-c", code + SHOW, str(small_model), str(tmp_path)]).check()
    assert done.out.strip().splitlines()[-1] == str(imported)
