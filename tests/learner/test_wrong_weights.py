"""Samples of weights that are not what their label says, planted into real runs: refused with both
names, and nothing of them is trained on; and a loss that is not a number."""

import json
import os
import time
from pathlib import Path

import held_reward
import msgspec
import pytest
from process_kit import ENV, ROOT, demo_command, run_command
from run_kit import finish, start, steps_done, wait_until

from asyncrl.config.load import load
from asyncrl.contract.messages import (
    PROTOCOL,
    Delivery,
    GeneratorHello,
    Refusal,
    Trajectory,
    VersionSpan,
)
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from asyncrl.transport.sockets import PeerSocket

pytestmark = pytest.mark.slow

WRONG = "feedfacefeedface"


def plant(run_dir: Path, label: Label) -> str:
    """Speak to the buffer as a generator of other weights; returns why it is refused."""
    address = rundir.get_buffer_address(load(run_dir / "config.toml"), run_dir)
    socket = PeerSocket(address, run=rundir.read_run_id(run_dir))
    try:
        socket.send(
            GeneratorHello(
                PROTOCOL, rundir.read_run_id(run_dir), "generator-7", 1, 8, "elsewhere", os.getpid()
            )
        )
        span = VersionSpan(label, WRONG, 0, 3, label)
        planted = Trajectory(
            0, 0, 1, b"", b"\0" * 12, b"\0" * 12, b"\1" * 3, [span], 1.0, {}, "stop", 1.0
        )
        socket.send(Delivery("generator-7", 1, 1, [planted]))
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            reply = socket.recv(1.0)
            if isinstance(reply, Refusal):
                return reply.reason
        raise AssertionError("the buffer took it")
    finally:
        socket.close()


@pytest.mark.parametrize(
    "label", [Label(1, 1), Label(1, 999)], ids=["another digest", "a version nobody announced"]
)
def test_weights_that_are_not_the_learners_are_refused_with_both_names(
    label: Label, tmp_path: Path, sort_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "REWARD_GATE", str(tmp_path / "gate"))
    words = (
        *(*held_reward.SETS, "learner.steps=20", "learner.groups=4", "learner.group_size=4"),
        *("evaluation.every=0", "record.samples_every=1", "record.samples=0", "name='w'"),
    )
    process = start(tmp_path, sort_model, *words)
    run_dir = tmp_path / "runs" / "w"
    wait_until(lambda: steps_done(run_dir) >= 4, process)
    reason = plant(run_dir, label)  # the run is not over: it waits, at step 10 at the latest
    (tmp_path / "gate").touch()
    summary = finish(process, tmp_path)
    # one stranger's frame costs the run nothing
    assert summary["steps"] == 20 and summary["trajectories"] == 20 * 16
    assert str(label) in reason and WRONG in reason
    rows = [json.loads(x) for x in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 20 * 16 and WRONG not in {d for r in rows for d in r["digests"]}
    if label.number == 1:
        digests = {
            d
            for r in rows
            for (name, _, _), d in zip(r["versions"], r["digests"], strict=True)
            if name == str(label)
        }
        assert len(digests) == 1
        assert f"{WRONG} at the generator and {digests.pop()} at the learner" in reason
    else:
        assert "no learner has announced them; the newest known are 1." in reason
    assert (run_dir / "logs").is_dir() and any(
        "refused a Deliver" in p.read_text() for p in (run_dir / "logs").rglob("buffer*.log")
    )


WORDS = (
    *("learner.groups=4", "learner.group_size=4", "learner.steps=8", "evaluation.every=0"),
    *("correction.proximal='recompute'", "loss.surrogate='decoupled_ppo'"),
    *("correction.function='own:weights'", "name='n'"),
    # nothing ends because a process stood still
    "wires.connect_s=3600.0",
    "watchdog.startup_s=3600.0",
    "watchdog.floor_s=3600.0",
    "reward.deadline_s=600.0",
)


def test_three_bad_steps_in_a_row_end_the_run(tmp_path: Path, sort_model: Path) -> None:
    body = "calls = [0]\n\ndef weights(log_rho, *rest):\n    calls[0] += 1\n"
    body += "    return log_rho.exp() * (float('nan') if 2 <= calls[0] else 1.0)\n"
    (tmp_path / "own.py").write_text(body)
    env = ENV | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run_command(demo_command("run", tmp_path, sort_model, *WORDS), env=env)
    run_dir = tmp_path / "runs" / "n"
    assert done.code == 1, done.err[-3000:]
    last = done.err.splitlines()[-1]
    assert last.startswith(
        "error: the loss or its gradient was not finite 3 times in a row, last in batch 3; the "
        "batch is saved in"
    ), last
    saved = msgspec.msgpack.decode((run_dir / "bad_batch.msgpack").read_bytes())
    assert len(saved) == 16
    assert all(r["prompt"] and r["tokens"] and 0 <= r["reward"] <= 1 for r in saved)
