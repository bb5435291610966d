import gc
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

import asyncrl
from asyncrl.contract import foreign_start, importing
from asyncrl.contract.importing import PartsFinder

ROOT = Path(__file__).resolve().parents[2]
INSIDE = Path(asyncrl.__file__).parent


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- the three packages --------------------------------------------------------------------------


def test_the_parts_are_found_beside_asyncrl_under_one_name() -> None:
    for part in importing.PARTS:
        spec = PartsFinder.find_spec(part)
        assert spec is not None and spec.origin == str(ROOT / part / "__init__.py")
        with pytest.raises(ModuleNotFoundError) as error:
            PartsFinder.find_spec(f"asyncrl.{part}")
        assert str(error.value) == f"asyncrl.{part} is imported as {part}"
        assert error.value.name == f"asyncrl.{part}"
    for other in ("queue", "asyncrl", "asyncrl.config", "asyncrl.config.learner", "x.learner"):
        assert PartsFinder.find_spec(other) is None, other


def test_the_finder_is_installed_once_and_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [x for x in sys.meta_path if x is not PartsFinder])
    importing.install_finder()
    importing.install_finder()
    assert sys.meta_path[0] is PartsFinder and sys.meta_path.count(PartsFinder) == 1


def test_another_package_of_the_name_is_an_error(here: Path) -> None:
    other = ModuleType("buffer")
    other.__file__ = str(here / "buffer" / "__init__.py")
    sys.modules["buffer"] = other
    with pytest.raises(ImportError) as error:
        importing.install_finder()
    assert str(error.value) == (
        f"asyncrl needs its own package `buffer`, but {other.__file__} was imported under that "
        "name: import asyncrl first"
    )
    other.__file__ = str(importing.HOME / "buffer" / "__init__.py")
    sys.modules.pop("actors", None)  # not imported yet
    importing.install_finder()


# ---- a user's modules ----------------------------------------------------------------------------


def test_the_working_directory_comes_last_and_once(here: Path) -> None:
    before = [*sys.path]
    importing.append_working_directory()
    importing.append_working_directory()
    assert sys.path == [*before, os.getcwd()]


def test_a_module_by_name_and_by_file(here: Path) -> None:
    (here / "own_named.py").write_text("VALUE = 1\n")
    assert importing.import_module("own_named").VALUE == 1
    folder = here / "elsewhere"
    folder.mkdir()
    (folder / "own_helper.py").write_text("VALUE = 2\n")
    text = "import own_helper, sys\nVALUE = own_helper.VALUE\nMINE = sys.modules[__name__]\n"
    (folder / "own_file.py").write_text(text)
    found = importing.import_module("elsewhere/own_file.py")
    assert (found.VALUE, found.__name__, found.MINE) == (2, "own_file", found)
    assert sys.path[-2:] == [os.getcwd(), str(folder)]
    again = importing.import_module("elsewhere/own_file.py")
    assert again is not found and again.__name__ == str(folder / "own_file.py")
    assert sys.modules[again.__name__] is again and sys.path.count(str(folder)) == 1
    with pytest.raises(ModuleNotFoundError):
        importing.import_module("no_such_module")


def test_the_file_that_would_be_run(here: Path) -> None:
    (here / "own_source.py").write_text("raise RuntimeError\n")
    assert importing.find_source("own_source") == here / "own_source.py"
    assert importing.find_source("own_source.py") == Path("own_source.py")
    assert importing.find_source("none.py") is None and importing.find_source("none") is None
    assert importing.find_source("sys") is None, "it has no file of Python"
    assert importing.find_source("") is None and importing.find_source("sys.part") is None
    spec_less = ModuleType("own_spec_less")
    spec_less.__spec__ = None
    sys.modules["own_spec_less"] = spec_less
    assert importing.find_source("own_spec_less") is None


# ---- processes -----------------------------------------------------------------------------------


def test_a_checkout_is_put_first_on_pythonpath_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"/a{os.pathsep}{os.pathsep}{ROOT}{os.pathsep}/b")
    for _ in range(2):
        importing.export_checkout_path()
        assert os.environ["PYTHONPATH"] == os.pathsep.join([str(ROOT), "/a", "/b"])
    monkeypatch.delenv("PYTHONPATH")
    importing.export_checkout_path()
    assert os.environ["PYTHONPATH"] == str(ROOT)


def test_elsewhere_pythonpath_stays(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a")
    importing.export_checkout_path()
    assert os.environ["PYTHONPATH"] == "/a"


def test_the_command_of_a_process() -> None:
    words = [sys.executable, "-P", "-m", "asyncrl.supervise.start", "learner.main", "a", "b"]
    assert importing.make_command("learner.main", "a", "b") == words
    start = INSIDE / "contract" / "foreign_start.py"
    assert start.is_file()
    words = ["/opt/python", "-P", str(start), "actors.worker", "3"]
    assert importing.make_command("actors.worker", "3", python="/opt/python") == words


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose module `told` is to run as another Python's main program would."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "asyncrl", asyncrl)
    monkeypatch.setattr(sys, "argv", ["foreign_start.py", "told", "3"])
    return tmp_path


def test_a_foreign_python_runs_modules(started: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (started / "told.py").write_text(
        "import sys\n"
        "print(sys.argv, __name__, vars(sys.modules['__main__']) is globals())\n"
        "package = sys.modules['asyncrl']\n"
        "print(package.__name__, package.__path__, package.__file__, package.__doc__[:13])\n"
    )
    foreign_start.main()
    assert capsys.readouterr().out == (
        f"{[str(started / 'told.py'), '3']} __main__ True\n"
        f"asyncrl {[str(INSIDE)]} {INSIDE / '__init__.py'} Reinforcement\n"
    )
    assert sys.modules["asyncrl"] is not asyncrl


@pytest.mark.parametrize("name", ["msgspec", "xxhash"])
def test_a_foreign_python_is_told_what_it_lacks(started: Path, name: str) -> None:
    (started / "told.py").write_text(f"raise ModuleNotFoundError('gone', name={name!r})")
    with pytest.raises(SystemExit) as ended:
        foreign_start.main()
    assert ended.value.code == (
        f"agent.python: {sys.executable} has no {name}: {sys.executable} -m pip install "
        "msgspec xxhash"
    )
    (started / "told.py").write_text("import no_such_module_of_theirs")
    sys.argv[:] = ["foreign_start.py", "told"]
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_theirs"):
        foreign_start.main()


def test_no_garbage_is_collected_during_imports() -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(KeyError), importing.pause_collection():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
