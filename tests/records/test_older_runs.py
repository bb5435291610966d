"""Runs of older versions, and rows as objects."""

import json
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from clients_kit import python_of
from process_kit import ENV, ROOT, Ended, run_cli

import asyncrl
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.supervise import notebook, summary
from asyncrl.tasks.file import read_prompts

pytestmark = pytest.mark.slow

ARCHIVE = ROOT / "tests" / "data" / "run_3eaeb19.tar.xz"
BATCHES = 10  # that it had trained


@pytest.fixture
def older_run(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "main-3eaeb19"


def call(run: Path, *words: str) -> Ended:
    return run_cli(*words, "--json", cwd=run.parent)


def test_an_older_run_loads_in_python(older_run: Path) -> None:
    run = asyncrl.load_run(older_run)
    lag = run.metrics["lag/mean"]
    assert len(lag.values) == BATCHES and lag.values.max() <= 2
    # it wrote them as adv/mean and adv/abs_max
    assert len(run.metrics["advantage/mean"].values) == BATCHES
    assert not any(name.startswith("adv/") for name in run.metrics)
    got = sum(n for line, n in run.ledger.items() if line != "generated")
    assert got == run.ledger["generated"]


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "buffer killed"])
def test_a_short_run_has_the_rate_of_its_whole_time(older_run: Path, killed: bool) -> None:
    """Generators report at intervals; a run may end before the first report."""
    name = "throughput/generator_tokens_per_s"
    path = older_run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    cut = [json.dumps({k: v for k, v in row.items() if k != name}) for row in rows]
    path.write_text("".join(line + "\n" for line in cut), encoding="utf-8")
    if killed:
        (older_run / "buffer_summary.json").unlink()
    made = summary.compose(load.load(older_run / "config.toml"), older_run)
    rate = made["speed"]["generator_tokens_per_s"]
    assert rate == pytest.approx(made["ledger"]["generated"] / made["wall_s"]) and rate > 0


def test_an_older_recording_replays(older_run: Path) -> None:
    """To rounding: the last bits are those of the processor that recorded it."""
    replayed = call(older_run, "replay", str(older_run))
    assert replayed.code in (0, 1), replayed.err  # 1: not the same bits
    assert replayed.json["to"] == BATCHES and replayed.json["changed"] == []
    recorded, again = replayed.json["recorded"], replayed.json["replayed"]
    assert recorded["optim/grad_norm"] > 0
    for name in ("optim/grad_norm", "policy/entropy", "loss/policy", "is/ess"):
        assert again[name] == pytest.approx(recorded[name], rel=1e-3, abs=1e-5), name


def test_an_older_run_resumes_from_its_journal(older_run: Path) -> None:
    steps = BATCHES + 2
    resumed = call(older_run, "run", "--resume", str(older_run), "--set", f"learner.steps={steps}")
    assert resumed.code == 0, resumed.err
    assert resumed.json["steps"] == steps
    ledger = resumed.json["ledger"]
    assert sum(n for line, n in ledger.items() if line != "generated") == ledger["generated"]
    assert list(asyncrl.load_run(older_run).metrics["optim/grad_norm"].steps) == list(range(steps))


ROWS = [{"question": f"{n}+1=", "answer": str(n + 1), "level": {"grade": n}} for n in range(3)]
# in the Python that has the package: an object of it, and what the module makes of it
PROGRAM = (Path(__file__).parents[1] / "data" / "programs" / "older_runs_program.txt").read_text()


def test_a_data_set_of_the_package_becomes_a_file(tmp_path: Path) -> None:
    words = [python_of("clients"), "-c", PROGRAM, json.dumps(ROWS), str(tmp_path / "kept")]
    env = ENV | {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_OFFLINE": "1"}
    shown = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    table = json.loads(shown.stdout.splitlines()[-1])
    task = table["task"]
    prompts = read_prompts(task["prompts"], "train", {"prompt": "question"})
    assert [(p.text, p.answer) for p in prompts] == [(r["question"], r["answer"]) for r in ROWS]
    assert prompts[1].meta == {"level": '{"grade": 1}', "seen": "2026-01-02 00:00:00"}
    held = read_prompts(task["heldout"], "heldout", {"prompt": "question"})
    assert [p.text for p in held] == ["0+1=", "2+1="]
    (part,) = task["mixture"]
    assert part["heldout"] == "mine.jsonl"
    (alone,) = read_prompts(part["prompts"], "train", {"prompt": "question"})
    assert alone.answer == "2"
    assert table["refused"] == (
        "task.prompts: has several splits; give one of them, as data['train']"
    )


def test_the_table_of_a_run_names_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by their content: the same rows are the same file, and the given table stays."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    sets = [{"name": "x", "file": rows}]
    given: dict[str, Any] = {
        "runs": "{here}/mine",
        "task": {"name": "file", "prompts": rows},
        "evaluation": {"sets": sets},
    }
    made = tomllib.loads(notebook._format_toml(given))
    path = Path(made["task"]["prompts"])
    assert path.parent == tmp_path / "mine" / ".prompts"
    assert [p.text for p in read_prompts(str(path), "train")] == ["a", "b"]
    assert made["evaluation"]["sets"][0]["file"] == str(path) and given["task"]["prompts"] is rows
    given["task"]["prompts"] = [*rows, {"prompt": "c"}]
    assert tomllib.loads(notebook._format_toml(given))["task"]["prompts"] != str(path)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (["a"], "task.prompts: row 0 is a str; each must be a mapping"),
        (3, "task.prompts: a int has no rows of text and numbers"),
        ([{("a", 1): 2}], "task.prompts: a list has no rows of text and numbers"),
    ],
)
def test_what_has_no_rows_is_refused(rows: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        notebook._format_toml({"task": {"prompts": rows}})
