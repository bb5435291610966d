"""Test the fast tests with mutants: do they notice a changed line?

Each mutant of the mathematics, the learner, the buffer, the actors, the messages, the transport,
the Tinker server's training and the viewer runs against the tests that reach it.

    make mutants MUTANTS="[--sample 600] [--seed 0] [--module PART] [--quick] [--json]"

Goals: at least 92 % of a seeded sample are killed, four of each file first, and at least 75 % of
each file of which eight were tried.  mutmut's operators make the mutants of the files that
`[tool.mutmut]` in pyproject.toml names.  What a type checker alone reads has none: a TypeVar, the
body of a Protocol and of `if TYPE_CHECKING`.
mutants_tests.json maps source files to the fast test files that run them; `--table` measures it
again.  A first process imports the project and collects the tests once.  Every mutant is a fork of
it that changes one function in memory and runs the tests that reach the changed statement, until
one fails: first those that have killed other mutants of the function, then those of the files that
speak of the module.  Mutants outside a function are tried in a fork that has imported other
packages alone and imports the changed file anew: against the likeliest tests of 20 seconds, those
first that name the changed constant or run a line with it.  What tests take and reach, and what
they have killed, is kept in .pytest_cache/mutants: it is measured again when the test file changes.
After a change of the source file it counts by function, so that its mutants need not wait.

A mutant is killed when a test fails, the import fails, or a test hangs: it takes more than four
times the processor time that it takes without the mutant, or sleeps for longer than that, with a
few seconds to spare.  Time in which a busy machine lets a fork wait for a processor does not count.
Survivors listed in mutants_equivalent.toml, with the reason why no test can notice them, are not
counted.  Some of the sample also run unchanged: a test that fails then is left out from there on,
with the mutants that it has killed, and after more than three such tests the program ends.
--module PART: only mutants of the files whose path contains PART; no result is written.  --minutes:
end after so many, everything counted, the drawn being in a random order.  Measuring the tests takes
half of it at most, the rest of them waiting for the next run, each mutant meets its likeliest tests
of 20 seconds alone, and the last quarter belongs to the mutants outside functions.  --planted: the
mutants of mutants_planted.py, each against the one test that must notice it."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
# faster, and no plugin of another package joins in
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

import argparse
import contextlib
import difflib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lib import results_file
from lib.mutant_forks import Child, NormalCost, TimeLimits, end_with_parent, fork, reap
from lib.mutant_session import CollectedSession, change_function, module_name
from lib.mutant_tests import PROJECT, Baseline, baseline, kept

ROOT = results_file.ROOT
# first: benchmarks/learner.py and buffer.py must not hide the packages of their names
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
GOAL = 0.92
GOAL_BY_FILE = 0.75
MEASURING = 0.5  # of --minutes, the most that measuring the tests may take
IN_FUNCTIONS = 0.75  # of --minutes, when the mutants outside functions are due
# of the tests of a mutant, the likeliest, in CPU seconds: with --minutes, and outside a function
LIKELIEST_S = 20.0
STAGES = (0, 3, 9, 27)  # test files, the likeliest first, that are imported when none before failed
BEGAN = time.monotonic()
LEAST = 4  # mutants drawn of each file
ENOUGH = 8  # mutants of a file, so that its share says something
TABLE = ROOT / "benchmarks" / "mutants_tests.json"
WHAT = (
    "mutants of the algorithms, the learner, the buffer, the actors, the messages, the transport, "
    "the Tinker server's training and the viewer, against the fast tests that reach them"
)
# fixtures that start processes: a mutant in memory does not reach them
REAL_RUNS = {"asyncrl", "sort_model", "sort_vllm_model", "gain", "forked"}
SURVIVED = "survived"
KILLED = "killed"
TIMEOUT = "timeout"
UNTESTED = "untested"
MOST_UNSTEADY = 3  # tests that may fail without a mutant before the program ends
UNCHANGED = "(unchanged)"
NOT_HERE = "outside a function"  # the collected session cannot change it


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


def catalogue(paths: Sequence[str]) -> list[tuple[str, Callable[[], Mutant]]]:
    """Return (path, what makes the mutant) for every mutant of the files, in their order."""
    from mutmut.mutation.file_mutation import create_mutations

    out: list[tuple[str, Callable[[], Mutant]]] = []
    for path in paths:
        text = (ROOT / path).read_text()
        module, mutations, _, _ = create_mutations(path, text)
        types = nodes_for_types(module)
        for m in mutations:
            if id(m.original_node) in types:
                continue
            # mutmut has no public name for one mutant's source; a node of the tree, replaced, is
            # what its own files hold
            out.append(
                (
                    path,
                    lambda m=m, module=module, path=path, text=text: mutant(
                        path, text, module.deep_replace(m.original_node, m.mutated_node).code
                    ),
                )
            )
    return out


def nodes_for_types(module: Any) -> set[int]:
    """The ids of the nodes that a type checker alone reads: a TypeVar, the body of a Protocol and
    of `if TYPE_CHECKING`.
    """
    import libcst.matchers as match

    protocol = match.Arg(match.Name("Protocol") | match.Subscript(match.Name("Protocol")))
    bases = [match.ZeroOrMore(), protocol, match.ZeroOrMore()]
    waiting: list[Any] = [
        *match.findall(module, match.Assign(value=match.Call(match.Name("TypeVar")))),
        *(x.body for x in match.findall(module, match.If(match.Name("TYPE_CHECKING")))),
        *(x.body for x in match.findall(module, match.ClassDef(bases=bases))),
    ]
    found = set()
    while waiting:
        node = waiting.pop()
        found.add(id(node))
        waiting += node.children
    return found


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
        self.name = module_name(path)
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


def is_slow(item: Any) -> bool:
    """Return whether a test is marked slow by itself, not with its whole file."""
    return any(mark.name == "slow" for mark in item.own_markers)


class Chosen:
    """A pytest plugin: only these tests, in this order; the first that fails."""

    def __init__(self, only: Sequence[str] | None) -> None:
        self.place = None if only is None else {name: i for i, name in enumerate(only)}
        self.failed = ""
        self.seen = 0
        self.collected = False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.collected = True
        items[:] = [i for i in items if not REAL_RUNS & set(i.fixturenames) and not is_slow(i)]
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


@dataclass(frozen=True)
class Trial:
    """A mutant and the tests for it, in their order, with what each takes without it."""

    mutant: Mutant
    tests: list[str]
    costs: Mapping[str, NormalCost]

    @property
    def cpu_s(self) -> float:
        """The processor time that all of it may take."""
        return 20 + 5 * sum(cost.cpu_s for cost in self.costs.values())


def trial_of(base: Baseline, m: Mutant, text: str, most_s: float = 0.0) -> Trial:
    """Return the trial of a mutant of a file's text.

    most_s: the likeliest tests alone, as many as take so long; 0: all."""
    tests = base.reaching(m.path, text, m.first, m.last)
    if most_s:
        sums = itertools.accumulate(base.seconds[t] for t in tests)
        tests = [
            t for t, total in zip(tests, sums, strict=True) if total <= most_s or t is tests[0]
        ]
    return Trial(m, tests, base.costs(tests))


def try_in_session(session: CollectedSession, trial: Trial, directory: Path) -> dict[str, Any]:
    """In a fork of the session: change the function, and run the tests until one fails."""
    m = trial.mutant
    if module_name(m.path) not in sys.modules:
        sys.meta_path.insert(0, Changed(m.path, m.code))
    elif m.plus != UNCHANGED:
        old = (ROOT / m.path).read_text()
        if not change_function(m.path, old, m.code, m.first, m.last):
            return {"status": NOT_HERE, "by": ""}
    chosen = Chosen(None)
    plugins = [chosen, TimeLimits(directory / "running", trial.costs)]
    try:
        session.run(trial.tests, directory / "t", plugins, lambda: bool(chosen.failed))
    except BaseException as error:  # the end of a pytest session, a test's SystemExit
        return {"status": KILLED, "by": chosen.failed or repr(error)}
    if not chosen.seen and not chosen.failed:
        return {"status": UNTESTED, "by": ""}
    return {"status": KILLED if chosen.failed else SURVIVED, "by": chosen.failed}


def try_anew(trial: Trial, directory: Path) -> dict[str, Any]:
    """In a fork: import the project with the mutant in it, run the tests until one fails.

    A few test files are imported and run before the next ones are."""
    sys.meta_path.insert(0, Changed(trial.mutant.path, trial.mutant.code))
    files = list(dict.fromkeys(t.split("::")[0] for t in trial.tests))
    limits = TimeLimits(directory / "running", trial.costs)
    seen = 0
    for begin, end in itertools.pairwise((*STAGES, len(files))):
        if not files[begin:end]:
            continue
        chosen = Chosen(trial.tests)
        code = pytest_main(files[begin:end], directory / f"t{begin}", [chosen, limits], "-x")
        seen += chosen.seen
        # 5: pytest has run no test
        if code and (chosen.failed or not chosen.collected or code != 5):
            return {"status": KILLED, "by": chosen.failed, "code": code}
    return {"status": SURVIVED if seen else UNTESTED, "by": ""}


def write_table(paths: Sequence[str], work: Path, workers: int, files: Sequence[str]) -> None:
    """Measure these fast test files, and note which source files each runs."""

    def act(session: CollectedSession) -> dict[str, Any]:
        baseline(session, files, paths, work, workers, exact=True)
        return {}

    collected(files, work, act)
    old: dict[str, list[str]] = json.loads(TABLE.read_text())
    table = {
        # of a file with a failing test nothing was measured
        t: sorted(set(found["lines"]) & set(paths))
        if t in files and (found := kept(t, paths, exact=True))
        else old.get(t, [])
        for t in fast_files()
        if t in files or t in old
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
        end_with_parent()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        plugins = [Chosen(None), CollectedSession(inside)]
        pytest_main(tests, work / "collected", plugins, "--continue-on-collection-errors")
    except BaseException:
        traceback.print_exc()  # nothing else says why it ends
    finally:
        os._exit(0)


def all_of(
    trials: Iterator[Trial],
    work: Path,
    workers: int,
    act: Callable[[Trial, Path], dict[str, Any]] = try_anew,
) -> Iterator[tuple[Trial, dict[str, Any]]]:
    """(trial, what became of its mutant), as they end."""
    running: list[Child] = []

    def ended() -> tuple[Trial, dict[str, Any]]:
        child, answer, last = reap(running)
        return child.what, answer or {"status": TIMEOUT, "by": last}

    for trial in trials:
        if not trial.tests:
            yield trial, {"status": UNTESTED, "by": ""}
            continue
        running.append(fork(trial, work, trial.cpu_s, lambda d, trial=trial: act(trial, d)))
        if len(running) >= workers:
            yield ended()
    while running:
        yield ended()


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
    assert_unimported()
    # compiled by the first fork, read by the others
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(work / "bytecode")
    gc.freeze()  # pytest collects garbage several times; what lies here is none


def assert_unimported() -> None:
    mine = [m for m in sys.modules if m.split(".")[0] in PROJECT]
    assert not mine, f"imported before the fork: {mine}"


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
        jobs.append(Trial(m, [p.test], {p.test: NormalCost(20.0, 20.0)}))
    # without a mutant every one of these tests must pass
    _, sound, _ = reap(
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
    for trial, answer in all_of(iter(jobs), work, workers):
        m = trial.mutant
        p = names[m.path, m.code]
        out.append({"name": p.name, "mutant": str(m), "status": answer["status"], "test": p.test})
    return sorted(out, key=lambda x: x["name"])


def share(counts: Mapping[str, int]) -> float:
    """Killed, of those of a file that a test can tell apart."""
    told_apart = sum(counts.values()) - counts.get("equivalent", 0)
    return (counts.get(KILLED, 0) + counts.get(TIMEOUT, 0)) / told_apart if told_apart else 1.0


def has_enough(counts: Mapping[str, int]) -> bool:
    """Return whether so many mutants of a file were tried that its share says something."""
    return sum(counts.values()) - counts.get("equivalent", 0) >= ENOUGH


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
    p.add_argument(
        "--table", action="store_true", help="write mutants_tests.json anew, or of --tests alone"
    )
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
    end = BEGAN + 60 * args.minutes if args.minutes else math.inf
    most_s = LIKELIEST_S if args.minutes else 0.0

    def first(session: CollectedSession) -> dict[str, Any]:
        measured_by = BEGAN + MEASURING * 60 * args.minutes if args.minutes else math.inf
        base = baseline(session, tests, paths, work, args.workers, end=measured_by)
        begin = time.monotonic()

        def trials() -> Iterator[Trial]:
            for place, (_, make) in enumerate(wanted):
                if time.monotonic() > BEGAN + IN_FUNCTIONS * (end - BEGAN):
                    return
                m = make()
                trial = trial_of(base, m, texts[m.path], most_s)
                yield trial
                if place in controls:
                    yield replace(trial, mutant=replace(m, code=texts[m.path], plus=UNCHANGED))

        def act(trial: Trial, directory: Path) -> dict[str, Any]:
            return try_in_session(session, trial, directory)

        answers: list[tuple[Mutant, dict[str, Any]]] = []
        unsteady: set[str] = set()
        for trial, answer in all_of(trials(), work, args.workers, act):
            m = trial.mutant
            if m.plus == UNCHANGED and answer["status"] not in (SURVIVED, UNTESTED):
                said = f"{answer['by']}, {answer['status']}, fails without a mutant: {m}"
                if answer["by"] not in base.seconds or len(unsteady) == MOST_UNSTEADY:
                    return {"failed": said}
                print(f"left out: {said}", file=sys.stderr, flush=True)
                unsteady.add(answer["by"])
                base.leave_out(answer["by"])
                answers = [(m, a) for m, a in answers if a["by"] not in unsteady]
            if m.plus == UNCHANGED or answer["by"] in unsteady:
                continue
            answers.append((m, answer))
            if answer["status"] in (KILLED, TIMEOUT) and answer["by"] in base.seconds:
                base.count_killer(m.path, texts[m.path], m.first, m.last, answer["by"])
            if answer["status"] == SURVIVED and not known.reason(m):
                print(f"lives so far: {m}", file=sys.stderr, flush=True)
            if len(answers) % 50 == 0:
                passed = f"{len(answers)} of {len(wanted)}, {time.monotonic() - begin:.0f} s"
                print(passed, file=sys.stderr, flush=True)
        base.keep_killers()
        seconds = time.monotonic() - begin
        told = [(asdict(m), answer) for m, answer in answers]
        return {
            "answers": told,
            "base": vars(base) | {"killers": {}},
            "seconds": seconds,
            "packages": [
                name
                for name, module in sys.modules.items()
                if "site-packages" in (getattr(module, "__file__", None) or "")
            ],
        }

    found = collected(tests, work, first)
    if "failed" in found:
        sys.exit(f"mutants: {found['failed']}")
    base = Baseline(**found["base"])
    base.load_killers()
    base.lines = {
        path: {int(n): names for n, names in lines.items()} for path, lines in base.lines.items()
    }
    begin = time.monotonic()
    every = [(Mutant(**m), answer) for m, answer in found["answers"]]
    answers = [(m, answer) for m, answer in every if answer["status"] != NOT_HERE]
    waiting = [m for m, answer in every if answer["status"] == NOT_HERE]
    for name in found["packages"] if waiting else ():
        with contextlib.suppress(Exception):  # a part that its package imports first
            importlib.import_module(name)
    assert_unimported()
    gc.freeze()
    anew = (
        trial_of(base, m, texts[m.path], LIKELIEST_S) for m in waiting if time.monotonic() <= end
    )
    by_anew: dict[Mutant, dict[str, Any]] = {}
    for trial, answer in all_of(anew, work, args.workers):
        by_anew[trial.mutant] = answer
        if len(by_anew) % 10 == 0:
            print(f"anew: {len(by_anew)} of {len(waiting)}", file=sys.stderr, flush=True)
    answers += [(m, by_anew[m]) for m in waiting if m in by_anew]
    for m, answer in answers:
        if answer["status"] in (SURVIVED, UNTESTED) and not known.reason(m):
            print(f"{answer['status']}: {m}", file=sys.stderr, flush=True)
    seconds = found["seconds"] + time.monotonic() - begin
    return {"answers": answers, "base": found["base"], "seconds": seconds}


def summarize(
    found: dict[str, Any],
    known: Equivalents,
    args: argparse.Namespace,
    wanted: int,
) -> dict[str, Any]:
    """Return the result of the tried mutants, of which `wanted` were drawn."""
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
    weakest = min(map(share, filter(has_enough, by_path.values())), default=0.0)
    enough = sum(map(has_enough, by_path.values()))
    tried_of = str(sum(total.values()))
    if sum(total.values()) < wanted:
        tried_of = f"the first {tried_of} of {wanted}"
    return {
        "goals": [
            {
                "figure": (
                    f"mutants killed by the fast tests, {tried_of} drawn by seed {args.seed}, "
                    f"without {total['equivalent']} equivalent ones"
                ),
                "value": round(score, 4),
                "goal": f">= {GOAL}",
                "met": score >= GOAL,
            },
            {
                "figure": (
                    "mutants killed, of the file with the fewest, "
                    f"of {enough} with {ENOUGH} or more tried"
                ),
                "value": round(weakest, 4),
                "goal": f">= {GOAL_BY_FILE}",
                "met": weakest >= GOAL_BY_FILE,
            },
        ],
        "met": score >= GOAL and weakest >= GOAL_BY_FILE,
        "what": WHAT,
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
        "tests_unmeasured": base.unmeasured,
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
        write_table(
            paths, work, args.workers, args.tests.split(",") if args.tests else fast_files()
        )
        return
    paths = [p for p in paths if args.module in p]
    every = catalogue(paths)
    if args.list:
        counts = Counter(path for path, _ in every)
        print("\n".join(f"{n:6} {path}" for path, n in counts.items()), f"{len(every):6}", sep="\n")
        return
    many = 20 if args.quick else args.sample or len(every)
    wanted = drawn(every, many, args.seed, 0 if args.quick else LEAST)
    known = Equivalents(ROOT / "benchmarks" / "mutants_equivalent.toml")
    paths = list(dict.fromkeys(path for path, _ in wanted))
    tests = args.tests.split(",") if args.tests else reaching_files(paths)
    found = tried(args, wanted, tests, paths, known, work)
    result = summarize(found, known, args, len(wanted)) | {"of": len(every)}
    by_path = result["by_file"]
    # the drawn are as many of a small file as of a large one: here each file counts by its mutants
    sizes = Counter(path for path, _ in every)
    counted = sum(sizes[path] for path in by_path)
    weighted = sum(sizes[path] * share(counts) for path, counts in by_path.items())
    result["score_by_size"] = weighted / max(counted, 1)
    for path, counts in sorted(by_path.items(), key=lambda x: share(x[1])):
        if share(counts) < GOAL_BY_FILE:
            print(f"{share(counts):4.0%} {path} {dict(counts)}", file=sys.stderr)
    print(
        f"{result['killed']} of {result['mutants'] - result['equivalent']} killed "
        f"({result['score']:.1%}), {result['equivalent']} equivalent, {result['seconds']} s",
        file=sys.stderr,
    )
    if not (args.quick or args.module):
        print(results_file.write("mutants", result), file=sys.stderr)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
