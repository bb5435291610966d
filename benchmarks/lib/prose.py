"""Find prose that reads like a translation, split string literals and long commit subjects.

`benchmarks/shape.py` counts what these functions list.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 100
SUBJECT_COLUMNS = 72
FIRST_COMMIT = "2f9d592"  # older subjects cannot be changed any more
GENERATED = tuple(f"docs/{name}.md" for name in ("configuration", "index", "metrics"))

# Sentences with these words or shapes hide the subject of the sentence.
DIALECT = re.compile(
    r"\b(?i:whoever|nobody|somebody|as ever|to be had|one's own|set aside|behaviour)\b"
    r"|(?:^|[.:;] )(?:Who|Whose|Whatever|What)\b(?![^.?]*\?)"
    r"|\b(?<![Tt]here )(?:is|are|was|were) no "
    r"(?!longer\b|more than\b|fewer than\b|less than\b|later\b|earlier\b|older\b|larger\b)\w+"
)
EXAMPLE = re.compile(r"^ *>>>.*(?:\n *\S.*)*", re.MULTILINE)  # a doctest with its output
SHAPES = re.compile(r"^ *\w[\w, ]*: .*\[.*$", re.MULTILINE)  # an argument with its shape
ITEM = re.compile(r"\n *(?=- |\w+: )")  # a list item or an argument begins
CHAIN = re.compile(r"[^.;]*;[^.;]*;")  # two semicolons in one sentence


def without_code(text: str) -> str:
    """Replace code blocks by blank lines, and inline code and quotations by a letter."""
    blanked = re.sub(r"```.*?```", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    blanked = re.sub(r"<!--.*?-->", lambda m: "\n" * m.group().count("\n"), blanked, flags=re.S)
    return re.sub(r'`[^`]*`|"[^"\n]{1,200}"', "X", blanked)


@functools.lru_cache(maxsize=1)
def tokens(source: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source).readline))


def comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of each run of comment lines."""
    first, last, words = 0, -1, []
    for token in tokens(source):
        if token.type != tokenize.COMMENT:
            continue
        trailing = token.line[: token.start[1]].strip() != ""
        if token.start[0] != last + 1 or trailing:
            if words:
                yield first, " ".join(words)
            first, words = token.start[0], []
        if "noqa" not in token.string:
            words.append(token.string.lstrip("# "))
        last = -1 if trailing else token.start[0]
    if words:
        yield first, " ".join(words)


def python_prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring and comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield (
                    getattr(node, "lineno", 1),
                    ITEM.sub(". ", EXAMPLE.sub("", SHAPES.sub("", text))),
                )
    yield from comment_blocks(source)


def page_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every paragraph of a Markdown page."""
    line = 1
    without_tables = re.sub(r"^\|.*$", "", without_code(text), flags=re.MULTILINE)
    for paragraph in without_tables.split("\n\n"):
        yield line + len(paragraph) - len(paragraph.lstrip("\n")), paragraph
        line += paragraph.count("\n") + 2


def dialect(path: Path) -> list[str]:
    """List the places of `path` that match the dialect, as "path:line: words"."""
    text = path.read_text()
    prose = page_prose(text) if path.suffix == ".md" else python_prose(text)
    places = []
    for line, raw in prose:
        sentence = " ".join(without_code(raw).split())
        for match in [*DIALECT.finditer(sentence), *CHAIN.finditer(sentence)]:
            words = sentence[max(0, match.start() - 30) : match.end() + 40]
            places.append(f"{path.relative_to(ROOT)}:{line}: {words[:120]}")
    return places


def wide_lines(page: Path) -> list[str]:
    """List the lines of a page beyond 100 columns, except code, tables and long links."""
    places, in_code = [], False
    for number, line in enumerate(page.read_text().split("\n"), 1):
        in_code ^= line.lstrip().startswith("```")
        exempt = (
            in_code
            or line.lstrip().startswith(("|", "```", "<!--", "![", "["))
            or (" " not in line.strip())
        )
        if len(line) > COLUMNS and not exempt:
            places.append(f"{page.relative_to(ROOT)}:{number}")
    return places


def split_literals(path: Path) -> list[str]:
    """List adjacent string literals that would fit on one line as one literal."""
    places: list[str] = []
    run: list[tokenize.TokenInfo] = []

    def close() -> None:
        if len(run) > 1 and not any(t.string.endswith(('"""', "'''")) for t in run):
            prefixes = {t.string[: t.string.index(t.string[-1])].lower() for t in run}
            inner = sum(len(t.string.lstrip("fFrRbBuU")) - 2 for t in run)
            if prefixes <= {"", "f"} and run[0].start[1] + inner + 4 <= COLUMNS:
                places.append(f"{path.relative_to(ROOT)}:{run[0].start[0]}")
        run.clear()

    for token in tokens(path.read_text()):
        if token.type == tokenize.STRING:
            run.append(token)
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            close()
    return places


def long_subjects() -> list[str]:
    """List the subjects of commits since FIRST_COMMIT that are longer than 72 characters."""
    argv = ["git", "log", "--no-merges", "--format=%h %s", f"{FIRST_COMMIT}..HEAD"]
    log = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    subjects = [line for line in log.stdout.splitlines() if log.returncode == 0]
    return [s for s in subjects if len(s.partition(" ")[2]) > SUBJECT_COLUMNS]
