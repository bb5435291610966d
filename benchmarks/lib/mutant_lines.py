"""Which tests run which lines of a source file, after the file has changed."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence


def functions_of(text: str) -> dict[str, tuple[int, int]]:
    """Return the first and last line of every function and method by its name, A.f as `A.f`."""
    spans: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                old = spans.get(above + child.name, (first, 0))  # a property has several
                spans[above + child.name] = (old[0], child.end_lineno or first)
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{above}{child.name}.")
            else:
                visit(child, above)

    visit(ast.parse(text), "")
    return spans


def lines_by_function(
    lines: Mapping[str, Sequence[str]],
    old: Mapping[str, Sequence[int]],
    new: Mapping[str, Sequence[int]],
) -> dict[str, list[str]]:
    """Return which tests run which lines of a file that has changed since it was measured.

    lines: of the old text, the tests that run each line.  old, new: its functions' lines.  A test
    counts for all lines of a function that it ran, and every test for a function that is new."""
    every = sorted({test for tests in lines.values() for test in tests})
    moved: dict[str, list[str]] = {}
    for name, (first, last) in new.items():
        tests = every
        if name in old:
            begin, end = old[name]
            ran = [lines[n] for n in map(str, range(begin, end + 1)) if n in lines]
            tests = sorted({test for names in ran for test in names})
        if tests:
            moved |= dict.fromkeys(map(str, range(first, last + 1)), tests)
    return moved
