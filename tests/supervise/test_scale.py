"""benchmarks/scale.py: generators with connections of their own and a real buffer, and the service
with a list for a socket; what is judged."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from process_kit import ROOT, load_program

sys.path.append(str(ROOT / "benchmarks"))  # last: benchmarks/learner.py must not hide the package
from lib import crowd_of_peers
from lib.crowd_of_peers import GROUPS, SIZE, Crowd

BATCH = GROUPS * SIZE


@pytest.fixture(scope="module")
def bench() -> Any:
    return load_program(ROOT / "benchmarks" / "scale.py")


@pytest.mark.parametrize("pace", [0.0, 1000.0])
def test_a_crowd_over_real_sockets_trains_every_answer(
    pace: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lag = 4 if pace else 0
    # a limit of 0: one batch is all there is room for, and of 40 generators some must wait
    crowd = Crowd(tmp_path, "process", lag, 40, pace)
    monkeypatch.setattr(crowd, "retry_s", 0.0)  # questions come again with each renewal
    monkeypatch.setattr(crowd_of_peers, "RENEW_S", 0.05)
    try:
        first = crowd.batches(2)
        second = crowd.batches(3)
        assert crowd.memory() > 1e6
    finally:
        crowd.end()
    assert crowd.process.poll() is not None
    assert crowd.peers.trajectories == 5 * BATCH == crowd.peers.number * BATCH
    assert sum(crowd.peers.written.values()) >= 5 * GROUPS  # beside them the evaluation's
    # who asks again before others have come takes their turn: on a quick machine not all have one
    assert 10 < len(crowd.peers.written) <= 40
    assert max(crowd.peers.sequence.values()) > max(crowd.peers.written.values()) + 1
    for each in (first, second):
        assert each.per_s > 0 and each.cpu_us > 0
        assert each.ticket_ms == sorted(each.ticket_ms) and each.ticket_ms[0] > 0


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_the_service_alone(bench: Any, mode: str, tmp_path: Path) -> None:
    loop = bench.Loop(tmp_path, mode, 120)
    assert loop.batches(4) > 0 and loop.renewals(130) > 0
    assert loop.peers.trajectories == 4 * BATCH
    assert not loop.heard
    assert loop.batches(2) > 0 and loop.peers.trajectories == 6 * BATCH
    loop.end()


def test_a_crowd_delivers_as_many_tokens_as_it_is_told(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, "process", 0, 2, 0.0, 24)
    try:
        crowd.batches(2)
        rows = (crowd.dir / "trained.jsonl").read_text().splitlines()
    finally:
        crowd.end()
    tokens = [sum(row["lags"].values()) for row in map(json.loads, rows) if "lags" in row]
    assert tokens and set(tokens) == {24 * BATCH}
