"""Losses by hand, and by the length of answers."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bad_input_kit import refused
from process_kit import ENV, ROOT, SMALL, Ended, run_command
from run_kit import steps_done, wait_until
from shutdown_kit import left
from store_kit import sample, stale

from asyncrl.config import load
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from asyncrl.supervise import live
from asyncrl.supervise.report import run_view
from buffer.ledger import LedgerSums, read_bins

pytestmark = pytest.mark.slow


CLI = (sys.executable, "-m", "asyncrl.cli")


class Hand:
    """Terminals: `start` leaves a process running, `type_` waits for its end."""

    def __init__(self, tmp_path: Path, model: Path) -> None:
        self.tmp_path, self.dir, self.model = tmp_path, tmp_path / "r", model
        self.all: dict[str, subprocess.Popen[str]] = {}

    def argv(self, part: str, *words: str) -> list[str]:
        sets = [f"model.path={str(self.model)!r}", *SMALL, *(w for w in words if "=" in w)]
        flags = ["--run-dir", str(self.dir), *(w for w in words if "=" not in w)]
        return [*CLI, part, "configs/demo.toml", *flags, *(x for s in sets for x in ("--set", s))]

    def start(self, name: str, *words: str) -> subprocess.Popen[str]:
        part, _, index = name.partition("-")
        argv = self.argv(part, *words, *(["--index", index] if index else []))
        streams = {
            "stdout": subprocess.DEVNULL,
            "stderr": (self.tmp_path / f"{name}.err").open("w"),
        }
        self.all[name] = subprocess.Popen(argv, cwd=ROOT, env=ENV, text=True, **streams)
        return self.all[name]

    def refuse(self, code: int, said: str, part: str, *words: str) -> None:
        refused(run_command(self.argv(part, *words)), code, said)

    def stop(self, *names: str) -> None:
        for name in names:
            self.all[name].send_signal(signal.SIGINT)
            assert self.all[name].wait(timeout=600) == 130, self.said(name)[-2000:]

    def said(self, name: str) -> str:
        return (self.tmp_path / f"{name}.err").read_text()

    def doctor(self) -> Ended:
        return run_command([*CLI, "doctor", str(self.dir), "--json"])

    def heard(self) -> set[str]:
        """Those of whom the buffer has heard."""
        config = load.load(self.dir / "config.toml")
        status = live.request_status(rundir.get_current_buffer_address(config, self.dir), "", 10.0)
        return set(status.peers) if status is not None else set()

    def codes(self) -> dict[str, int]:
        return {name: p.wait(timeout=1800) for name, p in self.all.items()}

    def end(self) -> None:
        for p in self.all.values():
            p.kill()
            p.wait()
        if (self.dir / "run_id").exists():
            rundir.clean(self.dir)


@pytest.fixture
def hand(tmp_path: Path, small_model: Path) -> Iterator[Hand]:
    made = Hand(tmp_path, small_model)
    yield made
    made.end()


def state(hand: Hand, name: str) -> Callable[[], bool]:
    """Does doctor, without a buffer to ask, see the process run?"""
    return lambda: (
        (hand.dir / "config.toml").exists()
        and any(p["name"] == name and p["alive"] for p in hand.doctor().json["processes"])
    )


def test_it_ends_as_under_a_supervisor_and_who_comes_later_is_told(hand: Hand) -> None:
    generator = hand.start("generator-0")
    wait_until(state(hand, "generator-0"), generator)
    before = hand.doctor()
    # a run that begins, and no buffer yet
    assert before.code == 0 and before.json["running"] and not before.json["ended"]
    hand.start("learner")
    hand.start("buffer")
    assert hand.codes() == {"generator-0": 0, "learner": 0, "buffer": 0}, [
        hand.said(n)[-2000:] for n in hand.all
    ]
    names = "summary.json report.html trace.json model/model.safetensors weights_digest"
    assert all((hand.dir / name).exists() for name in names.split())
    # one of them wrote it, once
    assert [hand.said(n).count(f"report: {hand.dir}") for n in hand.all].count(1) == 1
    summary = json.loads((hand.dir / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["weights_digest"]
    assert summary["heldout_end"] is not None and summary["seed"] == 0
    events = json.loads((hand.dir / "trace.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert lanes >= {"generator-0", "learner"} and left(hand.dir) == []
    for part in ("generator", "learner", "buffer"):
        hand.refuse(6, "has ended", part)
    said = "--set learner.lr=0.5: the run has learner.lr = 0.003, not 0.5"
    hand.refuse(2, said, "learner", "learner.lr=0.5")
    after = hand.doctor()
    assert after.code == 0 and after.json["ended"] and after.json["committed"] == 6


def test_a_generator_may_leave_and_all_may_be_stopped(hand: Hand) -> None:
    """A lease lasts ten minutes here: what the one that left had held comes back as it said so."""
    words = ("learner.steps=4000", "wires.lease_s=600", "generators=2", "evaluation.every=0")
    for name in ("buffer", "learner", "generator-0", "generator-1"):
        hand.start(name, *words)
    wait_until(lambda: steps_done(hand.dir) >= 3, hand.all["learner"])
    # whom the buffer has heard has said that it lives, and ends when it is told to
    wait_until(lambda: {"generator-0", "generator-1"} <= hand.heard(), hand.all["learner"])
    said = f"of {hand.dir} is running already as process"
    hand.refuse(2, f"generator-1 {said}", "generator", *words, "--index", "1")
    hand.refuse(2, f"buffer {said} {hand.all['buffer'].pid}", "buffer", *words)
    leaver = hand.all.pop("generator-1")
    leaver.send_signal(signal.SIGINT)
    assert leaver.wait(timeout=600) == 130
    at = steps_done(hand.dir)
    # past all that it can have held
    wait_until(lambda: steps_done(hand.dir) >= at + 20, hand.all["learner"])
    assert "generator-1" not in {w["on"] for w in hand.doctor().json["waits"]}
    hand.stop("learner", "generator-0", "buffer")
    summary = json.loads((hand.dir / "summary.json").read_text())
    assert at + 20 <= summary["steps"] < 4000 and not (hand.dir / "model").exists()
    assert f"continue with: asyncrl run --resume {hand.dir}" in hand.said("buffer")
    dead = hand.doctor()
    assert dead.code == 4
    assert {p["name"]: p["code"] for p in dead.json["processes"]} == dict.fromkeys(
        ("buffer", "learner", "generator-0", "generator-1"), 130
    )
    expected = f"Not finished: {summary['steps']} of 4000 steps"
    assert expected in (hand.dir / "report.html").read_text() and left(hand.dir) == []


def test_a_buffer_that_was_killed_is_started_again(hand: Hand) -> None:
    """In `memory` mode nothing is left of it: one line says what to do, in every terminal."""
    words = ("learner.steps=4000", "wires.lease_s=600", "learner.checkpoint_every=2")
    for name in ("buffer", "learner", "generator-3"):
        hand.start(name, *words)
    wait_until(lambda: steps_done(hand.dir) >= 3, hand.all["learner"])
    doctor = hand.doctor().json
    assert {p["name"] for p in doctor["processes"]} == {"buffer", "learner", "generator-3"}
    listed = run_command([*CLI, "ls", str(hand.dir.parent), "--json"])
    assert [run["state"] for run in listed.json["runs"]] == ["running"]
    hand.all["buffer"].kill()
    hand.all.pop("buffer").wait()
    hand.start("buffer", *words)
    ended = {name: hand.all.pop(name) for name in ("learner", "generator-3")}
    assert {name: p.wait(timeout=1800) for name, p in ended.items()} == dict.fromkeys(ended, 3)
    line = "start learner and generators again, and the run continues from its last checkpoint"
    assert all(hand.said(name).count(line) == 1 for name in (*ended, "buffer"))
    assert "refused" not in hand.said("buffer")
    shown = run_command([*CLI, "doctor", str(hand.dir)]).out
    advice = [row for row in shown.splitlines() if "start it: " in row]
    assert len(advice) == 1 and "asyncrl learner " in advice[0] and "--index 3" in advice[0]
    assert "To try: add a generator" not in shown and "asyncrl buffer" not in advice[0]
    before = steps_done(hand.dir)
    hand.start("learner", *words)
    hand.start("generator-3", *words)
    wait_until(lambda: steps_done(hand.dir) > before, hand.all["learner"])
    assert "connected to the buffer at" in hand.said("generator-3")
    assert "trains batch" in hand.said("learner")
    hand.stop("learner", "generator-3", "buffer")


def test_mask_and_drop_say_how_long_the_answers_were() -> None:
    store, (a, b) = stale("mask", k=1)
    # 6 tokens, the first 3 two versions old
    store.deliver(sample(a, 0, (Label(1, 0), 3), (Label(1, 1), 2), (Label(1, 2), 1)), 0.0)
    groups, _ = store.ask(1, 2)
    assert groups and store.commit(2, Label(1, 3), "d3")
    assert read_bins(store.sum_ledger()["masked_stale"], "upto_") == {8: 3}
    # two fresh answers of 4 before it
    assert read_bins(store.sum_ledger()["trained"], "upto_") == {4: 8, 8: 3}
    store, (a, b) = stale("drop")
    store.deliver(sample(b, 0, (Label(1, 0), 17)), 0.0)
    store.deliver(sample(a, 0, (Label(1, 0), 1)), 0.0)
    assert store.ask(1, 2)[0] == []
    assert read_bins(store.sum_ledger()["dropped_stale"], "upto_") == {1: 1, 32: 17}


def test_the_report_shows_each_length_with_its_shares() -> None:
    kept, lost = LedgerSums(), LedgerSums()
    for length in (4, 4, 9):
        kept.add(length, 1, length, 1.0, faded=length / 2 if length == 9 else 0.0)
    lost.add(7, 1, 16, 0.0)
    lines = {"trained": kept, "masked_stale": lost, "filtered": LedgerSums()}
    rows = run_view.build_length_ledger({name: sums.as_dict() for name, sums in lines.items()})
    assert rows == [
        ("completion length", "tokens", "trained", "masked_stale", "faded"),
        ("3 to 4", "8", "100.00%", "0.00%", "0.00%"),
        ("9 to 16", "16", "56.25%", "43.75%", "28.12%"),
    ]


@pytest.mark.parametrize(
    ("on_exceed", "limit"), [("drop", "1"), ("mask", "1"), ("downweight", "1"), ("pace", "inf")]
)
def test_real_runs_keep_what_each_choice_promises(
    on_exceed: str, limit: str, asyncrl: Callable[..., Ended]
) -> None:
    words = "learner.steps=12 learner.groups=4 learner.group_size=4 evaluation.every=0 name='x' "
    words += f"staleness.max_lag={limit} staleness.on_exceed='{on_exceed}'"
    s = asyncrl("run", *words.split()).check().json
    ledger = s["ledger"]
    assert s["steps"] == 12
    assert sum(v for k, v in ledger.items() if k != "generated") == ledger["generated"]
    assert s["lag"]["max"] <= 1 or on_exceed in ("downweight", "pace")
    assert on_exceed == "mask" or ledger["masked_stale"] == 0
    assert on_exceed == "drop" or ledger["dropped_stale"] == ledger["abandoned"] == 0
    for name, x in s["ledger_lines"].items():
        if name != "lost_with_process":
            assert sum(read_bins(x, "upto_").values()) <= x["tokens"]
            assert name != "trained" or sum(read_bins(x, "upto_").values()) == x["tokens"]
    run_dir = Path(s["run_dir"])
    rows = run_view.build_length_ledger(s["ledger_lines"])
    report = (run_dir / "report.html").read_text()
    assert len(rows) > 1 and all(f">{row[0]}</td>" in report for row in rows[1:])
