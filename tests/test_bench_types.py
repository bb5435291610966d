"""Every program in benchmarks/ calls the product as it is today.

They run for minutes to hours, so no test runs them all; the type checker reads every call.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("learner", "buffer")  # programs of these names would hide the packages
# what it says of a call that does not fit, of a name that is gone, of a file that cannot be read
WRONG = (
    "arg-type,call-arg,call-overload,attr-defined,name-defined,index,misc,operator,union-attr,"
    "import-not-found,func-returns-value,return-value,syntax,assignment,list-item,dict-item"
).split(",")
CONFIG = """
[mypy]
python_version = 3.11
check_untyped_defs = true
ignore_missing_imports = true
namespace_packages = true
mypy_path = {root}
cache_dir = {root}/.mypy_cache/benchmarks

[mypy-asyncrl.*,actors.*,buffer.*,learner.*]
follow_imports = silent
"""


def checked(into: Path) -> list[str]:
    """What mypy says of the programs copied to `into`, a line each."""
    config = into.parent / "mypy.ini"
    config.write_text(CONFIG.format(root=ROOT))
    programs = sorted(path.name for path in into.glob("*.py"))
    argv = [sys.executable, "-m", "mypy", "--config-file", str(config), *programs, "lib"]
    ended = subprocess.run(argv, cwd=into, capture_output=True, text=True)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    return [line for line in ended.stdout.splitlines() if ": error:" in line]


def test_every_program_calls_what_is_there(tmp_path: Path) -> None:
    into = tmp_path / "benchmarks"
    shutil.copytree(
        ROOT / "benchmarks", into, ignore=shutil.ignore_patterns("results", "node_agent")
    )
    for name in PACKAGES:
        (into / f"{name}.py").rename(into / f"program_{name}.py")
    found = checked(into)
    assert not found, "\n".join(found)
