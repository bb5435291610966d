"""The main job, for real: buffer, generator and learner as a user starts them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from process_kit import ENV, ROOT, Ended, demo_command
from run_kit import FEW, check_summary, children, finish, let_go, start, steps_done, wait_until

from asyncrl.records import jsonl, metrics

pytestmark = pytest.mark.slow

Call = Callable[..., Ended]


def test_asynchronous_run_gains_accuracy_at_positive_lag(gain: Ended) -> None:
    assert gain.code == 0, gain.err[-3000:]
    summary = gain.json
    check_summary(summary, 4)
    assert summary["steps"] == 40 and summary["lag"]["mean"] > 0
    # two shares at n = 256: 0.1 is 2.3 standard errors; seen: 0.3
    assert summary["heldout_end"] > summary["heldout_start"] + 0.1
    run_dir = Path(summary["run_dir"])
    names = (
        "summary.json metrics.jsonl tensorboard report.html checkpoints samples.jsonl trace.json"
    )
    for name in ("config.toml", "summary.json", *names.split()):
        assert (run_dir / name).exists(), name
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(run_dir / "model")


def test_synchronous_runs_repeat_bitwise(asyncrl: Call, tmp_path: Path, sort_model: Path) -> None:
    words = ("learner.steps=8", "staleness.max_lag=0", "learner.checkpoint_every=3", *FEW)
    words += ("wires.lease_s=600",)  # a generator that stands still draws nothing a second time
    first = asyncrl("run", *words, "name='one'").json
    check_summary(first, 0)
    assert first["steps"] == 8 and first["lag"]["max"] == 0
    # forks have one hash seed, these processes another
    again = asyncrl("run", *words, "name='two'", PYTHONHASHSEED="5").json
    assert first["weights_digest"] == again["weights_digest"]
    process = start(tmp_path, sort_model, *words, "name='three'", hold=5)
    run_dir = tmp_path / "runs" / "three"
    wait_until(lambda: steps_done(run_dir) >= 4, process)
    os.kill(process.pid, signal.SIGINT)
    let_go(tmp_path)
    assert process.wait(timeout=3600) == 130
    resumed = asyncrl("run", "--resume", str(run_dir)).check()
    assert resumed.json["weights_digest"] == first["weights_digest"]
    whole = tmp_path / "runs" / "one" / "optimizer_steps.jsonl"
    # kept over the resume, none doubled and none lost
    assert (run_dir / "optimizer_steps.jsonl").read_bytes() == whole.read_bytes()
    check_optimizer_steps(run_dir)


def check_optimizer_steps(run_dir: Path) -> None:
    """Each optimizer step of the run has its row, once, in order, with the numbers of its batch."""
    rows = jsonl.read(run_dir / "optimizer_steps.jsonl")
    batches = [r for r in metrics.read(run_dir) if "reward/mean" in r]
    assert [(r["step"], r["update"]) for r in rows] == [
        (b["step"], i) for b in batches for i in range(int(b["optim/steps"]))
    ]
    names = {"kl/behavior_target_k3", "is/target_ratio", "is/target_ratio_max"}
    names |= {"optim/grad_norm", "optim/lr"}
    assert rows and all(names <= r.keys() for r in rows)
    for batch in batches:
        norms = [r["optim/grad_norm"] for r in rows if r["step"] == batch["step"]]
        assert sum(norms) / len(norms) == pytest.approx(batch["optim/grad_norm"])


@pytest.mark.parametrize("victim", ["generator", "learner"])
def test_a_killed_process_costs_its_time(victim: str, tmp_path: Path, sort_model: Path) -> None:
    sets = (*FEW, "learner.steps=10", "staleness.max_lag=2", "learner.checkpoint_every=3")
    process = start(tmp_path, sort_model, *sets, "name='kill'", hold=8)
    run_dir = tmp_path / "runs" / "kill"
    wait_until(lambda: steps_done(run_dir) >= 5, process)
    os.kill(children(process.pid)[victim], signal.SIGKILL)
    let_go(tmp_path)
    summary = finish(process, tmp_path)
    check_summary(summary, 2)
    assert summary["steps"] == 10 and "SIGKILL" in (tmp_path / "stderr").read_text()
    check_optimizer_steps(run_dir)


@pytest.mark.cold
def test_parts_start_in_any_order_from_terminals(tmp_path: Path, sort_model: Path) -> None:
    run_dir = tmp_path / "runs" / "parts"
    words = (*FEW, "learner.steps=6", "name='parts'", "--run-dir", str(run_dir))
    parts = []
    for part in ("learner", "generator", "buffer"):
        argv = [w for w in demo_command(part, tmp_path, sort_model, *words) if w != "--json"]
        parts.append(
            subprocess.Popen(argv, cwd=ROOT, env=ENV, stderr=(tmp_path / part).open("w"), text=True)
        )
        # only to make the order of starting what the name says; no assertion rests on it
        time.sleep(0.5)
    for part, process in zip(("learner", "generator", "buffer"), parts, strict=True):
        assert process.wait(timeout=3600) == 0, (part, (tmp_path / part).read_text()[-2000:])
    assert steps_done(run_dir) == 6


def test_weights_over_tcp(asyncrl: Call) -> None:
    sets = ("weights.transport='tcp'", "wires.weights_address='tcp://127.0.0.1:0'", "name='tcp'")
    done = asyncrl("run", *FEW, "learner.steps=5", *sets).check()
    check_summary(done.json, done.json["lag"]["limit"])
