import dataclasses
import io
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from watch_kit import run_dir  # noqa: F401

from asyncrl.cli import main
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.transport import http_server, sockets
from asyncrl.transport.http_server import HttpServer, ListenAddress
from asyncrl.viewer import server


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, places: list[Path], host: str = "127.0.0.1", **more: bool
) -> Iterator[tuple[str, int]]:
    started: list[HttpServer] = []
    announced: list[tuple[str, int]] = []
    ready = threading.Event()

    class Stoppable(HttpServer):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            started.append(self)

    def announce(url: str, runs: int) -> None:
        announced.append((url, runs))
        ready.set()

    monkeypatch.setattr(http_server, "HttpServer", Stoppable)
    thread = threading.Thread(
        target=server.serve, args=(places, host, 0, announce), kwargs={"token": True} | more
    )
    thread.start()
    assert ready.wait(300)
    try:
        yield announced[0]
    finally:
        started[0].end()
        thread.join(300)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("::", False),
        ("a.name", False),
    ],
)
def test_which_addresses_are_this_machine_s_alone(host: str, is_local: bool) -> None:
    assert sockets.is_loopback(host) is is_local


def test_the_first_free_port_is_taken_where_none_was_chosen() -> None:
    taken = ListenAddress().listen()
    host, port = taken.getsockname()
    assert host == "127.0.0.1"
    assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1, "after a restart"
    address = ListenAddress(port=port, port_name="--port")
    with dataclasses.replace(address, further_ports=(port, 0)).listen() as other:
        assert other.getsockname()[1] not in (0, port)
    with pytest.raises(ConfigError) as error:
        address.listen()
    assert str(error.value) == f"--port: 127.0.0.1:{port}: Address already in use"
    taken.close()
    with address.listen() as again:
        assert again.getsockname()[1] == port
        with socket.create_connection(("127.0.0.1", port), 60):
            assert again.accept()


def test_the_page_is_served_at_the_announced_address(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"host": "this.machine"}
    with serving(monkeypatch, [run_dir]) as (url, runs):
        address, token = url.split("/?token=")
        assert httpx2.get(url, headers=named).status_code == 421
        assert runs == 1 and len(token) == 24 and address.startswith("http://127.0.0.1:")
        assert httpx2.get(f"{address}/api/runs").status_code == 403
        with httpx2.Client() as browser:
            page = browser.get(url, follow_redirects=True)
            assert page.status_code == 200 and "<html" in page.text
            assert "server" not in page.headers
            assert browser.get(f"{address}/api/runs").json()[0]["id"] == "first"
    with serving(monkeypatch, [run_dir], "0.0.0.0") as (other, _):
        assert other.split("=")[1] != token, "a token of its own"
        assert httpx2.get(other, headers=named, follow_redirects=True).status_code == 200


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_an_address_of_six_is_written_in_brackets(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(monkeypatch, [run_dir], host="::1", token=False) as (url, _):
        assert url.startswith("http://[::1]:")
        assert httpx2.get(f"{url}api/runs").status_code == 200


def test_a_run_that_is_expected_may_begin_later(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "late"
    with pytest.raises(ConfigError, match="no such directory"):
        server.serve([late], "127.0.0.1", 0, lambda *_: None, token=True)
    with serving(monkeypatch, [late], token=False, expected=True) as (url, runs):
        assert runs == 0 and httpx2.get(f"{url}api/runs").json() == []
        run_dir.rename(late)
        assert [row["id"] for row in httpx2.get(f"{url}api/runs").json()] == ["late"]


def test_a_page_has_a_process_of_its_own_until_it_is_closed(run_dir: Path) -> None:
    page = server.watch(str(run_dir))
    address, _ = page.url.split("/?token=")
    assert httpx2.get(f"{address}/api/runs").status_code == 403
    assert repr(page) == f"page at {page.url}" and f'href="{page.url}"' in page._repr_html_()
    assert os.getsid(page.process.pid) == page.process.pid, "Ctrl-C here does not reach it"
    page.close()
    assert page.process.poll() is not None
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{address}/api/runs")


def test_the_process_of_a_page_ends_with_this_one_and_takes_no_input(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent's death is asked for before it runs anything."""
    started: list[dict[str, Any]] = []

    class Started:
        stdout = io.StringIO("http://127.0.0.1:7/?token=t\n")

        def __init__(self, command: list[str], **how: Any) -> None:
            started.append(how | {"command": command})

    monkeypatch.setattr(subprocess, "Popen", Started)
    marker = lambda: None  # noqa: E731
    monkeypatch.setattr(server, "end_with_parent", lambda: marker)
    assert server.watch(run_dir).url == "http://127.0.0.1:7/?token=t"
    (how,) = started
    assert how["preexec_fn"] is marker and how["stdin"] == subprocess.DEVNULL
    assert how["command"] == importing.make_command("asyncrl.viewer.server", str(run_dir))


def test_the_process_of_a_page_serves_what_may_begin_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As a process of its own: any free port of this machine, its address on standard output."""
    asked: list[ListenAddress] = []

    class Ended:
        def __init__(self, app: Any, address: ListenAddress) -> None:
            asked.append(address)

        async def serve(self, announce: Callable[[str], None]) -> None:
            announce("http://127.0.0.1:7")

    monkeypatch.setattr(http_server, "HttpServer", Ended)
    monkeypatch.setattr(sys, "argv", ["server", str(tmp_path / "later")])
    monkeypatch.delitem(sys.modules, "asyncrl.viewer.server")
    runpy.run_module("asyncrl.viewer.server", run_name="__main__")
    ports = (*range(7861, 7880), 0)
    got = (asked[0].host, asked[0].port, tuple(asked[0].further_ports))
    assert got == ("127.0.0.1", 7860, ports)
    assert re.fullmatch(r"http://127\.0\.0\.1:7/\?token=\S{24}\n", capfd.readouterr().out)
    server.serve([tmp_path], "127.0.0.1", 7861, lambda *_: None, token=True, expected=True)
    assert (asked[1].port, tuple(asked[1].further_ports)) == (7861, ())


def test_a_run_s_page_is_announced_and_ends_with_the_run(run_dir: Path) -> None:
    said: list[str] = []
    with server.serve_page_beside(run_dir, said.append):
        (line,) = said
        begin, url = line.split("watch it at ")
        assert begin == "" and httpx2.get(url, follow_redirects=True).status_code in (200, 403)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)
    assert said[1:] == [f"its page has ended too; open it again with: asyncrl watch {run_dir}"]


@pytest.mark.parametrize(
    ("host", "forwarding"),
    [("127.0.0.1", "; from another machine: ssh -L 7861:localhost:7861 trainer"), ("0.0.0.0", "")],
)
def test_the_command_names_port_and_machine_of_an_address_that_needs_forwarding(
    host: str, forwarding: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(
        places: list[Path],
        host: str,
        port: int | None,
        announce: Callable[[str, int], None],
        token: bool,
    ) -> None:
        assert places == [run_dir] and port is None and token
        announce(f"http://{host}:7861/?token=x", 1)

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer")
    result = CliRunner().invoke(main, ["watch", str(run_dir), "--host", host])
    assert result.exit_code == 0 and result.stdout == f"http://{host}:7861/?token=x\n"
    assert result.stderr == f"watching 1 run:\nstop with Ctrl-C{forwarding}\n"


def test_a_run_goes_on_where_its_page_cannot_start(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "make_command", lambda *_: ["false"])
    said: list[str] = []
    with server.serve_page_beside(run_dir, said.append):
        assert said == ["note: the page of this run could not start"]
    page = server.PageProcess([run_dir])
    assert repr(page) == "page at no address: it could not start"
    page.close()
