"""`asyncrl sweep`: cells, early abandonment, resuming, the limit it suggests, refusals."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models_kit import model_fixture
from process_kit import ROOT, RUN_SEED, Ended, as_options, run_cli
from warm_run_kit import SMALL, make_record

from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.experiments import figures, process_run, serial
from asyncrl.experiments.compare import analysis, grid, page, verdict, warm_pool
from asyncrl.experiments.compare.arms import CORRECTIONS, parse_arm
from asyncrl.models.policy import build_model
from asyncrl.tasks.calc import CalcTask

pytestmark = pytest.mark.slow

model = model_fixture("0123456789=:,#", layers=1)


def plan_rle(names: str, *limits: float, sets: Sequence[str] = ()) -> grid.SweepPlan:
    """A sweep of these methods at injected lags."""
    arms = [parse_arm(name) for name in names.split()]
    return grid.SweepPlan("configs/rle.toml", sets, arms, limits, injected=True)


def call(model: Path, out: Path, *words: str) -> Ended:
    sets = (*SMALL, f"model.path={str(model)!r}", f"seed={RUN_SEED}")
    return run_cli("sweep", "configs/demo.toml", "--out", str(out), *as_options(sets), *words)


def test_a_sweep_from_start_to_suggestion_and_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    text = (
        "--set evaluation.ood_prompts=4 --inject --limits 0,2 --correction configured --correction "
        "other:loss.entropy=0.2 --seeds 2 --json"
    )
    words = text.split()
    found = call(model, out, *words).check().json
    cells = {(c["correction"], c["limit"]): c for c in found["cells"]}
    assert set(cells) == {(n, x) for n in ("configured", "other") for x in ("0", "2")}
    assert found["missing"] == 0
    # limit 0 as configured is the synchronous run itself, not made twice
    assert cells["configured", "0"]["arm"] == "sync"
    assert [cells[n, "2"]["lag_max"] for n in ("configured", "other")] == [2, 2]
    assert cells["other", "0"]["lag_max"] == 0
    assert cells["other", "2"]["digests"] != cells["configured", "2"]["digests"]
    # every cell trains the same samples in the same order
    assert len({tuple(c["trained_ids"]) for c in cells.values()}) == 1
    assert [c["ood_each"] for c in cells.values()] == [[0.0, 0.0]] * 4
    assert found["sync"]["ood_end"] == found["sync"]["ood_start"] == 0
    assert found["speed"]["2"] >= found["speed"]["0"] == 1
    # An untrained model scores 0 everywhere, and every interval is [0, 0].
    assert found["suggestion"]["limit"] == "2"
    assert found["suggestion"]["set"].startswith("--set staleness.max_lag=2")
    page = (out / "report.html").read_text()
    assert all(set(c["signs"]) == {"unmoved_accuracy"} for c in cells.values()), "it is never right"
    assert (
        page.count("unmoved_accuracy in 2 of 2 runs: held-out reward went from 0.000 to 0.000") == 4
    )
    assert "Frontier" in page and found["suggestion"]["set"] in page and len(page) < 500_000
    assert json.loads((out / "result.json").read_text()) == found

    # A figure over steps has a series for each cell; over lags, one for each correction.
    points = figures.read_points([out], "eval/heldout", figures.STEP)
    names = [line.name for line in figures.make_lines(points)]
    assert names == [f"{n}, limit {x}" for n in ("configured", "other") for x in ("0", "2")]
    assert {p.position for p in points} == {0.0, 2.0, 4.0} and len(points) == 3 * 2 * 4
    points = figures.read_points([out], "eval/heldout", figures.LAG)
    for line in figures.make_lines(points):
        assert line.positions[0] == 0 < line.positions[1] <= 2 and line.counts == [2, 2]

    # Interrupted: only what is missing is made, and it comes out the same.
    gone = out / "cells" / f"other-limit2-seed{RUN_SEED + 1}.json"
    kept = out / "cells" / f"sync-seed{RUN_SEED}.json"
    before, stamp = json.loads(gone.read_text())["weights_digest"], kept.stat().st_mtime_ns
    gone.unlink()
    again = call(model, out, *words).check()
    assert "9 of 10 runs are finished already" in again.err and "(10 of 10" in again.err
    assert kept.stat().st_mtime_ns == stamp
    assert json.loads(gone.read_text())["weights_digest"] == before

    shown = call(model, out, *words[:-1]).out
    assert re.search(r"unstable .*OOD end *\n", shown) and shown.count("0.000") >= 4

    with pytest.raises(
        ConfigError, match=r"learner.lr: 0.0003, now 0.001.*choose another directory with --out"
    ):
        sets = [*SMALL, f"model.path={str(model)!r}", "learner.lr=1e-3", "evaluation.ood_prompts=4"]
        arms = [parse_arm("configured")]
        what = grid.SweepPlan("configs/demo.toml", sets, arms, [0.0, 2.0], injected=True)
        grid.Sweep(out, what, 2, print)
    gone.write_text("{")
    with pytest.raises(ConfigError, match=r"json \(delete it, and the run is read"):
        warm_pool.CellStore(out).read(gone.stem)
    (out / "run_id").touch()
    with pytest.raises(ConfigError, match="holds a run; choose another directory"):
        grid.Sweep(out, what, 2, print)


@pytest.mark.parametrize(
    ("corrections", "limits", "sets", "said"),
    [
        ("pppo", "1", "", "--correction pppo: no such method (did you mean ppo?)"),
        ("none", "1,x", "", "--limits 1,x: give whole numbers"),
        ("none", "1.5", "", "1.5 is neither a whole number"),
        ("none", "inf", "", "a lag of inf cannot be injected"),
        ("none", "2,2", "", "given twice"),
        ("configured ppo", "2", "", "ppo: with limit 2 it is the same as configured-limit2"),
        ("tis tis:learner.lr=1", "2", "", "give the second another name, such as NAME:method=tis"),
        ("a:same-as=b", "2", "", "same-as belongs to compare"),
        ("a:seed=3", "2", "", "--correction a, limit 2: seed must be the same in all cells"),
        ("a:staleness.max_lag=3", "2", "", "limit 2: staleness.max_lag must be the same in all"),
        ("a:los.surrogate=ppo", "2", "", "--correction a, limit 2: "),
        ("none", "2", "staleness.inject=1", "staleness.inject: the sweep sets it"),
    ],
)
def test_what_it_refuses(corrections: str, limits: str, sets: str, said: str) -> None:
    with pytest.raises(ConfigError) as e:
        arms = [parse_arm(text, "--correction") for text in corrections.split()]
        parsed = grid.parse_limits(limits, True)
        grid.SweepPlan("configs/demo.toml", sets.split(), arms, parsed, injected=True)
    assert said in str(e.value) and "\n" not in str(e.value)


def test_what_a_correction_is_comes_from_its_configs() -> None:
    """A method with keys of its own is that method, and the page says what its config has."""
    asked = ("tis:learner.lr=1e-4", "far:method=tis,correction.hi=4.0", "ppo")
    arms = [parse_arm(text, "--correction") for text in asked]
    made = grid.SweepPlan("configs/rle.toml", (), arms, [2.0], injected=True)
    config = made.arms["tis-limit2"]
    correction = config.correction
    assert (correction.level, correction.hi, config.learner.lr) == ("token", 2.0, 1e-4)
    assert made.arms["far-limit2"].correction.hi == 4.0
    tis, far, ppo = made.describe()
    assert tis[:2] == ("tis", f"{CORRECTIONS['tis'][0]}; with learner.lr=1e-4")
    assert "learner.lr = 0.0001 (0.0002)" in tis[2] and "correction.hi = 2 (none)" in tis[2]
    assert "correction.hi = 4 (none)" in far[2] and "learner.lr" not in far[2]
    assert ppo[2] == "nothing", "the config is PPO already, and limits are the cells' own"


def test_every_correction_is_a_valid_config_at_every_limit() -> None:
    filtering = "dapo"  # an injected lag needs all groups
    names = [n for n in CORRECTIONS if n not in ("configured", filtering)]
    # some correct by the weights of every version that the lag spans
    p = plan_rle(" ".join(names), 0.0, 4.0, sets=["weights.slots=6"])
    # sync is ppo at limit 0
    assert len({load.dump(c) for c in p.arms.values()}) == len(p.arms) == 2 * len(names)
    assert p.arms["tis-limit4"].correction.hi == 2.0
    assert p.arms["none-limit4"].loss.surrogate == "vanilla"
    assert p.arms["mis-limit4"].staleness.inject == 4
    assert p.arms["mis-limit0"].staleness.inject is None


def test_a_collapsed_run_is_given_up_and_keeps_its_last_accuracy(sort_model: Path) -> None:
    text = (
        "learner.steps=30 learner.groups=8 learner.group_size=4 learner.lr=0.3 evaluation.every=1 "
        "evaluation.prompts=64 evaluation.final_prompts=64 evaluation.ood_prompts=0"
    )
    sets = [f"model.path={str(sort_model)!r}", *text.split()]
    record = serial.run_serial(
        load.load("configs/demo.toml", sets),
        RUN_SEED,
        lambda _, rewards: verdict.find_collapse(rewards),
    )
    assert record["abandoned"].startswith("collapse: held-out reward below half its best")
    assert record["steps"] < 10
    steps, accuracy = analysis.complete_curve(record, 30)
    assert steps[-1] == 30 and accuracy[-1] == accuracy[-2] < accuracy[0] / 2
    assert any(x.startswith("collapse") for x in grid.list_instabilities(record))


def test_a_run_that_fails_is_named_and_the_others_are_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = "def reward(prompt, text):\n    raise ValueError('no')\n"
    (tmp_path / "broken_reward.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.syspath_prepend(str(tmp_path))
    cells, told = warm_pool.CellStore(tmp_path / "s"), []
    sets = [f"model.path={str(model)!r}", *SMALL]
    good = load.load("configs/demo.toml", [*sets, "learner.steps=1"])
    cells.add("good", good, 0)
    bad = ["learner.steps=4", "reward.function=broken_reward:reward"]
    cells.add("bad", load.load("configs/demo.toml", [*sets, *bad]), 0)
    cells.add("late", good, 1)
    failure = r"run bad: the reward function failed on ticket \d+: .*no.*continues from here"
    with pytest.raises(AsyncrlError, match=failure):
        cells.run(1, lambda name, event: told.append((name, "done" in event)))
    assert cells.list_missing() == ["bad", "late"] and ("good", True) in told


def cell(correction: str, limit: str, low: float, high: float, **more: Any) -> dict[str, Any]:
    """A cell of three seeds, stable unless `more` says otherwise."""
    middle, sd = (low + high) / 2, (high - low) / 4.97
    values = {"ess": 0.9, "unstable": 0, "seeds": 3, "trouble": ["collapse"], "final": 0.7}
    values |= {"difference": {"mean": middle, "sd": sd, "interval": [low, high]}}
    speed = {"1": 1.5, "2": 1.9, "4": 1.91, "8": 1.91}[limit]
    return values | {"correction": correction, "limit": limit, "speed": speed} | more


def test_the_out_of_distribution_end_of_a_cell_counts_where_the_run_came_to_it() -> None:
    config = load.load("configs/demo.toml", ["learner.steps=4"])
    curve = [{"version": n + 1, "t": 0.0, "kl/target_ref_k3": n / 2} for n in range(3)]
    oods = [[0.0, 4.0], [0.3, 0.2]], [[0.0, 2.0], [0.5, 0.9]]
    records = [make_record([[0.0, 4.0], [0.5, 0.6]], curve, ood=ood) for ood in oods]
    records += [make_record([[0.0, 4.0], [0.5, 0.6]])]  # of an older version
    cells = [grid.CellResult("a", n, x, config) for n, x in enumerate(records)]
    found = analysis.summarize_cell(cells, config)
    assert found["ood_start"] == pytest.approx(0.4)
    assert found["ood_end"] == found["ood_each"][0] == 0.2
    against = {"difference": {"mean": 0.0, "interval": [0, 0], "p": 1.0}, "speed": 1.0}
    (row,) = page.format_cells({"cells": [cell("ppo", "1", 0, 0) | found | against]})
    shown = dict(zip(page.SWEEP_HEAD, row, strict=True))
    assert (shown["OOD end"], shown["KL to ref"]) == ("0.200", "0.75")


@pytest.mark.parametrize(
    ("cells", "limit", "words"),
    [
        ("ppo 4 -0.02 0.01|ppo 8 -0.09 -0.01", "4", "at limit 8: reward -0.050 [-0.090, -0.010]"),
        ("ppo 4 -0.02 0.01|ppo 8 -0.02 0.01 ess=0.4", "4", "at limit 8: ESS falls to 0.40"),
        ("ppo 2 0.01 0.03|ppo 4 -0.9 0.1 unstable=1", "2", "4: 1 of 3 runs unstable (collapse)"),
        ("ppo 2 -0.04 0.1|ppo 8 -0.04 0.1", "8", "limit 2 is as fast there"),
        ("ppo 4 -0.02 0.1 final=0.6|none 4 -0.02 0.1 final=0.7", "4", "limit 4 with none"),
        ("ppo 1 -0.1 -0.05", "0", "stay synchronous"),
        ("ppo 1 -0.04 0.1|ppo 8 -1.2 0.6", "1", "0.05 below or more, though the interval"),
        ("ppo 1 -0.04 -0.01|ppo 4 -0.07 0.05", "1", "at 3 seeds is undecided; about 6"),
    ],
)
def test_the_suggested_limit_and_its_reason(cells: str, limit: str, words: str) -> None:
    listed = []
    for text in cells.split("|"):
        name, at, low, high, *more = text.split()
        values = {key: json.loads(value) for key, value in (x.split("=") for x in more)}
        listed.append(cell(name, at, float(low), float(high), **values))
    plan = plan_rle("ppo none", 1.0, 2.0, 4.0, 8.0)
    found = analysis.suggest({"cells": listed, "seeds": [0, 1, 2]}, plan)
    assert found["limit"] == limit and words in found["reason"]
    assert f"--set staleness.max_lag={limit}" in found["set"]
    assert "staleness.inject" not in found["set"]
    if found["correction"] == "none":  # to be pasted as it is
        c = load.load("configs/rle.toml", [x for x in found["set"].split() if x != "--set"])
        assert (c.loss.surrogate, c.correction.level) == ("vanilla", "none")
        assert c.staleness.max_lag == 4


def test_an_interval_that_reaches_below_the_margin_suggests_nothing() -> None:
    """The lower bound decides: here of -0.016 [-0.214, +0.183], which says nothing of a limit."""
    plan = plan_rle("ppo", 1.0, 2.0)
    wide = cell("ppo", "1", -0.214, 0.183)
    found = analysis.suggest({"cells": [wide], "seeds": [0, 1, 2]}, plan)
    assert found["limit"] is found["by_correction"]["ppo"]["limit"] is None and found["set"] == ""
    need = verdict.count_needed_seeds(-0.0155 + 0.05, wide["difference"]["sd"])
    assert (
        "no limit is suggested: none has an interval above -0.05 (ppo, at limit 1: reward -0.015 "
        f"[-0.214, +0.183] at 3 seeds is undecided; about {need} seeds would decide)"
    ) in found["reason"]
    assert "stays above -0.05" in found["rule"] and page.format_headline(found) == "No suggestion"
    found = analysis.suggest({"cells": [wide], "seeds": [0, 1, 2]}, plan, 0.3)
    assert found["limit"] == "1" and "above -0.3," in found["rule"]
    bad = [cell("ppo", "1", -0.3, -0.1), cell("ppo", "2", -0.214, 0.183)]
    found = analysis.suggest({"cells": bad, "seeds": [0, 1, 2]}, plan)
    assert found["limit"] is None and "ppo, at limit 2:" in found["reason"]
    one_seed = analysis.suggest({"cells": [cell("ppo", "1", -0.1, 0.1)], "seeds": [0]}, plan)
    assert one_seed["limit"] is None and "one seed" in one_seed["reason"] and not one_seed["set"]


STEPS = 2
SETS_TEXT = (
    "learner.groups=2 learner.group_size=4 evaluation.every=0 evaluation.prompts=2 "
    "evaluation.final_prompts=2 evaluation.ood_prompts=2 agent.step_s=3600.0 "
    "wires.connect_s=3600.0 wires.lease_s=3600.0 watchdog.floor_s=3600.0 watchdog.startup_s=3600.0"
)
SETS = (f"seed={RUN_SEED}", "model.path=m", f"learner.steps={STEPS}", *SETS_TEXT.split())


def test_sessions_make_a_run_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of one run stands for all cells, which are analyzed as those of warm runs are."""
    monkeypatch.chdir(tmp_path)
    build_model(tmp_path / "m", CalcTask.symbols, hidden=32, layers=1)
    plan = grid.SweepPlan("calc", SETS, [parse_arm("configured")], [1.0], injected=False)
    made = grid.Sweep(tmp_path / "s", plan, 1, print)
    store, cell = warm_pool.CellStore(tmp_path / "s"), made.name_run(grid.SYNC, RUN_SEED)
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
    assert record["ledger_lines"]["trained"]["tokens"] == sum(record["lag_histogram"].values())
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
    assert page.format_cells(found) and json.dumps(found)


def test_a_run_that_fails_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    with pytest.raises(AsyncrlError, match=r"run a ended with exit code 2: .*no-config.* \(log: "):
        process_run.complete(tmp_path / "a", "no-config.toml", [], 1, log)
