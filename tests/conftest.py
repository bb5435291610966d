"""Fixtures that real-process tests share: a warm-started model, and `asyncrl` as typed."""

import gc
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_python
import zmq
from hypothesis import HealthCheck, settings
from process_kit import ENV, JUDGED, ROOT, SMALL, Ended, demo_command, run_command, shared
from warm_python import SERVERS

SUPPORT = {path.stem for path in (ROOT / "tests" / "support").glob("*_kit.py")}
pytest.register_assert_rewrite(*(SUPPORT - {"process_kit"}))


# a context that a failed test leaves with an open socket would wait for it, for ever, when it is
# collected, and with it all tests after that
zmq.Context.__del__ = lambda self: None  # type: ignore[method-assign]

# commands of asyncrl begin with everything imported, but in tests that are marked `cold`
warm_python.install()

# importing thousands of modules makes no garbage; collected again once everything is imported
gc.disable()

# no test hangs on speed
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


# The most expensive files, which begin first, so that no worker ends long after the others.  Each
# worker gets the next one of them, and so many other tests that all have as many.
LONG = (
    *("test_shutdown", "test_docs_commands", "test_backends", "test_vllm"),
    *("test_vllm_serve", "test_tinker_cookbook", "test_ray", "test_planted_mutants"),
    *("test_verifiers", "test_gpu_check", "test_both_engines", "test_real_model", "test_new"),
    *("test_run", "test_vllm_calls", "test_tasks_train", "test_compare"),
)


WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def pytest_collection(session: pytest.Session) -> None:
    """Workers begin with different folders: what one has compiled, the others read."""
    if WORKERS > 1 and [Path(arg).resolve() for arg in session.config.args] == [ROOT / "tests"]:
        folders = sorted({str(path.parent) for path in (ROOT / "tests").glob("*/test_*.py")})
        first = int(os.environ["PYTEST_XDIST_WORKER"][2:]) * len(folders) // WORKERS
        session.config.args = folders[first:] + folders[:first]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path)  # pytest-xdist wants one order
    others = [item for item in items if item.path.stem not in LONG]
    share, ordered = len(items) // WORKERS, []
    for worker in range(WORKERS):
        names = LONG[worker::WORKERS]
        begin = [item for name in names for item in items if item.path.stem == name]
        count = max(0, share - len(begin)) if worker < WORKERS - 1 else len(others)
        ordered += begin + others[:count]
        others = others[count:]
    items[:] = ordered


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt modules and collected tests from garbage collection, which searched them each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def sort_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `sort` model after its warm start, built once a test session."""
    return shared(tmp_path_factory, "model", _warm) / "sort"


DEMO = "configs/demo.toml"
# 300 steps of 550: right on 0.27 of the prompts, where the demo's model is on 0.38
WARM_START = (
    f"{warm_python.FORKED}import sys; from asyncrl.config.load import load; "
    "from asyncrl.tasks.warm_start import warm_start; "
    "warm_start(load(sys.argv[2]), sys.argv[1], steps=300, threads=1)"
)
WARMED_BY = (
    "asyncrl/tasks/*.py",
    "asyncrl/models/policy.py",
    "asyncrl/models/without_transformers.py",
    "asyncrl/models/packed_forward.py",
    "asyncrl/models/tokenizer.py",
)


def _warm(directory: Path) -> None:
    """A warm start costs most of a minute: one by the same code is kept in .pytest_cache."""
    made_by = [ROOT / DEMO, *sorted(p for pattern in WARMED_BY for p in ROOT.glob(pattern))]
    code = b"".join([WARM_START.encode(), *(p.read_bytes() for p in made_by)])
    kept = ROOT / ".pytest_cache" / "models" / hashlib.sha256(code).hexdigest()[:16]
    if not kept.exists():
        part = kept.with_suffix(f".part{os.getpid()}")
        argv = [sys.executable, "-c", WARM_START, str(part / "sort"), DEMO]
        run_command(argv, timeout=7200).check()
        part.rename(kept)
    shutil.copytree(kept, directory, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def gain(tmp_path_factory: pytest.TempPathFactory, sort_model: Path) -> Ended:
    """An asynchronous run of 40 steps, made once a test session."""

    def make(path: Path) -> None:
        words = ("learner.steps=40", "staleness.max_lag=4", "name='gain'", *JUDGED)
        done = run_command(demo_command("run", path, sort_model, *words), timeout=7200)
        (path / "ended.json").write_text(json.dumps([done.code, done.out, done.err]))

    code, out, err = json.loads((shared(tmp_path_factory, "gain", make) / "ended.json").read_text())
    return Ended(subprocess.CompletedProcess([], code, out, err))


@pytest.fixture
def asyncrl(tmp_path: Path, sort_model: Path) -> Callable[..., Ended]:
    """`asyncrl("run", "a=1", ...)`: a command on configs/demo.toml with small settings; words with
    `=` become --set.  Variables beside ENV's are keyword arguments."""

    def call(
        command: str, *words: str, timeout: float = 3600.0, config: str = "demo", **env: str
    ) -> Ended:
        return run_command(
            demo_command(command, tmp_path, sort_model, *words, config=config),
            env=ENV | env,
            timeout=timeout,
        )

    return call


# ---- what each file of tests costs, in CPU seconds: unlike wall time it says the same on a busy ma


BEGAN = pytest.StashKey[float]()


def _cpu_s() -> float:
    """Of this worker, every child it has waited for, with theirs, and the servers of its tests."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used) + sum(map(_server_s, SERVERS))


def _server_s(pid: int) -> float:
    """Of a process that nobody has waited for, and its children that ended; 0 once it is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[BEGAN] = _cpu_s()
    warm_python.WarmPopen.cold = item.get_closest_marker("cold") is not None
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    item.user_properties.append(("cpu_s", _cpu_s() - item.stash[BEGAN]))
    return result


class AsTheyFail:
    """Says a failure as it happens: a suite that is cut off has said what failed in it."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})")
            for line in report.longreprtext.splitlines()[-40:]:
                self.terminal.write_line(f"    {line}")


def pytest_sessionstart(session: pytest.Session) -> None:
    warm_python.WarmPopen.cold = False  # pytest-xdist starts its workers next
    plugins = session.config.pluginmanager
    terminal = plugins.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(session.config, "workerinput"):
        plugins.register(AsTheyFail(terminal), "as-they-fail")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    files: Counter[str] = Counter()
    for report in (
        r
        for kind in terminalreporter.stats.values()
        for r in kind
        if getattr(r, "when", "") == "teardown"
    ):
        files[report.nodeid.split("::")[0]] += dict(report.user_properties).get("cpu_s", 0.0)
    if sum(files.values()) > 60:
        terminalreporter.section("CPU seconds by file")
        for name, seconds in [*files.most_common(), ("all", sum(files.values()))]:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model for the task `sort`: two layers, two key/value heads."""
    from asyncrl.config.tree import TaskConfig
    from asyncrl.models import policy
    from asyncrl.tasks import get_task

    path = tmp_path_factory.mktemp("small") / "model"
    policy.build_model(
        path, get_task(TaskConfig(name="sort")).symbols, hidden=32, kv_heads=2, seed=1
    )
    return path


@pytest.fixture(scope="session")
def forked(small_model: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """`forked(RUN_DIR, "key=value", ..., die={...}, slow={...}, stop=N)`: a real run of SMALL,
    forked from one warm process (forked.py)."""
    from asyncrl.config import load
    from asyncrl.records import metrics

    argv, env = (
        [sys.executable, str(ROOT / "tests" / "support" / "forked.py"), str(small_model)],
        ENV,
    )
    forge = subprocess.Popen(
        argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    SERVERS.append(forge.pid)
    assert forge.stdin is not None and forge.stdout is not None

    def order(run_dir: Path, *sets: str, **more: Any) -> dict[str, Any]:
        config = load.load(
            ROOT / "configs" / "demo.toml", [f"model.path={str(small_model)!r}", *SMALL, *sets]
        )
        forge.stdin.write(
            json.dumps({"config": load.dump(config), "run_dir": str(run_dir)} | more) + "\n"
        )  # type: ignore[union-attr]
        line = forge.stdout.readline()  # type: ignore[union-attr]
        assert line, "the forging process has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return dict(answer) | {"run_dir": run_dir, "rows": metrics.read(run_dir)}

    yield order
    forge.stdin.close()
    assert forge.wait(timeout=3600) == 0
