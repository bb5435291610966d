"""samples.jsonl shows some answers of some batches, spread over each; the others are left alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rows_kit
from hostile_messages_kit import honest_hello
from process_kit import ROOT
from schedules import PROMPTS
from service_kit import SMALL, greet
from store_kit import sample

from asyncrl.cli.inspect.doctor import print_running
from asyncrl.config import load
from asyncrl.config.tree import RecordConfig
from asyncrl.contract import messages as m
from asyncrl.contract.messages import Batch, SamplingSettings, Ticket, Trajectory
from asyncrl.contract.versions import Label
from asyncrl.records import metrics, rundir
from asyncrl.supervise import doctor, live
from buffer import numbers
from buffer.service import BufferService


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
        assert row["tokens"] == [row["ticket"], 5, 6] and row["logprobs"] == [-0.5, -1.0, -2.0]


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


LINE = "the link holds generators up: fetching weights takes 40% of their time, 12 MB/s each"
TOLD = {
    "generator/busy_s": 6.0,
    "generator/idle_s": 4.0,
    "link/fetch_s": 4.0,
    "link/fetched_mb": 48.0,
    "link/acked": 10.0,
    "link/ack_waited_s": 5.0,
}
SHOWN = {"link/ack_s": 0.5, "link/fetch_share": 0.4, "link/fetch_mb_per_s": 12.0}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[BufferService]:
    config = load.load(ROOT / "configs" / "demo.toml", [*SMALL, "learner.steps=9"])
    rundir.ensure(config, load.dump(config), tmp_path / "run")
    service = BufferService(config, tmp_path / "run")
    service.send = lambda *_: None  # type: ignore[method-assign]
    service.clock.start(1.0)  # the first ticket
    service.handle(b"l", honest_hello(service.run))
    service.handle(b"g", greet(service.run, "generator-0", 1))
    yield service
    assert service.close() == ""
    rundir.clean(tmp_path / "run")


def commit(service: BufferService, number: int) -> None:
    label = Label(1, number + 1)
    service.record_commit(m.Commit(1, number, label, f"d{number}", {"reward/mean": 0.5}), {})


def links(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith("link/")}


def test_what_a_generator_tells_of_its_link_is_in_the_commits_row_and_in_the_status(
    made: BufferService, tmp_path: Path
) -> None:
    commit(made, 0)
    made.handle(b"g", m.LeaseRenewal("generator-0", 1, [], TOLD, None))
    commit(made, 1)
    commit(made, 2)  # nothing has been told since
    assert links(made.latest) == SHOWN
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [links(row) for row in rows] == [{}, SHOWN, {}] and set(SHOWN) <= set(metrics.METRICS)


def test_doctor_names_the_link_of_a_run_that_is_going_on_and_of_one_that_stopped(
    made: BufferService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    made.handle(b"g", m.LeaseRenewal("generator-0", 1, [], TOLD, None))
    commit(made, 0)
    status = m.RunStatus(made.run, 1, 9, 1, dict(made.latest), {}, [], {}, False)
    seen = doctor.examine_run(made.config, run_dir, status)
    assert seen["link"] == LINE
    print_running(made.config, run_dir, status, seen)
    assert LINE in capsys.readouterr().out.splitlines()[0]
    quiet = m.RunStatus(made.run, 1, 9, 1, {}, {}, [], {}, False)
    assert doctor.examine_run(made.config, run_dir, quiet)["link"] == ""
    # its buffer answers no more: by the last row that tells of links
    commit(made, 1)
    seen = doctor.examine_run(made.config, run_dir, None)
    assert seen["link"] == LINE and LINE in doctor.format_lines(run_dir, seen)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("link/fetch_share", 0.1, "the link holds generators up: "),
        ("link/fetch_share", 0.1 - 1e-6, ""),
        ("link/ack_s", 1.0, "the link holds deliveries up: "),
        ("link/ack_s", 1.0 - 1e-6, ""),
    ],
)
def test_a_link_is_named_from_its_limit_on(name: str, value: float, said: str) -> None:
    found = live.describe("link", {name: value, "link/fetch_mb_per_s": 12.0})
    assert found.startswith(said) and bool(found) == bool(said)
