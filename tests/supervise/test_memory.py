"""The learner stays flat over many small batches; what is freed is not faulted in again."""

import importlib
import platform
import signal
import sys
from pathlib import Path

import pytest
from process_kit import ENV, ROOT, run_command
from warm_python import FORKED

from asyncrl.config import load
from asyncrl.models import memory

pytestmark = pytest.mark.slow

MOST_MB = 6.0  # a leak of one row a batch is many times this

LEARNER = """
import sys
from pathlib import Path
from asyncrl.models.policy import build_model
from learner_step_kit import batch, core
build_model(Path(sys.argv[1]), "abcdefgh", hidden=32, layers=2)
c = core(Path(sys.argv[1]))
def work(n):
    for number in range(30 * n, 30 * n + 30):
        c.train(batch(number, seed=number))
"""
MEASURE = """
import psutil
rss = []
for n in range(6):
    work(n)
    rss.append(psutil.Process().memory_info().rss / 2**20)
print(rss[-1] - rss[1], rss)
"""


def test_the_learners_memory_stays_flat_over_many_small_batches(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FORKED + LEARNER + MEASURE, str(tmp_path / "m")]
    done = run_command(argv, timeout=600).check()
    assert float(done.out.split()[0]) < MOST_MB, done.out


CONFIG = """
import msgspec, sys
from asyncrl.config import load
model = {"path": sys.argv[1], "device": "cpu"}
config = load.build({"model": model, "task": {"name": "sort"}})
"""
KEEPERS = {
    "learner": """
from learner.step import LearnerCore
LearnerCore(config, sys.argv[1])
""",
    "engine": """
from actors.engine_embedded import make_engine
make_engine(config)
""",
}
TENSOR = 1 << 26  # bytes: more than malloc ever keeps by itself
FAULTS = f"""
import resource, torch
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones({TENSOR // 4})
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = TENSOR // 4096


def faulted(who: str, model: Path, **more: str) -> int:
    """Pages faulted in by twenty tensors, one after the other, in a process that has a `who`."""
    argv = [sys.executable, "-c", CONFIG + KEEPERS[who] + FAULTS, str(model)]
    return int(run_command(argv, env=ENV | more, timeout=600).check().out.split()[-1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is what is set")
def test_memory_that_is_freed_is_not_faulted_in_again(small_model: Path) -> None:
    for who in KEEPERS:
        assert faulted(who, small_model) < PAGES, who
    # what the user has set stays: everything from 1 MiB on by a mapping of its own
    assert faulted("learner", small_model, MALLOC_MMAP_THRESHOLD_=str(1 << 20)) > 15 * PAGES


HEAPS = """
import ctypes, os, sys, tempfile, threading
from asyncrl.models import memory
print(memory.keep_freed())
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
def use():
    for _ in range(50):
        libc.malloc(1000)
threads = [threading.Thread(target=use) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
with tempfile.TemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    file.seek(0)
    print(file.read().count(b"<heap "))
"""


def heaps(**more: str) -> list[str]:
    """Whether anything was set, and how many heaps there are after four threads had memory."""
    argv = [sys.executable, "-c", HEAPS]
    return run_command(argv, env=ENV | more, timeout=600).check().out.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is what is set")
def test_all_threads_may_share_a_heap() -> None:
    assert heaps() == ["True", "1"]
    said, count = heaps(MALLOC_ARENA_MAX="8")  # the user's own setting stays
    assert said == "False" and int(count) > 1


@pytest.mark.parametrize(
    ("role", "first"), [("buffer.service", "BufferService"), ("learner.loop", "Learner")]
)
def test_what_is_freed_is_kept_before_there_are_threads(
    role: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        pass

    asked: list[bool] = []

    def begun(*_: object, **__: object) -> None:
        assert asked == [True]
        raise Begun

    module = importlib.import_module(role)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    monkeypatch.setattr(memory, "keep_freed", lambda: asked.append(True))
    monkeypatch.setattr(module, first, begun)
    with pytest.raises(Begun):
        module.main(load.load(ROOT / "configs" / "demo.toml", []), tmp_path)
