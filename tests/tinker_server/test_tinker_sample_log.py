import random
from pathlib import Path

import numpy as np
import pytest
import xxhash

from asyncrl.records import jsonl
from asyncrl.tinker import sample_log
from asyncrl.tinker.messages import Datum
from asyncrl.tinker.sample_log import ScoredDatum, TrainedSampleLog
from asyncrl.tinker.sequences import SampledRun, SampledSequence


class Letters:
    @staticmethod
    def decode(ids: list[int]) -> str:
        return "".join(chr(96 + id) for id in ids)


def datum(ids: list[int], **fields: list[float]) -> Datum:
    lags = fields.pop("lags", [-2] * (len(ids) - 1))
    inside = [lag != -2 for lag in lags]
    targets = [id if sampled else 0 for id, sampled in zip(ids[1:], inside, strict=True)]
    return Datum(
        np.array(ids[:-1], "<i4"),
        np.array(targets, "<i4"),
        {name: np.array(row, "<f4") for name, row in fields.items()},
        np.array(lags, "<i4"),
    )


def sampled(start: int, stop: int, id: str = "seq-0", version: int = 3) -> SampledRun:
    return SampledRun(start, stop, SampledSequence(id, "m", version, stop - start, ""))


# "ab" asked, "cd" sampled at version 3, "ef" of an environment, "gh" of no known sequence
TURNS = datum(
    [1, 2, 3, 4, 5, 6, 7, 8],
    logprobs=[0, -0.5, -0.25, 0, 0, -1.0, -2.0],
    advantages=[0, 1.5, 1.5, 0, 0, -1.0, -1.0],
    mask=[0, 1, 1, 0, 0, 1, 0],
    lags=[-2, 1, 1, -2, -2, -1, -1],
)
RUNS = [sampled(1, 3), SampledRun(5, 7, None)]
SCORES = np.array([9, -0.25, -0.75, 9, 9, -1.5, float("-inf")], "<f4")


def test_a_row_tells_every_token_of_a_conversation() -> None:
    scored = ScoredDatum(TURNS, RUNS, SCORES)
    assert scored.describe(Letters()) == {
        "prompt": "ab",
        "pieces": ["c", "d", "e", "f", "g", "h"],
        "tokens": [3, 4, 5, 6, 7, 8],
        "versions": [["3", 0, 2], ["unknown", 4, 6]],
        "behavior": [-0.5, -0.25, None, None, -1.0, -2.0],
        "start": [-0.25, -0.75, None, None, -1.5, None],
        "advantage": [1.5, 1.5, None, None, -1.0, -1.0],
        "lag": [1, 1, None, None, None, None],
        "mask": [1, 1, 0, 0, 1, 1],
        "used": [1, 1, 0, 0, 1, 0],
    }
    assert scored.count_sampled() == 4
    finite = ScoredDatum(TURNS, RUNS[:1], SCORES)
    assert finite.measure_distance() == pytest.approx((0.25 + 0.5) / 2)
    plain = datum([1, 2, 3], logprobs=[0, -1.23456], advantages=[0, 1], lags=[-2, 0])
    row = ScoredDatum(plain, [sampled(1, 2)], np.zeros(2, "<f4")).describe(Letters())
    assert (row["used"], row["behavior"]) == ([1], [-1.2346]), "without a mask, all are trained"


def log_of(folder: Path) -> TrainedSampleLog:
    return TrainedSampleLog(folder, Letters())


def test_the_furthest_the_longest_and_one_at_random(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    texts = [[1, 2, 3], [1, 2, 3, 4], [1, 2], [2, 3, 4]]
    data = [
        datum(
            text,
            logprobs=[0.0, *[-1.0] * (len(text) - 2)],
            advantages=[0.0, *[1.0] * (len(text) - 2)],
            lags=[-2, *[place] * (len(text) - 2)],
        )
        for place, text in enumerate(texts)
    ]
    runs = [[sampled(1, len(text) - 1, f"seq-{n}")] for n, text in enumerate(texts)]
    runs[2] = []  # nothing of it was sampled
    scores = [
        np.full(len(text) - 1, -1.0 - moved, "<f4")
        for text, moved in zip(texts, (0.25, 0.0, 5.0, 0.5), strict=True)
    ]
    supervised = datum([1, 2, 3], weights=[1, 1])
    without = datum([1, 2, 3], logprobs=[0, -1], lags=[-2, 0])
    log.collect(
        [*data, supervised, without],
        [*runs, [sampled(1, 2)], [sampled(1, 2)]],
        [*scores, scores[0], scores[0]],
    )
    assert len(log.collected) == 3, "of policy losses alone"
    log.write(20)
    rows = jsonl.read(tmp_path / "token_samples.jsonl")
    at_random = random.Random(20).randrange(3)
    rules: dict[int, list[str]] = {}
    for rule, place in (("off_policy", 2), ("longest", 1), ("random", at_random)):
        rules.setdefault(place, []).append(rule)
    assert {row["ticket"]: row["rules"] for row in rows} == rules
    [furthest] = [row for row in rows if row["ticket"] == 2]
    sequence = furthest.pop("sequences")[0]
    assert furthest == {
        "batch": 20,
        "ticket": 2,
        "sample": 0,
        "group_key": xxhash.xxh3_64_hexdigest(b"bc"),
        "rules": rules[2],
        "reward": None,
        "sequence_ids": ["seq-3"],
        "parts": {},
        "finish": "",
        "calls": 0,
        "excluded": 0,
        "lag_mean": 3.0,
        "lag_max": 3,
        "length": 1,
        "group_rewards": [],
    }
    assert sequence["pieces"] == ["d"]
    log.drop()
    log.write(30)
    assert len(jsonl.read(tmp_path / "token_samples.jsonl")) == len(rows)
    log.collect([TURNS], [[RUNS[1]]], [SCORES])
    log.write(40)
    [row] = [row for row in jsonl.read(tmp_path / "token_samples.jsonl") if row["batch"] == 40]
    assert (row["lag_mean"], row["lag_max"], row["sequence_ids"]) == (0.0, 0, [])
    log.close()


def test_every_tenth_version_to_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(tmp_path)
    assert [version for version in range(31) if log.is_due(version)] == [0, 10, 20, 30]
    assert sample_log.LIMIT_BYTES == 64 * 2**20
    path = tmp_path / "token_samples.jsonl"
    path.write_text("x" * 99)
    monkeypatch.setattr(sample_log, "LIMIT_BYTES", 100)
    assert log.is_due(10)
    path.write_text("x" * 100)
    assert not log.is_due(10)
    log.close()
