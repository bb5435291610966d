"""A batch that kills its learner is set aside: by the rules of the store, and in a real run."""

import json
from pathlib import Path

import deadly_weight
import pytest
from journal_kit import state
from process_kit import ENV, Ended
from store_kit import hello, make, total, train, write

from asyncrl.config import load
from asyncrl.contract.messages import Prompt, SamplingSettings
from asyncrl.records import metrics, process_log
from asyncrl.supervise import doctor
from buffer.groups import StoreSettings
from buffer.journal import RecordedStore
from buffer.store import Store


def filled(store: Store) -> None:
    """Every ticket that there is room for, written."""
    for ticket in store.grant("g", 1, 99, 0.0):
        write(store, ticket)


def life(store: Store, epoch: int, before: str, *, number: int = 1, ask: int = 1) -> list[int]:
    """A learner's hello at version `number`, after a life that ended in the way `before`; the
    tickets of batch `ask`, which it is given."""
    assert hello(store, epoch, number, origin=epoch - 1, before=before, k=3)
    filled(store)
    groups, why = store.ask(epoch, ask)
    assert groups, why
    return [group.ticket for group in groups]


def begun(store: Store) -> Store:
    """Batch 0 is trained, batches of 2 groups of 2 samples are there."""
    filled(store)
    train(store, 0)
    return store


@pytest.mark.parametrize(
    "ends",
    [
        ["crashed"] * 2,
        ["killed"] * 4,
        ["", "killed", "crashed"],
        ["outside"] * 16,
        ["outside"] * 8 + ["crashed"],
    ],
)
def test_a_deadly_batch_is_set_aside_and_the_next_takes_its_place(ends: list[str]) -> None:
    store = begun(make(3, 2, 2))
    bad, after = store.ask(1, 1)[0], store.ask(1, 2)[0]
    bad, after = [g.ticket for g in bad], [g.ticket for g in after]
    before, excluded = total(store), []
    store.on_excluded = lambda batch: excluded.extend(x.ticket for x in batch.samples[::2])
    for epoch, how in enumerate(ends[:-1], 2):
        assert life(store, epoch, how) == bad and not store.aside and not excluded
    assert life(store, len(ends) + 1, ends[-1]) == after
    line = store.sum_ledger()["fatal"]
    assert excluded == bad and store.aside == 1 and (line["tokens"], line["samples"]) == (16, 4)
    assert total(store) >= before and not set(bad) & set(store.alive)
    epoch = store.epoch
    for number in range(1, 9):  # and it goes on to its end, no place is lost
        filled(store)
        store.ask(epoch, number)
        filled(store)  # what older epochs wrote too long ago for its batch
        train(store, number)
    assert store.committed == 9 and store.sum_ledger()["trained"]["samples"] == 36


def test_a_life_that_ended_elsewhere_or_well_is_not_counted() -> None:
    store = begun(make(3, 2, 2))
    bad = [g.ticket for g in store.ask(1, 1)[0]]
    for epoch, how in enumerate(["crashed", *["ended"] * 9], 2):
        assert life(store, epoch, how) == bad
    assert store.suspect == (bad, 2)
    for epoch in range(12, 16):  # it died before it was given anything
        assert hello(store, epoch, 1, origin=epoch - 1, before="crashed" if epoch > 12 else "ended")
    assert store.suspect == (bad, 2)
    # what can be trained is not at fault, whatever happens behind it
    life(store, 16, "crashed")
    train(store, 1)
    assert store.suspect == ([], 0)
    filled(store)
    other = [g.ticket for g in store.ask(16, 2)[0]]
    assert life(store, 17, "crashed") == bad, "an older checkpoint: batch 1 comes again"
    assert store.suspect == (other, 2)
    assert life(store, 18, "crashed") == bad and store.suspect == (bad, 2) and not store.aside


def test_a_learner_whose_checkpoint_lies_behind_the_batch_has_trained_it() -> None:
    store = begun(make(3, 2, 2))
    bad = [g.ticket for g in store.ask(1, 1)[0]]
    assert life(store, 2, "crashed") == bad and hello(store, 3, 2, origin=2, before="crashed", k=3)
    assert not store.aside and set(bad) <= set(store.retained)


def test_a_buffer_that_is_killed_between_two_lives_still_counts(tmp_path: Path) -> None:
    def opened() -> RecordedStore:
        settings = StoreSettings(2, 2, 9, SamplingSettings())
        store = RecordedStore(settings, lambda i: Prompt(i, f"p{i}"))
        return store.open(tmp_path, sync=False, now=0.0)

    store = opened()
    assert hello(store, 1, 0, k=3)
    begun(store)
    bad = [g.ticket for g in store.ask(1, 1)[0]]
    assert life(store, 2, "crashed") == bad
    for epoch in (3, 4):
        store.flush_journal()
        before = state(store)
        store.journal.close()
        store = opened()  # once from the records, once from a snapshot
        assert state(store).suspect == before.suspect and store.aside == before.aside == epoch - 3
        assert life(store, epoch, "crashed" if epoch == 3 else "ended") != bad and store.aside == 1


def test_under_injection_new_groups_stand_where_those_set_aside_stood() -> None:
    """So that the ones behind keep their batches, and with them their lags."""
    store = make(3, 2, 2, inject=0)
    for ticket in store.grant("g", 1, 4, 0.0):
        write(store, ticket)
    bad = [g.ticket for g in store.ask(1, 0)[0]]
    for epoch in (2, 3):
        assert hello(store, epoch, 0, origin=epoch - 1, before="crashed", k=3)
        if epoch == 2:
            assert [g.ticket for g in store.ask(2, 0)[0]] == bad
    assert store.aside == 1 and [g.position for g in store.alive.values()] == [0, 1]
    assert not set(store.alive) & set(bad)


def test_how_the_life_before_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine: list[str | int] = ["this start of it", 3]
    monkeypatch.setattr(process_log, "read_memory_kills", lambda: machine)

    def before() -> str:
        return process_log.find_previous_end(tmp_path, 99)

    assert before() == ""
    process_log.append_event(tmp_path, "learner", 99, "began")
    process_log.append_event(tmp_path, "generator-0", 5, "ended", code=1)
    assert before() == ""
    process_log.append_event(tmp_path, "learner", 7, "began")
    assert before() == "killed"
    for code, said in ((0, "ended"), (130, "ended"), (6, "ended"), (1, "crashed"), (5, "crashed")):
        process_log.append_event(tmp_path, "learner", 7, "ended", code=code)
        assert before() == said
    # a row of an older version, which does not tell of its machine's memory
    for code, said in ((-9, "killed"), (-15, "outside"), (-11, "crashed"), (137, "killed")):
        process_log.append_event(tmp_path, "learner", 7, "died", code=code)
        assert before() == said
    process_log.append_event(tmp_path, "learner", 7, "died", code=-9, asked=True)
    assert before() == "ended"


def test_a_kill_from_outside_is_told_from_one_for_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine: list[str | int] = ["this start of it", 3]
    monkeypatch.setattr(process_log, "read_memory_kills", lambda: list(machine))
    (tmp_path / "logs").mkdir()
    life = process_log.ProcessIncarnation(tmp_path, "learner", alone=False)
    (row,) = process_log.read_events(tmp_path)
    assert row["memory_kills"] == machine

    def before() -> str:
        return process_log.find_previous_end(tmp_path, 0)

    assert before() == "outside", "its supervisor died with it, and left no word"
    process_log.append_event(tmp_path, "learner", row["pid"], "died", code=-9)
    assert before() == "outside"
    machine[1] = 4
    assert before() == "killed", "the kernel has killed somebody since it began"
    machine[:] = ["its next start", 0]
    assert before() == "outside", "the machine went, and the learner with it"
    machine.clear()
    assert before() == "killed", "nobody can tell"
    machine[:] = ["this start of it", 3]
    process_log.append_event(tmp_path, "learner", row["pid"], "died", code=-9, held_up=True)
    assert before() == "killed", "it stood still on what it had"
    process_log.append_event(tmp_path, "learner", row["pid"], "died", code=-11)
    assert before() == "crashed"
    life.release()


def test_this_machine_tells_how_many_it_has_killed_for_want_of_memory() -> None:
    told = process_log.read_memory_kills()
    assert process_log.read_memory_kills()[:1] == told[:1]
    lines = Path("/proc/vmstat").read_text().splitlines()
    assert bool(told) == any(line.startswith("oom_kill ") for line in lines)
    assert not told or isinstance(told[1], int)


@pytest.mark.parametrize("mode", ["process"])
def test_a_run_goes_on_without_the_batch_that_kills_its_learner(
    mode: str, tmp_path: Path, asyncrl: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, deadly_weight.VARIABLE, str(tmp_path / "mark"))
    done: Ended = asyncrl(
        "run",
        "name='deadly'",
        "learner.steps=8",
        "learner.groups=4",
        "learner.checkpoint_every=1",
        f"durability.mode='{mode}'",
        "correction.function='deadly_weight:weight'",
        "correction.proximal='recompute'",
    )
    run_dir = tmp_path / "runs" / "deadly"
    assert done.code == 0, done.err[-3000:]
    assert done.json["steps"] == 8
    line = done.json["ledger_lines"]["fatal"]
    (kept,) = (run_dir / "set_aside").glob("*.jsonl")
    rows = [json.loads(row) for row in kept.read_text().splitlines()]
    assert line["samples"] == len(rows) == 4 * done.json["trajectories"] // 32
    assert line["tokens"] == sum(len(row["tokens"]) for row in rows) > 0
    assert len({row["ticket"] for row in rows}) == 4
    # said in the log, on the terminal, in the report, by doctor
    (log,) = (run_dir / "logs").glob("attempt_*/buffer.log")
    assert f"are kept in {kept}" in log.read_text()
    assert "1 batch was excluded" in done.err and "exit code 66" in done.err
    assert done.err.count("starting learner again") == 2
    assert "1 batch was excluded" in (run_dir / "report.html").read_text()
    assert metrics.read(run_dir)[-1]["step"] == 8
    config = load.load(run_dir / "config.toml")
    assert doctor.examine_run(config, run_dir, None)["set_aside"] == [str(kept)]
