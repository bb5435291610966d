"""What was trained, summed: the same totals and the same digest, however much of it is only sums;
copies of a run keep to themselves."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from process_kit import ROOT
from store_kit import make
from trajectory_kit import trajectory

from asyncrl.config import load
from asyncrl.contract.admission import AdaptiveLimit
from asyncrl.contract.freshness import AdmissionWindow
from asyncrl.contract.messages import Batch, TrainingSequence, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from buffer.numbers import (
    SUMS,
    compute_batch_metrics,
    compute_generator_metrics,
    compute_judge_metrics,
    compute_limit_metrics,
    leave_out_wait_for_ticket,
)
from buffer.training_log import TrainingLog, mean, quantile


def batch(number: int, r: random.Random) -> Batch:
    label = Label(1, 0)
    spans = [VersionSpan(label, "", 0, 4, label)]
    samples = [trajectory((number, s, 1), (), [0] * 4, mask=b"", spans=spans) for s in range(2)]
    lags = [[(0, 2, r.randint(0, 2)), (2, 4, r.randint(0, 2))] for _ in samples]
    return Batch(1, number, samples, [0, 0], [0, 0], lags, {}, number + 1, {})


def test_sums_of_old_batches_say_what_their_rows_said(tmp_path: Path) -> None:
    r = random.Random(0)
    plain, summed = TrainingLog(tmp_path / "plain.jsonl"), TrainingLog(tmp_path / "summed.jsonl")
    for _life in range(6):
        start = r.randint(summed.summed, max(summed.rows, default=-1) + 1)
        plain.begin_at(start)
        summed.begin_at(start)
        assert max([*plain.rows, *summed.rows], default=-1) < start
        for n in range(start, start + 30):
            b = batch(n, r)
            for t in (plain, summed):
                t.record_lease(b, 1.0)
                t.add(b, 1.0)
            summed.fold_below(n - 5)
            assert len(summed.rows) <= 6 and len(summed.leases) <= 1
            assert plain.summarize() == summed.summarize()
    assert TrainingLog(tmp_path / "summed.jsonl").summarize() == plain.summarize()


def test_what_was_handed_out_is_settled_at_the_hello_and_never_twice(tmp_path: Path) -> None:
    path, lent = tmp_path / "trained.jsonl", tmp_path / "leased.jsonl"
    r = random.Random(0)
    first = TrainingLog(path)
    first.begin_at(0)
    for number in range(3):
        first.record_lease(batch(number, r), 1.0)
    first.add(batch(0, r), 1.0)
    assert list(first.leases) == [1, 2] and len(lent.read_text().splitlines()) == 3
    first.close()
    with lent.open("a") as file:
        file.write('{"batch": 3, "samples": 2}\n{"batch": 4, "sam')  # torn
    again = TrainingLog(path)
    assert list(again.leases) == [1, 2]
    again.begin_at(2)
    assert sorted(again.rows) == [0, 1] and not again.leases and not lent.read_text()
    again.close()
    # the branch was left, and what was lent on it is nobody's
    assert not TrainingLog(path).leases


def test_a_copy_of_a_run_directory_has_a_socket_and_weights_of_its_own(tmp_path: Path) -> None:
    config = load.load(ROOT / "configs" / "demo.toml", [])
    rundir.ensure("", tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    a, b = tmp_path / "run", tmp_path / "copy"
    assert rundir.read_run_id(a) == rundir.read_run_id(b)
    assert rundir.get_buffer_address(config, a) != rundir.get_buffer_address(config, b)
    assert rundir.get_shm_dir(a) != rundir.get_shm_dir(b)
    a.rename(tmp_path / "moved")
    assert rundir.get_shm_dir(tmp_path / "moved") != rundir.get_shm_dir(b)
    for path in (tmp_path / "moved", b):
        rundir.clean(path)


def test_a_row_of_the_log_and_one_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trained.jsonl"
    lags = [[(0, 2, 0), (2, 4, 2)], [(0, 2, 1), (2, 4, 1)]]
    one = msgspec.structs.replace(batch(3, random.Random(0)), token_lags=lags)
    log = TrainingLog(path)
    assert log.add(one, 1.0) == {0: 2, 1: 4} and log.has_batch(3) and not log.has_batch(4)
    log.close()
    ids = xxhash.xxh3_64_hexdigest(b"3.0;3.1")
    row = {"batch": 3, "samples": 2, "ids": ids, "lags": {"0": 2, "1": 4}, "tickets": [[3, 3]]}
    assert json.loads(path.read_text()) == row and not capsys.readouterr().err
    older = {"batch": 4, "samples": 1, "ids": "x", "lags": {}}
    rows = [{"batch": 9}, older, {**older, "batch": 5}, {**older, "batch": 6}, {"from": 5}]
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    again = TrainingLog(path)
    assert capsys.readouterr().err == (
        f"note: {path}: left out a row that does not describe a batch: {{'batch': 9}}\n"
    )
    assert list(again.rows) == [3, 4] and again.rows[4].tickets == []
    assert again.summarize() == (3, {0: 2, 1: 4}, xxhash.xxh3_64_hexdigest((ids + "x").encode()))
    assert [mean(x) for x in ({}, {1: 1, 3: 3})] == [0.0, 2.5]
    shares = [quantile({0: 1, 2: 2, 1: 1}, share) for share in (0.25, 0.26, 0.5, 0.51)]
    assert shares == [0, 1, 1, 2] and quantile({}, 0.5) == 0


OLD, NEW = Label(1, 4), Label(1, 5)


def test_tokens_on_the_keys_of_older_weights_are_counted() -> None:
    """A completion of one version; one whose last three tokens attend to the version before; a
    session whose second sequence, of six tokens, attends to it with its last two."""
    spans = [
        [VersionSpan(NEW, "b", 0, 5, NEW)],
        [VersionSpan(OLD, "a", 0, 2, OLD), VersionSpan(NEW, "b", 2, 5, OLD)],
        [VersionSpan(NEW, "b", 0, 5, NEW)],
    ]
    samples = [
        trajectory((1, n, 0), [3], [4] * 5, [-1.0] * 5, spans=own) for n, own in enumerate(spans)
    ]
    later = [VersionSpan(OLD, "a", 0, 4, OLD), VersionSpan(NEW, "b", 4, 6, OLD)]
    samples[2].rows = [TrainingSequence(b"", b"\4\0\0\0" * 6, b"\0" * 24, b"\1" * 6, later)]
    runs = [[(0, 5, 0)], [(0, 2, 3), (2, 5, 1)], []]
    batch = Batch(1, 5, samples, [0, 3, 1], [0, 1, 1], runs, {}, 1, {}, tasks=["a", "b", "b"])
    for sample, reward in zip(samples, (1.0, 0.5, 0.25), strict=True):
        sample.reward = reward
        sample.reward_parts = {"style": 2 * reward} if reward > 0.25 else {}
    assert compute_batch_metrics(batch, {0: 11, 1: 8, 3: 2}) == {
        **{"lag/mean": pytest.approx(14 / 21), "lag/max": 3, "lag/p95": 3},
        **{"lag/in_flight": 2 / 3, "lag/in_queue": 2 / 3, "answer/length": 21 / 3},
        "lag/old_kv_share": pytest.approx((3 + 2) / (5 + 5 + 5 + 6)),
        "reward_part/style": 1.5,
        **{"task/a_share": 1 / 3, "task/a_reward": 1.0, "task/a_length": 5.0, "task/a_lag": 0.0},
        **{"task/b_share": 2 / 3, "task/b_reward": 0.375, "task/b_length": 8.0},
        "task/b_lag": pytest.approx((2 * 3 + 3 * 1) / 5),
    }


def test_numbers_of_reward_processes_and_of_the_judge() -> None:
    sums = dict.fromkeys(SUMS, 0.0) | {"generator/busy_s": 3.0, "generator/reward_idle_s": 6.0}
    stats = [{"reward/workers": 1.0, "reward/queue": 3.0}, {"reward/workers": 2.0}, {"x": 9.0}]
    load = {"reward/queue": 3.0, "reward/workers": 3.0, "time/reward_wait_share": 1.0}
    for reports, expected in ((stats, load), (stats[2:], {})):
        found = compute_generator_metrics(reports, sums, 1.0)
        assert {name: found[name] for name in found if "reward" in name} == expected
    budgets = [("a", {"judge/requests_left": x, "judge/x": 1.0, "x": 1.0}) for x in (5.0, 3.0, 4.0)]
    judged = [("a", {"judge/requests": x}) for x in (5.0, 7.0, 6.0)] + [
        ("b", {"judge/requests": 2.0})
    ]
    found = compute_judge_metrics([*budgets, *judged])
    assert found == {"judge/requests_left": 3.0, "judge/requests": 9.0}


def test_numbers_of_an_adaptive_limit_and_of_a_window() -> None:
    store: Any = make(ess_floor=0.5, wait=0.1)
    store.limit = AdaptiveLimit(3, before=2, ess=0.7, idle=0.25)
    moved = {"limit/now": 3, "limit/before": 2, "limit/ess": 0.7, "limit/idle": 0.25}
    assert moved.items() <= compute_limit_metrics(store, AdaptiveLimit(2)).items()
    for lower, more in ((1.5, 0.0), (3.0, 1.0)):
        store.window = AdmissionWindow(2.0, wait=0.125, lower=lower)
        found = compute_limit_metrics(store, store.limit)
        window = {"window/now": store.current_window(), "window/wait": 0.125, "window/lower": more}
        assert found == {"limit/now": 3, **window}
    assert compute_limit_metrics(make(), store.limit) == {}


@pytest.mark.parametrize(("seconds", "left"), [(4.0, (4.0, 0.5, 20.0)), (9.0, (8.0, 0.75, 10.0))])
def test_a_first_step_begins_with_the_first_ticket(seconds: float, left: Any) -> None:
    names = ("time/step", "time/learner_idle_share", "throughput/learner_tokens_per_s")
    values = dict(zip(names, (8.0, 0.75, 10.0), strict=True))
    leave_out_wait_for_ticket(values, seconds)
    assert tuple(values.values()) == left
