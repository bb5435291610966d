"""The staleness protocol as a small pure model, searched exhaustively; each of its rules can be
switched off.

    python tests/support/protocol_model.py          the runs of RUNS: states, and that
                                                    every invariant holds
    python tests/support/protocol_model.py table    each rule off: which invariant breaks,
                                                    and the shortest trace
    python tests/support/protocol_model.py large    more runs, some minutes

A state is a `World`; `steps` lists every action enabled in it.  A policy is a node of a tree of
updates, its label (epoch, number) is what travels.  Samples travel through a network that reorders
them; faults come out of a budget: a sample lost or doubled, a generator or learner killed, a lease
that ends under a slow generator, a second learner beside the first.  With `sessions` a generator is
a gateway: a sample's last call may be another engine's, and what a new epoch finds begun waits
until the next grant of its sample adopts it.  With `mail` tickets, renewals and their answers
travel too, and tickets get lost, as a connection breaks or the buffer dies between the grant and
its reply, or overtaken; no lease of a generator that lives then ends by time, but by a fault.
Requests of a learner are answered at once: their loss and repetition are the business of
tests/buffer/test_service.py, durability of tests/buffer/test_journal.py.
tests/buffer/test_protocol_model.py runs the model and the real store side by side, step by step.

Invariants: I1 no token is trained past the limit.  I2 no sample is trained twice in the surviving
history.  I4 a batch that comes again is the same, orphans excepted.  I5 the end stays reachable
without further faults.  I6 what was written has one ledger line, or is still on its way.  I7 what a
checkpoint kept may need is not retired.  I8 batches are trained in order, none left out.  I9 a
label names one policy, and the buffer knows it.  I10 what a generator holds, or will take, is not
given to another as long as its lease lasts."""

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

Label = tuple[int, int]  # (epoch, number)
Version = tuple[Label, int]  # (label, policy)
Token = tuple[Label, int, int]  # (label, policy, the attempt that it was drawn under)
Key = tuple[int, int, int]  # (ticket, sample, attempt)

PARENT, DEPTH = [0], [0]  # policy 0 is the initial one
NODES: dict[Any, int] = {}


def grow(policy: int, update: Any) -> int:
    """What `update` makes of `policy`; the same update of the same policy is the same node."""
    if (policy, update) not in NODES:
        NODES[policy, update] = len(PARENT)
        PARENT.append(policy)
        DEPTH.append(DEPTH[policy] + 1)
    return NODES[policy, update]


def ancestor(policy: int, depth: int) -> int:
    while DEPTH[policy] > depth:
        policy = PARENT[policy]
    return policy


def distance(token: int, train: int, number: int) -> int:
    """Updates between `token` and the descendant of `train` at depth `number`."""
    a, b = token, train
    while a != b:
        a, b = (PARENT[a], b) if DEPTH[a] >= DEPTH[b] else (a, PARENT[b])
    return DEPTH[token] - DEPTH[a] + number - DEPTH[a]


class Bounds(NamedTuple):
    batch: int = 1  # groups
    group: int = 1  # samples
    k: tuple[int, ...] = (1,)  # limits: the first learner has the first, a later one any
    steps: int = 2
    gens: int = 1
    slots: int = 1  # tickets that a generator holds
    faults: int = 1
    kinds: str = "lose double gen learner slow second older"
    prefetch: int = 0
    keep: int = 1  # checkpoints
    same: bool = False  # an update computed again from the same samples is the same
    filtered: tuple[int, ...] = ()  # tickets whose group has no reward spread
    refiltered: tuple[int, ...] = ()  # tickets whose group has none when written again
    # a limit that sets itself: what it may become at a commit, by whatever rule; (): it is constant
    moves: tuple[int, ...] = ()
    # generators are gateways: a sample is a session whose last call any engine draws, and which
    # goes on over a learner's life
    sessions: bool = False
    # of a generator's tickets, renewals and the answers to these, so many of each may be on their
    # way; 0: tickets are taken as they are granted
    mail: int = 0
    off: frozenset[str] = frozenset()


class Group(NamedTuple):
    ticket: int
    lease: tuple[Any, ...]  # () or (attempt, generator, session, samples to come)
    samples: tuple[Any, ...]  # per sample () or (attempt, tokens)
    ghost: bool = False  # filtered, and yet counted: only with `filter_leaves` off


class Buffer(NamedTuple):
    epoch: int = 0
    k: int = 0
    cursor: int = 0
    attempts: int = 0
    committed: int = 0
    base: int = 0  # behind it nothing is kept
    policy: int = 0
    groups: tuple[Group, ...] = ()
    comps: tuple[tuple[int, ...], ...] = ()  # tickets of batch base, base + 1, ...
    known: frozenset[Version] = frozenset()
    lines: frozenset[tuple[Key, str]] = frozenset()
    now: int = -1  # where the limit sets itself: the one for tickets from now on, k at most
    # (attempt, the limit that its ticket announced, its least version)
    said: frozenset[tuple[int, int, Label]] = frozenset()


class Generator(NamedTuple):
    session: int = 0
    weights: tuple[Any, ...] = ()  # () or a version
    # (ticket, attempt, samples to do, min_version, () or the first token)
    held: tuple[Any, ...] = ()
    out: frozenset[Any] = frozenset()  # sent, not acknowledged
    taken: int = 0  # with `mail`: the attempt up to which it takes no ticket


class Learner(NamedTuple):
    epoch: int
    k: int
    policy: int
    queue: tuple[Any, ...] = ()  # leased batches: (number, ((key, tokens), ...))
    told: int = 0  # commits answered


class World(NamedTuple):
    buffer: Buffer
    gens: tuple[Generator, ...]
    learners: tuple[Learner, ...]
    # (epoch that claimed its directory, policies checkpointed there)
    kept: tuple[int, tuple[int, ...]]
    net: frozenset[Any]  # samples: (generator, session, key, tokens)
    faults: int
    epochs: int = 1
    # ghost: (number, ((ticket, sample), ...)) of every batch handed out
    leased: tuple[Any, ...] = ()
    # ("tickets", generator, what it is to hold), ("renewal", generator, its `taken`, the attempts
    # that it names), ("heard", generator, the attempts granted then)
    mail: frozenset[tuple[Any, ...]] = frozenset()


class Broken(Exception):
    """An invariant does not hold."""


def need(ok: bool, invariant: str, why: str) -> None:
    if not ok:
        raise Broken(f"{invariant}: {why}")


def label(c: Bounds, epoch: int, number: int) -> Label:
    return (0 if "lineage" in c.off else epoch, number)


def alive(b: Buffer) -> list[Group]:
    """Groups of no committed batch, in ticket order."""
    gone = {t for comp in b.comps[: b.committed - b.base] for t in comp}
    return [g for g in b.groups if g.ticket not in gone]


def swap(groups: tuple[Group, ...], new: Group) -> tuple[Group, ...]:
    return tuple(new if g.ticket == new.ticket else g for g in groups)


def relabel(
    lines: frozenset[tuple[Key, str]], keys: list[Key], what: str
) -> frozenset[tuple[Key, str]]:
    return frozenset(x for x in lines if x[0] not in keys) | {(k, what) for k in keys}


def grantable(c: Bounds, b: Buffer) -> Group | None:
    """The group whose ticket may go out now, again or for the first time: fewer than (k + 1) *
    batch alive come before it."""
    k = b.now if c.moves and "announced_room" not in c.off else b.k
    line, room = alive(b), (k + 1) * c.batch
    for place, g in enumerate(line):
        if place >= room and "reissue_paced" not in c.off:
            break
        if not g.lease and not all(g.samples):
            return g
    composed = {t for comp in b.comps for t in comp}
    counted = len(line) - (
        sum(g.ticket in composed for g in line) if "count_leased" in c.off else 0
    )
    if counted >= room or b.committed + sum(not g.ghost for g in line) // c.batch >= c.steps:
        return None
    return Group(b.cursor, (), ((),) * c.group)


def on_grant(b: Buffer, g: Group, i: int, session: int) -> tuple[Buffer, tuple[Any, ...]]:
    a, todo = b.attempts + 1, tuple(s for s, got in enumerate(g.samples) if not got)
    new = g._replace(lease=(a, i, session, todo))
    groups = swap(b.groups, new) if g.ticket < b.cursor else (*b.groups, new)
    b = b._replace(said=(b.said | {(a, b.now, (b.epoch, b.committed))} if b.now >= 0 else b.said))
    return b._replace(attempts=a, cursor=max(b.cursor, g.ticket + 1), groups=groups), (
        g.ticket,
        a,
        todo,
        (b.epoch, b.committed),
        (),
    )


def on_sample(c: Bounds, b: Buffer, key: Key, tokens: tuple[Token, ...]) -> Buffer:
    t, s, a = key
    need(
        all(x[:2] in b.known for x in tokens),
        "I9",
        f"{key}: weights {tokens} that no learner registered",
    )
    if any(k == key for k, _ in b.lines) and "dedupe" not in c.off:
        return b
    g = next((g for g in b.groups if g.ticket == t), None)
    if g is not None and g.lease and g.lease[0] == a:
        todo = tuple(x for x in g.lease[3] if x != s)
        g = g._replace(lease=(*g.lease[:3], todo) if todo else ())
        b = b._replace(groups=swap(b.groups, g))
    if g is None or g.ghost or (g.samples[s] and "dedupe" not in c.off):
        return b._replace(lines=relabel(b.lines, [key], "duplicate"))
    need(not g.samples[s], "I6", f"sample {t}.{s} is stored twice")
    g = g._replace(samples=(*g.samples[:s], (a, tokens), *g.samples[s + 1 :]))
    if all(g.samples):
        g = g._replace(lease=())
    b = b._replace(groups=swap(b.groups, g), lines=relabel(b.lines, [key], "accepted"))
    inside = any(t in comp for comp in b.comps)
    spread = t in c.filtered or (inside and t in c.refiltered)
    if all(g.samples) and spread and (not inside or "filter_once" in c.off):
        b = b._replace(
            lines=relabel(b.lines, [(t, n, x[0]) for n, x in enumerate(g.samples)], "filtered")
        )
        if "filter_leaves" in c.off:
            return b._replace(groups=swap(b.groups, g._replace(ghost=True)))
        return b._replace(
            groups=tuple(x for x in b.groups if x.ticket != t),
            comps=tuple(comp for comp in b.comps if t not in comp) if inside else b.comps,
        )
    return b


def end_leases(b: Buffer, which: Any) -> Buffer:
    return b._replace(
        groups=tuple(g._replace(lease=()) if g.lease and which(g) else g for g in b.groups)
    )


def on_ask(c: Bounds, b: Buffer, number: int) -> list[tuple[Buffer, tuple[Any, ...]]]:
    """The ways to answer: (state, the batch or ()).  Composes, and judges the lag of what was
    written by an earlier epoch."""
    if number < b.committed:
        return []
    need(number >= b.base, "I7", f"batch {number} is asked for and retired")
    at = number - b.base
    if at > len(b.comps):
        return []
    ways: list[tuple[Buffer, tuple[int, ...]]] = []
    if at < len(b.comps):
        ways = [(b, b.comps[at])]
    else:
        composed = {t for comp in b.comps for t in comp}
        line = [g for g in alive(b) if g.ticket not in composed and not g.ghost]
        picks = [tuple(line[: c.batch])] if len(line) >= c.batch else []
        if "ticket_order" in c.off:
            picks = list(itertools.combinations([g for g in line if all(g.samples)], c.batch))
        ways = [
            (b._replace(comps=(*b.comps, tuple(g.ticket for g in p))), tuple(g.ticket for g in p))
            for p in picks
            if all(all(g.samples) for g in p)
        ]
    return [judge(c, b2, comp, number) for b2, comp in ways]


def own_limit(said: frozenset[tuple[int, int, Label]], attempt: int, k: int) -> int:
    """What an attempt's ticket announced; k at most."""
    return min([k, *(limit for a, limit, _ in said if a == attempt)])


def promised(c: Bounds, b: Buffer, token: Token, tokens: tuple[Token, ...]) -> int:
    """The lag up to which a token of a sample may be trained, as the buffer reckons it, which sees
    versions and attempts: of those of the sample's grants that its version may have written under,
    the largest limit."""
    attempts = {x[2] for x in tokens}
    limits = [
        limit
        for a, limit, least in b.said
        if a in attempts
        and ("own_epoch" in c.off or (token[0][0] == least[0] and token[0] >= least))
    ]
    return min(b.k, max(limits, default=b.k))


def judged(c: Bounds, b: Buffer, tokens: tuple[Token, ...]) -> list[Token]:
    """Those whose lag is looked at: all, an adopted session's first ones too."""
    mixed = len({x[0][0] for x in tokens}) > 1
    return [x for x in tokens if not (mixed and "adopted" in c.off and x[0][0] < b.epoch)]


def judge(
    c: Bounds, b: Buffer, comp: tuple[int, ...], number: int
) -> tuple[Buffer, tuple[Any, ...]]:
    by_ticket = {g.ticket: g for g in b.groups}
    need(all(t in by_ticket for t in comp), "I7", f"a group of batch {number} is gone")
    late: list[Key] = []
    for g in (by_ticket[t] for t in comp):
        for s, got in enumerate(g.samples):
            past = got and any(
                distance(x[1], b.policy, number) > promised(c, b, x, got[1])
                for x in judged(c, b, got[1])
            )
            if past and "orphans" not in c.off:
                need(
                    got[1][0][0][0] < b.epoch or "lineage" in c.off,
                    "I1",
                    f"sample {g.ticket}.{s} of this epoch would train past its limit in batch "
                    f"{number}",
                )
                late.append((g.ticket, s, got[0]))
                g = g._replace(samples=(*g.samples[:s], (), *g.samples[s + 1 :]))
                b = b._replace(groups=swap(b.groups, g))
    b = b._replace(lines=relabel(b.lines, late, "orphaned"))
    groups = [next(g for g in b.groups if g.ticket == t) for t in comp]
    if not all(all(g.samples) for g in groups):
        return b, ()
    return b, (
        number,
        tuple(((g.ticket, s, got[0]), got[1]) for g in groups for s, got in enumerate(g.samples)),
    )


def on_hello(c: Bounds, b: Buffer, epoch: int, policy: int, k: int) -> Buffer | None:
    number = DEPTH[policy]
    if number < b.base or epoch <= b.epoch:
        return None
    b = register(b, (label(c, epoch, number), policy))
    if "hello_leases" not in c.off:
        b = end_leases(b, lambda g: True)
    b = b._replace(epoch=epoch, k=k, now=min(max(b.now, c.moves[0]), k) if c.moves else -1)
    if "hello_truth" not in c.off:
        b = b._replace(committed=number, policy=policy)
    return b._replace(comps=b.comps[: number - b.base]) if "composition" in c.off else b


def register(b: Buffer, version: Version) -> Buffer:
    need(
        all(x[0] != version[0] or x[1] == version[1] for x in b.known),
        "I9",
        f"two policies under the label {version[0]}",
    )
    return b._replace(known=b.known | {version})


def on_commit(c: Bounds, b: Buffer, epoch: int, number: int, policy: int) -> Buffer:
    if number < b.committed and "hello_truth" not in c.off:
        return b
    need(number == b.committed, "I8", f"batch {number} is committed, {b.committed} is next")
    b = register(b, (label(c, epoch, number + 1), policy))
    return b._replace(committed=number + 1, policy=policy)


def retire(b: Buffer, oldest: int) -> Buffer:
    cut = max(0, min(oldest, b.committed) - b.base)
    gone = {t for comp in b.comps[:cut] for t in comp}
    return b._replace(
        base=b.base + cut,
        comps=b.comps[cut:],
        groups=tuple(g for g in b.groups if g.ticket not in gone),
    )


def with_gen(w: World, i: int, **fields: Any) -> World:
    return w._replace(gens=(*w.gens[:i], w.gens[i]._replace(**fields), *w.gens[i + 1 :]))


def with_learner(w: World, x: Learner, **fields: Any) -> World:
    return w._replace(learners=tuple(y._replace(**fields) if y is x else y for y in w.learners))


def grant(c: Bounds, w: World, i: int) -> World:
    g = grantable(c, w.buffer)
    assert g is not None
    b, held = on_grant(w.buffer, g, i, w.gens[i].session)
    if "attempts" in c.off:
        held = (held[0], 0, *held[2:])
    w = w._replace(buffer=b)
    if c.mail:
        return w._replace(mail=w.mail | {("tickets", i, held)})
    mine = w.gens[i].held
    if c.sessions:
        held, mine = adopt(held, mine)
    return with_gen(w, i, held=(*mine, held))


def will_take(c: Bounds, w: World, letter: tuple[Any, ...]) -> bool:
    _, i, held = letter
    return held[1] > w.gens[i].taken or "forgo" in c.off


def take(c: Bounds, w: World, letter: tuple[Any, ...]) -> World:
    """Tickets arrive; what was forgone is not taken, nor what is of an epoch that is over."""
    _, i, held = letter
    g = w.gens[i]
    mine = will_take(c, w, letter) and not parked(g, held)
    w = w._replace(mail=w.mail - {letter})
    return with_gen(w, i, held=(*g.held, held) if mine else g.held, taken=max(g.taken, held[1]))


def tickets_lost(c: Bounds, w: World, letter: tuple[Any, ...]) -> World:
    return w._replace(mail=w.mail - {letter}, faults=w.faults - 1)


def renew(c: Bounds, w: World, i: int) -> World:
    """A generator names what it holds, and up to which attempt that is all."""
    g = w.gens[i]
    sent = {m[2][2] for m in g.out} if "written" not in c.off else set()
    named = frozenset({h[1] for h in g.held} | sent)
    return w._replace(mail=w.mail | {("renewal", i, g.taken, named)})


def answer(c: Bounds, w: World, letter: tuple[Any, ...]) -> World:
    """What is not named, and will not be taken, is due again."""
    _, i, taken, named = letter
    b = w.buffer

    def unheld(group: Group) -> bool:
        attempt, holder, session, _ = group.lease
        forgone = attempt <= taken or "taken" in c.off
        mine = holder == i and session == w.gens[i].session
        return mine and forgone and attempt not in named and "unheld" not in c.off

    for group in (x for x in b.groups if x.lease and unheld(x)):
        attempt = group.lease[0]
        held = any(h[1] == attempt for h in w.gens[i].held)
        coming = any(
            x[0] == "tickets" and x[1] == i and x[2][1] == attempt and will_take(c, w, x)
            for x in w.mail
        )
        sent = any(x[2][2] == attempt for x in w.gens[i].out)
        need(
            not (held or coming or sent),
            "I10",
            f"attempt {attempt} of ticket {group.ticket} is freed, and generator {i} has it",
        )
    # an answer that says nothing new would change nothing
    news = {("heard", i, b.attempts)} if b.attempts > taken else set()
    return w._replace(buffer=end_leases(b, unheld), mail=w.mail - {letter} | news)


def overtakes(w: World, letter: tuple[Any, ...]) -> bool:
    """Are tickets still on their way that were granted before this answer was given?"""
    _, i, attempts = letter
    return any(x[:2] == ("tickets", i) and x[2][1] <= attempts for x in w.mail)


def hear(c: Bounds, w: World, letter: tuple[Any, ...], fault: bool) -> World:
    """What was granted by now, and has not come, is lost: it is not taken later."""
    _, i, attempts = letter
    w = w._replace(mail=w.mail - {letter}, faults=w.faults - fault)
    return with_gen(w, i, taken=max(w.gens[i].taken, attempts))


def adopt(new: tuple[Any, ...], mine: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A ticket and what its gateway holds: the session that it has begun for a sample of the ticket
    goes on under it, its first tokens as they are; what else it held of the ticket is over."""
    t, a, todo, least, _ = new
    begun = [h for h in mine if h[0] == t and h[4] and h[2][0] in todo]
    if begun:
        sample, first = begun[-1][2][0], begun[-1][4]
        new = (t, a, (sample, *(s for s in todo if s != sample)), least, first)
    return new, tuple(h for h in mine if h[0] != t)


def parked(g: Generator, h: tuple[Any, ...]) -> bool:
    """Is it of an epoch that is over, as this generator knows?"""
    return bool(g.weights) and h[3][0] < g.weights[0][0]


def newest(c: Bounds, w: World) -> Version:
    """What a generator may load: the last commit or hello; with `announce` off, whatever the newest
    learner has published."""
    b = w.buffer
    if "announce" in c.off:
        x = w.learners[-1]
        return label(c, x.epoch, DEPTH[x.policy]), x.policy
    return label(c, b.epoch, b.committed), b.policy


def load(c: Bounds, w: World, i: int) -> World:
    """Newer weights; those of a newer epoch end what an older epoch's ticket asked for."""
    new = newest(c, w)
    held = tuple(
        h
        for h in w.gens[i].held
        if h[3][0] >= w.buffer.epoch or "epoch_tickets" in c.off or (c.sessions and h[4])
    )
    return with_gen(w, i, weights=new, held=held)


def may_begin(c: Bounds, g: Generator, h: tuple[Any, ...]) -> bool:
    if not g.weights or h[4]:
        return False
    now, least = g.weights[0], h[3]
    if "lineage" in c.off:
        return bool(now[1] >= least[1])
    return (now[0] == least[0] or "epoch_tickets" in c.off) and (
        now >= least or "min_version" in c.off
    )


def begin(c: Bounds, w: World, i: int, h: tuple[Any, ...]) -> World:
    g = w.gens[i]
    first = (*g.weights, h[1])
    return with_gen(w, i, held=tuple((*x[:4], first) if x is h else x for x in g.held))


def may_finish(c: Bounds, g: Generator, h: tuple[Any, ...]) -> bool:
    """May this engine draw the last call of a session?"""
    if not g.weights:
        return False
    now, least = g.weights[0], h[3]
    return now[0] == least[0] and (now >= least or "later_calls" in c.off)


def finish(c: Bounds, w: World, i: int, h: tuple[Any, ...], by: int = -1) -> World:
    """The last token of a sample, by the weights of now; of a session by those of engine `by`."""
    (t, a, todo, least, first), g = h, w.gens[i]
    weights = w.gens[by].weights if by >= 0 else g.weights
    key, tokens = (t, todo[0], a), tuple(sorted({first, (*weights, a)}))
    need(
        all(k != key for k, _ in w.buffer.lines)
        and all(m[2] != key for x in w.gens for m in x.out),
        "I6",
        f"{key} is written twice and counted once",
    )
    m = (i, g.session, key, tokens)
    rest = ((t, a, todo[1:], least, ()),) if todo[1:] else ()
    out = g.out if "redelivery" in c.off else g.out | {m}
    return with_gen(
        w._replace(net=w.net | {m}), i, held=tuple(x for x in g.held if x is not h) + rest, out=out
    )


def deliver(c: Bounds, w: World, m: tuple[Any, ...], keep: bool) -> World:
    i, session, key, tokens = m
    w = w._replace(
        buffer=on_sample(c, w.buffer, key, tokens),
        net=w.net if keep else w.net - {m},
        faults=w.faults - keep,
    )
    return with_gen(w, i, out=w.gens[i].out - {m}) if w.gens[i].session == session else w


def lose(c: Bounds, w: World, m: tuple[Any, ...]) -> World:
    i, session, key, _ = m
    alive_still = w.gens[i].session == session
    need(
        not alive_still or m in w.gens[i].out or any(k == key for k, _ in w.buffer.lines),
        "I6",
        f"{key} is lost without a line, its writer lives",
    )
    return w._replace(net=w.net - {m}, faults=w.faults - 1)


def resend(c: Bounds, w: World, m: tuple[Any, ...]) -> World:
    return w._replace(net=w.net | {m})


def ask(c: Bounds, w: World, x: Learner, way: int) -> World:
    number = DEPTH[x.policy] + len(x.queue)
    b, batch = on_ask(c, w.buffer, number)[way]
    w = w._replace(buffer=b)
    if not batch:
        return w
    mine, before = tuple(k[:2] for k, _ in batch[1]), dict(w.leased)
    need(
        before.get(number, mine) == mine,
        "I4",
        f"batch {number} came again as {mine}, not {before.get(number)}",
    )
    return with_learner(
        w._replace(leased=tuple(sorted((before | {number: mine}).items()))),
        x,
        queue=(*x.queue, batch),
    )


def train(c: Bounds, w: World, x: Learner) -> World:
    (number, samples), depth = x.queue[0], DEPTH[x.policy]
    need(number == depth, "I8", f"batch {number} is trained on version {depth}")
    before = {k[:2] for p in path(x.policy) for k in p[1]}
    for key, tokens in samples:
        for token in tokens:
            far, k = distance(token[1], x.policy, depth), own_limit(w.buffer.said, token[2], x.k)
            late = f"{key} is trained {far} versions late in batch {number}, limit {k}"
            need(far <= k, "I1", late)
        need(key[:2] not in before, "I2", f"sample {key[:2]} is trained twice")
    update = (0 if c.same else x.epoch, tuple(k for k, _ in samples))
    return with_learner(w, x, policy=grow(x.policy, update), queue=x.queue[1:])


def path(policy: int) -> list[Any]:
    """The updates that made a policy."""
    out = []
    while policy:
        out.append(UPDATE_OF[policy])
        policy = PARENT[policy]
    return out


class _Updates(dict[int, Any]):
    def __missing__(self, policy: int) -> Any:
        for (_, update), node in NODES.items():
            self[node] = update
        return self[policy]


UPDATE_OF = _Updates()


def commit(c: Bounds, w: World, x: Learner, to: int = -1) -> World:
    """to: what the limit becomes, where it sets itself."""
    if x.epoch < w.buffer.epoch and "fencing" not in c.off:
        return fenced(w, x)
    b = on_commit(c, w.buffer, x.epoch, x.told, ancestor(x.policy, x.told + 1))
    b = b._replace(now=to) if to >= 0 and x.epoch == b.epoch else b
    return with_learner(w._replace(buffer=b), x, told=x.told + 1)


def fenced(w: World, x: Learner) -> World:
    return w._replace(learners=tuple(y for y in w.learners if y is not x))


def checkpoint(c: Bounds, w: World, x: Learner) -> World:
    """Into its own epoch's directory; then the buffer hears of the oldest kept."""
    policies = (*w.kept[1], x.policy)[-c.keep :]
    oldest = DEPTH[policies[0]] if "retire_kept" not in c.off else DEPTH[x.policy]
    return w._replace(kept=(x.epoch, policies), buffer=retire(w.buffer, oldest))


def start(
    c: Bounds, w: World, policy: int, k: int, others: tuple[Learner, ...], fault: bool
) -> World:
    """A learner's new life from a checkpoint: hello, welcome, and the directory is its own."""
    epoch = w.epochs + 1
    w = w._replace(epochs=epoch, faults=w.faults - fault)
    b = on_hello(c, w.buffer, epoch, policy, k)
    need(
        b is not None,
        "I5",
        f"a learner that resumes from version {DEPTH[policy]} is fenced for good",
    )
    assert b is not None
    kept = tuple(p for p in w.kept[1] if w.buffer.base <= DEPTH[p] <= DEPTH[policy])
    return w._replace(
        buffer=b,
        learners=(*others, Learner(epoch, k, policy, (), DEPTH[policy])),
        kept=(epoch, kept or (policy,)),
    )


def kill_generator(c: Bounds, w: World, i: int) -> World:
    """It comes back empty; its new session ends its leases."""
    w = w._replace(faults=w.faults - 1)
    if "reissue" not in c.off:
        w = w._replace(buffer=end_leases(w.buffer, lambda g: g.lease[1] == i))
    w = w._replace(mail=frozenset(x for x in w.mail if x[1] != i))
    new = {"weights": (), "held": (), "out": frozenset(), "taken": 0}
    return with_gen(w, i, session=w.gens[i].session + 1, **new)


def expire(c: Bounds, w: World, ticket: int, fault: bool) -> World:
    return w._replace(
        buffer=end_leases(w.buffer, lambda g: g.ticket == ticket), faults=w.faults - fault
    )


def idle_lease(c: Bounds, w: World, g: Group) -> bool:
    """Nobody works on it any more: it ends by itself, without a fault."""
    attempt, i, session, _ = g.lease
    mine = w.gens[i]
    if c.mail:
        return bool(mine.session != session)
    busy = any(h[:2] == (g.ticket, attempt) for h in mine.held) or any(
        (m[2][0], m[2][2]) == (g.ticket, attempt) for m in mine.out | w.net
    )
    return mine.session != session or not busy


def steps(c: Bounds, w: World) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """(action and arguments, is it a fault?) of everything that may happen now."""
    b, free = w.buffer, grantable(c, w.buffer)
    for i, g in enumerate(w.gens):
        # those that wait to be adopted take no place: else none might come that adopts them
        full = sum(not parked(g, h) for h in g.held) >= c.slots
        if free is not None and not full and (not c.mail or on_way(w, "tickets", i) < c.mail):
            yield (grant, i), False
        if g.weights != newest(c, w) and (
            not g.weights or newest(c, w)[0] >= g.weights[0] or "lineage" in c.off
        ):
            yield (load, i), False
        for h in g.held:
            if may_begin(c, g, h):
                yield (begin, i, h), False
            elif h[4] and c.sessions:
                for j in range(c.gens):
                    if may_finish(c, w.gens[j], h):
                        yield (finish, i, h, j), False
            elif h[4]:
                yield (finish, i, h), False
        for m in g.out - w.net:
            yield (resend, m), False
    if c.mail:
        yield from mail_steps(c, w)
    for m in w.net:
        yield (deliver, m, False), False
        if w.faults and "double" in c.kinds:
            yield (deliver, m, True), True
        if w.faults and "lose" in c.kinds:
            yield (lose, m), True
    for x in w.learners:
        yield from learner_steps(c, w, x)
    for g2 in b.groups:
        if g2.lease and "reissue" not in c.off and idle_lease(c, w, g2):
            yield (expire, g2.ticket, False), False
        elif g2.lease and w.faults and "slow" in c.kinds:
            yield (expire, g2.ticket, True), True
    if w.faults:
        for i in range(c.gens):
            if "gen" in c.kinds:
                yield (kill_generator, i), True
        for p, k in itertools.product(w.kept[1] if "older" in c.kinds else w.kept[1][-1:], c.k):
            if "learner" in c.kinds:
                yield (start, p, k, (), True), True
            if "second" in c.kinds and len(w.learners) == 1:
                yield (start, p, k, w.learners, True), True
    if not w.learners:
        yield (start, w.kept[1][-1], c.k[0], (), False), False


def on_way(w: World, kind: str, i: int) -> int:
    return sum(x[:2] == (kind, i) for x in w.mail)


def mail_steps(c: Bounds, w: World) -> Iterator[tuple[tuple[Any, ...], bool]]:
    for i in range(c.gens):
        leased = any(g.lease and g.lease[1] == i for g in w.buffer.groups)
        if leased and on_way(w, "renewal", i) < c.mail:  # else none can be freed
            yield (renew, i), False
    for letter in w.mail:
        kind, i = letter[:2]
        if kind == "tickets":
            yield (take, letter), False
            if w.faults and "unheard" in c.kinds:
                yield (tickets_lost, letter), True
        elif kind == "heard":
            late = overtakes(w, letter)
            if not late or (w.faults and "unheard" in c.kinds):
                yield (hear, letter, late), late
        elif on_way(w, "heard", i) < c.mail:
            yield (answer, letter), False


def learner_steps(c: Bounds, w: World, x: Learner) -> Iterator[tuple[tuple[Any, ...], bool]]:
    old = x.epoch < w.buffer.epoch and "fencing" not in c.off
    number = DEPTH[x.policy] + len(x.queue)
    if number < c.steps and len(x.queue) <= c.prefetch:
        if old:
            yield (lambda c, w, x: fenced(w, x), x), False
        else:
            for way, (b, batch) in enumerate(on_ask(c, w.buffer, number)):
                if batch or b != w.buffer:
                    yield (ask, x, way), False
    if x.queue:
        yield (train, x), False
    if x.told < DEPTH[x.policy]:
        for to in [k for k in c.moves if k <= x.k and not old] or [-1]:
            yield (commit, x, to) if to >= 0 else (commit, x), False
    elif x.epoch == w.kept[0] and not old and DEPTH[x.policy] > DEPTH[w.kept[1][-1]]:
        yield (checkpoint, x), False


def initial(c: Bounds) -> World:
    b = on_hello(c, Buffer(), 1, 0, c.k[0])
    assert b is not None
    return World(
        b, (Generator(),) * c.gens, (Learner(1, c.k[0], 0),), (1, (0,)), frozenset(), c.faults
    )


def apply(c: Bounds, w: World, action: tuple[Any, ...]) -> World:
    return action[0](c, w, *action[1:])


def over(c: Bounds, w: World) -> bool:
    return w.buffer.committed == c.steps and any(x.told == c.steps for x in w.learners)


class Violation(NamedTuple):
    what: str
    trace: list[str]


def search(c: Bounds, most: int = 1_000_000) -> tuple[int, Violation | None]:
    """All states within the bounds, breadth first: (how many, the shortest first violation)."""
    first = initial(c)
    index, worlds, came = {first: 0}, [first], [(-1, "")]
    back: list[list[int]] = [[]]  # edges that are no faults, backwards
    todo, ends = deque([0]), []
    while todo:
        at = todo.popleft()
        w = worlds[at]
        if over(c, w):
            ends.append(at)
            continue
        action: tuple[Any, ...] = (steps,)
        try:
            after = []
            for action, fault in steps(c, w):
                after.append((action, fault, apply(c, w, action)))
        except Broken as e:
            return len(worlds), Violation(str(e), [*trace(came, at), name(action)])
        for action, fault, new in after:
            to = index.get(new)
            if to is None:
                to = index[new] = len(worlds)
                worlds.append(new)
                came.append((at, name(action)))
                back.append([])
                todo.append(to)
                if to >= most:
                    raise RuntimeError(f"more than {most} states")
            if not fault:
                back[to].append(at)
    good, front = set(ends), list(ends)
    while front:
        for at in back[front.pop()]:
            if at not in good:
                good.add(at)
                front.append(at)
    stuck = next((n for n in range(len(worlds)) if n not in good), None)
    return len(worlds), None if stuck is None else Violation(
        "I5: from here the end cannot be reached", trace(came, stuck)
    )


def name(action: tuple[Any, ...]) -> str:
    return " ".join(
        [
            action[0].__name__.replace("<lambda>", "fenced"),
            *(str(x) for x in action[1:] if not isinstance(x, Learner)),
        ]
    )


def trace(came: list[tuple[int, str]], at: int) -> list[str]:
    out: list[str] = []
    while at > 0:
        at, what = came[at]
        out.insert(0, what)
    return out


RUNS: tuple[dict[str, Any], ...] = (
    {"k": (0,)},
    {"k": (1,)},
    {"k": (0,), "gens": 2},
    {"k": (0,), "batch": 2},
    {"k": (0,), "group": 2, "filtered": (0,)},
    {"k": (1, 0), "kinds": "learner older", "keep": 2},
    {"k": (1,), "prefetch": 1, "kinds": "gen second"},
    {"k": (0, 1), "same": True, "kinds": "learner"},
    {"k": (1, 0), "moves": (0, 1), "kinds": "learner slow"},
    {"k": (1, 0), "kinds": "learner slow", "sessions": True},
    {"k": (2, 0), "moves": (0, 2), "kinds": "learner slow", "sessions": True},
    {"k": (0,), "kinds": "unheard", "mail": 2},
    {"k": (0,), "kinds": "unheard gen", "mail": 1},
    {"k": (0,), "kinds": "unheard learner", "mail": 1},
)
LARGE: tuple[dict[str, Any], ...] = (
    {"k": (0,), "faults": 2},
    {"k": (1,), "group": 2},
    {"k": (1, 0), "kinds": "learner older second", "keep": 2, "steps": 3},
    {"k": (1, 0), "kinds": "learner", "steps": 3, "refiltered": (1,)},
    {"k": (1,), "slots": 2, "kinds": "gen slow"},
    {"k": (1, 0), "moves": (0, 1), "kinds": "learner slow", "steps": 3},
    {"k": (1, 0), "kinds": "learner slow", "sessions": True, "gens": 2},
    {"k": (0,), "kinds": "learner slow", "sessions": True, "group": 2, "steps": 3},
    {"k": (2,), "moves": (0, 2), "kinds": "learner", "sessions": True, "gens": 2},
    {"k": (1,), "kinds": "unheard", "mail": 2},
    {"k": (0,), "kinds": "unheard", "mail": 1, "gens": 2, "faults": 2},
)
# rule -> (invariant that breaks without it, bounds that show it)
OFF: dict[str, tuple[str, dict[str, Any]]] = {
    "ticket_order": ("I1", {"faults": 0, "gens": 2, "slots": 2, "steps": 4}),
    "count_leased": ("I1", {"k": (0,), "faults": 0}),
    "reissue_paced": ("I1", {"k": (1, 0), "kinds": "learner", "steps": 3, "slots": 2}),
    "announced_room": ("I1", {"moves": (0, 1), "faults": 0, "slots": 2}),
    "min_version": ("I1", {"k": (0,), "faults": 0}),
    "epoch_tickets": ("I1", {"k": (0,), "kinds": "learner"}),
    "later_calls": ("I1", {"k": (0,), "faults": 0, "sessions": True, "gens": 2}),
    "adopted": ("I1", {"k": (0,), "kinds": "learner", "sessions": True}),
    "own_epoch": ("I1", {"k": (2,), "moves": (0, 2), "kinds": "learner", "sessions": True}),
    "orphans": ("I1", {"k": (1, 0), "kinds": "learner", "steps": 3}),
    "filter_leaves": ("I5", {"k": (0,), "faults": 0, "group": 2, "filtered": (0,)}),
    "filter_once": ("I4", {"k": (1, 0), "kinds": "learner", "steps": 3, "refiltered": (1,)}),
    "lineage": ("I9", {"k": (0,), "kinds": "learner"}),
    "announce": ("I9", {"faults": 0}),
    "dedupe": ("I6", {"k": (0,), "kinds": "double"}),
    "attempts": ("I6", {"k": (0,), "kinds": "slow"}),
    "redelivery": ("I6", {"k": (0,), "kinds": "lose"}),
    "reissue": ("I5", {"k": (0,), "kinds": "gen"}),
    "hello_truth": ("I9", {"k": (0,), "kinds": "learner"}),
    "fencing": ("I9", {"kinds": "second"}),
    "retire_kept": ("I5", {"kinds": "learner older", "steps": 3, "keep": 2}),
    "unheld": ("I5", {"k": (0,), "kinds": "unheard", "mail": 1}),
    "taken": ("I10", {"k": (0,), "faults": 0, "mail": 1}),
    "forgo": ("I10", {"k": (0,), "kinds": "unheard", "mail": 1}),
    "written": ("I10", {"k": (0,), "faults": 0, "mail": 1}),
}


def main(words: list[str]) -> int:
    bad = 0
    if words[:1] == ["table"]:
        for rule, (invariant, more) in OFF.items():
            _, found = search(Bounds(off=frozenset([rule]), **more))
            bad += found is None or not found.what.startswith(invariant)
            print(
                f"{rule:14} {found.what if found else 'nothing breaks'} "
                f"({len(found.trace) if found else 0} steps)"
            )
            print(
                "".join(f"    {x}\n" for x in found.trace if found)
                if words[1:] == [rule] and found
                else "",
                end="",
            )
        return bad
    for more in RUNS if words[:1] != ["large"] else LARGE:
        began = time.monotonic()
        states, found = search(Bounds(**more), 5_000_000)
        bad += found is not None
        print(
            f"{states:9,} states {time.monotonic() - began:6.1f} s  "
            f"{found or 'all invariants hold'}  {more}",
            flush=True,
        )
    return bad


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
