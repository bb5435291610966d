import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from process_kit import ROOT

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write, rundir
from asyncrl.supervise import run as runner


def test_text_and_bytes_take_the_place_of_what_was_there_and_leave_no_part(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    atomic_write.write(path, "first")
    assert path.read_text() == "first"
    atomic_write.write(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_failure_leaves_what_was_there_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("first")
    with pytest.raises(OSError, match="full"), atomic_write.replace(path) as part:
        part.write_text("half")
        assert path.read_text() == "first"
        raise OSError("full")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["summary.json"]


def test_an_interrupt_leaves_no_part_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_write.replace(tmp_path / "model") as part:
        part.mkdir()
        (part / "weights").write_text("half")
        raise KeyboardInterrupt
    assert not os.listdir(tmp_path)


def test_a_directory_takes_the_place_of_another_and_of_what_a_killed_process_left(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model"
    hidden = tmp_path / ".mine"
    for directory in (path, hidden):
        directory.mkdir()
        (directory / "old").write_text("old")
    with atomic_write.replace(path, part=hidden) as part:
        assert part == hidden
        part.mkdir()
        (part / "new").write_text("new")
    assert os.listdir(tmp_path) == ["model"] and os.listdir(path) == ["new"]


@pytest.mark.parametrize("sync", [True, False])
def test_with_sync_every_file_and_the_directories_reach_the_disk_before_and_after_the_renaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    done: list[str] = []

    def fsync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    replace = os.replace

    def replaced(source: Path, target: Path) -> None:
        done.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaced)
    with atomic_write.replace(tmp_path / "kept" / "model", sync=sync) as part:
        part.mkdir(parents=True)
        (part / "weights").write_text("all")
    expected = ["model.part", "weights", "renamed", "kept"] if sync else ["renamed"]
    assert done == expected


def test_what_cannot_be_removed_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    atomic_write.remove(tmp_path / "file" / "below")
    atomic_write.remove(tmp_path / "nothing")
    assert os.listdir(tmp_path) == ["file"]


PLAIN_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_files_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from asyncrl.records import atomic_write; "
    code += "atomic_write.write(Path(sys.argv[1]), chr(0x3c0))"
    argv = [sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(
        argv, env=os.environ | PLAIN_LOCALE, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text(encoding="utf-8") == chr(0x3C0)


def test_a_run_in_a_plain_locale(tmp_path: Path, small_model: Path) -> None:
    """Prompts, reward, config and every path have characters that the locale cannot write."""
    folder = tmp_path / "prøjekt-日本"
    folder.mkdir()
    prompts = [{"prömpt": f"{n}é=", "answer": "1"} for n in range(8)]
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts)
    (folder / "pé.jsonl").write_text(rows, encoding="utf-8")
    (folder / "möin.py").write_text(
        'def reward(prompt, text):\n    print("π")\n    return {"reward": 1.0, "é": 0.5}\n',
        encoding="utf-8",
    )
    (folder / "cü.toml").write_text(
        f"""# é
model.path = "{small_model}"
model.device = "cpu"
task = {{ name = "file", prompts = "pé.jsonl", columns = {{ prompt = "prömpt" }} }}
reward.function = "{{here}}/möin.py:reward"
reward.deadline_s = 600.0
generator = {{ context = 32, max_new_tokens = 4, slots = 4 }}
learner = {{ steps = 2, groups = 2, group_size = 2 }}
wires.connect_s = 1800.0
watchdog = {{ floor_s = 1800.0, startup_s = 3600.0 }}
""",
        encoding="utf-8",
    )
    env = os.environ | PLAIN_LOCALE | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def call(*words: str) -> str:
        argv = [sys.executable, "-m", "asyncrl.cli", *words]
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, timeout=7200)
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
        return done.stdout.decode("ascii")

    call("run", "cü.toml", "--set", "name=lauf-ä")
    assert "é" in (folder / "runs" / "lauf-ä" / "report.html").read_text(encoding="utf-8")
    assert r"lacks '\xe9'" in call("config", "check", "cü.toml")
    call("report", "runs/lauf-ä")
    call("ls", "runs")
    call("export", "runs/lauf-ä", "mødell")


def test_runs_of_one_config_in_the_same_second_get_their_own_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command: the first is refused and leaves nothing, the others start at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    begun: list[Path] = []

    def begin(config: Config, run_dir: Path, **_: Any) -> tuple[int, dict[str, Any]]:
        assert run_dir.is_dir() and not any(run_dir.iterdir())
        begun.append(run_dir)
        if len(begun) <= 2:
            raise ConfigError("refused")
        (run_dir / "config.toml").touch()
        return 0, {}

    monkeypatch.setattr(runner, "run", begin)
    for kept in ([], ["runs"]):
        assert CliRunner().invoke(main, ["run", "demo"]).exit_code == 2
        assert [path.name for path in tmp_path.iterdir()] == kept
        (tmp_path / "runs").mkdir(exist_ok=True)
    for _ in range(3):
        done = CliRunner().invoke(main, ["run", "demo"])
        assert done.exit_code == 0, done.output
    names = ["demo-20260101-000000", "demo-20260101-000000-2", "demo-20260101-000000-3"]
    assert [path.name for path in begun] == [names[0], names[0], *names]
    with ThreadPoolExecutor(8) as pool:
        config = load.load("demo", [f"runs='{tmp_path / 'many'}'"])
        made = pool.map(lambda _: rundir.choose_directory(config, "demo", create=True), range(40))
    assert len(set(made)) == 40
