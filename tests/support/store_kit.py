from collections.abc import Sequence
from typing import Any

from hostile_messages_kit import honest_hello
from trajectory_kit import trajectory

from asyncrl.contract.messages import (
    Prompt,
    RewardFailure,
    SamplingSettings,
    Ticket,
    Trajectory,
    VersionSpan,
    WeightsSource,
)
from asyncrl.contract.versions import Label
from buffer.evaluation import Evaluations
from buffer.groups import StoreSettings
from buffer.ledger import sum_tokens
from buffer.store import Store


def prompt(i: int) -> Prompt:
    return Prompt(i, f"p{i}")


def make(
    k: float = 1,
    batch: int = 1,
    group: int = 1,
    steps: int = 9,
    evaluations: Evaluations | None = None,
    **more: Any,
) -> Store:
    """A store that a learner at version 0 of epoch 1 has said hello to."""
    store = Store(
        StoreSettings(batch, group, steps, SamplingSettings(), **more), prompt, evaluations
    )
    assert hello(store, 1, 0, k=k)
    return store


def hello(
    store: Store,
    epoch: int,
    number: int,
    *,
    k: float = 1,
    origin: int = 0,
    digest: str = "",
    next_ticket: int = 0,
    ring: Sequence[tuple[Label, str]] = (),
    **more: Any,
) -> bool:
    parent = Label(origin, number - 1) if number and origin else None
    label = Label(epoch, number)
    source = WeightsSource(epoch, "here", "", "")
    given = {"epoch": epoch, "label": label, "parent": parent, "digest": digest or f"d{number}"}
    given |= {"next_ticket": next_ticket, "origin": origin, "max_lag": k, "ring": list(ring)}
    return store.follow_learner(honest_hello("run", source=source, **given, **more))


def sample(
    t: Ticket,
    s: int = 0,
    *versions: tuple[Label, int],
    reward: float = 1.0,
    length: int = 4,
    failed: str = "",
    digest: str = "",
) -> Trajectory:
    """An answer to ticket t; `versions` are (label, tokens) runs, by default all tokens by the
    ticket's minimum version."""
    spans, at = [], 0
    for label, n in versions or ((t.exact_version or t.min_version, length),):
        spans.append(VersionSpan(label, digest, at, at + n, label))
        at += n
    failure = RewardFailure(*failed.split(": ", 1)) if failed else ""
    fields = {"spans": spans, "reward": reward, "failed": failure}
    return trajectory((t.ticket, s, t.attempt), (), [0] * at, [0] * at, **fields)


def write(store: Store, t: Ticket, **more: Any) -> list[str]:
    return [store.deliver(sample(t, s, **more), 0.0) for s in t.samples]


def train(store: Store, number: int, *unwritten: Ticket) -> None:
    """Write samples of these tickets, and train the batch of this number."""
    for ticket in unwritten:
        write(store, ticket)
    groups, why = store.ask(store.epoch, number)
    assert groups, why
    assert store.commit(number, Label(store.epoch, number + 1), f"d{number + 1}")


def total(store: Store) -> int:
    return sum_tokens(store.sum_ledger())


def stale(on_exceed: str, k: float = 0, **more: Any) -> tuple[Store, list[Ticket]]:
    """A store at version 2, tickets 0 and 1 of version 0 still out; k is the limit now."""
    store = make(9, 1, 1, 9, on_exceed=on_exceed, **more)
    tickets = store.grant("g", 1, 4, 0.0)
    for n in (2, 3):
        write(store, tickets[n])
        train(store, n - 2)
    store.max_lag = k
    return store, tickets[:2]


def judged(store: Store, t: Ticket, reward: float) -> str:
    return store.deliver(sample(t, 0, (t.exact_version or Label(0, 0), 4), reward=reward), 0.0)
