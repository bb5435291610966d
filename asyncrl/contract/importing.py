"""What is imported from where, and importing torch cheaply.

Ours always win.  `actors`, `buffer` and `learner` are names that others use too, so they are never
looked up on sys.path: `PartsFinder` finds them beside `asyncrl` (a checkout) or in it (an installed
wheel, which brings no top-level name but `asyncrl`), under this one spelling.  The working
directory comes last on sys.path, behind the standard library and what is installed: a user's
queue.py or learner.py hides nothing, and a user's reward module is found all the same."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

PARTS = ("actors", "buffer", "learner")
INSIDE = Path(__file__).resolve().parents[1]  # of the package asyncrl
HOME = INSIDE if (INSIDE / PARTS[0]).is_dir() else INSIDE.parent  # where the three packages lie


class PartsFinder:
    """A finder for the three packages, asked before sys.path is."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in PARTS:
            return PathFinder.find_spec(name, [str(HOME)])
        if name.startswith("asyncrl.") and name.count(".") == 1 and name.partition(".")[2] in PARTS:
            part = name.partition(".")[2]  # a class under two names would be two classes
            raise ModuleNotFoundError(f"{name} is imported as {part}", name=name)
        return None


def install_finder() -> None:
    """Let `PartsFinder` find our packages.  Raises ImportError when another module has one of
    their names
    already.
    """
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
    """The working directory at the end of sys.path, if it is not on it already."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def module(name: str) -> ModuleType:
    """The module called `name`, looked up from the working directory too; or the file `name`, when
    it ends in .py, whose folder then comes last on sys.path for what it imports itself.

    Raises whatever importing it raises."""
    append_working_directory()
    if not name.endswith(".py"):
        return importlib.import_module(name)
    file = Path(name).resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    known = file.stem if file.stem not in sys.modules else str(file)
    spec = spec_from_file_location(known, file)
    assert spec is not None and spec.loader is not None  # as for every name that ends in .py
    made = module_from_spec(spec)
    sys.modules[known] = made  # dataclasses look themselves up there
    spec.loader.exec_module(made)
    return made


def source_path(name: str) -> Path | None:
    """The file that `module` would run for `name`, which is not run; None where there is none."""
    if name.endswith(".py"):
        return Path(name) if Path(name).is_file() else None
    append_working_directory()
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def export_checkout_path() -> None:
    """After `python -m` in a checkout that is not installed: processes that this one starts find
    asyncrl by PYTHONPATH.
    """
    if (root := str(INSIDE.parent)) == os.getcwd():
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a process of ours: `module` as the main program, the working directory
    last.
    """
    return [sys.executable, "-P", "-m", "asyncrl.supervise.start", module, *arguments]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Around imports: no collection runs, and what is there afterwards is never looked at again.

    Modules are no garbage; to search them dozens of times while torch makes them, and once more at
    the end, costs a process half a second of CPU."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
