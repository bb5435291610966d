"""Free memory and kills for want of it, as the kernel's files say them."""

from pathlib import Path

import psutil
import pytest

from asyncrl.config.tree import Config, ModelConfig, TaskConfig
from asyncrl.records import machine_memory, process_log, rundir
from asyncrl.supervise.run import SupervisedProcess, Supervisor


@pytest.mark.parametrize(
    ("limit", "taken", "folder", "line", "none"),
    [
        ("memory.max", "memory.current", "", "0::/a/b", "max"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory", "4:memory:/a/b", str(1 << 62)),
    ],
    ids=["version 2", "version 1"],
)
def test_free_memory_is_the_machines_or_what_a_control_group_leaves(
    limit: str,
    taken: str,
    folder: str,
    line: str,
    none: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 1 << 20 < machine_memory.read_free_bytes() <= psutil.virtual_memory().total
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemAvailable:  4096 kB\nBuffers: 9 kB\n")
    monkeypatch.setattr(machine_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "OWN_GROUPS", tmp_path / "absent")
    assert machine_memory.read_free_bytes() == 4096 << 10
    group = tmp_path / folder / "a" / "b"
    group.mkdir(parents=True)
    (group / limit).write_text(f"{none}\n")
    (group / taken).write_text("5\n")
    (group.parent / limit).write_text("5000\n")
    (group.parent / taken).write_text("3000\n")
    (group.parent / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    (tmp_path / "own").write_text(f"7:pids:/elsewhere\n{line}\n")
    monkeypatch.setattr(machine_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(machine_memory, "OWN_GROUPS", tmp_path / "own")
    assert machine_memory.read_free_bytes() == 2500


def test_memory_kills_are_of_host_or_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And resident memory is the process's own."""
    for name in ("KERNEL", "GROUPS", "OWN_GROUPS"):
        monkeypatch.setattr(machine_memory, name, tmp_path / name)
    assert machine_memory.count_memory_kills() is None
    (tmp_path / "KERNEL").write_text("nr_free_pages 7\noom_kill 2\n")
    assert machine_memory.count_memory_kills() == 2
    (tmp_path / "OWN_GROUPS").write_text("0::/a\n3:memory:/a\n")
    for folder, file in (("a", "memory.events"), ("memory/a", "memory.oom_control")):
        (tmp_path / "GROUPS" / folder).mkdir(parents=True)
        (tmp_path / "GROUPS" / folder / file).write_text("oom_kill_disable 0\noom_kill 3\n")
    assert machine_memory.count_memory_kills() == 8
    counted = psutil.Process().memory_info().rss
    assert 0.8 * counted < machine_memory.read_resident_bytes() < 1.25 * counted


def test_memory_kills_name_longest_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(
        Config(model=ModelConfig(path="m"), task=TaskConfig(name="sort")), tmp_path, print
    )

    def cause(
        code: int, before: list[str | int], now: list[str | int], held_up: bool = False
    ) -> str:
        monkeypatch.setattr(process_log, "read_memory_kills", lambda: now)
        child = SupervisedProcess("generator-0", [], 1, True, memory_kills=before, held_up=held_up)
        return supervisor.explain_kill(child, code)

    assert cause(-9, ["boot", 1], ["boot", 2]) == " (out of memory)"
    rundir.note_longest_prompt(tmp_path, "generator-0", 28_290)
    assert cause(-9, ["boot", 1], ["boot", 2]) == cause(137, ["boot", 1], ["boot", 2])
    said = cause(-9, ["boot", 1], ["boot", 2])
    assert said.startswith(" (out of memory; its longest prompt had 28290 tokens: set")
    assert "perhaps out of memory; this machine does not report it" in cause(-9, [], [])
    assert cause(-9, ["boot", 2], ["boot", 2]) == cause(-11, [], ["boot", 1]) == ""
    assert cause(-9, [], [], held_up=True) == ""  # by the supervisor itself
