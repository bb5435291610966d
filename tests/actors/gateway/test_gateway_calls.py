"""Calls between a gateway and its generators: a call is answered once, whoever dies; every call is
admitted at or above its session's minimum; its random stream is its own."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from gateway_calls_kit import AT, call

from actors.engine import Completion, CompletionRequest, build_engine, draw_uniform_rows
from actors.gateway.service import CallRouter, RoutedCall
from actors.generator import REPORT_S, CallPeer, CallTurn
from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.contract.versions import Label
from asyncrl.models.policy import build_model, list_named_weights


def said(
    name: str, session: int, held: list[int], heard: int = 0, slots: int = 4
) -> m.ServingReport:
    return m.ServingReport(m.PROTOCOL, "run", name, session, slots, held, heard)


def submit(board: CallRouter, number: int, **more: Any) -> None:
    board.submit(RoutedCall(call(number, **more), SimpleNamespace(generator="", images={}), None))


def sent(board: CallRouter) -> dict[bytes, list[int]]:
    return {peer: [c.id for c in message.calls] for peer, message in board.take_messages(None)}


def board(*names: str) -> CallRouter:
    made = CallRouter("run", 10.0)
    for name in names:
        assert made.on_report(name.encode(), said(name, 1, []), 0.0) is None
    assert sent(made) == {}
    return made


def test_calls_go_where_most_room_is_and_never_beyond_it() -> None:
    two = CallRouter("run", 10.0)
    two.on_report(b"a", said("a", 1, [], slots=4), 0.0)
    two.on_report(b"b", said("b", 1, [], slots=2), 0.0)
    for number in range(10):
        submit(two, number)
    first = sent(two)
    assert sorted(first[b"a"] + first[b"b"]) == list(range(8))  # 1.25 times the slots, each up
    assert len(first[b"a"]) == 5 and len(first[b"b"]) == 3
    assert two.on_result(m.CallResult(first[b"b"][0], b"", b"", [], "stop")) is not None
    assert sent(two) == {b"b": [8]}


def test_a_sessions_calls_stay_with_the_generator_that_drew_the_last() -> None:
    """While it has a free row; who has gone is not waited for."""

    owners = [SimpleNamespace(generator="", images={}) for _ in range(5)]

    def ask(number: int, owner: int) -> None:
        b.submit(RoutedCall(call(number), owners[owner], None))

    def answered(*numbers: int) -> None:
        for number in numbers:
            b.on_result(m.CallResult(number, b"", b"", [], "stop"))

    b = board("a", "b")
    for number in range(4):
        ask(number, number)
    first = sent(b)
    assert sorted(map(len, first.values())) == [2, 2]
    answered(0, 1, 2, 3)
    for number in range(3, -1, -1):  # alone they would go by turns
        ask(10 + number, number)
    assert {peer: sorted(x - 10 for x in ids) for peer, ids in sent(b).items()} == first
    answered(10, 11, 12, 13)
    mine = first[b"a"][0]
    for number in range(20, 26):  # four slots: the others go where room is
        ask(number, mine)
    assert sent(b) == {b"a": [20, 21, 22, 23], b"b": [24, 25]}
    answered(*range(20, 26))  # b drew the last
    ask(30, mine)
    ask(31, 4)  # another session
    assert sent(b) == {b"b": [30], b"a": [31]}
    answered(30)
    del b.generators["b"]
    ask(40, mine)
    assert sent(b) == {b"a": [40]}


def test_a_generator_started_anew_is_sent_its_calls_again() -> None:
    one = board("a")
    submit(one, 1, stream=9)
    submit(one, 2)
    assert sent(one) == {b"a": [1, 2]}
    one.on_result(m.CallResult(1, b"", b"", [], "stop"))
    one.on_report(b"a2", said("a", 2, []), 1.0)
    ((peer, message),) = one.take_messages(None)
    assert (peer, message.session, message.sequence, message.calls) == (b"a2", 2, 1, [call(2)])


def test_a_silent_generators_calls_go_to_another_and_its_late_answer_counts_if_first() -> None:
    one = board("a")
    submit(one, 1)
    assert sent(one) == {b"a": [1]}
    one.on_report(b"b", said("b", 1, []), 9.0)
    one.tick(10.0)
    assert sent(one) == {}
    one.tick(10.1)
    assert sent(one) == {b"b": [1]}
    first = one.on_result(m.CallResult(1, b"x", b"", [], "stop"))
    assert first is not None and first.message == call(1)  # a's
    assert one.on_result(m.CallResult(1, b"y", b"", [], "stop")) is None  # b's
    assert one.on_result(m.CallResult(2, b"", b"", [], "stop")) is None  # nobody's


def test_a_lost_message_is_made_up_for() -> None:
    one = board("a")
    submit(one, 1)
    submit(one, 2)
    sent(one)
    one.on_report(b"a", said("a", 1, [], heard=0), 1.0)  # on its way
    assert sent(one) == {}
    one.on_report(b"a", said("a", 1, [2], heard=1), 1.5)  # seen, and 1 is neither held nor answered
    assert sent(one) == {b"a": [1]}
    one.on_report(b"a", said("a", 1, [1, 2], heard=2), 2.0)
    assert sent(one) == {}


def test_a_cut_call_is_told_to_its_generator_and_one_that_waits_is_over() -> None:
    one = board("a")
    submit(one, 1)
    sent(one)
    assert not one.cancel(1)
    ((_, message),) = one.take_messages(None)
    assert message.cut == [1] and not message.calls
    submit(one, 2)
    assert one.cancel(2)
    assert sent(one) == {}  # it is in no queue any more


def test_one_generator_too_many_and_that_of_another_run_are_refused() -> None:
    full = board(*map(str, range(4096)))
    assert full.on_report(b"c", said("c", 1, []), 1.0) == m.Refusal(
        "c is refused: this gateway has 4096 generators", 2
    )
    assert full.on_report(b"0", said("0", 1, []), 1.0) is None, "a known one goes on"
    assert full.on_report(b"0", said("0", 2, []), 1.0) is None, "also when it was started anew"
    assert len(full.generators) == 4096 and full.generators["0"].session == 2
    one = board()
    refused = one.on_report(b"a", msgspec.structs.replace(said("a", 1, []), run="other"), 0.0)
    assert refused == m.Refusal(
        f"this gateway belongs to run run with protocol {m.PROTOCOL}, a to run other with protocol "
        f"{m.PROTOCOL}"
    )
    submit(one, 1)
    assert sent(one) == {}


def test_new_weights_are_told_once() -> None:
    one = board("a")
    source = m.WeightsSource(1, "here", "", "")
    news = m.PolicyAnnouncement(Label(1, 4), "d", source)
    assert [message.announcement for _, message in one.take_messages(news)] == [news]
    assert one.take_messages(news) == []


def request(stream: int, sample: int = 1) -> CompletionRequest:
    return CompletionRequest(
        (99, sample, 5), np.array([1]), 0, 8, 1.0, 1.0, 0, (), 5, stream, (7, sample)
    )


def test_a_calls_stream_is_the_plain_answers_or_one_beside_it() -> None:
    (plain,) = draw_uniform_rows([request(0).stream], 8)
    assert (plain == draw_uniform_rows([(5, 7, 1)], 8)).all()
    beside = [request(stream, sample).stream for stream in (12, 13) for sample in (1, 2)]
    assert len({tuple(x) for x in (plain, *draw_uniform_rows(beside, 8))}) == 5
    assert CompletionRequest((7, 1, 5), np.array([1]), 0, 8, 1.0, 1.0, 0, (), 5).stream == (5, 7, 1)


@pytest.fixture()
def turn(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("calls") / "m"
    model = build_model(path, "abcdefgh", hidden=32, layers=1)
    raw = {
        "model": {"path": str(path), "device": "cpu"},
        "task": {"name": "sort"},
        "generator": {"slots": 4, "max_new_tokens": 4, "context": 32},
        "agent": {"env": "x:y"},
        "reward": {"function": "of_another_machine:reward"},
    }
    config = load.build(raw)
    made = CallTurn(config, build_engine(config))
    made.engine.load(dict(list_named_weights(model)), Label(1, 3), "d3")
    return made


def drawn(turn, calls: list[m.GenerationCall], loaded: Label) -> list[m.CallResult]:
    turn.take_calls(calls)
    requests, refused = turn.build_requests(loaded)
    assert not refused
    turn.engine.add(requests)
    while turn.engine.active:
        for answer in turn.engine.step():
            turn.finish(answer)
    out, turn.results = turn.results, []
    return out


def test_every_call_is_admitted_at_or_above_its_sessions_minimum(turn) -> None:
    calls = [
        call(1, least=Label(1, 3)),
        call(2, least=Label(1, 4)),
        call(3, least=Label(2, 0)),
        call(4, least=Label(1, 0), exact=Label(1, 2)),
        call(5, least=Label(1, 1)),
    ]
    assert sorted(x.id for x in drawn(turn, calls, Label(1, 3))) == [1, 5]
    assert sorted(turn.calls) == [2, 3, 4]
    assert drawn(turn, calls[1:4], Label(1, 3)) == []  # sent again: known
    assert [x.id for x in drawn(turn, [], Label(1, 4))] == [2]
    turn.take_calls([call(6)])
    (asked,), _ = turn.build_requests(Label(1, 4))
    routed = RoutedExperts(np.zeros((3, 1, 1), np.uint16), 2)
    ended = np.ones(1, np.int32), np.zeros(1, np.float32), [], "stop"
    turn.finish(Completion(asked.key, asked.prompt, *ended, support=None, routed=routed))
    assert turn.results.pop().routed == routed.encode()


def test_a_call_that_fails_is_answered_and_the_others_are_drawn(turn) -> None:
    """Without a word its client would wait for ever, and those of its message too."""
    foreign = np.array([3, turn.vocabulary], "<i4").tobytes()
    bad = [
        msgspec.structs.replace(call(11), prompt=foreign),
        msgspec.structs.replace(call(12), max_new_tokens=turn.context),
        msgspec.structs.replace(call(13), prompt=b""),
        msgspec.structs.replace(call(15), grammar='start: %json {"not": {}}'),
    ]
    answers = {each.id: each for each in drawn(turn, [bad[0], call(14), *bad[1:]], AT)}
    assert answers.keys() == {11, 12, 13, 14, 15} and answers[14].tokens and not answers[14].failed
    assert "of a model with" in answers[11].failed and "in a context of" in answers[12].failed
    assert "Unimplemented keys" in answers[15].failed
    for x in bad:
        failed = m.CallResult(x.id, b"", b"", [], "length", failed=answers[x.id].failed)
        assert failed.failed and answers[x.id] == failed
    assert not turn.calls
    turn.grammars.stops = []
    (answer,) = drawn(turn, [msgspec.structs.replace(call(17), grammar="start: /a/")], AT)
    assert "no token that ends" in answer.failed
    long = msgspec.structs.replace(call(18), grammar="a" * (m.MOST_GRAMMAR + 1))
    with pytest.raises(msgspec.ValidationError, match="of length <= 65536"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(long), type=m.GenerationCall)


def test_a_call_is_sampled_under_its_grammar(turn) -> None:
    """Sampled again, its answer and its support are the same; a cut one is forgotten."""
    a, b = (turn.tokenizer.encode(text)[0] for text in "ab")
    calls = [msgspec.structs.replace(call(n), grammar="start: /[ab]{3}/") for n in (1, 2)]
    first, again = drawn(turn, calls, AT)
    tokens = np.frombuffer(first.tokens, "<i4")
    assert set(tokens[:3].tolist()) <= {a, b} and tokens[3:].tolist() == [turn.stops[0]]
    support = SampledSupport.decode(first.support, 4)
    assert support.sizes.tolist() == [2, 2, 2, 1] and support.ids[:2].tolist() == [a, b]
    assert (again.tokens, again.support) == (first.tokens, first.support)
    turn.take_calls([calls[0]])
    turn.cancel_calls([1])
    assert not turn.calls and not turn.schedule.held


def test_the_same_call_drawn_again_is_the_same(turn) -> None:
    first = drawn(turn, [call(1, stream=8), call(2)], AT)
    again = drawn(turn, [call(3), call(4, stream=8)], AT)
    assert {x.tokens for x in first} == {x.tokens for x in again}
    assert len({x.tokens + x.logprobs for x in first}) == 2
    for each in first:
        length = len(each.tokens) // 4
        assert len(each.logprobs) == 4 * length and each.spans[-1].end == length


def test_a_cut_call_tells_what_is_lost(turn) -> None:
    turn.stops = ()
    turn.take_calls([call(1)])
    turn.engine.add(turn.build_requests(AT)[0])
    turn.engine.step(2)
    turn.cancel_calls([1, 77])
    assert turn.results == [m.CallResult(1, b"", b"", [], "length", 2)]
    assert not turn.engine.active and not turn.schedule.held and not turn.calls


class PlayedSocket:
    """Messages that came, and those that were sent."""

    def __init__(self, *received: m.FromGateway) -> None:
        self.received = [*received]
        self.sent: list[m.FromGenerator] = []
        self.closed = False
        self.run = "run"

    def recv(self, timeout: float) -> m.FromGateway | None:
        assert timeout == 0
        return self.received.pop(0) if self.received else None

    def send(self, message: m.FromGenerator) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


def peer(turn, *received: m.FromGateway):
    made = CallPeer.__new__(CallPeer)
    made.turn, made.socket = turn, PlayedSocket(*received)
    made.producer, made.session = "generator-0", 7
    made.received_sequence, made.reported_at = 0, -1.0
    return made


def assigned(session: int, sequence: int, *numbers: int, cut: tuple[int, ...] = ()):
    source = m.WeightsSource(1, "host", "ring", "tcp://127.0.0.1:1")
    news = m.PolicyAnnouncement(Label(1, sequence), "d", source)
    return m.CallAssignments(session, sequence, [*map(call, numbers)], [*cut], news)


def test_a_refusal_of_the_gateway_ends_the_generator(turn) -> None:
    refused = peer(turn, assigned(7, 1, 1), m.Refusal("another run", 5), assigned(7, 2, 2))
    with pytest.raises(AsyncrlError) as error:
        refused.read()
    assert (str(error.value), error.value.exit_code) == ("another run", 5)
    assert sorted(turn.calls) == [1] and len(refused.socket.received) == 1
    refused.close()
    assert refused.socket.closed


def test_assignments_of_this_session_are_taken_and_reported(turn) -> None:
    served = peer(turn, assigned(7, 3, 1, 2), assigned(6, 9, 5), assigned(7, 2, 3, cut=(1,)))
    served.read()
    assert sorted(turn.calls) == [2, 3] and served.received_sequence == 3
    assert turn.schedule.announced is not None and turn.schedule.announced.label == Label(1, 3)
    (cut,) = turn.results
    served.send_report(100.0, 4)
    report = m.ServingReport(m.PROTOCOL, "run", "generator-0", 7, 4, [2, 3], 3)
    assert served.socket.sent == [cut, report] and turn.results == []
    served.send_report(100.0 + REPORT_S / 2, 4)
    assert len(served.socket.sent) == 2
    served.send_report(100.0 + REPORT_S, 5)
    assert served.socket.sent[2:] == [msgspec.structs.replace(report, slots=5)]


def test_a_generator_of_calls_starts_no_reward_process(turn) -> None:
    assert not turn.rewards.processes
