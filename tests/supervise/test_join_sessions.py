"""A run of sessions with keys: a generator of another machine joins it and takes over its calls,
and the run is scaled."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_kit import RUN_SEED
from several_hosts_kit import JoinedRun, free_address

from asyncrl.contract import messages as m
from asyncrl.models.policy import build_model
from asyncrl.tasks.calc import CalcTask
from asyncrl.transport.keys import is_allowed

pytestmark = pytest.mark.slow


def test_a_gateways_key_and_a_generators_key_let_each_speak_for_itself() -> None:
    report = m.ServingReport(m.PROTOCOL, "r", "generator-1", 7, 8, [], 0)
    result = m.CallResult(5, b"", b"", [], "stop")
    assert is_allowed("generator-1", report) and is_allowed("generator-1", result)
    assert not is_allowed("generator-2", report)
    hello = m.GeneratorHello(m.PROTOCOL, "r", "gateway-0", 7, 8, "host", 9)
    assert is_allowed("gateway-0", hello) and not is_allowed("gateway-1", hello)
    assert not is_allowed("generator-0", hello)
    for name in ("gateway-0", "learner", "viewer"):
        assert not is_allowed(name, result) and not is_allowed(name, report)


def test_a_generator_of_another_machine_serves_sessions(tmp_path: Path) -> None:
    joined = JoinedRun(tmp_path)
    build_model(joined.here / "m", CalcTask.symbols, hidden=32, layers=1)
    sets = [
        f"seed={RUN_SEED}",
        "model.path='m'",
        "model.warm_start=false",
        f"wires.gateway_address={free_address()!r}",
        "agent.step_s=3600.0",
    ]
    joined.play("calc", sets, batches=6)
