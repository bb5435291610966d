"""actors/schedule.py: which weights a generator loads next, and which samples may start."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from generator_kit import announcement, ticket

from actors.schedule import LeasedTicket, TicketSchedule
from actors.turn import EVERYTHING, count_samples_to_request, list_ticket_progress
from asyncrl.contract.messages import Ticket
from asyncrl.contract.versions import Label

V1, V2, V3 = (Label(1, number) for number in (1, 2, 3))


def schedule(*tickets: Ticket, drain_first: bool = False, lockstep: bool = False) -> TicketSchedule:
    made = TicketSchedule(drain_first=drain_first, lockstep=lockstep)
    made.add_tickets(tickets)
    return made


def exact(number: int, attempt: int, label: Label, samples: int = 1) -> Ticket:
    """An evaluation ticket of one version."""
    return msgspec.structs.replace(
        ticket(number, attempt, label.epoch, samples), kind="eval", exact_version=label
    )


def numbers(started: Sequence[tuple[LeasedTicket, int]]) -> list[tuple[int, int]]:
    return [(leased.ticket.ticket, sample) for leased, sample in started]


def test_a_ticket_is_taken_once_and_lost_ones_are_refused() -> None:
    made = schedule(ticket(1, 3, 1))
    assert made.add_tickets([ticket(1, 3, 1), ticket(2, 2, 1), ticket(3, 4, 1)]) == [
        ticket(3, 4, 1)
    ]
    assert list(made.held) == [(1, 3), (3, 4)] and made.newest_attempt == 4
    made.refuse_up_to(6)
    made.refuse_up_to(5)
    assert made.add_tickets([ticket(4, 6, 1)]) == [] and made.newest_attempt == 6
    assert len(made.add_tickets([ticket(5, 7, 1), ticket(6, 7, 1)])) == 2, "of one grant"


def test_samples_start_with_weights_of_their_epoch_that_are_new_enough() -> None:
    at_two = msgspec.structs.replace(ticket(1, 1, 1), min_version=V2)
    leased = LeasedTicket(at_two, [0])
    found = [leased.is_ready(x) for x in (None, V1, V2, V3, Label(2, 9))]
    assert found == [False, False, True, True, False]
    leased = LeasedTicket(exact(1, 1, V2), [0])
    assert [leased.is_ready(x) for x in (None, V1, V2, V3)] == [False, False, True, False]


def test_evaluation_starts_first_then_tickets_by_number() -> None:
    made = schedule(ticket(5, 1, 1), ticket(2, 2, 1), exact(9, 3, V1, samples=2))
    assert numbers(made.admit(V1, 4)) == [(9, 0), (9, 1), (2, 0), (2, 1)]
    assert made.count_waiting() == 2 and made.count_live() == 4
    assert numbers(made.admit(V1, 0)) == [] and numbers(made.admit(None, 9)) == []
    assert numbers(made.admit(V1, 9)) == [(5, 0), (5, 1)]


def test_in_lockstep_no_training_sample_starts_while_an_evaluation_is_held() -> None:
    made = schedule(ticket(1, 1, 1, 1), exact(9, 2, V1), lockstep=True)
    assert numbers(made.admit(V1, 9)) == [(9, 0)]
    assert numbers(made.admit(V1, 9)) == [], "it is still being written"
    made.finish_sample((9, 0, 2), 5)
    assert numbers(made.admit(V1, 9)) == [(1, 0)]


def test_the_newest_announcement_counts() -> None:
    made = schedule()
    assert made.announce(announcement(1, 2)) and not made.announce(announcement(1, 1))
    assert not made.announce(announcement(1, 2)) and not made.announce(None)
    assert made.next_version(V1) == V2 and made.next_version(V2) is None
    assert made.next_version(None) == V2 and made.next_version(V3) is None, "never backwards"
    assert made.announce(announcement(2, 0)) and made.next_version(V3) == Label(2, 0)
    assert schedule().next_version(None) is None, "nothing is announced"


def test_a_sample_of_one_version_keeps_the_weights_until_it_ends() -> None:
    made = schedule(exact(1, 1, V1), ticket(2, 2, 1, 1))
    made.announce(announcement(1, 2))
    assert made.next_version(V2) == V1, "for an evaluation it goes back"
    assert numbers(made.admit(V1, 9)) == [(1, 0), (2, 0)] and made.is_pinned()
    assert made.next_version(V1) is None
    made.finish_sample((1, 0, 1), 3)
    assert not made.is_pinned() and made.next_version(V1) == V2


def test_weights_go_back_only_when_nothing_is_written() -> None:
    made = schedule(ticket(2, 1, 1, 2))
    made.announce(announcement(1, 2))
    assert len(made.admit(V2, 1)) == 1
    made.add_tickets([exact(3, 2, V1)])
    assert made.next_version(V2) is None
    assert numbers(made.admit(V2, 9)) == [], "the engine drains"
    made.finish_sample((2, 0, 1), 3)
    assert made.next_version(V2) == V1


def test_between_groups_new_weights_wait_for_the_samples_in_the_engine() -> None:
    made = schedule(ticket(1, 1, 1, 3), drain_first=True)
    made.announce(announcement(1, 1))
    assert numbers(made.admit(V1, 1) + made.admit(V1, 1)) == [(1, 0), (1, 1)]
    made.announce(announcement(1, 2))
    assert made.next_version(V1) is None and numbers(made.admit(V1, 9)) == []
    made.finish_sample((1, 0, 1), 3)
    made.finish_sample((1, 1, 1), 3)
    assert made.next_version(V1) == V2
    freely = schedule(ticket(1, 1, 1, 2))
    freely.announce(announcement(1, 2))
    assert len(freely.admit(V1, 1)) == 1 and freely.next_version(V1) == V2
    assert numbers(freely.admit(V1, 9)) == [(1, 1)], "in flight nothing waits"


def test_a_newer_epoch_drops_the_tickets_of_the_older_one() -> None:
    made = schedule(ticket(1, 1, 1), ticket(2, 2, 2))
    assert made.find_outdated() == []
    made.announce(announcement(2, 0))
    (old,) = made.find_outdated()
    assert old.ticket.ticket == 1 and old.epoch == 1
    made.admit(V1, 9)
    assert made.drop(old) == [(1, 0, 1), (1, 1, 1)] and list(made.held) == [(2, 2)]
    made.finish_sample((1, 0, 1), 3)  # of a ticket that is gone


def test_progress_counts_the_tokens_of_finished_and_of_live_samples() -> None:
    made = schedule(ticket(1, 4, 1, 3), ticket(2, 5, 1, 1))
    made.admit(V1, 9)
    made.finish_sample((1, 0, 4), 5)
    made.finish_sample((1, 1, 4), 7)
    progress = list_ticket_progress(made, {(1, 2, 4): 3, (2, 0, 5): 2, (8, 0, 9): 1})
    assert sorted(progress) == [(1, 4, 15), (2, 5, 2)]
    made.finish_sample((1, 2, 4), 3)
    assert list_ticket_progress(made, {}) == [(2, 5, 0)], "a finished ticket is forgotten"


def test_as_many_samples_are_asked_for_as_rows_are_free() -> None:
    made = schedule(ticket(1, 1, 1, 3))
    assert count_samples_to_request(made, 10, 4, False) == 3
    assert count_samples_to_request(made, 10, 4, True) == 3
    empty = schedule(lockstep=True)
    assert count_samples_to_request(empty, 10, 0, False) == EVERYTHING
    assert count_samples_to_request(empty, 10, 1, False) == 0
    assert count_samples_to_request(empty, 10, 0, True) == 0
    made.lockstep = True
    assert count_samples_to_request(made, 10, 0, False) == 0
