"""Names cannot collide: whatever lies in a user's folder, ours and the library's are imported."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from installed_kit import PLAIN_ENV, installed  # noqa: F401
from process_kit import ROOT, SMALL, Ended

pytestmark = [pytest.mark.slow, pytest.mark.cold]

TAKEN = (
    "learner",
    "buffer",
    "actors",
    "config",
    "messages",
    "queue",
    "random",
    "secrets",
    "selectors",
    "tempfile",
    "logging",
    "uuid",
)
REWARD = """
import json, queue, sys
from pathlib import Path

def reward(prompt, text):
    wanted = ("actors", "asyncrl", "queue")
    names = {n: getattr(sys.modules.get(n), "__file__", None) for n in wanted}
    Path(__file__).with_name("seen.json").write_text(json.dumps(names))
    return float(len(text) % 2)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with files of unlucky names, each telling its import, and a reward module."""
    path = tmp_path / "work"
    path.mkdir()
    for name in TAKEN:
        (path / f"{name}.py").write_text(
            f"raise RuntimeError('{name}.py of the working directory was imported')\n"
        )
    (path / "my_reward.py").write_text(REWARD)
    shutil.copy(ROOT / "configs" / "demo.toml", path / "demo.toml")
    return path


def small_run(folder: Path, model: Path, argv: list[str], **env: str) -> Ended:
    sets = [
        f"model.path={str(model)!r}",
        *SMALL[:-1],
        "learner.steps=2",
        "evaluation.every=0",
        "name='r'",
        "reward.function='my_reward:reward'",
        "reward.deadline_s=600.0",
    ]
    words = [*argv, "run", "demo.toml", "--json", *[x for s in sets for x in ("--set", s)]]
    return Ended(
        subprocess.run(
            words, cwd=folder, env=PLAIN_ENV | env, capture_output=True, text=True, timeout=1800
        )
    )


def check_small_run(done: Ended, folder: Path, rewards: Path) -> dict[str, str]:
    """Where the run's reward process, in whose folder `rewards` is, found its modules."""
    assert done.code == 0 and done.json["steps"] == 2, done.err[-3000:]
    assert "working directory was imported" not in done.err + "".join(
        p.read_text() for p in folder.glob("runs/r/logs/*/*.log")
    )
    seen: dict[str, str] = json.loads((rewards / "seen.json").read_text())
    return seen


def test_a_run_in_a_folder_with_files_of_our_names(folder: Path, small_model: Path) -> None:
    """By the console script; as a module below."""
    done = small_run(folder, small_model, [str(Path(sys.executable).with_name("asyncrl"))])
    seen = check_small_run(done, folder, folder)
    assert seen["actors"] == str(ROOT / "actors" / "__init__.py") and "lib/python" in seen["queue"]


def test_users_modules_hide_nothing(folder: Path, tmp_path: Path, small_model: Path) -> None:
    """There the standard library comes later, as the user asked; our names still win."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (folder / "my_reward.py").rename(mine / "my_reward.py")
    for name in ("learner", "buffer", "actors"):
        shutil.copy(folder / f"{name}.py", mine / f"{name}.py")
    module = [sys.executable, "-m", "asyncrl.cli"]
    done = small_run(folder, small_model, module, PYTHONPATH=str(mine))
    seen = check_small_run(done, folder, mine)
    assert seen["actors"] == str(ROOT / "actors" / "__init__.py") and "lib/python" in seen["queue"]


def test_the_wheel_has_one_name_and_runs(installed: Path, folder: Path, small_model: Path) -> None:
    (wheel,) = installed.glob("asyncrl-*.whl")
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"asyncrl"}
    ours = {
        p.relative_to(ROOT)
        for x in ("asyncrl", "actors", "buffer", "learner", "configs")
        for p in (ROOT / x).rglob("*.py")
    }
    inside = {
        Path(n) if (ROOT / n).exists() else Path(n).relative_to("asyncrl")
        for n in names
        if n.endswith(".py")
    }
    assert inside == ours, "every module is in it, each once"

    (folder / "demo.toml").unlink()  # the one of the wheel is found by its name
    done = small_run(folder, small_model, [str(installed / "env" / "bin" / "asyncrl")])
    seen = check_small_run(done, folder, folder)
    (site,) = (installed / "env").glob("lib/python*/site-packages")
    assert seen["actors"] == str(site / "asyncrl" / "actors" / "__init__.py")
    assert seen["asyncrl"] == str(site / "asyncrl" / "__init__.py")
    assert (folder / "runs" / "r" / "report.html").exists(), "its template was found"


def ended(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env=PLAIN_ENV | env,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_module_has_one_name() -> None:
    done = ended("import asyncrl, learner; print(learner.__file__); import asyncrl.learner")
    assert done.stdout.strip() == str(ROOT / "learner" / "__init__.py")
    assert "asyncrl.learner is imported as learner" in done.stderr


def test_another_module_of_our_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "buffer.py").touch()
    done = ended("import buffer, asyncrl", PYTHONPATH=str(tmp_path))
    assert (
        done.returncode == 1
        and f"asyncrl needs its own package `buffer`, but {tmp_path / 'buffer.py'} was imported"
        in done.stderr
    )


def test_a_checkout_that_is_not_installed_runs_by_name(tmp_path: Path) -> None:
    """`python -m asyncrl.cli` in it: its processes find it too, which `-P` would prevent."""
    code = (
        "import os, asyncrl.contract.importing as i; i.INSIDE = i.Path(os.getcwd()) / 'asyncrl'; "
        "i.export_checkout_path(); print(os.environ['PYTHONPATH'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=PLAIN_ENV | {"PYTHONPATH": "a" + os.pathsep + "b"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip().split(os.pathsep) == [str(tmp_path), "a", "b"], done.stderr
