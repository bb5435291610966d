"""A sample of several rows (a session whose calls forked): the loss numbers samples, rows exist in
the forward pass alone; the buffer counts what was drawn, once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from learner_step_kit import core, weights
from models_kit import model_fixture
from rows_kit import AT, GROUPS, SIZE, batch, ids, row, sample, sessions
from store_kit import make
from trajectory_kit import trajectory

from actors.gateway.service import build_limits
from asyncrl.algorithms.loss import REDUCTIONS
from asyncrl.config import load
from asyncrl.contract.errors import BadMessage, ConfigError
from asyncrl.contract.messages import (
    ModelShape,
    RewardFailure,
    SamplingSettings,
    TrainingSequence,
    Trajectory,
    VersionSpan,
)
from asyncrl.contract.versions import Label
from buffer import checks
from buffer.groups import StoreSettings, count_bytes
from buffer.ledger import sum_tokens
from learner.batch import pack, split_micro_batches

model_dir = model_fixture("abcdefgh", layers=2)


MODEL = ModelShape(9)
VARIANTS: list[dict[str, Any]] = [
    *({"loss": {"reduction": how}} for how in REDUCTIONS),
    {"loss": {"surrogate": "gspo", "reduction": "seq-mean-token-mean"}},
    {"loss": {"surrogate": "ppo"}, "correction": {"proximal": "behavior"}},
    {"correction": {"proximal": "interpolate", "level": "sequence", "bound": "truncate"}},
    {"correction": {"preset": "mis", "reject_lo": 0.1, "reject_hi": 10.0, "veto_below": 1e-9}},
    {"advantage": {"name": "opo"}},
    {"advantage": {"name": "reinforce_pp"}},
    {"advantage": {"truncated": "soft", "truncation_penalty": 0.5}},
    {"kl": {"reward": {"coefficient": 0.1}}},
    {"kl": {"loss": {"coefficient": 0.1, "estimator": "k3"}}},
    {"staleness": {"max_lag": 1, "on_exceed": "mask"}},
    {"learner": {"minibatches": 2, "epochs": 2}},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_split_sample_has_the_unsplit_gradient(model_dir: Path, variant: dict[str, Any]) -> None:
    moved = []
    for how in ("whole", "split", "shared"):
        learner = {"groups": GROUPS, "group_size": SIZE} | variant.get("learner", {})
        c = core(model_dir, **(variant | {"learner": learner}))
        before = weights(c)
        metrics = c.train(sessions(how))
        moved.append((weights(c) - before, metrics))
    (whole, numbers), *others = moved
    assert whole.norm() > 1e-4
    for other, found in others:
        assert (other - whole).abs().max() <= 1e-6 * max(1.0, float(whole.abs().max()))
        for name in ("reward/mean", "optim/grad_norm", "advantage/std"):
            assert found[name] == pytest.approx(numbers[name], rel=1e-4, abs=1e-6), name


def test_rows_stand_one_after_another_and_share_prompts_by_their_ids() -> None:
    rows = [
        row([1, 2], [3, 4, 5], [-1, -2, -3], [1, 0, 1]),
        row([1, 2], [3, 6], [-1, -4], [0, 1]),
        row([1, 2, 3], [7], [-5], [1]),
    ]
    alone = row([1, 2], [8, 8], [-6, -7], [1, 1])
    other = row([1, 2], [9], [-8], [1])
    first = sample(4, 0, rows)
    marked = msgspec.structs.replace(rows[1].spans[0], label=Label(1, 5), kv=Label(1, 3))
    first.rows[0] = msgspec.structs.replace(rows[1], spans=[marked])
    p = pack(batch([first, sample(4, 1, [alone]), sample(3, 0, [other])], [0, 4, 7]))
    assert first.length == 4 and first.token_count == 6
    assert p.count == 3 and p.row_offsets.tolist() == [0, 3, 4, 5]
    assert p.shared == [0, 0, 1, 0, 2]  # not over tickets
    assert p.offsets.tolist() == [0, 6, 8, 9] and p.seq.tolist() == [0] * 6 + [1, 1, 2]
    assert p.mask.tolist() == [True, False, True, False, True, True, True, True, True]
    assert p.token_lag.tolist() == [0, 0, 1, 0, 1, 1, 4, 4, 7]
    assert p.age.tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 0]
    assert p.behavior.tolist() == [-1, 0, -3, 0, -4, -5, -6, -7, -8]
    assert p.list_rows([1, 0]) == [3, 0, 1, 2] and p.count_sample_tokens() == [5 + 4 + 4, 4, 3]
    selected = p.select_rows([2, 0])
    assert selected["temperature"].tolist() == [1.0] * 4 and selected["groups"] == [2, 0, 0, 1]


def test_a_micro_batch_holds_whole_samples() -> None:
    long = [row([1], [2] * 9, [-1] * 9, [1] * 9)] * 3
    short = [row([1], [2] * 4, [-1] * 4, [1] * 4)]
    p = pack(batch([sample(0, 0, long), sample(0, 1, short), sample(0, 2, short)], [0, 0, 0]))
    assert split_micro_batches(p, [0, 1, 2], 1000) == [[1, 2, 0]]
    assert split_micro_batches(p, [0, 1, 2], 1000, rows=4) == [[1, 2], [0]]
    assert split_micro_batches(p, [0, 1, 2], 40) == [[1, 2], [0]]


def test_a_forked_session_has_its_reward_on_its_last_token_of_all() -> None:
    given = np.array([0.5], "<f4").tobytes()
    rows = [
        msgspec.structs.replace(row([1], [2], [-1], [1]), token_rewards=given),
        msgspec.structs.replace(row([3], [4], [-1], [1]), token_rewards=given),
    ]
    s = sample(0, 0, rows, reward=2.0)
    s.token_rewards = given
    loss = pack(batch([s, sample(0, 1, [row([1], [2], [-1], [1])], reward=3.0)], [0, 0]))
    assert loss.token_rewards is not None and loss.token_rewards.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    "variant",
    [
        {"advantage": {"name": "reinforce_pp", "gamma": 0.9}},
        {"advantage": {"name": "reinforce_pp"}, "kl": {"reward": {"coefficient": 0.1}}},
        {"advantage": {"name": "gae"}},
        {"advantage": {"name": "otb"}},
        {"loss": {"surrogate": "minpro"}, "correction": {"proximal": "behavior"}},
        {"kl": {"loss": {"coefficient": 0.1, "off_policy": "prefix"}}},
    ],
    ids=str,
)
def test_methods_of_order_refuse_forked_sessions(model_dir: Path, variant: dict[str, Any]) -> None:
    learner = {"groups": GROUPS, "group_size": SIZE}
    with pytest.raises(ConfigError, match=r'has forked.*agent\.fork = "end"'):
        core(model_dir, learner=learner, **variant).train(sessions("split"))
    core(model_dir, learner=learner, **variant).train(sessions("whole"))


def test_skipped_tokens_are_counted_where_they_were_drawn(model_dir: Path) -> None:
    """Early stopping leaves samples untrained: of them the tokens of mask 1, over all rows."""
    c = core(model_dir, learner={"groups": GROUPS, "group_size": SIZE}, stop={"ess_min": 1.0})
    for how in ("split", "shared"):
        data = sessions(how)
        assert c.train(data)["optim/steps"] == 0
        assert c.unused == [(s.length, 0) for s in data.samples]


SETTINGS = StoreSettings(1, 2, 3, SamplingSettings(), context=64, session_tokens=100)


def delivered(**fields: Any) -> Trajectory:
    rows = [row([1], [2, 3, 4], [-1, 0, -1], [1, 0, 1]), row([1, 2], [5, 5], [-1, -1], [1, 1])]
    return sample(0, 0, rows, **fields)


def test_the_ledger_counts_what_was_drawn_once_and_what_was_set_aside() -> None:
    store = make(group=2, steps=3)
    (ticket,) = store.grant("gateway-0", 1, 1, 0.0)
    assert ticket.samples == [0, 1]
    store.report_tokens("gateway-0", 1, 4 + 7 + 1)
    assert store.deliver(delivered(aside=7), 0.0) == "accepted"
    store.deliver(sample(0, 1, [row([1], [2], [-1], [1])]), 0.0)
    assert store.ask(1, 0)[0]
    message = store.make_batch(0)
    assert message.token_lags[0] == [(0, 1, 0), (2, 3, 0), (3, 5, 0)]
    assert store.stored_bytes == count_bytes(delivered()) + count_bytes(message.samples[1])
    store.commit(0, Label(1, 1), "d1")
    lines = store.sum_ledger()
    assert lines["trained"]["tokens"] == 5 and lines["set_aside"]["tokens"] == 7
    assert sum_tokens(lines) == store.count_generated_tokens() == 12
    late = delivered(aside=2)
    late.attempt = 1
    assert store.deliver(late, 0.0) == "accepted"  # told before: a copy
    assert sum_tokens(store.sum_ledger()) == 12


def test_a_failed_sessions_tokens_are_counted_and_its_rows_checked() -> None:
    store = make(group=2, steps=3)
    store.grant("gateway-0", 1, 1, 0.0)
    failed = delivered(failed=RewardFailure("data", "the agent ended"), aside=3)
    checks.check_samples([failed], MODEL, SETTINGS)
    store.settings.error_budget = 9.0
    assert store.deliver(failed, 0.0) == "failed"
    lines = store.sum_ledger()
    assert lines["failed"]["tokens"] == 4 and lines["set_aside"]["tokens"] == 3
    empty = trajectory((0, 1, 1), failed=RewardFailure("data", "no call"))
    checks.check_samples([empty], MODEL, SETTINGS)
    assert store.deliver(empty, 0.0) == "failed"
    empty.failed = ""
    with pytest.raises(BadMessage, match="1 training sequences with 0 tokens to train"):
        checks.check_samples([empty], MODEL, SETTINGS)


@pytest.mark.parametrize(
    ("change", "said", "reason"),
    [
        ({"mask": b"\1\0"}, "its spans do not cover its 1 tokens of mask 1 in order", "shape"),
        (
            {"spans": [VersionSpan(AT, "", 0, 1, AT)]},
            "its spans do not cover its 2 tokens of mask 1 in order",
            "shape",
        ),
        (
            {"spans": [VersionSpan(AT, "", 0, 3, AT)]},
            "its spans are not in order in its 2 tokens",
            "shape",
        ),
        (
            {"tokens": ids([5])},
            "4 bytes of tokens, 8 of behavior_logprobs and 0 of token_rewards",
            "shape",
        ),
        ({"tokens": ids([5, 9])}, "tokens from 5 to 9, of a model with 9 tokens", "token"),
        ({"behavior_logprobs": b""}, "8 bytes of tokens, 0 of behavior_logprobs", "shape"),
        ({"token_rewards": b"1234"}, "8 bytes of tokens", "shape"),
        (
            {"prompt_tokens": ids(range(63))},
            "2 tokens after a prompt of 63; generator.context is 64",
            "length",
        ),
    ],
)
def test_a_row_that_would_end_the_learner_is_refused(
    change: dict[str, Any], said: str, reason: str
) -> None:
    good = delivered()
    checks.check_samples([good], MODEL, SETTINGS)
    good.rows[0] = msgspec.structs.replace(good.rows[0], **change)
    place = "" if reason == "token" else "training sequence 1: "
    with pytest.raises(BadMessage, match=place + said) as error:
        checks.check_samples([good], MODEL, SETTINGS)
    assert error.value.reason == reason


def test_a_session_of_which_nothing_is_to_be_trained_is_refused() -> None:
    nothing = TrainingSequence(ids([1]), ids([2]), b"\0\0\0\0", b"\0", [])
    with pytest.raises(BadMessage, match="2 training sequences with 0 tokens to train"):
        checks.check_samples([sample(0, 0, [nothing, nothing])], MODEL, SETTINGS)


def test_a_session_without_a_limit_of_rows_has_no_more_than_the_buffer_takes() -> None:
    agent: dict[str, Any] = {"env": "a:B", "rows": 0}
    raw: dict[str, Any] = {"model": {"path": "m"}, "task": {"name": "calc"}, "agent": agent}
    config = load.build(raw)
    most = build_limits(config, config.agent).rows
    small = row([1], [2], [-1.0], [1])
    settings = replace(SETTINGS, session_tokens=2 * most)
    checks.check_samples([sample(0, 0, [small] * most)], MODEL, settings)
    with pytest.raises(BadMessage, match=f"{most + 1} training sequences"):
        checks.check_samples([sample(0, 0, [small] * (most + 1))], MODEL, settings)
    agent["rows"] = most + 1
    with pytest.raises(ConfigError, match=r"agent\.rows"):
        load.build(raw)


def test_a_run_without_sessions_takes_none() -> None:
    plain = msgspec.structs.replace(delivered(), rows=[])
    settings = StoreSettings(1, 2, 3, SamplingSettings(), context=64)
    for bad in (delivered(), delivered(aside=1)):
        with pytest.raises(BadMessage, match=r"the run has no \[agent\]"):
            checks.check_samples([bad], MODEL, settings)
    with pytest.raises(BadMessage, match="101 tokens to train; a sample has 1 to 100 of these"):
        long = row([1], [2] * 101, [-1] * 101, [1] * 101)
        checks.check_samples([sample(0, 0, [long])], MODEL, SETTINGS)
    assert plain.length == 2


def test_rows_survive_the_wire_and_older_records_have_none() -> None:
    whole = delivered(aside=3)
    whole.calls = 2
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=Trajectory)
    assert again == whole and again.list_rows() == whole.list_rows()
    fields = [field.name for field in msgspec.structs.fields(Trajectory)]
    assert fields[-7:] == ["rows", "aside", "calls", "adopted", "support", "routed", "images"]
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(whole))[:-7]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=Trajectory)
    assert (read.rows, read.aside, read.calls, read.adopted) == ([], 0, 0, [])
    assert (read.support, read.routed, read.images) == (b"", b"", [])


def test_the_limit_of_a_report_is_a_sessions() -> None:
    store = make(group=2, session_tokens=100)
    store.grant("gateway-0", 1, 1, 0.0)
    store.renew("gateway-0", 1, [(0, 1, 200)], 0.0)
    with pytest.raises(BadMessage, match="201 tokens so far; at most 200 are possible"):
        store.renew("gateway-0", 1, [(0, 1, 201)], 0.0)
