"""benchmarks/ray_run.py: what it finds wrong, and whose host it takes away.  The run itself is
tests/supervise/test_ray.py's."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_kit import ROOT, load_program


@pytest.fixture(scope="module")
def bench() -> Any:
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    before = dict(os.environ)
    module = load_program(ROOT / "benchmarks" / "ray_run.py")
    patch.undo()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    return module


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        ({}, ""),
        ({"lags": {"3": 1}}, "lag 3, limit 2"),
        ({"batch": 0}, "trained batches: [0]"),
        ({"tickets": [[1, 2]]}, "4 tickets trained, 3 different"),
        ({"tickets": [[2, 2]]}, "3 tickets trained, 3 different"),
        ({"ledger": {"generated": 9, "trained": 8}}, "does not sum"),
        ({"ledger": {"generated": 0, "trained": 0}}, "does not sum"),
    ],
)
def test_a_run_that_is_wrong_is_found(
    bench: Any, tmp_path: Path, broken: dict[str, Any], word: str
) -> None:
    rows = [
        {"batch": 0, "lags": {"0": 8}, "tickets": [[0, 1]]},
        {"batch": 1, "lags": {"3": 8}, "tickets": [[0, 1]]},  # another life made it again
        {"batch": 1, "lags": {"2": 8}, "tickets": [[2, 3]]},
    ]
    rows[2] |= {name: broken[name] for name in broken if name != "ledger"}
    rows = rows[::2] if "batch" in broken else rows
    ledger = broken.get("ledger", {"generated": 9, "trained": 7, "orphaned": 2})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "trained.jsonl").write_text(text + '{"batch": 2, "half')
    (tmp_path / "summary.json").write_text(json.dumps({"ledger": ledger}))
    found = bench.wrong(tmp_path, 2, 2, 2)
    assert bool(found) == bool(word) and (not word or any(word in each for each in found)), found


def test_the_host_that_is_lost_is_a_generators_and_no_other_parts(
    bench: Any, tmp_path: Path
) -> None:
    nodes = [SimpleNamespace(node_id=name) for name in ("b", "c")]
    done: list[str] = []
    cluster = SimpleNamespace(
        worker_nodes=nodes,
        remove_node=lambda node, allow_graceful: done.append(f"{node.node_id} {allow_graceful}"),
        add_node=lambda **_: done.append("another"),
    )
    lost = bench.Lost(cluster, tmp_path, 2)
    lost.look()
    (tmp_path / "hosts.json").write_text(json.dumps({"nodes": {"0": "b", "1": "head", "2": "c"}}))
    (tmp_path / "trained.jsonl").write_text('{"batch": 0}\n')
    lost.look()
    assert done == [] and not lost.name
    (tmp_path / "trained.jsonl").write_text('{"batch": 0}\n{"batch": 1}\n')
    for _ in range(2):
        lost.look()
    assert done == ["c False", "another"] and (lost.name, lost.at) == ("generator-1", 2)
