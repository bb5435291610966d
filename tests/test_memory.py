"""Engine and learner stay flat over many short answers; each in a process of its own, whose resident memory is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENV, ROOT

MOST_MB = 6.0  # a leak of one position's cache, or of one row of a batch, an answer is many times this

ENGINE = """
import sys
from pathlib import Path
from asyncrl import models
from test_engine import engine, request
e = engine(models.build_model(Path(sys.argv[1]), "abcdefgh", seed=3), slots=64)
def work(n):
    for t in range(400 * n, 400 * n + 400):
        e.add([request(t, s, [3 + t % 8] * (1 + t % 5), 1 + (t + s) % 4) for s in range(4)])
        while e.active > 60:
            e.step(2)
"""
LEARNER = """
import sys
from pathlib import Path
from asyncrl.models import build_model
from test_learner_step import batch, core
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


@pytest.mark.parametrize("code", [ENGINE, LEARNER], ids=["engine", "learner"])
def test_memory_stays_flat_over_many_short_answers(code: str, tmp_path: Path) -> None:
    env = ENV | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", code + MEASURE, str(tmp_path / "m")], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[0]) < MOST_MB, done.stdout
