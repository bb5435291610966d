"""Several users on one machine: what another one made, can write to or has linked is not used."""

import ast
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_kit import ROOT, TEXTS

from asyncrl.cli import processes
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.records import private, rundir
from asyncrl.transport.ring import RingReader, WeightRing
from asyncrl.transport.sockets import BufferSocket

NOBODY = 65534
ROWS = [("w", "float32", [4], 0, 16)]
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs a second user: root can make one")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_a_run_and_its_sockets_are_of_mode_0700(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))  # a socket's path has 107 bytes
    config = load.load(ROOT / "configs" / "demo.toml")
    run_dir = tmp_path / "runs" / "one"
    rundir.ensure(load.dump(config), run_dir)
    address = rundir.get_buffer_address(config, run_dir)
    before = os.umask(0)
    try:
        socket = BufferSocket(address)
        assert mode(run_dir) == mode(Path(address.removeprefix("ipc://"))) == 0o700
        assert mode(rundir.ensure_socket_dir(run_dir)) == 0o700
        assert mode(rundir.ensure_socket_dir(run_dir).parent) == 0o700
        socket.close()
        ring = WeightRing(tmp_path / "shm" / "epoch_1", 16, 2, ROWS, 1)  # type: ignore[arg-type]
        assert mode(tmp_path / "shm") == mode(ring.directory) == 0o700
        assert {mode(p) for p in ring.directory.glob("slot_*")} == {0o600}
        ring.close()
    finally:
        os.umask(before)


@as_root
@pytest.mark.parametrize("what", ["sockets", "ring", "reader"])
def test_a_directory_of_somebody_else_is_not_used(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = load.load(ROOT / "configs" / "demo.toml")
    run_dir = tmp_path / "run"
    rundir.ensure(load.dump(config), run_dir)
    foreign = tmp_path / f"asyncrl-{os.getuid()}" if what == "sockets" else tmp_path / "ring"
    foreign.mkdir(mode=0o777)
    os.chown(foreign, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=rf"{foreign.name} belongs to user {NOBODY}.*removed"):
        if what == "sockets":
            rundir.get_buffer_address(config, run_dir)
        elif what == "ring":
            WeightRing(foreign, 16, 2, ROWS, 1)  # type: ignore[arg-type]
        else:
            RingReader(foreign, "generator-0")
    assert not list(foreign.iterdir())


def test_a_directory_that_others_may_write_to_or_a_link_to_one_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide").chmod(0o777)
    with pytest.raises(ConfigError, match=r"wide has mode 0777: other users may have put"):
        private.create_directory(tmp_path / "wide")
    (tmp_path / "mine").mkdir(mode=0o755)
    # nobody else could write to it
    assert mode(private.create_directory(tmp_path / "mine")) == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="link is a link"):
        private.create_directory(tmp_path / "link")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match="nowhere is a link"):
        private.create_directory(tmp_path / "nowhere")
    assert not (tmp_path / "missing").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a link, is not a directory"):
        private.create_directory(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        private.check(tmp_path / "missing")


@pytest.mark.parametrize("how", ["symbolic", "hard"])
@pytest.mark.parametrize("name", ["slot_0", "pin_generator-0"])
def test_the_ring_follows_no_link(name: str, how: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("somebody's keys\n")
    ring = tmp_path / "ring"
    if name != "slot_0":
        WeightRing(ring, 16, 2, ROWS, 1).close(remove=False)  # type: ignore[arg-type]
    private.create_directory(ring)
    if how == "symbolic":
        (ring / name).symlink_to(victim)
    else:
        os.link(victim, ring / name)
    with pytest.raises(ConfigError, match=rf"{name} is (a link|not a plain file)"):
        if name == "slot_0":
            WeightRing(ring, 16, 2, ROWS, 1)  # type: ignore[arg-type]
        else:
            RingReader(ring, "generator-0")
    assert victim.read_text() == "somebody's keys\n"


PRODUCT = ("asyncrl", "actors", "buffer", "learner")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}


def offences(source: str, name: str) -> list[str]:
    """Lines of a module that could run what a message or a file says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        wrong = [f"imports {n}" for n in names if n.split(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if call in CALLS:
                wrong.append(f"calls {call}")
            if call in ("torch.load", "np.load", "numpy.load", "yaml.load"):
                safe = given.get("weights_only") == "True" or given.get("allow_pickle") == "False"
                wrong += [] if safe else [f"calls {call} without weights_only"]
            if given.get("shell", "False") != "False" or call in ("os.system", "os.popen"):
                wrong.append(f"{call} starts a shell")
        found += [f"{name}:{getattr(node, 'lineno', 0)} {what}" for what in wrong]
    return found


def test_nothing_that_is_read_is_run() -> None:
    wrong = []
    files = [path for part in PRODUCT for path in sorted((ROOT / part).rglob("*.py"))]
    assert len(files) > 100
    for path in files:
        wrong += offences(path.read_text(), str(path.relative_to(ROOT)))
    assert wrong == []


@pytest.mark.parametrize("source", TEXTS["the_search_finds_what_it_looks_for"])
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert offences(source, "m") != []


HOLDER = (
    "import os, signal, sys; from pathlib import Path; from asyncrl.records import rundir; "
    "rundir.SHM = Path(sys.argv[2]); held = rundir.hold_memory(Path(sys.argv[1])); "
    "(rundir.get_ring_dir(Path(sys.argv[1]), 1)).mkdir(); print('on', flush=True); "
    "sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)"
)


def test_unheld_memory_is_swept_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(rundir, "SHM", shm)
    runs = [tmp_path / name for name in ("killed", "alive", "own")]
    for run in runs:
        run.mkdir()
        (run / "run_id").write_text(run.name)
    killed, alive, own = (
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(run), str(shm)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for run in runs
    )
    try:
        for each in (killed, alive, own):
            assert each.stdout is not None and each.stdout.readline() == "on\n"
        for each in (killed, own):
            each.communicate("end")
            assert each.returncode == -9
        unknown = shm / f"asyncrl-{os.getuid()}-unknown"
        unknown.mkdir()
        link = shm / f"asyncrl-{os.getuid()}-link"
        link.mkdir()
        (link / rundir.HELD).symlink_to(tmp_path / "elsewhere")
        foreign = shm / f"asyncrl-{os.getuid() + 1}-x"
        foreign.mkdir()
        (foreign / rundir.HELD).touch()
        with rundir.hold_memory(runs[2]):  # one that is killed, and resumed here
            assert rundir.sweep_memory() == [rundir.get_shm_dir(runs[0]).name]
        left = {rundir.get_shm_dir(runs[1]), rundir.get_shm_dir(runs[2]), unknown, link, foreign}
        assert set(shm.iterdir()) == left and rundir.get_ring_dir(runs[1], 1).is_dir()
        assert rundir.sweep_memory() == [rundir.get_shm_dir(runs[2]).name]
    finally:
        alive.communicate("end")


def test_memory_swept_early_is_remade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "SHM", tmp_path)
    (tmp_path / "run_id").write_text("x")
    place = rundir.get_shm_dir(tmp_path)
    swept: list[Any] = []
    lock = fcntl.flock

    def later(file: Any, how: int) -> None:
        lock(file, how)
        if how == fcntl.LOCK_SH and not swept:  # who had the lock until now has swept
            swept.append(file)
            shutil.rmtree(place)

    monkeypatch.setattr(fcntl, "flock", later)
    with rundir.hold_memory(tmp_path):
        assert swept and place.is_dir() and rundir.sweep_memory() == []


def test_a_buffer_sweeps_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "SHM", tmp_path)
    (tmp_path / "run_id").write_text("x")
    old = tmp_path / f"asyncrl-{os.getuid()}-old"
    for name in ("generator", "buffer"):
        old.mkdir(exist_ok=True)
        (old / rundir.HELD).touch()
        seen: list[bool] = []

        def served(*_: Any, seen: list[bool] = seen, **__: Any) -> bool:
            held = rundir.get_shm_dir(tmp_path)
            seen.append(old.exists())
            assert held.is_dir() and rundir.sweep_memory() == [old.name] * seen[-1]
            return True

        monkeypatch.setattr(processes, "run_process", served)
        monkeypatch.setattr("asyncrl.supervise.run.conclude_unsupervised", lambda _: None)
        assert processes.run_recorded(name, None, tmp_path, 0) == 0
        assert seen == [name == "generator"]
        assert rundir.sweep_memory() == [rundir.get_shm_dir(tmp_path).name]
