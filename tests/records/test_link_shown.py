"""What generators tell of their links, from the buffer's door to metrics, status and doctor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_messages_kit import honest_hello
from process_kit import ROOT
from service_kit import SMALL, greet

from asyncrl.cli.inspect.doctor import print_running
from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import metrics, rundir
from asyncrl.supervise import doctor, live
from buffer.service import BufferService

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
    assert [links(row) for row in rows] == [{}, SHOWN, {}]
    assert set(SHOWN) <= set(metrics.METRICS)


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
