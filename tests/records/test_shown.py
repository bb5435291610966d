"""samples.jsonl shows some answers of some batches, spread over each; the others are left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import rows_kit
from schedules import PROMPTS
from store_kit import sample

from asyncrl.config.tree import RecordConfig
from asyncrl.contract.messages import Batch, SamplingSettings, Ticket, Trajectory
from asyncrl.contract.versions import Label
from buffer import numbers


def answer(number: int) -> Trajectory:
    ticket = Ticket(number, 1, "train", PROMPTS[0], [0], SamplingSettings(), Label(1, 0), None, 0)
    made = sample(ticket, length=3)
    made.tokens = np.array([number, 5, 6], "<i4").tobytes()
    made.behavior_logprobs = np.array([-0.5, -1.0, -2.0], "<f4").tobytes()
    return made


def batch(number: int, samples: list[Trajectory]) -> Batch:
    many = len(samples)
    return Batch(1, number, samples, list(range(many)), [0] * many, [], {}, 0, {})


def tickets(rows: Any) -> list[int]:
    return [row["ticket"] for row in rows]


@pytest.mark.parametrize(
    ("most", "shown"), [(4, [0, 2, 4, 6]), (3, [0, 2, 4]), (1, [0]), (9, [*range(8)])]
)
def test_the_samples_shown_are_spread_over_the_batch(most: int, shown: list[int]) -> None:
    samples = [answer(number) for number in range(8)]
    for number in set(range(8)) - set(shown):
        samples[number].tokens = b"odd"  # whoever turns it into numbers raises
    found = list(numbers.select_sample_rows(batch(20, samples), RecordConfig(samples=most)))
    assert tickets(found) == shown and [row["lag"] for row in found] == shown
    for row in found:
        assert row["tokens"] == [row["ticket"], 5, 6]
        assert row["logprobs"] == [-0.5, -1.0, -2.0]


def test_all_samples_are_shown_of_every_batch_that_is_named() -> None:
    many = [answer(number) for number in range(3)]
    record = RecordConfig(samples=0, samples_every=5)
    said = {n: tickets(numbers.select_sample_rows(batch(n, many), record)) for n in range(11)}
    assert {n for n, rows in said.items() if rows} == {0, 5, 10}
    assert said[5] == [0, 1, 2] == tickets(numbers.make_batch_rows(batch(1, many)))
    assert tickets(numbers.make_batch_rows(batch(1, many), [2, 0])) == [2, 0]
    assert not list(numbers.select_sample_rows(batch(0, many), RecordConfig(samples_every=0)))


def test_a_row_of_a_sample_has_these_fields() -> None:
    one = batch(3, [answer(7)])
    plain = {
        **{"batch": 3, "ticket": 7, "sample": 0, "attempt": 1, "prompt": "", "text": ""},
        **{"reward": 1.0, "parts": {}, "finish": "stop", "lag": 0},
        "versions": [["1.0", 0, 3]],
        "digests": [one.samples[0].spans[0].digest],
        **{"prompt_tokens": [], "tokens": [7, 5, 6], "logprobs": [-0.5, -1.0, -2.0]},
    }
    (found,) = numbers.make_batch_rows(one)
    plain |= {key: found[key] for key in ("prompt", "text", "prompt_tokens", "reward", "parts")}
    assert found == plain and isinstance(found["prompt_tokens"], list)
    one.tasks.append("calc")
    one.samples[0].images = ["d1"]
    assert numbers.make_batch_rows(one) == [plain | {"task": "calc", "images": ["d1"]}]


def test_a_row_of_a_session_has_its_calls_and_sequences() -> None:
    first = rows_kit.row([1, 2], [3, 4, 5], [-0.5, -1.0, -2.0], [1, 0, 1])
    second = rows_kit.row([6], [7], [-0.25], [1])
    session = rows_kit.sample(4, 1, [first, second], calls=3, aside=2)
    (found,) = numbers.make_batch_rows(rows_kit.batch([session], [1]))
    assert {key: found[key] for key in ("calls", "aside", "mask", "rows")} == {
        "calls": 3,
        "aside": 2,
        "mask": [1, 0, 1],
        "rows": [
            {
                "prompt_tokens": [6],
                "tokens": [7],
                "logprobs": [-0.25],
                "mask": [1],
                "versions": [["1.0", 0, 1]],
            }
        ],
    }
    assert found["versions"] == [["1.0", 0, 1], ["1.0", 2, 3]]
