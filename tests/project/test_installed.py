"""The wheel in a clean environment and in another directory: nothing of the checkout is in reach,
and configs, schema, page templates and types have come with it."""

import json
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from installed_kit import called, installed  # noqa: F401
from process_kit import ROOT

from asyncrl.config import bundled_configs, load
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.tasks.warm_start import warm_start
from asyncrl.tinker import settings

pytestmark = pytest.mark.slow


def test_what_is_no_module_is_in_the_wheel(installed: Path) -> None:
    (wheel,) = installed.glob("asyncrl-*.whl")
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
    wanted = {f"asyncrl/{p.relative_to(ROOT)}" for p in (ROOT / "configs").rglob("*.*")}
    wanted = {x for x in wanted if "__pycache__" not in x}
    for folder in ("cli/templates", "records/page", "viewer/static"):
        files = (ROOT / "asyncrl" / folder).rglob("*.*")
        wanted |= {str(p.relative_to(ROOT)) for p in files}
    assert wanted | {"asyncrl/py.typed"} <= names
    some = ("configs/schema.json", "records/page/page.html", "cli/templates/new/reward.py")
    assert {f"asyncrl/{name}" for name in some} <= wanted


def test_a_shipped_example_finds_its_files_anywhere(installed: Path, tmp_path: Path) -> None:
    argv = [str(installed / "env" / "bin" / "asyncrl"), "task", "try"]
    done = called([*argv, "configs/file_example.toml", "-n", "1"], tmp_path).check()
    assert done.json["reward_of_answer"] == 0, "the task's own would say 1: it wants no `#`"


def test_a_new_project_runs_from_a_notebook(installed: Path, tmp_path: Path) -> None:
    env = installed / "env" / "bin"
    assert called([str(env / "asyncrl"), "new", "mine"], tmp_path).code == 0
    warm_start(load.load(tmp_path / "mine" / "config.toml"), tmp_path / "mine" / "model", steps=2)
    code = (
        "import asyncrl; r = asyncrl.run('mine/config.toml', ['learner.steps=2', "
        "'evaluation.every=0', 'evaluation.final_prompts=16', 'evaluation.prompts=16']); "
        "print(r.metrics['reward/mean'].values.shape, r.summary['steps'], asyncrl.__file__)"
    )
    done = called([str(env / "python"), "-P", "-c", code], tmp_path)
    assert done.out.startswith(f"(2,) 2 {installed / 'env'}"), done.err


def test_errors_of_a_wheel_name_extras_that_exist(installed: Path, tmp_path: Path) -> None:
    """No Makefile is there to name; nothing is built before the refusal."""
    env = installed / "env" / "bin"
    assert called([str(env / "asyncrl"), "new", "mine"], tmp_path).code == 0
    code = (
        "import importlib.util as u, sys; before = u.find_spec; "
        "gone = ('vllm', 'deepspeed', 'peft', 'httptools'); "
        "u.find_spec = lambda n, *a: None if n in gone else before(n, *a); "
        "from asyncrl.cli import main; main(sys.argv[1:])"
    )
    cases = {
        "generator.engine='vllm'": "vllm",
        "learner.backend='deepspeed'": "deepspeed",
        "lora.rank=4": "lora",
    }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for item, extra in cases.items():
        argv = [str(env / "python"), "-P", "-c", code, "run", "mine/config.toml", "--set", item]
        done = called(argv, tmp_path)
        assert done.code == 2 and f"pip install 'asyncrl[{extra}]'" in done.err, (item, done.err)
        assert extra in extras and "warm" not in done.err.replace("warm_start", "")
        assert not (tmp_path / "mine" / "model").exists()


@pytest.mark.parametrize("name", ["demo", "demo.toml", "configs/demo.toml"])
def test_names_of_shipped_configs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # a folder is no config
    assert load.load(name) == load.load(ROOT / "configs" / "demo.toml")
    (tmp_path / "configs").mkdir()
    for mine in ("demo.toml", "configs/demo.toml"):
        (tmp_path / mine).write_text('model.path = "mine"\ntask.name = "rle"\n')
    own = name != "demo"
    assert (load.load(name).model.path == "mine") == own, "a file of one's own comes first"


@pytest.mark.parametrize("name", ["tinker_demo", "configs/examples/tinker_demo.toml"])
def test_a_shipped_server_is_found_by_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings.read(name).model.path == "models/tinker_demo"


def test_a_config_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demoo.toml", "elsewhere/demo.toml", "/configs/demo.toml"):
        with pytest.raises(ConfigError) as error:
            load.load(name)
        said = str(error.value)
        assert said.startswith(
            f"{name}: no such config file; did you mean demo? bundled configs, by name: calc,"
        )
    assert "demo" in bundled_configs.list_names()


def test_here_is_the_configs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file only: a path of the command line is the working directory's."""
    path = tmp_path / "mine" / "c.toml"
    path.parent.mkdir()
    path.write_text(
        'model.path = "{here}"\ngenerator.stop = ["{here}/a", "b{here}"]\nruns = "r"\n'
        '[task]\nname = "file"\nprompts = "{here}/p.jsonl"\nood = "{heretic}"\n'
    )
    monkeypatch.chdir(tmp_path)
    c = load.load("mine/c.toml", ["task.heldout='{here}/h.jsonl'"])
    assert (c.model.path, c.task.prompts) == (str(path.parent), str(path.parent / "p.jsonl"))
    assert (c.runs, c.task.ood, c.task.heldout) == ("r", "{heretic}", "{here}/h.jsonl")
    assert c.generator.stop == [str(path.parent / "a"), "b{here}"]
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(load.dump(c))
    assert load.load(resolved).task.prompts == c.task.prompts, "as RUN/config.toml repeats it"


def test_a_reward_file_by_its_path(tmp_path: Path) -> None:
    """Its folder is looked in for what it imports, after everything else; a known name is not
    taken from another module."""
    (tmp_path / "json.py").write_text(
        "from dataclasses import dataclass\nimport queue, helper_of_json\n"
        "@dataclass\nclass Judged:\n    value: 'float'\n"
        "def reward(prompt, text):\n    return Judged(helper_of_json.VALUE).value\n"
    )
    (tmp_path / "queue.py").write_text("raise RuntimeError('hidden by the standard library')\n")
    (tmp_path / "helper_of_json.py").write_text("VALUE = 0.25\n")
    code = (
        "from asyncrl.contract.importing import import_function; import json as before; "
        f"found = import_function({str(tmp_path / 'json.py')!r} + ':reward', ''); import json; "
        "print(found(None, ''), json is before)"
    )
    done = called([sys.executable, "-c", code], ROOT)
    assert done.out.split() == ["0.25", "True"], done.err
    with pytest.raises(FileNotFoundError):
        importing.import_module(str(tmp_path / "none.py"))
    assert json.dumps({}) == "{}"
