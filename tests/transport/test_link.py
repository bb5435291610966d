"""What the way between generators and buffer costs, from the generator's own clock to the line that
doctor and terminal show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.delivery import Outbox
from asyncrl.config.tree import WiresConfig
from asyncrl.contract.messages import DeliveryAcks, RunStatus, Trajectory
from asyncrl.supervise import live
from buffer import numbers
from buffer.sessions import PeerState


def sample(number: int) -> Trajectory:
    return Trajectory(0, number, 1, b"", b"1234", b"", b"\1", [], 0.0, {}, "stop", 1.0)


def test_an_acknowledgement_is_waited_for_from_the_first_sending() -> None:
    box = Outbox(WiresConfig(retry_s=1.0), "generator-0", 1)
    first, second = sample(0), sample(1)
    for each in (first, second):
        box.add(each)
    assert len(list(box.take_frames(10.0, flush=True))) == 1
    assert len(list(box.take_frames(11.5, flush=True))) == 1  # sent again
    acks = DeliveryAcks(1, [(0, 0, first.attempt, "accepted")], 1000, None)
    box.on_acks(acks, 13.0)
    box.on_acks(acks, 99.0)  # twice said is once heard
    assert box.collect_metrics() == {"link/acked": 1.0, "link/ack_waited_s": 3.0}
    box.on_acks(DeliveryAcks(1, [(0, 1, second.attempt, "accepted")], 1000, None), 12.0)
    assert box.collect_metrics() == {"link/acked": 2.0, "link/ack_waited_s": 5.0}
    assert box.is_empty and box.unacked_bytes == 0


def test_two_generators_links_become_a_line() -> None:
    sums = {
        "generator/busy_s": 6.0,
        "generator/idle_s": 4.0,
        "link/fetch_s": 4.0,
        "link/fetched_mb": 48.0,
        "link/acked": 10.0,
        "link/ack_waited_s": 20.0,
    }
    generators = [PeerState(stats=each) for each in (sums, sums | {"link/fetch_s": 2.0})]
    totals = numbers.sum_growth(generators)
    found = numbers.compute_link_metrics(totals, totals["busy_s"] + totals["idle_s"])
    assert found == {
        "link/ack_s": 2.0,
        "link/fetch_share": pytest.approx(0.3),
        "link/fetch_mb_per_s": 16.0,
    }
    assert (
        numbers.compute_link_metrics(numbers.sum_growth(generators), 1.0) == {}
    )  # nothing since then
    status = RunStatus("r", 1, 9, 1, found, {}, [], {}, False)
    assert live.format_status(status).endswith(
        "the link holds generators up: fetching weights takes 30% of their time, 16 MB/s each; "
        "the link holds deliveries up: acknowledged after 2 s"
    )
    near = found | {"link/fetch_share": 0.09, "link/ack_s": 0.9}
    assert "link" not in live.format_status(RunStatus("r", 1, 9, 1, near, {}, [], {}, False))


def test_what_a_generator_spends_on_a_long_step_is_no_wait_for_the_link() -> None:
    """It reads between steps alone: on busy cores a step takes seconds."""

    def waited(sent: float, unread: tuple[float, float], read: float) -> float:
        box = Outbox(WiresConfig(), "generator-0", 1)
        box.add(sample(0))
        assert len(list(box.take_frames(sent, flush=True))) == 1
        box.on_acks(DeliveryAcks(1, [(0, 0, 1, "accepted")], 1000, None), read, unread)
        return box.collect_metrics()["link/ack_waited_s"]

    assert waited(10.0, (9.0, 18.0), 18.0) == 0.0, "sent, then a step of eight seconds"
    assert waited(10.0, (14.0, 18.0), 18.0) == 4.0, "it was not there after four seconds"
    assert waited(10.0, (10.0, 10.0), 13.0) == 3.0, "it stood by all the time"


def test_a_slow_generator_draws_nothing_twice(
    forked: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A real run whose generator takes longer for each step than a lease lasts: it was slow, not
    dead, and there was nobody else to take its tickets."""
    sets = (
        "learner.steps=2",
        "generator.max_new_tokens=3",
        "wires.lease_s=1.0",  # ten of them, the longest lease, outlast a step beside other work
        "evaluation.every=0",
    )
    done = forked(tmp_path / "run", *sets, slow={"generator-0": 1.5})
    ledger = done["ledger"]
    assert ledger["generated"] == ledger["trained"] > 0, ledger
