"""Bad sets and a bad `asyncrl eval`: one clear line each."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments import model_evaluation
from asyncrl.tasks.evaluation_sets import TaskWithSets

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


def test_reserved_generators_leave_one_for_training(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(BASE)
    with pytest.raises(ConfigError, match=r"evaluation.generators: 2 of generators = 2 leave none"):
        load.load(path, ["generators=2", "evaluation.generators=2"])
    assert load.load(path, ["generators=2", "evaluation.generators=1"]).evaluation.generators == 1


def test_a_config_with_sets_is_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
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
        (["nowhere", "demo"], "MODEL: nowhere is not a model directory"),
        (["MODEL", "demo", "--only", "x"], "--only x: choose from heldout, ood"),
        (
            ["MODEL", "demo", "--only", "ood", "--set", "evaluation.ood_prompts=0"],
            "--only ood: this set has no prompts",
        ),
    ],
)
def test_a_bad_eval_command_gets_one_clear_line(
    small_model: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *(word.replace("MODEL", str(small_model)) for word in words)])
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert ended.value.code == 2 and last.startswith("error: ") and message in last, last


@pytest.mark.parametrize("command", ["compare", "sweep", "simulate"])
def test_a_command_that_compares_runs_refuses_runs_of_no_steps(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "demo", "--set", "learner.steps=0"])
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert ended.value.code == 2 and "learner.steps = 0 only evaluates" in last, last


def test_progress_says_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    progress = model_evaluation.EvaluationProgress(lines.append)
    progress.report("hard", 1, 4)
    assert lines == []  # not at once
    progress.reported_at -= 2 * model_evaluation.QUIET_S
    progress.report("hard", 2, 4)
    assert len(lines) == 1 and lines[0].startswith("hard: 2 of 4 completions, ")
    assert lines[0].endswith(" left")
    progress.redraws = True
    progress.report("hard", 4, 4)
    assert "hard: 4 of 4" in capsys.readouterr().err and len(lines) == 1


def test_sessions_are_followed_by_the_buffer_s_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(BASE)
    lines: list[str] = []
    progress = model_evaluation.EvaluationProgress(lines.append)
    ended = threading.Event()
    done = iter([None, 3, OSError("no socket yet"), 9])

    def ask(address: str, curve_dir: str, timeout: float) -> Any:
        found = next(done)
        if found == 9:
            ended.set()
        if isinstance(found, OSError):
            raise found
        return None if found is None else SimpleNamespace(committed=0, progress=found)

    monkeypatch.setattr(model_evaluation.rundir, "get_current_buffer_address", lambda *_: "ipc://x")
    monkeypatch.setattr(model_evaluation.live, "request_status", ask)
    monkeypatch.setattr(model_evaluation, "ASK_S", 0.001)
    monkeypatch.setattr(model_evaluation, "QUIET_S", 0.0)
    model_evaluation.follow_sessions(load.load(path), tmp_path, 8, progress, ended)
    counts = [line.split(" completions")[0] for line in lines]
    assert counts[-1] == "sessions: 8 of 8" and set(counts) <= {"sessions: 3 of 8", counts[-1]}
