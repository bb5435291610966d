"""Measure the shape of the product's code and prose, each figure with its limit (`make shape`).

    python benchmarks/shape.py            the figures, each with its limit; exit 1 beyond one
    python benchmarks/shape.py --where    and the places beyond, worst first

Code is counted over asyncrl, actors, buffer and learner, prose also over README, CONTRIBUTING and
docs (without docs/log).  One-letter names: bound outside comprehensions, lambdas and the modules
of MATHEMATICS, where a letter is that of the formula.  Dialect: see lib/prose.py.

The limits of size (LIMITS) only ever fall: a change that needs more code removes as much
elsewhere, and a change that removes code lowers them.
  code tokens        names, operators, numbers and strings, without docstrings
  one importer       modules that a single other module of the product imports
  one-call helpers   undecorated functions with a body of at most six lines, whose only mention in
                     the product is one call
  words of pages     of docs/ as committed, without docs/log, as wc counts them"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import math
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lib import prose

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("asyncrl", "actors", "buffer", "learner")
MATHEMATICS = (
    "asyncrl/algorithms",
    "asyncrl/experiments/lab",
    "asyncrl/experiments/compare/analysis.py",
    "asyncrl/experiments/compare/verdict.py",
    "asyncrl/models/exact_operators.py",
    "asyncrl/models/packed_attention.py",
    "asyncrl/models/packed_forward.py",
    "actors/decoder.py",
)
# Bare participles, pronouns and particles say nothing in a stack trace: a class is a noun phrase
# and a
# function starts with a verb.
BARE_WORDS = """
abandoned about above across adopted after again all along anew announced answered apart arrived
at back before behind below beyond called changed checked chosen committed compared completed
drawn drew dropped each elsewhere ended everything everywhere faded gone granted grown happened
heard held here judged kept known knows lacks left lent lived look lost luck made merged moved
named need newest news nobody now of off older oldest on one ones opened others ours out over
packed padded paid parked placed plain published pulled reached received recorded refused
removed replaced reported resolved resumed rounded said same sampled scaled seen settle settled
several shaped shared shown sized somebody spent spoken stands stored stranger summed taken
takes there together told traded trained tried turned two unbegun under unheard until up updated
wanted weighed which who whole why written wrong
"""
BARE_NAMES = frozenset(BARE_WORDS.split())
LIMITS = {
    "code tokens": 427_109,
    "lines": 69_484,
    "modules with one importer": 37,
    "one-call helpers": 127,
    "lines of tables and pages' code": 6_763,
    "lines of benchmarks": 27_634,
    "lines of tests, % of the product": 107,
    "words of pages outside the log": 39_942,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


class Figure(NamedTuple):
    """A number, the most it may be, and the places that make it up, worst first."""

    name: str
    value: float
    limit: float
    places: list[str]


def files() -> list[Path]:
    return [path for part in PRODUCT for path in sorted((ROOT / part).rglob("*.py"))]


def pages() -> list[Path]:
    """Return the pages that a reader of the documentation meets, without the log."""
    written = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    skipped = {ROOT / page for page in prose.GENERATED}
    return [p for p in written if ROOT / "docs" / "log" not in p.parents and p not in skipped]


def prose_figures() -> list[Figure]:
    """Count what `lib/prose.py` finds in code and pages."""
    code: list[str] = []
    split: list[str] = []
    for path in files():
        code += prose.dialect(path)
        split += prose.split_literals(path)
    page = [place for path in pages() for place in prose.dialect(path)]
    wide = [place for path in pages() for place in prose.wide_lines(path)]
    subjects = prose.long_subjects()
    return [
        Figure("dialect in docstrings and comments", len(code), 0, code),
        Figure("dialect in pages", len(page), 0, page),
        Figure("lines of pages wider than 100 columns", len(wide), 0, wide),
        Figure("literals split although they fit", len(split), 0, split),
        Figure("commit subjects over 72 characters", len(subjects), 0, subjects),
    ]


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@functools.cache
def walk(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def bound(node: ast.AST) -> str | None:
    """The name that a node binds, if any."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, ast.ExceptHandler) else None


def letters(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every one-letter name bound outside comprehensions and lambdas."""
    inside = {
        id(child)
        for node in walk(tree)
        if isinstance(node, COMPREHENSIONS)
        for child in ast.walk(node)
    }
    for node in walk(tree):
        name = bound(node)
        if name and len(name) == 1 and name != "_" and id(node) not in inside:
            yield getattr(node, "lineno", 0), name


def has_docstring(node: ast.AST) -> bool:
    return isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None


def count_tokens(text: str, tree: ast.AST) -> int:
    """Count the tokens of code, without docstrings."""
    found = prose.tokens(text)
    docstrings = sum(has_docstring(node) for node in walk(tree))
    return sum(token.type in CODE for token in found) - docstrings


def size_figures(trees: dict[Path, ast.AST], graph: dict[str, dict[str, str]]) -> list[Figure]:
    """How much code there is, and how much of it only holds other code."""
    texts = {path: path.read_text() for path in trees}
    tokens = {path: count_tokens(texts[path], tree) for path, tree in trees.items()}
    folders: Counter[str] = Counter()
    for path, count in tokens.items():
        folders[str(path.parent.relative_to(ROOT))] += count
    lines = sum(text.count("\n") for text in texts.values())
    importers: dict[str, list[str]] = {}
    for name, targets in graph.items():
        for target in targets:
            importers.setdefault(target, []).append(name)
    single = [f"{name} by {by[0]}" for name, by in sorted(importers.items()) if len(by) == 1]
    nodes = [node for tree in trees.values() for node in walk(tree)]
    mentions = Counter(word for node in nodes if (word := mentioned(node)))
    calls = Counter(mentioned(node.func) for node in nodes if isinstance(node, ast.Call))
    definitions = Counter(node.name for tree in trees.values() for node in functions(tree))
    helpers = [
        f"{where(path, node.lineno)} {node.name}"
        for path, tree in trees.items()
        for node in functions(tree)
        if not node.decorator_list and body_lines(node) <= 6
        if mentions[node.name] == calls[node.name] == definitions[node.name] == 1
    ]
    words = Counter({p: len(p.read_text().split()) for p in pages() if p.parent != ROOT})
    test_lines, program_lines = (
        sum(path.read_text().count("\n") for path in (ROOT / part).rglob("*.py"))
        for part in ("tests", "benchmarks")
    )
    tables = Counter(
        {
            path: path.read_text().count("\n")
            for part in PRODUCT
            for path in (ROOT / part).rglob("*")
            if path.suffix in (".toml", ".js", ".css", ".html")
        }
    )
    values: dict[str, tuple[float, list[str]]] = {
        "code tokens": (sum(tokens.values()), [f"{x}: {n}" for x, n in folders.most_common(20)]),
        "lines": (lines, []),
        "modules with one importer": (len(single), single),
        "one-call helpers": (len(helpers), helpers),
        "lines of tables and pages' code": (
            sum(tables.values()),
            [f"{path.relative_to(ROOT)}: {count}" for path, count in tables.most_common(20)],
        ),
        "lines of benchmarks": (program_lines, []),
        "lines of tests, % of the product": (math.ceil(100 * test_lines / max(lines, 1)), []),
        "words of pages outside the log": (
            sum(words.values()),
            [f"{page.relative_to(ROOT)}: {count}" for page, count in words.most_common()],
        ),
    }
    return [Figure(name, values[name][0], LIMITS[name], values[name][1]) for name in LIMITS]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function's body without its docstring."""
    body = function.body[has_docstring(function) :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def mentioned(node: ast.AST) -> str | None:
    """The name that a node reads."""
    if isinstance(node, ast.Name | ast.Attribute):
        return node.id if isinstance(node, ast.Name) else node.attr
    return None


def named(tree: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every class and function, those of other functions included."""
    for node in walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(trees: dict[Path, ast.AST]) -> dict[str, dict[str, str]]:
    """Module -> {imported module of the product: place}, imports in functions and under
    TYPE_CHECKING included."""
    modules = {module_name(path) for path in trees}
    graph: dict[str, dict[str, str]] = {name: {} for name in modules}
    for path, tree in trees.items():
        for node in walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [name if name in modules else str(node.module) for name in full]
            else:
                continue
            for target in set(targets) & modules - {module_name(path)}:
                graph[module_name(path)].setdefault(target, where(path, node.lineno))
    return graph


def import_circles(graph: dict[str, dict[str, str]]) -> list[str]:
    """One line for each strongly connected component of several modules, with its imports."""
    reachable = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:  # Warshall's algorithm
        for targets in reachable.values():
            if middle in targets:
                targets |= reachable[middle]
    circles = {
        tuple(sorted(other for other in targets if name in reachable[other]))
        for name, targets in reachable.items()
        if name in targets
    }
    return [
        "; ".join(
            f"{place} imports {target}"
            for name in circle
            for target, place in sorted(graph[name].items())
            if target in circle
        )
        for circle in sorted(circles)
    ]


def figures() -> list[Figure]:
    classes: dict[str, list[str]] = {}
    bare: list[str] = []
    wide: list[str] = []
    skips: list[str] = []
    long: list[tuple[int, str]] = []
    calls: list[tuple[int, str]] = []
    short: list[str] = []
    trees: dict[Path, ast.AST] = {}
    for path in files():
        text = path.read_text()
        tree = trees[path] = ast.parse(text)
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > 100:
                wide.append(where(path, number))
            if "fmt: skip" in line or "fmt: off" in line:
                skips.append(where(path, number))
        for function in functions(tree):
            size = (function.end_lineno or 0) - function.lineno + 1
            long.append((size, f"{where(path, function.lineno)} {function.name}, {size} lines"))
        for definition in named(tree):
            place = where(path, definition.lineno)
            if isinstance(definition, ast.ClassDef):
                classes.setdefault(definition.name, []).append(place)
            if definition.name.strip("_").lower() in BARE_NAMES:
                bare.append(f"{place} {definition.name}")
        for node in walk(tree):
            if isinstance(node, ast.Call) and len(node.args) > 6:
                what = f"{where(path, node.lineno)} {len(node.args)} arguments by position"
                calls.append((len(node.args), what))
        if not str(path.relative_to(ROOT)).startswith(MATHEMATICS):
            short += [f"{where(path, line)} {name}" for line, name in letters(tree)]
    long.sort(reverse=True)
    calls.sort(reverse=True)
    twice = [f"{places[0]} {name}" for name, places in classes.items() if places[1:]]
    graph = import_graph(trees)
    circles = import_circles(graph)
    return [
        *size_figures(trees, graph),
        Figure("lines wider than 100 columns", len(wide), 0, wide),
        Figure("fmt: skip", len(skips), 0, skips),
        Figure(
            "lines of a function, most",
            max(long)[0] if long else 0,
            120,
            [place for _, place in long[:10]],
        ),
        Figure("calls with over 6 arguments by position", len(calls), 0, [c for _, c in calls]),
        Figure("one-letter names", len(short), 0, short),
        Figure("class names used twice", len(twice), 0, twice),
        Figure("bare participles and pronouns as names", len(bare), 0, bare),
        Figure("import circles", len(circles), 0, circles),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--where", action="store_true", help="name the places beyond a limit")
    asked = parser.parse_args()
    gc.disable()  # it would search all trees again and again
    beyond = False
    for figure in [*figures(), *prose_figures()]:
        over = figure.value > figure.limit
        beyond |= over
        mark = "beyond" if over else "ok"
        print(f"{figure.name:<42}{figure.value:>8g}   at most {figure.limit:g}   {mark}")
        if asked.where and over:
            print("\n".join(f"    {place}" for place in figure.places))
    sys.exit(beyond)


if __name__ == "__main__":
    main()
