"""A run of sessions with keys: a generator of another machine joins it and takes over its calls,
and the run is scaled."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from process_kit import ENV, RUN_SEED
from several_hosts_kit import free_address, other_machine

from asyncrl.contract import messages as m
from asyncrl.contract.messages import RunStatus
from asyncrl.models.policy import build_model
from asyncrl.records import process_log
from asyncrl.supervise import live
from asyncrl.tasks.calc import CalcTask
from asyncrl.transport.keys import is_allowed, make_keys

pytestmark = pytest.mark.slow

WAIT_S = 1800.0


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
    here, there, keys = tmp_path / "here", tmp_path / "there", tmp_path / "keys"
    here.mkdir()
    there.mkdir()
    make_keys(keys, 3)
    other_machine(keys, there / "copied", "generator-2")
    build_model(here / "m", CalcTask.symbols, hidden=32, layers=1)
    address = free_address()
    sets = [
        "name='r'",
        f"seed={RUN_SEED}",
        "model.path='m'",
        "model.warm_start=false",
        "learner.steps=100000",
        "learner.groups=2",
        "learner.group_size=4",
        "evaluation.every=0",
        "evaluation.final_prompts=4",
        f"wires.address={address!r}",
        f"wires.weights_address={free_address()!r}",
        f"wires.gateway_address={free_address()!r}",
        f"wires.curve_dir={str(keys)!r}",
        "wires.lease_s=2",
        "wires.connect_s=600",
        "watchdog.floor_s=3600.0",
        "watchdog.startup_s=3600.0",
        "agent.step_s=3600.0",
        "weights.transport='tcp'",
    ]
    command = [sys.executable, "-m", "asyncrl.cli"]

    def start(name: str, where: Path, *words: str) -> subprocess.Popen[str]:
        log = (tmp_path / f"{name}.log").open("w")
        return subprocess.Popen([*command, *words], cwd=where, env=ENV, stderr=log, text=True)

    def log(name: str) -> str:
        return (tmp_path / f"{name}.log").read_text()

    def status() -> RunStatus:
        until = time.monotonic() + WAIT_S
        while (found := live.request_status(address, str(keys), 5.0)) is None:
            assert time.monotonic() < until and run.poll() is None, log("run")
        return found

    def wait_for(what: Callable[[], object]) -> None:
        until = time.monotonic() + WAIT_S
        while not what():
            assert time.monotonic() < until and run.poll() is None, log("run") + log("join")
            time.sleep(0.05)

    def scale(number: int) -> int:
        words = ["scale", str(here / "runs" / "r"), str(number), "--json", "--wait", f"{WAIT_S}"]
        ended = subprocess.run([*command, *words], cwd=there, env=ENV, capture_output=True)
        return int(json.loads(ended.stdout)["generators"])

    run = start("run", here, "run", "calc", *[word for each in sets for word in ("--set", each)])
    cache = ["--cache", str(there / "cache")]
    words = ("join", address, "--keys", "copied", "--wait", f"{WAIT_S}", *cache)
    joined = start("join", there, *words)
    try:
        both = {"generator-0", "generator-2"}
        wait_for(lambda: joined.poll() is None and both <= status().peers.keys())
        rows = process_log.read_events(here / "runs" / "r")
        alone = next(row["pid"] for row in rows if row["name"] == "generator-0")
        os.kill(alone, signal.SIGSTOP)
        before = status().committed
        # more batches than the stopped one can have sampled ahead: the other machine's
        wait_for(lambda: status().committed >= before + 6)
        os.kill(alone, signal.SIGCONT)
        assert scale(2) == 2
        wait_for(lambda: "generator-1" in status().peers)
        joined.send_signal(signal.SIGINT)
        assert joined.wait(WAIT_S) == 130
        assert scale(1) == 1
        wait_for(lambda: "generator-1 has left" in log("run"))
        run.send_signal(signal.SIGINT)
        assert run.wait(WAIT_S) == 130, log("run")
    finally:
        for process in (joined, run):
            process.kill()
            process.wait()
    drawn = re.search(r"generator-2: ended after (\d+) tokens", log("join"))
    assert drawn and int(drawn[1]) > 0
    ledger = json.loads((here / "runs" / "r" / "summary.json").read_text())["ledger"]
    assert ledger["generated"] == sum(ledger.values()) - ledger["generated"] > 0
