"""benchmarks/real_start.py: what supervised training and distillation show; it runs both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_rivals_kit import program


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("real_start", monkeypatch)


def split(bench: Any, start: float, end: float) -> dict[str, Any]:
    ends = {"start": start, "end": end}
    return {k: {"share": v, "interval": bench.real_learns.wilson(v, 192)} for k, v in ends.items()}


@pytest.mark.parametrize(
    ("teacher", "student", "loss", "kl", "missed"),
    [
        (0.6, 0.6, 0.5, 0.1, []),
        (0.6, 0.6, 0.5, 0.26, ["reverse KL, last / first"]),
        (0.6, 0.6, 1.1, 0.25, ["loss on problems never seen, end / start"]),
        # 0.3 of 192 is at most 0.369, and 0.43 at least 0.362
        (0.43, 0.6, 0.5, 0.1, ["solved problems, held out: gain beyond both intervals"]),
        (0.6, 0.43, 0.5, 0.1, ["distilled, held out: gain beyond both intervals"]),
    ],
)
def test_what_they_have_to_show(
    bench: Any, teacher: float, student: float, loss: float, kl: float, missed: list[str]
) -> None:
    supervised = {"heldout_start": 1.0, "heldout_end": loss}
    taught = {"accuracy": {"heldout": split(bench, teacher, 0.0)}}
    learned = {
        "accuracy": {"heldout": split(bench, 0.3, student)},
        "kl": {"first": 0.5, "last": kl},
    }
    found = bench.goals(supervised, taught, learned)
    assert [g["figure"] for g in found if not g["met"]] == missed and len(found) == 4


def test_both_are_run(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In short, of a tiny model of the same family, which is far from any answer: a teacher that
    has seen solved problems puts them nearer."""
    model = program("real_equal", monkeypatch).tiny(tmp_path)
    bench.main([str(model), "--quick", "--json", "--set", "generator.context=320"])
    found = json.loads(capsys.readouterr().out)
    sft, teacher, student = found["sft"], found["teacher"], found["student"]
    assert sft["steps"] == 2 and sft["rows"] == bench.SOLVED["train"]
    assert sft["heldout_end"] < sft["heldout_start"]
    assert teacher["accuracy"]["heldout"]["n"] == 8 and "kl" not in teacher
    assert student["kl"]["first"] > 0 and student["seconds"] > 0


def test_a_solved_problem_is_what_a_run_asks(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    bench.write_solved(path, "heldout", 3)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    task = bench.get_task(bench.TaskConfig(name="sort_names"))
    assert len({row["prompt"] for row in rows}) == 3
    for number, row in enumerate(rows):
        prompt = task.prompt("heldout", number, 0)
        assert row["prompt"] == prompt.text and task.reward(prompt, row["answer"]) == 1
        assert row["answer"].endswith("\n")
