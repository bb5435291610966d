"""Every program in benchmarks/ calls the product as it is today.

They run for minutes to hours, so no test runs them all; the type checker reads every call."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("learner", "buffer")  # programs of these names would hide the packages
# what it says of a call that does not fit, and of a name that is gone
CALLS = [
    "arg-type",
    "call-arg",
    "call-overload",
    "attr-defined",
    "name-defined",
    "import-not-found",
    "syntax",
    "assignment",
]
CONFIG = """
[mypy]
python_version = 3.11
check_untyped_defs = true
follow_imports = skip
ignore_missing_imports = true
namespace_packages = true
mypy_path = {root}
cache_dir = {root}/.mypy_cache/benchmarks

[mypy-asyncrl.*,actors.*,buffer.*,learner.*,zmq.*]
follow_imports = silent
ignore_missing_imports = false

[mypy-numpy.*]
follow_imports_for_stubs = true
"""
ROTTEN = """
from actors.rewards import RewardRunner
from asyncrl.contract import messages as m
from asyncrl.contract.messages import Grant
from asyncrl.messages import Want
from asyncrl.tasks.synthetic import TASKS

def main(runner: RewardRunner) -> None:
    runner.timed = lambda name, began, ended: print(ended - began)
    m.TicketRequest()
    m.GeneratorGoodbye("generator-0", "7")
    TASKS["sort"].letters
"""


def checked(into: Path) -> list[str]:
    config = into.parent / "mypy.ini"
    config.write_text(CONFIG.format(root=ROOT))
    programs = sorted(
        str(path.relative_to(into))
        for place in ("*.py", "studies/*.py")
        for path in into.glob(place)
    )
    argv = [sys.executable, "-m", "mypy", "--config-file", str(config), *programs, "lib"]
    ended = subprocess.run(argv, cwd=into, capture_output=True, text=True)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    return [line for line in lines if re.search(rf" error: .*\[({'|'.join(CALLS)})\]$", line)]


def test_every_program_calls_what_is_there(tmp_path: Path) -> None:
    into = tmp_path / "benchmarks"
    shutil.copytree(
        ROOT / "benchmarks", into, ignore=shutil.ignore_patterns("results", "node_agent")
    )
    for name in PACKAGES:
        (into / f"{name}.py").rename(into / f"program_{name}.py")
    # what had rotted once: a callback of too few arguments, a message of old
    (into / "rotten.py").write_text(ROTTEN)
    found = checked(into)
    others = [line for line in found if not line.startswith("rotten.py:")]
    assert not others, "\n".join(others)
    said = [f"{line.split(':')[1]} {line.rsplit('[')[-1][:-1]}" for line in found]
    assert said == [
        "4 attr-defined",
        "5 import-not-found",
        "9 assignment",
        "10 call-arg",
        "11 arg-type",
        "12 attr-defined",
    ]


def hidden_imports(source: str) -> list[str]:
    """The packages of the product that a program imports before asyncrl or lib finds them.

    Python has no path to them: `python benchmarks/NAME.py` fails where it imports them first."""
    hidden = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or node.names[0].name
            if module.partition(".")[0] in ("asyncrl", "lib"):
                break
            hidden += [module] if module.partition(".")[0] in ("actors", *PACKAGES) else []
    return hidden


def test_every_program_finds_the_packages() -> None:
    """Without an entry for the checkout on PYTHONPATH."""
    for folder in ("", "studies"):
        for program in (ROOT / "benchmarks" / folder).glob("*.py"):
            assert not hidden_imports(program.read_text()), program
    assert hidden_imports("import numpy\nfrom actors import rewards\nimport asyncrl") == ["actors"]
    code = "import lib, actors, buffer.store, learner.step; print(actors.__path__[0])"
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    argv, into = [sys.executable, "-c", code], ROOT / "benchmarks"
    ended = subprocess.run(argv, cwd=into, env=environ, capture_output=True, text=True)
    assert ended.stdout.strip() == str(ROOT / "actors"), ended.stderr


# options whose names come from a list of the program, with no string to read
FROM_A_LIST = {
    "chaos.py": {"kinds", "points", "actions"},
    "gpu_bench.py": {"part", "device", "work"},
    "gpu_check.py": {"part", "device", "work", "receive"},
}


def unknown_options(source: str, shared: Set[str] = frozenset()) -> set[str]:
    """The attributes of `args` that neither an `add_argument` nor an assignment gives it."""
    tree = ast.parse(source)
    given, read = options(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "args":
            (read if isinstance(node.ctx, ast.Load) else given).add(node.attr)
    return read - given - shared if options(tree) else set()


def options(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [n.value for n in node.args if isinstance(n, ast.Constant)]
            found |= {name.lstrip("-").replace("-", "_") for name in names}
            found |= {k.value.value for k in node.keywords if k.arg == "dest"}
    return found


def test_every_program_reads_options_that_it_has() -> None:
    """argparse's namespace has no types: an option of another name is an error at its first use."""
    programs = [p for p in (ROOT / "benchmarks").rglob("*.py") if "results" not in p.parts]
    assert len(programs) > 100
    of_lib = [p for p in programs if "lib" in p.parts]
    shared = set().union(*(options(ast.parse(p.read_text())) for p in of_lib))
    for program in programs:
        own = FROM_A_LIST.get(program.name, set())
        assert not unknown_options(program.read_text(), shared | own), program
    rotten = 'p.add_argument("--attention-kind", "-a")\nargs.b = 1\nprint(args.b, args.attend)'
    assert unknown_options(rotten) == {"attend"}
