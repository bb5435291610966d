"""Test the fast tests with mutants: do they notice a changed line?

Each mutant of the mathematics, the learner, the buffer, the actors, the messages, the transport,
the Tinker server's training and the viewer runs against the tests that reach it.

    make mutants MUTANTS="[--sample 600] [--seed 0] [--module PART] [--quick] [--json]"

Proves: at least 90 % of a seeded sample are killed, and at least 75 % of each file.  mutmut's
operators make the mutants of the files that `[tool.mutmut]` in pyproject.toml names.
mutants_tests.json maps source files to the fast test files that run them; `--table` measures it
again.  A first process imports the project and collects the tests once.  Every mutant is a fork of
it that changes one function in memory and runs the tests that reach the changed statement, until
one fails.  Mutants that this does not kill, and those outside a function, are tried once more in a
process that imports the changed file anew.  Only measurements are written to disk, to
.pytest_cache/mutants: they are made again when the test file changes.  After a change of the source
file they count by function, so that its mutants need not wait for them.

A mutant is killed when a test fails, the import fails, the tests take five times the processor
they take without it, or they stand still.  Time in which a busy machine lets a fork wait for a
processor does not count.  Survivors listed in mutants_equivalent.toml, with the reason why no test
can notice them, are not counted.  Some of the sample also run unchanged: a failure then is not
caused by a mutant, and the program ends.  --module PART: only mutants of the files whose path
contains PART; no result is written.  --minutes: end after so many, the drawn being in a random
order.  --planted: the mutants of
mutants_planted.py, each against the one test that must notice it."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
# faster, and no plugin of another package joins in
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

import argparse
import ast
import difflib
import gc
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lib import results_file
from lib.mutant_lines import functions_of, lines_by_function
from lib.mutant_session import CollectedSession, change_function

ROOT = results_file.ROOT
# first: benchmarks/learner.py and buffer.py must not hide the packages of their names
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
GOAL = 0.9
GOAL_BY_FILE = 0.75
LEAST = 4  # mutants drawn of each file, so that its share says something
TABLE = ROOT / "benchmarks" / "mutants_tests.json"
KEPT = ROOT / ".pytest_cache" / "mutants"
WHAT = (
    "mutants of the algorithms, the learner, the buffer, the actors, the messages, the transport, "
    "the Tinker server's training and the viewer, against the fast tests that reach them"
)
SLOW_S = 3.0  # a test that takes longer has no place in a fork per mutant
# fixtures that start processes: a mutant in memory does not reach them
REAL_RUNS = {"asyncrl", "sort_model", "sort_vllm_model", "gain", "forked"}
PROJECT = ("asyncrl", "actors", "buffer", "learner")
SURVIVED = "survived"
KILLED = "killed"
TIMEOUT = "timeout"
UNTESTED = "untested"
UNCHANGED = "(unchanged)"
NOT_HERE = "outside a function"  # the collected session cannot change it
# mutmut leaves functions with a decorator alone; these may be comments while it looks
DECORATORS = re.compile(r"^( *)@(?=(?:torch\.no_grad\(\)|contextmanager)$)", re.MULTILINE)
HIDDEN = "# hidden @"


# ---- mutants -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One file with one change.  minus, plus: the changed lines, stripped; first, last: their
    numbers in the original.
    """

    path: str
    code: str
    first: int
    last: int
    minus: str
    plus: str

    def __str__(self) -> str:
        return f"{self.path}:{self.first}: {self.minus}  ->  {self.plus}"


def mutant(path: str, old: str, new: str) -> Mutant:
    """The mutant that makes `new` of a file's text `old`."""
    before = old.splitlines()
    after = new.splitlines()
    blocks = [
        b
        for b in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        if b[0] != "equal"
    ]
    first = blocks[0][1]
    last = max(blocks[-1][2], blocks[0][1] + 1)
    minus = before[first:last]
    plus = after[blocks[0][3] : blocks[-1][4]]
    return Mutant(
        path,
        new,
        first + 1,
        last,
        " ".join(x.strip() for x in minus),
        " ".join(x.strip() for x in plus),
    )


def catalogue(
    paths: Sequence[str], only: Mapping[str, Sequence[str]] | None = None
) -> list[tuple[str, Callable[[], Mutant]]]:
    """(path, what makes the mutant) for every mutant of the files, in their order; only: of each
    file the functions and methods of these names.  Ends the program for a name with no mutant."""
    from mutmut.mutation.file_mutation import create_mutations

    out: list[tuple[str, Callable[[], Mutant]]] = []
    for path in paths:
        text = (ROOT / path).read_text()
        shown = text if only is None else DECORATORS.sub(rf"\1{HIDDEN}", text)
        module, mutations, _, _ = create_mutations(path, shown)
        if only is not None:
            wanted = set(only[path])
            named = {id(m): within(m.contained_by_top_level_function) for m in mutations}
            if missing := wanted - set(named.values()):
                sys.exit(f"mutants: mutants_sets.toml: {path} has no mutant of {sorted(missing)}")
            mutations = [m for m in mutations if named[id(m)] in wanted]
        for m in mutations:
            # mutmut has no public name for one mutant's source; a node of the tree, replaced, is
            # what its own files hold
            out.append(
                (
                    path,
                    lambda m=m, module=module, path=path, text=text: mutant(
                        path,
                        text,
                        module.deep_replace(m.original_node, m.mutated_node).code.replace(
                            HIDDEN, "@"
                        ),
                    ),
                )
            )
    return out


def within(node: Any) -> str:
    """The name of the function or method that holds a mutant; "": of none."""
    return getattr(getattr(node, "name", None), "value", "")


def listed(name: str) -> dict[str, Any]:
    """A set of mutants_sets.toml: tests, goal, what, files (path -> names of functions)."""
    every = tomllib.loads((ROOT / "benchmarks" / "mutants_sets.toml").read_text())
    if name not in every:
        sys.exit(f"mutants: --set {name}: mutants_sets.toml has {', '.join(every)}")
    return dict(every[name])


def sources() -> list[str]:
    """The files to mutate, of pyproject.toml."""
    c = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    paths = [
        str(p.relative_to(ROOT))
        for s in c["source_paths"]
        for p in (sorted((ROOT / s).rglob("*.py")) if (ROOT / s).is_dir() else [ROOT / s])
    ]
    return [p for p in paths if p not in c["do_not_mutate"] and (ROOT / p).stat().st_size]


def fast_files() -> list[str]:
    """Every test file without the marker `slow`, and those that pyproject.toml adds."""
    also = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]["also_test"]
    paths = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: path.name)
    slow = {path for path in paths if "\npytestmark = pytest.mark.slow\n" in path.read_text()}
    names = {str(path.relative_to(ROOT)): path for path in paths}
    return [name for name, path in names.items() if path not in slow or name in also]


def reaching_files(paths: Sequence[str]) -> list[str]:
    """The test files that run any of these, by the table, and those newer than it; of a source file
    that it does not have yet, those that speak of its module.
    """
    table: dict[str, list[str]] = json.loads(TABLE.read_text())
    found = {test for test, reached in table.items() if set(reached) & set(paths)}
    found |= set(fast_files()) - set(table)
    known = {path for reached in table.values() for path in reached}
    for path in set(paths) - known:
        module = re.compile(rf"\b{Path(path).stem}\b")
        found |= {test for test in fast_files() if module.search((ROOT / test).read_text())}
    return sorted(found)


class Equivalents:
    """Survivors that no test can tell from the original, with the reason: by their two lines, or by
    what alone differs between them.
    """

    def __init__(self, path: Path) -> None:
        self.known: list[dict[str, str]] = tomllib.loads(path.read_text())["equivalent"]

    def reason(self, m: Mutant) -> str | None:
        for e in self.known:
            if "differ_only_in" in e:
                a, b = (re.sub(e["differ_only_in"], "", x) for x in (m.minus, m.plus))
                if a == b and re.match(e.get("path", ""), m.path):
                    return e["reason"]
            elif (e["path"], e["minus"], e["plus"]) == (m.path, m.minus, m.plus):
                return e["reason"]
        return None


# ---- a fork with one file changed ----------------------------------------------------------------


class Changed(importlib.abc.MetaPathFinder):
    """Imports one module from a text in memory."""

    def __init__(self, path: str, code: str) -> None:
        self.name = path.removesuffix(".py").replace("/", ".")
        self.path = str(ROOT / path)
        self.code = code

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.util.spec_from_file_location(
                name, self.path, loader=_Loader(name, self.path, self.code)
            )
            if name == self.name
            else None
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname: str) -> Any:
        return compile(self.text, self.path, "exec", dont_inherit=True)


class Chosen:
    """A pytest plugin: only these tests, in this order; the first that fails."""

    def __init__(self, only: Sequence[str] | None) -> None:
        self.place = None if only is None else {name: i for i, name in enumerate(only)}
        self.failed = ""
        self.seen = 0
        self.collected = False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.collected = True
        items[:] = [i for i in items if not REAL_RUNS & set(i.fixturenames)]
        if self.place is not None:
            items[:] = sorted(
                (i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid]
            )  # type: ignore[index]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seen += report.when == "call"
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"the import of {report.nodeid}"


def pytest_main(files: Sequence[str], work: Path, plugins: list[Any], *more: str) -> int:
    import pytest
    from hypothesis import settings as hypothesis_settings

    hypothesis_settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
    hypothesis_settings.load_profile("mutants")
    os.chdir(ROOT)
    common = [
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "--assert=plain",
        "--no-header",
        "--show-capture=no",
        f"--basetemp={work}",
    ]
    return int(pytest.main([*files, *common, *more], plugins=plugins))


@dataclass
class Child:
    """A fork at work.  Its answer is a file: a mutant may end the process at any place."""

    pid: int
    answer: Path
    idle_s: float  # how long it may stand still
    what: Any
    began: float = field(default_factory=time.monotonic)

    @property
    def stands_still(self) -> bool:
        """Whether it has slept for too long: time spent waiting for a processor is not sleep."""
        try:
            ran, waited, _ = Path(f"/proc/{self.pid}/schedstat").read_text().split()
        except OSError:
            return False
        slept = time.monotonic() - self.began - (int(ran) + int(waited)) / 1e9
        return slept > self.idle_s


def fork(what: Any, work: Path, cpu_s: float, act: Callable[[Path], dict[str, Any]]) -> Child:
    """Run `act(directory)` in a fork with a processor limit; what it returns is written down for
    `reap`.
    """
    directory = Path(tempfile.mkdtemp(dir=work))
    answer = directory / "answer.json"
    pid = os.fork()
    if pid:
        return Child(pid, answer, 60 + cpu_s, what)
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 5))
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
        out = os.open(directory / "out", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        answer.write_text(json.dumps(act(directory)))
        code = 0
    finally:
        os._exit(code)


def reap(children: list[Child]) -> tuple[Child, dict[str, Any] | None]:
    """Wait for one to end: (child, its answer); None: it ended or was ended without one."""
    while True:
        for child in children:
            pid, _ = os.waitpid(child.pid, os.WNOHANG)
            if not pid and child.stands_still:
                os.killpg(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                pid = child.pid
            if pid:
                children.remove(child)
                found = json.loads(child.answer.read_text()) if child.answer.exists() else None
                shutil.rmtree(child.answer.parent, ignore_errors=True)
                return child, found
        time.sleep(0.02)


def try_in_session(
    session: CollectedSession, m: Mutant, tests: Sequence[str], directory: Path
) -> dict[str, Any]:
    """In a fork of the session: change the function, and run the tests until one fails."""
    if m.path.removesuffix(".py").replace("/", ".") not in sys.modules:
        sys.meta_path.insert(0, Changed(m.path, m.code))
    elif m.plus != UNCHANGED:
        old = (ROOT / m.path).read_text()
        if not change_function(m.path, old, m.code, m.first, m.last):
            return {"status": NOT_HERE, "by": ""}
    chosen = Chosen(None)
    try:
        session.run(tests, directory / "t", [chosen], lambda: bool(chosen.failed))
    except BaseException as error:  # the end of a pytest session, a test's SystemExit
        return {"status": KILLED, "by": chosen.failed or repr(error)}
    if not chosen.seen and not chosen.failed:
        return {"status": UNTESTED, "by": ""}
    return {"status": KILLED if chosen.failed else SURVIVED, "by": chosen.failed}


def try_mutant(m: Mutant, tests: Sequence[str], directory: Path) -> dict[str, Any]:
    """In a fork: import the project with the mutant in it, run the tests until one fails."""
    sys.meta_path.insert(0, Changed(m.path, m.code))
    chosen = Chosen(tests)
    files = list(dict.fromkeys(t.split("::")[0] for t in tests))
    code = pytest_main(files, directory / "t", [chosen], "-x")
    if chosen.collected and not chosen.seen and not chosen.failed:
        return {"status": UNTESTED, "by": "", "code": code}
    return {"status": KILLED if code else SURVIVED, "by": chosen.failed, "code": code}


# ---- which tests reach which line ----------------------------------------------------------------


@dataclass
class Baseline:
    """The fast tests without a mutant: the time of each, and the tests that run each line.

    Fast tests need no real run and take less than SLOW_S, with the processes that they start.
    Lines run by a shared fixture count for every test of the file."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def reaching(self, m: Mutant, text: str) -> list[str]:
        """Tests that run the changed statement, quickest file first; where it runs at import, all
        of the files that run anything of its file or speak of its module."""
        start, end = statement(text, m.first, m.last)
        here = self.lines.get(m.path, {})
        found = {t for n in range(start, end + 1) for t in here.get(n, ())}
        if start == 0:
            name = re.compile(rf"\b{Path(m.path).stem}\b")
            files = {t.split("::")[0] for tests in here.values() for t in tests}
            files |= {
                f
                for f in {t.split("::")[0] for t in self.seconds}
                if name.search((ROOT / f).read_text())
            }
            found = {t for t in self.seconds if t.split("::")[0] in files}
        whole: Counter[str] = Counter()
        for t in found:
            whole[t.split("::")[0]] += self.seconds[t]  # type: ignore[assignment]
        order = {t: i for i, t in enumerate(self.seconds)}
        return sorted(found, key=lambda t: (whole[t.split("::")[0]], order[t]))

    def cpu_s(self, tests: Sequence[str]) -> float:
        """Return the CPU seconds that a mutant may use."""
        return 20 + 5 * sum(self.seconds[t] for t in tests)


def statement(text: str, first: int, last: int) -> tuple[int, int]:
    """Return the lines of the statement that contains [first, last].

    Of a compound statement that is its head, of a function's head its body.  (0, 0) means that it
    runs at import."""
    best: ast.stmt | None = None
    inside = False

    def visit(node: ast.AST, within: bool) -> None:
        nonlocal best, inside
        for child in ast.iter_child_nodes(node):
            if (
                isinstance(child, ast.stmt)
                and child.lineno <= first
                and (child.end_lineno or 0) >= last
            ):
                best = child
                inside = within
            if getattr(child, "lineno", 0) <= last:
                visit(child, within or isinstance(child, ast.FunctionDef))

    visit(ast.parse(text), False)
    if best is None or (not inside and not isinstance(best, ast.FunctionDef)):
        return 0, 0
    if isinstance(best, ast.FunctionDef):
        return best.body[0].lineno, best.end_lineno or best.lineno
    body = getattr(best, "body", None)
    return best.lineno, (
        body[0].lineno - 1
        if isinstance(body, list) and body[0].lineno > best.lineno
        else best.end_lineno or best.lineno
    )


class Watch:
    """A pytest plugin: coverage told apart by test, and what each takes."""

    def __init__(self, cover: Any) -> None:
        # type: ignore[var-annotated]
        self.cover = cover
        self.seconds = {}
        self.failed = []
        self.began = 0.0

    def pytest_runtest_setup(self, item: Any) -> None:
        self.cover.switch_context(item.nodeid.split("::")[0])

    def pytest_runtest_call(self, item: Any) -> None:
        self.cover.switch_context(item.nodeid)
        self.began = cpu_seconds()  # a busy machine makes no test slower in this

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = cpu_seconds() - self.began

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def cpu_seconds() -> float:
    """Of this process and of the children it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(session: CollectedSession, test_file: str, directory: Path) -> dict[str, Any]:
    """In a fork: the fast tests of a file once, under coverage of all source files."""
    import coverage

    cover = coverage.Coverage(
        data_file=None, source=[str(ROOT / p) for p in PROJECT], config_file=False
    )
    watch = Watch(cover)
    cover.start()
    session.run(session.of_file(test_file), directory / "t", [watch])
    cover.stop()
    fast = {t: s for t, s in watch.seconds.items() if s < SLOW_S}
    lines: dict[str, dict[int, list[str]]] = {}
    data = cover.get_data()
    for full in data.measured_files():
        path = str(Path(full).relative_to(ROOT))
        for n, contexts in data.contexts_by_lineno(full).items():
            named = {t for c in contexts if c for t in ([c] if c in fast else fast)}
            if named:
                lines.setdefault(path, {})[n] = sorted(named)
    return {"seconds": fast, "lines": lines, "failed": watch.failed}


def digest(path: str) -> str:
    file = ROOT / path
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else ""


def kept(test_file: str, paths: Collection[str], *, exact: bool = False) -> dict[str, Any] | None:
    """Return the stored measurement of a test file, None if there is none or the file has changed.

    For a source file that has changed since it is by function.  exact: neither tests/conftest.py
    nor any of `paths` that it runs may have changed."""
    file = KEPT / f"{Path(test_file).stem}.json"
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text())
    changed = [path for path, old in found["digests"].items() if digest(path) != old]
    shared = {"tests/conftest.py", *paths} if exact else set()
    if {test_file, *shared} & set(changed) or "functions" not in found:
        return None
    for path in set(changed) & set(found["lines"]):
        lines = found["lines"].pop(path)
        if (ROOT / path).exists():
            functions = functions_of((ROOT / path).read_text())
            found["lines"][path] = lines_by_function(lines, found["functions"][path], functions)
    return found


def baseline(
    session: CollectedSession,
    tests: Sequence[str],
    paths: Collection[str],
    work: Path,
    workers: int,
    *,
    exact: bool = False,
) -> Baseline:
    """Measured, or as it was kept.  A file with a test that fails without a mutant is left out, and
    named.
    """
    KEPT.mkdir(parents=True, exist_ok=True)
    base = Baseline()
    found = {t: f for t in tests if (f := kept(t, paths, exact=exact)) is not None}
    running: list[Child] = []

    def collect() -> None:
        child, answer = reap(running)
        if answer is None or answer["failed"]:
            failed = "no answer" if answer is None else ", ".join(answer["failed"])
            base.left_out.append(child.what)
            print(f"left out: {child.what}: {failed}", file=sys.stderr, flush=True)
            return
        of = [child.what, "tests/conftest.py", *answer["lines"]]
        answer["digests"] = {p: digest(p) for p in of}
        answer["functions"] = {p: functions_of((ROOT / p).read_text()) for p in answer["lines"]}
        (KEPT / f"{Path(child.what).stem}.json").write_text(json.dumps(answer))
        found[child.what] = answer
        print(f"measured {len(found)} of {len(tests)} test files", file=sys.stderr, flush=True)

    for t in tests:
        if t in session.failed:
            base.left_out.append(t)
            print(f"left out: {t}: cannot be collected", file=sys.stderr, flush=True)
        elif t not in found:
            running.append(fork(t, work, 300, lambda d, t=t: measure(session, t, d)))
            if len(running) >= workers:
                collect()
    while running:
        collect()
    for t in found:
        base.seconds |= found[t]["seconds"]
        for path, lines in found[t]["lines"].items():
            for n, named in lines.items():
                base.lines.setdefault(path, {}).setdefault(int(n), []).extend(named)
    return base


def write_table(paths: Sequence[str], work: Path, workers: int) -> None:
    """Measure every fast test file, and note which source files it runs."""
    files = fast_files()

    def act(session: CollectedSession) -> dict[str, Any]:
        baseline(session, files, paths, work, workers, exact=True)
        return {}

    collected(files, work, act)
    old: dict[str, list[str]] = json.loads(TABLE.read_text())
    table = {
        # of a file with a failing test nothing was measured
        t: sorted(set(found["lines"]) & set(paths))
        if (found := kept(t, paths, exact=True))
        else old.get(t, [])
        for t in files
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{TABLE}: {len(table)} test files")


# ---- the whole -----------------------------------------------------------------------------------


def collected(
    tests: Sequence[str], work: Path, act: Callable[[CollectedSession], dict[str, Any]]
) -> dict[str, Any]:
    """Return what `act` returns in a process that has collected these test files."""
    answer = work / "session.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        if not answer.exists():
            sys.exit("mutants: the process that collects the tests has ended")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    def inside(session: CollectedSession) -> None:
        gc.freeze()
        answer.write_text(json.dumps(act(session)))

    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        plugins = [Chosen(None), CollectedSession(inside)]
        pytest_main(tests, work / "collected", plugins, "--continue-on-collection-errors")
    finally:
        os._exit(0)


Trial = Callable[[Mutant, Sequence[str], Path], dict[str, Any]]


def all_of(
    jobs: Iterator[tuple[Mutant, list[str], float]],
    work: Path,
    workers: int,
    trial: Trial = try_mutant,
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """(mutant, what became of it), as they end."""
    running: list[Child] = []
    for m, tests, cpu_s in jobs:
        if not tests:
            yield m, {"status": UNTESTED, "by": ""}
            continue
        running.append(fork(m, work, cpu_s, lambda d, m=m, tests=tests: trial(m, tests, d)))
        if len(running) >= workers:
            child, answer = reap(running)
            yield child.what, answer or {"status": TIMEOUT, "by": ""}
    while running:
        child, answer = reap(running)
        yield child.what, answer or {"status": TIMEOUT, "by": ""}


def warm(work: Path) -> None:
    """Import what every fork needs, and nothing of the project."""
    import coverage  # noqa: F401
    import hypothesis  # noqa: F401
    import msgspec  # noqa: F401
    import numpy  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import transformers  # noqa: F401
    import xxhash  # noqa: F401
    import zmq  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401

    torch.set_num_threads(1)
    mine = [m for m in sys.modules if m.split(".")[0] in PROJECT]
    assert not mine, f"imported before the fork: {mine}"
    # compiled by the first fork, read by the others
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(work / "bytecode")
    gc.freeze()  # pytest collects garbage several times; what lies here is none


def planted(work: Path, workers: int) -> list[dict[str, Any]]:
    """Every mutant of mutants_planted.py against its own test."""
    from mutants_planted import PLANTED

    jobs = []
    names = {}
    for p in PLANTED:
        text = (ROOT / p.path).read_text()
        if text.count(p.old) != 1:
            sys.exit(
                f"mutants: {p.name}: {p.path} holds {text.count(p.old)} times: {p.old!r}; give "
                "benchmarks/mutants_planted.py the line as it is now"
            )
        m = mutant(p.path, text, text.replace(p.old, p.new))
        names[m.path, m.code] = p
        jobs.append((m, [p.test], 120.0))
    # without a mutant every one of these tests must pass
    _, sound = reap(
        [
            fork(
                None,
                work,
                300,
                lambda d: {"code": pytest_main([p.test for p in PLANTED], d / "t", [])},
            )
        ]
    )
    if sound is None or sound["code"]:
        sys.exit("mutants: a test of mutants_planted.py fails, or is none, without a mutant")
    out = []
    for m, answer in all_of(iter(jobs), work, workers):
        p = names[m.path, m.code]
        out.append({"name": p.name, "mutant": str(m), "status": answer["status"], "test": p.test})
    return sorted(out, key=lambda x: x["name"])


def share(counts: Mapping[str, int]) -> float:
    """Killed, of those of a file that a test can tell apart."""
    told_apart = sum(counts.values()) - counts.get("equivalent", 0)
    return (counts.get(KILLED, 0) + counts.get(TIMEOUT, 0)) / told_apart if told_apart else 1.0


def drawn(every: Sequence[Any], many: int, seed: int, least: int) -> list[Any]:
    """So many by a seed, at least `least` of each file (or all it has)."""
    places = list(range(len(every)))
    random.Random(seed).shuffle(places)
    by_path: Counter[str] = Counter()
    first, rest = [], []
    for n in places:
        path = every[n][0]
        by_path[path] += 1
        (first if by_path[path] <= least else rest).append(n)
    return [every[n] for n in [*first, *rest][:many]]


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--sample", type=int, default=600, help="0: all")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--module",
        default="",
        help="only mutants of the files whose path contains this; writes no result",
    )
    p.add_argument(
        "--controls",
        type=int,
        default=8,
        help="so many of the drawn are run unchanged as well, and must survive",
    )
    p.add_argument(
        "--tests",
        default="",
        help="files of tests instead of those of the table, with commas between them",
    )
    p.add_argument("--minutes", type=float, default=0.0, help="end after so many; 0: never")
    p.add_argument("--table", action="store_true", help="write mutants_tests.json anew")
    p.add_argument("--set", default="", help="the functions that mutants_sets.toml has under this")
    p.add_argument("--planted", action="store_true")
    p.add_argument("--quick", action="store_true", help="a sample of 20; writes no result")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--list", action="store_true", help="count the mutants by file")
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    os.chdir(ROOT)
    work = Path(tempfile.mkdtemp(prefix="mutants"))
    try:
        _main(args, work)
    finally:
        gc.unfreeze()
        shutil.rmtree(work, ignore_errors=True)


def tried(
    args: argparse.Namespace,
    wanted: Sequence[tuple[str, Callable[[], Mutant]]],
    tests: Sequence[str],
    paths: Sequence[str],
    known: Equivalents,
    work: Path,
) -> dict[str, Any]:
    """Try the drawn mutants: answers (of each mutant what became of it), seconds, base.

    Ends the program when a test fails that is run without a mutant."""
    texts = {path: (ROOT / path).read_text() for path in paths}
    controls = set(
        random.Random(args.seed).sample(range(len(wanted)), min(args.controls, len(wanted)))
    )

    def first(session: CollectedSession) -> dict[str, Any]:
        base = baseline(session, tests, paths, work, args.workers)
        begin = time.monotonic()

        def jobs() -> Iterator[tuple[Mutant, list[str], float]]:
            for place, (_, make) in enumerate(wanted):
                if args.minutes and time.monotonic() - begin > 60 * args.minutes:
                    return
                m = make()
                reaching = base.reaching(m, texts[m.path])
                yield m, reaching, base.cpu_s(reaching)
                if place in controls:
                    unchanged = replace(m, code=texts[m.path], plus=UNCHANGED)
                    yield unchanged, reaching, base.cpu_s(reaching)

        def trial(m: Mutant, reaching: Sequence[str], directory: Path) -> dict[str, Any]:
            return try_in_session(session, m, reaching, directory)

        answers = []
        for m, answer in all_of(jobs(), work, args.workers, trial):
            if m.plus == UNCHANGED and answer["status"] not in (SURVIVED, UNTESTED):
                return {"failed": f"{answer['by'] or 'a time limit'} fails without a mutant: {m}"}
            if m.plus != UNCHANGED:
                answers.append((asdict(m), answer))
                if answer["status"] == SURVIVED and not known.reason(m):
                    print(f"lives so far: {m}", file=sys.stderr, flush=True)
                if len(answers) % 50 == 0:
                    passed = f"{len(answers)} of {len(wanted)}, {time.monotonic() - begin:.0f} s"
                    print(passed, file=sys.stderr, flush=True)
        return {"answers": answers, "base": asdict(base), "seconds": time.monotonic() - begin}

    found = collected(tests, work, first)
    if "failed" in found:
        sys.exit(f"mutants: {found['failed']}")
    base = Baseline(**found["base"])
    base.lines = {
        path: {int(n): names for n, names in lines.items()} for path, lines in base.lines.items()
    }
    begin = time.monotonic()
    answers = []
    again = []
    for m, answer in ((Mutant(**m), answer) for m, answer in found["answers"]):
        is_done = answer["status"] in (KILLED, UNTESTED) or known.reason(m)
        (answers if is_done else again).append((m, answer))
    jobs = ((m, t := base.reaching(m, texts[m.path]), base.cpu_s(t)) for m, _ in again)
    answers += all_of(jobs, work, args.workers)
    for m, answer in answers:
        if answer["status"] in (SURVIVED, UNTESTED) and not known.reason(m):
            print(f"{answer['status']}: {m}", file=sys.stderr, flush=True)
    seconds = found["seconds"] + time.monotonic() - begin
    return {"answers": answers, "base": found["base"], "seconds": seconds}


def summarize(
    found: dict[str, Any],
    known: Equivalents,
    args: argparse.Namespace,
    chosen: dict[str, Any],
    wanted: int,
) -> dict[str, Any]:
    """Return the result of the tried mutants, of which `wanted` were drawn."""
    goal = chosen.get("goal", GOAL)
    base = Baseline(**found["base"])
    by_path: dict[str, Counter[str]] = {}
    survivors = []
    equivalents = []
    killers = Counter[str]()
    for m, answer in found["answers"]:
        status = answer["status"]
        if status in (SURVIVED, UNTESTED):
            if (reason := known.reason(m)) is not None:
                status = "equivalent"
                equivalents.append({"mutant": str(m), "reason": reason})
            else:
                survivors.append({"mutant": str(m), "untested": status == UNTESTED})
        killers[answer["by"].split("[")[0]] += status == KILLED
        by_path.setdefault(m.path, Counter())[status] += 1
    total = sum(by_path.values(), Counter())
    killed = total[KILLED] + total[TIMEOUT]
    counted = sum(total.values()) - total["equivalent"]
    score = killed / max(counted, 1)
    weakest = min(map(share, by_path.values()), default=1.0)
    tried_of = str(sum(total.values()))
    if sum(total.values()) < wanted:
        tried_of = f"the first {tried_of} of {wanted}"
    return {
        "goals": [
            {
                "figure": f"mutants killed by the fast tests, {tried_of} drawn by seed {args.seed}",
                "value": round(score, 4),
                "goal": f">= {goal}",
                "met": score >= goal,
            },
            {
                "figure": "mutants killed, of the file with the fewest",
                "value": round(weakest, 4),
                "goal": f">= {GOAL_BY_FILE}",
                "met": weakest >= GOAL_BY_FILE,
            },
        ],
        "met": score >= goal and weakest >= GOAL_BY_FILE,
        "what": chosen.get("what", WHAT),
        "seed": args.seed,
        "mutants": sum(total.values()),
        "controls": min(args.controls, wanted),
        "killed": killed,
        "by_time_limit": total[TIMEOUT],
        "survived": len(survivors),
        "equivalent": total["equivalent"],
        "score": score,
        "seconds": round(found["seconds"]),
        "tests": len(base.seconds),
        "tests_left_out": base.left_out,
        "tests_seconds": round(sum(base.seconds.values()), 1),
        "by_file": {k: dict(v) for k, v in by_path.items()},
        "survivors": survivors,
        "equivalents": equivalents,
        "killers": dict(killers.most_common(40)),
    }


def _main(args: argparse.Namespace, work: Path) -> None:
    warm(work)
    if args.planted:
        every_planted = planted(work, args.workers)
        alive = [x for x in every_planted if x["status"] not in (KILLED, TIMEOUT)]
        print(
            json.dumps(every_planted)
            if args.json
            else "\n".join(f"{x['status']:9} {x['name']}: {x['mutant']}" for x in every_planted)
        )
        sys.exit(1 if alive else 0)
    paths = sources()
    if args.table:
        write_table(paths, work, args.workers)
        return
    chosen = listed(args.set) if args.set else {}
    if chosen:
        paths = list(chosen["files"])
    paths = [p for p in paths if args.module in p]
    every = catalogue(paths, chosen.get("files"))
    if args.list:
        counts = Counter(path for path, _ in every)
        print("\n".join(f"{n:6} {path}" for path, n in counts.items()), f"{len(every):6}", sep="\n")
        return
    many = 20 if args.quick else args.sample or len(every)
    wanted = drawn(every, many, args.seed, 0 if chosen or args.quick else LEAST)
    known = Equivalents(ROOT / "benchmarks" / "mutants_equivalent.toml")
    paths = list(dict.fromkeys(path for path, _ in wanted))
    tests = args.tests.split(",") if args.tests else chosen.get("tests") or reaching_files(paths)
    found = tried(args, wanted, tests, paths, known, work)
    result = summarize(found, known, args, chosen, len(wanted)) | {"of": len(every)}
    by_path = result["by_file"]
    for path, counts in sorted(by_path.items(), key=lambda x: share(x[1])):
        if share(counts) < GOAL_BY_FILE:
            print(f"{share(counts):4.0%} {path} {dict(counts)}", file=sys.stderr)
    print(
        f"{result['killed']} of {result['mutants'] - result['equivalent']} killed "
        f"({result['score']:.1%}), {result['equivalent']} equivalent, {result['seconds']} s",
        file=sys.stderr,
    )
    if not (args.quick or args.module):
        name = f"mutants_{args.set}" if args.set else "mutants"
        print(results_file.write(name, result), file=sys.stderr)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
