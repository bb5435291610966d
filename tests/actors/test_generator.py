"""The generator's loop with its buffer and its engine played by hand: what a frame makes it do, and
what it says when it ends."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from generator_kit import (
    CONNECT_S,
    ROOT,
    STARTUP_S,
    Engine,
    Wire,
    announcement,
    make,  # noqa: F401
    one_pass,
    ticket,
    tickets,
)
from process_kit import until

from actors import generator
from actors.delivery import estimate_size
from actors.engine import Completion
from actors.generator import Generator
from actors.rewards import RewardResult
from actors.schedule import LeasedTicket, TicketSchedule
from actors.turn import (
    EVERYTHING,
    GeneratorTurn,
    PromptTooLong,
    ScoredResponse,
    build_failed_trajectory,
    build_trajectory,
    count_samples_to_request,
)
from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.errors import (
    AsyncrlError,
    NotFiniteError,
    NothingToDo,
    PeerUnreachable,
    ProtocolError,
)
from asyncrl.contract.messages import (
    RewardFailure,
    SamplingSettings,
    Ticket,
    TrainingSequence,
    Trajectory,
    VersionSpan,
)
from asyncrl.contract.versions import Label
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.records import trace

MakeGenerator = Callable[..., Generator]
SPAN = m.VersionSpan(Label(1, 0), "d", 0, 2, Label(1, 0))


def told(g: Generator, *heard: m.FromBuffer) -> m.LeaseRenewal:
    """What it says of itself after one pass."""
    g.renewed = 0.0
    one_pass(g, *heard)
    return next(x for x in reversed(g.socket.said) if isinstance(x, m.LeaseRenewal))


def end_answers(g: Generator, *keys: tuple[int, int, int]) -> None:
    """These rows of the engine end, with two tokens each."""
    for key in keys:
        prompt, logprobs = g.engine.rows.pop(key).prompt, np.zeros(2, np.float32)
        tokens = np.zeros(2, np.int32)
        ended = Completion(key, prompt, tokens, logprobs, [SPAN], "length", support=None)
        g.accept_completion(ended)


def test_an_outdated_attempt_takes_nothing_from_the_next_one(make: MakeGenerator) -> None:
    """The learner dies while an answer is written and comes back; the ticket's second attempt comes
    before the first one is dropped."""
    g, began = make(), time.monotonic()
    one_pass(g, tickets(g, announcement(1), ticket(0, 1, epoch=1)))
    assert set(g.engine.rows) == {(0, 0, 1), (0, 1, 1)}
    one_pass(g, tickets(g, announcement(2), ticket(0, 2, epoch=2)))
    assert g.engine.aborted == [(0, 0, 1), (0, 1, 1)] and g.engine.loads == [(1, 0), (2, 0)]
    assert g.engine.given == ({}, "d2.0", b"")
    assert g.usage.swaps == 2 and 0 < g.usage.swap_s < time.monotonic() - began
    rows = g.engine.rows
    assert set(rows) == {(0, 0, 2), (0, 1, 2)} and all(len(r.prompt) == 3 for r in rows.values())


def test_answers_that_wait_for_their_reward_keep_their_lease(
    make: MakeGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewed is what is written and being judged; not what has a row in the engine, ever."""
    (tmp_path / "gated.py").write_text(
        "import os, time\ndef reward(prompt, text):\n    while not os.path.exists('open'): "
        "time.sleep(0.01)\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    # nobody takes the thread that feeds the reward processes for stuck when it is only not running
    monkeypatch.setattr("actors.rewards.STUCK_S", 1e9)
    monkeypatch.setattr("asyncrl.transport.worker_pool.GRACE_S", 600.0)
    g = make("reward.function='gated:reward'")
    said = g.socket.said
    one_pass(g, tickets(g, announcement(1), ticket(0, 1, epoch=1), ticket(1, 2, epoch=1)))

    end_answers(g, (0, 0, 1), (0, 1, 1), (1, 0, 2))
    renew = told(g)
    # ticket 1 has a row in the engine
    assert renew.judging == [(0, 1)] and [p[:2] for p in renew.progress] == [(1, 2)]
    assert renew.stats["reward/queue"] == 3 and renew.stats["reward/workers"] == 1
    assert not renew.waiting and g.rewards.pool.log == f"; reward.log: {g.run_dir / 'reward.log'}"
    end_answers(g, (1, 1, 2))
    renew = told(g)
    assert renew.judging == [(0, 1), (1, 2)] and renew.waiting.what == m.REWARDS_WAITED_FOR
    monkeypatch.setattr(type(g.rewards), "is_working", property(lambda self: False))
    assert told(g).judging == [], "nobody sees to their end"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open").touch()
    until(lambda: not g.unscored or one_pass(g))
    assert told(g).judging == [] and told(g).stats["reward/judged"] == 4
    assert told(g).stats["generator/reward_idle_s"] > 0
    assert {"link/acked", "link/fetch_s"} < set(told(g).stats)
    assert sum(len(x.samples) for x in said if isinstance(x, m.Delivery)) == 4


def test_what_was_granted_and_has_not_come_is_forgone_and_said_to_be(make: MakeGenerator) -> None:
    """It names all that it has, wherever that is, and the attempt up to which that is all."""
    g = make()
    granted = [ticket(n, n + 1, epoch=1, samples=1) for n in range(3)]
    one_pass(g, tickets(g, announcement(1), *granted))

    end_answers(g, (0, 0, 1), (1, 0, 2))
    g.rewards.poll = list
    renew = told(g)
    assert (renew.taken, renew.written) == (3, [(0, 1), (1, 2)])
    assert [name[:2] for name in renew.progress] == [(2, 3)]
    written = g.unscored.pop((0, 0, 1))
    refused = PromptTooLong(written.ticket, (0, 0, 1), m.RewardFailure("data", "no"))
    g.outbox.add(build_failed_trajectory(refused, Label(1, 0), "d"))
    assert told(g).written == [(0, 1), (1, 2)]  # fresh, then sent, and not acknowledged
    g.outbox.fresh_since = -1.0  # it has waited for company
    assert told(g).written == [(0, 1), (1, 2)] and g.outbox.sent and not g.outbox.fresh
    acks = m.DeliveryAcks(g.session, [(0, 0, 1, "failed")], 1 << 20, None)
    assert told(g, acks).written == [(1, 2)]
    assert told(g, m.HeartbeatReply(1, None, attempts=5)).taken == 5
    renew = told(g, tickets(g, None, ticket(4, 5, epoch=1), ticket(5, 6, epoch=1)))
    assert set(g.schedule.held) == {(2, 3), (5, 6)} and renew.taken == 6
    assert told(g, m.HeartbeatReply(1, None, attempts=2)).taken == 6  # a late one


def test_the_timeline_has_loads_and_prefills(make: MakeGenerator) -> None:
    g = make()
    one_pass(g, tickets(g, announcement(1), ticket(0, 1, epoch=1, samples=2)))
    asked = [x for x in g.socket.said if isinstance(x, m.TicketRequest)]
    assert asked[-1].holding == Label(1, 0), "the live view shows the weights of each generator"
    assert (asked[-1].producer, asked[-1].session) == (g.producer, g.session)
    g.send_ticket_request(1, None)
    assert g.socket.said[-1].sequence == asked[-1].sequence + 1
    for late, requested in ((1, 3), (0, 0)):
        g.requested_samples = 3
        g.receive = Mock(return_value=[m.TicketGrant(g.session, g.want_sequence - late, [], None)])
        g.read_replies(0.25)
        g.receive.assert_called_with(0.25)
        assert g.requested_samples == requested, "a reply to an earlier request answers none"
    g.tracer.close()
    spans = trace.read_sized_spans(g.run_dir)["generator-0"]
    loads = [(x.name, x.size) for x in spans if x.name in ("weights", "prefill")]
    assert loads == [("weights", 0), ("prefill", 2)]


def test_who_waits_for_rewards_waits_for_a_part_of_itself(
    make: MakeGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    g = make()
    g.set_wait(m.REWARDS_WAITED_FOR)
    wait = g.current_wait(time.monotonic() + 9)
    assert wait is not None and wait.on == "generator-0-rewards" and wait.is_internal
    g.set_wait("a ticket")
    wait = g.current_wait(time.monotonic() + 9)
    assert wait is not None and wait.on == "buffer" and not wait.is_internal
    g.socket.inbox.append(m.HeartbeatReply(1, cause="the buffer is full"))
    g.read_replies(0.0)
    g.waiting_since -= 99
    g.renew()
    expected = "has waited for the buffer at ipc:///nowhere for 99 s: a ticket: the buffer is full"
    assert expected in capsys.readouterr().err and g.socket.said[-1].waiting.what == "a ticket"
    g.set_wait("weights 1.0")
    g.waiting_since -= 99
    g.renew_now()
    expected = expected.replace("a ticket: the buffer is full", "weights 1.0")
    assert expected in capsys.readouterr().err


def test_requests_renewals_and_greetings_go_by_the_clock(
    make: MakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    g, now = make(), 1000.0
    monkeypatch.setattr("actors.ticket_holder.time.monotonic", lambda: now)
    assert (g.over, g.ending, g.unread, g.requested_samples) == (False, False, (0.0, 0.0), 0)
    g.set_wait("")
    said = g.socket.said
    steps = ((0, 0, False), (0, 1, True), (0, 1, False), (1, 1, False), (1.5, 1, True))
    for passed, samples, sent in (*steps, (1.5, 3, True), (1.6, 2, False), (9, 0, False)):
        now = 1000.0 + passed
        said.clear()
        g.request_tickets(samples, None)
        assert [x.samples for x in said] == [samples] * sent
    g.greet()
    for passed, kinds in ((0.4, ""), (0.5, "L"), (5.0, "L"), (5.1, ""), (5.5, "GL"), (6.0, "L")):
        now = 1009.0 + passed
        g.renewed = max(g.renewed, 1009.0)
        said.clear()
        g.renew()
        assert "".join(type(x).__name__[0] for x in said) == kinds
    acks = m.DeliveryAcks(g.session, [], 9, announcement(1, 1))
    for reply in (acks, m.HeartbeatReply(1, announcement(1, 2)), tickets(g, announcement(1, 3))):
        g.socket.inbox.append(reply)
        g.read_replies(0.0)
        assert g.schedule.announced == reply.announcement


def test_a_failed_reward_ends_a_run_that_is_to_stop(
    make: MakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = make("reward.on_error='stop'")
    monkeypatch.setattr(generator, "build_trajectory", lambda *given: given)
    g.outbox = Mock()
    good = ("response", SimpleNamespace(failed=""))
    g.turn.poll_results = lambda: [good]
    g.collect()
    g.outbox.add.assert_called_once_with(good)
    response = SimpleNamespace(ticket=SimpleNamespace(prompt=SimpleNamespace(id=7)))
    g.turn.poll_results = lambda: [(response, SimpleNamespace(failed="it raised"))]
    said = r"^the reward function failed on prompt 7: it raised \(reward\.on_error = stop\)$"
    with pytest.raises(AsyncrlError, match=said):
        g.collect()


def test_it_waits_for_replies_only_while_no_row_is_live(make: MakeGenerator) -> None:
    g = make("reward.function='of_nowhere:reward'", "reward.workers=0")
    waited: list[float] = []
    g.read_replies = waited.append
    g.read()
    g.unscored[1, 0, 1] = None
    g.read()
    g.engine.rows[1, 0, 1] = None
    g.read()
    assert waited == [0.02, 0.002, 0.0]


def test_one_that_draws_calls_forgoes_none_and_says_nothing_of_tickets(
    make: MakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are numbered by itself: what the buffer has granted is the gateway's business."""
    g = make("agent.env='none:None'")
    assert g.calls is not None and g.calls.socket.run == g.run
    g.calls.close()
    waited: list[Any] = []
    monkeypatch.setattr("actors.generator.wait", lambda *given: waited.append(given))
    monkeypatch.setattr(g.calls, "read", lambda: None)
    g.socket.inbox.append(m.HeartbeatReply(1, None, attempts=5))
    g.read()
    assert waited == [([g.socket, g.calls.socket], [], 0.02)] and g.schedule.newest_attempt == 0
    g.schedule.newest_attempt = 3
    g.renew()
    assert g.socket.said[-1].taken == 0


def test_a_slow_engine_makes_fewer_steps_in_a_call(
    make: MakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are renewed between two calls; in lockstep a call's steps must not hang on time."""
    for sets, expected in (((), [8, 4, 2, 1, 1, 2, 3]), (("staleness.max_lag=0",), [8] * 7)):
        g = make(*sets)
        one_pass(g, tickets(g, announcement(1), ticket(0, 1, epoch=1)))
        clock, made, slow = [0.0], [], [4.0, 4.0, 4.0, 4.0, 0.1, 0.1, 0.1]
        g.steps = 8
        g.idle_since = g.usage.busy_s = 0.0
        total, accepted = sum(slow), []

        def step(
            n: int, g: Any = g, clock: Any = clock, made: Any = made, slow: Any = slow
        ) -> list[Completion]:
            made.append(n)
            g.engine.steps_made += n
            clock[0] += slow.pop(0)
            return [SimpleNamespace(tokens=np.zeros(3, np.int32))]

        monkeypatch.setattr(g, "accept_completion", accepted.append)
        monkeypatch.setattr(g.engine, "step", step)
        monkeypatch.setattr("actors.generator.time.monotonic", lambda clock=clock: clock[0])
        while slow:
            g.decode()
        monkeypatch.undo()
        assert made == expected and g.usage.busy_s == pytest.approx(total)
        assert g.make_renewal(None).stats["generator/tokens"] == 3 * len(accepted) == 3 * len(made)
        g.tracer.close()
        calls = trace.read_sized_spans(g.run_dir)[g.producer][-len(made) :]
        assert [(x.name, x.size, x.steps) for x in calls] == [("decode", 2, n) for n in made]


def test_told_to_end_it_says_what_it_drew_and_that_its_leases_are_free(make: MakeGenerator) -> None:
    g = make()
    one_pass(g, tickets(g, announcement(1), ticket(0, 1, epoch=1)))
    said = g.socket.said
    del said[:]
    g.ending = True
    g.loop()
    g.close()
    *_, renew, leaving = said
    # 3 tokens of each of two answers: lost, and counted
    assert isinstance(renew, m.LeaseRenewal) and renew.progress == [(0, 1, 6)]
    assert renew.stats["prefix/hits"] == 4.0 and "generator/tokens" in renew.stats
    assert leaving == m.GeneratorGoodbye(g.producer, g.session) and g.socket.closed


@pytest.mark.parametrize("is_over", [True, False])
def test_an_engine_is_built_on_its_own_gpu(is_over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    config: Any = SimpleNamespace(generator=SimpleNamespace(gpus=[4, 5]))
    made = Mock(usage=SimpleNamespace(tokens=12.4))
    made.run_until_signal.return_value = is_over
    monkeypatch.setattr(generator, "bind", lambda *given: seen.append(given))
    monkeypatch.setattr(generator, "build_engine", lambda given: [given])
    monkeypatch.setattr(generator, "Generator", lambda *given: seen.append(given) or made)
    assert generator.main(config, Path("run"), 1) is is_over
    assert seen == [([4, 5], 1, "generator.gpus"), (config, Path("run"), 1, [config])]
    made.run_until_signal.assert_called_once_with(made.loop)
    made.log_change.assert_called_once_with("ended after 12 tokens")


def test_told_that_the_run_is_over_it_ends_without_a_word(make: MakeGenerator) -> None:
    """Nobody waits for it any more; a buffer that has gone would make it wait for nothing."""
    g = make()
    one_pass(g, tickets(g, announcement(1)))
    del g.socket.said[:]
    g.socket.inbox.append(tickets(g, announcement(1), finished=True))
    g.loop()
    g.close()
    assert [type(x) for x in g.socket.said] == [m.GeneratorHello] and g.engine.closed


def end_run(run_dir: Path, steps: int) -> None:
    """What the buffer and the learner of a run leave at its end."""
    (run_dir / "buffer_summary.json").write_text(f'{{"finished": true, "steps": {steps}}}')
    (run_dir / "weights_digest").write_text("d")


@pytest.mark.parametrize("how", ["by the buffer", "by the files of its end"])
def test_one_that_comes_after_the_end_says_so(make: MakeGenerator, how: str) -> None:
    g = make("learner.steps=9")
    if how == "by the buffer":
        g.socket.inbox.append(tickets(g, announcement(1), finished=True))
    else:
        end_run(g.run_dir, 9)
        g.silent_since = time.monotonic() - 3
    with pytest.raises(
        NothingToDo, match=r"has ended, all its 9 steps are made: generator-0 came too late"
    ):
        g.loop()
    g.close()
    assert not any(isinstance(x, m.GeneratorGoodbye) for x in g.socket.said)


def test_one_that_was_not_told_ends_by_the_files_of_the_end(make: MakeGenerator) -> None:
    """The buffer has told the end for its five seconds, and gone, while this one decoded."""
    g = make("learner.steps=9")
    one_pass(g, tickets(g, announcement(1)))
    end_run(g.run_dir, 8)  # of a shorter run, which goes on
    g.silent_since = time.monotonic() - 3
    one_pass(g)
    assert not g.over
    end_run(g.run_dir, 9)
    g.loop()
    assert g.over


def test_weights_of_a_gone_learner_are_waited_for_or_others_announced(make: MakeGenerator) -> None:
    g = make()
    g.weights.missing = {1}
    g.socket.inbox.append(tickets(g, announcement(1), ticket(0, 1, epoch=1)))
    for _ in range(3):
        one_pass(g)
    since = g.waiting_since
    assert g.missing is not None and "weights 1.0, which are unavailable" in g.waiting_for
    assert "ring_1/manifest" in g.waiting_for
    one_pass(g)
    assert g.waiting_since == since  # one wait, whose age grows, and not a new one in each pass
    # longer than wires.connect_s, shorter than a start may take
    g.missing_since = time.monotonic() - CONNECT_S - 1
    one_pass(g)
    one_pass(g, tickets(g, announcement(2), ticket(0, 2, epoch=2)))
    assert g.missing is None and g.engine.loads == [(2, 0)] and g.engine.active == 2


def test_a_version_is_pulled_by_the_digest_of_its_announcement(make: MakeGenerator) -> None:
    """Other weights under its label are never loaded; of another version no digest is known."""
    g = make()
    asked: list[tuple[Label, str | None]] = []

    def pull(source: m.WeightsSource, label: Label, digest: str | None) -> Any:
        asked.append((label, digest))
        return None if digest == "d1.0" else ({}, digest or "of the ring", b"")

    g.weights.pull = pull
    one_pass(g, tickets(g, announcement(1), ticket(0, 1, epoch=1)))
    assert asked == [(Label(1, 0), "d1.0")] and g.loaded is None and g.lacks_weights
    assert not g.engine.loads and "weights 1.0" in g.waiting_for
    said = announcement(1, 3)
    assert g.pull(said, Label(1, 3)) == ({}, "d1.3", b"")
    assert g.pull(said, Label(1, 2)) == ({}, "of the ring", b"")
    assert asked[1:] == [(Label(1, 3), "d1.3"), (Label(1, 2), None)]


@pytest.mark.parametrize("ring", ["not announced", "gone"])
def test_a_dead_learners_tickets_go_when_the_next_is_heard(make: MakeGenerator, ring: str) -> None:
    """It asks for no ticket and delivers nothing: only the answer to its renewals can tell it."""
    g = make()
    g.weights.missing = {1}
    full = [ticket(n, n + 1, epoch=1) for n in range(4)]  # two samples each, eight rows
    g.socket.inbox.append(tickets(g, announcement(1) if ring == "gone" else None, *full))
    for _ in range(2):
        one_pass(g)
    assert g.schedule.count_waiting() == g.engine.slots and not g.engine.active
    said = g.socket.said
    del said[:]
    one_pass(g, m.HeartbeatReply(2, announcement(2)))
    assert not g.schedule.held and g.engine.loads == [(2, 0)]
    assert any(isinstance(x, m.TicketRequest) for x in said)


def test_weights_that_stay_gone_end_a_generator_of_its_own_and_never_a_supervised_one(
    make: MakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(g: Generator) -> None:
        g.weights.missing = {1}
        one_pass(g, tickets(g, announcement(1)))
        assert g.missing is not None
        g.missing_since = time.monotonic() - STARTUP_S - 1
        one_pass(g)

    with pytest.raises(
        PeerUnreachable,
        match=r"weights 1\.0 have been unavailable for 7\d\d\d s: .*is the learner running",
    ):
        gone(make())
    monkeypatch.setenv("ASYNCRL_SUPERVISED", "1")
    gone(make())


def test_a_silent_buffer_is_given_up_and_one_that_answers_is_not(make: MakeGenerator) -> None:
    g = make()
    one_pass(g)
    assert g.silent_since  # its renewals are answered, so silence has a beginning
    g.silent_since = silent = g.silent_since - CONNECT_S - 1
    one_pass(g, m.HeartbeatReply(0))
    assert not g.silent_since or g.silent_since > silent
    assert g.waiting_for == "the learner: no weights have been announced yet"
    g.request(m.LeaseRenewal(g.producer, g.session, [], {}, None))
    g.silent_since -= CONNECT_S + 1
    with pytest.raises(
        PeerUnreachable, match=r"has not answered for 5\d\d\d s \(wires.connect_s\)"
    ):
        one_pass(g)


def test_a_buffer_found_elsewhere_is_greeted_and_asked_anew(make: MakeGenerator) -> None:
    g = make()
    one_pass(g)
    wire: Wire = g.socket
    first = [type(x).__name__ for x in wire.said]
    wire.said.clear()
    g.silent_since -= CONNECT_S + 1  # the one before would be given up
    wire.moved = True
    one_pass(g)
    again = [type(x).__name__ for x in wire.said]
    assert again[0] == "GeneratorHello" and "TicketRequest" in first and "TicketRequest" in again
    assert time.monotonic() - g.silent_since < CONNECT_S


AT = Label(1, 2)
SPECIAL = np.array([0, 7, 1])  # the padding token, a character, the end
SPANS = [VersionSpan(AT, "d", 0, 3, AT)]


def written(logprobs: list[float]) -> ScoredResponse:
    prompt, tokens = np.array([5, 6]), np.array([7, 8, 1], np.int32)  # a prompt's may be int64
    scores = np.array(logprobs, np.float32)
    made = Completion((4, 1, 9), prompt, tokens, scores, SPANS, "length", support=None)
    sampling = SamplingSettings(max_new_tokens=12, temperature=0.5)
    return ScoredResponse(msgspec.structs.replace(ticket(4, 9, 1), sampling=sampling), made, "31")


def test_a_trajectory_has_the_tokens_as_sampled_and_the_reward_as_judged() -> None:
    result = RewardResult((4, 1, 9), 1, {"form": 0.5}, [0.25, float("nan"), 1.0], "")
    began = time.monotonic()
    made = build_trajectory(written([-0.5, -0.25, 0.0]), result)
    assert (made.ticket, made.sample, made.attempt) == (4, 1, 9)
    assert np.frombuffer(made.prompt_tokens, "<i4").tolist() == [5, 6]
    assert np.frombuffer(made.tokens, "<i4").tolist() == [7, 8, 1]
    assert np.frombuffer(made.behavior_logprobs, "<f4").tolist() == [-0.5, -0.25, 0.0]
    assert made.mask == b"\1\1\1" and made.segments == [("model", 0, 3)] and made.spans == SPANS
    assert type(made.reward) is float and made.reward == 1.0
    assert made.reward_parts == {"form": 0.5} and made.failed == ""
    rewards = np.frombuffer(made.token_rewards, "<f4").tolist()
    assert rewards[0] == 0.25 and np.isnan(rewards[1]) and rewards[2] == 1.0
    assert (made.finish, made.temperature, made.text) == ("length", 0.5, "31")
    assert made.prompt_text == "31=" and made.images == [] and made.support == made.routed == b""
    assert began <= made.generated_at <= time.monotonic()
    failure = RewardFailure("data", "no")
    made = build_trajectory(written([0.0, 0.0, 0.0]), RewardResult((4, 1, 9), 0, {}, None, failure))
    assert made.failed == failure and made.token_rewards == b""


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_logprob_that_is_not_finite_names_ticket_sample_and_weights(bad: float) -> None:
    result = RewardResult((4, 1, 9), 0, {}, None, "")
    why = r"not finite for ticket 4, sample 1, with weights 1\.2"
    with pytest.raises(NotFiniteError, match=why) as error:
        build_trajectory(written([-0.5, bad, 0.0]), result)
    assert isinstance(error.value, ProtocolError), "a divergence, and a breach of the protocol"


def test_a_prompt_that_is_too_long_becomes_a_failed_sample_without_tokens() -> None:
    refused = PromptTooLong(ticket(4, 9, 1), (4, 1, 9), RewardFailure("data", "too long"))
    made = build_failed_trajectory(refused, AT, "d")
    assert (made.ticket, made.sample, made.attempt) == (4, 1, 9)
    assert made.tokens == made.prompt_tokens == made.behavior_logprobs == made.mask == b""
    assert made.spans == [VersionSpan(AT, "d", 0, 0, AT)]
    assert (made.reward, made.reward_parts) == (0.0, {})
    assert made.failed == RewardFailure("data", "too long")


def test_all_free_rows_of_the_engine_are_filled(small_model: Path) -> None:
    config = load.load(ROOT / "configs" / "demo.toml", [f"model.path={str(small_model)!r}"])
    engine = Engine()
    turn = GeneratorTurn(config, engine, lockstep=False)
    turn.context = 9
    try:
        turn.accept_tickets([ticket(0, 1, 1, samples=20)])
        first, refused = turn.build_requests(Label(1, 0), 3)
        engine.add(first)
        assert [request.key for request in first] == [(0, n, 1) for n in range(3)]
        more, _ = turn.build_requests(Label(1, 0))
        assert [request.key for request in more] == [(0, n, 1) for n in range(3, 8)]
        prompt = len(first[0].prompt)
        assert {request.max_new_tokens for request in more} == {9 - prompt} and not refused
        assert more[0].stop == turn.stops and more[0].group == 0 and more[0].seed == 0
        turn.context = prompt
        none, refused = turn.build_requests(Label(1, 0), 1)
        why = f"the prompt has {prompt} tokens, generator.context is {prompt}"
        assert none == [] and refused == [
            PromptTooLong(ticket(0, 1, 1, samples=20), (0, 8, 1), RewardFailure("data", why))
        ]
        turn.context = prompt + 1
        ((last,), refused) = turn.build_requests(Label(1, 0), 1)
        assert last.max_new_tokens == 1 and not refused
    finally:
        turn.rewards.close()


def test_the_text_has_special_tokens_but_no_stop_token(small_model: Path) -> None:
    """The reward function compares it with reference answers, which may hold special tokens."""
    turn = GeneratorTurn.__new__(GeneratorTurn)
    held = SimpleNamespace(
        held={(4, 9): SimpleNamespace(ticket="t")}, finish_sample=lambda *_: None
    )
    turn.schedule, turn.unscored = held, {}
    turn.tokenizer, turn.stops = load_tokenizer(small_model), (1,)
    response = turn.finish(dataclasses.replace(written([0.0] * 3).completion, tokens=SPECIAL))
    assert response is not None and 1 in SPECIAL
    assert response.text == turn.tokenizer.decode([0, 7], skip_special_tokens=False)
    assert response.text != turn.tokenizer.decode([0, 7], skip_special_tokens=True)


def row(prompt: int, tokens: int, spans: int, **more: bytes) -> TrainingSequence:
    parts = [VersionSpan(AT, "0123456789abcdef", 9 * n, 9 * n + 9, AT) for n in range(spans)]
    arrays = (b"\1\0\0\0" * prompt, b"\2\0\0\0" * tokens, b"\3\3\3\3" * tokens)
    return TrainingSequence(*arrays, b"\1" * tokens, parts, **more)


@pytest.mark.parametrize("more", [{}, {"token_rewards": 900 * b"r", "support": 800 * b"s"}])
@pytest.mark.parametrize("others", [[], [(200, 300, 2), (700, 10, 1)]])
def test_a_samples_size_is_that_of_its_message(
    others: list[tuple[int, int, int]], more: dict[str, bytes]
) -> None:
    first = row(150, 400, 3, **more)
    sample = Trajectory(
        *(4, 1, 9, first.prompt_tokens, first.tokens, first.behavior_logprobs, first.mask),
        first.spans,
        reward=1.0,
        reward_parts={"form": 0.5},
        finish="stop",
        temperature=1.0,
        text="x" * 120,
        rows=[row(*other, **more) for other in others],
        **more,
    )
    assert estimate_size(sample) == pytest.approx(len(msgspec.msgpack.encode(sample)), rel=0.05)
    names = msgspec.structs.replace(sample, images=["f" * 32] * 50)
    assert estimate_size(names) == pytest.approx(len(msgspec.msgpack.encode(names)), rel=0.05)


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


def test_samples_start_evaluation_first_with_new_enough_weights_the_newest_count() -> None:
    leased = LeasedTicket(msgspec.structs.replace(ticket(1, 1, 1), min_version=V2), [0])
    found = [leased.is_ready(x) for x in (None, V1, V2, V3, Label(2, 9))]
    assert found == [False, False, True, True, False]
    leased = LeasedTicket(exact(1, 1, V2), [0])
    assert [leased.is_ready(x) for x in (None, V1, V2, V3)] == [False, False, True, False]
    made = schedule(ticket(5, 1, 1), ticket(2, 2, 1), exact(9, 3, V1, samples=2))
    assert numbers(made.admit(V1, 4)) == [(9, 0), (9, 1), (2, 0), (2, 1)]
    assert made.count_waiting() == 2 and made.count_live() == 4
    assert numbers(made.admit(V1, 0)) == [] and numbers(made.admit(None, 9)) == []
    assert numbers(made.admit(V1, 9)) == [(5, 0), (5, 1)]
    made = schedule(ticket(1, 1, 1, 1), exact(9, 2, V1), lockstep=True)
    assert numbers(made.admit(V1, 9)) == [(9, 0)]
    assert numbers(made.admit(V1, 9)) == [], "it is still being written"
    made.finish_sample((9, 0, 2), 5)
    assert numbers(made.admit(V1, 9)) == [(1, 0)]
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
    made.add_tickets([exact(3, 2, V1), exact(4, 3, V2)])
    assert made.next_version(V2) is None
    assert numbers(made.admit(V2, 9)) == [(4, 0)], "the engine drains of all others"
    for key in ((2, 0, 1), (4, 0, 3)):
        made.finish_sample(key, 3)
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
    live = {(1, 2, 4): 3, (2, 0, 5): 2, (8, 0, 9): 1}
    turn: Any = SimpleNamespace(schedule=made, engine=SimpleNamespace(count_tokens=lambda: live))
    assert sorted(GeneratorTurn.list_progress(turn)) == [(1, 4, 15), (2, 5, 2)]
    made.finish_sample((1, 2, 4), 3)
    live.clear()
    assert GeneratorTurn.list_progress(turn) == [(2, 5, 0)], "a finished ticket is forgotten"


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
