"""benchmarks/chaos.py: its checker finds planted faults, and a short run of processes has none."""

import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.chaos import board, checker, forks
from lib.useful_time import History, Kill, measure
from process_kit import ENV, ROOT, run_command

pytestmark = pytest.mark.slow

STEPS, GROUPS, SIZE = 6, 1, 2
WRONG = ("lost", "duplicated", "over_limit", "miscounted", "foreign")


def sound() -> checker.History:
    """Two lives: the second goes on from version 2 of the first; version 3 comes out as before."""
    history = checker.History(lives={1: (0, 0), 2: (1, 2)})
    for epoch, numbers in ((1, range(4)), (2, range(2, STEPS + 1))):
        for number in numbers:
            same = number <= 3
            history.digests[epoch, number] = f"w{number}" if same else f"w{epoch}.{number}"
    for number in range(STEPS):
        epoch = 1 if number < 2 else 2
        rows = []
        for sample in range(SIZE):
            key = (number, sample, 10 + number)
            drawn = (1, min(number, 3)) if number < 4 else (2, number - 1)
            rows.append([*key, 3, [list(drawn)]])
            history.witness.append((number, epoch, *key, 3))
            history.made[key] = 3
            history.made_by_survivors.add(key)
            history.acks[key] = {"accepted"}
        history.trained[number, epoch] = rows
    history.ledger = {"trained": STEPS * SIZE * 3, "orphaned": 0}
    return history


def wrong(history: checker.History, **more: Any) -> dict[str, int]:
    found = checker.check(history, STEPS, GROUPS, SIZE, 1, **more)
    return {name: found[name] for name in WRONG if found[name]}


def test_each_kind_of_wrong_is_counted_apart() -> None:
    history = sound()
    row = history.witness.pop()
    history.ledger["trained"] -= 3
    assert wrong(history) == {"lost": 2}, "planned and not trained, acknowledged and not trained"
    assert wrong(history, memory=True) == {"lost": 1}
    history = sound()
    history.witness.append(row)
    history.ledger["trained"] += 3
    assert wrong(history) == {"duplicated": 1}
    history = sound()
    history.witness.append((STEPS - 1, 2, STEPS + 7, 0, 99, 3))
    history.ledger["trained"] += 3
    assert wrong(history) == {"duplicated": 1}, "of no planned ticket"
    history = sound()
    history.trained[STEPS - 1, 2][0][4] = [[1, 2]]
    assert wrong(history) == {"over_limit": 1}
    history = sound()
    history.ledger["trained"] -= 2
    assert wrong(history) == {"miscounted": 2}
    history = sound()
    history.lives[3] = (1, 2)
    assert "foreign" in wrong(history), "the newest life does not come from what was trained"
    assert wrong(sound()) == {}
    assert checker.lag(sound(), (1, 3), (2, 3)) == 0, "the same weights, whatever their name"
    assert checker.lag(sound(), (2, 3), (2, 5)) == 2 and checker.ancestors(sound(), 2) == {1}


def test_each_answer_must_be_accounted_for() -> None:
    history = sound()
    history.made[2, 0, 9] = 5
    history.acks[2, 0, 9] = {"accepted"}
    assert wrong(history) == {"lost": 1}
    history.ledger["orphaned"] = 5
    assert wrong(history) == {}
    history = sound()
    history.acks[1, 0, 11] = {"accepted", "duplicate"}
    assert wrong(history) == {"duplicated": 1}
    history = sound()
    history.made[1, 0, 9] = 5
    assert wrong(history) == {}
    history.made_by_survivors.add((1, 0, 9))
    assert wrong(history) == {"lost": 1}
    history = sound()
    del history.acks[1, 0, 11]
    assert wrong(history) == {}, "trained, and the run ended before the word came a second time"


def test_a_group_that_failed_and_a_batch_set_aside_leave_the_plan_and_no_other() -> None:
    history = sound()
    moved = [(row[0], row[1], row[2] + (row[2] >= 3), *row[3:]) for row in history.witness]
    history.witness = moved
    history.acks = {key: said for key, said in history.acks.items() if key[0] < 3}
    history.acks |= {(3, 0, 50): {"failed"}, (3, 1, 50): {"failed"}}
    assert wrong(history)["lost"] == SIZE, "two failures are no reason"
    history.acks[3, 0, 51] = {"failed"}
    assert wrong(history) == {}
    history = sound()
    history.witness = [(*row[:2], row[2] + (row[2] >= 3), *row[3:]) for row in history.witness]
    history.acks = {key: said for key, said in history.acks.items() if key[0] < 3}
    assert wrong(history)["lost"] == SIZE
    history.set_aside = {3, 4}
    assert wrong(history) == {}, "what is in the file and was trained was not set aside"


def test_a_slow_recovery_is_told_with_its_seed_and_what_else_went_on() -> None:
    import chaos
    from lib.chaos.faults import Fault

    shared, choice = board.Board(), random.Random(1)
    drawn = [
        ("buffer", "idle", "kill"),
        ("learner", "mid-step", "stop"),
        ("reward", "idle", "kill"),
    ]
    faults = [Fault(shared, one, choice) for one in drawn]
    for fault, seconds in zip(faults, (38.7, 0.5, 20.0), strict=True):
        fault.state, fault.seconds = "over", seconds
    faults[2].state = "none"  # it never came about
    rows = [fault.row() for fault in chaos.over(faults)]
    (row,) = chaos.slow(rows, 1007)
    got = (row["what"], row["seed"], row["beside"])
    assert got == ("buffer: kill idle", 1007, ["learner: stop mid-step"])
    run = {"each": rows, "slow": [row], "seconds": 40.0, "error": ""}
    run["messages"] = dict.fromkeys(("lost", "doubled", "held"), 0)
    assert chaos.summed([run])["slow"] == [row]


def ended(body: Callable[[], Any]) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(forks.fork(body), 0)[1])


def test_a_full_disk_takes_half_and_the_record_of_the_faults_goes_on(tmp_path: Path) -> None:
    def body() -> int:
        shared = board.Board()
        shared.give("buffer", "idle", "disk")
        assert shared.reached("buffer", "idle") and not shared.reached("buffer", "mid-journal")
        shared.obey("buffer", room=10)
        assert shared.obeyed("buffer") and not shared.reached("buffer", "idle")
        board.Notes(tmp_path / "notes").add({"longer": "than ten bytes"})
        file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        assert os.write(file, bytes(20)) == 10
        try:
            os.write(file, b"x")
        except OSError:
            return 7
        return 0

    assert ended(body) == 7
    assert json.loads((tmp_path / "notes").read_text()) == {"longer": "than ten bytes"}


def test_clocks_jump_for_one_process_and_stay_so_in_its_next_life() -> None:
    shared = board.Board()

    def body() -> int:
        shared.own_clocks("learner")
        wall, monotonic = time.time(), time.monotonic()
        shared.give("learner", "idle", "clock", 5.0)
        shared.obey("learner")
        ahead, away = time.monotonic() - monotonic, abs(time.time() - wall)
        away_ns = abs(time.time_ns() / 1e9 - wall)
        return 7 if 5.0 <= ahead < 100.0 and away > 400.0 and away_ns > 400.0 else 1

    assert ended(body) == 7 and shared.seconds("learner", board.MONOTONIC) == 5.0
    assert shared.seconds("buffer", board.MONOTONIC) == 0.0


def test_broken_connections_lose_what_was_under_way_and_spare_the_door() -> None:
    def body() -> int:
        name = f"\0chaos-{os.getpid()}"
        door = socket.socket(socket.AF_UNIX)
        door.bind(name)
        door.listen()
        client = socket.socket(socket.AF_UNIX)
        client.connect(name)
        served, _ = door.accept()
        client.send(b"under way")
        assert board.cut_connections() == 2
        again = socket.socket(socket.AF_UNIX)
        again.connect(name)
        return 7 if served.recv(100) in (b"", b"under way") and client.recv(1) == b"" else 1

    assert ended(body) == 7


def test_a_flipped_bit_is_one_and_is_mended(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "file").write_bytes(bytes(range(50)))
    found = board.flip(tmp_path, random.Random(1))
    now = (tmp_path / "file").read_bytes()
    differ = [(a ^ b).bit_count() for a, b in zip(now, bytes(range(50)), strict=True) if a != b]
    assert found[0] == tmp_path / "file" and differ == [1]
    board.mend(found)
    assert (tmp_path / "file").read_bytes() == bytes(range(50))


def chaos_run(*words: str) -> dict[str, Any]:
    argv = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--quick", "--json"]
    argv += ["--patience", "900", *words]
    done = run_command(argv, env={**ENV, "PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.out[-2000:] + done.err[-3000:]
    found = done.json
    assert {name: found[name] for name in WRONG} == dict.fromkeys(WRONG, 0)
    assert found["faults"] == found["recovered"] >= 10 and found["errors"] == []
    return found


def test_kills_and_stops_at_points_of_the_work_lose_and_double_nothing() -> None:
    found = chaos_run("--seed", "5")
    assert found["trained"] > 100 and len(found["victims"]) >= 3
    found = chaos_run("--topology", "sessions", "--kinds", "gateway", "--actions", "kill")
    assert list(found["victims"]) == ["gateway"] and found["trained"] > 100


def test_an_error_of_a_hook_is_no_end_that_a_run_recovers_from(tmp_path: Path) -> None:
    import chaos

    log = tmp_path / "log"
    log.write_text("ended with 3: a rank\nTraceback (most recent call last):\n")
    assert chaos.own_errors(log) == ""
    log.write_text("  File x\nTypeError: on_acks() takes 2\n")
    assert chaos.own_errors(log) == "TypeError: on_acks() takes 2"


def test_killed_processes_cost_no_sample_and_train_once(tmp_path: Path, sort_model: Path) -> None:
    """The program that benchmarks/kills.py runs with 24 kills, here with four."""
    import kills

    found = kills.run(tmp_path, 4, 1, model=str(sort_model))
    assert found["wrong"] == []
    assert sum(found["kills"].values()) == 4 and any(
        k.startswith("learner") for k in found["kills"]
    ), found


def row(batch: int) -> dict[str, object]:
    return {"batch": batch, "lags": {"0": 60, "1": 40}}


def steady(batches: int, every: float = 10.0, begin: float = 0.0) -> History:
    history = History()
    for batch in range(batches):
        history.add(row(batch), begin + every * batch)
    return history


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
    found = measure(steady(11), [], -100.0, 100.0)
    assert (found["effective"], found["effective_starts_apart"]) == (1.0, 1.0)
    assert found["effective_start_included"] == 0.5
    assert found["tokens_per_s_undisturbed"] == found["tokens_per_s"] == 10.0
    assert (found["kills"], found["trained_again"], found["tokens_kept"]) == (0, 0, 1000)


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
