"""What is known before a run starts: where a warm start may build a model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from process_kit import TEXTS

from asyncrl.cli import main, new
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.models import model_check
from asyncrl.supervise import preflight
from asyncrl.tasks import warm_start


@pytest.fixture(scope="module", autouse=True)
def compared_once() -> Iterator[None]:
    """A model that is not changed in between is compared with its eager forward once."""
    compare, notes = model_check.check_complete, dict[Any, str]()

    def check_complete(raw: Any, *place: Any, **more: Any) -> str:
        key = (json.dumps(raw), place, *more.items())
        if key not in notes:
            notes[key] = compare(raw, *place, **more)
        return notes[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_check, "check_complete", check_complete)
        yield


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    new.write(tmp_path / "mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    whole = warm_start.warm_start
    monkeypatch.setattr(
        warm_start,
        "warm_start",
        lambda config, path, **more: whole(config, path, steps=1, threads=1, **more),
    )
    return tmp_path / "mine"


def at(project: Path, path: str | Path, *sets: str) -> Config:
    return load.load(project / "config.toml", [f"model.path='{path}'", *sets])


def test_a_name_of_the_hub_and_a_run_directory_are_not_warm_started(project: Path) -> None:
    with pytest.raises(ConfigError) as error:
        preflight.preflight(at(project, "Qwen/Qwen2.5-0.5B"))
    said = str(error.value)
    assert "Qwen/Qwen2.5-0.5B is not a directory" in said
    assert "`asyncrl model get hf://Qwen/Qwen2.5-0.5B models/Qwen2.5-0.5B`" in said
    assert 'model.path = "hf://Qwen/Qwen2.5-0.5B"' in said and not list(Path.cwd().iterdir())
    run_dir = project / "runs" / "r"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="is not a model directory"):
        preflight.preflight(at(project, run_dir / "model"))


@pytest.mark.parametrize(
    "place", ["{tmp}/data/models/real", "{tmp}/data/real", "{tmp}/mine/lama", "m"]
)
def test_a_misspelled_place_of_a_model_is_not_warm_started(project: Path, place: str) -> None:
    path = place.format(tmp=project.parent)
    with pytest.raises(ConfigError) as error:
        preflight.preflight(at(project, path))
    assert "is not a model directory" in str(error.value) and not Path(path).exists()
    assert f'"models/{Path(path).name}"' in str(error.value)
    assert str(Path(path) / preflight.MARKER) in str(error.value)


@pytest.mark.parametrize("place", ["{here}/model", "{here}/models/small", "models/small", "marked"])
def test_a_project_builds_its_own_model(project: Path, place: str) -> None:
    if place == "marked":
        Path(place).mkdir()
        (Path(place) / preflight.MARKER).touch()
    path = Path(place.replace("{here}", str(project)))
    preflight.preflight(at(project, path))
    assert (path / "config.json").is_file()


def test_runs_elsewhere_leave_the_project_its_model(project: Path, tmp_path: Path) -> None:
    preflight.preflight(at(project, project / "model", f"runs='{tmp_path / 'scratch'}'"))
    assert (project / "model" / "config.json").is_file()


# ---- `asyncrl config check` ----------------------------------------------------------------------


def found(config: Config, *names: str) -> dict[str, tuple[str, str]]:
    needed = {*names, *(other for name in names for other in preflight.NEEDS.get(name, ()))}
    checks = {n: check for n, check in preflight.CHECKS.items() if not names or n in needed}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "CHECKS", checks)
        return {f.check: (f.state, f.text) for f in preflight.run_checks(config)}


def test_a_config_is_checked_without_building_anything(project: Path) -> None:
    checks = found(load.load(project / "config.toml"))
    assert list(checks) == list(preflight.CHECKS)
    later = ("model", "tokenizer", "template", "images", "prompts", "characters", "disk", "memory")
    assert [name for name, (state, _) in checks.items() if state == "later"] == list(later)
    assert checks["task"] == ("ok", "file: 800 train, 160 heldout prompts")
    state, said = checks["reward"]
    assert state == "ok" and ": 1 for the answer '" in said and not (project / "model").exists()


def test_a_config_with_a_model_is_checked_whole(project: Path, small_model: Path) -> None:
    sets = ("task.name='sort'", "reward.function=''", "generator.context=64")
    config = at(project, small_model, *sets, "generator.max_new_tokens=40", "model.device='cpu'")
    checks = found(config)
    assert {state for state, _ in checks.values()} == {"ok"}, checks
    assert (
        checks["tokenizer"][1].endswith("completions end at '[end]'")
        or "end at" in (checks["tokenizer"][1])
    )
    assert "there is room for 24" in checks["prompts"][1]
    count = preflight.Subject(config).parameters
    assert f"{count:,} parameters" in checks["model"][1]
    from asyncrl.models import policy

    loaded = policy.load_policy(small_model, "float32", "cpu")
    assert count == sum(p.numel() for p in loaded.hf.parameters())
    # two layers, two key/value heads of 8 dimensions, keys and values, float32; and a probe
    tokens = (config.generator.slots + 1) * 64 + 16 * 32
    assert preflight.Subject(config).kv_cache == tokens * 2 * 2 * 2 * 8 * 4


CHAT = "client.chat.completions.create(model='policy', messages=[])"
TEXT = "client.completions.create(model='policy', prompt='')"
AGENTS = TEXTS["agents"]


@pytest.mark.parametrize("line", AGENTS)
@pytest.mark.parametrize("kind", ["function", "module", "command"])
def test_an_agent_that_asks_for_chat_is_refused_without_a_chat_template(
    line: str, kind: str, project: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project / "my_agent.py"
    file.write_text(f"def play(prompt, session):\n    {line}\n")
    monkeypatch.syspath_prepend(project)
    item = {
        "function": f"agent.function={file}:play",
        "module": "agent.function=my_agent:play",
        "command": f"agent.command=['python', {str(file)!r}]",
    }[kind]
    config = at(project, small_model, "reward.function=", item, "generator.max_new_tokens=4")
    state, text = found(config, "template")["template"]
    if AGENTS[line]:
        assert state == "failed" and f"{file}:2 makes a chat call" in text
        assert "put a chat_template.jinja there" in text
        assert f"the tokenizer in {small_model}" in text
        with pytest.raises(ConfigError, match="makes a chat call"):
            preflight.preflight(config)
    else:
        assert state == "note" and "has no chat template" in text


def test_characters_that_the_vocabulary_lacks_are_named(
    project: Path, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = project / "p.jsonl"
    rows = [{"prompt": text, "answer": "1"} for text in ("123=", "1é3=", "1ß 3=")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project / "h.jsonl").write_text('{"prompt": "321=", "answer": "1"}\n')
    sets = (
        f"task.prompts='{prompts}'",
        f"task.heldout='{project / 'h.jsonl'}'",
        "generator.max_new_tokens=4",
    )
    config = at(project, small_model, *sets, "reward.deadline_s=600.0")
    for tiny, remedy in ((True, f"delete {small_model}"), (False, "choose a model")):
        model = msgspec.structs.replace(config.model, warm_start=tiny)
        checked = msgspec.structs.replace(config, model=model)
        state, text = found(checked, "characters")["characters"]
        assert state == "note" and remedy in text
        assert "'é' (train prompt 1)" in text and "'ß' (train prompt 2)" in text
    preflight.preflight(config)
    assert "warning: task: the vocabulary in" in capsys.readouterr().err
    prompts.write_text(json.dumps(rows[0]) + "\n")
    got = found(config, "characters")["characters"]
    assert got == ("ok", "the vocabulary has all 4 characters of the checked prompts")
    preflight.preflight(config)
    assert "warning" not in capsys.readouterr().err


WRONG: list[tuple[str, str, str]] = TEXTS["wrong"]


@pytest.mark.parametrize(("item", "check", "said"), WRONG, ids=[w[0] for w in WRONG])
def test_what_is_wrong_is_one_failed_line(
    item: str, check: str, said: str, project: Path, small_model: Path
) -> None:
    prompts = project / "p.jsonl"
    prompts.write_text('{"prompt": "123=", "answer": "1"}\n{"prompt": "321=", "answer": "2"}\n')
    files = (f"task.prompts='{prompts}'", "task.heldout=''", "reward.deadline_s=600.0")
    checks = found(at(project, small_model, *files, item))
    assert [name for name, (state, _) in checks.items() if state == "failed"] == [check], checks
    assert said in checks[check][1]


LISTS = """
def one(prompts, texts): return [0.5]
def mean(prompts, texts): return 0.5
def alone(prompts, texts):
    if len(texts) > 1: raise KeyError("several")
    return [0.5]
def trl(prompts, completions, **columns): return [0.5]
def right(prompts, texts): return [float(p.answer == t) for p, t in zip(prompts, texts)]
def boxed(prompts, texts): return [float("<answer>" in t) - 1.0 for t in texts]
for function in (one, mean, alone, right, boxed): function.batched = True
def digit(prompt, text): return float(text == prompt.answer) + 0 * int(text[0])
def alike(prompt, text): return 0.5 if text else 0.25
"""


@pytest.mark.parametrize(
    ("of", "name", "said"),
    TEXTS["the_check_and_the_run_call_a_function_of_lists_with_several_prompts"],
)
def test_the_check_and_the_run_call_a_function_of_lists_with_several_prompts(
    of: str, name: str, said: str, project: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "r.py").write_text(LISTS)
    function = f"{project}/r.py:{name}"
    sets = {
        "run": (f"reward.function='{function}'", "reward.workers=2"),
        "part": (
            "reward.function=''",
            "task.name='mixture'",
            "task.prompts=''",
            "task.heldout=''",
            f"task.mixture=[{{name='sort', reward='{function}'}}, {{name='rle'}}]",
        ),
        "set": (
            "reward.function=''",
            "task.name='sort'",
            "task.prompts=''",
            "task.heldout=''",
            f"evaluation.sets=[{{name='mine', reward='{function}'}}]",
        ),
    }[of]
    config = at(project, small_model, *sets, "reward.deadline_s=600.0")
    state, text = found(config, "reward")["reward"]
    assert (state, said.replace("N", "9") in text) == ("failed" if said else "ok", True), text
    for name in ("check_task", "build_model", "check_images", "check_template", "check_prompts"):
        monkeypatch.setattr(preflight, name, lambda subject: "")
    monkeypatch.setattr(preflight, "check_characters", lambda subject: "")
    if said:
        with pytest.raises(ConfigError, match=re.escape(said.replace("N", "2"))):
            preflight.preflight(config)
    else:
        preflight.preflight(config)


@pytest.mark.parametrize(("name", "state", "said"), TEXTS["an_empty_completion_gets_less"])
def test_an_empty_completion_gets_less(name: str, state: str, said: str, project: Path) -> None:
    (project / "r.py").write_text(LISTS)
    function = f"{project}/r.py:{name}" if name else ""
    blank = project / "blank.jsonl"  # an answer of white space equals an empty completion
    blank.write_text("".join(f'{{"prompt": "{n}=", "answer": " "}}\n' for n in range(20)))
    sets = [f"reward.function='{function}'", "reward.deadline_s=600.0"]
    sets += [] if name else [f"task.prompts='{blank}'", "task.heldout=''"]
    config = load.load(project / "config.toml", sets)
    checked, text = found(config, "reward")["reward"]
    assert (checked, said in text) == (state, True), text
    if name == "boxed":
        assert (
            "-1 for an empty completion, and no more for any of 8 reference answers (-1 for" in text
        )
        assert "check the column of the answer (task.columns), or whether the function" in text
    preflight.call_reward(preflight.Subject(config))  # as at the start of a run


def test_memory_and_disk_are_compared_with_what_is_free(
    project: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    import psutil

    sets = ("task.name='sort'", "reward.function=''", "model.device='cpu'")
    more = ("generator.context=64", "generator.max_new_tokens=40")
    config = at(project, small_model, *sets, *more)

    class Little:
        available = free = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Little)
    checks = found(config, "memory", "disk")
    assert checks["memory"][0] == "note" and "are free" in checks["memory"][1]
    assert checks["disk"][0] == "failed" and "0 MiB free in" in checks["disk"][1]


@pytest.mark.parametrize(
    ("settings", "logs_mib"),
    [
        ((), 128),
        (("record.samples_every=0",), 64),
        (("record.token_samples=[]",), 64),
        (("record.token_samples_mib=200", "record.optimizer_steps_mib=100"), 300),
        (("record.stream=true", "record.stream_mib=300"), 428),
    ],
)
def test_the_disk_must_hold_the_logs_and_the_recording_of_a_run(
    settings: tuple[str, ...],
    logs_mib: int,
    project: Path,
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import shutil

    sets = ("task.name='sort'", "reward.function=''", "model.device='cpu'", "runs='runs'")
    subject = preflight.Subject(at(project, small_model, *sets, *settings))
    copies = 3 * subject.config.learner.keep_checkpoints + 1
    needed = subject.parameters * 4 * copies + (logs_mib << 20)

    class Disk:
        free = needed

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk)
    assert "for checkpoints, model, logs and recording;" in preflight.check_disk(subject)
    Disk.free = needed - 1
    with pytest.raises(ConfigError, match=r"^runs: "):
        preflight.check_disk(subject)


def test_the_command_says_a_line_each(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["config", "check", str(project / "config.toml"), *words])
            raise SystemExit(0)
        return int(ended.value.code or 0)

    assert check() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(preflight.CHECKS)
    assert check("--json", "--set", "model.path=org/name") == 2
    out, err = capsys.readouterr()
    told = json.loads(out.splitlines()[-1])
    assert not told["ok"] and told["checks"][3]["state"] == "failed"
    assert "1 check(s) failed: model" in err
    with pytest.raises(SystemExit):
        main(["run", str(project / "config.toml"), "--dry-run"])
        raise SystemExit(0)
    assert "model      later" in capsys.readouterr().err
