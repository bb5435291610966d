import json
import sys
from pathlib import Path
from typing import Any

from models_kit import model_fixture
from process_kit import RUN_SEED

from asyncrl.tasks.calc import CalcTask

model_dir = model_fixture(CalcTask.symbols, layers=1)


def command(model_dir: Path, runs: Path, name: str, *sets: str) -> list[str]:
    small = [
        *(f"model.path={str(model_dir)!r}", f"runs={str(runs)!r}", f"name={name!r}"),
        *(f"seed={RUN_SEED}", "learner.groups=4", "learner.group_size=4", "evaluation.prompts=4"),
        *("evaluation.final_prompts=4", "evaluation.ood_prompts=2", "record.samples_every=1"),
        "record.samples=0",
        # nothing here ends because a process stood still
        *("agent.step_s=3600.0", "agent.idle_s=3600.0", "agent.deadline_s=7200.0"),
        *("wires.lease_s=3600.0", "wires.connect_s=3600.0", "watchdog.floor_s=3600.0"),
        "watchdog.startup_s=3600.0",
    ]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "configs/calc.toml", "--json"]
    return argv + [part for item in (*small, *sets) for part in ("--set", item)]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(run: Path, max_lag: int, steps: int) -> list[dict[str, Any]]:
    """What holds of every run of sessions; returns its samples."""
    summary = json.loads((run / "summary.json").read_text())
    ledger = summary["ledger"]
    assert summary["steps"] == steps and summary["trajectories"] == 16 * steps
    assert ledger["generated"] == sum(v for k, v in ledger.items() if k != "generated")
    assert summary["lag"]["max"] <= max_lag
    samples = rows(run / "samples.jsonl")
    assert len(samples) == 16 * steps
    for s in samples:
        drawn = [start for _, start, end in s["versions"] for start in range(start, end)]
        assert drawn == [at for at, mask in enumerate(s["mask"]) if mask]
        assert all(x == 0 for x, mask in zip(s["logprobs"], s["mask"], strict=True) if not mask)
        assert 1 <= s["calls"] <= 6 and not s["rows"]
    assert ledger["trained"] == sum(sum(s["mask"]) for s in samples)
    return samples
