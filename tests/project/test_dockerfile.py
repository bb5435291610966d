"""The Dockerfile, read: no container is built here, but what its steps name is there."""

import re
import tomllib

import pytest
from process_kit import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# what the wheel is built of, beside pyproject.toml
SOURCES = ("asyncrl", "actors", "buffer", "learner", "configs", "README.md")


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, its arguments), comments and continuations resolved."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [re.fullmatch(r"([A-Z]+) +(.+)", line) for line in joined.split("\n")]
    assert all(found), joined
    return [(each[1], each[2]) for each in found if each]


STEPS = instructions((ROOT / "Dockerfile").read_text())
RUNS = [words for name, words in STEPS if name == "RUN"]


def arguments(name: str) -> list[str]:
    return [words for each, words in STEPS if each == name]


def test_continuations_and_comments_are_read() -> None:
    assert instructions("# a\nRUN a \\\n  b\nENV X=1\n") == [("RUN", "a    b"), ("ENV", "X=1")]


def test_python_is_one_that_the_package_takes() -> None:
    (image,) = arguments("FROM")
    assert STEPS[0][0] == "FROM" and image == "python:3.11-slim"
    assert PROJECT["requires-python"].startswith(">=3.11")


def test_torch_is_the_version_of_make() -> None:
    pinned = set(re.findall(r"torch==[\d.]+", (ROOT / "Makefile").read_text()))
    (torch,) = {x for run in RUNS for x in re.findall(r"torch==\S+", run)}
    assert pinned == {torch}
    assert RUNS[1].startswith("pip install"), "before the package, which would bring another"


def test_each_variable_is_declared_and_each_extra_exists() -> None:
    defaults = dict(words.split("=", 1) for words in arguments("ARG"))
    assert {name for run in RUNS for name in re.findall(r"\$\{(\w+)\}", run)} == set(defaults)
    extras = [defaults["EXTRAS"]]
    extras += re.findall(r"--build-arg EXTRAS=(\S+)", (ROOT / "Dockerfile").read_text())
    assert len(extras) == 2
    for extra in ",".join(extras).split(","):
        assert extra in PROJECT["optional-dependencies"], extra


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_copied_has_what_the_package_is_built_of(name: str) -> None:
    (copied,) = arguments("COPY")
    source, target = copied.split()
    assert source == "." and any(f'"{target}[' in run and f"rm -rf {target}" in run for run in RUNS)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert (ROOT / name).exists() and name not in ignored


def test_it_starts_the_command_that_the_package_installs() -> None:
    (entry,) = arguments("ENTRYPOINT")
    assert entry.strip('["]') in PROJECT["scripts"]
    (folder,) = arguments("WORKDIR")
    mounted = re.findall(r'-v "\$PWD:(\S+)"', (ROOT / "Dockerfile").read_text())
    assert mounted and set(mounted) == {folder}
