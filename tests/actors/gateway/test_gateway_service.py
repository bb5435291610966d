"""The gateway by hand: its environments are real, its buffer and its generators are the test."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from gateway_service_kit import AT, Wire
from models_kit import model_fixture
from process_kit import until

from actors.gateway import service
from actors.gateway.environment_sessions import EnvironmentSource, describe_request
from actors.gateway.environment_worker import EnvironmentEvent
from actors.gateway.sessions import SessionOutcome
from actors.rewards import RewardResult
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import RewardFailure
from asyncrl.contract.routed_experts import RoutedExperts, RoutingShape
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import OpenSession
from asyncrl.models.policy import build_model

# a process of environments may stand still, while others have the cores
PATIENT = {"step_s": 3600.0, "deadline_s": 7200.0}


model_dir = model_fixture("abcdefgh0123456789=", layers=1)


class World:
    """A gateway, and one generator that answers what the test says."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        (run_dir / "run_id").write_text("run")
        self.gateway = service.Gateway(config, run_dir, source=EnvironmentSource)
        self.gateway.socket.close()
        self.wire = Wire()
        self.gateway.socket = self.wire
        serving = m.ServingReport(m.PROTOCOL, "run", "generator-0", 1, 64, [], 0)
        self.gateway.router.on_report(b"g", serving, time.monotonic())
        self.tickets = 0
        self.cut: list[int] = []

    def ticket(self, samples: int = 1, *, kind: str = "talks", at: Label = AT) -> m.Ticket:
        prompt = m.Prompt(5, "ab=", meta={"kind": kind})
        self.tickets += 1
        most = self.gateway.config.generator.max_new_tokens
        which, sampling = list(range(samples)), m.SamplingSettings(max_new_tokens=most)
        number = self.tickets
        return m.Ticket(10 + number, number, "train", prompt, which, sampling, at, None, 3)

    def take(self, *tickets: m.Ticket) -> None:
        self.gateway.accept_tickets(list(tickets))
        self.gateway.open_sessions()

    def calls(self, count: int) -> list[m.GenerationCall]:
        out: list[m.GenerationCall] = []

        def look() -> bool:
            self.turn()
            for _, message in self.gateway.router.take_messages(self.gateway.schedule.announced):
                out.extend(message.calls)
                self.cut.extend(message.cut)
            return len(out) >= count

        self.until(look)
        return out

    def turn(self) -> None:
        self.gateway.sources[""].poll()
        self.gateway.tick(time.monotonic())

    def until(self, what: Callable[[], bool]) -> None:
        until(what)

    def answer(self, call: m.GenerationCall, text: str, *, at: Label = AT) -> None:
        ids = [*self.gateway.chat.encode(text), 1][: call.max_new_tokens]
        finish = "stop" if ids[-1] == 1 else "length"
        logprobs = np.full(len(ids), -0.5, "<f4").tobytes()
        spans = [m.VersionSpan(at, "", 0, len(ids), at)]
        called = m.CallResult(call.id, np.array(ids, "<i4").tobytes(), logprobs, spans, finish)
        self.gateway.on_result(called)

    def say(self, *texts: str) -> None:
        """Answer so many calls, one after another."""
        for text in texts:
            self.answer(self.calls(1)[0], text)

    def ended(self, count: int = 1) -> list[m.Trajectory]:

        def look() -> bool:
            self.turn()
            return len(self.gateway.outbox.fresh) >= count

        self.until(look)
        out, self.gateway.outbox.fresh = self.gateway.outbox.fresh, []
        return out


MakeWorld = Callable[..., World]


@pytest.fixture()
def world(
    model_dir: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., World]]:
    made = []

    def make(*, generator: dict[str, Any] | None = None, **agent: Any) -> World:
        raw = {
            "model": {"path": str(model_dir), "device": "cpu"},
            "task": {"name": "sort"},
            "generator": {"max_new_tokens": 6, "context": 64} | (generator or {}),
            "agent": {"env": "agent_envs:Talks", "max_tokens": 64, **PATIENT} | agent,
            "wires": {"lease_s": 3600.0},  # its generator tells of itself once
        }
        made.append(World(load.build(raw), tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.gateway.close()


def ids(world: World, text: str) -> list[int]:
    return [int(x) for x in world.gateway.chat.encode(text)]


def test_a_session_is_one_row_of_its_calls_and_what_stood_between_them(world: MakeWorld) -> None:
    w = world()
    w.take(w.ticket())
    prompts = []
    for text in ("ab", "abc", "a"):
        (call,) = w.calls(1)
        assert (call.ticket, call.sample, call.min_version, call.seed) == (11, 0, AT, 3)
        prompts.append(np.frombuffer(call.prompt, "<i4").tolist())
        assert (call.stream == 0) == (text == "ab")  # the ticket's own prompt, first asked
        w.answer(call, text)
    first = ids(w, "ab=")
    assert prompts[0] == first and prompts[1] == [*first, *ids(w, "ab"), 1, *ids(w, "2=")]
    assert prompts[2] == [*prompts[1], *ids(w, "abc"), 1, *ids(w, "3=")]
    (s,) = w.ended()
    assert (s.ticket, s.sample, s.attempt, s.calls, s.aside) == (11, 0, 1, 3, 0)
    assert np.frombuffer(s.prompt_tokens, "<i4").tolist() == first
    assert np.frombuffer(s.tokens, "<i4").tolist() == [*prompts[2][len(first) :], *ids(w, "a"), 1]
    assert list(s.mask) == [1] * 3 + [0] * 2 + [1] * 4 + [0] * 2 + [1] * 2
    assert s.length == 9 and not s.rows and not s.failed and s.finish == "stop"
    assert [(x.label, x.start, x.end) for x in s.spans] == [(AT, 0, 3), (AT, 5, 9), (AT, 11, 13)]
    assert s.reward == pytest.approx(0.6) and s.reward_parts == {"turns": 3.0}
    assert s.token_rewards == b""  # rows have no order
    assert not w.gateway.held and not w.gateway.sessions


def test_rewards_of_calls_stand_on_their_last_tokens_in_one_row(world: MakeWorld) -> None:
    w = world(fork="end")
    w.take(w.ticket())
    w.say("ab", "abc", "a")
    (s,) = w.ended()
    given = np.frombuffer(s.token_rewards, "<f4")
    at = {int(i): round(float(given[i]), 6) for i in np.flatnonzero(~np.isnan(given))}
    assert at == {2: 0.2, 8: 0.3, 12: 0.1}


def of_side(w: World, side: int, kind: str = "") -> m.Ticket:
    """A ticket whose seed gives the policy that side of a game."""
    while True:
        ticket = w.ticket(kind=kind)
        if service.compute_env_seed(w.gateway.config, ticket) % 2 == side:
            return ticket


@pytest.mark.parametrize("side", [0, 1])
def test_against_itself_one_side_is_trained_alone(world: MakeWorld, side: int) -> None:
    """Both sides' calls are the session's: the same minimum version, seed and ledger."""
    settings = {"max_new_tokens": 8, "context": 64}
    w = world(env="agent_envs:Longer", opponent="self", eval_opponent="random", generator=settings)
    ticket = of_side(w, side)
    w.take(ticket)
    heard: list[list[list[int]]] = [[], []]
    texts = ("a", "bb", "abc", "abcd", "abcde", "abcdef")
    streams = []
    for turn, text in enumerate(texts):
        (call,) = w.calls(1)
        told = (call.ticket, call.sample, call.min_version, call.seed)
        assert told == (ticket.ticket, 0, AT, 3)
        heard[turn % 2].append(np.frombuffer(call.prompt, "<i4").tolist())
        streams.append(call.stream)
        w.answer(call, text)
    assert len(set(streams)) == 6
    (s,) = w.ended()
    for player, begins in enumerate(("ab=", "1=")):
        whole = ids(w, begins)
        for turn, prompt in enumerate(heard[player]):
            assert prompt == whole
            whole = [*whole, *ids(w, texts[2 * turn + player]), 1]
            whole += ids(w, f"{2 * turn + player + 2}=")
    own, other = ("a", "abc", "abcde"), ("bb", "abcd", "abcdef")
    if side:
        own, other = other, own
    kept = np.frombuffer(s.tokens, "<i4")[np.frombuffer(s.mask, np.uint8) > 0].tolist()
    assert kept == [token for text in own for token in (*ids(w, text), 1)]
    assert (s.calls, s.aside, s.rows) == (6, sum(len(text) + 1 for text in other), [])
    assert s.reward == side and not s.failed and s.finish == "stop"
    assert s.reward_parts == {"won": side, "length": sum(map(len, own))}
    assert np.frombuffer(s.prompt_tokens, "<i4").tolist() == heard[side][0]


def test_the_opponents_reward_is_on_the_policys_last_token(world: MakeWorld) -> None:
    w = world(env="agent_envs:Longer", opponent="self", eval_opponent="self", fork="end")
    w.take(of_side(w, 0))
    w.say("abcd", "a", "abcd", "a", "abcd", "a")
    (s,) = w.ended()
    given = np.frombuffer(s.token_rewards, "<f4")
    assert s.reward == 1 and np.flatnonzero(~np.isnan(given)).tolist() == [len(given) - 1]
    assert given[-1] == 1 and not s.rows


def test_evaluations_are_against_their_own_opponent(world: MakeWorld) -> None:
    """Whom it plays is the ticket's kind; a fixed opponent's moves are no calls."""
    w = world(env="agent_envs:Longer", opponent="self", eval_opponent="random")
    w.take(msgspec.structs.replace(w.ticket(), kind="eval"))
    w.say("abc", "abc", "abc")
    (s,) = w.ended()
    assert (s.calls, s.aside, s.reward) == (3, 0, 1.0)


def test_a_limit_of_calls_is_an_outcome_once_the_policy_has_moved(world: MakeWorld) -> None:
    """Before that nothing of the sample could be trained: it has failed."""
    for kind, side, texts in (("", 1, ("a", "bb", "abc")), ("quits", 1, ("h", "h", "h"))):
        w = world(env="agent_envs:Longer", opponent="self", eval_opponent="random", max_calls=3)
        w.take(of_side(w, side, kind))
        w.say(*texts)
        (s,) = w.ended()
        assert (s.calls, s.reward, s.finish) == (3, 0.0, "length")
        if kind:
            assert s.failed and s.failed.why == "the session ended before its first answer"
            assert (s.length, s.aside) == (0, 6)
        else:
            assert (s.failed, s.length, s.aside) == ("", 3, 6)


def test_an_opponent_in_another_game_knows_nothing_of_the_first(world: MakeWorld) -> None:
    w = world(env="agent_envs:Longer", opponent="self", eval_opponent="random")
    w.take(of_side(w, 1, "quits"))
    prompts = []
    for text in ("h", "h", "a", "bb", "h"):  # h ends it
        (call,) = w.calls(1)
        prompts.append(np.frombuffer(call.prompt, "<i4").tolist())
        w.answer(call, text)
    (s,) = w.ended()
    first = ids(w, "ab=")
    assert prompts[:4] == [first, first, first, ids(w, "1=")]
    assert prompts[4] == [*first, *ids(w, "a"), 1, *ids(w, "2=")]
    assert (s.calls, s.aside, s.length, s.reward) == (5, 8, 3, 0.5)


@pytest.mark.parametrize(
    ("agent", "generator", "calls", "reward"),
    [
        ({"max_calls": 2}, {}, 2, 0.5),
        ({"max_tokens": 8}, {}, 3, 0.5),
        ({}, {"context": 16}, 3, 0.75),
    ],
)
def test_a_limit_is_an_outcome(
    world: MakeWorld, agent: dict[str, Any], generator: dict[str, Any], calls: int, reward: float
) -> None:
    """What the policy can cause is never written again, which would censor the long."""
    for how in ("keep", "fail"):
        w = world(env="agent_envs:Endless", at_limit=how, generator=generator, **agent)
        w.take(w.ticket())
        w.say(*["ab"] * calls)
        (s,) = w.ended()
        assert s.calls == calls and s.finish == "length" and s.length > 0
        if how == "keep":
            assert not s.failed and s.reward == pytest.approx(reward, abs=0.26)
        else:
            assert s.failed and "it reached agent." in s.failed.why and s.reward == 0


def test_the_deadline_ends_a_session_whose_call_is_being_drawn(world: MakeWorld) -> None:
    w = world(deadline_s=5000.0)
    w.take(w.ticket())
    w.answer(w.calls(1)[0], "ab")
    (call,) = w.calls(1)
    late = time.monotonic() + 5001
    holding = m.ServingReport(m.PROTOCOL, "run", "generator-0", 1, 64, [call.id], 9)
    w.gateway.router.on_report(b"g", holding, late)
    w.gateway.tick(late)
    w.gateway.ticked = 0.0
    ((_, message),) = w.gateway.router.take_messages(None)
    assert message.cut == [call.id] and not w.gateway.outbox.fresh
    lost = m.CallResult(call.id, b"", b"", [], "length", 2)
    w.gateway.on_result(lost)
    (s,) = w.ended()
    assert (s.length, s.aside, s.finish) == (3, 2, "length") and not s.failed
    assert s.reward == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("raises", "raised KeyError"),
        ("nan", "not a finite number"),
        ("dies", "its process ended (exit code 3)"),
    ],
)
def test_an_environments_failure_is_no_reward_of_0(world: MakeWorld, kind: str, why: str) -> None:
    w = world(env="agent_envs:Fails")
    w.take(w.ticket(kind=kind))
    w.answer(w.calls(1)[0], "ab")
    (s,) = w.ended()
    assert s.failed and s.failed.kind == "data" and why in s.failed.why
    assert s.length == 3  # drawn, and counted


def test_a_session_lost_with_anothers_environment_begins_again(world: MakeWorld) -> None:
    w = world(env="agent_envs:Fails")
    w.take(w.ticket(kind="dies"), w.ticket())
    first = {call.ticket: call for call in w.calls(2)}
    w.answer(first[11], "ab")
    (again,) = w.calls(1)  # the other one's: the same prompt, the same stream
    assert again.ticket == 12 and again.id != first[12].id
    assert (again.prompt, again.stream) == (first[12].prompt, first[12].stream)
    w.answer(first[12], "abc")  # forgotten
    for _ in range(2):
        w.answer(again, "ab")
        (again,) = w.calls(1)
    w.answer(again, "ab")
    found = {s.ticket: s for s in w.ended(2)}
    assert found[11].failed and not found[12].failed and found[12].calls == 3


def test_sessions_of_an_earlier_epoch_go_on_under_the_next_grant(world: MakeWorld) -> None:
    """Nothing of theirs is drawn between; what they drew before stays with their first attempt."""
    w = world()
    first = w.ticket(2)
    w.take(first)
    w.answer(w.calls(2)[0], "ab")
    w.calls(1)
    gateway = w.gateway
    assert gateway.list_progress() == [(11, 1, 3)]
    for epoch in (2, 3):
        source = m.WeightsSource(epoch, "here", "", "")
        gateway.announce(m.PolicyAnnouncement(Label(epoch, 1), "d", source))
        assert len(gateway.list_parked_sessions()) == 2
        assert not gateway.router.open
    gateway.announce(gateway.schedule.announced)
    assert gateway.free_sessions == 256 and gateway.list_progress() == [(11, 1, 3)]
    gateway.renewed = 0.0
    gateway.renew()
    assert [x.judging for x in w.wire.sent if isinstance(x, m.LeaseRenewal)] == [[]]
    gateway.accept_tickets([msgspec.structs.replace(first, attempt=2, min_version=Label(3, 1))])
    assert not gateway.list_parked_sessions() and len(gateway.router.open) == 2
    assert sorted(gateway.list_progress()) == [(11, 1, 3), (11, 2, 0)]
    first_done = next(x.sample for x in gateway.sessions.values() if x.tokens)
    texts = {first_done: ["abc", "a"], 1 - first_done: ["ab", "abc", "a"]}
    calls = w.calls(2)
    while calls:
        call = calls.pop()
        assert call.min_version == Label(3, 1)
        w.answer(call, texts[call.sample].pop(0), at=Label(3, 1))
        calls += w.calls(1) if texts[call.sample] else []
    samples = {s.sample: s for s in w.ended(2)}
    early = next(s for s in samples.values() if s.spans[0].label == AT)
    late = next(s for s in samples.values() if s is not early)
    assert (early.attempt, early.adopted, early.length) == (2, [(1, 3)], 9)
    assert early.tokens_by_attempt == [(2, 6), (1, 3)] and late.adopted == [(1, 0)]
    assert [x.label for x in early.spans] == [AT, Label(3, 1), Label(3, 1)]


@pytest.mark.parametrize("later", [0, 1])
def test_an_evaluation_adopts_its_own_versions_session(world: MakeWorld, later: int) -> None:
    """Two evaluations may be under way at once, with the same numbers of tickets: by the weights of
    one, nothing of the other's is drawn."""
    w = world(sessions=2)
    first = msgspec.structs.replace(w.ticket(), kind="eval", exact_version=AT)
    w.take(first)
    w.answer(w.calls(1)[0], "ab")
    (call,) = w.calls(1)  # its second
    other = Label(AT.epoch, AT.number + later)
    w.take(msgspec.structs.replace(first, attempt=2, exact_version=other))
    assert set(w.gateway.held) == ({(11, 1), (11, 2)} if later else {(11, 2)})
    if later:
        (anew,) = w.calls(1)
        assert (anew.exact_version, anew.stream) == (other, 0)
    w.answer(call, "abc")
    w.answer(w.calls(1)[0], "a")
    (s,) = w.ended()
    assert (s.attempt, s.calls) == (1 if later else 2, 3) and {x.label for x in s.spans} == {AT}
    assert set(w.gateway.held) == ({(11, 2)} if later else set())


def test_what_nothing_adopts_is_given_up_and_told_of(world: MakeWorld) -> None:
    w = world(deadline_s=1000.0, sessions=2)
    w.take(w.ticket(2))
    w.answer(w.calls(2)[0], "ab")
    gateway = w.gateway
    gateway.announce(m.PolicyAnnouncement(Label(2, 1), "d", m.WeightsSource(2, "here", "", "")))
    now = time.monotonic()
    gateway.tick(now)
    assert len(gateway.sessions) == 2
    gateway.ticked = 0.0
    gateway.tick(
        now + 1000.0 + service.build_limits(gateway.config, gateway.agents[""]).grace_s + 1.0
    )
    assert not gateway.sessions and not gateway.held and not gateway.router.open
    assert not gateway.outbox.fresh and gateway.list_progress() == [(11, 1, 3)]


def test_a_sample_granted_again_while_it_waits_or_is_open_is_written_once(world: MakeWorld) -> None:
    w = world(sessions=1)
    first = w.ticket(2)
    w.take(first)
    (call,) = w.calls(1)
    w.gateway.accept_tickets([msgspec.structs.replace(first, attempt=2)])
    assert list(w.gateway.held) == [(11, 2)] and len(w.gateway.sessions) == 1
    assert w.gateway.held[11, 2].waiting == [1]
    w.answer(call, "ab")  # of the same epoch: it is still drawn
    assert w.gateway.list_progress() == [(11, 2, 3)]


def test_an_environment_that_answers_as_its_time_runs_out_ends_no_gateway(world: MakeWorld) -> None:
    w = world()
    w.take(w.ticket())
    (session,) = w.gateway.sessions.values()
    session.fail("its time ran out")
    source = w.gateway.sources[""]
    assert isinstance(source, EnvironmentSource)
    for judge in (False, True):
        session.state = "open"
        play = session.play = source.play(session)
        next(play)
        # its time runs out as it ends
        session.limit, session.limited_at, session.call_at = "deadline_s", 0.0, 0.0
        end = EnvironmentEvent(session.number, "ok", ended=True, judge=judge)
        source.resume(session, end)
    assert session.outcome is not None and session.outcome.failed


def test_an_impossible_message_of_a_generator_is_refused_and_logged_twenty_times(
    world: MakeWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = world().gateway
    bad = m.ServingReport(m.PROTOCOL, "run", "\x1b", 1, 1, [], 0)
    received: list[Any] = [None, *[(b"g", bad)] * 21]
    sent: list[Any] = []
    played = {"send": lambda *given: sent.append(given), "close": gateway.calls_socket.close}
    gateway.calls_socket = SimpleNamespace(recv=lambda _: received.pop(), **played)
    capsys.readouterr()
    gateway.read_calls()
    why = "a generator's name is printable and has 1 to 200 characters, not '\\x1b'"
    assert sent == [(b"g", m.Refusal(why, 4))] * 21 and gateway.refused == {"message": 21}
    line = f"{gateway.name}: refused a ServingReport: {why}"
    assert capsys.readouterr().err.splitlines() == [line] * 20


def test_a_call_that_a_generator_cannot_sample_fails_its_session(world: MakeWorld) -> None:
    w = world()
    w.take(w.ticket())
    (call,) = w.calls(1)
    w.gateway.on_result(m.CallResult(call.id, b"", b"", [], "length", failed="it is too long"))
    (ended,) = w.ended()
    assert "a generator cannot sample its call: it is too long" in str(ended.failed)
    w.take(w.ticket())
    (call,) = w.calls(1)
    (session,) = w.gateway.sessions.values()
    routed = RoutedExperts.make_unrecorded(len(call.prompt) // 4, RoutingShape(2, 8, 1))
    one = (np.array([1], "<i4").tobytes(), np.zeros(1, "<f4").tobytes(), [])
    w.gateway.on_result(m.CallResult(call.id, *one, "stop", routed=routed.encode()))
    assert w.gateway.routing == routed.shape
    (call,) = w.calls(1)
    assert [*w.gateway.router.open] == [call.id]
    w.gateway.drop(session)
    assert not w.gateway.router.open and not w.gateway.sessions


def test_a_failed_reward_is_its_sessions_failure(world: MakeWorld) -> None:
    w, outcomes, parts = world(), [], {"a": 1.0}
    failure = RewardFailure("data", "no")
    ends = ((1, ""), (2, failure), (3, ""))
    results = [RewardResult((n, 0, 0), 0.5, parts, None, failed) for n, failed in ends]
    w.gateway.rewards = Mock(**{"poll.return_value": results})
    sessions = {n: Mock(on_judged=outcomes.append) for n in (1, 2, 4)}
    w.gateway.sessions, before = sessions, w.gateway.sessions
    w.gateway.read_rewards()
    w.gateway.sessions = before
    assert outcomes == [SessionOutcome(0.5, parts), SessionOutcome(0.5, parts, "data: no")]


def test_it_vouches_for_open_sessions_and_asks_for_as_many_as_it_may_hold(world: MakeWorld) -> None:
    w = world(sessions=3)
    w.gateway.request_samples()
    assert [x.samples for x in w.wire.sent] == [3]
    w.wire.sent.clear()
    w.take(w.ticket(2), w.ticket(2))
    assert len(w.gateway.sessions) == 3
    w.answer(w.calls(3)[0], "ab")
    w.gateway.requested_samples = 0
    w.gateway.request_samples()
    assert not w.wire.sent  # one waits already
    w.gateway.renew()
    (renewed,) = [x for x in w.wire.sent if isinstance(x, m.LeaseRenewal)]
    assert renewed.judging == [(11, 1), (12, 2)] and renewed.drawn == 3
    assert renewed.progress == [(11, 1, 3), (12, 2, 0)]
    assert (renewed.taken, renewed.written) == (2, [])
    w.wire.replies.append(m.TicketGrant(w.gateway.session, 1, [], None, True))
    w.gateway.read_replies(0.0)
    assert w.gateway.over


def test_what_was_granted_and_has_not_come_is_forgone_and_said_to_be(world: MakeWorld) -> None:
    w = world(sessions=3, env="agent_envs:Fails")
    lost = w.ticket(kind="raises")
    w.wire.replies.append(m.HeartbeatReply(1, None, attempts=1))
    w.gateway.read_replies(0.0)
    w.take(lost, w.ticket(kind="raises"))
    assert set(w.gateway.held) == {(12, 2)}
    w.answer(w.calls(1)[0], "ab")
    w.gateway.outbox.fresh = w.ended()  # on its way, and no session's any more
    w.gateway.renew()
    (renewed,) = [x for x in w.wire.sent if isinstance(x, m.LeaseRenewal)]
    assert not w.gateway.held and (renewed.taken, renewed.written) == (2, [(12, 2)])


def test_a_buffer_found_elsewhere_or_restarted_is_greeted_and_asked_anew(world: MakeWorld) -> None:
    w = world(sessions=3)
    w.gateway.requested_samples = 2
    w.gateway.silent_since = time.monotonic() - 1e6  # the one before would be given up
    w.wire.moved = True
    w.wire.sent.clear()
    w.gateway.read_replies(0.0)
    assert [type(x) for x in w.wire.sent] == [m.GeneratorHello]
    assert w.gateway.requested_samples == 0 and time.monotonic() - w.gateway.silent_since < 1e5
    w.wire.sent.clear()  # and one that was started again
    for session in (w.gateway.session + 1, w.gateway.session):
        w.wire.replies.append(m.UnknownSession(w.gateway.producer, session))
    w.gateway.read_replies(0.0)
    assert [type(x) for x in w.wire.sent] == [m.GeneratorHello], "its own session alone"


def test_it_tells_what_the_oldest_sessions_wait_for(world: MakeWorld) -> None:
    """One of each ticket: that which has waited longest for anything but the engine."""
    began = time.monotonic()
    w = world(sessions=3, deadline_s=3000.0)
    gateway = w.gateway
    w.take(w.ticket(2, kind="hangs"), w.ticket(2))

    def told(after: float = 0.0) -> list[OpenSession]:
        return gateway.list_oldest_sessions(time.monotonic() + after)

    assert [x.ticket for x in told()] == [11, 12]
    assert [(x.name, x.kind, x.what) for x in told() if x.kind == "place"] == [
        ("", "place", "a place: agent.sessions = 3")
    ]
    (place,) = (x for x in told(7.0) if x.kind == "place")
    assert 7 <= place.seconds == place.open_s <= 7 + time.monotonic() - began
    calls = w.calls(3)
    (first, _) = told(7.0)
    assert (first.kind, first.what) == ("engine", "an answer of the engine")
    assert first.task == "prompt 5 'ab='" and first.turn == 1 and 7 <= first.seconds <= first.open_s
    assert first.limit == "agent.deadline_s" and 0 < first.ends_s < 3000 and not first.is_bounded
    hanging, behind = (call for call in calls if call.ticket == 11)
    w.answer(hanging, "ab")
    name = f"11.{hanging.sample}.1"
    (first, _) = told(7.0)
    waits = (name, "environment", "the step of its environment")
    assert (first.name, first.kind, first.what) == waits
    # its process is taken for it until the deadline of a step, or the session's is nearer
    assert first.limit == "agent.deadline_s" and first.is_bounded
    w.answer(behind, "ab")
    one = next(x for x in gateway.sessions.values() if x.name == f"11.{behind.sample}.1")
    second = gateway.describe_session(one, time.monotonic())
    assert second.what.endswith(f"behind that of session {name} in the same process")
    one.state, one.judging_at = "judging", time.monotonic() - 5.0
    judged = gateway.describe_session(one, time.monotonic())
    assert (judged.kind, judged.what) == ("reward", "the reward of its answer")
    assert judged.seconds >= 5.0 and not judged.limit
    source = m.WeightsSource(2, "here", "", "")
    gateway.announce(m.PolicyAnnouncement(Label(2, 1), "d", source))
    assert {x.kind for x in told()} == {"grant"}
    assert service.WaitCause("place", "a place") == ("place", "a place", "", 0.0)


ENDED: Any = SimpleNamespace(name="1.1.1", opened=0.0, part="")


def test_a_run_of_failed_sessions_ends(world: MakeWorld, capfd: pytest.CaptureFixture[str]) -> None:
    """Eight, and half of those that began: not the first few of many, none after one did well."""
    w = world(env="agent_envs:Fails")
    w.take(w.ticket(8, kind="raises"))
    for call in w.calls(8):
        w.answer(call, "ab")
    said = (
        r"agent\.env = agent_envs:Fails: 8 sessions failed, and none has ended well; the last one: "
        r"data: the environment raised KeyError: 'gone' in step; if it cannot use"
    )
    with pytest.raises(ConfigError, match=said):
        w.ended(8)
    assert "session 11.0.1: data: the environment raised" in capfd.readouterr().err

    gateway = world().gateway
    gateway.tallies[""].begun = 18
    for _ in range(8):
        gateway.count(ENDED, "why")
    with pytest.raises(ConfigError, match=r"agent\.env = agent_envs:Talks: 9 sessions failed"):
        gateway.count(ENDED, "why")
    gateway.count(ENDED, "")
    gateway.count(ENDED, "why")
    assert gateway.tallies[""].failed == 10


def test_sessions_of_which_hardly_any_ends_well_end_the_run(world: MakeWorld) -> None:
    """Of the last 64, or twice those at once: more than nine tenths failed."""
    w = world(env="agent_envs:Talks", sessions=40)
    for ended in range(200):  # one in ten ends well: that is enough
        w.gateway.count(ENDED, "why" if ended % 10 else "")
    said = r"Talks: 73 of the last 80 sessions failed; the last one: KeyError: 'gone'; if it"
    with pytest.raises(ConfigError, match=said):
        w.gateway.count(ENDED, "KeyError: 'gone'")
    assert world(function="a:b", env="", at_once=16).gateway.tallies[""].recent.maxlen == 64


def test_a_harness_that_fails_is_waited_for(world: MakeWorld) -> None:
    w = world()
    serving = msgspec.structs.replace(w.gateway.config.agent, env="", serve=True)
    w.gateway.agents[""] = serving
    for _ in range(20):
        w.gateway.count(ENDED, "why")
    assert w.gateway.tallies[""].failed == 20


OWN, STEP = ("agent.deadline_s", 9.0), "agent.step_s"


@pytest.mark.parametrize(
    ("front", "left_s", "replaced", "said", "limit"),
    [
        (3, 5.0, "", "the step", (STEP, 5.0)),
        (3, 9.5, "", "the step", OWN),
        (None, 9.5, "", "a process to import agent.env = x", (STEP, 9.5)),
        (5, 9.0, "1 died", "the step (1 died), behind that of session 7.0.1 in", (STEP, 9.0)),
        (6, 9.5, "", "the step, behind that of session one that has ended in", OWN),
        ("", 0.0, "", "the step", OWN),
    ],
)
def test_it_says_behind_which_session_an_environment_waits(
    front: Any, left_s: float, replaced: str, said: str, limit: tuple[str, float]
) -> None:
    source: Any = EnvironmentSource.__new__(EnvironmentSource)
    place = SimpleNamespace(front=front, limit=STEP, left_s=left_s)
    source.pool = SimpleNamespace(named="agent.env = x", replaced=replaced, locate=lambda *_: place)
    source.pool.processes = () if front == "" else (3,)
    source.gateway = SimpleNamespace(sessions={5: SimpleNamespace(name="7.0.1")})
    session: Any = SimpleNamespace(number=3, waits_for="the step")
    found = source.explain_wait(session, *OWN, 0.0)
    assert found == ("environment", said + " the same process" * said.endswith("in"), *limit)


def test_what_an_answer_asks_of_its_environment() -> None:
    calls = [{"function": {"name": name}} for name in ("add", "se\x1barch")]
    assert describe_request({"tool_calls": calls}) == "its tool add, se\\x1barch"
    assert describe_request({"content": "x"}) == describe_request(None)
    assert describe_request(None) == "the step of its environment"


def test_the_router_s_clock_is_the_gateway_s() -> None:
    gateway = service.Gateway.__new__(service.Gateway)
    ticks: list[float] = []
    gateway.ticked, gateway.sessions = 100.0, {}
    gateway.router = SimpleNamespace(tick=ticks.append)
    for now in (100.0 + service.TICK_S, 101.0, 101.0 + service.TICK_S, 102.0):
        gateway.tick(now)
    assert ticks == [101.0, 102.0]


def test_its_numbers_are_its_rewards_and_how_long_sessions_take(world: MakeWorld) -> None:
    gateway = world().gateway
    assert gateway.rewards is None and gateway.collect_metrics() == {}  # its environment pays
    gateway.tallies[""].durations.extend(float(n) for n in range(101))
    assert gateway.collect_metrics() == {"session/p95_s": 95.0}
    rewards: Any = SimpleNamespace(
        collect_metrics=lambda: {"judge/requests": 3.0}, close=lambda: None
    )
    gateway.rewards = rewards
    assert gateway.collect_metrics() == {"session/p95_s": 95.0, "judge/requests": 3.0}


def test_all_samples_of_a_group_meet_the_same_environment(world: MakeWorld) -> None:
    w = world()
    config = w.gateway.config
    one, other = w.ticket(), w.ticket()
    assert service.compute_env_seed(config, one) == service.compute_env_seed(config, one)
    assert service.compute_env_seed(config, one) != service.compute_env_seed(config, other)
    again = msgspec.structs.replace(one, ticket=m.EVAL_BASE, kind="eval")
    later = msgspec.structs.replace(other, ticket=m.EVAL_BASE + 512, kind="eval")
    seeds = [service.compute_env_seed(config, each) for each in (again, later)]
    assert seeds[0] == seeds[1]  # of prompt 5


def test_tools_need_a_chat_template(world: MakeWorld) -> None:
    with pytest.raises(AsyncrlError, match=r"agent\.tools: the tokenizer in .* has no chat templa"):
        world(env="", tools=["agent_envs:add"])


TEMPLATE = (
    "{% for x in messages %}[{{ x.role }}:{{ x.content }}"
    "{% for c in x.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}[assistant:{% endif %}"
)


def test_tools_are_called_and_the_reward_judges_the_last_answer(tmp_path: Path) -> None:
    build_model(tmp_path / "m", "".join(map(chr, range(32, 127))), hidden=32, layers=1)
    (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATE)
    raw = {
        "model": {"path": str(tmp_path / "m"), "device": "cpu"},
        "task": {"name": "sort"},
        "generator": {"max_new_tokens": 90, "context": 512},
        "agent": {"tools": ["agent_envs:add"], "max_tokens": 400, **PATIENT},
        "reward": {"function": "agent_envs:is_four", "workers": 1, "deadline_s": 3600.0},
        "wires": {"lease_s": 3600.0},
    }
    w = World(load.build(raw), tmp_path)
    try:
        w.take(w.ticket(2))
        first = {c.sample: c for c in w.calls(2)}
        call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
        w.answer(first[0], call)
        (second,) = w.calls(1)
        said = w.gateway.tokenizer.decode(np.frombuffer(second.prompt, "<i4").tolist())
        assert said.startswith("[user:ab=<eos>[assistant:<tool_call>")
        assert said.endswith("[tool:4<eos>[assistant:")
        w.answer(second, "4")
        w.answer(first[1], "5")

        def judged() -> bool:
            w.gateway.read_rewards()
            w.turn()
            return len(w.gateway.outbox.fresh) == 2

        w.until(judged)
        found = {s.sample: s for s in w.gateway.outbox.fresh}
        ends = {k: (s.reward, s.calls, len(s.rows)) for k, s in found.items()}
        assert ends == {0: (1.0, 2, 0), 1: (0.0, 1, 0)}
        assert sum(found[0].mask) == found[0].length == len(call) + 1 + 2
    finally:
        w.gateway.close()
