from __future__ import annotations

import gc
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lib import prose
from process_kit import ROOT, load_program

shape = load_program(ROOT / "benchmarks" / "shape.py")


def test_the_product_is_within_every_limit() -> None:
    gc.disable()  # it would search all trees again and again
    try:
        figures = [*shape.figures(), *shape.prose_figures()]
    finally:
        gc.enable()
    found = {figure.name: (figure.value, figure.limit, figure.places) for figure in figures}
    assert {name: each for name, each in found.items() if each[0] > each[1]} == {}
    assert len(found) == 21


LONG = "\n".join(["def long():", *["    pass"] * 121])
FILES = {
    "lines of tables and pages' code": "part/table.toml",
    "lines of benchmarks": "benchmarks/run.py",
    "lines of tests, % of the product": "tests/test_one.py",
}
BEYOND = {
    **dict.fromkeys(FILES, "value = 1\n"),
    "lines wider than 100 columns": "value = '" + "a" * 100 + "'",
    "fmt: skip": "value = 1  # fmt: skip",
    "code tokens": "'''Text.'''\nvalue = [1, 2]",
    "lines": "# text\n" * 9,
    "modules with one importer": "import part.two",
    "one-call helpers": "def read():\n    '''Text.'''\n    pass\n\n\nread()",
    "words of pages outside the log": "",
    "lines of a function, most": LONG,
    "calls with over 6 arguments by position": "print(\n" + "1,\n" * 7 + ")",
    "one-letter names": "def f(x):\n    pass",
    "class names used twice": "class Row:\n    pass\n\n\nclass Row:\n    pass",
    "bare participles and pronouns as names": "def _held():\n    pass",
}
LIMITS = {
    "code tokens": 6,
    "lines": 8,
    **dict.fromkeys(("modules with one importer", "one-call helpers"), 0),
    **dict.fromkeys(FILES, 3),
    "lines of tests, % of the product": 199,
    "words of pages outside the log": 2,
}


def test_docstrings_and_comments_are_no_code_tokens() -> None:
    code = "'''Text.'''\ndef read():\n    '''Text.'''\n    return 1  # text\n"
    assert shape.count_tokens(code, shape.ast.parse(code)) == 7  # def read ( ) : return 1


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_beyond_a_limit_is_found(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.py").write_text(BEYOND[name])
    (tmp_path / "part" / "two.py").write_text("")
    limits = dict.fromkeys(shape.LIMITS, 1000) | {name: LIMITS.get(name, 1000)}
    monkeypatch.setattr(shape, "LIMITS", {key: limits[key] for key in shape.LIMITS})
    if name in FILES:
        (tmp_path / FILES[name]).parent.mkdir(exist_ok=True)
        (tmp_path / FILES[name]).write_text("value = 1\n" * 4)
    if name == "words of pages outside the log":
        (tmp_path / "docs" / "log").mkdir(parents=True)
        for page in ("glossary", "metrics", "log/lag"):  # the second is generated
            (tmp_path / "docs" / f"{page}.md").write_text("# Two words\n")
    monkeypatch.setattr(shape, "ROOT", tmp_path)
    monkeypatch.setattr(shape, "PRODUCT", ("part",))
    if name == "one-letter names":
        (tmp_path / "part" / "two.py").write_text("value = [x for x in (1, 2)]")
    monkeypatch.setattr(shape, "MATHEMATICS", ())
    beyond = [figure for figure in shape.figures() if figure.value > figure.limit]
    assert [figure.name for figure in beyond] == [name]
    if name == "words of pages outside the log":
        assert beyond[0].places == ["docs/glossary.md: 3"]
    elif name not in ("lines", "lines of benchmarks", "lines of tests, % of the product"):
        assert beyond[0].places[0].startswith("part")


def test_import_circles_are_found_in_functions_and_types(tmp_path: Path, monkeypatch: Any) -> None:
    part = tmp_path / "part"
    part.mkdir()
    (part / "__init__.py").write_text("")
    (part / "one.py").write_text("from part import two\nimport part.four")
    (part / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from part.three import Three"
    )
    (part / "three.py").write_text("def read():\n    from part.one import two")
    (part / "four.py").write_text("import part.five")
    (part / "five.py").write_text("import ast")
    monkeypatch.setattr(shape, "ROOT", tmp_path)
    monkeypatch.setattr(shape, "PRODUCT", ("part",))
    (figure,) = (figure for figure in shape.figures() if figure.name == "import circles")
    assert figure.places == [
        "part/one.py:1 imports part.two; part/three.py:2 imports part.one; "
        "part/two.py:3 imports part.three"
    ]
    (part / "five.py").write_text("from part import four")
    (figure,) = (figure for figure in shape.figures() if figure.name == "import circles")
    assert figure.value == 2 and figure.value > figure.limit


SENTENCES = [
    ("Whoever comes first makes the directory.", True),
    ("Nothing here. Who reads it first wins.", True),
    ("Who reads it?", False),
    ("A session is no lease.", True),
    ("There is no lease, and a lease is no longer held.", False),
    ("A limit; a floor; a ceiling.", True),
    ("A limit; a floor.", False),
    ("`whoever` is code, `nobody` too.", False),
]


@pytest.mark.parametrize(("sentence", "found"), SENTENCES)
def test_dialect_is_found_in_docstrings_comments_and_pages(
    sentence: str, found: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    for name, text in {
        "comment.py": f"value = 1\n# {sentence}\n",
        "docstring.py": f"def read():\n    '''{sentence}'''\n",
        "page.md": f"# Title\n\n{sentence}\n\n```sh\nwhoever\n```\n",
    }.items():
        (tmp_path / name).write_text(text)
        places = prose.dialect(tmp_path / name)
        assert bool(places) == found, (name, places)
        assert all(place.startswith(name + ":") for place in places)
    assert prose.dialect(tmp_path / "page.md") == [] or "page.md:3:" in places[0]


def test_wide_lines_and_split_literals_are_found(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    page, code = tmp_path / "page.md", tmp_path / "code.py"
    wide = "word " * 21
    page.write_text(f"{wide}\n| {wide} |\n```\n{wide}\n```\nfine\n{wide}\n")
    assert prose.wide_lines(page) == ["page.md:1", "page.md:7"]
    long = "x" * 60
    code.write_text(f'a = ("one " "two")\nb = (\n    "{long}"\n    "{long}"\n)\nc = "one"\n')
    assert prose.split_literals(code) == ["code.py:1"]


def test_commit_subjects_are_read_from_the_history(tmp_path: Path, monkeypatch: Any) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True)

    git("init", "--quiet")
    for subject in ("first", "x" * 73, "y" * 72):
        git("commit", "--quiet", "--allow-empty", "-m", subject)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "FIRST_COMMIT", "HEAD~2")
    assert [line.split(" ", 1)[1] for line in prose.long_subjects()] == ["x" * 73]
