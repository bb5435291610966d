from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from journal_kit import open_recorded
from store_kit import hello, sample, write

from asyncrl.config.tree import CurriculumConfig, MixedTaskConfig
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import Batch, MixturePosition, Prompt, SamplingSettings, Ticket
from asyncrl.contract.versions import Label
from buffer.evaluation import EvaluationPlan, Evaluations
from buffer.groups import StoreSettings
from buffer.journal import RecordedStore
from buffer.mixer import MixtureState, TaskMixer
from buffer.numbers import compute_task_metrics
from buffer.store import Store

GROUPS = 8
DRY_LINE = (
    "task b runs dry: its last 32 groups were all removed (the last one: filtered); removed groups "
    "are now replaced by those of the other tasks"
)
OUT_LINE = (
    "task file has run out of prompts after 2 passes (task.mixture.passes): its share goes to the "
    "other tasks"
)
Rewards = Callable[[Prompt], tuple[float, float]]


def part(name: str = "sort", **keys: Any) -> MixedTaskConfig:
    return MixedTaskConfig(name=name, **keys)


WEIGHTED = {"a": part(weight=5), "b": part(weight=3), "c": part(weight=2)}


def mixer(
    parts: Mapping[str, MixedTaskConfig] = WEIGHTED, lengths: Mapping[str, int] = {}
) -> TaskMixer:
    """Prompts of a task with a length repeat."""

    def prompt(title: str, index: int) -> Prompt:
        key = index % lengths.get(title, 1 << 30)
        return Prompt(key, f"{title}{key}", task=title)

    return TaskMixer(parts, prompt, {title: lengths.get(title) for title in parts})


def settings(**more: Any) -> StoreSettings:
    keys = {"batch": GROUPS, "group": 2, "steps": 1000, "sampling": SamplingSettings()}
    return StoreSettings(**keys | more)


def unused(index: int) -> Prompt:
    raise AssertionError("a mixture draws its prompts itself")


def store_of(mixed: TaskMixer, evaluations: Evaluations | None = None, **more: Any) -> Store:
    store = Store(settings(**more), unused, evaluations, mixed)
    assert hello(store, 1, 0, k=1)
    return store


def spread(prompt: Prompt) -> tuple[float, float]:
    return 0.0, 1.0


def grant(store: Store) -> list[Ticket]:
    return store.grant("g", 1, 10_000, 0.0)


def answer(store: Store, tickets: list[Ticket], rewards: Rewards = spread) -> None:
    for ticket in tickets:
        for number in ticket.samples:
            store.deliver(sample(ticket, number, reward=rewards(ticket.prompt)[number]), 0.0)


def train(store: Store) -> Batch:
    number = store.committed
    groups, why = store.ask(store.epoch, number)
    assert groups, why
    batch = store.make_batch(number)
    assert store.commit(number, Label(store.epoch, number + 1), f"d{number + 1}")
    return batch


def play(store: Store, batches: int, rewards: Rewards = spread) -> list[str]:
    trained: list[str] = []
    for _ in range(batches):
        while tickets := grant(store):
            answer(store, tickets, rewards)
        trained += train(store).tasks[:: store.settings.group]
    return trained


def shares(trained: list[str]) -> dict[str, float]:
    return {title: count / len(trained) for title, count in sorted(Counter(trained).items())}


def test_shares_hold_in_every_prefix() -> None:
    trained = play(store_of(mixer()), 50)
    assert shares(trained) == {"a": 0.5, "b": 0.3, "c": 0.2}
    for end in range(1, len(trained)):
        for title, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
            assert abs(trained[:end].count(title) - share * end) <= 1.5


def test_a_removed_group_is_replaced_by_one_of_its_task() -> None:
    """Two of three groups of `b` have equal rewards: its share of what is trained still holds."""

    def rewards(prompt: Prompt) -> tuple[float, float]:
        return (1.0, 1.0) if prompt.task == "b" and prompt.id % 3 else (0.0, 1.0)

    mixed = mixer()
    mixed.log = pytest.fail
    store = store_of(mixed, filter_no_spread=True)
    for title, share in shares(play(store, 50, rewards)).items():
        assert abs(share - {"a": 0.5, "b": 0.3, "c": 0.2}[title]) < 0.02, title
    wanted = {"task/a_weight": 0.5, "task/b_weight": 0.3, "task/c_weight": 0.2}
    for title, removed in (("a", 0), ("b", 242), ("c", 0)):
        wanted |= {f"task/{title}_removed": removed, f"task/{title}_dry": 0}
    assert store.mixer.compute_metrics(store.committed) == wanted


def test_a_schedule_moves_the_shares() -> None:
    parts = {"old": part(weight=[(0, 1.0), (10, 0.0)]), "new": part(weight=[(0, 0.0), (10, 1.0)])}
    trained = play(store_of(mixer(parts)), 16)
    by_batch = [trained[i * GROUPS : (i + 1) * GROUPS].count("new") for i in range(16)]
    assert by_batch[0] == 0 and set(by_batch[10:]) == {GROUPS} and by_batch == sorted(by_batch)
    assert sum(by_batch[:10]) == 36
    assert mixer(parts).compute_metrics(5)["task/new_weight"] == 0.5


def test_a_killed_buffer_draws_the_same_prompts(tmp_path: Path) -> None:
    """The journal replays the draws, with removed groups and pools of success rates."""
    eager = CurriculumConfig(easy=0.25, hard=0.5)
    parts = {"a": part("file", weight=2, curriculum=eager), "b": part()}

    def rewards(prompt: Prompt) -> tuple[float, float]:
        return (1.0, 1.0) if prompt.id % 3 == 0 else (0.0, 1.0)

    def opened(folder: str) -> RecordedStore:
        keys = {"prompt": unused, "mixer": mixer(parts, {"a": 10})}
        return open_recorded(tmp_path / folder, settings(filter_no_spread=True), **keys)

    def prompts(folder: str, kills: tuple[int, ...]) -> list[str]:
        store, drawn = opened(folder), []
        assert hello(store, 1, 0, k=1)
        for step in range(12):
            while tickets := grant(store):
                drawn += [ticket.prompt.text for ticket in tickets]
                answer(store, tickets, rewards)
            if step in kills:
                store.journal.close()
                store = opened(folder)
            train(store)
        store.journal.close()
        return drawn

    once = prompts("once", ())
    assert prompts("killed", (1, 4, 9)) == once and len(once) > 12 * GROUPS


def test_a_new_buffer_continues_from_the_checkpoint() -> None:
    """`memory`: the learner's checkpoint has the position, and what was not trained comes again."""
    wanted = play(store_of(mixer()), 9)
    first = store_of(mixer())
    trained = play(first, 3)
    answer(first, grant(first))
    batch = train(first)  # groups of the next batch are out
    trained += batch.tasks[::2]
    assert batch.mixture is not None and len(batch.mixture.due) == GROUPS
    kept = msgspec.json.decode(msgspec.json.encode(batch.mixture), type=type(batch.mixture))
    again = Store(settings(), unused, None, mixer())
    position = {"next_ticket": batch.next_ticket, "ledger": batch.ledger, "mixture": kept}
    assert hello(again, 2, 4, k=1, origin=1, **position)
    tickets = grant(again)
    assert [t.ticket for t in tickets[:GROUPS]] == list(range(4 * GROUPS, 5 * GROUPS))
    assert [t.prompt.id for t in tickets[:GROUPS]] == [index for _, index in batch.mixture.due]
    answer(again, tickets)
    trained += train(again).tasks[::2]
    assert trained + play(again, 4) == wanted
    check_ledgers(again)


def test_a_position_holds_what_was_drawn_and_removed() -> None:
    mixed, lines = mixer(), []
    mixed.log = lines.append
    for _ in range(7):
        mixed.draw(0)
    mixed.on_complete("a", 0, (1.0, 1.0))
    assert not mixed.state.passed, "its pools are all drawn alike"
    for dry, events in ((0, []), (1, [DRY_LINE])):
        for _ in range(31 if not dry else 1):
            mixed.on_removed("b", "filtered")  # type: ignore[arg-type]
        assert (mixed.compute_metrics(0)["task/b_dry"], lines) == (dry, events)
    position = mixed.make_position([("a", 3), ("gone", 1)], {})
    credit, due = (
        {key: pytest.approx(x) for key, x in {"a": -0.5, "b": 0.1, "c": 0.4}.items()},
        [("b", -1)] * 31,
    )
    indices = {"a": 4, "b": 2, "c": 1}
    assert position == MixturePosition(
        credit, indices, [("a", 3), ("gone", 1), *due], {"b": 32}, {}
    )
    mixed.restore_position(position)
    assert mixed.state == MixtureState(credit, indices, [("a", 3), *due], {"b": 32})
    assert TaskMixer().make_position([], {}) is None and not TaskMixer().compute_metrics(0)
    assert TaskMixer(WEIGHTED).draw(0) == ("a", 0)


def check_ledgers(store: Store) -> None:
    by_task = [ledger.compute_totals() for ledger in store.make_task_ledgers().values()]
    for name, line in store.sum_ledger().items():
        for key in ("tokens", "samples"):
            assert sum(totals[name][key] for totals in by_task) == line[key], (name, key)


def test_a_task_that_runs_dry_is_named_and_does_not_hold_up_the_others() -> None:
    dry = True

    def rewards(prompt: Prompt) -> tuple[float, float]:
        return (1.0, 1.0) if prompt.task == "b" and dry else (0.0, 1.0)

    mixed, lines = mixer(), []
    mixed.log = lines.append
    store = store_of(mixed, filter_no_spread=True)
    assert set(play(store, 6, rewards)) == {"a", "c"}
    assert lines == [DRY_LINE]
    assert store.mixer.compute_metrics(6)["task/b_dry"] == 1
    check_ledgers(store)
    dry = False
    assert set(play(store, 3, rewards)) == {"a", "b", "c"}
    assert store.mixer.compute_metrics(9)["task/b_dry"] == 0


def test_a_file_ends_after_its_passes() -> None:
    mixed, lines = mixer({"file": part("file", passes=2), "other": part()}, {"file": 6}), []
    mixed.log = lines.append
    store = store_of(mixed)
    trained = play(store, 5)
    assert trained.count("file") == 12 and trained[-GROUPS:] == ["other"] * GROUPS
    assert lines == [OUT_LINE]
    only = store_of(mixer({"file": part("file", passes=2)}, {"file": 6}))
    answer(only, grant(only))
    train(only)
    with pytest.raises(AsyncrlError, match=r"every task has run out of prompts .* before batch 1"):
        grant(only)
    names = ("task/file_weight", "task/file_removed", "task/file_dry")
    assert only.mixer.compute_metrics(1) == dict(zip(names, (0, 0, 1), strict=True))
    eager = CurriculumConfig(easy=0.25)
    mixed, drawn = mixer({"file": part("file", passes=3, curriculum=eager)}, {"file": 3}), []
    while draw := mixed.draw(0):
        drawn.append(draw[1])
        mixed.on_complete(*draw, (1.0, 1.0))
        assert mixed.compute_weights(0) in ({"file": 1.0}, {})
    assert drawn == [0, 1, 2, 4, 8]
    for lengths, second in (({"file": 1}, None), ({}, ("file", 1))):  # a generated task has no end
        mixed = mixer({"file": part("file", passes=1)}, lengths)
        assert [mixed.draw(0), mixed.draw(0)] == [("file", 0), second]


def test_pools_come_in_their_share_of_the_passes() -> None:
    """Prompts 0 to 3 are easy, 4 to 7 hard, and the others neither."""
    curriculum = CurriculumConfig(easy=0.25, hard=0.5, passing=0.5)
    parts = {"file": part("file", curriculum=curriculum)}

    def rewards(prompt: Prompt) -> tuple[float, float]:
        return ((1.0, 0.9), (0.0, 0.1), (0.0, 0.7))[min(prompt.id // 4, 2)]

    store, came = store_of(mixer(parts, {"file": 12})), Counter[int]()
    for _ in range(60):
        while tickets := grant(store):
            came.update(ticket.prompt.id for ticket in tickets)
            answer(store, tickets, rewards)
        train(store)
    assert [came[key] for key in range(12)] == [19, 18, 19, 19, *[35] * 4, 69, 68, 68, 68]
    passed = {key: (1.0, 0.0, 0.5)[key // 4] for key in range(12)}
    assert store.mixer.state.passed == {"file": passed}


def test_a_generated_task_is_in_one_pool() -> None:
    curriculum = CurriculumConfig(easy=0.25, easy_from=0.9)
    parts = {"easy": part(curriculum=curriculum), "other": part(curriculum=curriculum)}

    def rewards(prompt: Prompt) -> tuple[float, float]:
        return (1.0, 1.0) if prompt.task == "easy" else (0.0, 1.0)

    made = mixer(parts)
    made.on_complete("easy", 0, (1.0, 1.0))
    made.on_complete("easy", 1, (1.0, 0.5))
    assert made.state.passed == {"easy": {0: (0.5 + 0.5 / 16) * 15 / 16 + 0.5 / 16}}
    trained = play(store_of(mixer(parts)), 30, rewards)
    assert shares(trained[20 * GROUPS :])["easy"] == pytest.approx(0.2, abs=0.02)


def test_metrics_and_limits_of_each_task() -> None:
    def held_out(split: str, index: int) -> Prompt:
        return Prompt(index, "", split=split, task="ab"[index % 2])

    evaluations = Evaluations(
        EvaluationPlan(every=1, prompts=4, final_prompts=4, ood_prompts=2), held_out
    )
    fresh: list[tuple[int, Any]] = []
    evaluations.on_result = lambda *result: fresh.append(result)
    parts = {"a": part(weight=3), "b": part(max_new_tokens=3)}
    limits = {"b": 3}
    store = store_of(mixer(parts), evaluations, token_limits=limits)
    tickets = grant(store)
    assert {(t.prompt.task, t.sampling.max_new_tokens) for t in tickets} == {("a", 64), ("b", 3)}
    assert Counter(t.kind for t in tickets)["eval"] == 6
    for ticket in tickets:
        write(store, ticket, reward=float(ticket.prompt.task == "b"), length=3)
    (number, values), *_ = [x for x in fresh if "eval/heldout" in x[1]]
    assert number == 0
    assert (values["eval/heldout"], values["eval/a"], values["eval/b"]) == (0.5, 0.0, 1.0)
    assert values["eval/a_n"] == values["eval/b_n"] == 2
    assert {"eval/a-ood", "eval/b-ood"} <= {k for _, x in fresh for k in x}
    found = compute_task_metrics(train(store))
    assert found["task/a_share"] == 0.75 and found["task/b_share"] == 0.25
    assert (found["task/a_reward"], found["task/b_reward"]) == (0.0, 1.0)
    assert found["task/a_length"] == 3 and found["task/a_lag"] == 0
    write(store, grant(store)[0])


def test_too_many_failures_name_the_task() -> None:
    store = store_of(mixer(), error_budget=0.0)
    (ticket, *_) = grant(store)
    with pytest.raises(AsyncrlError, match="ticket 0 of task a, data: no number"):
        store.deliver(sample(ticket, 0, failed="data: no number"), 0.0)


def test_a_part_that_still_has_groups_cannot_be_left_out() -> None:
    store = store_of(mixer())
    grant(store)
    other = Store(settings(), unused, None, mixer({"a": part(), "b": part()}))
    with pytest.raises(AsyncrlError, match="groups of c, which the config lacks"):
        other.restore(store.snapshot())
