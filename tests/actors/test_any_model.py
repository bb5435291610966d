"""Any transformers causal LM directory: GPT-2 and a Gemma, which have no packed forward, through
engine, learner and a whole run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from any_model_kit import FAMILIES, directory
from bare_kit import edit
from engine_kit import request, run
from holding import held
from learner_step_kit import batch, core
from process_kit import FEW, Ended
from wrong_model_kit import SYMBOLS, TEMPLATE, config

from actors.engine_embedded import make_engine
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.models import model_check, packed_forward, policy
from asyncrl.models.policy import compute_weights_digest
from asyncrl.models.tokenizer import PlainTokenizer, load_tokenizer
from asyncrl.records import jsonl
from asyncrl.supervise.preflight import run_checks
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
    metrics = learner.train(batch())
    assert np.isfinite(metrics["optim/grad_norm"])
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
            lambda hf, rows, *rest, **more: plain(
                hf, replace(rows, prompts=[p[1:] for p in rows.prompts]), *rest, **more
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
    done = asyncrl(
        "run",
        f"model.path={str(path)!r}",
        "model.warm_start=false",
        *FEW,
        "learner.steps=3",
        "name='other'",
    ).check()
    assert done.json["steps"] == 3 and done.json["mismatch_k3_max"] < 1e-9
    trained = transformers.AutoModelForCausalLM.from_pretrained(
        Path(done.json["run_dir"]) / "model"
    )
    assert type(trained).__name__ == "GPT2LMHeadModel"


@pytest.mark.cold
@pytest.mark.parametrize("kind", ["tokenizer of transformers", "chats"])
def test_nothing_of_transformers_is_imported_once_tickets_come(
    asyncrl: Callable[..., Ended], tmp_path: Path, kind: str
) -> None:
    """Its import takes seconds, for which the whole run would wait: learner, generator, buffer."""
    path, prompts = tmp_path / "m", tmp_path / "p.jsonl"
    if kind == "chats":
        policy.build_model(path, SYMBOLS, hidden=32)
        (path / "chat_template.jinja").write_text(TEMPLATE)
        rows = [{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(20)]
    else:
        policy.build_model(path, SYMBOLS, hidden=32)
        edit(path, "tokenizer_config.json", extra_special_tokens={})
        rows = [{"prompt": f"{n}="} for n in range(20)]
    assert isinstance(load_tokenizer(path), PlainTokenizer) == (kind == "chats")
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    late = tmp_path / "late"
    done = asyncrl(
        "run",
        f"model.path={str(path)!r}",
        "model.warm_start=false",
        "task.name='file'",
        f"task.prompts={str(prompts)!r}",
        *FEW,
        "learner.steps=1",
        "name='late'",
        **held(imports=late),
    ).check()
    assert (Path(done.json["run_dir"]) / "token_samples.jsonl").read_text()
    assert not late.exists(), late.read_text()[:3000]


def test_ones_own_prompts_and_reward(asyncrl: Callable[..., Ended]) -> None:
    """The example of docs/rewards.md: configs/examples, its parts of the reward in the metrics."""
    done = asyncrl(
        "run",
        *FEW,
        "learner.steps=3",
        "task.name='file'",
        "task.prompts='configs/examples/prompts.jsonl'",
        "reward.function='configs.examples.my_reward:reward'",
        "reward.workers=1",
        "reward.deadline_s=600.0",
        "name='own'",
    ).check()
    rows = jsonl.read(Path(done.json["run_dir"]) / "metrics.jsonl")
    parts = {k for r in rows for k in r if k.startswith("reward_part/")}
    assert parts and done.json["failures"] == {}
