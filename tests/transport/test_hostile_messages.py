"""Random messages of every kind, most of them nonsense, among those of a run: none ends the buffer,
and its journal folds."""

import contextlib
import dataclasses
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hostile_messages_kit import F4, GOOD, greeting, honest_hello
from journal_kit import state
from process_kit import ROOT
from service_kit import SMALL
from trajectory_kit import trajectory

from actors.turn import PromptTooLong, build_failed_trajectory
from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract import waits
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.versions import Count, Label
from asyncrl.records import rundir
from asyncrl.tasks import get_task
from buffer import checks
from buffer.evaluation import EvaluationPlan, Evaluations
from buffer.groups import StoreSettings
from buffer.service import BufferService, open_store
from buffer.store import Store

NUMBERS = (-1, 0, 1, 2, 3, 4, 5, 7, 63, 2**31, 2**40, 2**40 + 1, 2**62, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))
LARGEST = sys.float_info.max
TEXTS = (
    "",
    "generator-0",
    "generator-1",
    "learner",
    "x" * 300,
    "\x1b[2J",
    "a|b",
    "a|1.5",
    "data: no",
    "machinery: no",
    "reward/mean",
    "no/metric",
)


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        (m.Finite, (-LARGEST, LARGEST), FLOATS[4:]),
        (waits.NonNegative, (0.0, LARGEST), (-1e-300, *FLOATS[4:])),
        (m.Positive, (1, 2**60 - 1), (0, 2**60)),
        (Count, (0, 2**60 - 1), (-1, 2**60)),
        (m.Vocabulary, (0, 2**31 - 1), (-1, 2**31)),
        (m.TicketNumber, (0, 2**48 - 1), (-1, 2**48)),
        (m.PathText, ("", "a" * 4096), ("a\0", "a" * 4097)),
        (m.NumberName, ("a" * 200,), ("a" * 201,)),
        (waits.SessionText, ("a" * 1000,), ("a" * 1001,)),
        (waits.Text, ("a" * 65536,), ("a" * 65537,)),
        (Annotated[list[int], m.FEW], ([1] * 256,), ([1] * 257,)),
        (Annotated[list[int], m.MANY], ([1] * 65536,), ([1] * 65537,)),
        (Annotated[list[int], m.MOST], ([1] * 2**20,), ([1] * (2**20 + 1),)),
    ],
)
def test_values_out_of_a_range_do_not_decode(
    kind: Any, taken: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    assert all(msgspec.convert(value, kind) == value for value in taken)
    for value in refused:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(value, kind)


def to_type(info: Any) -> Any:
    kind = {"IntType": int, "FloatType": float, "StrType": str}[type(info).__name__]
    bounds = {name: getattr(info, name) for name in info.__struct_fields__}
    bounds = {name: value for name, value in bounds.items() if value is not None}
    return Annotated[kind, msgspec.Meta(**bounds)] if bounds else kind


class Fuzz:
    """Values of a message's fields by their types, sometimes of the run as it is."""

    def __init__(self, service: BufferService, r: random.Random) -> None:
        self.service, self.r = service, r

    def number(self) -> int:
        s = self.service.store
        near = (s.epoch, s.committed, s.cursor, s.attempts, s.base, s.committed + 1, s.epoch + 1)
        return self.r.choice(near if self.r.random() < 0.6 else NUMBERS)

    def choose(self, info: Any, choose: Callable[[], Any]) -> Any:
        for _ in range(20):
            value = choose()
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(value, to_type(info))
        return value

    def make(self, kind: Any) -> Any:
        r, info = (
            self.r,
            msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind,
        )
        i = msgspec.inspect
        if isinstance(info, i.IntType):
            return self.choose(info, self.number)
        if isinstance(info, i.FloatType):
            return self.choose(info, lambda: r.choice(FLOATS))
        if isinstance(info, i.StrType):
            run = self.service.run
            return self.choose(info, lambda: run if r.random() < 0.2 else r.choice(TEXTS))
        if isinstance(info, i.BytesType):
            return bytes(4 * r.choice((0, 1, 2, 5)))
        if isinstance(info, i.BoolType):
            return r.random() < 0.5
        if isinstance(info, i.LiteralType):
            return r.choice(info.values)
        if isinstance(info, i.NoneType):
            return None
        if isinstance(info, i.UnionType):
            return self.make(r.choice(info.types))
        if isinstance(info, i.ListType):
            return [self.make(info.item_type) for _ in range(r.choice((0, 0, 1, 2, 3)))]
        if isinstance(info, i.DictType):
            return {
                self.make(info.key_type): self.make(info.value_type)
                for _ in range(r.choice((0, 1, 2)))
            }
        if isinstance(info, i.TupleType):
            return tuple(self.make(x) for x in info.item_types)
        if isinstance(info, i.NamedTupleType):
            return info.cls(*(self.make(f.type) for f in info.fields))
        assert isinstance(info, i.StructType), info
        fields = {f.name: self.make(f.type) for f in info.fields if f.required or r.random() < 0.5}
        if "protocol" in fields and r.random() < 0.9:
            fields |= {"protocol": m.PROTOCOL, "run": self.service.run}
        return info.cls(**fields)


def honest(service: BufferService, r: random.Random) -> m.FromPeer | None:
    """What a peer of the run would say next."""
    s = service.store
    if s.policy is None:
        return honest_hello(service.run)
    leases = [
        (g.ticket, g.lease.attempt, k, g.lease.granted)
        for g in s.alive.values()
        if g.lease
        for k in sorted(g.lease.todo)
    ]
    jobs = ((attempt, leased.job) for attempt, leased in s.evaluations.leased_jobs.items())
    leases += [(job.ticket, attempt, 0, job.label) for attempt, job in jobs]
    what = r.random()
    known = service.generators.get("generator-0")
    if (known is None or not known.is_greeted) and what < 0.5:
        return greeting(service)
    if what < 0.5 and leases:
        ticket, attempt, k, label = r.choice(leases)
        fields = {"spans": [m.VersionSpan(label, "", 0, 2, label)], "reward": float(k)}
        t = trajectory((ticket, k, attempt), (), [0, 0], [0, 0], **fields)
        return m.Delivery("generator-0", 7, 1, [t])
    if what < 0.7:
        return m.TicketRequest("generator-0", 7, 1, 8, None)
    if what < 0.85 and s.committed < s.settings.steps:
        return m.BatchRequest(s.epoch, s.committed)
    if not s.leased:
        return None
    return m.Commit(
        s.epoch,
        s.committed,
        Label(s.epoch, s.committed + 1),
        f"d{s.epoch}.{s.committed}",
        {"reward/mean": 0.5},
    )


SPAN = m.VersionSpan(Label(1, 0), "", 0, 1, Label(1, 0))
WHOLE, EMPTY = (msgspec.structs.replace(SPAN, start=at, end=2) for at in (0, 2))
MANY = dict.fromkeys(map(str, range(300)), 0.0)
NAN = float("nan")
LIMITS = StoreSettings(1, 2, 9, m.SamplingSettings(max_new_tokens=2), context=3)
SESSIONS = dataclasses.replace(LIMITS, session_tokens=1)
# what is changed, what is said of it, and the reason that it is counted under
BAD = [
    ({"tokens": b"\0" * 7}, "7 bytes of tokens, 8 of behavior_logprobs", "shape"),
    (
        {"tokens": b"", "mask": b"", "behavior_logprobs": b"", "spans": []},
        "with 0 tokens to train",
        "length",
    ),
    ({"mask": b"\1"}, "for 1 mask bytes", "shape"),
    ({"mask": b"\1\2"}, "its mask has other bytes", "shape"),
    ({"prompt_tokens": b"\0" * 3}, "3 of its prompt", "shape"),
    ({"behavior_logprobs": b"\0" * 4}, "4 of behavior_logprobs", "shape"),
    ({"behavior_logprobs": F4["half"] + F4["nan"]}, "above 0 or not finite", "number"),
    ({"behavior_logprobs": F4["half"] + F4["up"]}, "above 0 or not finite", "number"),
    ({"behavior_logprobs": F4["half"] + F4["-inf"]}, "above 0 or not finite", "number"),
    ({"behavior_logprobs": F4["half"] + F4["low"]}, "above 0 or not finite", "number"),
    ({"token_rewards": F4["up"]}, "4 of token_rewards for 2 mask bytes", "shape"),
    ({"token_rewards": F4["up"] + F4["inf"]}, "a token reward is not finite", "number"),
    ({"token_rewards": F4["inf"] + F4["up"]}, "a token reward is not finite", "number"),
    ({"reward": NAN}, "reward is nan", "number"),
    ({"reward_parts": MANY}, "a reward has 300 parts", "text"),
    ({"temperature": NAN}, "its temperature is nan", "number"),
    ({"temperature": 0.0}, "its temperature is 0", "number"),
    ({"generated_at": NAN}, "it was sampled at nan", "number"),
    ({"spans": []}, "its spans do not cover its 2 tokens of mask 1 in order", "shape"),
    ({"spans": [SPAN]}, "its spans do not cover its 2 tokens of mask 1 in order", "shape"),
    ({"spans": [SPAN, SPAN]}, "its spans are not in order in its 2 tokens", "shape"),
    ({"spans": [WHOLE, EMPTY]}, "do not cover its 2 tokens of mask 1 in order", "shape"),
    ({"segments": [("tool", 1, 3)]}, "its segments do not lie within its 2 tokens", "shape"),
    ({"segments": [("tool", -1, 1)]}, "its segments do not lie within its 2 tokens", "shape"),
    ({"segments": [("tool", 0, 1)] * 4}, "its segments do not lie within its 2 tokens", "shape"),
    ({"segments": [("x" * 201, 0, 1)]}, "its segments do not lie within its 2 tokens", "shape"),
    ({"tokens": b"\0\0\0\0\5\0\0\0"}, "tokens from 0 to 5, of a model with 5 tokens", "token"),
    ({"tokens": b"\0\0\0\0\xff\xff\xff\xff"}, "tokens from -1 to 0", "token"),
    ({"prompt_tokens": b"\5\0\0\0"}, "prompt_tokens from 5 to 5, of a model with 5", "token"),
    (
        {
            "tokens": b"\0" * 12,
            "mask": b"\1" * 3,
            "behavior_logprobs": F4["half"] * 3,
            "token_rewards": b"",
            "spans": [msgspec.structs.replace(SPAN, end=3)],
        },
        "3 tokens to train; a sample has 1 to 2 of these tokens .generator.max_new_tokens.",
        "length",
    ),
    ({"prompt_tokens": b"\0" * 8}, "2 tokens after a prompt of 2", "length"),
    *(
        (change, f"it is a session .{of} calls., but the run has no .agent.", "shape")
        for change, of in (
            ({"calls": 1}, "1 training sequences of 1"),
            ({"aside": 1}, "1 training sequences of 0"),
            ({"adopted": [(1, 1)]}, "1 training sequences of 0"),
            ({"rows": [m.TrainingSequence(b"", b"", b"", b"", [])]}, "2 training sequences of 0"),
        )
    ),
    ({"text": "x" * 100_000}, "texts of 100000 and 0 characters", "text"),
    ({"prompt_text": "x" * 100_000}, "texts of 0 and 100000 characters", "text"),
]


def answer(ticket: int, sample: int, **fields: Any) -> m.Trajectory:
    scalars = {"reward": 0.0, "reward_parts": {"a": 1.0}, "temperature": 1.0, "attempt": 1}
    return m.Trajectory(ticket=ticket, sample=sample, finish="stop", **(GOOD | scalars | fields))


def test_an_answer_that_could_not_be_begun_and_rewards_given_for_some_tokens_are_taken() -> None:
    """Nothing was drawn of the first; NaN among token rewards says that none was given."""
    at, prompt, sampling = Label(1, 0), m.Prompt(3, "long"), m.SamplingSettings()
    ticket = m.Ticket(3, 1, "train", prompt, [1], sampling, at, None, 0)
    why = m.RewardFailure("data", "the prompt is too long")
    failed = build_failed_trajectory(PromptTooLong(ticket, (3, 1, 1), why), at, "d")
    some = answer(3, 0, token_rewards=F4["up"] + F4["nan"])
    checks.check_samples([failed, some], m.ModelShape(5), LIMITS)
    checks.check_samples([failed], m.ModelShape(5), LIMITS)


@pytest.mark.parametrize(("change", "said", "reason"), BAD)
def test_a_deadly_answer_is_refused(change: dict[str, Any], said: str, reason: str) -> None:
    """In a durable run every later learner would end on it too."""
    good, bad = answer(3, 1), answer(3, 1, **change)
    checks.check_samples([good, good], m.ModelShape(5), LIMITS)
    for place in range(3):  # also in the company of good ones, which are looked at together
        many = [good] * place + [bad] + [good] * (2 - place)
        with pytest.raises(BadMessage, match=said) as error:
            checks.check_samples(many, m.ModelShape(5), LIMITS)
        assert str(error.value).startswith("ticket 3, sample 1: ") and error.value.reason == reason
    if "session" in said:  # of a run with an agent, whose limit is that of a session
        with pytest.raises(BadMessage, match=r"has 1 to 1 of these tokens \(agent\.max_tokens\)"):
            checks.check_samples([bad], m.ModelShape(5), SESSIONS)
    if "of a model with 5" in said:
        checks.check_samples([bad], m.UNKNOWN_MODEL, LIMITS)  # no learner has said what it has


def test_a_refused_answer_leaves_its_lease_and_an_honest_one_ends_it(tmp_path: Path) -> None:
    config = load.load(ROOT / "configs" / "demo.toml", SMALL)
    rundir.ensure("", tmp_path / "run")
    service = BufferService(config, tmp_path / "run")
    try:
        hello = honest(service, random.Random(0))
        service.handle(b"l", msgspec.structs.replace(hello, vocabulary=5))
        service.handle(b"g", greeting(service))
        service.handle(b"g", m.TicketRequest("generator-0", 7, 1, 8, None))
        service.answer()
        group = next(g for g in service.store.alive.values() if g.lease)
        todo = set(group.lease.todo)
        sample = answer(group.ticket, min(todo), attempt=group.lease.attempt, reward=1.0)
        high = msgspec.structs.replace(sample, tokens=b"\0\0\0\0\7\0\0\0")
        service.handle(b"g", m.Delivery("generator-0", 7, 2, [high]))
        assert service.refused.total() == 1 and set(group.lease.todo) == todo
        service.handle(b"g", m.Delivery("generator-0", 7, 3, [sample]))
        assert service.refused.total() == 1 and set(group.lease.todo) == todo - {sample.sample}
    finally:
        service.close()
        rundir.clean(tmp_path / "run")


SAID = {
    *(
        f"tokens were sampled with weights {sampled}, but its ticket asked for {asked}"
        for sampled, asked in (
            ("1.0", "1.1 or newer of its epoch"),
            ("1.0", "2.1 or newer of its epoch"),
            ("1.1", "2.1 or newer of its epoch"),
            ("2.1", "1.1 or newer of its epoch"),
            ("1.1", "exactly 1.0"),
        )
    ),
    "tokens were sampled with weights 1.2 (digest ), but no learner has announced them; the "
    "newest known are 1.1: stop the generator that runs other weights",
    "weights 1.1 sampled tokens on keys and values of 1.2, which is not an earlier version",
    *(
        f"it claims to continue the attempts [{adopted}] (attempt, tokens), but has 2 tokens in all"
        for adopted in ((3, 3), (3, -1), (4, 1))
    ),
    "attempt 2 is not one of its attempts",
    *(f"sample {number}, but its group has 1 samples, numbered from 0" for number in (-1, 1)),
    "ticket 9 was never granted; the next one is 3",
    *(f"attempt {number} was never granted; the last one is 5" for number in (0, 9)),
    "attempt 1 does not belong to evaluation ticket 1099511627776, sample 1",
}


def test_versions_that_a_ticket_did_not_ask_for_are_refused() -> None:
    """Older ones evade the limit; those of a newer epoch were never granted."""
    plan = Evaluations(EvaluationPlan(final_prompts=1), lambda split, index: m.Prompt(index, "p"))
    store = Store(StoreSettings(1, 1, 9, m.SamplingSettings()), lambda i: m.Prompt(i, "p"), plan)
    greet = honest_hello("run", vocabulary=0)
    assert store.follow_learner(greet)
    test, first = store.grant("g", 1, 2, 0.0)
    said: list[str] = []

    def answer(ticket: m.Ticket, *labels: Label, kv: Label | None = None) -> m.Trajectory:
        spans = [m.VersionSpan(x, "", at, at + 1, kv or x) for at, x in enumerate(labels)]
        many = len(labels)
        key = ticket.ticket, 0, ticket.attempt
        return trajectory(key, (), [0] * many, [0] * many, spans=spans)

    def refused(sample: m.Trajectory) -> str:
        with pytest.raises(BadMessage) as error:
            checks.check_sample(store, sample)
            checks.check_versions(store, sample)
        said.append(str(error.value))
        return error.value.reason

    def taken(sample: m.Trajectory) -> None:
        checks.check_sample(store, sample)
        checks.check_versions(store, sample)
        store.deliver(sample, 0.0)

    taken(answer(first, Label(1, 0)))
    assert store.ask(1, 0)[0] and store.commit(0, Label(1, 1), "d1")
    (second,) = store.grant("g", 1, 1, 0.0)
    assert second.min_version == (1, 1) and refused(answer(second, Label(1, 0))) == "limit"
    assert refused(answer(second, Label(1, 1), Label(1, 0))) == "limit"
    assert refused(answer(second, Label(1, 2))) == "version"  # of the future
    assert refused(answer(second, Label(1, 1), kv=Label(1, 2))) == "version"
    assert refused(answer(test, Label(1, 1))) == "limit"  # held-out answers are of version 0
    assert store.follow_learner(
        msgspec.structs.replace(greet, epoch=2, label=Label(2, 1), digest="d1", origin=1)
    )
    assert refused(answer(second, Label(2, 1))) == "limit"
    # a session that the next life's grant adopted: each version keeps to the grant it was drawn for
    again = next(x for x in store.grant("g", 1, 9, 0.0) if x.ticket == second.ticket)
    both = answer(again, Label(1, 1), Label(2, 1))
    assert refused(both) == "limit"
    adopted = msgspec.structs.replace(both, adopted=[(second.attempt, 1)])
    checks.check_sample(store, adopted)
    checks.check_versions(store, adopted)
    older = answer(again, Label(1, 0), Label(2, 1))
    assert refused(msgspec.structs.replace(older, adopted=[(second.attempt, 1)])) == "limit"
    for wrong in ([(second.attempt, 3)], [(second.attempt, -1)], [(again.attempt, 1)]):
        assert refused(msgspec.structs.replace(both, adopted=wrong)) == "ticket"
    assert refused(msgspec.structs.replace(both, adopted=[(first.attempt, 1)])) == "ticket"
    for wrong in ({"sample": 1}, {"sample": -1}, {"ticket": 9}, {"attempt": 9}, {"attempt": 0}):
        assert refused(msgspec.structs.replace(answer(second, Label(1, 1)), **wrong)) == "ticket"
    assert refused(msgspec.structs.replace(answer(test, Label(1, 0)), sample=1)) == "ticket"
    taken(answer(second, Label(1, 1), kv=Label(1, 0)))
    taken(answer(test, Label(1, 0)))
    assert {text.partition(": ")[2] or text for text in said} == SAID
    for number, label, why in (
        (0, Label(2, 2), "the commit of batch 0 in epoch 2 makes version 2.1, not 2.2"),
        (2, Label(2, 3), "batch 2 is committed but was not composed; the last composed batch is 0"),
    ):
        with pytest.raises(BadMessage) as error:
            checks.check_commit(store, number, label)
        assert str(error.value) == why
    with pytest.raises(BadMessage) as error:
        checks.check_batch_request(store, 9)
    assert str(error.value) == ("batch 9 was requested; the last of 9 batches is 8 (learner.steps)")


@pytest.mark.parametrize("mode", ["memory", "process"])
def test_no_message_ends_the_run(mode: str, tmp_path: Path) -> None:
    kinds, committed, refused = m.FromPeer.__args__, 0, 0
    for seed in range(12):
        r = random.Random(seed)
        config = load.load(
            ROOT / "configs" / "demo.toml",
            [*SMALL, "learner.steps=30", f"durability.mode='{mode}'"],
        )
        run_dir = tmp_path / str(seed)
        rundir.ensure("", run_dir)
        service = BufferService(config, run_dir)
        # these end a run, and are meant to
        service.store.settings.error_budget = service.store.settings.machinery_budget = 1e9
        fuzz = Fuzz(service, r)
        try:
            for _ in range(600):
                kind = r.choice(kinds)
                message = honest(service, r) if r.random() < 0.6 else fuzz.make(kind)
                if isinstance(message, m.LearnerHello) and message.epoch > 50:
                    continue  # a well-formed hello of a far epoch is a learner's right
                if message is not None:
                    data = msgspec.msgpack.encode(message)
                    try:
                        message = msgspec.msgpack.decode(data, type=m.FromPeer)
                    except msgspec.ValidationError:
                        continue  # the socket refuses it
                    service.handle(bytes([r.randrange(3)]), message)
                    service.answer()
                    service.flush()
                    service.make_status()
            committed, refused = (
                committed + service.store.committed,
                refused + service.refused.total(),
            )
            assert all(line.tokens >= 0 for line in service.store.make_ledger().lines.values())
            before = state(service.store)
            assert service.close() == ""
            if mode == "process":
                again = open_store(config, run_dir, get_task(config.task))
                again.settings.error_budget = again.settings.machinery_budget = 1e9
                after = state(again)
                assert {
                    f: (x, getattr(after, f))
                    for f in before.__struct_fields__
                    if (x := getattr(before, f)) != getattr(after, f)
                } == {}
        except Exception as e:
            raise AssertionError(f"seed {seed}: {type(e).__name__} {e}") from e
        finally:
            rundir.clean(run_dir)
    assert committed > 20 and refused > 300


CORPUS = defaultdict(list)
for _line in (Path(__file__).parents[1] / "data" / "fuzz_corpus.tsv").read_text().splitlines():
    _name, _verdict, _data = _line.split("\t")
    CORPUS[_name].append((_verdict, bytes.fromhex(_data)))


@pytest.mark.parametrize("name", CORPUS)
def test_each_mutant_gets_its_verdict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from lib.fuzz_targets import TARGETS

    target = TARGETS[name]()
    try:
        found = [(target.feed(data), data) for _, data in CORPUS[name]]
        honest = {target.feed(frame) for frame in target.frames}
    finally:
        target.close()
    assert found == CORPUS[name]
    assert "taken" in honest and {verdict for verdict, _ in CORPUS[name]} - {"taken"}


def test_every_socket_has_a_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from lib.fuzz_targets import TARGETS

    assert list(CORPUS) == list(TARGETS)
