"""Import rules: our packages are never shadowed, and torch is imported cheaply.

Other projects also use the names `actors`, `buffer` and `learner`, so Python never looks these
packages up on sys.path: `PartsFinder` finds them beside `asyncrl` (a checkout) or in it (an
installed wheel, whose only top-level name is `asyncrl`), always under these names.  The working
directory comes last on sys.path, after the standard library and the installed packages: a user's
queue.py or learner.py shadows nothing, and a user's reward module is still found."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import describe_exception

_PR_SET_PDEATHSIG = 1
PARTS = ("actors", "buffer", "learner")
INSIDE = Path(__file__).resolve().parents[1]  # the folder of the package asyncrl
HOME = INSIDE if (INSIDE / PARTS[0]).is_dir() else INSIDE.parent  # the folder of the three packages


class PartsFinder:
    """A finder for the three packages, used before sys.path."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find one of the three packages; None for any other module.

        Raises ModuleNotFoundError for a package under asyncrl's name, such as asyncrl.buffer."""
        if name in PARTS:
            return PathFinder.find_spec(name, [str(HOME)])
        if name.startswith("asyncrl.") and name.count(".") == 1 and name.partition(".")[2] in PARTS:
            part = name.partition(".")[2]  # a module under two names would define its classes twice
            raise ModuleNotFoundError(f"{name} is imported as {part}", name=name)
        return None


def install_finder() -> None:
    """Install `PartsFinder`. Raises ImportError if another module already has one of the names."""
    for name in PARTS:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).resolve().parent != HOME / name:
            raise ImportError(
                f"asyncrl needs its own package `{name}`, but {file} was imported under that name: "
                "import asyncrl first"
            )
    if PartsFinder not in sys.meta_path:
        sys.meta_path.insert(0, PartsFinder)


def append_working_directory() -> None:
    """Append the working directory to sys.path if it is not there yet."""
    if (directory := os.getcwd()) not in sys.path:
        sys.path.append(directory)


def import_module(name: str) -> ModuleType:
    """Import a module by name, also from the working directory, or from a .py file.

    The folder of such a file is appended to sys.path for its own imports.  Raises all errors of the
    import."""
    append_working_directory()
    if not name.endswith(".py"):
        return importlib.import_module(name)
    file = Path(name).resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module_name = file.stem if file.stem not in sys.modules else str(file)
    spec = spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None  # true for every name that ends in .py
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@functools.cache
def import_function(path: str, key: str) -> Callable[..., Any]:
    """Import `module:function` or `file.py:function`, the value of `key`. Raises ConfigError."""
    module, _, name = path.rpartition(":")
    try:
        function = getattr(import_module(module), name)
        if not callable(function):
            raise TypeError(f"{name} is not a function")
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} = {path}: importing it {describe_exception(error)}; write module:function or "
            "file.py:function"
        ) from error
    return function  # type: ignore[no-any-return]


def find_source(name: str) -> Path | None:
    """Find the file that `import_module` would run for `name`, or None."""
    if name.endswith(".py"):
        return Path(name) if Path(name).is_file() else None
    append_working_directory()
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def export_checkout_path() -> None:
    """Put a checkout that is not installed on PYTHONPATH, so that child processes find asyncrl."""
    if (root := str(INSIDE.parent)) == os.getcwd():
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def make_command(module: str, *arguments: str, python: str = "") -> list[str]:
    """Make the command line that runs `module` as the main program, with our import rules.

    python: another Python (agent.python), where asyncrl need not be installed."""
    if python:
        start = str(INSIDE / "contract" / "foreign_start.py")
        return [python, "-P", start, module, *arguments]
    return [sys.executable, "-P", "-m", "asyncrl.supervise.start", module, *arguments]


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause garbage collection around imports; exempt all existing objects from it afterwards.

    Modules never become garbage. Searching them dozens of times while torch is imported, and once
    more at exit, costs a process half a second of CPU."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_with_parent() -> Callable[[], None]:
    """Make a `preexec_fn` that kills the child (SIGKILL) when the thread that started it ends.

    It also works if that thread has ended before the child calls it."""
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def request_kill() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return request_kill
