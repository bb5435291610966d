"""benchmarks/effective.py: what counts as useful time, by histories made by hand, and two kills of
a real run."""

import json
import sys
from pathlib import Path

import pytest
from process_kit import ENV, ROOT, run_command

sys.path.append(str(ROOT / "benchmarks"))  # last: benchmarks/learner.py must not hide the package
from lib.useful_time import History, Kill, measure

pytestmark = pytest.mark.slow


def row(batch: int) -> dict[str, object]:
    return {"batch": batch, "lags": {"0": 60, "1": 40}}


def steady(batches: int, every: float = 10.0, begin: float = 0.0) -> History:
    history = History()
    for batch in range(batches):
        history.add(row(batch), begin + every * batch)
    return history


def test_a_run_that_nobody_kills_is_useful_but_for_its_start() -> None:
    found = measure(steady(11), [], -100.0, 100.0)
    assert (found["effective"], found["effective_starts_apart"]) == (1.0, 1.0)
    assert found["effective_start_included"] == 0.5
    assert found["tokens_per_s_undisturbed"] == found["tokens_per_s"] == 10.0
    assert (found["kills"], found["trained_again"], found["tokens_kept"]) == (0, 0, 1000)


def test_what_is_trained_again_and_the_time_of_the_restart_are_lost() -> None:
    history = steady(6)  # to 50 s, the last checkpoint is of 3 batches
    history.add({"from": 3}, 70.0)
    for batch in range(3, 13):  # 3 at 80 s, to 12 at 170 s
        history.add(row(batch), 80.0 + 10.0 * (batch - 3))
    found = measure(history, [Kill("learner", "step", 55.0, 72.0, 6.0)], 0.0, 170.0)
    # 12 batches beyond the first in 170 s at 10 s each
    assert found["effective"] == round(120 / 170, 4)
    assert found["effective_starts_apart"] == round(120 / 164, 4)
    assert found["trained_again"] == 3 and found["tokens_kept"] == 1200
    # 30 s from batch 5 to batch 3 made again; it gained one batch and took three out: 20 s more
    assert found["each_kill"] == [
        {"victim": "learner", "state": "step", "back_s": 17.0, "start_s": 6.0, "cost_s": 50.0}
    ]
    assert found["tokens_per_s_undisturbed"] == 10.0


def test_two_kills_of_a_real_run(sort_model: Path) -> None:
    """The supervisor's, whose run is resumed, then the learner's in a step."""
    words = ["--quick", "--json", "--seed", "1", "--model", str(sort_model)]
    argv = [sys.executable, str(ROOT / "benchmarks" / "effective.py"), *words]
    done = run_command(argv, env={**ENV, "PYTHONPATH": str(ROOT)}, timeout=7200)
    assert done.code == 0, done.out[-2000:] + done.err[-3000:]
    found = json.loads(done.out.splitlines()[-1])
    (run,) = found["runs"]
    assert [row["victim"] for row in run["each_kill"]] == ["supervisor", "learner"]
    assert all(row["back_s"] >= row["start_s"] > 0.0 for row in run["each_kill"])
    assert run["trained_again"] > 0, "a checkpoint lies behind the kill"
    # however the machine's standing still divides it: tokens at the undisturbed pace, what kills
    # cost, and the start are the same account
    assert run["tokens_kept"] > 0 and run["seconds_to_the_first_batch"] > 0.0
    span_s, start_s = run["seconds_from_it_on"], run["seconds_to_the_first_batch"]
    useful_s = run["tokens_kept"] / run["tokens_per_s_undisturbed"]
    lost_s = sum(row["cost_s"] for row in run["each_kill"])
    assert run["effective"] == pytest.approx(useful_s / span_s, abs=0.01)
    assert run["effective"] == pytest.approx(1 - lost_s / span_s, abs=0.01)
    included = useful_s / (start_s + span_s)
    assert run["effective_start_included"] == pytest.approx(included, abs=0.01)
    assert run["effective"] <= run["effective_starts_apart"]
    assert set(found["one_kill"]) >= {"supervisor: any"} and "720" in found["rates"]
