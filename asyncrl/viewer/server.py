"""Serve the page of `asyncrl watch`: address, token, uvicorn, and a process of its own."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.parent import end_with_parent
from asyncrl.supervise.notebook import LoadedRun
from asyncrl.viewer import run_search

PORT = 7860
PORTS = 20  # ports from PORT on that are tried if none was chosen


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the port is taken or not permitted."""
    tried = [port] if port is not None else [*range(PORT, PORT + PORTS), 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in tried:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            problem = error
    raise ConfigError(
        f"--host {host} --port {port}: {problem.strerror}; choose another port, or leave out --port"
    )


def serve(
    places: list[Path],
    host: str,
    port: int | None,
    announce: Callable[[str, int], None],
    *,
    token: bool,
    expected: bool = False,
) -> None:
    """Serve until interrupted. Raises ConfigError for places without a run or a bad address.

    announce: called with the page's address and the number of runs once it accepts requests.
    token: require the token in that address. Without one, only an address of this machine is
    allowed.
    expected: the runs may begin later.
    """
    import uvicorn

    from asyncrl.viewer.app import WatchApp

    if not token and not is_loopback(host):
        raise ConfigError(
            f"--no-token --host {host}: everyone with access to this address could read prompts "
            "and logs; leave out --no-token, or listen on 127.0.0.1"
        )
    secret = secrets.token_urlsafe(18) if token else ""
    own = host if is_loopback(host) else ""
    app = WatchApp(places, secret, expected=expected, host=own)
    listener = listen(host, port)
    address = listener.getsockname()
    name = f"[{address[0]}]" if ":" in host else address[0]
    query = f"/?token={app.token}" if app.token else "/"
    announce(f"http://{name}:{address[1]}{query}", len(app.runs))
    config = uvicorn.Config(
        app.build_application(), log_level="warning", access_log=False, server_header=False
    )
    uvicorn.Server(config).run(sockets=[listener])


class PageProcess:
    """A page of runs, served by a process of its own that ends with this one.

    Its failures and its work do not affect the run. Ctrl-C in this process does not reach it.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        """Start it and wait for its address; `url` is "" if it could not start."""
        self.process = subprocess.Popen(
            importing.make_command("asyncrl.viewer.server", *map(str, places)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def __repr__(self) -> str:
        return f"page at {self.url or 'no address: it could not start'}"

    def _repr_html_(self) -> str:
        """Return a link for a notebook."""
        return f'<a href="{self.url}" target="_blank">watch the run in a new tab</a>'

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def watch(*runs: str | Path | LoadedRun) -> PageProcess:
    """Serve the page of runs as `asyncrl watch` does, until its `close` or this process's end.

    runs: run directories, directories of runs, or loaded runs. A notebook shows the result as a
    link.

    Raises ConfigError for a place without a run."""
    places = [run.path if isinstance(run, LoadedRun) else Path(run) for run in runs]
    run_search.find_runs(places)
    return PageProcess(places)


@contextmanager
def serve_page_beside(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of a run that is about to begin until the block ends."""
    page = PageProcess([run_dir])
    say(f"watch it at {page.url}" if page.url else "note: the page of this run could not start")
    try:
        yield
    finally:
        page.close()
        say(f"its page has ended too; open it again with: asyncrl watch {run_dir}")


if __name__ == "__main__":
    serve(
        [Path(word) for word in sys.argv[1:]],
        "127.0.0.1",
        None,
        lambda url, _: print(url, flush=True),
        token=True,
        expected=True,
    )
