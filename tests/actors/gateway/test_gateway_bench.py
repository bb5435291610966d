"""benchmarks/gateway.py: what it makes of its rounds, who asks and who stands around the gateway,
and a short run of it without vLLM."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from lib.endpoint import asker, stage
from process_kit import ENV, ROOT, load_program, run_command, until

from asyncrl.contract import messages as m


@pytest.fixture(scope="module")
def bench() -> Any:
    """benchmarks/gateway.py, under a name of its own."""
    return load_program(ROOT / "benchmarks" / "gateway.py")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the endpoint that answers at once, in a thread: it goes with this process."""
    file = tmp_path_factory.mktemp("stub") / "url"
    threading.Thread(target=stage.stub, args=(file,), daemon=True).start()
    until(file.exists)
    yield file.read_text()


def test_every_call_is_asked_once_with_all_that_was_said(stub: str) -> None:
    """Five sessions of three calls, two at a time; 32 tokens each."""
    asked = {"url": stub, "sessions": 5, "calls": 3, "at_once": 2, "history": 1000}
    bodies: list[dict[str, Any]] = []
    made = asker.Bench(asked)
    encode, asker.encode = (
        asker.encode,
        lambda said: bodies.append(json.loads(encode(said))) or encode(said),
    )
    try:
        said = made.run()
    finally:
        asker.encode = encode
    assert said["calls"] == len(said["latencies"]) == 15 and said["tokens"] == 15 * 32
    assert said["latencies"] == sorted(said["latencies"]) and said["latencies"][0] > 0.0
    # of each session: system and user, then an answer and a user more for each call
    assert sorted(len(body["messages"]) for body in bodies) == [2] * 5 + [4] * 5 + [6] * 5
    assert all(len(body["messages"][0]["content"]) == 1000 for body in bodies)


def test_an_error_ends_it_with_what_was_said(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = asker.Asker(asker.Bench({"url": stub, "sessions": 1, "calls": 1, "at_once": 1}))
    one.state = "call"
    body = b'{"error": "no"}'
    one.got = bytearray(b"HTTP/1.1 410 Gone\r\nContent-Length: %d\r\n\r\n" % len(body))
    one.socket.close()
    one.socket = type("Once", (), {"recv": lambda self, size: body})()
    with pytest.raises(RuntimeError, match=r"call: 410 .*no"):
        one.read()


def test_the_first_token_tells_the_pause() -> None:
    takes = stage.pauses(0.2)
    assert len(set(takes)) == stage.SYMBOLS and sum(takes) / len(takes) == pytest.approx(0.2)
    assert min(takes) == pytest.approx(0.1) and max(takes) == pytest.approx(0.3)
    how = m.SamplingSettings(max_new_tokens=32)
    for number in (0, 39, 40, 1234):
        call = m.GenerationCall(number, 0, 0, "train", b"", 32, how, stage.AT, None, 7)
        called = stage.answer(call)
        tokens = np.frombuffer(called.tokens, "<i4")
        assert tokens[0] - stage.FIRST_TOKEN == number % stage.SYMBOLS
        assert len(tokens) == 32 == len(np.frombuffer(called.logprobs, "<f4"))
        assert (called.id, called.spans[0].end, called.finish) == (number, 32, "length")


def test_what_does_not_start_is_said_and_leaves_nothing(bench: Any, tmp_path: Path) -> None:
    server = bench.servers.Server(tmp_path / "s")
    server.start("other", ["sleep", "600"])
    server.start("one", [sys.executable, "-c", "print('no port'); raise SystemExit(3)"])
    other = server.processes["other"]
    with pytest.raises(RuntimeError, match="it: one has ended\nno port"):
        server.wait("it", lambda: False)
    assert other.poll() is not None and not server.processes


def test_servers_end_with_who_started_them(tmp_path: Path) -> None:
    """Killed, so that it can end nothing itself."""
    code = (
        "import sys; sys.path.append('benchmarks')\n"
        "from lib.endpoint import servers\n"
        "from pathlib import Path\n"
        f"one = servers.Stub(Path({str(tmp_path / 's')!r}))\n"
        "print(one.processes['endpoint'].pid, flush=True)\n"
        "input()"
    )
    argv = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": ENV}
    with subprocess.Popen(argv, cwd=ROOT, **pipes) as bench:
        endpoint = psutil.Process(int(bench.stdout.readline()))
        bench.kill()
    endpoint.wait(timeout=600)


def test_ratios_are_taken_within_a_round(bench: Any) -> None:
    """A machine half as fast in the second round changes none."""
    rates = {"embedded": 200.0, "vLLM inside": 110.0, "vllm serve": 100.0, bench.WITH: 80.0}

    def a_round(speed: float) -> Any:
        return {
            name: {"calls_per_s": rate * speed, "cpu_ms": {"endpoint": 1.0}}
            for name, rate in rates.items()
        }

    goals = bench.judged_engines([a_round(1.0), a_round(0.5)])
    assert [(g["value"], g["met"], g["spread"]) for g in goals] == [
        (1.1, True, [1.1, 1.1]),
        (2.0, True, [2.0, 2.0]),
    ]
    assert [g["over_log_probabilities"] for g in goals] == [1.375, 2.5]
    assert bench.judged_engines([{"embedded": a_round(1.0)["embedded"]}]) == []


def test_a_cold_step_is_not_measured(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(end=lambda: None)
    monkeypatch.setattr(bench, "a_run", lambda *_: {"step": 1.0, "length": 30.0, "reward": 0.0})
    with pytest.raises(RuntimeError, match=r"reward 0\.00: the model has no warm start"):
        bench.step(stand_in)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="g") as folder:
        yield Path(folder)


def test_the_program_without_vllm(short: Path) -> None:
    """Real gateways, by processes as they are; the values of so few calls say nothing."""
    argv = [sys.executable, str(ROOT / "benchmarks" / "gateway.py"), "--quick", "--json"]
    done = run_command(argv, env=ENV | {"PYTHONPATH": str(ROOT), "TMPDIR": str(short)})
    assert done.code == 0, done.out[-2000:] + done.err[-3000:]
    said = done.json
    assert list(said["parts"]) == ["engines", "beyond", "history", "client"]
    assert len(said["goals"]) == 9 + 1 + 1  # without vLLM the engines have no rival
    (embedded,) = said["parts"]["engines"]
    assert embedded["embedded"]["calls"] == 16 * 8
    assert set(embedded["embedded"]["cpu_ms"]) >= {"endpoint", "generator", "buffer"}
    (beyond,) = said["parts"]["beyond"]
    assert beyond["64 at once"]["calls"] == 64 * 8 and beyond["1 paused"]["calls"] == 8
    (history,) = said["parts"]["history"]
    assert history["one call"]["cpu_ms"]["endpoint"] > history["nine calls"]["cpu_ms"]["endpoint"]
    assert not list(short.glob("tmp*")), "its folder goes"
    end = time.monotonic() + 600
    while left := [
        words
        for one in psutil.process_iter(["cmdline"])
        if (words := one.info["cmdline"]) and str(short) in " ".join(words)
    ]:
        assert time.monotonic() < end, f"they were ended, and go on: {left}"
        time.sleep(0.1)
