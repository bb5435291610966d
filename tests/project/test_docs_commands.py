"""The commands, Python, TOML and JSON of README, CONTRIBUTING and docs are run as they stand.

Commands run in the order of the pages, in one directory, so that a later page may use what an
earlier one made.  What a command gets in addition stands in SHORTER (the last word wins, on the
command line too), what another test runs in ELSEWHERE.  A block that cannot run here says so in its
source: `<!-- not run: why -->`.  Output that a page shows after `<!-- output -->` is compared by
shape: words as they are, any number for a number, and ` ...` for the rest of a line or for lines
that are left out."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import warm_python
from process_kit import ENV, ROOT

pytestmark = pytest.mark.slow

PAGE_NAMES = """
README.md docs/getting-started.md docs/running.md docs/watch.md docs/evaluation.md
docs/troubleshooting.md docs/prompts.md docs/rewards.md docs/tinker.md docs/models.md docs/agents.md
docs/http.md docs/staleness.md docs/findings.md docs/simulate.md docs/diagnose.md
docs/compare-and-sweep.md docs/machines.md docs/gpus.md docs/engines.md
docs/algorithms.md docs/methods.md docs/performance.md docs/python-api.md docs/recipes.md
CONTRIBUTING.md docs/extending.md benchmarks/results/README.md
"""
PAGES = PAGE_NAMES.split()
SHELL = ("sh", "console", "bash", "shell")

# on a busy machine nothing is overdue: what a page shows has no losses
TINY_SETS = """
learner.groups=4 learner.group_size=4 learner.checkpoint_every=5 generator.max_new_tokens=12
generator.slots=16 evaluation.every=0 evaluation.prompts=3 evaluation.final_prompts=5
evaluation.ood_prompts=2 wires.lease_s=600 watchdog.floor_s=600 watchdog.startup_s=600
reward.deadline_s=600
"""
TINY = shlex.join(word for setting in TINY_SETS.split() for word in ("--set", setting))
# the beginning of a command -> what is added to it; the longest beginning counts
SHORTER = {
    "asyncrl run configs/demo.toml": f"{TINY} --set learner.steps=22",
    "asyncrl run configs/demo.toml --set staleness.max_lag=0": f"{TINY} --set learner.steps=2",
    "asyncrl run configs/demo.toml --set record.stream=true": f"{TINY} --set learner.steps=3",
    "asyncrl run sums/config.toml": (
        f"{TINY} --set learner.steps=2 --set generator.max_new_tokens=4"
    ),
    "asyncrl task try": "--set reward.deadline_s=600",
    "asyncrl run --resume": "--set learner.steps=23",
    "python -m pytest": "--collect-only",  # they are run by themselves
    "asyncrl simulate": "--seeds 1 --steps 2",
    "asyncrl simulate configs/demo.toml --generators": "--generators 1,3 --seeds 1 --steps 2",
    "asyncrl compare configs/demo.toml --arm": f"{TINY} --set learner.steps=2 --seeds 1",
    "asyncrl sweep": f"{TINY} --set learner.steps=2 --seeds 1 --limits 1 --workers 1",
}
# the same for Python: words of a block -> what stands in their place
SHORTER_PYTHON = {"learner.steps=40": "learner.steps=2"}
# commands that another test runs, with settings of its own
ELSEWHERE = {
    "asyncrl compare configs/demo.toml": "test_compare.py::test_a_comparison_from_start_to_verdict",
    "asyncrl engines": "test_vllm.py::test_engines_command",
    "asyncrl model get smollm2 models/smollm2": "test_real_model.py::test_the_directory_is_whole",
    "python benchmarks/figures.py": "test_docs.py::test_every_figure_is_what_its_result_draws",
    "asyncrl lab bias": "test_lab.py::test_bias_truncation_and_discount_trade",
    "asyncrl lab corrections": "test_lab.py::test_corrections_as_json",
    "asyncrl lab reshape": (
        "test_lab.py::test_reshape_a_claim_that_does_not_hold_is_said_and_ends_with_1"
    ),
}
# commands that end with another exit code than 0, as their page says
ENDS_WITH = {
    "asyncrl diff runs/A runs/R --html diff.html": 1,
    "asyncrl config diff demo decoupled": 1,
}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    mark: str  # what the comment before it says
    text: str


def blocks(page: str) -> list[Block]:
    found = []
    lines = (ROOT / page).read_text().splitlines()
    at = 0
    while at < len(lines):
        if fence := re.fullmatch(r"\s*```(\w*)", lines[at]):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            comment = re.fullmatch(r"<!-- (.+) -->", lines[at - 1].strip()) if at else None
            text = "\n".join(lines[at + 1 : end])
            found.append(Block(page, at + 1, fence[1], comment[1] if comment else "", text))
            at = end
        at += 1
    return found


ALL = [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> list[str]:
    """One string a command, comments off, words separated by single blanks."""
    whole = block.text.replace("\\\n", " ")
    words = (shlex.split(line.removeprefix("$ "), comments=True) for line in whole.splitlines())
    return [shlex.join(w).replace(" '>' ", " > ") for w in words if w]


def longest(command: str, table: dict[str, str]) -> str:
    """What the table has for the longest beginning of the command, "" for none."""
    hits = [k for k in table if command == k or command.startswith(k + " ")]
    return table[max(hits, key=len)] if hits else ""


def shape(line: str) -> str:
    """The words of a line; a number of any sign and length counts as any other."""
    return " ".join(re.sub(r"-?[\d.,]*\d(?:e[+-]\d+)?", "#", line).split())


def is_among(shown: str, printed: list[str]) -> bool:
    """Is this line among the printed ones? `...` at its end stands for the rest of the line."""
    start = shape(shown.removesuffix("..."))
    if shown.endswith("..."):
        return any(line.startswith(start) for line in printed)
    return start in printed


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    """A directory as a clone looks to its user, with untrained models in place of warm starts."""
    from asyncrl.config.tree import TaskConfig
    from asyncrl.models import policy
    from asyncrl.tasks import get_task

    path = tmp_path_factory.mktemp("docs")
    (path / "configs").symlink_to(ROOT / "configs")
    (path / "models").mkdir()
    shutil.copytree(small_model, path / "models" / "sort")
    # all that the prompts of `asyncrl new` are written in
    policy.build_model(path / "models" / "sums", "0123456789+=", hidden=32, kv_heads=2, seed=1)
    symbols = get_task(TaskConfig(name="rle")).symbols  # type: ignore[attr-defined]
    policy.build_model(path / "models" / "rle", symbols, hidden=32, kv_heads=2, seed=1)
    return path


def run(command: str, where: Path) -> subprocess.CompletedProcess[str]:
    """`asyncrl` in the directory `where`, `python` in the clone unless it is given a file of
    `where`; `> FILE` is left out."""
    program, *words = shlex.split(command.split(" > ")[0])
    argv = {"asyncrl": [sys.executable, "-m", "asyncrl.cli"], "python": [sys.executable]}[program]
    env = {k: v for k, v in ENV.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [*argv, *words],
        cwd=where if program == "asyncrl" or str(where) in command else ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )


def test_every_command_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: dict[str, str] = {}
    ran = ""
    monkeypatch.setattr(warm_python, "PROGRAMS", [*warm_python.PROGRAMS, place])
    monkeypatch.setattr(warm_python, "MODULES", (*warm_python.MODULES, "pytest"))
    for block in ALL:
        where = f"{block.page}:{block.line}"
        if block.mark == "output":
            printed = [shape(line) for line in outputs[ran].splitlines()]
            missing = [line for line in block.text.splitlines() if not is_among(line, printed)]
            assert not missing, f"{where}: `{ran}` printed no such lines: {missing}"
        if block.language == "python" and not block.mark.startswith("not run: "):
            text = block.text
            for long, short in SHORTER_PYTHON.items():
                text = text.replace(long, short)
            (place / "block.py").write_text(text + "\n")
            done = run(shlex.join(["python", str(place / "block.py")]), place)
            assert done.returncode == 0, f"{where}:\n{done.stdout[-3000:]}"
        if block.language not in SHELL or block.mark.startswith("not run: "):
            continue
        for command in commands(block):
            if command in ELSEWHERE:
                continue
            ran = command
            if command in outputs or command.startswith("make "):
                continue
            done = run(f"{command} {longest(command, SHORTER)}", place)
            expected = ENDS_WITH.get(command, 0)
            assert done.returncode == expected, f"{where}: `{command}`:\n{done.stdout[-3000:]}"
            outputs[command] = done.stdout
            if command == "asyncrl new sums":  # no warm start: the model is there
                shutil.move(place / "models" / "sums", place / "sums" / "model")
    assert len(outputs) > 20


def test_every_make_target_is_there() -> None:
    """`make` itself installs an environment: only that the target is known is looked at."""
    named = {c for b in ALL if b.language in SHELL for c in commands(b) if c.startswith("make ")}
    assert len(named) >= 5
    for command in sorted(named):
        argv = ["make", "-n", *shlex.split(command)[1:]]
        done = subprocess.run(
            argv, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, f"`{command}`: {done.stderr}"


def test_the_tables_name_commands_and_tests_that_are_there() -> None:
    written = [c for b in ALL if b.language in SHELL for c in commands(b)]
    for key in (*SHORTER, *ENDS_WITH):
        assert any(c == key or c.startswith(key + " ") for c in written), f"no page has `{key}`"
    for command, test in ELSEWHERE.items():
        assert command in written, f"no page has `{command}`"
        file, function = test.split("::")
        (path,) = (ROOT / "tests").rglob(file)
        tree = ast.parse(path.read_text())
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, test
    python = [b.text for b in ALL if b.language == "python"]
    for key in SHORTER_PYTHON:
        assert any(key in text for text in python), f"no block of Python has `{key}`"
    marks = [b.mark for b in ALL if b.mark]
    for mark in marks:
        assert mark == "output" or re.match(r"not run: \w", mark), mark
        for test in re.findall(r"tests/[\w/]+\.py", mark):
            assert (ROOT / test).is_file(), mark


def test_no_command_hides_in_a_block_of_another_kind() -> None:
    kinds = {*SHELL, "python", "toml", "json", "text"}
    for block in ALL:
        assert block.language in kinds, f"{block.page}:{block.line}: ```{block.language}"
        if block.language == "text":
            first = {line.split(" ")[0] for line in block.text.splitlines()}
            assert not first & {"asyncrl", "make", "python", "pip", "$"}, block


def test_every_page_with_a_command_is_run() -> None:
    """No page is left out of PAGES by oversight (the log tells of its day)."""
    docs = ROOT / "docs"
    pages = [*ROOT.glob("*.md"), *docs.glob("*.md")]
    for path in [*pages, ROOT / "configs" / "README.md"]:
        page = str(path.relative_to(ROOT))
        if path.name == "index.md":
            continue  # README.md once more, made for the site
        kinds = {b.language for b in blocks(page)}
        assert page in PAGES or not kinds & {*SHELL, "python", "toml"}, f"{page} is in no list"


def test_prompts_and_reward_of_the_page_train(place: Path) -> None:
    """The first three blocks of docs/rewards.md, each in its file, are a run's task."""
    by_kind: dict[str, str] = {}
    for block in blocks("docs/rewards.md"):
        if block.language not in ("sh", "text"):
            by_kind.setdefault(block.language, block.text)
    assert set(by_kind) == {"json", "python", "toml"}
    answers = [json.loads(line)["answer"] for line in by_kind["json"].splitlines()]
    (place / "prompts.jsonl").write_text(by_kind["json"] + "\n")
    name = re.match(r"# (\w+\.py)", by_kind["python"])
    assert name, "its first line says what the file is called"
    (place / name[1]).write_text(by_kind["python"] + "\n")
    (place / "my.toml").write_text(by_kind["toml"] + "\n")
    more = "--set model.path=models/sort --set reward.deadline_s=600"
    tried = run(f"asyncrl task try my.toml {more} --json", place)
    assert tried.returncode == 0, tried.stdout
    rows = [json.loads(line) for line in tried.stdout.splitlines() if line.startswith("{")]
    assert {r["answer"] for r in rows} <= set(answers) and rows
    for row in rows:  # 1 for the answer, less 0.01 for each character
        assert row["reward_of_answer"] == pytest.approx(1 - 0.01 * len(row["answer"]))
        assert row["reward_of_nothing"] == 0
