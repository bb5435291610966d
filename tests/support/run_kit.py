import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from holding import allow, held
from process_kit import ENV, ROOT, demo_command

from asyncrl.cli import main
from asyncrl.contract.messages import Batch
from asyncrl.records import stream

FEW = ("learner.groups=8", "learner.group_size=4")  # of runs in which nothing is learned
DISPOSITIONS = {
    "trained",
    "masked_stale",
    "dropped_stale",
    "abandoned",
    "filtered",
    "duplicate",
    "orphaned",
    "lost_with_process",
    "left_over",
}


def check_summary(summary: dict[str, Any], limit: float) -> None:
    ledger, lag = summary["ledger"], summary["lag"]
    assert ledger.keys() >= DISPOSITIONS | {"generated"}
    assert sum(v for k, v in ledger.items() if k != "generated") == ledger["generated"] > 0
    assert lag["limit"] == limit and lag["max"] <= limit
    assert summary["tokens"] > 0 and summary["speed"]["generator_tokens_per_s"] > 0


def children(pid: int) -> dict[str, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if parent == pid:
                found.update(
                    {
                        part: int(entry.name)
                        for part in ("buffer", "generator", "learner")
                        if part in words
                    }
                )
    return found


def steps_done(run_dir: Path) -> int:
    """Committed batches, read from metrics.jsonl as any other program would."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return 0
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return max([int(r["step"]) for r in rows if "reward/mean" in r], default=-1) + 1


def wait_until(
    condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 3600
) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        assert process.poll() is None, f"ended early with {process.returncode}"
        time.sleep(0.05)
    raise AssertionError("the awaited event did not come")


def start(
    tmp_path: Path, model: Path, *words: str, hold: int = 0, config: str = "demo"
) -> subprocess.Popen[str]:
    """hold: before this batch the run stands still until `finish_scale_down` (0: it does not)."""
    out = (tmp_path / "stdout").open("w+")
    env = ENV
    if hold:
        allow(tmp_path / "allowed", hold)
        env = held(batches=tmp_path / "allowed")
    return subprocess.Popen(
        demo_command("run", tmp_path, model, *words, config=config),
        cwd=ROOT,
        env=env,
        stdout=out,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
        start_new_session=True,
    )


def let_go(tmp_path: Path) -> None:
    allow(tmp_path / "allowed", 1_000_000)


def finish(process: subprocess.Popen[str], tmp_path: Path) -> dict[str, Any]:
    code = process.wait(timeout=3600)
    assert code == 0, f"exit {code}: {(tmp_path / 'stderr').read_text()[-3000:]}"
    return dict(json.loads((tmp_path / "stdout").read_text().strip().splitlines()[-1]))


KEEPS = (
    *("durability.mode='disk'", "record.stream=true", "record.split_every=1", "generators=2"),
    *("exact=true", "weights.in_flight='recompute_kv'"),
)


def survive_kills(
    forked: Callable[..., dict[str, Any]],
    run_dir: Path,
    *sets: str,
    die: Sequence[str] = ("learner", "generator-0", "generator-1"),
) -> list[Batch]:
    """Batches of an exact run that was killed whole, then in parts; its replay is equal.

    In exact mode the learner refuses a batch whose log-probabilities differ by one bit."""
    forked(run_dir, *sets, *KEEPS, stop=2)  # all processes are killed
    done = forked(run_dir, *sets, *KEEPS, die=dict.fromkeys(die, 2))
    assert {"learner", "buffer"} & {*die} <= {*done["deaths"]}
    split = [row for row in done["rows"] if "split/mismatch" in row]
    assert split and all(row["mismatch/max_one_version"] == 0 for row in split)
    recording = stream.read(run_dir)
    replayed = CliRunner().invoke(main, ["replay", str(run_dir), "--json"])
    assert replayed.exit_code == 0, replayed.output
    assert '"equal": true' in replayed.output or '"equal":true' in replayed.output
    return [recording.read_step(number).batch for number in range(recording.end)]
