"""What the way between generators and buffer costs, from the generator's own clock to the line that
doctor and terminal show.
"""

from __future__ import annotations

import pytest

from actors.delivery import Outbox
from asyncrl.config.tree import Wires
from asyncrl.contract.messages import Acks, Status, Trajectory
from asyncrl.supervise import live
from buffer import numbers


def sample(number: int) -> Trajectory:
    return Trajectory(0, number, 1, b"", b"1234", b"", b"\1", [], 0.0, {}, "stop", 1.0)


def test_an_acknowledgement_is_waited_for_from_the_first_sending() -> None:
    box = Outbox(Wires(retry_s=1.0), "generator-0", 1)
    first, second = sample(0), sample(1)
    for each in (first, second):
        box.add(each)
    assert len(list(box.frames(10.0, flush=True))) == 1
    assert len(list(box.frames(11.5, flush=True))) == 1  # sent again
    acks = Acks(1, [(0, 0, first.attempt, "accepted")], 1000, None)
    box.on_acks(acks, 13.0)
    box.on_acks(acks, 99.0)  # twice said is once heard
    assert box.numbers() == {"link/acked": 1.0, "link/ack_waited_s": 3.0}
    box.on_acks(Acks(1, [(0, 1, second.attempt, "accepted")], 1000, None), 12.0)
    assert box.numbers() == {"link/acked": 2.0, "link/ack_waited_s": 5.0}
    assert box.empty and box.unacked_bytes == 0


def test_two_generators_links_become_a_line() -> None:
    sums = {
        "generator/busy_s": 6.0,
        "generator/idle_s": 4.0,
        "link/fetch_s": 4.0,
        "link/fetched_mb": 48.0,
        "link/acked": 10.0,
        "link/ack_waited_s": 20.0,
    }
    generators = [{"stats": sums}, {"stats": sums | {"link/fetch_s": 2.0}}]
    totals = numbers.news(generators)
    found = numbers.of_links(totals, totals["busy_s"] + totals["idle_s"])
    assert found == {
        "link/ack_s": 2.0,
        "link/fetch_share": pytest.approx(0.3),
        "link/fetch_mb_per_s": 16.0,
    }
    assert numbers.of_links(numbers.news(generators), 1.0) == {}  # nothing since then
    status = Status("r", 1, 9, 1, found, {}, [], {}, False)
    assert live.line(status).endswith(
        "the link holds generators up: 30% of their time weights come over it, 16 MB/s each; "
        "the link holds deliveries up: acknowledged after 2 s"
    )
    near = found | {"link/fetch_share": 0.09, "link/ack_s": 0.9}
    assert "link" not in live.line(Status("r", 1, 9, 1, near, {}, [], {}, False))
