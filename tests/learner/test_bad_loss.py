"""A loss that is not a number, as a user brings it about: by a weight function of one's own."""

from pathlib import Path

import msgspec
import pytest
from process_kit import ENV, ROOT, demo_command, run_command

pytestmark = pytest.mark.slow

WORDS = (
    "learner.groups=4",
    "learner.group_size=4",
    "learner.steps=8",
    "evaluation.every=0",
    "correction.proximal='recompute'",
    "loss.surrogate='decoupled_ppo'",
    "correction.function='own:weights'",
    "name='n'",
    # nothing ends because a process stood still
    "wires.connect_s=3600.0",
    "watchdog.startup_s=3600.0",
    "watchdog.floor_s=3600.0",
    "reward.deadline_s=600.0",
)


def test_three_steps_in_a_row_without_a_number_end_the_run(
    tmp_path: Path, sort_model: Path
) -> None:
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
