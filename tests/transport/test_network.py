"""benchmarks/network.py: the relay's clock and its cuts, what is judged, nothing left behind, and a
real run over a slow link where namespaces can be made."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lib.network import namespaces
from lib.network.relay import Line, Order, Relay, Shape
from process_kit import ENV, ROOT, load_program

PROGRAM = ROOT / "benchmarks" / "network.py"
WAIT_S = 600.0
CUT = 60_000


@pytest.fixture(scope="module")
def bench() -> Any:
    return load_program(PROGRAM)


def test_a_line_is_shared_and_delays_what_has_left_it() -> None:
    line = Line(Shape(delay_s=1.0, rate=10.0))
    assert line.arrival(100, now=5.0) == 16.0
    assert (line.arrival(20, now=6.0), line.ahead(16.0)) == (18.0, 1.0)
    assert (line.arrival(10, now=30.0), line.bytes) == (32.0, 130)  # it stood idle
    assert Line(Shape(delay_s=0.02)).arrival(1 << 30, now=3.0) == 3.02


def test_the_relay_hands_on_all_and_cuts_what_carried_so_much(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(4096):
            writer.write(piece)
        writer.close()

    async def both() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        there = server.sockets[0].getsockname()[:2]
        link = Relay(Order([], Shape(cut_bytes=CUT), str(tmp_path / "counts")))
        front = await asyncio.start_server(
            lambda reader, writer: link.connection(there, reader, writer), "127.0.0.1", 0
        )
        port = front.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = bytes(range(250)) * 100
        writer.write(data)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(-1), WAIT_S) == data  # and then its end
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(CUT))
        with pytest.raises(ConnectionResetError):
            while await asyncio.wait_for(reader.read(4096), WAIT_S):
                pass
        assert (link.cuts, link.connections) == (1, 2) and link.down.bytes >= CUT
        assert link.counts()["up"] <= len(data) + CUT
        for each in (server, front):
            each.close()

    asyncio.run(both())


def test_where_no_namespaces_can_be_made_it_says_so(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["network.py", "--quick"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == bench.CANNOT
    assert "no network namespaces here: there is no program `ip`" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda _: "/sbin/ip")
    said = subprocess.CompletedProcess([], 1, "", "Operation not permitted\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    with pytest.raises(namespaces.NoNamespaces, match="list` says: Operation not permitted"):
        namespaces.ours()


@pytest.mark.parametrize("gone", [True, False])
def test_programs_may_share_removing_leftovers(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["asyncrl-999999999-near", "asyncrl-1-far", "somebodys"]

    def stand_in(*words: str) -> str:
        if words[1] == "list":
            return "\n".join(there)
        assert words == ("netns", "del", "asyncrl-999999999-near")
        if gone:
            del there[0]  # by the other one
        raise namespaces.NoNamespaces("Cannot remove namespace file: No such file or directory")

    monkeypatch.setattr(namespaces, "ip", stand_in)
    if gone:
        namespaces.tidy()
    else:
        with pytest.raises(namespaces.NoNamespaces, match="Cannot remove"):
            namespaces.tidy()


def program(*words: str, log: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, str(PROGRAM), *words]
    with log.open("w") as file:
        return subprocess.Popen(
            argv, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=file, text=True
        )


def left_of(pid: int) -> list[str]:
    return [name for name, owner in namespaces.ours().items() if owner == pid]


def test_ctrl_c_leaves_nothing_and_the_next_removes_old_ones(bench: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for number in (signal.SIGKILL, signal.SIGINT):
        process = program("--quick", log=log)
        until = time.monotonic() + WAIT_S
        try:
            while process.poll() is None and len(left_of(process.pid)) < 2:
                assert time.monotonic() < until
                time.sleep(0.02)
            if process.poll() == bench.CANNOT:
                pytest.skip(log.read_text())
            if number == signal.SIGKILL:
                process.kill()
                killed = process.pid
            else:
                # its own are there, so what the other one left is not
                assert not left_of(killed)
                process.send_signal(number)
            process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 130, log.read_text()
    assert not left_of(process.pid)


def test_a_run_over_a_slow_link_that_is_cut(bench: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = program("--quick", "--json", log=log)
    try:
        out, _ = process.communicate(timeout=6 * WAIT_S)
    finally:
        process.terminate()  # it takes its own down
        process.communicate()
    if process.returncode == bench.CANNOT:
        pytest.skip(log.read_text())
    assert process.returncode == 0, log.read_text()[-4000:]
    result = json.loads(out.splitlines()[-1])
    (run,) = result["runs"]["all"]
    assert run["wrong"] == [] and run["steps"] == 10
    # on a busy machine the link takes a small part of a step
    assert "the link holds generators up" in run["doctor"] or run["link/fetch_share"] < 0.3
    counts = run["relay"]
    assert counts["cuts"] >= 1 and counts["connections"] > 2
    # a generator that comes late skips versions, as far as the limit lets it
    versions = run["steps"] // (bench.MAX_LAG + 1)
    assert counts["down"] > versions * result["bytes"] and counts["up"] > 0
    # no faster than the line
    assert 0 < run["link/fetch_mb_per_s"] * 1e6 < 1.02 * bench.QUICK["all"].rate
    assert not left_of(process.pid)
