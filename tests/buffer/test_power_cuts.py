"""Power losses at every sync of the journal and of the checkpoints: what was promised is there."""

import shutil
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_kit import EXTRA, core, model_dir  # noqa: F401  # a fixture
from journal_kit import open_recorded, state
from power import Disk
from process_kit import until
from schedules import World

from asyncrl.config import load
from asyncrl.models import policy
from asyncrl.records import atomic_write, rundir
from buffer import journal as j
from buffer.groups import StoreSettings
from buffer.journal import RecordedStore
from buffer.store import Store
from learner import checkpoint, loop

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.close()


def test_the_simulated_disk_keeps_only_what_was_synced(disk: Disk, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_text("synced")
    atomic_write.sync_path(root / "a")
    atomic_write.sync_path(root)
    with (root / "a").open("a") as file:
        file.write(" and more")
    (root / "a").rename(root / "b")
    (root / "c").write_text("never")
    left = disk.cut(root, tmp_path / "one")
    assert {p.name: p.read_text() for p in left.iterdir()} == {"a": "synced"}
    atomic_write.sync_path(root)
    left = disk.cut(root, tmp_path / "two")
    assert {p.name: p.read_text() for p in left.iterdir()} == {"b": "synced", "c": ""}


@pytest.mark.parametrize("wait", [True, False])
def test_no_acknowledged_record_is_lost_at_any_sync(wait: bool, disk: Disk, tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    atomic_write.sync_path(tmp_path)
    atomic_write.sync_path(root)
    made: list[j.Journal] = []
    cuts = 0
    lock = threading.Lock()
    wrong: list[str] = []

    def look() -> None:
        nonlocal cuts
        with lock:
            promised = made[0].durable if made else 0
            cuts += 1
            left = disk.cut(root, tmp_path / "left")
            try:
                found = j.list_segments(left / "journal")
                numbers = [int(x) for x in (list(j.read(found[-1])) if found else [b"0"])]
                whole = numbers == list(range(numbers[0], numbers[-1] + 1))
                if not whole or numbers[-1] < promised:
                    wrong.append(f"{promised} promised, there are {numbers}")
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")
            shutil.rmtree(left)

    disk.at_sync = look
    log = j.Journal(root / "journal", b"0", sync=True, segment_bytes=300)
    made.append(log)
    for number in range(1, 40):
        log.append(b"%d" % number)
        until(lambda: log.write() or log.durable == log.appended)
        if log.is_full:
            log.rotate(b"%d" % number, wait=wait)
            if log.next is not None:
                futures.wait([log.next])
    assert log.number > 2 and cuts > 80
    log.close()
    disk.at_sync = lambda: None
    assert wrong == []


def test_a_store_comes_back_from_what_was_synced(disk: Disk, tmp_path: Path) -> None:
    """Random schedules in mode `disk`, the power cut in the middle of them."""
    cuts = 0
    for seed in range(60):
        where = [tmp_path / f"{seed}"]
        where[0].mkdir()

        def make(settings: StoreSettings, now: float = 0.0, where: list[Path] = where) -> Store:
            keys = {"sync": True, "now": now, "segment_bytes": 3000}
            return open_recorded(where[-1] / "journal", settings, **keys)

        world = World(seed, make=make)

        def cut(
            world: World = world, make: Any = make, where: list[Path] = where, seed: int = seed
        ) -> bool:
            nonlocal cuts
            store = world.store
            assert isinstance(store, RecordedStore)
            log = store.journal
            until(lambda: store.flush_journal() or log.durable == log.appended)
            before = state(store)
            cuts += 1
            left = disk.cut(where[-1], tmp_path / f"{seed}.{cuts}")
            log.close()
            shutil.rmtree(where[-1])
            disk.boot(left)
            where.append(left)
            world.store = make(world.settings, now=world.now)
            assert state(world.store) == before
            return True

        world.more_faults = [cut, cut, cut]
        world.faults += 3
        world.run()
        assert isinstance(world.store, RecordedStore)
        world.store.journal.close()
        shutil.rmtree(where[-1])
    assert cuts > 60


def test_told_checkpoints_outlive_each_sync(disk: Disk, tmp_path: Path, model_dir: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    atomic_write.sync_path(tmp_path)
    atomic_write.sync_path(run)
    root = run / "checkpoints"
    promised = -1
    cuts = 0

    def look() -> None:
        nonlocal cuts
        cuts += 1
        left = disk.cut(run, tmp_path / "left")
        claimed = checkpoint.list_epochs(left / "checkpoints", claimed=True)
        if promised >= 0:
            assert claimed, "no claimed epoch"
            directory = left / "checkpoints" / f"epoch_{claimed[-1]}"
            kept = checkpoint.list_numbers(directory)
            assert kept and kept[-1] >= promised, (kept, promised)
            assert [checkpoint.verify(directory / f"number_{n}") for n in kept] == [""] * len(kept)
        shutil.rmtree(left)

    disk.at_sync = look
    learner = core(model_dir)
    for life in range(3):
        _, origin, mine = checkpoint.start_epoch(root)
        assert origin == life
        directory = checkpoint.claim(mine, max(promised - 1, 0))
        for number in range(promised + 1, promised + 3):
            learner.state.number = number
            checkpoint.save(directory, learner, EXTRA, 2)
            promised = number
            look()
    assert cuts > 60


def test_final_digests_come_with_their_weights(disk: Disk, tmp_path: Path, model_dir: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    atomic_write.sync_path(tmp_path)
    atomic_write.sync_path(run)
    learner: Any = SimpleNamespace(core=core(model_dir), run_dir=run)
    expected = policy.compute_weights_digest(learner.core.model)
    there = 0

    def look() -> None:
        nonlocal there
        left = disk.cut(run, tmp_path / "left")
        if (left / "weights_digest").exists():
            there += 1
            assert (left / "weights_digest").read_text() == expected
            assert policy.compute_weights_digest(policy.load_policy(left / "model")) == expected
        shutil.rmtree(left)

    disk.at_sync = look
    loop.Learner.export(learner)
    assert there >= 1, "after the last sync it is there"


def test_a_run_directory_that_is_named_is_whole(disk: Disk, tmp_path: Path) -> None:
    atomic_write.sync_path(tmp_path)
    config = load.load(Path(__file__).resolve().parents[2] / "configs" / "demo.toml")
    toml = load.dump(config)
    run_dir = tmp_path / "runs" / "one"
    rundir.ensure(toml, run_dir)
    left = disk.cut(tmp_path, tmp_path.parent / f"{tmp_path.name}-left") / "runs" / "one"
    assert (left / "config.toml").read_text() == toml
    assert rundir.read_run_id(left) == rundir.read_run_id(run_dir)
