"""A buffer stands still in the middle of a run, another one goes on at another address from its
journal; the first one wakes and is over; or it is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from holding import allow, held
from process_kit import ROOT, SMALL
from run_kit import check_summary, children, finish, let_go, start, steps_done, wait_until
from several_hosts_kit import free_address, other_machine

from asyncrl.contract.errors import BufferTakenOver
from asyncrl.contract.messages import RunStatus
from asyncrl.records import buffer_leadership, metrics, rundir
from asyncrl.supervise import live
from asyncrl.transport.keys import make_keys

pytestmark = pytest.mark.slow

WAIT_S = 1800.0
ASK_S = 10.0
STEPS = 40
# so far the learner goes until everybody is there and the first buffer stands; then, until that one
# has woken
BEFORE, MEANWHILE = 20, 33
SETS = [
    *SMALL,
    f"learner.steps={STEPS}",
    "learner.groups=2",
    "evaluation.every=0",
    "reward.function=''",
    "generators=2",
    "durability.mode='disk'",
    "weights.transport='tcp'",
    "wires.lease_s=5",
]


class Hosts:
    """The processes of one run, each on what stands for a host."""

    def __init__(self, where: Path, model: Path) -> None:
        self.where, self.run_dir = where, where / "here"
        self.all: dict[str, subprocess.Popen[str]] = {}
        make_keys(where / "keys", 2)
        self.keys = str(where / "keys")
        self.sets = [*SETS, f"model.path={str(model)!r}"]
        self.is_allowed = where / "allowed"
        allow(self.is_allowed, BEFORE)

    def start(self, name: str, part: str, run_dir: Path, keys: str, *words: str) -> None:
        sets = [*self.sets, f"wires.curve_dir={keys!r}"]
        argv = [sys.executable, "-m", "asyncrl.cli", part, str(ROOT / "configs" / "demo.toml")]
        argv += ["--run-dir", str(run_dir), *words, *(x for each in sets for x in ("--set", each))]
        log = (self.where / f"{name}.log").open("w")
        self.all[name] = subprocess.Popen(
            argv, cwd=ROOT, env=held(batches=self.is_allowed), stderr=log, text=True
        )

    def log(self, name: str) -> str:
        return (self.where / f"{'buffer' if name == 'old' else name}.log").read_text()

    def committed(self, address: str) -> int:
        found = live.request_status(address, self.keys, ASK_S)
        return found.committed if isinstance(found, RunStatus) else -1

    def wait_for(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not what():
            ended = {name: process.poll() for name, process in self.all.items()}
            assert time.monotonic() < until and set(ended.values()) == {None}, {
                name: (code, self.log(name)[-1500:]) for name, code in ended.items()
            }
            time.sleep(0.05)

    def end(self) -> None:
        for process in self.all.values():
            process.kill()
            process.wait()
        for where in (self.run_dir, self.where / "there"):
            if (where / "run_id").exists():
                rundir.clean(where)


def test_a_buffer_that_slept_is_over_when_it_wakes(tmp_path: Path, small_model: Path) -> None:
    hosts = Hosts(tmp_path, small_model)
    first, weights, second = free_address(), free_address(), free_address()
    hosts.sets += [f"wires.address={first!r}", f"wires.weights_address={weights!r}"]
    copied = other_machine(tmp_path / "keys", tmp_path / "copied", "generator-1")
    try:
        for part in ("buffer", "learner", "generator"):
            hosts.start(part, part, hosts.run_dir, hosts.keys)
        # shares no directory: it hears of the other buffer from the learner
        hosts.start("far", "generator", tmp_path / "there", str(copied), "--index", "1")

        def both() -> bool:
            found = live.request_status(first, hosts.keys, ASK_S)
            return found is not None and {"generator-0", "generator-1"} <= found.peers.keys()

        hosts.wait_for(both)
        hosts.wait_for(lambda: hosts.committed(first) >= 2)
        old = hosts.all.pop("buffer")
        old.send_signal(signal.SIGSTOP)
        hosts.all["old"] = old
        hosts.start("new", "buffer", hosts.run_dir, hosts.keys, *["--take-over", second])
        hosts.wait_for(lambda: hosts.committed(second) >= 0)
        allow(hosts.is_allowed, MEANWHILE)
        hosts.wait_for(lambda: hosts.committed(second) >= BEFORE + 3)
        old = hosts.all.pop("old")
        old.send_signal(signal.SIGCONT)
        assert old.wait(WAIT_S) == BufferTakenOver.exit_code
        others = ("learner", "generator", "far")
        found_it = f"the run's buffer is now at {second}"
        hosts.wait_for(lambda: all(found_it in hosts.log(name) for name in others))
        allow(hosts.is_allowed, STEPS)
        codes = {name: process.wait(WAIT_S) for name, process in hosts.all.items()}
        assert codes == dict.fromkeys(("learner", "generator", "far", "new"), 0), {
            name: hosts.log(name)[-1500:] for name in codes
        }
    finally:
        hosts.end()
    said = [line for line in hosts.log("buffer").splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "the buffer of" in said[0] and f"at {second}): this one" in said[0]
    summary = json.loads((hosts.run_dir / "buffer_summary.json").read_text())
    ledger = summary["ledger"]
    assert summary["finished"] and summary["steps"] == STEPS
    assert summary["trajectories"] == STEPS * 2 * 4
    assert ledger["generated"] == sum(ledger.values()) - ledger["generated"] > 0
    assert ledger["orphaned"] == 0, "the learner went on in its life"
    rows = [json.loads(x) for x in (hosts.run_dir / "trained.jsonl").read_text().splitlines()]
    by_batch = {row["batch"]: row for row in rows}
    assert sorted(by_batch) == list(range(STEPS))
    tickets = [
        ticket
        for row in by_batch.values()
        for begin, end in row["tickets"]
        for ticket in range(begin, end + 1)
    ]
    assert len(tickets) == len(set(tickets)) == STEPS * 2, "nothing is trained twice"
    whose = [buffer_leadership.read(p) for p in buffer_leadership.list_term_files(hosts.run_dir)]
    assert [began.moved for began, _ in whose if began] == [False, True]
    assert "term 00000002 is process" in whose[0][1] and whose[1][1] == "ended"


@pytest.mark.parametrize("mode", ["process", "disk"])
def test_a_killed_buffer_costs_only_its_time(mode: str, tmp_path: Path, sort_model: Path) -> None:
    words = (
        "learner.steps=24",
        "learner.groups=8",
        "learner.group_size=4",
        "learner.checkpoint_every=5",
        f"durability.mode='{mode}'",
        "name='kill'",
    )
    process = start(tmp_path, sort_model, *words, hold=18)
    run_dir = tmp_path / "runs" / "kill"
    killed = [0]
    for at in (5, 12):
        wait_until(lambda at=at: steps_done(run_dir) >= at, process)
        # another one than was killed before
        wait_until(lambda: children(process.pid).get("buffer", killed[-1]) != killed[-1], process)
        killed.append(children(process.pid)["buffer"])
        os.kill(killed[-1], signal.SIGKILL)
    let_go(tmp_path)
    summary = finish(process, tmp_path)
    check_summary(summary, summary["lag"]["limit"])
    # the learner lived: nothing is written anew for it
    assert summary["steps"] == 24 and summary["ledger"]["orphaned"] == 0
    rows = [json.loads(line) for line in (run_dir / "trained.jsonl").read_text().splitlines()]
    assert {r["batch"] for r in rows} == set(range(24)) and summary["trajectories"] == 24 * 32
    assert (tmp_path / "stderr").read_text().count("SIGKILL") == 2


def test_a_killed_memory_buffer_ends_and_a_resume_goes_on(tmp_path: Path, sort_model: Path) -> None:
    words = ("learner.steps=20", "learner.checkpoint_every=2", "name='kill'")
    words += ("learner.groups=8", "learner.group_size=4")
    process = start(tmp_path, sort_model, *words, hold=15)
    run_dir = tmp_path / "runs" / "kill"
    wait_until(lambda: steps_done(run_dir) >= 6, process)
    os.kill(children(process.pid)["buffer"], signal.SIGKILL)
    let_go(tmp_path)
    assert process.wait(timeout=3600) == 3
    process = start(tmp_path, sort_model, "--resume", str(run_dir))
    summary = finish(process, tmp_path)
    # each batch counts once, over both lives
    assert summary["steps"] == 20 and summary["trajectories"] == 20 * 32
    assert summary["ledger"]["trained"] >= summary["tokens"] > 0
    # the clock of the second life goes on where the first one's stood
    times = [r["t"] for r in metrics.read(run_dir) if "reward/mean" in r]
    assert len(times) >= 20 and times == sorted(times)
    assert summary["wall_s"] == pytest.approx(times[-1], abs=0.01)
