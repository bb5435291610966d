"""What open HTTP sessions keep on disk: a restored session is the one that was kept, a torn tail
costs the record that it is of, and a new gateway process delivers each sample once."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gateway_door_kit import config, ticket
from gateway_kit import CHATML, tokenizer
from gateway_service_kit import AT, Wire

from actors.gateway import service
from actors.gateway.chat import ChatFormat
from actors.gateway.recovery.session_journal import (
    SessionJournal,
    SessionOpening,
    read_kept_port,
    read_records,
    restore,
    write_endpoint_files,
)
from actors.gateway.refusals import CallRefused
from actors.gateway.session_api import SessionApi
from actors.gateway.sessions import HarnessRequest, Session, SessionLimits
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.contract.versions import Label

__all__ = ["config"]  # a fixture
LIMITS = SessionLimits(max_calls=9, rows=9)
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


class Recorded:
    """A session by messages whose calls are answered at once, and its file."""

    def __init__(self, path: Path) -> None:
        self.tokens = tokenizer(CHATML)
        self.ends = self.tokens.convert_tokens_to_ids(["</s>", "<|im_end|>"])
        self.chat = ChatFormat(self.tokens, self.ends)
        self.session = self.new_session()
        opening = SessionOpening("1.0.1", 0, "key", "lease", 3, True, "2026-11-24T00:00:00", 5.0)
        self.journal = SessionJournal(path / "sessions")
        self.journal.open(opening, self.session.ticket)
        self.path = path / "sessions" / "1.0.1"

    def new_session(self) -> Session:
        return Session(ticket(1), 0, 1, LIMITS, self.chat)

    def answer(self, body: bytes, messages: list[Any], text: str, **more: Any) -> dict[str, Any]:
        """One call: placed, sampled, kept."""
        request = self.session.register_request(body)
        call = self.session.place(messages=messages, now=6.0, **more)
        request.call = call
        ids = np.array([*self.tokens.convert_tokens_to_ids(list(text)), self.ends[1]], np.int32)
        spans = [m.VersionSpan(AT, "d", 0, 1, AT), m.VersionSpan(AT, "e", 1, len(ids), AT)]
        logprobs = np.linspace(-1, 0, len(ids), dtype=np.float32)
        kept = [np.unique([token, 3]) for token in ids.tolist()]
        support = SampledSupport.from_lists(kept, 400)
        routed = experts_of(np.concatenate([call.prompt_ids, ids]))
        node = self.session.on_result(
            call, ids, logprobs, spans, "stop", now=7.0, support=support, routed=routed
        )
        assert node is not None and node.answer is not None
        request.answer = b"bytes of " + body
        self.journal.append_answer(self.session, request)
        return node.answer

    def play(self) -> list[Any]:
        """A row of two calls, a branch, an excluded call; the messages of the first row."""
        talk = [USER, self.answer(b"a", [USER], "one", tools=[TOOL])]
        talk.append({"role": "user", "content": "go on"})
        talk.append(self.answer(b"b", talk, "two ", tools=[TOOL], stop=["zz"]))
        self.answer(b"c", [*talk[:2], {"role": "user", "content": "else"}], "three")
        self.answer(b"d", [USER], "beside", aside=True)
        return talk


def experts_of(tokens: np.ndarray) -> RoutedExperts:
    """Experts of the tokens but the last, made from their ids and positions."""
    read = tokens[:-1]
    ids = np.stack([read % 7, 7 + np.arange(len(read)) % 3], -1)
    return RoutedExperts(ids[:, None].astype(np.uint16), 10)


def tokens_of(row: m.TrainingSequence) -> np.ndarray:
    return np.concatenate([np.frombuffer(x, "<i4") for x in (row.prompt_tokens, row.tokens)])


def test_a_restored_session_is_the_one_that_was_kept(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    talk = recorded.play()
    before = recorded.session
    before.refusals.add(CallRefused(400, "invalid_value", "stop: give a text"))
    before.reported = 4
    recorded.journal.append_sent(recorded.session, before.requests[0])
    recorded.journal.append_progress(before)
    assert recorded.path.stat().st_mode & 0o777 == 0o600
    assert recorded.path.parent.stat().st_mode & 0o777 == 0o700
    ((opening, records),) = SessionJournal(tmp_path / "sessions").read()
    assert opening.key == "key" and [x.ticket for x in records if x.ticket][-1] == before.ticket
    after = recorded.new_session()
    restore(after, records, 8.0)
    assert after.last is not None and after.last.number == 2  # the newest that is trained
    assert after.build_training_rows() == before.build_training_rows()
    assert len(after.build_training_rows()) == 2
    for row in after.build_training_rows():
        support = SampledSupport.decode(row.support, len(row.mask))
        assert np.array_equal(support.sizes > 0, np.frombuffer(row.mask, np.uint8) > 0)
        assert support.contains(np.frombuffer(row.tokens, "<i4")).all()
        assert row.routed == experts_of(tokens_of(row)).encode()
    assert after.describe(8.0) == before.describe(8.0) and after.reported == 4
    own = [
        [(x.text_digest, {at: one.number for at, one in x.ours.items()}) for x in each.tree.nodes]
        for each in (before, after)
    ]
    assert own[0] == own[1] and {1: 0} in [numbers for _, numbers in own[1]], "its own answers"
    # the next call goes on behind the same one, from the same stream
    talk.append({"role": "user", "content": "more"})
    for messages, tools in ((talk, [TOOL]), ([USER], [])):
        old, new = (each.place(messages=messages, tools=tools, now=9.0) for each in (before, after))
        assert (new.number, new.stream_key) == (old.number, old.stream_key)
        assert new.prompt_ids.tolist() == old.prompt_ids.tolist()
        above, earlier = new.parent, old.parent
        assert (above and above.number) == (earlier and earlier.number)
    # a retry is given its bytes, with and without a word of it; an answer that went out is no retry
    assert after.register_request(b"a", retry=True).answer == b"bytes of a"
    assert after.register_request(b"a").answer is None
    assert after.register_request(b"b").answer == b"bytes of b"


def test_an_answer_that_went_out_is_noted(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.answer(b"a", [USER], "one")
    (answered,) = recorded.session.requests
    assert answered.call is not None
    open_one = HarnessRequest(b"b", "", call=answered.call)
    refused, lost = HarnessRequest(b"b", ""), HarnessRequest(b"b", "", answer=b"x")
    for request in (refused, open_one, lost, answered):
        recorded.journal.append_sent(recorded.session, request)
    sent = [record.sent for record in read_records(recorded.path)]
    assert sent == [None, None, answered.call.number]
    # the end of a run removes what was kept
    recorded.journal.clear()
    assert list(recorded.journal.read()) == [] and list(tmp_path.rglob("1.0.1*")) == []


def test_a_call_that_was_open_does_not_count_in_a_restored_session(tmp_path: Path) -> None:
    """The agent repeats it, which agent.max_calls must permit."""
    recorded = Recorded(tmp_path)
    recorded.session.place(messages=[USER], now=5.0)
    recorded.answer(b"a", [{**USER, "content": "else"}], "one")
    after = recorded.new_session()
    restore(after, read_records(recorded.path), 8.0)
    assert (recorded.session.calls, after.calls) == (2, 1)
    assert {request.connections for request in after.requests} == {0}


def test_a_torn_tail_costs_the_record_it_is_of(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    sizes = [recorded.path.stat().st_size]
    recorded.answer(b"a", [USER], "one")
    sizes.append(recorded.path.stat().st_size)
    whole = recorded.path.read_bytes()
    for end in range(sizes[0], sizes[1]):
        recorded.path.write_bytes(whole[:end])
        assert len(read_records(recorded.path)) == 1
        assert recorded.path.stat().st_size == sizes[0]  # what follows is read again
    damaged = bytearray(whole)
    damaged[-3] ^= 1
    recorded.path.write_bytes(damaged)
    assert len(read_records(recorded.path)) == 1


def test_a_bad_file_costs_that_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Recorded(tmp_path)
    other = recorded.path.parent / "2.0.1"
    other.write_bytes(b"nonsense")
    assert [x.name for x, _ in SessionJournal(tmp_path / "sessions").read()] == ["1.0.1"]
    assert not other.exists() and "2.0.1: it does not begin with" in capsys.readouterr().err
    # a link in the place of a file is not followed, and the session goes on without
    recorded.path.unlink()
    os.symlink(tmp_path / "elsewhere", recorded.path)
    recorded.answer(b"a", [USER], "one")
    recorded.answer(b"b", [USER], "two")
    assert not (tmp_path / "elsewhere").exists()
    reason = "links are not followed there: remove it"
    assert capsys.readouterr().err.count(f"{reason}: a restart ends this session") == 1


class Process:
    """A gateway process of a run, with the test in the place of buffer and generators."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        (run_dir / "run_id").write_text("run")
        self.gateway = service.Gateway(config, run_dir, source=SessionApi)
        self.gateway.socket.close()
        self.wire = self.gateway.socket = Wire()
        assert isinstance(self.gateway.sources[""], SessionApi)
        self.door = self.gateway.sources[""]
        self.door.restore_sessions()

    async def ask(self, session: Session, body: bytes, tokens: int) -> None:
        """One call and its answer, as the endpoint serves it."""
        door = self.door
        request = session.register_request(body)
        request.call = session.place(text="ab=", now=door.current_time())
        drawing = asyncio.create_task(door.draw(session, request.call))
        await asyncio.sleep(0)
        (number,) = self.gateway.router.open
        at = self.gateway.router.open[number].message.min_version
        ids, logprobs = np.ones(tokens, "<i4").tobytes(), np.zeros(tokens, "<f4").tobytes()
        spans = [m.VersionSpan(at, "d", 0, tokens, at)]
        self.gateway.on_result(m.CallResult(number, ids, logprobs, spans, "stop"))
        assert await drawing is not None
        request.answer = b"answer"
        assert session.name in door.journal.files
        door.journal.append_answer(session, request)

    def score(self, opened: Session, reward: float) -> None:
        opened.set_reward(reward, now=self.door.current_time())
        self.door.on_change(opened)

    def kill(self) -> None:
        """End without a word: nothing but the files is left."""
        self.gateway.calls_socket.close()
        if self.gateway.rewards is not None:
            self.gateway.rewards.close()


def test_a_new_process_delivers_each_sample_once(config: Config, tmp_path: Path) -> None:
    async def play() -> None:
        first = Process(config, tmp_path)
        first.gateway.accept_tickets([ticket(1)])
        ended, going = [await first.door.lease(name, 0.0) for name in "ab"]
        assert ended is not None and going is not None
        await first.ask(ended, b"x", 2)
        await first.ask(going, b"y", 3)
        first.gateway.renew()  # the buffer is told of five tokens
        first.score(ended, 1.0)
        first.gateway.tick(first.door.current_time())
        (old,) = first.gateway.outbox.fresh
        first.kill()

        second = Process(config, tmp_path)
        gateway, door = second.gateway, second.door
        # the one that had ended goes out again as it was, under the same attempt
        (sample,) = gateway.outbox.fresh
        assert msgspec.structs.replace(sample, generated_at=old.generated_at) == old
        # the other is found by its name, key and lease, and waits for its sample's next grant
        opened = door.find(going.name)
        assert opened is not None and opened.api_key == going.api_key
        assert await door.lease("b", 0.0) is opened and going.name in door.journal.files
        assert gateway.begun == {(1, 0, None), (1, 1, None)} and opened.seed == going.seed
        assert opened.register_request(b"y", retry=True).answer == b"answer"
        waiting = opened.place(text="ab=1", now=door.current_time())
        drawing = asyncio.create_task(door.draw(opened, waiting))
        await asyncio.sleep(0)
        assert not gateway.router.open
        gateway.request_samples()
        (asked,) = [x for x in second.wire.sent if isinstance(x, m.TicketRequest)]
        assert asked.samples == 1
        gateway.renew()
        (report,) = [x for x in second.wire.sent if isinstance(x, m.LeaseRenewal)]
        # the lease is not claimed; tokens that were reported before are not counted again
        assert not report.judging and report.drawn == 0
        granted = msgspec.structs.replace(ticket(1, samples=2), attempt=7, samples=[1])
        gateway.accept_tickets([granted])
        (number,) = gateway.router.open
        one = np.ones(1, "<i4").tobytes(), np.zeros(1, "<f4").tobytes()
        gateway.on_result(m.CallResult(number, *one, [m.VersionSpan(AT, "d", 0, 1, AT)], "stop"))
        await drawing
        second.kill()

        # killed again: the answer that never left is lost, the new attempt is not
        third = Process(config, tmp_path)
        opened = third.door.find(going.name)
        assert opened is not None and opened.attempt == 7
        assert opened.adopted == [(1, 3)] and opened.tokens == 3
        third.score(opened, 0.5)
        third.gateway.accept_tickets([msgspec.structs.replace(granted, attempt=9)])
        third.gateway.tick(third.door.current_time())
        samples = {(x.sample, x.attempt): x for x in third.gateway.outbox.fresh}
        assert samples.keys() == {(0, 1), (1, 9)}
        assert samples[1, 9].adopted == [(1, 3), (7, 0)] and samples[1, 9].reward == 0.5
        # files stay until the buffer has the samples
        files = tmp_path / "sessions-0"
        third.door.open_sessions()
        assert len(list(files.iterdir())) == 2
        (frame,) = third.gateway.outbox.take_frames(0.0, flush=True)
        acks = [(x.ticket, x.sample, x.attempt, "stored") for x in frame.samples]
        third.gateway.outbox.on_acks(m.DeliveryAcks(0, acks, 1 << 20, None), 0.0)
        third.door.open_sessions()
        assert not list(files.iterdir())
        third.kill()

    asyncio.run(play())


async def begin(process: Process) -> Session:
    """A leased session with an answer of two tokens."""
    process.gateway.accept_tickets([ticket(1)])
    session = await process.door.lease("a", 0.0)
    assert session is not None
    await process.ask(session, b"x", 2)
    return session


def test_a_session_being_judged_is_judged_by_the_next(config: Config, tmp_path: Path) -> None:
    first = Process(config, tmp_path)
    going = asyncio.run(begin(first))
    going.judge(first.door.current_time())
    first.door.journal.append_progress(going)
    first.kill()
    second = Process(config, tmp_path)
    opened, rewards = second.door.find(going.name), second.gateway.rewards
    assert opened is not None and rewards is not None and opened.state == "judging"
    for _ in range(2):
        second.gateway.tick(second.door.current_time())
    assert [x.key for x in rewards.collect()] == [(opened.number, 0, 0)]
    second.kill()


def test_a_learners_restart_while_the_gateway_is_down(config: Config, tmp_path: Path) -> None:
    first = Process(config, tmp_path)
    going = asyncio.run(begin(first))
    first.kill()
    second = Process(config, tmp_path)
    source = m.WeightsSource(2, "", "", "")
    second.gateway.announce(m.PolicyAnnouncement(Label(2, 0), "d", source))
    opened = second.door.find(going.name)
    assert opened is not None and opened.state == "open"
    again = msgspec.structs.replace(ticket(1), attempt=4, min_version=Label(2, 0))
    second.gateway.accept_tickets([again])
    asyncio.run(second.ask(opened, b"y", 1))
    second.score(opened, 1.0)
    second.gateway.tick(second.door.current_time())
    (sample,) = second.gateway.outbox.fresh
    assert sample.attempt == 4 and sample.adopted == [(1, 2)] and sample.calls == 2
    second.kill()


def test_port_and_key_are_kept(config: Config, tmp_path: Path) -> None:
    assert read_kept_port(tmp_path) == 0
    write_endpoint_files(tmp_path, "http://127.0.0.1:4321", "the-key")
    assert read_kept_port(tmp_path) == 4321
    process = Process(config, tmp_path)
    assert process.door.run_key == "the-key"
    process.kill()
