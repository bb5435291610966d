"""Which session holds a name: random lives of generators, clocks and late frames."""

import random
from dataclasses import dataclass

from buffer.sessions import CLAIMS, ENDED, FORGET, MARGIN_S, NAMES, PeerSessions

SILENT_S = 20.0


@dataclass
class Life:
    """A process: it speaks twice a second while it lives; frames may arrive late, all at once."""

    token: int
    born: float
    ends: float
    told: str = ""  # "refused" or "over": it leaves
    spoke: float = -1.0


def play(seed: int) -> tuple[int, int]:
    """One schedule of lives of one name; returns (takeovers, refusals).  A token is a clock's
    reading that may be set back."""
    r = random.Random(seed)
    s, now, holder = PeerSessions(SILENT_S), 0.0, None
    lives: list[Life] = []
    tokens = iter(r.sample(range(1000), 200))
    takeovers = refusals = 0
    for _ in range(600):
        now += 0.25
        live = [x for x in lives if x.ends > now and not x.told]
        if len(live) < 2 and r.random() < (0.3 if not live else 0.03):
            lives.append(Life(next(tokens), now, now + r.choice((2.0, 10.0, 60.0))))
        # the last frame of a dead one
        late = [x for x in lives if x.ends <= now] if r.random() < 0.05 else []
        for x in [y for y in live if now - y.spoke >= 0.5] + late[-1:]:
            # known on the same machine only
            gone = r.random() < 0.7 and holder is not None and holder.ends <= now
            before, x.spoke = holder, now
            said = s.on_message("g", x.token, now, holder_ended=gone)
            if said == "new":
                takeovers += before is not None
                alive = (
                    before is not None
                    and before.ends > now
                    and not before.told
                    and now - before.spoke <= SILENT_S
                )
                assert not alive or x is before, f"{x} took the name from {before}, which is alive"
                holder = x
            elif said == "refused":
                refusals += 1
                assert before is not None and before.spoke > x.born, (
                    f"{x} is refused, and nobody else was heard of"
                )
                x.told = said
            elif said == "over":
                assert x is not holder
                x.told = said
            assert (said in ("new", "holds")) == (x is holder)
            assert s.names["g"].token == (holder.token if holder else None)
        waiting = [
            x
            for x in lives
            if x.ends > now and not x.told and x is not holder and now - x.born > SILENT_S + 1
        ]
        assert (
            not waiting or holder is None or holder.ends > now or now - holder.ends <= SILENT_S + 1
        ), "a live one waits, and the holder is long dead"
    return takeovers, refusals


def test_a_live_holder_keeps_its_name_and_a_dead_one_is_replaced() -> None:
    seen = [play(seed) for seed in range(400)]
    assert sum(x for x, _ in seen) > 400 and sum(y for _, y in seen) > 100  # both happen


def test_one_burst_of_late_frames_does_not_prove_a_life() -> None:
    s = PeerSessions(SILENT_S)
    assert s.on_message("g", 1, 0.0) == "new" and s.on_message("g", 2, 5.0) == "waits"
    for _ in range(50):
        assert s.on_message("g", 1, 5.0 + MARGIN_S) == "holds"  # of a dead one, all at once
    assert s.on_message("g", 2, 5.5 + MARGIN_S) == "waits"
    assert s.on_message("g", 1, 5.0 + 2 * MARGIN_S) == "holds"
    assert s.on_message("g", 2, 5.5 + 2 * MARGIN_S) == "refused"


def test_who_leaves_frees_the_name_at_once_and_for_good() -> None:
    s = PeerSessions(SILENT_S)
    assert s.on_message("g", 1, 0.0) == "new" and not s.end_session("g", 2)
    assert s.end_session("g", 1) and s.names["g"].token is None
    assert s.on_message("g", 1, 0.1) == "over" and s.on_message("g", 2, 0.2) == "new"
    assert s.end_session("nobody", 7) and s.is_over("g", 1) and not s.is_over("nobody", 1)


def test_memory_is_bounded_whatever_is_said() -> None:
    s = PeerSessions(SILENT_S)
    for n in range(2 * NAMES):
        assert s.on_message(f"g{n}", 1, 0.0) == ("new" if n < NAMES else "full")
    for n in range(1000):
        s.on_message("g0", n, 0.0)
    for n in range(1000):
        s.on_message("g1", n, 0.0, holder_ended=True)
    assert len(s.names["g0"].claims) <= CLAIMS and len(s.names["g1"].ended) <= ENDED
    assert len(s.forget(FORGET * SILENT_S + 1)) == NAMES and not s.names
