"""A sweep of a config with sessions: its cells are runs of `asyncrl run`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from process_kit import RUN_SEED

from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError
from asyncrl.experiments import process_run
from asyncrl.experiments.compare import analysis, grid, page
from asyncrl.experiments.compare.warm_pool import CellStore
from asyncrl.models.policy import build_model
from asyncrl.tasks.calc import CalcTask

pytestmark = pytest.mark.slow

STEPS = 2
SETS_TEXT = (
    "learner.groups=2 learner.group_size=4 evaluation.every=0 evaluation.prompts=2 "
    "evaluation.final_prompts=2 evaluation.ood_prompts=2 agent.step_s=3600.0 "
    "wires.connect_s=3600.0 wires.lease_s=3600.0 watchdog.floor_s=3600.0 watchdog.startup_s=3600.0"
)
SETS = (f"seed={RUN_SEED}", "model.path=m", f"learner.steps={STEPS}", *SETS_TEXT.split())


def test_a_cell_with_sessions_is_a_run_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of one run stands for all cells, which are analyzed as those of warm runs are."""
    monkeypatch.chdir(tmp_path)
    build_model(tmp_path / "m", CalcTask.symbols, hidden=32, layers=1)
    plan = grid.make_plan("calc", SETS, [("configured", [])], [1.0], injected=False)
    made = grid.Sweep(tmp_path / "s", plan, 1, print)
    store = CellStore(tmp_path / "s")
    cell = grid.Sweep.name_run(grid.SYNC, RUN_SEED)
    store.add(cell, plan.arms[grid.SYNC], RUN_SEED)
    events: list[tuple[str, dict[str, Any]]] = []
    store.run(1, lambda name, event: events.append((name, event)))
    assert events == [(cell, {"done": True})] and not store.list_missing()
    record = store.read(cell)
    assert (record["seed"], record["steps"], record["abandoned"]) == (RUN_SEED, STEPS, "")
    assert record["accuracy"][0] == record["ood"][0] == [0.0, float(STEPS)]
    heldout = record["evaluation_metrics"]["eval/heldout"]
    assert heldout == dict(zip(("0", str(STEPS)), record["accuracy"][1], strict=True))
    assert [row["version"] for row in record["curve"]] == [1, 2]
    assert all("reward/mean" in row and "is/ess" in row for row in record["curve"])
    assert set(record["lag_histogram"]) == {"0"} and len(record["batches"]) == STEPS
    trained = record["ledger_lines"]["trained"]["tokens"]
    assert trained == sum(record["lag_histogram"].values())
    assert record["clock"] == round(1000 * record["wall_s"]) > 0 and record["weights_digest"]
    run_dir = tmp_path / "s" / "runs" / cell
    before = (run_dir / "summary.json").stat().st_mtime_ns
    process_run.complete(run_dir, "calc", [], STEPS, tmp_path / "log")  # it is finished
    assert (run_dir / "summary.json").stat().st_mtime_ns == before
    cells = [*plan.cell.values()], [f"probe-limit{x}" for x in ("0", "1")]
    for name in [grid.Sweep.name_run(cells[0][0], RUN_SEED), *cells[1]]:
        shutil.copy(store.get_path(cell), store.get_path(name))
    found = analysis.analyze_sweep(made)
    assert found["missing"] == 0 and found["speed"] == {"0": 1.0, "1": 1.0}
    assert found["cells"][0]["lag"] == 0 and found["cells"][0]["difference"]["mean"] == 0
    assert page.format_cells(found)
    assert json.dumps(found)


def test_a_run_that_fails_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    with pytest.raises(AsyncrlError, match=r"run a ended with exit code 2: .*no-config.* \(log: "):
        process_run.complete(tmp_path / "a", "no-config.toml", [], 1, log)


def test_engines_and_backends_that_need_processes_are_taken() -> None:
    sets = ("generator.engine=vllm", "learner.backend=deepspeed")
    for items in (sets[:1], sets[1:]):
        plan = grid.make_plan("demo", items, [("none", [])], [2.0], injected=True)
        assert load.dump(plan.arms["none-limit2"])
