"""`asyncrl new`: what is written loads, judges and trains, wherever it is called from."""

import asyncio
import json
import re
import sys
from pathlib import Path
from statistics import mean

import pytest
from process_kit import ROOT, RUN_SEED, Ended, as_options, run_cli, run_command, write_lines
from warm_python import FORKED

from actors.rewards import check_reward_process
from asyncrl.cli import new
from asyncrl.config import load, rules
from asyncrl.config.tree import TaskConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import import_module
from asyncrl.contract.messages import Prompt
from asyncrl.records import jsonl
from asyncrl.tasks import get_task
from asyncrl.tasks.file import FileTask
from asyncrl.tasks.warm_start import warm_start

pytestmark = pytest.mark.slow

# a process may stand still for a minute
PATIENT = (
    "reward.deadline_s=600.0",
    "wires.connect_s=1800.0",
    "watchdog.floor_s=1800.0",
    "watchdog.startup_s=3600.0",
)
AGENT_PATIENT = ("agent.idle_s=3600.0", "agent.deadline_s=7200.0", "wires.lease_s=3600.0")


def asyncrl(folder: Path, *words: str) -> Ended:
    return run_cli(*words, cwd=folder, timeout=7200)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    new.write(tmp_path / "mine")
    return tmp_path / "mine"


def test_what_is_written(tmp_path: Path) -> None:
    done = asyncrl(tmp_path, "new", "a/mine", "--json").check()
    written = {p.name for p in (tmp_path / "a" / "mine").iterdir()}
    assert written == {"reward.py", *new.FILES} == {Path(f).name for f in done.json["files"]}
    assert "train: asyncrl run b/config.toml" in asyncrl(tmp_path, "new", "b").out


def test_the_project_of_an_agent_trains_from_a_model_that_is_given(tmp_path: Path) -> None:
    """As its README says: the agent that is written, OpenAI's client, the real endpoint."""
    done = asyncrl(tmp_path, "new", "first", "--agent", "--json").check()
    written = {p.name for p in (tmp_path / "first").iterdir()}
    assert written == {"agent.py", *new.FILES} == {Path(f).name for f in done.json["files"]}
    config = load.load(tmp_path / "first" / "config.toml")
    assert config.agent.function == f"{tmp_path / 'first'}/agent.py:play"
    assert config.model.warm_start
    assert not rules.find_warnings(config) and not config.reward.function
    warm_start(config, config.model.path, steps=2, threads=1)
    asyncrl(tmp_path, "new", "mine", "--agent", "--model", "first/model").check()
    sets = [*SHORT.split(), *PATIENT, *AGENT_PATIENT, "name=first"]
    sets += ["generator.max_new_tokens=4", "generator.context=16", "agent.max_tokens=16"]
    done = asyncrl(tmp_path, "run", "mine/config.toml", "--json", *as_options(sets)).check()
    assert done.json["steps"] == load.load(tmp_path / "mine" / "config.toml", sets).learner.steps
    samples = jsonl.read(tmp_path / "mine" / "runs" / "first" / "samples.jsonl")
    calls = [sample["calls"] for sample in samples]
    assert calls and set(calls) <= {1, 2} and max(calls) == 2, "a wrong number is tried again"
    readme = (tmp_path / "mine" / "README.md").read_text()
    assert "agent.py" in readme and "pip install openai" in readme


def test_the_model_to_begin_with(tmp_path: Path) -> None:
    for agent in (False, True):
        folder = tmp_path / f"hub{agent:d}"
        new.write(folder, agent=agent, model="hf://ORG/NAME")
        config = load.load(folder / "config.toml")
        assert config.model.path == "hf://ORG/NAME" and not config.model.warm_start
        assert not rules.find_warnings(config)
        generator = config.generator
        assert (generator.slots, generator.max_new_tokens, generator.context) == (16, 128, 1024)
        assert (config.learner.groups, config.learner.lr) == (8, 1e-6)
        assert config.agent.max_tokens >= 2 * generator.max_new_tokens
        assert bool(config.agent.function) == agent != bool(config.reward.function)
    (tmp_path / "nothing").mkdir()
    done = asyncrl(tmp_path, "new", "mine", "--model", "nothing", "--json")
    assert done.code == 2 and "--model: nothing is not a model directory" in done.json["error"]
    assert not (tmp_path / "mine").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    new.write(tmp_path / "empty")
    for name in ("empty", "file"):
        (tmp_path / "file").write_text("mine")
        done = asyncrl(tmp_path, "new", name, "--json")
        assert done.code == 2 and done.err.count("\n") == 1, done.err
        assert "choose a new or empty folder" in done.json["error"]
    assert (tmp_path / "file").read_text() == "mine"


def test_config_prompts_and_reward_fit_together(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any folder; every answer of the files gets 1, and fits the config's lengths."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    c = load.load(project / "config.toml")
    assert not rules.find_warnings(c)
    check_reward_process(c)
    task = get_task(c.task)
    assert isinstance(task, FileTask)
    assert (len(task.sets["train"]), len(task.sets["heldout"])) == (800, 160)
    assert task.unanswered == 0
    reward = import_module(str(project / "reward.py")).reward
    for p in (*task.sets["train"], *task.sets["heldout"]):
        assert sum(map(int, p.text.rstrip("=").split("+"))) == int(p.answer)
        assert (reward(p, f" {p.answer}"), reward(p, "")) == (1.0, 0.0)
        assert len(p.answer) < c.generator.max_new_tokens
        assert len(p.text) + c.generator.max_new_tokens <= c.generator.context


def test_the_rewards_in_comments_work_once_they_are_none(project: Path) -> None:
    """Coroutines and lists: with the marks of the comments taken away."""
    file = project / "reward.py"
    head, _, rest = file.read_text().partition("# import asyncio\n")
    code = "import asyncio\n" + re.sub(r"(?m)^# ?", "", rest)
    file.write_text(head + re.sub(r"(?m)^(If it judges|reward\.function).*\n", "", code))
    made = import_module(str(file))
    prompts = [Prompt(0, "1+1+1=", "3"), Prompt(1, "2+2+2=", "6")]
    assert made.together(prompts, ["3", "5"]) == [1.0, 0.0] and made.together.batched
    assert asyncio.run(made.waiting(prompts[0], "3")) == 1.0
    for name in ("waiting", "together"):
        sets = [f"reward.function='{file}:{name}'"]
        check_reward_process(load.load(project / "config.toml", sets))


def test_a_project_trains_and_gets_better(project: Path, tmp_path: Path) -> None:
    """As the README says, from a folder beside it; what it writes is in the project."""
    sets = ["learner.steps=60", "evaluation.every=30", "name='first'", f"seed={RUN_SEED}", *PATIENT]
    s = asyncrl(tmp_path, "run", "mine/config.toml", "--json", *as_options(sets)).check().json
    assert s["steps"] == 60 and s["lag"]["max"] <= 2 and s["lag"]["mean"] > 0.5
    rows = (project / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    rewards = [row["reward/mean"] for row in map(json.loads, rows) if "reward/mean" in row]
    # 20 batches of 256 answers each: a standard error of 0.01; seen: 0.10.  Of the 160 held-out
    # prompts the difference has one of 0.05.
    assert len(rewards) == 60 and mean(rewards[-20:]) > mean(rewards[:20]) + 0.05
    assert s["heldout_end"] > s["heldout_start"] - 0.05
    assert s["heldout_start"] > 0.15, "the warm start has begun to learn it"
    assert (project / "runs" / "first" / "report.html").exists()
    assert (project / "model" / "config.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["mine"], "nothing beside the project"
    from_run = ("simulate", "config.toml", "--from", "runs/first", "--steps", "10", "--seeds", "1")
    simulated = asyncrl(project, *from_run, "--json")
    assert simulated.code == 0 and simulated.json["tokens_per_s"] > 0, simulated.err
    words = as_options(("learner.steps=2", "name='again'", "evaluation.every=0", *PATIENT))
    again = asyncrl(project, "run", "config.toml", "--json", *words)
    assert again.code == 0 and "warm-starting" not in again.err, "from inside, with that model"
    assert (project / "runs" / "again" / "summary.json").exists()


SHORT = "learner.steps=2 evaluation.every=0 evaluation.prompts=8 evaluation.final_prompts=8 "
SHORT += " ".join(PATIENT)


def commands(text: str) -> list[str]:
    blocks = "\n".join(re.findall(r"(?ms)^```sh\n(.*?)^```", text))
    return re.findall(r"(?m)^asyncrl .*$", blocks) or re.findall(r"`(asyncrl [^`]*)`", text)


def test_every_command_of_the_pages_runs(tmp_path: Path) -> None:
    """The project of docs/getting-started.md, then its README; runs are cut short."""
    page = (ROOT / "docs" / "getting-started.md").read_text().partition("## Your own project")[2]
    readme = (new.TEMPLATE / "README.md").read_text().replace("NAME", "four")
    # fetching a model is tests/models/test_real_model.py's; `new --agent` and `--model`, which have
    # a remark behind them, are made by the tests above
    own = [line for line in commands(page) if line.split()[1] != "model" and "#" not in line]
    typed = [(tmp_path, line) for line in own]
    typed += [(tmp_path / "sums", line) for line in commands(readme)]
    assert [line.split()[1] for _, line in typed] == (
        ["new", "run", "task", "run", "report", "task", "run", "doctor", "run", "sweep", "export"]
    )
    more = {"run": as_options(SHORT.split()), "sweep": ["--dry-run"]}
    for n, (folder, line) in enumerate(typed):
        words = line.split()[1:] + more.get(line.split()[1], [])
        if words[0] == "run" and "name=four" not in words:
            words += ["--set", f"name=run{n}"]
        done = asyncrl(folder, *words)
        assert done.code == 0, (line, done.err[-2000:])
        if n == 0:
            config = load.load(tmp_path / "sums" / "config.toml")
            warm_start(config, config.model.path, steps=2, threads=1)
    (python,) = re.findall(r"(?ms)^```python\n(import asyncrl\n.*?)^```", page)
    short = "', '".join(SHORT.split())
    code = python.replace('"learner.steps=40"', f"'{short}', 'name=own'")
    done = run_command([sys.executable, "-c", FORKED + code], cwd=tmp_path, timeout=7200)
    assert done.out.startswith("[0 2] [0."), done.err


def prompts(path: Path, *rows: dict[str, object]) -> FileTask:
    return FileTask(write_lines(path, *rows))


def test_demonstrations_are_of_training_prompts_and_a_quarter_is_spoiled(tmp_path: Path) -> None:
    task = prompts(
        tmp_path / "p.jsonl", *({"prompt": f"{i}=", "answer": f"a{i}"} for i in range(40))
    )
    held = {p.text for p in task.sets["heldout"]}
    shown = task.make_demonstrations(4000, 0)
    assert len(shown) == 4000 and len(held) == 4
    assert {p for p, _ in shown} == {p.text for p in task.sets["train"]}
    right = sum(f"a{p[:-1]}" == a for p, a in shown) / 4000
    assert 0.72 < right < 0.81, "three quarters, and one of 36 drawn answers is right by chance"
    assert not {f"a{p[:-1]}" for p in held} & {a for _, a in shown}, "nothing held out is shown"
    assert shown == task.make_demonstrations(4000, 0) != task.make_demonstrations(4000, 1)
    assert task.symbols == "0123456789=a"


CANNOT = [
    ([{"prompt": "a", "answer": "b"}, {"prompt": "c"}, {"prompt": "d"}], "no answer to learn from"),
    (
        [{"messages": [{"role": "user", "content": x}], "answer": x} for x in "abc"],
        "prompts are chats",
    ),
    (
        [{"prompt": "".join(map(chr, range(n, n + 150))), "answer": "a"} for n in (500, 700)],
        "characters, 256 at most",
    ),
]


@pytest.mark.parametrize(("rows", "why"), CANNOT, ids=[c[1] for c in CANNOT])
def test_what_no_tiny_model_can_be(rows: list[dict[str, object]], why: str, tmp_path: Path) -> None:
    task = prompts(tmp_path / "p.jsonl", *rows)
    with pytest.raises(ConfigError, match=why) as error:
        task.make_demonstrations(8, 0)
    assert "set model.path to your own model" in str(error.value)


def test_the_model_knows_every_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts(tmp_path / "p.jsonl", *({"prompt": f"{x}?", "answer": x} for x in "abcdef"))
    (tmp_path / "c.toml").write_text(new.build_config(agent=False, model=""))
    sets = (f"task.prompts='{tmp_path / 'p.jsonl'}'", "task.heldout=''", "generator.context=400")
    config = load.load(tmp_path / "c.toml", sets)
    assert config.task == TaskConfig(name="file", prompts=str(tmp_path / "p.jsonl"))
    monkeypatch.setattr("asyncrl.tasks.warm_start.PROGRESS_S", -1.0)
    told: list[str] = []
    said = warm_start(config, tmp_path / "model", steps=3, threads=1, say=told.append)
    assert sum(line.startswith("warm start: step ") for line in told) == 3
    assert said["steps"] == 3 and said["task"] == "file"
    made = json.loads((tmp_path / "model" / "config.json").read_text())
    assert made["max_position_embeddings"] == 400
    vocabulary = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    assert set("abcdef?") < set(vocabulary)
