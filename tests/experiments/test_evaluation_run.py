"""Evaluation sets in a real run, and `asyncrl eval` on the model that it exports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main
from asyncrl.supervise import live
from asyncrl.supervise.report import plots, run_page
from asyncrl.supervise.report.series import Series

PROMPTS = ["3:312", "4:9041", "2:51"]


def sets_of(folder: Path) -> str:
    """A file with a reward of its own, a task with its reward, and prompts of the run's task."""
    file = folder / "hard.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return (
        "evaluation.sets=["
        f"{{name='hard', file='{file}', reward='set_reward:reward', samples=3, greedy=true, "
        "passing=0.5, every=3, pass_at=[1, 2]}, "
        "{name='reversed', task='dedup', prompts=2, temperature=0}, "
        "{name='again', samples=2, prompts=4}]"
    )


@pytest.fixture(scope="module")
def run(
    forked: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """One generator of two is reserved."""
    folder = tmp_path_factory.mktemp("sets")
    sets = (sets_of(folder), "generators=2", "evaluation.generators=1")
    return forked(folder / "run", *sets) | {"sets": sets}


def evaluated(run: dict[str, Any], name: str) -> dict[int, dict[str, float]]:
    return {row["step"]: row for row in run["rows"] if f"eval/{name}" in row}


def test_each_set_is_evaluated_at_its_versions(run: dict[str, Any]) -> None:
    hard = evaluated(run, "hard")
    assert sorted(hard) == [0, 3, 6]
    assert sorted(evaluated(run, "reversed")) == sorted(evaluated(run, "again")) == [0, 6]
    assert sorted(evaluated(run, "heldout")) == [0, 3, 6]  # as without sets
    for row in hard.values():
        assert row["eval/hard_n"] == 3
        assert 0 <= row["eval/hard_greedy"] <= 1
        for count in (1, 2):
            name = f"eval/hard_pass_at_{count}"
            assert 0 <= row[f"{name}_low"] <= row[name] <= row[f"{name}_high"] <= 1
        assert row["eval/hard_pass_at_1"] <= row["eval/hard_pass_at_2"]
        assert "eval/hard_pass_at_3" not in row
    assert all(row["eval/again_n"] == 4 for row in evaluated(run, "again").values())
    greedy = evaluated(run, "reversed")[6]
    assert greedy["eval/reversed_n"] == 2 and "eval/reversed_greedy" not in greedy


def test_training_is_that_of_the_ledger_without_the_sets_samples(run: dict[str, Any]) -> None:
    rows = [row for row in run["rows"] if "reward/mean" in row]
    assert [row["step"] for row in rows] == list(range(6))
    summary = json.loads((run["run_dir"] / "buffer_summary.json").read_text())
    assert summary["trajectories"] == 6 * 16
    ledger = summary["ledger"]
    assert sum(v for name, v in ledger.items() if name != "generated") == ledger["generated"]


def test_the_sets_are_shown(run: dict[str, Any]) -> None:
    values = evaluated(run, "hard")[6] | evaluated(run, "again")[6]
    shown = live.format_sets(values)
    assert f"hard {values['eval/hard']:.3f}" in shown and "again" in shown
    assert f"pass@2 {values['eval/hard_pass_at_2']:.3f}" in shown and "_low" not in shown
    assert live.format_sets({"eval/heldout": 0.5, "eval/ood": 0.2}) == ""
    lines = plots.build_set_plot(name for row in run["rows"] for name in row).series.items()
    assert ("eval/hard", "hard") in lines and ("eval/hard_pass_at_2", "hard pass@2") in lines
    assert not any(name.startswith(("eval/heldout", "eval/ood")) for name, _ in lines)
    assert "Evaluation sets" in run_page.write(run["run_dir"]).read_text()
    series = Series(run["run_dir"] / "metrics.jsonl")
    series.refresh()
    (figure,) = [f for f in plots.build_plots("overview", {"r": series}) if "sets" in f.title]
    drawn = {line.metric: line for line in figure.lines}
    assert len(drawn["eval/hard"].ys) == 3
    for line in drawn.values():
        if "pass_at" in line.metric:
            assert all(a <= b <= c for a, b, c in zip(line.low, line.ys, line.high, strict=True))
    assert "eval/hard_n" not in drawn


@pytest.fixture(scope="module")
def exported(run: dict[str, Any], small_model: Path) -> Path:
    path: Path = run["run_dir"] / "model"
    assert (path / "config.json").is_file()
    return path


def test_a_model_directory_is_evaluated_without_a_run(
    run: dict[str, Any], exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for one in run["sets"][:1] for word in ("--set", one)]
    words += ["--set", "reward.function='shared_reward:reward'", "--set", "reward.deadline_s=600"]
    words += ["--set", "generator.max_new_tokens=12", "--set", "evaluation.final_prompts=5"]
    words += ["--only", "hard", "--only", "heldout"]
    main(["eval", str(exported), "configs/demo.toml", *words, "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert found["model"] == str(exported) and list(found["sets"]) == ["heldout", "hard"]
    hard, last = found["sets"]["hard"], evaluated(run, "hard")[6]
    assert hard["n"] == 3 and hard["failed"] == 0 and hard["seconds"] > 0
    assert hard.keys() >= {"reward", "greedy", "pass_at_2", "pass_at_2_low", "length"}
    # the same prompts, streams and weights; the other rows of a batch may round a token away
    assert hard["reward"] == pytest.approx(last["eval/hard"], abs=0.35)
    assert found["sets"]["heldout"]["reward"] == pytest.approx(
        evaluated(run, "heldout")[6]["eval/heldout"], abs=0.35
    )
    assert "loading" in err and "Traceback" not in err
