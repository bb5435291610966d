"""`asyncrl.train` in a script, with functions of the script, of its modules and of a notebook."""

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from process_kit import ENV, PATIENT, ROOT, run_command

import asyncrl
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.models.policy import build_model
from asyncrl.supervise import notebook

SCRIPT = (Path(__file__).parents[1] / "data" / "programs" / "train_script.txt").read_text()


def in_main(monkeypatch: pytest.MonkeyPatch, source: str, **names: Any) -> dict[str, Any]:
    """The script as a program that runs it has it."""
    main = ModuleType("__main__")
    main.__dict__.update(names)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(source, "script", "exec"), main.__dict__)
    return main.__dict__


def test_a_function_brings_what_it_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + "print(reward)\n1 / 0\n")
    made = in_main(monkeypatch, SCRIPT, __file__=str(tmp_path / "script.py"))
    kept = tmp_path / "kept"
    paths = [notebook._export_function(made[name], kept) for name in ("reward", "short")]
    texts = [Path(path.rpartition(":")[0]).read_text() for path in paths]
    assert "raise_once" not in texts[0] and "asyncrl" not in texts[0] and "1 / 0" not in texts[0]
    assert texts[1].startswith("def short") and "import" not in texts[1]
    again = importing.import_function(paths[0], "reward")
    assert again("", "12ab") == made["reward"]("", "12ab") > 0
    assert notebook._export_function(made["reward"], kept) == paths[0]
    cells = ["", "LIMIT = 1", "not python", "def reward(prompt, text): return LIMIT", "LIMIT = 3"]
    made = in_main(monkeypatch, "\n".join([cells[3], cells[4]]), In=cells)
    path = notebook._export_function(made["reward"], tmp_path)
    assert importing.import_function(path, "reward")("", "") == 3
    for missing in (lambda prompt, text: 1.0, in_main(monkeypatch, cells[3])["reward"]):
        with pytest.raises(ConfigError, match=r"^reward: .* is not defined at the top level of a"):
            missing.__module__ = "__main__"
            notebook._export_function(missing, tmp_path)
    with pytest.raises(
        ConfigError, match=r"^reward: functools.partial.* is not defined at the top"
    ):
        notebook._export_function(partial(made["reward"]), tmp_path)
    of_module = notebook._export_function(importing.make_command, tmp_path)
    assert of_module == "asyncrl.contract.importing:make_command"


def test_keys_are_not_given_twice_and_have_known_names(small_model: Path, tmp_path: Path) -> None:
    for keys, problem in (
        ({"staleness.max_lag": 4}, "^staleness.max_lag: is also given by another argument"),
        ({"max_steps": 3, "learner.steps": 3}, "^learner.steps: is also given by another"),
        ({"beta": 0.1}, "^beta: was replaced; write kl.loss.coefficient"),
        ({"num_iteration": 2}, "^num_iteration: unknown key; did you mean learner.epochs"),
    ):
        with pytest.raises(ConfigError, match=problem):
            asyncrl.train(small_model, [{"prompt": "1"}], "math:sqrt", runs=str(tmp_path), **keys)


@pytest.mark.slow
def test_the_page_s_script_trains(tmp_path: Path) -> None:
    """From TRL in ten minutes, with a tiny model, three steps and patience."""
    build_model(tmp_path / "tiny", "0123456789+= ", hidden=32, seed=1)
    page = (ROOT / "docs" / "python-api.md").read_text()
    script = re.search(r"```python\n(# train\.py.*?)```", page, re.S)
    assert script is not None
    patient = {key: float(value) for key, value in (item.split("=") for item in PATIENT)}
    own = {"hf://Qwen/Qwen2.5-0.5B": str(tmp_path / "tiny"), "max_steps=200": "max_steps=3"}
    own |= {"learning_rate=1e-6": f"learning_rate=1e-3, **{patient | {'learner.groups': 2}}"}
    text = script[1]
    for shown, used in own.items():
        assert text.count(shown) == 1
        text = text.replace(shown, used)
    (tmp_path / "train.py").write_text(text)
    env = ENV | {"PYTHONPATH": str(ROOT)}
    done = run_command([sys.executable, "train.py"], cwd=tmp_path, env=env).check()
    (directory,) = (tmp_path / "runs").glob("[!.]*")
    run = asyncrl.load_run(directory)
    assert run.summary["steps"] == 3 and run.config.staleness.max_lag == 2
    assert (run.config.loss.surrogate, run.config.learner.group_size) == ("vespo", 8)
    assert done.out.count("step ") == 3 and f"is in runs/{directory.name}/model" in done.out
    assert (directory / "model" / "config.json").is_file() and "3 of 3" in done.out
