"""What a message may say: each function raises BadMessage for what cannot be, before anything of
the store is changed.

They look at names and counts, which index the store, at the versions, and at what an answer holds:
one whose arrays do not fit together would end the learner that trains on it, and in a durable run
every learner after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import DISPOSITIONS, EVAL_BASE, LearnerHello, Renew, Trajectory
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import BUFFER
from buffer.ledger import Ledger

if TYPE_CHECKING:
    from buffer.store import Store

NAME_LENGTH = 200
TEXT_LENGTH = 1000
TICKET_END = 1 << 48
LOGPROB_ABOVE_0 = 1e-3  # what rounding may leave of a probability of 1


def need(ok: bool, what: str) -> None:
    if not ok:
        raise BadMessage(what)


def producer(name: str) -> None:
    """A generator's name: it stands in logs and in the live view."""
    need(
        0 < len(name) <= NAME_LENGTH and name.isprintable(),
        f"a generator's name is printable and has 1 to {NAME_LENGTH} characters, not {name[:40]!r}",
    )


def sample(store: Store, answer: Trajectory) -> None:
    """An answer: to a ticket and an attempt that were granted, by weights that a learner
    registered.
    """
    for span in answer.spans:
        theirs = span.digest[:40]
        need(
            span.label in store.tree,
            f"ticket {answer.ticket}: weights {span.label} (digest {theirs}) wrote tokens, but no "
            "learner has announced them; "
            f"known are up to {store.policy}: stop the generator that runs other weights",
        )
        ours = store.tree.digest(span.label)
        need(
            span.digest in ("", ours),
            f"ticket {answer.ticket}: weights {span.label} have digest {theirs} at the generator "
            f"and {ours} at the learner",
        )
    need(
        1 <= answer.attempt <= store.attempts,
        f"ticket {answer.ticket}: attempt {answer.attempt} was never granted; the last one is "
        f"{store.attempts}",
    )
    if answer.ticket >= EVAL_BASE:
        out = store.evaluations.out.get(answer.attempt)
        need(
            answer.sample == 0 and (out is None or out.job.ticket == answer.ticket),
            f"attempt {answer.attempt} is not of evaluation ticket {answer.ticket}, sample "
            f"{answer.sample}",
        )
        return
    need(
        0 <= answer.sample < store.settings.group,
        f"ticket {answer.ticket}: sample {answer.sample} of a group of {store.settings.group}",
    )
    need(
        0 <= answer.ticket < store.cursor,
        f"ticket {answer.ticket} was never granted; the next one is {store.cursor}",
    )
    group = store.alive.get(answer.ticket) or store.retained.get(answer.ticket)
    need(
        group is None or answer.attempt in group.attempts,
        f"ticket {answer.ticket}: attempt {answer.attempt} is not one of its attempts",
    )


def answer(sample: Trajectory, vocabulary: int) -> None:
    """An answer's own arrays: of one length, numbers where numbers are meant, tokens that the model
    has.  vocabulary: 0 while no learner has said it.
    """
    which = f"ticket {sample.ticket}, sample {sample.sample}"
    length = len(sample.mask)
    size = len(sample.tokens)
    need(
        size == 4 * length > 0 and len(sample.prompt_tokens) % 4 == 0,
        f"{which}: {size} bytes of tokens for {length} mask bytes; int32, one or more",
    )
    need(
        len(sample.behavior_logprobs) == 4 * length,
        f"{which}: {len(sample.behavior_logprobs)} bytes of behavior_logprobs for {length} tokens; "
        "float32 each",
    )
    need(
        len(sample.token_rewards) in (0, 4 * length),
        f"{which}: {len(sample.token_rewards)} bytes of token_rewards for {length} tokens; "
        "float32, "
        "or none",
    )
    ends = [0, *(span.end for span in sample.spans)]
    need(
        ends[-1] == length
        and all(
            a == span.start < span.end for a, span in zip(ends[:-1], sample.spans, strict=True)
        ),
        f"{which}: its spans are not its {length} tokens in order",
    )
    need(
        not sample.mask.strip(b"\0\1"),
        f"{which}: its mask holds other bytes than 0 and 1",
    )
    logprobs = np.frombuffer(sample.behavior_logprobs, "<f4")
    need(
        bool(logprobs.max() <= LOGPROB_ABOVE_0 and logprobs.min() > -np.inf),
        f"{which}: a behavior_logprob is above 0 or not finite",
    )
    for name, raw in (("prompt_tokens", sample.prompt_tokens), ("tokens", sample.tokens)):
        ids = np.frombuffer(raw, "<i4")
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            need(
                low >= 0 and (high < vocabulary or not vocabulary),
                f"{which}: {name} from {low} to {high}, of a model with {vocabulary} tokens",
            )
    if sample.token_rewards:
        need(
            bool(np.isfinite(np.frombuffer(sample.token_rewards, "<f4")).all()),
            f"{which}: a token reward is not finite",
        )


def progress(store: Store, rows: list[tuple[int, int, int]]) -> None:
    """(ticket, attempt, tokens so far): no attempt has more tokens than its samples may have."""
    most = store.settings.group * store.settings.sampling.max_new_tokens
    for ticket, attempt, tokens in rows:
        need(
            0 <= tokens <= most,
            f"ticket {ticket}, attempt {attempt}: {tokens} tokens so far, of at most {most}",
        )


def renew(message: Renew) -> None:
    """A generator's own numbers and its wait: finite, not negative, and its own."""
    for name, value in message.stats.items():
        need(math.isfinite(value) and value >= 0, f"{message.producer}: {name[:40]!r} is {value}")
    drawn(message.drawn)
    wait = message.waiting
    if wait is None:
        return
    need(
        wait.who == message.producer and (wait.on == BUFFER or wait.within),
        f"{message.producer} tells of the wait of {wait.who[:40]!r} for {wait.on[:40]!r}",
    )
    need(
        len(wait.what) <= TEXT_LENGTH and len(wait.on) <= TEXT_LENGTH,
        f"{message.producer}: a wait's text has up to {TEXT_LENGTH} characters, not "
        f"{len(wait.what)} and {len(wait.on)}",
    )
    need(
        math.isfinite(wait.seconds) and wait.seconds >= 0,
        f"{message.producer}: a wait of {wait.seconds} s, for {wait.what[:40]!r}",
    )


def drawn(tokens: int) -> None:
    need(0 <= tokens < 1 << 60, f"{tokens} tokens cannot have been drawn")


def hello(message: LearnerHello) -> None:
    """A learner's names are of its own epoch, its ring lies behind it, its totals are a ledger."""
    who = f"the learner of epoch {message.epoch}"
    need(
        message.epoch >= 1 and message.label.epoch == message.epoch and message.label.number >= 0,
        f"{who} says that it is at version {message.label}",
    )
    need(
        0 <= message.origin <= message.epoch,
        f"{who} says that it resumed from epoch {message.origin}",
    )
    need(message.max_lag >= 0, f"{who} has the limit {message.max_lag}")
    need(
        0 <= message.next_ticket < TICKET_END
        and all(0 <= ticket < TICKET_END for ticket in message.trained_above),
        f"{who} goes on at ticket {message.next_ticket}",
    )
    behind = all(
        label.epoch == message.epoch and 0 <= label.number < message.label.number
        for label, _ in message.ring
    )
    need(
        behind,
        f"{who} at version {message.label} holds weights that are not of its past: "
        f"{', '.join(str(x) for x, _ in message.ring[:8])}",
    )
    try:
        need(
            set(message.ledger) <= set(DISPOSITIONS),
            f"{who} has a ledger with other lines than {', '.join(DISPOSITIONS)}",
        )
        Ledger.restore(message.ledger)
    except (KeyError, ValueError, OverflowError) as error:
        raise BadMessage(
            f"{who} has a ledger that does not read: {type(error).__name__} {error}"
        ) from error


def ask(store: Store, number: int) -> None:
    need(
        number < store.settings.steps,
        f"batch {number} is asked for; the last one of {store.settings.steps} is "
        f"{store.settings.steps - 1} "
        "(learner.steps)",
    )


def commit(store: Store, number: int, label: Label, unused: Sequence[tuple[int, int]] = ()) -> None:
    """A batch that is told to be trained: it is composed and complete, and its update has the name
    that follows.
    """
    need(
        label == (store.epoch, number + 1),
        f"the commit of batch {number} in epoch {store.epoch} makes version "
        f"{store.epoch}.{number + 1}, not {label}",
    )
    if number < store.committed:
        return
    at = number - store.base
    need(
        at < len(store.comps),
        f"batch {number} is committed and was not composed: known are batches up to "
        f"{store.base + len(store.comps) - 1}",
    )
    missing = [t for t in store.comps[at] if t not in store.alive or not store.alive[t].complete]
    samples = len(store.comps[at]) * store.settings.group
    fits = len(unused) in (0, samples) and all(
        0 <= x < 1 << 60 for counts in unused for x in counts
    )
    need(
        fits,
        f"batch {number} has {samples} samples; its commit counts unused tokens of {len(unused)}, "
        "or counts that cannot be",
    )
    need(
        not missing,
        f"batch {number} is committed and was never complete: ticket "
        f"{missing[0] if missing else ''} lacks samples",
    )


def goodbye(store: Store, number: int) -> None:
    """A learner that leaves has trained all there is."""
    done = f"{store.committed} of {store.settings.steps} batches are committed (learner.steps)"
    need(store.committed >= store.settings.steps, f"the learner leaves at version {number}; {done}")
