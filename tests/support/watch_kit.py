"""A run directory as `asyncrl watch` finds it, and the page's routes over it."""

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from asyncrl.config import load
from asyncrl.viewer.app import WatchApp

MARKUP = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\x1b[2J"


def metric_row(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "t": step * 0.5, "reward/mean": 0.5 + step / 1000, **more}


SAMPLE = (Path(__file__).parents[1] / "data" / "token_sample.json").read_text()


def sample_row(batch: int, sample: int = 0, reward: float = 1.0, **more: Any) -> dict[str, Any]:
    """A row of token_samples.jsonl with three tokens, the last two sampled by a later version."""
    row: dict[str, Any] = json.loads(SAMPLE.replace("MARKUP", json.dumps(MARKUP)[1:-1]))
    row |= {"batch": batch, "ticket": batch * 4, "sample": sample, "reward": reward}
    return row | {"rules": ["best"] if reward else ["worst"], **more}


def write_lines(path: Path, rows: list[dict[str, Any]], end: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "first"
    (path / "logs" / "attempt_1").mkdir(parents=True)
    least = {"model": {"path": "m"}, "task": {"name": "sort"}}
    (path / "config.toml").write_text(load.dump(load.build(least)))
    (path / "run_id").write_text("abc")
    (path / "logs" / "attempt_1" / "learner.log").write_text(f"starting\n{MARKUP}\n")
    write_lines(path / "metrics.jsonl", [metric_row(step) for step in range(30)])
    write_lines(path / "token_samples.jsonl", [sample_row(n, n, float(n % 2)) for n in range(4)])
    write_lines(path / "trained.jsonl", [{"batch": n, "lags": {"0": 1, "2": 3}} for n in range(4)])
    return path


@pytest.fixture
def client(run_dir: Path) -> TestClient:
    return TestClient(WatchApp([run_dir.parent]).build_application())


QUESTIONS = (
    *("runs", "overview", "processes", "ledger", "config", "logs", "sample?number=0"),
    *("plots?page=staleness", "plots?page=learner", "samples?reward=0..&lag=0..&sort=lag"),
)
ABSENT = object()


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value; of a list, the first entry."""
    for key in list(value) if isinstance(value, dict) else range(min(len(value), 1)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from list_places(value[key])


def list_damaged(path: Path) -> Iterator[bytes]:
    """The content of a file with another value, or none, in one place after the other."""
    first, *rest = path.read_bytes().splitlines(keepends=True)
    if path.suffix == ".toml":
        lines = [first, *rest]
        for number in range(0, len(lines), 1 + len(lines) // 12):
            yield b"".join([*lines[:number], *lines[number + 1 :]])
            yield b"".join([*lines[:number], b"staleness = 1\n", *lines[number + 1 :]])
        return
    row = json.loads(first)
    values = cycle((None, ABSENT, "x", [], ABSENT, {}, -1, 2**70, "\ud800"))
    for holder, key in list(list_places(row)):
        old, new = holder[key], next(values)
        holder[key] = new
        if new is ABSENT:
            del holder[key]
        yield b"".join([json.dumps(row).encode() + b"\n", *rest])
        if isinstance(holder, dict) or new is not ABSENT:
            holder[key] = old
        else:
            holder.insert(key, old)


def ask_about_damage(place: Path, path: Path) -> list[str]:
    """Ask the page everything about each damage of a file; the errors that it answers with."""
    whole, errors = path.read_bytes(), []
    for damaged in list_damaged(path):
        path.write_bytes(damaged)
        client = TestClient(WatchApp([place], expected=True).build_application())
        for question in QUESTIONS:
            reply = client.get(f"/api/{question}")
            assert reply.status_code == 200 or (reply.status_code == 400 and question != "runs")
            errors += [reply.json()["error"]] if reply.status_code == 400 else []
    path.write_bytes(whole)
    return errors
