"""Models of other families, and models that are not what their files say."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from any_model_kit import FAMILIES, directory
from bare_kit import edit
from engine_kit import request, run
from generator_kit import announcement, make, one_pass, ticket, tickets  # noqa: F401
from holding import held
from learner_step_kit import batch, core
from process_kit import FEW, Ended
from wrong_model_kit import SYMBOLS, TEMPLATE, chat_model, check_ends, config

from actors.engine import Completion
from actors.engine_embedded import EmbeddedEngine, make_engine
from actors.generator import Generator
from asyncrl.contract import messages as m
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.models import model_check, packed_forward, policy
from asyncrl.models.policy import compute_weights_digest
from asyncrl.models.tokenizer import PlainTokenizer, collect_stop_tokens, load_tokenizer
from asyncrl.records import jsonl
from asyncrl.supervise.preflight import preflight, run_checks
from asyncrl.tasks.synthetic import TASKS

pytestmark = pytest.mark.slow

# as published with models; transformers reads it and refuses to write it
SAMPLING = '{"do_sample": false, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1]}'


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_learner_agree_with_transformers(family: str, tmp_path: Path) -> None:
    """With its eager attention, but that of Falcon, which adds its ALiBi bias twice."""
    path = directory(tmp_path, family, "abcdefgh")
    (path / "generation_config.json").write_text(SAMPLING)
    model = policy.load_policy(path, "float32", "cpu")
    engine = make_engine(config(path, "generator.slots=4", "generator.context=64"))
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
    requests = [
        request(t, 0, [3 + t] * (1 + t), 4 + t, temperature=0.7 if t % 2 else 1.0) for t in range(6)
    ]
    answers = run(engine, requests)
    assert len(answers) == 6
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="sdpa" if family == "falcon_alibi" else "eager"
    )
    for r in requests:
        a = answers[r.key]
        ids = torch.from_numpy(np.concatenate([a.prompt, a.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = (
                hf(input_ids=ids, use_cache=False).logits[0, len(a.prompt) - 1 : -1].float()
                / r.temperature
            )
        want = torch.log_softmax(logits, -1).gather(1, ids[0, len(a.prompt) :, None])[:, 0]
        assert np.allclose(a.logprobs, want.numpy(), atol=1e-5)
        ours = model.logprobs(
            [a.prompt], [a.tokens], torch.tensor([r.temperature]), groups=[0], want_entropy=False
        ).logprobs
        assert torch.allclose(ours.detach(), want, atol=1e-5)
    note = model_check.compare_with_eager(path, "bfloat16", "cpu")
    said = {
        "gemma2": "eager attention (sdpa ignores the cap of its scores); ",
        "bloom": "eager attention (it has no sdpa); ",
        "qwen2": "packed forward; ",
    }
    assert note.startswith(said.get(family, "")) and "in float32 to " in note
    learner = core(path)
    before = compute_weights_digest(learner.model)
    assert np.isfinite(learner.train(batch())["optim/grad_norm"])
    assert compute_weights_digest(learner.model) != before
    policy.export(learner.model, tmp_path / "exported")
    policy.load_policy(tmp_path / "exported", "float32", "cpu")
    assert (tmp_path / "exported" / "generation_config.json").read_text() == SAMPLING


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("attention", "the sdpa attention leaves something out (Gemma2ForCausalLM)"),
        ("padding", "padded rows change its results (Gemma2ForCausalLM)"),
        ("packed", "the packed forward leaves something out (BareModel)"),
        ("large", "those of transformers' eager attention in bfloat16 on cpu, as its weights take"),
    ],
)
def test_a_forward_that_is_not_the_models_is_refused(
    change: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory(tmp_path, "qwen2" if change == "packed" else "gemma2", "abcdefgh")
    if change == "large":
        monkeypatch.setattr(model_check, "FLOAT32_BYTES", 1000)
        assert said in model_check.compare_with_eager(path, "bfloat16", "cpu")
        return
    if change == "attention":
        monkeypatch.setattr(policy, "caps_scores", lambda config: False)
    elif change == "padding":
        plain = policy.compute_plain_logprobs
        monkeypatch.setattr(  # as if padding took part
            policy,
            "compute_plain_logprobs",
            lambda hf, rows, at_once, *rest, **more: plain(
                hf,
                replace(rows, prompts=[p[min(at_once - 1, 1) :] for p in rows.prompts]),
                *(at_once, *rest),
                **more,
            ),
        )
    else:
        monkeypatch.setattr(packed_forward, "rotate", lambda x, cos, sin: x)
        monkeypatch.setattr(packed_forward, "apply_rotary", lambda x, cos, sin: x)
    with pytest.raises(ConfigError) as error:
        model_check.compare_with_eager(path, "float32", "cpu")
    assert f"model.path: {path} would be trained as another model" in str(error.value)
    assert said in str(error.value)


def test_the_check_of_a_config_compares_and_says_what_is_not_applied(tmp_path: Path) -> None:
    """Whatever transformers loads is compared before each run; the packed forward, by the check."""
    path = directory(tmp_path, "qwen3_moe", "0123456789=:,#")
    edit(path, "config.json", output_router_logits=True, router_aux_loss_coef=0.01)
    findings = {finding.check: finding for finding in run_checks(config(path))}
    assert "log-probabilities equal those of transformers' eager" in findings["model"].text
    assert "router_aux_loss_coef = 0.01 of config.json is not applied" in findings["model"].text


@pytest.mark.parametrize("text", [SAMPLING, '{"top_p": 0.9}', ""])
def test_a_model_is_exported_with_its_own_sampling_settings(text: str, tmp_path: Path) -> None:
    """Through the modules of transformers, as ZeRO-3 has them; without a file, as config.json."""
    path = directory(tmp_path, "qwen2", "abcdefgh")
    (path / "generation_config.json").write_text(text)
    if not text:
        (path / "generation_config.json").unlink()
        edit(path, "config.json", temperature=0.6)
    model = policy.load_policy(path, "float32", "cpu", with_modules=True)
    policy.export(model, tmp_path / "exported")
    exported = (tmp_path / "exported" / "generation_config.json").read_text()
    assert exported == text or (not text and json.loads(exported)["eos_token_id"] == 1)
    assert model.hf.can_generate()


def test_a_whole_run_of_another_architecture(asyncrl: Callable[..., Ended], tmp_path: Path) -> None:
    path = directory(tmp_path, "gpt2", TASKS["sort"].symbols)
    model = f"model.path={str(path)!r}", "model.warm_start=false"
    done = asyncrl("run", *model, *FEW, "learner.steps=3", "name='other'").check()
    assert done.json["steps"] == 3 and done.json["mismatch_k3_max"] < 1e-9
    exported = Path(done.json["run_dir"]) / "model"
    trained = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert type(trained).__name__ == "GPT2LMHeadModel"


@pytest.mark.cold
@pytest.mark.parametrize("kind", ["tokenizer of transformers", "chats"])
def test_nothing_of_transformers_is_imported_once_tickets_come(
    asyncrl: Callable[..., Ended], tmp_path: Path, kind: str
) -> None:
    """Its import takes seconds, for which the whole run would wait: learner, generator, buffer."""
    path, prompts = tmp_path / "m", tmp_path / "p.jsonl"
    policy.build_model(path, SYMBOLS, hidden=32)
    if kind == "chats":
        (path / "chat_template.jinja").write_text(TEMPLATE)
        rows = [{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(20)]
    else:
        edit(path, "tokenizer_config.json", extra_special_tokens={})
        rows = [{"prompt": f"{n}="} for n in range(20)]
    assert isinstance(load_tokenizer(path), PlainTokenizer) == (kind == "chats")
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    late = tmp_path / "late"
    done = asyncrl(
        "run",
        *(f"model.path={str(path)!r}", "model.warm_start=false", "task.name='file'"),
        *(f"task.prompts={str(prompts)!r}", *FEW, "learner.steps=1", "name='late'"),
        **held(imports=late),
    ).check()
    assert (Path(done.json["run_dir"]) / "token_samples.jsonl").read_text()
    assert not late.exists(), late.read_text()[:3000]


def test_ones_own_prompts_and_reward(asyncrl: Callable[..., Ended]) -> None:
    """The example of docs/rewards.md: configs/examples, its parts of the reward in the metrics."""
    done = asyncrl(
        *("run", *FEW, "learner.steps=3", "task.name='file'", "name='own'"),
        *("task.prompts='configs/examples/prompts.jsonl'", "reward.workers=1"),
        *("reward.function='configs.examples.my_reward:reward'", "reward.deadline_s=600.0"),
    ).check()
    rows = jsonl.read(Path(done.json["run_dir"]) / "metrics.jsonl")
    parts = {k for r in rows for k in r if k.startswith("reward_part/")}
    assert parts and done.json["failures"] == {}


def weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def without_layer(path: Path) -> None:
    """Layer 1 of 2 is gone, and config.json asks for it."""
    weights(path, lambda t: [t.pop(k) for k in list(t) if ".1." in k])


def spoiled(value: float, dtype: torch.dtype) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({k: t.to(dtype) for k, t in tensors.items()})
        tensors["model.norm.weight"][5] = value

    return lambda path: weights(path, change)


def more_tokens(path: Path) -> None:
    """Two tokens were added to the tokenizer, and the embeddings were not resized."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    tokenizer.save_pretrained(path)


def no_end(path: Path) -> None:
    edit(path, "tokenizer_config.json", eos_token=None)
    edit(path, "config.json", eos_token_id=None)
    (path / "generation_config.json").unlink()


NOT_FINITE = "model.norm.weight in {path}/model.safetensors has NaN or infinities"


def unreadable(file: str) -> Callable[[Path], Any]:
    return lambda path: (path / file).write_text("{")


# what is done to the directory, or a setting; and what is said of it
WRONG: dict[str, tuple[Callable[[Path], Any] | str, str]] = {
    "lacks a layer": (without_layer, "which would be random: model.layers.1."),
    "NaN": (spoiled(float("nan"), torch.float32), NOT_FINITE),
    "infinite in bfloat16": (spoiled(float("-inf"), torch.bfloat16), NOT_FINITE),
    "masked LM": (
        lambda p: edit(p, "config.json", architectures=["BertForMaskedLM"]),
        "is a BertForMaskedLM (config.json), not a causal LM",
    ),
    "two stacks": (
        lambda p: edit(p, "config.json", is_encoder_decoder=True),
        "is an encoder-decoder model (config.json), not a causal LM",
    ),
    "tokenizer too large": (more_tokens, "to number 18, the model's vocabulary ends at 16 (voc"),
    "context too long": ("generator.context=300", "300 tokens; the model in {path} has 256 pos"),
    "no end": (no_end, "no token ends a completion: neither the tokenizer nor generation_config"),
    "stop of many tokens": ('generator.stop=["#1"]', "generator.stop: '#1' is 2 tokens"),
    "no JSON": (unreadable("config.json"), "config.json cannot be read"),
    "no sampling settings": (unreadable("generation_config.json"), "_config.json cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_before_the_start(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    policy.build_model(path, SYMBOLS, hidden=32)
    preflight(config(path))
    wrong, said = WRONG[name]
    sets = [wrong] if isinstance(wrong, str) else []
    if not isinstance(wrong, str):
        wrong(path)
    with pytest.raises(ConfigError) as e:
        preflight(config(path, *sets))
    assert said.format(path=path) in str(e.value) and "\n" not in str(e.value)


def test_a_reference_is_looked_at_too(tmp_path: Path) -> None:
    policy.build_model(tmp_path / "m", SYMBOLS, hidden=32)
    policy.build_model(tmp_path / "r", SYMBOLS + "xyz", hidden=32)
    reference = f"model.reference={str(tmp_path / 'r')!r}"
    with pytest.raises(
        ConfigError, match=r"model.reference: .* has a vocabulary of 20, model.path of 17"
    ):
        preflight(config(tmp_path / "m", reference))
    policy.build_model(tmp_path / "r", SYMBOLS, hidden=32)
    preflight(config(tmp_path / "m", reference))
    without_layer(tmp_path / "r")
    with pytest.raises(ConfigError, match=r"model.reference: the weights in .* lack 11"):
        preflight(config(tmp_path / "m", reference))


def bert(path: Path) -> None:
    """An encoder whose directory calls it a language model, as transformers lets it be loaded."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 128, "eos_token_id": 1}
    shape = transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    torch.manual_seed(0)
    transformers.BertLMHeadModel(shape).save_pretrained(path)


def test_an_encoder_under_another_name(tmp_path: Path) -> None:
    policy.build_model(tmp_path, SYMBOLS, hidden=32)
    bert(tmp_path)
    with pytest.raises(
        ConfigError, match="is not a causal LM: its logits at a token depend on later tokens"
    ):
        preflight(config(tmp_path))


def test_a_layer_that_another_architecture_lacks(tmp_path: Path) -> None:
    path = directory(tmp_path, "gemma2", SYMBOLS)
    without_layer(path)
    with pytest.raises(
        ConfigError, match=r"model.path: the weights in .* lack 11 of the parameters"
    ):
        preflight(config(path))
    with pytest.raises(ConfigError, match=r"lack 11 of the parameters"):
        policy.load_policy(path)  # also where nobody looked before


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("named", ["TokenizersBackend", "Qwen2Tokenizer", "LlamaTokenizer"])
def test_the_tokenizer_is_the_one_of_its_file(family: str, named: str, tmp_path: Path) -> None:
    """A class of transformers that builds another one would read and write no spaces."""
    policy.build_model(tmp_path, SYMBOLS, hidden=32, family=family)
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "▁add": 3, "▁1": 4, "▁2": 5}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    edit(tmp_path, "tokenizer_config.json", tokenizer_class=named)
    notes: list[str] = []
    tokenizer = model_check.check(config(tmp_path), notes.append)
    ids = tokenizer.encode("add 1 2", add_special_tokens=False)
    assert ids == [3, 4, 5] and tokenizer.decode(ids) == "add 1 2"
    own_class = "Llama" if named.startswith("Llama") and family != "qwen2" else "Qwen2"
    by_file = named == "TokenizersBackend" and family != "qwen2"
    reason = f"because {own_class}Tokenizer of transformers reads otherwise"
    assert [note for note in notes if "tokenizer.json" in note] == (
        [] if by_file else [f"tokenizer.json is used as it is, {reason}"]
    )


def test_what_ends_an_answer(tmp_path: Path) -> None:
    """The tokenizer's, the model's (one or a list), those asked for; each once, in this order."""
    policy.build_model(tmp_path, SYMBOLS, hidden=32)

    def ends(*sets: str) -> tuple[int, ...]:
        return collect_stop_tokens(load_tokenizer(tmp_path), config(tmp_path, *sets))

    assert ends() == (1,)
    edit(tmp_path, "generation_config.json", eos_token_id=[1, 7, 9])
    assert ends() == (1, 7, 9) and ends('generator.stop=["#", "0"]') == (1, 7, 9, 16, 3)
    edit(tmp_path, "generation_config.json", eos_token_id=5)
    assert ends() == (1, 5)
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path, "config.json", eos_token_id=[4])
    assert ends() == (1, 4), "as transformers takes it from there"
    no_eos = tmp_path / "n"
    shutil.copytree(tmp_path, no_eos, ignore=shutil.ignore_patterns("n"))
    edit(no_eos, "tokenizer_config.json", eos_token=None)
    edit(no_eos, "config.json", eos_token_id=None)
    assert collect_stop_tokens(load_tokenizer(no_eos), config(no_eos)) == ()
    preflight(config(no_eos, 'generator.stop=["#"]'))


def test_the_generator_stops_and_shows_the_text_without(make: Callable[..., Generator]) -> None:
    g = make('generator.stop=["#"]')
    one_pass(g, tickets(g, announcement(1), ticket(0, 1, epoch=1, samples=1)))
    ((key, r),) = g.engine.rows.items()
    assert r.stop == (1, 16)
    span = m.VersionSpan(Label(1, 0), "d", 0, 3, Label(1, 0))
    tokens, logprobs = np.array([4, 5, 16], np.int32), np.zeros(3, np.float32)
    g.accept_completion(Completion(key, r.prompt, tokens, logprobs, [span], "stop", support=None))
    assert g.unscored[key][2] == "12"


def test_a_chat_template_with_several_end_tokens(tmp_path: Path) -> None:
    """The embedded engine; an untrained model draws each of 17 tokens about as often: 64 answers of
    12 tokens meet all three ends."""
    model = chat_model(tmp_path, hidden=32)
    c = config(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "12="}], **how)
    assert prompt == [4, 5, 13, 1, 14], "the template's own end of a turn is in the prompt"
    stops = collect_stop_tokens(tokenizer, c)
    engine = EmbeddedEngine(model, slots=64, context=32, max_new_tokens=12)
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
    requests = [replace(request(t, 0, prompt, 12), stop=stops) for t in range(64)]
    check_ends(run(engine, requests), stops, 12)
