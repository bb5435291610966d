"""The learner stays flat over many small batches, in a process of its own whose resident memory is
read (the engine: test_speed.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import ENV

MOST_MB = 6.0  # a leak of one row a batch is many times this

LEARNER = """
import sys
from pathlib import Path
from asyncrl.models.policy import build_model
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


def test_the_learners_memory_stays_flat_over_many_small_batches(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEARNER + MEASURE, str(tmp_path / "m")],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[0]) < MOST_MB, done.stdout
