"""Whatever ends a run, nothing of it survives; a run that stands still is ended by rule."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from process_kit import run_cli
from run_kit import FEW, check_summary, children, finish, start, steps_done, wait_until
from shutdown_kit import left

pytestmark = pytest.mark.slow


def of_run(run_dir: Path) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if str(run_dir) in words and state != "Z":
                found[int(entry.name)] = " ".join(words)
    return found


def gone(run_dir: Path, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (of_run(run_dir) or left(run_dir)):
        time.sleep(0.05)
    assert of_run(run_dir) == {} and left(run_dir) == []


def under_way(tmp_path: Path, model: Path, *words: str) -> tuple[subprocess.Popen[str], Path]:
    process = start(tmp_path, model, *FEW, "learner.steps=4000", "name='end'", *words)
    run_dir = tmp_path / "runs" / "end"
    wait_until(lambda: steps_done(run_dir) >= 4, process)
    assert len(of_run(run_dir)) >= 3 and left(run_dir), "the test looks at the wrong places"
    return process, run_dir


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("SIGTERM", 130),  # by SIGINT: the test below
        ("SIGINT twice", 130),
        pytest.param("SIGKILL", -9, marks=pytest.mark.cold),  # a child's tie to its parent
    ],
)
def test_nothing_survives_the_end(how: str, code: int, tmp_path: Path, sort_model: Path) -> None:
    process, run_dir = under_way(tmp_path, sort_model)
    name, _, twice = how.partition(" ")
    os.kill(process.pid, signal.Signals[name])
    if twice:
        time.sleep(0.05)
        os.kill(process.pid, signal.Signals[name])
    assert process.wait(timeout=600) == code, (tmp_path / "stderr").read_text()[-2000:]
    gone(run_dir)
    if how == "SIGKILL":  # and the run goes on from its checkpoint
        steps = steps_done(run_dir) + 4
        process = start(tmp_path, sort_model, "--resume", str(run_dir), f"learner.steps={steps}")
        assert finish(process, tmp_path)["steps"] == steps
        gone(run_dir)


def test_doctor_says_who_waits_for_whom_and_until_when(tmp_path: Path, sort_model: Path) -> None:
    """A generator stands still: the learner waits for it by name, by the run's own median."""
    process, run_dir = under_way(
        tmp_path, sort_model, "watchdog.floor_s=3600.0", "wires.lease_s=3600.0"
    )
    generator = children(process.pid)["generator"]
    os.kill(generator, signal.SIGSTOP)
    try:

        def doctor(*flags: str) -> str:
            return run_cli("doctor", str(run_dir), *flags).check().out

        def held_up() -> dict[str, Any] | None:
            seen: dict[str, Any] = json.loads(doctor("--json").splitlines()[-1])
            for w in seen["waits"]:
                if w["who"] == "learner" and w["on"] == "generator-0" and w["seconds"] > 1:
                    return seen
            return None

        seen = wait_until(held_up, process)
        assert seen["deadline_s"] >= 3600.0
        # it asks the buffer anew, which may take its time
        said = wait_until(lambda: text if "learner waits" in (text := doctor()) else "", process)
        assert "generator-0: last message" in said and "a step is overdue after" in said
    finally:
        os.kill(generator, signal.SIGCONT)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=600) == 130
    gone(run_dir)


def test_stopped_processes_are_replaced(tmp_path: Path, sort_model: Path) -> None:
    """SIGSTOP, as a hanging device or file system looks from outside: one process after another."""
    # of a machine that stands still itself, others may be ended before: that costs time alone
    sets = "watchdog.floor_s=4.0 watchdog.startup_s=60.0 watchdog.multiple=5.0 "
    sets += "watchdog.restarts=1000 learner.steps=40 learner.checkpoint_every=5 "
    sets += "wires.lease_s=3600.0 durability.mode='process' name='still'"
    process = start(tmp_path, sort_model, *FEW, *sets.split())
    run_dir = tmp_path / "runs" / "still"

    def ended() -> list[str]:
        said = (tmp_path / "stderr").read_text().splitlines()
        return [line for line in said if line.endswith(", which holds it up")]

    for steps, victim in ((8, "learner"), (14, "generator"), (20, "buffer")):
        wait_until(lambda least=steps: steps_done(run_dir) >= least, process)
        os.kill(
            wait_until(lambda name=victim: children(process.pid).get(name), process), signal.SIGSTOP
        )
        wait_until(lambda name=victim: any(name in x.rsplit(";", 1)[1] for x in ended()), process)
    summary = finish(process, tmp_path)
    check_summary(summary, summary["lag"]["limit"])
    assert summary["steps"] == 40
    assert all("the run stands still: no commit and no evaluation answer for" in x for x in ended())


def test_a_stuck_run_ends_and_says_who_was_waited_for(tmp_path: Path, sort_model: Path) -> None:
    """No restarts left: exit code 3, the process, its deadline with the arithmetic, its log."""
    # with no restart a busy machine must not pass the floor by itself
    sets = "watchdog.floor_s=60.0 watchdog.startup_s=3600.0 watchdog.multiple=5.0 "
    sets += "watchdog.restarts=0 wires.lease_s=3600.0 learner.steps=4000 name='still'"
    process = start(tmp_path, sort_model, *FEW, *sets.split())
    run_dir = tmp_path / "runs" / "still"
    wait_until(lambda: steps_done(run_dir) >= 8, process)
    os.kill(children(process.pid)["generator"], signal.SIGSTOP)
    assert process.wait(timeout=600) == 3
    said = (tmp_path / "stderr").read_text()
    assert "medians of" in said and "learner waits" in said
    assert "generator-0.log" in said and "cannot be started again" in said
    logs = {
        name: next((run_dir / "logs").glob(f"*/{name}.log")).read_text()
        for name in ("buffer", "learner")
    }
    assert "learner has waited for generator-0 for" in logs["buffer"], logs
    assert "learner has waited for the buffer at" in logs["learner"], logs
    gone(run_dir)
