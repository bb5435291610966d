"""A mixture of tasks: prompts, rewards, refusals, and a run in processes and by turns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from process_kit import write_lines
from signs_kl_kit import apply_rules

from asyncrl.config import load
from asyncrl.config.tree import TaskConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.serial import run_serial
from asyncrl.records import health_checks, metrics
from asyncrl.supervise import live
from asyncrl.supervise import summary as summaries
from asyncrl.supervise.report import run_view
from asyncrl.tasks import get_task


def mixture(*parts: dict[str, Any]) -> Any:
    return get_task(msgspec.convert({"name": "mixture", "mixture": parts}, TaskConfig))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mine") / "mine.jsonl"
    rows = [{"prompt": f"{i:02}", "answer": f"{i}", "level": 3} for i in range(20)]
    return write_lines(path, *rows)


def test_every_prompt_knows_its_task(file: str) -> None:
    task = mixture(
        {"name": "sort", "weight": 3}, {"name": "file", "label": "mine", "prompts": file}
    )
    first = [task.prompt("train", index, 0) for index in range(8)]
    assert [prompt.task for prompt in first].count("sort") == 6
    assert [prompt for prompt in first if prompt.task == "mine"] == [
        task.build_prompt("train", "mine", index, 0) for index in range(2)
    ]
    assert task.count_prompts("mine") == 18 and task.count_prompts("sort") is None
    held_out = [task.prompt("heldout", index, 0).task for index in range(5)]
    assert held_out == ["sort", "mine", "sort", "mine", "sort"]  # `mine` has two
    assert task.size("ood") == get_task(TaskConfig(name="sort")).size("ood")
    for prompt in first:
        assert task.reward(prompt, prompt.answer) == 1.0
        assert task.reward(prompt, prompt.answer + "?") == 0.0


def test_a_tiny_model_sees_the_demonstrations_of_all() -> None:
    task = mixture({"name": "dedup"}, {"name": "cancel"})
    assert set(task.symbols) == set("abcdefghABC=;#")
    pairs = task.make_demonstrations(5, 0)
    assert len(pairs) == 5 and [asked.islower() for asked, _ in pairs[::2]] == [True] * 3
    assert task.steps == 950
    with pytest.raises(ConfigError, match=r"task.mixture: mine: task.prompts: \S+ is not a file"):
        mixture({"name": "sort"}, {"name": "file", "label": "mine", "prompts": "nowhere/x"})


SORT = "{name='sort'}"
REFUSED = {
    "task.mixture=[]": "task.name: mixture with 0 parts",
    "task.name='sort'": "task.name: sort with 2 parts",
    "task.prompts='x.jsonl'": "task.prompts: a mixture reads no files itself",
    f"task.mixture=[{SORT}, {SORT}]": "task.mixture: sort: another part or evaluation set",
    "evaluation.sets=[{name='rle', task='rle'}]": "task.mixture: rle: another part or evaluation",
    "evaluation.sets=[{name='x', file='x.jsonl'}]": "evaluation.sets: x: its file belongs to no",
    "task.mixture=[{name='nim'}]": "nim: name: nim needs an environment",
    "task.mixture=[{name='mixture'}]": "mixture cannot be a part",
    "task.mixture=[{name='sort', weight=0}]": "all weights are 0 at batch 0",
    "task.mixture=[{name='sort', weight=[[0, 1], [5, 0]]}]": "all weights are 0 at batch 5",
    "task.mixture=[{name='sort', weight=[[5, 1], [5, 0]]}]": "each at a later batch",
    "task.mixture=[{name='sort', weight=[]}]": "of length >= 1",
    "task.mixture=[{name='sort', passes=2}]": "passes: sort generates prompts without end",
    "task.mixture=[{name='sort', prompts='x'}]": "prompts: sort reads no file",
    "task.mixture=[{name='sort', columns={prompt='x'}}]": "columns: sort reads no file",
    "task.mixture=[{name='sort', options={a=1}}]": "options: sort has no options",
    "task.mixture=[{name='sort', max_new_tokens=999}]": "is above generator.max_new_tokens",
    "task.mixture=[{name='sort', reward='x'}]": "write module:function or file.py:function",
    "task.mixture=[{name='sort', curriculum={easy_from=0.2, hard_to=0.3}}]": "is not below",
    "task.mixture=[{name='reasoning_gym:chain_sum'}]": "it has no answers to learn from",
    "task.mixture=[{name='sort', wight=2}]": "wight",
    "task.mixture=[{name='sort', label='A b'}]": "task.mixture",
}
PARTS = ("task.name='mixture'", f"task.mixture=[{SORT}, {{name='rle'}}]")


@pytest.mark.parametrize("item", REFUSED)
def test_what_cannot_be_mixed_is_refused_in_one_line(item: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load.load("configs/demo.toml", [*PARTS, item])
    assert REFUSED[item] in str(refused.value) and "\n" not in str(refused.value)


def parts(file: str) -> tuple[str, ...]:
    """The run has a reward function for `sort`, and `mine` its own."""
    mine = f"{{name='file', label='mine', prompts='{file}', reward='mixture_reward:reward'}}"
    sort = "{name='sort', weight=3, max_new_tokens=5}"
    return ("task.name='mixture'", f"task.mixture=[{sort}, {mine}]")


def check_rows(rows: list[dict[str, Any]]) -> None:
    """4 groups of 4 a batch: three of `sort`, one of `mine`."""
    for row in rows:
        assert (row["task/sort_share"], row["task/mine_share"]) == (0.75, 0.25)
        assert 0.25 <= row["task/mine_reward"] <= 0.75 and row["task/sort_length"] <= 5
        assert row["task/mine_lag"] >= 0 and 0 < row["task/mine_ess"] <= 1 + 1e-6


def test_run_in_processes(file: str, forked: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """A generator and the learner are killed; the shares hold in every batch all the same."""
    run = forked(tmp_path / "run", *parts(file), die={"generator-0": 20, "learner": 4})
    assert set(run["deaths"]) == {"generator-0", "learner"}
    rows = [row for row in run["rows"] if "reward/mean" in row]
    assert [row["step"] for row in rows] == list(range(6))
    check_rows(rows)
    assert not [name for row in run["rows"] for name in row if not known(name)]
    last = [row for row in run["rows"] if "eval/heldout" in row][-1]
    assert last["eval/sort_n"] == 3 and last["eval/mine_n"] == 2
    assert last["eval/heldout"] == pytest.approx(
        (3 * last["eval/sort"] + 2 * last["eval/mine"]) / 5
    )
    summary = json.loads((run["run_dir"] / "buffer_summary.json").read_text())
    trained = {k: x["trained"]["samples"] for k, x in summary["ledger_by_task"].items()}
    assert trained == {"sort": 72, "mine": 24}
    logged = [json.loads(x) for x in (run["run_dir"] / "samples.jsonl").open()]
    assert {row["task"] for row in logged} == {"sort", "mine"}
    tokens = [json.loads(x) for x in (run["run_dir"] / "token_samples.jsonl").open()]
    assert {row["task"] for row in tokens} <= {"sort", "mine"}
    page = run_view.write_report(run["run_dir"]).read_text()
    for shown in ("Ledger by task", "Tasks, at the last step", "Tasks: effective sample size"):
        assert shown in page
    assert "mine: share 25%, reward 0." in live.format_tasks(rows[-1])
    summaries.write_model_card(run["run_dir"], run["run_dir"], "1.0")
    card = (run["run_dir"] / "README.md").read_text()
    assert f"| mine | - | {last['eval/mine']:.3f} | 2 |" in card or "| mine | 0" in card
    assert "| mine | `mine.jsonl` | a part of them | `mixture_reward:reward` |" in card


def known(name: str) -> bool:
    return name in ("step", "t") or metrics.is_known_metric(name)


def test_a_run_by_turns(file: str, small_model: Path) -> None:
    small = "learner.groups=4 learner.group_size=4 learner.steps=2 generator.max_new_tokens=12"
    small += " evaluation.final_prompts=4 evaluation.ood_prompts=2"
    sets = (f"model.path={str(small_model)!r}", *parts(file), *small.split())
    record = run_serial(load.load("configs/demo.toml", sets), 0)
    check_rows(record["curve"])
    assert len(record["curve"]) == 2


def test_a_dry_task_is_a_finding() -> None:
    row = {"reward/mean": 0.5, "task/a_dry": 0.0, "task/b_dry": 1.0, "task/b_removed": 40.0}
    (found,) = [s for s in apply_rules([row | {"step": 3}]) if s.name == "dry_tasks"]
    assert "no more groups to train from b (removed so far: b 40)" in found.said
    assert health_checks.check_dry_tasks([row | {"task/b_dry": 0.0}]) is None
