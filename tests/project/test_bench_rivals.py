"""The rivals of benchmarks/learner.py and engine.py: the plain steps do what the learner does, and
generate gets its best way."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_rivals_kit import program

from actors.generator import Generator
from actors.ticket_holder import TicketHolder
from asyncrl.config.tree import TaskConfig
from asyncrl.contract import messages as m
from asyncrl.models.policy import build_model
from asyncrl.tasks import get_task
from asyncrl.transport import sockets


def test_every_plain_step_has_the_learners_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = program("learner", monkeypatch)
    build_model(tmp_path, "0123456789abcdefghij", hidden=32, layers=2, heads=2)
    batch = bench.batch()
    ours = bench.make("ours", tmp_path)
    ours.train(batch)
    expected = bench.gradient(ours)
    for way in ("64 rows, sdpa", "32 rows, eager"):
        plain = bench.make(way, tmp_path)
        plain.train(batch)
        error = (bench.gradient(plain) - expected).norm() / expected.norm()
        assert float(error) < 1e-4, way
    strong = bench.make("strong", tmp_path)
    strong.optimizer.zero_grad = lambda **_: None  # so that the step leaves its gradient
    strong.train(batch)
    # in another order of parameters: the norms of all, and the embedding itself
    whole = torch.cat([w.grad.flatten() for w in strong.policy.parameters()])
    torch.testing.assert_close(whole.norm(), expected.norm(), rtol=1e-4, atol=0)
    embedding = ours.model.hf.model.embed_tokens.weight.grad
    torch.testing.assert_close(strong.policy.embed.grad, embedding, rtol=1e-3, atol=1e-6)


def test_generate_is_measured_in_the_way_that_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of attention, cache and rows runs once on the first few answers; the best on all."""
    bench = program("engine", monkeypatch)
    ran: list[Any] = []
    clock = [0.0]
    seconds = {("eager", "static", 256): 1.0, ("sdpa", None, 64): 2.0}

    def fake(model: str, batch: int, prompts: Any, lens: Any, cache: str | None = None) -> Any:
        def run() -> None:
            ran.append((model, cache, batch, len(lens)))
            clock[0] += seconds.get((model, cache, batch), 5.0)

        return run

    for name in ("by_generate", "by_loop"):
        monkeypatch.setattr(bench, name, fake)
    monkeypatch.setattr(bench.time, "process_time", lambda: clock[0])
    models: Any = {"sdpa": "sdpa", "eager": "eager"}
    found = bench.rivals(models, [64, 256], torch.zeros(100, 3), np.ones(100), 40)
    assert list(found) == ["generate, eager, static cache, 256 rows", "plain loop, sdpa, 64 rows"]
    assert len(ran) == len(set(ran)) == 8 + 4 and {n for *_, n in ran} == {40}
    ran.clear()
    for run in found.values():
        run()
    assert ran == [("eager", "static", 256, 100), ("sdpa", None, 64, 100)]


def test_the_stand_in_of_a_buffer_has_all_that_a_generator_asks_of_its_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = program("vllm_engine", monkeypatch)
    classes = (Generator, TicketHolder, sockets.BufferPeer)
    source = "".join(inspect.getsource(kind) for kind in classes)
    asked = set(re.findall(r"self\.socket\.(\w+)\(", source))
    assert {"send", "recv", "find_moved_buffer"} <= asked
    missing = [name for name in sorted(asked) if not callable(getattr(bench.Buffer, name, None))]
    assert not missing
    task = get_task(TaskConfig(name="sort"))
    stand_in = bench.Buffer(task, 8)
    assert stand_in.recv(0.0) is None and stand_in.find_moved_buffer(1e9) is False
    stand_in.want(bench.GROUP)
    stand_in.send(m.TicketRequest("g", 1, 1, bench.GROUP, None))
    tickets = stand_in.recv(0.0)  # decoded as a generator would
    assert [t.samples for t in tickets.tickets] == [list(range(bench.GROUP))]
    tokens = np.zeros(8, "<i4").tobytes()
    sample = m.Trajectory(0, 0, 1, tokens, tokens, tokens, b"\1" * 8, [], 1.0, {}, "length", 1.0)
    stand_in.send(m.Delivery("g", 1, 1, [sample]))
    assert stand_in.recv(0.0).acks == [(0, 0, 1, "accepted")]
