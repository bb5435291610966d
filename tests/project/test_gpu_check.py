"""The check of a GPU, its benchmark, and the pretended GPU on which tests run them."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_rivals_kit import program
from engine_kit import request, run
from holding import held
from learner_step_kit import batch, core, weights
from packaging.requirements import Requirement
from pretend_gpu import GPU, pretend_gpu, waits
from process_kit import ROOT

from actors import decoder
from actors.decoding.drafts import DraftPolicy
from actors.engine import Completion, load_model
from actors.engine_embedded import EmbeddedEngine
from actors.engine_generic import GenericEngine
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.tasks.synthetic import SortTask
from learner import checkpoint
from learner.step import LearnerCore

FORKED = ROOT / "tests" / "support" / "forked_gpu_check.py"
ENOUGH = ("torch", "transformers", "numpy", "safetensors", "msgspec", "pyzmq", "xxhash", "click")
pytestmark = pytest.mark.slow

# an interpreter imports this module when it starts, so that every process of the check obeys it
HIDE = """
import importlib.machinery, json, os, sys
HIDDEN = frozenset(json.load(open(os.environ["HIDDEN_PACKAGES"])))
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(name, path, target)
sys.meta_path[:] = [
    Finder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path
]
"""


def brought_by(roots: tuple[str, ...]) -> set[str]:
    """The distributions that installing `roots` brings, with themselves."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform
            continue
        needs = [Requirement(line) for line in lines]
        waiting += [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def few_packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("few")
    allowed = brought_by((*ENOUGH, "rich"))
    hidden = [
        module
        for module, owners in metadata.packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & allowed
        and module not in ("asyncrl", "__editable___asyncrl_0_1_0_finder")
    ]
    assert {"psutil", "tomli_w", "tensorboardX", "scipy", "peft"} <= {*hidden}
    assert not {"torch", "jinja2", "tokenizers", "zmq"} & {*hidden}
    (folder / "sitecustomize.py").write_text(HIDE)
    # found before the installed one: an untested version is warned about and not refused
    other = folder / "transformers-5.17.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0\n")
    (folder / "hidden.json").write_text(json.dumps(hidden))
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return {
        **os.environ,
        "PYTHONPATH": paths,
        "HIDDEN_PACKAGES": str(folder / "hidden.json"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def test_every_part_works_on_a_cpu_with_few_packages(few_packages: dict[str, str]) -> None:
    hidden = subprocess.run([sys.executable, "-c", "import psutil"], env=few_packages, check=False)
    assert hidden.returncode
    ended = subprocess.run(
        [sys.executable, str(FORKED), "--quick", "--json", "--patience", "40"],
        cwd=ROOT,
        env=few_packages,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *table, last = ended.stdout.strip().splitlines()
    found = json.loads(last)
    assert "warning: untested versions: transformers 5.17.0 (tested: 5.19.0)" in table
    assert "no CUDA GPU: all parts run on the CPU" in ended.stdout
    parts = {row["part"]: row for row in found["parts"]}
    assert len(parts) == 14 and all(row["works"] for row in parts.values())
    assert all(any(line.startswith(name) and "works" in line for line in table) for name in parts)
    for name, row in parts.items():
        compared = (row["logprobs"], row["gradients"])
        if name.endswith("fp32") or name == "LoRA":
            assert 0 <= row["logprobs"] < 1e-4
        elif name.endswith("bf16"):
            assert 0 < row["logprobs"] < 0.2
        if name.startswith(("packed", "learner", "FSDP2")):
            assert None not in compared and row["tokens_per_s"] > 0
    assert parts["FSDP2"]["note"].startswith("with offload")
    assert parts["speculative decoding"]["note"].endswith("drafted tokens")
    assert parts["routing replay"]["note"].startswith("replay lowers k3")
    assert parts["LoRA"]["note"] == "engine only: training needs peft"
    assert parts["demo run"]["note"].startswith("2 steps")
    assert found["met"] and found["machine"]["device"] == "cpu"
    assert found["versions"]["transformers"] == "5.17.0"
    assert found["versions"]["torch"] == metadata.version("torch")


@pytest.mark.cold  # parts in processes of their own, as a user starts them
def test_lora_trains_where_peft_is_installed(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_check.py", "--quick", "--json", "--only", "LoRA"]
    command += ["--patience", "40"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    (row,) = json.loads(ended.stdout.strip().splitlines()[-1])["parts"]
    assert row["gradients"] is not None and row["gradients"] < 1e-4 and row["note"] == ""


@pytest.mark.parametrize(
    ("code", "limit", "error"),
    [
        ("print('{\"a\": 1}')", 600.0, ""),
        ("raise MemoryError('no room')", 600.0, "exit code 1: MemoryError: no room"),
        ("import os; os.abort()", 600.0, "ended by SIGABRT"),
        ('print(\'{"error": "E: no"}\'); raise SystemExit(1)', 600.0, "E: no"),
        ("import time; time.sleep(3600)", 0.5, "not done after 0 s"),
        ("print('[]x')", 600.0, "it ended without a result"),
        ("", 600.0, "it ended without a result"),
    ],
)
def test_an_end_of_a_part_is_one_line(
    code: str, limit: float, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = program("gpu_check", monkeypatch)
    outcome = check.run_isolated([sys.executable, "-S", "-c", code], limit)
    assert outcome.error == error and outcome.result == ({} if error else {"a": 1})


def test_a_part_that_hangs_ends_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = program("gpu_check", monkeypatch)
    monkeypatch.setattr(check, "ENDING_S", 0.3)
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    code = f"""
import subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-S", "-c", {child + "time.sleep(3600)"!r}], stdout=subprocess.PIPE
)
child.stdout.readline()
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(3600)
"""
    started = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert started.poll() is None
        time.sleep(0.02)
    check.stop_group(started)
    assert started.wait(120) < 0
    pid = int((tmp_path / "pid").read_text())
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        state = "Z"
    assert state == "Z"


def test_a_failed_part_leaves_the_others_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = program("gpu_check", monkeypatch)
    codes = {
        "device": 'print(\'{"device": "cpu", "gpus": [], "cuda": null}\')',
        "engine fp32": "import os; os.abort()",
        "LoRA": "raise ValueError('wrong\\nshape')",
    }

    def command(name: str, *_: Any) -> list[str]:
        return [sys.executable, "-S", "-c", codes.get(name, "print('{\"logprobs\": 0.5}')")]

    monkeypatch.setattr(check, "part_command", command)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--quick", "--json"])
    assert check.main() == 1
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["parts"]
    assert [row["part"] for row in rows] == list(check.PARTS)
    bad = {row["part"]: row["error"] for row in rows if not row["works"]}
    assert bad == {"engine fp32": "ended by SIGABRT", "LoRA": "exit code 1: shape"}
    assert all(row["logprobs"] == 0.5 for row in rows if row["works"])


def test_a_difference_from_the_cpu_beyond_the_limit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    program("gpu_check", monkeypatch)
    from lib import gpu_parts

    result = gpu_parts.PartResult(1e-2, 1e-3)
    assert result.check("bfloat16") is result
    with pytest.raises(gpu_parts.PartError, match=r"differ from the CPU by 1\.0e-02 nats"):
        result.check("float32")
    for wrong in (gpu_parts.PartResult(None, 0.5), gpu_parts.PartResult(0.0, float("nan"))):
        with pytest.raises(gpu_parts.PartError, match="the gradient differs from the CPU"):
            wrong.check("bfloat16")


def test_all_parts_have_a_limit_and_fit_into_eight_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    check = program("gpu_check", monkeypatch)
    from lib import gpu_parts

    assert check.PARTS.keys() == gpu_parts.CHECKS.keys()
    # a part that hangs takes no time from the others
    assert sum(check.PARTS.values()) <= check.TOTAL_S and check.TOTAL_S + check.DEVICE_S < 8 * 60


def test_the_tested_versions_are_those_of_the_project() -> None:
    from asyncrl.models.installed import TESTED

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, version in TESTED.items():
        assert f"{name}=={version}" in project["dependencies"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu_bench")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    program("gpu_bench", monkeypatch)
    from lib import gpu_bench_parts

    return gpu_bench_parts


MEASURED = ("peaks", "engine", "generate", "learner", "plain learner", "asynchronous", "shared")


@pytest.mark.parametrize("name", [*MEASURED, "shared on a GPU"])
def test_a_part_measures_rates(name: str, parts: Any, work: Path) -> None:
    name, _, gpu = name.partition(" on a ")
    parts.Setting("cpu", parts.SCALES["tiny"], work).model_directory("0.5B")
    with pretend_gpu() if gpu else nullcontext():
        found = parts.run_part(f"{name} 0.5B", "cuda" if gpu else "cpu", "tiny", work)
    rates = [value for key, value in found.items() if key.endswith("per_s")]
    assert rates and all(rate > 0 for rate in rates)
    if "lag" in found or "lags" in found:
        assert found["step_s"] > 0 and (name == "shared" or found["lag"]["limit"] == 2)


def test_completions_end_by_chance(parts: Any, work: Path) -> None:
    """One in `mean` tokens is the end token, and its chance does not depend on the text much: the
    share of completions that go on past the mean is (1 - 1 / 8) ** 8 = 0.34."""
    setting = parts.Setting("cpu", parts.SCALES["tiny"], work)
    model = policy.load_policy(setting.model_directory("0.5B"), "float32", "cpu")
    e = EmbeddedEngine(model, slots=64, context=100, max_new_tokens=90)
    load_model(e, model, Label(1, 0))
    prompts = parts.draw_prompts(setting, 100)
    requests = [request(row // 8, row % 8, prompts[row // 8], 90) for row in range(800)]
    lengths = np.array([len(answer.tokens) for answer in run(e, requests, 8).values()])
    assert len(lengths) == 800 and requests[0].stop == (parts.END,)
    assert 5 < lengths.mean() < 13 and 0.2 < (lengths > 8).mean() < 0.5


def test_a_failed_part_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Continuous batching needs a GPU.  A second call adds to the results of the first one."""
    bench = program("gpu_bench", monkeypatch)
    out = ["gpu_bench.py", "--quick", "--json", "--patience", "100", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*out, "--only", "continuous batching 0.5B"])
    assert bench.main() == 1
    monkeypatch.setattr(sys, "argv", [*out, "--only", "peaks 0.5B"])
    assert bench.main() == 1
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found == json.loads((tmp_path / "result.json").read_text())
    assert found["parts"]["peaks 0.5B"]["bytes_per_s"] > 0
    assert "a GPU's free memory" in found["parts"]["continuous batching 0.5B"]["error"]


def test_ratios_have_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GB are read 300 times a second from a memory of 1,000 GB/s; 6 * 1e9 * 2e4 FLOP are 0.3 of
    4e14; a swap takes 0.05 of a step of 2 s."""
    bench = program("gpu_bench", monkeypatch)
    rows = {
        "peaks 0.5B": {"flop_per_s": 4e14, "bytes_per_s": 1e12},
        "engine 0.5B": {
            **{"tokens_per_s": 6000.0, "passes_per_s": 300.0},
            **{"weight_bytes": 1.5e9, "cache_bytes": 5e8, "swap_s": 0.1},
        },
        "generate 0.5B": {"tokens_per_s": 1000.0},
        "learner 0.5B": {"parameters": 1e9, "positions_per_s": 2e4},
        "synchronous 0.5B": {"step_s": 4.0},
        "asynchronous 0.5B": {"step_s": 2.0},
        "shared 0.5B": {"step_s": 3.0},
    }
    goals = {row["figure"]: (row["value"], row["met"]) for row in bench.compute_goals(rows)}
    assert goals == {
        "engine / generate": (6.0, True),
        "engine / bandwidth": (0.6, True),
        "learner / peak": (pytest.approx(0.3), False),
        "asynchronous / synchronous": (0.5, True),
        "shared / synchronous": (0.75, False),
        "shared / asynchronous": (1.5, False),
        "swap / step": (0.05, False),
    }
    assert bench.compute_goals({}) == []


@pytest.fixture
def gpu() -> Iterator[None]:
    with pretend_gpu():
        yield


def test_a_step_that_cannot_be_captured_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def step() -> None: ...

    assert decoder.capture(step) is step
    assert "engine: a decode step runs without a CUDA graph: " in capsys.readouterr().err


def test_it_computes_as_the_cpu_and_refuses_its_tensors(gpu: None) -> None:
    here = torch.arange(6.0).view(2, 3)
    there = here.to("cuda")
    assert there.device == GPU and torch.zeros(2, device="cuda").device == GPU
    assert torch.equal((there @ there.T + 1.0).cpu(), here @ here.T + 1.0)
    assert torch.equal(there[torch.tensor([1])].cpu(), here[[1]])  # the CPU's may index
    there[:, 1:].mul_(2)
    assert there.tolist() == [[0.0, 2.0, 4.0], [3.0, 8.0, 10.0]]
    with pytest.raises(RuntimeError, match="same device"):
        there + here
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    layer = torch.nn.Linear(3, 1).to("cuda")
    layer(there).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.device == GPU


# those without other processes
PARTS = (
    *("engine fp32", "engine bf16", "packed forward fp32", "learner step fp32"),
    *("learner step bf16", "weights by shared memory", "LoRA", "speculative decoding"),
    "routing replay",
)


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_of_the_check_work(
    gpu: None, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("gpu_check", monkeypatch)
    from lib import gpu_parts

    setting = gpu_parts.Setting("cuda", gpu_parts.SIZES["tiny"], tmp_path)
    found = gpu_parts.CHECKS[part](setting)
    assert found.logprobs is not None or part == "routing replay"
    if part == "LoRA":  # it also trains, with peft
        assert found.gradients < 1e-4 and found.note == ""


ENGINES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "kept keys": (EmbeddedEngine, {"kept_tokens": 256, "in_flight": "recompute_kv"}),
    "drafts": (EmbeddedEngine, {"drafts": DraftPolicy(3, 8)}),
    "int8": (EmbeddedEngine, {"quantize": "int8"}),
    "short mantissa": (EmbeddedEngine, {"mantissa_bits": 5}),
    "generic": (GenericEngine, {}),
    "llama": (EmbeddedEngine, {}),
}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_samples_what_it_samples_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Weights arrive in the host's memory, also while completions are unfinished."""
    kind, more = ENGINES[name]
    family: dict[str, Any] = {"family": "llama", "kv_heads": 2} if name == "llama" else {}
    first, second = (
        dict(policy.list_named_weights(policy.build_model(tmp_path / f"{n}", "abcdefgh", **shape)))
        for n, shape in ((1, {"seed": 1} | family), (2, {"seed": 2} | family))
    )

    def generate(device: str) -> list[Completion]:
        model = policy.load_policy(tmp_path / "1", "float32", device)
        engine = kind(model, slots=8, context=64, max_new_tokens=20, **more)
        engine.load(first, Label(1, 0), "d0")
        cuts: list[dict[str, float]] = [{}, {"top_p": 0.8}, {"top_k": 3}]
        completions = []
        for turn in range(2):
            prompt = [3, 4, 5, 6, 7, 8, 9, 10, 3, 4, 5]
            engine.add([request(turn, n, prompt + [3 + n], **cut) for n, cut in enumerate(cuts)])
            completions += engine.step(3)
            engine.load(second, Label(1, 1 + turn), "d1")
            completions += run(engine, []).values()
        graphs = getattr(engine, "graphs", {}).items()
        assert name != "llama" or any(graph for (*_, cuts), graph in graphs if cuts) == (
            device == "cuda"
        )
        scores = engine.score([np.array([3, 4, 5, 6], np.int32)], 2)
        completions.sort(key=lambda completion: completion.key)
        return [*completions, *scores]

    here = generate("cpu")
    with pretend_gpu():
        there = generate("cuda")
    assert len(here) == 7
    for ours, theirs in zip(here[:-1], there[:-1], strict=True):
        assert np.array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        for completion in (ours, theirs):
            assert (completion.support is None) == (completion.key[1] == 0)
        if ours.support is not None:
            assert ours.support.encode() == theirs.support.encode()
    np.testing.assert_allclose(here[-1].logprobs, there[-1].logprobs, atol=1e-5)


def test_a_call_of_an_engine_reads_the_gpu_once(gpu: None, tmp_path: Path) -> None:
    policy.build_model(tmp_path / "m", "abcdefgh")
    e = EmbeddedEngine(policy.load_policy(tmp_path / "m", device="cuda"), slots=8, context=64)
    load_model(e, policy.load_policy(tmp_path / "m"), Label(1, 0))
    e.add([replace(request(n, 0, [3, 4, 5], 17 + n), stop=()) for n in range(3)])
    assert e.step(8) == [] and e.graphs
    waits.clear()
    assert e.step(8) == [] and waits == ["tolist"]
    lengths = [len(completion.tokens) for completion in e.step(8)]
    assert lengths == [17, 18, 19] and e.steps_made == 19


SETS = {
    **{"learner.steps": 2, "learner.groups": 2, "learner.group_size": 2, "generator.slots": 8},
    **{"generator.max_new_tokens": 8, "generator.context": 32, "evaluation.prompts": 4},
    **{"evaluation.final_prompts": 4, "evaluation.ood_prompts": 0, "model.warm_start": "false"},
    **{"advantage.name": '"gae"', "kl.loss.coefficient": 0.1, "generator.top_p": 0.9},
    **{"weights.in_flight": '"recompute_kv"', "generator.speculate": 2},
}


def test_a_run_of_the_config_for_one_gpu_ends(tmp_path: Path) -> None:
    policy.build_model(tmp_path / "models" / "m", SortTask.symbols, hidden=32, heads=2)
    path, runs = (json.dumps(str(tmp_path / name)) for name in ("models/m", "runs"))
    command = [sys.executable, "-m", "asyncrl.cli", "run", "--json", "configs/gpu_one.toml"]
    for key, value in (SETS | {"model.path": path, "runs": runs}).items():
        command += ["--set", f"{key}={value}"]
    ended = subprocess.run(
        command, cwd=ROOT, env=held(gpu=True), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads(ended.stdout.strip().splitlines()[-1])
    assert summary["steps"] == 2 and summary["tokens"] > 0


def test_a_checkpoint_of_a_gpu_continues_there(gpu: None, tmp_path: Path) -> None:
    path, folder = tmp_path / "m", tmp_path / "checkpoints"
    policy.build_model(path, "abcdefgh", hidden=32)
    folder.mkdir()

    def begin() -> LearnerCore:
        learner = {"optimizer": "adamw", "gradient_cosine": "log"}
        return core(path, model={"path": str(path), "device": "cuda"}, learner=learner)

    whole, second = begin(), begin()
    whole.train(batch(0))
    checkpoint.save(folder, whole, {}, 1, {})
    whole.train(batch(1, seed=1))
    found = checkpoint.find_newest_checkpoint(folder)
    assert found is not None
    checkpoint.restore(second, found)
    second.train(batch(1, seed=1))
    assert torch.equal(weights(second).cpu(), weights(whole).cpu())
