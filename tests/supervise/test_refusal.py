from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from asyncrl.contract import refusal
from asyncrl.contract.errors import AsyncrlError, BadMessage, ConfigError


class RankEnded(AsyncrlError):
    exit_code = 137


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    monkeypatch.setenv(refusal.VARIABLE, str(writer))
    refusal.take_pipe()
    yield reader, writer
    refusal._pipes.clear()
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:
            pass


def test_a_refusal_arrives_once_with_its_exit_code(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    assert refusal.VARIABLE not in os.environ and not os.get_inheritable(writer)
    assert refusal.read_refusal(reader) is None, "nothing was sent"
    refusal.send_refusal(RankEnded("killed"))
    assert refusal.read_refusal(reader) is None, "the crash of another process"
    refusal.send_refusal(ConfigError("no such key \u00e9"))
    refusal.send_refusal(BadMessage("a second one"))
    error = refusal.read_refusal(reader)
    assert error is not None and str(error) == "no such key \u00e9"
    assert error.exit_code == ConfigError.exit_code
    assert refusal.read_refusal(reader) is None


def test_a_long_refusal_is_cut_and_still_read(pipe: tuple[int, int]) -> None:
    refusal.send_refusal(ConfigError("\u00e9" * 100_000))
    error = refusal.read_refusal(pipe[0])
    assert error is not None and str(error) == "\u00e9" * 4096


def test_without_a_supervisor_nothing_is_sent(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    refusal.send_refusal(ConfigError("to nobody"))
    assert refusal._pipes == []
    refusal.take_pipe()
    assert refusal._pipes == [], "a child of the child has none"


def test_other_bytes_are_no_refusal(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"Segmentation fault")
    assert refusal.read_refusal(reader) is None
