"""Run `asyncrl` in real processes as a user would: environment, settings and results."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# tables of cases, by the name of their test
TEXTS = tomllib.loads((ROOT / "tests" / "data" / "configs.toml").read_text())


def write_lines(path: Path, *rows: object) -> str:
    """Write each row as a line, what is no text as JSON; return the path."""
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def load_program(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"program_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# processes keep what they compile, also where Python is told to write no bytecode
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# also for the reward processes of commands called in this process
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests' / 'support'}"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else threads of OpenMP that wait spin


ENV = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


# For real processes on a busy machine: nobody is taken for hung, or gone, because others have the
# cores.
PATIENT = (
    "watchdog.floor_s=3600.0",
    "watchdog.startup_s=3600.0",
    "wires.connect_s=1200.0",
    "reward.deadline_s=600.0",
)


# The seed of the runs that tests make: no outcome hangs on what a short run happens to sample and
# learn, hence ASYNCRL_TEST_SEED=7 passes as well.
RUN_SEED = int(os.environ.get("ASYNCRL_TEST_SEED", "0"))


class Ended:
    def __init__(self, process: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = process.returncode, process.stdout, process.stderr

    def check(self) -> Ended:
        """Itself, of a process that ended well."""
        assert self.code == 0, self.err[-3000:]
        return self

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.strip(), (
            f"nothing on stdout (exit {self.code}); stderr ends:\n{self.err[-3000:]}"
        )
        return dict(json.loads(self.out.strip().splitlines()[-1]))


def run_command(
    argv: list[str], *, cwd: Path = ROOT, env: dict[str, str] = ENV, timeout: float = 3600
) -> Ended:
    return Ended(
        subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    )


def as_options(sets: Iterable[str]) -> list[str]:
    return [word for item in sets for word in ("--set", item)]


def run_cli(*words: str, sets: Iterable[str] = (), **more: Any) -> Ended:
    """`asyncrl WORDS --set ITEM ...` in a process of its own."""
    return run_command([sys.executable, "-m", "asyncrl.cli", *words, *as_options(sets)], **more)


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A directory that `make` fills once for all workers of a session; the others wait for it."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            path.mkdir()
            make(path)
            done.touch()
    return path


# batches of 16 samples, of runs in which nothing hangs on what they teach
FEW = ("learner.groups=4", "learner.group_size=4", "generator.max_new_tokens=8")
JUDGED = ("evaluation.final_prompts=256", "evaluation.ood_prompts=16", "evaluation.prompts=64")


def demo_command(
    command: str, tmp_path: Path, model: Path, *words: str, config: str = "demo"
) -> list[str]:
    sets = [
        f"model.path={str(model)!r}",
        f"runs={str(tmp_path / 'runs')!r}",
        # where nothing hangs on what was learned; JUDGED where something does
        "evaluation.final_prompts=8",
        "evaluation.ood_prompts=4",
        "evaluation.prompts=8",
        f"seed={RUN_SEED}",
        *PATIENT,
    ]
    sets += [w for w in words if "=" in w and not w.startswith("-")]
    flags = [w for w in words if "=" not in w or w.startswith("-")]
    argv = [sys.executable, "-m", "asyncrl.cli", command]
    if "--resume" not in flags:
        argv.append(f"configs/{config}.toml")
        argv += as_options(sets)
    else:
        argv += as_options(s for s in words if "=" in s and not s.startswith("-"))
    return argv + flags + ["--json"]


SMALL = (
    *PATIENT,
    f"seed={RUN_SEED}",
    "learner.steps=6",
    "learner.groups=4",
    "learner.group_size=4",
    "learner.lr=3e-3",
    "learner.checkpoint_every=2",
    "generator.max_new_tokens=12",
    "generator.slots=7",
    "evaluation.every=3",
    "evaluation.prompts=3",
    "evaluation.final_prompts=5",
    "evaluation.ood_prompts=2",
    "reward.function='shared_reward:reward'",
)


def wait_for(what: Callable[[], bool], logs: Callable[[], str]) -> None:
    until = time.monotonic() + 600
    while not what():
        assert time.monotonic() < until, logs()
        time.sleep(0.1)


def until(happened: Callable[[], Any]) -> Any:
    """What it returns, once that is true."""
    end = time.monotonic() + 1800
    while not (found := happened()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)
    return found
