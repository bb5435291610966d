"""Which tests run which lines of the source, and in which order a mutant meets them.

Only measurements are written to disk, to .pytest_cache/mutants.  They are made again when the test
file changes; after a change of a source file they count by function."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic  # tests may patch that of the module
from typing import Any

import pytest

from lib import mutant_forks
from lib.mutant_forks import NormalCost
from lib.mutant_lines import functions_of, lines_by_function
from lib.mutant_session import CollectedSession
from lib.results_file import ROOT

KEPT = ROOT / ".pytest_cache" / "mutants"
KILLERS = "killers.json"  # in KEPT: path -> function -> test -> mutants that it has killed
PROJECT = ("asyncrl", "actors", "buffer", "learner")
SLOW_S = 3.0  # a test that takes longer has no place in a fork per mutant
MEASURE_S = 300.0  # of a test file, at most: processor time, or asleep beside its own processes
FIRST = 8  # tests that have killed mutants of the function, or of the file, and come first


@dataclass
class Baseline:
    """The fast tests without a mutant: what each takes, and the tests that run each line.

    Fast tests need no real run and take less than SLOW_S, with the processes that they start.
    Lines run by a shared fixture count for every test of the file.

    left_out: test files with a test that fails without a mutant, and such tests
    unmeasured: test files for which there was no time"""

    seconds: dict[str, float] = field(default_factory=dict)
    asleep: dict[str, float] = field(default_factory=dict)
    setup: dict[str, float] = field(default_factory=dict)  # of the fixtures of each test file
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    killers: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)

    def add(self, test_file: str, measured: Mapping[str, Any]) -> None:
        """Take what `measure` returned for a test file."""
        self.seconds |= measured["seconds"]
        self.asleep |= measured["asleep"]
        self.setup[test_file] = measured["setup_s"]
        for path, lines in measured["lines"].items():
            for n, named in lines.items():
                self.lines.setdefault(path, {}).setdefault(int(n), []).extend(named)

    def leave_out(self, test: str) -> None:
        """Use a test no more that has failed without a mutant."""
        self.left_out.append(test)
        del self.seconds[test]
        for lines in self.lines.values():
            for names in lines.values():
                names[:] = [name for name in names if name != test]

    def costs(self, tests: Sequence[str]) -> dict[str, NormalCost]:
        """Return what each test takes without a mutant."""
        return {
            t: NormalCost(self.seconds[t], self.asleep[t], self.setup[t.split("::")[0]])
            for t in tests
        }

    def reaching(self, path: str, text: str, first: int, last: int) -> list[str]:
        """Return the tests that run the changed statement, the likeliest to notice it first.

        first, last: its lines in the file's text.  Where they run at import, these are all tests
        of the files that run anything of the file or speak of its module."""
        start, end = statement(text, first, last)
        here = self.lines.get(path, {})
        users: set[str] = set()
        name = ""
        found = {t for n in range(start, end + 1) for t in here.get(n, ())}
        if start == 0:
            files = {t.split("::")[0] for tests in here.values() for t in tests}
            files |= {
                f for f in {t.split("::")[0] for t in self.seconds} if mentions(f, Path(path).stem)
            }
            found = {t for t in self.seconds if t.split("::")[0] in files}
            name = name_at(text, first, last)
            users = self._running(name)
        return self._in_order(found, path, function_at(text, first, last), users, name)

    def _running(self, name: str) -> set[str]:
        """Return the tests that run a line with this name."""
        word = re.compile(rf"\b{name}\b")
        return {
            t
            for path, lines in self.lines.items()
            if (ROOT / path).exists()
            for n, line in enumerate((ROOT / path).read_text().splitlines(), 1)
            if n in lines and word.search(line)
            for t in lines[n]
        }

    def _in_order(
        self,
        tests: Collection[str],
        path: str,
        function: str,
        users: Collection[str],
        constant: str,
    ) -> list[str]:
        """Put killers of the function's mutants first, then those of the file's other mutants.

        Then come the tests that name the constant, `users`, the files that speak of the module, and
        the others, the quickest first."""
        by_function = self.killers.get(path, {})
        of_function = by_function.get(function, Counter())
        of_file = sum(by_function.values(), Counter[str]())
        known = [t for t, _ in (*of_function.most_common(), *of_file.most_common()) if t in tests]
        begin = list(dict.fromkeys(known))[:FIRST]
        whole = Counter[str]()
        for t in tests:
            whole[t.split("::")[0]] += self.seconds[t]  # type: ignore[assignment]
        place = {t: i for i, t in enumerate(self.seconds)}
        speaks = {f: mentions(f, Path(path).stem) for f in whole}
        naming = {f: tests_naming(f, constant) for f in whole} if constant else {}

        def order(t: str) -> tuple[bool, bool, bool, float, str, int]:
            file, _, name = t.partition("::")
            names = name.partition("[")[0] in naming.get(file, ())
            return not names, t not in users, not speaks[file], whole[file], file, place[t]

        return begin + sorted(set(tests) - set(begin), key=order)

    def count_killer(self, path: str, text: str, first: int, last: int, test: str) -> None:
        """Remember that a test has killed a mutant of these lines."""
        by_function = self.killers.setdefault(path, {})
        by_function.setdefault(function_at(text, first, last), Counter())[test] += 1

    def load_killers(self) -> None:
        """Read the killers that earlier runs have kept."""
        file = KEPT / KILLERS
        kept = json.loads(file.read_text()) if file.exists() else {}
        self.killers = {
            path: {name: Counter(tests) for name, tests in by_function.items()}
            for path, by_function in kept.items()
        }

    def keep_killers(self) -> None:
        """Write the killers for later runs."""
        part = KEPT / f"{KILLERS}.{os.getpid()}"
        part.write_text(json.dumps(self.killers))
        part.replace(KEPT / KILLERS)


@functools.cache
def mentions(test_file: str, name: str) -> bool:
    """Return whether a test file speaks of a module."""
    return re.search(rf"\b{name}\b", (ROOT / test_file).read_text()) is not None


@functools.cache
def tests_naming(test_file: str, name: str) -> set[str]:
    """Return the names of the file's tests in which this name stands."""
    word = re.compile(rf"\b{name}\b")
    parts = re.split(r"(?m)^(?:async )?def ", (ROOT / test_file).read_text())
    return {part.partition("(")[0] for part in parts[1:] if word.search(part)}


def function_at(text: str, first: int, last: int) -> str:
    """Return the name of the innermost function that holds these lines, "" outside of all."""
    holding = [
        (begin, name)
        for name, (begin, end) in functions_of(text).items()
        if begin <= first and last <= end
    ]
    return max(holding)[1] if holding else ""


def name_at(text: str, first: int, last: int) -> str:
    """Return the name of the class that holds these lines, else of the constant."""
    for node in ast.parse(text).body:
        if node.lineno <= first and last <= (node.end_lineno or 0):
            for part in ast.walk(node):
                if isinstance(part, ast.ClassDef):
                    return part.name
                if isinstance(part, ast.Name):
                    return part.id
    return r"\Z."  # nowhere


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
                visit(child, within or isinstance(child, FUNCTIONS))

    visit(ast.parse(text), False)
    if best is None or (not inside and not isinstance(best, FUNCTIONS)):
        return 0, 0
    if isinstance(best, FUNCTIONS):
        return best.body[0].lineno, best.end_lineno or best.lineno
    body = getattr(best, "body", None)
    return best.lineno, (
        body[0].lineno - 1
        if isinstance(body, list) and body[0].lineno > best.lineno
        else best.end_lineno or best.lineno
    )


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


# ---- measuring -----------------------------------------------------------------------------------


class Watch:
    """A pytest plugin: coverage told apart by test, and what each takes."""

    def __init__(self, cover: Any) -> None:
        self.cover = cover
        self.seconds: dict[str, float] = {}
        self.asleep: dict[str, float] = {}
        self.setup_s = 0.0
        self.failed: list[str] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: Any) -> Iterator[None]:
        self.cover.switch_context(item.nodeid.split("::")[0])
        began = mutant_forks.cpu_seconds()
        yield
        self.setup_s += mutant_forks.cpu_seconds() - began

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        self.cover.switch_context(item.nodeid)
        # a busy machine makes no test slower in processor time
        began = mutant_forks.cpu_seconds(), monotonic(), awake_now()
        yield
        self.seconds[item.nodeid] = mutant_forks.cpu_seconds() - began[0]
        asleep = monotonic() - began[1] - (awake_now() - began[2])
        self.asleep[item.nodeid] = max(0.0, asleep)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "call" and not report.passed:
            self.seconds.pop(report.nodeid, None)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def awake_now() -> float:
    return mutant_forks.awake_seconds(os.getpid())


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
    # a template of a page, compiled under its file's name, is covered too
    for full in (name for name in data.measured_files() if name.endswith(".py")):
        path = str(Path(full).relative_to(ROOT))
        for n, contexts in data.contexts_by_lineno(full).items():
            named = {t for c in contexts if c for t in ([c] if c in fast else fast)}
            if named:
                lines.setdefault(path, {})[n] = sorted(named)
    asleep = {t: watch.asleep[t] for t in fast}
    measured = {"seconds": fast, "asleep": asleep, "setup_s": watch.setup_s, "lines": lines}
    return measured | {"failed": watch.failed}


def digest(path: str) -> str:
    file = ROOT / path
    return digest_of(file.read_bytes()) if file.exists() else ""


def digest_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def kept_file(test_file: str) -> Path:
    return KEPT / f"{Path(test_file).stem}.json"


def kept(test_file: str, paths: Collection[str], *, exact: bool = False) -> dict[str, Any] | None:
    """Return the stored measurement of a test file, None if there is none or the file has changed.

    For a source file that has changed since it is by function.  exact: neither tests/conftest.py
    nor any of `paths` that it runs may have changed."""
    file = kept_file(test_file)
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text())
    changed = [path for path, old in found["digests"].items() if digest(path) != old]
    shared = {"tests/conftest.py", *paths} if exact else set()
    if {test_file, *shared} & set(changed) or "asleep" not in found:
        return None
    for path in set(changed) & set(found["lines"]):
        lines = found["lines"].pop(path)
        if (ROOT / path).exists():
            functions = functions_of((ROOT / path).read_text())
            found["lines"][path] = lines_by_function(lines, found["functions"][path], functions)
    return found


def in_likely_order(tests: Sequence[str], paths: Collection[str]) -> list[str]:
    """Put the test files first that speak of one of these modules, the shortest first."""
    speaks = {t: any(mentions(t, Path(path).stem) for path in paths) for t in tests}
    return sorted(tests, key=lambda t: (not speaks[t], (ROOT / t).stat().st_size))


def baseline(
    session: CollectedSession,
    tests: Sequence[str],
    paths: Collection[str],
    work: Path,
    workers: int,
    *,
    exact: bool = False,
    end: float = 0.0,
) -> Baseline:
    """Measure the test files, or read what was kept of them.

    A file with a test that fails without a mutant is left out, and named.  end: no measurement
    begins after this time of `time.monotonic`, 0: whenever."""
    KEPT.mkdir(parents=True, exist_ok=True)
    # as they are imported: somebody may edit a file while its tests are measured
    files = [file for part in (*PROJECT, "tests") for file in (ROOT / part).rglob("*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_bytes() for file in files}
    base = Baseline()
    base.load_killers()
    measured = {t: found for t in tests if (found := kept(t, paths, exact=exact)) is not None}
    running: list[mutant_forks.Child] = []

    def collect() -> None:
        child, answer, _ = mutant_forks.reap(running)
        if answer is None or answer["failed"]:
            failed = "no answer" if answer is None else ", ".join(answer["failed"])
            base.left_out.append(child.what)
            print(f"left out: {child.what}: {failed}", file=sys.stderr, flush=True)
            return
        of = [child.what, "tests/conftest.py", *answer["lines"]]
        answer["digests"] = {p: digest_of(texts[p]) for p in of}
        answer["functions"] = {p: functions_of(texts[p].decode()) for p in answer["lines"]}
        kept_file(child.what).write_text(json.dumps(answer))
        measured[child.what] = answer
        print(f"measured {len(measured)} of {len(tests)} test files", file=sys.stderr, flush=True)

    for t in in_likely_order([t for t in tests if t not in measured], paths):
        if t in session.failed:
            base.left_out.append(t)
            print(f"left out: {t}: cannot be collected", file=sys.stderr, flush=True)
        elif end and monotonic() > end:
            base.unmeasured.append(t)
        else:
            act = functools.partial(measure, session, t)
            running.append(mutant_forks.fork(t, work, MEASURE_S, act, MEASURE_S))
            if len(running) >= workers:
                collect()
    while running:
        collect()
    if base.unmeasured:
        waiting = len(base.unmeasured)
        print(f"{waiting} test files are measured by the next run", file=sys.stderr, flush=True)
    for t, found in measured.items():
        base.add(t, found)
    return base
