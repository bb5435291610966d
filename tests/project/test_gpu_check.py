"""`make gpu-check` on a CPU, with the few packages that a GPU machine may have."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from bench_rivals_kit import program
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
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
        waiting += [
            need.name
            for need in needs
            if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
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
