"""Run a module of asyncrl as main in a Python where asyncrl is not installed.

`PYTHON -P PATH/foreign_start.py MODULE ARGUMENTS`, as `importing.make_command` writes it for
agent.python.  That Python finds the package asyncrl here, and nothing else of our environment: its
packages and ours may have different versions.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

INSIDE = Path(__file__).resolve().parents[1]  # the folder of the package asyncrl
NEEDED = ("msgspec", "xxhash")


def main() -> None:
    """Run the module that the command line names."""
    # imported from this file's folder
    spec = spec_from_file_location("asyncrl", INSIDE / "__init__.py")
    assert spec is not None and spec.loader is not None
    package = sys.modules["asyncrl"] = module_from_spec(spec)
    spec.loader.exec_module(package)
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        sys.exit(
            f"agent.python: {sys.executable} has no {error.name}: {sys.executable} -m pip install "
            f"{' '.join(NEEDED)}"
        )


if __name__ == "__main__":
    main()
