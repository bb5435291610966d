"""Evaluation sets in a real run, `asyncrl eval` on the model that it exports, and bad sets."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from process_kit import as_options

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import EVAL_BASE, RewardFailure
from asyncrl.experiments import model_evaluation
from asyncrl.models.policy import load_policy
from asyncrl.supervise import live
from asyncrl.supervise.report import plots, run_view
from asyncrl.supervise.report.plots import Series
from asyncrl.tasks.evaluation_sets import TaskWithSets

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
        assert row["eval/hard_n"] == 3 and 0 <= row["eval/hard_greedy"] <= 1
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
    assert "Evaluation sets" in run_view.write_report(run["run_dir"]).read_text()
    series = Series(run["run_dir"] / "metrics.jsonl")
    series.refresh()
    (figure,) = [f for f in plots.build_plots("overview", {"r": series}) if "sets" in f.title]
    drawn = {line.metric: line for line in figure.lines}
    assert drawn["eval/hard"].label == "hard" and len(drawn["eval/hard"].ys) == 3
    assert drawn["eval/hard_pass_at_2"].label == "hard pass@2"
    assert not any(name.startswith(("eval/heldout", "eval/ood")) for name in drawn)
    for line in drawn.values():
        if "pass_at" in line.metric:
            assert all(a <= b <= c for a, b, c in zip(line.low, line.ys, line.high, strict=True))
    assert "eval/hard_n" not in drawn


def test_a_model_directory_is_evaluated_without_a_run(run: dict[str, Any]) -> None:
    exported: Path = run["run_dir"] / "model"
    assert (exported / "config.json").is_file()
    sets = [run["sets"][0], "reward.function='shared_reward:reward'", "reward.deadline_s=600"]
    sets += ["generator.max_new_tokens=12", "evaluation.final_prompts=5"]
    words = [*as_options(sets), "--only", "hard", "--only", "heldout", "--json"]
    done = CliRunner().invoke(main, ["eval", str(exported), "configs/demo.toml", *words])
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] == str(exported) and list(found["sets"]) == ["heldout", "hard"]
    hard, last = found["sets"]["hard"], evaluated(run, "hard")[6]
    assert hard["n"] == 3 and hard["failed"] == 0 and hard["seconds"] > 0
    assert hard.keys() >= {"reward", "greedy", "pass_at_2", "pass_at_2_low", "length"}
    # the same prompts, streams and weights; the other rows of a batch may round a token away
    assert hard["reward"] == pytest.approx(last["eval/hard"], abs=0.35)
    assert found["sets"]["heldout"]["reward"] == pytest.approx(
        evaluated(run, "heldout")[6]["eval/heldout"], abs=0.35
    )
    assert "loading" in done.stderr and "Traceback" not in done.stderr


BASE = 'model.path = "m"\ntask.name = "sort"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 'Hard'", "evaluation.sets.name: Expected `str` matching regex"),
        ("samples = 2", "evaluation.sets: Object missing required field `name`"),
        ("name = 'a'\nsample = 2", "evaluation.sets: Object contains unknown field `sample`"),
        ("name = 'ood'", "evaluation.sets: ood: that name belongs to the run's own prompts"),
        ("name = 'a'\nfile = 'f'\ntask = 'sort'", "a: has both file and task"),
        ("name = 'a'\nfile = 'f'\nsplit = 'ood'", "a: split = ood selects prompts of a task"),
        ("name = 'a'\ntask = 'file'", "a: task = file names no prompts; give the file's path"),
        ("name = 'a'\noptions = {x = 1}", "a: options are for task = reasoning_gym:GENERATOR"),
        ("name = 'a'\ntemperature = 0\nsamples = 4", "temperature = 0 makes all 4 samples"),
        ("name = 'a'\ntemperature = 0\ngreedy = true", "temperature = 0 is greedy already"),
        ("name = 'a'\nsamples = 4\npass_at = [8]", "pass_at = 8 needs at least as many samples"),
        ("name = 'a'\nreward = 'f.py'", "reward = f.py; write module:function"),
        ("name = 'a'\n[[evaluation.sets]]\nname = 'a'", "two sets are called a"),
    ],
)
def test_a_bad_set_gets_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(BASE + "[[evaluation.sets]]\n" + text + "\n")
    with pytest.raises(ConfigError) as refused:
        load.load(path)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_config_with_sets_is_written_and_read_again(tmp_path: Path) -> None:
    """And reserved generators leave one for training."""
    path = tmp_path / "c.toml"
    path.write_text(BASE)
    with pytest.raises(ConfigError, match=r"evaluation.generators: 2 of generators = 2 leave none"):
        load.load(path, ["generators=2", "evaluation.generators=2"])
    assert load.load(path, ["generators=2", "evaluation.generators=1"]).evaluation.generators == 1
    path.write_text(BASE + "[[evaluation.sets]]\nname = 'a'\nsamples = 4\npass_at = [2]\n")
    config = load.load(path)
    assert config.evaluation.sets[0].counts == (2,)
    path.write_text(load.dump(config))
    assert load.load(path) == config


def test_a_missing_file_or_task_of_a_set_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(BASE + "[[evaluation.sets]]\nname = 'a'\nfile = 'nowhere.jsonl'\n")
    with pytest.raises(ConfigError, match=r"evaluation.sets: a: nowhere.jsonl is not a file"):
        TaskWithSets(load.load(path)).size("a")
    path.write_text(BASE + "[[evaluation.sets]]\nname = 'a'\ntask = 'sorts'\n")
    with pytest.raises(ConfigError, match=r"evaluation.sets: a: task.name = sorts: choose one of"):
        TaskWithSets(load.load(path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval nowhere demo", "MODEL: nowhere is not a model directory"),
        ("eval MODEL demo --only x", "--only x: choose from heldout, ood"),
        (
            "eval MODEL demo --only ood --set evaluation.ood_prompts=0",
            "--only ood: this set has no prompts",
        ),
        *(
            (f"{command} demo --set learner.steps=0", "learner.steps = 0 only evaluates")
            for command in ("compare", "sweep", "simulate")
        ),
    ],
)
def test_a_bad_command_gets_one_clear_line(small_model: Path, words: str, message: str) -> None:
    done = CliRunner().invoke(main, words.replace("MODEL", str(small_model)).split())
    last = done.stderr.strip().split("\n")[-1]
    assert done.exit_code == 2 and last.startswith("error: ") and message in last, last


def test_what_fails_is_tried_again_and_counted_once(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward that fails once, one that always fails, and prompts that leave no room."""
    sizes = ["generator.context=6", "generator.max_new_tokens=1", f"model.path='{small_model}'"]
    lines: list[str] = []
    progress = model_evaluation.EvaluationProgress(lines.append)
    config = load.load("configs/demo.toml", sizes)
    evaluator = model_evaluation.OfflineEvaluator(config, report=progress.report)
    evaluator.load(load_policy(small_model, "float32", "cpu"), 0)
    turn, tries = evaluator.turn, Counter[int]()
    prompts = [turn.task.prompt("heldout", index, config.seed).text for index in range(8)]
    fitting = [EVAL_BASE + index for index, text in enumerate(prompts) if len(text) < 6]
    poll = turn.poll_results

    def fail() -> Any:
        for response, result in poll():
            ticket = response.ticket.ticket
            tries[ticket] += 1
            fails = ticket == fitting[0] or (ticket == fitting[1] and tries[ticket] == 1)
            yield response, result._replace(failed=RewardFailure("data", "no") if fails else "")

    monkeypatch.setattr(turn, "poll_results", fail)
    values = evaluator.measure("heldout", 8)
    assert values["eval/heldout_n"] == len(fitting) - 1 and turn.schedule.held == {}
    assert [tries[ticket] for ticket in fitting] == [3, 2, *[1] * (len(fitting) - 2)]
    assert len(evaluator.failures) == 8 - len(fitting) + 1 < 8
    assert lines == []  # not at once
    progress.reported_at -= 2 * model_evaluation.REPORT_S
    progress.report("heldout", 2, 8)
    assert len(lines) == 1 and lines[0].startswith("heldout: 2 of 8 completions, ")
    assert lines[0].endswith(" left")


def test_the_buffers_count_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text(BASE)
    ended, said = threading.Event(), list[str]()

    def say(line: str) -> None:
        said.append(line.split(" completions")[0])
        if "8 of 8" in line:
            ended.set()

    statuses = [SimpleNamespace(committed=0, progress=number) for number in (3, 9)]
    ask = Mock(side_effect=[None, statuses[0], OSError("no socket yet"), statuses[1]])
    monkeypatch.setattr(model_evaluation.rundir, "get_current_buffer_address", lambda *_: "ipc://x")
    monkeypatch.setattr(model_evaluation.live, "request_status", ask)
    monkeypatch.setattr(model_evaluation, "ASK_S", 0.001)
    monkeypatch.setattr(model_evaluation, "REPORT_S", 0.0)
    progress = model_evaluation.EvaluationProgress(say)
    model_evaluation.follow_sessions(load.load(tmp_path / "c.toml"), tmp_path, 8, progress, ended)
    assert said == ["sessions: 3 of 8", "sessions: 8 of 8"]
