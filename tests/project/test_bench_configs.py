"""Every config that a program in benchmarks/ builds of its arms loads: none names a key that
nothing reads."""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_rivals_kit import program
from process_kit import run_command

from actors.generator import Generator
from actors.ticket_holder import TicketHolder
from asyncrl.config import load
from asyncrl.config.tree import TaskConfig
from asyncrl.contract import messages as m
from asyncrl.contract.errors import ConfigError
from asyncrl.models.policy import build_model
from asyncrl.tasks import get_task
from asyncrl.transport import sockets

ROOT = Path(__file__).resolve().parents[2]
Built = Iterator[tuple[str, str, list[str]]]  # the arm, its config's name, its --set items


def arms_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Built:
    bench = program(name, monkeypatch)
    if name == "kl_placement":
        for place in (*bench.PLACES, *bench.LATE, "distillation", "distillation alone"):
            for source in ("demo", "rle"):
                yield place, source, bench.sets(place, "0.1")
    elif name == "mismatch":
        for engine, items in bench.ENGINES.items():
            for arm, more in bench.ARMS.items():
                yield f"{engine}, {arm}", "rle", [*items, *more]
    elif name == "natural_lag":
        for part, arms in bench.PARTS.items():
            for source, _ in bench.tasks_of(part).values():
                for arm, items in arms.items():
                    yield arm, source, items
    elif name == "high_lag":
        for source, _ in bench.TASKS.values():
            for arm, items in bench.ARMS.items():
                yield arm, source, items
    elif name == "losses":
        for method in bench.methods.FOR_OLD_SAMPLES:
            yield method, "rle", [f"method={method}"]
        for arm, items in bench.MORE.items():
            yield arm, "rle", ["method=ppo", *items]
    elif name == "lag_grid":
        for source, rate in bench.TASKS.values():
            for arm, items in bench.corrections(rate).items():
                yield arm, source, items
    elif name == "trust_regions":
        for arm, (_, items) in bench.ARMS.items():
            yield arm, "rle", ["learner.minibatches=4", *items]
    else:
        for arm, (_, items) in bench.ARMS.items():
            yield arm, "demo", items


@pytest.mark.parametrize(
    "name",
    [
        "high_lag",
        "kl_placement",
        "lag_grid",
        "losses",
        "mismatch",
        "natural_lag",
        "orders",
        "trust_regions",
    ],
)
def test_every_arm_is_a_config(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, loaded = [], set()
    for arm, source, items in arms_of(name, monkeypatch):
        try:
            made = load.load(ROOT / "configs" / f"{source}.toml", items)
            loaded.add((source, load.dump(made)))
        except ConfigError as e:
            refused.append(f"{source}, {arm}: {e}")
    assert not refused, "\n".join(refused)
    assert len(loaded) > 2, "the arms are the same config"


def test_every_part_is_started_until_it_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = program("startup", monkeypatch)
    monkeypatch.setattr(bench, "READY_S", 1800.0)
    monkeypatch.setattr(sys, "argv", ["startup.py", "--quick", "--json"])
    bench.main()
    found = json.loads(capsys.readouterr().out)
    assert found["started"].keys() == {"rival", "import torch", *bench.GOALS}
    assert all(row["cpu_s"] > 0 for row in found["started"].values())
    assert [g["rounds"] for g in found["goals"]] == [1] * len(bench.GOALS)


def test_plain_steps_have_the_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_buffers_stand_in_has_all_that_generators_ask(
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


MODES = ("memory", "process", "disk")


def test_the_cpu_of_a_batch_is_judged_against_the_bare_store_of_the_same_run() -> None:
    done = run_command([sys.executable, "benchmarks/buffer.py", "--quick", "--json"]).check()
    found = json.loads(done.out.splitlines()[-1])
    goals = {goal["figure"]: goal for goal in found["goals"]}
    assert set(found["times"]) == {*MODES, "queue", "bare store"} and found["bare_store_ms"] > 0
    for mode in MODES:
        goal = goals[f"{mode}: CPU of a batch over the bare store's, last third"]
        assert goal["goal"] == "<= 5" and goal["met"] == (goal["value"] <= 5)
        last_ms = found["cpu"][mode]["last_ms"]
        assert goal["value"] == pytest.approx(last_ms / found["bare_store_ms"], rel=0.02)
        assert goals[f"{mode}: samples/s over the socket"]["of_queue"] > 0
