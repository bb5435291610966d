"""A pytest session that is collected once; its forks run tests with one function changed.

A fork of the session needs no import and no collection, which take longer than most tests."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from lib.results_file import ROOT


class CollectedSession:
    """A pytest plugin: `act` is called in place of running the collected tests."""

    def __init__(self, act: Callable[[CollectedSession], None]) -> None:
        self.act = act
        self.items: dict[str, Any] = {}
        self.failed: set[str] = set()  # test files that cannot be collected

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid.split("::")[0])

    def pytest_runtestloop(self, session: Any) -> bool:
        self.config = session.config
        self.items = {item.nodeid: item for item in session.items}
        self.act(self)
        return True

    def of_file(self, test_file: str) -> list[str]:
        """Return the ids of the collected tests of a file."""
        return [name for name in self.items if name.split("::")[0] == test_file]

    def run(
        self,
        names: Sequence[str],
        directory: Path,
        plugins: Sequence[Any],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """In a fork: run tests in this order until `is_over`."""
        manager = self.config.pluginmanager
        capture = manager.getplugin("capturemanager")
        # its files would be shared with the other forks
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        folders = self.config._tmp_path_factory  # it has no public setter for a fork's directory
        folders._given_basetemp, folders._basetemp = directory, None
        for plugin in plugins:
            manager.register(plugin)
        items = [self.items[name] for name in names if name in self.items]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if is_over():
                return


def module_name(path: str) -> str:
    """Return the name under which a file is imported.

    >>> module_name("actors/rewards.py"), module_name("actors/scorers/__init__.py")
    ('actors.rewards', 'actors.scorers')
    """
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def change_function(path: str, old: str, new: str, first: int, last: int) -> bool:
    """Give a function of an imported module the code that it has in another text of its file.

    first, last: the lines of `old` that differ.  False where this is not possible: the lines
    belong to no function's body, or the function cannot be found."""
    module = sys.modules.get(module_name(path))
    place = _function_around(ast.parse(old), first, last)
    if module is None or place is None:
        return False
    chain, number = place
    codes = [_codes_of(text, path, chain) for text in (old, new)]
    if len(codes[0]) != len(codes[1]) or number >= len(codes[0]):
        return False
    before, after = codes[0][number], codes[1][number]
    for function in _functions_of(module, chain):
        same = function.__code__.co_firstlineno == before.co_firstlineno
        if same and function.__code__.co_qualname == before.co_qualname:
            if function.__code__.co_freevars != after.co_freevars:
                return False
            function.__code__ = after
            return True
    return False


def _function_around(tree: ast.Module, first: int, last: int) -> tuple[list[str], int] | None:
    """Return the names down to the outermost function with these lines in its body, and which
    function of that name it is."""
    chain: list[str] = []
    body: Sequence[ast.stmt] = tree.body
    while True:
        inside = [x for x in body if x.lineno <= first and last <= (x.end_lineno or 0)]
        if len(inside) != 1 or not isinstance(
            inside[0], ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            return None
        found = inside[0]
        chain.append(found.name)
        if not isinstance(found, ast.ClassDef):
            named = [x for x in body if getattr(x, "name", None) == found.name]
            return (chain, named.index(found)) if found.body[0].lineno <= first else None
        body = found.body


def _codes_of(text: str, path: str, chain: Sequence[str]) -> list[CodeType]:
    """Return the compiled functions of these names, in the order of the text."""
    codes = [compile(text, str(ROOT / path), "exec", dont_inherit=True)]
    for name in chain:
        inner = [x for code in codes for x in code.co_consts if isinstance(x, CodeType)]
        codes = [code for code in inner if code.co_name == name]
    return codes


def _functions_of(module: Any, chain: Sequence[str]) -> Iterator[FunctionType]:
    """Yield the functions behind a name: without decorators, of a property all three."""
    holder = module
    for name in chain[:-1]:
        holder = vars(holder).get(name)
        if holder is None:
            return
    waiting = [vars(holder).get(chain[-1])]
    while waiting:
        found = waiting.pop()
        if isinstance(found, FunctionType):
            yield found
        parts = ("__wrapped__", "__func__", "func", "fget", "fset", "fdel")
        waiting += [x for part in parts if (x := getattr(found, part, None)) is not None]
