"""How a learner's life ends: what lies in the run directory by the time that the buffer hears of
it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from learner_end_kit import Buffer
from process_kit import ROOT

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from asyncrl.transport.ring import RingReader
from learner.loop import Learner
from learner.state import BatchCursor

MakeLearner = Callable[[], Learner]


@pytest.fixture
def learner(tmp_path: Path, small_model: Path) -> Iterator[Callable[[], Learner]]:
    made: list[Learner] = []

    def make() -> Learner:
        config = load.load(
            ROOT / "configs" / "demo.toml",
            [f"model.path={str(small_model)!r}", "learner.steps=2", "learner.threads=1"],
        )
        rundir.ensure(config, "", tmp_path / "run")
        one = Learner(config, tmp_path / "run")
        one.socket.close()
        one.socket = Buffer(tmp_path / "run")
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
    rundir.clean(tmp_path / "run")


def test_the_model_is_exported_before_the_buffer_hears_the_goodbye(learner: MakeLearner) -> None:
    """So whoever is killed after the buffer has said Finished leaves nothing undone."""
    one = learner()
    one.core.state.number = 2  # a life that finds the last checkpoint at the last step
    one.run_batches()
    assert one.finished
    assert one.socket.seen["LearnerGoodbye"] == ["model/config.json", "weights_digest"]
    assert one.socket.seen["LearnerHello"] == []


def test_a_run_that_goes_on_past_its_end_has_no_final_weights_until_its_new_end(
    learner: MakeLearner,
) -> None:
    one = learner()
    (one.run_dir / "weights_digest").write_text("of the end before")
    one.send_hello()
    assert one.welcomed and not (one.run_dir / "weights_digest").exists()


def test_a_learner_whose_ring_was_removed_makes_it_anew_while_it_waits(
    learner: MakeLearner,
) -> None:
    """A generator that is started then finds the weights, though no step has been made since."""
    one = learner()
    one.send_hello()
    shutil.rmtree(one.publisher.directory)
    one.sent["progress"] = 0.0
    one.handle_messages(0)
    reader = RingReader(one.publisher.directory, "late")
    assert reader.list_labels() == {Label(one.epoch, 0): one.digest}
    reader.close()


def test_a_buffer_found_elsewhere_is_asked_at_once_for_all_that_was_not_answered(
    learner: MakeLearner,
) -> None:
    one = learner()
    one.send_hello()
    one.repeat("ask 0", m.BatchRequest(one.epoch, 0))
    one.socket.sent.clear()
    one.waiting_for = "a batch"
    one.silent_since -= 1e6  # the one before would be given up
    one.socket.moved = True
    one.handle_messages(0)
    one.repeat("ask 0", m.BatchRequest(one.epoch, 0))
    assert m.BatchRequest(one.epoch, 0) in one.socket.sent


def test_at_the_end_it_waits_for_the_last_evaluation(learner: MakeLearner) -> None:
    one = learner()
    one.send_hello()
    one.core.state.number = one.config.learner.steps
    seen: list[str] = []

    def answer(timeout: float) -> None:
        seen.append(one.waiting_for)
        one.finished = True

    one.handle_messages = answer
    one.run_batches()
    assert seen == ["the last evaluation"]


def test_told_to_stop_it_leaves_a_checkpoint_and_exports_nothing(learner: MakeLearner) -> None:
    one = learner()
    one.send_hello()
    one.stopping = True
    one.run_batches()
    assert not one.finished
    assert list(one.directory.glob("number_0"))
    assert "LearnerGoodbye" not in one.socket.seen
    assert not (one.run_dir / "model").exists()


def test_what_an_earlier_program_did_not_keep_has_its_default() -> None:
    assert BatchCursor.read({"next_ticket": 3, "no more": 1}) == BatchCursor(next_ticket=3)
